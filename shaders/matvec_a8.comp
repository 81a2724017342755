// Matrix products in integers for few tokens, and on CPU devices for any number: y[t] = W x[t], where x is
// in 8 bits (quantize_rows.comp). sum(w x) over 32 columns is d dx sum(q qx) + level sum(x): the sum of
// products of integers is exact, scales are applied once per 32 columns or unit.
//
// A workgroup computes 4 QUADS rows. Lane `slot * QUADS + quad` takes every slots-th unit of a quad of rows,
// so neighbouring lanes read neighbouring 16 bytes (QUADS = 2), and the lanes' sums are added in shared
// memory; on a CPU device QUADS is the number of lanes, each takes whole rows and nothing is shared.
// Bytes: as matvec.comp, x a quarter of it: a word of x meets a word of four rows. Flops: on GPUs a unit's eight
// products are two dot instructions a row, 8 for four rows and a token where matvec.comp has 32 multiply-adds, and
// nothing is converted but the sums; then 8 multiply-adds for the scales of four rows. Occupancy: registers are
// few; shared memory is 16 bytes a lane and token, 16 KiB at most, neighbouring lanes at neighbouring 16 bytes: no
// bank conflicts. Up to four units are in flight for one token.
// Workgroups: x = ceil(rows / (4 QUADS)), y = ceil(tokens / TOKENS).
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
// variants: FORMAT=q8_0,q4_0,q4_1,int4,int8 INTEGERS=dot,plain
layout(local_size_x_id = 0) in; // spec: local_size, QUADS times a power of two
layout(constant_id = 1) const uint TOKENS = 1u;
layout(constant_id = 2) const uint QUADS = 2u; // 2, or the local size
#define GROUP_CONSTANT 4
#include "formats.glsl"
#define EPILOGUE_LOOP [[dont_unroll]]
#define QUANTIZED_X
#include "linear.glsl"
#include "dot.glsl"
#include "rows_a8.glsl"

const uint SLOTS = gl_WorkGroupSize.x / QUADS;
// Where a lane has whole rows it sums the units of a block, which share a scale, before it applies that; else
// its units are far apart, and for few tokens several are in flight.
const uint RUN = SLOTS == 1u ? BLOCK_UNITS : 1u;
const uint IN_FLIGHT = SLOTS == 1u || TOKENS > 2u ? 1u : 4u / TOKENS;
#define FOR_TOKENS [[unroll]] for (uint t = 0u; t < TOKENS; t++)

shared vec4 partial[SLOTS == 1u ? 1u : gl_WorkGroupSize.x * TOKENS];

void main() {
    const Tile tile = find_tile();
    const uint t0 = tile.first, used = tile.end;
    if (t0 >= used)
        return; // the whole workgroup: used is the same for all
    const uint quad = gl_LocalInvocationID.x % QUADS, slot = gl_LocalInvocationID.x / QUADS;
    const uint row_words = ROW_WORDS(p.cols), units = UNITS(p.cols);
    const uint row = (gl_WorkGroupID.x * QUADS + quad) * 4u;
    const uint group = min(row / 8u, (p.rows - 1u) / 8u); // lanes beyond work on the last and store nothing
    const uint w_at = tile.weights / 4u + group * row_words * 2u + (quad & 1u); // word k: w[w_at + 2k]
    const uint first = w_at + 2u * DATA_FIRST(p.cols);

    vec4 acc[TOKENS];
    uint x_at[TOKENS];
    FOR_TOKENS {
        acc[t] = vec4(0.0);
        x_at[t] = p.x_offset + x_row(min(t0 + t, used - 1u)) * p.x_stride; // unused rows are not read
    }
    for (uint k0 = slot * RUN; k0 < units; k0 += IN_FLIGHT * SLOTS * RUN) {
        uvec4 raw[IN_FLIGHT][RAW], s[IN_FLIGHT][SCALES_LOADED];
        [[unroll]] for (uint u = 0u; u < IN_FLIGHT; u++) {
            const uint k = min(k0 + u * SLOTS, units - RUN);
            load_scales(w_at, k, s[u]);
            load_unit(first, k, raw[u]);
        }
        [[unroll]] for (uint u = 0u; u < IN_FLIGHT; u++) {
            const uint k = k0 + u * SLOTS;
            if (k >= units)
                break;
            ivec4 sum[TOKENS];
            FOR_TOKENS sum[t] = ivec4(0);
            [[dont_unroll]] for (uint i = 0u; i < RUN; i++) {
                if (i > 0u)
                    load_unit(first, k + i, raw[u]);
                uvec4 q[RUNS];
                unit_words(raw[u], q);
                [[unroll]] for (uint r = 0u; r < RUNS; r++)
                    FOR_TOKENS sum[t] += dot4(q[r], x[x_at[t] + x_word(k + i, r)]);
            }
            vec4 d, m;
            open_scales(s[u], k, d, m);
            FOR_TOKENS {
                const vec2 dx = load_x_scales(x_at[t], k / BLOCK_UNITS);
                acc[t] += d * dx.x * vec4(sum[t]);
#ifdef SUMS
                if (k % BLOCK_UNITS == 0u)
                    acc[t] += LEVEL(d, m) * dx.y;
#endif
            }
        }
    }

    if (SLOTS == 1u) {
        const vec4 b = load_bias(row);
        for (uint t = 0u; t < min(TOKENS, used - t0); t++)
            store(row, t0 + t, acc[t] + b);
        return;
    }
    const uint lane = gl_LocalInvocationID.x;
    FOR_TOKENS partial[t * gl_WorkGroupSize.x + lane] = acc[t];
    barrier();
    for (uint lanes = gl_WorkGroupSize.x / 2u; lanes >= QUADS; lanes /= 2u) {
        if (lane < lanes)
            [[dont_unroll]] for (uint i = lane; i < TOKENS * gl_WorkGroupSize.x; i += gl_WorkGroupSize.x)
                partial[i] += partial[i + lanes];
        barrier();
    }
    // the first QUADS lanes hold the sums of their rows; each lane stores a quad of a token
    for (uint i = lane; i < QUADS * min(TOKENS, used - t0); i += gl_WorkGroupSize.x) {
        const uint at = (gl_WorkGroupID.x * QUADS + i % QUADS) * 4u;
        store(at, t0 + i / QUADS, partial[i / QUADS * gl_WorkGroupSize.x + i % QUADS] + load_bias(at));
    }
}

// Matrix products on GPUs for many tokens (prefill): y[t] = W x[t], 64 rows x TOKENS tokens a workgroup.
//
// 256 lanes. For every 32 columns they decode a tile of W into shared memory as f32 (a lane loads 16
// bytes, a word of four rows; neighbouring lanes neighbouring 16 bytes), transpose a tile of x into
// it (16 bytes a lane along the row), and multiply: lane (r, s) = (lane % 16, lane / 16) computes rows
// 4r .. 4r+3 of tokens s, s + 16, s + 32, …, TOKENS / 4 products for 16 + TOKENS / 4 bytes of shared
// memory. A weight is read and decoded once per TOKENS tokens, x once per 64 rows.
//
// Shared memory: W tile [32 columns][16 + 1 quads] of vec4, 8.5 KiB; x tile [32 columns][TOKENS + 1], at
// most 8.1 KiB (64 tokens); 32 tokens fit in the 16 KiB that every device has. Banks (4 bytes, 32 of them): in the product the 16 quads of a column are read in a
// row, and the 2 or 4 tokens of a subgroup are broadcasts; the padding spreads the columns that the
// decoding lanes write at once, and the 8 x 4 columns of the transposition.
// Workgroups: x = ceil(rows / 64), y = ceil(tokens / TOKENS).
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
// variants: FORMAT=f32,f16,bf16,q8_0,q4_0,q4_1,q5_0,q5_1,q2_k,q3_k,q4_k,q5_k,q6_k,iq4_nl,iq4_xs,mxfp4,int4,int8
layout(local_size_x_id = 0) in; // spec: local_size = 256
layout(constant_id = 1) const uint TOKENS = 16u; // 16, 32 or 64
layout(constant_id = 2) const uint ALIGNED = 1u; // x_offset and x_stride are multiples of 4
#define GROUP_CONSTANT 4
#define FLOAT_BY_BITS
#include "formats.glsl"
#define EPILOGUE_LOOP [[unroll]]
#include "linear.glsl"

const uint COLUMNS = 32u, QUADS = 16u;
const uint W_STRIDE = QUADS + 1u, X_STRIDE = TOKENS + 1u;
const uint PER_LANE = TOKENS / 16u;

shared vec4 tile_w[COLUMNS * W_STRIDE];
shared float tile_x[COLUMNS * X_STRIDE];
shared uint x_start[TOKENS]; // words: where the tokens' rows of x begin

void load_w(uint w_at, uint block) {
    const uint row_words = ROW_WORDS(p.cols), data_first = DATA_FIRST(p.cols), units = UNITS(p.cols);
    const uint last_group = (p.rows - 1u) / 8u;
    for (uint i = gl_LocalInvocationID.x; i < BLOCK_UNITS * QUADS; i += gl_WorkGroupSize.x) {
        const uint h = i & 1u, k = (i >> 1u) % BLOCK_UNITS, g = (i >> 1u) / BLOCK_UNITS;
        const uint group = min(gl_WorkGroupID.x * 8u + g, last_group); // rows beyond are not stored
        const uint quad = w_at / 4u + group * row_words * 2u + h;
        const uint unit = block * BLOCK_UNITS + k;
        uvec4 raw[RAW];
        if (unit < units)
            load_unit(quad + 2u * data_first, unit, raw);
        else
            [[unroll]] for (uint n = 0u; n < RAW; n++)
                raw[n] = uvec4(0u);
        vec4 v[WEIGHTS];
        decode(raw, unit, v);
#ifdef SCALED
        uvec4 s[SCALES_LOADED];
        load_scales(quad, unit, s);
        vec4 d, m;
        open_scales(s, unit, d, m);
        small_scales(s, unit, d, m);
#endif
        for (uint n = 0u; n < WEIGHTS; n++) {
#ifdef SCALED
            v[n] = d * (v[n] - OFFSET) + m;
#endif
            tile_w[column(k, n) * W_STRIDE + g * 2u + h] = v[n];
        }
    }
}

void load_x_tile(uint block, uint t0, uint used) {
    for (uint i = gl_LocalInvocationID.x; i < COLUMNS / 4u * TOKENS; i += gl_WorkGroupSize.x) {
        const uint c = (i & 7u) * 4u, t = i >> 3u;
        const uint first = block * COLUMNS + c;
        const uint at = x_start[t] + first;
        vec4 v = vec4(0.0); // unused rows and columns beyond the last are not read
        if (t0 + t < used) {
            if (first + 4u <= p.cols)
                v = load_x4(at);
            else
                for (uint n = 0u; n < 4u; n++)
                    if (first + n < p.cols)
                        v[n] = load_x(at + n);
        }
        for (uint n = 0u; n < 4u; n++)
            tile_x[(c + n) * X_STRIDE + t] = v[n];
    }
}

void main() {
    const Tile tile = find_tile();
    const uint t0 = tile.first, used = tile.end;
    if (t0 >= used)
        return; // the whole workgroup: used is the same for all
    const uint quad = gl_LocalInvocationID.x % QUADS, slot = gl_LocalInvocationID.x / QUADS;
    vec4 acc[PER_LANE];
    [[unroll]] for (uint i = 0u; i < PER_LANE; i++)
        acc[i] = vec4(0.0);
    for (uint t = gl_LocalInvocationID.x; t < TOKENS; t += gl_WorkGroupSize.x)
        x_start[t] = p.x_offset + x_row(min(t0 + t, used - 1u)) * p.x_stride;
    barrier();
    for (uint block = 0u; block * COLUMNS < p.cols; block++) {
        load_w(tile.weights, block);
        load_x_tile(block, t0, used);
        barrier();
        [[dont_unroll]] for (uint c0 = 0u; c0 < COLUMNS; c0 += 4u)
            [[unroll]] for (uint c = c0; c < c0 + 4u; c++) {
                const vec4 v = tile_w[c * W_STRIDE + quad];
                [[unroll]] for (uint i = 0u; i < PER_LANE; i++)
                    acc[i] += v * tile_x[c * X_STRIDE + slot + 16u * i];
            }
        barrier();
    }
    const uint row = gl_WorkGroupID.x * 64u + quad * 4u;
    const vec4 b = load_bias(row);
    [[unroll]] for (uint i = 0u; i < PER_LANE; i++)
        if (t0 + slot + 16u * i < used)
            store(row, t0 + slot + 16u * i, acc[i] + b);
}

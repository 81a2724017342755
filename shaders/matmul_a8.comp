// Matrix products in integers on GPUs for many tokens: y[t] = W x[t], where x is in 8 bits
// (quantize_rows.comp), 64 rows x TOKENS tokens a workgroup. See matvec_a8.comp for the arithmetic.
//
// 256 lanes. For every 32 BLOCKS columns they copy W's words, four weights each, into shared memory (a lane
// loads 16 bytes, a word of four rows; neighbouring lanes neighbouring 16 bytes), its scales, and x with
// its own (4 bytes a lane along the row), and multiply: lane (r, s) = (lane % 16, lane / 16) computes rows
// 4r .. 4r+3 of tokens s, s + 16, s + 32, …: of 4 columns TOKENS / 4 dot products for 16 + TOKENS / 4 bytes
// of shared memory. Scales are applied once per 32 columns.
//
// Bytes: weights once per TOKENS tokens, x once per 64 rows. Flops: for 64 tokens 5 loads from shared memory
// are 16 dot instructions, 64 multiply-adds: four times what matmul.comp makes of as many loads.
// Shared memory, BLOCKS = 4: W 8.5 KiB, its scales 4 KiB at most, x 8.1 KiB and its scales 2 KiB for 64
// tokens: 32 tokens fit in the 16 KiB that every device has. Occupancy: of a processor with 100 KiB, 4 workgroups of
// 64 tokens, 32 subgroups of 32. Banks: in the product 16 lanes read the quads of a column in a row, the others
// the same ones, and a subgroup's 2 or 4 tokens are broadcasts. Rows are padded by one for those who write: of W,
// 8 lanes at once have 4 words of two quads, which take two turns; of x, 32 words of one token, in 32 banks.
// Workgroups: x = ceil(rows / 64), y = ceil(tokens / TOKENS).
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
// variants: FORMAT=q8_0,q4_0,q4_1,int4,int8 INTEGERS=dot,plain
layout(local_size_x_id = 0) in; // spec: local_size = 256
layout(constant_id = 1) const uint TOKENS = 16u; // 16, 32 or 64
layout(constant_id = 2) const uint BLOCKS = 4u;  // of 32 columns in a tile
#define GROUP_CONSTANT 4
#include "formats.glsl"
#define EPILOGUE_LOOP [[unroll]]
#define QUANTIZED_X
#include "linear.glsl"
#include "dot.glsl"
#include "rows_a8.glsl"

const uint QUADS = 16u, WORDS = 8u; // words of 32 columns
const uint W_STRIDE = QUADS + 1u, X_STRIDE = TOKENS + 1u;
const uint PER_LANE = TOKENS / 16u;

shared uvec4 tile_w[BLOCKS * WORDS * W_STRIDE];
shared vec4 tile_d[BLOCKS * QUADS];
#ifdef SUMS
shared vec4 tile_level[BLOCKS * QUADS];
#endif
shared uint tile_x[BLOCKS * WORDS * X_STRIDE];
shared vec2 tile_dx[BLOCKS * TOKENS];
shared uint x_start[TOKENS]; // words: where the tokens' rows of x begin

// W of BLOCKS blocks of columns from `block` on; beyond the last, scales of zero.
void load_w(uint w_at, uint block) {
    const uint row_words = ROW_WORDS(p.cols), data_first = DATA_FIRST(p.cols), units = UNITS(p.cols);
    const uint last_group = (p.rows - 1u) / 8u;
    for (uint i = gl_LocalInvocationID.x; i < BLOCKS * BLOCK_UNITS * QUADS; i += gl_WorkGroupSize.x) {
        const uint h = i & 1u, k = (i >> 1u) % (BLOCKS * BLOCK_UNITS), g = (i >> 1u) / (BLOCKS * BLOCK_UNITS);
        const uint group = min(gl_WorkGroupID.x * 8u + g, last_group); // rows beyond are not stored
        const uint quad = w_at / 4u + group * row_words * 2u + h;
        const uint unit = min(block * BLOCK_UNITS + k, units - 1u);
        uvec4 raw[RAW], q[RUNS];
        load_unit(quad + 2u * data_first, unit, raw);
        unit_words(raw, q);
        [[unroll]] for (uint r = 0u; r < RUNS; r++)
            tile_w[x_word(k, r) * W_STRIDE + g * 2u + h] = q[r];
        if (k % BLOCK_UNITS == 0u) {
            uvec4 s[SCALES_LOADED];
            load_scales(quad, unit, s);
            vec4 d, m;
            open_scales(s, unit, d, m);
            const bool there = block * BLOCK_UNITS + k < units;
            const uint at = k / BLOCK_UNITS * QUADS + g * 2u + h;
            tile_d[at] = there ? d : vec4(0.0);
#ifdef SUMS
            tile_level[at] = there ? LEVEL(d, m) : vec4(0.0);
#endif
        }
    }
}

// x of the same columns: zeros beyond the last, and for rows that are not in use, neither of which is read.
void load_x_tile(uint block, uint t0, uint used) {
    const uint words = BLOCKS * WORDS;
    for (uint i = gl_LocalInvocationID.x; i < words * TOKENS; i += gl_WorkGroupSize.x) {
        const uint n = i % words, t = i / words;
        const bool there = t0 + t < used && block * WORDS + n < p.cols / 4u;
        tile_x[n * X_STRIDE + t] = there ? x[x_start[t] + block * WORDS + n] : 0u;
    }
    for (uint i = gl_LocalInvocationID.x; i < BLOCKS * TOKENS; i += gl_WorkGroupSize.x) {
        const uint b = i % BLOCKS, t = i / BLOCKS;
        vec2 dx = vec2(0.0);
        if (t0 + t < used && block + b < p.cols / 32u)
            dx = load_x_scales(x_start[t], block + b);
        tile_dx[b * TOKENS + t] = dx;
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
    for (uint block = 0u; block < p.cols / 32u; block += BLOCKS) {
        load_w(tile.weights, block);
        load_x_tile(block, t0, used);
        barrier();
        [[dont_unroll]] for (uint b = 0u; b < BLOCKS; b++) {
            ivec4 sum[PER_LANE];
            [[unroll]] for (uint i = 0u; i < PER_LANE; i++)
                sum[i] = ivec4(0);
            [[dont_unroll]] for (uint n0 = b * WORDS; n0 < (b + 1u) * WORDS; n0 += 4u)
                [[unroll]] for (uint n = n0; n < n0 + 4u; n++) {
                    const uvec4 q = tile_w[n * W_STRIDE + quad];
                    [[unroll]] for (uint i = 0u; i < PER_LANE; i++)
                        sum[i] += dot4(q, tile_x[n * X_STRIDE + slot + 16u * i]);
                }
            [[unroll]] for (uint i = 0u; i < PER_LANE; i++) {
                const vec2 dx = tile_dx[b * TOKENS + slot + 16u * i];
                acc[i] += tile_d[b * QUADS + quad] * dx.x * vec4(sum[i]);
#ifdef SUMS
                acc[i] += tile_level[b * QUADS + quad] * dx.y;
#endif
            }
        }
        barrier();
    }
    const uint row = gl_WorkGroupID.x * 64u + quad * 4u;
    const vec4 b = load_bias(row);
    [[unroll]] for (uint i = 0u; i < PER_LANE; i++)
        if (t0 + slot + 16u * i < used)
            store(row, t0 + slot + 16u * i, acc[i] + b);
}

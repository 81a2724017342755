// Matrix products on GPUs for many tokens (prefill): y[t] = W x[t], 64 ROW_QUADS rows x TOKENS tokens a workgroup.
//
// 256 lanes. For every 32 columns they decode a tile of W into shared memory as f32 (a lane loads 16
// bytes, a word of four rows; neighbouring lanes neighbouring 16 bytes), transpose a tile of x into
// it (16 bytes a lane along the row), and multiply: lane (r, s) = (lane % 16, lane / 16) computes rows
// 4r .. 4r+3 (of each 64) of tokens s, s + 16, s + 32, ….
//
// Bytes: a weight is read and decoded once per TOKENS tokens, x once per 64 ROW_QUADS rows. Flops: 2 per weight
// and token. What bounds them is shared memory: a column is ROW_QUADS loads of 16 bytes and TOKENS / 16 of 4 for
// ROW_QUADS TOKENS / 4 multiply-adds: 5 loads for 16 of them with 64 x 64, 6 for 32 with 128 x 64.
//
// STAGES, what happens between the tiles of two neighbouring slices of 32 columns:
//   0  load, decode, barrier, multiply, barrier: the workgroup waits for memory each time, and others on the same
//      processor have to fill it;
//   1  the words of the next slice are loaded into registers before this one is multiplied;
//   2  and decoded into a second buffer, so that one barrier a slice is enough, and lanes that have multiplied
//      may decode while others multiply.
//
// Shared memory: W tile [32 columns][16 ROW_QUADS + 1] of vec4, 8.5 KiB for 64 rows; x tile [32 columns]
// [TOKENS + 1], at most 8.1 KiB; twice that with STAGES = 2. 64 rows x 32 tokens in one buffer fit in the 16 KiB
// that every device has. Occupancy: of a processor with 100 KiB, 64 x 64 takes 17 KiB (5 workgroups, 40 subgroups
// of 32), in two buffers 34 KiB, where overlap replaces what two or three workgroups fewer hid.
// Banks (4 bytes, 32 of them): in the product 16 lanes read the quads of a column in a row, the others the same
// ones, and the 2 or 4 tokens of a subgroup are broadcasts: no conflicts. Transposing x, 8 lanes write to columns
// 4 (TOKENS + 1) words apart and 4 tokens beside one another: 32 banks. Decoding W, eight lanes that write at
// once have 4 units of two quads, in columns 2 (f16), 4 (bytes and most nibbles) or 8 (ADJACENT) apart: of 16-byte
// columns 17 or 33 apart these hit 8, 4 or 2 places of 8, so two or four take turns: once per TOKENS tokens.
// Workgroups: x = ceil(rows / (64 ROW_QUADS)), y = ceil(tokens / TOKENS).
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
// variants: FORMAT=f32,f16,bf16,q8_0,q4_0,q4_1,q5_0,q5_1,q2_k,q3_k,q4_k,q5_k,q6_k,iq4_nl,iq4_xs,mxfp4,int4,int8
layout(local_size_x_id = 0) in; // spec: local_size = 256
layout(constant_id = 1) const uint TOKENS = 16u; // 16, 32 or 64
layout(constant_id = 2) const uint ALIGNED = 1u; // x_offset and x_stride are multiples of 4
layout(constant_id = 4) const uint ROW_QUADS = 1u; // quads of rows a lane computes: 1 or 2
layout(constant_id = 5) const uint STAGES = 0u;    // 0, 1 or 2
#define GROUP_CONSTANT 6
#define FLOAT_BY_BITS
#include "formats.glsl"
#define EPILOGUE_LOOP [[unroll]]
#include "linear.glsl"

const uint COLUMNS = 32u, LANES = 256u;
const uint QUADS = 16u * ROW_QUADS;
const uint W_STRIDE = QUADS + 1u, X_STRIDE = TOKENS + 1u;
const uint PER_LANE = TOKENS / 16u;
const uint BUFFERS = STAGES == 2u ? 2u : 1u;

shared vec4 tile_w[BUFFERS * COLUMNS * W_STRIDE];
shared float tile_x[BUFFERS * COLUMNS * X_STRIDE];
shared uint x_start[TOKENS]; // words: where the tokens' rows of x begin

// What a lane brings of a slice: units of W, and four columns of tokens.
const uint W_ITEMS = (BLOCK_UNITS * QUADS + LANES - 1u) / LANES;
const uint X_ITEMS = (COLUMNS / 4u * TOKENS + LANES - 1u) / LANES;
const uint MAX_W_ITEMS = (BLOCK_UNITS * 32u + LANES - 1u) / LANES, MAX_X_ITEMS = 2u;
#define FOR_W [[unroll]] for (uint n = 0u; n < W_ITEMS; n++)
#define FOR_X [[unroll]] for (uint n = 0u; n < X_ITEMS; n++)
struct Words {
    uvec4 raw[RAW];
#ifdef SCALED
    uvec4 scales[SCALES_LOADED];
#endif
};

// Item n of a lane: half of a group of 8 rows, unit of the slice, group. Those beyond are none.
uint item(uint n) { return n * LANES + gl_LocalInvocationID.x; }
bool is_item(uint n) { return item(n) < BLOCK_UNITS * QUADS; }
uint item_unit(uint n) { return (item(n) >> 1u) % BLOCK_UNITS; }
uint item_group(uint n) { return (item(n) >> 1u) / BLOCK_UNITS; }

void fetch_w(uint w_at, uint block, uint n, out Words words) {
    const uint row_words = ROW_WORDS(p.cols), units = UNITS(p.cols);
    const uint unit = block * BLOCK_UNITS + item_unit(n);
    const bool there = unit < units && is_item(n);
    if (there) {
        // rows beyond the last are not stored
        const uint group = min(gl_WorkGroupID.x * (QUADS / 2u) + item_group(n), (p.rows - 1u) / 8u);
        const uint quad = w_at / 4u + group * row_words * 2u + (item(n) & 1u);
        load_unit(quad + 2u * DATA_FIRST(p.cols), unit, words.raw);
#ifdef SCALED
        load_scales(quad, unit, words.scales);
#endif
    } else {
        [[unroll]] for (uint i = 0u; i < RAW; i++)
            words.raw[i] = uvec4(0u);
#ifdef SCALED
        [[unroll]] for (uint i = 0u; i < SCALES_LOADED; i++)
            words.scales[i] = uvec4(0u);
#endif
    }
}

void put_w(uint block, uint n, Words words, uint first) {
    if (!is_item(n))
        return;
    const uint unit = block * BLOCK_UNITS + item_unit(n);
    vec4 v[WEIGHTS];
    decode(words.raw, unit, v);
#ifdef SCALED
    vec4 d, m;
    open_scales(words.scales, unit, d, m);
    small_scales(words.scales, unit, d, m);
#endif
    for (uint i = 0u; i < WEIGHTS; i++) {
#ifdef SCALED
        v[i] = d * (v[i] - OFFSET) + m;
#endif
        tile_w[first + column(item_unit(n), i) * W_STRIDE + item_group(n) * 2u + (item(n) & 1u)] = v[i];
    }
}

vec4 fetch_x(uint block, uint n, uint rows) {
    const uint t = item(n) >> 3u, first = block * COLUMNS + (item(n) & 7u) * 4u;
    vec4 v = vec4(0.0); // unused rows and columns beyond the last are not read
    if (t < rows) {
        const uint at = x_start[t] + first;
        if (first + 4u <= p.cols)
            v = load_x4(at);
        else
            for (uint i = 0u; i < 4u; i++)
                if (first + i < p.cols)
                    v[i] = load_x(at + i);
    }
    return v;
}

void put_x(uint n, vec4 v, uint first) {
    const uint t = item(n) >> 3u, c = (item(n) & 7u) * 4u;
    if (t < TOKENS)
        for (uint i = 0u; i < 4u; i++)
            tile_x[first + (c + i) * X_STRIDE + t] = v[i];
}

void main() {
    const Tile tile = find_tile();
    const uint t0 = tile.first, used = tile.end;
    if (t0 >= used)
        return; // the whole workgroup: used is the same for all
    const uint quad = gl_LocalInvocationID.x % 16u, slot = gl_LocalInvocationID.x / 16u;
    const uint rows = min(used - t0, TOKENS), blocks = (p.cols + COLUMNS - 1u) / COLUMNS;
    vec4 acc[ROW_QUADS * PER_LANE];
    [[unroll]] for (uint i = 0u; i < ROW_QUADS * PER_LANE; i++)
        acc[i] = vec4(0.0);
    for (uint t = gl_LocalInvocationID.x; t < TOKENS; t += gl_WorkGroupSize.x)
        x_start[t] = p.x_offset + x_row(t0 + min(t, rows - 1u)) * p.x_stride;
    barrier();

    Words words[MAX_W_ITEMS];
    vec4 ahead[MAX_X_ITEMS];
#define FETCH(block)                                               \
    FOR_W fetch_w(tile.weights, block, n, words[n]);               \
    FOR_X ahead[n] = fetch_x(block, n, rows);
#define PUT(block, buffer_of)                                                         \
    FOR_W put_w(block, n, words[n], (buffer_of) * (COLUMNS * W_STRIDE));              \
    FOR_X put_x(n, ahead[n], (buffer_of) * (COLUMNS * X_STRIDE));
    if (STAGES > 0u) {
        FETCH(0u)
        PUT(0u, 0u)
        barrier();
    }
    for (uint block = 0u; block < blocks; block++) {
        const uint next = min(block + 1u, blocks - 1u), here = block % BUFFERS;
        if (STAGES == 0u) {
            FETCH(block)
            PUT(block, 0u)
            barrier();
        } else {
            FETCH(next)
        }
        [[dont_unroll]] for (uint c0 = 0u; c0 < COLUMNS; c0 += 4u)
            [[unroll]] for (uint c = c0; c < c0 + 4u; c++) {
                vec4 v[ROW_QUADS];
                [[unroll]] for (uint q = 0u; q < ROW_QUADS; q++)
                    v[q] = tile_w[(here * COLUMNS + c) * W_STRIDE + quad + 16u * q];
                [[unroll]] for (uint i = 0u; i < PER_LANE; i++) {
                    const float one = tile_x[(here * COLUMNS + c) * X_STRIDE + slot + 16u * i];
                    [[unroll]] for (uint q = 0u; q < ROW_QUADS; q++)
                        acc[q * PER_LANE + i] += v[q] * one;
                }
            }
        if (STAGES != 2u)
            barrier(); // before what was read is overwritten
        if (STAGES > 0u && next > block) {
            PUT(next, next % BUFFERS)
            barrier();
        }
    }
    [[unroll]] for (uint q = 0u; q < ROW_QUADS; q++) {
        const uint row = (gl_WorkGroupID.x * QUADS + quad + 16u * q) * 4u;
        const vec4 b = load_bias(row);
        [[unroll]] for (uint i = 0u; i < PER_LANE; i++)
            if (slot + 16u * i < rows)
                store(row, t0 + slot + 16u * i, acc[q * PER_LANE + i] + b);
    }
}

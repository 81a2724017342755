// Matrix products on lavapipe, where everything hangs on how a load is written (include/uniform.glsl):
// y[t] = W x[t] for TOKENS tokens a workgroup. Other CPU devices take matmul_simd.comp.
//
// Eight lanes (a subgroup) are the eight rows of a group of the x8 layout: a word of weights of all lanes is
// 32 bytes side by side. Lanes load all eight words from uniform addresses and keep their own, which LLVM
// turns into one vector load; x is loaded from uniform addresses too, which becomes the memory operand of
// the multiplication. Both need addresses instead of bindings (buffer_reference), because a binding's size
// is tested at every load, and code without branches or loops: the blocks of a row are unrolled. What comes
// out is what one would write by hand: per 8 weights an AND, a conversion, a multiplication, an addition.
// (Mesa 25.0 has no fused multiply-add for shaders.)
//
// A long row is cut into CHUNKS of BLOCKS, one a subgroup, whose sums are added in shared memory. The barrier
// this takes costs some 500 cycles, so BLOCKS is as large as compiling (0.03 to 0.15 s a block) allows.
// A subgroup takes 8 rows, a workgroup many: making a workgroup costs lavapipe about as much as 1,000 weights.
//
// For 1 and 2 tokens the weights are only converted, too large by a power of two (see formats.glsl), summed
// for each power by itself, and scaled once a block: sum(w x) = d sum(q x) + m sum(x). For more they are
// scaled first: with 8 tokens that is a fifth of the work.
//
// Order matters in two more ways. Everything that branches (a load of a binding or a push constant, a store of
// a lane) stands before the products or after the sums are in shared memory: LLVM would move the additions
// behind a branch that comes between, and keep every product on the stack until there. And where x is needed
// as a vector, too, it is loaded twice, from addresses that differ only by a zero the compiler does not know: a
// load that is both a vector's part and a memory operand would be neither.
//
// Code this long comes from the core's second cache, at 15 bytes a cycle, so short instructions are quick ones:
// a displacement of x takes one byte instead of four up to 512 bytes before and behind the address. So x is
// read through the address of the middle of a window of 1,024 bytes, which moves on by a step the compiler does
// not know; it would add it to the displacements otherwise.
//
// What a run costs beside its products is its end: 8 tokens are stored with an instruction each if it is to an
// address (a scatter); to a binding every lane by itself, with a test of its size. And no loops there, either.
//
// Measured on a Zen 4 core of 3.5 GHz that another process shares, CPU time, q4_1, 3072 x 576: 8 G weights/s for
// one token, 21 to 25 G products/s for 8 tokens (matmul_simd: 6). The same instructions in a loop of 2 KiB
// make 33; products and sums are two instructions (Mesa 25.0 fuses none). What did not help: vectors of 512
// bits (LP_NATIVE_VECTOR_WIDTH: registers spill, and Mesa's shader cache does not know the width), loops with
// gathers, more than 8 tokens, chunks so short that their code stays in the first cache (more ends).
//
// Norms that begin or end here (xinfer_vk/kernels/split_norm.py; NORMS, for few tokens). The sums of squares of a
// begun row are a word for each lane and block: one addition with an operand in memory per block and token, where
// its products are 64 instructions. They come before the products, so that nothing waits for the root, and always:
// from x where that is no begun row, since uniform loads stand outside of all branches. A norm that begins is two
// stores more at the end of a run. CPU time of one thread, q4_1, a layer of SmolLM2-135M, against products without
// this and two norms with dispatches of their own: 0.91 to 0.98 for one token, 0.98 for two, 1.01 for eight. And
// those norms kept all cores but one idle for a few tokens.
//
// Bytes: the weights once per TOKENS tokens, x once per 8 rows (from the caches).
// Workgroups: x = ceil(groups of 8 rows / row groups of a workgroup), y = ceil(tokens / TOKENS).
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_buffer_reference : require
#extension GL_EXT_buffer_reference_uvec2 : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require
// variants: FORMAT=f32,f16,bf16,q8_0,q4_0,q4_1,q5_0,q5_1,q2_k,q3_k,q4_k,q5_k,q6_k,iq4_nl,iq4_xs,mxfp4,int4,int8
layout(local_size_x_id = 0) in; // spec: local_size = 8 * CHUNKS * row groups of a workgroup
layout(constant_id = 1) const uint TOKENS = 1u;
layout(constant_id = 2) const uint BLOCKS = 1u; // of a chunk
layout(constant_id = 3) const uint CHUNKS = 1u;
layout(constant_id = 4) const uint WHOLE = 1u;  // 0: the last chunk goes beyond the row
layout(constant_id = 5) const uint DIGITS = 1u; // of the largest workgroup id in x, to base 8
layout(constant_id = 6) const uint ARGMAX = 0u; // 1: of every group of rows the largest, and which it is
layout(constant_id = 7) const uint NORMS = 0u;  // 1: norms can begin and end here; for one tile of tokens
#define GROUP_CONSTANT 8

const uint LANES = 8u;
struct Run { uint word[LANES]; };    // a word of each row of a group
struct Block { float column[32]; };  // of a row of x
// Volatile is what is loaded once anyway: Mesa need not look for loads of the same, in a time that grows with
// the square of their number, at every start of a program.
layout(buffer_reference, std430, buffer_reference_align = 4) readonly buffer Words { Run run[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) volatile readonly buffer Data { Run run[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) volatile readonly buffer Floats { Block block[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) buffer Numbers { float number[]; };

Words scales_at; // the first scale of this row group in this chunk,
Data data_at;    // and its first word of weights

uint lanes_own(uint v[LANES]) { // v[lane], where all lanes have all of v
    [[unroll]] for (uint half_count = LANES / 2u, bit = 1u; half_count > 0u; half_count /= 2u, bit *= 2u)
        [[unroll]] for (uint i = 0u; i < half_count; i++)
            v[i] = (gl_SubgroupInvocationID & bit) != 0u ? v[2u * i + 1u] : v[2u * i];
    return v[0];
}

uint own(Run run) { return lanes_own(run.word); } // the word of the lane's row

// formats.glsl decodes four rows at once; the other three are zero, and vanish.
#define LOAD_SCALES(i) uvec4(own(scales_at.run[(i) >> 1u]), 0u, 0u, 0u)
#define LOAD_DATA(i) uvec4(own(data_at.run[(i) >> 1u]), 0u, 0u, 0u)
#define ALL_SCALES
#include "formats.glsl"

layout(set = 0, binding = 1) readonly buffer X { float x[]; };  // [tokens][x_stride] at x_offset; by address
layout(set = 0, binding = 2) buffer Y { float y[]; };           // [tokens][y_stride] at y_offset; by address
layout(set = 0, binding = 3) readonly buffer State { uint state[]; };
layout(set = 0, binding = 4) readonly buffer Bias { float bias[]; }; // [rows of the whole matrix]
layout(push_constant) uniform Push {
    uint w_offset;    // words
    uint rows;        // of this part
    uint cols;
    uint first_row;   // of this part in the whole matrix
    uint x_offset;    // words
    uint x_stride;    // words
    uint y_offset;    // words
    uint y_stride;    // words
    uint bias_offset; // words; NO_BIAS: there is none
    uint epilogue;    // as in linear.glsl; not looked at where ARGMAX is
    uint count_at;    // word of the state buffer with the number of rows of x in use
    uint last_token;  // of the plan: rows of x beyond are not there
    uint row_words, data_first; // ROW_WORDS and DATA_FIRST of cols
    uint w_low, w_high, x_low, x_high, y_low, y_high; // the addresses of w, x and y
    mat2x4 digits;    // see uniform.glsl
    // RMSNorms that the product before begins and the one after ends, as in linear.glsl
    uint next_weight, next_offset, next_cols;
    float norm_eps;
} p;
const uint NO_BIAS = 0xFFFFFFFFu;
const uint STORE = 0u, ADD = 1u, SWIGLU = 2u, GATED = 3u, GEGLU = 4u;

#include "argmax.glsl"
#include "gelu.glsl"
#include "silu.glsl"
#include "uniform.glsl"

#define FOR_TOKENS [[unroll]] for (uint t = 0u; t < TOKENS; t++)
#define FOR_FINISHED [[unroll]] for (uint j = 0u; j < FINISHED; j++)
#define FOR_FOUR [[unroll]] for (uint n = 0u; n < 4u; n++)
const bool SCALE_FIRST = TOKENS > 2u;
#if defined(PAIRED)
const bool ONE_PLACE = LOW_PLACE == HIGH_PLACE;
#endif
#ifdef ADJACENT
    #define LOW_COLUMN(unit) (8u * (unit))
    #define HIGH_COLUMN(unit) (8u * (unit) + 4u)
#else
    #define LOW_COLUMN(unit) (4u * (unit))
    #define HIGH_COLUMN(unit) (16u + 4u * (unit))
#endif

Floats x_at[TOKENS], x_again[TOKENS];
const uint WINDOW = 8u; // blocks; see open_window()
const uint FINISHED = (TOKENS + CHUNKS - 1u) / CHUNKS; // tokens whose sums a run adds and stores, at most
shared float sums[gl_WorkGroupSize.x * TOKENS]; // [row group][chunk][token][row]
// What ends the norm of a token: [row group][chunk][token], the sum of the squares of x in each chunk; where a row is
// one chunk, the factor.
shared float squares[NORMS != 0u ? gl_WorkGroupSize.x / LANES * TOKENS : 1u];

uvec2 advance(uvec2 address, uint bytes) {
    uint carry;
    const uint low = uaddCarry(address.x, bytes, carry);
    return uvec2(low, address.y + carry);
}

// Lets x_at be the middle of a window of the rows of x that begin at word x_first. Every window finds where in a
// push constant of its own: the test of that begins a new block of code, and LLVM compiles several short ones
// in two thirds of the time of a long one.
void open_window(uint x_first[TOKENS], uint window) {
    const uint unknown_zero = floatBitsToUint(p.digits[0][0]);
    const uint middle = 2u * window + 1u; // in half windows
    const uint unknown_middle = floatBitsToUint(p.digits[middle / 4u & 1u][middle & 3u]) + (middle & ~7u);
    FOR_TOKENS {
        const uint byte = 4u * (x_first[t] + WINDOW / 2u * BLOCK * unknown_middle);
        x_at[t] = Floats(advance(uvec2(p.x_low, p.x_high), byte));
        x_again[t] = Floats(advance(uvec2(p.x_low, p.x_high), byte + unknown_zero));
    }
}

// Keeps what has been added so far before a branch that follows, by a use of it that nobody reads.
void hold(float acc[TOKENS], uint run) {
    FOR_TOKENS sums[(run * TOKENS + t) * LANES] = subgroupShuffle(acc[t], 0u);
}

// The sum of `count` columns (a multiple of 8) of a block of x, in all lanes.
float sum_of(uint t, int block, uint first, uint count) {
    const uint lane = gl_SubgroupInvocationID;
    float sum = 0.0;
    [[unroll]] for (uint c = 0u; c < count; c += LANES) {
        float v = x_again[t].block[block].column[first + c];
        [[unroll]] for (uint i = 1u; i < LANES; i++) {
            const float next = x_again[t].block[block].column[first + c + i];
            v = lane == i ? next : v;
        }
        sum += v;
    }
    sum += subgroupShuffle(sum, lane ^ 1u);
    sum += subgroupShuffle(sum, lane ^ 2u);
    return sum + subgroupShuffle(sum, lane ^ 4u);
}

// The sum over all lanes of v[t] in every lane whose number modulo TOKENS is t.
float lanes_sum(float v[TOKENS]) {
    const uint lane = gl_SubgroupInvocationID;
    [[unroll]] for (uint bit = 1u; bit < LANES; bit *= 2u) {
        if (bit < TOKENS) {
            [[unroll]] for (uint i = 0u; i < TOKENS / 2u / bit; i++) {
                const bool odd = (lane & bit) != 0u;
                const float keep = odd ? v[2u * i + 1u] : v[2u * i], give = odd ? v[2u * i] : v[2u * i + 1u];
                v[i] = keep + subgroupShuffle(give, lane ^ bit);
            }
        } else {
            v[0] += subgroupShuffle(v[0], lane ^ bit);
        }
    }
    return v[0];
}

// What a product of a begun row is multiplied by, given the sum of the squares; 1 if it is none.
float norm_factor(float sum) {
    return p.norm_eps < 0.0 ? 1.0 : 1.0 / sqrt(sum * (1.0 / float(p.cols)) + p.norm_eps);
}

void add_squares(uint run, uint chunk) {
    const uint first_block = chunk * BLOCKS;
    float sum[TOKENS];
    FOR_TOKENS {
        const uint row = p.x_offset + min(t, p.last_token) * p.x_stride + (p.norm_eps < 0.0 ? 0u : p.cols);
        Data of_row = Data(advance(uvec2(p.x_low, p.x_high), 4u * (row + first_block * LANES)));
        float part[4]; // four, because an addition waits for the one before
        FOR_FOUR part[n] = 0.0;
        [[unroll]] for (uint i = 0u; i < BLOCKS; i++) {
            uint b = i;
            bool within = true;
            if (WHOLE == 0u) {
                within = first_block + i < p.cols / BLOCK;
                b = min(first_block + i, p.cols / BLOCK - 1u) - first_block;
            }
            const float four = uintBitsToFloat(own(of_row.run[b]));
            part[i & 3u] += within ? four : 0.0;
        }
        sum[t] = (part[0] + part[1]) + (part[2] + part[3]);
    }
    float all = lanes_sum(sum);
    if (CHUNKS == 1u)
        all = norm_factor(all);
    FOR_TOKENS squares[run * TOKENS + t] = subgroupShuffle(all, t);
}

void main() {
    const uint lane = gl_SubgroupInvocationID;
    const uint run = uniformly(gl_SubgroupID, gl_WorkGroupSize.x > 8u * LANES ? 2u : 1u);
    const uint row_groups = gl_WorkGroupSize.x / LANES / CHUNKS; // of a workgroup
    const uint chunk = run % CHUNKS;
    const uint group = min(uniformly(gl_WorkGroupID.x, DIGITS) * row_groups + run / CHUNKS,
        (p.rows - 1u) / LANES); // groups beyond the last one work on it and store nothing
    const uint t0 = TOKENS < 8u ? 0u : uniformly(gl_WorkGroupID.y, 3u) * TOKENS; // fewer are one tile
    const uint used = state[p.count_at];

    const uint blocks = p.cols / BLOCK, first_block = chunk * BLOCKS;
    const uvec2 row_at = advance(uvec2(p.w_low, p.w_high), 4u * (p.w_offset + group * p.row_words * LANES));
    data_at = Data(advance(row_at, 4u * LANES * (p.data_first + first_block * BLOCK_WORDS)));
#if defined(GROUPED)
    scales_at = Words(row_at);
    const uint scale_block = first_block; // where blocks are counted from that have their scales at scales_at
#elif defined(SCALED) // from the chunk, if it begins with a word of scales: then shifts are constants
    const bool from_chunk = BLOCKS % (SCALE_COLUMNS / BLOCK) == 0u;
    const uint scale_words = from_chunk ? first_block / (SCALE_COLUMNS / BLOCK) * SCALE_WORDS : 0u;
    scales_at = Words(advance(row_at, 4u * LANES * scale_words));
    const uint scale_block = from_chunk ? 0u : first_block;
#endif
    if (NORMS != 0u)
        add_squares(run, chunk);
    uint x_first[TOKENS]; // words
    FOR_TOKENS x_first[t] = p.x_offset + min(t0 + t, p.last_token) * p.x_stride + first_block * BLOCK;
    open_window(x_first, 0u);

    const uint row = group * LANES + lane;
    const bool paired = p.epilogue == SWIGLU || p.epilogue == GEGLU; // rows are gate, up, gate, up, …
    const bool stores = gl_WorkGroupID.x * row_groups + gl_SubgroupID / CHUNKS == group && row < p.rows
        && (!paired || (row & 1u) == 0u);
    float row_bias = 0.0;
    if (p.bias_offset != NO_BIAS)
        row_bias = bias[p.bias_offset + p.first_row + min(row, p.rows - 1u)];

    float acc[TOKENS];
    FOR_TOKENS acc[t] = 0.0;
#ifndef SCALED // the last cols % 32 columns; what lies beyond them in x is not read
    [[dont_unroll]] for (uint k = chunk == 0u ? blocks * BLOCK_UNITS : p.row_words; k < p.row_words; k++) {
        uvec4 raw[RAW];
        raw[0] = uvec4(Words(row_at).run[k].word[lane], 0u, 0u, 0u);
        vec4 v[WEIGHTS];
        decode(raw, k, v);
        [[unroll]] for (uint i = 0u; i < WEIGHTS; i++)
            if (column(k, i) < p.cols) {
                const int x_block = int(column(k, i) / BLOCK) - int(WINDOW / 2u);
                FOR_TOKENS acc[t] += v[i].x * x_at[t].block[x_block].column[column(k, i) % BLOCK];
            }
    }
#endif
    [[unroll]] for (uint i = 0u; i < BLOCKS; i++) {
        if (i > 0u && i % WINDOW == 0u) {
            hold(acc, run);
            open_window(x_first, i / WINDOW);
        }
        uint b = i;
        bool within = true;
        if (WHOLE == 0u) {
            within = first_block + i < blocks;
            b = min(first_block + i, blocks - 1u) - first_block;
        }
        const int x_block = int(b) - int(i / WINDOW * WINDOW + WINDOW / 2u); // from x_at on
#ifdef PAIRED
        [[unroll]] for (uint from = 0u; from < 4u; from += SCALE_UNITS) {
            const uint k = (scale_block + b) * BLOCK_UNITS + from;
            uvec4 s[SCALES_LOADED];
            vec4 d, m;
            load_scales(0u, k, s);
            open_scales(s, k, d, m);
    #ifdef SUPER
            small_scales(s, k, d, m);
    #endif
            const float scale = within ? d.x : 0.0;
    #ifdef SUMS
            const float level = within ? LEVEL(d, m).x : 0.0;
    #endif
            float low[4u * TOKENS], high[4u * TOKENS];
            [[unroll]] for (uint n = 0u; n < 4u * TOKENS; n++)
                low[n] = high[n] = 0.0;
            [[unroll]] for (uint j = 0u; j < SCALE_UNITS; j++) {
                const uint unit = from + j;
                uvec4 raw[RAW];
                load_unit(0u, b * BLOCK_UNITS + unit, raw);
                vec4 l[4], h[4];
                decode_placed(raw, unit, l, h);
                FOR_FOUR {
                    float wl = l[n].x, wh = h[n].x;
                    if (SCALE_FIRST) {
                        wl *= scale * LOW_PLACE[n];
                        wh *= scale * HIGH_PLACE[n];
    #ifdef SUMS
                        wl += level;
                        wh += level;
    #endif
                    }
                    FOR_TOKENS {
                        const float xl = x_at[t].block[x_block].column[LOW_COLUMN(unit) + n];
                        const float xh = x_at[t].block[x_block].column[HIGH_COLUMN(unit) + n];
                        if (SCALE_FIRST) {
                            acc[t] += wl * xl;
                            acc[t] += wh * xh;
                        } else {
                            low[4u * t + n] += wl * xl;
                            if (ONE_PLACE)
                                low[4u * t + n] += wh * xh;
                            else
                                high[4u * t + n] += wh * xh;
                        }
                    }
                }
            }
            if (!SCALE_FIRST)
                FOR_TOKENS {
                    float part = 0.0;
                    FOR_FOUR {
                        part += low[4u * t + n] * LOW_PLACE[n];
                        if (!ONE_PLACE)
                            part += high[4u * t + n] * HIGH_PLACE[n];
                    }
                    acc[t] += scale * part;
    #ifdef SUMS
                    acc[t] += level * sum_of(t, x_block, LOW_COLUMN(from), 8u * SCALE_UNITS);
    #endif
                }
        }
#else
        float scale = within ? 1.0 : 0.0;
    #ifdef SCALED
        const uint k = (scale_block + b) * BLOCK_UNITS;
        uvec4 s[SCALES_LOADED];
        vec4 d, m;
        load_scales(0u, k, s);
        open_scales(s, k, d, m);
        scale = within ? d.x : 0.0;
        #ifdef SUMS
        const float level = within ? LEVEL(d, m).x : 0.0;
        #endif
    #endif
        float part[4u * TOKENS];
        [[unroll]] for (uint n = 0u; n < 4u * TOKENS; n++)
            part[n] = 0.0;
        [[unroll]] for (uint unit = 0u; unit < BLOCK_UNITS; unit++) {
            uvec4 raw[RAW];
            load_unit(0u, b * BLOCK_UNITS + unit, raw);
            vec4 v[WEIGHTS];
            decode(raw, unit, v);
            [[unroll]] for (uint n = 0u; n < WEIGHTS; n++) {
                const uint c = unit * WEIGHTS + n;
                float w = v[n].x;
                if (SCALE_FIRST) {
                    w *= scale;
    #ifdef SUMS
                    w += level;
    #endif
                    FOR_TOKENS acc[t] += w * x_at[t].block[x_block].column[c];
                } else {
                    FOR_TOKENS part[4u * t + (c & 3u)] += w * x_at[t].block[x_block].column[c];
                }
            }
        }
        if (!SCALE_FIRST)
            FOR_TOKENS {
                acc[t] += scale * ((part[4u * t] + part[4u * t + 1u]) + (part[4u * t + 2u] + part[4u * t + 3u]));
    #ifdef SUMS
                acc[t] += level * sum_of(t, x_block, 0u, BLOCK);
    #endif
            }
#endif
    }

    if (CHUNKS == 1u) {
        hold(acc, run);
        if (NORMS != 0u)
            FOR_TOKENS acc[t] *= squares[run * TOKENS + t];
    } else {
        // Every lane stores all eight sums of its subgroup: to a uniform address, like the loads.
        FOR_TOKENS [[unroll]] for (uint i = 0u; i < LANES; i++)
            sums[(run * TOKENS + t) * LANES + i] = subgroupShuffle(acc[t], i);
        barrier();
        if (CHUNKS > TOKENS) { // not every run has a token
            acc[0] = 0.0;
            float norm = 0.0;
            if (chunk < TOKENS)
                [[dont_unroll]] for (uint c = 0u; c < CHUNKS; c++) {
                    acc[0] += sums[((run - chunk + c) * TOKENS + chunk) * LANES + lane];
                    if (NORMS != 0u)
                        norm += squares[(run - chunk + c) * TOKENS + chunk];
                }
            if (NORMS != 0u)
                acc[0] *= norm_factor(norm);
        } else {
            FOR_FINISHED {
                const uint t = min(chunk + j * CHUNKS, TOKENS - 1u);
                acc[j] = 0.0;
                float norm = 0.0;
                [[unroll]] for (uint c = 0u; c < CHUNKS; c++) {
                    if (NORMS != 0u)
                        norm += squares[(run - chunk + c) * TOKENS + t];
                    uint numbers[LANES];
                    [[unroll]] for (uint i = 0u; i < LANES; i++)
                        numbers[i] = floatBitsToUint(sums[((run - chunk + c) * TOKENS + t) * LANES + i]);
                    acc[j] += uintBitsToFloat(lanes_own(numbers));
                }
                if (NORMS != 0u)
                    acc[j] *= norm_factor(norm);
            }
        }
    }
    if (ARGMAX != 0u) { // y: [tokens][y_stride], a (value, index) pair for every group, which argmax_join.comp joins
        Numbers pair_at = Numbers(uvec2(p.y_low, p.y_high));
        FOR_FINISHED {
            // Rows of the padding are below all others. Shuffles from a lane that is a constant are an instruction
            // or two each; from one that is not, some fifty.
            const uint key = row < p.rows ? order_key(floatBitsToUint(acc[j] + row_bias)) : 0u;
            uint top = 0u, top_lane = 0u;
            [[unroll]] for (uint i = 0u; i < LANES; i++) {
                const uint other = subgroupShuffle(key, i);
                top_lane = other > top ? i : top_lane; // the first of equals
                top = max(other, top);
            }
            const uint i = chunk + j * CHUNKS, at = p.y_offset + (t0 + i) * p.y_stride + (p.first_row + row) / 4u;
            if (stores && lane == 0u && i < TOKENS && t0 + i < used) {
                pair_at.number[at] = uintBitsToFloat(bits_of(top));
                pair_at.number[at + 1u] = float(p.first_row + row + top_lane);
            }
        }
        return;
    }
    float up[FINISHED];
    FOR_FINISHED {
        acc[j] += row_bias;
        up[j] = subgroupShuffle(acc[j], lane ^ 1u);
    }

    // From here on nothing uniform is needed.
    if (!stores)
        return;
    Numbers y_at = Numbers(uvec2(p.y_low, p.y_high));
    bool wanted[FINISHED];
    uint at[FINISHED];
    FOR_FINISHED {
        const uint i = chunk + j * CHUNKS;
        wanted[j] = i < TOKENS && t0 + i < used;
        at[j] = p.y_offset + (t0 + i) * p.y_stride + (paired ? (p.first_row + row) / 2u : p.first_row + row);
    }
    if (p.epilogue == SWIGLU) {
        FOR_FINISHED acc[j] = silu(acc[j]) * up[j];
    } else if (p.epilogue == GEGLU) {
        FOR_FINISHED acc[j] = gelu_tanh(acc[j]) * up[j];
    } else if (p.epilogue != STORE) {
        FOR_FINISHED {
            const float old = wanted[j] ? y_at.number[at[j]] : 0.0;
            acc[j] = p.epilogue == ADD ? acc[j] + old : acc[j] * silu(old);
        }
    }
    FOR_FINISHED
        if (wanted[j])
            y_at.number[at[j]] = acc[j];
    if (NORMS == 0u || p.next_cols == 0u)
        return;
    // Every lane is here: rows of a norm come in blocks of eight and more.
    const uint column = p.first_row + row;
    const float next_weight = bias[p.next_weight + column];
    FOR_FINISHED {
        float four = acc[j] * acc[j];
        four += subgroupShuffle(four, lane ^ 1u);
        four += subgroupShuffle(four, lane ^ 2u);
        const uint next = p.next_offset + (chunk + j * CHUNKS) * (p.next_cols + p.next_cols / 4u);
        if (wanted[j]) {
            y_at.number[next + column] = acc[j] * next_weight;
            if ((lane & 3u) == 0u)
                y_at.number[next + p.next_cols + column / 4u] = four;
        }
    }
}

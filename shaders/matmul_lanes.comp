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
// Order matters in two more ways. Everything that branches (a load of a binding, a store of a lane) stands
// before the products or after the sums are in shared memory: LLVM would move the additions behind a
// branch that comes between, and keep every product on the stack until there. And x is loaded twice, from
// addresses that differ only by a zero the compiler does not know: a load that is both a vector's part and
// a memory operand would be neither.
//
// Measured on a Zen 4 core of 3.6 GHz, CPU time, q4_1, 3072 x 576: 7 to 14 G weights/s for one token (from
// memory, from the cache) against 4.4 of matmul_simd, 16 to 21 G products/s for 8 tokens against 10.5. Without
// fused operations the core makes 29 to 58: code this long comes from its second cache, at 15 bytes a cycle, and
// a product is two instructions of 14 bytes. What did not help: vectors of 512 bits (LP_NATIVE_VECTOR_WIDTH:
// registers spill, and Mesa's shader cache does not know the width), loops with gathers, more than 8 tokens.
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
layout(constant_id = 5) const uint DIGITS = 1u; // of the largest workgroup id in x, to base 16
#define GROUP_CONSTANT 6

const uint LANES = 8u;
struct Run { uint word[LANES]; };    // a word of each row of a group
struct Block { float column[32]; };  // of a row of x
layout(buffer_reference, std430, buffer_reference_align = 4) readonly buffer Words { Run run[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) readonly buffer Floats { Block block[]; };

Words scales_at, data_at; // the first scale of this row group, and its first word of weights, in this chunk

uint own(Run run) { // the word of the lane's row
    uint v[LANES] = run.word;
    [[unroll]] for (uint half_count = LANES / 2u, bit = 1u; half_count > 0u; half_count /= 2u, bit *= 2u)
        [[unroll]] for (uint i = 0u; i < half_count; i++)
            v[i] = (gl_SubgroupInvocationID & bit) != 0u ? v[2u * i + 1u] : v[2u * i];
    return v[0];
}

// formats.glsl decodes four rows at once; the other three are zero, and vanish.
#define LOAD_SCALES(i) uvec4(own(scales_at.run[(i) >> 1u]), 0u, 0u, 0u)
#define LOAD_DATA(i) uvec4(own(data_at.run[(i) >> 1u]), 0u, 0u, 0u)
#define ALL_SCALES
#include "formats.glsl"

layout(set = 0, binding = 1) readonly buffer X { float x[]; };  // [tokens][x_stride] at x_offset; by address
layout(set = 0, binding = 2) buffer Y { float y[]; };           // [tokens][y_stride] at y_offset
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
    uint epilogue;    // as in linear.glsl
    uint count_at;    // word of the state buffer with the number of rows of x in use
    uint last_token;  // of the plan: rows of x beyond are not there
    uint w_low, w_high, x_low, x_high; // the addresses of w and x
    mat4 digits;      // see uniform.glsl
} p;
const uint NO_BIAS = 0xFFFFFFFFu;
const uint STORE = 0u, ADD = 1u, SWIGLU = 2u, GATED = 3u, GEGLU = 4u;

#include "gelu.glsl"
#include "silu.glsl"
#include "uniform.glsl"

#define FOR_TOKENS [[unroll]] for (uint t = 0u; t < TOKENS; t++)
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
shared float sums[gl_WorkGroupSize.x * TOKENS]; // [row group][chunk][token][row]

uvec2 advance(uvec2 address, uint bytes) {
    uint carry;
    const uint low = uaddCarry(address.x, bytes, carry);
    return uvec2(low, address.y + carry);
}

// The sum of `count` columns (a multiple of 8) of a block of x, in all lanes.
float sum_of(uint t, uint block, uint first, uint count) {
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

// Row `row` of token t is v. Where rows are pairs of a gate and its up, `up` is the next row, and row even.
void finish(uint row, uint t, float v, float up) {
    const bool paired = p.epilogue == SWIGLU || p.epilogue == GEGLU;
    if (p.bias_offset != NO_BIAS) {
        const uint at = p.bias_offset + p.first_row + row;
        v += bias[at];
        if (paired)
            up += bias[at + 1u];
    }
    const uint at = p.y_offset + t * p.y_stride + (paired ? (p.first_row + row) / 2u : p.first_row + row);
    if (paired)
        v = (p.epilogue == SWIGLU ? silu(v) : gelu_tanh(v)) * up;
    else if (p.epilogue == ADD)
        v += y[at];
    else if (p.epilogue == GATED)
        v *= silu(y[at]);
    y[at] = v;
}

void main() {
    const uint lane = gl_SubgroupInvocationID;
    const uint run = uniformly(gl_SubgroupID, gl_WorkGroupSize.x > 16u * LANES ? 2u : 1u);
    const uint row_groups = gl_WorkGroupSize.x / LANES / CHUNKS; // of a workgroup
    const uint chunk = run % CHUNKS;
    const uint group = min(uniformly(gl_WorkGroupID.x, DIGITS) * row_groups + run / CHUNKS,
        (p.rows - 1u) / LANES); // groups beyond the last one work on it and store nothing
    const uint t0 = TOKENS < 8u ? 0u : uniformly(gl_WorkGroupID.y, 2u) * TOKENS; // fewer are one tile
    const uint used = state[p.count_at];

    const uint row_words = ROW_WORDS(p.cols), data_first = DATA_FIRST(p.cols);
    const uint blocks = p.cols / BLOCK, first_block = chunk * BLOCKS;
    const uvec2 row_at = advance(uvec2(p.w_low, p.w_high), 4u * (p.w_offset + group * row_words * LANES));
    data_at = Words(advance(row_at, 4u * LANES * (data_first + first_block * BLOCK_WORDS)));
#if defined(GROUPED)
    scales_at = Words(row_at);
    const uint scale_block = first_block; // where blocks are counted from that have their scales at scales_at
#elif defined(SCALED) // from the chunk, if it begins with a word of scales: then shifts are constants
    const bool from_chunk = BLOCKS % (SCALE_COLUMNS / BLOCK) == 0u;
    const uint scale_words = from_chunk ? first_block / (SCALE_COLUMNS / BLOCK) * SCALE_WORDS : 0u;
    scales_at = Words(advance(row_at, 4u * LANES * scale_words));
    const uint scale_block = from_chunk ? 0u : first_block;
#endif
    const uint unknown_zero = floatBitsToUint(p.digits[0][0]);
    FOR_TOKENS {
        const uint word = p.x_offset + min(t0 + t, p.last_token) * p.x_stride + first_block * BLOCK;
        x_at[t] = Floats(advance(uvec2(p.x_low, p.x_high), 4u * word));
        x_again[t] = Floats(advance(uvec2(p.x_low, p.x_high), 4u * word + unknown_zero));
    }

    float acc[TOKENS];
    FOR_TOKENS acc[t] = 0.0;
#ifndef SCALED // the last cols % 32 columns; what lies beyond them in x is not read
    [[dont_unroll]] for (uint k = chunk == 0u ? blocks * BLOCK_UNITS : row_words; k < row_words; k++) {
        uvec4 raw[RAW];
        raw[0] = uvec4(Words(row_at).run[k].word[lane], 0u, 0u, 0u);
        vec4 v[WEIGHTS];
        decode(raw, k, v);
        [[unroll]] for (uint i = 0u; i < WEIGHTS; i++)
            if (column(k, i) < p.cols)
                FOR_TOKENS acc[t] += v[i].x * x_at[t].block[column(k, i) / BLOCK].column[column(k, i) % BLOCK];
    }
#endif
    [[unroll]] for (uint i = 0u; i < BLOCKS; i++) {
        uint b = i;
        bool within = true;
        if (WHOLE == 0u) {
            within = first_block + i < blocks;
            b = min(first_block + i, blocks - 1u) - first_block;
        }
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
                        const float xl = x_at[t].block[b].column[LOW_COLUMN(unit) + n];
                        const float xh = x_at[t].block[b].column[HIGH_COLUMN(unit) + n];
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
                    acc[t] += level * sum_of(t, b, LOW_COLUMN(from), 8u * SCALE_UNITS);
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
                    FOR_TOKENS acc[t] += w * x_at[t].block[b].column[c];
                } else {
                    FOR_TOKENS part[4u * t + (c & 3u)] += w * x_at[t].block[b].column[c];
                }
            }
        }
        if (!SCALE_FIRST)
            FOR_TOKENS {
                acc[t] += scale * ((part[4u * t] + part[4u * t + 1u]) + (part[4u * t + 2u] + part[4u * t + 3u]));
    #ifdef SUMS
                acc[t] += level * sum_of(t, b, 0u, BLOCK);
    #endif
            }
#endif
    }

    // Every lane stores all eight sums of its subgroup: to a uniform address, like the loads.
    FOR_TOKENS [[unroll]] for (uint i = 0u; i < LANES; i++)
        sums[(run * TOKENS + t) * LANES + i] = subgroupShuffle(acc[t], i);
    if (CHUNKS > 1u)
        barrier();

    const float next = subgroupShuffle(acc[0], lane ^ 1u);

    // From here on nothing uniform is needed, nor used: a variable of a loop may take its name, and make it
    // one that is not.
    const uint first = gl_SubgroupID / CHUNKS * CHUNKS;
    const uint row = (gl_WorkGroupID.x * row_groups + gl_SubgroupID / CHUNKS) * LANES + lane;
    const bool paired = p.epilogue == SWIGLU || p.epilogue == GEGLU;
    if (row >= p.rows || (paired && (row & 1u) != 0u))
        return;
    if (TOKENS * CHUNKS == 1u) {
        if (used > 0u)
            finish(row, 0u, acc[0], next);
        return;
    }
    [[dont_unroll]] for (uint i = gl_SubgroupID % CHUNKS; i < TOKENS; i += CHUNKS) {
        const uint t = gl_WorkGroupID.y * TOKENS + i;
        if (t >= used)
            break;
        float v = 0.0, up = 0.0;
        [[dont_unroll]] for (uint c = first; c < first + CHUNKS; c++) {
            const uint at = (c * TOKENS + i) * LANES + lane;
            v += sums[at];
            if (paired)
                up += sums[at + 1u];
        }
        finish(row, t, v, up);
    }
}

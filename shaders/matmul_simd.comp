// Matrix products on CPU devices (lavapipe, SwiftShader): y[t] = W x[t] for up to TOKENS tokens a workgroup.
//
// A workgroup is 8 invocations, one SIMD register of the driver's code, and computes 32 rows: lane L
// holds the quad of rows 4L .. 4L+3. For every word of W a lane loads 16 bytes, that word of its four
// rows. Such drivers have no vector load: they turn a load into a bounds check, a scalar load and an
// insert per lane and component, plus about as much per lane alone, so one 4-component load a word is
// the cheapest there is, and the loads are most of the time for one token. x comes likewise: one
// 4-component load brings 32 columns, four in each lane, and is broadcast lane by lane (BROADCAST of
// `subgroup`, for subgroups of at least 8; with `none` every lane loads all of it).
// The word loaded serves all tokens: weights are read and unpacked once per TOKENS of them.
//
// Weights of 2 to 6 bits (four to a word of bytes, see formats.glsl) are masked where they lie in the word
// and converted there, a power of two too large; x, not the weights, carries the power that undoes it
// (exact). Scales are applied once per block of 32 or 16 columns: sum(w x) = d sum(q x) + m sum(x). The
// scales of super-blocks are loaded every 256 columns and stay in registers.
//
// Bytes: the weights once per TOKENS tokens, x once per 32 rows. No shared memory, no barrier.
// Workgroups: x = ceil(rows / 32), y = ceil(tokens / TOKENS).
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
// variants: FORMAT=f32,f16,bf16,q8_0,q4_0,q4_1,q5_0,q5_1,q2_k,q3_k,q4_k,q5_k,q6_k,iq4_nl,iq4_xs,mxfp4,int4,int8 BROADCAST=subgroup,none
#ifdef BROADCAST_SUBGROUP
    #extension GL_KHR_shader_subgroup_basic : require
    #extension GL_KHR_shader_subgroup_shuffle : require
#endif
layout(local_size_x_id = 0) in; // spec: local_size = 8
layout(constant_id = 1) const uint TOKENS = 1u;
layout(constant_id = 2) const uint ALIGNED = 1u; // x_offset and x_stride are multiples of 4
#define ALL_SCALES // they serve a whole super-block
#define GROUP_CONSTANT 4
#include "formats.glsl"
#define EPILOGUE_LOOP [[dont_unroll]]
#include "linear.glsl"

#define FOR_TOKENS [[unroll]] for (uint t = 0u; t < TOKENS; t++)
#define FOR_QUAD [[unroll]] for (uint c = 0u; c < 4u; c++)
// How many steps are unrolled matters: a loop that does not fit the instruction caches (some 3,000
// instructions, 22 KB) ran half as fast on lavapipe, and took twice as long to compile. With nibbles
// Mesa's own rule is right (it unrolls for one token, not for 8).
#ifdef PAIRED
    #define FOR_STEPS(n) for (uint i = 0u; i < n; i++)
#else
    #define FOR_STEPS(n) [[dont_unroll]] for (uint i = 0u; i < n; i++)
#endif

// Columns 4i .. 4i+3 of the 32 in hand.
#ifdef BROADCAST_SUBGROUP
    #define COLUMNS(t, i) subgroupShuffle(xs[t], i)
#else
    #define COLUMNS(t, i) load_x4(x_at[t] + 4u * (i))
#endif

// PAIRED: which columns the low and the high runs of unit u are, and the units that share a scale.
#ifdef ADJACENT
    #define LOW_COLUMNS(u) (2u * (u))
    #define HIGH_COLUMNS(u) (2u * (u) + 1u)
    #define LOW_RUN(i) ((i & 1u) == 0u)
    #define FOR_PARTS for (uint from = 0u; from < 4u; from += SCALE_UNITS)
#else
    #define LOW_COLUMNS(u) (u)
    #define HIGH_COLUMNS(u) (4u + (u))
    #define LOW_RUN(i) (i < 4u)
    #define FOR_PARTS const uint from = 0u;
#endif

// What the products of token t are multiplied by if its row of x is a begun norm (xinfer_vk/kernels/split_norm.py).
float norm_factor(uint t) {
    if (p.norm_eps < 0.0)
        return 1.0;
    const uint at = p.x_offset + t * p.x_stride + p.cols;
    vec4 squares = vec4(0.0);
#ifdef BROADCAST_SUBGROUP
    const uint lane = gl_LocalInvocationID.x;
    for (uint i = 4u * lane; i < p.cols / 4u; i += 32u)
        squares += load_x4(at + i);
    float sum = dot(squares, vec4(1.0));
    [[unroll]] for (uint bit = 1u; bit < 8u; bit *= 2u)
        sum += subgroupShuffle(sum, lane ^ bit);
#else
    for (uint i = 0u; i < p.cols / 4u; i += 4u)
        squares += load_x4(at + i);
    const float sum = dot(squares, vec4(1.0));
#endif
    return 1.0 / sqrt(sum / float(p.cols) + p.norm_eps);
}

void main() {
    const uint lane = gl_LocalInvocationID.x;
    const uint row = gl_WorkGroupID.x * 32u + lane * 4u;
    const Tile tile = find_tile();
    const uint t0 = tile.first, used = tile.end;
    const uint row_words = ROW_WORDS(p.cols), data_first = DATA_FIRST(p.cols);
    // Lanes beyond the last group of rows work on the last one and store nothing.
    const uint group = min(row / 8u, (p.rows - 1u) / 8u);
    const uint quad = tile.weights / 4u + group * row_words * 2u + (lane & 1u); // word k: w[quad + 2k]

    vec4 acc[TOKENS];
    uint x_at[TOKENS];
    FOR_TOKENS {
        acc[t] = vec4(0.0);
        x_at[t] = p.x_offset + x_row(min(t0 + t, max(used, 1u) - 1u)) * p.x_stride; // unused rows are not read
    }
    const uint blocks = t0 < used ? p.cols / 32u : 0u;
#ifdef SUPER
    uvec4 s[SCALES_LOADED];
    vec4 super_d, super_m;
#endif
    for (uint b = 0u; b < blocks; b++) {
        const uint first = quad + 2u * (data_first + b * BLOCK_WORDS);
#ifdef SUPER
        if ((b & 7u) == 0u) { // 256 columns share these words
            load_scales(quad, b * BLOCK_UNITS, s);
            open_scales(s, b * BLOCK_UNITS, super_d, super_m);
        }
#endif
#ifdef BROADCAST_SUBGROUP
        vec4 xs[TOKENS];
        FOR_TOKENS xs[t] = load_x4(x_at[t] + 4u * lane);
#endif
#ifdef PAIRED
    #if defined(BROADCAST_SUBGROUP)
        #ifdef SUMS
        float sum[TOKENS]; // of the columns that share a scale, in each of their lanes
        FOR_TOKENS {
            float a = (xs[t].x + xs[t].y) + (xs[t].z + xs[t].w);
            a += subgroupShuffle(a, lane ^ 1u);
            a += subgroupShuffle(a, lane ^ 2u);
            #ifndef ADJACENT
            a += subgroupShuffle(a, lane ^ 4u);
            #endif
            sum[t] = a;
        }
        #endif
        FOR_TOKENS xs[t] *= LOW_RUN(lane) ? LOW_PLACE : HIGH_PLACE;
    #endif
        uvec4 raw[RAW];
        [[unroll]] for (uint n = 0u; n < PLANES; n++)
            raw[RAW - PLANES + n] = w[first + 2u * (NIBBLE_WORDS + n)];
        FOR_PARTS {
            vec4 part[TOKENS];
            FOR_TOKENS part[t] = vec4(0.0);
            FOR_STEPS(SCALE_UNITS) {
                const uint unit = from + i; // of the four of these columns
    #ifdef NIBBLES
                raw[0] = w[first + 2u * unit];
    #endif
                vec4 l[4], h[4];
                decode_placed(raw, unit, l, h);
                FOR_TOKENS {
                    vec4 lo = COLUMNS(t, LOW_COLUMNS(unit)), hi = COLUMNS(t, HIGH_COLUMNS(unit));
    #ifndef BROADCAST_SUBGROUP
                    lo *= LOW_PLACE;
                    hi *= HIGH_PLACE;
    #endif
                    FOR_QUAD {
                        float a = part[t][c];
                        [[unroll]] for (uint n = 0u; n < 4u; n++) {
                            a += l[n][c] * lo[n];
                            a += h[n][c] * hi[n];
                        }
                        part[t][c] = a;
                    }
                }
            }
            const uint k = b * BLOCK_UNITS + from;
            vec4 d, m;
    #ifdef SUPER
            d = super_d;
            m = super_m;
            small_scales(s, k, d, m);
    #else
            uvec4 s[SCALES_LOADED];
            load_scales(quad, k, s);
            open_scales(s, k, d, m);
    #endif
            FOR_TOKENS {
                acc[t] += d * part[t];
    #ifdef SUMS
        #if !defined(BROADCAST_SUBGROUP)
                vec4 quads = vec4(0.0);
                FOR_STEPS(2u * SCALE_UNITS) quads += COLUMNS(t, 2u * from + i);
                const float all = (quads.x + quads.y) + (quads.z + quads.w);
        #elif defined(ADJACENT)
                const float all = subgroupShuffle(sum[t], 2u * from);
        #else
                const float all = sum[t];
        #endif
                acc[t] += LEVEL(d, m) * all;
    #endif
            }
        }
        FOR_TOKENS x_at[t] += 32u;
#else
        vec4 part[TOKENS];
        FOR_TOKENS part[t] = vec4(0.0);
    #ifdef SUMS
        vec4 quads[TOKENS];
        FOR_TOKENS quads[t] = vec4(0.0);
    #endif
        FOR_STEPS(8u) { // columns 4i .. 4i+3 are 4 / WEIGHTS units
            vec4 v[4];
            [[unroll]] for (uint k = 0u; k < 4u / WEIGHTS; k++) {
                uvec4 raw[RAW];
                load_unit(first, i * (4u / WEIGHTS) + k, raw);
                vec4 u[WEIGHTS];
                decode(raw, k, u);
                [[unroll]] for (uint n = 0u; n < WEIGHTS; n++)
                    v[k * WEIGHTS + n] = u[n];
            }
            FOR_TOKENS {
                const vec4 at = COLUMNS(t, i);
    #ifdef SUMS
                quads[t] += at;
    #endif
                FOR_QUAD {
                    float a = part[t][c];
                    [[unroll]] for (uint n = 0u; n < 4u; n++)
                        a += v[n][c] * at[n];
                    part[t][c] = a;
                }
            }
        }
    #ifdef SCALED
        uvec4 s[SCALES_LOADED];
        load_scales(quad, b * BLOCK_UNITS, s);
        vec4 d, m;
        open_scales(s, b * BLOCK_UNITS, d, m);
    #endif
        FOR_TOKENS {
    #ifdef SCALED
            acc[t] += d * part[t];
        #ifdef SUMS
            acc[t] += LEVEL(d, m) * ((quads[t].x + quads[t].y) + (quads[t].z + quads[t].w));
        #endif
    #else
            acc[t] += part[t];
    #endif
            x_at[t] += 32u;
        }
#endif
    }
#ifndef SCALED
    // the last cols % 32 columns; what lies beyond them in x is not read
    for (uint k = blocks * BLOCK_UNITS; t0 < used && k < row_words; k++) {
        uvec4 raw[RAW];
        load_unit(quad, k, raw);
        vec4 v[WEIGHTS];
        decode(raw, k, v);
        [[unroll]] for (uint i = 0u; i < WEIGHTS; i++)
            if (column(k, i) < p.cols)
                FOR_TOKENS acc[t] += v[i] * load_x(x_at[t]++);
    }
#endif
    const vec4 row_bias = load_bias(row);
    for (uint t = 0u; t < min(TOKENS, used - min(used, t0)); t++)
        store(row, t0 + t, norm_factor(t0 + t) * acc[t] + row_bias);
}

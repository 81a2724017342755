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
// Nibbles are masked where they lie in the word and converted there, a power of two too large; x, not
// the weights, carries the power that undoes it (exact). Scales are applied once per block of 32
// columns: sum(w x) = d sum(q x) + m sum(x).
//
// Bytes: the weights once per TOKENS tokens, x once per 32 rows. No shared memory, no barrier.
// Workgroups: x = ceil(rows / 32), y = ceil(tokens / TOKENS).
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
// variants: FORMAT=f32,f16,bf16,q8_0,q4_0,q4_1 BROADCAST=subgroup,none
#ifdef BROADCAST_SUBGROUP
    #extension GL_KHR_shader_subgroup_basic : require
    #extension GL_KHR_shader_subgroup_shuffle : require
#endif
layout(local_size_x_id = 0) in; // spec: local_size = 8
layout(constant_id = 1) const uint TOKENS = 1u;
layout(constant_id = 2) const uint ALIGNED = 1u; // x_offset and x_stride are multiples of 4
#include "formats.glsl"
#define EPILOGUE_LOOP [[dont_unroll]]
#include "linear.glsl"

#define FOR_TOKENS [[unroll]] for (uint t = 0u; t < TOKENS; t++)
#define FOR_QUAD [[unroll]] for (uint c = 0u; c < 4u; c++)
// How many steps are unrolled matters: a loop that does not fit the instruction caches (some 3,000
// instructions, 22 KB) ran half as fast on lavapipe, and took twice as long to compile. With nibbles
// Mesa's own rule is right (it unrolls for one token, not for 8).
#ifdef NIBBLES
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

void main() {
    const uint lane = gl_LocalInvocationID.x;
    const uint row = gl_WorkGroupID.x * 32u + lane * 4u;
    const uint t0 = gl_WorkGroupID.y * TOKENS;
    const uint used = state[p.count_at];
    const uint row_words = ROW_WORDS(p.cols), data_first = DATA_FIRST(p.cols);
    // Lanes beyond the last group of rows work on the last one and store nothing.
    const uint group = min(row / 8u, (p.rows - 1u) / 8u);
    const uint quad = p.w_offset / 4u + group * row_words * 2u + (lane & 1u); // word k: w[quad + 2k]

    vec4 acc[TOKENS];
    uint x_at[TOKENS];
    const vec4 start = load_bias(row);
    FOR_TOKENS {
        acc[t] = start;
        x_at[t] = p.x_offset + min(t0 + t, max(used, 1u) - 1u) * p.x_stride; // unused rows are not read
    }
#ifdef NIBBLES
    // byte c of word j: x[4j + c] meets the low nibble, x[16 + 4j + c] the high one
    const vec4 LOW = vec4(1.0, 1.0 / 256.0, 1.0 / 65536.0, 1.0 / 16777216.0);
    const vec4 HIGH = vec4(1.0 / 16.0, 1.0 / 4096.0, 1.0 / 1048576.0, 1.0);
#endif
    const uint blocks = t0 < used ? p.cols / 32u : 0u;
    for (uint b = 0u; b < blocks; b++) {
        const uint first = quad + 2u * (data_first + b * BLOCK_WORDS);
        vec4 part[TOKENS];
        FOR_TOKENS part[t] = vec4(0.0);
#ifdef BROADCAST_SUBGROUP
        vec4 xs[TOKENS];
        FOR_TOKENS xs[t] = load_x4(x_at[t] + 4u * lane);
#endif
#ifdef NIBBLES
        float sum[TOKENS];
        FOR_TOKENS {
    #ifdef BROADCAST_SUBGROUP
            float s = (xs[t].x + xs[t].y) + (xs[t].z + xs[t].w);
            s += subgroupShuffle(s, lane ^ 1u);
            s += subgroupShuffle(s, lane ^ 2u);
            sum[t] = s + subgroupShuffle(s, lane ^ 4u);
            xs[t] *= lane < 4u ? LOW : HIGH;
    #else
            vec4 s = vec4(0.0);
            FOR_STEPS(8u) s += COLUMNS(t, i);
            sum[t] = (s.x + s.y) + (s.z + s.w);
    #endif
        }
        FOR_STEPS(4u) {
            const uvec4 word = w[first + 2u * i];
            vec4 l[4], h[4];
            [[unroll]] for (uint n = 0u; n < 4u; n++) {
                l[n] = vec4(ivec4(word & (0xFu << (8u * n))));
                h[n] = n < 3u ? vec4(ivec4(word & (0xF0u << (8u * n)))) : vec4(ivec4(word >> 28u));
            }
            FOR_TOKENS {
                vec4 lo = COLUMNS(t, i), hi = COLUMNS(t, 4u + i);
    #ifndef BROADCAST_SUBGROUP
                lo *= LOW;
                hi *= HIGH;
    #endif
                FOR_QUAD {
                    float s = part[t][c];
                    [[unroll]] for (uint n = 0u; n < 4u; n++) {
                        s += l[n][c] * lo[n];
                        s += h[n][c] * hi[n];
                    }
                    part[t][c] = s;
                }
            }
        }
#else
        FOR_STEPS(8u) { // columns 4i .. 4i+3 are 4 / WEIGHTS words
            vec4 v[4];
            [[unroll]] for (uint k = 0u; k < 4u / WEIGHTS; k++) {
                vec4 u[WEIGHTS];
                decode(w[first + 2u * (i * (4u / WEIGHTS) + k)], u);
                [[unroll]] for (uint n = 0u; n < WEIGHTS; n++)
                    v[k * WEIGHTS + n] = u[n];
            }
            FOR_TOKENS {
                const vec4 at = COLUMNS(t, i);
                FOR_QUAD {
                    float s = part[t][c];
                    [[unroll]] for (uint n = 0u; n < 4u; n++)
                        s += v[n][c] * at[n];
                    part[t][c] = s;
                }
            }
        }
#endif
#ifdef SCALED
        vec4 d, m;
        scales(w[quad + 2u * scale_word(b)], b, d, m);
#endif
        FOR_TOKENS {
#if defined(NIBBLES)
            acc[t] += d * part[t];
            acc[t] += m * sum[t];
#elif defined(SCALED)
            acc[t] += d * part[t];
#else
            acc[t] += part[t];
#endif
            x_at[t] += 32u;
        }
    }
#ifndef SCALED
    // the last cols % 32 columns; what lies beyond them in x is not read
    for (uint k = blocks * BLOCK_WORDS; t0 < used && k < row_words; k++) {
        vec4 v[WEIGHTS];
        decode(w[quad + 2u * k], v);
        [[unroll]] for (uint i = 0u; i < WEIGHTS; i++)
            if (column(k, i) < p.cols)
                FOR_TOKENS acc[t] += v[i] * load_x(x_at[t]++);
    }
#endif
    for (uint t = 0u; t < min(TOKENS, used - min(used, t0)); t++)
        store(row, t0 + t, acc[t]);
}

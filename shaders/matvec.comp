// Matrix products on GPUs for few tokens (decode): y[t] = W x[t] for up to TOKENS tokens a workgroup.
//
// A workgroup computes 8 rows. Lane 2s + h takes units s, s + S, s + 2S, … of the rows of half h
// (S = lanes / 2): 16 bytes, one word of four rows, so neighbouring lanes read neighbouring 16 bytes
// and any subgroup of 16, 32 or 64 reads 256, 512 or 1024 bytes in a row. Scales and the planes of
// upper bits are words that several lanes need: one reads them from memory, the others from the cache. For one token
// four such loads are in flight per lane. x is read through the cache, 16 bytes a lane, once for four rows.
//
// Bytes: the weights once per TOKENS tokens; x once per 8 rows, from the cache. Flops: 2 per weight and
// token, which at 4 to 16 bits a weight stays far below what any GPU computes in the time it reads them.
// The partial sums of the lanes are added in shared memory: 16 bytes a lane and token (at most 16 KiB),
// neighbouring lanes at neighbouring addresses, so without bank conflicts; log2(S) barriers.
// Workgroups: x = ceil(rows / 8), y = ceil(tokens / TOKENS).
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
// variants: FORMAT=f32,f16,bf16,q8_0,q4_0,q4_1,q5_0,q5_1,q2_k,q3_k,q4_k,q5_k,q6_k,iq4_nl,iq4_xs,mxfp4,int4,int8
layout(local_size_x_id = 0) in; // spec: local_size, a power of two
layout(constant_id = 1) const uint TOKENS = 1u;
layout(constant_id = 2) const uint ALIGNED = 1u; // x_offset and x_stride are multiples of 4
#define GROUP_CONSTANT 4
#define FLOAT_BY_BITS
#include "formats.glsl"
#define EPILOGUE_LOOP [[dont_unroll]]
#include "linear.glsl"

// Units in flight; with more tokens their loads of x fill the time instead. A unit of a super-block is
// several loads of its own (and long code).
#ifdef SUPER
const uint IN_FLIGHT = TOKENS < 2u ? 2u : 1u;
#else
const uint IN_FLIGHT = TOKENS < 4u ? 4u / TOKENS : 1u;
#endif
#define FOR_TOKENS [[unroll]] for (uint t = 0u; t < TOKENS; t++)
#define FOR_LOADS [[unroll]] for (uint u = 0u; u < IN_FLIGHT; u++)

shared vec4 partial[gl_WorkGroupSize.x * TOKENS];

// The values of x that meet unit k; zero beyond the last column, which is not read. Where the weights of
// a unit are decoded in place (too large by powers of two, include/formats.glsl) x is made smaller instead:
// it serves four rows. Returns their sum, where a format needs that.
float load_columns(uint x_at, uint k, out float xs[WEIGHTS]) {
    float all = 0.0;
#if defined(PAIRED)
    const vec4 lo = load_x4(x_at + column(k, 0u)), hi = load_x4(x_at + column(k, 1u));
    #ifdef SUMS
    all = dot(lo + hi, vec4(1.0));
    #endif
    [[unroll]] for (uint i = 0u; i < 4u; i++) {
        xs[2u * i] = lo[i] * LOW_PLACE[i];
        xs[2u * i + 1u] = hi[i] * HIGH_PLACE[i];
    }
#elif defined(BYTES)
    const vec4 v = load_x4(x_at + column(k, 0u));
    #ifdef SUMS
    all = dot(v, vec4(1.0));
    #endif
    [[unroll]] for (uint i = 0u; i < 4u; i++)
        xs[i] = v[i];
#else
    [[unroll]] for (uint i = 0u; i < WEIGHTS; i++) {
        xs[i] = 0.0;
        if (column(k, i) < p.cols)
            xs[i] = load_x(x_at + column(k, i));
    }
#endif
    return all;
}

// The weights of a unit as load_columns wants them.
void decode_in_place(uvec4 raw[RAW], uint k, out vec4 v[WEIGHTS]) {
#ifdef PAIRED
    vec4 low[4], high[4];
    decode_placed(raw, k & 3u, low, high);
    [[unroll]] for (uint n = 0u; n < 4u; n++) {
        v[2u * n] = low[n];
        v[2u * n + 1u] = high[n];
    }
#else
    decode(raw, k, v);
#endif
}

void main() {
    const Tile tile = find_tile();
    const uint t0 = tile.first, used = tile.end;
    if (t0 >= used)
        return; // the whole workgroup: used is the same for all
    const uint lane = gl_LocalInvocationID.x, slots = gl_WorkGroupSize.x / 2u;
    const uint row_words = ROW_WORDS(p.cols), units = UNITS(p.cols);
    const uint quad = tile.weights / 4u + gl_WorkGroupID.x * row_words * 2u + (lane & 1u); // word k: w[quad + 2k]
    const uint first = quad + 2u * DATA_FIRST(p.cols);

    vec4 acc[TOKENS];
    uint x_at[TOKENS];
    FOR_TOKENS {
        acc[t] = vec4(0.0);
        x_at[t] = p.x_offset + x_row(min(t0 + t, used - 1u)) * p.x_stride; // unused rows are not read
    }
    for (uint k0 = lane / 2u; k0 < units; k0 += IN_FLIGHT * slots) {
        uvec4 raw[IN_FLIGHT][RAW];
        FOR_LOADS load_unit(first, min(k0 + u * slots, units - 1u), raw[u]);
#ifdef SCALED
        uvec4 s[IN_FLIGHT][SCALES_LOADED];
        FOR_LOADS load_scales(quad, min(k0 + u * slots, units - 1u), s[u]);
#endif
        FOR_LOADS {
            const uint k = k0 + u * slots;
            if (k < units) {
                vec4 v[WEIGHTS];
                decode_in_place(raw[u], k, v);
#ifdef SCALED
                vec4 d, m;
                open_scales(s[u], k, d, m);
                small_scales(s[u], k, d, m);
#endif
                FOR_TOKENS {
                    float xs[WEIGHTS];
                    const float all = load_columns(x_at[t], k, xs);
#ifdef SCALED
                    vec4 sum = vec4(0.0);
                    [[unroll]] for (uint i = 0u; i < WEIGHTS; i++)
                        sum += v[i] * xs[i];
                    acc[t] += d * sum;
    #ifdef SUMS
                    acc[t] += LEVEL(d, m) * all;
    #endif
#else
                    [[unroll]] for (uint i = 0u; i < WEIGHTS; i++)
                        acc[t] += v[i] * xs[i];
#endif
                }
            }
        }
    }

    FOR_TOKENS partial[t * gl_WorkGroupSize.x + lane] = acc[t];
    barrier();
    for (uint s = slots; s >= 2u; s /= 2u) {
        if (lane < s)
            [[dont_unroll]] for (uint i = lane; i < TOKENS * gl_WorkGroupSize.x; i += gl_WorkGroupSize.x)
                partial[i] += partial[i + s];
        barrier();
    }
    // lanes 0 and 1 hold the sums of rows 0-3 and 4-7; lane l stores token l / 2
    for (uint i = lane; i < 2u * min(TOKENS, used - t0); i += gl_WorkGroupSize.x) {
        const uint row = gl_WorkGroupID.x * 8u + (i & 1u) * 4u;
        store(row, t0 + i / 2u, partial[i / 2u * gl_WorkGroupSize.x + (i & 1u)] + load_bias(row));
    }
}

// Matrix products on GPUs for few tokens (decode): y[t] = W x[t] for up to TOKENS tokens a workgroup.
//
// A workgroup computes 8 ROW_GROUPS rows. Lane 2s + h takes units s, s + S, s + 2S, … (S = lanes / 2) of the
// rows of half h of each of its groups: 16 bytes, one word of four rows. So neighbouring lanes read neighbouring
// 16 bytes, and any subgroup of 16, 32 or 64 reads 256, 512 or 1024 bytes in a row. Scales and the planes of
// upper bits are words that several lanes need: one reads them from memory, the others from the cache. For one
// token and group four such loads are in flight per lane. x is read through the cache, 16 bytes a lane.
//
// Bytes: the weights once per TOKENS tokens. x from the cache: a value (4 bytes) for every four weights and
// token, with ROW_GROUPS = 2 for every eight. In nibbles these are 2 bytes of weights beside 4 TOKENS bytes of
// x, so for several tokens it is the loads of x, and what computes their addresses, that a kernel waits for: two
// groups halve them. They also let a lane of f32, f16 and bf16 take RUN neighbouring units, four columns, so
// that x comes in loads of 16 bytes there too (pairs of lanes then read 32 bytes in a row, RUN of them side by
// side). Flops: 2 per weight and token; of instructions, a unit of eight nibbles of four rows takes about 70 to
// decode and 32 multiply-adds, 16 operations on x and its loads for each token: what bounds 4-bit formats.
// Where x is a begun norm (xinfer_vk/kernels/split_norm.py) a quarter of a row more is read, once for 8 ROW_GROUPS rows.
// Registers: 4 ROW_GROUPS TOKENS sums, and 32 ROW_GROUPS weights: some 60 for one token, 150 for 8 and two groups,
// 130 for 16 and one group.
//
// The sums of the lanes are added up
//   REDUCE_SHARED    in shared memory: 16 bytes a lane, token and group (at most 16 KiB), neighbouring lanes at
//                    neighbouring addresses, so without bank conflicts; log2(S) + 1 barriers;
//   REDUCE_SUBGROUP  by shuffles inside of a subgroup, log2(SUBGROUP) - 1 of them a sum, then 32 bytes a
//                    subgroup in shared memory and one barrier. Which lanes reduce together is for the
//                    subgroup to say: lanes are numbered by it, which needs all subgroups full
//                    (Kernel.full_subgroups), of SUBGROUP lanes. Any size from 4 up to the workgroup's will do.
// Occupancy: with 16 KiB of shared memory a processor holds 6 workgroups where it has 100 KiB: 6 x 64 lanes for
// 8 tokens and two groups, or 16 and one; the other way it is registers that bound it.
// Workgroups: x = ceil(rows / (8 ROW_GROUPS)), y = ceil(tokens / TOKENS).
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
// variants: FORMAT=f32,f16,bf16,q8_0,q4_0,q4_1,q5_0,q5_1,q2_k,q3_k,q4_k,q5_k,q6_k,iq4_nl,iq4_xs,mxfp4,int4,int8 REDUCE=shared,subgroup
#ifdef REDUCE_SUBGROUP
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#endif
layout(local_size_x_id = 0) in; // spec: local_size, a power of two
layout(constant_id = 1) const uint TOKENS = 1u;  // 1, 2, 4, 8 or 16
layout(constant_id = 2) const uint ALIGNED = 1u; // x_offset and x_stride are multiples of 4
layout(constant_id = 4) const uint ROW_GROUPS = 1u; // 1 or 2
#ifdef REDUCE_SUBGROUP
layout(constant_id = 5) const uint SUBGROUP = 32u; // lanes of a subgroup
#define GROUP_CONSTANT 6
#else
#define GROUP_CONSTANT 5
#endif
#define FLOAT_BY_BITS
#include "formats.glsl"
#define EPILOGUE_LOOP [[dont_unroll]]
#include "linear.glsl"

// A step of a lane: RUN units, of which STEP weights are decoded.
const uint MAX_RUN = WEIGHTS < 4u ? 4u / WEIGHTS : 1u, STEP = WEIGHTS * MAX_RUN;
const uint RUN = ROW_GROUPS > 1u ? MAX_RUN : 1u;
// Steps in flight; with more tokens their loads of x fill the time instead. A unit of a super-block is
// several loads of its own (and long code).
const uint ALL_SUMS = TOKENS * ROW_GROUPS;
#ifdef SUPER
const uint IN_FLIGHT = ALL_SUMS < 2u ? 2u : 1u;
#else
const uint IN_FLIGHT = ALL_SUMS < 4u ? 4u / ALL_SUMS : 1u;
#endif
#define FOR_TOKENS [[unroll]] for (uint t = 0u; t < TOKENS; t++)
#define FOR_GROUPS [[unroll]] for (uint g = 0u; g < ROW_GROUPS; g++)
#define FOR_LOADS [[unroll]] for (uint u = 0u; u < IN_FLIGHT; u++)
#define FOR_RUN [[unroll]] for (uint r = 0u; r < RUN; r++)

#ifdef REDUCE_SUBGROUP
const uint PARTS = 2u * (gl_WorkGroupSize.x / SUBGROUP); // sums of a token and group that are left
#else
const uint PARTS = gl_WorkGroupSize.x;
#endif
shared vec4 partial[PARTS * ALL_SUMS];

// Where the rows of x are begun norms (xinfer_vk/kernels/split_norm.py) SQUARES lanes a token add up its sums of
// squares, then whoever stores the token adds up theirs.
const uint SQUARES = 32u;
shared float squares[SQUARES * TOKENS];

void add_squares(uint t, uint slot, uint at) { // at: where they are; a barrier must follow
    vec4 sum = vec4(0.0);
    for (uint i = 4u * slot; i < p.cols / 4u; i += 4u * SQUARES)
        sum += load_x4(at + i);
    squares[t * SQUARES + slot] = dot(sum, vec4(1.0));
}

float norm_factor(uint t) { // 1 / sqrt(mean(x²) + eps), or 1
    if (p.norm_eps < 0.0)
        return 1.0;
    float sum = 0.0;
    for (uint i = 0u; i < SQUARES; i++)
        sum += squares[t * SQUARES + i];
    return 1.0 / sqrt(sum / float(p.cols) + p.norm_eps);
}

// The values of x that meet the step from unit k on; zero beyond the last column, which is not read. Where the weights of
// a unit are decoded in place (too large by powers of two, include/formats.glsl) x is made smaller instead:
// it serves four rows and more. Returns their sum, where a format needs that.
float load_columns(uint x_at, uint k, out float xs[STEP]) {
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
    const uint first = column(k, 0u);
    if (RUN > 1u && first + STEP <= p.cols) {
        const vec4 v = load_x4(x_at + first);
        [[unroll]] for (uint i = 0u; i < STEP; i++)
            xs[i] = v[i];
    } else {
        [[unroll]] for (uint i = 0u; i < WEIGHTS * RUN; i++) {
            xs[i] = 0.0;
            if (first + i < p.cols)
                xs[i] = load_x(x_at + first + i);
        }
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
#ifdef REDUCE_SUBGROUP
    const uint lane = gl_SubgroupID * SUBGROUP + gl_SubgroupInvocationID;
#else
    const uint lane = gl_LocalInvocationID.x;
#endif
    const uint slots = gl_WorkGroupSize.x / 2u;
    const uint row_words = ROW_WORDS(p.cols), units = UNITS(p.cols);
    const uint data_first = 2u * DATA_FIRST(p.cols), last_group = (p.rows - 1u) / 8u;

    uint quad[ROW_GROUPS]; // word k of the lane's rows of a group: w[quad + 2k]. Groups beyond are not stored
    FOR_GROUPS {
        const uint group = min(gl_WorkGroupID.x * ROW_GROUPS + g, last_group);
        quad[g] = tile.weights / 4u + group * row_words * 2u + (lane & 1u);
    }
    vec4 acc[ALL_SUMS];
    uint x_at[TOKENS];
    [[unroll]] for (uint i = 0u; i < ALL_SUMS; i++)
        acc[i] = vec4(0.0);
    FOR_TOKENS x_at[t] = p.x_offset + x_row(min(t0 + t, used - 1u)) * p.x_stride; // unused rows are not read
    if (p.norm_eps >= 0.0)
        for (uint i = lane; i < SQUARES * min(TOKENS, used - t0); i += gl_WorkGroupSize.x)
            add_squares(i / SQUARES, i % SQUARES, p.x_offset + (t0 + i / SQUARES) * p.x_stride + p.cols);
    for (uint k0 = lane / 2u * RUN; k0 < units; k0 += IN_FLIGHT * slots * RUN) {
        uvec4 raw[IN_FLIGHT * ROW_GROUPS * RUN][RAW];
        FOR_LOADS FOR_GROUPS FOR_RUN
            load_unit(quad[g] + data_first, min(k0 + u * slots * RUN + r, units - 1u),
                      raw[(u * ROW_GROUPS + g) * RUN + r]);
#ifdef SCALED
        uvec4 s[IN_FLIGHT * ROW_GROUPS][SCALES_LOADED];
        FOR_LOADS FOR_GROUPS load_scales(quad[g], min(k0 + u * slots, units - 1u), s[u * ROW_GROUPS + g]);
#endif
        FOR_LOADS {
            const uint k = k0 + u * slots * RUN;
            if (k < units) {
                vec4 v[ROW_GROUPS * STEP];
                FOR_GROUPS FOR_RUN {
                    vec4 of_unit[WEIGHTS];
                    decode_in_place(raw[(u * ROW_GROUPS + g) * RUN + r], k + r, of_unit);
                    [[unroll]] for (uint i = 0u; i < WEIGHTS; i++)
                        v[g * STEP + r * WEIGHTS + i] = of_unit[i];
                }
#ifdef SCALED
                vec4 d[ROW_GROUPS], m[ROW_GROUPS];
                FOR_GROUPS {
                    open_scales(s[u * ROW_GROUPS + g], k, d[g], m[g]);
                    small_scales(s[u * ROW_GROUPS + g], k, d[g], m[g]);
                }
#endif
                FOR_TOKENS {
                    float xs[STEP];
                    const float all = load_columns(x_at[t], k, xs);
                    FOR_GROUPS {
#ifdef SCALED
                        vec4 sum = vec4(0.0);
                        [[unroll]] for (uint i = 0u; i < WEIGHTS; i++)
                            sum += v[g * STEP + i] * xs[i];
                        acc[t * ROW_GROUPS + g] += d[g] * sum;
    #ifdef SUMS
                        acc[t * ROW_GROUPS + g] += LEVEL(d[g], m[g]) * all;
    #endif
#else
                        [[unroll]] for (uint i = 0u; i < WEIGHTS * RUN; i++)
                            acc[t * ROW_GROUPS + g] += v[g * STEP + i] * xs[i];
#endif
                    }
                }
            }
        }
    }

    // What is left of each sum: PARTS, of the two halves in turn, then the first two lanes'.
#ifdef REDUCE_SUBGROUP
    [[unroll]] for (uint distance = 2u; distance < SUBGROUP; distance *= 2u)
        [[unroll]] for (uint i = 0u; i < ALL_SUMS; i++)
            acc[i] += subgroupShuffleXor(acc[i], distance);
    if (gl_SubgroupInvocationID < 2u)
        [[unroll]] for (uint i = 0u; i < ALL_SUMS; i++)
            partial[i * PARTS + 2u * gl_SubgroupID + (lane & 1u)] = acc[i];
    barrier();
#else
    [[unroll]] for (uint i = 0u; i < ALL_SUMS; i++)
        partial[i * PARTS + lane] = acc[i];
    barrier();
    for (uint s = slots; s >= 2u; s /= 2u) {
        if (lane < s)
            [[dont_unroll]] for (uint i = lane; i < PARTS * ALL_SUMS; i += PARTS)
                partial[i] += partial[i + s];
        barrier();
    }
#endif
    for (uint i = lane; i < 2u * ROW_GROUPS * min(TOKENS, used - t0); i += gl_WorkGroupSize.x) {
        const uint h = i & 1u, n = i / 2u, row = (gl_WorkGroupID.x * ROW_GROUPS + n % ROW_GROUPS) * 8u + h * 4u;
        vec4 sum = partial[n * PARTS + h];
#ifdef REDUCE_SUBGROUP
        for (uint part = 2u; part < PARTS; part += 2u)
            sum += partial[n * PARTS + part + h];
#endif
        sum *= norm_factor(n / ROW_GROUPS);
        store(row, t0 + n / ROW_GROUPS, sum + load_bias(row));
    }
}

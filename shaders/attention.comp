// Exact attention over the paged KV cache: out = softmax(scale q Kᵀ) V, each query over positions
// 0 … its own, or over the last `window` of those; with CAPPED, softmax(cap tanh(scale q Kᵀ / cap)).
// Blocks outside every window of an item are not visited. Online softmax (Milakov & Gimelshein 2018; the tiling is that of Dao et al. 2022,
// "FlashAttention"), grouped-query heads, scores and sums in f32.
//
// A query row is one head of one token. GROUP heads share a KV head, so the rows of an item are
// (token, head in group), tokens outermost. An item is a query tile: tokens of one sequence
// (state TILE_*), or, with PER_TOKEN, a single token. Eight lanes, an *octet*, hold ROWS rows in
// registers and walk over blocks of 32 tokens:
//   1. scores: a lane computes ROWS x 4 tokens (K is stored with tokens innermost for this);
//   2. the octet finds each row's new maximum, rescales, and exponentiates;
//   3. a lane adds p V to ROWS x (head dim / 8) sums, 4 tokens at a time.
// A workgroup is ROW_OCTETS x KV_OCTETS octets: on different rows, and on different stretches of the
// sequence, whose results it joins. Grid: x items (it strides on if there are more), y KV heads, z (group of
// rows, split). With PARTIAL (flash-decoding, Dao et al. 2023) each split writes (sum of p V, max, sum of p)
// and attention_combine.comp joins them.
//
// Occupancy: one token of a model with 8 KV heads of 128 at depth 4096 is 8 heads x 16 splits x 8 octets of one
// block each: 256 subgroups of 32 lanes on a card of 132 processors, with four to eight 16-byte loads in flight
// in each lane. That is latency, not bandwidth (8 MiB of K and V a layer), but a longer context only makes
// stretches longer once there are 64 splits. Prefill: a workgroup of 64 lanes holds 8 x ROWS rows, and all of its
// octets read the same K and V at the same time: once from memory, then from the cache near the core.
//
// What passes between the lanes of an octet (queries, maxima, probabilities) goes through
//   EXCHANGE_SUBGROUP  shuffles: for subgroups that hold octets whole. No barrier, no shared memory:
//                      on lavapipe a barrier makes LLVM split the shader into coroutines, which took
//                      3 to 5 times as long to compile and ran 2.5 times slower;
//   EXCHANGE_SHARED    shared memory, two barriers a block: for any device.
//
// Per octet and block of 32 tokens, f16, head dim 64: 8 KiB of K and V read once for ROWS rows, 2 x
// ROWS x 64 x 32 multiply-adds, so ROWS / 2 of them a byte. K and V are read in runs of 128 bytes.
// Shared memory: queries are read as broadcasts, and rows are an odd number of 16-byte units apart,
// so octets of different rows use different banks.
//
// NEW_APPENDED, for decode steps, where every sequence of the batch has one new token: that token's queries, key and
// value come as the product made them, and are made ready here (include/append.glsl) instead of by append_kv.comp
// before. Every workgroup does so for its own query heads. Those that have the newest block (of one split, in every
// group of rows) do it for the KV head's key and value too and begin their sums with them, in the words that the cache
// gets, so that no invocation waits for what another writes; one of them writes. Key and value are 2 to 4 vectors of
// 2 x group + 2: what is done more than once is little beside a dispatch and its barrier, and nothing grows with the
// context. Loads of four neighbouring keys may touch the word that is being written: its bits are not looked at.
//
// Positions a query does not see may hold anything, NaN too (a freed block, a slot not written yet, a
// later token of the same chunk, one that has left the window): their scores are replaced, not masked by addition, and their values
// are never multiplied by a zero probability (0 x NaN is NaN) but left out.
#version 450
// variants: KV=f32,f16,q8_0,q4_0 EXCHANGE=shared,subgroup NEW=cached,appended
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#ifdef EXCHANGE_SUBGROUP
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#endif
layout(local_size_x_id = 0) in; // spec: local_size = 8 * ROW_OCTETS * KV_OCTETS
layout(constant_id = 1) const uint HEAD_DIM = 64u;
layout(constant_id = 2) const uint GROUP = 1u; // query heads of a KV head
layout(constant_id = 3) const uint ROWS = 1u;
layout(constant_id = 4) const uint ROW_OCTETS = 1u;
layout(constant_id = 5) const uint KV_OCTETS = 1u;
layout(constant_id = 6) const uint PER_TOKEN = 0u; // 0 or 1
layout(constant_id = 7) const uint PARTIAL = 0u;   // 0 or 1
layout(constant_id = 8) const uint CAPPED = 0u;    // 0 or 1
layout(constant_id = 9) const uint NORM = 0u;      // 0 or 1
layout(set = 0, binding = 0) readonly buffer Queries { float qkv[]; }; // [T][q_stride]: queries, then keys and values
#ifdef NEW_APPENDED
layout(set = 0, binding = 1) buffer Cache { uint cache[]; }; // the layer's K and V regions
#else
layout(set = 0, binding = 1) readonly buffer Cache { uint cache[]; };
#endif
layout(set = 0, binding = 2) readonly buffer Cache4 { uvec4 cache4[]; }; // the same memory
layout(set = 0, binding = 3) readonly buffer State { uint state[]; };
layout(set = 0, binding = 4) writeonly buffer Target { float target[]; }; // out or partials
#ifdef NEW_APPENDED
layout(set = 0, binding = 5) readonly buffer Weight { float weight[]; }; // [HEAD_DIM], twice
layout(set = 0, binding = 6) readonly buffer Table { float table[]; };   // [rows][pairs][cos, sin]
#endif
layout(push_constant) uniform Push {
    uint q_offset;
    uint q_stride;
    uint target_offset;
    uint out_stride; // unused with PARTIAL
    uint k_offset;   // multiples of 4
    uint v_offset;
    uint kv_heads;
    uint splits;     // workgroups that share the blocks of a sequence
    uint row_groups; // workgroups that share the rows of an item
    uint window;     // positions a query sees, its own included; 0xffffffff: all
    float scale;
    float softcap;   // unused without CAPPED
#ifdef NEW_APPENDED
    uint pairs;      // rotary_dim / 2
    uint table_offset;
    uint by_token;
    uint q_weight_offset;
    uint k_weight_offset;
    float eps;
#endif
} p;
#include "state.glsl"
#include "kv.glsl"

const float LOWEST = -3.4028234e38; // finite, so that LOWEST - LOWEST is no NaN
const uint SUMS = CHUNKS * LANE_DIMS; // sums of one row in a lane
const uint ALL_SUMS = ROWS * SUMS;
const uint SCORES = ROWS * 4u;        // scores of a block in a lane
const uint HELD = ROWS * EIGHTS;

uint lane;  // 0 … 7, in the octet
uint octet; // in the workgroup

// Tokens whose values are added at once. CPU devices have no vector load: a load is some 15 instructions
// a lane, and a loop with more than two leaves the instruction caches.
#ifdef EXCHANGE_SUBGROUP
const uint RUN = 2u;
#define UNROLL_QUADS [[dont_unroll]]
uint octet_start; // subgroup invocation of the octet's lane 0
#else
const uint RUN = 4u;
#define UNROLL_QUADS [[unroll]]
const uint OCTETS = ROW_OCTETS * KV_OCTETS;
const uint QUADS = 2u * EIGHTS;
const uint QUERY_QUADS = QUADS + 1u; // vec4 from one row to the next: odd
const uint P_QUADS = BLOCK_TOKENS / 4u + 1u;
shared vec4 shared_q[ROW_OCTETS * ROWS * QUERY_QUADS];
shared vec4 shared_p[OCTETS * ROWS * P_QUADS]; // probabilities of a block
shared vec4 shared_lanes[OCTETS * ROWS * 2u];  // one number of each lane
const uint JOINED = KV_OCTETS > 1u ? OCTETS : 1u;
shared vec2 shared_tops[JOINED];               // (max, sum of p) of one row
shared float shared_sums[JOINED * SUMS * 8u];  // sums of one row
#endif

#ifdef NEW_APPENDED
const uint LANES = gl_WorkGroupSize.x;
const uint VECTORS = ROWS + 1u;
const uint STAGED = HEAD_DIM;
#ifdef EXCHANGE_SUBGROUP
#define WAIT() subgroupBarrier() // the workgroup is one octet
#else
#define WAIT() barrier()
#endif
#include "append.glsl"
const uint APPENDED = 1u; // tokens that are not read from the cache
shared float ready[ROWS * HEAD_DIM];        // the workgroup's queries
shared uint new_words[2u * VECTOR_WORDS]; // the new key and value
bool writer;

void keep_query(uint query, uint i, float v) {
    ready[query * HEAD_DIM + i] = v;
}

void put(uint vector, uint e, uint word, uint at) {
    new_words[vector * VECTOR_WORDS + e] = word;
    if (writer) cache[at] = word;
}

// Dim i of the new key (0) or value (1), as it will be read from the cache.
float new_dim(uint vector, uint i) {
    const uint first = vector * VECTOR_WORDS, word = new_words[first + i / WORD_DIMS];
#if defined(KV_F16)
    const vec2 pair = unpackHalf2x16(word);
    return (i & 1u) == 0u ? pair.x : pair.y;
#elif defined(QUANTIZED)
    const uint block = i / BLOCK_DIMS;
    return quantized(word >> (i % WORD_DIMS / 4u * 16u))[i % 4u]
         * scale_of(new_words[first + DATA_WORDS + block / 2u], block & 1u);
#else
    return uintBitsToFloat(word);
#endif
}

float query_dim(uint at) {
    return ready[at];
}
#else
const uint APPENDED = 0u;

float query_dim(uint at) {
    return qkv[at];
}
#endif

// The rows of an octet: where their queries are, and which positions each one sees.
struct Rows {
    uint query[ROWS];
    int from[ROWS]; // the first position it sees
    int seen[ROWS]; // and the one after the last
};

// Where the query of a row is: in qkv, or in `ready`, which has those from first_row on.
uint query_at(uint start, uint kv_head, uint row, uint first_row) {
#ifdef NEW_APPENDED
    return (row - first_row) * HEAD_DIM;
#else
    return p.q_offset + (start + row / GROUP) * p.q_stride + (kv_head * GROUP + row % GROUP) * HEAD_DIM;
#endif
}

// First position that a query sees, `seen` being the one after its own.
uint window_start(uint seen) {
    return seen - min(seen, p.window);
}

// What softmax takes of a dot product. tanh(x) = 1 - 2 / (exp(2 x) + 1) is right for every x, while a
// device's tanh may overflow; near 0 its error is that of rounding 1, small against scores.
float score(float dot_product) {
    const float s = dot_product * p.scale;
    return CAPPED != 0u ? p.softcap * (1.0 - 2.0 / (exp(s * (2.0 / p.softcap)) + 1.0)) : s;
}

#ifdef EXCHANGE_SUBGROUP
float from_lane(float x, uint i) { return subgroupShuffle(x, octet_start + i); }

float octet_max(float x) {
    x = max(x, subgroupShuffle(x, octet_start + (lane ^ 1u)));
    x = max(x, subgroupShuffle(x, octet_start + (lane ^ 2u)));
    return max(x, subgroupShuffle(x, octet_start + (lane ^ 4u)));
}

float octet_sum(float x) {
    x += subgroupShuffle(x, octet_start + (lane ^ 1u));
    x += subgroupShuffle(x, octet_start + (lane ^ 2u));
    return x + subgroupShuffle(x, octet_start + (lane ^ 4u));
}

void octet_max(inout float x[ROWS]) {
    [[unroll]] for (uint r = 0u; r < ROWS; ++r)
        x[r] = octet_max(x[r]);
}

void octet_sum(inout float x[ROWS]) {
    [[unroll]] for (uint r = 0u; r < ROWS; ++r)
        x[r] = octet_sum(x[r]);
}
#else
// Every lane's x[r], as two vec4, for all rows at once. Whoever read the last ones has passed a barrier
// since: the one before add_values, or the one in share_queries.
void share_lanes(float x[ROWS]) {
    [[unroll]] for (uint r = 0u; r < ROWS; ++r)
        shared_lanes[(octet * ROWS + r) * 2u + lane / 4u][lane % 4u] = x[r];
    barrier();
}

void octet_max(inout float x[ROWS]) {
    share_lanes(x);
    [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
        const vec4 m = max(shared_lanes[(octet * ROWS + r) * 2u], shared_lanes[(octet * ROWS + r) * 2u + 1u]);
        x[r] = max(max(m.x, m.y), max(m.z, m.w));
    }
}

void octet_sum(inout float x[ROWS]) {
    share_lanes(x);
    [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
        const vec4 m = shared_lanes[(octet * ROWS + r) * 2u] + shared_lanes[(octet * ROWS + r) * 2u + 1u];
        x[r] = (m.x + m.y) + (m.z + m.w);
    }
}

// Copies the workgroup's queries to shared memory, zeros for dims and rows that do not exist. Whoever
// read the last item's has passed the barriers of its last block since.
void share_queries(uint first_row, uint end_row, uint start, uint kv_head) {
    for (uint i = gl_LocalInvocationID.x; i < ROW_OCTETS * ROWS * QUADS; i += gl_WorkGroupSize.x) {
        const uint row = first_row + i / QUADS, dim = i % QUADS * 4u;
        vec4 x = vec4(0.0);
        if (row < end_row) {
            const uint at = query_at(start, kv_head, row, first_row) + dim;
            [[unroll]] for (uint j = 0u; j < 4u; ++j)
                if (HEAD_DIM % 8u == 0u || dim + j < HEAD_DIM) x[j] = query_dim(at + j);
        }
        shared_q[i / QUADS * QUERY_QUADS + i % QUADS] = x;
    }
    barrier();
}
#endif

// scores[row][i] = q[row] · k[4 lane + i] of the block whose keys for this lane begin at cache4[at]
void score_block(float held[HELD], uint at, out float scores[SCORES]) {
    [[unroll]] for (uint i = 0u; i < SCORES; ++i)
        scores[i] = 0.0;
#ifdef QUANTIZED
    for (uint first = 0u; first < EIGHTS; first += SCALE_EIGHTS) { // dims that share a scale
        float part[SCORES];
        [[unroll]] for (uint i = 0u; i < SCORES; ++i)
            part[i] = 0.0;
#else
    {
        const uint first = 0u;
#define part scores
#endif
        for (uint eight = first; eight < first + SCALE_EIGHTS; ++eight) {
#ifdef EXCHANGE_SUBGROUP
            float dims[ROWS]; // a lane has one dim of the eight for all lanes
            [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
                dims[r] = held[r * EIGHTS];
                [[unroll]] for (uint i = 1u; i < EIGHTS; ++i)
                    dims[r] = eight == i ? held[r * EIGHTS + i] : dims[r];
            }
#endif
            const uvec4 words = load_eight(at, eight);
            UNROLL_QUADS for (uint half_eight = 0u; half_eight < 2u; ++half_eight) {
                const uint quad = eight * 2u + half_eight;
                vec4 keys[4];
                load_keys(at, quad, words, keys);
                [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
#ifdef EXCHANGE_SUBGROUP
                    const uint source = half_eight * 4u;
                    const vec4 x = vec4(from_lane(dims[r], source), from_lane(dims[r], source + 1u),
                                        from_lane(dims[r], source + 2u), from_lane(dims[r], source + 3u));
#else
                    const vec4 x = shared_q[((octet / KV_OCTETS) * ROWS + r) * QUERY_QUADS + quad];
#endif
                    [[unroll]] for (uint i = 0u; i < 4u; ++i)
                        part[r * 4u + i] += x.x * keys[i].x + x.y * keys[i].y + x.z * keys[i].z + x.w * keys[i].w;
                }
            }
        }
#ifdef QUANTIZED
        const uvec4 scales = load_scales(at, first / (2u * SCALE_EIGHTS));
        [[unroll]] for (uint i = 0u; i < SCORES; ++i)
            scores[i] += scale_of(scales[i % 4u], first / SCALE_EIGHTS & 1u) * part[i];
#endif
    }
}

// Probabilities (up to the common factor that the sums carry) of RUN tokens of the block from its token j on,
// a multiple of RUN.
void probabilities(float mine[SCORES], uint row, uint j, out float run[RUN]) {
#ifdef EXCHANGE_SUBGROUP
    const bool low = (j & 2u) == 0u;
    [[unroll]] for (uint i = 0u; i < RUN; ++i)
        run[i] = from_lane(low ? mine[row * 4u + i] : mine[row * 4u + 2u + i], j / 4u);
#else
    const vec4 quad = shared_p[(octet * ROWS + row) * P_QUADS + j / 4u];
    [[unroll]] for (uint i = 0u; i < RUN; ++i)
        run[i] = quad[i];
#endif
}

// The same of one token.
float probability(float mine[SCORES], uint row, uint j) {
#ifdef EXCHANGE_SUBGROUP
    const float even = (j & 2u) == 0u ? mine[row * 4u] : mine[row * 4u + 2u];
    const float odd = (j & 2u) == 0u ? mine[row * 4u + 1u] : mine[row * 4u + 3u];
    return from_lane((j & 1u) == 0u ? even : odd, j / 4u);
#else
    return shared_p[(octet * ROWS + row) * P_QUADS + j / 4u][j % 4u];
#endif
}

#ifdef QUANTIZED
const uint VALUE_SCALES = SCALE_WORDS;

// The word with the scale of the lane's dims of a chunk, of the value of token j of the block. `mine`: the words
// of the lane's own 4 tokens; `at`: word of the block's values.
uint value_scale_word(uvec4 mine[VALUE_SCALES], uint at, uint pair, uint j) {
#ifdef EXCHANGE_SUBGROUP
    uint word = 0u;
    [[unroll]] for (uint s = 0u; s < SCALE_WORDS; ++s) {
        const uvec2 two = (j & 2u) == 0u ? mine[s].xy : mine[s].zw;
        const uint of_token = subgroupShuffle((j & 1u) == 0u ? two.x : two.y, octet_start + j / 4u);
        word = s == pair ? of_token : word;
    }
    return word;
#else
    return cache[at + (DATA_WORDS + pair) * BLOCK_TOKENS + j];
#endif
}
#else
const uint VALUE_SCALES = 1u; // and nothing in it
#endif

// The lane's dims of a chunk of the value of token j of the block; `mine` and `at` as above.
void block_values(uvec4 mine[VALUE_SCALES], uint at, uint chunk, uint j, out float v[MAX_LANE_DIMS]) {
    load_values(at + j * DATA_WORDS, chunk, lane, v);
#ifdef QUANTIZED
    const uint scale_block = min(lane_dim(chunk, lane), HEAD_DIM - 1u) / 32u;
    const float scale = scale_of(value_scale_word(mine, at, scale_block / 2u, j), scale_block & 1u);
    [[unroll]] for (uint d = 0u; d < LANE_DIMS; ++d)
        v[d] *= scale;
#endif
}

// sums[row] += Σ p[row][j] v[j]. `first`: position of the block's token 0; rows see positions from
// `begin` on and none from `end` on, and all of them see `all_from` … `all_seen` - 1.
void add_values(Rows rows, float mine[SCORES], uvec4 scales[VALUE_SCALES], uint at, int first, int begin, int end,
                int all_from, int all_seen, inout float sums[ALL_SUMS]) {
    const int stop = min(end - first, int(BLOCK_TOKENS));
    const int runs_from = (max(all_from - first, 0) + int(RUN) - 1) & -int(RUN);
    const int runs_to = min(all_seen - first, stop) & -int(RUN);
    int j = max(begin - first, 0);
    while (j < stop) {
        // the window's and the causal edge: one token at a time, left out of the rows that do not see it
        for (; j < stop && (j < runs_from || j >= runs_to); ++j) {
            [[unroll]] for (uint c = 0u; c < CHUNKS; ++c) {
                float v[MAX_LANE_DIMS];
                block_values(scales, at, c, uint(j), v);
                [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
                    const float w = probability(mine, r, uint(j));
                    const bool sees = first + j >= rows.from[r] && first + j < rows.seen[r];
                    [[unroll]] for (uint d = 0u; d < LANE_DIMS; ++d)
                        sums[(r * CHUNKS + c) * LANE_DIMS + d] += sees ? w * v[d] : 0.0;
                }
            }
        }
        [[dont_unroll]] for (; j < runs_to; j += int(RUN)) {
            [[unroll]] for (uint c = 0u; c < CHUNKS; ++c) {
                float v[RUN][MAX_LANE_DIMS];
                [[unroll]] for (uint i = 0u; i < RUN; ++i)
                    block_values(scales, at, c, uint(j) + i, v[i]);
                [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
                    float w[RUN];
                    probabilities(mine, r, uint(j), w);
                    [[unroll]] for (uint d = 0u; d < LANE_DIMS; ++d) {
                        float x = w[0] * v[0][d];
                        [[unroll]] for (uint i = 1u; i < RUN; ++i)
                            x += w[i] * v[i][d];
                        sums[(r * CHUNKS + c) * LANE_DIMS + d] += x;
                    }
                }
            }
        }
    }
}

// Whether this octet, of those on the same rows, writes the lane's sum i of a row.
bool writes(uint i) {
    return i % KV_OCTETS == octet % KV_OCTETS;
}

#ifdef EXCHANGE_SHARED
// Joins what the octets on the same row found in their stretches: its maximum, its sum of p, and of its sums
// (the first SUMS) those that are this octet's to write. An octet without blocks has found LOWEST, 0 and zeros.
void join_octets(inout float highest, inout float total, inout float sums[ALL_SUMS]) {
    const uint first = octet / KV_OCTETS * KV_OCTETS;
    if (lane == 0u) shared_tops[octet] = vec2(highest, total);
    [[unroll]] for (uint i = 0u; i < SUMS; ++i)
        shared_sums[(octet * SUMS + i) * 8u + lane] = sums[i];
    barrier();
    highest = LOWEST;
    for (uint o = first; o < first + KV_OCTETS; ++o)
        highest = max(highest, shared_tops[o].x);
    total = 0.0;
    [[unroll]] for (uint i = 0u; i < SUMS; ++i)
        if (writes(i)) sums[i] = 0.0;
    for (uint o = first; o < first + KV_OCTETS; ++o) {
        const float weight = exp(shared_tops[o].x - highest);
        total += weight * shared_tops[o].y;
        [[unroll]] for (uint i = 0u; i < SUMS; ++i)
            if (writes(i)) sums[i] += weight * shared_sums[(o * SUMS + i) * 8u + lane];
    }
    barrier(); // the next row's come into the same place
}
#endif

#ifdef NEW_APPENDED
// Queries in `ready` and, if the newest block is here, the new key and value in new_words and, once, in the cache.
void append(uint row, uint kv_head, uint first_row, uint end_row, bool newest) {
    const uint heads = p.kv_heads * GROUP;
    batch_row = row;
    queries_at = p.q_offset + row * p.q_stride + (kv_head * GROUP + first_row) * HEAD_DIM;
    keys_at = p.q_offset + row * p.q_stride + (heads + kv_head) * HEAD_DIM;
    values_at = keys_at + p.kv_heads * HEAD_DIM;
    first_kv_head = kv_head;
    queries = end_row - first_row;
    vectors = queries + (newest ? 1u : 0u);
    writer = first_row == 0u;
    if (NORM != 0u) find_factors();
    turn(0u);
    if (newest) store();
    WAIT();
}

// What softmax takes of the new key, for each row of the octet, and the sums that it begins.
void begin(Rows rows, inout float highest[ROWS], inout float total[ROWS], inout float sums[ALL_SUMS]) {
    float dots[ROWS];
    [[unroll]] for (uint r = 0u; r < ROWS; ++r)
        dots[r] = 0.0;
    [[dont_unroll]] for (uint dim = lane; dim < HEAD_DIM; dim += 8u) {
        const float key = new_dim(0u, dim);
        [[unroll]] for (uint r = 0u; r < ROWS; ++r)
            dots[r] += query_dim(rows.query[r] + dim) * key;
    }
    octet_sum(dots);
    WAIT(); // before other numbers come into the same place
    if (octet % KV_OCTETS != 0u) return;
    float value[SUMS];
    [[dont_unroll]] for (uint i = 0u; i < SUMS; ++i) { // each dim moves those before it up
        [[unroll]] for (uint j = 1u; j < SUMS; ++j)
            value[j - 1u] = value[j];
        value[SUMS - 1u] = new_dim(1u, min(lane_dim(i / LANE_DIMS, lane) + i % LANE_DIMS, HEAD_DIM - 1u));
    }
    [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
        highest[r] = score(dots[r]);
        total[r] = lane == 0u ? 1.0 : 0.0;
        [[unroll]] for (uint i = 0u; i < SUMS; ++i)
            sums[r * SUMS + i] = value[i];
    }
}
#endif

// All rows of one workgroup of an item: `count` tokens from row `start` of the batch.
void attend(uint start, uint count) {
    const uint kv_head = gl_WorkGroupID.y;
    const uint split = gl_WorkGroupID.z / p.row_groups;
    const uint first_row = gl_WorkGroupID.z % p.row_groups * (ROW_OCTETS * ROWS);
    const uint end_row = min(first_row + ROW_OCTETS * ROWS, count * GROUP);
    if (first_row >= end_row) return;

    // The stretch of blocks. Positions of a tile's tokens need not ascend, so look at all of them.
    uint positions = 0u, visible_from = 0xffffffffu;
    for (uint t = first_row / GROUP; t <= (end_row - 1u) / GROUP; ++t) {
        const uint seen = state[STATE_POSITION + start + t] + 1u;
        positions = max(positions, seen);
        visible_from = min(visible_from, window_start(seen));
    }
    const uint skipped = visible_from / BLOCK_TOKENS; // blocks before every window
    const uint blocks = (positions + BLOCK_TOKENS - 1u) / BLOCK_TOKENS;
    const uint stretches = p.splits * KV_OCTETS;
    const uint stretch = (blocks - skipped + stretches - 1u) / stretches; // blocks of one stretch
    if (skipped + split * KV_OCTETS * stretch >= blocks) return;
    const uint first_block = skipped + (split * KV_OCTETS + octet % KV_OCTETS) * stretch;
    const int end = int(min(positions - APPENDED, (first_block + stretch) * BLOCK_TOKENS));
    const uint table = STATE_BLOCK_TABLE + state[STATE_SEQUENCE + start] * state[STATE_TABLE_STRIDE];

    Rows rows;
    int all_from = 0, all_seen = int(positions - APPENDED); // what every row of the octet sees in the cache
    const uint octet_row = first_row + octet / KV_OCTETS * ROWS;
    [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
        const uint row = min(octet_row + r, end_row - 1u); // a row that does not exist repeats the last
        const uint token = start + row / GROUP;
        rows.query[r] = query_at(start, kv_head, row, first_row);
        const uint seen = state[STATE_POSITION + token] + 1u;
        rows.from[r] = int(window_start(seen));
        rows.seen[r] = int(seen - APPENDED);
        all_from = max(all_from, rows.from[r]);
        all_seen = min(all_seen, rows.seen[r]);
    }
#ifdef NEW_APPENDED
    const bool newest = (blocks - 1u - skipped) / (KV_OCTETS * stretch) == split;
    append(start, kv_head, first_row, end_row, newest);
#endif
#ifdef EXCHANGE_SHARED
    share_queries(first_row, end_row, start, kv_head);
#endif

    float held[HELD];
#ifdef EXCHANGE_SUBGROUP
    [[unroll]] for (uint i = 0u; i < HELD; ++i)
        held[i] = 0.0;
    [[dont_unroll]] for (uint dim = lane; dim < EIGHTS * 8u; dim += 8u) { // each dim moves those before it up
        [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
            [[unroll]] for (uint i = 1u; i < EIGHTS; ++i)
                held[r * EIGHTS + i - 1u] = held[r * EIGHTS + i];
            held[r * EIGHTS + EIGHTS - 1u] =
                HEAD_DIM % 8u == 0u || dim < HEAD_DIM ? query_dim(rows.query[r] + dim) : 0.0;
        }
    }
#endif
    float sums[ALL_SUMS]; // [ROWS][CHUNKS][LANE_DIMS] of p V, times exp(-highest)
    float highest[ROWS];     // maximum of the scores so far
    float total[ROWS];       // sum of p over the lane's own tokens
    [[unroll]] for (uint i = 0u; i < ALL_SUMS; ++i)
        sums[i] = 0.0;
    [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
        highest[r] = LOWEST;
        total[r] = 0.0;
    }
#ifdef NEW_APPENDED
    if (newest) begin(rows, highest, total, sums);
#endif
    for (uint b = 0u; b < stretch; ++b) { // as many for every octet: there are barriers inside
        const uint index = first_block + b;
        const uint words = head_words(state[table + min(index, blocks - 1u)], kv_head, p.kv_heads);
        float scores[SCORES]; // then probabilities, of the lane's 4 tokens
        score_block(held, (p.k_offset + words) / 4u + lane, scores);
        uvec4 value_scales[VALUE_SCALES];
#if defined(QUANTIZED) && defined(EXCHANGE_SUBGROUP)
        [[unroll]] for (uint s = 0u; s < VALUE_SCALES; ++s)
            value_scales[s] = load_scales((p.v_offset + words) / 4u + lane, s);
#endif

        const int first = int(index * BLOCK_TOKENS), mine = first + int(lane) * 4;
        float new_highest[ROWS];
        [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
            new_highest[r] = highest[r];
            [[unroll]] for (uint i = 0u; i < 4u; ++i) {
                const bool sees = mine + int(i) >= rows.from[r] && mine + int(i) < min(rows.seen[r], end);
                scores[r * 4u + i] = sees ? score(scores[r * 4u + i]) : LOWEST;
                new_highest[r] = max(new_highest[r], scores[r * 4u + i]);
            }
        }
        octet_max(new_highest);
        [[unroll]] for (uint r = 0u; r < ROWS; ++r) {
            const float rescale = exp(highest[r] - new_highest[r]);
            highest[r] = new_highest[r];
            total[r] *= rescale;
            [[unroll]] for (uint i = 0u; i < SUMS; ++i)
                sums[r * SUMS + i] *= rescale;
            [[unroll]] for (uint i = 0u; i < 4u; ++i) {
                const bool sees = mine + int(i) >= rows.from[r] && mine + int(i) < min(rows.seen[r], end);
                scores[r * 4u + i] = sees ? exp(scores[r * 4u + i] - highest[r]) : 0.0;
                total[r] += scores[r * 4u + i];
            }
#ifdef EXCHANGE_SHARED
            shared_p[(octet * ROWS + r) * P_QUADS + lane] =
                vec4(scores[r * 4u], scores[r * 4u + 1u], scores[r * 4u + 2u], scores[r * 4u + 3u]);
#endif
        }
#ifdef EXCHANGE_SHARED
        barrier(); // the barrier in the next octet_max comes before the next block's are written
#endif
        add_values(rows, scores, value_scales, p.v_offset + words, first, int(visible_from), end, all_from, all_seen, sums);
    }
    octet_sum(total);

    [[dont_unroll]] for (uint row = octet_row; row < octet_row + ROWS; ++row) { // the first of what is left
#ifdef EXCHANGE_SHARED
        if (KV_OCTETS > 1u) join_octets(highest[0], total[0], sums);
#endif
        const uint token = start + row / GROUP, head = kv_head * GROUP + row % GROUP;
        uint at = p.target_offset + token * p.out_stride + head * HEAD_DIM;
        float factor = 1.0 / total[0];
        if (PARTIAL != 0u) { // [token][head][split][HEAD_DIM + 2]
            at = p.target_offset + ((token * p.kv_heads * GROUP + head) * p.splits + split) * (HEAD_DIM + 2u);
            factor = 1.0;
            if (lane == 0u && row < end_row) {
                target[at + HEAD_DIM] = highest[0];
                target[at + HEAD_DIM + 1u] = total[0];
            }
        }
        [[unroll]] for (uint c = 0u; c < CHUNKS; ++c)
            [[unroll]] for (uint d = 0u; d < LANE_DIMS; ++d)
                if (row < end_row && writes(c * LANE_DIMS + d)
                    && (HEAD_DIM % (8u * LANE_DIMS) == 0u || lane_dim(c, lane) + d < HEAD_DIM))
                    target[at + lane_dim(c, lane) + d] = sums[c * LANE_DIMS + d] * factor;
        [[unroll]] for (uint r = 1u; r < ROWS; ++r) {
            highest[r - 1u] = highest[r];
            total[r - 1u] = total[r];
            [[unroll]] for (uint i = 0u; i < SUMS; ++i)
                sums[(r - 1u) * SUMS + i] = sums[r * SUMS + i];
        }
    }
}

void main() {
    lane = gl_LocalInvocationID.x % 8u;
    octet = gl_LocalInvocationID.x / 8u;
#ifdef EXCHANGE_SUBGROUP
    octet_start = gl_SubgroupInvocationID & ~7u;
#endif
    const uint items = state[PER_TOKEN != 0u ? STATE_N_TOKENS : STATE_N_QUERY_TILES];
    for (uint item = gl_WorkGroupID.x; item < items; item += gl_NumWorkGroups.x) {
        if (PER_TOKEN != 0u) attend(item, 1u);
        else attend(state[STATE_TILE_START + item], state[STATE_TILE_COUNT + item]);
    }
}

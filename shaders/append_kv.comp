// What stands between the product that makes queries, keys and values, and attention: RMSNorm of every query and key
// head by itself (NORM: Qwen3, Gemma 3), rotary position embedding (Su et al. 2021) of both, and the keys and values
// written into their slots of the paged KV cache, as f32, rounded to f16 pairs, or quantized to q8_0 or q4_0
// (xinfer_vk/kernels/kv.py has the layout and the formats). Queries stay where they are; keys go to the cache only.
//
// RoPE is in the rotate-half order of Hugging Face and GPT-NeoX: dims i and i + rotary_dim/2 of a vector are turned
// by position / theta^(2i / rotary_dim), dims from rotary_dim on stay as they are. The angles' cosines and sines come
// from a table that the host makes in float64: f32 sines of large angles would be off by far more than rounding.
// It has a row for each position or, where they depend on the length of the sequence, for each token of the batch
// (by_token). A layer without positions has no pairs, and begins with its keys.
//
// A workgroup takes EACH neighbouring heads of a token, queries before keys: one on GPUs, which want many workgroups,
// as many as its shared memory holds on CPU devices, which so read an angle once for all of them. A lane owns whole
// pairs of dims, so it overwrites only what it alone reads. What the cache takes is first brought together in shared
// memory, because a word of it holds dims that several lanes turned. No word of the cache holds parts of two tokens or is
// written by two invocations, so nothing is read back and nobody races.
//
// Bytes: 8 a dim of a query, 6 a dim of a key or a value in f16, and the angles; 6 flops a pair, 8 more with NORM.
// Lanes read neighbouring words of activations and angles, 64, 128 or 256 bytes at once for subgroups of 16, 32 or 64,
// and so are values written; the words of a key stand 32 apart (see include/kv.glsl), which costs a GPU whole sectors
// for words: 3 MB of traffic for 512 tokens of SmolLM2, and decoding does not notice. Quantizing, an invocation looks
// for the largest of 32 staged dims, and after a barrier makes words of 4 or 8: loops that stay loops, because lavapipe
// compiled them for 9 s when they were unrolled, and now for 0.2.
#version 450
// variants: KV=f32,f16,q8_0,q4_0
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "state.glsl"
layout(local_size_x_id = 0) in; // spec: local_size
layout(constant_id = 1) const uint NORM = 0u;   // 0 or 1
layout(constant_id = 2) const uint EACH = 1u;   // heads of a workgroup
layout(constant_id = 3) const uint STAGED = 1u; // dims of the keys, and of the values, of a workgroup
layout(set = 0, binding = 0) buffer Vectors { float x[]; };              // [T][x_stride]: queries, keys, values
layout(set = 0, binding = 1) readonly buffer Weight { float weight[]; }; // [head_dim], twice
layout(set = 0, binding = 2) readonly buffer Table { float table[]; };   // [rows][pairs][cos, sin]
layout(set = 0, binding = 3) readonly buffer State { uint state[]; };
layout(set = 0, binding = 4) writeonly buffer Cache { uint cache[]; };
layout(push_constant) uniform Push {
    uint x_offset;
    uint x_stride;
    uint heads;
    uint kv_heads;
    uint head_dim;
    uint first; // head to begin with: 0, or `heads` where queries stay as they are
    uint pairs; // rotary_dim / 2
    uint table_offset;
    uint by_token;
    uint q_weight_offset;
    uint k_weight_offset;
    float eps;
    uint cache_k_offset;
    uint cache_v_offset;
    uint vector_words; // of one head's key or value, with its scales
} p;
#if defined(KV_Q8_0) || defined(KV_Q4_0)
#define QUANTIZED
#endif
#ifndef KV_F32
#include "half.glsl"
#endif

const uint LANES = gl_WorkGroupSize.x;
shared float squares[EACH * LANES]; // of each head, as each lane added them up
shared float factors[EACH];         // 1 / sqrt(mean square + eps) of each head
#ifdef QUANTIZED
shared float staged[2u * STAGED]; // [keys, values][heads][head_dim], keys normalized and turned
shared uint scales[2u * STAGED / 32u];
#else
shared float staged[STAGED]; // [heads][head_dim]: keys, normalized and turned
#endif
uint lane, token;
uint row;             // where the token's queries begin
uint first, key, end; // the workgroup's heads are `first` to `end` - 1; from `key` on they are keys

// Dim i of a head.
uint at(uint head, uint i) {
    return row + head * p.head_dim + i;
}

void find_factors() {
    for (uint head = first; head < end; ++head) {
        float sum = 0.0;
        for (uint i = lane; i < p.head_dim; i += LANES)
            sum += x[at(head, i)] * x[at(head, i)];
        squares[(head - first) * LANES + lane] = sum;
    }
    barrier();
    for (uint which = lane; which < end - first; which += LANES) {
        float sum = 0.0;
        for (uint i = 0u; i < LANES; ++i)
            sum += squares[which * LANES + i];
        factors[which] = 1.0 / sqrt(sum / float(p.head_dim) + p.eps);
    }
    barrier();
}

// Dim i of a head, normalized.
float normalized(uint head, uint i) {
    if (NORM == 0u) return x[at(head, i)];
    const uint scale = head < key ? p.q_weight_offset : p.k_weight_offset;
    return weight[scale + i] * (x[at(head, i)] * factors[head - first]);
}

// Puts a dim of a query back, and one of a key where the cache's words are made.
void keep(uint head, uint i, float v) {
    if (head < key)
        x[at(head, i)] = v;
    else
        staged[(head - key) * p.head_dim + i] = v;
}

void turn() {
    const uint angles = p.table_offset + (p.by_token != 0u ? token : state[STATE_POSITION + token]) * p.pairs * 2u;
    for (uint i = lane; i < p.pairs; i += LANES) {
        const float c = table[angles + i * 2u], s = table[angles + i * 2u + 1u];
        for (uint head = first; head < end; ++head) {
            const float a = normalized(head, i), b = normalized(head, i + p.pairs);
            keep(head, i, a * c - b * s);
            keep(head, i + p.pairs, b * c + a * s);
        }
    }
    for (uint head = NORM != 0u ? first : key; head < end; ++head) // dims that are not turned
        for (uint i = 2u * p.pairs + lane; i < p.head_dim; i += LANES)
            keep(head, i, normalized(head, i));
}

// Where a KV head's vectors of the token's block begin, in the layer's keys or values.
uint head_words(uint kv_head) {
    return (state[STATE_SLOT + token] / BLOCK_TOKENS * p.kv_heads + kv_head) * p.vector_words * BLOCK_TOKENS;
}

#ifndef QUANTIZED
void store() {
    barrier();
    const uint place = state[STATE_SLOT + token] % BLOCK_TOKENS;
    for (uint head = key; head < end; ++head) {
        const uint start = head_words(head - p.heads), from = (head - key) * p.head_dim;
        for (uint e = lane; e < p.vector_words; e += LANES) {
#ifdef KV_F16
            const uint k = from + e * 2u, v = at(head + p.kv_heads, e * 2u);
            const uint key_word = half_pair(staged[k], staged[k + 1u]), value_word = half_pair(x[v], x[v + 1u]);
#else
            const uint key_word = floatBitsToUint(staged[from + e]);
            const uint value_word = floatBitsToUint(x[at(head + p.kv_heads, e)]);
#endif
            cache[p.cache_k_offset + start + e * BLOCK_TOKENS + place] = key_word;
            cache[p.cache_v_offset + start + place * p.vector_words + e] = value_word;
        }
    }
}
#else
const uint SCALE_DIMS = 32u; // that share a scale
#ifdef KV_Q8_0
const uint WORD_DIMS = 4u;
#else
const uint WORD_DIMS = 8u;
#endif

// The f16 scale of 32 numbers. An infinity or NaN gives one that is not finite.
uint scale_of(uint from) {
    float extreme = staged[from];
    [[dont_unroll]] for (uint i = 1u; i < SCALE_DIMS; ++i) { // by bits, so that NaN is the largest of all
        const float v = staged[from + i];
        if ((floatBitsToUint(v) & 0x7fffffffu) > (floatBitsToUint(extreme) & 0x7fffffffu)) extreme = v;
    }
#ifdef KV_Q8_0
    return half_bits(abs(extreme) * (1.0 / 127.0));
#else
    return half_bits(extreme * -0.125);
#endif
}

// A word of numbers from `from` on. With a scale that is not finite they are 0, and read as NaN.
uint quantized(uint from, uint scale) {
    const bool usable = (scale & 0x7c00u) != 0x7c00u && (scale & 0x7fffu) != 0u;
    const float inverse = usable ? 1.0 / unpackHalf2x16(scale).x : 0.0;
    uint bits = 0u;
    [[dont_unroll]] for (uint i = 0u; i < WORD_DIMS; ++i) {
        const float v = usable ? roundEven(staged[from + i] * inverse) : 0.0;
#ifdef KV_Q8_0
        bits |= (uint(int(clamp(v, -127.0, 127.0))) & 255u) << (8u * i);
#else
        bits |= uint(clamp(v + 8.0, 0.0, 15.0)) << (4u * i);
#endif
    }
    return bits;
}

void store() {
    const uint count = end - key, dims = count * p.head_dim;
    for (uint i = lane; i < dims; i += LANES)
        staged[dims + i] = x[at(key + p.kv_heads, i)];
    barrier();
    for (uint i = lane; i < 2u * dims / SCALE_DIMS; i += LANES)
        scales[i] = scale_of(i * SCALE_DIMS);
    barrier();
    const uint place = state[STATE_SLOT + token] % BLOCK_TOKENS;
    const uint data_words = p.head_dim / WORD_DIMS, blocks = p.head_dim / SCALE_DIMS;
    for (uint vector = 0u; vector < 2u * count; ++vector) {
        const bool value = vector >= count;
        const uint start = head_words(key - p.heads + vector % count) + (value ? p.cache_v_offset : p.cache_k_offset);
        for (uint e = lane; e < data_words; e += LANES)
            cache[start + (value ? place * data_words + e : e * BLOCK_TOKENS + place)] =
                quantized(vector * p.head_dim + e * WORD_DIMS, scales[vector * blocks + e * WORD_DIMS / SCALE_DIMS]);
        for (uint e = data_words + lane; e < p.vector_words; e += LANES) {
            const uint first_block = (e - data_words) * 2u, which = vector * blocks + first_block;
            cache[start + e * BLOCK_TOKENS + place] =
                scales[which] | (first_block + 1u < blocks ? scales[which + 1u] << 16u : 0u);
        }
    }
}
#endif

void main() {
    lane = gl_LocalInvocationID.x;
    token = gl_WorkGroupID.y;
    if (token >= state[STATE_N_TOKENS]) return;
    row = p.x_offset + token * p.x_stride;
    first = p.first + gl_WorkGroupID.x * EACH;
    end = min(first + EACH, p.heads + p.kv_heads);
    key = min(max(first, p.heads), end);
    if (NORM != 0u) find_factors();
    turn();
    store();
}

// Writes the keys and values of a batch's tokens into their slots of the paged KV cache: as f32, rounded to f16
// pairs, or quantized to q8_0 or q4_0 (xinfer_vk/kernels/kv.py has the layout and the formats).
//
// f32, f16: an invocation writes one word of the key and the same word of the value of one token. q8_0, q4_0: an
// invocation quantizes 64 neighbouring dims of one key or value, two blocks, and writes their words and the word
// that holds both scales. Either way no word holds parts of two tokens or is written by two invocations, so nothing
// is read back and nobody races.
//
// Reads of f32 and f16 are coalesced, and so are the writes of values; the words of a key stand 32 apart (see
// kv.glsl), which costs a GPU whole sectors for words: 3 MB of traffic for 512 tokens of SmolLM2, and decoding does
// not notice. An f16 pair costs 24 bytes. Quantizing reads runs of 256 bytes an invocation, twice, the second time
// from the cache near the core: 64 dims cost some 300 instructions, nothing beside the product that made them.
#version 450
// variants: KV=f32,f16,q8_0,q4_0
#extension GL_GOOGLE_include_directive : require
#include "state.glsl"
layout(local_size_x_id = 0) in; // spec: local_size
layout(set = 0, binding = 0) readonly buffer Keys { float k[]; };     // [T][k_stride]
layout(set = 0, binding = 1) readonly buffer Values { float v[]; };   // [T][v_stride]
layout(set = 0, binding = 2) readonly buffer State { uint state[]; };
layout(set = 0, binding = 3) writeonly buffer Cache { uint cache[]; };
layout(push_constant) uniform Push {
    uint k_offset;
    uint k_stride;
    uint v_offset;
    uint v_stride;
    uint cache_k_offset;
    uint cache_v_offset;
    uint kv_heads;
    uint head_dim;
    uint vector_words; // of one head's key or value, with its scales
} p;
#ifndef KV_F32
#include "half.glsl"
#endif

#if defined(KV_F32) || defined(KV_F16)
void main() {
    const uint word = gl_GlobalInvocationID.x, token = gl_WorkGroupID.y; // word: [kv_heads][vector_words]
    if (token >= state[STATE_N_TOKENS] || word >= p.kv_heads * p.vector_words) return;
    const uint head = word / p.vector_words, e = word % p.vector_words;
    const uint slot = state[STATE_SLOT + token];
    const uint block = slot / BLOCK_TOKENS, place = slot % BLOCK_TOKENS;
    const uint start = (block * p.kv_heads + head) * p.vector_words * BLOCK_TOKENS;
    const uint key = p.cache_k_offset + start + e * BLOCK_TOKENS + place;
    const uint value = p.cache_v_offset + start + place * p.vector_words + e;
#ifdef KV_F16
    const uint from_k = p.k_offset + token * p.k_stride + word * 2u;
    const uint from_v = p.v_offset + token * p.v_stride + word * 2u;
    cache[key] = half_pair(k[from_k], k[from_k + 1u]);
    cache[value] = half_pair(v[from_v], v[from_v + 1u]);
#else
    cache[key] = floatBitsToUint(k[p.k_offset + token * p.k_stride + word]);
    cache[value] = floatBitsToUint(v[p.v_offset + token * p.v_stride + word]);
#endif
}
#else
#ifdef KV_Q8_0
const uint WORD_DIMS = 4u;
#else
const uint WORD_DIMS = 8u;
#endif
const uint SCALE_DIMS = 32u;
bool is_value; // or a key

float number(uint at) {
    return is_value ? v[at] : k[at];
}

// Quantizes the 32 numbers from `from` on into words at `to`, `step` apart, and returns their scale as f16.
uint quantize(uint from, uint to, uint step) {
    float extreme = 0.0;
    for (uint i = 0u; i < SCALE_DIMS; ++i) { // by bits, so that NaN is the largest of all
        const float x = number(from + i);
        if ((floatBitsToUint(x) & 0x7fffffffu) > (floatBitsToUint(extreme) & 0x7fffffffu)) extreme = x;
    }
#ifdef KV_Q8_0
    const uint scale = half_bits(abs(extreme) * (1.0 / 127.0));
#else
    const uint scale = half_bits(extreme * -0.125);
#endif
    // An infinity or NaN gives a scale that is not finite, and numbers that are 0: the block reads as NaN.
    const bool usable = (scale & 0x7c00u) != 0x7c00u && (scale & 0x7fffu) != 0u;
    const float inverse = usable ? 1.0 / unpackHalf2x16(scale).x : 0.0;
    for (uint word = 0u; word < SCALE_DIMS / WORD_DIMS; ++word) {
        uint bits = 0u;
        for (uint i = 0u; i < WORD_DIMS; ++i) {
            const float x = usable ? roundEven(number(from + word * WORD_DIMS + i) * inverse) : 0.0;
#ifdef KV_Q8_0
            bits |= (uint(int(clamp(x, -127.0, 127.0))) & 255u) << (8u * i);
#else
            bits |= uint(clamp(x + 8.0, 0.0, 15.0)) << (4u * i);
#endif
        }
        cache[to + word * step] = bits;
    }
    return scale;
}

void main() {
    const uint unit = gl_GlobalInvocationID.x, token = gl_WorkGroupID.y; // unit: [k, v][kv_heads][pairs]
    const uint pairs = (p.head_dim + 2u * SCALE_DIMS - 1u) / (2u * SCALE_DIMS); // of blocks
    if (token >= state[STATE_N_TOKENS] || unit >= 2u * p.kv_heads * pairs) return;
    is_value = unit >= p.kv_heads * pairs;
    const uint head = unit / pairs % p.kv_heads, pair = unit % pairs;
    const uint slot = state[STATE_SLOT + token];
    const uint block = slot / BLOCK_TOKENS, place = slot % BLOCK_TOKENS;
    const uint data_words = p.head_dim / WORD_DIMS;
    const uint start = (is_value ? p.cache_v_offset : p.cache_k_offset)
                     + (block * p.kv_heads + head) * p.vector_words * BLOCK_TOKENS;
    const uint from = (is_value ? p.v_offset + token * p.v_stride : p.k_offset + token * p.k_stride)
                    + head * p.head_dim;
    const uint step = is_value ? 1u : BLOCK_TOKENS; // words from one of a vector to the next
    const uint vector = start + (is_value ? place * data_words : place);
    uint scales = 0u;
    for (uint i = 0u; i < 2u; ++i) {
        const uint dim = (pair * 2u + i) * SCALE_DIMS;
        if (dim < p.head_dim)
            scales |= quantize(from + dim, vector + dim / WORD_DIMS * step, step) << (16u * i);
    }
    cache[start + (data_words + pair) * BLOCK_TOKENS + place] = scales;
}
#endif

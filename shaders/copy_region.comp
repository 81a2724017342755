// Writes the keys and values of a batch's tokens into their slots of the paged KV cache, as f32 or
// rounded to f16 pairs.
//
// An invocation writes one word of the key and the same word of the value of one token: dims 2 e and
// 2 e + 1 in f16. No word holds parts of two tokens, so nothing is read back and nobody races. Reads
// are coalesced, and so are the writes of values; the words of a key stand 32 apart (see kv.glsl),
// which costs a GPU whole sectors for words: 3 MB of traffic for 512 tokens of SmolLM2, and decoding
// does not notice. An f16 pair costs 24 bytes.
#version 450
// variants: KV=f32,f16
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
    uint vector_words; // of one head's key or value
} p;
#ifdef KV_F16
#include "half.glsl"
#endif

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

// What stands between the product that makes queries, keys and values, and attention, for a batch of any tokens:
// RMSNorm of every query and key head by itself (NORM: Qwen3, Gemma 3), rotary position embedding (Su et al. 2021) of
// both, and the keys and values written into their slots of the paged KV cache, as f32, rounded to f16 pairs, or
// quantized to q8_0 or q4_0 (xinfer_vk/kernels/kv.py has the layout and the formats). Queries stay where they are; keys
// go to the cache only. The work itself is include/append.glsl's. In decode steps attention.comp does it.
//
// A workgroup takes EACH neighbouring heads of a token, queries before keys: one on GPUs, which want many workgroups,
// as many as its shared memory holds on CPU devices, which so read an angle once for all of them. A layer without
// positions begins with its keys. A lane owns whole pairs of dims, so it overwrites only what it alone reads. No word of
// the cache holds parts of two tokens or is written by two invocations, so nothing is read back and nobody races.
//
// Bytes: 8 a dim of a query, 6 a dim of a key or a value in f16, and the angles; 6 flops a pair, 8 more with NORM.
// Lanes read neighbouring words of activations and angles, 64, 128 or 256 bytes at once for subgroups of 16, 32 or 64,
// and so are values written; the words of a key stand 32 apart (see include/kv.glsl), which costs a GPU whole sectors
// for words: 3 MB of traffic for 512 tokens of SmolLM2. Quantizing, an invocation looks
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
layout(set = 0, binding = 0) buffer Vectors { float qkv[]; };            // [T][stride]: queries, keys, values
layout(set = 0, binding = 1) readonly buffer Weight { float weight[]; }; // [head_dim], twice
layout(set = 0, binding = 2) readonly buffer Table { float table[]; };   // [rows][pairs][cos, sin]
layout(set = 0, binding = 3) readonly buffer State { uint state[]; };
layout(set = 0, binding = 4) writeonly buffer Cache { uint cache[]; };
layout(push_constant) uniform Push {
    uint qkv_offset;
    uint qkv_stride;
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
    uint k_offset;
    uint v_offset;
    uint vector_words; // of one head's key or value, with its scales
} p;
const uint LANES = gl_WorkGroupSize.x;
const uint VECTORS = EACH;
#define HEAD_DIM p.head_dim
#define VECTOR_WORDS p.vector_words
#define WAIT() barrier()
#include "kv_words.glsl"
#include "append.glsl"

void keep_query(uint query, uint i, float v) {
    qkv[vector_dim(query, i)] = v;
}

void put(uint vector, uint e, uint word, uint at) {
    cache[at] = word;
}

void main() {
    batch_row = gl_WorkGroupID.y;
    if (batch_row >= state[STATE_N_TOKENS]) return;
    const uint row = p.qkv_offset + batch_row * p.qkv_stride;
    const uint first = p.first + gl_WorkGroupID.x * EACH, end = min(first + EACH, p.heads + p.kv_heads);
    const uint key = min(max(first, p.heads), end);
    queries_at = row + first * p.head_dim;
    keys_at = row + key * p.head_dim;
    values_at = keys_at + p.kv_heads * p.head_dim;
    first_kv_head = key - min(key, p.heads);
    queries = key - first;
    vectors = end - first;
    if (NORM != 0u) find_factors();
    turn(NORM != 0u ? 0u : queries); // queries that are not normalized are in place
    if (vectors != queries) store();
}

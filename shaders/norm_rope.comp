// RMSNorm of every head by itself, then rotary position embedding, in place: what Qwen3 and Gemma 3 do to
// queries and keys. See rmsnorm.comp and rope.comp.
//
// A workgroup takes a head of a token; the first `first` heads (queries) have one weight, the rest (keys)
// another. A lane owns whole pairs of dims, i and i + pairs, and dims from 2 pairs on, which are not rotated;
// so it writes only what it alone has read. 16 bytes and 14 flops a pair.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "state.glsl"
layout(local_size_x_id = 0) in; // spec: local_size, a power of two
layout(set = 0, binding = 0) buffer Vectors { float x[]; };              // [T][x_stride], heads side by side
layout(set = 0, binding = 1) readonly buffer Weight { float weight[]; }; // [head_dim], twice
layout(set = 0, binding = 2) readonly buffer Table { float table[]; };   // [rows][pairs][cos, sin]
layout(set = 0, binding = 3) readonly buffer State { uint state[]; };
layout(push_constant) uniform Push {
    uint x_offset;
    uint x_stride;
    uint head_dim;
    uint pairs;              // rotary_dim / 2
    uint first;
    uint weight_offset;
    uint rest_weight_offset;
    uint table_offset;
    uint by_token;
    float eps;
} p;
#include "reduce.glsl"

void main() {
    const uint head = gl_WorkGroupID.x, token = gl_WorkGroupID.y;
    if (token >= state[STATE_N_TOKENS]) return;
    const uint at = p.x_offset + token * p.x_stride + head * p.head_dim;
    const uint scale = head < p.first ? p.weight_offset : p.rest_weight_offset;
    const uint row = p.by_token != 0u ? token : state[STATE_POSITION + token];
    float squares = 0.0;
    for (uint i = gl_LocalInvocationID.x; i < p.head_dim; i += gl_WorkGroupSize.x)
        squares += x[at + i] * x[at + i];
    const float factor = 1.0 / sqrt(workgroup_sum(squares) / float(p.head_dim) + p.eps);
    for (uint i = gl_LocalInvocationID.x; i < p.pairs; i += gl_WorkGroupSize.x) {
        const uint angle = p.table_offset + (row * p.pairs + i) * 2u;
        const float c = table[angle], s = table[angle + 1u];
        const float a = weight[scale + i] * (x[at + i] * factor);
        const float b = weight[scale + i + p.pairs] * (x[at + i + p.pairs] * factor);
        x[at + i] = a * c - b * s;
        x[at + i + p.pairs] = b * c + a * s;
    }
    for (uint i = 2u * p.pairs + gl_LocalInvocationID.x; i < p.head_dim; i += gl_WorkGroupSize.x)
        x[at + i] = weight[scale + i] * (x[at + i] * factor);
}

// Rotary position embedding (Su et al. 2021), in place, in the rotate-half order of Hugging Face and
// GPT-NeoX: dims i and i + rotary_dim/2 of a vector are turned by position / theta^(2i / rotary_dim).
// Dims from rotary_dim on stay as they are.
//
// The angles' cosines and sines come from a table that the host makes in float64: f32 sines of large
// angles would be off by far more than rounding. It has a row for each position or, where they depend on
// the length of the sequence, for each token of the batch (by_token). An invocation turns dim pair i of `heads_each`
// neighbouring vectors of a token (all of them on CPU devices, which so read the table once; one on
// GPUs, which want more invocations). Neighbours read neighbouring words; 16 bytes and 6 flops a pair.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "state.glsl"
layout(local_size_x_id = 0) in; // spec: local_size
layout(set = 0, binding = 0) buffer Vectors { float x[]; };            // [T][x_stride], heads side by side
layout(set = 0, binding = 1) readonly buffer Table { float table[]; }; // [rows][rotary_dim/2][cos, sin]
layout(set = 0, binding = 2) readonly buffer State { uint state[]; };
layout(push_constant) uniform Push {
    uint x_offset;
    uint x_stride;
    uint heads;
    uint head_dim;
    uint pairs; // rotary_dim / 2
    uint table_offset;
    uint heads_each;
    uint by_token;
} p;

void main() {
    const uint token = gl_WorkGroupID.y;
    const uint pair = gl_GlobalInvocationID.x % p.pairs;
    const uint first = gl_GlobalInvocationID.x / p.pairs * p.heads_each;
    if (token >= state[STATE_N_TOKENS] || first >= p.heads) return;
    const uint row = p.by_token != 0u ? token : state[STATE_POSITION + token];
    const uint angle = p.table_offset + (row * p.pairs + pair) * 2u;
    const float c = table[angle], s = table[angle + 1u];
    const uint end = min(first + p.heads_each, p.heads);
    for (uint head = first; head < end; ++head) {
        const uint at = p.x_offset + token * p.x_stride + head * p.head_dim + pair;
        const float a = x[at], b = x[at + p.pairs];
        x[at] = a * c - b * s;
        x[at + p.pairs] = b * c + a * s;
    }
}

// Joins what attention.comp found in the splits of a long sequence (flash-decoding):
//   m = max of the splits' maxima, out = Σ exp(m_s - m) sums_s / Σ exp(m_s - m) total_s.
//
// One invocation a dim of a head of a token. Neighbours read and write neighbouring words; the two
// numbers of each split are the same for a whole workgroup. Reads splits x (head_dim + 2) words a
// head. The splits in use follow from the token's position and window, as in attention.comp; the
// others are never read.
//
// Why the output projection does not do this while it reads x: each of its workgroups, one for 8 or 16 rows, would
// read the sums of all splits again. For 3584 x 3584 and 16 splits these are 103 MB from the cache beside 7 MB of
// weights in Q4_0; up to some 4 splits that is less than a dispatch takes on a large GPU, but then for every x of
// eight weights there are as many loads and multiply-adds. Tried with matvec on lavapipe (CPU time, Q4_0,
// 2048 x 2048, for 2, 4 and 8 splits): 1.5, 1.6 and 2.7 times the product for one token, 1.4, 2.4 and 3.3 for eight.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "state.glsl"
layout(local_size_x_id = 0) in; // spec: local_size
layout(set = 0, binding = 0) readonly buffer Partials { float partials[]; }; // [T][heads][splits][head_dim + 2]
layout(set = 0, binding = 1) readonly buffer State { uint state[]; };
layout(set = 0, binding = 2) writeonly buffer Target { float target[]; }; // [T][out_stride]
layout(push_constant) uniform Push {
    uint partials_offset;
    uint target_offset;
    uint out_stride;
    uint head_dim;
    uint heads;
    uint splits;
    uint window;
    uint octets; // stretches of a split
} p;

void main() {
    const uint column = gl_GlobalInvocationID.x, token = gl_WorkGroupID.y;
    if (token >= state[STATE_N_TOKENS] || column >= p.heads * p.head_dim) return;
    const uint head = column / p.head_dim, dim = column % p.head_dim;
    const uint position = state[STATE_POSITION + token];
    const uint window_start = position + 1u - min(position + 1u, p.window);
    const uint blocks = position / BLOCK_TOKENS - window_start / BLOCK_TOKENS + 1u;
    const uint stretches = p.splits * p.octets;
    const uint stretch = (blocks + stretches - 1u) / stretches * p.octets; // blocks of a split
    const uint used = (blocks + stretch - 1u) / stretch;
    const uint width = p.head_dim + 2u;
    const uint at = p.partials_offset + (token * p.heads + head) * p.splits * width;
    float highest = partials[at + p.head_dim];
    for (uint s = 1u; s < used; ++s)
        highest = max(highest, partials[at + s * width + p.head_dim]);
    float sum = 0.0, total = 0.0;
    for (uint s = 0u; s < used; ++s) {
        const float weight = exp(partials[at + s * width + p.head_dim] - highest);
        sum += weight * partials[at + s * width + dim];
        total += weight * partials[at + s * width + p.head_dim + 1u];
    }
    target[p.target_offset + token * p.out_stride + column] = sum / total;
}

// RMSNorm (Zhang & Sennrich 2019): y = x / sqrt(mean(x²) + eps) * weight, a workgroup a row.
//
// Two passes over the row, the second from cache; a lane sums every local_size-th element, so
// neighbouring lanes read neighbouring words, and the partial sums of many lanes make the sum of
// squares at least as exact as a sequential f32 one. 12 bytes and 4 flops an element: bound by memory.
// With GATHER, row i of y is made of row output_row[i] of x: the rows that want logits. With ADD, the
// result is added to y; with THEN, moreover, the sum is normalized by another weight into z: the norm after
// a block, the residual connection and the norm before the next block in one pass. x and z may be the same
// place.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "state.glsl"
layout(local_size_x_id = 0) in; // spec: local_size, a power of two
layout(constant_id = 1) const uint GATHER = 0u; // 0 or 1
layout(constant_id = 2) const uint ADD = 0u;    // 0 or 1
layout(constant_id = 3) const uint THEN = 0u;   // 0 or 1
layout(set = 0, binding = 0) readonly buffer Input { float x[]; };       // [rows][x_stride]
layout(set = 0, binding = 1) readonly buffer Weight { float weight[]; }; // [dim], twice
layout(set = 0, binding = 2) readonly buffer State { uint state[]; };
layout(set = 0, binding = 3) buffer Output { float y[]; };               // [rows][y_stride], and z
layout(push_constant) uniform Push {
    uint x_offset;
    uint x_stride;
    uint weight_offset;
    uint y_offset;
    uint y_stride;
    uint dim;
    float eps;
    uint z_offset; // THEN: in the buffer of y
    uint z_stride;
    uint z_weight_offset;
    float z_eps;
} p;
#include "reduce.glsl"

void main() {
    const uint row = gl_WorkGroupID.x;
    if (row >= state[GATHER != 0u ? STATE_N_OUTPUTS : STATE_N_TOKENS]) return;
    const uint source = p.x_offset + (GATHER != 0u ? state[STATE_OUTPUT_ROW + row] : row) * p.x_stride;
    const uint target = p.y_offset + row * p.y_stride;
    float squares = 0.0;
    for (uint i = gl_LocalInvocationID.x; i < p.dim; i += gl_WorkGroupSize.x)
        squares += x[source + i] * x[source + i];
    const float factor = 1.0 / sqrt(workgroup_sum(squares) / float(p.dim) + p.eps);
    squares = 0.0;
    for (uint i = gl_LocalInvocationID.x; i < p.dim; i += gl_WorkGroupSize.x) {
        float value = weight[p.weight_offset + i] * (x[source + i] * factor);
        if (ADD != 0u) value += y[target + i];
        y[target + i] = value;
        squares += value * value;
    }
    if (THEN != 0u) {
        barrier(); // everyone has read the first sum
        const float z_factor = 1.0 / sqrt(workgroup_sum(squares) / float(p.dim) + p.z_eps);
        for (uint i = gl_LocalInvocationID.x; i < p.dim; i += gl_WorkGroupSize.x)
            y[p.z_offset + row * p.z_stride + i] = weight[p.z_weight_offset + i] * (y[target + i] * z_factor);
    }
}

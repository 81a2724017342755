// RMSNorm (Zhang & Sennrich 2019): y = x / sqrt(mean(x²) + eps) * weight, a workgroup a row.
//
// Two passes over the row, the second from cache; a lane takes every local_size-th run of four elements, so
// neighbouring lanes read neighbouring 16 bytes (single elements where a row is not made of such runs: ALIGNED
// == 0), and the partial sums of many lanes make the sum of squares at least as exact as a sequential f32 one.
// 12 bytes and 4 flops an element: bound by memory; on CPU devices by the number of loads, whatever their size.
// With GATHER, row i of y is made of row output_row[i] of x: the rows that want logits. With ADD, the
// result is added to y; with THEN, moreover, the sum is normalized by another weight into z: the norm after
// a block, the residual connection and the norm before the next block in one pass. x and z may be the same
// place.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "state.glsl"
layout(local_size_x_id = 0) in; // spec: local_size, a power of two
layout(constant_id = 1) const uint GATHER = 0u;  // 0 or 1
layout(constant_id = 2) const uint ADD = 0u;     // 0 or 1
layout(constant_id = 3) const uint THEN = 0u;    // 0 or 1
layout(constant_id = 4) const uint ALIGNED = 1u; // all offsets and strides, and dim, are multiples of 4
layout(set = 0, binding = 0) readonly buffer Input { vec4 x[]; };       // [rows][x_stride] floats
layout(set = 0, binding = 1) readonly buffer Weight { vec4 weight[]; }; // [dim], twice
layout(set = 0, binding = 2) readonly buffer State { uint state[]; };
layout(set = 0, binding = 3) buffer Output { vec4 y[]; };               // [rows][y_stride], and z
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

// A run of elements from word i on: RUN of them, and zeros.
const uint RUN = ALIGNED != 0u ? 4u : 1u;
#define LOAD(from, i) (ALIGNED != 0u ? from[(i) >> 2u] : vec4(from[(i) >> 2u][(i) & 3u], 0.0, 0.0, 0.0))
#define FOR_RUNS(i) for (uint i = RUN * gl_LocalInvocationID.x; i < p.dim; i += RUN * gl_WorkGroupSize.x)

void store(uint i, vec4 v) {
    if (ALIGNED != 0u)
        y[i >> 2u] = v;
    else
        y[i >> 2u][i & 3u] = v.x;
}

void main() {
    const uint row = gl_WorkGroupID.x;
    if (row >= state[GATHER != 0u ? STATE_N_OUTPUTS : STATE_N_TOKENS]) return;
    const uint source = p.x_offset + (GATHER != 0u ? state[STATE_OUTPUT_ROW + row] : row) * p.x_stride;
    const uint target = p.y_offset + row * p.y_stride;
    float squares = 0.0;
    FOR_RUNS(i) {
        const vec4 v = LOAD(x, source + i);
        squares += dot(v, v);
    }
    const float factor = 1.0 / sqrt(workgroup_sum(squares) / float(p.dim) + p.eps);
    squares = 0.0;
    FOR_RUNS(i) {
        vec4 value = LOAD(weight, p.weight_offset + i) * (LOAD(x, source + i) * factor);
        if (ADD != 0u) value += LOAD(y, target + i);
        store(target + i, value);
        squares += dot(value, value);
    }
    if (THEN != 0u) {
        barrier(); // everyone has read the first sum
        const float z_factor = 1.0 / sqrt(workgroup_sum(squares) / float(p.dim) + p.z_eps);
        FOR_RUNS(i)
            store(p.z_offset + row * p.z_stride + i,
                LOAD(weight, p.z_weight_offset + i) * (LOAD(y, target + i) * z_factor));
    }
}

// First stage of argmax: every invocation finds the best (value, index) of a slice of a row of logits,
// and writes it where argmax_join.comp collects it; for logits that must be in memory (others: the epilogue
// ARGMAX in include/linear.glsl). Slices interleave: neighbours read neighbouring
// words. No barriers, 4 bytes a value: bound by memory.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "state.glsl"
#include "argmax.glsl"
layout(local_size_x_id = 0) in; // spec: local_size
layout(set = 0, binding = 0) readonly buffer Logits { uint x[]; }; // f32 bits, [rows][x_stride]
layout(set = 0, binding = 1) readonly buffer State { uint state[]; };
layout(set = 0, binding = 2) writeonly buffer Partials { uint partials[]; }; // [rows][slices][value, index]
layout(push_constant) uniform Push {
    uint x_offset;
    uint x_stride;
    uint n;
    uint partials_offset;
} p;

void main() {
    const uint row = gl_WorkGroupID.y, slice = gl_GlobalInvocationID.x;
    const uint slices = gl_NumWorkGroups.x * gl_WorkGroupSize.x;
    if (row >= state[STATE_N_OUTPUTS]) return;
    const uint start = p.x_offset + row * p.x_stride;
    uint bits = 0xFF800000u, key = order_key(bits), index = slice; // -infinity, as if the row went on with it
    for (uint i = slice; i < p.n; i += slices) {
        const uint value = x[start + i], candidate = order_key(value);
        if (candidate > key) { // indices ascend, so the first of equals stays
            key = candidate;
            bits = value;
            index = i;
        }
    }
    const uint at = p.partials_offset + (row * slices + slice) * 2u;
    partials[at] = bits;
    partials[at + 1u] = floatBitsToUint(float(index));
}

// Soft cap: y = cap * tanh(y / cap), in place, for the rows of logits in use. tanh(x) is 1 - 2 / (exp(2 x) + 1),
// right for every x, while a device's tanh may overflow; near 0 it is off by the rounding of 1, 6e-8 of the cap.
// 8 bytes an element.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "state.glsl"
layout(local_size_x_id = 0) in; // spec: local_size
layout(set = 0, binding = 0) buffer Values { float y[]; }; // [outputs][stride] at offset
layout(set = 0, binding = 1) readonly buffer State { uint state[]; };
layout(push_constant) uniform Push {
    uint offset;
    uint stride;
    uint dim;
    float cap;
} p;

void main() {
    const uint i = gl_GlobalInvocationID.x, row = gl_WorkGroupID.y;
    if (row >= state[STATE_N_OUTPUTS] || i >= p.dim) return;
    const uint at = p.offset + row * p.stride + i;
    y[at] = p.cap * (1.0 - 2.0 / (exp(y[at] * (2.0 / p.cap)) + 1.0));
}

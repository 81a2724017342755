// Second stage of argmax: a workgroup a row joins the slices' (key, index) pairs. The result is the
// index of the largest value, the lowest among equals, or 0xFFFFFFFF if the row has a NaN.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "state.glsl"
#include "argmax.glsl"
layout(local_size_x_id = 0) in; // spec: local_size, a power of two
layout(set = 0, binding = 0) readonly buffer Partials { uint partials[]; }; // [rows][slices][key, index]
layout(set = 0, binding = 1) readonly buffer State { uint state[]; };
layout(set = 0, binding = 2) writeonly buffer Result { uint result[]; }; // [rows]
layout(push_constant) uniform Push {
    uint partials_offset;
    uint slices;
    uint result_offset;
} p;
shared uvec2 best[gl_WorkGroupSize.x];

void main() {
    const uint row = gl_WorkGroupID.x, lane = gl_LocalInvocationID.x;
    if (row >= state[STATE_N_OUTPUTS]) return;
    uvec2 mine = uvec2(0u, 0xFFFFFFFFu);
    for (uint i = lane; i < p.slices; i += gl_WorkGroupSize.x) {
        const uint at = p.partials_offset + (row * p.slices + i) * 2u;
        const uvec2 other = uvec2(partials[at], partials[at + 1u]);
        if (comes_before(other, mine)) mine = other;
    }
    best[lane] = mine;
    barrier();
    for (uint width = gl_WorkGroupSize.x / 2u; width > 0u; width /= 2u) {
        if (lane < width && comes_before(best[lane + width], best[lane])) best[lane] = best[lane + width];
        barrier();
    }
    if (lane == 0u) result[p.result_offset + row] = best[0].x == NAN_KEY ? 0xFFFFFFFFu : best[0].y;
}

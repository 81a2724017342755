// Last stage of argmax: a workgroup a row joins the (value, index) pairs of its slices. The result is the
// index of the largest value, the lowest among equals; 0xFFFFFFFF if the row has a NaN or +infinity,
// 0xFFFFFFFE if it has nothing above -infinity.
//
// Bytes: 8 a slice, of which the epilogue of a product leaves one for every four rows (38,000 for 152,000
// tokens, 300 KB). A single workgroup reads them, so latency bounds it: as many lanes as a workgroup can have,
// neighbours at neighbouring 8 bytes, with IN_FLIGHT loads each. Shared memory: 8 bytes a lane.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "state.glsl"
#include "argmax.glsl"
layout(local_size_x_id = 0) in; // spec: local_size, a power of two
layout(set = 0, binding = 0) readonly buffer Partials { vec2 partials[]; }; // [rows][stride]: value, index
layout(set = 0, binding = 1) readonly buffer State { uint state[]; };
layout(set = 0, binding = 2) writeonly buffer Result { uint result[]; }; // [rows]
layout(push_constant) uniform Push {
    uint partials_offset; // words, even
    uint stride;          // pairs
    uint slices;
    uint result_offset;
} p;
const uint IN_FLIGHT = 8u;
shared uvec2 best[gl_WorkGroupSize.x];

void main() {
    const uint row = gl_WorkGroupID.x, lane = gl_LocalInvocationID.x;
    if (row >= state[STATE_N_OUTPUTS]) return;
    const uint first = p.partials_offset / 2u + row * p.stride;
    uvec2 mine = uvec2(0u, 0xFFFFFFFFu);
    for (uint i = lane; i < p.slices; i += IN_FLIGHT * gl_WorkGroupSize.x) {
        vec2 loaded[IN_FLIGHT]; // beyond the last slice that one again, which changes nothing
        [[unroll]] for (uint n = 0u; n < IN_FLIGHT; n++)
            loaded[n] = partials[first + min(i + n * gl_WorkGroupSize.x, p.slices - 1u)];
        [[unroll]] for (uint n = 0u; n < IN_FLIGHT; n++) {
            const uvec2 other = with_key(loaded[n]);
            if (comes_before(other, mine)) mine = other;
        }
    }
    best[lane] = mine;
    barrier();
    for (uint width = gl_WorkGroupSize.x / 2u; width > 0u; width /= 2u) {
        if (lane < width && comes_before(best[lane + width], best[lane])) best[lane] = best[lane + width];
        barrier();
    }
    if (lane != 0u) return;
    const uint key = best[0].x;
    result[p.result_offset + row] = key == NAN_KEY ? 0xFFFFFFFFu : key <= MINUS_INFINITY_KEY ? 0xFFFFFFFEu : best[0].y;
}

// Copies a buffer to another as fast as the device can: the yardstick of `bench`, not used by models.
//
// Bytes: 32 per vec4 (one read, one write), no arithmetic. Neighbouring invocations touch neighbouring
// 16-byte words: a subgroup of 32 moves 512 bytes an instruction. The buffers are far larger than caches.
#version 450
layout(local_size_x_id = 0) in; // spec: local_size
layout(set = 0, binding = 0) readonly buffer Source { uvec4 source[]; };
layout(set = 0, binding = 1) writeonly buffer Target { uvec4 target[]; };
layout(push_constant) uniform Push {
    uint count; // uvec4s
} p;

void main() {
    const uint stride = gl_NumWorkGroups.x * gl_WorkGroupSize.x;
    for (uint i = gl_GlobalInvocationID.x; i < p.count; i += stride)
        target[i] = source[i];
}

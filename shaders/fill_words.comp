// Sets a run of 32-bit words to one value: clears new device-only memory, which the host cannot reach.
//
// Bytes: 4 per word (one write), no arithmetic. Neighbouring invocations write neighbouring words, so
// every access is coalesced for any subgroup size. A dispatch covers at most 65535 x 256 words; the
// stride loop covers the rest.
#version 450
layout(local_size_x_id = 0) in; // spec: local_size
layout(set = 0, binding = 0) writeonly buffer Target { uint target[]; };
layout(push_constant) uniform Push {
    uint target_offset; // words
    uint count;         // words
    uint value;
} p;

void main() {
    const uint stride = gl_NumWorkGroups.x * gl_WorkGroupSize.x;
    for (uint i = gl_GlobalInvocationID.x; i < p.count; i += stride)
        target[p.target_offset + i] = p.value;
}

// Copies a run of 32-bit words from one buffer to another: fills device-only memory from a mapped
// buffer (Kompute's `storage` tensors cannot be the target of a transfer) and brings results back.
//
// Bytes: 8 per word (one read, one write), no arithmetic. Neighbouring invocations touch
// neighbouring words, so every access is coalesced for any subgroup size. A dispatch covers at most
// 65535 x 256 words; the stride loop covers the rest.
#version 450
layout(local_size_x_id = 0) in; // spec: local_size
layout(set = 0, binding = 0) readonly buffer Source { uint source[]; };
layout(set = 0, binding = 1) writeonly buffer Target { uint target[]; };
layout(push_constant) uniform Push {
    uint source_offset; // words
    uint target_offset; // words
    uint count;         // words
} p;

void main() {
    const uint stride = gl_NumWorkGroups.x * gl_WorkGroupSize.x;
    for (uint i = gl_GlobalInvocationID.x; i < p.count; i += stride)
        target[p.target_offset + i] = source[p.source_offset + i];
}

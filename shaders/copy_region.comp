// Moves regions of a KV buffer: blocks that a sequence shares and is about to write, forks, restored blocks.
//
// Which regions changes from run to run, so the list is in the state buffer: a count, then for each the word
// where it begins, the word it goes to, and its words. A buffer has several parts laid out alike (the keys and
// the values of its layers), and the list is done for each: workgroup y is the part. No region of a list may be
// another's target, so they can be moved in any order.
//
// Bytes: 8 a word (one read, one write), no arithmetic; neighbouring invocations touch neighbouring words.
#version 450
layout(local_size_x_id = 0) in; // spec: local_size
layout(set = 0, binding = 0) readonly buffer State { uint state[]; };
layout(set = 0, binding = 1) buffer Data { uint data[]; };
layout(push_constant) uniform Push {
    uint list;        // word of the state buffer where the count is
    uint part_stride; // words from one part to the next
} p;

void main() {
    const uint base = gl_WorkGroupID.y * p.part_stride;
    const uint stride = gl_NumWorkGroups.x * gl_WorkGroupSize.x;
    const uint count = state[p.list];
    for (uint region = 0u; region < count; region++) {
        const uint entry = p.list + 1u + 3u * region;
        const uint source = base + state[entry], target = base + state[entry + 1u], words = state[entry + 2u];
        for (uint i = gl_GlobalInvocationID.x; i < words; i += stride)
            data[target + i] = data[source + i];
    }
}

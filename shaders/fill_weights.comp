// Makes random weights of any number format in place: `bench --synthetic` needs no file and no upload.
//
// A matrix lies in the x8 layout (kernels/layout.py): eight rows word by word, in each row the scales first.
// Scale words repeat a given pattern, so that decoded weights have a chosen size; words of weights are a
// hash of their index (PCG-RXS-M-XS: Jarzynski and Olano 2020, "Hash Functions for GPU Rendering"), of
// which `keep` says the random bits and `set` the fixed ones (the exponents of floats).
//
// Bytes: 4 per word (one write), about ten integer operations. Neighbouring invocations write neighbouring
// words: coalesced for any subgroup size.
#version 450
layout(local_size_x_id = 0) in; // spec: local_size
layout(set = 0, binding = 0) writeonly buffer Target { uint target[]; };
layout(push_constant) uniform Push {
    uint target_offset; // words
    uint count;         // words
    uint row_words;     // of a row: scales, then weights
    uint scale_words;   // of a row
    uint period;        // scale words after which the pattern begins anew, 1 to 5
    uint scale0;
    uint scale1;
    uint scale2;
    uint scale3;
    uint scale4;
    uint keep;
    uint set;
    uint seed;
} p;

uint hash(uint value) {
    const uint state = value * 747796405u + 2891336453u;
    const uint word = ((state >> ((state >> 28u) + 4u)) ^ state) * 277803737u;
    return (word >> 22u) ^ word;
}

uint scale(uint index) {
    return index == 0u ? p.scale0 : index == 1u ? p.scale1 : index == 2u ? p.scale2
                                 : index == 3u ? p.scale3 : p.scale4;
}

void main() {
    const uint stride = gl_NumWorkGroups.x * gl_WorkGroupSize.x;
    for (uint i = gl_GlobalInvocationID.x; i < p.count; i += stride) {
        const uint word = i / 8u % p.row_words;
        const uint random = hash(i + p.seed) & p.keep | p.set;
        target[p.target_offset + i] = word < p.scale_words ? scale(word % p.period) : random;
    }
}

// The router of a mixture of experts: for every token the PER_TOKEN experts with the largest logits, and
// what each one's output is worth: its share of softmax(logits), with NORMALIZED divided by the sum of
// the chosen shares. A workgroup a token.
//
// An expert's rank is the number of experts that come before it: those with a larger logit, or as large a
// one and a smaller number. No two experts have one rank, whatever the logits are (NaN comes last, and
// makes every weight NaN), so a rank below PER_TOKEN is a slot that one expert fills. EXPERTS² comparisons
// in shared memory; a lane ranks every local_size-th expert, and neighbours read the same word. 4 bytes a
// logit: the few thousand bytes of a token are nothing beside one expert's weights.
//
// With PAIR_TILES every (token, slot) pair is a tile of its own for the products (include/rows.glsl), and
// is written here; else group_experts.comp makes tiles of `chosen`.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "state.glsl"
layout(local_size_x_id = 0) in; // spec: local_size, a power of two
layout(constant_id = 1) const uint EXPERTS = 8u;
layout(constant_id = 2) const uint PER_TOKEN = 2u;
layout(constant_id = 3) const uint NORMALIZED = 1u; // 0 or 1
layout(constant_id = 4) const uint PAIR_TILES = 1u; // 0 or 1
layout(set = 0, binding = 0) readonly buffer Logits { float logits[]; }; // [T][logits_stride]
layout(set = 0, binding = 1) readonly buffer State { uint state[]; };
layout(set = 0, binding = 2) buffer Routing { uint routing[]; };
layout(push_constant) uniform Push {
    uint logits_offset;
    uint logits_stride;
    uint weights_at; // words of routing: [T][PER_TOKEN] f32
    uint chosen_at;  // [T][PER_TOKEN]
    uint list_at;    // [T * PER_TOKEN] pairs, tile by tile
    uint tiles_at;   // 1 + 3 words a tile
    uint pairs_at;   // a word: pairs in use
} p;
#include "reduce.glsl"

shared uint keys[EXPERTS];
shared float values[EXPERTS];
shared uint slots[PER_TOKEN]; // the experts chosen

// Unsigned numbers in the order of the floats: NaN first, -0 as 0.
uint order(float x) {
    const uint bits = floatBitsToUint(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u)
        return 0u;
    if (bits == 0x80000000u)
        return 0x80000000u;
    return (bits & 0x80000000u) != 0u ? ~bits : bits | 0x80000000u;
}

// exp(logit - the largest), which some drivers make 0 for NaN.
float weight_of(uint expert, float largest) {
    return keys[expert] == 0u ? uintBitsToFloat(0x7FC00000u) : exp(values[expert] - largest);
}

void main() {
    const uint lane = gl_LocalInvocationID.x, token = gl_WorkGroupID.x, used = state[STATE_N_TOKENS];
    if (token == 0u && lane == 0u) {
        routing[p.pairs_at] = used * PER_TOKEN;
        if (PAIR_TILES != 0u)
            routing[p.tiles_at] = used * PER_TOKEN;
    }
    if (token >= used)
        return; // the whole workgroup
    for (uint e = lane; e < EXPERTS; e += gl_WorkGroupSize.x) {
        values[e] = logits[p.logits_offset + token * p.logits_stride + e];
        keys[e] = order(values[e]);
    }
    barrier();
    for (uint e = lane; e < EXPERTS; e += gl_WorkGroupSize.x) {
        const uint key = keys[e];
        uint rank = 0u;
        for (uint other = 0u; other < EXPERTS; other++)
            rank += uint(keys[other] > key || (keys[other] == key && other < e));
        if (rank < PER_TOKEN)
            slots[rank] = e;
    }
    barrier();
    const float largest = values[slots[0]];
    float sum = 0.0;
    for (uint e = lane; e < EXPERTS; e += gl_WorkGroupSize.x)
        sum += weight_of(e, largest);
    const float all = workgroup_sum(sum);
    float shares = 1.0;
    if (NORMALIZED != 0u) {
        shares = 0.0;
        for (uint slot = 0u; slot < PER_TOKEN; slot++)
            shares += weight_of(slots[slot], largest) / all;
    }
    for (uint slot = lane; slot < PER_TOKEN; slot += gl_WorkGroupSize.x) {
        const uint pair = token * PER_TOKEN + slot, expert = slots[slot];
        routing[p.weights_at + pair] = floatBitsToUint(weight_of(expert, largest) / all / shares);
        routing[p.chosen_at + pair] = expert;
        if (PAIR_TILES != 0u) {
            const uint tile = p.tiles_at + 1u + 3u * pair;
            routing[tile] = expert;
            routing[tile + 1u] = p.list_at + pair;
            routing[tile + 2u] = p.list_at + pair + 1u;
            routing[p.list_at + pair] = pair;
        }
    }
}

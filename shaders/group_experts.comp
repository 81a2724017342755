// Groups the (token, slot) pairs of a batch by the expert they chose, for the products by experts: a list
// of pairs, expert by expert, in their own order within each; and tiles of at most TILE neighbours of the
// list that share an expert (include/rows.glsl reads them). One workgroup.
//
// The pairs are cut into CHUNKS, and a lane counts those of one expert in one chunk; where its own begin
// is the sum of the counts before it, so that it writes them on a second pass. No atomics: the same lists
// from run to run. 2 EXPERTS CHUNKS reads of pairs/CHUNKS words, from the cache; lanes of one chunk read
// the same word.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "state.glsl"
layout(local_size_x_id = 0) in; // spec: local_size
layout(constant_id = 1) const uint EXPERTS = 8u;
layout(constant_id = 2) const uint PER_TOKEN = 2u;
layout(constant_id = 3) const uint CHUNKS = 1u;
layout(constant_id = 4) const uint TILE = 2u;
layout(set = 0, binding = 0) readonly buffer State { uint state[]; };
layout(set = 0, binding = 1) buffer Routing { uint routing[]; };
layout(push_constant) uniform Push {
    uint chosen_at; // words of routing: [T][PER_TOKEN]
    uint list_at;   // [T * PER_TOKEN]
    uint tiles_at;  // 1 + 3 words a tile
} p;

shared uint counts[CHUNKS * EXPERTS]; // [chunk][expert]
shared uint firsts[EXPERTS + 1u];     // where an expert's pairs begin in the list

void main() {
    const uint lane = gl_LocalInvocationID.x;
    const uint pairs = state[STATE_N_TOKENS] * PER_TOKEN, chunk = (pairs + CHUNKS - 1u) / CHUNKS;
    for (uint i = lane; i < CHUNKS * EXPERTS; i += gl_WorkGroupSize.x) {
        const uint expert = i % EXPERTS, first = i / EXPERTS * chunk;
        uint count = 0u;
        for (uint pair = first; pair < min(first + chunk, pairs); pair++)
            count += uint(routing[p.chosen_at + pair] == expert);
        counts[i] = count;
    }
    barrier();
    for (uint expert = lane; expert <= EXPERTS; expert += gl_WorkGroupSize.x) {
        uint first = 0u;
        for (uint c = 0u; c < CHUNKS; c++)
            for (uint e = 0u; e < expert; e++)
                first += counts[c * EXPERTS + e];
        firsts[expert] = first;
    }
    barrier();
    for (uint i = lane; i < CHUNKS * EXPERTS; i += gl_WorkGroupSize.x) {
        const uint expert = i % EXPERTS, first = i / EXPERTS * chunk;
        uint at = p.list_at + firsts[expert];
        for (uint before = expert; before < i; before += EXPERTS)
            at += counts[before];
        for (uint pair = first; pair < min(first + chunk, pairs); pair++)
            if (routing[p.chosen_at + pair] == expert)
                routing[at++] = pair;
    }
    for (uint expert = lane; expert <= EXPERTS; expert += gl_WorkGroupSize.x) {
        uint tile = 0u;
        for (uint e = 0u; e < expert; e++)
            tile += (firsts[e + 1u] - firsts[e] + TILE - 1u) / TILE;
        if (expert == EXPERTS) {
            routing[p.tiles_at] = tile;
            break;
        }
        for (uint first = firsts[expert]; first < firsts[expert + 1u]; first += TILE) {
            const uint at = p.tiles_at + 1u + 3u * tile++;
            routing[at] = expert;
            routing[at + 1u] = p.list_at + first;
            routing[at + 2u] = p.list_at + min(first + TILE, firsts[expert + 1u]);
        }
    }
}

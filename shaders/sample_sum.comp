// Sums of the weights of every 1024 tokens, for rows that need to know the whole: top-p without a
// top-k before it, and draws from the whole vocabulary. A workgroup adds up one chunk of one row.
//
// Reads 4 bytes a token, neighbours side by side, and about 50 integer operations each. Invocations add
// up 64-bit sums of their own and join them by two atomics; integers do not mind the order.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "state.glsl"
#include "sample.glsl"
layout(local_size_x_id = 0) in; // spec: local_size
layout(set = 0, binding = 0) readonly buffer State { uint state[]; };
layout(set = 0, binding = 1) readonly buffer Parameters { uint rows[]; };
layout(set = 0, binding = 2) readonly buffer Keys { uint keys[]; }; // [rows][vocabulary]
layout(set = 0, binding = 3) buffer Partials { uint partials[]; };
layout(push_constant) uniform Push {
    uint vocabulary;
    uint groups;          // of a row
    uint partials_stride; // words of a row: [groups] largest keys, [chunks] sums (low, high), …
    uint total;           // the words (low, high) of the sum of sums
    uint segment;
} p;

shared uint s_top, s_low, s_high;

void main() {
    const uint row = gl_WorkGroupID.y, chunk = gl_WorkGroupID.x, lane = gl_LocalInvocationID.x;
    const uint lanes = gl_WorkGroupSize.x;
    if (row >= state[STATE_N_OUTPUTS]) return;
    const uint record = row * ROW_WORDS;
    const uint mode = rows[record + ROW_MODE + p.segment];
    if ((mode & MODE_SUMS) == 0u) return;
    const uint partial = row * p.partials_stride;
    const uint at = record + ROW_SCALES + ((mode & MODE_SUMS_SCALE) != 0u ? 3u : 0u);
    const Scale scale = Scale(uintBitsToFloat(rows[at]), rows[at + 1u], rows[at + 2u]);

    if (lane == 0u) s_top = s_low = s_high = 0u;
    barrier();
    uint largest = EXCLUDED;
    for (uint i = lane; i < p.groups; i += lanes) largest = max(largest, partials[partial + i]);
    atomicMax(s_top, largest);
    barrier();
    const uint top = s_top;
    if (top == NAN_KEY || top == EXCLUDED) return;

    uvec2 sum = uvec2(0u);
    const uint end = min((chunk + 1u) * CHUNK, p.vocabulary);
    for (uint token = chunk * CHUNK + lane; token < end; token += lanes) {
        const uint key = keys[row * p.vocabulary + token];
        if (key == EXCLUDED) continue;
        sum = add64(sum, weight_of(distance_of(key, top, scale), scale));
    }
    const uint before = atomicAdd(s_low, sum.x);
    atomicAdd(s_high, sum.y + (before + sum.x < before ? 1u : 0u));
    barrier();
    if (lane == 0u) {
        partials[partial + p.groups + chunk * 2u] = s_low;
        partials[partial + p.groups + chunk * 2u + 1u] = s_high;
        const uint low = atomicAdd(partials[partial + p.total], s_low);
        atomicAdd(partials[partial + p.total + 1u], s_high + (low + s_low < low ? 1u : 0u));
    }
}

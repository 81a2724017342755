// Between two decode steps of one plan: the token that each sequence chose becomes its next input.
//
// What the host does before a step it does for the first one only; here the state buffer moves on: token,
// position, and the cache slot of that position, from the block table. Rows and sequences stay as they
// are. A row in which no token could be chosen (NaN) goes on with token 0: the host sees what came back and
// throws the rest away. An invocation a row; a few words each.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "state.glsl"
layout(local_size_x_id = 0) in; // spec: local_size
layout(set = 0, binding = 0) readonly buffer Result { uint result[]; }; // [outputs] tokens, at result_offset
layout(set = 0, binding = 1) buffer State { uint state[]; };
layout(push_constant) uniform Push {
    uint result_offset;
    uint vocabulary;
} p;

void main() {
    const uint row = gl_GlobalInvocationID.x;
    if (row >= state[STATE_N_OUTPUTS]) return;
    const uint token = result[p.result_offset + row];
    const uint position = state[STATE_POSITION + row] + 1u;
    const uint table = STATE_BLOCK_TABLE + state[STATE_SEQUENCE + row] * state[STATE_TABLE_STRIDE];
    state[STATE_TOKEN_ID + row] = token < p.vocabulary ? token : 0u;
    state[STATE_POSITION + row] = position;
    state[STATE_SLOT + row] = state[table + position / BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS;
}

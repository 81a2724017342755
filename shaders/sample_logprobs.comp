// What the host needs to tell the log-probabilities of a row's token and of its most likely tokens: a
// few logits and the sum of all weights, as integers, so that all devices say the same. The logarithm
// is the host's. One workgroup a row; rows that want none return at once.
//
// The most likely tokens come out of a tournament: tokens t, t + 256, t + 512 … are one column, whose
// best is known; the best of these is taken, and its column is searched again for the one after it.
//
// Reads the row twice, neighbours side by side (4 bytes a token each time, 60 integer operations in
// the second pass), and a 256th of it for every token listed. 2 KiB shared memory.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "state.glsl"
#include "sample.glsl"
layout(local_size_x_id = 0) in; // spec: local_size
layout(set = 0, binding = 0) readonly buffer State { uint state[]; };
layout(set = 0, binding = 1) readonly buffer Parameters { uint rows[]; };
layout(set = 0, binding = 2) readonly buffer Logits { uint logits[]; }; // f32 bits, [rows][logits_stride]
layout(set = 0, binding = 3) readonly buffer Result { uint result[]; }; // sampled tokens
layout(set = 0, binding = 4) writeonly buffer Logprobs { uint logprobs[]; }; // [rows][LOGPROB_WORDS]
layout(push_constant) uniform Push {
    uint logits_offset;
    uint logits_stride;
    uint vocabulary;
    uint result_offset;
    uint logprobs_offset;
} p;

const uint COLUMNS = 256u;
const uint NOWHERE = 0xFFFFFFFFu;
shared uint s_key[COLUMNS], s_id[COLUMNS]; // the best token of each column that is not listed yet
shared uint s_best, s_best_id, s_low, s_high, s_ahead;

uint key_at(uint token) {
    return key_of(logits[p.logits_offset + gl_WorkGroupID.x * p.logits_stride + token]);
}

// The best of all (key, id) that invocations bring, in all invocations: the larger key, then the lower id.
uvec2 best_of(uint key, uint id) {
    if (gl_LocalInvocationID.x == 0u) {
        s_best = EXCLUDED;
        s_best_id = NOWHERE;
    }
    barrier();
    atomicMax(s_best, key);
    barrier();
    if (key == s_best) atomicMin(s_best_id, id);
    barrier();
    const uvec2 best = uvec2(s_best, s_best_id);
    barrier();
    return best;
}

void main() {
    const uint row = gl_WorkGroupID.x, lane = gl_LocalInvocationID.x, lanes = gl_WorkGroupSize.x;
    if (row >= state[STATE_N_OUTPUTS]) return;
    const uint record = row * ROW_WORDS;
    const uint wanted = rows[record + ROW_LOGPROBS];
    if (wanted == 0u) return;
    const uint at = p.logprobs_offset + row * LOGPROB_WORDS;
    uint token = rows[record + ROW_TARGET];
    if (token == SAMPLED) token = result[p.result_offset + row];

    for (uint column = lane; column < COLUMNS; column += lanes) {
        uint key = EXCLUDED, id = NOWHERE;
        for (uint i = column; i < p.vocabulary; i += COLUMNS) {
            const uint candidate = key_at(i);
            if (candidate > key) { // ids ascend, so the lowest of equals stays
                key = candidate;
                id = i;
            }
        }
        s_key[column] = key;
        s_id[column] = id;
    }
    if (lane == 0u) s_low = s_high = s_ahead = 0u;
    barrier();

    // Once round for each listed token, the first time to find the largest and the sum.
    uint top = EXCLUDED, listed = 0u, gone = COLUMNS;
    uvec2 last = uvec2(0u);
    for (;;) {
        // the column of the token listed last, from there on; and the best of all columns
        uint key = EXCLUDED, id = NOWHERE;
        if (gone != COLUMNS) {
            for (uint i = gone + lane * COLUMNS; i < p.vocabulary; i += lanes * COLUMNS) {
                const uint candidate = key_at(i);
                if (candidate > last.x || (candidate == last.x && i <= last.y)) continue;
                if (candidate > key) {
                    key = candidate;
                    id = i;
                }
            }
        } else {
            for (uint column = lane; column < COLUMNS; column += lanes) {
                if (s_key[column] > key || (s_key[column] == key && s_id[column] < id)) {
                    key = s_key[column];
                    id = s_id[column];
                }
            }
        }
        const uvec2 best = best_of(key, id);
        if (gone != COLUMNS) {
            if (lane == 0u) {
                s_key[gone] = best.x;
                s_id[gone] = best.y;
            }
            gone = COLUMNS;
            barrier();
            continue;
        }
        if (top == EXCLUDED) {
            top = best.x;
            if (top == NAN_KEY || top == EXCLUDED) break;
            const Scale scale = Scale(
                uintBitsToFloat(rows[record + ROW_SCALES + SCALE_FACTOR]),
                rows[record + ROW_SCALES + SCALE_MULTIPLIER],
                rows[record + ROW_SCALES + SCALE_LAST]
            );
            const uint chosen = token < p.vocabulary ? key_at(token) : EXCLUDED;
            uvec2 sum = uvec2(0u);
            uint ahead = 0u;
            for (uint i = lane; i < p.vocabulary; i += lanes) {
                const uint candidate = key_at(i);
                if (candidate > chosen || (candidate == chosen && i < token)) ahead++;
                if (candidate != EXCLUDED) sum = add64(sum, weight_of(distance_of(candidate, top, scale), scale));
            }
            const uint before = atomicAdd(s_low, sum.x);
            atomicAdd(s_high, sum.y + (before + sum.x < before ? 1u : 0u));
            atomicAdd(s_ahead, ahead);
        }
        if (listed == wanted - 1u || best.x == EXCLUDED) break;
        if (lane == 0u) {
            logprobs[at + LOGPROB_TOP + listed * 2u] = best.y;
            logprobs[at + LOGPROB_TOP + listed * 2u + 1u] = logit_bits(best.x);
        }
        listed++;
        last = best;
        gone = best.y % COLUMNS;
    }
    barrier();
    if (lane != 0u) return;
    const bool known = token < p.vocabulary && top != NAN_KEY;
    logprobs[at + LOGPROB_TOKEN] = token;
    logprobs[at + LOGPROB_LOGIT] = known ? logits[p.logits_offset + row * p.logits_stride + token] : 0x7FC00000u;
    logprobs[at + LOGPROB_RANK] = known ? s_ahead + 1u : 0u;
    logprobs[at + LOGPROB_LARGEST] = top == NAN_KEY ? 0x7FC00000u : top == EXCLUDED ? 0xFF800000u : logit_bits(top);
    logprobs[at + LOGPROB_SUM] = s_low;
    logprobs[at + LOGPROB_SUM + 1u] = s_high;
    logprobs[at + LOGPROB_COUNT] = listed;
}

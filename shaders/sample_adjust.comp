// First step of sampling, and of each later segment of an unusual stage order: penalties and bias.
// A workgroup takes 1024 tokens of the vocabulary of one row, turns their logits into keys (integers
// in the order of the logits, 0 for a token that cannot be chosen), and finds the largest key of each
// group of neighbouring tokens, by which the next kernel finds the few that matter.
//
// Penalties need to know how often each token occurs in the row's history: the workgroup counts its
// own tokens in shared memory by walking over the window, so no table of counts has to be kept, and
// tokens that were sampled on the device count at once. Bias entries are spread out likewise.
//
// Reads: the row's logits once (4 bytes a token), the window and the bias list once a workgroup.
// Writes: 4 bytes a token. An invocation takes every (local_size / groups)-th token of one group, so
// runs of 4 (local size 64) or 16 (256) and more invocations touch neighbouring words. 8 KiB shared
// memory; its atomics are spread by token.
// variants: SOURCE=logits,keys
#version 450
#extension GL_GOOGLE_include_directive : require
#include "state.glsl"
#include "sample.glsl"
layout(local_size_x_id = 0) in; // spec: local_size
layout(set = 0, binding = 0) readonly buffer State { uint state[]; };
layout(set = 0, binding = 1) readonly buffer Parameters { uint rows[]; };
layout(set = 0, binding = 2) readonly buffer History { uint history[]; }; // [slots][history_stride]
layout(set = 0, binding = 3) buffer Keys { uint keys[]; };                // [rows][vocabulary]
layout(set = 0, binding = 4) writeonly buffer Partials { uint partials[]; };
#ifdef SOURCE_LOGITS
layout(set = 0, binding = 5) readonly buffer Logits { uint logits[]; };   // f32 bits, [rows][logits_stride]
#endif
layout(push_constant) uniform Push {
    uint logits_offset;
    uint logits_stride;
    uint vocabulary;
    uint group_tokens;    // a power of two, 64 … 1024
    uint partials_stride; // words of a row: [groups] largest keys, [chunks] sums, then state of the row
    uint done;            // of a row: whether its token has been drawn, then the sum of sums (low, high)
    uint history_stride;
    uint segment;
} p;

const uint BAN = 0xFF800000u; // -inf

shared uint s_count[CHUNK]; // occurrences in the window
shared uint s_bias[CHUNK];  // f32 bits
shared uint s_largest[gl_WorkGroupSize.x];

// Devices differ in what becomes of denormal numbers: results below 2^-100 are zero on all of them.
float settle(float x) {
    return abs(x) < 7.88860905e-31 ? 0.0 : x;
}

void main() {
    const uint row = gl_WorkGroupID.y, chunk = gl_WorkGroupID.x, lane = gl_LocalInvocationID.x;
    const uint lanes = gl_WorkGroupSize.x;
    if (row >= state[STATE_N_OUTPUTS]) return;
    const uint record = row * ROW_WORDS;
    const uint adjust = rows[record + ROW_ADJUST + p.segment];
    if (adjust == 0u) return;
    const bool penalties = (adjust & ADJUST_PENALTIES) != 0u;
    const bool biased = (adjust & (ADJUST_BIAS | ADJUST_BANS)) != 0u;
    const bool scaled = (adjust & ADJUST_TEMPERATURE) != 0u;
    const uint first = chunk * CHUNK;
    const uint partial = row * p.partials_stride;

    if (penalties || biased) {
        // tokens so far: this row's token and all before it
        const uint position = state[STATE_POSITION + state[STATE_OUTPUT_ROW + row]] + 1u;
        for (uint i = lane; i < CHUNK; i += lanes) {
            s_count[i] = 0u;
            s_bias[i] = 0u;
        }
        barrier();
        if (penalties) {
            const uint end = min(position, p.history_stride);
            const uint begin = end - min(rows[record + ROW_WINDOW], end);
            const uint base = rows[record + ROW_HISTORY] * p.history_stride;
            for (uint i = begin + lane; i < end; i += lanes) {
                const uint at = history[base + i] - first;
                if (at < CHUNK) atomicAdd(s_count[at], 1u);
            }
        }
        if (biased) {
            uint entry = rows[record + ROW_BIAS_FIRST] + lane * BIAS_WORDS;
            const uint end = rows[record + ROW_BIAS_FIRST] + rows[record + ROW_BIAS_COUNT] * BIAS_WORDS;
            for (; entry < end; entry += lanes * BIAS_WORDS) {
                const uint at = rows[entry] - first; // a token has one entry
                if (at >= CHUNK) continue;
                if ((adjust & ADJUST_BIAS) != 0u) s_bias[at] = rows[entry + 1u];
                if ((adjust & ADJUST_BANS) != 0u && position < rows[entry + 2u]) s_bias[at] = BAN;
            }
        }
        barrier();
    }

    const uint groups = CHUNK / p.group_tokens, lanes_each = lanes / groups;
    const uint start = (lane / lanes_each) * p.group_tokens + lane % lanes_each; // in the chunk
    const uint end = min((lane / lanes_each + 1u) * p.group_tokens, max(first, p.vocabulary) - first);
    const uint base = row * p.vocabulary + first;
    uint largest = EXCLUDED;
    if (adjust == ADJUST_PRESENT) {
        for (uint at = start; at < end; at += lanes_each) {
#ifdef SOURCE_LOGITS
            const uint key = key_of(logits[p.logits_offset + row * p.logits_stride + first + at]);
            keys[base + at] = key;
#else
            const uint key = keys[base + at];
#endif
            largest = max(largest, key);
        }
    } else {
        const float repetition = uintBitsToFloat(rows[record + ROW_REPETITION]);
        const float repetition_inverse = uintBitsToFloat(rows[record + ROW_REPETITION_INVERSE]);
        const float presence = uintBitsToFloat(rows[record + ROW_PRESENCE]);
        const float frequency = uintBitsToFloat(rows[record + ROW_FREQUENCY]);
        const float inverse_temperature = uintBitsToFloat(rows[record + ROW_INVERSE_TEMPERATURE]);
        for (uint at = start; at < end; at += lanes_each) {
#ifdef SOURCE_LOGITS
            uint key = key_of(logits[p.logits_offset + row * p.logits_stride + first + at]);
#else
            uint key = keys[base + at];
#endif
            if (key != EXCLUDED && key != NAN_KEY) {
                precise float x = logit_of(key);
                if (scaled) {
                    precise float product = x * inverse_temperature;
                    x = settle(product);
                }
                if (penalties && s_count[at] != 0u) {
                    precise float product = x * (x > 0.0 ? repetition_inverse : repetition);
                    precise float repeated = frequency * float(s_count[at]);
                    precise float penalty = presence + repeated;
                    precise float difference = product - penalty;
                    x = settle(difference);
                }
                const uint bias = biased ? s_bias[at] : 0u;
                if (bias != 0u) {
                    precise float sum = x + uintBitsToFloat(bias);
                    x = settle(sum);
                }
                key = bias == BAN ? EXCLUDED : key_of(floatBitsToUint(x));
            }
            keys[base + at] = key;
            largest = max(largest, key);
        }
    }
    s_largest[lane] = largest;
    barrier();
    if (lane < groups) {
        largest = EXCLUDED;
        for (uint i = 0u; i < lanes_each; i++) largest = max(largest, s_largest[lane * lanes_each + i]);
        partials[partial + chunk * groups + lane] = largest;
    }
    if (chunk == 0u && lane < 3u) partials[partial + p.done + lane] = 0u;
}

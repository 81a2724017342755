// What the sampler's kernels share: where parameters lie, and the integer arithmetic that makes every
// device choose the same token. xinfer_vk/kernels/sample_math.py and sample_layout.py mirror this file.
#include "argmax.glsl"

// A row's parameters, ROW_WORDS words each, rows side by side; then the lists that rows point into.
const uint ROW_WORDS = 40u;
const uint MAX_SEGMENTS = 3u;
const uint ROW_SEED = 0u;             // 2 words, low first
const uint ROW_SEQUENCE = 2u;         // which stream of random numbers
const uint ROW_HISTORY = 3u;          // row of the history buffer
const uint ROW_FLAGS = 4u;
const uint ROW_WINDOW = 5u;           // how many tokens back penalties look
const uint ROW_REPETITION = 6u;       // f32, for logits at most 0
const uint ROW_REPETITION_INVERSE = 7u; // f32, for logits above 0
const uint ROW_PRESENCE = 8u;         // f32
const uint ROW_FREQUENCY = 9u;        // f32
const uint ROW_INVERSE_TEMPERATURE = 10u; // f32
const uint ROW_BIAS_FIRST = 11u;      // word of this buffer where the row's bias entries begin
const uint ROW_BIAS_COUNT = 12u;
const uint ROW_TOP_K = 13u;
const uint ROW_TYPICAL_P = 14u;       // units of 2^-32
const uint ROW_TOP_P = 15u;           // units of 2^-32
const uint ROW_MIN_P = 16u;           // the largest distance that is kept
const uint ROW_SCALES = 18u;          // [2]: at temperature 1 and at the row's, 3 words each:
const uint SCALE_FACTOR = 0u;         //   f32: logit units to distance units, a power of two
const uint SCALE_MULTIPLIER = 1u;     //   distance units to binary exponents
const uint SCALE_LAST = 2u;           //   the largest distance that has a weight
const uint SCALE_WORDS = 3u;
const uint ROW_ADJUST = 24u;          // [MAX_SEGMENTS] ADJUST_… bits, 0: the row has no such segment
const uint ROW_MODE = 27u;            // [MAX_SEGMENTS] MODE_… bits
const uint ROW_STAGES = 30u;          // [MAX_SEGMENTS] four bits a stage, the first one lowest
const uint ROW_LOGPROBS = 33u;        // wanted alternatives + 1, 0: no log-probabilities
const uint ROW_TARGET = 34u;          // the token whose log-probability is wanted, or SAMPLED

const uint FLAG_APPEND = 1u;          // write the token to the history
const uint SAMPLED = 0xFFFFFFFFu;     // ROW_TARGET: the token that was drawn

const uint ADJUST_PRESENT = 1u;
const uint ADJUST_TEMPERATURE = 2u;
const uint ADJUST_PENALTIES = 4u;
const uint ADJUST_BIAS = 8u;
const uint ADJUST_BANS = 16u;

const uint MODE_DRAW = 1u;            // the last segment: a token comes out
const uint MODE_SUMS = 2u;            // sums of weights of chunks are wanted
const uint MODE_SUMS_SCALE = 4u;      // at the row's temperature
const uint MODE_SHORT = 8u;           // the first truncation may work on a short list of candidates

const uint STAGE_TOP_K = 1u;
const uint STAGE_TYPICAL = 2u;
const uint STAGE_TOP_P = 3u;
const uint STAGE_MIN_P = 4u;
const uint STAGE_TEMPERATURE = 5u;
const uint STAGE_DRAW = 0u;           // no more stages: draw

const uint BIAS_WORDS = 3u;           // an entry: token, f32 bias, position before which it is banned
const uint CHUNK = 1024u;             // tokens of the vocabulary that one workgroup prepares
const uint LIST = 1024u;              // candidates of the short list, and the most groups of a row
const uint LONG_LIST = 8192u;
const uint KEPT_WORDS = 1u + 2u * LONG_LIST; // of a row: number of candidates, then (key or 0, token) of each
const uint KEPT_IN_KEYS = 0xFFFFFFFFu; // instead of a number: they are in the keys of the row
const uint MAX_LOGPROBS = 20u;
const uint LOGPROB_TOKEN = 0u;        // of a row of log-probabilities: the token,
const uint LOGPROB_LOGIT = 1u;        // its logit,
const uint LOGPROB_RANK = 2u;         // 1 + how many are more likely,
const uint LOGPROB_LARGEST = 3u;      // the largest logit,
const uint LOGPROB_SUM = 4u;          // the sum of all weights (low, high),
const uint LOGPROB_COUNT = 6u;        // how many of the most likely tokens follow:
const uint LOGPROB_TOP = 7u;          // [MAX_LOGPROBS] (token, logit)
const uint LOGPROB_WORDS = LOGPROB_TOP + 2u * MAX_LOGPROBS;
const uint NAN_TOKEN = 0xFFFFFFFFu;   // result of a row with NaN or +inf
const uint NO_TOKEN = 0xFFFFFFFEu;    // result of a row in which no token is possible

const uint EXCLUDED = 0u;             // key of a token that cannot be chosen
const uint FAR = 0x7FFFFFFFu;         // distance of what is too far to have a weight

uint key_of(uint bits) {
    const uint key = order_key(bits);
    return key == MINUS_INFINITY_KEY ? EXCLUDED : key;
}

uint logit_bits(uint key) {
    return (key & 0x80000000u) != 0u ? key ^ 0x80000000u : ~key;
}

float logit_of(uint key) {
    return uintBitsToFloat(logit_bits(key));
}

struct Scale {
    float factor;
    uint multiplier;
    uint last;
};

// Distance of a key that is not excluded below the row's largest. One f32 subtraction is the only
// rounding; factor is a power of two.
uint distance_of(uint key, uint top, Scale scale) {
    precise float below = logit_of(top) - logit_of(key);
    precise float steps = below * scale.factor;
    const uint distance = steps < 2147483648.0 ? uint(steps) : FAR;
    return key == top ? 0u : distance;
}

// 64-bit numbers as (low, high).
uvec2 add64(uvec2 a, uvec2 b) {
    uint carry;
    const uint low = uaddCarry(a.x, b.x, carry);
    return uvec2(low, a.y + b.y + carry);
}

bool less64(uvec2 a, uvec2 b) {
    return a.y < b.y || (a.y == b.y && a.x < b.x);
}

uvec2 subtract64(uvec2 a, uvec2 b) {
    return uvec2(a.x - b.x, a.y - b.y - (a.x < b.x ? 1u : 0u));
}

uvec2 multiply(uint a, uint b) {
    uvec2 product;
    umulExtended(a, b, product.y, product.x);
    return product;
}

uint multiply_high(uint a, uint b) {
    return multiply(a, b).y;
}

// 2^44 exp(-distance) as an integer: 2^-fraction by a polynomial of degree 6, shifted by the whole part.
uvec2 weight_of(uint distance, Scale scale) {
    const uint exponent = multiply_high(distance * 2u, scale.multiplier); // 25 fraction bits
    const uint fraction = exponent << 7; // units of 2^-32
    uint q = 468251u;
    q = 5475002u - multiply_high(q, fraction);
    q = 41142264u - multiply_high(q, fraction);
    q = 238330987u - multiply_high(q, fraction);
    q = 1031755803u - multiply_high(q, fraction);
    q = 2977043973u - multiply_high(q, fraction);
    const uint mantissa = 0x80000000u - (multiply_high(q, fraction) >> 1); // units of 2^-31
    const uint whole = exponent >> 25;
    const uint low = mantissa << 13, high = mantissa >> 19;
    if (whole > 44u) return uvec2(0u);
    if (whole >= 32u) return uvec2(high >> (whole - 32u), 0u);
    // two shifts, because a shift by 32 is undefined
    return uvec2((low >> whole) | ((high << 1) << (31u - whole)), high >> whole);
}

// The order argmax goes by: (key, index) pairs, the larger key first, the lower index among equals.
// Keys are integers, so that all devices agree: some flush denormals, or compare NaN in their own way.
//
// In memory a pair is (value, index), both f32, so that a buffer of floats can hold it: an index is exact up
// to 2^24, and as the bits of a float it would be a denormal.
const uint NAN_KEY = 0xFFFFFFFFu; // NaN and +infinity, above all numbers: a row with one anywhere yields it
const uint MINUS_INFINITY_KEY = 0x007FFFFFu;

// Order of floats as order of unsigned integers; -0 equals +0. A logit of +infinity is an overflow, so it
// counts as NaN: chosen, it would be the same wrong token for ever.
uint order_key(uint bits) {
    if (bits == 0x7F800000u || (bits & 0x7FFFFFFFu) > 0x7F800000u) return NAN_KEY;
    if (bits == 0x80000000u) bits = 0u;
    return (bits & 0x80000000u) != 0u ? ~bits : bits | 0x80000000u;
}

// A float of that key; of zeros +0.
uint bits_of(uint key) { return (key & 0x80000000u) != 0u ? key & 0x7FFFFFFFu : ~key; }

bool comes_before(uvec2 a, uvec2 b) {
    return a.x > b.x || (a.x == b.x && a.y < b.y);
}

uvec2 with_key(vec2 pair) { return uvec2(order_key(floatBitsToUint(pair.x)), uint(pair.y)); }

vec2 better(vec2 a, vec2 b) { return comes_before(with_key(b), with_key(a)) ? b : a; }

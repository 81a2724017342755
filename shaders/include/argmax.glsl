// The order argmax goes by: (key, index) pairs, the larger key first, the lower index among equals.
// Keys are integers, so that all devices agree: some flush denormals, or compare NaN in their own way.
const uint NAN_KEY = 0xFFFFFFFFu; // above all numbers: a row with a NaN anywhere yields it

// Order of floats as order of unsigned integers; -0 equals +0.
uint order_key(uint bits) {
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return NAN_KEY;
    if (bits == 0x80000000u) bits = 0u;
    return (bits & 0x80000000u) != 0u ? ~bits : bits | 0x80000000u;
}

bool comes_before(uvec2 a, uvec2 b) {
    return a.x > b.x || (a.x == b.x && a.y < b.y);
}

// f32 to f16 bits, rounded to nearest, ties to even, by integers: Vulkan leaves the rounding mode of
// packHalf2x16 to the driver, and the cache should be the same on every device.
uint half_bits(float x) {
    const uint bits = floatBitsToUint(x);
    const uint sign = bits >> 16u & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return sign | 0x7E00u;  // NaN
    if (magnitude >= 0x477FF000u) return sign | 0x7C00u; // 65520 and more round to infinity
    if (magnitude >= 0x38800000u)                        // normal: rebias the exponent, drop 13 bits
        return sign | (magnitude - 0x38000000u + 0xFFFu + (magnitude >> 13u & 1u)) >> 13u;
    const uint exponent = magnitude >> 23u;
    if (exponent < 102u) return sign; // below half of the smallest subnormal
    const uint shift = 126u - exponent, mantissa = (magnitude & 0x7FFFFFu) | 0x800000u; // 14 … 24 bits drop
    const uint rest = mantissa & ((1u << shift) - 1u), tie = 1u << (shift - 1u);
    const uint kept = mantissa >> shift;
    return sign | (kept + (rest > tie || (rest == tie && (kept & 1u) != 0u) ? 1u : 0u));
}

// Two floats as a word: x in the low half.
uint half_pair(float x, float y) {
    return half_bits(x) | half_bits(y) << 16u;
}

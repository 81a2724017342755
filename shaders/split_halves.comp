// Prepares rows of activations for products on matrix units: x = (high + low / 2048) 2^e with high and low in f16.
//
// 11 bits of mantissa each and a power of two that is the row's own: 22 bits of every value (23 where it
// counts: f32 has 24), whatever the row's size (Ootomo and Yokota 2022, "Recovering single precision
// accuracy from Tensor Cores"; the power of two is ours). e makes the row's largest value just below 2^11.
// Infinity and NaN become NaN.
//
// A workgroup a row; two passes, the second from cache; neighbouring lanes read neighbouring 16 bytes.
// 8 bytes an element: bound by memory, and little beside the product's weights. Columns up to the next
// multiple of 32 are zero. Output: a word of scale for every row, padded to 4, then row by row the words of
// high (two values a word) and those of low.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
layout(local_size_x_id = 0) in; // spec: local_size, a power of two
layout(set = 0, binding = 0) readonly buffer Input { float x[]; };          // [rows][x_stride]
layout(set = 0, binding = 1) readonly buffer State { uint state[]; };
layout(set = 0, binding = 2) writeonly buffer Halves { uint halves[]; };
layout(push_constant) uniform Push {
    uint x_offset; // words
    uint x_stride; // words
    uint cols;
    uint offset;   // of the output, words
    uint tokens;   // rows that the output has room for
    uint count_at; // word of the state buffer with the number of rows in use
} p;

shared uint largest[gl_WorkGroupSize.x];

float scaled(uint row, uint c, float scale) {
    return c < p.cols ? x[p.x_offset + row * p.x_stride + c] * scale : 0.0;
}

void main() {
    const uint row = gl_WorkGroupID.x, lane = gl_LocalInvocationID.x;
    if (row >= state[p.count_at])
        return; // the whole workgroup
    uint bits = 0u; // of the largest magnitude: they order as the values do, and NaN lies above infinity
    for (uint c = lane; c < p.cols; c += gl_WorkGroupSize.x)
        bits = max(bits, floatBitsToUint(x[p.x_offset + row * p.x_stride + c]) & 0x7FFFFFFFu);
    largest[lane] = bits;
    barrier();
    for (uint width = gl_WorkGroupSize.x / 2u; width > 0u; width /= 2u) {
        if (lane < width)
            largest[lane] = max(largest[lane], largest[lane + width]);
        barrier();
    }
    const uint exponent = max(largest[0] >> 23u, 11u) - 10u; // biased, of the scale
    const float inverse = uintBitsToFloat((254u - exponent) << 23u);
    if (lane == 0u)
        halves[p.offset + row] = exponent << 23u;
    const uint words = (p.cols + 31u) / 32u * 16u;
    const uint first = p.offset + (p.tokens + 3u) / 4u * 4u + row * 2u * words;
    for (uint i = lane; i < words; i += gl_WorkGroupSize.x) {
        const vec2 v = vec2(scaled(row, 2u * i, inverse), scaled(row, 2u * i + 1u, inverse));
        const uint high = packHalf2x16(v);
        halves[first + i] = high;
        // p.tokens >> 31 is zero: lest lavapipe 25 takes the second of unpack(pack(v)) for v itself
        const vec2 rest = v - unpackHalf2x16(high | (p.tokens >> 31u));
        halves[first + words + i] = packHalf2x16(rest * 2048.0);
    }
}

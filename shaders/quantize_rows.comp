// Activations in 8 bits: every 32 columns of a row become signed bytes q and a scale, x = dx q.
//
// dx is the largest absolute value divided by 127, q is x / dx rounded to the nearest. With a NaN or an
// infinity dx is NaN or infinite, and so is what is made of it. A row of y: cols / 4 words of bytes, then for
// every 32 columns dx and dx * sum(q), which formats with a minimum or an offset multiply.
// An invocation quantizes 32 columns: 128 bytes read, 40 written, some 200 flops; a row is a few KB.
// Workgroups: x = ceil(cols / 32 / local size), y = tokens. No shared memory.
#version 450
#extension GL_EXT_control_flow_attributes : require
layout(local_size_x_id = 0) in; // spec: local_size
layout(set = 0, binding = 0) readonly buffer Input { float x[]; };  // [tokens][x_stride]
layout(set = 0, binding = 1) readonly buffer State { uint state[]; };
layout(set = 0, binding = 2) writeonly buffer Output { uint y[]; }; // [tokens][y_stride]
layout(push_constant) uniform Push {
    uint x_offset; // words
    uint x_stride;
    uint y_offset;
    uint y_stride;
    uint cols;     // a multiple of 32
    uint count_at; // word of the state buffer with the number of rows in use
} p;

const float SMALLEST = 1e-30;

void main() {
    const uint block = gl_GlobalInvocationID.x, t = gl_WorkGroupID.y;
    if (block >= p.cols / 32u || t >= state[p.count_at])
        return;
    const uint from = p.x_offset + t * p.x_stride + block * 32u;
    const uint row = p.y_offset + t * p.y_stride;
    uint largest = 0u; // by bits: above every number are infinity and then NaN, which max() may lose
    for (uint i = 0u; i < 32u; i++)
        largest = max(largest, floatBitsToUint(x[from + i]) & 0x7FFFFFFFu);
    const float most = uintBitsToFloat(largest), dx = most / 127.0;
    // q is 0 where x / dx is no number, or would need a reciprocal beyond the largest float
    const bool rounds = most > SMALLEST && largest < 0x7F800000u;
    const float inverse = rounds ? 127.0 / most : 0.0;
    int sum = 0;
    for (uint i = 0u; i < 8u; i++) {
        uint word = 0u;
        [[unroll]] for (uint n = 0u; n < 4u; n++) {
            const int q = rounds ? clamp(int(roundEven(x[from + 4u * i + n] * inverse)), -127, 127) : 0;
            word |= (uint(q) & 0xFFu) << (8u * n);
            sum += q;
        }
        y[row + block * 8u + i] = word;
    }
    y[row + p.cols / 4u + 2u * block] = floatBitsToUint(dx);
    y[row + p.cols / 4u + 2u * block + 1u] = floatBitsToUint(dx * float(sum));
}

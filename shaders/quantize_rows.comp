// Activations in 8 bits: every 32 columns of a row become signed bytes q and a scale, x = dx q.
//
// dx is the largest absolute value divided by 127, q is x / dx rounded to the nearest. With a NaN or an
// infinity dx is NaN or infinite, and so is what is made of it. A row of y: cols / 4 words of bytes, then for
// every 32 columns dx and dx * sum(q), which formats with a minimum or an offset multiply.
// On GPUs BLOCK_LANES = 8 lanes share a block: neighbouring lanes read neighbouring 16 bytes (single words of
// them where the rows of x do not begin at multiples of four: ALIGNED == 0) and write neighbouring words. What
// they must know of one another, the block's largest and its sum, goes through shared memory: two barriers, no
// subgroup operations, 8 bytes a lane; eight lanes read the same words, and the eights of a subgroup words in
// different banks. On CPU devices, whose lanes gain nothing by neighbours, a lane has a block for itself.
// Bytes: 128 read and 40 written a block; some 200 flops. A row is a few KB: what counts is the time of a load
// and two barriers, and that one token fills several workgroups, 8 for 2048 columns.
// Workgroups: x = ceil(cols / 32 * BLOCK_LANES / local size), y = tokens.
#version 450
#extension GL_EXT_control_flow_attributes : require
layout(local_size_x_id = 0) in; // spec: local_size, a multiple of BLOCK_LANES
layout(constant_id = 1) const uint ALIGNED = 1u;     // x_offset and x_stride are multiples of 4
layout(constant_id = 2) const uint BLOCK_LANES = 8u; // or 1
layout(set = 0, binding = 0) readonly buffer Input { vec4 x[]; };   // [tokens][x_stride] floats
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
const uint QUADS = 8u / BLOCK_LANES; // of columns, that a lane has
#define FOR_QUADS(i) [[unroll]] for (uint i = 0u; i < QUADS; i++)
#define FOR_BLOCK_LANES(i) [[unroll]] for (uint i = 0u; i < BLOCK_LANES; i++)

shared uint most_of[gl_WorkGroupSize.x];
shared int sum_of[gl_WorkGroupSize.x];

vec4 load_x4(uint i) {
    if (ALIGNED != 0u)
        return x[i >> 2u];
    vec4 v;
    [[unroll]] for (uint n = 0u; n < 4u; n++)
        v[n] = x[(i + n) >> 2u][(i + n) & 3u];
    return v;
}

void main() {
    const uint block = gl_GlobalInvocationID.x / BLOCK_LANES, t = gl_WorkGroupID.y;
    if (t >= state[p.count_at])
        return; // the whole workgroup
    const uint lane = gl_LocalInvocationID.x, one = lane % BLOCK_LANES, first = lane - one;
    const bool inside = block < p.cols / 32u;
    const uint from = p.x_offset + t * p.x_stride + 32u * block, row = p.y_offset + t * p.y_stride;

    vec4 v[QUADS];
    uint largest = 0u; // by bits: above every number are infinity and then NaN, which max() may lose
    FOR_QUADS(i) {
        v[i] = inside ? load_x4(from + 4u * (i * BLOCK_LANES + one)) : vec4(0.0);
        const uvec4 bits = floatBitsToUint(v[i]) & 0x7FFFFFFFu;
        largest = max(largest, max(max(bits.x, bits.y), max(bits.z, bits.w)));
    }
    if (BLOCK_LANES > 1u) {
        most_of[lane] = largest;
        barrier();
        FOR_BLOCK_LANES(i) largest = max(largest, most_of[first + i]);
    }

    const float most = uintBitsToFloat(largest), dx = most / 127.0;
    // q is 0 where x / dx is no number, or would need a reciprocal beyond the largest float
    const bool rounds = most > SMALLEST && largest < 0x7F800000u;
    const float inverse = rounds ? 127.0 / most : 0.0;
    int sum = 0;
    FOR_QUADS(i) {
        const ivec4 q = rounds ? clamp(ivec4(roundEven(v[i] * inverse)), -127, 127) : ivec4(0);
        const uvec4 bytes = uvec4(q) & 0xFFu;
        if (inside)
            y[row + block * 8u + i * BLOCK_LANES + one] =
                bytes.x | bytes.y << 8u | bytes.z << 16u | bytes.w << 24u;
        sum += q.x + q.y + q.z + q.w;
    }
    if (BLOCK_LANES > 1u) {
        sum_of[lane] = sum;
        barrier();
        sum = 0;
        FOR_BLOCK_LANES(i) sum += sum_of[first + i];
    }
    if (inside && one == 0u) {
        const uint scales = row + p.cols / 4u + 2u * block;
        y[scales] = floatBitsToUint(dx);
        y[scales + 1u] = floatBitsToUint(dx * float(sum));
    }
}

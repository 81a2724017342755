// Columns in another order: y[t][c] = x[t][order[c]], one element an invocation.
//
// 12 bytes an element. Neighbouring lanes write neighbouring words and read the order so; x, a row of
// some KB, is read in any order and comes from the cache.
// Workgroups: x = ceil(cols / local size), y = tokens. No shared memory.
#version 450
layout(local_size_x_id = 0) in; // spec: local_size
layout(set = 0, binding = 0) readonly buffer Input { float x[]; };     // [tokens][x_stride]
layout(set = 0, binding = 1) readonly buffer Order { uint order[]; };  // [cols]
layout(set = 0, binding = 2) readonly buffer State { uint state[]; };
layout(set = 0, binding = 3) writeonly buffer Output { float y[]; };   // [tokens][y_stride]
layout(push_constant) uniform Push {
    uint x_offset; // words
    uint x_stride;
    uint order_offset;
    uint y_offset;
    uint y_stride;
    uint cols;
    uint count_at; // word of the state buffer with the number of rows in use
} p;

void main() {
    const uint c = gl_GlobalInvocationID.x, t = gl_WorkGroupID.y;
    if (c < p.cols && t < state[p.count_at])
        y[p.y_offset + t * p.y_stride + c] = x[p.x_offset + t * p.x_stride + order[p.order_offset + c]];
}

// Token embedding: y[t][c] = scale * W[token_id[t]][c].
//
// An invocation decodes one word of a row (1 to 8 weights). In the x8 layout the words of a row are
// eight words apart, so a row touches all lines of its group of rows: 8 times its bytes, which for a
// handful of tokens is nothing beside the matrix products (a whole table row is 1 to 20 KB).
// Workgroups: x = ceil(data words of a row / local size), y = tokens. No shared memory.
#version 450
#extension GL_GOOGLE_include_directive : require
// variants: FORMAT=f32,f16,bf16,q8_0,q4_0,q4_1
layout(local_size_x_id = 0) in; // spec: local_size
#include "formats.glsl"
#include "state.glsl"
layout(set = 0, binding = 0) readonly buffer W { uvec4 w[]; };
layout(set = 0, binding = 1) writeonly buffer Y { float y[]; }; // [tokens][y_stride] at y_offset
layout(set = 0, binding = 2) readonly buffer State { uint state[]; };
layout(push_constant) uniform Push {
    uint w_offset;  // words, a multiple of 4
    uint rows;      // of this part
    uint cols;
    uint first_row; // of this part in the whole table
    uint y_offset;  // words
    uint y_stride;  // words
    float scale;
} p;

void main() {
    const uint k = gl_GlobalInvocationID.x; // data word of the row
    const uint t = gl_WorkGroupID.y;
    if (t >= state[STATE_N_TOKENS] || k >= DATA_WORDS(p.cols))
        return;
    const uint row = state[STATE_TOKEN_ID + t] - p.first_row; // wraps for a row before this part
    if (row >= p.rows)
        return;
    const uint quad = p.w_offset / 4u + (row / 8u) * ROW_WORDS(p.cols) * 2u + ((row >> 2u) & 1u);
    const uint c = row & 3u;
    vec4 v[WEIGHTS];
    decode(w[quad + 2u * (DATA_FIRST(p.cols) + k)], v);
#ifdef SCALED
    vec4 d, m;
    const uint block = k / BLOCK_WORDS;
    scales(w[quad + 2u * scale_word(block)], block, d, m);
#endif
    const uint first = p.y_offset + t * p.y_stride;
    for (uint i = 0u; i < WEIGHTS; i++) {
#ifdef SCALED
        const float value = d[c] * v[i][c] + m[c];
#else
        const float value = v[i][c];
#endif
        const uint at = column(k, i);
        if (at < p.cols)
            y[first + at] = value * p.scale;
    }
}

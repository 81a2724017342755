// Token embedding: y[t][c] = scale * W[token_id[t]][c].
//
// An invocation decodes one unit of a row (1 to 8 weights). In the x8 layout the words of a row are
// eight words apart, so a row touches all lines of its group of rows: 8 times its bytes, which for a
// handful of tokens is nothing beside the matrix products (a whole table row is 1 to 20 KB).
// Workgroups: x = ceil(units of a row / local size), y = tokens. No shared memory.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
// variants: FORMAT=f32,f16,bf16,q8_0,q4_0,q4_1,q5_0,q5_1,q2_k,q3_k,q4_k,q5_k,q6_k,iq4_nl,iq4_xs,mxfp4,int4,int8
layout(local_size_x_id = 0) in; // spec: local_size
#define GROUP_CONSTANT 1
#include "formats.glsl"
#include "state.glsl"
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
    const uint k = gl_GlobalInvocationID.x; // unit of the row
    const uint t = gl_WorkGroupID.y;
    if (t >= state[STATE_N_TOKENS] || k >= UNITS(p.cols))
        return;
    const uint row = state[STATE_TOKEN_ID + t] - p.first_row; // wraps for a row before this part
    if (row >= p.rows)
        return;
    const uint quad = p.w_offset / 4u + (row / 8u) * ROW_WORDS(p.cols) * 2u + ((row >> 2u) & 1u);
    const uint c = row & 3u;
    uvec4 raw[RAW];
    load_unit(quad + 2u * DATA_FIRST(p.cols), k, raw);
    vec4 v[WEIGHTS];
    decode(raw, k, v);
#ifdef SCALED
    uvec4 s[SCALES_LOADED];
    load_scales(quad, k, s);
    vec4 d, m;
    open_scales(s, k, d, m);
    small_scales(s, k, d, m);
#endif
    const uint first = p.y_offset + t * p.y_stride;
    for (uint i = 0u; i < WEIGHTS; i++) {
#ifdef SCALED
        const float value = d[c] * (v[i][c] - OFFSET) + m[c];
#else
        const float value = v[i][c];
#endif
        const uint at = column(k, i);
        if (at < p.cols)
            y[first + at] = value * p.scale;
    }
}

// The weighted sum of what a token's experts gave, added to the residual stream:
// y[t] += sum over slots s of weight[t][s] * x[t * per_token + s]. A lane an element, neighbours
// neighbouring words; per_token + 2 words of memory an element.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "state.glsl"
layout(local_size_x_id = 0) in; // spec: local_size
layout(set = 0, binding = 0) readonly buffer Input { float x[]; };          // [T * per_token][x_stride]
layout(set = 0, binding = 1) readonly buffer Routing { float weights[]; };  // [T][per_token] at weights_at
layout(set = 0, binding = 2) readonly buffer State { uint state[]; };
layout(set = 0, binding = 3) buffer Output { float y[]; };                  // [T][y_stride]
layout(push_constant) uniform Push {
    uint x_offset;
    uint x_stride;
    uint weights_at;
    uint per_token;
    uint y_offset;
    uint y_stride;
    uint dim;
} p;

void main() {
    const uint i = gl_GlobalInvocationID.x, token = gl_WorkGroupID.y;
    if (token >= state[STATE_N_TOKENS] || i >= p.dim)
        return;
    const uint first = token * p.per_token, at = p.y_offset + token * p.y_stride + i;
    float sum = 0.0;
    for (uint pair = first; pair < first + p.per_token; pair++)
        sum += weights[p.weights_at + pair] * x[p.x_offset + pair * p.x_stride + i];
    y[at] += sum;
}

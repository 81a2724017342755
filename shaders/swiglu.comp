// SwiGLU or GeGLU (Shazeer 2020), elementwise: y = silu(gate) * up, or gelu(gate) * up. Only where gate
// and up come from two matrix products; usually it is the epilogue of one. 12 bytes an element.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "state.glsl"
layout(local_size_x_id = 0) in; // spec: local_size
layout(set = 0, binding = 0) readonly buffer Gate { float gate[]; }; // [T][gate_stride]
layout(set = 0, binding = 1) readonly buffer Up { float up[]; };     // [T][up_stride]
layout(set = 0, binding = 2) readonly buffer State { uint state[]; };
layout(set = 0, binding = 3) writeonly buffer Output { float y[]; }; // [T][y_stride]
layout(push_constant) uniform Push {
    uint gate_offset;
    uint gate_stride;
    uint up_offset;
    uint up_stride;
    uint y_offset;
    uint y_stride;
    uint dim;
    uint gelu; // 0: silu, 1: gelu
} p;
#include "silu.glsl"
#include "gelu.glsl"

void main() {
    const uint i = gl_GlobalInvocationID.x, token = gl_WorkGroupID.y;
    if (token >= state[STATE_N_TOKENS] || i >= p.dim) return;
    const float g = gate[p.gate_offset + token * p.gate_stride + i];
    y[p.y_offset + token * p.y_stride + i] =
        (p.gelu != 0u ? gelu_tanh(g) : silu(g)) * up[p.up_offset + token * p.up_stride + i];
}

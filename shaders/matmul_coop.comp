// Matrix products for many tokens on GPUs with matrix units; see include/coop.glsl.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_cooperative_matrix : require
// variants: FORMAT=f32,f16,bf16,q8_0,q4_0,q4_1,q5_0,q5_1,q2_k,q3_k,q4_k,q5_k,q6_k,iq4_nl,iq4_xs,mxfp4,int4,int8
layout(local_size_x_id = 0) in; // spec: local_size = 128
layout(constant_id = 1) const uint TOKENS = 64u;   // 16, 32 or 64
layout(constant_id = 2) const uint SUBGROUPS = 4u; // in a workgroup: 8, 4 or 2
layout(constant_id = 4) const uint TEAMS = 1u;     // a power of two, at most SUBGROUPS
#define GROUP_CONSTANT 5
#define FLOAT_BY_BITS
#define SPLIT_X
#include "formats.glsl"
#define EPILOGUE_LOOP [[unroll]]
#include "linear.glsl"
#include "coop.glsl"

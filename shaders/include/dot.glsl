// Dot products of four signed bytes. INTEGERS_DOT: by the instruction of SPV_KHR_integer_dot_product, for
// devices whose feature shaderIntegerDotProduct is on; else byte by byte.
#ifdef INTEGERS_DOT
    // Declared by hand (GL_EXT_spirv_intrinsics) because glslang knows GL_EXT_integer_dot_product only since
    // 2025. OpSDot with the packed vector format PackedVectorFormat4x8Bit, which is 0.
    #extension GL_EXT_spirv_intrinsics : require
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6018, 6019], id = 4450)
int packed_dot(int a, int b, spirv_literal int format);

int dot4(uint a, uint b) { return packed_dot(int(a), int(b), 0); }
#else
ivec4 signed_bytes(uint a) { return ivec4(a << 24u, a << 16u, a << 8u, a) >> 24; }

int dot4(uint a, uint b) {
    const ivec4 v = signed_bytes(a) * signed_bytes(b);
    return (v.x + v.y) + (v.z + v.w);
}
#endif

// That of four rows' words with one word.
ivec4 dot4(uvec4 rows, uint b) { return ivec4(dot4(rows.x, b), dot4(rows.y, b), dot4(rows.z, b), dot4(rows.w, b)); }

// Weight formats in the x8 layout (rows interleaved by eight, word by word; xinfer_vk/kernels/layout.py).
// A group of 8 rows is a run of uvec4: element 2k holds word k of rows 0-3, element 2k+1 of rows 4-7.
// So one 16-byte load brings one word of four rows (a "quad"), and neighbouring (word, half) pairs lie
// side by side: coalesced for any number of lanes.
//
// The format is chosen by a macro: FORMAT_F32, _F16, _BF16, _Q8_0, _Q4_0 or _Q4_1.
//   DATA_FIRST(cols)          words of scales before the weights of a row
//   ROW_WORDS(cols)           all words of a row
//   WEIGHTS                   weights in a word
//   decode(w, v)              the word's weights of four rows, before scaling
//   column(k, i)              the column of weight i of data word k
//   scale_word(block), scales(s, block, d, m)   w = d * v + m  (block formats only: SCALED)
const uint BLOCK = 32u; // columns of one quantized block

#if defined(FORMAT_F32)
    const uint WEIGHTS = 1u;
#elif defined(FORMAT_F16) || defined(FORMAT_BF16)
    const uint WEIGHTS = 2u;
#elif defined(FORMAT_Q8_0)
    #define SCALED
    const uint WEIGHTS = 4u;
#elif defined(FORMAT_Q4_0) || defined(FORMAT_Q4_1)
    #define SCALED
    #define NIBBLES
    const uint WEIGHTS = 8u;
#else
    #error "no weight format is chosen"
#endif
const uint BLOCK_WORDS = BLOCK / WEIGHTS; // data words of 32 columns

uint DATA_FIRST(uint cols) {
#if defined(FORMAT_Q4_1)
    return cols / BLOCK;
#elif defined(SCALED)
    return (cols / BLOCK + 1u) / 2u;
#else
    return 0u;
#endif
}

uint DATA_WORDS(uint cols) { return (cols + WEIGHTS - 1u) / WEIGHTS; }

uint ROW_WORDS(uint cols) { return DATA_FIRST(cols) + DATA_WORDS(cols); }

vec4 low_halves(uvec4 w) {
    return vec4(unpackHalf2x16(w.x).x, unpackHalf2x16(w.y).x, unpackHalf2x16(w.z).x, unpackHalf2x16(w.w).x);
}

vec4 high_halves(uvec4 w) { return low_halves(w >> 16u); }

void decode(uvec4 w, out vec4 v[WEIGHTS]) {
#if defined(FORMAT_F32)
    v[0] = uintBitsToFloat(w);
#elif defined(FORMAT_F16)
    v[0] = low_halves(w);
    v[1] = high_halves(w);
#elif defined(FORMAT_BF16)
    v[0] = uintBitsToFloat(w << 16u);
    v[1] = uintBitsToFloat(w & 0xFFFF0000u);
#elif defined(FORMAT_Q8_0)
    v[0] = vec4(ivec4(w << 24u) >> 24);
    v[1] = vec4(ivec4(w << 16u) >> 24);
    v[2] = vec4(ivec4(w << 8u) >> 24);
    v[3] = vec4(ivec4(w) >> 24);
#else
    for (uint i = 0u; i < 8u; i++)
        v[i] = vec4(ivec4((w >> (4u * i)) & 15u));
#endif
}

uint column(uint k, uint i) {
#if defined(NIBBLES) // byte i/2 of word j of a block: weight 4j + i/2 in the low nibble, 16 more in the high
    return (k >> 2u) * BLOCK + (k & 3u) * 4u + (i >> 1u) + (i & 1u) * 16u;
#else
    return k * WEIGHTS + i;
#endif
}

#if defined(SCALED)
uint scale_word(uint block) {
    #if defined(FORMAT_Q4_1)
    return block;
    #else
    return block >> 1u;
    #endif
}

void scales(uvec4 s, uint block, out vec4 d, out vec4 m) {
    #if defined(FORMAT_Q4_1)
    d = low_halves(s);
    m = high_halves(s);
    #else
    d = low_halves(s >> ((block & 1u) * 16u));
        #if defined(FORMAT_Q4_0)
    m = -8.0 * d;
        #else
    m = vec4(0.0);
        #endif
    #endif
}
#endif

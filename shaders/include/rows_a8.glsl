// Rows of activations in 8 bits, as quantize_rows.comp leaves them: cols / 4 words of signed bytes, then two
// floats for every 32 columns, their scale dx and dx * sum(q). And weights in the words that meet them.
uint scales_of(uint x_at, uint block) { return x_at + p.cols / 4u + 2u * block; }

vec2 load_x_scales(uint x_at, uint block) {
    const uint at = scales_of(x_at, block);
    return vec2(uintBitsToFloat(x[at]), uintBitsToFloat(x[at + 1u]));
}

#if defined(PAIRED)
const uint RUNS = 2u; // words of four weights in a unit

void unit_words(uvec4 raw[RAW], out uvec4 q[RUNS]) {
    q[0] = raw[0] & LOW_NIBBLES;
    q[1] = (raw[0] >> 4u) & LOW_NIBBLES;
}

// The word of x, from the row's first one on, that run r of unit k meets.
uint x_word(uint k, uint r) { return k / BLOCK_UNITS * 8u + k % BLOCK_UNITS + 4u * r; }
#else
const uint RUNS = 1u;

void unit_words(uvec4 raw[RAW], out uvec4 q[RUNS]) { q[0] = raw[0]; }

uint x_word(uint k, uint r) { return k; }
#endif

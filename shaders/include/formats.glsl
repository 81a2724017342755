// Weight formats in the x8 layout (rows interleaved by eight, word by word; xinfer_vk/kernels/layout.py).
// A group of 8 rows is a run of uvec4: element 2k holds word k of rows 0-3, element 2k+1 of rows 4-7.
// So one 16-byte load brings one word of four rows (a "quad"), and neighbouring (word, half) pairs lie
// side by side: coalesced for any number of lanes.
//
// What is decoded at once is a unit: WEIGHTS neighbouring weights of a quad of rows, from RAW words.
// The format is chosen by a macro, FORMAT_F32, FORMAT_Q4_K, …:
//   DATA_FIRST(cols)          words of scales before the weights of a row
//   ROW_WORDS(cols)           all words of a row
//   UNITS(cols)               units of a row
//   load_unit(first, k, raw)  the words of unit k; first: index in w of the row's first word of weights
//   decode(raw, k, v)         its weights, before scaling
//   column(k, i)              the column of weight i of unit k
// In block formats (SCALED) w = d (v - OFFSET) + m, m with MINIMUM only, and:
//   SCALE_UNITS               units that share d and m
//   load_scales(quad, k, s)   the words with the scales of unit k; quad: index in w of the row
//   open_scales(s, k, d, m)   their f16 part, which in a super-block of 256 (SUPER) serves SUPER_UNITS units
//   small_scales(s, k, d, m)  d and m of unit k, from those
// PAIRED formats (all block formats but q8_0 and int8) have units of eight weights in two runs of four, the
// low and the high nibbles. ADJACENT: the runs are neighbours; else they are 16 columns apart.
// In GROUPED formats (GPTQ, AWQ) m = -d zero, and how many columns share them is a specialization constant,
// whose id the including shader gives as GROUP_CONSTANT.
// A shader that has other ways to load w[i] defines LOAD_DATA(i), for words of weights, and LOAD_SCALES(i).
layout(set = 0, binding = 0) readonly buffer W { uvec4 w[]; };
#ifndef LOAD_DATA
    #define LOAD_DATA(i) w[i]
    #define LOAD_SCALES(i) w[i]
#endif

const uint BLOCK = 32u; // columns whose weights lie together

#if defined(FORMAT_F32)
    const uint WEIGHTS = 1u;
#elif defined(FORMAT_F16) || defined(FORMAT_BF16)
    const uint WEIGHTS = 2u;
#elif defined(FORMAT_Q8_0) || defined(FORMAT_INT8)
    #define SCALED
    #define BYTES
    const uint WEIGHTS = 4u;
#else
    #define SCALED
    #define PAIRED
    const uint WEIGHTS = 8u;
#endif
const uint BLOCK_UNITS = BLOCK / WEIGHTS;

// SCALE_COLUMNS share SCALE_WORDS words of scales. PLANES: words of upper bits of every 32 columns.
#if defined(FORMAT_Q2_K) || defined(FORMAT_Q6_K)
    const uint SCALE_COLUMNS = 256u, SCALE_WORDS = 5u;
    #define SUPER
    #define ADJACENT
    #define PLANES 2
#elif defined(FORMAT_Q3_K)
    const uint SCALE_COLUMNS = 256u, SCALE_WORDS = 4u;
    #define SUPER
    #define ADJACENT
    #define PLANES 3
#elif defined(FORMAT_Q4_K)
    const uint SCALE_COLUMNS = 256u, SCALE_WORDS = 4u;
    #define SUPER
    #define PLANES 0
#elif defined(FORMAT_Q5_K)
    const uint SCALE_COLUMNS = 256u, SCALE_WORDS = 4u;
    #define SUPER
    #define PLANES 1
#elif defined(FORMAT_IQ4_XS)
    const uint SCALE_COLUMNS = 256u, SCALE_WORDS = 2u;
    #define SUPER
    #define PLANES 0
#elif defined(FORMAT_Q4_1)
    const uint SCALE_COLUMNS = 32u, SCALE_WORDS = 1u;
    #define PLANES 0
#elif defined(FORMAT_Q5_1)
    const uint SCALE_COLUMNS = 32u, SCALE_WORDS = 1u;
    #define PLANES 1
#elif defined(FORMAT_Q5_0)
    const uint SCALE_COLUMNS = 64u, SCALE_WORDS = 1u;
    #define PLANES 1
#elif defined(FORMAT_MXFP4)
    const uint SCALE_COLUMNS = 128u, SCALE_WORDS = 1u;
    #define PLANES 0
#elif defined(FORMAT_Q8_0) || defined(FORMAT_Q4_0) || defined(FORMAT_IQ4_NL)
    const uint SCALE_COLUMNS = 64u, SCALE_WORDS = 1u;
    #define PLANES 0
#elif defined(FORMAT_INT4) || defined(FORMAT_INT8)
    // Of every ZEROS groups a word of zeros, then their f16 scales; the last ones may be fewer.
    #define GROUPED
    #define PLANES 0
layout(constant_id = GROUP_CONSTANT) const uint GROUP = 128u; // a multiple of 32; may be beyond the row
    #if defined(FORMAT_INT4)
    const uint ZEROS = 8u;
    #else
    const uint ZEROS = 4u;
    #endif
    const uint SCALE_WORDS = 2u; // that a unit needs
#elif defined(SCALED)
    #error "no weight format is chosen"
#endif

#if defined(FORMAT_Q2_K) || defined(FORMAT_Q3_K) // all bits are in planes
    const uint NIBBLE_WORDS = 0u;
#else
    #define NIBBLES
    const uint NIBBLE_WORDS = 4u;
#endif
#if defined(FORMAT_Q4_1) || defined(FORMAT_Q5_1) || defined(FORMAT_Q2_K) || defined(FORMAT_Q4_K) \
    || defined(FORMAT_Q5_K) || defined(GROUPED)
    #define MINIMUM
#endif
#if defined(FORMAT_Q4_0)
    #define OFFSET 8.0
#elif defined(FORMAT_Q5_0)
    #define OFFSET 16.0
#elif defined(FORMAT_Q6_K)
    #define OFFSET 32.0
#elif defined(FORMAT_Q3_K)
    #define OFFSET 4.0
#elif defined(FORMAT_MXFP4)
    #define OFFSET 12.0
#else
    #define OFFSET 0.0
    #define NO_OFFSET
#endif
// A product needs sum(x) where there is a LEVEL: sum(w x) = d sum(v x) + LEVEL(d, m) sum(x).
#if !defined(NO_OFFSET)
    #define SUMS
    #define LEVEL(d, m) (-OFFSET * (d))
#elif defined(MINIMUM)
    #define SUMS
    #define LEVEL(d, m) (m)
#endif

#if defined(PAIRED)
    const uint BLOCK_WORDS = NIBBLE_WORDS + PLANES; // of 32 columns
    #if defined(NIBBLES)
        const uint RAW = 1u + PLANES;
    #else
        const uint RAW = PLANES;
    #endif
#else
    const uint BLOCK_WORDS = BLOCK_UNITS;
    const uint RAW = 1u;
#endif
#if defined(ADJACENT)
    const uint SCALE_UNITS = 2u;
#else
    const uint SCALE_UNITS = BLOCK_UNITS;
#endif
// Words that load_scales brings: of a super-block with a word of scales for every four parts, the one
// that the unit needs, unless ALL_SCALES is defined, which makes them serve the whole super-block.
#if (defined(FORMAT_Q2_K) || defined(FORMAT_Q6_K)) && !defined(ALL_SCALES)
    #define ONE_SCALE_WORD
    const uint SCALES_LOADED = 2u;
#elif defined(SCALED)
    const uint SCALES_LOADED = SCALE_WORDS;
#endif
const uint SUPER_UNITS = 32u; // 256 columns

uint DATA_FIRST(uint cols) {
#if defined(GROUPED)
    const uint groups = (cols - 1u) / GROUP + 1u, rest = groups % ZEROS;
    return groups / ZEROS * (1u + ZEROS / 2u) + (rest == 0u ? 0u : 1u + (rest + 1u) / 2u);
#elif defined(SCALED)
    return (cols + SCALE_COLUMNS - 1u) / SCALE_COLUMNS * SCALE_WORDS;
#else
    return 0u;
#endif
}

uint UNITS(uint cols) { return (cols + WEIGHTS - 1u) / WEIGHTS; }

uint ROW_WORDS(uint cols) {
#if defined(SCALED)
    return DATA_FIRST(cols) + cols / BLOCK * BLOCK_WORDS;
#else
    return UNITS(cols);
#endif
}

uint column(uint k, uint i) {
#if defined(PAIRED) && !defined(ADJACENT) // byte i/2: weight 4j + i/2 in the low nibble, 16 more in the high
    return (k >> 2u) * BLOCK + (k & 3u) * 4u + (i >> 1u) + (i & 1u) * 16u;
#elif defined(PAIRED)
    return k * WEIGHTS + (i >> 1u) + (i & 1u) * 4u;
#else
    return k * WEIGHTS + i;
#endif
}

// Small integers to floats. Converting is slow on GPUs (a quarter of the rate of other arithmetic or less);
// FLOAT_BY_BITS puts the integer, below 2^23, in a float's mantissa and subtracts the 2^23 that it then has.
#ifdef FLOAT_BY_BITS
vec4 to_float(uvec4 v) { return uintBitsToFloat(v | 0x4B000000u) - 8388608.0; }
#else
vec4 to_float(uvec4 v) { return vec4(ivec4(v)); }
#endif

vec4 low_halves(uvec4 s) {
    return vec4(unpackHalf2x16(s.x).x, unpackHalf2x16(s.y).x, unpackHalf2x16(s.z).x, unpackHalf2x16(s.w).x);
}

vec4 high_halves(uvec4 s) { return low_halves(s >> 16u); }

void load_unit(uint first, uint k, out uvec4 raw[RAW]) {
#if defined(PAIRED)
    const uint at = first + 2u * (k >> 2u) * BLOCK_WORDS;
    #if defined(NIBBLES)
    raw[0] = LOAD_DATA(at + 2u * (k & 3u));
    #endif
    [[unroll]] for (uint i = 0u; i < PLANES; i++)
        raw[RAW - PLANES + i] = LOAD_DATA(at + 2u * (NIBBLE_WORDS + i));
#else
    raw[0] = LOAD_DATA(first + 2u * k);
#endif
}

#if defined(PAIRED)
const uint LOW_NIBBLES = 0x0F0F0F0Fu, LOW_PAIRS = 0x03030303u, LOW_BITS = 0x01010101u;

// The runs of four stand in `low` and `high` where they lie in a word, too large by a power of two:
// weight n of a run is RUN_PLACE[n] times that (LOW_PLACE, HIGH_PLACE).
    #if defined(FORMAT_IQ4_NL) || defined(FORMAT_IQ4_XS)
const vec4 LOW_PLACE = vec4(1.0), HIGH_PLACE = vec4(1.0);

// The value that a four-bit code stands for (IQ4_VALUES), from a table of bytes in four words.
vec4 iq4_value(uvec4 code) {
    const uvec4 above = mix(uvec4(0x26190D01u), uvec4(0x71594535u), notEqual(code & 4u, uvec4(0u)));
    const uvec4 below = mix(uvec4(0xBFAD9881u), uvec4(0xF6EADDCFu), notEqual(code & 4u, uvec4(0u)));
    const uvec4 four = mix(below, above, notEqual(code & 8u, uvec4(0u)));
    return vec4(ivec4(four << (24u - 8u * (code & 3u))) >> 24);
}
    #elif defined(FLOAT_BY_BITS) // the upper half of a word is shifted down
const vec4 LOW_PLACE = vec4(1.0, 1.0 / 256.0, 1.0, 1.0 / 256.0);
        #if PLANES == 0 && !defined(FORMAT_MXFP4)
const vec4 HIGH_PLACE = LOW_PLACE / 16.0;
        #else
const vec4 HIGH_PLACE = LOW_PLACE;
        #endif
    #elif PLANES == 0 && !defined(FORMAT_MXFP4)
const vec4 LOW_PLACE = vec4(1.0, 1.0 / 256.0, 1.0 / 65536.0, 1.0 / 16777216.0);
const vec4 HIGH_PLACE = vec4(1.0 / 16.0, 1.0 / 4096.0, 1.0 / 1048576.0, 1.0);
    #else
const vec4 LOW_PLACE = vec4(1.0, 1.0 / 256.0, 1.0 / 65536.0, 1.0 / 16777216.0);
const vec4 HIGH_PLACE = LOW_PLACE;
    #endif

    #if defined(FORMAT_MXFP4)
// 12 + the value of each of four codes (MXFP4_VALUES), byte by byte: codes 0 to 7 are 0 1 2 3 4 6 8 12,
// which is the code, plus its low two bits from 4 on, plus 2 at 7.
uvec4 mxfp4_bytes(uvec4 codes) {
    const uvec4 bit2 = (codes >> 2u) & LOW_BITS;
    const uvec4 size = (codes & 0x07070707u) + (codes & (bit2 * 3u)) + ((bit2 & (codes >> 1u) & codes) << 1u);
    const uvec4 positive = 0x01010101u - ((codes >> 3u) & LOW_BITS);
    return 0x0C0C0C0Cu - size + ((size & (positive * 15u)) << 1u);
}
    #endif

// Unit i (0 to 3) of 32 columns.
void decode_placed(uvec4 raw[RAW], uint i, out vec4 low[4], out vec4 high[4]) {
    #if defined(FORMAT_IQ4_NL) || defined(FORMAT_IQ4_XS)
    [[unroll]] for (uint n = 0u; n < 4u; n++) {
        low[n] = iq4_value(raw[0] >> (8u * n));
        high[n] = iq4_value(raw[0] >> (8u * n + 4u));
    }
    #elif PLANES == 0 && !defined(FORMAT_MXFP4) && defined(FLOAT_BY_BITS)
    [[unroll]] for (uint n = 0u; n < 4u; n++) {
        const uvec4 half_word = raw[0] >> (16u * (n >> 1u));
        low[n] = to_float(half_word & (0xFu << (8u * (n & 1u))));
        high[n] = to_float(half_word & (0xF0u << (8u * (n & 1u))));
    }
    #elif PLANES == 0 && !defined(FORMAT_MXFP4)
    [[unroll]] for (uint n = 0u; n < 4u; n++) {
        low[n] = vec4(ivec4(raw[0] & (0xFu << (8u * n))));
        high[n] = n < 3u ? vec4(ivec4(raw[0] & (0xF0u << (8u * n)))) : vec4(ivec4(raw[0] >> 28u));
    }
    #else
        #if defined(FORMAT_MXFP4)
    const uvec4 l = mxfp4_bytes(raw[0] & LOW_NIBBLES), h = mxfp4_bytes((raw[0] >> 4u) & LOW_NIBBLES);
        #elif defined(FORMAT_Q2_K)
    const uvec4 l = (raw[0] >> (2u * i)) & LOW_PAIRS, h = (raw[1] >> (2u * i)) & LOW_PAIRS;
        #elif defined(FORMAT_Q3_K)
    const uvec4 l = ((raw[0] >> (2u * i)) & LOW_PAIRS) | (((raw[2] >> i) & LOW_BITS) << 2u);
    const uvec4 h = ((raw[1] >> (2u * i)) & LOW_PAIRS) | (((raw[2] >> (i + 4u)) & LOW_BITS) << 2u);
        #elif defined(FORMAT_Q6_K)
    const uvec4 l = (raw[0] & LOW_NIBBLES) | (((raw[1] >> (2u * i)) & LOW_PAIRS) << 4u);
    const uvec4 h = ((raw[0] >> 4u) & LOW_NIBBLES) | (((raw[2] >> (2u * i)) & LOW_PAIRS) << 4u);
        #else
    const uvec4 l = (raw[0] & LOW_NIBBLES) | (((raw[1] >> i) & LOW_BITS) << 4u);
    const uvec4 h = ((raw[0] >> 4u) & LOW_NIBBLES) | (((raw[1] >> (i + 4u)) & LOW_BITS) << 4u);
        #endif
    [[unroll]] for (uint n = 0u; n < 4u; n++) { // no byte is above 63: the highest one is positive, too
        #ifdef FLOAT_BY_BITS
        low[n] = to_float((l >> (16u * (n >> 1u))) & (0xFFu << (8u * (n & 1u))));
        high[n] = to_float((h >> (16u * (n >> 1u))) & (0xFFu << (8u * (n & 1u))));
        #else
        low[n] = vec4(ivec4(l & (0xFFu << (8u * n))));
        high[n] = vec4(ivec4(h & (0xFFu << (8u * n))));
        #endif
    }
    #endif
}
#endif

void decode(uvec4 raw[RAW], uint k, out vec4 v[WEIGHTS]) {
#if defined(FORMAT_F32)
    v[0] = uintBitsToFloat(raw[0]);
#elif defined(FORMAT_F16)
    v[0] = low_halves(raw[0]);
    v[1] = high_halves(raw[0]);
#elif defined(FORMAT_BF16)
    v[0] = uintBitsToFloat(raw[0] << 16u);
    v[1] = uintBitsToFloat(raw[0] & 0xFFFF0000u);
#elif defined(BYTES) && defined(FLOAT_BY_BITS) // 128 more, so that no byte is negative
    const uvec4 bytes = raw[0] ^ 0x80808080u;
    [[unroll]] for (uint n = 0u; n < 4u; n++)
        v[n] = uintBitsToFloat(((bytes >> (8u * n)) & 0xFFu) | 0x4B000000u) - (8388608.0 + 128.0);
#elif defined(BYTES)
    v[0] = vec4(ivec4(raw[0] << 24u) >> 24);
    v[1] = vec4(ivec4(raw[0] << 16u) >> 24);
    v[2] = vec4(ivec4(raw[0] << 8u) >> 24);
    v[3] = vec4(ivec4(raw[0]) >> 24);
#else
    vec4 low[4], high[4];
    decode_placed(raw, k & 3u, low, high);
    [[unroll]] for (uint n = 0u; n < 4u; n++) {
        v[2u * n] = low[n] * LOW_PLACE[n];
        v[2u * n + 1u] = high[n] * HIGH_PLACE[n];
    }
#endif
}

#if defined(SCALED)
void load_scales(uint quad, uint k, out uvec4 s[SCALES_LOADED]) {
    #ifdef GROUPED
    const uint group = k * WEIGHTS / GROUP;
    const uint at = quad + 2u * (group / ZEROS * (1u + ZEROS / 2u));
    s[0] = LOAD_SCALES(at);
    s[1] = LOAD_SCALES(at + 2u * (1u + group % ZEROS / 2u));
    #else
    const uint at = quad + 2u * (k / (SCALE_COLUMNS / WEIGHTS) * SCALE_WORDS);
    #endif
    #ifdef ONE_SCALE_WORD
    s[0] = LOAD_SCALES(at);
    s[1] = LOAD_SCALES(at + 2u * (1u + ((k / SCALE_UNITS >> 2u) & 3u)));
    #elif !defined(GROUPED)
    [[unroll]] for (uint i = 0u; i < SCALE_WORDS; i++)
        s[i] = LOAD_SCALES(at + 2u * i);
    #endif
}

void open_scales(uvec4 s[SCALES_LOADED], uint k, out vec4 d, out vec4 m) {
    m = vec4(0.0);
    #if defined(FORMAT_MXFP4) // half of 2^(e - 127), as a float's bits; the smallest two have no exponent
    const uvec4 e = (s[0] >> (8u * ((k / BLOCK_UNITS) & 3u))) & 0xFFu;
    d = uintBitsToFloat(mix((e - 1u) << 23u, uvec4(0x00200000u) << e, lessThan(e, uvec4(2u))));
    #elif defined(GROUPED) // m is exact: 11 bits times 8
    const uint group = k * WEIGHTS / GROUP;
    d = low_halves(s[1] >> (16u * (group & 1u)));
        #if defined(FORMAT_INT4)
    m = -d * vec4(ivec4((s[0] >> (4u * (group & 7u))) & 15u));
        #else
    m = -d * vec4(ivec4(s[0] << (24u - 8u * (group & 3u))) >> 24);
        #endif
    #elif defined(SUPER) || defined(MINIMUM)
    d = low_halves(s[0]);
        #if defined(MINIMUM)
    m = high_halves(s[0]);
        #endif
    #else
    d = low_halves(s[0] >> ((k / BLOCK_UNITS & 1u) * 16u));
    #endif
}

void small_scales(uvec4 s[SCALES_LOADED], uint k, inout vec4 d, inout vec4 m) {
    #if defined(FORMAT_Q4_K) || defined(FORMAT_Q5_K) // 6 bits each; of blocks 4 to 7 in two pieces
    const uint block = (k / BLOCK_UNITS) & 7u, shift = 8u * (block & 3u);
    uvec4 ds = (s[1] >> shift) & 63u, ms = (s[2] >> shift) & 63u;
    if (block >= 4u) {
        ds = ((s[3] >> shift) & 15u) | ((s[1] >> (shift + 2u)) & 48u);
        ms = ((s[3] >> (shift + 4u)) & 15u) | ((s[2] >> (shift + 2u)) & 48u);
    }
    d *= to_float(ds);
    m *= -to_float(ms);
    #elif defined(FORMAT_IQ4_XS)
    const uint block = (k / BLOCK_UNITS) & 7u;
    const uvec4 ds = ((s[1] >> (4u * block)) & 15u) | (((s[0] >> (16u + 2u * block)) & 3u) << 4u);
    d *= to_float(ds) - 32.0;
    #elif defined(FORMAT_Q3_K)
    const uint part = (k / SCALE_UNITS) & 15u, shift = 8u * (part & 3u);
    const uvec4 low = (part & 4u) == 0u ? s[1] : s[2];
    const uvec4 ds = ((low >> (shift + 4u * (part >> 3u))) & 15u)
        | (((s[3] >> (shift + 2u * (part >> 2u))) & 3u) << 4u);
    d *= to_float(ds) - 32.0;
    #elif defined(SUPER) // q2_k, q6_k: a byte for every 16 columns
    const uint part = (k / SCALE_UNITS) & 15u, shift = 8u * (part & 3u);
        #ifdef ONE_SCALE_WORD
    const uvec4 four = s[1];
        #else
    const uvec4 four = part < 8u ? (part < 4u ? s[1] : s[2]) : (part < 12u ? s[3] : s[4]);
        #endif
        #if defined(FORMAT_Q6_K)
    d *= to_float(((four >> shift) & 0xFFu) ^ 0x80u) - 128.0;
        #else
    d *= to_float((four >> shift) & 15u);
    m *= -to_float((four >> (shift + 4u)) & 15u);
        #endif
    #endif
}
#endif

// Reading the paged KV cache, whose layout and formats xinfer_vk/kernels/kv.py describes. Before it is included:
//   KV_F32, KV_F16, KV_Q8_0 or KV_Q4_0, HEAD_DIM, and two views of the cache buffer, `uint cache[]` and
//   `uvec4 cache4[]`.
//
// Eight lanes work together. Over keys a lane owns 4 neighbouring tokens of the block of 32: one 16-byte load a
// lane, and the eight of them 128 bytes in a row. Over values it owns CHUNKS runs of neighbouring dims of the
// vector, of LANE_WORDS words: 4, or fewer where a quantized vector is shorter than 128 bytes.
#include "kv_words.glsl"
const uint DATA_WORDS = HEAD_DIM / WORD_DIMS;
#ifdef QUANTIZED
const uint SCALE_WORDS = (HEAD_DIM + 63u) / 64u;
const uint LANE_WORDS = DATA_WORDS > 16u ? 4u : DATA_WORDS > 8u ? 2u : 1u;
const uint SCALE_EIGHTS = 4u; // eights of dims that share a scale
#else
const uint SCALE_WORDS = 0u;
const uint LANE_WORDS = DATA_WORDS % 4u == 0u ? 4u : 1u; // a value vector begins at a multiple of 16 bytes
const uint SCALE_EIGHTS = (HEAD_DIM + 7u) / 8u;
#endif
const uint VECTOR_WORDS = DATA_WORDS + SCALE_WORDS;
const uint CHUNK_WORDS = 8u * LANE_WORDS;
const uint CHUNKS = (DATA_WORDS + CHUNK_WORDS - 1u) / CHUNK_WORDS;
const uint LANE_DIMS = LANE_WORDS * WORD_DIMS; // dims of one lane in one chunk
const uint MAX_LANE_DIMS = 4u * WORD_DIMS;     // what arrays are sized by: glslang sizes them too early
const uint EIGHTS = (HEAD_DIM + 7u) / 8u;      // steps of 8 dims over a vector

// First word of one KV head in a block, relative to the layer's K (or V) region.
uint head_words(uint block, uint kv_head, uint kv_heads) {
    return (block * kv_heads + kv_head) * VECTOR_WORDS * BLOCK_TOKENS;
}

// The four dims that a word of q8_0, or a half of a word of q4_0, holds, without their scale.
vec4 quantized(uint word) {
#ifdef KV_Q4_0
    return vec4(word & 15u, word >> 4u & 15u, word >> 8u & 15u, word >> 12u & 15u) - 8.0;
#else
    const int bytes = int(word);
    return vec4(bitfieldExtract(bytes, 0, 8), bitfieldExtract(bytes, 8, 8), bitfieldExtract(bytes, 16, 8),
                bytes >> 24);
#endif
}

// One of the two scales in a word.
float scale_of(uint word, uint which) {
    return unpackHalf2x16(which == 0u ? word : word >> 16u).x;
}

// Word of a key vector to read; past its end the last one, which the caller multiplies by zero.
uint key_word(uint word) {
    return HEAD_DIM % 8u == 0u ? word : min(word, DATA_WORDS - 1u);
}

// What is loaded once for two quads: words of q4_0, which hold eight dims. `at` as in load_keys.
uvec4 load_eight(uint at, uint eight) {
#ifdef KV_Q4_0
    return cache4[at + eight * 8u];
#else
    return uvec4(0u);
#endif
}

// Dims 4 quad … 4 quad + 3 of the lane's 4 tokens, without their scales. `at`: cache4 index of the lane's
// tokens at word 0; `eight`: load_eight of quad / 2.
void load_keys(uint at, uint quad, uvec4 eight, out vec4 keys[4]) {
#if defined(KV_F16)
    const uvec4 low = cache4[at + key_word(quad * 2u) * 8u];
    const uvec4 high = cache4[at + key_word(quad * 2u + 1u) * 8u];
    [[unroll]] for (uint i = 0u; i < 4u; ++i)
        keys[i] = vec4(unpackHalf2x16(low[i]), unpackHalf2x16(high[i]));
#elif defined(KV_Q8_0)
    const uvec4 words = cache4[at + quad * 8u];
    [[unroll]] for (uint i = 0u; i < 4u; ++i)
        keys[i] = quantized(words[i]);
#elif defined(KV_Q4_0)
    [[unroll]] for (uint i = 0u; i < 4u; ++i)
        keys[i] = quantized(eight[i] >> ((quad & 1u) * 16u));
#else
    [[unroll]] for (uint dim = 0u; dim < 4u; ++dim) {
        const uvec4 words = cache4[at + key_word(quad * 4u + dim) * 8u];
        [[unroll]] for (uint i = 0u; i < 4u; ++i)
            keys[i][dim] = uintBitsToFloat(words[i]);
    }
#endif
}

#ifdef QUANTIZED
// Words of the scales of the lane's 4 tokens, of blocks 2 pair and 2 pair + 1 of their keys (or values). `at` as
// in load_keys, of the keys (or the values).
uvec4 load_scales(uint at, uint pair) {
    return cache4[at + (DATA_WORDS + pair) * 8u];
}
#endif

// Word of a value vector where the lane's dims of a chunk begin; at the ragged end of the vector a
// lane without dims reads another's.
uint value_word(uint chunk, uint lane) {
    const uint unit = chunk * 8u + lane;
    return (DATA_WORDS % CHUNK_WORDS == 0u ? unit : min(unit, DATA_WORDS / LANE_WORDS - 1u)) * LANE_WORDS;
}

// The lane's dims of a chunk, of the value vector at word `at`, without their scale.
void load_values(uint at, uint chunk, uint lane, out float values[MAX_LANE_DIMS]) {
    const uint first = at + value_word(chunk, lane);
    uvec4 words = uvec4(0u);
    if (LANE_WORDS == 4u) {
        words = cache4[first / 4u];
    } else {
        [[unroll]] for (uint i = 0u; i < LANE_WORDS; ++i)
            words[i] = cache[first + i];
    }
    [[unroll]] for (uint i = 0u; i < LANE_WORDS; ++i) {
#if defined(KV_F16)
        const vec2 pair = unpackHalf2x16(words[i]);
        values[i * 2u] = pair.x;
        values[i * 2u + 1u] = pair.y;
#elif defined(QUANTIZED)
        [[unroll]] for (uint quad = 0u; quad < WORD_DIMS / 4u; ++quad) {
            const vec4 dims = quantized(words[i] >> (quad * 16u));
            [[unroll]] for (uint d = 0u; d < 4u; ++d)
                values[i * WORD_DIMS + quad * 4u + d] = dims[d];
        }
#else
        values[i] = uintBitsToFloat(words[i]);
#endif
    }
}

// First dim of the lane's share of a chunk; HEAD_DIM or more means it has none.
uint lane_dim(uint chunk, uint lane) {
    return (chunk * 8u + lane) * LANE_DIMS;
}

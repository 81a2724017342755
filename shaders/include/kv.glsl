// Reading the paged KV cache, whose layout xinfer_vk/kernels/kv.py describes. Before it is included:
//   KV_F16 or KV_F32, HEAD_DIM, and two views of the cache buffer, `uint cache[]` and `uvec4 cache4[]`.
//
// Eight lanes work together. Over keys a lane owns 4 neighbouring tokens of the block of 32, over
// values it owns CHUNKS runs of neighbouring dims of the vector: both are one 16-byte load a lane, and
// the eight of them 128 bytes in a row.
#ifdef KV_F16
const uint WORD_DIMS = 2u; // dims in a word
#else
const uint WORD_DIMS = 1u;
#endif
const uint VECTOR_WORDS = HEAD_DIM / WORD_DIMS;
const bool ALIGNED = VECTOR_WORDS % 4u == 0u; // a value vector begins at a multiple of 16 bytes
const uint LANE_WORDS = ALIGNED ? 4u : 1u;
const uint CHUNK_WORDS = 8u * LANE_WORDS;
const uint CHUNKS = (VECTOR_WORDS + CHUNK_WORDS - 1u) / CHUNK_WORDS;
const uint LANE_DIMS = LANE_WORDS * WORD_DIMS; // dims of one lane in one chunk
const uint MAX_LANE_DIMS = 4u * WORD_DIMS;     // what arrays are sized by: glslang sizes them too early
const uint QUADS = (HEAD_DIM + 7u) / 8u * 2u;  // steps of 4 dims over a vector, an even number

// First word of one KV head in a block, relative to the layer's K (or V) region.
uint head_words(uint block, uint kv_head, uint kv_heads) {
    return (block * kv_heads + kv_head) * VECTOR_WORDS * BLOCK_TOKENS;
}

// Word of a key vector to read; past its end the last one, which the caller multiplies by zero.
uint key_word(uint word) {
    return HEAD_DIM % 8u == 0u ? word : min(word, VECTOR_WORDS - 1u);
}

// Dims 4 quad … 4 quad + 3 of the lane's 4 tokens. `at`: cache4 index of the lane's tokens at dim 0.
void load_keys(uint at, uint quad, out vec4 keys[4]) {
#ifdef KV_F16
    const uvec4 low = cache4[at + key_word(quad * 2u) * 8u];
    const uvec4 high = cache4[at + key_word(quad * 2u + 1u) * 8u];
    [[unroll]] for (uint i = 0u; i < 4u; ++i)
        keys[i] = vec4(unpackHalf2x16(low[i]), unpackHalf2x16(high[i]));
#else
    [[unroll]] for (uint dim = 0u; dim < 4u; ++dim) {
        const uvec4 words = cache4[at + key_word(quad * 4u + dim) * 8u];
        [[unroll]] for (uint i = 0u; i < 4u; ++i)
            keys[i][dim] = uintBitsToFloat(words[i]);
    }
#endif
}

// Word of a value vector where the lane's dims of a chunk begin; at the ragged end of the vector a
// lane without dims reads another's.
uint value_word(uint chunk, uint lane) {
    const uint unit = chunk * 8u + lane;
    return (VECTOR_WORDS % CHUNK_WORDS == 0u ? unit : min(unit, VECTOR_WORDS / LANE_WORDS - 1u)) * LANE_WORDS;
}

// The lane's dims of a chunk, of the value vector at word `at`.
void load_values(uint at, uint chunk, uint lane, out float values[MAX_LANE_DIMS]) {
    const uint word = at + value_word(chunk, lane);
    if (ALIGNED) {
        const uvec4 words = cache4[word / 4u];
#ifdef KV_F16
        [[unroll]] for (uint i = 0u; i < 4u; ++i) {
            const vec2 pair = unpackHalf2x16(words[i]);
            values[i * 2u] = pair.x;
            values[i * 2u + 1u] = pair.y;
        }
#else
        [[unroll]] for (uint i = 0u; i < 4u; ++i)
            values[i] = uintBitsToFloat(words[i]);
#endif
    } else {
#ifdef KV_F16
        const vec2 pair = unpackHalf2x16(cache[word]);
        values[0] = pair.x;
        values[1] = pair.y;
#else
        values[0] = uintBitsToFloat(cache[word]);
#endif
    }
}

// First dim of the lane's share of a chunk; HEAD_DIM or more means it has none.
uint lane_dim(uint chunk, uint lane) {
    return (chunk * 8u + lane) * LANE_DIMS;
}

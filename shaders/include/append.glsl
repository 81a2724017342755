// New tokens made ready for attention: RMSNorm of every query and key head by itself (NORM), rotary position embedding
// of both, and keys and values as words of the paged KV cache. append_kv.comp does only this; attention.comp does it
// in decode steps for the token that it attends from.
//
// A workgroup takes some query and some key heads of one token, its *vectors*, queries first, and the values that
// belong to the keys. A lane owns whole pairs of dims. Keys, and values that are quantized, are first brought together
// in shared memory, because a word of the cache holds dims that several lanes made. What becomes of a query and of a
// word is the shader's to say: keep_query and put.
//
// RoPE is in the rotate-half order of Hugging Face and GPT-NeoX: dims i and i + rotary_dim/2 of a vector are turned
// by position / theta^(2i / rotary_dim), dims from rotary_dim on stay as they are. The angles' cosines and sines come
// from a table that the host makes in float64: f32 sines of large angles would be off by far more than rounding.
// It has a row for each position or, where they depend on the length of the sequence, for each token of the batch
// (by_token). A layer without positions has no pairs.
//
// Before it is included: kv_words.glsl and state.glsl; buffers qkv, weight, table and state; push constants kv_heads,
// pairs, table_offset, by_token, q_weight_offset, k_weight_offset, eps, k_offset, v_offset; and
//   NORM                     0 or 1
//   VECTORS, STAGED          most vectors of a workgroup, and dims of its keys
//   HEAD_DIM, VECTOR_WORDS   dims of a vector, and words of one in the cache with its scales
//   LANES, WAIT()            lanes of the workgroup, and how they wait for each other
#ifndef KV_F32
#include "half.glsl"
#endif

void keep_query(uint query, uint i, float v);      // dim i of a query of the workgroup
void put(uint vector, uint e, uint word, uint at); // word e of a key or, after all keys, of a value: into cache[at]

shared float squares[NORM != 0u ? VECTORS * LANES : 1u]; // of each vector, as each lane added them up
shared float factors[NORM != 0u ? VECTORS : 1u];         // 1 / sqrt(mean square + eps) of each vector
#ifdef QUANTIZED
const uint BLOCK_DIMS = 32u;        // that share a scale
shared float staged[2u * STAGED]; // [keys, values][heads][HEAD_DIM], keys normalized and turned
shared uint staged_scales[2u * STAGED / BLOCK_DIMS];
#else
shared float staged[STAGED]; // [heads][HEAD_DIM]: keys, normalized and turned
#endif
// What the shader sets: the token's row in the batch; where in qkv the workgroup's queries, keys and values begin; its
// first KV head; how many of its vectors are queries, and how many there are.
uint batch_row, queries_at, keys_at, values_at, first_kv_head, queries, vectors;

// Dim i of a vector in qkv.
uint vector_dim(uint which, uint i) {
    return (which < queries ? queries_at + which * HEAD_DIM : keys_at + (which - queries) * HEAD_DIM) + i;
}

void find_factors() {
    for (uint which = 0u; which < vectors; ++which) {
        float sum = 0.0;
        for (uint i = gl_LocalInvocationID.x; i < HEAD_DIM; i += LANES) {
            const float v = qkv[vector_dim(which, i)];
            sum += v * v;
        }
        squares[which * LANES + gl_LocalInvocationID.x] = sum;
    }
    WAIT();
    for (uint which = gl_LocalInvocationID.x; which < vectors; which += LANES) {
        float sum = 0.0;
        for (uint i = 0u; i < LANES; ++i)
            sum += squares[which * LANES + i];
        factors[which] = 1.0 / sqrt(sum / float(HEAD_DIM) + p.eps);
    }
    WAIT();
}

// Dim i of a vector, normalized.
float normalized(uint which, uint i) {
    const float v = qkv[vector_dim(which, i)];
    if (NORM == 0u) return v;
    return weight[(which < queries ? p.q_weight_offset : p.k_weight_offset) + i] * (v * factors[which]);
}

void keep(uint which, uint i, float v) {
    if (which < queries)
        keep_query(which, i, v);
    else
        staged[(which - queries) * HEAD_DIM + i] = v;
}

// Turns all vectors; of those from `unturned` on, dims that are not turned are kept as well.
void turn(uint unturned) {
    const uint row = p.by_token != 0u ? batch_row : state[STATE_POSITION + batch_row];
    const uint angles = p.table_offset + row * p.pairs * 2u;
    for (uint i = gl_LocalInvocationID.x; i + p.pairs < HEAD_DIM; i += LANES) { // pairs, then single dims
        const bool pair = i < p.pairs;
        const float c = pair ? table[angles + i * 2u] : 1.0, s = pair ? table[angles + i * 2u + 1u] : 0.0;
        for (uint which = pair ? 0u : unturned; which < vectors; ++which) {
            float b = normalized(which, i + p.pairs);
            if (pair) {
                const float a = normalized(which, i);
                keep(which, i, a * c - b * s);
                b = b * c + a * s;
            }
            keep(which, i + p.pairs, b);
        }
    }
}

#ifdef QUANTIZED
// The f16 scale of 32 numbers. An infinity or NaN gives one that is not finite.
uint block_scale(uint from) {
    float extreme = staged[from];
    [[dont_unroll]] for (uint i = 1u; i < BLOCK_DIMS; ++i) { // by bits, so that NaN is the largest of all
        const float v = staged[from + i];
        if ((floatBitsToUint(v) & 0x7fffffffu) > (floatBitsToUint(extreme) & 0x7fffffffu)) extreme = v;
    }
#ifdef KV_Q8_0
    return half_bits(abs(extreme) * (1.0 / 127.0));
#else
    return half_bits(extreme * -0.125);
#endif
}

// A word of numbers from `from` on. With a scale that is not finite they are 0, and read as NaN.
uint quantized_word(uint from, uint scale) {
    const bool usable = (scale & 0x7c00u) != 0x7c00u && (scale & 0x7fffu) != 0u;
    const float inverse = usable ? 1.0 / unpackHalf2x16(scale).x : 0.0;
    uint bits = 0u;
    [[dont_unroll]] for (uint i = 0u; i < WORD_DIMS; ++i) {
        const float v = usable ? roundEven(staged[from + i] * inverse) : 0.0;
#ifdef KV_Q8_0
        bits |= (uint(int(clamp(v, -127.0, 127.0))) & 255u) << (8u * i);
#else
        bits |= uint(clamp(v + 8.0, 0.0, 15.0)) << (4u * i);
#endif
    }
    return bits;
}

// What the words are made of, before any of them: values beside the keys, and the scales.
void stage(uint keys) {
    const uint dims = keys * HEAD_DIM;
    for (uint i = gl_LocalInvocationID.x; i < dims; i += LANES)
        staged[dims + i] = qkv[values_at + i];
    WAIT();
    for (uint i = gl_LocalInvocationID.x; i < 2u * dims / BLOCK_DIMS; i += LANES)
        staged_scales[i] = block_scale(i * BLOCK_DIMS);
    WAIT();
}

uint data_word(uint vector, uint keys, uint e) {
    return quantized_word(vector * HEAD_DIM + e * WORD_DIMS, staged_scales[(vector * HEAD_DIM + e * WORD_DIMS) / BLOCK_DIMS]);
}

uint scale_word(uint vector, uint e) {
    const uint blocks = HEAD_DIM / BLOCK_DIMS, which = vector * blocks + e * 2u;
    return staged_scales[which] | (e * 2u + 1u < blocks ? staged_scales[which + 1u] << 16u : 0u);
}
#else
void stage(uint keys) {
    WAIT();
}

// Dim i of a key or value.
float cached_dim(uint vector, uint keys, uint i) {
    return vector < keys ? staged[vector * HEAD_DIM + i] : qkv[values_at + (vector - keys) * HEAD_DIM + i];
}

uint data_word(uint vector, uint keys, uint e) {
#ifdef KV_F16
    return half_pair(cached_dim(vector, keys, e * 2u), cached_dim(vector, keys, e * 2u + 1u));
#else
    return floatBitsToUint(cached_dim(vector, keys, e));
#endif
}
#endif

// Puts the keys and values where the token's slot is.
void store() {
    const uint keys = vectors - queries, data_words = HEAD_DIM / WORD_DIMS;
    const uint block = state[STATE_SLOT + batch_row] / BLOCK_TOKENS, place = state[STATE_SLOT + batch_row] % BLOCK_TOKENS;
    stage(keys);
    for (uint vector = 0u; vector < 2u * keys; ++vector) {
        const bool value = vector >= keys;
        const uint head = first_kv_head + (value ? vector - keys : vector);
        const uint start = (value ? p.v_offset : p.k_offset) + (block * p.kv_heads + head) * VECTOR_WORDS * BLOCK_TOKENS;
        for (uint e = gl_LocalInvocationID.x; e < data_words; e += LANES)
            put(vector, e, data_word(vector, keys, e), start + (value ? place * data_words + e : e * BLOCK_TOKENS + place));
#ifdef QUANTIZED
        for (uint e = data_words + gl_LocalInvocationID.x; e < VECTOR_WORDS; e += LANES)
            put(vector, e, scale_word(vector, e - data_words), start + e * BLOCK_TOKENS + place);
#endif
    }
}

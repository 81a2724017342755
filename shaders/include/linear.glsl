// What every matrix product shares: y[t] = W x[t] (+ bias), stored, added to y, through SwiGLU or GeGLU (gate and
// up in one matrix; or y holds the gate, and the product is up: GATED, SwiGLU only), or of every four rows the
// largest and which it is (ARGMAX: half the bytes, and argmax_join.comp has a quarter to look at).
// W lies in the x8 layout; see include/formats.glsl, which must be included first. ALIGNED is a
// specialization constant, EPILOGUE_LOOP what to do with a loop of four: [[unroll]] or [[dont_unroll]].
#ifdef SPLIT_X // rows in two f16 planes (split_halves.comp) at x_offset, room for x_stride of them
layout(set = 0, binding = 1) readonly buffer X { uvec4 x[]; };
#elif defined(QUANTIZED_X)
layout(set = 0, binding = 1) readonly buffer X { uint x[]; };   // [tokens][x_stride], see rows_a8.glsl
#else
layout(set = 0, binding = 1) readonly buffer X { vec4 x[]; };   // [tokens][x_stride] floats at x_offset
#endif
layout(set = 0, binding = 2) buffer Y { float y[]; };           // [tokens][y_stride] at y_offset
layout(set = 0, binding = 3) readonly buffer State { uint state[]; };
layout(set = 0, binding = 4) readonly buffer Bias { float bias[]; }; // [rows of the whole matrix]
layout(push_constant) uniform Push {
    uint w_offset;    // words, a multiple of 4
    uint rows;        // of this part
    uint cols;
    uint first_row;   // of this part in the whole matrix
    uint x_offset;    // words
    uint x_stride;    // words
    uint y_offset;    // words
    uint y_stride;    // words
    uint bias_offset; // words
    uint has_bias;
    uint epilogue;    // STORE, ADD, SWIGLU, GATED, GEGLU, ARGMAX
    uint count_at;    // word of the state buffer with the number of rows of x in use (EXPERTS: of tiles)
    uint expert_words; // EXPERTS: words from an expert's weights to the next one's
    uint first_expert; // EXPERTS: the first of this part
    uint experts;      // EXPERTS: how many are in this part
    uint per_token;    // EXPERTS: pairs of a token
    uint x_of_tokens;  // EXPERTS: 1: x has a row a token, 0: one a pair
    // RMSNorms that the product before begins and the one after ends (xinfer_vk/kernels/split_norm.py)
    uint next_weight; // words, in the buffer of the biases
    uint next_offset; // words, in y: of the begun rows
    uint next_cols;   // of the whole matrix' rows; 0: no norm begins here
    float norm_eps;   // below zero: the rows of x are no begun ones
} p;
layout(constant_id = 3) const uint EXPERTS = 0u; // of a mixture; 0: plain products. See rows.glsl

const uint STORE = 0u, ADD = 1u, SWIGLU = 2u, GATED = 3u, GEGLU = 4u, ARGMAX = 5u;

#include "rows.glsl"

#ifdef SPLIT_X
float scale_of(uint t) { return uintBitsToFloat(x[(p.x_offset + t) >> 2u][(p.x_offset + t) & 3u]); }
#elif !defined(QUANTIZED_X)
// x is declared as vec4 so that a lane can load four values at once; where the rows of x do not begin
// at multiples of four words (ALIGNED == 0) the same four are picked one by one.
float load_x(uint i) { return x[i >> 2u][i & 3u]; }

vec4 load_x4(uint i) {
    if (ALIGNED != 0u)
        return x[i >> 2u];
    return vec4(load_x(i), load_x(i + 1u), load_x(i + 2u), load_x(i + 3u));
}
#endif

// Bias of rows row .. row+3 of this part; zero for rows of the padding.
vec4 load_bias(uint row) {
    vec4 b = vec4(0.0);
    if (p.has_bias != 0u)
        EPILOGUE_LOOP for (uint c = 0u; c < min(4u, p.rows - min(row, p.rows)); c++)
            b[c] = bias[p.bias_offset + p.first_row + row + c];
    return b;
}

#include "silu.glsl"
#include "gelu.glsl"
#include "argmax.glsl"

// Rows row .. row+3 (row a multiple of 4) of token t are v. Rows of the padding are not stored. Where a norm
// begins what is stored is stored again times the norm's weight, and the sum of its squares behind the row.
void store(uint row, uint t, vec4 v) {
    uint first = p.first_row + row, count = min(4u, p.rows - min(row, p.rows));
    if (p.epilogue == ARGMAX) { // y: [tokens][y_stride], a (value, index) pair for every four rows
        vec2 best = vec2(v.x, float(first));
        EPILOGUE_LOOP for (uint c = 1u; c < count; c++)
            best = better(best, vec2(v[c], float(first + c)));
        const uint at = p.y_offset + t * p.y_stride + first / 2u;
        if (count != 0u) {
            y[at] = best.x;
            y[at + 1u] = best.y;
        }
        return;
    }
    if (p.epilogue == SWIGLU || p.epilogue == GEGLU) { // gate in even rows, up in odd ones
        v.xz = p.epilogue == SWIGLU ? vec2(silu(v.x), silu(v.z)) : vec2(gelu_tanh(v.x), gelu_tanh(v.z));
        v.xy = vec2(v.x * v.y, v.z * v.w);
        first /= 2u;
        count /= 2u;
    }
    first += p.y_offset + y_row(t) * p.y_stride;
    const uint column = p.first_row + row;
    const uint next = p.next_offset + t * (p.next_cols + p.next_cols / 4u) + column;
    float squares = 0.0;
    EPILOGUE_LOOP for (uint c = 0u; c < count; c++) {
        float a = v[c];
        if (p.epilogue == ADD)
            a += y[first + c];
        else if (p.epilogue == GATED)
            a *= silu(y[first + c]);
        y[first + c] = a;
        if (p.next_cols != 0u) {
            y[next + c] = a * bias[p.next_weight + column + c];
            squares += a * a;
        }
    }
    if (p.next_cols != 0u && count != 0u)
        y[next + p.next_cols - column + column / 4u] = squares;
}

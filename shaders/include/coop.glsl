// Matrix products on matrix units (VK_KHR_cooperative_matrix), exact to about what f32 is.
//
// Matrix units multiply f16. So every operand is a sum of two: w = high + low / 2048, and x likewise
// (split_halves.comp), and w x = high high + (high low + low high) / 2048; low low is below what counts.
// Three products of f16 for one of f32 (two for f16 weights, whose low is zero), at the rate of the matrix
// units. These may cut bits off a sum where an f32 addition rounds, always downwards; so sums of the large
// products are taken over from them every 32 columns and added up in f32.
//
// A workgroup of 128 lanes computes ROWS = 128 / TEAMS rows x TOKENS tokens. Its lanes are TEAMS teams, which
// take turns with blocks of 32 columns and add up their sums at the end (split-K, inside of a workgroup: no sums
// go through memory). For a block a team decodes W into shared memory, once for all tokens; words of its next
// block are on their way meanwhile. A subgroup multiplies 128 / SUBGROUPS rows of a team with all tokens of the
// tile, in pieces of 16 x 16 x 16.
//
// Bytes: weights once per TOKENS tokens; neighbouring lanes read neighbouring 16 bytes. x (4 bytes a value, as f32)
// once per ROWS rows, which for few tokens comes from the cache. Flops: 6 (4) per weight and token on the matrix
// units; about 15 instructions to decode a weight, per TOKENS tokens.
// Occupancy: few tokens leave a card idle without teams. A 14336 x 4096 matrix is 112 workgroups of 4 subgroups, on
// 132 processors, and each has one block's loads in flight: 128 blocks one after the other, a microsecond each.
// Four teams are 448 workgroups, 14 subgroups a processor, each of 32 blocks. Their price is x once per 32 rows:
// for 8 tokens 58 MB from the cache, beside 33 MB of 4-bit weights from memory.
// Shared memory: 80 bytes for 32 columns of a row in one plane, so that the rows of a 16-byte column, which
// is what is fetched at once, lie in different banks; (128 + TEAMS TOKENS) * 160 bytes: 30 KiB for 64 tokens, and
// for 16 tokens of four teams.
// Workgroups: x = ceil(rows / ROWS), y = ceil(tokens / TOKENS).
//
// EMULATED computes the same with ordinary arithmetic, for devices that have no matrix units: slow, to test
// everything but the multiplication itself.
const uint COLUMNS = 32u, WORKGROUP = 128u;
const uint LANES = WORKGROUP / TEAMS, ROWS = LANES; // of a team
const uint TEAM_SUBGROUPS = SUBGROUPS / TEAMS;
const uint STRIDE = 10u; // of a row in a tile, uvec2: 8 and 2 of padding
const uint X_HIGH = 0u, X_LOW = TOKENS * STRIDE, W_HIGH = 2u * X_LOW, W_LOW = W_HIGH + ROWS * STRIDE;
const uint TEAM_CELLS = W_LOW + ROWS * STRIDE;
const uint ROW_PIECES = ROWS / 16u / TEAM_SUBGROUPS, TOKEN_PIECES = TOKENS / 16u;

shared uvec2 cells[TEAMS * TEAM_CELLS]; // 4 halves an element; at the end sums, 2 an element

uint lane;       // of the team
uint first_cell; // of the team

#ifdef EMULATED
    #define PIECES [[dont_unroll]]
    #define MATRIX_A uint
    #define MATRIX_B uint
    #define LANES_OF_ONE 32u
    #define SUBGROUP_OF_LANE (gl_LocalInvocationID.x / 32u)
    #define LANE_OF_ONE (gl_LocalInvocationID.x % 32u)
struct Sums {
    float v[8];
};
Sums no_sums() {
    Sums s;
    [[unroll]] for (uint i = 0u; i < 8u; i++)
        s.v[i] = 0.0;
    return s;
}
float half_at(uint at, uint i) {
    const vec2 v = unpackHalf2x16(cells[at + i / 4u][(i / 2u) & 1u]);
    return v[i & 1u];
}
// Lane l has row l % 16 and eight columns of the 16 x 16 sums.
Sums multiply(uint a, uint b, Sums s) {
    const uint l = LANE_OF_ONE;
    for (uint i = 0u; i < 8u; i++)
        for (uint k = 0u; k < 16u; k++)
            s.v[i] += half_at(a + (l & 15u) * STRIDE, k) * half_at(b + ((l >> 4u) * 8u + i) * STRIDE, k);
    return s;
}
Sums add(Sums a, Sums b, float factor) {
    [[unroll]] for (uint i = 0u; i < 8u; i++)
        a.v[i] += b.v[i] * factor;
    return a;
}
void put(Sums s, uint at) {
    const uint l = LANE_OF_ONE;
    for (uint i = 0u; i < 8u; i++)
        cells[at + ((l >> 4u) * 8u + i) * 8u + (l & 15u) / 2u][l & 1u] = floatBitsToUint(s.v[i]);
}
    #define LOAD_A(m, at) m = at
    #define LOAD_B(m, at) m = at
#else
    #define PIECES [[unroll]]
    #define MATRIX_A coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA>
    #define MATRIX_B coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseB>
    #define Sums coopmat<float, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator>
    #define no_sums() Sums(0.0)
    #define multiply(a, b, s) coopMatMulAdd(a, b, s)
    #define add(a, b, factor) ((a) + (b) * (factor))
    #define put(s, at) coopMatStore(s, cells, at, 8u, gl_CooperativeMatrixLayoutColumnMajor)
    #define LOAD_A(m, at) coopMatLoad(m, cells, at, STRIDE, gl_CooperativeMatrixLayoutRowMajor)
    #define LOAD_B(m, at) coopMatLoad(m, cells, at, STRIDE, gl_CooperativeMatrixLayoutColumnMajor)
    #define LANES_OF_ONE (WORKGROUP / SUBGROUPS)
    #define SUBGROUP_OF_LANE gl_SubgroupID // there are SUBGROUPS, all full: Kernel.full_subgroups
    #define LANE_OF_ONE gl_SubgroupInvocationID
#endif

// What is decoded in one go: runs of four neighbouring columns of a quad of rows. A paired unit is two runs.
#if defined(PAIRED)
const uint RUN_UNITS = 1u, RUNS = 2u;
#else
const uint RUN_UNITS = 4u / WEIGHTS, RUNS = 1u;
#endif
const uint ITEMS = BLOCK_UNITS / RUN_UNITS * (ROWS / 4u) / LANES; // a lane and 32 columns
const uint X_LOADS = TOKENS * 8u / LANES;                         // of 16 bytes

struct Words {
    uvec4 raw[RUN_UNITS][RAW];
#ifdef SCALED
    uvec4 scales[SCALES_LOADED];
#endif
};

// Item i of a lane: which quad of the team's rows, and which unit of the 32 columns. Neighbouring lanes
// take the halves of a group of 8 rows, then its units, which lie one behind the other in memory.
uint item_quad(uint i) {
    const uint n = i * LANES + lane;
    return (n / (2u * BLOCK_UNITS / RUN_UNITS)) * 2u + (n & 1u);
}
uint item_unit(uint i) {
    const uint n = i * LANES + lane;
    return (n / 2u) % (BLOCK_UNITS / RUN_UNITS) * RUN_UNITS;
}

void fetch(uint w_first, uint block, uint i, out Words words) {
    const uint last_group = (p.rows - 1u) / 8u, units = UNITS(p.cols), q = item_quad(i);
    const uint group = min(gl_WorkGroupID.x * (ROWS / 8u) + q / 2u, last_group); // rows beyond are not stored
    const uint quad = w_first / 4u + group * ROW_WORDS(p.cols) * 2u + (q & 1u);
    const uint unit = block * BLOCK_UNITS + item_unit(i);
    [[unroll]] for (uint u = 0u; u < RUN_UNITS; u++)
        if (unit + u < units)
            load_unit(quad + 2u * DATA_FIRST(p.cols), unit + u, words.raw[u]);
        else
            [[unroll]] for (uint n = 0u; n < RAW; n++)
                words.raw[u][n] = uvec4(0u);
#ifdef SCALED
    if (unit < units) // else nothing: the team's block is beyond the last
        load_scales(quad, unit, words.scales);
    else
        [[unroll]] for (uint n = 0u; n < SCALES_LOADED; n++)
            words.scales[n] = uvec4(0u);
#endif
}

void put_run(uint row, uint column, vec4 v) {
    const uint at = first_cell + row * STRIDE + column / 4u;
    const uvec2 high = uvec2(packHalf2x16(v.xy), packHalf2x16(v.zw));
    cells[W_HIGH + at] = high;
#ifndef FORMAT_F16
    const uint zero = p.rows >> 31u; // lest lavapipe 25 takes the second of unpack(pack(v)) for v itself
    const vec4 rest = (v - vec4(unpackHalf2x16(high.x | zero), unpackHalf2x16(high.y | zero))) * 2048.0;
    cells[W_LOW + at] = uvec2(packHalf2x16(rest.xy), packHalf2x16(rest.zw));
#endif
}

void decode_to_tile(uint block, uint i, Words words) {
    const uint row = item_quad(i) * 4u, unit = item_unit(i);
    vec4 v[WEIGHTS * RUN_UNITS]; // of four rows each
    [[unroll]] for (uint u = 0u; u < RUN_UNITS; u++) {
        vec4 of_unit[WEIGHTS];
        decode(words.raw[u], block * BLOCK_UNITS + unit + u, of_unit);
        [[unroll]] for (uint n = 0u; n < WEIGHTS; n++)
            v[u * WEIGHTS + n] = of_unit[n];
    }
#ifdef SCALED
    vec4 d, m;
    open_scales(words.scales, block * BLOCK_UNITS + unit, d, m);
    small_scales(words.scales, block * BLOCK_UNITS + unit, d, m);
    [[unroll]] for (uint n = 0u; n < WEIGHTS; n++)
        v[n] = d * (v[n] - OFFSET) + m;
#endif
    [[unroll]] for (uint r = 0u; r < 4u; r++)
        [[unroll]] for (uint run = 0u; run < RUNS; run++)
            put_run(row + r, column(unit, run), // a paired unit has its runs in even and in odd places
                vec4(v[run][r], v[RUNS + run][r], v[2u * RUNS + run][r], v[3u * RUNS + run][r]));
}

void main() {
    const Tile tile = find_tile();
    const uint t0 = tile.first, used = tile.end;
    if (t0 >= used)
        return; // the whole workgroup: used is the same for all
    const uint one = SUBGROUP_OF_LANE % TEAM_SUBGROUPS, team = SUBGROUP_OF_LANE / TEAM_SUBGROUPS;
    lane = one * LANES_OF_ONE + LANE_OF_ONE;
    first_cell = team * TEAM_CELLS;
    const uint blocks = (p.cols + COLUMNS - 1u) / COLUMNS;
    const uint x_first = (p.x_offset + (p.x_stride + 3u) / 4u * 4u) / 4u; // uvec4; x_stride: rows there is room for

    Sums sums[ROW_PIECES * TOKEN_PIECES]; // one declaration each: glslang 13 types only the first of several right
    Sums small[ROW_PIECES * TOKEN_PIECES];
    PIECES for (uint i = 0u; i < ROW_PIECES * TOKEN_PIECES; i++) {
        sums[i] = no_sums();
        small[i] = no_sums();
    }
    Words words[ITEMS];
    uvec4 halves[X_LOADS];
    // x: the halves of a token's 32 columns are 4 loads of 16 bytes in each plane
#define FETCH(block)                                                                              \
    [[unroll]] for (uint i = 0u; i < ITEMS; i++) fetch(tile.weights, block, i, words[i]);         \
    [[unroll]] for (uint i = 0u; i < X_LOADS; i++) {                                              \
        const uint n = i * LANES + lane, t = t0 + n / 8u, plane = (n >> 2u) & 1u;                 \
        halves[i] = uvec4(0u);                                                                    \
        if (t < used && (block) < blocks)                                                         \
            halves[i] = x[x_first + ((x_row(t) * 2u + plane) * blocks + (block)) * 4u + (n & 3u)];       \
    }
    FETCH(team)
    for (uint first_block = 0u; first_block < blocks; first_block += TEAMS) { // as many for each: barriers inside
        const uint block = first_block + team, next = block + TEAMS;
        [[unroll]] for (uint i = 0u; i < ITEMS; i++)
            decode_to_tile(block, i, words[i]);
        [[unroll]] for (uint i = 0u; i < X_LOADS; i++) {
            const uint n = i * LANES + lane;
            const uint at = first_cell + ((n >> 2u) & 1u) * X_LOW + n / 8u * STRIDE + (n & 3u) * 2u;
            cells[at] = halves[i].xy;
            cells[at + 1u] = halves[i].zw;
        }
        barrier();
        FETCH(next)

        MATRIX_A high[ROW_PIECES * 2u];
        MATRIX_A low[ROW_PIECES * 2u];
        PIECES for (uint i = 0u; i < ROW_PIECES; i++)
            PIECES for (uint k = 0u; k < 2u; k++) {
                const uint at = first_cell + (one * ROW_PIECES + i) * 16u * STRIDE + k * 4u;
                LOAD_A(high[i * 2u + k], W_HIGH + at);
#ifndef FORMAT_F16
                LOAD_A(low[i * 2u + k], W_LOW + at);
#endif
            }
        PIECES for (uint j = 0u; j < TOKEN_PIECES; j++) {
            MATRIX_B x_high[2];
            MATRIX_B x_low[2];
            PIECES for (uint k = 0u; k < 2u; k++) {
                LOAD_B(x_high[k], first_cell + X_HIGH + j * 16u * STRIDE + k * 4u);
                LOAD_B(x_low[k], first_cell + X_LOW + j * 16u * STRIDE + k * 4u);
            }
            PIECES for (uint i = 0u; i < ROW_PIECES; i++) {
                const uint n = i * TOKEN_PIECES + j;
                Sums part = no_sums();
                PIECES for (uint k = 0u; k < 2u; k++) {
                    part = multiply(high[i * 2u + k], x_high[k], part);
                    small[n] = multiply(high[i * 2u + k], x_low[k], small[n]);
#ifndef FORMAT_F16
                    small[n] = multiply(low[i * 2u + k], x_high[k], small[n]);
#endif
                }
                sums[n] = add(sums[n], part, 1.0);
            }
        }
        barrier();
    }

    // Through shared memory, 16 x 16 a subgroup at a time, to the lanes that add up the teams' and store four rows
    // of a token.
    PIECES for (uint i = 0u; i < ROW_PIECES; i++)
        PIECES for (uint j = 0u; j < TOKEN_PIECES; j++) {
            const uint n = i * TOKEN_PIECES + j;
            sums[n] = add(sums[n], small[n], 1.0 / 2048.0);
            put(sums[n], SUBGROUP_OF_LANE * 128u);
            barrier();
            const uint row0 = gl_WorkGroupID.x * ROWS + (one * ROW_PIECES + i) * 16u;
            for (uint e = team * LANES_OF_ONE + LANE_OF_ONE; e < 64u; e += TEAMS * LANES_OF_ONE) {
                const uint t = t0 + j * 16u + e / 4u, row = row0 + (e & 3u) * 4u;
                vec4 sum = vec4(0.0);
                for (uint part = 0u; part < TEAMS; part++) {
                    const uint at = (part * TEAM_SUBGROUPS + one) * 128u + e * 2u;
                    sum += uintBitsToFloat(uvec4(cells[at], cells[at + 1u]));
                }
                if (t < used)
                    store(row, t, sum * scale_of(x_row(t)) + load_bias(row));
            }
            barrier();
        }
}

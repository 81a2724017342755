// The stages that cut the distribution, and the draw: one workgroup a row.
//
// Every stage asks one question: of the tokens in a certain order, which is the shortest prefix whose
// weights (or whose number) reach a given sum? top-k: by logit, number k. top-p: by logit, weight p of
// the whole. Typical: by |distance - mean distance|, weight p. The draw: by token id, a random part of
// the whole. It is answered without sorting: a histogram of 256 bins over the range in question, then
// again over the bin in which the sum is reached, until one token remains (radix selection). Weights
// are integers, so the order in which atomics add them does not matter. The order by logit compares
// distances first, whose bins are even, then keys (all bits of the logit), then token ids.
//
// SOURCE=list works on a short list in shared memory. If k groups have their largest key within some
// distance of the top, then so have at least k tokens, and rarely many more; only these groups are
// read. A list that overflows, or that lacks a part of what is wanted, leaves the row to
// SOURCE=vocabulary, which takes what suits no list: it makes passes over all keys of the row, until a
// first histogram tells how far the kept tokens reach and these fit a long list in memory.
//
// One loop goes through the stages, so that the selection stands in the code once: drivers that
// compile for CPUs take seconds over code with many barriers.
//
// Reads: list: 4 bytes a token of about k groups; vocabulary: 4 bytes a token and pass, two passes
// (typical: four) and short ones over the long list, neighbours side by side. A pass takes about 15
// integer operations a token, 60 where its weight is wanted. Shared memory: 3 KiB of bins, 12 KiB
// more for the list. Bins are hit at random: bank conflicts are few unless many logits are equal.
// variants: SOURCE=list,vocabulary
#version 450
#extension GL_GOOGLE_include_directive : require
#include "state.glsl"
#include "sample.glsl"
#include "philox.glsl"
layout(local_size_x_id = 0) in; // spec: local_size
layout(set = 0, binding = 0) readonly buffer State { uint state[]; };
layout(set = 0, binding = 1) readonly buffer Parameters { uint rows[]; };
layout(set = 0, binding = 2) buffer Keys { uint keys[]; };           // [rows][vocabulary]
layout(set = 0, binding = 3) buffer Partials { uint partials[]; };
layout(set = 0, binding = 4) coherent buffer Kept { uint kept[]; };  // [rows][KEPT_WORDS]
layout(set = 0, binding = 5) writeonly buffer History { uint history[]; };
layout(set = 0, binding = 6) writeonly buffer Result { uint result[]; };
layout(push_constant) uniform Push {
    uint vocabulary;
    uint group_tokens;    // a power of two
    uint groups;          // of a row
    uint chunks;          // of a row
    uint partials_stride; // words of a row: [groups] largest keys, [chunks] sums (low, high), then
    uint done;            // the word that says whether the row's token has been drawn; then the sum of sums
    uint history_stride;
    uint result_offset;
    uint segment;
} p;

const uint BINS = 256u;
const uint BLOCKS = 16u;                                // of bins: the right bin is found in two short walks
const uint BY_LOGIT = 0u, BY_SURPRISE = 1u, BY_ID = 2u; // orders of the tokens
const uint DISTANCE = 0u, KEY = 1u, ID = 2u;            // what an order compares, in turn,
const uint MASS = 3u, MOMENT = 4u;                      // after what the mean distance takes to find
const uint NUMBER = 0u, PART = 1u, RANDOM_PART = 2u;    // what must be reached
const uint FOUND = 0u, ALL_KEPT = 1u, OUT_OF_REACH = 2u;

shared uint s_low[BINS], s_high[BINS], s_number[BINS];
shared uint s_block_low[BLOCKS], s_block_high[BLOCKS], s_block_number[BLOCKS];
shared uint s_top, s_tokens, s_middle, s_outcome, s_bin, s_bin_number;
shared uvec2 s_need, s_before;
#ifdef SOURCE_LIST
shared uint s_key[LIST], s_id[LIST], s_group[LIST]; // candidates (or groups, to begin with); groups to read
shared uint s_groups;
#endif

// Of the row, the same in all invocations.
uint record, partial, kept_list, top;
uint size; // tokens (or groups) that are worked on: of the list, or all keys of the row
Scale scale;

#ifdef SOURCE_LIST
const bool listed = true;

uint key_at(uint i) {
    return s_key[i];
}

uint id_at(uint i) {
    return s_id[i];
}

void exclude(uint i) {
    s_key[i] = EXCLUDED;
}
#else
bool listed = false;   // whether the tokens are those of the long list
bool may_list = false; // a segment that another follows leaves the row's keys as it cut them

uint key_at(uint i) {
    if (listed) return kept[kept_list + i * 2u];
    return keys[gl_WorkGroupID.x * p.vocabulary + i];
}

uint id_at(uint i) {
    return listed ? kept[kept_list + i * 2u + 1u] : i;
}

// The same invocation always looks after a token, so no other has to see this.
void exclude(uint i) {
    if (listed) kept[kept_list + i * 2u] = EXCLUDED;
    else keys[gl_WorkGroupID.x * p.vocabulary + i] = EXCLUDED;
}
#endif

Scale scale_at(uint at) {
    return Scale(uintBitsToFloat(rows[at + SCALE_FACTOR]), rows[at + SCALE_MULTIPLIER], rows[at + SCALE_LAST]);
}

void add_to_bin(uint bin, uvec2 weight, uint number) {
    const uint before = atomicAdd(s_low[bin], weight.x);
    const uint high = weight.y + (before + weight.x < before ? 1u : 0u);
    if (high != 0u) atomicAdd(s_high[bin], high);
    if (number != 0u) atomicAdd(s_number[bin], number);
}

void clear_bins() {
    for (uint bin = gl_LocalInvocationID.x; bin < BINS; bin += gl_WorkGroupSize.x)
        s_low[bin] = s_high[bin] = s_number[bin] = 0u;
    barrier();
}

// ceil(part 2^-32 total), at least 1
uvec2 part_of(uint part, uvec2 total) {
    const uvec2 low = multiply(part, total.x);
    uvec2 sum = add64(multiply(part, total.y), uvec2(low.y, 0u));
    if (low.x != 0u) sum = add64(sum, uvec2(1u, 0u));
    return sum == uvec2(0u) ? uvec2(1u, 0u) : sum;
}

// floor(a b / 2^64)
uvec2 multiply_high64(uvec2 a, uvec2 b) {
    const uvec2 middle = add64(multiply(a.y, b.x), uvec2(multiply_high(a.x, b.x), 0u)); // does not overflow
    const uvec2 other = add64(multiply(a.x, b.y), uvec2(middle.x, 0u));
    return add64(multiply(a.y, b.y), add64(uvec2(middle.y, 0u), uvec2(other.y, 0u)));
}

// floor(a 2^32 / b), for a < b < 2^63
uint divide(uvec2 a, uvec2 b) {
    uint quotient = 0u;
    for (uint i = 0u; i < 32u; i++) {
        a = uvec2(a.x << 1, (a.y << 1) | (a.x >> 31));
        quotient <<= 1;
        if (!less64(a, b)) {
            a = subtract64(a, b);
            quotient |= 1u;
        }
    }
    return quotient;
}

// What a selection finds. The last token that stays is the only one within all three ranges; what comes
// before it in the order stays too.
struct Cut {
    uint outcome;
    uvec2 near;  // distances, or how far from middle they are
    uvec2 below; // keys, counted down from the top
    uvec2 ids;
    uint middle; // the mean distance, for the order by surprise. A token's surprise less the entropy is
                 // its distance less this: the logarithm of the sum of weights cancels.
};

uint value_of(uint distance, uint order, uint middle) {
    return order == BY_SURPRISE ? max(distance, middle) - min(distance, middle) : distance;
}

#ifdef SOURCE_VOCABULARY
// Go on with the tokens up to a value in an order, on the long list, if they fit it.
void collect(uint order, uint middle, uint farthest) {
    for (uint i = gl_LocalInvocationID.x; i < size; i += gl_WorkGroupSize.x) {
        const uint key = key_at(i);
        if (key == EXCLUDED || value_of(distance_of(key, top, scale), order, middle) > farthest) continue;
        const uint at = atomicAdd(s_tokens, 1u);
        if (at >= LONG_LIST) continue;
        kept[kept_list + at * 2u] = key;
        kept[kept_list + at * 2u + 1u] = i;
    }
    memoryBarrierBuffer();
    barrier();
    if (s_tokens > LONG_LIST) return;
    listed = true;
    size = s_tokens;
}
#endif

// The shortest prefix in an order that reaches: a number of tokens (amount.x); a part of all weights
// (amount.x 2^-32 of whole, or of what there is if whole is 0); or a random part (amount 2^-64).
// sums_known: the sums of chunks are those of the first pass.
Cut select(uint order, uint measure, uvec2 amount, uvec2 whole, bool sums_known) {
    const uint lane = gl_LocalInvocationID.x, lanes = gl_WorkGroupSize.x;
    Cut cut;
    cut.outcome = FOUND;
    cut.near = uvec2(0u, measure == NUMBER ? FAR : scale.last);
    cut.below = uvec2(0u, 0xFFFFFFFFu);
    cut.ids = uvec2(0u, p.vocabulary - 1u);
    cut.middle = 0u;
    if (lane == 0u) s_before = uvec2(0u);
    uint what = order == BY_ID ? ID : order == BY_SURPRISE ? MASS : DISTANCE;
    bool first_pass = true;
    for (;;) {
        const uvec2 range = what == DISTANCE ? cut.near : what == KEY ? cut.below : cut.ids;
        uint shift = uint(max(findMSB(range.y - range.x) - 7, 0)); // at most 256 bins
        uint start = 0u, end = size;
        clear_bins();
#ifdef SOURCE_VOCABULARY
        if (order == BY_ID && !listed) {
            start = cut.ids.x - cut.ids.x % lanes; // a token stays with its invocation
            end = cut.ids.y + 1u;
            // Tokens come in the order of their ids: where bins are few, an invocation adds up many
            // tokens before it touches a bin.
            if (end - start > 4096u) shift += 4u;
        }
        if (sums_known && order == BY_ID && first_pass) {
            shift = 10u;
            for (uint bin = lane; bin < p.chunks; bin += lanes) {
                s_low[bin] = partials[partial + p.groups + bin * 2u];
                s_high[bin] = partials[partial + p.groups + bin * 2u + 1u];
            }
            end = start;
        }
#endif
#ifdef SOURCE_LIST
        const bool counting = true;
#else
        const bool counting = listed || !first_pass; // first bins of a vocabulary hold more than one token
#endif
        uint bin = 0u, number = 0u;
        uvec2 sum = uvec2(0u);
        for (uint i = start + lane;; i += lanes) {
            uint to = BINS; // no bin: the end, where what is left over is added
            uint distance = 0u;
            if (i < end) {
                const uint key = key_at(i), id = id_at(i), under = top - key;
                distance = distance_of(key, top, scale);
                uint value = value_of(distance, order, cut.middle);
                bool within = key != EXCLUDED && (measure == NUMBER || distance <= scale.last);
                if (what <= KEY || (what == ID && order != BY_ID)) within = within && value >= cut.near.x && value <= cut.near.y;
                within = within && under >= cut.below.x && under <= cut.below.y && id >= cut.ids.x && id <= cut.ids.y;
                if (!within) continue;
                if (what == KEY) value = under;
                if (what == ID) value = id;
                to = what >= MASS ? 0u : (value - range.x) >> shift;
            }
            if (to != bin) {
                if (number != 0u) add_to_bin(bin, sum, counting ? number : 0u);
                bin = to;
                number = 0u;
                sum = uvec2(0u);
            }
            if (to == BINS) break;
            number++;
            uvec2 weight = weight_of(distance, scale);
            if (what == MOMENT) weight = add64(multiply(weight.y, distance), uvec2(multiply_high(weight.x, distance), 0u));
            sum = measure == NUMBER ? uvec2(number, 0u) : add64(sum, weight);
        }
        barrier();

        for (uint block = lane; block < BLOCKS; block += lanes) {
            uvec2 block_sum = uvec2(0u);
            for (uint i = 0u; i < BINS / BLOCKS; i++) {
                const uint at = block * (BINS / BLOCKS) + i;
                block_sum = add64(block_sum, uvec2(s_low[at], s_high[at]));
            }
            s_block_low[block] = block_sum.x;
            s_block_high[block] = block_sum.y;
        }
        barrier();
        if (lane == 0u) {
            if (first_pass && what < MASS) {
                uvec2 total = uvec2(0u);
                for (uint i = 0u; i < BLOCKS; i++) total = add64(total, uvec2(s_block_low[i], s_block_high[i]));
                s_need = amount;
                if (measure == PART) s_need = part_of(amount.x, whole == uvec2(0u) ? total : whole);
                if (measure == RANDOM_PART) s_need = add64(multiply_high64(amount, total), uvec2(1u, 0u));
                s_outcome = FOUND;
                if (measure == NUMBER && !less64(s_need, total)) s_outcome = ALL_KEPT;
                if (measure == PART && less64(total, s_need)) s_outcome = OUT_OF_REACH;
            }
            const uvec2 need = s_need;
            uvec2 before = s_before;
            uint at = 0u;
            for (; at < BLOCKS - 1u; at++) {
                const uvec2 after = add64(before, uvec2(s_block_low[at], s_block_high[at]));
                if (!less64(after, need)) break;
                before = after;
            }
            for (at *= BINS / BLOCKS; at < BINS - 1u; at++) {
                const uvec2 after = add64(before, uvec2(s_low[at], s_high[at]));
                if (!less64(after, need)) break;
                before = after;
            }
            s_bin = at;
            s_bin_number = s_number[at];
            if (what < MASS) s_before = before;
            if (what == MASS) s_need = uvec2(s_low[0], s_high[0]);
            if (what == MOMENT) s_middle = divide(uvec2(s_low[0], s_high[0]), s_need); // in units of 2^32 before
        }
        barrier();
        if (what >= MASS) {
            cut.middle = s_middle;
            what = what == MASS ? MOMENT : DISTANCE;
            continue;
        }
        if (first_pass && s_outcome != FOUND) {
            cut.outcome = s_outcome;
            break;
        }
        const uint low = range.x + (s_bin << shift);
        const uvec2 found = uvec2(low, min(range.y, low + ((1u << shift) - 1u)));
        if (what == DISTANCE) cut.near = found;
#ifdef SOURCE_VOCABULARY
        if (what == DISTANCE && first_pass && may_list && !listed) collect(order, cut.middle, found.y);
#endif
        first_pass = false;
        if (what == KEY) cut.below = found;
        if (what == ID) cut.ids = found;
        if (s_bin_number == 1u && order != BY_ID) break;
        if (found.x == found.y) {
            if (what == ID) break;
            what = what == DISTANCE && order == BY_LOGIT ? KEY : ID;
        }
    }
    return cut;
}

// Exclude what a selection by logit or by surprise leaves out.
void keep(Cut cut, uint order) {
    uint largest = EXCLUDED;
    for (uint i = gl_LocalInvocationID.x; i < size; i += gl_WorkGroupSize.x) {
        const uint key = key_at(i), id = id_at(i);
        if (key == EXCLUDED) continue;
        const uint distance = distance_of(key, top, scale), under = top - key;
        const uint value = value_of(distance, order, cut.middle);
        bool stays = cut.outcome == ALL_KEPT || value < cut.near.x;
        if (!stays && value <= cut.near.y)
            stays = under < cut.below.x || (under <= cut.below.y && id <= cut.ids.y);
        if (order == BY_SURPRISE && distance > scale.last) stays = false; // without weight
        if (stays) largest = max(largest, key);
        else exclude(i);
    }
    if (order == BY_SURPRISE) { // the largest may be gone
        if (gl_LocalInvocationID.x == 0u) s_top = EXCLUDED;
        barrier();
        atomicMax(s_top, largest);
        barrier();
        top = s_top;
    }
}

#ifdef SOURCE_LIST
// Fill the list with all tokens within a distance of the top. False if they are too many.
bool gather(uint farthest) {
    const uint lane = gl_LocalInvocationID.x, lanes = gl_WorkGroupSize.x;
    for (uint i = lane; i < p.groups; i += lanes) {
        const uint key = partials[partial + i];
        if (key != EXCLUDED && distance_of(key, top, scale) <= farthest) s_group[atomicAdd(s_groups, 1u)] = i;
    }
    barrier();
    const uint end = s_groups * p.group_tokens;
    for (uint i = lane; i < end; i += lanes) {
        const uint id = s_group[i / p.group_tokens] * p.group_tokens + i % p.group_tokens;
        if (id >= p.vocabulary) continue;
        const uint key = keys[gl_WorkGroupID.x * p.vocabulary + id];
        if (key == EXCLUDED || distance_of(key, top, scale) > farthest) continue;
        const uint at = atomicAdd(s_tokens, 1u);
        if (at >= LIST) continue;
        s_key[at] = key;
        s_id[at] = id;
    }
    barrier();
    size = s_tokens;
    return size <= LIST;
}
#endif

void main() {
    const uint row = gl_WorkGroupID.x, lane = gl_LocalInvocationID.x, lanes = gl_WorkGroupSize.x;
    if (row >= state[STATE_N_OUTPUTS]) return;
    record = row * ROW_WORDS;
    partial = row * p.partials_stride;
    kept_list = row * KEPT_WORDS + 1u;
    if (rows[record + ROW_ADJUST + p.segment] == 0u) return; // the row has no such segment
    const uint mode = rows[record + ROW_MODE + p.segment];
#ifdef SOURCE_LIST
    if ((mode & MODE_SHORT) == 0u) return;
    bool sums_known = false;
#else
    if (partials[partial + p.done] != 0u) return;
    bool sums_known = (mode & MODE_SUMS) != 0u;
    may_list = (mode & MODE_DRAW) != 0u;
#endif
    uint stages = rows[record + ROW_STAGES + p.segment];
    scale = scale_at(record + ROW_SCALES);
    size = p.vocabulary;

    if (lane == 0u) {
        s_top = EXCLUDED;
        s_tokens = 0u;
#ifdef SOURCE_LIST
        s_groups = 0u;
#endif
    }
    barrier();
    uint largest = EXCLUDED;
    for (uint i = lane; i < p.groups; i += lanes) {
        const uint key = partials[partial + i];
        largest = max(largest, key);
#ifdef SOURCE_LIST
        s_key[i] = key;
        s_id[i] = i;
#endif
    }
    atomicMax(s_top, largest);
    barrier();
    top = s_top;
    uint token = top == NAN_KEY ? NAN_TOKEN : NO_TOKEN;

    bool going_on = top != NAN_KEY && top != EXCLUDED;
    uvec2 whole = uvec2(0u); // sum of all weights, where the list holds a part of them
#ifdef SOURCE_LIST
    // To begin with, the list holds the groups, each as its largest token, and a selection finds how far
    // from the top the list of tokens has to reach.
    bool listing = going_on, by_number = false;
    size = p.groups;
    if ((mode & MODE_SUMS) != 0u) whole = uvec2(partials[partial + p.done + 1u], partials[partial + p.done + 2u]);
#else
    const bool listing = false;
#endif
    while (going_on) {
        uint stage = stages & 15u;
        if (!listing) stages >>= 4;
        if (stage == STAGE_TEMPERATURE) {
            scale = scale_at(record + ROW_SCALES + SCALE_WORDS);
#ifdef SOURCE_LIST
            if (listing) stage = (stages >> 4) & 15u;
            else
#endif
            continue;
        }
        if (stage == STAGE_DRAW) {
            going_on = false;
            if ((mode & MODE_DRAW) == 0u) break;
        }
        uint order = BY_LOGIT, measure = PART;
        uvec2 amount = uvec2(0u);
        Cut cut = Cut(FOUND, uvec2(0u), uvec2(0u, 0xFFFFFFFFu), uvec2(0u, 0xFFFFFFFFu), 0u);
        bool selecting = true;
        if (stage == STAGE_TOP_K) {
            measure = NUMBER;
            amount.x = rows[record + ROW_TOP_K];
        }
        if (stage == STAGE_TOP_P) amount.x = rows[record + ROW_TOP_P];
        if (stage == STAGE_MIN_P) {
            selecting = false;
            cut.near.y = rows[record + ROW_MIN_P];
        }
#ifdef SOURCE_LIST
        if (listing) {
            going_on = true;
            if (by_number) {
                measure = NUMBER;
                amount.x = p.groups / 2u;
            }
            if (p.vocabulary <= LIST) {
                selecting = false;
                cut.near.y = FAR;
            }
        }
        if (!listing)
#endif
        {
            if (stage == STAGE_TYPICAL) {
                order = BY_SURPRISE;
                amount.x = rows[record + ROW_TYPICAL_P];
            }
            if (stage == STAGE_DRAW) {
                order = BY_ID;
                measure = RANDOM_PART;
                const uint position = state[STATE_POSITION + state[STATE_OUTPUT_ROW + row]] + 1u;
                amount = philox(
                    uvec4(position, rows[record + ROW_SEQUENCE], 0u, 0u),
                    uvec2(rows[record + ROW_SEED], rows[record + ROW_SEED + 1u])
                ).xy;
            }
        }
        if (selecting) cut = select(order, measure, amount, stage == STAGE_TOP_P ? whole : uvec2(0u), sums_known);
#ifdef SOURCE_LIST
        if (listing) {
            // Where the groups' largest tokens alone do not hold p of the whole, half of the groups may.
            if (cut.outcome == OUT_OF_REACH && !by_number) by_number = true;
            else {
                if (!gather(cut.outcome == ALL_KEPT ? FAR : cut.near.y)) return;
                listing = false;
                scale = scale_at(record + ROW_SCALES);
            }
            continue;
        }
        if (cut.outcome == OUT_OF_REACH) return;
        whole = uvec2(0u);
#endif
        if (stage == STAGE_DRAW) token = cut.ids.x;
        else keep(cut, order);
        sums_known = false;
    }

#ifdef SOURCE_LIST
    if (token >= NO_TOKEN) size = 0u;
    for (uint i = lane; i < size; i += lanes) {
        kept[kept_list + i * 2u] = s_key[i];
        kept[kept_list + i * 2u + 1u] = s_id[i];
    }
#endif
    if (lane != 0u || (mode & MODE_DRAW) == 0u) return;
    kept[kept_list - 1u] = listed ? size : KEPT_IN_KEYS;
    result[p.result_offset + row] = token;
    partials[partial + p.done] = 1u;
    if ((rows[record + ROW_FLAGS] & FLAG_APPEND) != 0u && token < NO_TOKEN) {
        const uint position = state[STATE_POSITION + state[STATE_OUTPUT_ROW + row]] + 1u;
        if (position < p.history_stride) history[rows[record + ROW_HISTORY] * p.history_stride + position] = token;
    }
}

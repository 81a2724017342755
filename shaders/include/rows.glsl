// Which rows of x a workgroup multiplies, by which weights, and which rows of y that gives.
//
// Plain products: rows t0 .. used - 1 of x and y, at most TOKENS of them, all by the same W.
// With EXPERTS (group_experts.comp or route_experts.comp makes the lists) row t of y is a pair (token, slot),
// and a workgroup takes a tile, pairs that chose one expert. State is the routing buffer; from count_at on:
//   [0]              tiles in use
//   [1 + 3i ..]      tile i: its expert; where its list begins, and ends, in words of the buffer
// A row is named by the place of its pair in that list.
struct Tile {
    uint first; // its rows, of which there are none (end <= first) if the workgroup has nothing to do
    uint end;
    uint weights; // words: where its W begins
};

Tile find_tile() {
    if (EXPERTS == 0u)
        return Tile(gl_WorkGroupID.y * TOKENS, state[p.count_at], p.w_offset);
    const uint at = p.count_at + 1u + 3u * gl_WorkGroupID.y;
    if (gl_WorkGroupID.y < state[p.count_at]) {
        const uint expert = state[at] - p.first_expert; // huge for one before this part
        if (expert < p.experts)
            return Tile(state[at + 1u], state[at + 2u], p.w_offset + expert * p.expert_words);
    }
    return Tile(0u, 0u, p.w_offset);
}

uint x_row(uint t) {
    return EXPERTS == 0u ? t : p.x_of_tokens != 0u ? state[t] / p.per_token : state[t];
}

uint y_row(uint t) { return EXPERTS == 0u ? t : state[t]; }

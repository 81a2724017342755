// Word offsets in the state buffer: what changes from run to run. xinfer_vk/kernels/state.py mirrors
// this file (a test compares the two). The host fills it; a plan's kernels only read it.
const uint MAX_TOKENS = 512u;        // rows of the largest plan
const uint STATE_N_TOKENS = 0u;      // rows in use; rows beyond are computed by nobody
const uint STATE_N_OUTPUTS = 1u;     // rows whose logits are wanted
const uint STATE_N_QUERY_TILES = 2u; // query tiles in use by prefill attention
const uint STATE_TABLE_STRIDE = 3u;  // block-table entries of one sequence
const uint STATE_TOKEN_ID = 16u;                            // [MAX_TOKENS]
const uint STATE_POSITION = STATE_TOKEN_ID + MAX_TOKENS;    // [MAX_TOKENS] 0-based, in its sequence
const uint STATE_SEQUENCE = STATE_POSITION + MAX_TOKENS;    // [MAX_TOKENS] row of the block table
const uint STATE_SLOT = STATE_SEQUENCE + MAX_TOKENS;        // [MAX_TOKENS] block * BLOCK_TOKENS + offset
const uint STATE_OUTPUT_ROW = STATE_SLOT + MAX_TOKENS;      // [MAX_TOKENS] token row of each output
const uint STATE_TILE_START = STATE_OUTPUT_ROW + MAX_TOKENS; // [MAX_TOKENS] first token of a query tile
const uint STATE_TILE_COUNT = STATE_TILE_START + MAX_TOKENS; // [MAX_TOKENS] its tokens, all of one sequence
const uint STATE_BLOCK_TABLE = STATE_TILE_COUNT + MAX_TOKENS; // [sequences][STATE_TABLE_STRIDE]
const uint BLOCK_TOKENS = 32u;       // tokens in a KV block

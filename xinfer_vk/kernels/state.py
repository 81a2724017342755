"""The state buffer: everything that changes between two runs of one plan. Mirrors include/state.glsl.

All in 32-bit words. A token row ``t`` has an id, a position in its sequence, the sequence's row in
the block table, and the cache slot (``block * BLOCK_TOKENS + offset``) its K and V are written to.
"""

from __future__ import annotations

MAX_TOKENS = 512
BLOCK_TOKENS = 32

N_TOKENS = 0
N_OUTPUTS = 1
N_QUERY_TILES = 2
TABLE_STRIDE = 3
TOKEN_ID = 16
POSITION = TOKEN_ID + MAX_TOKENS
SEQUENCE = POSITION + MAX_TOKENS
SLOT = SEQUENCE + MAX_TOKENS
OUTPUT_ROW = SLOT + MAX_TOKENS
TILE_START = OUTPUT_ROW + MAX_TOKENS
TILE_COUNT = TILE_START + MAX_TOKENS
BLOCK_TABLE = TILE_COUNT + MAX_TOKENS


def state_words(sequences: int, table_stride: int) -> int:
    """Size of a state buffer for ``sequences`` block tables of ``table_stride`` entries each."""
    return BLOCK_TABLE + sequences * table_stride

"""A ragged batch as the engine makes it: the state buffer, block tables, and a filled KV cache.

What a kernel must not look at holds what an earlier, larger step may have left there, so that a kernel
that looks does harm: rows beyond those in use name tokens, slots and tiles that exist, table entries
beyond a sequence's blocks name a free block, and cache slots nobody has written hold NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xinfer_vk.kernels import kv
from xinfer_vk.kernels import state as st
from xinfer_vk.kernels.base import ceil_div
from xinfer_vk.plan import Buffer, BufferKind
from xinfer_vk.selftest.case import HALF_NANS, POISON, Bench

SPARE_BLOCKS = 2  # free ones


@dataclass(frozen=True)
class Batch:
    """``sequences``: (tokens in the cache, new tokens) of each. ``rows``: of the plan, at least the new
    tokens of all. ``tile``: most tokens of a query tile. ``outputs``: token rows whose logits are wanted."""

    sequences: tuple[tuple[int, int], ...]
    rows: int
    tile: int = 16
    outputs: tuple[int, ...] = ()
    seed: int = 0

    @property
    def tokens(self) -> int:
        return sum(new for _, new in self.sequences)

    @property
    def max_context(self) -> int:
        return max(past + new for past, new in self.sequences)

    @property
    def table_stride(self) -> int:
        return ceil_div(self.max_context, st.BLOCK_TOKENS) + 1

    @property
    def blocks(self) -> int:
        return sum(ceil_div(past + new, st.BLOCK_TOKENS) for past, new in self.sequences) + SPARE_BLOCKS

    def tables(self) -> list[np.ndarray]:
        """The blocks of each sequence, in no order."""
        shuffled = np.random.default_rng(self.seed).permutation(self.blocks)
        lengths = [ceil_div(past + new, st.BLOCK_TOKENS) for past, new in self.sequences]
        return np.split(shuffled, np.cumsum(lengths))[:-1]

    def state(self, token_ids: np.ndarray | None = None) -> np.ndarray:
        """The state buffer's words."""
        words = np.zeros(st.state_words(len(self.sequences), self.table_stride), np.uint32)
        tables = self.tables()
        free = int(np.setdiff1d(np.arange(self.blocks), np.concatenate(tables))[0])
        words[st.POSITION : st.POSITION + st.MAX_TOKENS] = self.max_context - 1
        words[st.SLOT : st.SLOT + st.MAX_TOKENS] = free * st.BLOCK_TOKENS + 5
        words[st.TILE_COUNT : st.TILE_COUNT + st.MAX_TOKENS] = 1
        words[st.BLOCK_TABLE :] = free
        row = tiles = 0
        for i, ((past, new), table) in enumerate(zip(self.sequences, tables)):
            at = st.BLOCK_TABLE + i * self.table_stride
            words[at : at + len(table)] = table
            positions = np.arange(past, past + new)
            here = slice(row, row + new)
            words[st.POSITION :][here] = positions
            words[st.SEQUENCE :][here] = i
            slots = table[positions // st.BLOCK_TOKENS] * st.BLOCK_TOKENS + positions % st.BLOCK_TOKENS
            words[st.SLOT :][here] = slots
            for start in range(0, new, self.tile):
                words[st.TILE_START + tiles] = row + start
                words[st.TILE_COUNT + tiles] = min(self.tile, new - start)
                tiles += 1
            row += new
        if token_ids is not None:
            words[st.TOKEN_ID : st.TOKEN_ID + row] = token_ids
        words[st.OUTPUT_ROW : st.OUTPUT_ROW + len(self.outputs)] = self.outputs
        words[st.N_TOKENS], words[st.N_OUTPUTS] = row, len(self.outputs)
        words[st.N_QUERY_TILES], words[st.TABLE_STRIDE] = tiles, self.table_stride
        return words

    def state_buffer(self, bench: Bench, token_ids: np.ndarray | None = None) -> Buffer:
        return bench.filled("state", self.state(token_ids), BufferKind.STATE)


@dataclass(frozen=True)
class Cache:
    """A layer's cache on a bench: its buffer and where its regions begin."""

    buffer: Buffer
    k_offset: int
    v_offset: int


def filled_cache(
    bench: Bench,
    batch: Batch,
    kv_dtype: str,
    kv_heads: int,
    head_dim: int,
    keys: list[np.ndarray],
    values: list[np.ndarray],
) -> Cache:
    """A cache that holds, for each sequence, keys and values [length, kv_heads, head_dim] of its first
    positions, and NaN in every other slot."""
    e = kv.vector_words(kv_dtype, head_dim)
    region = batch.blocks * kv_heads * e * st.BLOCK_TOKENS
    nothing = POISON if kv_dtype == "f32" else HALF_NANS  # with scales that are NaN
    k = np.full((batch.blocks, kv_heads, st.BLOCK_TOKENS, e), nothing, np.uint32)
    v = k.copy()
    for table, some_keys, some_values in zip(batch.tables(), keys, values):
        position = np.arange(len(some_keys))
        block, place = table[position // st.BLOCK_TOKENS], position % st.BLOCK_TOKENS
        k[block, :, place] = kv.pack(some_keys, kv_dtype)
        v[block, :, place] = kv.pack(some_values, kv_dtype)
    before, between = 8, 4  # regions need not begin at the start, nor touch
    buffer = bench.buffer("cache", before + region + between + region, BufferKind.KV)
    cache = Cache(buffer, before, before + region + between)
    bench.write(buffer, cache.k_offset, np.swapaxes(k, 2, 3))
    bench.write(buffer, cache.v_offset, kv.place_values(v, kv_dtype, head_dim))
    return cache

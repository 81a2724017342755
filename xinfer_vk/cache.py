"""The paged KV cache: fixed-size blocks of tokens, handed out and taken back by one allocator.

A sequence owns a list of blocks; block ``i`` holds the keys and values of its positions
``32 i … 32 i + 31`` in every layer. Blocks need not be neighbours, so sequences grow without copying
and share a prefix by counting references (Kwon et al. 2023, "Efficient Memory Management for Large
Language Model Serving with PagedAttention").
"""

from __future__ import annotations

from dataclasses import dataclass, field

from xinfer_vk.errors import OutOfMemoryError, setting
from xinfer_vk.kernels.kv import SCALE_DIMS, vector_words
from xinfer_vk.kernels.state import BLOCK_TOKENS
from xinfer_vk.plan import WORD_BYTES, Buffer, BufferKind, Runtime

KV_BYTES = {"f32": 4, "f16": 2, "q8_0": 1.0625, "q4_0": 0.5625}  # of a value, scales included


class BlockAllocator:
    """Hands out block numbers ``0 … count-1``; a block is free again when its last user lets go."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._users = [0] * count

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        if not self._free:
            raise OutOfMemoryError(
                f"the KV cache is full ({self.count * BLOCK_TOKENS} tokens): "
                f"use a larger {setting('context')} or generate fewer tokens"
            )
        block = self._free.pop()
        self._users[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more sequence uses ``block``."""
        assert self._users[block] > 0, f"block {block} is not in use"
        self._users[block] += 1

    def release(self, block: int) -> None:
        assert self._users[block] > 0, f"block {block} released more often than taken"
        self._users[block] -= 1
        if self._users[block] == 0:
            self._free.append(block)


@dataclass(slots=True)
class CachedSequence:
    """What the cache holds of one sequence: ``length`` tokens in ``blocks``; ``row`` is its line in
    the device's block table.

    ``expected``: how long it is known to become, its prompt's length. RoPE scalings that depend on the
    length use it for every piece of the prompt; ``rope_key`` tells by which of them the cached keys were
    rotated (:meth:`RopeScaling.key`), -1: not all by the same.
    """

    row: int
    blocks: list[int] = field(default_factory=list)
    length: int = 0
    expected: int = 0
    rope_key: int = 0

    def slot(self, position: int) -> int:
        """Where the token at ``position`` is stored: ``block * BLOCK_TOKENS + offset``."""
        return self.blocks[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS


@dataclass(frozen=True)
class LayerCache:
    """Where one layer's keys and values stand: word offsets of the two regions in ``buffer``."""

    buffer: Buffer
    k_offset: int
    v_offset: int


class KVCache:
    """Keys and values of up to ``sequences`` sequences of up to ``capacity`` tokens each, on the device.

    ``total``: tokens of all sequences together (default ``capacity``); it is cut to what a device can
    bind for one layer, but not below one sequence's.

    :mod:`xinfer_vk.kernels.kv` has the layout of a block and the number formats.

    Raises :class:`UsageError` for an unknown dtype or a head dim that it cannot hold, and
    :class:`OutOfMemoryError` when a layer cannot be bound or the device is full.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        kv_dtype: str,
        capacity: int,
        sequences: int = 1,
        total: int | None = None,
    ) -> None:
        block_words = kv_heads * vector_words(kv_dtype, head_dim) * BLOCK_TOKENS  # of K (or V)
        self.runtime, self.kv_dtype, self.max_sequences = runtime, kv_dtype, sequences
        self.blocks_per_sequence = -(-capacity // BLOCK_TOKENS)
        self.capacity = self.blocks_per_sequence * BLOCK_TOKENS
        limit = min(runtime.profile.max_storage_range_bytes, (1 << 32) - WORD_BYTES) // WORD_BYTES
        most_blocks = limit // (2 * block_words)
        if self.blocks_per_sequence > most_blocks:
            smaller = {"f32": "f16", "f16": "" if head_dim % SCALE_DIMS else "q8_0"}.get(kv_dtype, "")
            needed = 2 * self.blocks_per_sequence * block_words * WORD_BYTES
            raise OutOfMemoryError(
                f"a context of {capacity} tokens needs {needed} bytes a layer and the device binds at most "
                f"{limit * WORD_BYTES}: use {setting('context', most_blocks * BLOCK_TOKENS)} or less"
                + (f", or {setting('kv_dtype', smaller)}" if smaller else "")
            )
        # Every sequence can end in a block that is not full, hence one more block for each.
        blocks = -(-max(total or capacity, capacity) // BLOCK_TOKENS) + sequences - 1
        blocks = min(blocks, most_blocks)
        self.allocator = BlockAllocator(blocks)
        region = blocks * block_words  # words of one layer's K (or V)
        self.bytes = layers * 2 * region * WORD_BYTES
        self._rows = list(range(sequences - 1, -1, -1))
        self.promised = 0  # blocks that running generations may still come to need, or have
        self._parked: dict[int, CachedSequence] = {}  # by row, the one parked first comes first
        self._buffers: list[Buffer] = []
        self.layers: list[LayerCache] = []
        per_buffer = max(1, limit // (2 * region))
        try:
            for first in range(0, layers, per_buffer):
                count = min(per_buffer, layers - first)
                name = f"KV cache of layers {first}–{first + count - 1}"
                buffer = runtime.allocate(name, count * 2 * region, BufferKind.KV)
                self._buffers.append(buffer)
                for i in range(count):
                    self.layers.append(LayerCache(buffer, i * 2 * region, (i * 2 + 1) * region))
        except BaseException:
            self.free()
            raise

    @property
    def in_use(self) -> int:
        """Sequences that are open and not parked."""
        return self.max_sequences - len(self._rows) - len(self._parked)

    @property
    def has_row(self) -> bool:
        """Whether :meth:`open` can give a sequence, if only by closing a parked one."""
        return bool(self._rows or self._parked)

    def open(self, expected: int = 0) -> CachedSequence:
        """A new, empty sequence (see :class:`CachedSequence` for ``expected``). Raises
        :class:`OutOfMemoryError` when all rows are taken."""
        if not self._rows:
            self._evict()
        if not self._rows:
            raise OutOfMemoryError(f"the KV cache holds {self.max_sequences} sequences and all are in use")
        return CachedSequence(self._rows.pop(), expected=expected)

    def reserve(self, sequence: CachedSequence, tokens: int) -> None:
        """Blocks for ``tokens`` more tokens after ``sequence.length``; nothing is taken if not all can be."""
        wanted = -(-(sequence.length + tokens) // BLOCK_TOKENS) - len(sequence.blocks)
        if wanted <= 0:
            return
        while wanted > self.allocator.free_blocks and self._parked:
            self._evict()
        if len(sequence.blocks) + wanted > self.blocks_per_sequence or wanted > self.allocator.free_blocks:
            raise OutOfMemoryError(
                f"{sequence.length + tokens} tokens do not fit the KV cache of {self.capacity}: "
                f"use a larger {setting('context')} or a shorter prompt"
            )
        sequence.blocks.extend(self.allocator.allocate() for _ in range(wanted))

    def fork(self, parent: CachedSequence, tokens: int) -> CachedSequence:
        """A new sequence that shares the parent's full blocks of its first ``tokens`` tokens; what is
        after them (under a block) is the new sequence's to fill. Shared blocks are never written again."""
        child = self.open()
        full = min(tokens, parent.length) // BLOCK_TOKENS
        child.blocks = parent.blocks[:full]
        for block in child.blocks:
            self.allocator.share(block)
        child.length = full * BLOCK_TOKENS
        child.expected, child.rope_key = tokens, parent.rope_key
        return child

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Forget everything from position ``length`` on (rejected drafts, an edited turn)."""
        assert 0 <= length <= sequence.length
        keep = -(-length // BLOCK_TOKENS)
        for block in sequence.blocks[keep:]:
            self.allocator.release(block)
        del sequence.blocks[keep:]
        sequence.length = length

    def close(self, sequence: CachedSequence) -> None:
        """Give back the sequence's blocks and its row."""
        self.truncate(sequence, 0)
        self._rows.append(sequence.row)

    def park(self, sequence: CachedSequence) -> None:
        """Keep a sequence for later, but only until another needs its row or its blocks: a conversation
        between two turns. :meth:`take_back` tells whether it is still there."""
        self._parked[sequence.row] = sequence

    def take_back(self, sequence: CachedSequence) -> bool:
        """Use a parked sequence again. False if it is gone: it must not be used any more then."""
        if self._parked.get(sequence.row) is not sequence:
            return False
        del self._parked[sequence.row]
        return True

    def _evict(self) -> None:
        """Close the sequence that has been parked longest, if there is one."""
        for sequence in self._parked.values():
            del self._parked[sequence.row]
            self.close(sequence)
            return

    def free(self) -> None:
        """Give the device memory back. What is parked is gone."""
        self._parked.clear()
        for buffer in self._buffers:
            self.runtime.free(buffer)
        self._buffers.clear()

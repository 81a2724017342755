"""The paged KV cache on the device: the buffers whose blocks :mod:`xinfer_vk.blocks` hands out.

Block ``i`` of a sequence holds the keys and values of its positions ``32 i … 32 i + 31`` in every layer.
Blocks need not be neighbours, so sequences grow without copying and share what they have in common.
"""

from __future__ import annotations

from dataclasses import dataclass

from xinfer_vk.blocks import CachedSequence, Sequences
from xinfer_vk.errors import OutOfMemoryError, setting
from xinfer_vk.kernels.copy_region import copy_region
from xinfer_vk.kernels.kv import SCALE_DIMS, vector_words
from xinfer_vk.kernels.state import BLOCK_TOKENS
from xinfer_vk.plan import WORD_BYTES, Buffer, BufferKind, DeviceProfile, Runtime, Step

__all__ = ["KV_BYTES", "CachedSequence", "KVCache", "KVShape", "LayerCache"]

KV_BYTES = {"f32": 4, "f16": 2, "q8_0": 1.0625, "q4_0": 0.5625}  # of a value, scales included


@dataclass(frozen=True)
class LayerCache:
    """Where one layer's keys and values stand: word offsets of the two regions in ``buffer``."""

    buffer: Buffer
    k_offset: int
    v_offset: int


def most_bytes(profile: DeviceProfile) -> int:
    """Of a buffer that a device can bind and 32 bits can count."""
    return min(profile.max_storage_range_bytes, (1 << 32) - WORD_BYTES)


@dataclass(frozen=True)
class KVShape:
    """What decides how large a block is."""

    layers: int
    kv_heads: int
    head_dim: int
    kv_dtype: str

    @property
    def vector_words(self) -> int:
        """Of the keys, or the values, of one block in one layer."""
        return self.kv_heads * vector_words(self.kv_dtype, self.head_dim) * BLOCK_TOKENS

    @property
    def block_bytes(self) -> int:
        """Of one block in all layers, keys and values."""
        return self.layers * self.layer_block_bytes

    @property
    def layer_block_bytes(self) -> int:
        return 2 * self.vector_words * WORD_BYTES

    def most_blocks(self, profile: DeviceProfile) -> int:
        """Blocks of one layer that a device can bind."""
        return most_bytes(profile) // self.layer_block_bytes


class KVCache(Sequences):
    """Keys and values of up to ``sequences`` sequences of up to ``capacity`` tokens each, on the device.

    ``blocks``: of all sequences together. Without it: what ``sequences`` need that have ``total`` tokens
    together (default: ``capacity``), cut to what a device can bind for one layer.

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
        blocks: int | None = None,
    ) -> None:
        shape = KVShape(layers, kv_heads, head_dim, kv_dtype)
        block_words = shape.vector_words
        self.runtime, self.kv_dtype = runtime, kv_dtype
        each = -(-capacity // BLOCK_TOKENS)
        limit = most_bytes(runtime.profile) // WORD_BYTES
        most_blocks = shape.most_blocks(runtime.profile)
        if (each if blocks is None else blocks) > most_blocks:
            smaller = {"f32": "f16", "f16": "" if head_dim % SCALE_DIMS else "q8_0"}.get(kv_dtype, "")
            needed = 2 * each * block_words * WORD_BYTES
            raise OutOfMemoryError(
                f"a context of {capacity} tokens needs {needed} bytes a layer and the device binds at most "
                f"{limit * WORD_BYTES}: use {setting('context', most_blocks * BLOCK_TOKENS)} or less"
                + (f", or {setting('kv_dtype', smaller)}" if smaller else "")
            )
        if blocks is None:  # every sequence can end in a block that is not full, hence one more for each
            blocks = min(-(-max(total or capacity, capacity) // BLOCK_TOKENS) + sequences - 1, most_blocks)
        super().__init__(blocks, capacity, sequences)
        region = blocks * block_words  # words of one layer's K (or V)
        self.block_words, self.region_words = block_words, region
        self.bytes = layers * 2 * region * WORD_BYTES
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

    def copy_steps(self, state: Buffer, at: int) -> list[Step]:
        """Steps that move blocks of all layers, by the list at word ``at`` of ``state``."""
        steps = []
        for buffer in self._buffers:
            parts = buffer.words // self.region_words
            steps.append(copy_region(state, at, buffer, parts, self.region_words, self.block_words))
        return steps

    def copy_list(self) -> list[tuple[int, int, int]]:
        """The regions of :attr:`copies`, for each part."""
        words = self.block_words
        return [(source * words, target * words, words) for source, target in self.copies]

    def free(self) -> None:
        """Give the device memory back."""
        for buffer in self._buffers:
            self.runtime.free(buffer)
        self._buffers.clear()

"""The angles by which queries and keys are rotated: tables on the device.

Most models turn a position always by the same angles: one table for all positions, written once. With
dynamic and longrope scaling the angles depend on how long the sequence is; then the host writes those of
each step's tokens (rotary_dim * 4 bytes a token).

transformers takes for all tokens of a forward pass the frequencies of the sequence's length after it, and
leaves the keys in its cache as they are. Run in chunks, a prompt is rotated here for its whole length
(``CachedSequence.expected``), as if it were one pass; then every new token for the length with it. Where
longrope changes from its short to its long factors, cached keys would be rotated by the wrong ones: they
are computed again (:attr:`RopeTables.renews`), as transformers' Phi-3 does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xinfer_vk.blocks import MIXED, CachedSequence
from xinfer_vk.kernels.base import Ref
from xinfer_vk.kernels.rope import rope_table
from xinfer_vk.models.config import ModelConfig
from xinfer_vk.models.graph import RopeTable
from xinfer_vk.models.rope_scaling import rope_factor, rope_inv_freq
from xinfer_vk.plan import Buffer, BufferKind, Runtime

AT_ONCE = 4096  # positions


class RopeTables:
    """``tables`` by kind (:meth:`ModelConfig.rope`), for sequences of up to ``positions`` tokens and steps of
    up to ``max_tokens``."""

    def __init__(self, runtime: Runtime, config: ModelConfig, positions: int, max_tokens: int) -> None:
        self._runtime, self._config = runtime, config
        scaling = config.rope_scaling
        self.by_length = scaling is not None and scaling.depends_on_length
        self._buffers: list[Buffer] = []
        self.tables: dict[str, RopeTable] = {}
        try:
            if self.by_length:
                words = max_tokens * config.rotary_dim
                self.tables["global"] = RopeTable(self._allocate("global", words, BufferKind.STATE), True)
            else:
                self.tables["global"] = self._table("global", positions)
            if config.local_rope_theta is not None:
                self.tables["local"] = self._table("local", positions)
        except BaseException:
            self.free()
            raise

    def write(self, chunks: Sequence[tuple[CachedSequence, int]]) -> None:
        """Before a step: the angles of the next ``count`` tokens of each sequence, where they depend on its
        length."""
        if not self.by_length:
            return
        rows = []
        for sequence, count in chunks:
            end = sequence.length + count
            length = max(sequence.expected, end)
            key = self.key(length)
            sequence.rope_key = key if sequence.length == 0 or sequence.rope_key == key else MIXED
            freq = rope_inv_freq(self._config, length=length)
            rows.append(rope_table(freq, np.arange(sequence.length, end), rope_factor(self._config)))
        words = np.concatenate(rows).reshape(-1).view(np.uint32)
        self._runtime.write(self.tables["global"].ref.buffer, 0, words)

    @property
    def renews(self) -> bool:
        """Whether cached keys must be computed again once a longer sequence rotates them in another way, as
        with longrope. (With dynamic scaling they stay: the frequencies change a little with every token.)"""
        scaling = self._config.rope_scaling
        return scaling is not None and scaling.type == "longrope"

    def free(self) -> None:
        for buffer in self._buffers:
            self._runtime.free(buffer)
        self._buffers.clear()

    def key(self, length: int) -> int:
        """What decides how the keys of a sequence of ``length`` tokens are rotated: a number."""
        scaling = self._config.rope_scaling
        return 0 if scaling is None else scaling.key(length)

    def _table(self, kind: str, positions: int) -> RopeTable:
        freq, factor = rope_inv_freq(self._config, kind), rope_factor(self._config, kind)
        width = 2 * len(freq)  # words of a position
        ref = self._allocate(kind, positions * width, BufferKind.WEIGHTS)
        for first in range(0, positions, AT_ONCE):  # a long context's cosines in float64 would take 100 MB
            values = rope_table(freq, np.arange(first, min(first + AT_ONCE, positions)), factor)
            self._runtime.write(ref.buffer, first * width, values.reshape(-1).view(np.uint32))
        return RopeTable(ref)

    def _allocate(self, kind: str, words: int, buffer_kind: BufferKind) -> Ref:
        buffer = self._runtime.allocate(f"{kind} rotary table", words, buffer_kind)
        self._buffers.append(buffer)
        return Ref(buffer)

"""The sampler on the device: owns its buffers, and adds its steps to a plan in the place of argmax.

Use: ``write_params`` when the rows of a batch change, ``write_history`` when a sequence with penalties
begins, and nothing at each step: the position comes from the state buffer, and a sampled token adds
itself to the history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xinfer_vk.errors import NumericError, UsageError
from xinfer_vk.kernels import sample_layout as lay
from xinfer_vk.kernels.base import Ref
from xinfer_vk.kernels.sample import SampleBuffers, logprobs, sample
from xinfer_vk.kernels.sample_layout import NAN_TOKEN, NO_TOKEN
from xinfer_vk.plan import Buffer, BufferKind, Runtime, Step
from xinfer_vk.sampling.logprobs import TokenLogprobs, from_parts, target_logprobs
from xinfer_vk.sampling.params import SamplingParams, named
from xinfer_vk.sampling.program import RowParams, pack_row

__all__ = ["NAN_TOKEN", "NO_TOKEN", "DeviceSampler", "RowParams", "SamplerVariant", "check_tokens"]

BIAS_ENTRIES = 8192  # of all rows together: 96 KiB


@dataclass(frozen=True)
class SamplerVariant:
    """What a plan must have in it for the rows of a batch: a part of the key that plans are kept by."""

    segments: int = 1
    sums: bool = False
    logprobs: bool = False


class DeviceSampler:
    """Samples up to ``max_rows`` rows of a vocabulary at once.

    ``slots`` and ``history_tokens``: how many sequences' tokens are kept on the device for penalties, and
    how many of each (the context). ``bias_entries``: biased or banned tokens of all rows together.
    """

    def __init__(
        self,
        runtime: Runtime,
        vocabulary: int,
        max_rows: int,
        *,
        slots: int = 1,
        history_tokens: int = 1,
        bias_entries: int = BIAS_ENTRIES,
    ) -> None:
        self.runtime, self.vocabulary, self.max_rows = runtime, vocabulary, max_rows
        self.slots, self.bias_entries = slots, bias_entries
        self.buffers = SampleBuffers.allocate(
            runtime, vocabulary, max_rows, slots, history_tokens, bias_entries
        )
        self._logprobs = runtime.allocate("sampler logprobs", max_rows * lay.LOGPROB_WORDS, BufferKind.RESULT)
        self._written: tuple[RowParams, ...] = ()
        self._variant = SamplerVariant()

    def write_params(self, rows: Sequence[RowParams]) -> SamplerVariant:
        """Say how the next batches' rows are sampled, in the order of their outputs, and get the variant of
        :meth:`steps` that does it. Costs nothing when the rows are the same as before.

        Raises :class:`UsageError` for a token beyond the vocabulary, or too many biased tokens.
        """
        rows = tuple(rows)
        if rows == self._written:
            return self._variant
        assert len(rows) <= self.max_rows, f"{len(rows)} rows, made for {self.max_rows}"
        records, lists = [], []
        first = self.max_rows * lay.ROW_WORDS
        for row in rows:
            alone = row.target is not None or not row.params.has_penalties
            assert alone or row.history is not None, "penalties need a history"
            assert row.history is None or row.history < self.slots, row.history
            row.params.check_vocabulary(self.vocabulary)
            record, entries = pack_row(row, self.buffers.geometry, first)
            first += entries.size
            records.append(record)
            lists.append(entries.reshape(-1))
        if first > self.buffers.parameters.words:
            used = (first - self.max_rows * lay.ROW_WORDS) // lay.BIAS_WORDS
            raise UsageError(
                f"{used} biased or banned tokens in one batch: there is room for {self.bias_entries}; "
                f"use fewer of {named('logit_bias')} and {named('bad_words')}"
            )
        self._written = ()
        if records:
            self.runtime.write(self.buffers.parameters, 0, np.concatenate(records))
        if any(entries.size for entries in lists):
            self.runtime.write(self.buffers.parameters, self.max_rows * lay.ROW_WORDS, np.concatenate(lists))
        self._written = rows
        self._variant = _variant_of(np.stack(records)) if records else SamplerVariant()
        return self._variant

    def write_targets(self, targets: Sequence[int] | np.ndarray) -> None:
        """Say that each of the next batch's rows wants the log-probability of a token of a text, and no
        more: :meth:`write_params` for many rows that differ in their target only."""
        row = RowParams(SamplingParams(logprobs=0), target=0)
        records = np.tile(pack_row(row, self.buffers.geometry, 0)[0], (len(targets), 1))
        records[:, lay.ROW_TARGET] = targets
        self._written = ()
        self.runtime.write(self.buffers.parameters, 0, records.reshape(-1))

    def write_history(self, slot: int, tokens: Sequence[int] | np.ndarray, start: int = 0) -> None:
        """Put a sequence's tokens from position ``start`` on into the history, for penalties."""
        stride = self.buffers.history_stride
        words = np.asarray(tokens, np.uint32)[: max(0, stride - start)]
        if words.size:
            self.runtime.write(self.buffers.history, slot * stride + start, words)

    def steps(
        self, logits: Ref, stride: int, rows: int, result: Ref, state: Buffer, variant: SamplerVariant
    ) -> list[Step]:
        """Steps that put a token for each output in use (``state``) of ``rows`` into ``result``: the id, or
        :data:`NAN_TOKEN` for a row with NaN or +inf, or :data:`NO_TOKEN` for one in which no token is
        possible. ``logits`` stay as they are."""
        steps = sample(
            self.runtime.profile,
            self.buffers,
            logits,
            stride,
            rows,
            result,
            state,
            variant.segments,
            variant.sums,
        )
        if variant.logprobs:
            steps.append(self.logprobs_step(logits, stride, rows, result, state))
        return steps

    def logprobs_step(self, logits: Ref, stride: int, rows: int, result: Ref, state: Buffer) -> Step:
        """The step behind :meth:`read_logprobs` alone, for rows that have a target and sample nothing (the
        tokens of a prompt)."""
        return logprobs(
            self.runtime.profile, self.buffers, logits, stride, rows, result, Ref(self._logprobs, 0), state
        )

    def read_logprobs(self, row: int) -> TokenLogprobs | None:
        """Log-probabilities of a row's token after a run, and of the most likely ones; None where the row
        asked for none. Reads :meth:`logprobs_bytes` from the device. Raises :class:`NumericError` on NaN
        and +inf."""
        wanted = self._written[row].params.logprobs
        if wanted is None:
            return None
        words = self.runtime.read(self._logprobs, row * lay.LOGPROB_WORDS, self.logprobs_bytes(row) // 4)
        floats = words.view(np.float32)
        if np.isnan(floats[lay.LOGPROB_LOGIT]):
            raise NumericError("no log-probabilities: the logits hold NaN or +inf, or no token is possible")
        low, high, count = (int(w) for w in words[lay.LOGPROB_SUM : lay.LOGPROB_COUNT + 1])
        pairs = slice(lay.LOGPROB_TOP, lay.LOGPROB_TOP + 2 * count)
        return from_parts(
            int(words[lay.LOGPROB_TOKEN]),
            float(floats[lay.LOGPROB_LOGIT]),
            int(words[lay.LOGPROB_RANK]),
            float(floats[lay.LOGPROB_LARGEST]),
            low | high << 32,
            words[pairs][::2],
            floats[pairs][1::2],
        )

    def read_targets(self, rows: int) -> np.ndarray:
        """Log-probabilities of the first ``rows`` rows' tokens after a run, ``float64 [rows]``, in one read
        of 188 bytes a row. NaN where the logits hold NaN or +inf, or no token is possible."""
        words = self.runtime.read(self._logprobs, 0, rows * lay.LOGPROB_WORDS).reshape(rows, -1)
        floats = words.view(np.float32)
        logit, largest = floats[:, lay.LOGPROB_LOGIT], floats[:, lay.LOGPROB_LARGEST]
        low, high = words[:, lay.LOGPROB_SUM], words[:, lay.LOGPROB_SUM + 1]
        return target_logprobs(logit, largest, low | high.astype(np.uint64) << np.uint64(32))

    def logprobs_bytes(self, row: int) -> int:
        """Bytes that :meth:`read_logprobs` brings back for a row."""
        wanted = self._written[row].params.logprobs
        return 0 if wanted is None else 4 * (lay.LOGPROB_TOP + 2 * wanted)

    def free(self) -> None:
        """Give the device memory back. Plans with these steps cannot run any more."""
        for buffer in (*self.buffers.all, self._logprobs):
            self.runtime.free(buffer)


def _variant_of(records: np.ndarray) -> SamplerVariant:
    """``records``: ``[rows, ROW_WORDS]``"""
    adjust = records[:, lay.ROW_ADJUST : lay.ROW_ADJUST + lay.MAX_SEGMENTS]
    modes = records[:, lay.ROW_MODE : lay.ROW_MODE + lay.MAX_SEGMENTS]
    return SamplerVariant(
        segments=int(np.count_nonzero(adjust, axis=1).max()),
        sums=bool((modes & lay.MODE_SUMS).any()),
        logprobs=bool(records[:, lay.ROW_LOGPROBS].any()),
    )


def check_tokens(tokens: Sequence[int] | np.ndarray, positions: Sequence[int], step: int) -> None:
    """Raise :class:`NumericError`, naming the step and the position, if a row of ``result`` is no token."""
    for token, position in zip(tokens, positions):
        if token >= NO_TOKEN:
            raise no_token_error(int(token), position, step)


def no_token_error(token: int, position: int, step: int) -> NumericError:
    """Why a row of ``result`` is no token: it is :data:`NAN_TOKEN` or :data:`NO_TOKEN`."""
    if token == NAN_TOKEN:
        return NumericError(
            f"step {step}: the logits for position {position} hold NaN or +inf; run `xinfer-vk selftest` "
            "to check the device, and check the model's weights"
        )
    return NumericError(
        f"step {step}: no token is possible at position {position}: all logits are -inf or banned; "
        "ban fewer tokens"
    )

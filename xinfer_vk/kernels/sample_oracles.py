"""What each kernel of the sampler must leave in the buffers: the oracles of kernels/sample.py.

The stages are the textbook's (sample_stages.py). What is here is where a row's parameters and data lie, and
which of the two pick kernels a row belongs to.
"""

from __future__ import annotations

import numpy as np

from xinfer_vk.kernels import sample_layout as lay
from xinfer_vk.kernels import sample_math as arithmetic
from xinfer_vk.kernels import sample_stages as textbook
from xinfer_vk.kernels import state as st
from xinfer_vk.kernels.sample_layout import Geometry
from xinfer_vk.kernels.sample_math import EXCLUDED, FAR, NAN_KEY, Scale
from xinfer_vk.plan import OracleCall


class _Row:
    """One row of a dispatch: its parameters, and its part of each buffer."""

    def __init__(self, call: OracleCall, row: int) -> None:
        p = call.p
        self.call, self.p, self.row = call, p, row
        self.words = call.u32("parameters")[row * lay.ROW_WORDS :]
        self.floats = self.words[: lay.ROW_WORDS].view(np.float32)
        self.keys = call.u32("keys")[row * p.vocabulary : (row + 1) * p.vocabulary]
        self.partials = call.u32("partials")[row * p.partials_stride : (row + 1) * p.partials_stride]
        self.adjust = int(self.words[lay.ROW_ADJUST + p.segment])
        self.mode = int(self.words[lay.ROW_MODE + p.segment])

    def stages(self) -> list[int]:
        packed = int(self.words[lay.ROW_STAGES + self.p.segment])
        return [packed >> 4 * i & 15 for i in range(8) if packed >> 4 * i]

    def scale(self, cooled: bool) -> Scale:
        at = lay.ROW_SCALES + (lay.SCALE_WORDS if cooled else 0)
        return Scale(float(self.floats[at]), int(self.words[at + 1]), int(self.words[at + 2]))

    def position(self) -> int:
        """Where the token to be sampled will stand: after this row's token."""
        state = self.call.u32("state")
        return int(state[st.POSITION + int(state[st.OUTPUT_ROW + self.row])]) + 1


def _rows(call: OracleCall) -> list[_Row]:
    rows = [_Row(call, row) for row in range(int(call.u32("state")[st.N_OUTPUTS]))]
    return [row for row in rows if row.adjust]


def adjust_oracle(call: OracleCall) -> None:
    p = call.p
    g = Geometry(p.vocabulary)
    for row in _rows(call):
        if "logits" in call.buffers:
            start = p.logits_offset + row.row * p.logits_stride
            logits = call.f32("logits")[start : start + p.vocabulary]
        else:
            logits = arithmetic.logits_of(row.keys)
        logits = _adjusted(row, logits)
        row.keys[:] = arithmetic.keys_of(logits)
        padded = np.zeros(g.chunks * lay.CHUNK, np.uint32)
        padded[: p.vocabulary] = row.keys
        row.partials[: g.groups] = padded.reshape(-1, g.group_tokens).max(axis=1)
        row.partials[p.done : p.done + 3] = 0


def _adjusted(row: _Row, logits: np.ndarray) -> np.ndarray:
    adjust, p, position = row.adjust, row.p, row.position()
    floats, words = row.floats, row.words
    if adjust & lay.ADJUST_TEMPERATURE:
        logits = textbook.scale_logits(logits, floats[lay.ROW_INVERSE_TEMPERATURE])
    if adjust & lay.ADJUST_PENALTIES:
        end = min(position, p.history_stride)
        begin = end - min(int(words[lay.ROW_WINDOW]), end)
        base = int(words[lay.ROW_HISTORY]) * p.history_stride
        penalties = textbook.Penalties(*floats[lay.ROW_REPETITION : lay.ROW_FREQUENCY + 1])
        logits = textbook.penalise(logits, row.call.u32("history")[base + begin : base + end], penalties)
    if adjust & (lay.ADJUST_BIAS | lay.ADJUST_BANS):
        first, count = int(words[lay.ROW_BIAS_FIRST]), int(words[lay.ROW_BIAS_COUNT])
        entries = row.call.u32("parameters")[first : first + count * lay.BIAS_WORDS].reshape(
            -1, lay.BIAS_WORDS
        )
        bias = entries[:, 1].copy().view(np.float32) * np.float32(bool(adjust & lay.ADJUST_BIAS))
        banned = (position < entries[:, 2]) & bool(adjust & lay.ADJUST_BANS)
        logits = textbook.add_bias(logits, entries[:, 0], np.where(banned, np.float32(-np.inf), bias))
    return logits


def sum_oracle(call: OracleCall) -> None:
    p = call.p
    for row in _rows(call):
        top = int(row.partials[: p.groups].max())
        if not row.mode & lay.MODE_SUMS or top in (EXCLUDED, NAN_KEY):
            continue
        scale = row.scale(bool(row.mode & lay.MODE_SUMS_SCALE))
        weights = np.zeros(call.groups[0] * lay.CHUNK, np.uint64)
        weights[: p.vocabulary] = arithmetic.weights(arithmetic.distances(row.keys, top, scale), scale)
        sums = weights.reshape(-1, lay.CHUNK).sum(axis=1)
        row.partials[p.groups : p.groups + 2 * sums.size] = sums.view(np.uint32)  # low word first
        row.partials[p.total : p.total + 2] = sums.sum(keepdims=True).view(np.uint32)


def list_oracle(call: OracleCall) -> None:
    for row in _rows(call):
        if row.mode & lay.MODE_SHORT:
            _pick(row, short=True)


def vocabulary_oracle(call: OracleCall) -> None:
    for row in _rows(call):
        if not row.partials[call.p.done]:
            _pick(row, short=False)


def _pick(row: _Row, short: bool) -> None:
    """The row's stages and its draw; leaves the row unchanged if a short list is not enough."""
    top = int(row.partials[: row.p.groups].max())
    keys, size = row.keys, lay.KEPT_IN_KEYS
    token = lay.NAN_TOKEN if top == NAN_KEY else lay.NO_TOKEN
    if top in (EXCLUDED, NAN_KEY):
        size = 0 if short else size
    else:
        if short:
            size = _listed(row, top)
            if size == 0:
                return
        cooled = False
        for stage in row.stages():
            cooled |= stage == lay.STAGE_TEMPERATURE
            keys = _cut(row, keys, stage, row.scale(cooled))
        if row.mode & lay.MODE_DRAW:
            seed = int(row.words[lay.ROW_SEED]) | int(row.words[lay.ROW_SEED + 1]) << 32
            random = arithmetic.random_word(seed, int(row.words[lay.ROW_SEQUENCE]), row.position())
            token = textbook.draw(keys, row.scale(cooled), random)
    if not short:
        row.keys[:] = keys
    if row.mode & lay.MODE_DRAW:
        _finish(row, token, size)


def _cut(row: _Row, keys: np.ndarray, stage: int, scale: Scale) -> np.ndarray:
    if stage == lay.STAGE_TOP_K:
        return textbook.top_k(keys, int(row.words[lay.ROW_TOP_K]))
    if stage == lay.STAGE_TYPICAL:
        return textbook.typical(keys, int(row.words[lay.ROW_TYPICAL_P]), scale)
    if stage == lay.STAGE_TOP_P:
        return textbook.top_p(keys, int(row.words[lay.ROW_TOP_P]), scale)
    if stage == lay.STAGE_MIN_P:
        return textbook.min_p(keys, int(row.words[lay.ROW_MIN_P]), scale)
    return keys


def _listed(row: _Row, top: int) -> int:
    """How many tokens the kernel's short list holds; 0 where it has to leave the row to the other variant."""
    p = row.p
    stages = row.stages()
    cooled = stages[:1] == [lay.STAGE_TEMPERATURE]
    first = (stages[1:] if cooled else stages)[:1]
    scale = row.scale(cooled)
    largest = row.partials[: p.groups][row.partials[: p.groups] != EXCLUDED]
    groups = arithmetic.distances(largest, top, scale)
    total = int(row.partials[p.done + 1 : p.done + 3].copy().view(np.uint64)[0])
    needed = arithmetic.mass_needed(int(row.words[lay.ROW_TOP_P]), total)
    if p.vocabulary <= lay.LIST:
        farthest = FAR
    elif first == [lay.STAGE_MIN_P]:
        farthest = int(row.words[lay.ROW_MIN_P])
    elif first == [lay.STAGE_TOP_P]:
        groups_weights = arithmetic.weights(groups, scale)
        if int(groups_weights.sum()) < needed:
            farthest = _distance_of(groups, np.ones_like(groups_weights), p.groups // 2, FAR)
        else:
            farthest = _distance_of(groups, groups_weights, needed, scale.last)
    else:
        farthest = _distance_of(groups, np.ones(groups.size, np.uint64), int(row.words[lay.ROW_TOP_K]), FAR)
    listed = np.flatnonzero((row.keys != EXCLUDED) & (arithmetic.distances(row.keys, top, scale) <= farthest))
    if listed.size > lay.LIST:
        return 0
    if row.mode & lay.MODE_SUMS and int(textbook.row_weights(row.keys, listed, scale).sum()) < needed:
        return 0
    return int(listed.size)


def _distance_of(groups: np.ndarray, weights: np.ndarray, needed: int, last: int) -> int:
    """A distance within which groups have the needed weight and no more: the end of the histogram bin in
    which the kernel's selection finds the last of them alone. :data:`FAR` if all are wanted by number."""
    if last == FAR and groups.size <= needed:
        return FAR
    low, high = 0, last
    while low < high:
        shift = max((high - low).bit_length() - 8, 0)
        inside = (groups >= low) & (groups <= high)
        bins = groups[inside] - low >> shift
        sums = [int(weights[inside][bins == i].sum()) for i in range(int(bins.max()) + 1)]
        reached = int(weights[groups < low].sum()) + np.cumsum(np.array(sums, np.uint64))
        found = int(np.searchsorted(reached, np.uint64(needed)))
        low, high = low + (found << shift), min(high, low + (found + 1 << shift) - 1)
        if np.count_nonzero(bins == found) == 1:
            break
    return high


def _finish(row: _Row, token: int, size: int) -> None:
    p, call = row.p, row.call
    call.u32("kept")[row.row * lay.KEPT_WORDS] = size
    call.u32("result")[p.result_offset + row.row] = token
    row.partials[p.done] = 1
    appends = bool(int(row.words[lay.ROW_FLAGS]) & lay.FLAG_APPEND) and token < lay.NO_TOKEN
    if appends and row.position() < p.history_stride:
        call.u32("history")[int(row.words[lay.ROW_HISTORY]) * p.history_stride + row.position()] = token


def logprobs_oracle(call: OracleCall) -> None:
    p, out = call.p, call.u32("logprobs")
    scale = Scale.of(1.0)
    for row in range(int(call.u32("state")[st.N_OUTPUTS])):
        words = call.u32("parameters")[row * lay.ROW_WORDS :]
        wanted = int(words[lay.ROW_LOGPROBS])
        if wanted == 0:
            continue
        token = int(words[lay.ROW_TARGET])
        if token == lay.SAMPLED:
            token = int(call.u32("result")[p.result_offset + row])
        start = p.logits_offset + row * p.logits_stride
        bits = call.u32("logits")[start : start + p.vocabulary]
        keys = arithmetic.keys_of(bits.view(np.float32))
        record = out[p.logprobs_offset + row * lay.LOGPROB_WORDS :][: lay.LOGPROB_WORDS]
        not_a_number, known = bool((keys == NAN_KEY).any()), token < p.vocabulary
        record[lay.LOGPROB_TOKEN] = token
        record[lay.LOGPROB_LOGIT] = bits[token] if known and not not_a_number else 0x7FC00000
        record[lay.LOGPROB_RANK] = 0
        record[lay.LOGPROB_LARGEST] = 0x7FC00000
        record[lay.LOGPROB_SUM : lay.LOGPROB_SUM + 2] = 0
        record[lay.LOGPROB_COUNT] = 0
        if not_a_number:
            continue
        best = textbook.candidates(keys)
        record[lay.LOGPROB_LARGEST] = arithmetic.logits_of(keys.max(keepdims=True)).view(np.uint32)[0]
        if best.size == 0:
            record[lay.LOGPROB_RANK] = int(known)
            continue
        total = int(textbook.row_weights(keys, best, scale).sum())
        record[lay.LOGPROB_SUM : lay.LOGPROB_SUM + 2] = total & 0xFFFFFFFF, total >> 32
        if known:
            ahead = (keys > keys[token]) | ((keys == keys[token]) & (np.arange(keys.size) < token))
            record[lay.LOGPROB_RANK] = int(ahead.sum()) + 1
        listed = best[: wanted - 1]
        record[lay.LOGPROB_COUNT] = listed.size
        pairs = np.stack(
            [listed.astype(np.uint32), arithmetic.logits_of(keys[listed]).view(np.uint32)], axis=-1
        )
        record[lay.LOGPROB_TOP : lay.LOGPROB_TOP + pairs.size] = pairs.reshape(-1)

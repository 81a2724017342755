"""A row's parameters as the words the kernels read.

Stages are cut into *segments*: adjustments first (temperature if it comes before them, penalties, bias), then
truncations. The usual order is one segment; an adjustment after a truncation begins another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from xinfer_vk.kernels import sample_layout as lay
from xinfer_vk.kernels.sample_layout import Geometry
from xinfer_vk.kernels.sample_math import TINY, Scale, probability_word
from xinfer_vk.kernels.sample_stages import Penalties
from xinfer_vk.sampling.params import ADJUSTMENTS, SamplingParams

CODES = {
    "top_k": lay.STAGE_TOP_K,
    "typical": lay.STAGE_TYPICAL,
    "top_p": lay.STAGE_TOP_P,
    "min_p": lay.STAGE_MIN_P,
    "temperature": lay.STAGE_TEMPERATURE,
}
ALWAYS = 0xFFFFFFFF  # a ban that no position ends


@dataclass(frozen=True)
class RowParams:
    """How one row of a batch is sampled.

    ``seed``, ``sequence``: with the token's position they are all that the random numbers depend on;
    ``sequence`` tells apart samples that share a seed. ``history``: the row of the device's history in
    which the sequence's tokens are; penalties need it, and the sampled token is added to it.
    ``banned``: tokens that must not come. ``end_tokens`` must not come before position ``end_from``
    (prompt tokens + ``min_new_tokens``). ``target``: the token whose log-probability is wanted instead
    of the sampled one's (of a prompt).
    """

    params: SamplingParams
    seed: int = 0
    sequence: int = 0
    history: int | None = None
    banned: tuple[int, ...] = ()
    end_tokens: tuple[int, ...] = ()
    end_from: int = 0
    target: int | None = None


@dataclass
class Segment:
    adjust: int = lay.ADJUST_PRESENT
    stages: list[str] = field(default_factory=list)


def segments_of(stages: tuple[str, ...]) -> list[Segment]:
    """Stages in order, cut into segments. A temperature before an adjustment becomes part of the
    adjustment: then it multiplies logits, where otherwise it scales distances."""
    segments = [Segment()]
    for stage in stages:
        now = segments[-1]
        if stage not in ADJUSTMENTS:
            now.stages.append(stage)
            continue
        bit = lay.ADJUST_PENALTIES if stage == "penalties" else lay.ADJUST_BIAS
        if now.stages == ["temperature"] and now.adjust == lay.ADJUST_PRESENT:
            now.stages.clear()
            now.adjust |= lay.ADJUST_TEMPERATURE
        elif now.stages or bit < now.adjust:  # within an adjustment the larger bit comes later
            segments.append(now := Segment())
            if "temperature" in segments[-2].stages:
                now.adjust |= lay.ADJUST_TEMPERATURE
        now.adjust |= bit
    return segments


def small_to_zero(x: float) -> np.float32:
    """In single precision, and zero where it would be lost in arithmetic anyway."""
    value = np.float32(x)
    return np.float32(0) if abs(value) < TINY else value


def penalties_of(params: SamplingParams) -> Penalties:
    """The factors the kernels and the reference multiply with."""
    return Penalties(
        np.float32(params.repetition_penalty),
        np.float32(1 / params.repetition_penalty),
        small_to_zero(params.presence_penalty),
        small_to_zero(params.frequency_penalty),
    )


def farthest_of(min_p: float, temperature: float, scale: Scale) -> int:
    """The largest distance at which a token has ``min_p`` of the probability of the first."""
    return min(scale.last, math.floor(-math.log(min_p) * temperature * scale.factor))


def pack_row(row: RowParams, geometry: Geometry, bias_first: int) -> tuple[np.ndarray, np.ndarray]:
    """The record of a row, ``uint32 [ROW_WORDS]``, and its bias entries, ``uint32 [n, BIAS_WORDS]``, which
    will be at word ``bias_first`` of the parameter buffer."""
    record = pack_params(row.params, geometry).copy()
    record[lay.ROW_SEED : lay.ROW_SEED + 2] = row.seed & 0xFFFFFFFF, row.seed >> 32
    record[lay.ROW_SEQUENCE] = row.sequence
    if row.history is not None:
        record[lay.ROW_HISTORY] = row.history
        record[lay.ROW_FLAGS] = lay.FLAG_APPEND
    if row.target is not None:
        record[lay.ROW_TARGET] = row.target
    entries = bias_entries(row, geometry.vocabulary)
    if entries.size:
        record[lay.ROW_BIAS_FIRST : lay.ROW_BIAS_COUNT + 1] = bias_first, len(entries)
        record[lay.ROW_ADJUST] |= lay.ADJUST_BANS
    return record, entries


@lru_cache(maxsize=256)
def pack_params(params: SamplingParams, geometry: Geometry) -> np.ndarray:
    """The part of a record that all rows with these parameters share. Not to be written to."""
    record = np.zeros(lay.ROW_WORDS, np.uint32)
    floats = record.view(np.float32)
    window = params.penalty_window
    record[lay.ROW_WINDOW] = 0xFFFFFFFF if window < 0 else min(window, 0xFFFFFFFF)
    penalties = penalties_of(params)
    floats[lay.ROW_REPETITION] = penalties.repetition
    floats[lay.ROW_REPETITION_INVERSE] = penalties.repetition_inverse
    floats[lay.ROW_PRESENCE] = penalties.presence
    floats[lay.ROW_FREQUENCY] = penalties.frequency
    record[lay.ROW_TOP_K] = 1 if params.is_greedy else min(params.top_k, geometry.vocabulary)
    record[lay.ROW_TOP_P] = probability_word(min(params.top_p, 1.0))
    record[lay.ROW_TYPICAL_P] = probability_word(min(params.typical_p, 1.0))
    record[lay.ROW_LOGPROBS] = 0 if params.logprobs is None else params.logprobs + 1
    record[lay.ROW_TARGET] = lay.SAMPLED

    temperature = 1.0 if params.is_greedy else params.temperature
    floats[lay.ROW_INVERSE_TEMPERATURE] = 1 / temperature
    for i, scale in enumerate((Scale.of(1.0), Scale.of(temperature))):
        at = lay.ROW_SCALES + i * lay.SCALE_WORDS
        floats[at] = scale.factor
        record[at + 1 : at + 3] = scale.multiplier, scale.last

    segments = segments_of(params.active_stages)
    if params.is_greedy:
        segments[-1].stages.append("top_k")
    for i, segment in enumerate(segments):
        record[lay.ROW_ADJUST + i] = segment.adjust
        record[lay.ROW_STAGES + i] = sum(CODES[stage] << 4 * j for j, stage in enumerate(segment.stages))
        if "min_p" in segment.stages:
            cooled = "temperature" in segment.stages[: segment.stages.index("min_p")]
            at_temperature = temperature if cooled else 1.0
            record[lay.ROW_MIN_P] = farthest_of(params.min_p, at_temperature, Scale.of(at_temperature))
    last = len(segments) - 1
    record[lay.ROW_MODE + last] = mode_of(segments[last], int(record[lay.ROW_TOP_K]), geometry)
    record.flags.writeable = False
    return record


def mode_of(segment: Segment, k: int, geometry: Geometry) -> int:
    """How the last segment is best done: by a short list or not, with sums of weights or without."""
    stages = segment.stages
    truncations = [stage for stage in stages if stage != "temperature"]
    first = truncations[0] if truncations else "draw"
    mode = lay.MODE_DRAW
    if geometry.vocabulary <= lay.LIST:
        return mode | lay.MODE_SHORT
    if (first == "top_k" and geometry.short_list_suits(k)) or first in ("top_p", "min_p"):
        mode |= lay.MODE_SHORT
    if first == "top_p" or (first == "draw" and geometry.chunks <= lay.MAX_SUMS):
        mode |= lay.MODE_SUMS
        cooled = "temperature" in (stages if first == "draw" else stages[: stages.index(first)])
        mode |= lay.MODE_SUMS_SCALE if cooled else 0
    return mode


def bias_entries(row: RowParams, vocabulary: int) -> np.ndarray:
    """(token, f32 bias, position before which it is banned) of every token that has one of these."""
    bias = row.params.logit_bias
    until = dict.fromkeys(row.end_tokens, row.end_from) if row.end_from > 0 else {}
    until.update(dict.fromkeys(row.banned, ALWAYS))
    tokens = sorted(token for token in {*bias, *until} if token < vocabulary)
    entries = np.zeros((len(tokens), lay.BIAS_WORDS), np.uint32)
    if tokens:
        entries[:, 0] = tokens
        entries[:, 1] = np.array([small_to_zero(bias.get(t, 0.0)) for t in tokens], np.float32).view(
            np.uint32
        )
        entries[:, 2] = [until.get(t, 0) for t in tokens]
    return entries

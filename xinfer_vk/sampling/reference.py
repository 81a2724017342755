"""Sampling on the CPU, for reading: the specification of the device sampler, and ``--sampler cpu``.

The stages themselves are in ``kernels/sample_stages.py``, which the kernels' oracles use too; here they
are put in the order that the parameters ask for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xinfer_vk.errors import NumericError
from xinfer_vk.kernels import sample_math as arithmetic
from xinfer_vk.kernels import sample_stages as stages
from xinfer_vk.kernels.sample_math import Scale
from xinfer_vk.sampling.logprobs import TokenLogprobs, logprobs_of
from xinfer_vk.sampling.params import SamplingParams
from xinfer_vk.sampling.program import farthest_of, penalties_of, small_to_zero


@dataclass(frozen=True)
class Sampled:
    """``token``: what was drawn. ``kept``: the ids it was drawn from, ascending, with ``probabilities``.
    ``logprobs``: what ``params.logprobs`` asked for, else None."""

    token: int
    kept: np.ndarray  # int64 [n]
    probabilities: np.ndarray  # float64 [n]
    logprobs: TokenLogprobs | None


def sample(
    logits: np.ndarray,
    params: SamplingParams,
    history: Sequence[int] | np.ndarray = (),
    seed: int = 0,
    sequence: int = 0,
    position: int | None = None,
    *,
    banned: Sequence[int] = (),
) -> Sampled:
    """Choose the token at ``position`` of a sequence from the logits ``[vocabulary]`` before it.

    ``history``: the tokens so far, prompt and answer; ``position`` is their number unless given.
    ``banned``: tokens that must not come. Raises :class:`NumericError` when a logit is NaN or +inf,
    or no token is possible.
    """
    raw = np.ascontiguousarray(logits, np.float32)
    tokens = np.asarray(history, np.int64).reshape(-1)
    position = tokens.size if position is None else position
    _refuse_nan(arithmetic.keys_of(raw), position)

    logits = ban(raw, banned)
    keys = arithmetic.keys_of(logits)  # 0 for what is out
    temperature = 1.0
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for stage in params.active_stages:
            if not keys.any():
                break
            scale = Scale.of(temperature)
            if stage == "top_k":
                keys = stages.top_k(keys, params.top_k)
            elif stage == "typical":
                keys = stages.typical(keys, arithmetic.probability_word(params.typical_p), scale)
            elif stage == "top_p":
                keys = stages.top_p(keys, arithmetic.probability_word(params.top_p), scale)
            elif stage == "min_p":
                keys = stages.min_p(keys, farthest_of(params.min_p, temperature, scale), scale)
            elif stage == "temperature":
                temperature = params.temperature
            else:  # an adjustment, of the logits of what is left
                logits = arithmetic.logits_of(keys)
                if temperature != 1:
                    logits = stages.scale_logits(logits, np.float32(1 / temperature))
                    temperature = 1.0
                keys = arithmetic.keys_of(adjust(stage, logits, params, tokens))
                _refuse_nan(keys, position)
        if params.is_greedy:
            keys = stages.top_k(keys, 1)
    if not keys.any():
        raise NumericError(f"no token is possible at position {position}: all logits are -inf or banned")

    kept = np.flatnonzero(keys)
    weights = stages.row_weights(keys, kept, Scale.of(temperature))
    token = stages.draw(keys, Scale.of(temperature), arithmetic.random_word(seed, sequence, position))
    return Sampled(
        token,
        kept,
        weights / weights.sum(),
        None if params.logprobs is None else logprobs_of(raw, token, params.logprobs),
    )


def _refuse_nan(keys: np.ndarray, position: int) -> None:
    if (keys == arithmetic.NAN_KEY).any():
        raise NumericError(f"the logits for position {position} hold NaN or +inf")


def ban(logits: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """The same logits with -inf for some tokens; those the vocabulary does not have are no matter."""
    out = logits.copy()
    out[[token for token in tokens if token < out.size]] = -np.inf
    return out


def adjust(stage: str, logits: np.ndarray, params: SamplingParams, history: np.ndarray) -> np.ndarray:
    """Logits after penalties or bias."""
    if stage == "penalties":
        window = (
            history if params.penalty_window < 0 else history[max(0, history.size - params.penalty_window) :]
        )
        return stages.penalise(logits, window, penalties_of(params))
    tokens = np.array(list(params.logit_bias), np.int64)
    bias = np.array([small_to_zero(value) for value in params.logit_bias.values()], np.float32)
    return stages.add_bias(logits, tokens, bias)

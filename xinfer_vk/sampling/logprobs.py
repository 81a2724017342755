"""Log-probabilities of a token and of the most likely ones.

They are those of the model: log-softmax of its logits at temperature 1, before any penalty, bias or
truncation, as the OpenAI API and vLLM have it. They say how sure the model is, not how the sampler chose.
The device hands over integers and logits (kernels/sample_logprobs.py); the logarithm is taken here, in
float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from xinfer_vk.errors import NumericError
from xinfer_vk.kernels import sample_math as arithmetic
from xinfer_vk.kernels import sample_stages as stages
from xinfer_vk.kernels.sample_math import WEIGHT_BITS, Scale


@dataclass(frozen=True)
class TokenLogprobs:
    """``logprob`` of ``token``, whose ``rank`` is 1 if it is the most likely; ``top``: (token, logprob) of
    the most likely ones, in falling order. ``text`` and ``top_texts`` are the texts of ``token`` and of
    those in ``top``; bytes that are no whole character are shown as U+FFFD."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]
    text: str = field(default="", compare=False)
    top_texts: tuple[str, ...] = field(default=(), compare=False)

    def with_texts(self, text_of: Callable[[int], str]) -> TokenLogprobs:
        """The same with the texts of its tokens."""
        texts = tuple(text_of(token) for token, _ in self.top)
        return replace(self, text=text_of(self.token), top_texts=texts)

    def as_dict(self) -> dict[str, Any]:
        """``{"token_id", "token", "logprob", "rank", "top": [{"token_id", "token", "logprob"}, …]}``"""
        top = zip(self.top, self.top_texts or ("",) * len(self.top))
        return {
            "token_id": self.token,
            "token": self.text,
            "logprob": self.logprob,
            "rank": self.rank,
            "top": [{"token_id": t, "token": text, "logprob": value} for (t, value), text in top],
        }


def logprobs_of(logits: np.ndarray, token: int, count: int) -> TokenLogprobs:
    """From the model's logits ``float32 [vocabulary]``. Raises :class:`NumericError` for NaN and +inf."""
    keys = arithmetic.keys_of(logits)
    if (keys == arithmetic.NAN_KEY).any():
        raise NumericError("no log-probabilities: the logits hold NaN or +inf")
    best = stages.candidates(keys)
    total = int(stages.row_weights(keys, best, Scale.of(1.0)).sum())
    ahead = (keys > keys[token]) | ((keys == keys[token]) & (np.arange(keys.size) < token))
    return from_parts(
        token,
        float(logits[token]),
        int(ahead.sum()) + 1,
        float(logits.max()),
        total,
        best[:count],
        logits[best[:count]],
    )


def from_parts(
    token: int,
    logit: float,
    rank: int,
    largest: float,
    total: int,
    tokens: Sequence[int] | np.ndarray,
    logits: Sequence[float] | np.ndarray,
) -> TokenLogprobs:
    """``total``: the sum of all weights (2^44 times the sum of ``exp(logit - largest)``)."""
    log_total = math.log(total) - WEIGHT_BITS * math.log(2)

    def logprob(x: float) -> float:
        return 0.0 - log_total if x == largest else x - largest - log_total

    return TokenLogprobs(
        token, logprob(logit), rank, tuple((int(t), logprob(float(x))) for t, x in zip(tokens, logits))
    )


def target_logprobs(logits: np.ndarray, largest: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """The log-probabilities of many tokens, one of each row: :func:`from_parts` without the most likely
    ones. ``float64 [rows]``; NaN where a row's logits hold NaN or +inf, or are all -inf."""
    with np.errstate(divide="ignore", invalid="ignore"):
        log_totals = np.log(totals.astype(np.float64)) - WEIGHT_BITS * math.log(2)
        below = np.where(logits == largest, 0.0, logits.astype(np.float64) - largest)
        return np.where(totals == 0, np.nan, below - log_totals)

"""Cases of the sampler: tokens, kept sets and sums must be the oracles' to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xinfer_vk.kernels import state as st
from xinfer_vk.kernels.base import Ref
from xinfer_vk.plan import Buffer, BufferKind, Step
from xinfer_vk.sampling.device import DeviceSampler, RowParams
from xinfer_vk.sampling.params import SamplingParams
from xinfer_vk.selftest.case import OWN_AND_GPU, Bench, Build, Case, Tolerance, kernel_cases

SAME_TOKENS = Tolerance(0.0, 0.0, "integers after the logits, so that every device chooses the same token")
CONTEXT = 24
PICKS = ("sample_pick.list", "sample_pick.vocabulary")

TRUNCATIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    {"temperature": 1.0},
    {"temperature": 1.5, "top_p": 0.9},
    {"temperature": 1.3, "top_p": 0.99999},
    {"temperature": 1.0, "min_p": 0.02},
    {"temperature": 0.9, "typical_p": 0.8, "min_p": 0.3},
    {"temperature": 1.0, "top_k": 700, "typical_p": 0.9, "top_p": 0.8},
]
ADJUSTMENTS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3, "logit_bias": {1: 2.0}},
    {"temperature": 0.8, "top_k": 20, "presence_penalty": 0.5, "frequency_penalty": 0.3, "penalty_window": 9},
    {"temperature": 1.0, "top_p": 0.9, "logit_bias": {0: 3.0, 2: -np.inf}},
    {
        "temperature": 0.7,
        "top_k": 60,
        "top_p": 0.95,
        "repetition_penalty": 1.5,
        "logit_bias": {4: 5.0},
        "sampler_order": ("top_k", "penalties", "temperature", "bias", "top_p"),
    },
]
# The lists' order is the device's choice. The keys are compared by the cases without a pick.
COMPARED = ("state", "result", "logits", "sampler parameters", "sampler history", "sampler partials")
VIEWS = {
    **dict.fromkeys(COMPARED, "u32"),
    "sampler logprobs": "u32",
    "sampler kept": "any",
    "sampler keys": "any",
}


class _Allocator:
    """What a DeviceSampler needs of a runtime, over the buffers of a case."""

    def __init__(self, bench: Bench) -> None:
        self.profile = bench.profile
        self._bench = bench

    def allocate(self, name: str, words: int, kind: BufferKind) -> Buffer:
        return self._bench.buffer(name, words, kind)

    def write(self, buffer: Buffer, offset: int, words: np.ndarray) -> None:
        self._bench.write(buffer, offset, words)


def _logits(vocabulary: int, rows: int) -> np.ndarray:
    """As models have them: a broad middle, a few far above, some equal, some -inf."""
    rng = np.random.default_rng(vocabulary)
    logits = rng.standard_normal((rows, vocabulary)) * 2
    for row in logits:
        row[rng.integers(0, vocabulary, 9)] += rng.uniform(2, 9)
        row[rng.integers(0, vocabulary, vocabulary // 20)] = -np.inf
    return np.round(logits, 3).astype(np.float32)


def _sample(
    vocabulary: int, fields: Sequence[dict[str, Any]], picks: bool = True, spoilt: bool = False,
    rest: bool = True,
) -> Build:  # fmt: skip
    """``rest``: with the passes over the whole vocabulary for rows whose list of candidates is too short; CPU
    devices take seconds to compile them."""

    def build(bench: Bench) -> list[Step]:
        used, rows = len(fields), len(fields) + 2
        sampler = DeviceSampler(_Allocator(bench), vocabulary, rows, slots=used, history_tokens=CONTEXT)  # type: ignore[arg-type]
        state = bench.filled("state", _state(used), BufferKind.STATE)
        stride = vocabulary + 1
        padded = np.full((rows, stride), np.nan, np.float32)
        padded[:used, :vocabulary] = _logits(vocabulary, used)
        if spoilt:
            padded[0, vocabulary - 1] = np.nan
            padded[1, :vocabulary] = -np.inf
            padded[2, :vocabulary] = 1.0
            padded[3, 3] = np.inf  # banned, and an error all the same
        logits = bench.filled("logits", padded)
        result = bench.buffer("result", rows + 1, BufferKind.RESULT)
        bench.write(result, 0, np.zeros(rows + 1, np.uint32))
        for row in range(used):
            sampler.write_history(row, np.arange(row, row + CONTEXT) % 7)
        variant = sampler.write_params(
            [
                RowParams(
                    SamplingParams(**f),
                    seed=1 << 40 | row,
                    sequence=row,
                    history=row,
                    banned=(3, 5),
                    end_tokens=(6,),
                    end_from=CONTEXT,
                )
                for row, f in enumerate(fields)
            ]
        )
        steps = sampler.steps(Ref(logits, 0), stride, rows, Ref(result, 1), state, variant)
        left_out = () if picks and rest else ("sample_pick.vocabulary",) if picks else PICKS
        return [step for step in steps if step.kernel.name not in left_out]

    return build


def _state(rows: int) -> np.ndarray:
    """Row i's token stands at position i + 5, and in token row ``rows - 1 - i``."""
    words = np.zeros(st.state_words(1, 1), np.uint32)
    words[st.N_TOKENS] = words[st.N_OUTPUTS] = rows
    words[st.OUTPUT_ROW : st.OUTPUT_ROW + rows] = np.arange(rows)[::-1]
    words[st.POSITION : st.POSITION + rows] = np.arange(rows)[::-1] + 5
    return words


def _case(variant: str, build: Build, views: dict[str, str] | None = None, quick: bool = True) -> list[Case]:
    return kernel_cases(
        "sample", variant, build, SAME_TOKENS, views=views or VIEWS, classes=OWN_AND_GPU, quick=quick
    )


SPOILT = [{}, {}, {"temperature": 1.0, "top_p": 0.3}, {"temperature": 1.0}]

CASES = [
    *_case("truncations, vocabulary 9001", _sample(9001, TRUNCATIONS)),
    *_case("truncations, vocabulary 70", _sample(70, TRUNCATIONS)),
    *_case("penalties and bias, vocabulary 1500", _sample(1500, ADJUSTMENTS)),
    *_case("keys and sums, vocabulary 1500", _sample(1500, ADJUSTMENTS + TRUNCATIONS, picks=False), {
        **VIEWS, "sampler keys": "u32", "sampler kept": "u32",
    }),
    *_case("NaN, -inf, all equal, +inf", _sample(2100, SPOILT, spoilt=True)),
    *_case("truncations from the list, vocabulary 9001", _sample(9001, TRUNCATIONS, rest=False)),
    *_case("log-probabilities from the list", _sample(1100, [{"logprobs": n} for n in (1, 20)], rest=False)),
    *_case("log-probabilities", _sample(1100, [{"logprobs": n} for n in (0, 1, 5, 20)])),
    *_case("truncations, vocabulary 151936", _sample(151936, TRUNCATIONS), quick=False),
]  # fmt: skip

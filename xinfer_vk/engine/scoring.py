"""Log-probabilities of given answers to one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xinfer_vk.blocks import CachedSequence
from xinfer_vk.engine.runner import Chunk, ModelRunner
from xinfer_vk.errors import NumericError


@dataclass(frozen=True)
class AnswerScore:
    """``logprobs``: natural logarithms, one for each of ``token_ids``; ``total``: their sum."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def total(self) -> float:
        return sum(self.logprobs)


def score(
    runner: ModelRunner, sequence: CachedSequence, prompt: Sequence[int], answers: Sequence[Sequence[int]]
) -> list[AnswerScore]:
    """Score each answer after the prompt, which runs once, unless rotary positions depend on the length.
    ``sequence`` is empty and has room for the longest. Raises what :meth:`ModelRunner.run` raises."""
    kept = 0 if runner.rope.by_length else len(prompt) - 1
    scores = []
    for answer in answers:
        runner.cache.truncate(sequence, min(kept, sequence.length))
        if runner.rope.by_length:
            sequence.expected = len(prompt) + len(answer)
        scores.append(AnswerScore(tuple(answer), _logprobs(runner, sequence, prompt, answer)))
    return scores


def _logprobs(
    runner: ModelRunner, sequence: CachedSequence, prompt: Sequence[int], answer: Sequence[int]
) -> tuple[float, ...]:
    before = len(prompt) - 1
    while sequence.length < before:
        at = sequence.length
        runner.run(
            [Chunk(sequence, prompt[at : min(before, at + runner.prefill_tokens)], "none")], "logprobs"
        )
    inputs, found = [prompt[-1], *answer[:-1]], np.empty(0)
    for at in range(0, len(inputs), runner.max_outputs):
        part = slice(at, at + runner.max_outputs)
        found = np.append(found, runner.target_logprobs(sequence, inputs[part], answer[part]))
    if np.isnan(found).any():
        raise NumericError(
            f"the logits for token {int(np.isnan(found).argmax())} of an answer hold NaN or +inf; run "
            "`xinfer-vk selftest` to check the device, and check the model's weights"
        )
    return tuple(found.tolist())

"""Runs a step batch on the device: how rows are sampled, and what became of each.

A row without a token (NaN or +inf in its logits, or nothing left that is possible) has an error of its own.
The others of its step have their tokens all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from xinfer_vk.blocks import CachedSequence
from xinfer_vk.engine.config import Sampler
from xinfer_vk.engine.generation import Generation
from xinfer_vk.engine.request import Request
from xinfer_vk.engine.runner import Chunk, Head, ModelRunner
from xinfer_vk.engine.scheduler import Scheduled, StepBatch
from xinfer_vk.errors import NumericError, UsageError
from xinfer_vk.sampling import reference
from xinfer_vk.sampling.device import NO_TOKEN, RowParams, no_token_error
from xinfer_vk.sampling.logprobs import TokenLogprobs, logprobs_of
from xinfer_vk.sampling.params import SamplingParams


@dataclass
class Outcome:
    """Of one chunk: ``tokens`` chosen, one a step, each with its entry of ``logprobs``; ``prompt_logprobs``
    from the chunk's first token on; or the ``error`` that ends its request."""

    chunk: Scheduled
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: NumericError | UsageError | None = None


class Executor:
    """``sampler``: "device" brings four bytes a token back, "cpu" the whole row of logits, and samples with
    the NumPy reference."""

    def __init__(self, runner: ModelRunner, sampler: Sampler) -> None:
        self.runner, self.sampler = runner, sampler
        self._behind: set[Request] = set()  # whose history on the device lacks tokens

    def execute(self, batch: StepBatch, stopped: Callable[[], bool]) -> list[Outcome]:
        """Run a batch; an outcome for each of its chunks. Raises :class:`StepStopped` when ``stopped`` says
        so within a long step, and what the runner raises: then nothing of the batch has happened."""
        self._behind.update(r for r in batch.admitted if r.owner.params.has_penalties)
        if batch.chunks[0].outputs == "all":
            return [self._prompt_logprobs(batch.chunks[0])]
        choosing = [chunk.request.owner for chunk in batch.chunks if chunk.outputs == "last"]
        head = self._head(choosing)
        if batch.decoding and head != "logits":
            return self._decode(batch, head)
        chunks = [Chunk(_sequence(c.request), c.tokens, c.outputs) for c in batch.chunks]
        out = self.runner.run_rows(chunks, head, stopped)
        outcomes, row = [], 0
        for chunk in batch.chunks:
            outcome = Outcome(chunk)
            if chunk.outputs == "last":
                self._choose(outcome, out, row, head)
                row += 1
            outcomes.append(outcome)
        return outcomes

    def _decode(self, batch: StepBatch, head: Head) -> list[Outcome]:
        """Decode steps of everything that runs, or several at once."""
        runner = self.runner
        sequences = [_sequence(chunk.request) for chunk in batch.chunks]
        steps = runner.decode(sequences, [chunk.tokens[0] for chunk in batch.chunks], head, batch.steps)
        outcomes = []
        for row, chunk in enumerate(batch.chunks):
            tokens: list[int] = []
            outcome = Outcome(chunk, tokens)
            for step in steps:
                if step[row] >= NO_TOKEN:  # of a later step: it is rerun, and raises then
                    if not tokens:
                        first = runner.steps_run - batch.steps + 1
                        outcome.error = no_token_error(step[row], sequences[row].length, first)
                    break
                tokens.append(step[row])
            outcome.logprobs = [None] * len(tokens)
            if outcome.error is None and chunk.request.owner.params.logprobs is not None:
                outcome.logprobs[0] = runner.read_logprobs(row)
            outcomes.append(outcome)
        return outcomes

    # -- how tokens are chosen ------------------------------------------------------------------

    def _head(self, choosing: Sequence[Generation]) -> Head:
        if all(g.plain for g in choosing):
            return "argmax"
        if self.sampler == "cpu" or any(g.params.logits_processors for g in choosing):
            self._behind.update(g.request for g in choosing if g.params.has_penalties)
            return "logits"
        for generation in choosing if self._behind else ():
            request = generation.request
            if request in self._behind and request.sequence is not None:
                self.runner.sampler.write_history(request.sequence.row, request.tokens)
                self._behind.discard(request)
        return self.runner.sampler.write_params([row_params(g) for g in choosing])

    def _choose(self, outcome: Outcome, out: np.ndarray, row: int, head: Head) -> None:
        request = outcome.chunk.request
        generation: Generation = request.owner
        if head != "logits":
            token = int(out[row])
            if token >= NO_TOKEN:
                outcome.error = no_token_error(token, _sequence(request).length, self.runner.steps_run)
                return
            outcome.tokens = [token]
            wanted = generation.params.logprobs is not None
            outcome.logprobs = [self.runner.read_logprobs(row) if wanted else None]
            return
        params = row_params(generation)
        position = len(request.tokens)
        early = params.end_tokens if position < params.end_from else ()
        raw = out[row]
        try:
            logits = processed(generation, raw)
            sampled = reference.sample(
                logits,
                generation.params,
                request.tokens,
                params.seed,
                params.sequence,
                position,
                banned=(*params.banned, *early),
            )
        except (NumericError, UsageError) as error:
            outcome.error = error
            return
        logprobs = sampled.logprobs
        if logits is not raw and logprobs is not None:
            logprobs = logprobs_of(raw, sampled.token, generation.params.logprobs or 0)
        outcome.tokens, outcome.logprobs = [sampled.token], [logprobs]

    def _prompt_logprobs(self, chunk: Scheduled) -> Outcome:
        """Prompt tokens whose log-probabilities are wanted: each row's target is the token after it."""
        outcome, request = Outcome(chunk), chunk.request
        at, count = request.computed, len(chunk.tokens)
        params = SamplingParams(logprobs=request.owner.params.logprobs or 0)
        targets = request.tokens[at + 1 : at + 1 + count]
        part = Chunk(_sequence(request), chunk.tokens, "all")
        try:
            if self.sampler == "cpu":
                logits = self.runner.run([part], "logits")
                outcome.prompt_logprobs = [
                    logprobs_of(row, target, params.logprobs or 0) for row, target in zip(logits, targets)
                ]
            else:
                self.runner.sampler.write_params([RowParams(params, target=target) for target in targets])
                self.runner.run_rows([part], "logprobs")
                outcome.prompt_logprobs = [self.runner.read_logprobs(row) for row in range(count)]
        except NumericError as error:
            outcome.error = error
        return outcome


def _sequence(request: Request) -> CachedSequence:
    assert request.sequence is not None
    return request.sequence


def processed(generation: Generation, logits: np.ndarray) -> np.ndarray:
    """The row after the caller's own functions, which get a copy. Raises :class:`UsageError` for one that
    returns anything but such a row."""
    for function in generation.params.logits_processors:  # type: ignore[union-attr]
        out = np.asarray(function(generation.tokens, logits.copy()))
        name = getattr(function, "__name__", type(function).__name__)
        if out.shape != logits.shape or out.dtype.kind not in "fiu":
            raise UsageError(
                f"logits processor {name} returned {out.dtype} of shape {list(out.shape)}: it must return "
                f"the logits, float32 of shape {list(logits.shape)}"
            )
        logits = out.astype(np.float32)
        if np.isnan(logits).any() or np.isposinf(logits).any():
            raise UsageError(f"logits processor {name} returned NaN or +inf: ban tokens with -inf")
    return logits


def row_params(generation: Generation) -> RowParams:
    """How the generation's next token is chosen, for the device; the same object while nothing changes."""
    p, sequence = generation.params, generation.request.sequence
    assert sequence is not None
    history = sequence.row if p.has_penalties else None
    kept = generation.row_params
    if kept is not None and generation.banned.always and kept.history == history:
        return kept
    generation.row_params = RowParams(
        params=p,
        seed=generation.seed,
        sequence=generation.sample,
        history=history,
        banned=generation.banned.after(generation.tokens),
        end_tokens=tuple(sorted(generation.end_ids)) if p.min_new_tokens else (),
        end_from=len(generation.prompt_ids) + p.min_new_tokens if p.min_new_tokens else 0,
    )
    return generation.row_params

"""Which tokens go into the next step, for any number of generations on one cache.

Each step takes one token of every generation that is past its prompt, then prompt tokens of the others
as far as the step has room: prefill and decode share a ragged batch (Yu et al. 2022, "Orca"; Agrawal et
al. 2023, "Sarathi": chunked prefill). A generation is admitted only when the cache has room for all it
may come to need, so none is ever thrown out half-way.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from xinfer_vk.engine.config import Sampler
from xinfer_vk.engine.generation import Generation
from xinfer_vk.engine.runner import Chunk, Head, ModelRunner, StepStopped
from xinfer_vk.errors import UsageError
from xinfer_vk.kernels.state import BLOCK_TOKENS
from xinfer_vk.plan import Plan
from xinfer_vk.sampling import reference
from xinfer_vk.sampling.device import RowParams
from xinfer_vk.sampling.logprobs import TokenLogprobs, logprobs_of
from xinfer_vk.sampling.params import SamplingParams

UNDER_WAY = "another generation is under way on this LLM: finish or cancel it first"


class Scheduler:
    """Runs generations to their ends over one :class:`ModelRunner`.

    ``sampler``: "device" brings four bytes a token back, "cpu" the whole row of logits, and samples
    with the NumPy reference. ``progress(done, total)`` counts prompt tokens. ``lock`` is held during a
    step: several schedulers may share a runner, from several threads, and each step has the state buffer
    and the sampler to itself. ``check`` is called before each step, with the lock; it raises if
    there must be no more steps.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler = "device",
        progress: Callable[[int, int], None] | None = None,
        lock: AbstractContextManager[Any] | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.runner, self.sampler = runner, sampler
        self._check = check or (lambda: None)
        self._lock = lock or nullcontext()
        self._progress = progress
        self._waiting: deque[Generation] = deque()
        self._running: list[Generation] = []
        self._reserved: dict[Generation, int] = {}  # blocks promised to a running generation
        self._counted: tuple[Plan | None, int] = None, 1  # see dispatches
        self.tokens_chosen = 0
        self.bytes_read = 0
        self._decoded = False

    def add(self, generation: Generation) -> None:
        if generation.params.logits_processors:
            self.sampler = "cpu"  # for all rows: the sampler's history on the device would miss tokens
        self._waiting.append(generation)

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def dispatches(self) -> int:
        """Of the last step, of one with decode tokens if there was any."""
        plan, steps = self._counted
        return len(plan.steps) // steps if plan is not None else 0

    def step(self) -> list[Generation]:
        """One step of the model; the generations that ended in it. Stopped ones end before it.

        Raises :class:`UsageError` when others have all rows of the cache, and what the runner raises.
        """
        with self._lock:
            self._check()
            read = self.runner.bytes_read
            try:
                return self._step()
            finally:
                self.bytes_read += self.runner.bytes_read - read

    def _step(self) -> list[Generation]:
        ended = self._end_stopped()
        self._admit()
        self._renew_keys()
        if self._running and all(g.prefilled for g in self._running):
            self._decode()
        elif batch := self._batch():
            self._run(batch)
        done = [g for g in self._running if g.finish_reason is not None]
        for generation in done:
            self._release(generation)
        return ended + done

    def abandon(self, reason: str = "interrupted") -> list[Generation]:
        """End everything now; the generations that were not at their end keep what they have."""
        with self._lock:
            unfinished = [*self._running, *self._waiting]
            for generation in unfinished:
                generation.finish(reason)
                self._release(generation)
            self._waiting.clear()
        return unfinished

    # -- who runs -----------------------------------------------------------------------------

    def _end_stopped(self) -> list[Generation]:
        ended = [g for g in (*self._running, *self._waiting) if g.stop_event.is_set()]
        for generation in ended:
            generation.finish("interrupted")
            self._release(generation)
        if ended:
            self._waiting = deque(g for g in self._waiting if g.finish_reason is None)
        return ended

    def _admit(self) -> None:
        cache = self.runner.cache
        while self._waiting and len(self._running) < min(cache.max_sequences, self.runner.max_outputs):
            generation = self._waiting[0]
            leader = generation.leader
            if leader is not None and leader.finish_reason is None and not leader.prefilled:
                return  # its prompt's blocks will be there soon
            blocks = -(-generation.needs_capacity // BLOCK_TOKENS)
            if cache.promised + blocks > cache.allocator.count:
                if self._running:
                    return
                raise UsageError(UNDER_WAY)  # the others are another scheduler's
            prompt = len(generation.prompt_ids)
            if (
                leader is not None
                and leader.sequence is not None
                and leader.prefilled
                and cache.has_row
                and self.runner.rope.fits(leader.sequence, prompt)
            ):
                shared = prompt - 1  # the last token must run: its logits are wanted
                generation.sequence = cache.fork(leader.sequence, shared)
                generation.fed = generation.sequence.length
            elif generation.sequence is None:
                if not cache.has_row:
                    if self._running:
                        return
                    raise UsageError(UNDER_WAY)
                generation.sequence = cache.open()
            generation.sequence.expected = prompt  # of a conversation's, it is another one at every turn
            generation.metrics.reused_tokens = generation.fed
            self._reserved[generation] = blocks
            cache.promised += blocks
            self._running.append(self._waiting.popleft())
            if self._on_device(generation) and generation.params.has_penalties:
                self.runner.sampler.write_history(generation.sequence.row, generation.prompt_ids)

    def _release(self, generation: Generation) -> None:
        if generation.sequence is not None and not generation.keep_sequence:
            self.runner.cache.close(generation.sequence)
            generation.sequence = None
        self.runner.cache.promised -= self._reserved.pop(generation, 0)
        if generation in self._running:
            self._running.remove(generation)

    # -- what runs ----------------------------------------------------------------------------

    def _batch(self) -> list[tuple[Generation, Chunk]]:
        room = self.runner.prefill_tokens
        batch: list[tuple[Generation, Chunk]] = []
        for generation in self._running:
            left = len(generation.prompt_ids) - 1 - generation.fed
            if generation.want_prompt_logprobs and left > 0:
                # A step of its own, whose every row is read: others wait for the few it takes.
                assert generation.sequence is not None
                tokens = generation.next_tokens(min(left, room, self.runner.max_outputs))
                return [(generation, Chunk(generation.sequence, tokens, "all"))]
        for generation in sorted(self._running, key=lambda g: not g.prefilled):
            assert generation.sequence is not None
            if room == 0:
                break
            tokens = generation.next_tokens(room)
            last = generation.prefilled or generation.fed + len(tokens) == len(generation.prompt_ids)
            batch.append((generation, Chunk(generation.sequence, tokens, "last" if last else "none")))
            room -= len(tokens)
        return batch

    def _renew_keys(self) -> None:
        """Recompute cached keys when a sequence crosses longrope's original context."""
        for generation in self._running:
            sequence = generation.sequence
            assert sequence is not None
            if not (generation.prefilled and self.runner.rope.must_recompute(sequence)):
                continue
            tokens = generation.tokens
            self.runner.cache.truncate(sequence, 0)
            sequence.expected = len(tokens)
            for at in range(0, len(tokens) - 1, self.runner.max_tokens):
                piece = tokens[at : min(at + self.runner.max_tokens, len(tokens) - 1)]
                self.runner.run([Chunk(sequence, piece, "none")])

    def _run(self, batch: list[tuple[Generation, Chunk]]) -> None:
        """A step of the model. Plans that are recorded for it count as compiling, not as its time."""
        began, compiled = time.perf_counter(), self.runner.compile_s
        first, chunk = batch[0]
        if chunk.outputs == "all":
            self._run_prompt_logprobs(first, chunk)
            self._note_prompts(batch, began, compiled)
            return
        choosing = [g for g, c in batch if c.outputs == "last"]
        head = self._head(choosing)
        decoding = any(g.prefilled for g, _ in batch)
        try:
            out = self.runner.run([c for _, c in batch], head, self._nobody_waits)
        except StepStopped:
            return  # the next step ends them
        if decoding or not self._decoded:
            self._decoded, self._counted = decoding, (self.runner.last_plan, 1)
        self._note_prompts(batch, began, compiled)
        now, compile_s = time.perf_counter(), self.runner.compile_s - compiled
        self.tokens_chosen += len(choosing)
        for row, generation in enumerate(choosing):
            token, logprobs = self._choice(out, row, generation, head)
            generation.accept(token, logprobs, now, compile_s)

    def _nobody_waits(self) -> bool:
        return all(g.stop_event.is_set() for g in self._running)

    def _decode(self) -> None:
        """A decode step of everything that runs, or several at once. What a generation chose after its end is
        thrown away."""
        running, runner = self._running, self.runner
        began, compiled = time.perf_counter(), runner.compile_s
        head = self._head(running)
        if head == "logits":
            self._run(self._batch())
            return
        steps = self._steps_ahead()
        sequences = [g.sequence for g in running if g.sequence is not None]
        out = runner.decode(sequences, [g.generated[-1] for g in running], head, steps)
        self._decoded, self._counted = True, (runner.last_plan, steps)
        compile_s = runner.compile_s - compiled
        each = (time.perf_counter() - began - compile_s) / steps
        if compile_s:
            for generation in running:
                generation.metrics.compile_s += compile_s
        for step, tokens in enumerate(out):
            now = began + compile_s + (step + 1) * each
            for row, (generation, token) in enumerate(zip(running, tokens)):
                if generation.finish_reason is None:
                    self.tokens_chosen += 1
                    generation.accept(token, self._logprobs(row, generation), now, 0.0 if step else compile_s)
                    if generation.finish_reason is not None:
                        sequence = sequences[row]
                        runner.cache.truncate(sequence, sequence.length - len(out) + step + 1)

    def _steps_ahead(self) -> int:
        """How many decode steps may be run before the host looks: one, where it has a say in the next."""
        if self._waiting or any(g.watched for g in self._running):
            return 1
        left = min(g.params.max_new_tokens - len(g.generated) for g in self._running)
        return self.runner.steps_ahead(len(self._running), left)

    def _note_prompts(self, batch: list[tuple[Generation, Chunk]], began: float, compiled: float) -> None:
        now, compile_s = time.perf_counter(), self.runner.compile_s - compiled
        for generation, chunk in batch:
            generation.metrics.compile_s += compile_s
            if not generation.prefilled:
                generation.metrics.prefill_s += now - began - compile_s
                generation.note_fed(len(chunk.token_ids), now)
                if self._progress is not None:
                    self._progress(generation.fed, len(generation.prompt_ids))

    # -- how tokens are chosen ------------------------------------------------------------------

    def _on_device(self, generation: Generation) -> bool:
        return self.sampler == "device" and not generation.plain

    def _head(self, choosing: Sequence[Generation]) -> Head:
        if all(g.plain for g in choosing):
            return "argmax"
        if self.sampler == "cpu":
            return "logits"
        return self.runner.sampler.write_params([row_params(g) for g in choosing])

    def _choice(
        self, out: np.ndarray, row: int, generation: Generation, head: Head
    ) -> tuple[int, TokenLogprobs | None]:
        if head == "logits":
            params = row_params(generation)
            position = len(generation.tokens)
            early = params.end_tokens if position < params.end_from else ()
            raw = out[row]
            logits = processed(generation, raw)
            sampled = reference.sample(
                logits,
                generation.params,
                generation.tokens,
                params.seed,
                params.sequence,
                position,
                banned=(*params.banned, *early),
            )
            if logits is raw or sampled.logprobs is None:
                return sampled.token, sampled.logprobs
            return sampled.token, logprobs_of(raw, sampled.token, generation.params.logprobs or 0)
        return int(out[row]), self._logprobs(row, generation)

    def _logprobs(self, row: int, generation: Generation) -> TokenLogprobs | None:
        """Those of the token that was just chosen on the device, if they are wanted."""
        return None if generation.params.logprobs is None else self.runner.read_logprobs(row)

    def _run_prompt_logprobs(self, generation: Generation, chunk: Chunk) -> None:
        """Prompt tokens whose log-probabilities are wanted: each row's target is the token after it."""
        ids, at, count = generation.prompt_ids, generation.fed, len(chunk.token_ids)
        params = SamplingParams(logprobs=generation.params.logprobs or 0)
        targets = ids[at + 1 : at + 1 + count]
        if self.sampler == "cpu":
            logits = self.runner.run([chunk], "logits")
            generation.prompt_logprobs += [
                logprobs_of(row, target, params.logprobs or 0) for row, target in zip(logits, targets)
            ]
            return
        self.runner.sampler.write_params([RowParams(params, target=target) for target in targets])
        self.runner.run([chunk], "logprobs")
        generation.prompt_logprobs += [self.runner.read_logprobs(row) for row in range(count)]


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
    if generation.row_params is not None and generation.banned.always:
        return generation.row_params
    p = generation.params
    assert generation.sequence is not None
    generation.row_params = RowParams(
        params=p,
        seed=generation.seed,
        sequence=generation.sample,
        history=generation.sequence.row if p.has_penalties else None,
        banned=generation.banned.after(generation.tokens),
        end_tokens=tuple(sorted(generation.end_ids)) if p.min_new_tokens else (),
        end_from=len(generation.prompt_ids) + p.min_new_tokens if p.min_new_tokens else 0,
    )
    return generation.row_params

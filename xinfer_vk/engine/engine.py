"""The engine: one model on one device, requests at any time from any thread.

Nobody runs in the background. A thread that waits for its request drives the engine: it takes the lock, and
unless there is news for it already it runs one step, in which all requests take part, others' too. Requests
come in through an inbox, which needs no lock. docs/engine.md has the reasons.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from xinfer_vk.blocks import CachedSequence
from xinfer_vk.engine.config import Sampler
from xinfer_vk.engine.execution import Executor, Outcome
from xinfer_vk.engine.generation import Generation
from xinfer_vk.engine.runner import ModelRunner, StepStopped
from xinfer_vk.engine.scheduler import Limits, Row, Scheduler, StepBatch
from xinfer_vk.errors import UsageError
from xinfer_vk.plan import Plan


class Engine:
    """Runs generations to their ends over one :class:`ModelRunner`.

    ``add`` may be called from any thread and at any time; ``advance`` drives, ``abort`` ends one early.
    ``lock`` is held during a step: the state buffer and the sampler belong to it.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler = "device",
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.runner = runner
        self.lock: Any = lock or threading.RLock()
        rope = runner.rope
        self.scheduler = Scheduler(
            runner.cache, self._limits, kind=rope.key, renews=rope.renews, ahead=runner.steps_ahead
        )
        self._executor = Executor(runner, sampler)
        self._inbox: deque[Generation] = deque()
        self._counted: tuple[Plan | None, int] = None, 1  # see dispatches
        self._decoded = False
        self._closed = ""  # why

    @property
    def sampler(self) -> Sampler:
        """Where tokens are chosen. Can be set between two steps."""
        return self._executor.sampler

    @sampler.setter
    def sampler(self, sampler: Sampler) -> None:
        self._executor.sampler = sampler

    @property
    def busy(self) -> bool:
        return bool(self._inbox) or self.scheduler.busy

    @property
    def dispatches(self) -> int:
        """Of the last step, of one with decode tokens if there was any."""
        plan, steps = self._counted
        return len(plan.steps) // steps if plan is not None else 0

    def add(self, generation: Generation) -> None:
        """Let a generation take part from the next step on. What cannot be is its error, which
        :meth:`advance` raises."""
        self._inbox.append(generation)

    def abort(self, generation: Generation, reason: str = "interrupted") -> None:
        """End a generation now, if it has not ended, and give its blocks back; what they hold can still be
        found. Waits for a step under way."""
        with self.lock:
            generation.finish(reason)
            if generation in self._inbox:
                self._inbox.remove(generation)
            self.scheduler.abort(generation.request)

    def advance(self, news: Callable[[], bool]) -> None:
        """Run one step, unless ``news`` says, once nobody else runs one, that there is something to do.
        Raises what makes a step impossible, after the requests in it have ended with it."""
        with self.lock:
            if not news():
                self._step()

    @contextmanager
    def borrow(self, tokens: int) -> Iterator[CachedSequence]:
        """A sequence with room for ``tokens``, and the engine for oneself: requests that are in the way give
        way, and go on afterwards."""
        with self.lock:
            self.scheduler.make_room(tokens)
            sequence = self.runner.cache.open(tokens)
            try:
                yield sequence
            finally:
                self.runner.cache.close(sequence)

    def close(self, reason: str) -> None:
        """End all generations, with what they have; whoever drives after that gets the error ``reason``."""
        with self.lock:
            self._closed = reason
            error = UsageError(reason)
            for generation in (*(r.owner for r in self.scheduler.requests), *self._inbox):
                generation.finish("error", error)
            self._inbox.clear()

    # -- a step -----------------------------------------------------------------------------------

    def _limits(self) -> Limits:
        runner = self.runner
        return Limits(
            runner.prefill_tokens, min(runner.cache.max_sequences, runner.max_outputs), runner.max_outputs
        )

    def _step(self) -> None:
        if self._closed:
            raise UsageError(self._closed)
        self._take_in()
        self._end_stopped()
        batch = self.scheduler.schedule()
        if batch is None:
            return
        began, compiled, read = time.perf_counter(), self.runner.compile_s, self.runner.bytes_read
        lengths = [(c.request.sequence, c.request.computed) for c in batch.chunks]
        try:
            outcomes = self._executor.execute(batch, self._nobody_waits)
        except StepStopped:
            return  # the next step ends them
        except Exception as error:
            self._fail(batch, error)
            raise
        except BaseException:  # Ctrl-C: as if the step had not been
            for sequence, length in lengths:
                if sequence is not None:
                    sequence.length = length
            raise
        self._commit(batch, outcomes, began, compiled, read)

    def _take_in(self) -> None:
        while self._inbox:
            generation = self._inbox.popleft()
            if generation.finish_reason is not None:
                continue
            try:
                self.scheduler.add(generation.request)
            except UsageError as error:
                generation.finish("error", error)

    def _end_stopped(self) -> None:
        for request in (*self.scheduler.running, *self.scheduler.waiting):
            generation: Generation = request.owner
            if generation.stop_event.is_set():
                generation.finish("interrupted")
            if generation.finish_reason is not None:
                self.scheduler.abort(request)

    def _nobody_waits(self) -> bool:
        return all(request.owner.stop_event.is_set() for request in self.scheduler.running)

    def _fail(self, batch: StepBatch, error: Exception) -> None:
        """A step was impossible (a device lost, memory gone): its requests end with it, and nothing that the
        cache holds is trusted."""
        for chunk in batch.chunks:
            chunk.request.owner.finish("error", error)
            self.scheduler.abort(chunk.request)
        self.runner.cache.pool.forget_all()

    def _commit(
        self, batch: StepBatch, outcomes: list[Outcome], began: float, compiled: float, read: int
    ) -> None:
        runner = self.runner
        choosing = any(outcome.tokens for outcome in outcomes)
        decoding = batch.decoding or any(o.chunk.request.computed > o.chunk.request.prompt for o in outcomes)
        if decoding or not self._decoded:
            self._decoded, self._counted = decoding, (runner.last_plan, batch.steps)
        now, compile_s = time.perf_counter(), runner.compile_s - compiled
        each = (now - began - compile_s) / batch.steps
        share = (runner.bytes_read - read) / max(1, sum(len(o.tokens) for o in outcomes))
        rows = []
        for outcome in outcomes:
            generation: Generation = outcome.chunk.request.owner
            if generation.request.ended:
                continue
            if compile_s:
                generation.metrics.compile_s += compile_s
            if choosing:
                generation.bytes_read += share * len(outcome.tokens)
            else:
                generation.bytes_read += (runner.bytes_read - read) / len(outcomes)
            if not batch.decoding:
                self._note_prompt(generation, outcome, now, now - began - compile_s)
            rows.append(self._accept(generation, outcome, began + compile_s, each, compile_s))
        self.scheduler.update(rows)

    @staticmethod
    def _note_prompt(generation: Generation, outcome: Outcome, now: float, took: float) -> None:
        """Prompt tokens went into the cache: how far, and what it took."""
        request = generation.request
        if outcome.prompt_logprobs:
            at = request.computed - len(outcome.chunk.tokens)
            del generation.prompt_logprobs[at:]
            generation.prompt_logprobs += outcome.prompt_logprobs
        if generation.fed >= request.prompt:
            return
        if generation.fed == 0:
            generation.fed = generation.metrics.reused_tokens = request.reused
        generation.metrics.prefill_s += took
        count = min(request.computed, request.prompt) - generation.fed
        if count > 0:
            generation.note_fed(count, now)
            if generation.on_prompt is not None:
                generation.on_prompt(generation.fed, request.prompt)

    @staticmethod
    def _accept(generation: Generation, outcome: Outcome, began: float, each: float, compile_s: float) -> Row:
        """Give a generation its tokens; those after its end do not count."""
        request, before = generation.request, len(generation.generated)
        if outcome.error is not None:
            generation.finish("error", outcome.error)
            return Row(request, ended=True, failed=True)
        for step, token in enumerate(outcome.tokens):
            now = began + (step + 1) * each
            generation.accept(token, outcome.logprobs[step], now, 0.0 if step else compile_s)
            if generation.finish_reason is not None:
                break
        return Row(request, generation.generated[before:], generation.finish_reason is not None)

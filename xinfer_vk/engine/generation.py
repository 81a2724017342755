"""The generation loop: prefill in chunks, then one token a step, until something ends it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from xinfer_vk.cache import CachedSequence
from xinfer_vk.engine.metrics import Metrics
from xinfer_vk.engine.runner import Chunk, ModelRunner
from xinfer_vk.text.stream import StreamDecoder


@dataclass(frozen=True)
class GenerationResult:
    """What a generation gave. ``finish_reason``: "stop" (end of sequence), "length" (the limit) or
    "interrupted". ``token_ids`` are the generated ones, the end-of-sequence token not included."""

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: str
    metrics: Metrics


@dataclass(frozen=True)
class Limits:
    """What ends a generation: a number of tokens, or one of ``end_ids``."""

    max_new_tokens: int
    end_ids: frozenset[int]


class GenerationStream:
    """Iterate to get text as it is made, whole characters only; afterwards :attr:`result` is there.

    Whatever ends the loop, an exception included, the sequence's cache blocks are given back and
    ``result`` holds what was made until then.
    """

    def __init__(
        self,
        runner: ModelRunner,
        decoder: StreamDecoder,
        prompt_ids: Sequence[int],
        limits: Limits,
        *,
        started: float,
        stop_event: threading.Event | None = None,
        progress: Callable[[int, int], None] | None = None,
        finished: Callable[[Metrics], None] | None = None,
    ) -> None:
        self._runner, self._decoder, self._limits = runner, decoder, limits
        self._prompt_ids, self._started = list(prompt_ids), started
        self._stop = stop_event or threading.Event()
        self._progress, self._finished = progress or (lambda done, total: None), finished
        self._generated: list[int] = []
        self._pieces: list[str] = []
        self._finish_reason = "interrupted"
        self._metrics = Metrics(prompt_tokens=len(prompt_ids))
        self._iterator = self._run()

    def __iter__(self) -> Iterator[str]:
        return self._iterator

    def __next__(self) -> str:
        return next(self._iterator)

    def cancel(self) -> None:
        """End the generation after the step under way; safe from another thread or a signal handler."""
        self._stop.set()

    @property
    def result(self) -> GenerationResult:
        """The whole result; runs what is left of the stream first."""
        for _ in self._iterator:
            pass
        return self.partial_result

    @property
    def partial_result(self) -> GenerationResult:
        """What there is so far, without running anything: what remains after an error."""
        return GenerationResult(
            "".join(self._pieces),
            tuple(self._generated),
            tuple(self._prompt_ids),
            self._finish_reason,
            self._metrics,
        )

    def _run(self) -> Iterator[str]:
        runner, sequence = self._runner, self._runner.cache.open()
        read_before = runner.bytes_read
        try:
            for piece in self._steps(sequence):
                self._pieces.append(piece)
                yield piece
        finally:
            runner.cache.close(sequence)
            metrics = self._metrics
            metrics.bytes_read_per_token = (runner.bytes_read - read_before) / (metrics.decode_tokens + 1)
            if self._finished is not None:
                self._finished(metrics)

    def _steps(self, sequence: CachedSequence) -> Iterator[str]:
        metrics, limits = self._metrics, self._limits
        token = self._prefill(sequence)
        prefilled = time.perf_counter()
        while token is not None:
            if token in limits.end_ids:
                self._finish_reason = "stop"
                break
            self._generated.append(token)
            if piece := self._decoder.push(token):
                yield piece
            if len(self._generated) >= limits.max_new_tokens:
                self._finish_reason = "length"
                break
            if self._stop.is_set():
                break
            token = int(self._runner.run([Chunk(sequence, [token])])[0])
            metrics.decode_tokens += 1
            metrics.decode_s = time.perf_counter() - prefilled
        if piece := self._decoder.finish():
            yield piece

    def _prefill(self, sequence: CachedSequence) -> int | None:
        """Run the prompt in chunks; the first generated token, or None when stopped on the way."""
        ids, step, begin = self._prompt_ids, self._runner.max_tokens, time.perf_counter()
        token: int | None = None
        for start in range(0, len(ids), step):
            if self._stop.is_set():
                return None
            last = start + step >= len(ids)
            self._progress(start, len(ids))
            out = self._runner.run([Chunk(sequence, ids[start : start + step])], "last" if last else "none")
            token = int(out[0]) if last else None
        self._progress(len(ids), len(ids))
        now = time.perf_counter()
        self._metrics.prefill_s, self._metrics.ttft_s = now - begin, now - self._started
        return token

"""The Python API: load a model once, then generate, stream, or ask for logits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from xinfer_vk.cache import KVCache
from xinfer_vk.engine.metrics import Metrics, peak_host_bytes
from xinfer_vk.engine.runner import Chunk, ModelRunner, bucket
from xinfer_vk.errors import UsageError
from xinfer_vk.models.registry import family
from xinfer_vk.text.chat import ChatTemplate, encode_chat, is_instruct
from xinfer_vk.text.stream import StreamDecoder
from xinfer_vk.text.tokenizer import eos_ids, load_tokenizer
from xinfer_vk.vulkan.runtime import open_runtime
from xinfer_vk.weights.device import WeightPlanner
from xinfer_vk.weights.hub import resolve_model
from xinfer_vk.weights.source import open_model

if TYPE_CHECKING:
    from xinfer_vk.plan import Runtime

Progress = Callable[[str, int, int], None]  # what is being done, how much is done, of how much

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_MAX_NEW_TOKENS = 256
PREFILL_CHUNK = 512


@dataclass(frozen=True)
class GenerationResult:
    """What a generation gave. ``finish_reason``: "stop" (end of sequence), "length" (the limit) or
    "interrupted". ``token_ids`` are the generated ones, the end-of-sequence token not included."""

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: str
    metrics: Metrics


class GenerationStream:
    """Iterate to get text as it is made, whole characters only; afterwards ``result`` is there."""

    def __init__(self, llm: LLM, prompt_ids: Sequence[int], max_new_tokens: int, ignore_eos: bool, started: float,
                 stop_event: threading.Event | None) -> None:  # fmt: skip
        self._llm, self._prompt_ids, self._max_new_tokens = llm, list(prompt_ids), max_new_tokens
        self._ignore_eos, self._started, self._stop = ignore_eos, started, stop_event or threading.Event()
        self._result: GenerationResult | None = None
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
        assert self._result is not None
        return self._result

    def _run(self) -> Iterator[str]:
        llm, metrics = self._llm, Metrics()
        runner = llm._runner_for(len(self._prompt_ids) + self._max_new_tokens)
        decoder, generated, pieces = StreamDecoder(llm.tokenizer), [], []  # type: ignore[var-annotated]
        sequence = runner.cache.open()
        finish = "length"
        read_before = runner.bytes_read
        begin = now = time.perf_counter()
        try:
            token = llm._prefill(runner, Chunk(sequence, self._prompt_ids), self._stop)
            metrics.prefill_s = (now := time.perf_counter()) - begin
            metrics.ttft_s = now - self._started
            prefilled = now
            while token is not None:
                if not self._ignore_eos and token in llm.eos_ids:
                    finish = "stop"
                    break
                generated.append(token)
                if piece := decoder.push(token):
                    pieces.append(piece)
                    yield piece
                if len(generated) >= self._max_new_tokens:
                    break
                if self._stop.is_set():
                    finish = "interrupted"
                    break
                token = int(runner.run([Chunk(sequence, [token])])[0])
                metrics.decode_tokens += 1
                now = time.perf_counter()
            else:
                finish = "interrupted"  # during the prefill
            metrics.decode_s = now - prefilled
            if piece := decoder.finish():
                pieces.append(piece)
                yield piece
        finally:
            runner.cache.close(sequence)
            metrics.load_s = llm.load_s
            metrics.prompt_tokens = len(self._prompt_ids)
            metrics.dispatches_per_token = runner.dispatches(1, 1)
            steps = max(1, metrics.decode_tokens + 1)
            metrics.bytes_read_per_token = (runner.bytes_read - read_before) / steps
            metrics.kv_bytes, metrics.weight_bytes = runner.cache.bytes, llm.weight_bytes
            metrics.peak_host_bytes = peak_host_bytes()
            metrics.device_bytes = llm.runtime.allocated_bytes
            self._result = GenerationResult(
                "".join(pieces), tuple(generated), tuple(self._prompt_ids), finish, metrics
            )


class LLM:
    """A model on a device.

    ``model``: a directory in Hugging Face layout, a ``.gguf`` file, a hub name, or the name of a
    pulled model. ``device``: an index, part of a name, "numpy", or None for the best there is.
    ``kv_dtype``: "f16" or "f32". ``context``: tokens the KV cache holds; None sizes it by what each
    call needs. ``progress`` is called with (stage, done, total) while loading and prefilling.

    Raises :class:`ModelError`, :class:`DeviceError`, :class:`OutOfMemoryError`, :class:`UsageError`.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        device: str | None = None,
        kv_dtype: str = "f16",
        context: int | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        progress: Progress | None = None,
    ) -> None:
        started = time.perf_counter()
        if context is not None and context < 1:
            raise UsageError(f"context is {context}: it must be at least 1 token")
        if prefill_chunk < 1:
            raise UsageError(f"prefill chunk is {prefill_chunk}: it must be at least 1 token")
        self.kv_dtype, self.context, self.prefill_chunk = kv_dtype, context, prefill_chunk
        self._progress = progress or (lambda stage, done, total: None)
        self._runner: ModelRunner | None = None
        self.runtime: Runtime | None = None  # type: ignore[assignment]
        source = open_model(resolve_model(str(model)))
        try:
            self.name, self.config = source.name, source.config
            if context is not None and context > self.config.max_position:
                raise UsageError(
                    f"context {context} is more than the {self.config.max_position} tokens {self.name} was made for"
                )
            self.tokenizer = load_tokenizer(source)
            self.chat_template = ChatTemplate.from_source(source)
            self.instruct = is_instruct(source)
            self.eos_ids = eos_ids(source, self.tokenizer)
            self.runtime = open_runtime(device)
            planner = WeightPlanner(source, self.runtime.profile)
            self.weights = family(self.config.architecture).load(planner, self.config)
            planner.upload(self.runtime, lambda done, total: self._progress("loading weights", done, total))
            self.weight_bytes = planner.total_bytes
        except BaseException:
            if self.runtime is not None:
                self.runtime.close()
            raise
        finally:
            source.close()
        self.load_s = time.perf_counter() - started

    # -- prompts ------------------------------------------------------------------------------

    def encode(self, prompt: str, *, system: str | None = None, raw: bool | None = None) -> list[int]:
        """Token ids of a prompt. Unless ``raw`` (default: for models without a chat template), the
        prompt becomes a user message in the model's chat template, after ``system`` if given; text
        that looks like a special token stays text."""
        if raw is None:
            raw = not self.instruct
        if raw:
            if system is not None:
                raise UsageError("a system text needs a chat template: leave out --raw, or use an instruct model")
            ids = self.tokenizer.encode(prompt, parse_special=True)
        else:
            messages = [] if system is None else [{"role": "system", "content": system}]
            messages.append({"role": "user", "content": prompt})
            ids = encode_chat(self.tokenizer, self.chat_template, messages)
        return list(ids)

    # -- generation ---------------------------------------------------------------------------

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        system: str | None = None,
        raw: bool | None = None,
        ignore_eos: bool = False,
        stop_event: threading.Event | None = None,
    ) -> GenerationStream:
        """Generate greedily from a text or from token ids, as an iterator over pieces of text."""
        started = time.perf_counter()
        if max_new_tokens < 1:
            raise UsageError(f"max new tokens is {max_new_tokens}: it must be at least 1")
        if isinstance(prompt, str):
            if not prompt.strip():
                raise UsageError("the prompt is empty: give some text with --prompt, --file or standard input")
            ids = self.encode(prompt, system=system, raw=raw)
        else:
            ids = [int(i) for i in prompt]
        self._check_ids(ids)
        room = self.context or self.config.max_position
        if len(ids) >= room:
            remedy = "a larger --context or a shorter prompt" if room < self.config.max_position else "a shorter prompt"
            raise UsageError(f"the prompt is {len(ids)} tokens, longer than the context of {room}: use {remedy}")
        return GenerationStream(self, ids, min(max_new_tokens, room - len(ids)), ignore_eos, started, stop_event)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        system: str | None = None,
        raw: bool | None = None,
        ignore_eos: bool = False,
        stop_event: threading.Event | None = None,
    ) -> GenerationResult:
        """Generate greedily from a text or from token ids and wait for the whole result."""
        return self.stream(
            prompt,
            max_new_tokens=max_new_tokens,
            system=system,
            raw=raw,
            ignore_eos=ignore_eos,
            stop_event=stop_event,
        ).result

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits after every token of a text: ``float32 [len(token_ids), vocabulary]``."""
        ids = [int(i) for i in token_ids]
        self._check_ids(ids)
        runner = self._runner_for(len(ids))
        sequence = runner.cache.open()
        try:
            step = runner.max_outputs
            rows = [
                runner.run([Chunk(sequence, ids[i : i + step])], outputs="all", head="logits")
                for i in range(0, len(ids), step)
            ]
        finally:
            runner.cache.close(sequence)
        return np.concatenate(rows)

    # -- life ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Give all device memory back. The object cannot be used afterwards."""
        self._runner = None
        if self.runtime is not None:
            self.runtime.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _check_ids(self, ids: Sequence[int]) -> None:
        if not ids:
            raise UsageError("the prompt is empty: give at least one token")
        bad = next((i for i in ids if not 0 <= i < self.config.vocab_size), None)
        if bad is not None:
            raise UsageError(f"token id {bad} is outside the vocabulary of {self.config.vocab_size}")

    def _runner_for(self, tokens: int) -> ModelRunner:
        """A runner whose cache holds ``tokens``; a larger one replaces a smaller one."""
        needed = self.context or tokens
        if tokens > needed:
            raise UsageError(f"{tokens} tokens are more than the context of {needed}: use a larger --context")
        if self._runner is None or self._runner.cache.capacity < needed:
            if self._runner is not None:
                cache = self._runner.cache
                self._runner.free()
                cache.free()
                self._runner = None
            c = self.config
            cache = KVCache(
                self.runtime,
                layers=c.layers,
                kv_heads=c.kv_heads,
                head_dim=c.head_dim,
                kv_dtype=self.kv_dtype,
                capacity=needed,
            )
            self._runner = ModelRunner(self.runtime, c, self.weights, cache, max_tokens=self.prefill_chunk)
        return self._runner

    def _prefill(self, runner: ModelRunner, chunk: Chunk, stop: threading.Event) -> int | None:
        """Run the prompt in chunks; the first generated token, or None when stopped on the way."""
        ids, step = chunk.token_ids, runner.max_tokens
        first_new: int | None = None
        for start in range(0, len(ids), step):
            if stop.is_set():
                return None
            last = start + step >= len(ids)
            self._progress("prefill", start, len(ids))
            out = runner.run([Chunk(chunk.sequence, ids[start : start + step])], outputs="last" if last else "none")
            first_new = int(out[0]) if last else None
        self._progress("prefill", len(ids), len(ids))
        return first_new

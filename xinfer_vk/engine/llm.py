"""The Python API: load a model once, then generate, stream, or ask for logits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from xinfer_vk.cache import KVCache
from xinfer_vk.engine.generation import GenerationResult, GenerationStream, Limits
from xinfer_vk.engine.metrics import Metrics, peak_host_bytes
from xinfer_vk.engine.runner import Chunk, ModelRunner
from xinfer_vk.errors import UsageError
from xinfer_vk.models.registry import family
from xinfer_vk.plan import Runtime
from xinfer_vk.text.chat import ChatTemplate, encode_chat, is_instruct
from xinfer_vk.text.stream import StreamDecoder
from xinfer_vk.text.tokenizer import eos_ids, load_tokenizer
from xinfer_vk.vulkan.runtime import open_runtime
from xinfer_vk.weights.device import WeightPlanner
from xinfer_vk.weights.hub import resolve_model
from xinfer_vk.weights.source import ModelSource, open_model

__all__ = ["LLM", "GenerationResult", "GenerationStream"]

Progress = Callable[[str, int, int], None]  # what is being done, how much is done, of how much

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_MAX_NEW_TOKENS = 256
PREFILL_CHUNK = 512


class LLM:
    """A model on a device.

    ``model``: a directory in Hugging Face layout, a ``.gguf`` file, a hub name, or the name of a
    pulled model. ``device``: an index, part of a name, "numpy", or None for the best there is.
    ``kv_dtype``: "f16" or "f32". ``context``: tokens the KV cache holds; None sizes it by what each
    call needs. ``prefill_chunk``: prompt tokens a step takes at most. ``progress`` is called with
    (stage, done, total) during long work. A context manager; :meth:`close` gives the device back.

    Raises :class:`ModelError`, :class:`DownloadError`, :class:`DeviceError`, :class:`OutOfMemoryError`
    and :class:`UsageError`.
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
        for name, value in (("context", context), ("prefill chunk", prefill_chunk)):
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}: it must be at least 1 token")
        self.kv_dtype, self.context, self.prefill_chunk = kv_dtype, context, prefill_chunk
        self._progress: Progress = progress or (lambda stage, done, total: None)
        self._runner: ModelRunner | None = None
        with open_model(resolve_model(str(model), progress)) as source:
            self.name, self.config = source.name, source.config
            if context is not None and context > self.config.max_position:
                raise UsageError(
                    f"context {context} is more than the {self.config.max_position} tokens that {self.name} "
                    "was made for: use less"
                )
            self.tokenizer = load_tokenizer(source)
            self.chat_template = ChatTemplate.from_source(source)
            self.instruct = is_instruct(source)
            self.eos_ids = eos_ids(source, self.tokenizer)
            self.dtype = main_format(source)
            self.runtime: Runtime = open_runtime(device)
            try:
                planner = WeightPlanner(source, self.runtime.profile)
                self.weights = family(self.config.architecture).load(planner, self.config)
                self.weight_bytes = planner.total_bytes
                planner.upload(self.runtime, self._stage("loading weights"))
            except BaseException:
                self.runtime.close()
                raise
        self.load_s = time.perf_counter() - started

    # -- what there is ------------------------------------------------------------------------

    @property
    def notices(self) -> tuple[str, ...]:
        """What the user should know of the device, a line each."""
        return self.runtime.notices

    @property
    def capacity(self) -> int:
        """Tokens the KV cache holds now; 0 before the first call."""
        return self._runner.cache.capacity if self._runner else 0

    # -- prompts ------------------------------------------------------------------------------

    def encode(self, prompt: str, *, system: str | None = None, raw: bool | None = None) -> list[int]:
        """Token ids of a prompt. Unless ``raw`` (default: for models without a chat template), the
        prompt becomes a user message in the model's chat template, after ``system`` if given; text
        that looks like a special token stays text."""
        if raw is None:
            raw = not self.instruct
        if raw:
            if system is not None:
                raise UsageError(
                    "a system text needs a chat template: leave out --raw, or use an instruct model"
                )
            return self.tokenizer.encode(prompt, parse_special=True)
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": prompt})
        return encode_chat(self.tokenizer, self.chat_template, messages)

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
        """Generate greedily from a text or from token ids, as an iterator over pieces of text.

        ``max_new_tokens`` is cut to what the context has room for. Setting ``stop_event`` from another
        thread ends the generation within a step. Raises :class:`UsageError` for an empty prompt, one
        longer than the context, or a token id outside the vocabulary.
        """
        started = time.perf_counter()
        if max_new_tokens < 1:
            raise UsageError(f"max new tokens is {max_new_tokens}: it must be at least 1")
        if isinstance(prompt, str):
            if not prompt.strip():
                raise UsageError(
                    "the prompt is empty: give some text with --prompt, --file or standard input"
                )
            ids = self.encode(prompt, system=system, raw=raw)
        else:
            ids = [int(i) for i in prompt]
        self._check_ids(ids)
        room = self.context or self.config.max_position
        if len(ids) >= room:
            larger = "a larger --context or " if room < self.config.max_position else ""
            raise UsageError(
                f"the prompt is {len(ids)} tokens, longer than the context of {room} has room for: use "
                f"{larger}a shorter prompt"
            )
        max_new_tokens = min(max_new_tokens, room - len(ids))
        return GenerationStream(
            self._runner_for(len(ids) + max_new_tokens),
            StreamDecoder(self.tokenizer),
            ids,
            Limits(max_new_tokens, frozenset() if ignore_eos else self.eos_ids),
            started=started,
            stop_event=stop_event,
            progress=self._stage("prefill"),
            finished=self._complete,
        )

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
        """:meth:`stream` to the end."""
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
        room = self.context or self.config.max_position
        if len(ids) > room:
            raise UsageError(f"{len(ids)} tokens are more than the context of {room}: use a shorter text")
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
        self.runtime.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def _stage(self, stage: str) -> Callable[[int, int], None]:
        return lambda done, total: self._progress(stage, done, total)

    def _check_ids(self, ids: Sequence[int]) -> None:
        if not ids:
            raise UsageError("the prompt is empty: give at least one token")
        bad = next((i for i in ids if not 0 <= i < self.config.vocab_size), None)
        if bad is not None:
            raise UsageError(f"token id {bad} is outside the vocabulary of {self.config.vocab_size}")

    def _runner_for(self, tokens: int) -> ModelRunner:
        """A runner whose cache holds ``tokens``; one of twice the size replaces one that is too small, so
        that growing conversations do not record their plans anew at every call."""
        needed = self.context or tokens
        if self._runner is not None and self._runner.cache.capacity < needed:
            needed = max(needed, min(2 * self._runner.cache.capacity, self.config.max_position))
        if self._runner is None or self._runner.cache.capacity < needed:
            if self._runner is not None:
                runner, self._runner = self._runner, None
                runner.free()
                runner.cache.free()
            c = self.config
            cache = KVCache(
                self.runtime,
                layers=c.layers,
                kv_heads=c.kv_heads,
                head_dim=c.head_dim,
                kv_dtype=self.kv_dtype,
                capacity=needed,
            )
            self._runner = ModelRunner(
                self.runtime, c, self.weights, cache, self.prefill_chunk, self._stage("compiling kernels")
            )
        return self._runner

    def _complete(self, metrics: Metrics) -> None:
        """Add what the stream does not know to its metrics."""
        assert self._runner is not None
        metrics.load_s, metrics.weight_bytes = self.load_s, self.weight_bytes
        metrics.dispatches_per_token = self._runner.dispatches(1, 1) if metrics.decode_tokens else 0
        metrics.kv_bytes = self._runner.cache.bytes
        metrics.peak_host_bytes, metrics.device_bytes = peak_host_bytes(), self.runtime.allocated_bytes


def main_format(source: ModelSource) -> str:
    """The number format most of the weights' bytes are in."""
    sizes: dict[str, int] = {}
    for tensor in source.tensors.values():
        sizes[tensor.fmt] = sizes.get(tensor.fmt, 0) + tensor.data.nbytes
    return max(sizes, key=lambda fmt: sizes[fmt])

"""The Python API: load a model once, then generate, stream, or ask for logits."""

from __future__ import annotations

import operator
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from xinfer_vk.engine.config import (
    DEFAULT_MODEL,
    PREFILL_CHUNK,
    Activations,
    EngineConfig,
    Sampler,
    Tune,
)
from xinfer_vk.engine.generation import Generation, GenerationResult, sibling
from xinfer_vk.engine.metrics import peak_host_bytes
from xinfer_vk.engine.runner import MAX_OUTPUTS, Chunk, ModelRunner, make_runner
from xinfer_vk.engine.scheduler import UNDER_WAY, Scheduler
from xinfer_vk.engine.stream import GenerationStream
from xinfer_vk.errors import OutOfMemoryError, UsageError
from xinfer_vk.kernels.state import BLOCK_TOKENS
from xinfer_vk.loading import Progress, load, main_format, open_checkpoint
from xinfer_vk.plan import Runtime
from xinfer_vk.sampling.device import BIAS_ENTRIES
from xinfer_vk.sampling.params import SamplingParams
from xinfer_vk.sampling.rules import BannedWords, bad_word_ids
from xinfer_vk.text.chat import ChatTemplate, encode_chat, is_instruct
from xinfer_vk.text.stream import StreamDecoder
from xinfer_vk.text.thinking import ThinkingSplitter, opened_by, tag_ids, thinks
from xinfer_vk.text.tokenizer import eos_ids, load_tokenizer
from xinfer_vk.vulkan.runtime import open_runtime

if TYPE_CHECKING:
    from xinfer_vk.engine.perplexity import Convention, Perplexity
    from xinfer_vk.engine.session import ChatSession, OnFull

__all__ = ["LLM", "GenerationResult", "GenerationStream", "SamplingParams"]


class LLM:
    """A model on a device.

    The arguments are the fields of :class:`~xinfer_vk.engine.config.EngineConfig`, which may be given whole
    in the place of ``model``. ``progress`` is called with (stage, done, total) during long work. A context
    manager; :meth:`close` gives the device back. Several threads may use it: their steps take turns.

    Raises :class:`ModelError`, :class:`DownloadError`, :class:`DeviceError`, :class:`OutOfMemoryError`
    and :class:`UsageError`.
    """

    def __init__(
        self,
        model: str | Path | EngineConfig = DEFAULT_MODEL,
        *,
        device: str | int | None = None,
        kv_dtype: str = "f16",
        quantize: str | None = None,
        activations: Activations = "f32",
        context: int | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        sampler: Sampler = "device",
        tune: Tune = "quick",
        progress: Progress | None = None,
    ) -> None:
        started = time.perf_counter()
        if progress is not None and not callable(progress):
            raise UsageError(f"progress is {progress!r}: it is a function of (stage, done, total), or None")
        given = EngineConfig(
            DEFAULT_MODEL if isinstance(model, EngineConfig) else model, device, kv_dtype, quantize,
            activations, context, prefill_chunk, sampler, tune,
        )  # fmt: skip
        if isinstance(model, EngineConfig):
            if given != EngineConfig():
                raise UsageError("an EngineConfig has every argument: put the others into it")
            given = model
        self.engine_config = given
        self.kv_dtype, self.context, self.prefill_chunk = given.kv_dtype, given.context, given.prefill_chunk
        self.activations, self.sampler = given.activations, given.sampler
        self._progress: Progress = progress or (lambda stage, done, total: None)
        self._runner: ModelRunner | None = None
        self._lock = threading.RLock()  # held during each step
        with open_checkpoint(given, progress) as source:
            self.name, self.config = source.name, source.config
            given.check_model(self.config, self.name)  # before anything is loaded
            self.tokenizer = load_tokenizer(source)
            self.chat_template = ChatTemplate.from_source(source)
            self.instruct = is_instruct(source)
            self.thinks = thinks(self.tokenizer, self.chat_template.text)
            self.eos_ids = eos_ids(source, self.tokenizer)
            self.generation_config = source.generation_config
            if not source.tensors:
                main_format(source)  # says so
            self.runtime: Runtime = open_runtime(given.device)
            try:
                loaded = load(source, self.runtime, given, progress)
            except BaseException:
                self.runtime.close()
                raise
        self.weights, self.weight_bytes, self.dtype = loaded.weights, loaded.weight_bytes, loaded.fmt
        self._notes = loaded.notices
        self.load_s = time.perf_counter() - started

    # -- what there is ------------------------------------------------------------------------

    @property
    def notices(self) -> tuple[str, ...]:
        """What the user should know of the device, the checkpoint and the weights, a line each."""
        return (*self.runtime.notices, *self._notes)

    @property
    def capacity(self) -> int:
        """Tokens the KV cache holds now; 0 before the first call."""
        return self._runner.cache.capacity if self._runner else 0

    @property
    def cached_tokens(self) -> int:
        """Tokens that the KV cache has room for, of all sequences together; 0 before the first call."""
        return self._runner.cache.allocator.count * BLOCK_TOKENS if self._runner else 0

    # -- prompts ------------------------------------------------------------------------------

    def encode(
        self,
        prompt: str,
        *,
        system: str | None = None,
        raw: bool | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a prompt. Unless ``raw`` (default: for models without a chat template), the
        prompt becomes a user message in the model's chat template, after ``system`` if given; text
        that looks like a special token stays text. ``template_args``: variables for the template, such as
        ``{"enable_thinking": False}``. Raises :class:`UsageError` for one that it does not know."""
        if raw is None:
            raw = not self.instruct
        if raw:
            if template_args:
                raise UsageError(
                    "template arguments need a chat template: leave out --raw, or use an instruct model"
                )
            if system is not None:
                raise UsageError(
                    "a system text needs a chat template: leave out --raw, or use an instruct model"
                )
            return self.tokenizer.encode(prompt, parse_special=True)
        self.chat_template.check_variables(template_args or {})
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": prompt})
        return encode_chat(self.tokenizer, self.chat_template, messages, **(template_args or {}))

    # -- generation ---------------------------------------------------------------------------

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        system: str | None = None,
        raw: bool | None = None,
        template_args: Mapping[str, Any] | None = None,
        prompt_logprobs: bool = False,
        stop_event: threading.Event | None = None,
        **fields: Any,
    ) -> GenerationStream:
        """Generate from a text or from token ids, as an iterator over pieces of text.

        ``system``, ``raw`` and ``template_args`` are those of :meth:`encode`; of token ids, ``raw`` says
        whether the text goes on with theirs (the space between them is then part of it) or answers it.
        ``params`` says how tokens are chosen and when to stop; ``fields`` are fields of it
        (``max_new_tokens=20, temperature=0.8``). ``max_new_tokens`` is cut to what the context has room
        for. Setting ``stop_event`` from another thread ends the generation within a step. Raises
        :class:`UsageError` for an empty prompt, one longer than the context, or a bad parameter.
        """
        started = time.perf_counter()
        params = self._params(params, fields)
        ids = self._prompt_ids(prompt, system, raw, template_args)
        event = stop_event or threading.Event()
        generation = self._generation(ids, params, started, event, self._continues(raw))
        generation.want_prompt_logprobs = prompt_logprobs
        return GenerationStream(self._begin, generation, self._complete)

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        system: str | None = None,
        raw: bool | None = None,
        template_args: Mapping[str, Any] | None = None,
        prompt_logprobs: bool = False,
        stop_event: threading.Event | None = None,
        **fields: Any,
    ) -> GenerationResult:
        """:meth:`stream` to the end."""
        return self.stream(
            prompt,
            params,
            system=system,
            raw=raw,
            template_args=template_args,
            prompt_logprobs=prompt_logprobs,
            stop_event=stop_event,
            **fields,
        ).result

    def batch(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        system: str | None = None,
        raw: bool | None = None,
        template_args: Mapping[str, Any] | None = None,
        prompt_logprobs: bool = False,
        stop_event: threading.Event | None = None,
        on_result: Callable[[GenerationResult], None] | None = None,
        on_step: Callable[[int], None] | None = None,
        **fields: Any,
    ) -> list[GenerationResult]:
        """Generate from several prompts as one ragged batch, ``n`` samples of each. Samples of a prompt,
        and prompts that are the same, share KV blocks. ``params`` may be one for each prompt.
        ``on_result`` is called with each result as it ends (when an exception ends the batch, with what
        there is of the others too), ``on_step`` after each step with the number of
        tokens made so far; the list is in the order of the prompts, samples of a prompt together.
        """
        started = time.perf_counter()
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise UsageError(f"n is {n!r}: it must be at least 1")
        if isinstance(prompts, str) or not prompts:
            raise UsageError("prompts must be a list of at least one prompt")
        if params is None or isinstance(params, SamplingParams):
            each = [self._params(params, fields)] * len(prompts)
        else:
            if len(params) != len(prompts):
                raise UsageError(f"{len(params)} sampling parameters for {len(prompts)} prompts")
            each = [self._params(p, fields) for p in params]
        event = stop_event or threading.Event()
        generations: list[Generation] = []
        first_with: dict[tuple[int, ...], Generation] = {}  # by its prompt
        for index, (prompt, chosen) in enumerate(zip(prompts, each)):
            ids = self._prompt_ids(prompt, system, raw, template_args)
            leader = self._generation(ids, chosen, started, event, self._continues(raw))
            leader.prompt, leader.want_prompt_logprobs = index, prompt_logprobs
            if not prompt_logprobs:  # those need every prompt token to be run
                other = first_with.setdefault(tuple(leader.prompt_ids), leader)
                leader.leader = None if other is leader else other
            generations.append(leader)
            for sample in range(1, n):
                generations.append(sibling(leader, sample, *self._decoders(ids, self._continues(raw))))
        needs = [g.needs_capacity for g in generations]
        rows = min(len(generations), MAX_OUTPUTS)
        with self._lock:
            runner = self._runner_for(max(needs), rows, sum(sorted(needs)[-rows:]))
        scheduler = Scheduler(runner, self.sampler, lock=self._lock)
        for generation in generations:
            scheduler.add(generation)

        def report(ended: Sequence[Generation]) -> None:
            for generation in ended:
                self._complete(generation, scheduler)
                if on_result is not None:
                    on_result(generation.result())

        try:
            while scheduler.busy:
                report(scheduler.step())
                if on_step is not None:
                    on_step(scheduler.tokens_chosen)
        except BaseException as error:
            report(scheduler.abandon("error" if isinstance(error, Exception) else "interrupted"))
            raise
        return [generation.result() for generation in generations]

    def chat(
        self,
        *,
        system: str | None = None,
        params: SamplingParams | None = None,
        context: int | None = None,
        on_full: OnFull = "drop-oldest",
        messages: Sequence[Mapping[str, Any]] = (),
        template_args: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> ChatSession:
        """A conversation, which keeps what it has read in the KV cache from turn to turn.

            session = llm.chat(system="You are terse.", temperature=0.7)
            for piece in session.send("What is Vulkan?"):
                print(piece, end="", flush=True)

        :class:`~xinfer_vk.engine.session.ChatSession` says what the arguments mean; ``fields`` are
        fields of ``params``. Raises :class:`UsageError` for a model without a chat template.
        """
        from xinfer_vk.engine.session import ChatSession

        return ChatSession(
            self,
            system=system,
            params=self._params(params, fields),
            context=context,
            on_full=on_full,
            messages=messages,
            template_args=template_args,
        )

    def perplexity(
        self,
        text: str | Sequence[int],
        *,
        context: int | None = None,
        stride: int | None = None,
        convention: Convention = "huggingface",
        bos: bool | None = None,
        max_tokens: int | None = None,
        stop_event: threading.Event | None = None,
        on_estimate: Callable[[int, int, float], None] | None = None,
    ) -> Perplexity:
        """How well the model predicts a text, or token ids: ``exp`` of their mean negative log-likelihood.

        ``context``: tokens of a window, 512 unless given. ``convention``: "huggingface" slides the window by
        ``stride`` tokens (half a window unless given), each scores what is new in it; "llama.cpp" puts
        windows side by side, each scores its second half (docs/perplexity.md). ``bos``: begin with the
        begin-of-sequence token; None does so for a text if the model was trained with it. In a text, what
        spells a special token stays text. ``max_tokens``: only so many from the beginning.

        Setting ``stop_event`` from another thread ends it within a step, with what was scored until then.
        ``on_estimate`` is called after each window with tokens scored, tokens to score and the perplexity
        so far. Runs in a KV cache of its own. Raises :class:`UsageError` for an empty text or one of fewer
        than two tokens and for windows that cannot be, :class:`NumericError` on NaN.
        """
        from xinfer_vk.engine.perplexity import Windowing, evaluate

        room = self.context or self.config.max_position
        windowing = Windowing.of(context, stride, convention, room)
        if windowing.context > room:
            raise UsageError(f"context {context} is more than the {room} tokens there is room for: use less")
        return evaluate(
            self,
            text,
            windowing,
            bos=bos,
            max_tokens=max_tokens,
            progress=self._stage("scoring"),
            stop_event=stop_event,
            on_estimate=on_estimate,
        )

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits after every token of a text: ``float32 [len(token_ids), vocabulary]``."""
        ids = as_ids(token_ids)
        self._check_ids(ids)
        room = self.context or self.config.max_position
        if len(ids) > room:
            raise UsageError(f"{len(ids)} tokens are more than the context of {room}: use a shorter text")
        with self._lock:
            runner = self._runner_for(len(ids))
            if not runner.cache.has_row:
                raise UsageError(UNDER_WAY)
            sequence = runner.cache.open(len(ids))
            try:
                step = runner.max_outputs
                rows = [
                    runner.run([Chunk(sequence, ids[i : i + step], "all")], "logits")
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

    def _params(self, params: SamplingParams | None, fields: dict[str, Any]) -> SamplingParams:
        params = (params or SamplingParams()).replace(**fields)
        params.check_vocabulary(self.config.vocab_size)
        return params

    def check_prompt(self, prompt: str, raw: bool | None = None) -> None:
        """Raise :class:`UsageError` for a prompt without text. White space is a text to go on with, but no
        message to answer."""
        if not (prompt if self._continues(raw) else prompt.strip()):
            raise UsageError("the prompt is empty: give some text with --prompt, --file or standard input")

    def _prompt_ids(
        self,
        prompt: str | Sequence[int],
        system: str | None,
        raw: bool | None,
        template_args: Mapping[str, Any] | None,
    ) -> list[int]:
        if isinstance(prompt, str):
            self.check_prompt(prompt, raw)
            ids = self.encode(prompt, system=system, raw=raw, template_args=template_args)
        else:
            ids = as_ids(prompt)
        self._check_ids(ids)
        return ids

    def check_fits(self, ids: Sequence[int], params: SamplingParams) -> None:
        """Raise :class:`UsageError` if a prompt leaves no room in the context, or ``params`` bias more
        tokens than the sampler has room for."""
        room = self.context or self.config.max_position
        if len(ids) >= room:
            larger = "a larger --context or " if room < self.config.max_position else ""
            raise UsageError(
                f"the prompt is {len(ids)} tokens, longer than the context of {room} has room for: use "
                f"{larger}a shorter prompt"
            )
        if len(params.logit_bias) > BIAS_ENTRIES // 2:
            raise UsageError(
                f"logit_bias has {len(params.logit_bias)} tokens: it must be at most {BIAS_ENTRIES // 2}"
            )

    def _generation(
        self,
        ids: list[int],
        params: SamplingParams,
        started: float,
        stop_event: threading.Event,
        continues: bool = False,
    ) -> Generation:
        """``continues``: the text goes on with the prompt's, instead of answering it."""
        self.check_fits(ids, params)
        room = self.context or self.config.max_position
        if params.max_new_tokens > room - len(ids):
            params = params.replace(
                max_new_tokens=room - len(ids), min_new_tokens=min(params.min_new_tokens, room - len(ids))
            )
        ends = frozenset(params.stop_token_ids) | self.tokenizer.special_ids_of(params.stop)
        if not params.ignore_eos:
            ends |= self.eos_ids
        bad = bad_word_ids(
            params, lambda text: self.tokenizer.encode(text, parse_special=False, add_bos=False)
        )
        seed = secrets.randbits(64) if params.seed is None else params.seed
        decoder, splitter = self._decoders(ids, continues)
        return Generation(
            prompt_ids=ids,
            params=params,
            end_ids=ends,
            decoder=decoder,
            splitter=splitter,
            banned=BannedWords(bad),
            seed=seed,
            started=started,
            stop_event=stop_event,
        )

    def _continues(self, raw: bool | None) -> bool:
        """Whether a text goes on with its prompt's: where no chat template makes an answer of it."""
        return not self.instruct if raw is None else raw

    def _decoders(
        self, prompt_ids: list[int], continues: bool
    ) -> tuple[StreamDecoder, ThinkingSplitter | None]:
        """What makes text of the tokens after a prompt, and tells the thinking in it from the answer."""
        after = prompt_ids if continues else ()
        if not self.thinks:
            return StreamDecoder(self.tokenizer, after=after), None
        splitter = ThinkingSplitter(opened_by(self.tokenizer, prompt_ids))
        return StreamDecoder(self.tokenizer, shown=tag_ids(self.tokenizer), after=after), splitter

    def _begin(self, generation: Generation, tokens: int = 0) -> Scheduler:
        """A scheduler with one generation in it, on a cache of at least ``tokens``."""
        with self._lock:
            runner = self._runner_for(max(tokens, generation.needs_capacity))
        progress = self._stage("prefill")
        progress(0, len(generation.prompt_ids))
        scheduler = Scheduler(runner, self.sampler, progress, self._lock)
        scheduler.add(generation)
        return scheduler

    def _runner_for(self, tokens: int, sequences: int = 1, total: int | None = None) -> ModelRunner:
        """A runner whose cache holds ``sequences`` of up to ``tokens`` each, ``total`` in all. One of twice
        the size replaces one that is too small, so that growing conversations do not record their plans
        anew at every call."""
        needed, total = self.context or tokens, max(total or 0, self.context or tokens)
        old = self._runner
        if old is not None:
            cache = old.cache
            blocks = cache.allocator.count
            if (
                cache.capacity >= needed
                and cache.max_sequences >= sequences
                and blocks * BLOCK_TOKENS >= total
            ):
                return old
            if cache.in_use:
                raise UsageError(UNDER_WAY)
            if cache.capacity < needed:
                needed = max(needed, min(2 * cache.capacity, self.config.max_position))
            else:  # batches and long texts in turn do not take each other's place
                needed = cache.capacity
            sequences = max(sequences, cache.max_sequences)
            self._runner = None
            old.free()
            cache.free()
        while True:
            try:
                self._runner = make_runner(
                    self.runtime,
                    self.config,
                    self.weights,
                    self.kv_dtype,
                    capacity=needed,
                    sequences=sequences,
                    total=total,
                    max_tokens=self.prefill_chunk,
                    progress=self._stage("compiling kernels"),
                    activation_dtype=self.activations,
                )
                return self._runner
            except OutOfMemoryError:
                if total <= needed:
                    raise
                total = max(needed, total // 2)  # a batch then takes turns in what there is

    def _complete(self, generation: Generation, scheduler: Scheduler) -> None:
        """Add what the generation does not know to its metrics."""
        metrics = generation.metrics
        metrics.load_s, metrics.weight_bytes = self.load_s, self.weight_bytes
        metrics.dispatches_per_token = scheduler.dispatches
        metrics.bytes_read_per_token = scheduler.bytes_read / max(1, scheduler.tokens_chosen)
        metrics.kv_bytes = scheduler.runner.cache.bytes
        metrics.peak_host_bytes, metrics.device_bytes = peak_host_bytes(), self.runtime.allocated_bytes


def as_ids(tokens: Sequence[int]) -> list[int]:
    """Token ids as Python integers. Raises :class:`UsageError` for anything else."""
    try:
        if not isinstance(tokens, (bytes, bytearray)):  # which are sequences of integers too
            return [operator.index(token) for token in tokens]
    except TypeError:
        pass
    raise UsageError(f"a prompt is a text or a list of token ids, not {type(tokens).__name__}")

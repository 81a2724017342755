"""The Python API: load a model once, then generate, stream, or ask for logits."""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, get_args, overload

import numpy as np

from xinfer_vk.engine.callbacks import as_event, check_callable
from xinfer_vk.engine.config import (
    DEFAULT_MODEL,
    PREFILL_CHUNK,
    Activations,
    EngineConfig,
    Sampler,
    Tune,
)
from xinfer_vk.engine.conversions import as_ids, as_messages, as_prompts, is_messages
from xinfer_vk.engine.embeddings import Pooling, hidden_states, pool, pooling_of
from xinfer_vk.engine.engine import Engine
from xinfer_vk.engine.generation import Generation, GenerationResult, sibling
from xinfer_vk.engine.memory import fitting_runner, pool_blocks
from xinfer_vk.engine.metrics import peak_host_bytes
from xinfer_vk.engine.runner import MAX_OUTPUTS, ModelRunner
from xinfer_vk.engine.scoring import AnswerScore, score
from xinfer_vk.engine.stream import GenerationStream, PieceStream, end_streams
from xinfer_vk.errors import UsageError, said, setting
from xinfer_vk.kernels.state import BLOCK_TOKENS
from xinfer_vk.loading import Progress, load, main_format, open_checkpoint
from xinfer_vk.options import Message, Prompt, SamplingOptions
from xinfer_vk.plan import Runtime
from xinfer_vk.sampling.device import BIAS_ENTRIES
from xinfer_vk.sampling.params import SamplingParams
from xinfer_vk.sampling.rules import BannedWords, bad_word_ids
from xinfer_vk.text.chat import ChatTemplate, encode_chat, is_instruct
from xinfer_vk.text.stream import StreamDecoder
from xinfer_vk.text.thinking import ThinkingSplitter, opened_by, tag_ids, thinks
from xinfer_vk.text.tokenizer import eos_ids, load_tokenizer
from xinfer_vk.vulkan.guard import ForkableLock
from xinfer_vk.vulkan.runtime import open_runtime

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from xinfer_vk.engine.perplexity import Convention, Perplexity
    from xinfer_vk.engine.session import ChatSession, OnFull

__all__ = ["LLM", "GenerationResult", "GenerationStream", "SamplingParams"]

CLOSED = "this LLM is closed: make a new one"


class LLM:
    """A model on a device.

    The arguments are the fields of :class:`~xinfer_vk.engine.config.EngineConfig`, which may be given whole
    in the place of ``model``; ``n_ctx`` is another name of ``context``. ``progress`` is called with
    (stage, done, total) during long work. A context manager: leaving it calls :meth:`close`. Several threads
    may use it: their steps take turns.

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
        n_ctx: int | None = None,
        kv_memory: int | float | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        sampler: Sampler = "device",
        tune: Tune = "quick",
        progress: Progress | None = None,
    ) -> None:
        started = time.perf_counter()
        if n_ctx is not None:
            if context not in (None, n_ctx):
                raise UsageError(
                    f"context is {context!r} and n_ctx {n_ctx!r}: they are one setting, give one"
                )
            context = n_ctx
        check_callable("progress", progress, "(stage, done, total)")
        given = EngineConfig(
            DEFAULT_MODEL if isinstance(model, EngineConfig) else model, device, kv_dtype, quantize,
            activations, context, kv_memory, prefill_chunk, sampler, tune,
        )  # fmt: skip
        if isinstance(model, EngineConfig):
            if given != EngineConfig():
                raise UsageError("an EngineConfig has every argument: put the others into it")
            given = model
        self.engine_config = given
        self.kv_dtype, self.context, self.prefill_chunk = given.kv_dtype, given.context, given.prefill_chunk
        self.activations, self.sampler = given.activations, given.sampler
        self._progress: Progress = progress or (lambda stage, done, total: None)
        self._engine: Engine | None = None
        self._lock = ForkableLock()  # held during each step
        self._streams: weakref.WeakSet[PieceStream] = weakref.WeakSet()
        self._closed = False
        with open_checkpoint(given, progress) as source:
            self.name, self.config, self.model_files = source.name, source.config, source.files
            given.check_model(self.config, self.name)  # before anything is loaded
            self.tokenizer = load_tokenizer(source)
            self.chat_template = ChatTemplate.from_source(source)
            self.instruct = is_instruct(source)
            self.thinks = thinks(self.tokenizer, self.chat_template.text)
            self.eos_ids = eos_ids(source, self.tokenizer)
            self.generation_config = source.generation_config
            self.pooling: Pooling = pooling_of(source)
            if not source.tensors:
                main_format(source)  # says so
            self.runtime: Runtime = open_runtime(given.device)
            try:
                loaded = load(source, self.runtime, given, progress)
                self._blocks, notes = pool_blocks(given, self.config, self.runtime)
            except BaseException:
                self.runtime.close()
                raise
        self.weights, self.weight_bytes, self.dtype = loaded.weights, loaded.weight_bytes, loaded.fmt
        self._notes = (*loaded.notices, *notes)
        self.room = min(given.room(self.config), self._blocks * BLOCK_TOKENS)  # tokens of one sequence
        self.load_s = time.perf_counter() - started

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"on {self.runtime.profile.name}"
        return f"<LLM {self.name} ({self.config.architecture}, {self.dtype}), {state}>"

    # -- Properties ---------------------------------------------------------------------------

    @property
    def notices(self) -> tuple[str, ...]:
        """Notes about the device, the checkpoint and the weights, one line each."""
        return (*self.runtime.notices, *self._notes)

    @property
    def capacity(self) -> int:
        """Tokens that one sequence may have in the KV cache; 0 before the first call."""
        return self._runner.cache.capacity if self._runner else 0

    @property
    def compile_s(self) -> float:
        """Seconds spent on compiling kernels since the KV cache was made; 0 before the first call."""
        return self._runner.compile_s if self._runner else 0.0

    @property
    def cached_tokens(self) -> int:
        """Tokens of all sequences together that the KV cache has room for; 0 before the first call."""
        return self._runner.cache.pool.count * BLOCK_TOKENS if self._runner else 0

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
        ``{"enable_thinking": False}``. Raises :class:`UsageError` for an unknown variable."""
        if raw is None:
            raw = not self.instruct
        if raw:
            if template_args:
                raise UsageError(
                    f"template arguments need a chat template: leave out {setting('raw')}, or use an "
                    "instruct model"
                )
            if system is not None:
                raise UsageError(
                    f"a system text needs a chat template: leave out {setting('raw')}, or use an instruct "
                    "model"
                )
            return self.tokenizer.encode(prompt, parse_special=True)
        self.chat_template.check_variables(template_args or {})
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": prompt})
        return encode_chat(self.tokenizer, self.chat_template, messages, **(template_args or {}))

    def tokenize(self, text: str, *, add_bos: bool | None = None, special: bool = False) -> list[int]:
        """Token ids of a text as it is, without the chat template. ``add_bos``: begin with the
        begin-of-sequence token; None does so if the model was trained with it. ``special``: read what spells
        a special token as that token."""
        return self.tokenizer.encode(text, parse_special=special, add_bos=add_bos)

    def detokenize(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of token ids. ``skip_special`` leaves special tokens out. Raises :class:`UsageError` for
        anything but ids of the vocabulary."""
        ids = as_ids(token_ids)
        if ids:
            self._check_ids(ids)
        return self.tokenizer.decode(ids, skip_special)

    decode = detokenize

    # -- generation ---------------------------------------------------------------------------

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        system: str | None = None,
        raw: bool | None = None,
        template_args: Mapping[str, Any] | None = None,
        prompt_logprobs: bool = False,
        stop_event: threading.Event | None = None,
        **fields: Unpack[SamplingOptions],
    ) -> GenerationStream:
        """Generate from a text, token ids or a list of messages. Returns an iterator over pieces of text.

        Messages (``[{"role": "user", "content": "…"}]``, the last of them the user's) go through the chat
        template; a system text is their first message. ``system``, ``raw`` and ``template_args`` are those of
        :meth:`encode`. For token ids, ``raw`` says
        whether the text continues theirs, with the space between them, or answers it.
        ``params``: how tokens are chosen and when to stop; ``fields`` override its fields
        (``max_new_tokens=20, temperature=0.8``). ``max_new_tokens``, also called ``max_tokens``, is cut to
        what the context has room for. Setting ``stop_event`` from another thread ends the generation within a
        step. Raises :class:`UsageError` for an empty prompt, one longer than the context, or a bad parameter.
        """
        started = time.perf_counter()
        params = self._params(params, fields)
        ids = self._prompt_ids(prompt, system, raw, template_args)
        event = as_event(stop_event)
        generation = self._generation(ids, params, started, event, self._continues(raw))
        generation.ask_prompt_logprobs(prompt_logprobs)
        stream = GenerationStream(self._begin, generation, self._complete)
        self._streams.add(stream)
        return stream

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        system: str | None = None,
        raw: bool | None = None,
        template_args: Mapping[str, Any] | None = None,
        prompt_logprobs: bool = False,
        stop_event: threading.Event | None = None,
        **fields: Unpack[SamplingOptions],
    ) -> GenerationResult:
        """Generate from a text, token ids or messages, to the end. The arguments are those of :meth:`stream`;
        ``prompt_logprobs`` also computes the log-probability of each prompt token after the first."""
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

    __call__ = generate

    def batch(
        self,
        prompts: Iterable[Prompt],
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
        **fields: Unpack[SamplingOptions],
    ) -> list[GenerationResult]:
        """Generate from an iterable of prompts as one ragged batch, ``n`` samples of each. Samples of one
        prompt, and equal prompts, share KV blocks. ``params``: for all prompts, or a list with one for each.
        ``on_result`` is called with each result as it ends; if an exception ends the batch, also with the
        partial results of the others. ``on_step`` is called after each step with the number of tokens made so
        far. The list is in the order of the prompts, with the samples of a prompt together. Raises what
        :meth:`stream` raises.
        """
        started = time.perf_counter()
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise UsageError(f"n is {n!r}: it must be at least 1")
        check_callable("on_result", on_result, "a result")
        check_callable("on_step", on_step, "a number of tokens")
        prompts = as_prompts(prompts)
        if params is None or isinstance(params, SamplingParams):
            each = [self._params(params, fields)] * len(prompts)
        else:
            if len(params) != len(prompts):
                raise UsageError(f"{len(params)} sampling parameters for {len(prompts)} prompts")
            each = [self._params(p, fields) for p in params]
        event = as_event(stop_event)
        generations: list[Generation] = []
        for index, (prompt, chosen) in enumerate(zip(prompts, each)):
            ids = self._prompt_ids(prompt, system, raw, template_args)
            leader = self._generation(ids, chosen, started, event, self._continues(raw))
            leader.prompt = index
            leader.ask_prompt_logprobs(prompt_logprobs)
            generations.append(leader)
            for sample in range(1, n):
                generations.append(sibling(leader, sample, *self._decoders(ids, self._continues(raw))))
        engine, ended = self._open_engine(min(len(generations), MAX_OUTPUTS)), deque[Generation]()

        def report() -> None:
            while ended:
                generation = ended.popleft()
                self._complete(generation)
                if on_result is not None:
                    on_result(generation.result())

        for generation in generations:
            generation.on_end = ended.append
            engine.add(generation)
        try:
            while any(generation.finish_reason is None for generation in generations):
                engine.advance(lambda: bool(ended))
                report()
                if on_step is not None:
                    on_step(sum(generation.chosen for generation in generations))
        except BaseException as error:
            for generation in generations:
                engine.abort(generation, "error" if isinstance(error, Exception) else "interrupted")
            report()
            raise
        report()
        for generation in generations:
            if generation.error is not None:
                raise generation.error
        return [generation.result() for generation in generations]

    @overload
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Mapping[str, Any]],
        /,
        params: SamplingParams | None = None,
        *,
        template_args: Mapping[str, Any] | None = None,
        stop_event: threading.Event | None = None,
        **fields: Unpack[SamplingOptions],
    ) -> GenerationResult: ...

    @overload
    def chat(
        self,
        *,
        system: str | None = None,
        params: SamplingParams | None = None,
        context: int | None = None,
        on_full: OnFull = "drop-oldest",
        messages: Sequence[Mapping[str, Any]] = (),
        template_args: Mapping[str, Any] | None = None,
        **fields: Unpack[SamplingOptions],
    ) -> ChatSession: ...

    def chat(self, *conversation: Any, **arguments: Any) -> GenerationResult | ChatSession:
        """Answer a list of messages, the last of them the user's, once::

            result = llm.chat([{"role": "user", "content": "What is Vulkan?"}], max_tokens=60)

        ``template_args`` and ``stop_event`` are those of :meth:`generate`. Nothing is remembered between two
        calls. :meth:`stream` takes messages, too. Without messages as the first argument this is
        :meth:`session`. Raises :class:`UsageError` for a model without a chat template and for messages that
        are no conversation.
        """
        if not conversation:
            return self.session(**arguments)
        return self._chat_once(*conversation, **arguments)

    def _chat_once(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        template_args: Mapping[str, Any] | None = None,
        stop_event: threading.Event | None = None,
        **fields: Unpack[SamplingOptions],
    ) -> GenerationResult:
        return self.generate(
            as_messages(messages), params, template_args=template_args, stop_event=stop_event, **fields
        )

    def _encode_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        system: str | None,
        raw: bool | None,
        template_args: Mapping[str, Any] | None,
    ) -> list[int]:
        messages = as_messages(messages)
        if raw:
            raise UsageError(f"messages need a chat template: leave out {setting('raw')}, or give a text")
        if system is not None:
            raise UsageError("messages and a system text: make the text the first message")
        if not self.instruct:
            raise UsageError(f"{self.name} has no chat template, so it cannot chat: use an instruct model")
        self.chat_template.check_variables(template_args or {})
        return encode_chat(self.tokenizer, self.chat_template, messages, **(template_args or {}))

    def session(
        self,
        *,
        system: str | None = None,
        params: SamplingParams | None = None,
        context: int | None = None,
        on_full: OnFull = "drop-oldest",
        messages: Sequence[Mapping[str, Any]] = (),
        template_args: Mapping[str, Any] | None = None,
        **fields: Unpack[SamplingOptions],
    ) -> ChatSession:
        """Begin a conversation. It keeps its tokens in the KV cache between turns.

            session = llm.session(system="You are terse.", temperature=0.7)
            for piece in session.send("What is Vulkan?"):
                print(piece, end="", flush=True)

        The arguments are those of :class:`~xinfer_vk.engine.session.ChatSession`; ``fields`` override
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
        """Measure perplexity on a text or token ids: ``exp`` of the mean negative log-likelihood.

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

        check_callable("on_estimate", on_estimate, "(tokens, all tokens, perplexity)")
        stop_event = as_event(stop_event)
        room = self.room
        windowing = Windowing.of(context, stride, convention, room)
        if windowing.context > room:
            raise UsageError(
                f"{setting('context')} {context} is more than the {room} tokens there is room for: use less"
            )
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
        """Logits after each token: ``float32 [len(token_ids), vocabulary]``. Raises :class:`UsageError` for
        anything but token ids, and for more than the context holds."""
        ids = as_ids(token_ids)
        self._check_ids(ids)
        self._check_room(len(ids))
        engine = self._open_engine()
        with engine.borrow(len(ids)) as sequence:
            self._check_open()
            return engine.runner.rows_of(sequence, ids, "logits")

    def hidden_states(self, text: str | Sequence[int]) -> np.ndarray:
        """The last layer's hidden states of a text as it is, or of token ids, after the final norm:
        ``float32 [tokens, hidden size]``. Raises :class:`UsageError` for an empty text and for more tokens
        than the context holds."""
        ids = self._plain_ids(text)
        self._check_room(len(ids))
        engine = self._open_engine()
        with engine.borrow(len(ids)) as sequence:
            self._check_open()
            return hidden_states(engine.runner, sequence, ids)

    def embed(
        self,
        texts: str | Sequence[str | Sequence[int]],
        *,
        pooling: Pooling | None = None,
        normalize: bool = True,
    ) -> np.ndarray:
        """A vector for each text: ``float32 [texts, hidden size]``. Texts are taken as they are, or given as
        token ids. ``pooling``: "mean" of the hidden states, "last", or "cls" (the first); None: what the
        checkpoint says, else the mean. ``normalize``: to length 1. Raises what :meth:`hidden_states`
        raises."""
        if pooling not in (None, *get_args(Pooling)):
            raise UsageError(f"pooling is {pooling!r}: it is {', '.join(get_args(Pooling))} or None")
        each = [texts] if isinstance(texts, str) else list(texts)
        if not each:
            raise UsageError("texts is empty: give at least one text")
        kind = pooling or self.pooling
        return np.stack([pool(self.hidden_states(text), kind, normalize) for text in each])

    def score(self, prompt: str | Sequence[int], answers: Sequence[str | Sequence[int]]) -> list[AnswerScore]:
        """Log-probabilities of each answer after the prompt, in the order of ``answers``. Texts are taken as
        they are, without the chat template. The prompt runs once for all answers. Raises :class:`UsageError`
        for an empty prompt or answer and for more tokens than the context holds."""
        if isinstance(answers, str) or not answers:
            raise UsageError(f"answers is {answers!r}: give a list of at least one text or list of token ids")
        ids = self._plain_ids(prompt)
        each = [self.tokenize(a, add_bos=False) if isinstance(a, str) else as_ids(a) for a in answers]
        for index, answer in enumerate(each):
            if not answer:
                raise UsageError(f"answer {index} is empty: give at least one token")
            self._check_ids(answer)
        most = len(ids) + max(map(len, each))
        self._check_room(most)
        engine = self._open_engine()
        with engine.borrow(most) as sequence:
            self._check_open()
            return score(engine.runner, sequence, ids, each)

    def _plain_ids(self, text: str | Sequence[int]) -> list[int]:
        ids = self.tokenize(text) if isinstance(text, str) else as_ids(text)
        self._check_ids(ids)
        return ids

    def _check_room(self, tokens: int) -> None:
        if tokens > self.room:
            raise UsageError(f"{tokens} tokens are more than the context of {self.room}: use a shorter text")

    # -- life ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Free all device memory, after the step under way. The object cannot be used afterwards: generations
        of other threads, open streams and later calls raise :class:`UsageError`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            end_streams(self._streams, CLOSED)
            if self._engine is not None:
                self._engine.close(CLOSED)
            self._engine = None
            self.runtime.close()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(CLOSED)
        if check := getattr(self.runtime, "check_process", None):  # before a step writes to mapped memory
            check()

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

    def _params(self, params: SamplingParams | None, fields: SamplingOptions) -> SamplingParams:
        params = (params or SamplingParams()).replace(**fields)
        params.check_vocabulary(self.config.vocab_size)
        return params

    def check_prompt(self, prompt: str, raw: bool | None = None) -> None:
        """Raise :class:`UsageError` for a prompt without text. White space is a text to go on with, but no
        message to answer."""
        if not (prompt if self._continues(raw) else prompt.strip()):
            raise UsageError(
                "the prompt is empty: give some text" + said("", " with --prompt, --file or standard input")
            )

    def _prompt_ids(
        self,
        prompt: Prompt,
        system: str | None,
        raw: bool | None,
        template_args: Mapping[str, Any] | None,
    ) -> list[int]:
        if isinstance(prompt, str):
            self.check_prompt(prompt, raw)
            ids = self.encode(prompt, system=system, raw=raw, template_args=template_args)
        elif is_messages(prompt):
            ids = self._encode_messages(prompt, system, raw, template_args)
        else:
            ids = as_ids(prompt)  # type: ignore[arg-type]  # is_messages() has said what it is not
        self._check_ids(ids)
        return ids

    def check_fits(self, ids: Sequence[int], params: SamplingParams) -> None:
        """Raise :class:`UsageError` if a prompt leaves no room in the context, or ``params`` bias more
        tokens than the sampler has room for."""
        room = self.room
        if len(ids) >= room:
            larger = f"a larger {setting('context')} or " if room < self.config.max_position else ""
            raise UsageError(
                f"the prompt is {len(ids)} tokens, longer than the context of {room} has room for: use "
                f"{larger}a shorter prompt"
            )
        if len(params.logit_bias) > BIAS_ENTRIES // 2:
            raise UsageError(
                f"{setting('logit_bias')} has {len(params.logit_bias)} tokens: it must be at most "
                f"{BIAS_ENTRIES // 2}"
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
        room = self.room
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

    def _begin(self, generation: Generation) -> Engine:
        """The engine, with one more generation in it."""
        engine = self._open_engine()
        generation.on_prompt = self._stage("prefill")
        generation.on_prompt(0, len(generation.prompt_ids))
        engine.add(generation)
        return engine

    def _open_engine(self, sequences: int = 1) -> Engine:
        """The engine, made when it is first needed, for so many sequences if memory holds them. Streams that
        were left end, so that nobody computes what nobody reads."""
        with self._lock:
            self._check_open()
            for stream in list(self._streams):
                stream.end_if_left()
            if self._engine is None:
                config = self.engine_config
                if config.context is not None:
                    self._blocks, _ = pool_blocks(config, self.config, self.runtime, sequences)
                runner = fitting_runner(
                    self.runtime, config, self.config, self.weights, self._blocks,
                    self._stage("compiling kernels"),
                )  # fmt: skip
                self._engine = Engine(runner, self.sampler, self._lock)
            self._engine.sampler = self.sampler
            return self._engine

    @property
    def _runner(self) -> ModelRunner | None:
        return None if self._engine is None else self._engine.runner

    def _complete(self, generation: Generation) -> None:
        """Add what the generation does not know to its metrics."""
        metrics, engine = generation.metrics, self._engine
        metrics.load_s, metrics.weight_bytes = self.load_s, self.weight_bytes
        metrics.bytes_read_per_token = generation.bytes_read / max(1, generation.chosen)
        if engine is not None:
            metrics.dispatches_per_token = engine.dispatches
            metrics.kv_bytes = engine.runner.cache.bytes
        metrics.peak_host_bytes, metrics.device_bytes = peak_host_bytes(), self.runtime.allocated_bytes

"""How well a model predicts a text: perplexity over a sliding window.

Perplexity is ``exp`` of the mean negative log-likelihood of a text's tokens, each given those before it
(Jelinek et al. 1977). A text longer than the context is cut into windows. Two ways of doing so are
common, and give different numbers for the same model and text; docs/perplexity.md compares them:

``huggingface``
    Windows of ``context`` tokens begin every ``stride`` tokens. Each scores the tokens that no window
    before it has scored: the first all of its own, every later one its last ``stride``, which so have
    at least ``context - stride`` tokens before them. Each token of the text but the first is scored once.
``llama.cpp``
    Windows stand side by side, and each scores its second half. What remains at the end and is shorter
    than a window is left out. Where a begin-of-sequence token is used, it takes the place of each
    window's first token, which is never scored.

Each window is computed from nothing: keys and values of tokens it has in common with the one before are
not taken over, since they stand at other positions and have seen tokens that this window does not hold.

The log-probabilities are computed on the device; what comes back is a few words a token, no logits.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from xinfer_vk.cache import CachedSequence
from xinfer_vk.engine.runner import MAX_OUTPUTS, Chunk, make_runner
from xinfer_vk.errors import NumericError, UsageError, said, setting

if TYPE_CHECKING:
    from xinfer_vk.engine.llm import LLM
    from xinfer_vk.text.tokenizer import Tokenizer

Convention = Literal["huggingface", "llama.cpp"]
CONVENTIONS = ("huggingface", "llama.cpp")
DEFAULT_CONTEXT = 512

# Tokens scored in one step. Each takes a row of logits on the device, and the sampler as much again.
MOST_ROWS = 128
ROWS_BYTES = 64 << 20


@dataclass(frozen=True)
class Window:
    """Tokens ``begin … end - 1`` of a text, of which ``first … end - 1`` are scored."""

    begin: int
    end: int
    first: int


@dataclass(frozen=True)
class Windowing:
    """How a text is cut into windows of ``context`` tokens.

    ``stride`` is ``context`` in llama.cpp's convention. Raises :class:`UsageError`, naming the option,
    for windows that cannot be.
    """

    context: int
    stride: int
    convention: Convention

    @classmethod
    def of(
        cls, context: int | None, stride: int | None, convention: Convention, room: int = DEFAULT_CONTEXT
    ) -> Windowing:
        """With defaults: windows of 512 tokens, or of ``room``, if the model has no more; a stride of half
        a window."""
        context = min(DEFAULT_CONTEXT, room) if context is None else context
        if convention == "llama.cpp":
            if stride is not None:
                raise UsageError(
                    f"{setting('stride')} is {stride}: windows of llama.cpp's convention stand side by "
                    "side; leave it out"
                )
            stride = context
        return cls(context, max(1, context // 2) if stride is None else stride, convention)

    def __post_init__(self) -> None:
        if self.convention not in CONVENTIONS:
            known = " or ".join(CONVENTIONS)
            raise UsageError(f"{setting('convention')} is {self.convention!r}: it is {known}")
        least = 3 if self.convention == "llama.cpp" else 2  # so that there is a token to score
        if self.context < least:
            raise UsageError(
                f"{setting('context')} is {self.context}: a window must have at least {least} tokens"
            )
        if self.stride < 1:
            raise UsageError(f"{setting('stride')} is {self.stride}: it must be at least 1 token")
        if self.stride > self.context:
            raise UsageError(
                f"{setting('stride')} is {self.stride} and {setting('context')} {self.context}: the tokens "
                f"between two windows would be left out; use a stride of at most {self.context}"
            )

    def over(self, tokens: int) -> list[Window]:
        """The windows over a text of so many tokens. Raises :class:`UsageError` if there is none."""
        if self.convention == "llama.cpp":
            windows = [
                Window(begin, begin + self.context, begin + self.context // 2 + 1)
                for begin in range(0, tokens - self.context + 1, self.context)
            ]
            if not windows:
                raise UsageError(
                    f"the text has {tokens} tokens, and llama.cpp's convention leaves out what is shorter "
                    f"than a window of {self.context}: use a smaller {setting('context')}, or "
                    f"{setting('convention', 'huggingface')}"
                )
            return windows
        windows, done = [], 1  # the first token of the text has nothing before it
        for begin in range(0, tokens, self.stride):
            end = min(begin + self.context, tokens)
            first = max(done, begin + 1)
            if first < end:
                windows.append(Window(begin, end, first))
            done = end
            if end == tokens:
                break
        return windows


@dataclass(frozen=True, repr=False)
class Perplexity:
    """The perplexity of a text, or of what was scored of it before an interruption.

    ``standard_error``: of the perplexity, from the variance of the tokens' log-probabilities, which it
    takes for independent; NaN with fewer than two tokens. ``logprobs``: natural logarithms, one for each
    of ``token_ids``, NaN for a token that was not scored. ``bits_per_byte`` can be compared between
    models with different tokenizers; NaN where tokens stand for no bytes.
    """

    perplexity: float
    standard_error: float
    nll: float  # mean negative log-likelihood of a token, in nats
    bits_per_byte: float
    tokens: int  # scored
    token_ids: tuple[int, ...]
    logprobs: np.ndarray  # float64 [len(token_ids)]
    windowing: Windowing
    windows: int  # finished
    bos: bool  # whether the text began with a begin-of-sequence token
    tokens_run: int  # through the model: most tokens run in more than one window
    seconds: float
    complete: bool

    @property
    def rate(self) -> float:
        """Tokens scored per second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def __repr__(self) -> str:
        return f"<Perplexity {self}: {self.tokens} tokens scored>"

    def __str__(self) -> str:
        """``12.345 ± 0.062``: the error with two digits, the value to the same place."""
        error = self.standard_error
        if not (math.isfinite(error) and error > 0):
            return f"{self.perplexity:.3f}"
        decimals = min(9, max(0, 1 - math.floor(math.log10(error))))
        return f"{self.perplexity:.{decimals}f} ± {error:.{decimals}f}"


def estimate(logprobs: np.ndarray) -> tuple[float, float]:
    """Perplexity and its standard error from the log-probabilities of tokens.

    The error of ``exp(mean)`` is ``exp(mean)`` times that of the mean (the delta method).
    """
    if logprobs.size == 0:
        return math.nan, math.nan
    with np.errstate(over="ignore", invalid="ignore"):
        value = float(np.exp(-logprobs.mean()))
        if logprobs.size == 1:
            return value, math.nan
        return value, value * float(logprobs.std(ddof=1)) / math.sqrt(logprobs.size)


def evaluate(
    llm: LLM,
    text: str | Sequence[int],
    windowing: Windowing,
    *,
    bos: bool | None,
    max_tokens: int | None,
    progress: Callable[[int, int], None],
    stop_event: threading.Event | None = None,
    on_estimate: Callable[[int, int, float], None] | None = None,
) -> Perplexity:
    """What :meth:`LLM.perplexity` does. ``progress`` is called after each step with the tokens scored."""
    started = time.perf_counter()
    ids = text_ids(llm.tokenizer, text, bos, max_tokens)
    llm._check_ids(ids)
    llm._check_open()
    has_bos = ids[0] == llm.tokenizer.bos_id and (adds_bos(llm.tokenizer) if bos is None else bos)
    windows = windowing.over(len(ids))
    total = sum(window.end - window.first for window in windows)
    done = 0

    def finished(window: Window) -> None:
        nonlocal done
        done += 1
        if on_estimate is not None:
            so_far = scorer.logprobs[: window.end]
            so_far = so_far[~np.isnan(so_far)]
            on_estimate(so_far.size, total, estimate(so_far)[0])

    first_token = ids[0] if has_bos and windowing.convention == "llama.cpp" else None
    scorer = Scorer(llm, ids, min(windowing.context, len(ids)), first_token)
    try:
        for scored in scorer.run(windows, finished):
            progress(scored, total)
            if stop_event is not None and stop_event.is_set():
                break
    finally:
        scorer.close()
    logprobs = scorer.logprobs[~np.isnan(scorer.logprobs)]
    value, error = estimate(logprobs)
    return Perplexity(
        perplexity=value,
        standard_error=error,
        nll=float(-logprobs.mean()) if logprobs.size else math.nan,
        bits_per_byte=bits_per_byte(llm.tokenizer, ids, scorer.logprobs),
        tokens=logprobs.size,
        token_ids=tuple(ids),
        logprobs=scorer.logprobs,
        windowing=windowing,
        windows=done,
        bos=has_bos,
        tokens_run=scorer.tokens_run,
        seconds=time.perf_counter() - started,
        complete=done == len(windows),
    )


def check_max_tokens(max_tokens: int | None) -> None:
    if max_tokens is not None and max_tokens < 2:
        raise UsageError(f"{setting('max_tokens')} is {max_tokens}: perplexity needs at least 2 tokens")


def text_ids(
    tokenizer: Tokenizer, text: str | Sequence[int], bos: bool | None, max_tokens: int | None
) -> list[int]:
    """The tokens to score, the first of which may be the begin-of-sequence token."""
    check_max_tokens(max_tokens)
    if isinstance(text, str):
        if not text.strip():
            raise UsageError("the text is empty: give some" + said("", " with --file or on standard input"))
        ids = tokenizer.encode(text, parse_special=False, add_bos=bos)
    else:
        ids = [int(i) for i in text]
        if bos:
            ids = [*tokenizer.encode("", parse_special=False, add_bos=True), *ids]
    if len(ids) < 2:
        tokens = "1 token" if ids else "no tokens"
        raise UsageError(f"the text has {tokens}: perplexity needs at least 2")
    return ids[:max_tokens]


def adds_bos(tokenizer: Tokenizer) -> bool:
    """Whether the model was trained with a begin-of-sequence token before every text."""
    return tokenizer.bos_id in tokenizer.encode("", parse_special=False)[:1]


def bits_per_byte(tokenizer: Tokenizer, ids: Sequence[int], logprobs: np.ndarray) -> float:
    """Bits it takes to write a byte of the scored text with the model's probabilities."""
    scored = ~np.isnan(logprobs)
    size = sum(len(tokenizer.token_bytes(i)) for i, is_scored in zip(ids, scored) if is_scored)
    return float(-logprobs[scored].sum() / math.log(2) / size) if size else math.nan


class Scorer:
    """Computes the log-probabilities of a text's tokens, with a KV cache of its own for one window.

    ``first_token``: takes the place of every window's first token, if given.
    """

    def __init__(self, llm: LLM, ids: Sequence[int], context: int, first_token: int | None) -> None:
        self._ids, self._first_token, self._llm = ids, first_token, llm
        self.logprobs = np.full(len(ids), np.nan)  # float64
        self.tokens_run = 0
        c = llm.config
        rows = min(MOST_ROWS, max(MAX_OUTPUTS, ROWS_BYTES // (4 * c.vocab_size)))
        with llm._lock:
            llm._check_open()
            self._runner = make_runner(
                llm.runtime,
                c,
                llm.weights,
                llm.kv_dtype,
                capacity=context,
                max_tokens=llm.prefill_chunk,
                max_outputs=1 << (rows.bit_length() - 1),
                progress=llm._stage("compiling kernels"),
                activation_dtype=llm.activations,
            )
        self._cache = self._runner.cache

    def run(self, windows: Sequence[Window], finished: Callable[[Window], None]) -> Iterator[int]:
        """Score windows; after each step, how many tokens have been scored."""
        scored = 0
        for window in windows:
            sequence = self._cache.open(window.end - 1 - window.begin)
            try:
                for count in self._score(window, sequence):
                    scored += count
                    yield scored
            finally:
                self._cache.close(sequence)
            finished(window)

    def _score(self, window: Window, sequence: CachedSequence) -> Iterator[int]:
        """The steps of one window, each with the number of tokens it scored. The last token is no input:
        nothing is predicted from it."""
        tokens = list(self._ids[window.begin : window.end - 1])
        if self._first_token is not None:
            tokens[0] = self._first_token
        runner, context = self._runner, window.first - 1 - window.begin
        for at in range(0, context, runner.max_tokens):
            piece = tokens[at : min(at + runner.max_tokens, context)]
            with self._turn():
                runner.run([Chunk(sequence, piece, "none")], "logprobs")
            self.tokens_run += len(piece)
            yield 0
        step = min(runner.max_tokens, runner.max_outputs)
        for at in range(context, len(tokens), step):
            piece = tokens[at : at + step]
            target = window.begin + at + 1  # the token after the first of the piece
            targets = slice(target, target + len(piece))
            with self._turn():
                found = runner.target_logprobs(sequence, piece, self._ids[targets])
            if np.isnan(found).any():
                which = target + int(np.isnan(found).argmax())
                raise NumericError(
                    f"the logits for token {which} of the text hold NaN or +inf; run `xinfer-vk selftest` to "
                    "check the device, and check the model's weights"
                )
            self.logprobs[targets] = found
            self.tokens_run += len(piece)
            yield len(piece)

    def close(self) -> None:
        """Give the device memory back."""
        with self._llm._lock:
            if not self._llm._closed:  # which frees everything
                self._runner.free()
                self._cache.free()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """A step of an LLM that other threads may use, and close."""
        with self._llm._lock:
            self._llm._check_open()
            yield

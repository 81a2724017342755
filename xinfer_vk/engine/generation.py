"""One sequence being generated: its prompt, what came after it, and what ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from xinfer_vk.engine.metrics import Metrics
from xinfer_vk.engine.request import Request
from xinfer_vk.sampling.logprobs import TokenLogprobs
from xinfer_vk.sampling.params import SamplingParams
from xinfer_vk.sampling.program import RowParams
from xinfer_vk.sampling.rules import BannedWords
from xinfer_vk.text.stop import StopStrings
from xinfer_vk.text.stream import StreamDecoder
from xinfer_vk.text.thinking import Piece, ThinkingSplitter


@dataclass(frozen=True, repr=False)
class GenerationResult:
    """The result of a generation.

    ``text``: the answer. ``thinking``: the reasoning before it, for models that reason.
    ``finish_reason``: "stop" (end of sequence, a stop token or a stop string), "length" (the limit),
    "interrupted", or "error" (an exception ended it: ``error``). ``token_ids``: the generated tokens, without
    the token that ended the text, but with those of a stop string. ``prompt``, ``sample``: the index of the
    prompt in a batch, and of this sample of it. ``seed``: the seed that repeats it. ``stop``: the stop string
    or token that ended it. ``logprobs``: one for each of ``token_ids``, if requested. ``prompt_logprobs``:
    one for each prompt token after the first.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: str
    metrics: Metrics
    prompt: int = 0
    sample: int = 0
    seed: int = 0
    stop: str | int | None = None  # the stop string or token that ended it
    thinking: str = ""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: Exception | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        shown = self.text if len(self.text) <= 60 else self.text[:59] + "…"
        return f"<GenerationResult {shown!r}: {len(self.token_ids)} tokens, {self.finish_reason}>"

    def as_dict(self) -> dict[str, Any]:
        """The whole result as dicts, lists, strings and numbers, ready for ``json.dumps``."""
        out: dict[str, Any] = {
            "prompt": self.prompt,
            "sample": self.sample,
            "seed": self.seed,
            "text": self.text,
            "thinking": self.thinking,
            "token_ids": list(self.token_ids),
            "prompt_token_ids": list(self.prompt_token_ids),
            "finish_reason": self.finish_reason,
            "stop": self.stop,
            "error": None if self.error is None else str(self.error),
            "metrics": self.metrics.as_dict(),
        }
        for name in ("logprobs", "prompt_logprobs"):
            entries = getattr(self, name)
            if entries is not None:
                out[name] = [entry.as_dict() for entry in entries]
        return out


@dataclass(eq=False)
class Generation:
    """The text of one request: what was chosen, what ends it, and the pieces that were given out.

    ``fed`` of the prompt's tokens are in the cache. One thread may run steps while another takes pieces:
    ``_lock`` keeps the two apart.
    """

    prompt_ids: list[int]
    params: SamplingParams
    end_ids: frozenset[int]  # ids that end the text: end of sequence unless ignored, and stop_token_ids
    decoder: StreamDecoder
    banned: BannedWords
    seed: int
    started: float  # time.perf_counter() when the caller asked
    prompt: int = 0
    sample: int = 0
    stop_event: threading.Event = field(default_factory=threading.Event)
    splitter: ThinkingSplitter | None = None  # of a model that thinks
    want_prompt_logprobs: bool = False
    on_prompt: Callable[[int, int], None] | None = None  # prompt tokens computed, of how many
    on_end: Callable[[Generation], None] | None = None

    fed: int = 0
    chosen: int = 0  # tokens, the one that ended it too
    bytes_read: float = 0.0  # from the device, its share
    error: Exception | None = None  # what ended it
    generated: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop: str | int | None = None
    metrics: Metrics = field(default_factory=Metrics)
    row_params: RowParams | None = field(default=None, repr=False)  # kept between steps

    def __post_init__(self) -> None:
        p = self.params
        # Whether the largest logit is the choice and nothing else is asked for: argmax does it.
        self.plain = (
            p.is_greedy
            and not p.has_penalties
            and not p.logit_bias
            and not p.bad_words
            and p.logprobs is None
            and p.min_new_tokens == 0
            and not p.logits_processors
        )
        # Whether the host must see each token before the next one is chosen.
        self.watched = bool(p.stop or p.bad_words or p.logprobs is not None)
        self._stops = StopStrings(self.params.stop)
        self._pieces: list[Piece] = []
        self._made_by: list[int] = []  # for each piece, how many tokens it took
        self._read = 0  # of the tokens generated, those whose text is among the pieces or held back
        self._last = self.started  # when the last token came
        self._shown = 0  # pieces that take() has given out
        self.metrics.prompt_tokens = len(self.prompt_ids)
        self._lock = threading.RLock()
        self.request = Request(
            self.prompt_ids.copy(),
            p.max_new_tokens,
            every_row=self.want_prompt_logprobs,
            watched=self.watched,
            owner=self,
        )

    @property
    def prefilled(self) -> bool:
        return self.fed == len(self.prompt_ids)

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer."""
        return self.prompt_ids + self.generated

    def ask_prompt_logprobs(self, wanted: bool) -> None:
        """Before it begins: whether the log-probabilities of its prompt's tokens are wanted."""
        self.want_prompt_logprobs = self.request.every_row = wanted

    @property
    def has_news(self) -> bool:
        """Whether there is text that was not given out, or the end."""
        return (
            self.finish_reason is not None
            or self._read < len(self.generated)
            or self._shown < len(self._pieces)
        )

    def note_fed(self, count: int, now: float) -> None:
        """``count`` prompt tokens have gone into the cache."""
        self.fed += count
        self.metrics.prefilled_tokens += count
        if self.prefilled:
            self.metrics.ttft_s = now - self.started
            self.metrics.ttft_compile_s = self.metrics.compile_s

    def accept(self, token: int, logprobs: TokenLogprobs | None, now: float, compile_s: float = 0.0) -> None:
        """Take a chosen token; ends the generation if it or the text says so. ``compile_s`` of the time
        since the last one went into compiling. The device waits meanwhile, so its text is made when someone
        wants it."""
        with self._lock:
            if self.finish_reason is None:
                self._accept(token, logprobs, now, compile_s)

    def _accept(self, token: int, logprobs: TokenLogprobs | None, now: float, compile_s: float) -> None:
        if self.generated:
            self.metrics.token_s.append(now - self._last - compile_s)
        self._last = now
        self.chosen += 1
        if token in self.end_ids:
            self.stop = token
            self.finish("stop")
            return
        self.generated.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if self.params.stop:
            self._make_text()
            if self._stops.found is not None:
                self.stop = self._stops.found
                self.finish("stop")
                return
        if len(self.generated) >= self.request.most:
            self.finish("length")

    def finish(self, reason: str, error: Exception | None = None) -> None:
        """End it. Text held back comes out, unless it was cut by a stop string."""
        with self._lock:
            if self.finish_reason is not None:
                return
            self._make_text()
            self.finish_reason, self.error = reason, error
            if self._stops.found is None:
                self._show(self._stops.push(self.decoder.finish()))
                self._show(self._stops.finish())
            if self.splitter is not None:
                self._append(self.splitter.finish())
        if self.on_end is not None:
            self.on_end(self)

    def take(self) -> Iterator[Piece]:
        """The text made and not given out yet, in pieces."""
        while True:
            with self._lock:
                self._make_text()
                if self._shown == len(self._pieces):
                    return
                self._shown += 1
                piece = self._pieces[self._shown - 1]
            yield piece

    def leave(self) -> None:
        """End it with the last piece that :meth:`take` gave out, for a caller who wants no more. Several
        steps may have run at once: what they made beyond that piece is forgotten, text and tokens."""
        with self._lock:
            self._leave()

    def _leave(self) -> None:
        if self.finish_reason is not None and self._shown == len(self._pieces):
            return
        kept = self._made_by[self._shown - 1] if self._shown else 0
        del self._pieces[self._shown :], self._made_by[self._shown :]
        del self.generated[kept:], self.logprobs[kept:]
        self._read = kept
        self.finish_reason, self.stop = "interrupted", None

    def result(self) -> GenerationResult:
        """What there is; complete once ``finish_reason`` is set."""
        with self._lock:
            return self._result()

    def _result(self) -> GenerationResult:
        self._make_text()
        return GenerationResult(
            text="".join(piece for piece in self._pieces if not piece.thinking),
            thinking="".join(piece for piece in self._pieces if piece.thinking),
            token_ids=tuple(self.generated),
            prompt_token_ids=tuple(self.prompt_ids),
            finish_reason=self.finish_reason or "interrupted",
            metrics=self.metrics,
            prompt=self.prompt,
            sample=self.sample,
            seed=self.seed,
            stop=self.stop,
            logprobs=None if self.params.logprobs is None else self._with_texts(self.logprobs),
            prompt_logprobs=self._with_texts(self.prompt_logprobs) if self.want_prompt_logprobs else None,
            error=self.error,
        )

    def _with_texts(self, entries: Sequence[TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
        return tuple(entry.with_texts(self.decoder.token_text) for entry in entries)

    def _make_text(self) -> None:
        """Of the tokens that came since it was made last."""
        for token in self.generated[self._read :]:
            self._read += 1
            self._show(self._stops.push(self.decoder.push(token)))

    def _show(self, text: str) -> None:
        if text:
            self._append([Piece(text)] if self.splitter is None else self.splitter.push(text))

    def _append(self, pieces: Sequence[Piece]) -> None:
        self._pieces += pieces
        self._made_by += [self._read] * len(pieces)


def sibling(
    leader: Generation, sample: int, decoder: StreamDecoder, splitter: ThinkingSplitter | None
) -> Generation:
    """Another sample of ``leader``'s prompt."""
    return Generation(
        prompt_ids=leader.prompt_ids,
        params=leader.params,
        end_ids=leader.end_ids,
        decoder=decoder,
        splitter=splitter,
        banned=leader.banned,
        seed=leader.seed,
        started=leader.started,
        prompt=leader.prompt,
        sample=sample,
        stop_event=leader.stop_event,
    )

"""A conversation: each turn computes only what the cache does not have yet.

The cache is a memory of *tokens*, the history one of *messages*, and the chat template leads from one to the
other. A turn renders the whole conversation, encodes it, and is a request like any other: what the cache
holds of its beginning is not computed again. So the cache never decides what the model reads, it only saves
work. Going back, changing a message or the system text, and templates that rewrite earlier turns all come
down to a shorter common beginning. An answer's own tokens are reused too, up to the first place where the
tokenizer would cut its text differently than the model wrote it.
"""

from __future__ import annotations

import threading
import time
import weakref
from bisect import bisect_left
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from xinfer_vk.engine.callbacks import as_event
from xinfer_vk.engine.generation import Generation
from xinfer_vk.engine.stream import PieceStream, pieces
from xinfer_vk.errors import UsageError, said, setting
from xinfer_vk.fields import quoted
from xinfer_vk.options import SamplingOptions
from xinfer_vk.sampling.params import SamplingParams
from xinfer_vk.text.chat import encode_chat
from xinfer_vk.text.thinking import Piece

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from xinfer_vk.engine.llm import LLM

OnFull = Literal["drop-oldest", "refuse"]

DEFAULT_CONTEXT = 4096  # tokens, where neither the session nor the LLM says how many


@dataclass(frozen=True)
class Turn:
    """A message and its answer, which may be cut short. What the model thought before the answer is not part
    of a conversation: models are not to read it again."""

    user: str
    assistant: str


@dataclass(frozen=True, eq=False)
class Answer:
    """An answer to ``text`` after ``turns``, of which the model does not read the oldest ``dropped``."""

    generation: Generation
    turns: list[Turn]
    text: str
    dropped: int


class ChatSession:
    """A conversation with a model; :meth:`LLM.session <xinfer_vk.engine.llm.LLM.session>` makes one.

    ``system``: the system text; None leaves it to the template. ``params``: defaults of all answers.
    ``context``: the most tokens of the conversation; None takes the LLM's context, or else 4096 or the
    model's limit. ``on_full``: what happens when a message no longer fits. ``messages``: a conversation to
    continue. ``template_args``: variables for the chat template, such as ``{"enable_thinking": False}``.

    A message fits when it leaves room for an answer: ``max_new_tokens``, or a quarter of the context if
    that is less. Otherwise "drop-oldest" hides the oldest turns from the model until half of the context is
    free, so that this does not happen at every turn; ``messages`` and the system text keep everything.
    "refuse" raises :class:`UsageError` and changes nothing.

    Between turns its tokens stay in the KV cache until other calls need the room. One thread
    at a time, except for ``cancel`` and ``stop_event``. Raises :class:`UsageError` for a model without a chat
    template and for bad arguments.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        system: str | None = None,
        params: SamplingParams | None = None,
        context: int | None = None,
        on_full: OnFull = "drop-oldest",
        messages: Sequence[Mapping[str, Any]] = (),
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        if not llm.instruct:
            raise UsageError(
                f"{llm.name} has no chat template, so it cannot chat: use an instruct model, "
                + said("or llm.generate", "or xinfer-vk generate")
            )
        if on_full not in get_args(OnFull):
            raise UsageError(f"{setting('on_full')} is {on_full!r}: it is {' or '.join(get_args(OnFull))}")
        room = llm.room
        if context is not None and not 1 <= context <= room:
            raise UsageError(f"{setting('context')} is {context}: it must be between 1 and {room}")
        self.llm, self.on_full = llm, on_full
        self.template_args = dict(template_args or {})
        llm.chat_template.check_variables(self.template_args)
        self.context: int = context or llm.context or min(DEFAULT_CONTEXT, room)
        self._params = params or SamplingParams()
        self._params.check_vocabulary(llm.config.vocab_size)
        self._system: str | None = None
        self._turns: list[Turn] = []
        self._dropped = 0  # of the oldest turns, those that the model does not read any more
        self._unanswered: str | None = None  # the last message, if it was stopped before an answer began
        self._fill: int | None = 0
        self._answering: Answer | None = None
        self._current: weakref.ref[ChatStream] | None = None  # weak: an answer that is dropped ends at once
        self.messages = messages
        if system is not None:
            self.system = system

    def __repr__(self) -> str:
        return f"<ChatSession with {self.llm.name}: {len(self._turns)} turns, context {self.context}>"

    # -- Properties ---------------------------------------------------------------------------

    @property
    def messages(self) -> list[dict[str, str]]:
        """The whole conversation, dropped turns included: ``{"role": …, "content": …}`` each, a system
        text first if there is one, then user and assistant in turn. Can be set; :class:`UsageError` if
        it is anything else."""
        return self._messages(self._turns)

    @messages.setter
    def messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        system, turns = read_messages(messages)
        self._stop_current()
        self._check_template(system, turns)
        self._system, self._turns, self._dropped = system, turns, 0
        self._changed()

    @property
    def system(self) -> str | None:
        """The system text. Setting it keeps the conversation, which is read again at the next turn;
        :class:`ModelError` if the template does not take one, as some do."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        self._stop_current()
        self._check_template(text, self._turns)
        self._system = text
        self._changed()

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters of answers. Can be set."""
        return self._params

    @params.setter
    def params(self, params: SamplingParams) -> None:
        params.check_vocabulary(self.llm.config.vocab_size)
        self._params = params

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Messages and their answers, the oldest first."""
        return tuple(self._turns)

    @property
    def dropped_turns(self) -> int:
        """How many of the oldest turns the model does not read any more."""
        return self._dropped

    @property
    def unanswered(self) -> str | None:
        """The last message, if it was stopped before its answer began. It is not part of the conversation;
        :meth:`retry` sends it again."""
        return self._unanswered

    @property
    def context_tokens(self) -> int:
        """Tokens that the conversation takes, as far as the model reads it; 0 before the first turn."""
        if self._fill is None:
            said, self._fill = self._messages(self._turns[self._dropped :]), 0
            if self._turns:  # not all of it at once: a template need not render what ends with an answer
                answer = self.llm.tokenizer.encode(said[-1]["content"], parse_special=False, add_bos=False)
                self._fill = len(self._encode(said[:-1])) + len(answer)
        return self._fill

    # -- turns --------------------------------------------------------------------------------

    def send(
        self,
        text: str,
        params: SamplingParams | None = None,
        *,
        stop_event: threading.Event | None = None,
        **fields: Unpack[SamplingOptions],
    ) -> ChatStream:
        """Send a message. Returns the answer as an iterator over pieces of text.

        ``fields`` are fields of SamplingParams, over ``params`` or the session's. The turn enters the
        conversation when its stream ends, however it ends: an answer that was interrupted stays as far as
        it came, and one whose stream was left (by ``break``, or closed) as far as it was given out; a stream
        that was left ends at the next call. Raises :class:`UsageError` for an empty message, a bad
        parameter, and a message that does not fit.
        """
        self._stop_current()
        return self._answer(self._turns, text, params, stop_event, fields)

    def retry(
        self,
        params: SamplingParams | None = None,
        *,
        stop_event: threading.Event | None = None,
        **fields: Unpack[SamplingOptions],
    ) -> ChatStream:
        """Answer the last message again, as :meth:`send`. The old answer stays until there is a new one."""
        self._stop_current()
        return self.edit(self._last_message("answer again"), params, stop_event=stop_event, **fields)

    def edit(
        self,
        text: str,
        params: SamplingParams | None = None,
        *,
        stop_event: threading.Event | None = None,
        **fields: Unpack[SamplingOptions],
    ) -> ChatStream:
        """Replace the last message, as :meth:`send`."""
        self._stop_current()
        self._last_message("change")
        turns = self._turns if self._unanswered is not None else self._turns[:-1]
        return self._answer(turns, text, params, stop_event, fields)

    def undo(self) -> str:
        """Remove the last message and its answer. Returns the message."""
        self._stop_current()
        text = self._last_message("take back")
        if self._unanswered is None:
            self._turns = self._turns[:-1]
            if self._dropped >= len(self._turns):
                self._dropped = 0  # nothing is left that the model would read: begin with all of it
        self._changed()
        return text

    def reset(self) -> None:
        """Forget the conversation; the system text stays."""
        self._stop_current()
        self._turns, self._dropped = [], 0
        self._changed()

    def close(self) -> None:
        """End the answer under way. The conversation stays and can continue."""
        self._stop_current()

    # -- a turn, step by step -----------------------------------------------------------------

    def _answer(
        self,
        turns: list[Turn],
        text: str,
        params: SamplingParams | None,
        stop_event: threading.Event | None,
        fields: SamplingOptions,
    ) -> ChatStream:
        started = time.perf_counter()
        if not text.strip():
            raise UsageError("the message is empty: write something")
        params = (params or self._params).replace(**fields)
        params.check_vocabulary(self.llm.config.vocab_size)
        ids, dropped = self._fit(turns, text, params)
        room = self.context - len(ids)
        if params.max_new_tokens > room:
            params = params.replace(max_new_tokens=room, min_new_tokens=min(params.min_new_tokens, room))
        generation = self.llm._generation(ids, params, started, as_event(stop_event))
        self._answering = Answer(generation, turns, text, dropped)
        stream = ChatStream(self, self._answering)
        self._current = weakref.ref(stream)
        self.llm._streams.add(stream)
        return stream

    def _fit(self, turns: list[Turn], text: str, params: SamplingParams) -> tuple[list[int], int]:
        """Token ids of the conversation with a new message, and how many turns had to be left out."""

        def prompt(dropped: int) -> list[int]:
            said = self._messages(turns[dropped:])
            return self._encode([*said, {"role": "user", "content": text}])

        dropped = min(self._dropped, len(turns))
        ids = prompt(dropped)
        answer = min(params.max_new_tokens, max(1, self.context // 4))
        most = self.context - answer
        if len(ids) <= most:
            return ids, dropped
        if self.on_full == "refuse" and dropped < len(turns):
            raise UsageError(
                f"the context is full: with this message the conversation is {len(ids)} tokens, and "
                f"{answer} of the {self.context} are kept for the answer; start a new conversation, take "
                f"turns back, or use a larger {setting('context')} or {setting('on_full', 'drop-oldest')}"
            )
        choices = range(dropped, len(turns) + 1)
        for target in (min(self.context // 2, most), most):
            found = bisect_left(choices, True, key=lambda n: len(prompt(n)) <= target)
            if found < len(choices):
                return prompt(choices[found]), choices[found]
        raise UsageError(
            f"the message is too long: it takes {len(prompt(len(turns)))} tokens by itself, and the context "
            f"of {self.context} has room for {most} beside the answer: shorten it, or use "
            f"a larger {setting('context')}"
        )

    def _begin(self, answer: Answer) -> Generator[Piece, None, None]:
        """Run it. Ends in :meth:`_ended`."""
        if self._answering is not answer:
            raise UsageError("the conversation has gone on since this stream was made: send again")
        try:
            yield from pieces(self.llm._begin, answer.generation, self.llm._complete)
        finally:
            self._ended(answer)

    def _ended(self, answer: Answer) -> None:
        """Keep the turn in the conversation, whatever ended it."""
        generation, self._answering, self._current = answer.generation, None, None
        text = generation.result().text
        if text or generation.finish_reason in ("stop", "length"):
            self._turns, self._dropped = [*answer.turns, Turn(answer.text, text)], answer.dropped
            self._changed()
        else:
            self._unanswered = answer.text

    def _stop_current(self) -> None:
        stream = self._current() if self._current is not None else None
        if stream is not None:
            stream.close()
        self._answering = self._current = None

    def _changed(self) -> None:
        self._unanswered, self._fill = None, None

    def _last_message(self, purpose: str) -> str:
        if self._unanswered is not None:
            return self._unanswered
        if not self._turns:
            raise UsageError(f"there is no message to {purpose}: the conversation is empty")
        return self._turns[-1].user

    def _check_template(self, system: str | None, turns: Sequence[Turn]) -> None:
        """Raise now what such a conversation would raise when it goes on: :class:`ModelError` if the template
        refuses it, :class:`UsageError` for text that is not Unicode."""
        said = messages_of(system, turns)
        if said:
            self._encode([*said, {"role": "user", "content": "x"}])

    def _messages(self, turns: Sequence[Turn]) -> list[dict[str, str]]:
        return messages_of(self._system, turns)

    def _encode(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return encode_chat(self.llm.tokenizer, self.llm.chat_template, messages, **self.template_args)


class ChatStream(PieceStream):
    """An answer of a conversation under way; see :class:`~xinfer_vk.engine.stream.PieceStream`.
    ``newly_dropped``: how many more of the oldest turns the model does not read, because the context is full.
    Of the result, ``metrics.reused_tokens`` of the prompt were in the cache and ``metrics.prefilled_tokens``
    were run. One that is closed before its first piece leaves no trace."""

    def __init__(self, session: ChatSession, answer: Answer) -> None:
        self.newly_dropped = max(0, answer.dropped - session.dropped_turns)
        super().__init__(answer.generation, session._begin(answer))

    def __enter__(self) -> ChatStream:
        return self


def messages_of(system: str | None, turns: Sequence[Turn]) -> list[dict[str, str]]:
    """A conversation as chat templates have it."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for turn in turns:
        messages.append({"role": "user", "content": turn.user})
        messages.append({"role": "assistant", "content": turn.assistant})
    return messages


def read_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[str | None, list[Turn]]:
    """The system text and the turns of a conversation, checked: a system message or none, then user and
    assistant in turn. Raises :class:`UsageError`, which numbers messages from 1."""
    texts: list[tuple[str, str]] = []
    for i, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise UsageError(f"message {i} is {quoted(message)}: it must have a role and a content")
        role, content = message["role"], message["content"]
        if role not in ("system", "user", "assistant"):
            raise UsageError(f"message {i} has the role {quoted(role)}: it is system, user or assistant")
        if not isinstance(content, str):
            raise UsageError(f"message {i} has the content {quoted(content)}: it must be text")
        texts.append((role, content))
    system = texts.pop(0)[1] if texts and texts[0][0] == "system" else None
    first = 1 if system is None else 2  # the number of the first user message
    for i, (role, content) in enumerate(texts):
        wanted = "assistant" if i % 2 else "user"
        if role != wanted:
            raise UsageError(f"message {first + i} is of the role {role}: {wanted} was expected")
        if role == "user" and not content.strip():
            raise UsageError(f"message {first + i} is empty: a user must say something")
    if len(texts) % 2:
        raise UsageError(f"message {first + len(texts) - 1}, the last one, has no answer")
    answers = iter(texts)
    return system, [Turn(user[1], assistant[1]) for user, assistant in zip(answers, answers)]

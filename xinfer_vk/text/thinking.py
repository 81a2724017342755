"""Thinking and answer told apart, while they are made.

Models that reason write their thoughts first, between ``<think>`` and ``</think>``, then the answer; some
templates open ``<think>`` in the prompt already. A tag may come in several pieces, so what may become one is
held back. Only a tag at the beginning counts: an answer may speak of ``<think>``.
"""

from __future__ import annotations

from xinfer_vk.text.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"
TAIL_TOKENS = 16  # of a prompt, enough to see an opened tag at its end


class Piece(str):
    """A piece of generated text. ``thinking``: whether it is of the thoughts, else of the answer."""

    __slots__ = ("thinking",)
    thinking: bool

    def __new__(cls, text: str, thinking: bool = False) -> Piece:
        self = super().__new__(cls, text)
        self.thinking = thinking
        return self


def thinks(tokenizer: Tokenizer, template: str) -> bool:
    """Whether a model is made to think: it has the tags as tokens, or its chat template knows them."""
    return tokenizer.id_of(CLOSE) is not None or CLOSE in template


def opened_by(tokenizer: Tokenizer, prompt: list[int]) -> bool:
    """Whether a prompt ends with an opened tag, so that what follows is thought."""
    return tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special=False).rstrip().endswith(OPEN)


def tag_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that are a tag, which some vocabularies count among the special ones."""
    return frozenset(i for i in map(tokenizer.id_of, (OPEN, CLOSE)) if i is not None)


class ThinkingSplitter:
    """Splits a text that comes in pieces. The tags are left out, and so is the white space around thoughts
    and before the answer that follows them. ``opened``: the prompt has the first tag."""

    def __init__(self, opened: bool = False) -> None:
        self._state = "thinking" if opened else "start"
        self._held = ""
        self._begun = False  # whether there was any thought

    def push(self, text: str) -> list[Piece]:
        """What is certain by now; maybe nothing."""
        self._held += text
        out: list[Piece] = []
        if self._state == "start":
            begun = self._held.lstrip()
            if begun.startswith(OPEN):
                self._state, self._held = "thinking", begun[len(OPEN) :]
            elif not OPEN.startswith(begun):
                self._state = "answer"
        if self._state == "thinking":
            thought, found, rest = self._held.partition(CLOSE)
            if found:
                self._state, self._held = "after", rest
                thought = thought.rstrip()
            else:
                keep = _held_back(thought)
                thought, self._held = thought[: len(thought) - keep], thought[len(thought) - keep :]
            out += self._thought(thought)
        if self._state == "after":
            self._held = self._held.lstrip()
            self._state = "answer" if self._held else "after"
        if self._state == "answer" and self._held:
            out.append(Piece(self._held))
            self._held = ""
        return out

    def finish(self) -> list[Piece]:
        """What was held back, when the text ends."""
        held, self._held = self._held, ""
        if self._state == "thinking":
            return self._thought(held.rstrip())
        return [Piece(held)] if held else []

    def _thought(self, text: str) -> list[Piece]:
        if not self._begun:
            text = text.lstrip()
        self._begun = self._begun or bool(text)
        return [Piece(text, thinking=True)] if text else []


def _held_back(text: str) -> int:
    """How many characters at the end may belong to what is left out: the closing tag or its beginning, and
    white space before it."""
    for size in range(min(len(CLOSE) - 1, len(text)), 0, -1):
        if text.endswith(CLOSE[:size]):
            break
    else:
        size = 0
    return len(text) - len(text[: len(text) - size].rstrip())

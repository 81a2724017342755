"""Words wrapped at the terminal's edge, in text that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from rich.cells import cell_len

FENCES = ("```", "~~~")
TAB_STOP = 8
JOINER = "\u200d"  # makes one emoji of several: a line never breaks after it
# A line may begin anywhere in text without spaces (Chinese, Japanese), but not with one of these.
NEVER_FIRST = frozenset("、。，．・：；？！）」』】〕〉》’”ー々…～")
PARTS = re.compile(r"\n|[^\S\n]+|\S+")


class WordWrapper:
    """Breaks lines between words so that none is longer than ``columns()`` cells.

    A word is given out when the space after it has come: :meth:`flush` gives out the last one. Between fences
    (three backticks or tildes) lines are code, and stay as they are; so does a word longer than a line.
    """

    def __init__(self, columns: Callable[[], int]) -> None:
        self._columns = columns
        self._reset()

    def _reset(self) -> None:
        self._word = ""  # that may go on in the next piece
        self._spaces = ""  # before it, not yet given out
        self._column = 0  # of the cursor, in cells
        self._at_start = True  # whether no word of the line has been given out
        self._code, self._fence = False, ""

    def push(self, text: str) -> str:
        """What can be shown now."""
        return "".join(self._push(text))

    def flush(self) -> str:
        """What was held back; the next text begins where this ends."""
        return "".join([*self._end_word(), self._spaces_out()])

    def end(self) -> str:
        """What was held back; the next text begins a line of its own."""
        text = self.flush()
        self._reset()
        return text

    def _push(self, text: str) -> Iterator[str]:
        for part in PARTS.findall(text):
            if part == "\n":
                yield from self._end_word()
                if self._code or self._column_after(self._spaces) <= self._columns():
                    yield self._spaces_out()
                yield "\n"
                self._spaces, self._column, self._at_start = "", 0, True
            elif part.isspace():
                yield from self._end_word()
                self._spaces += part
            else:
                yield from self._push_word(part)

    def _push_word(self, part: str) -> Iterator[str]:
        """Part of a word. Wide characters are words of their own, with what must not begin a line."""
        for character in part:
            before = self._word[-1:]
            splits = before and character not in NEVER_FIRST and cell_len(character) > 0 and before != JOINER
            if splits and (cell_len(character) == 2 or cell_len(before) == 2 or before in NEVER_FIRST):
                yield from self._end_word()
            self._word += character

    def _end_word(self) -> Iterator[str]:
        word, self._word = self._word, ""
        if not word:
            return
        if self._at_start:
            self._note_fence(word)
        columns, spaces, width = max(1, self._columns()), self._spaces, cell_len(word)
        if not self._code and not self._at_start:
            end = self._column_after(spaces) + width
            if end > columns and (width <= columns or self._column >= columns):
                yield "\n"
                self._spaces, self._column = "", 0
        yield self._spaces_out() + word
        self._at_start = False
        self._column += width
        if self._column > columns:  # the terminal has broken it
            self._column = (self._column - 1) % columns + 1

    def _note_fence(self, word: str) -> None:
        """The first word of a line may begin or end a block of code."""
        if self._code:
            self._code = not (word.startswith(self._fence) and not word.strip(self._fence[0]))
        elif word.startswith(FENCES) and "`" not in word.lstrip("`"):  # else code within a line: ```x```
            self._code, self._fence = True, word[:3]

    def _spaces_out(self) -> str:
        spaces, self._spaces = self._spaces, ""
        self._column = self._column_after(spaces)
        return spaces

    def _column_after(self, spaces: str) -> int:
        column = self._column
        for character in spaces:
            column += TAB_STOP - column % TAB_STOP if character == "\t" else cell_len(character)
        return column


def wrap(text: str, columns: int) -> str:
    """``text`` with line breaks between words, so that no line is longer than ``columns``."""
    wrapper = WordWrapper(lambda: columns)
    return wrapper.push(text) + wrapper.end()

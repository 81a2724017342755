"""How an answer is shown while it is made, when the model thinks first.

On a terminal words wrap at its edge, the thinking is dim, and an empty line stands before the answer.
Elsewhere the text is as the model writes it, with the thinking between ``<think>`` and ``</think>``: nothing
is lost, and who wants only the answer takes what follows the tag, or ``--json``, which has the two apart.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol, TextIO

from xinfer_vk.cli.output import columns_of, printable
from xinfer_vk.text.thinking import CLOSE, OPEN, Piece

if TYPE_CHECKING:
    from xinfer_vk.cli.wrap import WordWrapper

DIM, NORMAL = "\x1b[2m", "\x1b[0m"


class Holdable(Protocol):
    """A progress bar, as far as it matters here: it shares the terminal with the answer."""

    def hold(self) -> None: ...

    def release(self) -> None: ...


class AnswerWriter:
    """Writes pieces to a stream, at once. :meth:`end` in any case, which puts a terminal's style back.

    ``progress``: a bar that must not appear from the first piece on a terminal to :meth:`end`.
    """

    def __init__(
        self, stream: TextIO, terminal: bool | None = None, progress: Holdable | None = None
    ) -> None:
        self._stream, self._terminal = stream, stream.isatty() if terminal is None else terminal
        coloured = self._terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._dim, self._normal = (DIM, NORMAL) if coloured else ("", "")
        self._thinking = False
        self._progress = progress if self._terminal else None
        self._wrapper: WordWrapper | None = None
        if self._terminal and columns_of(stream) is not None:
            from xinfer_vk.cli.wrap import WordWrapper

            self._wrapper = WordWrapper(lambda: columns_of(stream) or 80)
        self.at_start = True  # of a line

    def write(self, piece: Piece) -> None:
        """A piece of the thinking or of the answer."""
        if not piece:
            return
        if self._progress is not None:
            self._progress.hold()
        if piece.thinking and not self._thinking:
            self._put(self._held_back(ends=False) + (self._dim if self._terminal else f"{OPEN}\n"))
        elif self._thinking and not piece.thinking:
            close = f"{self._normal}\n\n" if self._terminal else f"\n{CLOSE}\n\n"
            self._put(self._held_back() + close)
        self._thinking = piece.thinking
        text = printable(piece) if self._terminal else piece
        self._put(text if self._wrapper is None else self._wrapper.push(text))
        self.at_start = piece.endswith("\n")

    def end(self, text: str = "") -> None:
        """The answer is over, whatever ended it; ``text`` follows it, the end of its line."""
        self._put(self._held_back() + (self._normal if self._thinking else "") + text)
        self._thinking, self.at_start = False, True
        if self._progress is not None:
            self._progress.release()

    def flush(self) -> None:
        """Write the last word now, though its end has not come: something else is about to be printed."""
        self._put(self._held_back(ends=False))

    def _held_back(self, ends: bool = True) -> str:
        """The last word, which was waiting for what follows it. ``ends``: a line begins after it."""
        if self._wrapper is None:
            return ""
        return self._wrapper.end() if ends else self._wrapper.flush()

    def _put(self, text: str) -> None:
        if text:
            self._stream.write(text)
            self._stream.flush()

"""How an answer is shown while it is made, when the model thinks first.

On a terminal the thinking is dim and an empty line stands before the answer. Elsewhere the text is as the
model writes it, with the thinking between ``<think>`` and ``</think>``: nothing is lost, and who wants only
the answer takes what follows the tag, or ``--json``, which has the two apart.
"""

from __future__ import annotations

import os
from typing import TextIO

from xinfer_vk.cli.output import printable
from xinfer_vk.text.thinking import CLOSE, OPEN, Piece

DIM, NORMAL = "\x1b[2m", "\x1b[0m"


class AnswerWriter:
    """Writes pieces to a stream, at once. :meth:`end` in any case, which puts a terminal's style back."""

    def __init__(self, stream: TextIO, terminal: bool | None = None) -> None:
        self._stream, self._terminal = stream, stream.isatty() if terminal is None else terminal
        coloured = self._terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._dim, self._normal = (DIM, NORMAL) if coloured else ("", "")
        self._thinking = False
        self.at_start = True  # of a line

    def write(self, piece: Piece) -> None:
        """A piece of the thinking or of the answer."""
        if not piece:
            return
        if piece.thinking and not self._thinking:
            self._put(self._dim if self._terminal else f"{OPEN}\n")
        elif self._thinking and not piece.thinking:
            self._put(f"{self._normal}\n\n" if self._terminal else f"\n{CLOSE}\n\n")
        self._thinking = piece.thinking
        self._put(printable(piece) if self._terminal else piece)
        self.at_start = piece.endswith("\n")

    def end(self) -> None:
        """The answer is over, whatever ended it."""
        if self._thinking:
            self._put(self._normal)
        self._thinking, self.at_start = False, True

    def _put(self, text: str) -> None:
        if text:
            self._stream.write(text)
            self._stream.flush()

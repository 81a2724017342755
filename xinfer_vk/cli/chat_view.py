"""What a chat shows: answers on standard output as they are made, all else on standard error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TextIO

from xinfer_vk.cli.answer import AnswerWriter, Holdable
from xinfer_vk.cli.output import printable, wrapped
from xinfer_vk.text.thinking import Piece

if TYPE_CHECKING:
    from rich.console import Console

Rows = Sequence[tuple[str, str]]


class View(Protocol):
    """Where a chat's output goes."""

    def piece(self, piece: Piece) -> None:
        """A piece of an answer, or of the thinking before it."""

    def end_answer(self) -> None:
        """The answer is over."""

    def notice(self, text: str) -> None:
        """Something the user should know."""

    def error(self, text: str) -> None:
        """Something that was not done."""

    def table(self, rows: Rows) -> None:
        """Names and what they are."""


def _write(stream: TextIO, text: str) -> None:
    stream.write(wrapped(printable(text), stream) if stream.isatty() else text)
    stream.flush()


class PlainView:
    """For pipes: answers as they are, each ended by a newline; notices as plain lines."""

    def __init__(
        self,
        out: TextIO | None = None,
        err: TextIO | None = None,
        quiet: bool = False,
        progress: Holdable | None = None,
    ) -> None:
        self._out, self._err, self._quiet = out or sys.stdout, err or sys.stderr, quiet
        self._answer = AnswerWriter(self._out, progress=progress)

    def piece(self, piece: Piece) -> None:
        self._answer.write(piece)

    def end_answer(self) -> None:
        self._answer.end("\n")

    def notice(self, text: str) -> None:
        if not self._quiet:
            self._tell(text)

    def error(self, text: str) -> None:
        self._tell(f"error: {text}")

    def table(self, rows: Rows) -> None:
        width = max(len(name) for name, _ in rows)
        for name, text in rows:
            self._tell(f"{name:<{width}}  {text}")

    def _tell(self, text: str) -> None:
        self._answer.flush()
        _write(self._err, text + "\n")


class TerminalView:
    """For people: answers as plain text, thinking dim, and notices in colours that set them apart."""

    def __init__(
        self,
        out: TextIO | None = None,
        console: Console | None = None,
        quiet: bool = False,
        progress: Holdable | None = None,
    ) -> None:
        from rich.console import Console

        self._out, self._quiet = out or sys.stdout, quiet
        self._console = console or Console(stderr=True, highlight=False)
        self._answer = AnswerWriter(self._out, terminal=True, progress=progress)

    def piece(self, piece: Piece) -> None:
        self._answer.write(piece)

    def end_answer(self) -> None:
        self._answer.end("\n" if self._answer.at_start else "\n\n")

    def notice(self, text: str) -> None:
        if not self._quiet:
            self._tell(text, "dim")

    def error(self, text: str) -> None:
        self._tell(f"error: {text}", "red")

    def table(self, rows: Rows) -> None:
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for name, text in rows:
            table.add_row(Text(printable(name), style="bold"), Text(printable(text), style="dim"))
        self._console.print(table)

    def _tell(self, text: str, style: str) -> None:
        from rich.text import Text

        self._console.print(Text(printable(text), style=style))

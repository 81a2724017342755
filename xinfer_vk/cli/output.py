"""Standard output and standard error, made safe once, at the start.

A disk that is full, a closed descriptor or an encoding without the character at hand must never look like
a bug, nor take away a result that is to be written elsewhere.
"""

from __future__ import annotations

import io
import json
import os
import select
import shutil
import sys
from typing import Any, TextIO

from xinfer_vk.errors import XinferError

# Control characters but newline and tab, as the pictures of them: a model must not steer the terminal.
PICTURES = {
    **{c: 0x2400 + c for c in range(0x20) if c not in (0x09, 0x0A)},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}


class OutputError(XinferError):
    """Standard output cannot be written."""


class ReaderGone(Exception):
    """The reader of a pipe has seen enough: no error of ours. (Click would make one of a BrokenPipeError.)"""


class _Results(io.FileIO):
    """Standard output's bytes. The first failure is raised, and what follows it is dropped: so the buffer
    above can be flushed at the end of the program."""

    problem: str | None = None  # known beforehand
    failed = False

    def write(self, data: Any, /) -> int:
        if self.failed:
            return len(data)
        try:
            if self.problem is not None:
                raise OSError(0, self.problem)
            while (written := super().write(data)) is None:  # a pipe that does not wait, and is full
                select.select((), (self.fileno(),), ())
            return written
        except BrokenPipeError:
            self.failed = True
            raise ReaderGone from None
        except OSError as error:
            self.failed = True
            raise OutputError(f"cannot write to standard output: {error.strerror or error}") from None


class _Notices(io.FileIO):
    """Standard error's bytes: what cannot be told is no reason to stop."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def guard_streams() -> None:
    """Put safe streams in place of the process's own; streams that somebody has replaced are left alone.

    Descriptors that were closed (``>&-``) are opened on the null device, lest the next file that is opened
    become standard output.
    """
    closed = [fd for fd in (0, 1, 2) if _fill(fd)]
    if sys.stdout is sys.__stdout__:
        raw = _Results(1, "w", closefd=False)
        if 1 in closed or sys.stdout is None:
            raw.problem = "it is closed"
        sys.stdout = _text(raw, sys.stdout, "replace")
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text(_Notices(2, "w", closefd=False), sys.stderr, "backslashreplace")


def _fill(fd: int) -> bool:
    """Open a closed descriptor on the null device; whether it was closed."""
    try:
        os.fstat(fd)
        return False
    except OSError:
        opened = os.open(os.devnull, os.O_RDWR)
        if opened != fd:
            os.dup2(opened, fd)
            os.close(opened)
        os.set_inheritable(fd, True)
        return True


def _text(raw: io.FileIO, before: TextIO | None, errors: str) -> TextIO:
    if before is not None:
        before.flush()
    encoding = "utf-8" if before is None else before.encoding
    lines = raw.isatty() or errors == "backslashreplace"
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=encoding, errors=errors, line_buffering=lines)


def say(text: str, end: str = "\n") -> None:
    """Print a result, at once. What a terminal would obey is shown, not sent; pipes get all of it."""
    sys.stdout.write((printable(text) if sys.stdout.isatty() else text) + end)
    sys.stdout.flush()


def say_json(record: Any) -> None:
    """Print a record as a line of JSON, in ASCII where standard output is not UTF-8."""
    say(json.dumps(record, ensure_ascii=not _is_utf8(sys.stdout)))


def terminal_columns() -> int | None:
    """How wide the terminal is that standard output goes to; None where it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def columns_of(stream: TextIO) -> int | None:
    """How wide the terminal is that a stream goes to; None where it is none, or does not say."""
    if not stream.isatty():
        return None
    if os.environ.get("COLUMNS", "").isdigit() and os.environ["COLUMNS"] != "0":
        return int(os.environ["COLUMNS"])
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return None


def wrapped(text: str, stream: TextIO) -> str:
    """``text`` with its lines broken between words where ``stream`` is a terminal."""
    columns = columns_of(stream)
    if columns is None or all(len(line) * 2 <= columns for line in text.splitlines()):
        return text
    from xinfer_vk.cli.wrap import wrap

    return wrap(text, columns)


def tell(text: str) -> None:
    """Print something the user should know to standard error."""
    sys.stderr.write(wrapped(text, sys.stderr) + "\n")
    sys.stderr.flush()


def printable(text: str) -> str:
    """``text`` without what a terminal would obey."""
    return text.translate(PICTURES)


def _is_utf8(stream: TextIO) -> bool:
    return (stream.encoding or "").lower().replace("-", "").replace("_", "") == "utf8"

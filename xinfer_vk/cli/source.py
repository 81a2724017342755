"""Text that a command works on: from a file, or from standard input."""

from __future__ import annotations

import codecs
import json
import sys
from pathlib import Path
from typing import Any

from xinfer_vk.errors import UsageError
from xinfer_vk.fields import quoted


def read_source(file: str | None, what: str, remedy: str) -> str:
    """The text of ``file``, or of standard input when it is None or "-", without a byte order mark. ``what``
    it is ("the prompt") and the ``remedy`` when there is nothing to read go into the errors.

    Raises :class:`UsageError` for a file that cannot be read or is not UTF-8, and for a terminal.
    """
    named = file is not None and file != "-"
    where = str(file) if named else "standard input"
    try:
        if named and "\0" in where:
            raise UsageError(f"cannot read {what} from {where!r}: the name holds a NUL")
        if named:
            data = Path(where).read_bytes()
        elif sys.stdin is None or sys.stdin.isatty():
            raise UsageError(remedy)
        else:
            data = sys.stdin.buffer.read()
    except OSError as error:
        raise UsageError(f"cannot read {what} from {where}: {error.strerror or error}") from error
    try:
        return data.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} from {where} is not UTF-8 (byte {error.start}): convert it") from error


def read_prompt(file: str | None) -> str:
    """A prompt, without the line break at its end."""
    remedy = "no prompt: give --prompt TEXT, --file FILE, or text on standard input"
    return read_source(file, "the prompt", remedy).rstrip("\r\n")


def check_unicode(value: Any, where: str) -> None:
    """Raise :class:`UsageError` if a text anywhere in ``value`` is no Unicode: half of a surrogate pair,
    which JSON can write as ``\\ud800``, and which stands for a byte that is not UTF-8 in an argument."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{where}: not valid Unicode: {quoted(text[error.start])} is half of a character, or no UTF-8"
        ) from None

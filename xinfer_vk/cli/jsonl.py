"""Prompts from a JSON-lines file, and results to one, in the order of the prompts."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from xinfer_vk.cli.logit_bias import bias_from_json
from xinfer_vk.cli.output import say_json
from xinfer_vk.cli.source import check_unicode
from xinfer_vk.errors import ModelError, UsageError, XinferError
from xinfer_vk.fields import parse_json_value

OWN_FIELDS = ("prompt", "system", "id")
STANDARD = "-"  # standard input or output, instead of a file


@dataclass(frozen=True)
class PromptLine:
    """One line: ``prompt`` is required, ``system`` and ``id`` are its own, ``fields`` are sampling
    parameters for this prompt. ``where`` names the file and line."""

    where: str
    prompt: str
    system: str | None
    id: Any
    fields: dict[str, Any]


def read_prompts(path: str) -> Iterator[PromptLine | UsageError]:
    """Each line's prompt, or what is wrong with it; blank lines are passed over.

    A line is a JSON object ``{"prompt": …, "system": …, "id": …, "temperature": …}`` or a JSON string.
    Raises :class:`UsageError` when the file cannot be read at all.
    """
    try:
        if path != STANDARD:
            data = Path(path).read_bytes()
        elif sys.stdin is None:
            raise UsageError("cannot read prompts from standard input: it is closed")
        else:
            data = sys.stdin.buffer.read()
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"cannot read prompts from {path}: {getattr(error, 'strerror', None) or error}"
        ) from error
    for number, raw in enumerate(data.removeprefix(codecs.BOM_UTF8).splitlines(), 1):
        if not raw.strip():
            continue
        try:
            yield _parse(raw, f"{path}:{number}")
        except UsageError as error:
            yield error


def _parse(raw: bytes, where: str) -> PromptLine:
    try:
        value = parse_json_value(raw, where)
    except ModelError as error:
        raise UsageError(str(error)) from error
    check_unicode(value, where)
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict):
        raise UsageError(f'{where}: must be an object with "prompt", or a string')
    prompt, system = value.get("prompt"), value.get("system")
    if not isinstance(prompt, str) or not prompt:
        raise UsageError(f'{where}: "prompt" must be a text that is not empty')
    if system is not None and not isinstance(system, str):
        raise UsageError(f'{where}: "system" must be a text')
    fields = {key: field for key, field in value.items() if key not in OWN_FIELDS}
    if "logit_bias" in fields:
        fields["logit_bias"] = bias_from_json(fields["logit_bias"])
    return PromptLine(where, prompt, system, value.get("id"), fields)


def check_output(path: str) -> None:
    """Raise :class:`UsageError` if results cannot be written to ``path``. What is there stays as it is."""
    if path == STANDARD:
        return
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            if os.path.isdir(path):
                raise UsageError(f"cannot write to {path}: it is a directory")
            return  # a device or a pipe, which somebody may be listening to: opening it is noticed
        new = not os.path.exists(path)
        with open(path, "ab"):
            pass
        if new:
            os.unlink(path)
    except OSError as error:
        raise UsageError(f"cannot write to {path}: {error.strerror or error}") from error
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"cannot write to {path!r}: {error}") from error


class OrderedWriter:
    """Writes records as lines of JSON in the order of their numbers, each as soon as those before it
    are written; :meth:`close` writes what is left, so that nothing generated is lost.

    The file is opened, and what it held before is gone, when there is a first record. "-" is standard
    output. Raises :class:`XinferError` for what cannot be written, once.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._waiting: dict[int, dict[str, Any]] = {}
        self._next = 0
        self._file: IO[str] | None = None
        self._failed = False

    def write(self, number: int, record: dict[str, Any]) -> None:
        self._waiting[number] = record
        while self._next in self._waiting:
            self._put(self._waiting.pop(self._next))
            self._next += 1

    def _put(self, record: dict[str, Any]) -> None:
        if self._failed:
            return
        if self.path == STANDARD:
            say_json(record)
            return
        try:
            if self._file is None:
                self._file = open(self.path, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
            self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            self._failed = True
            raise XinferError(f"cannot write to {self.path}: {error.strerror or error}") from error

    def close(self) -> None:
        for number in sorted(self._waiting):
            self._put(self._waiting.pop(number))
        if self._file is not None:
            with contextlib.suppress(OSError):  # every line was flushed: this is what failed already
                self._file.close()

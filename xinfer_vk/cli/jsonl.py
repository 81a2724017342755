"""Prompts from a JSON-lines file, and results to one: as they end, or in the order of the prompts."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
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
    parameters for this prompt. ``where`` names the file and line, ``index`` counts prompts from 0."""

    where: str
    prompt: str
    system: str | None
    id: Any
    fields: dict[str, Any]
    index: int = 0


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
    index = -1  # of a bad line, too: an index stays the same when the line is mended
    for number, raw in enumerate(data.removeprefix(codecs.BOM_UTF8).splitlines(), 1):
        if not raw.strip():
            continue
        index += 1
        try:
            yield _parse(raw, f"{path}:{number}", index)
        except UsageError as error:
            yield error


def _parse(raw: bytes, where: str, index: int) -> PromptLine:
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
    return PromptLine(where, prompt, system, value.get("id"), fields, index)


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


COMPLETE = ("stop", "length")  # finish reasons of results that --resume does not run again


def resume(path: str, lines: Sequence[PromptLine], samples: int) -> list[PromptLine]:
    """The prompts that have no complete result in ``path`` yet, with all their samples.

    What else the file holds (a last line torn by a kill, results that were interrupted or failed) is taken
    out of it first. Raises :class:`UsageError` for a file that holds no results of these prompts.
    """
    if path == STANDARD:
        raise UsageError("--resume needs a file that --output names, not -")
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        return list(lines)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    prompts = {line.index: line for line in lines}
    found: dict[int, dict[int, bytes]] = {}  # by index and sample
    raw_lines = data.split(b"\n")
    for number, raw in enumerate(raw_lines, 1):
        if not raw.strip():
            continue
        record = _result(raw, f"{path}:{number}", torn=number == len(raw_lines))
        if record is None:
            continue
        line = prompts.get(record["index"])
        if line is not None and record["prompt"] != line.prompt:
            raise UsageError(
                f"{path}:{number} answers another prompt than {line.where}: --resume needs the prompts that "
                "the results were made from; write to another --output"
            )
        if record["finish_reason"] in COMPLETE:
            found.setdefault(record["index"], {})[record["sample"]] = raw
    done = {index for index, results in found.items() if set(range(samples)) <= set(results)}
    kept = [raw for index, results in found.items() if index in done for raw in results.values()]
    _replace(path, data, b"".join(raw + b"\n" for raw in kept))
    return [line for line in lines if line.index not in done]


def _result(raw: bytes, where: str, torn: bool) -> dict[str, Any] | None:
    """A line of results; None for one that a kill has ``torn``."""
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        if torn:
            return None
        record = None
    kinds = {"index": int, "sample": int, "prompt": str, "finish_reason": str}
    if not isinstance(record, dict) or any(not isinstance(record.get(k), t) for k, t in kinds.items()):
        raise UsageError(
            f'{where} is not a result with "index", "sample", "prompt" and "finish_reason": --resume goes on '
            "with a file that --output wrote; name another --output"
        )
    return record


def _replace(path: str, before: bytes, after: bytes) -> None:
    """Replace a file, whole or not at all; nothing if it holds that already."""
    if before == after:
        return
    target = os.path.realpath(path)  # a link stays a link
    beside = f"{target}.{os.getpid()}.tmp"
    try:
        with open(beside, "xb") as file:
            file.write(after)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise UsageError(f"cannot write to {path}: {error.strerror or error}") from error


class ResultWriter:
    """Writes records as lines of JSON, each as it comes, so that a kill costs no result that has ended.

    ``ordered``: in the order of their numbers instead, ``numbers``, each as soon as those before it are
    written; :meth:`close` writes what is left. ``resumed``: behind what the file holds; otherwise what it
    held is gone when there is a first record. "-" is standard output. Raises :class:`XinferError` for what
    cannot be written, once.
    """

    def __init__(
        self, path: str, *, ordered: bool = False, numbers: Sequence[int] = (), resumed: bool = False
    ) -> None:
        self.path, self._ordered = path, ordered
        self._mode = "a" if resumed else "w"
        self._waiting: dict[int, dict[str, Any]] = {}
        self._numbers = list(reversed(numbers))  # still to come, the next one last
        self._file: IO[str] | None = None
        self._failed = False

    def write(self, number: int, record: dict[str, Any]) -> None:
        if not self._ordered:
            self._put(record)
            return
        self._waiting[number] = record
        while self._numbers and self._numbers[-1] in self._waiting:
            self._put(self._waiting.pop(self._numbers.pop()))

    def _put(self, record: dict[str, Any]) -> None:
        if self._failed:
            return
        if self.path == STANDARD:
            say_json(record)
            return
        try:
            if self._file is None:
                self._file = open(self.path, self._mode, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
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

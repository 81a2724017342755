"""Prompts from a JSON-lines file, and results to one, in the order of the prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from xinfer_vk.errors import UsageError, XinferError

OWN_FIELDS = ("prompt", "system", "id")


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
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read prompts from {path}: {error.strerror or error}") from error
    for number, raw in enumerate(data.splitlines(), 1):
        if not raw.strip():
            continue
        where = f"{path}:{number}"
        try:
            yield _parse(raw, where)
        except UsageError as error:
            yield error


def _parse(raw: bytes, where: str) -> PromptLine:
    try:
        value = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: is not UTF-8 (byte {error.start} of the line)") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: is not JSON: {error}") from error
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict):
        raise UsageError(f'{where}: must be an object with "prompt", or a string')
    prompt, system = value.get("prompt"), value.get("system")
    if not isinstance(prompt, str) or not prompt.strip():
        raise UsageError(f'{where}: "prompt" must be a text that is not empty')
    if system is not None and not isinstance(system, str):
        raise UsageError(f'{where}: "system" must be a text')
    fields = {key: field for key, field in value.items() if key not in OWN_FIELDS}
    if "logit_bias" in fields:
        fields["logit_bias"] = _token_keys(fields["logit_bias"], where)
    return PromptLine(where, prompt, system, value.get("id"), fields)


def _token_keys(bias: Any, where: str) -> dict[int, Any]:
    """JSON has only text for keys."""
    try:
        return {int(token): value for token, value in bias.items()}
    except (AttributeError, ValueError):
        raise UsageError(f'{where}: "logit_bias" must map token ids to numbers') from None


class OrderedWriter:
    """Writes records as lines of JSON in the order of their numbers, each as soon as those before it
    are written; :meth:`close` writes what is left, so that nothing generated is lost."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._waiting: dict[int, dict[str, Any]] = {}
        self._next = 0
        try:
            self._file: IO[str] = open(path, "w", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise UsageError(f"cannot write to {path}: {error.strerror or error}") from error

    def write(self, number: int, record: dict[str, Any]) -> None:
        self._waiting[number] = record
        while self._next in self._waiting:
            self._put(self._waiting.pop(self._next))
            self._next += 1

    def _put(self, record: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise XinferError(f"cannot write to {self.path}: {error.strerror or error}") from error

    def close(self) -> None:
        for number in sorted(self._waiting):
            self._put(self._waiting.pop(number))
        self._file.close()

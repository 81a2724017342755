"""``/save`` and ``/load``: a conversation as a JSON file."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xinfer_vk.cli.chat_settings import settings_from_record, settings_record
from xinfer_vk.engine.session import read_messages
from xinfer_vk.errors import ModelError, UsageError
from xinfer_vk.fields import parse_json, quoted
from xinfer_vk.sampling.params import SamplingParams
from xinfer_vk.weights.mapped import read_small_file

FORMAT = "xinfer-vk chat"
VERSION = 1
MAX_BYTES = 1 << 26


@dataclass(frozen=True)
class SavedChat:
    """``messages`` are a conversation that :func:`~xinfer_vk.engine.session.read_messages` has read."""

    model: str
    params: SamplingParams
    messages: Sequence[Mapping[str, Any]]


def save_chat(path: Path, chat: SavedChat, *, overwrite: bool = False) -> None:
    """Write the file, whole or not at all. Raises :class:`UsageError` if it exists and ``overwrite`` was
    not said, or if it cannot be written."""
    record = {
        "format": FORMAT,
        "version": VERSION,
        "model": chat.model,
        "settings": settings_record(chat.params),
        "messages": list(chat.messages),
    }
    try:
        path = path.resolve()  # a link stays a link
        if path.exists() and not overwrite:
            raise UsageError(f"{path} exists: /save -f {path} overwrites it")
        _write_atomically(path, json.dumps(record, ensure_ascii=False, indent=2) + "\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{path} cannot be written: {quoted(error.object[error.start])} in it is no UTF-8"
        ) from error


def _write_atomically(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(beside, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if path.is_dir():
            raise IsADirectoryError(0, "it is a directory")
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def load_chat(path: Path) -> SavedChat:
    """Read and check a saved conversation. Raises :class:`UsageError`, one line that names the file, for
    anything that :func:`save_chat` would not have written."""
    try:
        record = parse_json(read_small_file(path, MAX_BYTES), str(path))
    except ModelError as error:
        raise UsageError(str(error)) from error
    if record.get("format") != FORMAT:
        raise UsageError(f"{path}: is not a saved chat: its format is {quoted(record.get('format'))}")
    if record.get("version") != VERSION:
        raise UsageError(
            f"{path}: is of version {quoted(record.get('version'))}, and this program reads version {VERSION}"
        )
    model, settings, messages = (record.get(key) for key in ("model", "settings", "messages"))
    for key, value, kind in (
        ("model", model, str),
        ("settings", settings, dict),
        ("messages", messages, list),
    ):
        if not isinstance(value, kind):
            raise UsageError(f"{path}: {key} is {quoted(value)}, {_KINDS[kind]} was expected")
    assert isinstance(model, str) and isinstance(settings, dict) and isinstance(messages, list)
    try:
        read_messages(messages)
        return SavedChat(model, settings_from_record(settings), messages)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


_KINDS: dict[type, str] = {str: "a text", dict: "an object", list: "a list"}

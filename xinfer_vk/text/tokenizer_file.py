"""What ``tokenizer.json`` may not say, because the ``tokenizers`` library ends the process over it.

Its panics arrive as exceptions (:mod:`xinfer_vk.text.guard`), except two that nobody can catch: a panic while
it handles a panic, and memory that is not there. Found by changing field after field in a child process.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from typing import Any

from xinfer_vk.errors import ModelError
from xinfer_vk.fields import quoted

PREFIX, CHARSMAP = "continuing_subword_prefix", "precompiled_charsmap"

# A file of 17 MB is read as JSON only where it may have one of these: as they stand, or with letters escaped.
SUSPECT = re.compile(rb'"continuing_subword_prefix"\s*:\s*"[^"]|"precompiled_charsmap"|\\u00[2-7]')


def refuse_fatal_fields(data: bytes, where: str) -> None:
    """Raise :class:`ModelError` for a field of ``tokenizer.json`` that would end the process. What is no JSON
    passes: the library tells what is wrong with it."""
    if SUSPECT.search(data) is None:
        return

    def look(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, value in pairs:  # of every object, also where a key occurs twice
            if key == PREFIX and value and isinstance(value, str) and ("type", "WordPiece") not in pairs:
                raise ModelError(
                    f"{where}: {PREFIX} is {quoted(value)}: BPE with such a prefix is not supported"
                )
            if key == CHARSMAP and isinstance(value, str):
                check_charsmap(_decoded(value), f"{where}: {CHARSMAP}")
        return dict(pairs)

    try:
        json.loads(data, object_pairs_hook=look)
    except (ValueError, RecursionError):
        return


def check_charsmap(data: bytes, where: str) -> None:
    """Raise :class:`ModelError` unless SentencePiece's map of characters (the size of a table of 4-byte
    units, the table, texts) holds the table that it announces."""
    size = int.from_bytes(data[:4], "little")
    if len(data) < 4 or size > len(data) - 4 or size % 4:
        raise ModelError(f"{where} is damaged: it has {len(data)} bytes, and its table would have {size}")


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""

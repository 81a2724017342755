"""What bytes a token stands for, as the tokenizer's own decoder has it.

``tokenizers`` decodes whole sequences to text; a stream needs the bytes of one token, which may be half a
character. Two decoders cover the supported models: byte-level BPE, and SentencePiece's, where "▁" is a
space, ``<0x0A>`` a byte, and one space at the start of the text is dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xinfer_vk.errors import ModelError
from xinfer_vk.fields import quoted
from xinfer_vk.text.byte_level import token_to_bytes

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Pieces:
    """``to_bytes`` maps a token of the vocabulary (not an added token: those are their own text) to its
    bytes. ``drop_first_space``: if the text begins with a space, that space is not part of it."""

    to_bytes: Callable[[str], bytes]
    drop_first_space: bool = False


BYTE_LEVEL = Pieces(token_to_bytes)


def sentencepiece_pieces(space: str, byte_tokens: bool, drop_first_space: bool) -> Pieces:
    """SentencePiece's pieces, in which ``space`` stands for a space, and ``<0x0A>`` for a byte if there are
    such tokens."""

    def to_bytes(token: str) -> bytes:
        byte = BYTE_TOKEN.fullmatch(token) if byte_tokens else None
        return bytes([int(byte[1], 16)]) if byte else token.replace(space, " ").encode("utf-8")

    return Pieces(to_bytes, drop_first_space)


def pieces_of(backend: Any, where: str) -> Pieces:
    """What the tokens of a ``tokenizers`` tokenizer stand for. The way from text to tokens decides: some
    files have a decoder of the other kind. Raises :class:`ModelError` for a decoder that is not supported."""
    if backend.decoder is None:
        raise ModelError(f"{where}: has no decoder; byte-level and SentencePiece tokenizers are supported")
    before = _steps(backend.normalizer, "normalizers") + _steps(backend.pre_tokenizer, "pretokenizers")
    if any(step["type"] == "ByteLevel" for step in before):
        return BYTE_LEVEL
    steps = _steps(backend.decoder, "decoders")
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        spaced = next((step for step in before if step["type"] == "Metaspace"), None)
        if spaced is None:
            return BYTE_LEVEL
        first = spaced.get("prepend_scheme") != "never"
        return sentencepiece_pieces(
            spaced["replacement"], bool(getattr(backend.model, "byte_fallback", 0)), first
        )
    space, drop_first_space = "", False
    for step in steps:
        if step["type"] == "Replace" and step["content"] == " " and "String" in step["pattern"]:
            space = step["pattern"]["String"]
        elif step["type"] == "Strip" and (step["content"], step["start"], step["stop"]) == (" ", 1, 0):
            drop_first_space = True
        elif step["type"] == "Metaspace":
            space, drop_first_space = step["replacement"], step.get("prepend_scheme") != "never"
        elif step["type"] not in ("ByteFallback", "Fuse"):
            raise ModelError(
                f"{where}: the decoder {quoted(step['type'])} is not supported; byte-level and SentencePiece "
                "tokenizers are"
            )
    dropped_last = not drop_first_space or kinds[-1] in ("Strip", "Metaspace")
    if not space or not ("Metaspace" in kinds or kinds[0] == "Replace") or not dropped_last:
        raise ModelError(f"{where}: the decoder {' + '.join(kinds)} is not supported")
    return sentencepiece_pieces(space, "ByteFallback" in kinds, drop_first_space)


def _steps(part: Any, kind: str) -> list[dict[str, Any]]:
    """The steps of a part of the pipeline, each with its "type"."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    return list(state[kind]) if state["type"] == "Sequence" else [state]

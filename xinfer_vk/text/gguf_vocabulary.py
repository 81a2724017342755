"""The tokens a GGUF file lists in its metadata: their texts and types, checked.

Keys as in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from xinfer_vk.errors import ModelError
from xinfer_vk.fields import Fields, quoted

TOKENS, TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"

# Types of tokens.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@dataclass(frozen=True)
class Vocabulary:
    """``tokens`` and their ``types`` by id; ``ids``: token to id, without the unused entries, which only fill
    up the embedding."""

    tokens: list[str]
    types: list[int]
    ids: dict[str, int]


def read_vocabulary(fields: Fields) -> Vocabulary:
    """Raises :class:`ModelError` for lists that are missing, of the wrong type, or contradict each other."""
    tokens = texts(fields, TOKENS)
    types = _types(fields, len(tokens))
    return Vocabulary(tokens, types, _numbered(tokens, types, fields.where))


def texts(fields: Fields, key: str) -> list[str]:
    values = fields.raw(key)
    if not isinstance(values, list) or not values or set(map(type, values)) != {str}:
        raise fields.wrong(key, "a list of texts was expected")
    return values


def _types(fields: Fields, count: int) -> list[int]:
    """The type of every token; all normal if the file does not say."""
    if TYPES not in fields:
        return [NORMAL] * count
    types = fields.raw(TYPES)
    if not isinstance(types, list) or set(map(type, types)) - {int}:
        raise fields.wrong(TYPES, "a list of numbers was expected")
    if len(types) != count:
        raise ModelError(f"{fields.where}: {TYPES} has {len(types)} entries for {count} tokens")
    wrong = set(types) - {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE}
    if wrong:
        raise ModelError(f"{fields.where}: {TYPES} has the type {min(wrong)}, known are {NORMAL} to {BYTE}")
    return types


def _numbered(tokens: list[str], types: list[int], where: str) -> dict[str, int]:
    """Token to id, of those in use."""
    if UNUSED in types:
        ids = {token: i for i, token in enumerate(tokens) if types[i] != UNUSED}
        count = len(types) - types.count(UNUSED)
    else:
        ids = dict(zip(tokens, range(len(tokens))))
        count = len(tokens)
    if "" in ids:
        raise ModelError(f"{where}: {TOKENS} has an empty token, id {ids['']}")
    if len(ids) != count:
        first: dict[str, int] = {}
        for i, token in enumerate(tokens):
            if types[i] != UNUSED and first.setdefault(token, i) != i:
                raise ModelError(f"{where}: {TOKENS} has {quoted(token)} twice, as {first[token]} and {i}")
    return ids

"""Builds the tokenizer that a GGUF file describes in its metadata.

The file lists the tokens, their types, and the merges of a byte-level BPE, and names the rest: the
pre-tokenizer (:mod:`xinfer_vk.text.pretokenizers`) and the special tokens' ids. Keys as in
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xinfer_vk.errors import ModelError
from xinfer_vk.fields import Fields, quoted
from xinfer_vk.text.guard import guarded
from xinfer_vk.text.pieces import BYTE_LEVEL
from xinfer_vk.text.pretokenizers import PreTokenization, pre_tokenization
from xinfer_vk.text.tokenizer import Tokenizer

TOKENS, TYPES, MERGES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges"

# Types of tokens.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# Templates' name of a token, and the key that has its id.
NAMED_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "sep_token": "tokenizer.ggml.seperator_token_id",  # spelled so in the specification
    "pad_token": "tokenizer.ggml.padding_token_id",
}
END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")

# Files written before there was a key for the end of a turn say it by the token's name only.
END_OF_TURN_NAMES = ("<|eot_id|>", "<|im_end|>")


def tokenizer_from_gguf(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """The tokenizer of a GGUF file; ``where`` names the file in errors.

    Raises :class:`ModelError` for a kind of tokenizer that is not supported, and for metadata that is
    missing, of the wrong type, or contradicts itself.
    """
    fields = Fields(metadata, where)
    if "tokenizer.ggml.model" not in fields:
        raise ModelError(f"{where}: has no tokenizer: the key 'tokenizer.ggml.model' is missing")
    kind = fields.text("tokenizer.ggml.model")
    if kind != "gpt2":
        known = {"llama": " (SentencePiece)", "bert": " (WordPiece)", "t5": " (Unigram)"}.get(kind, "")
        raise ModelError(
            f"{where}: tokenizer.ggml.model is {quoted(kind)}{known}, supported: gpt2 (byte-level BPE)"
        )
    pre = fields.text("tokenizer.ggml.pre") if "tokenizer.ggml.pre" in fields else None
    rules = pre_tokenization(pre, where)
    tokens = _texts(fields, TOKENS)
    types = _types(fields, len(tokens))
    ids = _numbered(tokens, types, where)
    backend = _backend(tokens, types, ids, _merges(fields, ids), rules, where)

    named = {name: _token_id(fields, key, len(tokens)) for name, key in NAMED_TOKENS.items()}
    add_bos = fields.flag("tokenizer.ggml.add_bos_token", rules.add_bos)
    add_eos = fields.flag("tokenizer.ggml.add_eos_token", False)
    ends = {_token_id(fields, key, len(tokens)) for key in END_KEYS}
    if "tokenizer.ggml.eot_token_id" not in fields:
        ends |= {i for i in map(ids.get, END_OF_TURN_NAMES) if i is not None and types[i] == CONTROL}
    return Tokenizer(
        backend,
        BYTE_LEVEL,
        where,
        prefix=[_required(fields, "bos", named)] if add_bos else [],
        suffix=[_required(fields, "eos", named)] if add_eos else [],
        bos_id=named["bos_token"],
        eos_ids=[i for i in ends if i is not None],
        special_texts=named_texts(metadata),
    )


def named_texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The texts of the special tokens that have a name, ``{"bos_token": "<|im_start|>", …}``."""
    tokens = metadata.get(TOKENS)
    if not isinstance(tokens, list):
        return {}
    ids = {name: metadata.get(key) for name, key in NAMED_TOKENS.items()}
    known = {name: tokens[i] for name, i in ids.items() if type(i) is int and 0 <= i < len(tokens)}
    return {name: text for name, text in known.items() if isinstance(text, str)}


def _texts(fields: Fields, key: str) -> list[str]:
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
    """Token to id. Unused entries only fill up the embedding, they are no tokens."""
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


def _merges(fields: Fields, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """The pairs to merge, in order of rank; each pair and what it makes are tokens."""
    if fields.raw(MERGES, []) == []:
        return []
    merges = []
    for rank, text in enumerate(_texts(fields, MERGES)):
        left, _, right = text.partition(" ")
        if left not in ids or right not in ids or left + right not in ids:
            raise ModelError(
                f"{fields.where}: {MERGES} entry {rank} is {quoted(text)}, "
                "two tokens that make a third were expected"
            )
        merges.append((left, right))
    if len(set(merges)) != len(merges):
        seen: dict[tuple[str, str], int] = {}
        rank = next(rank for rank, pair in enumerate(merges) if seen.setdefault(pair, rank) != rank)
        raise ModelError(
            f"{fields.where}: {MERGES} has {quoted(' '.join(merges[rank]))} twice, "
            f"as entries {seen[merges[rank]]} and {rank}"
        )
    return merges


def _backend(
    tokens: list[str],
    types: list[int],
    ids: dict[str, int],
    merges: list[tuple[str, str]],
    rules: PreTokenization,
    where: str,
) -> Any:
    from tokenizers import AddedToken, decoders, models
    from tokenizers import Tokenizer as Backend

    options = {"ignore_merges": rules.ignore_merges}
    model = guarded(where, "the tokenizer is damaged", models.BPE, ids, merges, **options)
    backend = Backend(model)
    normalizer = rules.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = rules.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    added = [
        AddedToken(tokens[i], special=kind != USER_DEFINED, normalized=False)
        for i, kind in enumerate(types)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    guarded(where, "the added tokens are damaged", backend.add_tokens, added)
    return backend


def _token_id(fields: Fields, key: str, count: int) -> int | None:
    """A token id; None if there is none, or if it is none of this vocabulary."""
    if key not in fields:
        return None
    value = fields.integer(key, low=-(2**63), high=2**64 - 1)
    return value if 0 <= value < count else None


def _required(fields: Fields, name: str, named: Mapping[str, int | None]) -> int:
    """The id of a token that goes with every text."""
    found = named[f"{name}_token"]
    if found is None:
        key = NAMED_TOKENS[f"{name}_token"]
        raise ModelError(
            f"{fields.where}: {key} is {quoted(fields.values.get(key))}, no token of this vocabulary, "
            f"and tokenizer.ggml.add_{name}_token wants it with every text"
        )
    return found

"""Builds the tokenizer that a GGUF file describes in its metadata.

The file lists the tokens and their types (:mod:`xinfer_vk.text.gguf_vocabulary`) and the special tokens' ids.
A byte-level BPE has its merges too, and the name of its pre-tokenizer (:mod:`xinfer_vk.text.pretokenizers`);
SentencePiece's tokenizers have scores (:mod:`xinfer_vk.text.gguf_sentencepiece`). Keys as in
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xinfer_vk.errors import ModelError
from xinfer_vk.fields import Fields, quoted
from xinfer_vk.text.eos import ends_by_name
from xinfer_vk.text.gguf_sentencepiece import sentencepiece_backend
from xinfer_vk.text.gguf_vocabulary import (
    CONTROL,
    TOKENS,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    read_vocabulary,
    texts,
)
from xinfer_vk.text.guard import guarded
from xinfer_vk.text.pieces import BYTE_LEVEL
from xinfer_vk.text.pretokenizers import PreTokenization, pre_tokenization
from xinfer_vk.text.tokenizer import Tokenizer

MERGES = "tokenizer.ggml.merges"

# Templates' name of a token, and the key that has its id.
NAMED_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "sep_token": "tokenizer.ggml.seperator_token_id",  # spelled so in the specification
    "pad_token": "tokenizer.ggml.padding_token_id",
}
END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


@dataclass(frozen=True)
class Kind:
    """What holds for a kind of tokenizer unless the file says otherwise: the ids of named tokens, and whether
    a begin and an end of sequence go with every text. As in llama.cpp."""

    ids: Mapping[str, int]
    add_bos: bool
    add_eos: bool


KINDS = {
    "gpt2": Kind({}, False, False),  # byte-level BPE
    "llama": Kind({"bos_token": 1, "eos_token": 2, "unk_token": 0}, True, False),  # SentencePiece's BPE
    "t5": Kind({"eos_token": 1, "unk_token": 2, "pad_token": 0}, False, True),  # SentencePiece's Unigram
}


def tokenizer_from_gguf(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """The tokenizer of a GGUF file; ``where`` names the file in errors.

    Raises :class:`ModelError` for a kind of tokenizer that is not supported, and for metadata that is
    missing, of the wrong type, or contradicts itself.
    """
    fields = Fields(metadata, where)
    if "tokenizer.ggml.model" not in fields:
        raise ModelError(f"{where}: has no tokenizer: the key 'tokenizer.ggml.model' is missing")
    name = fields.text("tokenizer.ggml.model")
    if name not in KINDS:
        known = " (WordPiece)" if name == "bert" else ""
        raise ModelError(
            f"{where}: tokenizer.ggml.model is {quoted(name)}{known}, supported: gpt2 (byte-level BPE), "
            "llama (SentencePiece), t5 (Unigram)"
        )
    kind = KINDS[name]
    named: dict[str, int | None]
    if name == "gpt2":
        pre = fields.text("tokenizer.ggml.pre") if "tokenizer.ggml.pre" in fields else None
        rules = pre_tokenization(pre, where)
        vocabulary = read_vocabulary(fields)
        named = _named(fields, kind, len(vocabulary.tokens))
        backend, pieces = _byte_level(fields, vocabulary, rules), BYTE_LEVEL
        kind = dataclasses.replace(kind, add_bos=rules.add_bos)
    else:
        vocabulary = read_vocabulary(fields)
        named = _named(fields, kind, len(vocabulary.tokens))
        backend, pieces = sentencepiece_backend(fields, vocabulary, named["unk_token"])

    tokens = vocabulary.tokens
    add_bos = fields.flag("tokenizer.ggml.add_bos_token", kind.add_bos)
    add_eos = fields.flag("tokenizer.ggml.add_eos_token", kind.add_eos)
    ends = {_token_id(fields, key, None, len(tokens)) for key in END_KEYS} | {named["eos_token"]}
    ends |= ends_by_name(tokens)  # whatever their type: converters get it wrong, and keys name one of several
    return Tokenizer(
        backend,
        pieces,
        where,
        prefix=[_required(fields, "bos", named)] if add_bos else [],
        suffix=[_required(fields, "eos", named)] if add_eos else [],
        bos_id=named["bos_token"],
        eos_ids=[i for i in ends if i is not None],
        special_texts=named_texts(metadata),
    )


def named_texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The texts of the special tokens that have a name, ``{"bos_token": "<|im_start|>", …}``."""
    tokens, kind = metadata.get(TOKENS), metadata.get("tokenizer.ggml.model")
    if not isinstance(tokens, list):
        return {}
    default = KINDS[kind].ids if isinstance(kind, str) and kind in KINDS else {}
    ids = {
        name: default.get(name) if (i := metadata.get(key)) is None else i
        for name, key in NAMED_TOKENS.items()
    }
    known = {name: tokens[i] for name, i in ids.items() if type(i) is int and 0 <= i < len(tokens)}
    return {name: text for name, text in known.items() if isinstance(text, str)}


def _named(fields: Fields, kind: Kind, count: int) -> dict[str, int | None]:
    return {name: _token_id(fields, key, kind.ids.get(name), count) for name, key in NAMED_TOKENS.items()}


def _merges(fields: Fields, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """The pairs to merge, in order of rank; each pair and what it makes are tokens."""
    if fields.raw(MERGES, []) == []:
        return []
    merges = []
    for rank, text in enumerate(texts(fields, MERGES)):
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


def _byte_level(fields: Fields, vocabulary: Vocabulary, rules: PreTokenization) -> Any:
    """The ``tokenizers`` pipeline of a byte-level BPE."""
    from tokenizers import AddedToken, decoders, models
    from tokenizers import Tokenizer as Backend

    where, ids, merges = fields.where, vocabulary.ids, _merges(fields, vocabulary.ids)
    options = {"ignore_merges": rules.ignore_merges}
    model = guarded(where, "the tokenizer is damaged", models.BPE, ids, merges, **options)
    backend = Backend(model)
    normalizer = rules.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = rules.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    added = [
        AddedToken(text, special=kind != USER_DEFINED, normalized=False)
        for text, kind in zip(vocabulary.tokens, vocabulary.types)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    guarded(where, "the added tokens are damaged", backend.add_tokens, added)
    return backend


def _token_id(fields: Fields, key: str, default: int | None, count: int) -> int | None:
    """A token id; None if there is none, or if it is none of this vocabulary."""
    value = fields.integer(key, default, low=-(2**63), high=2**64 - 1)
    return value if value is not None and 0 <= value < count else None


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

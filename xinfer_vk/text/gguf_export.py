"""The tokenizer and the chat template of a Hugging Face directory as metadata of a GGUF file: what
:mod:`xinfer_vk.text.gguf_tokenizer` reads.

A GGUF file does not say how text is cut into words, only the name of the way. Which name fits is found by
cutting a text that holds what the ways differ in, as llama.cpp's converter does.
"""

from __future__ import annotations

import json
from typing import Any

from xinfer_vk.errors import ModelError
from xinfer_vk.fields import quoted
from xinfer_vk.text.chat import GGUF_KEY, ChatTemplate
from xinfer_vk.text.gguf_tokenizer import END_KEYS, MERGES, NAMED_TOKENS
from xinfer_vk.text.gguf_vocabulary import CONTROL, NORMAL, TOKENS, TYPES, UNUSED, USER_DEFINED
from xinfer_vk.text.pieces import BYTE_LEVEL
from xinfer_vk.text.pretokenizers import BY_NAME
from xinfer_vk.text.tokenizer import Tokenizer, eos_ids, load_tokenizer
from xinfer_vk.weights.source import ModelSource

# Runs of spaces and line breaks, digits by one to seven, contractions in both cases, words and signs
# beside each other, scripts with and without case, combining marks in both normal forms, emoji.
CUTS = (
    "Hello  world   \n\n \n\t\t x\r\n  y \n   z    . 1 12 123 1234 12345 1234567 3.14 1,000x2y "
    "I'm you'RE it's they'll WE'D don't'x 'tis _a_b __init__(self): #$%^ foo.bar(); /*c*/ a=b!=c\n"
    "'''' \"\"\"\" ------====== ... ?!\u2026 \u00e9l\u00e8ve e\u0301le\u0300ve na\u00efve \u0130stanbul "
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u4f60\u597d\uff0c\u4e16\u754c\u3002"
    "\u3053\u3093\u306b\u3061\u306f \uc548\ub155\ud558\uc138\uc694 \u0645\u0631\u062d\u0628\u0627 "
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u0661\u0662\u0663\u0664 "
    "\u2163\u00bd\u00b2 \U0001f680\U0001f44d\U0001f3fd \U0001f468\u200d\U0001f469\u200d\U0001f467 "
    "\u00a0\u3000\u200b\ufeff CamelCaseWORDS mixed123abc 0x1F v1.2.3 user@example.com \ud55c\uae001\n\n\n"
)


def tokenizer_metadata(source: ModelSource) -> dict[str, Any]:
    """Keys and values for the tokenizer and the chat template of a model directory.

    Raises :class:`ModelError`, naming what it is, for a tokenizer that GGUF's byte-level BPE cannot
    express.
    """
    tokenizer = load_tokenizer(source)
    backend, where = tokenizer._backend, tokenizer.where
    model = json.loads(backend.to_str())["model"]
    if model["type"] != "BPE" or tokenizer.pieces is not BYTE_LEVEL:
        kind = f"{model['type']} with SentencePiece's spaces" if model["type"] == "BPE" else model["type"]
        raise ModelError(
            f"{where}: is a {kind} tokenizer, only byte-level BPE can be written to GGUF: convert the model "
            "with llama.cpp's convert_hf_to_gguf.py"
        )
    tokens, types = _vocabulary(tokenizer, source.config.vocab_size)
    out: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _pre_tokenizer_name(tokenizer, bool(model.get("ignore_merges"))),
        TOKENS: tokens,
        TYPES: types,
        MERGES: [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]],
    }
    out.update(_named_ids(source, tokenizer))
    template = ChatTemplate.from_source(source)
    if not template.fallback:
        out[GGUF_KEY] = template.text
    return out


def _vocabulary(tokenizer: Tokenizer, rows: int) -> tuple[list[str], list[int]]:
    """(texts, types) of as many tokens as the embedding has rows; those without a text are unused."""
    backend = tokenizer._backend
    if tokenizer.vocab_size > rows:
        raise ModelError(
            f"{tokenizer.where}: has {tokenizer.vocab_size} tokens, the model's embedding only {rows} rows"
        )
    tokens, types = [f"[PAD{i}]" for i in range(rows)], [UNUSED] * rows
    for text, i in backend.get_vocab(with_added_tokens=False).items():
        tokens[i], types[i] = text, NORMAL
    for i, added in backend.get_added_tokens_decoder().items():
        tokens[i], types[i] = added.content, CONTROL if added.special else USER_DEFINED
    return tokens, types


def _pre_tokenizer_name(tokenizer: Tokenizer, ignore_merges: bool) -> str:
    """The name for ``tokenizer.ggml.pre`` of what cuts as the tokenizer does."""
    backend = tokenizer._backend
    if backend.pre_tokenizer is not None:
        wanted = _cut(backend.normalizer, backend.pre_tokenizer)
        for name, rules in BY_NAME.items():
            same = rules.ignore_merges == ignore_merges
            if same and _cut(rules.normalizer(), rules.pre_tokenizer()) == wanted:
                return name
    raise ModelError(
        f"{tokenizer.where}: cuts text into words in a way that has no name in GGUF files here; known are "
        f"those of {', '.join(BY_NAME)}"
    )


def _cut(normalizer: Any, pre_tokenizer: Any) -> list[str]:
    text = CUTS if normalizer is None else normalizer.normalize_str(CUTS)
    return [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]


def _named_ids(source: ModelSource, tokenizer: Tokenizer) -> dict[str, Any]:
    """The ids of the named tokens, of those that end a text, and whether some go around every text."""
    out: dict[str, Any] = {}
    for name, key in NAMED_TOKENS.items():
        text = tokenizer.special_texts.get(name)
        token = None if text is None else tokenizer.id_of(text)
        if token is not None:
            out[key] = token
    eos_key, *more_keys = END_KEYS
    ends = sorted(eos_ids(source, tokenizer) - {out.get(eos_key)})
    if eos_key not in out and ends:
        out[eos_key] = ends.pop(0)
    if len(ends) > len(more_keys):
        raise ModelError(
            f"{source.path}: {len(ends) + 1} tokens end a text, {len(END_KEYS)} can be written to GGUF: "
            "leave some out of eos_token_id"
        )
    out.update(zip(more_keys, ends))
    for key, ids, token in (
        ("tokenizer.ggml.add_bos_token", tokenizer._prefix, tokenizer.bos_id),
        ("tokenizer.ggml.add_eos_token", tokenizer._suffix, out.get(eos_key)),
    ):
        if ids not in ([], [token]):
            raise ModelError(
                f"{tokenizer.where}: puts the tokens {quoted(ids)} around a text, GGUF can say one"
            )
        out[key] = bool(ids)
    return out

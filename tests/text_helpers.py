"""What the tests of text share: the fixture tokenizers, and GGUF metadata made from them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from xinfer_vk.text.chat import template_from_directory
from xinfer_vk.text.gguf_tokenizer import tokenizer_from_gguf
from xinfer_vk.text.hf_tokenizer import tokenizer_from_directory
from xinfer_vk.text.tokenizer import Tokenizer

FIXTURES = Path(__file__).parent / "fixtures" / "text"
NAMES = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir())
PRE = {"gpt2": "gpt-2", "smollm": "smollm", "qwen2": "qwen2", "llama3": "llama-bpe"}
SENTENCEPIECE = "llama2-legacy"  # the fixture that is a SentencePiece model in GGUF
NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6
TEMPLATES = {name: template_from_directory(FIXTURES / name) for name in NAMES}
HELLO = [{"role": "user", "content": "Hello"}]


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def markup(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Those of the ids that are added tokens, other than runs of spaces."""
    return [i for i in ids if i in tokenizer._markup]


@cache
def hf(name: str) -> Tokenizer:
    return tokenizer_from_directory(FIXTURES / name)


@cache
def gguf(name: str) -> Tokenizer:
    return tokenizer_from_gguf(metadata(name), f"{name}.gguf")


@cache
def reference(name: str) -> dict[str, Any]:
    return json.loads((FIXTURES / name / "reference.json").read_text(encoding="utf-8"))


def metadata(name: str, unused: int = 3) -> dict[str, Any]:
    """What a converter writes for a fixture, with ``unused`` entries that fill up the embedding."""
    tokenizer = json.loads((FIXTURES / name / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = {i: (token, NORMAL) for token, i in tokenizer["model"]["vocab"].items()}
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]] = (added["content"], CONTROL if added["special"] else USER_DEFINED)
    count = max(tokens) + 1
    for i in range(count, count + unused):
        tokens[i] = (f"[PAD{i}]", UNUSED)
    ids = {token: i for i, (token, _) in tokens.items()}
    named = json.loads((FIXTURES / name / "tokenizer_config.json").read_text(encoding="utf-8"))
    out: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2" if name in PRE else "llama",
        "tokenizer.ggml.pre": PRE.get(name, "default"),
        "tokenizer.ggml.tokens": [tokens[i][0] for i in range(len(tokens))],
        "tokenizer.ggml.token_type": [tokens[i][1] for i in range(len(tokens))],
        "tokenizer.chat_template": (FIXTURES / name / "chat_template.jinja").read_text(encoding="utf-8"),
    }
    merges = tokenizer["model"]["merges"]
    if name in PRE:
        out["tokenizer.ggml.merges"] = [" ".join(pair) for pair in merges]
    else:
        made: dict[str, float] = {}
        for rank, pair in enumerate(merges):  # the better a piece's score, the earlier it is made
            made.setdefault("".join(pair), -float(rank))
        out["tokenizer.ggml.scores"] = [made.get(tokens[i][0], -1e6) for i in range(len(tokens))]
        out["tokenizer.ggml.token_type"] = [
            BYTE if token.startswith("<0x") else kind
            for token, kind in (tokens[i] for i in range(len(tokens)))
        ]
    for key, text in (("bos_token_id", "bos_token"), ("eos_token_id", "eos_token")):
        if named.get(text):
            out[f"tokenizer.ggml.{key}"] = ids[named[text]]
    return out


def both_ways() -> Iterator[tuple[str, Tokenizer]]:
    """Every fixture as a directory, and as GGUF metadata where that can hold it."""
    for name in NAMES:
        yield f"{name}-hf", hf(name)
        if (
            name in PRE or name == SENTENCEPIECE
        ) and name != "gpt2":  # its tokens that take spaces along are not in GGUF metadata
            yield f"{name}-gguf", gguf(name)

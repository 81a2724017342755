"""Loads the tokenizer of a directory in Hugging Face layout.

``tokenizer.json`` has nearly everything. ``tokenizer_config.json`` names the special tokens, may add
tokens or change what is known about them, and may say whether a begin-of-sequence token is added;
``special_tokens_map.json`` names special tokens in older models.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xinfer_vk.errors import ModelError
from xinfer_vk.fields import Fields, parse_json, quoted
from xinfer_vk.text.guard import guarded
from xinfer_vk.text.pieces import pieces_of
from xinfer_vk.text.tokenizer import Tokenizer
from xinfer_vk.text.tokenizer_file import refuse_fatal_fields
from xinfer_vk.weights.mapped import read_small_file

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
MAP_FILE = "special_tokens_map.json"
OLD_FILES = ("tokenizer.model", "vocab.json", "merges.txt", "tiktoken.model", "tekken.json", "vocab.txt")
MAX_TOKENIZER_BYTES = 256 << 20
MAX_CONFIG_BYTES = 16 << 20

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def tokenizer_from_directory(path: Path) -> Tokenizer:
    """Raises :class:`ModelError` if there is no ``tokenizer.json``, or if a file is damaged."""
    file = path / TOKENIZER_FILE
    if not file.exists():
        raise ModelError(f"{path}: {_missing(path)}")
    from tokenizers import Tokenizer as Backend

    where = str(file)
    data = read_small_file(file, MAX_TOKENIZER_BYTES)
    refuse_fatal_fields(data, where)
    backend = guarded(where, "not a tokenizer", Backend.from_buffer, data)
    backend.no_truncation()
    backend.no_padding()
    config = tokenizer_config(path)
    _add_tokens(backend, config, path / CONFIG_FILE)
    texts = named_tokens(path, config)
    pieces = pieces_of(backend, where)
    bos_id, eos_id = (_id_of(backend, texts.get(name)) for name in ("bos_token", "eos_token"))
    prefix, suffix = _around(backend, config, bos_id, eos_id, path)
    return Tokenizer(
        backend,
        pieces,
        where,
        prefix=prefix,
        suffix=suffix,
        bos_id=bos_id,
        eos_ids=[] if eos_id is None else [eos_id],
        special_texts=texts,
    )


def tokenizer_config(path: Path) -> dict[str, Any]:
    """``tokenizer_config.json``, empty if there is none."""
    return _optional_json(path / CONFIG_FILE)


def named_tokens(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that have a name, ``{"bos_token": "<s>", …}``."""
    older = _optional_json(path / MAP_FILE)
    texts: dict[str, str] = {}
    for name in NAMED_TOKENS:
        for place, values in ((path / MAP_FILE, older), (path / CONFIG_FILE, config)):
            if name in values:
                text = _token_text(values[name], f"{place}: {name}")
                texts.pop(name, None)
                if text is not None:
                    texts[name] = text
    return texts


def _missing(path: Path) -> str:
    found = [name for name in OLD_FILES if (path / name).exists()]
    if found:
        return (
            f"has {', '.join(found)} but no {TOKENIZER_FILE}: make it with transformers, "
            f"AutoTokenizer.from_pretrained({path.name!r}).save_pretrained({path.name!r})"
        )
    return f"has no tokenizer: {TOKENIZER_FILE} is missing, copy it and {CONFIG_FILE} from the model's source"


def _optional_json(path: Path) -> dict[str, Any]:
    return parse_json(read_small_file(path, MAX_CONFIG_BYTES), str(path)) if path.exists() else {}


def _token_text(value: Any, where: str) -> str | None:
    """A token is its text, or an object that has the text as ``content``, or null."""
    if isinstance(value, dict):
        value = value.get("content")
    if value is None or (isinstance(value, str) and value):
        return value
    raise ModelError(f"{where} is {quoted(value)}, the text of a token was expected")


def _add_tokens(backend: Any, config: Mapping[str, Any], file: Path) -> None:
    """``added_tokens_decoder`` (id to token) overrides what ``tokenizer.json`` says, as in transformers."""
    from tokenizers import AddedToken

    entries = config.get("added_tokens_decoder") or {}
    if not isinstance(entries, dict):
        raise ModelError(f"{file}: added_tokens_decoder is {quoted(entries)}, an object was expected")
    known = backend.get_added_tokens_decoder()
    wanted: dict[int, Any] = {}
    for key, entry in entries.items():
        where = f"{file}: added_tokens_decoder[{quoted(key)}]"
        if not key.isdecimal() or len(key) > 9 or not isinstance(entry, dict):
            raise ModelError(f"{where} is {quoted(entry)}, a token under its id was expected")
        fields = Fields(entry, where)
        text = _token_text(entry, where)
        if text is None:
            raise ModelError(f"{where} has no content")
        flags = {name: fields.flag(name, False) for name in ("single_word", "lstrip", "rstrip", "special")}
        token = AddedToken(text, normalized=fields.flag("normalized", not flags["special"]), **flags)
        if repr(known.get(int(key))) != repr(token):
            wanted[int(key)] = token
    in_order = [wanted[i] for i in sorted(wanted)]
    guarded(str(file), "the added tokens are damaged", backend.add_tokens, in_order)
    for i, token in wanted.items():
        if backend.token_to_id(token.content) != i:
            raise ModelError(
                f"{file}: added_tokens_decoder gives {quoted(token.content)} the id {i}, "
                f"{TOKENIZER_FILE} leads to {backend.token_to_id(token.content)}"
            )


def _id_of(backend: Any, text: str | None) -> int | None:
    return None if text is None else backend.token_to_id(text)


def _around(
    backend: Any, config: Mapping[str, Any], bos_id: int | None, eos_id: int | None, path: Path
) -> tuple[list[int], list[int]]:
    """The ids that go before and after every text: what the config says, else what the post-processor of
    ``tokenizer.json`` does."""
    fields = Fields(config, str(path / CONFIG_FILE))
    if "add_bos_token" in fields:  # alone, add_eos_token changes nothing, as in transformers
        add_bos, add_eos = fields.flag("add_bos_token", False), fields.flag("add_eos_token", False)
        prefix = [bos_id] if add_bos and bos_id is not None else []
        return prefix, [eos_id] if add_eos and eos_id is not None else []
    where = str(path / TOKENIZER_FILE)
    bare = guarded(where, "the tokenizer failed", backend.encode, "a", add_special_tokens=False).ids
    full = guarded(where, "the tokenizer failed", backend.encode, "a", add_special_tokens=True).ids
    if not bare:
        return full, []
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    raise ModelError(f"{where}: the post-processor changes the text's own tokens, which is not supported")

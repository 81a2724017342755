"""What a model's files say, without a device: what it is, what its tensors are, whether it can be run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from xinfer_vk.engine.config import EngineConfig
from xinfer_vk.errors import ModelError
from xinfer_vk.fields import parse_json
from xinfer_vk.loading import declare
from xinfer_vk.models.config import ModelConfig
from xinfer_vk.reference import NUMPY_PROFILE
from xinfer_vk.text.chat import ChatTemplate
from xinfer_vk.text.pieces import BYTE_LEVEL
from xinfer_vk.text.tokenizer import eos_ids, load_tokenizer
from xinfer_vk.weights.gguf_file import read_gguf
from xinfer_vk.weights.mapped import read_small_file
from xinfer_vk.weights.safetensors_file import close_all
from xinfer_vk.weights.source import MAX_CONFIG_BYTES, ModelSource, open_model
from xinfer_vk.weights.tensors import TensorInfo, element_count

KINDS = {"hf": "safetensors", "gguf": "GGUF"}


@dataclass(frozen=True)
class FormatCount:
    """The tensors of one number format, together."""

    tensors: int
    weights: int
    bytes: int


@dataclass(frozen=True)
class Inspection:
    """``config``: every field of :class:`ModelConfig`. ``unsupported``: what keeps the model from being run,
    a line each; where its configuration is at fault there is nothing else to tell. ``notes``: what of the
    files is not used, a line each."""

    name: str
    path: Path
    kind: str = ""
    file_bytes: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    formats: dict[str, FormatCount] = field(default_factory=dict)  # the largest first
    tokenizer: dict[str, Any] = field(default_factory=dict)
    chat_template: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unsupported: tuple[str, ...] = ()

    @property
    def weights(self) -> int:
        """Of all tensors in the files: a tied head counts once."""
        return sum(count.weights for count in self.formats.values())

    @property
    def bits_per_weight(self) -> float:
        return 8 * sum(count.bytes for count in self.formats.values()) / max(1, self.weights)


def inspect_model(path: Path) -> Inspection:
    """Read everything about a model but its weights. Raises :class:`ModelError` only for a path that is no
    model at all; whatever else is wrong is in ``unsupported``."""
    if not path.exists():
        open_model(path)  # says so
    try:
        source = open_model(path)
    except ModelError as error:
        return Inspection(path.name, path, **_glimpse(path), unsupported=(str(error),))
    with source:
        problems = []
        parts: dict[str, dict[str, Any]] = {}
        for name, look in (("tokenizer", _tokenizer), ("chat_template", _chat_template)):
            try:
                parts[name] = look(source)
            except ModelError as error:
                problems.append(str(error))
        try:
            declare(source, NUMPY_PROFILE, EngineConfig(path)).planner.check()
        except ModelError as error:
            problems.append(str(error))
        return Inspection(
            name=source.name,
            path=source.path,
            kind=KINDS[source.kind],
            file_bytes=source.file_bytes,
            config=_config(source.config),
            formats=_formats(source.tensors),
            **parts,
            notes=(*source.notices, *_template_notes(source)),
            unsupported=tuple(problems),
        )


def _glimpse(path: Path) -> dict[str, Any]:
    """What can be told of a model that does not open: its architecture, and its tensors' formats."""
    with contextlib.suppress(ModelError):
        if path.is_dir():
            values = parse_json(read_small_file(path / "config.json", MAX_CONFIG_BYTES), "config.json")
            names = values.get("architectures")
            named = names[0] if isinstance(names, list) and names else values.get("model_type")
            return {"kind": KINDS["hf"], "config": {"architecture": named}}
        gguf = read_gguf(path)
        try:
            return {
                "kind": KINDS["gguf"],
                "file_bytes": gguf.bytes,
                "config": {"architecture": gguf.metadata.get("general.architecture")},
                "formats": _formats(gguf.tensors),
            }
        finally:
            close_all(gguf.tensors)
    return {}


def _config(config: ModelConfig) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in fields(config)}


def _formats(tensors: Mapping[str, TensorInfo]) -> dict[str, FormatCount]:
    out: dict[str, FormatCount] = {}
    for tensor in tensors.values():
        old = out.get(tensor.fmt, FormatCount(0, 0, 0))
        out[tensor.fmt] = FormatCount(
            old.tensors + 1, old.weights + element_count(tensor.shape), old.bytes + tensor.bytes
        )
    return dict(sorted(out.items(), key=lambda item: -item[1].bytes))


def _tokenizer(source: ModelSource) -> dict[str, Any]:
    tokenizer = load_tokenizer(source)
    pieces = "byte-level" if tokenizer.pieces is BYTE_LEVEL else "SentencePiece"

    def texts(ids: Iterable[int]) -> dict[int, str]:
        return {i: tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids}

    return {
        "kind": f"{pieces} {type(tokenizer._backend.model).__name__}",
        "tokens": tokenizer.vocab_size,
        "around_a_text": texts(tokenizer.encode("", parse_special=False)),
        "ends": texts(sorted(eos_ids(source, tokenizer))),
    }


def _template_notes(source: ModelSource) -> tuple[str, ...]:
    """Why the chat template cannot be used, where prompts without it still can."""
    with contextlib.suppress(ModelError):  # which is told elsewhere
        if (why := ChatTemplate.from_source(source).unusable) is not None:
            return (why,)
    return ()


def _chat_template(source: ModelSource) -> dict[str, Any]:
    template = ChatTemplate.from_source(source)
    if template.fallback or template.unusable is not None:
        return {"present": False}
    template.check()
    return {
        "present": True,
        "characters": len(template.text),
        "where": template.where,
        "variables": sorted(template.variables),
    }

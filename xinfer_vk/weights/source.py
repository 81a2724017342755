"""Opens a model, whatever it is stored in, and shows it under one set of names: Hugging Face's."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from xinfer_vk.errors import ModelError
from xinfer_vk.fields import parse_json, quoted
from xinfer_vk.models.config import ModelConfig
from xinfer_vk.models.config_gguf import config_from_gguf
from xinfer_vk.models.config_hf import config_from_hf
from xinfer_vk.models.multimodal import text_config, text_name
from xinfer_vk.models.rope_scaling import FACTOR_TENSORS, with_factors
from xinfer_vk.weights.formats import as_f32
from xinfer_vk.weights.gguf_file import PART_NAME, GGUFFile, read_gguf
from xinfer_vk.weights.gguf_names import PERMUTED, hf_name
from xinfer_vk.weights.grouped import INTEGERS, LONG_INTEGERS, grouped_tensors
from xinfer_vk.weights.mapped import read_small_file
from xinfer_vk.weights.quantization_config import read_quantization
from xinfer_vk.weights.safetensors_file import (
    FLOATS,
    INDEX_NAME,
    close_all,
    read_safetensors,
    read_sharded_safetensors,
)
from xinfer_vk.weights.tensors import TensorInfo
from xinfer_vk.weights.unify import unify

__all__ = ["ModelSource", "TensorInfo", "open_model"]

MAX_CONFIG_BYTES = 16 << 20
SINGLE_NAME = "model.safetensors"
SHARD_NAME = re.compile(r"-[0-9]{5}-of-[0-9]{5}\.(safetensors|bin)$")
ADAPTER_NAME = re.compile(r"adapter_|lora", re.IGNORECASE)

# Buffers that old checkpoints of these families carry and that the config already determines.
KNOWN_EXTRA = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")

ROPE_FACTORS = FACTOR_TENSORS[0]


@dataclass
class ModelSource:
    """An open model. Close it once the weights are on the device; views of tensors stay valid.

    ``tensors``: by Hugging Face name. ``metadata``: the parsed ``config.json``, or the GGUF file's
    keys. ``generation_config``: empty where there is none. ``file_bytes``: of all weight files.
    ``left_out``: names of the tensors that are not part of the text model, in a multimodal checkpoint.
    """

    name: str
    path: Path  # a directory ("hf") or a file ("gguf")
    kind: str  # "hf" or "gguf"
    tensors: dict[str, TensorInfo]
    config: ModelConfig
    metadata: dict[str, Any]
    file_bytes: int
    generation_config: dict[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        """The model's directory or file, and the files that its tensors are read from."""
        return (self.path, *dict.fromkeys(f.path for tensor in self.tensors.values() for f in tensor.files))

    @property
    def notices(self) -> tuple[str, ...]:
        """What the user should know of the checkpoint, a line each."""
        notices, ids, size = [], self.config.ids_left_out, self.config.vocab_size
        if ids:
            notices.append(f"{self.name}: left out {', '.join(ids)}: outside the vocabulary of {size} tokens")
        if not self.left_out:
            return tuple(notices)
        parts = sorted({name.removeprefix("model.").split(".")[0] for name in self.left_out})
        notices.append(
            f"{self.name}: only the text model is used; {len(self.left_out)} tensors of {', '.join(parts)} "
            "are left out"
        )
        return tuple(notices)

    def close(self) -> None:
        close_all(self.tensors)

    def __enter__(self) -> ModelSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_model(path: Path, name: str | None = None) -> ModelSource:
    """Open a directory in Hugging Face layout, a ``.gguf`` file, or a directory with one ``.gguf`` file.

    ``name`` is what to call it, by default the file's or the directory's. Raises
    :class:`ModelError`, one line, for anything missing, damaged or not supported.
    """
    path = Path(path)
    if not os.path.exists(path):  # unlike path.exists(), false for a name that cannot be one
        raise ModelError(f"{path}: no such file or directory: give a model directory or a .gguf file")
    if path.suffix == ".safetensors":
        raise ModelError(f"{path}: give the model's directory, which also has its config.json and tokenizer")
    if not path.is_dir():
        return _open_gguf(path, name or path.stem)
    if (path / "config.json").exists():
        return _open_hf(path, name or _directory_name(path))
    files = [p for p in sorted(path.glob("*.gguf")) if _part_number(p) == 1]
    ggufs = [p for p in files if "mmproj" not in p.name.lower()]  # an image encoder beside the model
    if files and not ggufs:
        raise ModelError(f"{path}: has only {quoted(files[0].name)}, an image encoder: add the model's file")
    if len(ggufs) == 1:
        return _open_gguf(ggufs[0], name or ggufs[0].stem)
    if ggufs:
        raise ModelError(
            f"{path}: has several .gguf models, name one of them, for example {quoted(ggufs[0].name)}"
        )
    raise ModelError(f"{path}: has neither a config.json nor a .gguf file, so it is not a model directory")


def _part_number(path: Path) -> int:
    """1 for a GGUF model of one file, else which of its parts this is."""
    part = PART_NAME.fullmatch(path.name)
    return 1 if part is None else int(part["number"])


def _directory_name(path: Path) -> str:
    """What to call a model directory; in the hub's cache that is ``owner/name``, not a revision."""
    path = path.absolute()
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1)
    return path.name


def _open_hf(path: Path, name: str) -> ModelSource:
    metadata = _json_file(path / "config.json")
    generation_path = path / "generation_config.json"
    generation = _json_file(generation_path) if generation_path.exists() else {}
    where = str(path / "config.json")
    text = text_config(metadata, where)
    described = metadata if text is None else text
    quantization = read_quantization(described, path)
    dtypes = FLOATS if quantization is None else {**FLOATS, "I32": INTEGERS, "I64": LONG_INTEGERS}
    left_out: set[str] = set()
    tensors = _hf_tensors(path, dtypes, None if text is None else left_out)
    try:
        if text is not None:
            text.setdefault("tie_word_embeddings", "lm_head.weight" not in tensors)
            where += ": text_config"
        config = config_from_hf(described, generation, where)
        if quantization is not None:
            tensors = grouped_tensors(tensors, quantization)
        tensors = unify(tensors, config, "hf")
    except BaseException:
        close_all(tensors)
        raise
    files = {id(file): file.size for t in tensors.values() for file in t.files}
    return ModelSource(
        name, path, "hf", tensors, config, metadata, sum(files.values()), generation, tuple(sorted(left_out))
    )


def _json_file(path: Path) -> dict[str, Any]:
    return parse_json(read_small_file(path, MAX_CONFIG_BYTES), str(path))


def _hf_tensors(
    path: Path, dtypes: Mapping[str, str], left_out: set[str] | None = None
) -> dict[str, TensorInfo]:
    """All tensors of a checkpoint. With ``left_out``, of a multimodal one: those of the text model under the
    names they have there; the names of the others are added to it."""

    def ignore(name: str) -> bool:
        if left_out is not None and text_name(name) is None:
            left_out.add(name)
            return True
        return KNOWN_EXTRA.search(name) is not None

    if (path / SINGLE_NAME).exists():
        tensors = read_safetensors(path / SINGLE_NAME, ignore, dtypes)
    elif (path / INDEX_NAME).exists():
        tensors = read_sharded_safetensors(path / INDEX_NAME, ignore, dtypes)
    else:
        tensors = read_safetensors(_only_safetensors(path), ignore, dtypes)
    if left_out is None:
        return tensors
    names = {name: text_name(name) or name for name in tensors}
    return {names[name]: replace(tensor, name=names[name]) for name, tensor in tensors.items()}


def _only_safetensors(path: Path) -> Path:
    """The weights of a directory that has them under a name of their own, as AutoGPTQ wrote them. Raises
    :class:`ModelError` unless there is one such file that is a whole model."""
    missing = f"{path}: has neither {SINGLE_NAME} nor {INDEX_NAME}"
    found = sorted(p.name for p in path.iterdir() if p.suffix in (".safetensors", ".bin", ".pt", ".pth"))
    whole = [name for name in found if name.endswith(".safetensors") and not ADAPTER_NAME.match(name)]
    shards = [name for name in found if SHARD_NAME.search(name)]
    if shards:
        raise ModelError(
            f"{missing}, only parts such as {quoted(shards[0])}: download the index, too, which lists them"
        )
    if len(whole) == 1:
        return path / whole[0]
    if whole:
        raise ModelError(f"{missing}, but {', '.join(map(quoted, whole[:8]))}: name the model {SINGLE_NAME}")
    if any(ADAPTER_NAME.match(name) for name in found):
        raise ModelError(
            f"{missing}, only an adapter: merge it into its base model (merge_and_unload of peft)"
        )
    hint = f", only {quoted(found[0])}: convert it with transformers' save_pretrained" if found else ""
    raise ModelError(missing + hint)


def _open_gguf(path: Path, name: str) -> ModelSource:
    gguf = read_gguf(path)
    try:
        return _gguf_source(path, name, gguf)
    except BaseException:
        close_all(gguf.tensors)
        raise


def _gguf_source(path: Path, name: str, gguf: GGUFFile) -> ModelSource:
    where = str(path)
    config = config_from_gguf(gguf.metadata, gguf.tensors, where)
    factors = {
        factor_name: _rope_factors(gguf.tensors.pop(factor_name), config)
        for factor_name in FACTOR_TENSORS
        if factor_name in gguf.tensors
    }
    config = replace(config, rope_scaling=with_factors(config.rope_scaling, factors, where))
    architecture = config.architecture
    heads = {"attn_q": config.heads, "attn_k": config.kv_heads} if architecture in PERMUTED else {}
    tensors = {}
    for file_name, tensor in gguf.tensors.items():
        name_in_hf, kind = hf_name(file_name, architecture, where)
        if name_in_hf in tensors:
            raise ModelError(f"{where}: {quoted(file_name)} and another are both a {name_in_hf}")
        tensors[name_in_hf] = replace(tensor, name=name_in_hf, permuted_heads=heads.get(kind, 0))
    tensors = unify(tensors, config, "gguf")
    return ModelSource(name, path, "gguf", tensors, config, gguf.metadata, gguf.bytes)


def _rope_factors(tensor: TensorInfo, config: ModelConfig) -> np.ndarray:
    if tensor.shape != (config.rotary_dim // 2,) or tensor.fmt not in ("f32", "f16", "bf16"):
        raise ModelError(
            f"{tensor.where}: {tensor.name} is {tensor.fmt} of shape {list(tensor.shape)}, "
            f"floats of shape [{config.rotary_dim // 2}] were expected"
        )
    return as_f32(tensor.fmt, tensor.data)

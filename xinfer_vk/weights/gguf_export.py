"""The tensors and the configuration of a Hugging Face checkpoint as a GGUF file has them.

As llama.cpp's ``convert_hf_to_gguf.py`` writes them: its names of tensors and keys, vectors in f32, queries
and keys of Llama models in interleaved RoPE order, and llama3's RoPE scaling worked out as a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any

import numpy as np

from xinfer_vk.errors import ModelError
from xinfer_vk.fields import quoted
from xinfer_vk.models.config import ModelConfig
from xinfer_vk.models.config_gguf import config_from_gguf
from xinfer_vk.models.rope_scaling import rope_inv_freq
from xinfer_vk.weights.formats import as_f32
from xinfer_vk.weights.gguf_names import PERMUTED, gguf_name
from xinfer_vk.weights.source import ROPE_FACTORS, ModelSource
from xinfer_vk.weights.tensors import DerivedTensor, TensorInfo

# Families whose checkpoints hold what GGUF files hold, but for the above, and their name in GGUF.
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "smollm3": "smollm3",
    "granite": "granite", "olmo2": "olmo2",
}  # fmt: skip
REMEDY = "convert the model with llama.cpp's convert_hf_to_gguf.py, then quantize that file"


class PermutedTensor(DerivedTensor):
    """Rows of a matrix whose heads are brought into interleaved RoPE order."""

    def read_rows(self, which: slice | np.ndarray) -> np.ndarray:
        rows = np.arange(self.shape[0])[which]
        return self.stored.read_rows(_interleaved(rows, self.shape[0] // self.permuted_heads))


def _interleaved(row: np.ndarray, dim: int) -> np.ndarray:
    """Where the usual order has row ``row`` of the interleaved one, whose heads have ``dim`` rows: row
    ``2 j + half`` of a head is row ``half * dim/2 + j``."""
    within = row % dim
    return row - within + within % 2 * (dim // 2) + within // 2


def exported_tensors(source: ModelSource) -> list[TensorInfo]:
    """The tensors of a checkpoint under GGUF's names, in the order of the checkpoint.

    Raises :class:`ModelError` for a family whose tensors are not written (yet).
    """
    c = source.config
    if c.architecture not in ARCHITECTURES:
        raise ModelError(
            f"{source.path}: is a {c.architecture} model, those that can be written to GGUF are "
            f"{', '.join(ARCHITECTURES)}: {REMEDY}"
        )
    architecture = ARCHITECTURES[c.architecture]
    heads = {"attn_q": c.heads, "attn_k": c.kv_heads} if architecture in PERMUTED else {}
    out = []
    for name, tensor in source.tensors.items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue  # the same as the embedding
        in_gguf, kind = gguf_name(name, architecture, tensor.where)
        permuted = heads.get(kind, 0)
        if len(tensor.shape) == 1:
            out.append(_vector(tensor, in_gguf, permuted))
        elif permuted:
            out.append(PermutedTensor.of(tensor, name=in_gguf, permuted_heads=permuted))
        else:
            out.append(replace(tensor, name=in_gguf))
    if c.rope_scaling is not None and c.rope_scaling.type == "llama3":
        plain = replace(c, rope_scaling=None)
        factors = (rope_inv_freq(plain) / rope_inv_freq(c)).astype(np.float32)
        out.append(TensorInfo(ROPE_FACTORS, factors.shape, "f32", factors.view(np.uint8)))
    return out


def _vector(tensor: TensorInfo, name: str, permuted_heads: int) -> TensorInfo:
    values = as_f32(tensor.fmt, tensor.data)
    if permuted_heads:
        values = values[_interleaved(np.arange(values.size), values.size // permuted_heads)]
    return TensorInfo(name, tensor.shape, "f32", values.view(np.uint8))


def exported_config(c: ModelConfig, tensor_names: Collection[str], where: str) -> dict[str, Any]:
    """Keys and values that tell a GGUF reader what the model is, ``general.architecture`` among them.
    ``tensor_names``: of :func:`exported_tensors`, which tell some of it.

    Raises :class:`ModelError` for a model of which these keys do not say everything: they are read back.
    Sliding windows are none of them: llama.cpp has none in these architectures, whatever the file says.
    """
    architecture, s = ARCHITECTURES[c.architecture], c.rope_scaling
    values: dict[str, Any] = {
        "vocab_size": c.vocab_size,
        "context_length": c.max_position,
        "embedding_length": c.hidden_size,
        "block_count": c.layers,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.heads,
        "attention.head_count_kv": c.kv_heads,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "rope.dimension_count": c.rotary_dim,
        "rope.freq_base": c.rope_theta,
    }
    if c.head_dim * c.heads != c.hidden_size:
        values["attention.key_length"] = values["attention.value_length"] = c.head_dim
    if architecture == "granite":
        values["attention.scale"] = c.attention_scale or c.head_dim**-0.5
        values["embedding_scale"] = c.embedding_scale
        values["residual_scale"] = c.residual_scale
        values["logit_scale"] = 1.0 / c.logit_scale
    if s is not None and s.type in ("linear", "yarn"):
        values["rope.scaling.type"] = s.type
        values["rope.scaling.factor"] = s.factor
    if s is not None and s.type == "yarn":
        values["rope.scaling.original_context_length"] = s.original_max_position
    keys = {f"{architecture}.{key}": value for key, value in values.items()}
    keys["general.architecture"] = architecture
    _require_same(c, config_from_gguf(keys, tensor_names, where), where)
    return keys


def _require_same(c: ModelConfig, read: ModelConfig, where: str) -> None:
    """Raise :class:`ModelError` for the first field that GGUF's keys do not say. The tokens that begin and
    end a text are in other keys; what the families' names differ in is in the tensors."""
    s = c.rope_scaling
    if s is not None and s.type == "llama3" and ARCHITECTURES[c.architecture] == "llama":
        c = replace(c, rope_scaling=None)  # it is a tensor; llama.cpp reads it for Llama alone
    for f in fields(ModelConfig):
        if f.name in ("architecture", "eos_token_ids", "bos_token_id", "ids_left_out"):
            continue
        ours, theirs = getattr(c, f.name), getattr(read, f.name)
        if isinstance(ours, float) and isinstance(theirs, float) and math.isclose(ours, theirs, rel_tol=1e-6):
            continue
        if ours != theirs:
            raise ModelError(
                f"{where}: GGUF files of {c.architecture} models cannot say that {f.name} is {quoted(ours)}: "
                f"{REMEDY}"
            )

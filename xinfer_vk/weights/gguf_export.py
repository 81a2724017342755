"""The tensors and the configuration of a Hugging Face checkpoint as a GGUF file has them.

As llama.cpp's ``convert_hf_to_gguf.py`` writes them: its names of tensors and keys, vectors in f32, queries
and keys of Llama models in interleaved RoPE order, and llama3's RoPE scaling worked out as a tensor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from xinfer_vk.errors import ModelError
from xinfer_vk.fields import quoted
from xinfer_vk.models.config import ModelConfig, rope_inv_freq
from xinfer_vk.weights.formats import as_f32
from xinfer_vk.weights.gguf_names import PERMUTED, gguf_name
from xinfer_vk.weights.source import ROPE_FACTORS, ModelSource
from xinfer_vk.weights.tensors import DerivedTensor, TensorInfo

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # whose checkpoints hold what GGUF files hold, but for the above
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
    heads = {"attn_q": c.heads, "attn_k": c.kv_heads} if c.architecture in PERMUTED else {}
    out = []
    for name, tensor in source.tensors.items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue  # the same as the embedding
        in_gguf, kind = gguf_name(name, c.architecture, tensor.where)
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


def exported_config(c: ModelConfig, where: str) -> dict[str, Any]:
    """Keys and values that tell a GGUF reader what the model is, ``general.architecture`` among them."""
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
    if any(c.layer_windows):
        raise ModelError(
            f"{where}: sliding windows of a {c.architecture} model have no key in GGUF: {REMEDY}"
        )
    scaling = c.rope_scaling
    if scaling is not None:
        if scaling.type == "linear":
            values.update({"rope.scaling.type": "linear", "rope.scaling.factor": scaling.factor})
        elif scaling.type != "llama3" or c.architecture != "llama":  # llama3's is a tensor
            raise ModelError(
                f"{where}: {c.architecture} with RoPE scaling of type {quoted(scaling.type)} cannot be "
                f"written to GGUF: {REMEDY}"
            )
    keys = {f"{c.architecture}.{key}": value for key, value in values.items()}
    return {"general.architecture": c.architecture, "general.type": "model", **keys}

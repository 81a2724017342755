"""Takes away how families differ in storing the same thing, so that model files need not know.

Gemma stores the weight of a norm as the w of ``1 + w`` in Hugging Face's checkpoints (not in GGUF). Phi-3
stores queries, keys and values, and gate and up, as one matrix each, in both. Experts: see
:mod:`xinfer_vk.weights.expert_tensors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from xinfer_vk.errors import ModelError
from xinfer_vk.fields import quoted
from xinfer_vk.models.config import GEMMA, ModelConfig
from xinfer_vk.weights.expert_tensors import one_by_one
from xinfer_vk.weights.tensors import DerivedTensor, TensorInfo


@dataclass(frozen=True, eq=False)
class RowsTensor(DerivedTensor):
    """Rows of another tensor, from ``first`` on."""

    first: int = field(kw_only=True)

    def read_rows(self, which: slice | np.ndarray) -> np.ndarray:
        rows = np.arange(self.first, self.first + self.shape[0])[which]
        if isinstance(which, slice) and rows.size and which.step in (None, 1):
            return self.stored.read_rows(slice(rows[0], rows[-1] + 1))  # a view, not a copy
        return self.stored.read_rows(rows)

    def release_rows(self, start: int, stop: int) -> None:
        self.stored.release_rows(self.first + start, self.first + stop)


def unify(tensors: Mapping[str, TensorInfo], config: ModelConfig, kind: str) -> dict[str, TensorInfo]:
    """The tensors of a checkpoint of ``kind`` "hf" or "gguf", by name, as all families have them. Raises
    :class:`ModelError` for a fused matrix of another shape than the config says."""
    if config.architecture in GEMMA and kind == "hf":
        return {
            name: replace(tensor, plus=1.0) if name.endswith("norm.weight") else tensor
            for name, tensor in tensors.items()
        }
    if config.architecture == "phi3":
        return _split(tensors, config)
    if config.experts is not None:
        return one_by_one(tensors)
    return dict(tensors)


def _split(tensors: Mapping[str, TensorInfo], c: ModelConfig) -> dict[str, TensorInfo]:
    parts = {
        "qkv_proj": {"q_proj": c.q_dim, "k_proj": c.kv_dim, "v_proj": c.kv_dim},
        "gate_up_proj": {"gate_proj": c.intermediate_size, "up_proj": c.intermediate_size},
    }
    out = {}
    for name, tensor in tensors.items():
        base, _, module = name.removesuffix(".weight").rpartition(".")
        if module not in parts or not name.endswith(".weight"):
            out[name] = tensor
            continue
        want = (sum(parts[module].values()), c.hidden_size)
        if tensor.shape != want:
            raise ModelError(
                f"{tensor.where}: the tensor {quoted(name)} has shape {list(tensor.shape)}, the config says "
                f"{list(want)}"
            )
        first = 0
        for part, rows in parts[module].items():
            new = f"{base}.{part}.weight"
            out[new] = RowsTensor.of(tensor, name=new, shape=(rows, tensor.shape[1]), first=first)
            first += rows
    return out

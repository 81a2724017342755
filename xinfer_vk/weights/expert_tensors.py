"""The experts of a mixture as files name and stack them, shown as a matrix each under one set of names:
``model.layers.<layer>.mlp.experts.<expert>.gate_proj.weight``, ``up_proj``, ``down_proj``.

Checkpoints of Qwen3-MoE have these. Mixtral's have ``block_sparse_moe`` with ``w1`` (gate), ``w3`` (up) and
``w2`` (down). transformers 5 stacks a layer's experts in memory, and writes them so if asked:
``mlp.experts.gate_up_proj`` [experts, 2 width, hidden], gate over up, and ``mlp.experts.down_proj``
[experts, hidden, width]. GGUF files stack each matrix: ``ffn_gate_exps`` [experts, width, hidden] and so on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from xinfer_vk.weights.tensors import TensorInfo

STACKED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|gate_proj|up_proj|down_proj)(\.weight)?")
OF_MIXTRAL = re.compile(r"(.*)\.block_sparse_moe\.(gate|experts\.[0-9]+)\.(w1\.|w2\.|w3\.)?weight")
MIXTRAL_NAMES = {"w1.": "gate_proj.", "w2.": "down_proj.", "w3.": "up_proj.", None: ""}


def one_by_one(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """``tensors`` by Hugging Face's names, with those of experts as said above; the others as they are.
    Nothing is read: an expert's matrix is a view of its part of the file."""
    out: dict[str, TensorInfo] = {}
    for name, tensor in tensors.items():
        mixtral, stacked = OF_MIXTRAL.fullmatch(name), STACKED.fullmatch(name)
        if mixtral is not None:
            renamed = f"{mixtral[1]}.mlp.{mixtral[2]}.{MIXTRAL_NAMES[mixtral[3]]}weight"
            out[renamed] = replace(tensor, name=renamed)
        elif stacked is not None and len(tensor.shape) == 3:
            kinds = ("gate_proj", "up_proj") if stacked[2] == "gate_up_proj" else (stacked[2],)
            if tensor.shape[1] % len(kinds) == 0:
                out.update((part.name, part) for part in _parts(tensor, stacked[1], kinds))
            else:  # not what it is called: it stays, and has no place
                out[name] = tensor
        else:
            out[name] = tensor
    return out


def _parts(tensor: TensorInfo, prefix: str, kinds: tuple[str, ...]) -> Iterator[TensorInfo]:
    """The matrices [rows, columns] that stand one behind the other in a stack, expert by expert."""
    experts, rows, cols = tensor.shape
    shape = rows // len(kinds), cols
    size = shape[0] * tensor.row_bytes
    for i in range(experts * len(kinds)):
        expert, kind = divmod(i, len(kinds))
        yield replace(
            tensor,
            name=f"{prefix}.{expert}.{kinds[kind]}.weight",
            shape=shape,
            data=tensor.data[i * size : (i + 1) * size],
            start=tensor.start + i * size,
        )

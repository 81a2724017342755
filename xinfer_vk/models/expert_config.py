"""The numbers of a mixture of experts, from ``config.json`` or from GGUF metadata.

What is supported: a router whose softmax chooses the same number of experts for every token, all alike.
Shared experts, groups of experts, biases of the choice and scaled weights are refused by their keys.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from xinfer_vk.fields import Fields
from xinfer_vk.kernels.routing import MAX_EXPERTS

MAX_WIDTH = 1 << 20

# Keys that change the mathematics of a mixture, with the value that changes nothing.
HF_EXPERT_NEUTRAL: dict[str, Any] = {
    "first_k_dense_replace": 0,
    "n_routed_experts": 0,
    "n_shared_experts": 0,
    "num_shared_experts": 0,
    "routed_scaling_factor": 1.0,
    "shared_expert_intermediate_size": 0,
}
SOFTMAX_GATING = 1  # of gguf.ExpertGatingFuncType
GGUF_EXPERT_NEUTRAL: dict[str, Any] = {
    "expert_gating_func": SOFTMAX_GATING,
    "expert_group_count": 1,
    "expert_shared_count": 0,
    "expert_shared_feed_forward_length": 0,
    "expert_weights_scale": 1.0,
}


@dataclass(frozen=True)
class ExpertConfig:
    """``count`` experts in a layer, of which every token uses ``per_token``. ``width``: the intermediate
    size of each. ``normalized``: the weights of those used add up to one. ``layers``: which have experts;
    the others have an MLP."""

    count: int
    per_token: int
    width: int
    normalized: bool
    layers: tuple[bool, ...]


def experts_from_hf(f: Fields, architecture: str, layers: int) -> ExpertConfig | None:
    """Mixtral's and Qwen3-MoE's keys (transformers' ``configuration_mixtral.py`` and
    ``configuration_qwen3_moe.py``); None for other architectures, and where no layer has experts."""
    if architecture == "mixtral":
        count = f.integer("num_local_experts", low=1, high=MAX_EXPERTS)
        width, normalized, sparse = (
            f.integer("intermediate_size", low=1, high=MAX_WIDTH),
            True,
            (True,) * layers,
        )
    elif architecture == "qwen3moe":
        key = "num_experts" if "num_experts" in f else "num_local_experts"  # which transformers 5 writes
        count = f.integer(key, 128, high=MAX_EXPERTS)
        width = f.integer("moe_intermediate_size", low=1, high=MAX_WIDTH)
        normalized = f.flag("norm_topk_prob", False)
        step = f.integer("decoder_sparse_step", 1, low=1)
        dense = f.raw("mlp_only_layers", None) or []
        if not isinstance(dense, list) or any(type(i) is not int for i in dense):
            raise f.wrong("mlp_only_layers", "a list of layers was expected")
        sparse = tuple(count > 0 and i not in dense and (i + 1) % step == 0 for i in range(layers))
    else:
        return None
    if not any(sparse):
        return None
    per_token = f.integer("num_experts_per_tok", low=1, high=count)
    return ExpertConfig(count, per_token, width, normalized, sparse)


def experts_from_gguf(f: Fields, arch: str, names: Collection[str], layers: int) -> ExpertConfig | None:
    """Keys of a GGUF file; ``names`` of its tensors tell the layers with a router.

    The weights are normalized unless ``expert_weights_norm`` says that they are not, as llama.cpp has it
    for these architectures.
    """
    count = f.integer(f"{arch}.expert_count", 0, high=MAX_EXPERTS)
    if not count:
        return None
    return ExpertConfig(
        count=count,
        per_token=f.integer(f"{arch}.expert_used_count", low=1, high=count),
        width=f.integer(
            f"{arch}.expert_feed_forward_length" if f"{arch}.expert_feed_forward_length" in f
            else f"{arch}.feed_forward_length", low=1, high=MAX_WIDTH,
        ),
        normalized=f.flag(f"{arch}.expert_weights_norm", True),
        layers=tuple(f"blk.{i}.ffn_gate_inp.weight" in names for i in range(layers)),
    )  # fmt: skip

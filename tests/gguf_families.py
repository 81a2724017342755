"""Turns a checkpoint in Hugging Face layout into a GGUF file, as llama.cpp's converter does for each family.

Tensor names come from the ``gguf`` package's own table, keys from its writer. What the converter does to
values (``convert_hf_to_gguf.py``): queries and keys of Llama's relatives are permuted, Gemma's norms are
stored as ``1 + w``, experts are stacked, Phi's longrope factors become tensors.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from model_files import permute

from xinfer_vk.weights.formats import as_f32
from xinfer_vk.weights.safetensors_file import read_safetensors

# Hugging Face's model_type → GGUF's architecture, where they differ.
ARCHITECTURES = {
    "mistral": "llama", "mixtral": "llama", "gemma3_text": "gemma3", "qwen3_moe": "qwen3moe",
}  # fmt: skip
PERMUTED = ("llama", "mistral", "mixtral", "smollm3", "granite")
EXPERT = re.compile(r"(.*\.experts)\.([0-9]+)(\.[a-z0-9_]+\.weight)")


def write_gguf_of(folder: Path, path: Path, tokenizer: str | None = None) -> None:
    """Write the model in ``folder`` to ``path``, every tensor as f32. ``tokenizer``: its kind, if it is to be
    named ("no_vocab" for llama.cpp, which wants one)."""
    config = json.loads((folder / "config.json").read_text())
    family = config["model_type"]
    name = ARCHITECTURES.get(family, family)
    arch = next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == name)
    writer = gguf.GGUFWriter(str(path), name)
    _add_keys(writer, family, config)
    if tokenizer is not None:
        writer.add_tokenizer_model(tokenizer)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    stacks: dict[str, dict[int, np.ndarray]] = {}  # the experts' matrices by number
    for hf_name, tensor in read_safetensors(folder / "model.safetensors").items():
        values = as_f32(tensor.fmt, tensor.data).reshape(tensor.shape)
        if expert := EXPERT.fullmatch(hf_name):
            stacks.setdefault(expert[1] + expert[3], {})[int(expert[2])] = values
            continue
        if family in PERMUTED and "q_proj" in hf_name:
            values = permute(values, config["num_attention_heads"])
        if family in PERMUTED and "k_proj" in hf_name:
            values = permute(values, config["num_key_value_heads"])
        if family.startswith("gemma") and hf_name.endswith("norm.weight"):
            values = values + 1
        writer.add_tensor(names.get_name(hf_name, (".weight", ".bias")), np.ascontiguousarray(values))
    for hf_name, matrices in stacks.items():
        writer.add_tensor(
            names.get_name(hf_name, (".weight",)), np.stack([matrices[i] for i in sorted(matrices)])
        )
    for kind in ("long", "short"):
        factors = rope_of(config).get(f"{kind}_factor")
        if factors:
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    """RoPE's settings of a ``config.json`` of transformers 5; Gemma 3's are those of its full layers."""
    rope: dict[str, Any] = config["rope_parameters"]
    return rope.get("full_attention", rope)


def _add_keys(writer: Any, family: str, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = rope_of(config)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if config.get("sliding_window") and not config.get("max_window_layers"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if family == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if "num_experts_per_tok" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "longrope":
        original = rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))

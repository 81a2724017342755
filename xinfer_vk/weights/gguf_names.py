"""Names of tensors in GGUF files, and what they are called in Hugging Face's checkpoints.

After the GGUF specification and llama.cpp's ``gguf-py/gguf/tensor_mapping.py``; one name can stand for
different tensors in different architectures.
"""

from __future__ import annotations

import re

from xinfer_vk.errors import ModelError
from xinfer_vk.fields import quoted

# Architectures whose queries and keys llama.cpp's converter puts into interleaved RoPE order: those it
# derives from Llama. See TensorInfo.permuted_heads.
PERMUTED = ("llama", "smollm3", "granite")

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
OTHER_LAYER_NAMES = {
    "gemma2": {"ffn_norm": "pre_feedforward_layernorm"},
    "gemma3": {"ffn_norm": "pre_feedforward_layernorm"},
    "olmo2": {"ffn_norm": "pre_feedforward_layernorm"},  # it has none, only one after each block
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
}
HF_LAYER = re.compile(r"model\.layers\.([0-9]+)\.([a-z_.]+)\.(weight|bias)")
LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.(weight|bias)")
# Files of 2023 and early 2024 have a tensor for each expert.
EXPERT = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.ffn_(gate|up|down)\.(0|[1-9][0-9]{0,3})\.weight")


def hf_name(name: str, architecture: str, where: str) -> tuple[str, str]:
    """(Hugging Face's name, the kind of tensor) for a name of the GGUF specification. Raises
    :class:`ModelError` for one that no architecture here has; ``where`` names the file."""
    base, _, suffix = name.rpartition(".")
    if base in NAMES and suffix in ("weight", "bias"):
        return f"{NAMES[base]}.{suffix}", base
    expert = EXPERT.fullmatch(name)
    if expert is not None:
        layer, kind, number = expert.groups()
        return f"model.layers.{layer}.mlp.experts.{number}.{kind}_proj.weight", f"ffn_{kind}_exps"
    match = LAYER.fullmatch(name)
    names = _layer_names(architecture)
    if match is None or match[2] not in names:
        raise ModelError(f"{where}: the tensor {quoted(name)} has no place in a {architecture} model")
    return f"model.layers.{match[1]}.{names[match[2]]}.{match[3]}", match[2]


def gguf_name(name: str, architecture: str, where: str) -> tuple[str, str]:
    """(GGUF's name, the kind of tensor) for one of Hugging Face's: :func:`hf_name` the other way."""
    base, _, suffix = name.rpartition(".")
    kinds = {hf: kind for kind, hf in NAMES.items()}
    if base in kinds:
        return f"{kinds[base]}.{suffix}", kinds[base]
    match = HF_LAYER.fullmatch(name)
    kind = (
        None
        if match is None
        else next((k for k, hf in _layer_names(architecture).items() if hf == match[2]), None)
    )
    if match is None or kind is None:
        raise ModelError(
            f"{where}: the tensor {quoted(name)} has no name in a GGUF file of a {architecture} model"
        )
    return f"blk.{match[1]}.{kind}.{match[3]}", kind


def _layer_names(architecture: str) -> dict[str, str]:
    return {**LAYER_NAMES, **OTHER_LAYER_NAMES.get(architecture, {})}

"""The families that are implemented, as Hugging Face checkpoints name them, and those that are not.

``defaults`` are what a family's configuration class of transformers 5 (``configuration_<family>.py``)
takes for a key that ``config.json`` leaves out; ``null`` in the file stays ``null``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HFFamily:
    """``architecture``: our name (and GGUF's, but for Mistral). ``classes``: of transformers, for
    ``architectures``. ``keys``: those of :data:`~xinfer_vk.models.config_hf.HF_NEUTRAL` that mean
    something here, and ``auto_map`` where it means nothing."""

    architecture: str
    classes: tuple[str, ...]
    model_types: tuple[str, ...]
    defaults: Mapping[str, Any]
    keys: frozenset[str] = frozenset()


# Sizes that several classes have.
_COMMON = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
_GEMMA = {
    **_COMMON,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_QWEN = {
    **_COMMON,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_LLAMA = {
    **_COMMON,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

HF_FAMILIES = (
    HFFamily("qwen2", ("Qwen2ForCausalLM",), ("qwen2",), _QWEN),
    HFFamily("llama", ("LlamaForCausalLM",), ("llama",), _LLAMA),
    HFFamily("qwen3", ("Qwen3ForCausalLM",), ("qwen3",), {**_QWEN, "head_dim": 128}),
    HFFamily(
        "gemma2",
        ("Gemma2ForCausalLM",),
        ("gemma2",),
        {
            **_GEMMA,
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        frozenset({"attn_logit_softcapping", "final_logit_softcapping"}),
    ),
    HFFamily(
        "gemma3",
        ("Gemma3ForCausalLM",),
        ("gemma3_text",),
        {
            **_GEMMA,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
        },
        frozenset({"attn_logit_softcapping", "final_logit_softcapping"}),
    ),
    HFFamily(
        "mistral",
        ("MistralForCausalLM",),
        ("mistral",),
        {
            **_LLAMA,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
    ),
    HFFamily(
        "mixtral",
        ("MixtralForCausalLM",),
        ("mixtral",),
        {
            **_LLAMA,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
        },
        frozenset({"num_local_experts"}),
    ),
    HFFamily(
        "qwen3moe",
        ("Qwen3MoeForCausalLM",),
        ("qwen3_moe",),
        {
            **_COMMON,
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        frozenset({"num_experts", "num_local_experts"}),
    ),
    HFFamily(
        "smollm3",
        ("SmolLM3ForCausalLM",),
        ("smollm3",),
        {
            **_COMMON,
            "vocab_size": 128256,
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "tie_word_embeddings": True,
            "rope_theta": 2e6,
            "use_sliding_window": False,
            "sliding_window": None,
        },
        frozenset({"no_rope_layers"}),
    ),
    HFFamily(
        "granite",
        ("GraniteForCausalLM",),
        ("granite",),
        {**_LLAMA, "attention_multiplier": 1.0},
        frozenset({"attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"}),
    ),
    HFFamily(
        "olmo2",
        ("Olmo2ForCausalLM",),
        ("olmo2",),
        {
            **_COMMON,
            "vocab_size": 50304,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 50279,
        },
    ),
    HFFamily(
        "phi3",
        ("Phi3ForCausalLM",),
        ("phi3",),
        {
            **_COMMON,
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 32000,
            "sliding_window": None,
        },
        # Microsoft's checkpoints bring the code that transformers has taken over since.
        frozenset({"partial_rotary_factor", "auto_map"}),
    ),
)


def hf_family(name: str) -> HFFamily | None:
    """The family of a transformers class or of a ``model_type``."""
    return next((f for f in HF_FAMILIES if name in f.classes or name in f.model_types), None)


# Why a class or model type is not supported, by a part of its name in lower case, the first that fits.
UNSUPPORTED: tuple[tuple[tuple[str, ...], str], ...] = (
    (("gptoss", "gpt_oss", "gpt-oss"), "attention sinks are not supported"),
    (
        ("deepseek", "minicpm3", "kimik2", "kimi_k2", "longcat", "glm4moelite", "glm4_moe_lite", "axk1"),
        "multi-head latent attention (MLA) is not supported",
    ),
    (
        ("qwen2moe", "qwen2_moe", "glm4moe", "glm4_moe", "ernie4_5moe", "ernie4_5_moe", "dots1", "bailingmoe",
         "granitemoeshared", "hunyuan"),
        "shared experts are not supported",
    ),
    (
        ("mamba", "jamba", "zamba", "bamba", "nemotronh", "nemotron_h", "falconh1", "falcon_h1", "moehybrid",
         "plamo2", "hymba"),
        "state-space layers are not supported",
    ),
    (
        ("qwen3next", "qwen3_next", "qwen3_5", "minimax", "kimilinear", "kimi_linear", "rwkv", "lfm2",
         "recurrentgemma", "recurrent_gemma", "retnet", "xlstm", "olmohybrid", "olmo_hybrid"),
        "linear-attention, convolution and recurrent layers are not supported",
    ),
    (("clip", "mmproj"), "a vision tower is no text model: give the text model's file"),
    (
        ("t5", "bart", "pegasus", "marian", "whisper", "encoderdecoder", "encoder_decoder", "m2m100", "nllb",
         "blenderbot", "prophetnet", "moonshine"),
        "encoder-decoder models are not supported",
    ),
)  # fmt: skip


def why_unsupported(name: str) -> str | None:
    """What of a class or model type is not supported, where we know it."""
    lower = name.lower()
    return next((why for parts, why in UNSUPPORTED if any(part in lower for part in parts)), None)

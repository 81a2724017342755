"""The shapes of known models, as their ``config.json`` has them: what a synthetic model is made from.

Only what decides shapes and kernels is here. Sources: the ``config.json`` of each model's repository on
the hub, named beside it.
"""

from __future__ import annotations

from typing import Any

from xinfer_vk.errors import UsageError
from xinfer_vk.models.config import ModelConfig
from xinfer_vk.models.config_hf import config_from_hf
from xinfer_vk.names import did_you_mean


def _model(
    architecture: str, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int, *,
    tied: bool, context: int, theta: float, eps: float, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "architectures": [architecture],
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": context,
        "rope_theta": theta,
        "rms_norm_eps": eps,
        **({} if "hidden_activation" in more else {"hidden_act": "silu"}),
        **more,
    }


def _qwen2(
    hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, *, tied: bool, vocab: int = 151936
) -> dict[str, Any]:
    return _model(
        "Qwen2ForCausalLM", hidden, mlp, layers, heads, kv_heads, vocab, tied=tied, context=32768,
        theta=1e6, eps=1e-6, eos_token_id=151645,
    )  # fmt: skip


def _smollm2(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, theta: float) -> dict[str, Any]:
    return _model(
        "LlamaForCausalLM", hidden, mlp, layers, heads, kv_heads, 49152, tied=True, context=8192,
        theta=theta, eps=1e-5, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def _llama3(
    hidden: int, mlp: int, layers: int, heads: int, head_dim: int, *, tied: bool, factor: float
) -> dict[str, Any]:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return _model(
        "LlamaForCausalLM", hidden, mlp, layers, heads, 8, 128256, tied=tied, context=131072, theta=5e5,
        eps=1e-5, bos_token_id=128000, eos_token_id=128001, head_dim=head_dim, rope_scaling=scaling,
    )  # fmt: skip


def _qwen3(
    hidden: int, mlp: int, layers: int, heads: int, *, tied: bool, vocab: int = 151936
) -> dict[str, Any]:
    return _model(
        "Qwen3ForCausalLM", hidden, mlp, layers, heads, 8, vocab, tied=tied, context=40960, theta=1e6,
        eps=1e-6, head_dim=128, eos_token_id=151645,
    )  # fmt: skip


def _qwen3moe(hidden: int, width: int, layers: int, heads: int) -> dict[str, Any]:
    """No layer has an MLP, so the ``intermediate_size`` that the files give means nothing."""
    return _model(
        "Qwen3MoeForCausalLM", hidden, 3 * hidden, layers, heads, 4, 151936, tied=False, context=40960,
        theta=1e6, eps=1e-6, head_dim=128, eos_token_id=151645, moe_intermediate_size=width, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True,
    )  # fmt: skip


def _gemma3(hidden: int, mlp: int, layers: int) -> dict[str, Any]:
    """One layer in six attends to everything, the others to a window of 512."""
    kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)]
    return _model(
        "Gemma3ForCausalLM", hidden, mlp, layers, 4, 1, 262144, tied=True, context=32768, theta=1e6, eps=1e-6,
        head_dim=256, hidden_activation="gelu_pytorch_tanh", sliding_window=512, layer_types=kinds,
        query_pre_attn_scalar=256, rope_local_base_freq=1e4, bos_token_id=2, eos_token_id=1,
    )  # fmt: skip


def _gemma2(
    hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, head_dim: int, scalar: int
) -> dict[str, Any]:
    """Every other layer attends to a window of 4096."""
    return _model(
        "Gemma2ForCausalLM", hidden, mlp, layers, heads, kv_heads, 256000, tied=True, context=8192, theta=1e4,
        eps=1e-6, head_dim=head_dim, hidden_activation="gelu_pytorch_tanh", sliding_window=4096,
        query_pre_attn_scalar=scalar, attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
        bos_token_id=2, eos_token_id=1,
    )  # fmt: skip


def _granite(hidden: int, mlp: int, layers: int, *, attention: float, logits: float) -> dict[str, Any]:
    return _model(
        "GraniteForCausalLM", hidden, mlp, layers, 32, 8, 49159, tied=True, context=131072, theta=1e7,
        eps=1e-5, attention_multiplier=attention, embedding_multiplier=12.0, logits_scaling=logits,
        residual_multiplier=0.22, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def _olmo2(hidden: int, mlp: int, layers: int, heads: int) -> dict[str, Any]:
    return _model(
        "Olmo2ForCausalLM", hidden, mlp, layers, heads, heads, 100352, tied=False, context=4096, theta=5e5,
        eps=1e-6, eos_token_id=100257,
    )  # fmt: skip


def _phi3(
    hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int, *, context: int, theta: float,
    window: int | None, eos: int,
) -> dict[str, Any]:  # fmt: skip
    return _model(
        "Phi3ForCausalLM", hidden, mlp, layers, heads, kv_heads, vocab, tied=False, context=context,
        theta=theta, eps=1e-5, sliding_window=window, original_max_position_embeddings=context,
        eos_token_id=eos,
    )  # fmt: skip


def _llama2(
    hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, context: int = 4096
) -> dict[str, Any]:
    return _model(
        "LlamaForCausalLM", hidden, mlp, layers, heads, kv_heads, 32000, tied=False, context=context,
        theta=1e4, eps=1e-5, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": _smollm2(576, 1536, 30, 9, 3, 1e5),  # HuggingFaceTB/SmolLM2-135M-Instruct
    "smollm2-360m": _smollm2(960, 2560, 32, 15, 5, 1e5),  # HuggingFaceTB/SmolLM2-360M-Instruct
    "smollm2-1.7b": _smollm2(2048, 8192, 24, 32, 32, 1.3e5),  # HuggingFaceTB/SmolLM2-1.7B-Instruct
    "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14, 2, tied=True),  # Qwen/Qwen2.5-0.5B-Instruct, and so on
    "qwen2.5-1.5b": _qwen2(1536, 8960, 28, 12, 2, tied=True),
    "qwen2.5-3b": _qwen2(2048, 11008, 36, 16, 2, tied=True),
    "qwen2.5-7b": _qwen2(3584, 18944, 28, 28, 4, tied=False, vocab=152064),
    "qwen2.5-14b": _qwen2(5120, 13824, 48, 40, 8, tied=False, vocab=152064),
    "qwen2.5-32b": _qwen2(5120, 27648, 64, 40, 8, tied=False, vocab=152064),
    "llama-3.2-1b": _llama3(2048, 8192, 16, 32, 64, tied=True, factor=32.0),  # meta-llama/Llama-3.2-1B
    "llama-3.2-3b": _llama3(3072, 8192, 28, 24, 128, tied=True, factor=32.0),  # meta-llama/Llama-3.2-3B
    "llama-3.1-8b": _llama3(4096, 14336, 32, 32, 128, tied=False, factor=8.0),  # meta-llama/Llama-3.1-8B
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),  # Qwen/Qwen3-0.6B, and so on
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, tied=False),
    "qwen3-30b-a3b": _qwen3moe(2048, 768, 48, 32),  # Qwen/Qwen3-30B-A3B
    "qwen3-235b-a22b": _qwen3moe(4096, 1536, 94, 64),  # Qwen/Qwen3-235B-A22B
    "gemma-3-270m": _gemma3(640, 2048, 18),  # google/gemma-3-270m-it
    "gemma-3-1b": _gemma3(1152, 6912, 26),  # google/gemma-3-1b-it
    "gemma-2-2b": _gemma2(2304, 9216, 26, 8, 4, 256, 256),  # google/gemma-2-2b-it
    "gemma-2-9b": _gemma2(3584, 14336, 42, 16, 8, 256, 256),  # google/gemma-2-9b-it
    "gemma-2-27b": _gemma2(4608, 36864, 46, 32, 16, 128, 144),  # google/gemma-2-27b-it
    # ibm-granite/granite-3.3-2b-instruct and so on
    "granite-3.3-2b": _granite(2048, 8192, 40, attention=0.015625, logits=8.0),
    "granite-3.3-8b": _granite(4096, 12800, 40, attention=0.0078125, logits=16.0),
    "olmo-2-1b": _olmo2(2048, 8192, 16, 16),  # allenai/OLMo-2-0425-1B
    "olmo-2-7b": _olmo2(4096, 11008, 32, 32),  # allenai/OLMo-2-1124-7B
    "olmo-2-13b": _olmo2(5120, 13824, 40, 40),  # allenai/OLMo-2-1124-13B
    # microsoft/Phi-3-mini-4k-instruct, microsoft/phi-4
    "phi-3-mini": _phi3(3072, 8192, 32, 32, 32, 32064, context=4096, theta=1e4, window=2047, eos=32000),
    "phi-4": _phi3(5120, 17920, 40, 40, 10, 100352, context=16384, theta=250000.0, window=None, eos=100265),
    "smollm3-3b": _model(  # HuggingFaceTB/SmolLM3-3B
        "SmolLM3ForCausalLM", 2048, 11008, 36, 16, 4, 128256, tied=True, context=65536, theta=5e6, eps=1e-6,
        no_rope_layer_interval=4, bos_token_id=128000, eos_token_id=128012,
    ),
    "mistral-7b": _model(  # mistralai/Mistral-7B-Instruct-v0.3
        "MistralForCausalLM", 4096, 14336, 32, 32, 8, 32768, tied=False, context=32768, theta=1e6, eps=1e-5,
        sliding_window=None, bos_token_id=1, eos_token_id=2,
    ),
    "mixtral-8x7b": _model(  # mistralai/Mixtral-8x7B-Instruct-v0.1
        "MixtralForCausalLM", 4096, 14336, 32, 32, 8, 32000, tied=False, context=32768, theta=1e6, eps=1e-5,
        num_local_experts=8, num_experts_per_tok=2, bos_token_id=1, eos_token_id=2,
    ),
    "llama-2-7b": _llama2(4096, 11008, 32, 32, 32),  # meta-llama/Llama-2-7b-hf
    "tinyllama-1.1b": _llama2(2048, 5632, 22, 32, 4, context=2048),  # TinyLlama/TinyLlama-1.1B-Chat-v1.0
}  # fmt: skip


def shape_config(name: str) -> tuple[ModelConfig, dict[str, Any]]:
    """The config of a known shape, parsed and as the file has it. Raises :class:`UsageError` for a name
    that is not known."""
    if name not in SHAPES:
        remedy = did_you_mean(name, SHAPES) or f"choose from {', '.join(SHAPES)}"
        raise UsageError(f"the shape {name!r} is not known: {remedy}")
    return config_from_hf(SHAPES[name], where=f"the shape {name}"), SHAPES[name]

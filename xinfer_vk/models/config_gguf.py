"""A model's configuration from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from xinfer_vk.errors import ModelError
from xinfer_vk.fields import Fields
from xinfer_vk.models.config import (
    GEMMA,
    GEMMA2_PERIOD,
    GEMMA3_PERIOD,
    MAX_CONTEXT,
    MAX_LAYERS,
    MAX_SCALE,
    MAX_VOCABULARY,
    MAX_WIDTH,
    NOPE_PERIOD,
    ModelConfig,
    SpecialIds,
    all_but_each,
    embedding_scale,
    read_heads,
    refuse_unless_neutral,
)
from xinfer_vk.models.expert_config import GGUF_EXPERT_NEUTRAL, experts_from_gguf
from xinfer_vk.models.hf_families import why_unsupported
from xinfer_vk.models.rope_scaling import scaling_from_gguf

GGUF_ARCHITECTURES = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3moe",
    "gemma2",
    "gemma3",
    "smollm3",
    "granite",
    "olmo2",
    "phi3",
)

# Window and soft caps where the keys are missing: the first files of Gemma 2 have none of them.
UNSAID: dict[str, Any] = {"window": 0, "scores": 0.0, "logits": 0.0}
GEMMA2_UNSAID: dict[str, Any] = {"window": 4096, "scores": 50.0, "logits": 30.0}
# Those of GGUF_NEUTRAL that mean something in an architecture.
GGUF_KEYS = {
    "llama": ("attention.sliding_window", "expert_count"),  # Mistral, Mixtral
    "qwen3moe": ("expert_count",),
    "gemma2": ("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"),
    "gemma3": ("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"),
    "phi3": ("attention.sliding_window",),
    "granite": ("attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
}
GGUF_NEUTRAL: dict[str, Any] = {
    **GGUF_EXPERT_NEUTRAL,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.scale": None,
    "attention.sliding_window": None,
    "attn_logit_softcapping": None,
    "embedding_scale": 1.0,
    "expert_count": 0,
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "use_parallel_residual": False,
}


def config_from_gguf(
    metadata: Mapping[str, Any], tensor_names: Collection[str] | None = None, where: str = "the GGUF file"
) -> ModelConfig:
    """The config in a GGUF file's metadata (the keys of the GGUF specification).

    ``tensor_names``: names in the file. The format says nowhere whether the head is tied or the
    projections have biases; the tensors that are there do.
    """
    f = Fields(metadata, where)
    names = frozenset(tensor_names or ())
    arch = _gguf_architecture(f)
    f = Fields(_same_in_every_layer(metadata, arch), where)
    neutral = {key: harmless for key, harmless in GGUF_NEUTRAL.items() if key not in GGUF_KEYS.get(arch, ())}
    refuse_unless_neutral(f, neutral, prefix=f"{arch}.")

    hidden = f.integer(f"{arch}.embedding_length", low=1, high=MAX_WIDTH)
    max_position = f.integer(f"{arch}.context_length", low=1, high=MAX_CONTEXT)
    lengths = (f"{arch}.attention.key_length", f"{arch}.attention.value_length")
    heads, kv_heads, head_dim = read_heads(
        f, f"{arch}.attention.head_count", f"{arch}.attention.head_count_kv", lengths, hidden
    )
    rotary = f.integer(f"{arch}.rope.dimension_count", head_dim, low=1, high=MAX_WIDTH)
    if rotary != head_dim and arch != "phi3":
        raise f.wrong(
            f"{arch}.rope.dimension_count", f"only the whole head dimension {head_dim} is supported"
        )
    if rotary % 2 or rotary > head_dim:
        raise f.wrong(f"{arch}.rope.dimension_count", f"an even number up to {head_dim} was expected")
    layers = f.integer(f"{arch}.block_count", low=1, high=MAX_LAYERS)
    sliding = _gguf_sliding_layers(f, arch, layers)
    unsaid = GEMMA2_UNSAID if arch == "gemma2" else UNSAID
    window = f.integer(f"{arch}.attention.sliding_window", unsaid["window"]) or max_position

    tokens = metadata.get("tokenizer.ggml.tokens")
    counted = len(tokens) if isinstance(tokens, (list, tuple)) and tokens else None
    vocab_key = f"{arch}.vocab_size"
    if counted is None and vocab_key not in f:
        raise ModelError(
            f"{where}: neither {vocab_key} nor tokenizer.ggml.tokens says how large the vocabulary is"
        )
    vocab_size = f.integer(vocab_key, counted, low=1, high=MAX_VOCABULARY)
    special = SpecialIds(vocab_size)
    eos: tuple[int, ...] = ()
    for kind in ("eos", "eot", "eom"):
        eos += special.read(f, f"tokenizer.ggml.{kind}_token_id")
    bos = special.read(f, "tokenizer.ggml.bos_token_id")

    return ModelConfig(
        architecture=arch,
        hidden_size=hidden,
        intermediate_size=f.integer(f"{arch}.feed_forward_length", low=1, high=MAX_WIDTH),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary,
        vocab_size=vocab_size,
        rms_norm_eps=f.number(f"{arch}.attention.layer_norm_rms_epsilon", low=0.0, high=1.0),
        rope_theta=f.number(f"{arch}.rope.freq_base", 10000.0, low=1.0, high=1e15),
        rope_scaling=scaling_from_gguf(f, arch, max_position),
        max_position=max_position,
        tie_word_embeddings="output.weight" not in names,
        attention_bias=arch == "qwen2" or "blk.0.attn_q.bias" in names,
        attention_output_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_gate.bias" in names,
        hidden_act="gelu_tanh" if arch in GEMMA else "silu",
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=bos[0] if bos else None,
        ids_left_out=tuple(special.left_out),
        layer_windows=tuple(window if here else None for here in sliding) if window < max_position else (),
        layer_ropes=_gguf_ropes(arch, sliding),
        local_rope_theta=f.number(f"{arch}.rope.freq_base_swa", 10000.0, low=1.0, high=1e15)
        if arch == "gemma3"
        else None,
        attention_scale=_gguf_attention_scale(f, arch, layers, hidden // heads, head_dim),
        attention_softcap=f.number(f"{arch}.attn_logit_softcapping", unsaid["scores"], high=MAX_SCALE),
        logit_softcap=f.number(f"{arch}.final_logit_softcapping", unsaid["logits"], high=MAX_SCALE),
        embedding_scale=embedding_scale(f, f"{arch}.embedding_scale", arch, hidden),
        residual_scale=f.number(f"{arch}.residual_scale", 1.0, low=1e-6, high=MAX_SCALE),
        logit_scale=1.0 / f.number(f"{arch}.logit_scale", 1.0, low=1e-6, high=MAX_SCALE),
        experts=experts_from_gguf(f, arch, names, layers),
    )


def _gguf_architecture(f: Fields) -> str:
    name = f.raw("general.architecture")
    why = why_unsupported(name) if isinstance(name, str) and name not in GGUF_ARCHITECTURES else None
    if why:
        raise f.wrong("general.architecture", f"{why}; supported: {', '.join(GGUF_ARCHITECTURES)}")
    return f.choice("general.architecture", GGUF_ARCHITECTURES)


def _same_in_every_layer(metadata: Mapping[str, Any], arch: str) -> dict[str, Any]:
    """The metadata, where a list of the same number for every layer is that number."""
    layers = metadata.get(f"{arch}.block_count")
    return {
        key: value[0]
        if isinstance(value, list)
        and key.startswith(f"{arch}.")
        and len(value) == layers
        and type(value[0]) in (int, float)
        and value.count(value[0]) == len(value)
        else value
        for key, value in metadata.items()
    }


def _gguf_sliding_layers(f: Fields, arch: str, layers: int) -> tuple[bool, ...]:
    """Which layers have the window: said by the file, or the architecture's pattern (as in llama.cpp)."""
    key = f"{arch}.attention.sliding_window_pattern"
    given = f.raw(key, {"gemma2": GEMMA2_PERIOD, "gemma3": GEMMA3_PERIOD}.get(arch, 0))
    if isinstance(given, list):
        if len(given) != layers or any(not isinstance(x, bool) for x in given):
            raise f.wrong(key, f"{layers} truth values were expected")
        return tuple(given)
    if not isinstance(given, int) or given < 0:
        raise f.wrong(key, "a number of layers was expected")
    return all_but_each(given, layers) if given else (True,) * layers


def _gguf_ropes(arch: str, sliding: tuple[bool, ...]) -> tuple[str | None, ...]:
    if arch == "gemma3":
        return tuple("local" if here else "global" for here in sliding)
    if arch == "smollm3":
        rotated = all_but_each(NOPE_PERIOD, len(sliding))
        return tuple("global" if here else None for here in rotated)
    return ()


def _gguf_attention_scale(f: Fields, arch: str, layers: int, wide: int, head_dim: int) -> float | None:
    """Gemma's is not in the file. Its 27B models, which llama.cpp knows by their number of layers, divide
    by the width over the heads, the others by the head dimension (gemma_pytorch, config.py)."""
    if arch in GEMMA:
        return (wide if (arch, layers) in (("gemma2", 46), ("gemma3", 62)) else head_dim) ** -0.5
    return f.number(f"{arch}.attention.scale", None, low=1e-9, high=MAX_SCALE)

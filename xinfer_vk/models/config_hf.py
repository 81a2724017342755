"""A model's configuration from a Hugging Face checkpoint's ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
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
from xinfer_vk.models.expert_config import HF_EXPERT_NEUTRAL, experts_from_hf
from xinfer_vk.models.hf_families import HF_FAMILIES, HFFamily, hf_family, why_unsupported
from xinfer_vk.models.multimodal import WRAPPERS
from xinfer_vk.models.rope_scaling import rope_from_hf

# Keys that change the mathematics where some relative of these families sets them, with the value
# that changes nothing.
HF_NEUTRAL: dict[str, Any] = {
    **HF_EXPERT_NEUTRAL,
    "attention_multiplier": None,
    "attn_logit_softcapping": None,
    "embedding_multiplier": 1.0,
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "no_rope_layers": None,
    "num_experts": 0,
    "num_local_experts": 0,
    "partial_rotary_factor": 1.0,
    "qk_layernorm": False,
    "residual_multiplier": 1.0,
    "rope_interleaved": False,
    "use_bidirectional_attention": False,
    "use_mrope": False,
    "use_qk_norm": False,
}


def config_from_hf(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None, where: str = "config.json"
) -> ModelConfig:
    """The config of a Hugging Face checkpoint.

    ``config`` is the parsed ``config.json`` of transformers 4 or 5 (which moved the RoPE settings to
    ``rope_parameters``); missing keys take transformers' defaults. ``where`` names the file in errors.
    Raises :class:`ModelError` for a missing, malformed or unsupported value, by key.
    """
    family = _hf_family(Fields(config, where))
    f = Fields({**family.defaults, **config}, where)
    architecture = family.architecture
    neutral = {key: harmless for key, harmless in HF_NEUTRAL.items() if key not in family.keys}
    refuse_unless_neutral(f, neutral)
    own_code = f.raw("auto_map", {})
    if isinstance(own_code, dict) and "AutoModelForCausalLM" in own_code and "auto_map" not in family.keys:
        raise f.wrong("auto_map", "a model that brings its own code is not supported")

    layers = f.integer("num_hidden_layers", low=1, high=MAX_LAYERS)
    hidden = f.integer("hidden_size", low=1, high=MAX_WIDTH)
    max_position = f.integer("max_position_embeddings", low=1, high=MAX_CONTEXT)
    heads, kv_heads, head_dim = read_heads(
        f, "num_attention_heads", "num_key_value_heads", ("head_dim",), hidden
    )
    attention_bias = architecture != "qwen2" and f.flag("attention_bias", False)
    vocab_size = f.integer("vocab_size", low=1, high=MAX_VOCABULARY)
    generation = Fields(generation_config or {}, where.replace("config.json", "generation_config.json"))
    special = SpecialIds(vocab_size)
    eos = special.read(generation, "eos_token_id")
    if "eos_token_id" in config or not eos:  # the family's default counts only where nothing else is said
        eos += special.read(f, "eos_token_id", given="eos_token_id" in config)
    bos = special.read(f, "bos_token_id", given="bos_token_id" in config)

    rope = rope_from_hf(f, max_position, head_dim, partial="partial_rotary_factor" in family.keys)
    if rope.scaling is not None and architecture != "gemma3":  # which has the scaled number
        max_position = rope.scaling.reach(max_position)
    sliding = _sliding_layers(f, family, layers)
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=f.integer("intermediate_size", low=1, high=MAX_WIDTH),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=rope.dim,
        vocab_size=vocab_size,
        rms_norm_eps=f.number("rms_norm_eps", low=0.0, high=1.0),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        max_position=max_position,
        tie_word_embeddings=f.flag("tie_word_embeddings"),
        attention_bias=architecture == "qwen2" or attention_bias,
        attention_output_bias=attention_bias,
        mlp_bias=architecture != "qwen2" and f.flag("mlp_bias", False),
        hidden_act=_hf_activation(f, architecture),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=bos[0] if bos else None,
        ids_left_out=tuple(dict.fromkeys(special.left_out)),
        layer_windows=_hf_windows(f, family, sliding, max_position),
        layer_ropes=_hf_ropes(f, architecture, sliding),
        local_rope_theta=rope.local_theta,
        attention_scale=_hf_attention_scale(f, architecture),
        attention_softcap=f.number("attn_logit_softcapping", 0.0, low=1e-3, high=MAX_SCALE),
        logit_softcap=f.number("final_logit_softcapping", 0.0, low=1e-3, high=MAX_SCALE),
        embedding_scale=embedding_scale(f, "embedding_multiplier", architecture, hidden),
        residual_scale=f.number("residual_multiplier", 1.0, low=1e-6, high=MAX_SCALE),
        logit_scale=1.0 / f.number("logits_scaling", 1.0, low=1e-6, high=MAX_SCALE),
        experts=experts_from_hf(f, architecture, layers),
    )


def _hf_family(f: Fields) -> HFFamily:
    """The family that ``architectures`` or, failing that, ``model_type`` names."""
    named = f.raw("architectures", [])
    classes = ", ".join(name for family in HF_FAMILIES for name in family.classes)
    if not isinstance(named, list) or len(named) > 1:
        raise f.wrong("architectures", f"one of {classes} is supported")
    key, name = ("architectures", named[0]) if named else ("model_type", f.raw("model_type"))
    family = hf_family(name) if isinstance(name, str) else None
    if family is not None:
        return family
    supported = classes if named else ", ".join(t for family in HF_FAMILIES for t in family.model_types)
    why = why_unsupported(name) if isinstance(name, str) else None
    if why is None and ("vision_config" in f or "audio_config" in f or "text_config" in f):
        why = f"the multimodal models whose text model is supported are {', '.join(WRAPPERS)}"
    raise f.wrong(key, f"{why}; supported: {supported}" if why else f"supported: {supported}")


def _hf_activation(f: Fields, architecture: str) -> str:
    """The MLP's activation. Gemma's ``hidden_act`` is a relic: ``hidden_activation`` is what counts."""
    if architecture in GEMMA:
        f.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
        return "gelu_tanh"
    return f.choice("hidden_act", ("silu",), "silu")


def _hf_attention_scale(f: Fields, architecture: str) -> float | None:
    if architecture in GEMMA:
        return f.number("query_pre_attn_scalar", low=1e-6, high=MAX_WIDTH) ** -0.5
    return f.number("attention_multiplier", None, low=1e-9, high=MAX_SCALE)


def _sliding_layers(f: Fields, family: HFFamily, layers: int) -> tuple[bool, ...]:
    """Which layers are of the type "sliding_attention", by the rule of each configuration class."""
    types = f.raw("layer_types", None)
    architecture = family.architecture
    if architecture in ("mistral", "mixtral", "qwen3moe"):  # their classes know no layer types
        return (True,) * layers
    if types is not None:
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) < layers or any(t not in known for t in types):
            raise f.wrong("layer_types", f"a list of {layers} types was expected, each one of {known}")
        return tuple(t == "sliding_attention" for t in types[:layers])
    if architecture in ("qwen2", "qwen3"):
        first = f.integer("max_window_layers")
        return tuple(i >= first for i in range(layers))
    if architecture == "smollm3":  # where it has a window, the layers without RoPE have it
        return tuple(not rotated for rotated in _rotated_layers(f, layers))
    if architecture in GEMMA:
        period = GEMMA2_PERIOD if architecture == "gemma2" else GEMMA3_PERIOD
        return all_but_each(f.integer("sliding_window_pattern", period, low=1), layers)
    return (True,) * layers


def _hf_windows(
    f: Fields, family: HFFamily, sliding: tuple[bool, ...], max_position: int
) -> tuple[int | None, ...]:
    """Every layer's window. One as long as the context masks nothing."""
    if "use_sliding_window" in family.defaults and not f.flag("use_sliding_window", False):
        return ()
    window = f.integer("sliding_window", None, low=1)
    if window is None or window >= max_position or not any(sliding):
        return ()
    if "sliding_window" not in family.defaults:
        raise ModelError(
            f"{f.where}: sliding_window is {window} of {max_position} positions, and {family.architecture} "
            "models are supported with full attention only"
        )
    return tuple(window if here else None for here in sliding)


def _rotated_layers(f: Fields, layers: int) -> tuple[bool, ...]:
    """Which layers of a SmolLM3 use RoPE."""
    given = f.raw("no_rope_layers", None)
    if given is None:
        period = f.integer("no_rope_layer_interval", NOPE_PERIOD, low=1)
        return all_but_each(period, layers)
    if not isinstance(given, list) or len(given) < layers or any(x not in (0, 1) for x in given):
        raise f.wrong("no_rope_layers", f"a list of {layers} zeros and ones was expected")
    return tuple(bool(x) for x in given[:layers])


def _hf_ropes(f: Fields, architecture: str, sliding: tuple[bool, ...]) -> tuple[str | None, ...]:
    if architecture == "gemma3":
        return tuple("local" if here else "global" for here in sliding)
    if architecture == "smollm3":
        return tuple("global" if rotated else None for rotated in _rotated_layers(f, len(sliding)))
    return ()

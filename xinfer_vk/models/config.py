"""What a model is: its sizes and switches, read from ``config.json`` or from GGUF metadata.

A checkpoint declares far more than we read, and most of it does not matter to inference. What does
matter and is not implemented is refused by its key and value: a model that loads is computed as its
authors meant it, or not at all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from xinfer_vk.errors import ModelError
from xinfer_vk.fields import Fields, quoted
from xinfer_vk.models.expert_config import (
    GGUF_EXPERT_NEUTRAL,
    HF_EXPERT_NEUTRAL,
    ExpertConfig,
    experts_from_gguf,
    experts_from_hf,
)
from xinfer_vk.models.hf_families import HF_FAMILIES, HFFamily, hf_family, why_unsupported
from xinfer_vk.models.multimodal import WRAPPERS
from xinfer_vk.models.rope_scaling import RopeScaling, rope_from_hf, rope_inv_freq, scaling_from_gguf

__all__ = [
    "ExpertConfig",
    "ModelConfig",
    "RopeScaling",
    "config_from_gguf",
    "config_from_hf",
    "rope_inv_freq",
]

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

# Sizes far beyond any model of these families: a number above is damage, and is refused before
# anything is allocated for it.
MAX_WIDTH = 1 << 20
MAX_LAYERS = 4096
MAX_VOCABULARY = 1 << 24
MAX_CONTEXT = 1 << 28
MAX_SCALE = 1e6

GEMMA = ("gemma2", "gemma3")
GEMMA2_PERIOD, GEMMA3_PERIOD = 2, 6  # every second, every sixth layer attends to all positions
NOPE_PERIOD = 4  # every fourth layer of a SmolLM3 has no RoPE

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


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer. Sizes are counts; ``head_dim`` and ``rotary_dim`` are even.

    ``attention_bias``: the query, key and value projections have biases; ``attention_output_bias``
    and ``mlp_bias``: so have the output projection and the MLP's three. Where layers differ, there is a
    value for each, and none at all where they do not.
    """

    architecture: str  # the name of a module beside this one: "llama", "gemma3", …
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int  # dimensions of a head that RoPE turns, from the first
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position: int  # tokens the model is good for, with rope_scaling
    tie_word_embeddings: bool
    attention_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    hidden_act: str  # "silu" or "gelu_tanh"
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    layer_windows: tuple[int | None, ...] = ()  # positions a token attends to, its own included; None: all
    layer_ropes: tuple[str | None, ...] = ()  # "global", "local" (theta is local_rope_theta), None: no RoPE
    local_rope_theta: float | None = None
    attention_scale: float | None = None  # of the scores; None: 1 / sqrt(head_dim)
    attention_softcap: float = 0.0  # scores s become c * tanh(s / c); 0: they do not
    logit_softcap: float = 0.0  # the same for the logits
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what a block adds to the residual stream
    logit_scale: float = 1.0
    experts: ExpertConfig | None = None

    def has_experts(self, layer: int) -> bool:
        """Whether this layer has experts where others have an MLP."""
        return self.experts is not None and self.experts.layers[layer]

    @property
    def residual_norm_eps(self) -> float:
        """Epsilon for norms of the residual stream as the graph keeps it, divided by ``residual_scale``."""
        return self.rms_norm_eps / self.residual_scale**2

    def window(self, layer: int) -> int | None:
        """Positions a token attends to in this layer, its own included; ``None``: all up to its own."""
        return self.layer_windows[layer] if self.layer_windows else None

    def rope(self, layer: int) -> str | None:
        """Which rotary table this layer uses: "global", "local" or none."""
        return self.layer_ropes[layer] if self.layer_ropes else "global"

    @property
    def q_dim(self) -> int:
        """Rows of the query projection."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.kv_heads * self.head_dim


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
    _refuse_unless_neutral(f, neutral)
    own_code = f.raw("auto_map", {})
    if isinstance(own_code, dict) and "AutoModelForCausalLM" in own_code and "auto_map" not in family.keys:
        raise f.wrong("auto_map", "a model that brings its own code is not supported")

    layers = f.integer("num_hidden_layers", low=1, high=MAX_LAYERS)
    hidden = f.integer("hidden_size", low=1, high=MAX_WIDTH)
    max_position = f.integer("max_position_embeddings", low=1, high=MAX_CONTEXT)
    heads, kv_heads, head_dim = _heads(f, "num_attention_heads", "num_key_value_heads", ("head_dim",), hidden)
    attention_bias = architecture != "qwen2" and f.flag("attention_bias", False)
    vocab_size = f.integer("vocab_size", low=1, high=MAX_VOCABULARY)
    generation = Fields(generation_config or {}, where.replace("config.json", "generation_config.json"))
    eos = generation.token_ids("eos_token_id", vocab_size)
    if "eos_token_id" in config or not eos:  # the family's default counts only where nothing else is said
        eos += f.token_ids("eos_token_id", vocab_size)

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
        bos_token_id=f.integer("bos_token_id", None, high=vocab_size - 1),
        layer_windows=_hf_windows(f, family, sliding, max_position),
        layer_ropes=_hf_ropes(f, architecture, sliding),
        local_rope_theta=rope.local_theta,
        attention_scale=_hf_attention_scale(f, architecture),
        attention_softcap=f.number("attn_logit_softcapping", 0.0, low=1e-3, high=MAX_SCALE),
        logit_softcap=f.number("final_logit_softcapping", 0.0, low=1e-3, high=MAX_SCALE),
        embedding_scale=_embedding_scale(f, "embedding_multiplier", architecture, hidden),
        residual_scale=f.number("residual_multiplier", 1.0, low=1e-6, high=MAX_SCALE),
        logit_scale=1.0 / f.number("logits_scaling", 1.0, low=1e-6, high=MAX_SCALE),
        experts=experts_from_hf(f, architecture, layers),
    )


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
    neutral = {key: harmless for key, harmless in GGUF_NEUTRAL.items() if key not in GGUF_KEYS.get(arch, ())}
    _refuse_unless_neutral(f, neutral, prefix=f"{arch}.")

    hidden = f.integer(f"{arch}.embedding_length", low=1, high=MAX_WIDTH)
    max_position = f.integer(f"{arch}.context_length", low=1, high=MAX_CONTEXT)
    lengths = (f"{arch}.attention.key_length", f"{arch}.attention.value_length")
    heads, kv_heads, head_dim = _heads(
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
    window = f.integer(f"{arch}.attention.sliding_window", 0) or max_position

    tokens = metadata.get("tokenizer.ggml.tokens")
    counted = len(tokens) if isinstance(tokens, (list, tuple)) and tokens else None
    vocab_key = f"{arch}.vocab_size"
    if counted is None and vocab_key not in f:
        raise ModelError(
            f"{where}: neither {vocab_key} nor tokenizer.ggml.tokens says how large the vocabulary is"
        )
    vocab_size = f.integer(vocab_key, counted, low=1, high=MAX_VOCABULARY)
    eos: tuple[int, ...] = ()
    for kind in ("eos", "eot", "eom"):
        eos += f.token_ids(f"tokenizer.ggml.{kind}_token_id", vocab_size)

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
        bos_token_id=f.integer("tokenizer.ggml.bos_token_id", None, high=vocab_size - 1),
        layer_windows=tuple(window if here else None for here in sliding) if window < max_position else (),
        layer_ropes=_gguf_ropes(arch, sliding),
        local_rope_theta=f.number(f"{arch}.rope.freq_base_swa", 10000.0, low=1.0, high=1e15)
        if arch == "gemma3"
        else None,
        attention_scale=_gguf_attention_scale(f, arch, layers, hidden // heads, head_dim),
        attention_softcap=f.number(f"{arch}.attn_logit_softcapping", 0.0, high=MAX_SCALE),
        logit_softcap=f.number(f"{arch}.final_logit_softcapping", 0.0, high=MAX_SCALE),
        embedding_scale=_embedding_scale(f, f"{arch}.embedding_scale", arch, hidden),
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
    return _all_but_each(given, layers) if given else (True,) * layers


def _gguf_ropes(arch: str, sliding: tuple[bool, ...]) -> tuple[str | None, ...]:
    if arch == "gemma3":
        return tuple("local" if here else "global" for here in sliding)
    if arch == "smollm3":
        rotated = _all_but_each(NOPE_PERIOD, len(sliding))
        return tuple("global" if here else None for here in rotated)
    return ()


def _gguf_attention_scale(f: Fields, arch: str, layers: int, wide: int, head_dim: int) -> float | None:
    """Gemma's is not in the file. Its 27B models, which llama.cpp knows by their number of layers, divide
    by the width over the heads, the others by the head dimension (gemma_pytorch, config.py)."""
    if arch in GEMMA:
        return (wide if (arch, layers) in (("gemma2", 46), ("gemma3", 62)) else head_dim) ** -0.5
    return f.number(f"{arch}.attention.scale", None, low=1e-9, high=MAX_SCALE)


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


def _embedding_scale(f: Fields, key: str, architecture: str, hidden: int) -> float:
    """Gemma's is not in the file: the square root of the width."""
    return float(hidden**0.5) if architecture in GEMMA else f.number(key, 1.0, low=1e-6, high=MAX_SCALE)


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
        return _all_but_each(f.integer("sliding_window_pattern", period, low=1), layers)
    return (True,) * layers


def _all_but_each(period: int, layers: int) -> tuple[bool, ...]:
    """All layers but each ``period``-th, counted from one."""
    return tuple((i + 1) % period != 0 for i in range(layers))


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
        return _all_but_each(period, layers)
    if not isinstance(given, list) or len(given) < layers or any(x not in (0, 1) for x in given):
        raise f.wrong("no_rope_layers", f"a list of {layers} zeros and ones was expected")
    return tuple(bool(x) for x in given[:layers])


def _hf_ropes(f: Fields, architecture: str, sliding: tuple[bool, ...]) -> tuple[str | None, ...]:
    if architecture == "gemma3":
        return tuple("local" if here else "global" for here in sliding)
    if architecture == "smollm3":
        return tuple("global" if rotated else None for rotated in _rotated_layers(f, len(sliding)))
    return ()


def _refuse_unless_neutral(f: Fields, neutral: Mapping[str, Any], prefix: str = "") -> None:
    for key, harmless in neutral.items():
        value = f.values.get(prefix + key)
        if value is None or (type(value) in (bool, int, float) and value == harmless):
            continue
        wanted = "it must be absent" if harmless is None else f"only {quoted(harmless)} is supported"
        raise f.wrong(prefix + key, wanted)


def _heads(
    f: Fields, heads_key: str, kv_key: str, dim_keys: tuple[str, ...], hidden: int
) -> tuple[int, int, int]:
    """(query heads, key/value heads, head dimension), checked against each other."""
    heads = f.integer(heads_key, low=1, high=MAX_WIDTH)
    kv_heads = f.integer(kv_key, heads, low=1, high=MAX_WIDTH)
    if heads % kv_heads:
        raise ModelError(
            f"{f.where}: {heads_key} is {heads}, not a multiple of {kv_key}, which is {kv_heads}"
        )
    dims = {key: f.integer(key, None, low=1, high=MAX_WIDTH) for key in dim_keys}
    given = {key: dim for key, dim in dims.items() if dim is not None}
    if not given and hidden % heads:
        raise ModelError(f"{f.where}: the width {hidden} is not a multiple of {heads_key}, which is {heads}")
    head_dim = next(iter(given.values()), hidden // heads)
    for key, dim in given.items():
        if dim != head_dim:
            raise f.wrong(key, f"only keys and values of one length ({head_dim}) are supported")
    if head_dim % 2 or not head_dim:
        name = next(iter(given), f"the head dimension (width {hidden} over {heads} heads)")
        raise ModelError(f"{f.where}: {name} is {head_dim}, an even number was expected")
    return heads, kv_heads, head_dim

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
from xinfer_vk.models.rope_scaling import RopeScaling, rope_inv_freq, scaling_from_gguf, scaling_from_hf

__all__ = ["ModelConfig", "RopeScaling", "config_from_gguf", "config_from_hf", "rope_inv_freq"]

HF_ARCHITECTURES = {"Qwen2ForCausalLM": "qwen2", "LlamaForCausalLM": "llama"}
GGUF_ARCHITECTURES = ("llama", "qwen2")

# Sizes far beyond any model of these families: a number above is damage, and is refused before
# anything is allocated for it.
MAX_WIDTH = 1 << 20
MAX_LAYERS = 4096
MAX_VOCABULARY = 1 << 24
MAX_CONTEXT = 1 << 28

# Keys that change the mathematics where some relative of these families sets them, with the value
# that changes nothing.
HF_NEUTRAL: dict[str, Any] = {
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
    "quantization_config": None,
    "residual_multiplier": 1.0,
    "rope_interleaved": False,
    "use_mrope": False,
    "use_qk_norm": False,
}
GGUF_NEUTRAL: dict[str, Any] = {
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
    """A decoder of the Llama shape. Sizes are counts; ``head_dim`` is even and all of it is rotated.

    ``attention_bias``: the query, key and value projections have biases; ``attention_output_bias``
    and ``mlp_bias``: so have the output projection and the MLP's three.
    """

    architecture: str  # "qwen2" or "llama"
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position: int  # tokens the model was made for
    tie_word_embeddings: bool
    attention_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    hidden_act: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that RoPE turns: all of them in these families."""
        return self.head_dim

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
    f = Fields(config, where)
    architecture = _hf_architecture(f)
    qwen2 = architecture == "qwen2"
    _refuse_unless_neutral(f, HF_NEUTRAL)
    if isinstance(f.raw("auto_map", {}), dict) and "AutoModelForCausalLM" in f.raw("auto_map", {}):
        raise f.wrong("auto_map", "a model that brings its own code is not supported")

    layers = f.integer("num_hidden_layers", 32, low=1, high=MAX_LAYERS)
    hidden = f.integer("hidden_size", 4096, low=1, high=MAX_WIDTH)
    max_position = f.integer("max_position_embeddings", 32768 if qwen2 else 2048, low=1, high=MAX_CONTEXT)
    heads, kv_heads, head_dim = _heads(
        f, "num_attention_heads", "num_key_value_heads", ("head_dim",), hidden, default_heads=32,
        default_kv_heads=32 if qwen2 and "num_key_value_heads" not in f.values else None,
    )  # fmt: skip
    _refuse_sliding_window(f, layers, max_position, qwen2)
    attention_bias = not qwen2 and f.flag("attention_bias", False)
    vocab_size = f.integer("vocab_size", 151936 if qwen2 else 32000, low=1, high=MAX_VOCABULARY)

    generation = Fields(generation_config or {}, where.replace("config.json", "generation_config.json"))
    default_eos = () if qwen2 or "eos_token_id" in f.values else (2,)
    eos = generation.token_ids("eos_token_id", vocab_size) + f.token_ids("eos_token_id", vocab_size)
    default_bos = None if qwen2 or "bos_token_id" in f.values else 1

    theta, scaling = scaling_from_hf(f, max_position)
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=f.integer("intermediate_size", 22016 if qwen2 else 11008, low=1, high=MAX_WIDTH),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        rms_norm_eps=f.number("rms_norm_eps", 1e-6, low=0.0, high=1.0),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position=max_position,
        tie_word_embeddings=f.flag("tie_word_embeddings", False),
        attention_bias=qwen2 or attention_bias,
        attention_output_bias=attention_bias,
        mlp_bias=not qwen2 and f.flag("mlp_bias", False),
        hidden_act=f.choice("hidden_act", ("silu",), "silu"),
        eos_token_ids=tuple(dict.fromkeys(eos or default_eos)),
        bos_token_id=f.integer("bos_token_id", default_bos, high=vocab_size - 1),
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
    arch = f.choice("general.architecture", GGUF_ARCHITECTURES)
    _refuse_unless_neutral(f, GGUF_NEUTRAL, prefix=f"{arch}.")

    hidden = f.integer(f"{arch}.embedding_length", low=1, high=MAX_WIDTH)
    max_position = f.integer(f"{arch}.context_length", low=1, high=MAX_CONTEXT)
    lengths = (f"{arch}.attention.key_length", f"{arch}.attention.value_length")
    heads, kv_heads, head_dim = _heads(
        f, f"{arch}.attention.head_count", f"{arch}.attention.head_count_kv", lengths, hidden
    )
    rotary = f.integer(f"{arch}.rope.dimension_count", head_dim, low=1, high=MAX_WIDTH)
    if rotary != head_dim:
        raise f.wrong(
            f"{arch}.rope.dimension_count", f"only the whole head dimension {head_dim} is supported"
        )

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
        layers=f.integer(f"{arch}.block_count", low=1, high=MAX_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        rms_norm_eps=f.number(f"{arch}.attention.layer_norm_rms_epsilon", low=0.0, high=1.0),
        rope_theta=f.number(f"{arch}.rope.freq_base", 10000.0, low=1.0, high=1e15),
        rope_scaling=scaling_from_gguf(f, arch),
        max_position=max_position,
        tie_word_embeddings="output.weight" not in names,
        attention_bias=arch == "qwen2" or "blk.0.attn_q.bias" in names,
        attention_output_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_gate.bias" in names,
        hidden_act="silu",
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=f.integer("tokenizer.ggml.bos_token_id", None, high=vocab_size - 1),
    )


def _hf_architecture(f: Fields) -> str:
    """Our name of the architecture, from ``architectures`` or, failing that, ``model_type``."""
    named = f.raw("architectures", [])
    if not isinstance(named, list) or len(named) > 1:
        raise f.wrong("architectures", f"one of {', '.join(HF_ARCHITECTURES)} is supported")
    if named:
        if not isinstance(named[0], str) or named[0] not in HF_ARCHITECTURES:
            raise f.wrong("architectures", f"supported: {', '.join(HF_ARCHITECTURES)}")
        return HF_ARCHITECTURES[named[0]]
    return f.choice("model_type", tuple(HF_ARCHITECTURES.values()))


def _refuse_unless_neutral(f: Fields, neutral: Mapping[str, Any], prefix: str = "") -> None:
    for key, harmless in neutral.items():
        value = f.values.get(prefix + key)
        if value is None or (type(value) in (bool, int, float) and value == harmless):
            continue
        wanted = "it must be absent" if harmless is None else f"only {quoted(harmless)} is supported"
        raise f.wrong(prefix + key, wanted)


def _heads(
    f: Fields, heads_key: str, kv_key: str, dim_keys: tuple[str, ...], hidden: int,
    default_heads: int | None = None, default_kv_heads: int | None = None,
) -> tuple[int, int, int]:  # fmt: skip
    """(query heads, key/value heads, head dimension), checked against each other."""
    if default_heads is None:
        f.raw(heads_key)  # required
    heads = f.integer(heads_key, default_heads, low=1, high=MAX_WIDTH)
    kv_heads = f.integer(kv_key, default_kv_heads or heads, low=1, high=MAX_WIDTH)
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


def _refuse_sliding_window(f: Fields, layers: int, max_position: int, qwen2: bool) -> None:
    """Attention over a window is refused where it would change the result.

    As in transformers: Qwen2 has a window only if ``use_sliding_window`` is true, from layer
    ``max_window_layers`` on; and a window as long as the context masks nothing.
    """
    if qwen2 and not f.flag("use_sliding_window", False):
        return
    window = f.integer("sliding_window", 4096 if qwen2 and "sliding_window" not in f.values else None, low=1)
    if window is None or window >= max_position:
        return
    layer_types = f.raw("layer_types", None)
    if layer_types is not None:
        windowed = layer_types != ["full_attention"] * layers
    else:
        windowed = not qwen2 or f.integer("max_window_layers", 28) < layers
    if windowed:
        raise ModelError(
            f"{f.where}: sliding_window is {window} of {max_position} positions, and only full attention is "
            "supported"
        )

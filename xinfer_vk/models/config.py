"""What a model is: its sizes and switches, whatever file they are read from.

A checkpoint declares far more than we read, and most of it does not matter to inference. What does
matter and is not implemented is refused by its key and value: a model that loads is computed as its
authors meant it, or not at all. ``config.json`` is read by config_hf.py, GGUF metadata by config_gguf.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xinfer_vk.errors import ModelError
from xinfer_vk.fields import Fields, quoted
from xinfer_vk.models.expert_config import ExpertConfig
from xinfer_vk.models.rope_scaling import RopeScaling

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
    ids_left_out: tuple[str, ...] = ()  # special tokens' ids outside the vocabulary: "eos_token_id 32000"

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


class SpecialIds:
    """Reads the ids of special tokens. Those outside the vocabulary can never be generated: they are left
    out, and ``left_out`` names those that are ``given``, by the files and not by a family's defaults."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.left_out: list[str] = []

    def read(self, f: Fields, key: str, given: bool = True) -> tuple[int, ...]:
        ids = f.token_ids(key)
        if given:
            self.left_out += [f"{key} {i}" for i in ids if not self._inside(i)]
        return tuple(i for i in ids if self._inside(i))

    def _inside(self, token_id: int) -> bool:
        return 0 <= token_id < self._vocab_size


def refuse_unless_neutral(f: Fields, neutral: Mapping[str, Any], prefix: str = "") -> None:
    for key, harmless in neutral.items():
        value = f.values.get(prefix + key)
        if value is None or (type(value) in (bool, int, float) and value == harmless):
            continue
        wanted = "it must be absent" if harmless is None else f"only {quoted(harmless)} is supported"
        raise f.wrong(prefix + key, wanted)


def read_heads(
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


def embedding_scale(f: Fields, key: str, architecture: str, hidden: int) -> float:
    """Gemma's is not in the file: the square root of the width."""
    return float(hidden**0.5) if architecture in GEMMA else f.number(key, 1.0, low=1e-6, high=MAX_SCALE)


def all_but_each(period: int, layers: int) -> tuple[bool, ...]:
    """All layers but each ``period``-th, counted from one."""
    return tuple((i + 1) % period != 0 for i in range(layers))

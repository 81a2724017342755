"""Rotary position embedding's frequencies, and the ways to stretch them to longer contexts.

A head's dimensions turn in pairs; pair ``i`` of ``d/2`` turns by ``position * theta^(-2i/d)`` (Su et
al. 2021, "RoFormer"). Scaling divides the slow frequencies so that more positions fit into one turn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from xinfer_vk.errors import ModelError
from xinfer_vk.fields import Fields

if TYPE_CHECKING:
    from xinfer_vk.models.config import ModelConfig

HF_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
GGUF_TYPES = ("none", "linear", "yarn", "longrope")
MAX_THETA = 1e15
MAX_FACTOR = 1e6
# In GGUF files: llama3's divisors, and longrope's for sequences beyond and within the original context.
FACTOR_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
PARTIAL_HINT = "a share of the head that is an even number of dimensions was expected"


@dataclass(frozen=True)
class RopeScaling:
    """How the frequencies are changed, as transformers' ``modeling_rope_utils.py`` computes it.

    * ``linear``: all divided by ``factor`` (Chen et al. 2023, position interpolation).
    * ``dynamic``: theta grows with the sequence beyond ``original_max_position`` (NTK-aware).
    * ``llama3``: a wavelength longer than ``original_max_position / low_freq_factor`` is divided by
      ``factor``, one shorter than ``original_max_position / high_freq_factor`` is kept, and between the two
      they blend (Llama 3.1).
    * ``yarn``: dimensions that turn more than ``beta_fast`` times in the original context are kept, those
      that turn less than ``beta_slow`` times divided by ``factor``, with a ramp between, whose ends are
      whole dimensions if ``truncate`` (Peng et al. 2023).
    * ``longrope``: each divided by its own number, ``short_factors`` for sequences within the original
      context and ``factors`` for longer ones (Ding et al. 2024).
    * ``factors``: each divided by its own number (GGUF's ``rope_freqs.weight``, which holds the quotients
      of llama3 already worked out).

    ``attention_factor`` multiplies the rotated queries and keys (yarn and longrope).
    """

    type: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    factors: tuple[float, ...] = ()  # [rotary_dim / 2]
    short_factors: tuple[float, ...] = ()  # [rotary_dim / 2]
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies depend on how long the sequence is."""
        return self.type in ("dynamic", "longrope")

    def reach(self, max_position: int) -> int:
        """Tokens that a model is good for whose config says ``max_position``."""
        if self.type in ("linear", "dynamic"):  # the config has the unscaled number
            return int(self.factor * max_position)
        return (
            max(max_position, int(self.factor * self.original_max_position))
            if self.type == "yarn"
            else max_position
        )

    def key(self, length: int) -> int:
        """A number that is the same for two lengths with the same frequencies."""
        if self.type == "longrope":
            return int(length > self.original_max_position)
        return max(length, self.original_max_position) if self.type == "dynamic" else 0


@dataclass(frozen=True)
class Rope:
    """What a ``config.json`` says of RoPE: ``dim`` of each head are turned; ``local_theta`` is that of
    sliding-window layers where they have their own, always unscaled."""

    theta: float
    scaling: RopeScaling | None
    dim: int
    local_theta: float | None = None


def rope_from_hf(f: Fields, max_position: int, head_dim: int, partial: bool = False) -> Rope:
    """RoPE of a ``config.json``. ``partial``: the family may rotate only the first dimensions of a head.

    transformers 4 has ``rope_theta`` and ``rope_scaling`` (whose type is ``rope_type``, once
    ``type``); transformers 5 has both in ``rope_parameters``. A file with both spellings, as some
    tools write, is read as transformers 5 does: ``rope_scaling`` first. Gemma 3's
    ``rope_parameters`` are given by layer type; in transformers 4 the local theta is
    ``rope_local_base_freq``.
    """
    key = "rope_scaling" if f.raw("rope_scaling", {}) != {} else "rope_parameters"
    values = f.raw(key, {})
    if not isinstance(values, dict):
        raise f.wrong(key, "a mapping or null was expected")
    local_theta = f.number("rope_local_base_freq", None, low=1.0, high=MAX_THETA)
    where = f"{f.where}: {key}"
    if any(isinstance(value, dict) for value in values.values()):
        if local_theta is None or not values.keys() <= {"full_attention", "sliding_attention"}:
            raise ModelError(f"{where} is given per layer type, one set for all layers is supported")
        local = Fields(values.get("sliding_attention") or {}, f"{where}: sliding_attention")
        local.choice("rope_type", ("default",), "default")
        local_theta = local.number("rope_theta", local_theta, low=1.0, high=MAX_THETA)
        values, where = values.get("full_attention") or {}, f"{where}: full_attention"
    r = Fields(values, where)
    theta = r.number("rope_theta", None, low=1.0, high=MAX_THETA)
    if theta is None:
        theta = f.number("rope_theta", low=1.0, high=MAX_THETA)
    part = r if "partial_rotary_factor" in r else f
    rotary_dim = int(head_dim * part.number("partial_rotary_factor", 1.0, low=0.0, high=1.0))
    if rotary_dim % 2 or not rotary_dim or (rotary_dim != head_dim and not partial):
        raise part.wrong("partial_rotary_factor", "only 1.0 is supported" if not partial else PARTIAL_HINT)
    original = f.integer("original_max_position_embeddings", None, low=1)  # first in rank: Phi-3 has it here
    if original is None:
        original = r.integer("original_max_position_embeddings", max_position, low=1)
    return Rope(theta, _hf_scaling(r, max_position, original, rotary_dim), rotary_dim, local_theta)


def _hf_scaling(r: Fields, max_position: int, original: int, dim: int) -> RopeScaling | None:
    kind_key = "rope_type" if "rope_type" in r else "type"
    if "long_factor" in r and r.raw(kind_key, None) in ("su", "yarn"):  # what Phi-3 once called it
        kind = "longrope"
    else:
        kind = r.choice(kind_key, HF_TYPES, "default")
    if kind == "default":
        return None
    stretch = max_position / original  # transformers' factor where yarn and longrope give none
    if kind == "longrope":
        factor = r.number("factor", stretch, low=1.0, high=MAX_FACTOR)
        mscale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
        return RopeScaling(
            "longrope",
            factor,
            original_max_position=original,
            factors=_factor_list(r, "long_factor", dim),
            short_factors=_factor_list(r, "short_factor", dim),
            attention_factor=r.number("attention_factor", mscale, low=1e-6, high=MAX_FACTOR),
        )
    if kind == "yarn":
        factor = r.number("factor", stretch, low=1.0, high=MAX_FACTOR)
        return RopeScaling(
            "yarn",
            factor,
            original_max_position=original,
            attention_factor=_yarn_attention_factor(r, factor),
            beta_fast=r.number("beta_fast", 32.0, low=1e-6, high=MAX_FACTOR),
            beta_slow=r.number("beta_slow", 1.0, low=1e-6, high=MAX_FACTOR),
            truncate=r.flag("truncate", True),
        )
    factor = r.number("factor", low=1.0, high=MAX_FACTOR)
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind == "dynamic":
        return RopeScaling("dynamic", factor, original_max_position=max_position)
    low = r.number("low_freq_factor", low=1e-6, high=MAX_FACTOR)
    high = r.number("high_freq_factor", low=1e-6, high=MAX_FACTOR)
    if high <= low:
        raise r.wrong("high_freq_factor", f"more than low_freq_factor, which is {low:g}, was expected")
    return RopeScaling("llama3", factor, low, high, original)


def _factor_list(r: Fields, key: str, dim: int) -> tuple[float, ...]:
    """A divisor for each pair of the ``dim`` dimensions that are rotated."""
    values = r.raw(key)
    if (
        not isinstance(values, list)
        or len(values) != dim // 2
        or any(
            isinstance(x, bool) or not isinstance(x, (int, float)) or not 0 < x < MAX_THETA for x in values
        )
    ):
        raise r.wrong(key, f"a list of {dim // 2} positive numbers was expected")
    return tuple(float(x) for x in values)


def _yarn_attention_factor(r: Fields, factor: float) -> float:
    """Section 3.4 of the paper, and DeepSeek's two scales of it."""

    def mscale(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    part, whole = (r.number(key, 0.0, high=MAX_FACTOR) for key in ("mscale", "mscale_all_dim"))
    default = mscale(part) / mscale(whole) if part and whole else mscale(1.0)
    return r.number("attention_factor", default, low=1e-6, high=MAX_FACTOR)


def scaling_from_gguf(f: Fields, arch: str, max_position: int) -> RopeScaling | None:
    """The scaling in GGUF metadata. ``rope_freqs.weight`` and longrope's factors are tensors:
    :func:`with_factors` adds them."""
    prefix = f"{arch}.rope.scaling"
    kind = f.choice(f"{prefix}.type", GGUF_TYPES, "none")
    original = f.integer(f"{prefix}.original_context_length", max_position, low=1)
    attention = f.number(f"{prefix}.attn_factor", 1.0, low=1e-6, high=MAX_FACTOR)
    old_key = f"{arch}.rope.scale_linear"  # how version 1 and early version 2 files spelled it
    factor = f.number(f"{prefix}.factor", None, low=1.0, high=MAX_FACTOR)
    if factor is None:
        factor = f.number(old_key, 1.0, low=1.0, high=MAX_FACTOR)
        kind = "linear" if old_key in f else kind
    if arch == "phi3" or kind == "longrope":  # whose converter writes no type
        return RopeScaling("longrope", original_max_position=original, attention_factor=attention)
    if kind == "yarn":
        return RopeScaling(
            "yarn",
            factor,
            original_max_position=original,
            attention_factor=attention * (0.1 * math.log(factor) + 1.0),  # as llama.cpp has it
            beta_fast=f.number(f"{prefix}.yarn_beta_fast", 32.0, low=1e-6, high=MAX_FACTOR),
            beta_slow=f.number(f"{prefix}.yarn_beta_slow", 1.0, low=1e-6, high=MAX_FACTOR),
        )
    return RopeScaling("linear", factor) if kind == "linear" and factor != 1.0 else None


def with_factors(
    scaling: RopeScaling | None, factors: Mapping[str, np.ndarray], where: str
) -> RopeScaling | None:
    """``scaling`` with the divisors that a GGUF file holds as tensors, float32 ``[rotary_dim / 2]`` by
    tensor name (:data:`FACTOR_TENSORS`)."""
    for name, values in factors.items():
        if not (np.isfinite(values).all() and (values > 0).all()):
            raise ModelError(f"{where}: {name} holds a value that is not a positive number")
    given = {name: tuple(float(x) for x in values) for name, values in factors.items()}
    freqs, long, short = (given.get(name, ()) for name in FACTOR_TENSORS)
    if scaling is not None and scaling.type == "longrope":
        if freqs or bool(long) != bool(short):
            raise ModelError(f"{where}: has {', '.join(given)}, both factors of longrope were expected")
        return replace(scaling, factors=long, short_factors=short) if long else None
    if long or short:
        raise ModelError(f"{where}: has {', '.join(given)}, and is not scaled by longrope")
    if not freqs:
        return scaling
    if scaling is not None:
        raise ModelError(f"{where}: has both rope.scaling and rope_freqs.weight, one of them is supported")
    return RopeScaling("factors", factors=freqs)


def rope_inv_freq(config: ModelConfig, kind: str = "global", length: int = 0) -> np.ndarray:
    """Radians a position turns each pair of dimensions: float64 ``[rotary_dim / 2]``. ``kind``: see
    :meth:`ModelConfig.rope`. ``length``: of the sequence, for scalings that depend on it."""
    dim = config.rotary_dim
    theta = config.rope_theta if kind == "global" else config.local_rope_theta
    assert theta is not None, f"the model has no {kind} RoPE"
    exponents = np.arange(0, dim, 2, dtype=np.float64) / dim
    s = config.rope_scaling if kind == "global" else None
    if s is not None and s.type == "dynamic":
        stretch = s.factor * s.key(length) / s.original_max_position - (s.factor - 1)
        theta *= stretch ** (dim / (dim - 2))
    freq: np.ndarray = theta**-exponents
    if s is None or s.type == "dynamic":
        return freq
    if s.type == "factors":
        return freq / np.array(s.factors, np.float64)
    if s.type == "longrope":
        return freq / np.array(s.factors if s.key(length) else s.short_factors, np.float64)
    if s.type == "linear":
        return freq / s.factor
    if s.type == "yarn":
        keep = _yarn_keep(s, theta, dim)
    else:
        turns = s.original_max_position * freq / (2 * math.pi)  # within the original context
        keep = np.clip((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0.0, 1.0)
    scaled: np.ndarray = freq * (keep + (1.0 - keep) / s.factor)
    return scaled


def _yarn_keep(s: RopeScaling, theta: float, dim: int) -> np.ndarray:
    """Which share of each frequency stays as it is, ``[dim / 2]``."""

    def pair(turns: float) -> float:
        """The pair that makes so many turns in the original context."""
        return dim * math.log(s.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(s.beta_fast), pair(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    return 1.0 - np.clip((np.arange(dim // 2) - low) / width, 0.0, 1.0)


def rope_factor(config: ModelConfig, kind: str = "global") -> float:
    """What the rotated queries and keys are multiplied by."""
    s = config.rope_scaling
    return s.attention_factor if s is not None and kind == "global" else 1.0

"""Rotary position embedding's frequencies, and the ways to stretch them to longer contexts.

A head's dimensions turn in pairs; pair ``i`` of ``d/2`` turns by ``position * theta^(-2i/d)`` (Su et
al. 2021, "RoFormer"). Scaling divides the slow frequencies so that more positions fit into one turn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from xinfer_vk.errors import ModelError
from xinfer_vk.fields import Fields

if TYPE_CHECKING:
    from xinfer_vk.models.config import ModelConfig

HF_TYPES = ("default", "linear", "llama3")
GGUF_TYPES = ("none", "linear")
MAX_THETA = 1e15
MAX_FACTOR = 1e6


@dataclass(frozen=True)
class RopeScaling:
    """How the frequencies are changed.

    ``linear``: all divided by ``factor`` (Chen et al. 2023, position interpolation). ``llama3``: a
    wavelength longer than ``original_max_position / low_freq_factor`` is divided by ``factor``, one
    shorter than ``original_max_position / high_freq_factor`` is kept, and between the two they blend
    (Llama 3.1). ``factors``: each divided by its own number (GGUF's ``rope_freqs.weight``, which
    holds the quotients of llama3 already worked out).
    """

    type: str  # "linear", "llama3" or "factors"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    factors: tuple[float, ...] = ()  # [head_dim / 2]


@dataclass(frozen=True)
class Rope:
    """What a ``config.json`` says of RoPE: ``dim`` of each head are turned; ``local_theta`` is that of
    sliding-window layers where they have their own, always unscaled."""

    theta: float
    scaling: RopeScaling | None
    dim: int
    local_theta: float | None = None


def rope_from_hf(f: Fields, max_position: int, head_dim: int) -> Rope:
    """RoPE of a ``config.json``.

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
    return Rope(theta, _hf_scaling(r, max_position), head_dim, local_theta)


def _hf_scaling(r: Fields, max_position: int) -> RopeScaling | None:
    if r.number("partial_rotary_factor", 1.0) != 1.0:
        raise r.wrong("partial_rotary_factor", "only 1.0 is supported")
    kind_key = "rope_type" if "rope_type" in r else "type"
    kind = r.choice(kind_key, HF_TYPES, "default")
    if kind == "default":
        return None
    factor = r.number("factor", low=1.0, high=MAX_FACTOR)
    if kind == "linear":
        return RopeScaling("linear", factor)
    low = r.number("low_freq_factor", low=1e-6, high=MAX_FACTOR)
    high = r.number("high_freq_factor", low=1e-6, high=MAX_FACTOR)
    if high <= low:
        raise r.wrong("high_freq_factor", f"more than low_freq_factor, which is {low:g}, was expected")
    original = r.integer("original_max_position_embeddings", max_position, low=1)
    return RopeScaling("llama3", factor, low, high, original)


def scaling_from_gguf(f: Fields, arch: str) -> RopeScaling | None:
    """The scaling in GGUF metadata. ``rope_freqs.weight`` is a tensor: :func:`with_factors` adds it."""
    kind = f.choice(f"{arch}.rope.scaling.type", GGUF_TYPES, "none")
    old_key = f"{arch}.rope.scale_linear"  # how version 1 and early version 2 files spelled it
    factor = f.number(f"{arch}.rope.scaling.factor", None, low=1.0, high=MAX_FACTOR)
    if factor is None:
        factor = f.number(old_key, 1.0, low=1.0, high=MAX_FACTOR)
        kind = "linear" if old_key in f else kind
    return RopeScaling("linear", factor) if kind == "linear" and factor != 1.0 else None


def with_factors(scaling: RopeScaling | None, factors: np.ndarray, where: str) -> RopeScaling:
    """``scaling`` with the divisors of a ``rope_freqs.weight`` tensor, float32 ``[head_dim / 2]``."""
    if scaling is not None:
        raise ModelError(f"{where}: has both rope.scaling and rope_freqs.weight, one of them is supported")
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelError(f"{where}: rope_freqs.weight holds a value that is not a positive number")
    return RopeScaling("factors", factors=tuple(float(x) for x in factors))


def rope_inv_freq(config: ModelConfig, kind: str = "global") -> np.ndarray:
    """Radians a position turns each pair of dimensions: float64 ``[rotary_dim / 2]``. ``kind``: see
    :meth:`ModelConfig.rope`."""
    dim = config.rotary_dim
    theta = config.rope_theta if kind == "global" else config.local_rope_theta
    assert theta is not None, f"the model has no {kind} RoPE"
    freq = theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    s = config.rope_scaling
    if s is None or kind == "local":
        return freq
    if s.type == "factors":
        return freq / np.array(s.factors, np.float64)
    if s.type == "linear":
        return freq / s.factor
    turns = s.original_max_position * freq / (2 * math.pi)  # within the original context
    keep = np.clip((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0.0, 1.0)
    return freq * (keep + (1.0 - keep) / s.factor)

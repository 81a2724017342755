"""Rotary position embedding in the rotate-half order (Su et al. 2021): its table and its oracle."""

from __future__ import annotations

import numpy as np

from xinfer_vk.errors import UsageError


def check_rotary_dim(rotary_dim: int, head_dim: int) -> None:
    """Raises :class:`UsageError` for a rotary dim that is odd or too large."""
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise UsageError(f"rotary dim {rotary_dim} is not supported: it must be even and at most {head_dim}")


def rope_table(inv_freq: np.ndarray, positions: np.ndarray, factor: float = 1.0) -> np.ndarray:
    """The table the kernel reads, float32 [len(positions), len(inv_freq), 2]: cos and sin of
    ``position * inv_freq``, times ``factor``, computed in float64 here because a device's sin may be off by
    2⁻¹¹ (Vulkan spec, precision of core operations)."""
    angles = positions.astype(np.float64)[:, None] * inv_freq.astype(np.float64)
    return (np.stack([np.cos(angles), np.sin(angles)], axis=-1) * factor).astype(np.float32)


def turned(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Vectors ``[tokens, heads, head_dim]`` turned by rows of :func:`rope_table`, ``[tokens, pairs, 2]``:
    dims ``i`` and ``i + pairs`` by angle ``i``. Dims from ``2 pairs`` on stay as they are. float64."""
    pairs = angles.shape[1]
    cos, sin = np.moveaxis(angles.astype(np.float64), -1, 0)[:, :, None]
    out = x.astype(np.float64)
    a, b = out[..., :pairs].copy(), out[..., pairs : 2 * pairs].copy()
    out[..., :pairs], out[..., pairs : 2 * pairs] = a * cos - b * sin, b * cos + a * sin
    return out

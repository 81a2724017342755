"""Finds the scale, or the scale and minimum, that a block of weights loses least with.

A block of weights ``x`` becomes whole numbers ``q`` and ``x ≈ d q`` (or ``d q + m``). The plain rule maps
the largest weight to the largest number, and so lets one weight decide the error of all others. Here a few
scales around the plain one each give their ``q``; for given ``q`` the best ``d`` (and ``m``) is a
least-squares problem with a closed solution; the candidate with the smallest squared error is taken.
docs/quantization.md has what this gains.

All arrays are float32; ``x`` is ``[blocks, weights of a block]``, finite.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Candidates: the largest weight becomes the largest number plus so much. Below 0 the steps between
# numbers are wider, above 0 the largest weights are clipped. Finer or wider grids gained under 1 %.
STEPS = (0.0, -1.0, -0.75, -0.5, -0.25, 0.25, 0.5, 0.75, 1.0)


def plain_scale(x: np.ndarray, low: int) -> np.ndarray:
    """``d [blocks]``: the weight of largest magnitude takes the end ``low`` (negative), which reaches
    furthest."""
    at = np.abs(x).argmax(axis=1)
    return np.take_along_axis(x, at[:, None], axis=1)[:, 0] / np.float32(low)


def plain_scale_and_minimum(
    x: np.ndarray, high: int, *, below_zero: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """``(d, m)``: the smallest weight is 0, the largest ``high``. ``below_zero``: the minimum must not be
    above 0."""
    m = x.min(axis=1)
    if below_zero:
        m = np.minimum(m, 0)
    return (x.max(axis=1) - m) / np.float32(high), m


def fit_scale(x: np.ndarray, low: int, high: int) -> np.ndarray:
    """``d [blocks]`` of ``x ≈ d q`` with ``q`` in ``low..high``."""
    plain = plain_scale(x, low)
    best, least = np.zeros_like(plain), np.zeros_like(plain)
    for step in STEPS:
        q = rounded(x, plain * np.float32(low / (low - step)), low, high)
        xq = dot(x, q)
        d = divided(xq, dot(q, q))
        error = -d * xq  # less Σx², which all candidates share
        better = error < least
        best, least = np.where(better, d, best), np.where(better, error, least)
    return best


def fit_scale_and_minimum(
    x: np.ndarray, high: int, *, below_zero: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """``(d, m)``, ``[blocks]`` each, of ``x ≈ d q + m`` with ``q`` in ``0..high``; ``m <= 0`` if
    ``below_zero``."""
    plain, bottom = plain_scale_and_minimum(x, high, below_zero=below_zero)
    above, sum_x, count = x - bottom[:, None], x.sum(axis=1), np.float32(x.shape[1])
    best_d, best_m, least = plain, bottom, np.full_like(plain, np.inf)
    for step in STEPS:
        q = rounded(above, plain * np.float32(high / (high + step)), 0, high)
        xq, qq, sum_q = dot(x, q), dot(q, q), q.sum(axis=1)
        determinant = count * qq - sum_q * sum_q  # whole numbers: 0 exactly where all q are the same
        d = divided(count * xq - sum_x * sum_q, determinant)
        m = (sum_x - d * sum_q) / count
        if below_zero:
            d, m = np.where(m > 0, divided(xq, qq), d), np.minimum(m, 0)
        error = d * (d * qq - 2 * xq + 2 * m * sum_q) + m * (m * count - 2 * sum_x)  # less Σx²
        better = (error < least) & (d >= 0)
        best_d, best_m = np.where(better, d, best_d), np.where(better, m, best_m)
        least = np.where(better, error, least)
    return best_d, best_m


def rounded(x: np.ndarray, d: np.ndarray, low: int, high: int) -> np.ndarray:
    """``q``: the whole numbers in ``low..high`` nearest to ``x / d`` (0 where ``d [blocks]`` is 0)."""
    q = x * divided(np.float32(1), d)[:, None]
    np.rint(q, out=q)
    return np.clip(q, low, high, out=q)


def divided(x: np.ndarray | np.float32, d: np.ndarray) -> np.ndarray:
    """``x / d``; 0 where ``d`` is 0, or so small that the quotient could overflow (no f16 is)."""
    return np.divide(x, d, out=np.zeros(d.shape, np.float32), where=np.abs(d) > 1e-30)


def dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Σ a b of each block."""
    return np.einsum("ij,ij->i", a, b)


def squared_error(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Σ (x − y)² of each block."""
    difference = x - y
    return dot(difference, difference)


def as_f16(values: np.ndarray) -> np.ndarray:
    """Float32 numbers as f16 rounds them, still float32."""
    with np.errstate(over="ignore"):  # callers see that a scale too large for f16 is infinite
        return values.astype(np.float16).astype(np.float32)


def closer_of(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Block by block, that of two results whose error is smaller. A result is arrays ``[blocks, …]``, the
    error ``[blocks]`` first."""
    better = b[0] < a[0]
    return [np.where(better.reshape(-1, *(1,) * (one.ndim - 1)), other, one) for one, other in zip(a, b)]

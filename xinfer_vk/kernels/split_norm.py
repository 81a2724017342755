"""RMSNorm without a dispatch of its own: the matrix product before it begins it, the one after it ends it.

``norm(x) Wᵀ = ((x * weight) Wᵀ) / sqrt(mean(x²) + eps)``: the weight is applied to each value where x is
made, the root once to each sum of the product. So what adds to the residual stream x leaves *begun rows* too
(see :class:`Begin`), and the product that wants ``norm(x)`` multiplies these and divides.

A begun row of ``cols`` values, in words: ``x * weight`` [cols], then the sums of the squares of every
:data:`SUMMED` values of x [cols / SUMMED]. Each sum is made by whoever has its values in registers, so no
workgroup waits for another; all of them are a quarter of a row to read for each that ends the norm.

That pays for few rows, where a dispatch costs as much as the norm of all rows or more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xinfer_vk.kernels.base import Ref

SUMMED = 4
BLOCK = 32  # values of a row come in blocks of so many, or no norm of it is split: sums are read by eights
NOT_SPLIT: dict[str, int | float] = {"next_weight": 0, "next_offset": 0, "next_cols": 0, "norm_eps": -1.0}
PARAMS = ("next_weight:u", "next_offset:u", "next_cols:u", "norm_eps:f")


@dataclass(frozen=True)
class Begin:
    """The norm of what a product stores: ``weight`` [cols], and where the begun rows go, one behind another,
    in the buffer of the product's result."""

    weight: Ref
    out: Ref


def can_split(cols: int) -> bool:
    """Whether rows of ``cols`` values can be begun ones."""
    return cols % BLOCK == 0


def begun_words(cols: int) -> int:
    """Words of a begun row."""
    return cols + cols // SUMMED


def begun(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The begun rows of ``x`` [rows, cols]: f32 [rows, begun_words(cols)]."""
    squares = (x.astype(np.float64) ** 2).reshape(len(x), -1, SUMMED).sum(axis=2)
    return np.concatenate([x * weight, squares], axis=1).astype(np.float32)


def norm_factors(rows: np.ndarray, cols: int, eps: float) -> np.ndarray:
    """``1 / sqrt(mean(x²) + eps)`` of begun rows [rows, begun_words(cols)]: f32 [rows, 1]."""
    mean = rows[:, cols:].astype(np.float64).sum(axis=1, keepdims=True) / cols
    factors: np.ndarray = (1 / np.sqrt(mean + eps)).astype(np.float32)
    return factors

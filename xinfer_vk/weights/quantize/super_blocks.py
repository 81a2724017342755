"""Weights to super-blocks of 256 whose blocks have small whole numbers for scales: Q4_K and Q6_K.

The layouts are GGML's (ggml-common.h, ``block_q4_K`` and ``block_q6_K``). Each function takes ``x``,
float32 ``[super-blocks, 256]``, and returns ``uint8 [super-blocks, bytes of one]``. As with the blocks of
32, the plain rule's result is taken where it is the closer one.
"""

from __future__ import annotations

import numpy as np

from xinfer_vk.weights.quantize.blocks import f16_bytes
from xinfer_vk.weights.quantize.fit import (
    as_f16,
    closer_of,
    divided,
    dot,
    fit_scale,
    fit_scale_and_minimum,
    plain_scale,
    plain_scale_and_minimum,
    rounded,
    squared_error,
)

SUPER_BLOCK = 256
MAX_SCALE_4 = 63  # of q4_k's 6-bit scales and minimums
MAX_SCALE_6 = 127  # of q6_k's 8-bit scales


def q6_k(x: np.ndarray) -> np.ndarray:
    """``x ≈ d s q``: 16 blocks of 16, each with a scale ``s`` (int8), ``q`` in -32..31, ``d`` f16."""
    blocks = x.reshape(-1, 16)

    def with_scales(d: np.ndarray, s: np.ndarray) -> list[np.ndarray]:
        q = rounded(blocks, (d[:, None] * s).reshape(-1), -32, 31).reshape(x.shape)
        return [squared_error(x, d[:, None] * s.repeat(16, axis=1) * q), d, s, q]

    def from_ideal(scale: np.ndarray) -> list[np.ndarray]:
        """From ideal scales of the blocks ``[super-blocks * 16]``: they are rounded to ``s``, and then the
        ``d`` is sought that fits what they make of the weights."""
        scale = scale.reshape(-1, 16)
        d = as_f16(np.abs(scale).max(axis=1) / np.float32(MAX_SCALE_6))
        first = with_scales(d, rounded(scale, d, -MAX_SCALE_6, MAX_SCALE_6))
        _, _, s, q = first
        sq = s.repeat(16, axis=1) * q
        return closer_of(first, with_scales(as_f16(divided(dot(x, sq), dot(sq, sq))), s))

    _, d, s, q = closer_of(from_ideal(plain_scale(blocks, -32)), from_ideal(fit_scale(blocks, -32, 31)))
    # A half is 128 weights in four rows of 32; byte l of the nibbles has those of rows 0 and 2 (or 1 and
    # 3) at column l, byte l of the upper bits those of all four.
    codes = (q + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    nibbles = codes[:, :, :2] & 15 | (codes[:, :, 2:] & 15) << 4
    upper = codes >> 4
    upper = upper[:, :, 0] | upper[:, :, 1] << 2 | upper[:, :, 2] << 4 | upper[:, :, 3] << 6
    n = len(x)
    return np.concatenate(
        (nibbles.reshape(n, 128), upper.reshape(n, 64), s.astype(np.int8).view(np.uint8), f16_bytes(d)),
        axis=1,
    )


def q4_k(x: np.ndarray) -> np.ndarray:
    """``x ≈ d s q − e t``: 8 blocks of 32, each with a scale ``s`` and a minimum ``t`` of 6 bits, ``q`` in
    0..15, ``d`` and ``e`` f16."""
    blocks = x.reshape(-1, 32)

    def with_scales(d: np.ndarray, e: np.ndarray, s: np.ndarray, t: np.ndarray) -> list[np.ndarray]:
        scale, depth = (d[:, None] * s).reshape(-1), (e[:, None] * t).reshape(-1, 1)
        q = rounded(blocks + depth, scale, 0, 15)
        return [
            squared_error(x, (scale[:, None] * q - depth).reshape(x.shape)),
            d,
            e,
            s,
            t,
            q.reshape(x.shape),
        ]

    def from_ideal(scale: np.ndarray, minimum: np.ndarray) -> list[np.ndarray]:
        """From ideal scales (>= 0) and minimums (<= 0) of the blocks, ``[super-blocks * 8]``."""
        scale, depth = scale.reshape(-1, 8), -minimum.reshape(-1, 8)
        d, e = (as_f16(v.max(axis=1) / np.float32(MAX_SCALE_4)) for v in (scale, depth))
        first = with_scales(d, e, rounded(scale, d, 0, MAX_SCALE_4), rounded(depth, e, 0, MAX_SCALE_4))
        *_, s, t, q = first
        d, e = _fit_two(x, s.repeat(32, axis=1) * q, -t.repeat(32, axis=1), d, e)
        return closer_of(first, with_scales(d, e, s, t))

    _, d, e, s, t, q = closer_of(
        from_ideal(*plain_scale_and_minimum(blocks, 15, below_zero=True)),
        from_ideal(*fit_scale_and_minimum(blocks, 15, below_zero=True)),
    )
    codes = q.astype(np.uint8).reshape(-1, 4, 2, 32)  # of two blocks, the first in the low nibbles
    nibbles = (codes[:, :, 0] | codes[:, :, 1] << 4).reshape(-1, 128)
    return np.concatenate((f16_bytes(d), f16_bytes(e), _six_bits(s, t), nibbles), axis=1)


def _six_bits(s: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Eight scales and eight minimums of 6 bits in 12 bytes: the first four of each in the low bits of
    bytes 0-3 and 4-7; of the last four, the low nibbles in bytes 8-11, and the upper two bits above the
    first four."""
    s, t = s.astype(np.uint8), t.astype(np.uint8)
    return np.concatenate(
        (
            s[:, :4] | s[:, 4:] >> 4 << 6,
            t[:, :4] | t[:, 4:] >> 4 << 6,
            s[:, 4:] & 15 | (t[:, 4:] & 15) << 4,
        ),
        axis=1,
    )


def _fit_two(
    x: np.ndarray, a: np.ndarray, b: np.ndarray, d: np.ndarray, e: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """``(d, e)`` of the least-squares fit ``x ≈ d a + e b`` of each row, as f16; those given where ``a``
    and ``b`` do not determine it."""
    aa, bb, ab, xa, xb = dot(a, a), dot(b, b), dot(a, b), dot(x, a), dot(x, b)
    determinant = aa * bb - ab * ab
    sound = determinant > 1e-4 * aa * bb  # else rounding would decide
    d = np.where(sound, divided(xa * bb - xb * ab, determinant), d)
    e = np.where(sound, divided(xb * aa - xa * ab, determinant), e)
    return as_f16(d), as_f16(e)

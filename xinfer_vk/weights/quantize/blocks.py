"""Weights to blocks of 32 with a scale, or a scale and a minimum, in f16: Q8_0, Q4_0, Q4_1, Q5_0.

The layouts are GGML's (ggml-common.h). Each function takes ``x``, float32 ``[blocks, 32]``, and returns
``uint8 [blocks, bytes of a block]``. Each block is at least as close to ``x`` as with the plain rule (the
largest weight decides the scale): both are worked out, with the scale as f16 rounds it, and compared.
"""

from __future__ import annotations

import numpy as np

from xinfer_vk.weights.quantize.fit import (
    as_f16,
    closer_of,
    fit_scale,
    fit_scale_and_minimum,
    plain_scale,
    plain_scale_and_minimum,
    rounded,
    squared_error,
)


def q8_0(x: np.ndarray) -> np.ndarray:
    _, d, q = _symmetric(x, -127, 127)
    return np.concatenate((f16_bytes(d), q.astype(np.int8).view(np.uint8)), axis=1)


def q4_0(x: np.ndarray) -> np.ndarray:
    _, d, q = _symmetric(x, -8, 7)
    return np.concatenate((f16_bytes(d), _nibbles((q + 8).astype(np.uint8))), axis=1)


def q5_0(x: np.ndarray) -> np.ndarray:
    _, d, q = _symmetric(x, -16, 15)
    codes = (q + 16).astype(np.uint8)
    fifth_bits = np.packbits(codes >> 4, axis=1, bitorder="little")  # of weight c in bit c
    return np.concatenate((f16_bytes(d), fifth_bits, _nibbles(codes & 15)), axis=1)


def q4_1(x: np.ndarray) -> np.ndarray:
    _, d, m, q = _with_minimum(x, 15)
    return np.concatenate((f16_bytes(d), f16_bytes(m), _nibbles(q.astype(np.uint8))), axis=1)


def _symmetric(x: np.ndarray, low: int, high: int) -> list[np.ndarray]:
    """``[error, d, q]`` of ``x ≈ d q``."""

    def with_scale(d: np.ndarray) -> list[np.ndarray]:
        d = as_f16(d)
        q = rounded(x, d, low, high)
        return [squared_error(x, d[:, None] * q), d, q]

    return closer_of(with_scale(plain_scale(x, low)), with_scale(fit_scale(x, low, high)))


def _with_minimum(x: np.ndarray, high: int) -> list[np.ndarray]:
    """``[error, d, m, q]`` of ``x ≈ d q + m``."""

    def with_scale(d: np.ndarray, m: np.ndarray) -> list[np.ndarray]:
        d, m = as_f16(d), as_f16(m)
        q = rounded(x - m[:, None], d, 0, high)
        return [squared_error(x, d[:, None] * q + m[:, None]), d, m, q]

    return closer_of(
        with_scale(*plain_scale_and_minimum(x, high)), with_scale(*fit_scale_and_minimum(x, high))
    )


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """Codes 0 to 15 ``[blocks, 32]``, two a byte: weight ``i`` in the low bits of byte ``i``, weight
    ``i + 16`` in its high bits."""
    return codes[:, :16] | codes[:, 16:] << 4


def f16_bytes(values: np.ndarray) -> np.ndarray:
    """``[n]`` as the two bytes of an f16 each: ``uint8 [n, 2]``."""
    return values.astype("<f2")[:, None].view(np.uint8)

"""Random weight matrices in every device format, packed by the letter of the layout's definition.

A second, slower implementation of what ``weights/formats.py`` and ``kernels/unpack.py`` do, sharing no
code with them: every word is placed by the formula in the words of :mod:`xinfer_vk.kernels.layout`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FORMATS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1")
BLOCK_FORMATS = ("q8_0", "q4_0", "q4_1")


@dataclass(frozen=True)
class WeightMatrix:
    """``words``: the x8 layout. ``dense``: the weights [rows, cols] in float64. ``magnitude``: what the
    products that make up a weight add up to in absolute value, ``|d q| + |m|``: the scale of rounding."""

    fmt: str
    rows: int
    cols: int
    words: np.ndarray
    dense: np.ndarray
    magnitude: np.ndarray


def _halves_to_words(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low.astype(np.uint32) | high.astype(np.uint32) << 16


def _place(row_major: np.ndarray) -> np.ndarray:
    """Row-major words [rows, words] -> x8, padding rows zero."""
    rows, per_row = row_major.shape
    out = np.zeros(-(-rows // 8) * 8 * per_row, np.uint32)
    r, k = np.meshgrid(np.arange(rows), np.arange(per_row), indexing="ij")
    out[(r // 8) * 8 * per_row + k * 8 + r % 8] = row_major
    return out


def _block_scales(values: np.ndarray) -> np.ndarray:
    """f16 scales [rows, blocks] -> words, two blocks a word."""
    bits = values.view(np.uint16)
    if bits.shape[1] % 2:
        bits = np.concatenate((bits, np.zeros((bits.shape[0], 1), np.uint16)), axis=1)
    return _halves_to_words(bits[:, 0::2], bits[:, 1::2])


def random_matrix(fmt: str, rows: int, cols: int, rng: np.random.Generator) -> WeightMatrix:
    """A matrix of ``rows`` x ``cols`` with weights of the order of one."""
    if fmt not in BLOCK_FORMATS:
        w = rng.standard_normal((rows, cols)).astype(np.float32)
        if fmt == "f32":
            return WeightMatrix(fmt, rows, cols, _place(w.view(np.uint32)), w.astype(np.float64), np.abs(w))
        if fmt == "f16":
            bits = w.astype(np.float16).view(np.uint16)
            dense = bits.view(np.float16).astype(np.float64)
        else:
            bits = (w.view(np.uint32) >> 16).astype(np.uint16)
            dense = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        padded = np.zeros((rows, cols + cols % 2), np.uint16)
        padded[:, :cols] = bits
        words = _place(_halves_to_words(padded[:, 0::2], padded[:, 1::2]))
        return WeightMatrix(fmt, rows, cols, words, dense, np.abs(dense))

    blocks = cols // 32
    d = rng.standard_normal((rows, blocks)).astype(np.float16)
    wide = np.repeat(d.astype(np.float64), 32, axis=1)
    if fmt == "q8_0":
        q = rng.integers(-128, 128, (rows, cols))
        data = np.zeros((rows, cols // 4), np.uint32)
        for c in range(cols):
            data[:, c // 4] |= (q[:, c].astype(np.uint32) & 255) << (8 * (c % 4))
        words = _place(np.concatenate((_block_scales(d), data), axis=1))
        return WeightMatrix(fmt, rows, cols, words, wide * q, np.abs(wide * q))

    q = rng.integers(0, 16, (rows, cols))
    data = np.zeros((rows, blocks * 4), np.uint32)
    for c in range(cols):
        block, i = divmod(c, 32)  # weight i of the block: byte i % 16, low nibble for the first sixteen
        data[:, block * 4 + i % 16 // 4] |= q[:, c].astype(np.uint32) << (8 * (i % 4) + 4 * (i // 16))
    if fmt == "q4_0":
        words = _place(np.concatenate((_block_scales(d), data), axis=1))
        return WeightMatrix(fmt, rows, cols, words, wide * (q - 8), np.abs(wide * q) + np.abs(8 * wide))
    m = rng.standard_normal((rows, blocks)).astype(np.float16)
    offset = np.repeat(m.astype(np.float64), 32, axis=1)
    words = _place(np.concatenate((_halves_to_words(d.view(np.uint16), m.view(np.uint16)), data), axis=1))
    return WeightMatrix(fmt, rows, cols, words, wide * q + offset, np.abs(wide * q) + np.abs(offset))

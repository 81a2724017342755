"""The x8 layout (see :mod:`xinfer_vk.kernels.layout`) back to dense float32: what the oracles multiply by.

Every decoded value is exact: f16 and bf16 are subsets of float32, and the products and sums of the
block formats are rounded once, as the formats' own definition in float32 does.
"""

from __future__ import annotations

import numpy as np

from xinfer_vk.kernels.layout import BLOCK, ROWS, padded_rows, row_words, scale_words


def bf16_to_f32(halves: np.ndarray) -> np.ndarray:
    """bfloat16 bits (uint16) to float32: the upper half of the same number."""
    return (halves.astype(np.uint32) << 16).view(np.float32)


def deinterleave(words: np.ndarray, rows: int, words_per_row: int) -> np.ndarray:
    """x8 words (flat, whole groups) -> [rows, words_per_row] words, row after row."""
    groups = padded_rows(rows) // ROWS
    tiles = words[: groups * ROWS * words_per_row].reshape(groups, words_per_row, ROWS)
    return tiles.transpose(0, 2, 1).reshape(groups * ROWS, words_per_row)[:rows]


def decode_rows(fmt: str, words: np.ndarray, cols: int) -> np.ndarray:
    """Row-major words [n, row_words(fmt, cols)] -> float32 [n, cols]."""
    words = np.ascontiguousarray(words, np.uint32)
    rows = words.shape[0]
    if fmt == "f32":
        return words.view(np.float32)
    if fmt in ("f16", "bf16"):
        halves = words.view(np.uint16)[:, :cols]
        return halves.view(np.float16).astype(np.float32) if fmt == "f16" else bf16_to_f32(halves)
    blocks, scales = cols // BLOCK, scale_words(fmt, cols)
    halves = np.ascontiguousarray(words[:, :scales]).view(np.float16).astype(np.float32)
    data = np.ascontiguousarray(words[:, scales:]).view(np.uint8)
    if fmt == "q8_0":
        q = data.view(np.int8).reshape(rows, blocks, BLOCK).astype(np.float32)
        return (q * halves[:, :blocks, None]).reshape(rows, cols)
    nibbles = data.reshape(rows, blocks, BLOCK // 2)
    q = np.concatenate((nibbles & 15, nibbles >> 4), axis=2).astype(np.float32)
    if fmt == "q4_0":
        return ((q - 8) * halves[:, :blocks, None]).reshape(rows, cols)
    d, m = halves[:, 0::2, None], halves[:, 1::2, None]
    return (q * d + m).reshape(rows, cols)


def unpack(fmt: str, words: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """x8 words of a matrix (flat, from its first word on) -> float32 [rows, cols]."""
    return decode_rows(fmt, deinterleave(words, rows, row_words(fmt, cols)), cols)


def unpack_rows(fmt: str, words: np.ndarray, cols: int, rows: np.ndarray) -> np.ndarray:
    """Chosen rows of an x8 matrix -> float32 [len(rows), cols], without decoding the others."""
    per_row = row_words(fmt, cols)
    first = rows // ROWS * (ROWS * per_row) + rows % ROWS
    index = first[:, None] + np.arange(per_row)[None, :] * ROWS
    return decode_rows(fmt, words[index], cols)

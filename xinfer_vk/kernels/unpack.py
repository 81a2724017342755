"""The x8 layout (see :mod:`xinfer_vk.kernels.layout`) back to dense float32: what the oracles multiply by.

Every decoded value is exact: f16 and bf16 are subsets of float32, and the products and sums of the
block formats are rounded once, as the formats' own definition in float32 does.
"""

from __future__ import annotations

import numpy as np

from xinfer_vk.kernels.layout import (
    BLOCK,
    BLOCK_LAYOUTS,
    GROUP_LAYOUTS,
    IQ4_VALUES,
    MXFP4_VALUES,
    ROWS,
    GroupLayout,
    is_bytes,
    padded_rows,
    row_words,
    scale_words,
)

SUPER_BLOCK = 256
OFFSETS = {"q4_0": 8, "q5_0": 16, "q6_k": 32, "q3_k": 4}  # what is zero


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
    if fmt == "f32":
        return words.view(np.float32)
    if fmt in ("f16", "bf16"):
        halves = words.view(np.uint16)[:, :cols]
        return halves.view(np.float16).astype(np.float32) if fmt == "f16" else bf16_to_f32(halves)
    n = words.shape[0]
    scales = words[:, : scale_words(fmt, cols)]
    layout = GROUP_LAYOUTS.get(fmt) or BLOCK_LAYOUTS[fmt]
    data = words[:, scales.shape[1] :].reshape(n, cols // BLOCK, layout.block_words)
    if isinstance(layout, GroupLayout):
        d, zero = _group_scales(layout, scales, cols)
        return ((_quants(fmt, data) - zero[:, :, None]) * d[:, :, None]).reshape(n, cols)
    if layout.columns == SUPER_BLOCK:
        d, m = _super_scales(fmt, scales.reshape(n, -1, layout.scale_words))
    else:
        d, m = _block_scales(fmt, scales, cols // BLOCK)
    q = _quants(fmt, data).reshape(n, d.shape[1], -1)  # as many columns as share a scale
    with np.errstate(invalid="ignore", over="ignore"):  # scales may be infinite or NaN
        w = q * d[:, :, None]
        return (w if m is None else w + m[:, :, None]).reshape(n, cols)


def _block_scales(fmt: str, words: np.ndarray, blocks: int) -> tuple[np.ndarray, np.ndarray | None]:
    """(d, m) of blocks of 32: float32 [n, blocks]."""
    if fmt == "mxfp4":
        exponents = np.ascontiguousarray(words).view(np.uint8)[:, :blocks].astype(np.int32)
        return np.ldexp(np.float32(1), exponents - 128), None
    halves = np.ascontiguousarray(words).view(np.float16).astype(np.float32)
    if fmt in ("q4_1", "q5_1"):
        return halves[:, 0::2], halves[:, 1::2]
    return halves[:, :blocks], None


def _group_scales(layout: GroupLayout, words: np.ndarray, cols: int) -> tuple[np.ndarray, np.ndarray]:
    """(d, zero) of blocks of 32, whose scales are ``words [n, words]`` in chunks: float32 [n, blocks]."""
    n, chunks = words.shape[0], -(-layout.groups(cols) // layout.zeros)
    whole = np.zeros((n, chunks, layout.chunk_words), np.uint32)
    whole.reshape(n, -1)[:, : words.shape[1]] = words
    shift = layout.bits * np.arange(layout.zeros, dtype=np.uint32)
    codes = (whole[:, :, :1] >> shift & np.uint32((1 << layout.bits) - 1)).reshape(n, -1)
    zero = codes.astype(np.uint8).view(np.int8) if layout.bits == 8 else codes
    d = np.ascontiguousarray(whole[:, :, 1:]).view(np.float16).reshape(n, -1)
    of_block = np.arange(0, cols, BLOCK) // layout.group
    return d[:, of_block].astype(np.float32), zero[:, of_block].astype(np.float32)


def _super_scales(fmt: str, words: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """(d, m) of blocks of 32 or 16 within super-blocks, whose scales are ``words [n, supers, words]``:
    float32 [n, blocks]."""
    n = words.shape[0]
    halves = np.ascontiguousarray(words[:, :, :1]).view(np.float16).astype(np.float32)
    d, m = halves[:, :, :1], halves[:, :, 1:]
    codes = np.ascontiguousarray(words[:, :, 1:]).view(np.uint8)  # bytes
    scale: np.ndarray
    small: np.ndarray | None = None
    if fmt == "q6_k":
        scale = codes.view(np.int8)
    elif fmt == "q2_k":
        scale, small = codes & 15, codes >> 4
    elif fmt == "q3_k":
        low, high = codes[:, :, :8], codes[:, :, 8:]
        low = np.concatenate((low & 15, low >> 4), axis=2)
        high = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=2)
        scale = (low | high << 4).astype(np.int8) - np.int8(32)
    elif fmt == "iq4_xs":
        j = np.arange(8, dtype=np.uint32)
        nibbles, tops = words[:, :, 1:] >> 4 * j & 15, words[:, :, :1] >> 16 + 2 * j & 3
        scale = (nibbles | tops << 4).astype(np.int8) - np.int8(32)
    else:  # q4_k, q5_k
        s, t, rest = codes[:, :, :4], codes[:, :, 4:8], codes[:, :, 8:]
        scale = np.concatenate((s & 63, rest & 15 | s >> 6 << 4), axis=2)
        small = np.concatenate((t & 63, rest >> 4 | t >> 6 << 4), axis=2)
    with np.errstate(invalid="ignore", over="ignore"):
        d = (d * scale.astype(np.float32)).reshape(n, -1)
        return d, None if small is None else -(m * small.astype(np.float32)).reshape(n, -1)


def _quants(fmt: str, data: np.ndarray) -> np.ndarray:
    """The numbers that scales multiply: words [n, blocks, block_words] -> float32 [n, blocks, 32]."""
    n, blocks, _ = data.shape
    if is_bytes(fmt):
        return np.ascontiguousarray(data).view(np.int8).astype(np.float32)
    low_at, high_at = _columns(fmt)
    q: np.ndarray = np.zeros((n, blocks, BLOCK), np.uint8)
    planes = data
    if fmt not in ("q2_k", "q3_k"):
        nibbles, planes = np.ascontiguousarray(data[:, :, :4]).view(np.uint8), data[:, :, 4:]
        q[:, :, low_at], q[:, :, high_at] = nibbles & 15, nibbles >> 4
    planes = np.ascontiguousarray(planes).view(np.uint8).reshape(n, blocks, -1, 1, 4)  # [plane][i][byte]
    i = np.arange(4, dtype=np.uint8)[:, None]
    pairs, bit = {"q2_k": (0, None), "q3_k": (0, 2), "q6_k": (4, None)}.get(fmt, (None, 4))
    if pairs is not None:
        q[:, :, low_at] |= (planes[:, :, 0] >> 2 * i & 3).reshape(n, blocks, 16) << pairs
        q[:, :, high_at] |= (planes[:, :, 1] >> 2 * i & 3).reshape(n, blocks, 16) << pairs
    if bit is not None and planes.size:
        q[:, :, low_at] |= (planes[:, :, -1] >> i & 1).reshape(n, blocks, 16) << bit
        q[:, :, high_at] |= (planes[:, :, -1] >> 4 + i & 1).reshape(n, blocks, 16) << bit
    values = {"iq4_nl": IQ4_VALUES, "iq4_xs": IQ4_VALUES, "mxfp4": MXFP4_VALUES}.get(fmt)
    if values is not None:
        return np.array(values, np.float32)[q]
    return q.astype(np.float32) - np.float32(OFFSETS.get(fmt, 0))


def _columns(fmt: str) -> tuple[np.ndarray, np.ndarray]:
    """Columns of the low and of the high nibbles of a block, byte by byte."""
    if fmt in ("q2_k", "q3_k", "q6_k"):
        low = np.arange(BLOCK).reshape(4, 2, 4)[:, 0].reshape(-1)
        return low, low + 4
    return np.arange(16), np.arange(16, 32)


def unpack(fmt: str, words: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """x8 words of a matrix (flat, from its first word on) -> float32 [rows, cols]."""
    return decode_rows(fmt, deinterleave(words, rows, row_words(fmt, cols)), cols)


def unpack_rows(fmt: str, words: np.ndarray, cols: int, rows: np.ndarray) -> np.ndarray:
    """Chosen rows of an x8 matrix -> float32 [len(rows), cols], without decoding the others."""
    per_row = row_words(fmt, cols)
    first = rows // ROWS * (ROWS * per_row) + rows % ROWS
    index = first[:, None] + np.arange(per_row)[None, :] * ROWS
    return decode_rows(fmt, words[index], cols)

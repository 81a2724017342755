"""Random weight matrices in every device format, packed by the letter of the layout's definition.

A second, slower implementation of what ``weights/formats.py`` and ``kernels/unpack.py`` do, sharing no
code with them: every word is placed by the formula in the words of :mod:`xinfer_vk.kernels.layout`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BLOCK_SIZES = {
    **dict.fromkeys(("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "mxfp4"), 32),
    **dict.fromkeys(("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs"), 256),
}
# GPTQ's and AWQ's: (bits, columns that share a scale and a zero; None: all of a row)
GROUPED = {
    f"int{bits}_{name}": (bits, group)
    for bits in (4, 8)
    for name, group in (("g32", 32), ("g64", 64), ("g128", 128), ("row", None))
}
BLOCK_SIZES |= dict.fromkeys(GROUPED, 32)
# The size of a group is a number in one kernel: two formats stand for all.
FORMATS = ("f32", "f16", "bf16", *(f for f in BLOCK_SIZES if f not in GROUPED), "int4_g32", "int8_g64")

BITS = {"q2_k": 2, "q3_k": 3, "q5_0": 5, "q5_1": 5, "q5_k": 5, "q6_k": 6}  # of a weight; others have 4
OFFSETS = {"q4_0": 8, "q5_0": 16, "q6_k": 32, "q3_k": 4}
ADJACENT = ("q2_k", "q3_k", "q6_k")  # a scale for every 16 weights
IQ4 = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
MXFP4 = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]


def whole_blocks(fmt: str, cols: int) -> int:
    """``cols``, or the next number of columns that is whole blocks of the format."""
    block = BLOCK_SIZES.get(fmt, 1)
    return -(-cols // block) * block


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
    if fmt not in BLOCK_SIZES:
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

    if fmt in GROUPED:
        return _grouped_matrix(fmt, rows, cols, rng)
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

    q = rng.integers(0, 1 << BITS.get(fmt, 4), (rows, cols))
    data = _place_bits(fmt, q)
    if BLOCK_SIZES[fmt] == 256:
        scales, d, m = _super_block_scales(fmt, rows, cols // 256, rng)
        wide = np.repeat(d, cols // d.shape[1], axis=1)
        offset = np.repeat(m, cols // m.shape[1], axis=1)
    else:
        offset = np.zeros((rows, cols))
        if fmt == "mxfp4":
            exponents = rng.integers(118, 129, (rows, blocks))
            wide = np.repeat(2.0 ** (exponents - 128), 32, axis=1)
            padded = np.zeros((rows, -(-blocks // 4) * 4), np.uint32)
            padded[:, :blocks] = exponents
            scales = sum(padded[:, i::4] << np.uint32(8 * i) for i in range(4))
        elif fmt in ("q4_1", "q5_1"):
            m16 = rng.standard_normal((rows, blocks)).astype(np.float16)
            offset = np.repeat(m16.astype(np.float64), 32, axis=1)
            scales = _halves_to_words(d.view(np.uint16), m16.view(np.uint16))
        else:
            scales = _block_scales(d)
    words = _place(np.concatenate((scales, data), axis=1))
    if fmt in ("iq4_nl", "iq4_xs", "mxfp4"):
        values = np.array(MXFP4 if fmt == "mxfp4" else IQ4)[q]
        magnitude = np.abs(wide) * (np.abs(values) + (24 if fmt == "mxfp4" else 0))
        return WeightMatrix(fmt, rows, cols, words, wide * values, magnitude)
    zero = OFFSETS.get(fmt, 0)
    magnitude = np.abs(wide * q) + np.abs(zero * wide) + np.abs(offset)
    return WeightMatrix(fmt, rows, cols, words, wide * (q - zero) + offset, magnitude)


def _grouped_matrix(fmt: str, rows: int, cols: int, rng: np.random.Generator) -> WeightMatrix:
    """``d (q - zero)``, every bit of the scales placed by itself."""
    bits, size = GROUPED[fmt]
    size = size or cols
    groups = -(-cols // size)
    d = rng.standard_normal((rows, groups)).astype(np.float16)
    low, high = (0, 16) if bits == 4 else (-128, 128)
    zero, q = rng.integers(low, high, (rows, groups)), rng.integers(low, high, (rows, cols))
    chunks: list[list[int]] = []  # of each: its groups
    for g in range(groups):
        if g % (32 // bits) == 0:
            chunks.append([])
        chunks[-1].append(g)
    scales = []
    for chunk in chunks:
        zeros, pairs = np.zeros(rows, np.uint32), [np.zeros(rows, np.uint32) for _ in chunk[::2]]
        for i, g in enumerate(chunk):
            zeros |= (zero[:, g].astype(np.uint32) & ((1 << bits) - 1)) << (bits * i)
            pairs[i // 2] |= d[:, g].view(np.uint16).astype(np.uint32) << (16 * (i % 2))
        scales += [zeros, *pairs]
    if bits == 4:
        data = _place_bits(fmt, q)
    else:
        data = np.zeros((rows, cols // 4), np.uint32)
        for c in range(cols):
            data[:, c // 4] |= (q[:, c].astype(np.uint32) & 255) << (8 * (c % 4))
    words = _place(np.concatenate((np.stack(scales, axis=1), data), axis=1))
    group = np.arange(cols) // size
    d_of, zero_of = d.astype(np.float64)[:, group], zero[:, group]
    magnitude = np.abs(d_of * q) + np.abs(d_of * zero_of)
    return WeightMatrix(fmt, rows, cols, words, d_of * (q - zero_of), magnitude)


def _place_bits(fmt: str, q: np.ndarray) -> np.ndarray:
    """Weights [rows, cols], of 2 to 6 bits -> words, column by column."""
    rows, cols = q.shape
    bits = BITS.get(fmt, 4)
    per_block = bits  # words of 32 weights
    data = np.zeros((rows, cols // 32 * per_block), np.uint32)
    for c in range(cols):
        block, i = divmod(c, 32)
        if fmt in ADJACENT:
            word, half, byte = i // 8, i % 8 // 4, i % 4
        else:
            word, half, byte = i % 16 // 4, i // 16, i % 4
        value, first = q[:, c].astype(np.uint32), block * per_block
        plane = first
        if bits >= 4:
            data[:, first + word] |= (value & 15) << (8 * byte + 4 * half)
            value, plane = value >> 4, first + 4
        if bits in (2, 3, 6):
            data[:, plane + half] |= (value & 3) << (8 * byte + 2 * word)
            value, plane = value >> 2, plane + 2
        if bits in (3, 5):
            data[:, plane] |= value << (8 * byte + 4 * half + word)
    return data


def _super_block_scales(
    fmt: str, rows: int, supers: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(words, d, m): d and m in float64 for every block of 32 or 16 columns."""
    parts = 16 if fmt in ADJACENT else 8
    limit = {"q2_k": 16, "q6_k": 256}.get(fmt, 64)
    size = {"q2_k": 0.05, "q6_k": 0.0005, "iq4_xs": 0.0005}.get(fmt, 0.005)
    d = (rng.standard_normal((rows, supers)) * size).astype(np.float16)
    m = (rng.standard_normal((rows, supers)) * size).astype(np.float16)
    s, t = rng.integers(0, limit, (2, rows, supers, parts))
    code = np.zeros((rows, supers, {"iq4_xs": 4, "q2_k": 16, "q6_k": 16}.get(fmt, 12)), np.uint32)
    upper = m.view(np.uint16) if fmt in ("q2_k", "q4_k", "q5_k") else np.zeros((rows, supers), np.uint32)
    for j in range(parts):
        if fmt == "q2_k":
            code[..., j] = s[..., j] | t[..., j] << 4
        elif fmt == "q6_k":
            code[..., j] = s[..., j]
        elif fmt == "q3_k":
            code[..., j % 8] |= (s[..., j].astype(np.uint32) & 15) << (4 * (j // 8))
            code[..., 8 + j % 4] |= (s[..., j].astype(np.uint32) >> 4) << (2 * (j // 4))
        elif fmt == "iq4_xs":
            code[..., j // 2] |= (s[..., j].astype(np.uint32) & 15) << (4 * (j % 2))
            upper |= (s[..., j].astype(np.uint32) >> 4) << (2 * j)
        elif j < 4:
            code[..., j] = s[..., j] | s[..., j + 4] >> 4 << 6
            code[..., 4 + j] = t[..., j] | t[..., j + 4] >> 4 << 6
        else:
            code[..., 4 + j] = s[..., j] & 15 | (t[..., j] & 15) << 4
    words = np.zeros((rows, supers, 1 + code.shape[2] // 4), np.uint32)
    words[..., 0] = _halves_to_words(d.view(np.uint16), upper)
    words[..., 1:] = sum(code[..., i::4] << np.uint32(8 * i) for i in range(4))
    if fmt == "q6_k":
        s = np.where(s < 128, s, s - 256)
    elif fmt in ("q3_k", "iq4_xs"):
        s = s - 32
    scale = (d.astype(np.float64)[..., None] * s).reshape(rows, -1)
    minimum = (m.astype(np.float64)[..., None] * -t).reshape(rows, -1)
    return words.reshape(rows, -1), scale, minimum if fmt in ("q2_k", "q4_k", "q5_k") else 0 * scale

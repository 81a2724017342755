"""The number formats of weights: how files store them, and how rows are packed for the device.

On the device a matrix lies as :mod:`xinfer_vk.kernels.layout` says ("x8"): eight rows side by side,
word by word. Packing changes the order of the bits and no value.

The block formats are GGML's (ggml-common.h: ``block_q8_0``, ``block_q4_K`` and so on). Blocks of 32
have their scale first, their minimum if any, then the weights; how the super-blocks of 256 (the
K-quants and iq4_xs) are laid out is said where they are packed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from xinfer_vk.kernels.layout import (
    BLOCK,
    BLOCK_LAYOUTS,
    GROUP_LAYOUTS,
    ROWS,
    padded_rows,
    row_words,
    scale_words,
)

SUPER_BLOCK = 256


@dataclass(frozen=True)
class Format:
    """``block`` weights take ``block_bytes`` in a file. ``safetensors``: the dtype's name there, if any."""

    name: str
    block: int
    block_bytes: int
    ggml_type: int
    safetensors: str | None = None

    def row_bytes(self, cols: int) -> int:
        """Bytes of a row of ``cols`` weights in a file; ``cols`` must be whole blocks."""
        return cols // self.block * self.block_bytes


FORMATS = {
    f.name: f
    for f in (
        Format("f32", 1, 4, 0, "F32"),
        Format("f16", 1, 2, 1, "F16"),
        Format("bf16", 1, 2, 30, "BF16"),
        Format("q8_0", 32, 34, 8),
        Format("q4_0", 32, 18, 2),
        Format("q4_1", 32, 20, 3),
        Format("q5_0", 32, 22, 6),
        Format("q5_1", 32, 24, 7),
        Format("q2_k", 256, 84, 10),
        Format("q3_k", 256, 110, 11),
        Format("q4_k", 256, 144, 12),
        Format("q5_k", 256, 176, 13),
        Format("q6_k", 256, 210, 14),
        Format("iq4_nl", 32, 18, 20),
        Format("iq4_xs", 256, 136, 23),
        Format("mxfp4", 32, 17, 39),
    )
}
BY_GGML_TYPE = {f.ggml_type: f for f in FORMATS.values()}
BY_SAFETENSORS = {f.safetensors: f for f in FORMATS.values() if f.safetensors}

# What llama.cpp's quantizer takes for rows that a format's blocks do not divide (Qwen2.5-0.5B's are 896
# wide, no multiple of 256), and so what real files of these names have.
INSTEAD = {
    "q2_k": "iq4_nl", "q3_k": "iq4_nl", "iq4_xs": "iq4_nl", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0",
}  # fmt: skip


def fitting_format(fmt: str, cols: int) -> str:
    """``fmt``, or the next wider one whose blocks divide ``cols``."""
    while True:
        try:
            row_words(fmt, cols)
            return fmt
        except ValueError:  # its blocks do not
            fmt = INSTEAD.get(fmt, "f16")


def as_f32(fmt: str, data: np.ndarray) -> np.ndarray:
    """Values of an unblocked format as float32 ``[n]``: exact, since all three are subsets of it.

    ``data``: ``uint8 [bytes]``, at any alignment.
    """
    if fmt == "f32":
        return _elements(data, "<f4").astype(np.float32)
    if fmt == "f16":
        return _elements(data, "<f2").astype(np.float32)
    if fmt == "bf16":
        return (_elements(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    raise ValueError(f"{fmt!r} is not a plain float format")


def pack_x8(fmt: str, rows: np.ndarray, cols: int) -> np.ndarray:
    """Rows as a file has them, packed for the device.

    ``rows``: ``uint8 [n, row_bytes]``, C-contiguous, at any alignment. Returns ``uint32 [groups,
    row_words, 8]`` with ``groups = ceil(n / 8)``; rows past ``n`` are zero, which decodes to zero in
    every format: their scales are zero.
    """
    n = rows.shape[0]
    if n % ROWS:
        padded = np.zeros((padded_rows(n), rows.shape[1]), np.uint8)
        padded[:n] = rows
        rows = padded
    groups = rows.shape[0] // ROWS
    data = rows.reshape(-1)
    step = rows.shape[1]  # bytes from a row to the next
    out = np.empty((groups, row_words(fmt, cols), ROWS), np.uint32)

    def words(offset: int, *dims: tuple[int, int]) -> np.ndarray:
        """``uint32 [groups, 8, *sizes]`` over (size, byte stride) ``dims`` of each row."""
        return _strided(data, "<u4", offset, ((groups, ROWS * step), (ROWS, step), *dims))

    def halves(count: int, stride: int, target: np.ndarray) -> None:
        """Two 16-bit values to a word: value ``2k`` in the low half of word ``k``."""
        values = _strided(data, "<u2", 0, ((groups, ROWS * step), (ROWS, step), (count, stride)))
        pairs = target.view(np.uint16).reshape(*target.shape, 2)  # [groups, words, 8, half]
        pairs[:, :, :, 0] = values[:, :, 0::2].transpose(0, 2, 1)
        odd = count // 2
        pairs[:, :odd, :, 1] = values[:, :, 1::2].transpose(0, 2, 1)
        pairs[:, odd:, :, 1] = 0

    if fmt == "f32" or fmt in GROUP_LAYOUTS:  # whose rows are in the words of the device
        out[...] = words(0, (out.shape[1], 4)).transpose(0, 2, 1)
    elif fmt in ("f16", "bf16") and cols % 2 == 0:
        out[...] = words(0, (cols // 2, 4)).transpose(0, 2, 1)
    elif fmt in ("f16", "bf16"):
        halves(cols, 2, out)
    else:
        layout, size = BLOCK_LAYOUTS[fmt], FORMATS[fmt].block_bytes
        scales, blocks = scale_words(fmt, cols), cols // layout.block
        body = out[:, scales:].reshape(groups, -1, layout.block_words, ROWS)  # of every 32 columns

        def block_words(offset: int, count: int) -> np.ndarray:
            """``uint32 [groups, blocks, count, 8]``: ``count`` words at a byte of every block."""
            return words(offset, (blocks, size), (count, 4)).transpose(0, 2, 3, 1)

        if layout.columns == SUPER_BLOCK:
            head = out[:, :scales].reshape(groups, blocks, layout.scale_words, ROWS)
            _pack_super_block(fmt, block_words, head, body.reshape(groups, blocks, 8, -1, ROWS))
            return out
        if fmt == "mxfp4":
            exponents = np.zeros((groups, scales * 4, ROWS), np.uint8)
            at = _strided(data, "u1", 0, ((groups, ROWS * step), (ROWS, step), (blocks, size)))
            exponents[:, :blocks] = at.transpose(0, 2, 1)
            out[:, :scales] = np.ascontiguousarray(
                exponents.reshape(groups, scales, 4, ROWS).transpose(0, 1, 3, 2)
            ).view("<u4")[..., 0]
        elif layout.columns == BLOCK:
            out[:, :scales] = words(0, (blocks, size)).transpose(0, 2, 1)
        else:
            halves(blocks, size, out[:, :scales])
        stored = 8 if fmt == "q8_0" else 4  # words of weights, which are the end of a block
        body[:, :, :stored] = block_words(size - 4 * stored, stored)
        if layout.block_words == 5:
            body[:, :, 4] = _bit_plane(block_words(size - 20, 1)[:, :, 0])
    return out


LOW_NIBBLES = np.uint32(0x0F0F0F0F)
LOW_PAIRS = np.uint32(0x03030303)
LOW_BITS = np.uint32(0x01010101)


def _bit_plane(bits: np.ndarray) -> np.ndarray:
    """The fifth bits of q5_0 and q5_1, weight ``c`` in bit ``c``, as a plane: weight ``4 j + n`` in bit
    ``8 n + j``."""
    plane = np.zeros(bits.shape, np.uint32)
    for n in range(4):
        part = (bits >> np.uint32(n)) & np.uint32(0x11111111)  # bit j at 4 j: bring them together
        part = (part | part >> np.uint32(3)) & np.uint32(0x03030303)
        part = (part | part >> np.uint32(6)) & np.uint32(0x000F000F)
        plane |= ((part | part >> np.uint32(12)) & np.uint32(0xFF)) << np.uint32(8 * n)
    return plane


def _pack_super_block(
    fmt: str, at: Callable[[int, int], np.ndarray], head: np.ndarray, body: np.ndarray
) -> None:
    """Super-blocks of 256 weights. ``at(offset, count)``: words ``[groups, supers, count, 8]`` at a byte
    of each. ``head``: their scales ``[groups, supers, words, 8]``; ``body``: their eight blocks
    ``[groups, supers, 8, words, 8]``.

    GGML's structs, in bytes: q2_k ``scales 16, pairs 64, d 2, m 2``; q3_k ``bits 32, pairs 64, scales
    12, d 2``; q4_k ``d 2, m 2, scales 12, nibbles 128``; q5_k ``d 2, m 2, scales 12, bits 32, nibbles
    128``; q6_k ``nibbles 128, pairs 64, scales 16, d 2``; iq4_xs ``d 2, upper scales 2, scales 4,
    nibbles 128``.
    """
    if fmt in ("q4_k", "q5_k"):
        head[...] = at(0, 4)
        nibbles = at(48 if fmt == "q5_k" else 16, 32)
        for pair in range(4):  # 32 bytes: block 2 pair in the low nibbles, the next in the high ones
            first, second = nibbles[:, :, 8 * pair : 8 * pair + 4], nibbles[:, :, 8 * pair + 4 : 8 * pair + 8]
            body[:, :, 2 * pair, :4] = first & LOW_NIBBLES | (second & LOW_NIBBLES) << np.uint32(4)
            body[:, :, 2 * pair + 1, :4] = first >> np.uint32(4) & LOW_NIBBLES | second & ~LOW_NIBBLES
        if fmt == "q5_k":
            bits = at(16, 8)  # bit j of byte l: weight l of block j
            for j in range(8):
                body[:, :, j, 4] = _gathered(bits >> np.uint32(j) & LOW_BITS, 1)
    elif fmt == "iq4_xs":
        head[...] = at(0, 2)
        body[...] = at(8, 32).reshape(body.shape)
    elif fmt == "q6_k":
        head[:, :, 0] = at(206, 1)[:, :, 0] >> np.uint32(16)  # the file may end with d
        head[:, :, 1:] = at(192, 4)
        nibbles = at(0, 32)
        for j in range(8):  # 64 bytes: blocks 0 and 1 of a half in the low nibbles, 2 and 3 in the high
            at_word = j // 4 * 16 + j % 2 * 8
            part = nibbles[:, :, at_word : at_word + 8] >> np.uint32(j % 4 // 2 * 4) & LOW_NIBBLES
            body[:, :, j, :4] = part[:, :, 0::2] | part[:, :, 1::2] << np.uint32(4)
        _pair_planes(at(128, 16), body[:, :, :, 4:])
    elif fmt == "q2_k":
        head[:, :, 0] = at(80, 1)[:, :, 0]
        head[:, :, 1:] = at(0, 4)
        _pair_planes(at(16, 16), body)
    else:  # q3_k
        head[:, :, 0] = at(106, 1)[:, :, 0] >> np.uint32(16)
        head[:, :, 1:] = at(96, 3)
        _pair_planes(at(32, 16), body)
        bits = at(0, 8)
        for j in range(8):
            part = bits >> np.uint32(j) & LOW_BITS
            plane = _gathered(part[:, :, 0::2], 1) | _gathered(part[:, :, 1::2], 1) << np.uint32(4)
            body[:, :, j, 2] = plane


def _pair_planes(pairs: np.ndarray, body: np.ndarray) -> None:
    """Two bits of every weight: in the file, bits ``2 q`` of byte ``l`` of each half are weight ``l`` of
    its block ``q``."""
    for j in range(8):
        part = pairs[:, :, j // 4 * 8 : j // 4 * 8 + 8] >> np.uint32(j % 4 * 2) & LOW_PAIRS
        body[:, :, j, 0] = _gathered(part[:, :, 0::2], 2)
        body[:, :, j, 1] = _gathered(part[:, :, 1::2], 2)


def _gathered(words: np.ndarray, bits: int) -> np.ndarray:
    """Words ``[groups, supers, k, 8]`` of which each byte uses its lowest ``bits``, as one: word ``k`` is
    shifted by ``k bits``."""
    out = words[:, :, 0].copy()
    for k in range(1, words.shape[2]):
        out |= words[:, :, k] << np.uint32(k * bits)
    return out


def _elements(data: np.ndarray, dtype: str) -> np.ndarray:
    size = np.dtype(dtype).itemsize
    return _strided(data, dtype, 0, ((data.size // size, size),))


def _strided(data: np.ndarray, dtype: str, offset: int, dims: tuple[tuple[int, int], ...]) -> np.ndarray:
    """A view of bytes as ``dtype`` at any alignment, over (size, byte stride) pairs."""
    shape, strides = tuple(size for size, _ in dims), tuple(stride for _, stride in dims)
    return np.ndarray(shape, dtype, data, offset, strides)

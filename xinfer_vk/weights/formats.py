"""The number formats of weights: how files store them, and how rows are packed for the device.

On the device a matrix lies as :mod:`xinfer_vk.kernels.layout` says ("x8"): eight rows side by side,
word by word. Packing changes the order of the bits and no value.

The block formats are GGML's (ggml-common.h: ``block_q8_0``, ``block_q4_0``, ``block_q4_1``): 32
weights a block, its scale first, its minimum if any, then the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xinfer_vk.kernels.layout import ROWS, padded_rows, row_words


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
    )
}
BY_GGML_TYPE = {f.ggml_type: f for f in FORMATS.values()}
BY_SAFETENSORS = {f.safetensors: f for f in FORMATS.values() if f.safetensors}


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
    every format but q4_0, where scale 0 does it.
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

    if fmt == "f32":
        out[...] = words(0, (cols, 4)).transpose(0, 2, 1)
    elif fmt in ("f16", "bf16") and cols % 2 == 0:
        out[...] = words(0, (cols // 2, 4)).transpose(0, 2, 1)
    elif fmt in ("f16", "bf16"):
        halves(cols, 2, out)
    else:
        blocks, size = cols // FORMATS[fmt].block, FORMATS[fmt].block_bytes
        per_block = 8 if fmt == "q8_0" else 4  # words of weights; they are the end of a block
        scales = out.shape[1] - blocks * per_block
        if fmt == "q4_1":
            out[:, :scales] = words(0, (blocks, size)).transpose(0, 2, 1)
        else:
            halves(blocks, size, out[:, :scales])
        body = out[:, scales:].reshape(groups, blocks, per_block, ROWS)
        body[...] = words(size - 4 * per_block, (blocks, size), (per_block, 4)).transpose(0, 2, 3, 1)
    return out


def _elements(data: np.ndarray, dtype: str) -> np.ndarray:
    size = np.dtype(dtype).itemsize
    return _strided(data, dtype, 0, ((data.size // size, size),))


def _strided(data: np.ndarray, dtype: str, offset: int, dims: tuple[tuple[int, int], ...]) -> np.ndarray:
    """A view of bytes as ``dtype`` at any alignment, over (size, byte stride) pairs."""
    shape, strides = tuple(size for size, _ in dims), tuple(stride for _, stride in dims)
    return np.ndarray(shape, dtype, data, offset, strides)

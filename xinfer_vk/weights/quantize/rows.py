"""Rows of a tensor from one number format to another, by way of float32."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from xinfer_vk.errors import ModelError
from xinfer_vk.kernels.unpack import unpack
from xinfer_vk.weights.formats import FORMATS, as_f32, pack_x8
from xinfer_vk.weights.quantize.blocks import q4_0, q4_1, q5_0, q8_0
from xinfer_vk.weights.quantize.super_blocks import q4_k, q6_k

ENCODERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "q8_0": q8_0, "q4_0": q4_0, "q4_1": q4_1, "q5_0": q5_0, "q4_k": q4_k, "q6_k": q6_k
}  # fmt: skip
FLOATS = ("f32", "f16", "bf16")
MAX_F16 = 65504.0
AT_ONCE = 1 << 17  # weights: what a fit works on stays in a core's cache


def quantize_rows(fmt: str, rows: np.ndarray, what: str) -> np.ndarray:
    """Float32 ``[n, cols]`` in format ``fmt``: ``uint8 [n, row_bytes]``. ``cols`` must be whole blocks.

    ``what`` names the tensor in errors. Raises :class:`ModelError` for weights that are NaN or infinite,
    and for those beyond f16, in which every format but f32 and bf16 keeps its numbers or its scales.
    """
    if fmt == "f32":
        return np.ascontiguousarray(rows, "<f4").view(np.uint8)
    if not np.isfinite(rows).all():
        raise ModelError(f"{what} holds weights that are NaN or infinite, which {fmt} has no numbers for")
    if fmt == "bf16":
        return _bf16(rows, what)
    peak = float(np.abs(rows).max(initial=0))
    if peak > MAX_F16:
        raise ModelError(f"{what} holds weights up to {peak:.6g}, {fmt} can hold {MAX_F16:g} at most")
    if fmt == "f16":
        return rows.astype("<f2").view(np.uint8)
    blocks = np.ascontiguousarray(rows, np.float32).reshape(-1, FORMATS[fmt].block)
    step = AT_ONCE // FORMATS[fmt].block
    pieces = [blocks[at : at + step] for at in range(0, len(blocks), step)]
    if len(pieces) == 1:
        encoded = ENCODERS[fmt](blocks)
    else:
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # NumPy lets other threads run while it computes
            encoded = np.concatenate(list(pool.map(ENCODERS[fmt], pieces)))
    return encoded.reshape(len(rows), FORMATS[fmt].row_bytes(rows.shape[1]))


def dequantize_rows(fmt: str, rows: np.ndarray, cols: int) -> np.ndarray:
    """``uint8 [n, row_bytes]`` as float32 ``[n, cols]``."""
    if fmt in FLOATS:
        return as_f32(fmt, np.ascontiguousarray(rows).reshape(-1)).reshape(len(rows), cols)
    packed = pack_x8(fmt, np.ascontiguousarray(rows), cols)
    return unpack(fmt, packed.reshape(-1), len(rows), cols)


def _bf16(rows: np.ndarray, what: str) -> np.ndarray:
    """Rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(rows, np.float32).view(np.uint32)
    halves = ((bits + (0x7FFF + (bits >> np.uint32(16) & 1))) >> np.uint32(16)).astype("<u2")
    if ((halves & 0x7F80) == 0x7F80).any():
        raise ModelError(f"{what} holds weights of {float(np.abs(rows).max()):.6g}, too large for bf16")
    return halves.view(np.uint8)

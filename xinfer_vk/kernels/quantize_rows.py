"""Activations in 8 bits: every 32 columns of a row become signed bytes and a scale (quantize_rows.comp).

A quantized row of ``cols`` (a multiple of 32) is ``cols / 4`` words of bytes ``q``, four a word, then for
every 32 columns two f32: the scale ``dx`` (the largest absolute value / 127; ``x = dx q``) and ``dx sum(q)``.
"""

from __future__ import annotations

import numpy as np

from xinfer_vk.kernels.base import COUNTS, Ref, ceil_div
from xinfer_vk.kernels.layout import BLOCK
from xinfer_vk.kernels.matmul import rows_view
from xinfer_vk.plan import Buffer, DeviceProfile, Kernel, OracleCall, Step, make_step

LOCAL_SIZE, BLOCK_LANES = 64, 8  # of a block, on GPUs
MOST = 127
SMALLEST = np.float32(1e-30)  # blocks below become zeros


def quantized_words(cols: int) -> int:
    """Words of a row of ``cols`` values."""
    return cols // 4 + cols // BLOCK * 2


def quantize(x: np.ndarray) -> np.ndarray:
    """Rows of f32 ``[n, cols]`` -> ``uint32 [n, quantized_words(cols)]``. With a NaN or an infinity the
    scale is NaN or infinite."""
    n, count = x.shape[0], x.shape[1] // BLOCK
    blocks = x.reshape(n, count, BLOCK)
    most = np.abs(blocks).max(axis=2, keepdims=True)
    rounds = (most > SMALLEST) & np.isfinite(most)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        q = np.where(rounds, np.rint(blocks * (np.float32(MOST) / most)), 0).clip(-MOST, MOST)
        dx = most[:, :, 0] / np.float32(MOST)
        scales = np.stack((dx, dx * q.sum(axis=2, dtype=np.float32)), axis=2)
    words = np.ascontiguousarray(q.astype(np.int8)).view(np.uint32).reshape(n, count * BLOCK // 4)
    return np.concatenate((words, scales.astype(np.float32).view(np.uint32).reshape(n, 2 * count)), axis=1)


def dequantize(words: np.ndarray, cols: int) -> np.ndarray:
    """Quantized rows ``uint32 [n, quantized_words(cols)]`` -> the f32 ``[n, cols]`` they stand for."""
    n, count = words.shape[0], cols // BLOCK
    q = np.ascontiguousarray(words[:, : cols // 4]).view(np.int8).reshape(n, count, BLOCK)
    dx = np.ascontiguousarray(words[:, cols // 4 :]).view(np.float32).reshape(n, count, 2)[:, :, :1]
    with np.errstate(invalid="ignore"):
        return (q * dx).reshape(n, cols)


def _oracle(call: OracleCall) -> None:
    p, rows = call.p, int(call.u32("state")[call.p.count_at])
    x = rows_view(call.f32("x"), p.x_offset, p.x_stride, rows, p.cols)
    rows_view(call.u32("y"), p.y_offset, p.y_stride, rows, quantized_words(p.cols))[:] = quantize(x)


def kernel(aligned: bool, block_lanes: int) -> Kernel:
    return Kernel(
        name="quantize_rows",
        shader="quantize_rows",
        bindings=("x", "state", "y"),
        params=("x_offset:u", "x_stride:u", "y_offset:u", "y_stride:u", "cols:u", "count_at:u"),
        spec=(("local_size", LOCAL_SIZE), ("aligned", int(aligned)), ("block_lanes", block_lanes)),
        oracle=_oracle,
    )


def quantize_rows(
    P: DeviceProfile,
    x: Ref,
    x_stride: int,
    y: Ref,
    y_stride: int,
    cols: int,
    tokens: int,
    state: Buffer,
    count: str,
) -> list[Step]:
    """``y[t]`` = the quantized row of the ``cols`` values ``x[t]``, for the rows in use of ``tokens``, which
    the word ``count`` of the state says ("tokens" or "outputs"). They may lie in one buffer but must not
    overlap. Raises ``ValueError`` for columns that are not whole blocks."""
    if cols % BLOCK or cols < BLOCK:
        raise ValueError(f"quantize_rows: {cols} columns are not whole blocks of {BLOCK}")
    block_lanes = 1 if P.simd else BLOCK_LANES
    return [
        make_step(
            kernel(x.offset % 4 == 0 and x_stride % 4 == 0, block_lanes),
            {"x": x.buffer, "state": state, "y": y.buffer},
            {
                "x_offset": x.offset, "x_stride": x_stride, "y_offset": y.offset, "y_stride": y_stride,
                "cols": cols, "count_at": COUNTS[count],
            },
            (ceil_div(cols // BLOCK * block_lanes, LOCAL_SIZE), tokens),
        )
    ]  # fmt: skip

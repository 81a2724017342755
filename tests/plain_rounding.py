"""Quantizing by the plain rule, in float64: what the fits of :mod:`xinfer_vk.weights.quantize` are measured
against by the tests and by ``benchmarks/quantization.py``."""

from __future__ import annotations

import numpy as np


def plain(fmt: str, x: np.ndarray) -> np.ndarray:
    """``x`` after the plain rule of each format, in float64: the weight of largest magnitude, or the
    largest and the smallest, decide the scale. Scales are rounded to f16 where the format has f16."""

    def f16(v: np.ndarray) -> np.ndarray:
        return v.astype(np.float16).astype(np.float64)

    def over(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.divide(a, b, out=np.zeros(np.broadcast_shapes(a.shape, b.shape)), where=b != 0)

    def peak(v: np.ndarray) -> np.ndarray:
        return np.take_along_axis(v, np.abs(v).argmax(-1)[..., None], -1)

    if fmt == "q6_k":
        v = x.astype(np.float64).reshape(-1, 16, 16)
        ideal = peak(v) / -32
        d = f16(np.abs(ideal).max(1, keepdims=True) / 127)
        s = d * np.rint(over(ideal, d))
        return (s * np.clip(np.rint(over(v, s)), -32, 31)).reshape(x.shape)
    if fmt == "q4_k":
        v = x.astype(np.float64).reshape(-1, 8, 32)
        low = np.minimum(v.min(-1, keepdims=True), 0)
        ideal = (v.max(-1, keepdims=True) - low) / 15
        d, e = f16(ideal.max(1, keepdims=True) / 63), f16(-low.min(1, keepdims=True) / 63)
        s, t = d * np.clip(np.rint(over(ideal, d)), 0, 63), e * np.clip(np.rint(over(-low, e)), 0, 63)
        return (s * np.clip(np.rint(over(v + t, s)), 0, 15) - t).reshape(x.shape)
    v = x.astype(np.float64).reshape(-1, 32)
    if fmt == "q4_1":
        low = v.min(-1, keepdims=True)
        d, m = f16((v.max(-1, keepdims=True) - low) / 15), f16(low)
        return (d * np.clip(np.rint(over(v - m, d)), 0, 15) + m).reshape(x.shape)
    bottom = {"q8_0": -127, "q5_0": -16, "q4_0": -8}[fmt]
    d = f16(peak(v) / bottom)
    return (d * np.clip(np.rint(over(v, d)), bottom, 127 if fmt == "q8_0" else -bottom - 1)).reshape(x.shape)

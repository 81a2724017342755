"""Matrix products with activations in 8 bits (W8A8): products of integers, scaled once per 32 columns.

``x`` is quantized first (:mod:`xinfer_vk.kernels.quantize_rows`); what is multiplied then are the weights'
integers by those of ``x``, by the device's dot product of bytes where it has one. :func:`tuned_choice` is
what :func:`xinfer_vk.kernels.matmul.linear` takes as ``choice``, with ``x`` of quantized rows and a format of
FORMATS; the result is that of the rounded ``x``, up to the order of sums in f32.

Two shader families: ``matvec_a8`` for few tokens, and on CPU devices for any number; ``matmul_a8`` for GPUs
and many.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from xinfer_vk.kernels import matmul
from xinfer_vk.kernels.base import ceil_div
from xinfer_vk.kernels.layout import GROUP_LAYOUTS, shader_format, units
from xinfer_vk.kernels.matmul import (
    BINDINGS,
    MATVEC_LANES,
    MATVEC_SHARED,
    MATVEC_TOKENS,
    PARAMS,
    Choice,
    distinct,
    up_to,
)
from xinfer_vk.kernels.quantize_rows import dequantize, quantized_words
from xinfer_vk.plan import DeviceProfile, Kernel, OracleCall

FORMATS = ("q8_0", "q4_0", "q4_1", *GROUP_LAYOUTS)  # of weights that are integers and a scale

SIMD_LANES = 8  # each computes four rows
TILE_LANES, TILE_ROWS, TILE_TOKENS, TILE_BLOCKS = 256, 64, (16, 32, 64), 4


def _x(call: OracleCall, tokens: int) -> np.ndarray:
    """What the quantized rows stand for: f32 [tokens, cols]."""
    p = call.p
    words = quantized_words(p.cols)
    return dequantize(matmul.rows_view(call.u32("x"), p.x_offset, p.x_stride, tokens, words), p.cols)


@cache
def _kernel(family: str, fmt: str, integers: str, spec: tuple[tuple[str, int], ...]) -> Kernel:
    shader_fmt, fmt_spec = shader_format(fmt)
    name, shader = f"{family}.{fmt}.{integers}", f"{family}.{shader_fmt}.{integers}"
    return Kernel(name, shader, BINDINGS, PARAMS, spec + fmt_spec, matmul.oracle_of(fmt, _x))


def tile_bytes(tokens: int) -> int:
    """Shared memory of a matmul_a8 workgroup: tiles of W and x, their scales, and where rows of x begin."""
    quads = TILE_ROWS // 4
    block = 8 * ((quads + 1) * 16 + (tokens + 1) * 4) + quads * 2 * 16 + tokens * 8
    return TILE_BLOCKS * block + tokens * 4


def _matvec(profile: DeviceProfile, fmt: str, tokens: int, lanes: int) -> Choice:
    tile = up_to(tokens, (1, 2, 4, MATVEC_TOKENS))
    quads = SIMD_LANES if profile.simd else 2
    lanes = SIMD_LANES if profile.simd else min(lanes, MATVEC_SHARED // tile)  # a vec4 a lane and token
    spec = (("local_size", lanes), ("tokens", tile), ("quads", quads), ("experts", 0))
    return _kernel("matvec_a8", fmt, _integers(profile), spec), 4 * quads, tile


def _matmul(profile: DeviceProfile, fmt: str, tokens: int, most: int) -> Choice:
    fitting = [tile for tile in TILE_TOKENS if tile_bytes(tile) <= profile.max_shared_bytes]
    tile = up_to(min(tokens, most), fitting)
    spec = (("local_size", TILE_LANES), ("tokens", tile), ("blocks", TILE_BLOCKS), ("experts", 0))
    return _kernel("matmul_a8", fmt, _integers(profile), spec), TILE_ROWS, tile


def _integers(profile: DeviceProfile) -> str:
    return "dot" if "integer_dot_product" in profile.features else "plain"


def choose(profile: DeviceProfile, fmt: str, cols: int, tokens: int) -> Choice:
    """The kernel for ``tokens`` rows of x where nothing is known about the device but its profile."""
    if profile.simd or tokens <= MATVEC_TOKENS:
        return _matvec(profile, fmt, tokens, up_to(2 * ceil_div(units(fmt, cols), 4), MATVEC_LANES))
    return _matmul(profile, fmt, tokens, TILE_TOKENS[-1])


def variants(profile: DeviceProfile, fmt: str, cols: int, tokens: int) -> dict[str, Choice]:
    """Every kernel for ``tokens`` rows of x, by name, the one of :func:`choose` first."""
    found = {"default": choose(profile, fmt, cols, tokens)}
    if not profile.simd and tokens <= MATVEC_TOKENS:
        found |= {f"matvec {lanes}": _matvec(profile, fmt, tokens, lanes) for lanes in MATVEC_LANES}
    elif not profile.simd:
        found |= {f"matmul {most}": _matmul(profile, fmt, tokens, most) for most in TILE_TOKENS}
    return distinct(found)


def tuned_format(fmt: str) -> str:
    """What stands for ``fmt`` in the key of a choice of these (:func:`matmul.tuned_key`)."""
    return f"{fmt} int8"


def tuned_choice(profile: DeviceProfile, fmt: str, rows: int, cols: int, tokens: int) -> Choice:
    """The kernel for a matrix of that size: the one found fastest here, else that of :func:`choose`."""
    known = variants(profile, fmt, cols, tokens)
    return known.get(matmul.tuned_variant(profile, tuned_format(fmt), rows, cols, tokens), known["default"])

"""Cases of the kernels that move little data: RMSNorm, RoPE with the KV cache, SwiGLU, argmax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from xinfer_vk.kernels import kv
from xinfer_vk.kernels import state as st
from xinfer_vk.kernels.advance import advance
from xinfer_vk.kernels.append_kv import HeadNorms, Rotation, append_kv
from xinfer_vk.kernels.argmax import argmax, argmax_partial_words
from xinfer_vk.kernels.base import Ref
from xinfer_vk.kernels.copy_region import copy_region, region_list
from xinfer_vk.kernels.copy_words import copy_words
from xinfer_vk.kernels.order_columns import order_columns
from xinfer_vk.kernels.quantize_rows import quantize_rows, quantized_words
from xinfer_vk.kernels.rmsnorm import Then, rmsnorm
from xinfer_vk.kernels.rope import rope_table
from xinfer_vk.kernels.softcap import softcap
from xinfer_vk.kernels.swiglu import swiglu
from xinfer_vk.plan import BufferKind, Step
from xinfer_vk.selftest.batch import SPARE_BLOCKS, Batch
from xinfer_vk.selftest.case import EXACT, OWN_AND_GPU, Bench, Build, Case, Tolerance, kernel_cases


def _rows(rng: np.random.Generator, rows: int, dim: int, stride: int, scale: float = 1.0) -> np.ndarray:
    """[rows, stride] of NaN with normal numbers in the first ``dim`` columns."""
    data = np.full((rows, stride), np.nan, np.float32)
    data[:, :dim] = rng.standard_normal((rows, dim)) * scale
    return data


# -- copy_words --------------------------------------------------------------------------------------


def _copy_words(count: int) -> Build:
    def build(bench: Bench) -> list[Step]:
        words = np.random.default_rng(count).integers(0, 1 << 32, count + 7, np.uint32)
        source = bench.filled("source", words, BufferKind.WEIGHTS)
        target = bench.buffer("target", count + 9)
        return [copy_words(source, 5, target, 3, count)]

    return build


# -- copy_region -------------------------------------------------------------------------------------


REGIONS: tuple[tuple[tuple[int, int, int], ...], ...] = (
    (),
    ((7, 4000, 257),),
    ((0, 1024, 1024), (4099, 2049, 900), (3, 4001, 1)),
)


def _copy_region(regions: tuple[tuple[int, int, int], ...], parts: int) -> Build:
    """Of a buffer of parts of 5000 words each; beyond the list there are regions that must not be moved."""

    def build(bench: Bench) -> list[Step]:
        words = np.random.default_rng(parts).integers(0, 1 << 32, parts * 5000, np.uint32)
        data = bench.filled("data", words, BufferKind.KV)
        listed = np.concatenate([[9] * 6, region_list(regions), [0, 1, 4000]]).astype(np.uint32)
        state = bench.filled("state", listed, BufferKind.STATE)
        return [copy_region(state, 6, data, parts, 5000, 600)]

    return build


# -- order_columns -----------------------------------------------------------------------------------


def _order_columns(cols: int, used: int, rows: int) -> Build:
    def build(bench: Bench) -> list[Step]:
        rng = np.random.default_rng(cols)
        x = bench.filled("x", _rows(rng, rows, cols, cols + 3))
        order = bench.filled("order", rng.permutation(cols).astype(np.uint32), BufferKind.WEIGHTS)
        state = Batch(((0, used),), rows).state_buffer(bench)
        y = bench.buffer("y", 5 + rows * (cols + 1))
        return order_columns(
            bench.profile, Ref(x), cols + 3, Ref(order), Ref(y, 5), cols + 1, cols, rows, state, "tokens"
        )

    return build


# -- quantize_rows -----------------------------------------------------------------------------------

QUANTIZE = Tolerance(0.0, 1e-6, "a division and a product; bytes of whole steps are exact")


def _quantize_rows(cols: int, used: int, rows: int, gap: int = 0) -> Build:
    """Of values that are whole steps, so that the last bit of a division decides nothing. ``gap``: words
    between the rows of x."""

    def build(bench: Bench) -> list[Step]:
        rng = np.random.default_rng(cols)
        steps = rng.integers(-127, 128, (rows, cols)).astype(np.float32)
        steps[:, ::32] = 127
        scales = np.repeat(2.0 ** rng.integers(-9, 9, (rows, cols // 32)), 32, axis=1)
        values = np.full((rows, cols + gap), np.nan, np.float32)
        values[:, :cols] = steps * scales
        x = bench.filled("x", values)
        state = Batch(((0, used),), rows).state_buffer(bench)
        stride = quantized_words(cols) + 3
        y = bench.buffer("y", 5 + rows * stride)
        return quantize_rows(
            bench.profile, Ref(x), cols + gap, Ref(y, 5), stride, cols, rows, state, "tokens"
        )

    return build


# -- rmsnorm -----------------------------------------------------------------------------------------

RMSNORM = Tolerance(
    1e-6, 4e-6, "a sum of up to 4864 squares in f32 by at least 8 lanes, a square root, three products"
)


def _rmsnorm(
    dim: int, used: int, rows: int, scale: float = 1.0, gather: bool = False, add: bool = False,
    aligned: bool = False,
) -> Build:  # fmt: skip
    """``aligned``: rows and weights begin at multiples of four words."""
    gaps, first = ((4, 8), 4) if aligned else ((3, 5), 2)

    def build(bench: Bench) -> list[Step]:
        rng = np.random.default_rng(dim)
        outputs = tuple(int(i) for i in rng.permutation(used)[: max(1, used // 2)]) if gather else ()
        x_stride, y_stride = dim + gaps[0], dim + gaps[1]
        batch = Batch(((0, used),), used, outputs=outputs)
        state = batch.state_buffer(bench)
        x = bench.filled("x", np.full(4 + max(rows, used) * x_stride, np.nan, np.float32))
        bench.write(x, 4, _rows(rng, used, dim, x_stride, scale))
        weights = rng.standard_normal(first + dim).astype(np.float32)
        weight = bench.filled("weight", weights, BufferKind.WEIGHTS)
        y = bench.buffer("y", first + rows * y_stride)
        if add:
            bench.write(y, first, _rows(rng, used, dim, y_stride))
        return rmsnorm(
            bench.profile, Ref(x, 4), x_stride, Ref(weight, first), Ref(y, first), y_stride, dim, 1e-5, rows,
            state, gather, add,
        )  # fmt: skip

    return build


def _rmsnorm_then(dim: int, used: int, rows: int, gap: int = 3) -> Build:
    """Added to y, and y normalized into where x was. ``gap``: words between rows; with 4 all is aligned."""

    def build(bench: Bench) -> list[Step]:
        rng = np.random.default_rng(dim)
        stride, first = dim + gap, gap // 4 * 4
        state = Batch(((0, used),), used).state_buffer(bench)
        both = bench.filled("both", np.full(first + 5 + 2 * rows * stride, np.nan, np.float32))
        x, y = Ref(both, first or 1), Ref(both, 4 + rows * stride)
        bench.write(both, x.offset, _rows(rng, used, dim, stride))
        bench.write(both, y.offset, _rows(rng, used, dim, stride))
        weights = rng.standard_normal(2 * dim + 5).astype(np.float32)
        weight = bench.filled("weight", weights, BufferKind.WEIGHTS)
        then = Then(Ref(weight, dim + 4), x, stride, 1e-3)
        return rmsnorm(
            bench.profile, x, stride, Ref(weight, first or 1), y, stride, dim, 1e-5, rows, state, add=True,
            then=then,
        )  # fmt: skip

    return build


# -- append_kv ---------------------------------------------------------------------------------------

ROPE = Tolerance(1e-6, 1e-6, "two products and a sum of numbers up to about 5 in f32, perhaps fused")

NORM_ROPE = Tolerance(4e-6, 4e-6, "an RMSNorm of numbers up to about 5, then ROPE's two products and a sum")

# Ties to even, both neighbours of ties, the largest and smallest f16, subnormals, what overflows.
HALF_EDGES = np.array(
    [
        1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-11 + 2**-20, 1 + 2**-11 - 2**-20, 65504, 65519.996, 65520, 1e30,
        2**-14, 2**-14 - 2**-25, 2**-15 + 2**-25, 2**-24, 2**-25, 2**-25 + 2**-40, 1.5 * 2**-24, 1e-30, 0.0,
        np.inf, np.nan, -0.0, -1 - 2**-11, -65520, -(2**-24), -np.inf,
    ],
    np.float32,
)  # fmt: skip


def off_ties(rng: np.random.Generator, x: np.ndarray, kv_dtype: str) -> np.ndarray:
    """Numbers in place of ``x`` that a quantized cache rounds alike on every device, though its division
    may be off by 2.5 ULP: no quotient is near a half. A block is zero, the scale of another subnormal."""
    top, low, high = (127, -126, 126) if kv_dtype == "q8_0" else (-8, -7, 7)
    blocks = x.reshape(-1, kv.SCALE_DIMS)
    scales = rng.uniform(0.01, 2, (len(blocks), 1)).astype(np.float16).astype(np.float32)
    scales[::2] *= -1
    numbers = rng.integers(low, high, blocks.shape, endpoint=True) + rng.uniform(-0.3, 0.3, blocks.shape)
    numbers[np.arange(len(blocks)), rng.integers(0, kv.SCALE_DIMS, len(blocks))] = top
    scales[1], scales[2] = 0, 2.0**-20
    return np.asarray((scales * numbers).reshape(x.shape), np.float32)


def any_angles(rows: int, pairs: int) -> np.ndarray:
    """A rope table of positions from 1000 on."""
    return rope_table(10000.0 ** -(np.arange(pairs) / pairs), 1000 + np.arange(rows))


def quarter_turns(rows: int, pairs: int) -> np.ndarray:
    """A rope table that rounds nothing and keeps the dims of a quantized block together."""
    quarters = (np.arange(rows)[:, None] + np.arange(pairs) // kv.SCALE_DIMS) % 4
    return np.array([(1, 0), (0, 1), (-1, 0), (0, -1)], np.float32)[quarters]


@dataclass(frozen=True)
class _Append:
    """Of ``heads`` query and ``kv_heads`` key heads, ``rotary_dim`` dims turned (0: they know no positions)
    by ``angles``, of the positions or ``by_token``."""

    kv_dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    batch: Batch
    by_token: bool = False
    norm: bool = False
    angles: Callable[[int, int], np.ndarray] = quarter_turns

    def __str__(self) -> str:
        heads = f"{self.heads} + {self.kv_heads} heads of {self.head_dim}"
        how = ", normalized" * self.norm + ", angles by token" * self.by_token
        rows = f"{self.batch.tokens} of {self.batch.rows} rows"
        return f"{self.kv_dtype}, {heads}, {self.rotary_dim} turned{how}, {rows}"

    def __call__(self, bench: Bench) -> list[Step]:
        batch, rng = self.batch, np.random.default_rng(self.head_dim)
        q_dim, kv_dim = self.heads * self.head_dim, self.kv_heads * self.head_dim
        dims = q_dim + 2 * kv_dim
        stride = dims + 7
        x = bench.filled("x", np.full(3 + batch.rows * stride, np.nan, np.float32))
        rows = _rows(rng, batch.rows, dims, stride)  # those not in use must stay as they are
        values = rows[:, q_dim + kv_dim : dims]
        if self.kv_dtype in kv.QUANTIZED:
            rows[:, q_dim:dims] = off_ties(rng, rows[:, q_dim:dims], self.kv_dtype)
            values[0] = np.resize(HALF_EDGES[~np.isnan(HALF_EDGES)], kv_dim)  # infinite in every block
        else:
            values[0] = np.resize(HALF_EDGES, kv_dim)
        bench.write(x, 3, rows)
        weights = rng.standard_normal(2 * self.head_dim + 5).astype(np.float32)
        weight = bench.filled("weight", weights, BufferKind.WEIGHTS)
        norms = HeadNorms(Ref(weight, self.head_dim + 4), Ref(weight, 1), 1e-5)
        table_rows = batch.tokens if self.by_token else batch.max_context
        table = bench.buffer("table", 5 + table_rows * self.rotary_dim, BufferKind.WEIGHTS)
        bench.write(table, 5, self.angles(table_rows, self.rotary_dim // 2))
        region = batch.blocks * self.kv_heads * kv.vector_words(self.kv_dtype, self.head_dim) * 32
        cache = bench.buffer("cache", 4 + 2 * region, BufferKind.KV)
        return append_kv(
            bench.profile, self.kv_dtype, Ref(x, 3), stride, self.heads, self.kv_heads, self.head_dim, cache,
            4, 4 + region, batch.rows, batch.state_buffer(bench), norms if self.norm else None,
            Rotation(Ref(table, 5), self.rotary_dim, self.by_token) if self.rotary_dim else None,
        )  # fmt: skip


# -- swiglu ------------------------------------------------------------------------------------------

SWIGLU = Tolerance(
    1e-30, 3e-5, "exp of up to 88 may be off by 2 * 88 + 3 units in the last place (Vulkan's limit): 2e-5"
)


GEGLU = Tolerance(1e-12, 3e-5, "the same; of a cubic, which for tiny results loses more than exp itself")


def _swiglu(dim: int, used: int, rows: int, activation: str) -> Build:
    def build(bench: Bench) -> list[Step]:
        rng = np.random.default_rng(dim)
        strides = dim + 1, dim + 2, dim + 3
        gate = bench.filled("gate", np.full(3 + rows * strides[0], np.nan, np.float32))
        some = _rows(rng, used, dim, strides[0], 8.0)
        edges = np.array([0.0, -0.0, 87.0, -87.0, 1e4, -1e4, 3e38, -3e38, -88.5, 1e-38], np.float32)
        some[0, : min(dim, edges.size)] = edges[:dim]
        bench.write(gate, 3, some)
        up = bench.filled("up", np.full(2 + rows * strides[1], np.nan, np.float32))
        bench.write(up, 2, np.clip(_rows(rng, used, dim, strides[1]), -1, 1))
        y = bench.buffer("y", 1 + rows * strides[2])
        state = Batch(((0, used),), rows).state_buffer(bench)
        return swiglu(
            bench.profile, Ref(gate, 3), Ref(up, 2), Ref(y, 1), *strides, dim, rows, state, activation
        )  # fmt: skip

    return build


# -- softcap -----------------------------------------------------------------------------------------

SOFTCAP = Tolerance(1e-5, 1e-5, "an exponential, a quotient and a difference near 1, times a cap of 30")


def _softcap(dim: int, used: int, rows: int) -> Build:
    def build(bench: Bench) -> list[Step]:
        rng = np.random.default_rng(dim)
        y = bench.filled("y", np.full(3 + rows * (dim + 2), np.nan, np.float32))
        values = _rows(rng, used, dim, dim + 2, 40.0)
        edges = np.array([0.0, -0.0, 1e-8, 1e9, -1e9, 3e38, -3e38, np.inf, -np.inf], np.float32)
        values[0, : min(dim, edges.size)] = edges[:dim]
        bench.write(y, 3, values)
        batch = Batch(((0, used),), rows, outputs=tuple(range(used)))
        return softcap(bench.profile, Ref(y, 3), dim + 2, dim, 30.0, rows, batch.state_buffer(bench))

    return build


# -- argmax ------------------------------------------------------------------------------------------


def logits_of_every_kind(n: int) -> np.ndarray:
    """Rows [9, n] that an argmax could get wrong."""
    rng = np.random.default_rng(n)
    x = rng.standard_normal((9, n)).astype(np.float32)
    x[1, rng.integers(n)] = 50.0  # one clear winner
    x[2] = rng.integers(0, 3, n)  # ties everywhere
    x[3] = -np.inf  # nothing is larger than the first
    x[4, rng.integers(n)] = np.nan
    x[5] = -np.abs(x[5]) - 1.0  # all negative
    x[6] = np.where(rng.integers(0, 2, n), 0.0, -0.0)  # equal, whatever the sign
    x[7, n - 1] = np.inf
    x[8] = np.nan
    x[8, 0] = np.inf
    return x


def _argmax(n: int) -> Build:
    def build(bench: Bench) -> list[Step]:
        logits = logits_of_every_kind(n)
        used, stride = len(logits), n + 3
        rows = used + 2
        x = bench.filled("x", np.full(6 + rows * stride, np.nan, np.float32))
        padded = np.full((used, stride), np.inf, np.float32)  # beyond the row: not to be looked at
        padded[:, :n] = logits
        bench.write(x, 6, padded)
        partials = bench.buffer("partials", 2 + argmax_partial_words(bench.profile, n, rows))
        result = bench.buffer("result", rows + 1, BufferKind.RESULT)
        state = Batch(((0, used),), rows, outputs=tuple(range(used))).state_buffer(bench)
        return argmax(bench.profile, Ref(x, 6), stride, n, rows, Ref(result, 1), Ref(partials, 2), state)

    return build


# -- advance -----------------------------------------------------------------------------------------


def _advance(bench: Bench) -> list[Step]:
    """Positions within a block, at its last token, and a row in which no token was chosen."""
    batch = Batch(((30, 2), (31, 2), (64, 2)), 8, outputs=(0, 1, 2))
    words = batch.state(np.arange(6))
    words[st.POSITION : st.POSITION + 3] = 30, 31, 64
    words[st.SEQUENCE : st.SEQUENCE + 3] = 0, 1, 2
    state = bench.filled("state", words)  # a STATE buffer's words on the device cannot be read back
    result = bench.filled("result", np.array([9, 9, 9, 9, 7, 99, 0xFFFFFFFF], np.uint32))
    return advance(bench.profile, Ref(result, 4), 100, 8, state)


# -- the list ----------------------------------------------------------------------------------------

RAGGED = Batch(((0, 3), (31, 33), (7, 1), (64, 5)), rows=48)


def _append_kv_cases() -> list[Case]:
    one, two, many = Batch(((0, 1),), 1), Batch(((31, 1), (32, 1)), 2), Batch(((30, 5), (0, 40)), 64)
    rounded = (  # in f32, so that what is rounded is seen
        _Append("f32", 2, 1, 2, 2, one, angles=any_angles),
        _Append("f32", 9, 3, 64, 64, RAGGED, angles=any_angles),
        _Append("f32", 4, 1, 80, 32, RAGGED, angles=any_angles),
        _Append("f32", 7, 7, 34, 34, Batch(((8000, 3),), 4), angles=any_angles),
        _Append("f32", 24, 8, 128, 128, two, angles=any_angles),
        _Append("f32", 2, 1, 64, 48, RAGGED, by_token=True, angles=any_angles),
        _Append("f32", 3, 2, 24, 24, RAGGED, norm=True, angles=any_angles),
        _Append("f32", 3, 2, 128, 96, RAGGED, by_token=True, norm=True, angles=any_angles),
        _Append("f32", 4, 1, 256, 256, RAGGED, norm=True, angles=any_angles),
        _Append("f32", 1, 9, 256, 256, many, norm=True, angles=any_angles),
        _Append("f32", 2, 2, 34, 0, many, norm=True),
    )
    exact = (
        _Append("f32", 3, 1, 2, 0, one),
        _Append("f16", 9, 3, 64, 64, RAGGED),
        _Append("f16", 5, 7, 34, 18, RAGGED, by_token=True),  # an odd number of pairs
        _Append("f16", 2, 2, 128, 0, two),
        _Append("f16", 3, 1, 256, 256, Batch(((5, 63),), 64)),
        *(
            append
            for kv_dtype in kv.QUANTIZED
            for append in (
                _Append(kv_dtype, 9, 3, 64, 64, RAGGED),
                _Append(kv_dtype, 3, 2, 96, 64, many, by_token=True),
                _Append(kv_dtype, 2, 9, 256, 256, two),
                _Append(kv_dtype, 2, 2, 32, 0, RAGGED),
            )
        ),
    )
    cases: list[Case] = []
    for append in rounded + exact:
        tolerance = EXACT if append in exact else NORM_ROPE if append.norm else ROPE
        cases += kernel_cases(
            "append_kv", str(append), append, tolerance, classes=OWN_AND_GPU, quick=append.batch is RAGGED,
            views={"cache": "u32" if append.kv_dtype in kv.QUANTIZED else append.kv_dtype},
        )  # fmt: skip
    return cases


def _cases() -> list[Case]:
    views = {"state": "u32", "result": "u32"}
    cases: list[Case] = [
        *kernel_cases("advance", "three sequences", _advance, EXACT, views=views, classes=OWN_AND_GPU)
    ]
    for count in (1, 3, 257, 70001):
        name, views = f"{count} words", {"source": "u32", "target": "u32"}
        cases += kernel_cases("copy_words", name, _copy_words(count), EXACT, views=views, quick=count != 3)
    for count, regions in enumerate(REGIONS):
        name, views = f"{len(regions)} regions", {"data": "u32", "state": "u32"}
        build = _copy_region(regions, 1 + 2 * count)
        cases += kernel_cases("copy_region", name, build, EXACT, views=views, quick=count > 0)
    for dim, used, rows, quick in (
        (1, 1, 1, False), (3, 2, 4, False), (7, 7, 8, False), (31, 1, 2, False), (33, 3, 3, True),
        (63, 2, 2, False), (65, 5, 8, False), (257, 3, 4, False), (576, 1, 1, True), (896, 31, 32, True),
        (4864, 2, 2, True),
    ):  # fmt: skip
        name = f"{dim} dims, {used} of {rows} rows"
        cases += kernel_cases(
            "rmsnorm", name, _rmsnorm(dim, used, rows), RMSNORM, classes=OWN_AND_GPU, quick=quick
        )
    for name, build in (
        ("large values", _rmsnorm(577, 3, 4, scale=1e15)),
        ("tiny values", _rmsnorm(577, 3, 4, scale=1e-12)),
        ("gathered rows", _rmsnorm(65, 33, 33, gather=True)),
        ("aligned rows", _rmsnorm(576, 3, 4, aligned=True)),
        ("aligned rows, gathered and added", _rmsnorm(1540, 9, 9, gather=True, add=True, aligned=True)),
        ("aligned rows, added and normalized again", _rmsnorm_then(1156, 2, 3, gap=4)),
        ("added", _rmsnorm(65, 3, 4, add=True)),
        ("added and normalized again", _rmsnorm_then(65, 3, 4)),
        ("added and normalized again, wide", _rmsnorm_then(1153, 2, 2)),
    ):
        cases += kernel_cases("rmsnorm", name, build, RMSNORM, classes=OWN_AND_GPU)
    cases += _append_kv_cases()
    for cols, used, rows, gap in ((32, 1, 1, 0), (4864, 7, 8, 0), (2080, 2, 3, 5)):
        name = f"{cols} columns, {used} of {rows} rows" + ", not aligned" * (gap > 0)
        build = _quantize_rows(cols, used, rows, gap)
        quick = cols > 32 and not gap
        cases += kernel_cases("quantize_rows", name, build, QUANTIZE, classes=OWN_AND_GPU, quick=quick)
    for cols, used, rows in ((1, 1, 1), (65, 2, 3), (4864, 7, 8)):
        name = f"{cols} columns, {used} of {rows} rows"
        cases += kernel_cases("order_columns", name, _order_columns(cols, used, rows), EXACT, quick=cols > 65)
    for dim, used, rows in ((1, 1, 1), (7, 3, 4), (65, 5, 8), (1537, 3, 4)):
        name = f"{dim} dims, {used} of {rows} rows"
        for kernel, activation, tolerance in (("swiglu", "silu", SWIGLU), ("geglu", "gelu_tanh", GEGLU)):
            build = _swiglu(dim, used, rows, activation)
            cases += kernel_cases(kernel, name, build, tolerance, quick=dim > 64)
        cases += kernel_cases("softcap", name, _softcap(dim, used, rows), SOFTCAP, quick=dim > 64)
    for n in (1, 3, 7, 31, 33, 63, 65, 257, 49152, 151936, 262144):
        views = {"partials": "u32", "result": "u32"}
        quick = n in (33, 257, 151936)
        cases += kernel_cases(
            "argmax", f"{n} values", _argmax(n), EXACT, views=views, classes=OWN_AND_GPU, quick=quick
        )
    return cases


assert SPARE_BLOCKS  # the caches above have slots that nothing writes
CASES = _cases()

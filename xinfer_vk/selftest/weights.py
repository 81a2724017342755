"""Cases of the kernels that read weights: embedding and matrix products, in every format."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from xinfer_vk.kernels.argmax import join
from xinfer_vk.kernels.base import Part, Ref, ceil_div
from xinfer_vk.kernels.embed import embed
from xinfer_vk.kernels.halves import halves_words, multiplies_halves, split_halves
from xinfer_vk.kernels.layout import (
    BLOCK_FORMATS,
    BLOCK_LAYOUTS,
    GROUP_LAYOUTS,
    PER_WORD,
    ROWS,
    row_words,
    scale_words,
)
from xinfer_vk.kernels.matmul import PAIRED, argmax_rows, linear, variants
from xinfer_vk.kernels.matmul_a8 import choose as choose_a8
from xinfer_vk.kernels.quantize_rows import quantize, quantized_words
from xinfer_vk.kernels.split_norm import Begin, begun_words
from xinfer_vk.plan import BufferKind, DeviceProfile, Step
from xinfer_vk.selftest.batch import Batch
from xinfer_vk.selftest.case import Bench, Build, Case, Tolerance, kernel_cases

SUPER_FORMATS = tuple(fmt for fmt, layout in BLOCK_LAYOUTS.items() if layout.block == 256)
# Of GPTQ's and AWQ's formats, which differ in the size of a group alone, two.
FORMATS = (*PER_WORD, *BLOCK_FORMATS, "int4_g128", "int8_g32")
# What most models are in; of the others, whose kernels differ by a few lines, one product is quick.
QUICK_FORMATS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q4_k", "q6_k")
EMBED = Tolerance(0.0, 2e-7, "a weight is decoded with at most two roundings, and scaled with a third")
PRODUCT = Tolerance(2e-4, 1e-5, "sums of at most 256 products of about 0.4; a wrong nibble changes 1e-2")
# Of the f16 in a scale that make weights of about 0.2; 0.03 where nothing is said.
SCALE_SIZES = {
    "q8_0": 0.003, "iq4_nl": 0.003, "q2_k": 0.01, "q3_k": 0.003, "q4_k": 0.001, "q5_k": 0.0005,
    "q6_k": 0.0002, "iq4_xs": 0.0002,
}  # fmt: skip


def random_words(fmt: str, rows: int, cols: int, rng: np.random.Generator) -> np.ndarray:
    """A matrix in the x8 layout (:mod:`xinfer_vk.kernels.layout`): any bits are a weight, but scales must
    be finite and of a useful size."""
    padded = ceil_div(rows, ROWS) * ROWS
    words = np.zeros((padded, row_words(fmt, cols)), np.uint32)
    if fmt == "f32":
        words[:rows] = (rng.standard_normal((rows, cols)) * 0.2).astype(np.float32).view(np.uint32)
    elif fmt in ("f16", "bf16"):
        halves = np.zeros((rows, words.shape[1] * 2), np.uint16)
        values = (rng.standard_normal((rows, cols)) * 0.2).astype(np.float32)
        upper = (values.view(np.uint32) >> 16).astype(np.uint16)
        halves[:, :cols] = values.astype(np.float16).view(np.uint16) if fmt == "f16" else upper
        words[:rows] = halves.view(np.uint32)
    else:
        scale_count = scale_words(fmt, cols)
        words[:rows] = rng.integers(0, 1 << 32, (rows, words.shape[1]), np.uint32)
        if fmt == "mxfp4":
            exponents = rng.integers(118, 123, (rows, scale_count * 4), np.uint8)
            words[:rows, :scale_count] = exponents.view(np.uint32)
        elif fmt in GROUP_LAYOUTS:  # every word of a chunk but the first is two f16
            pairs = rng.standard_normal((rows, scale_count, 2)) * (0.03 if fmt.startswith("int4") else 0.002)
            is_scale = np.arange(scale_count) % GROUP_LAYOUTS[fmt].chunk_words > 0
            words[:rows, :scale_count][:, is_scale] = pairs.astype(np.float16).view(np.uint32)[:, is_scale, 0]
        else:  # the first word of every group of scales is one or two f16
            layout = BLOCK_LAYOUTS[fmt]
            pairs = rng.standard_normal((rows, scale_count, 2)) * SCALE_SIZES.get(fmt, 0.03)
            first = pairs.astype(np.float16).view(np.uint32)[:, :: layout.scale_words, 0]
            words[:rows, : scale_count : layout.scale_words] = first
    return words.reshape(-1, ROWS, words.shape[1]).transpose(0, 2, 1).reshape(-1)


def _parts(
    bench: Bench, fmt: str, cols: int, bounds: tuple[int, ...], rng: np.random.Generator
) -> list[Part]:
    """A matrix of ``bounds[-1]`` rows, in buffers that begin at the rows ``bounds[:-1]``."""
    parts = []
    for i, (first, last) in enumerate(itertools.pairwise(bounds)):
        words = random_words(fmt, last - first, cols, rng)
        buffer = bench.buffer(f"w{i}", 4 * i + words.size, BufferKind.WEIGHTS)
        bench.write(buffer, 4 * i, words)
        parts.append(Part(buffer, 4 * i, first, last - first))
    return parts


def _embed(fmt: str) -> Build:
    cols, vocabulary, tokens, rows = (256 if fmt in SUPER_FORMATS else 96), 261, 7, 8

    def build(bench: Bench) -> list[Step]:
        rng = np.random.default_rng(1)
        parts = _parts(bench, fmt, cols, (0, 128, vocabulary), rng)
        ids = np.array([0, 127, 128, vocabulary - 1, 77, 200, 77])
        state = Batch(((0, tokens),), rows).state_buffer(bench, ids)
        out = bench.buffer("out", 3 + rows * (cols + 5))
        return embed(bench.profile, fmt, parts, cols, state, Ref(out, 3), cols + 5, rows, 1.5)

    return build


def _linear(
    fmt: str, used: int, tokens: int, epilogue: str, bias: bool, bounds: tuple[int, ...],
    halves: bool = False, int8: bool = False, variant: str | None = None,
) -> Build:  # fmt: skip
    """``halves``: on matrix units; ``int8``: products of integers, with ``x`` in 8 bits; ``variant``: of the
    kernel, as the tuner names it."""
    cols, count = (256 if fmt in SUPER_FORMATS else 96), "outputs" if tokens == 1 else "tokens"

    def build(bench: Bench) -> list[Step]:
        rng = np.random.default_rng(tokens)
        rows = bounds[-1]
        parts = _parts(bench, fmt, cols, bounds, rng)
        width = rows // 2 if epilogue in PAIRED else rows
        x_stride, y_stride = (quantized_words(cols) if int8 else cols) + 4, width + 3
        x = np.full((tokens, x_stride), np.nan, np.float32)
        values = rng.standard_normal((used, cols)).astype(np.float32)
        if int8:
            values = quantize(values).view(np.float32)
        x[:used, : values.shape[1]] = values
        x_buffer = bench.filled("x", x)
        y = bench.buffer("y", 1 + tokens * y_stride)
        if epilogue == "add":
            before = np.full((used, y_stride), np.nan, np.float32)
            before[:, :width] = rng.standard_normal((used, width))
            bench.write(y, 1, before)
        biases = bench.filled("bias", rng.standard_normal(rows + 2).astype(np.float32), BufferKind.WEIGHTS)
        batch = Batch(((0, used),), tokens, outputs=tuple(range(used)) if count == "outputs" else ())
        state, split = batch.state_buffer(bench), None
        steps: list[Step] = []
        if halves:
            split = Ref(bench.buffer("halves", halves_words(tokens, cols)))
            steps = split_halves(Ref(x_buffer), x_stride, cols, split, tokens, state, count)
        return steps + linear(
            bench.profile, fmt, parts, cols, Ref(x_buffer), x_stride, Ref(y, 1), y_stride, tokens,
            state, Ref(biases, 2) if bias else None, epilogue, count, halves=split, variant=variant,
            choice=choose_a8(bench.profile, fmt, cols, tokens) if int8 else None,
        )  # fmt: skip

    return build


# Variants that only a tuner chooses.
VARIANTS = (
    ("matvec 64 subgroup", "added up by subgroup", 1, 1),
    ("matvec 128 subgroup x16", "added up by subgroup, 16 in a workgroup", 5, 8),
    ("matvec 64", "16 tokens at once", 11, 16),
    ("matmul 32 double", "in two buffers", 33, 64),
    ("matmul 64 x128", "128 in a workgroup", 33, 64),
    ("coop 16 teams 2", "on matrix units, in two teams", 5, 8),
)


def _variant_cases() -> list[Case]:
    """On CPU devices, too, which have no use for them but can show that they are right."""
    cases: list[Case] = []
    for (name, means, used, tokens), fmt in itertools.product(VARIANTS, ("q4_0", "f16")):

        def applies(profile: DeviceProfile, name: str = name, tokens: int = tokens) -> bool:
            return name in variants(dataclasses.replace(profile, simd=False), "q4_0", 96, tokens, True)

        halves = name.startswith("coop")
        build = _linear(fmt, used, tokens, "store", False, (0, 76), halves, variant=name)
        variant = f"{fmt}, {used} of {tokens} rows, {means}"
        (case,) = kernel_cases("linear", variant, build, PRODUCT, classes=("as on a GPU",))
        cases.append(dataclasses.replace(case, applies=applies, quick=True))
    return cases


def _split_norm(fmt: str, used: int, tokens: int) -> Build:
    """A product that begins a norm and one that ends it."""
    cols, hidden, rows = (256 if fmt in SUPER_FORMATS else 96), 256, 70

    def build(bench: Bench) -> list[Step]:
        rng = np.random.default_rng(tokens)
        down = _parts(bench, fmt, cols, (0, 128, hidden), rng)
        up = _parts(bench, fmt, hidden, (0, rows), rng)
        x = np.full((tokens, cols), np.nan, np.float32)
        x[:used] = rng.standard_normal((used, cols))
        x_at = Ref(bench.filled("x", x))
        residual = Ref(bench.buffer("residual", tokens * (hidden + begun_words(hidden))))
        bench.write(residual.buffer, 0, rng.standard_normal((used, hidden)).astype(np.float32))
        normed = Ref(residual.buffer, tokens * hidden)
        weight = Ref(bench.filled("weight", rng.standard_normal(hidden).astype("f4"), BufferKind.WEIGHTS))
        state, out = Batch(((0, used),), tokens).state_buffer(bench), Ref(bench.buffer("out", tokens * rows))
        begins = linear(
            bench.profile, fmt, down, cols, x_at, cols, residual, hidden, tokens, state, None, "add",
            "tokens", begin=Begin(weight, normed),
        )  # fmt: skip
        return begins + linear(
            bench.profile, fmt, up, hidden, normed, begun_words(hidden), out, rows, tokens, state, None,
            "store", "tokens", norm_eps=1e-5,
        )  # fmt: skip

    return build


def _argmax(fmt: str, used: int, tokens: int) -> Build:
    """The largest value of each row of a product, and where it is."""
    cols, rows = (256 if fmt in SUPER_FORMATS else 96), 261

    def build(bench: Bench) -> list[Step]:
        rng = np.random.default_rng(tokens)
        parts = _parts(bench, fmt, cols, (0, 128, rows), rng)
        x = np.full((tokens, cols), np.nan, np.float32)
        x[:used] = rng.standard_normal((used, cols))
        batch = Batch(((0, used),), tokens, outputs=tuple(range(used)))
        state, stride = batch.state_buffer(bench), ceil_div(rows, 4)
        pairs = Ref(bench.buffer("pairs", tokens * 2 * stride))
        result = Ref(bench.buffer("result", tokens, BufferKind.RESULT))
        steps = linear(
            bench.profile, fmt, parts, cols, Ref(bench.filled("x", x)), cols, pairs, 2 * stride, tokens,
            state, None, "argmax", "outputs",
        )  # fmt: skip
        slices = ceil_div(rows, argmax_rows(steps))
        return [*steps, join(bench.profile, pairs, stride, slices, tokens, result, state)]

    return build


def _cases() -> list[Case]:
    cases: list[Case] = []
    for fmt in FORMATS:
        cases += kernel_cases("embed", fmt, _embed(fmt), EMBED)
    for fmt in FORMATS:
        for used, tokens, epilogue, bias, bounds in (
            (1, 1, "store", True, (0, 70)), (5, 8, "add", False, (0, 32, 67)),
            (33, 64, "swiglu", True, (0, 134)),
        ):  # fmt: skip
            build = _linear(fmt, used, tokens, epilogue, bias, bounds)
            variant = f"{fmt}, {used} of {tokens} rows, {epilogue}" + (" with bias" if bias else "")
            quick = fmt in QUICK_FORMATS or epilogue == "add"
            cases += kernel_cases("linear", variant, build, PRODUCT, quick=quick)
        build = _linear(fmt, 33, 64, "swiglu", True, (0, 134), halves=True)
        cases += [
            dataclasses.replace(case, applies=lambda profile: multiplies_halves(profile, 64))
            for case in kernel_cases("linear", f"{fmt}, 33 of 64 rows, on matrix units", build, PRODUCT)
        ]
    cases += _variant_cases()
    for fmt in ("f16", "q4_0", "q6_k"):
        for used, tokens in ((1, 1), (5, 8)):
            variant = f"{fmt}, {used} of {tokens} rows, a norm between two products"
            build, classes = _split_norm(fmt, used, tokens), ("", "as on a GPU")
            cases += kernel_cases("linear", variant, build, PRODUCT, classes=classes)
            variant = f"{fmt}, {used} of {tokens} rows, the largest of each row"
            build, views = _argmax(fmt, used, tokens), {"result": "u32"}
            cases += kernel_cases("linear", variant, build, PRODUCT, views=views, classes=classes)
    for fmt in ("q8_0", "q4_0", "q4_1", "int4_g128", "int8_g32"):
        for used, tokens, epilogue, bias, bounds in (
            (1, 1, "store", True, (0, 70)), (5, 8, "add", False, (0, 32, 67)),
            (33, 64, "swiglu", True, (0, 134)),
        ):  # fmt: skip
            build = _linear(fmt, used, tokens, epilogue, bias, bounds, int8=True)
            variant = f"{fmt}, {used} of {tokens} rows in 8 bits, {epilogue}" + (" with bias" if bias else "")
            cases += kernel_cases("linear", variant, build, PRODUCT, quick=fmt == "q4_0")
    return cases


CASES = _cases()

"""Matrix products: every format, kernel family, tile and epilogue, on every Vulkan device, against float64.

Tolerance. A sum of n products in float32 makes n roundings of at most 2^-24 of a partial sum, and no
partial sum exceeds S = sum |w x| (with |d q| + |m| for |w|, see WeightMatrix.magnitude). They add up
like a random walk, so 4 sqrt(n) 2^-24 S is far more than any order of summation needs, and a small
fraction of what a single wrong nibble changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from conftest import runs_all
from weight_matrices import BLOCK_SIZES, FORMATS, GROUPED, WeightMatrix, random_matrix, whole_blocks

from xinfer_vk.kernels import state as st
from xinfer_vk.kernels.base import Part, Ref
from xinfer_vk.kernels.halves import halves_words, multiplies_halves, split_halves
from xinfer_vk.kernels.layout import matrix_words, row_words
from xinfer_vk.kernels.matmul import (
    ARGMAX_ROWS,
    EPILOGUES,
    PAIRED,
    Choice,
    argmax_rows,
    linear,
    variants,
)
from xinfer_vk.kernels.split_norm import SUMMED, Begin, begun_words
from xinfer_vk.kernels.unpack import unpack, unpack_rows
from xinfer_vk.plan import Buffer, BufferKind, DeviceProfile, Plan, Step
from xinfer_vk.reference import NumpyRuntime

POISON = np.float32(np.nan)
EPS = 2.0**-24
NORM_EPS = 0.5
SIZES = (1, 3, 7, 31, 33, 63, 65, 257)

# The classes of devices that a kernel is written for, whatever the device under test is.
PROFILES = {"simd": {"simd": True}, "gpu": {"simd": False}}


@dataclass(frozen=True)
class Product:
    """One product: ``used`` of ``tokens`` rows of x are real, the others NaN. ``splits``: first rows of
    the parts after the first. ``gap``: words between the rows of x (and y) beyond what they need."""

    fmt: str
    rows: int
    cols: int
    tokens: int
    used: int
    epilogue: str = "store"
    bias: bool = False
    splits: tuple[int, ...] = ()
    gap: int = 0
    count: str = "tokens"
    halves: bool = False  # from activations in two f16 planes
    ends: bool = False  # an RMSNorm: x are begun rows
    begins: bool = False  # an RMSNorm of y

    @property
    def x_stride(self) -> int:
        return -(-(begun_words(self.cols) if self.ends else self.cols) // 4) * 4 + self.gap

    @property
    def width(self) -> int:
        if self.epilogue == "argmax":
            return 2 * -(-self.rows // ARGMAX_ROWS)  # or half of it
        return self.rows // 2 if self.epilogue in PAIRED else self.rows


class Setup:
    """The buffers and contents of a product, the same for every runtime it is run on. ``x``: as the kernel
    reads it; ``x_values [used, cols]``: the numbers in it."""

    def __init__(self, product: Product) -> None:
        p = self.product = product
        rng = np.random.default_rng(abs(hash((p.rows, p.cols, p.tokens))) % 2**32)
        self.matrix: WeightMatrix = random_matrix(p.fmt, p.rows, p.cols, rng)
        self.x = np.full((p.tokens, p.x_stride), POISON)
        self.x[: p.used, : p.cols] = rng.standard_normal((p.used, p.cols))
        self.x_values = self.x[: p.used, : p.cols]
        if p.ends:
            self.x[: p.used, p.cols : begun_words(p.cols)] = rng.random((p.used, p.cols // SUMMED)) * 10
        self.next_weight = rng.standard_normal(p.rows).astype(np.float32)
        self.before = rng.standard_normal((p.tokens, p.width)).astype(np.float32)
        self.bias = rng.standard_normal(p.rows).astype(np.float32)

    def choice(self, profile: DeviceProfile) -> Choice | None:
        """The kernel, where it is another module's."""
        return None

    def run(self, rt: Any, profile: DeviceProfile, variant: str | None = None) -> np.ndarray:
        """The words of y after the product, with a frame of poison around. ``variant``: of the kernel."""
        p = self.product
        y_stride = p.width + 1 + p.gap
        buffers: list[Buffer] = []

        def put(name: str, kind: BufferKind, values: np.ndarray, offset: int) -> Ref:
            words = np.full(-(-(offset + values.size) // 4) * 4, POISON).view(np.uint32)
            words[offset : offset + values.size] = values.reshape(-1).view(np.uint32)
            buffers.append(rt.allocate(name, words.size, kind))
            rt.write(buffers[-1], 0, words)
            return Ref(buffers[-1], offset)

        bounds = (0, *p.splits, p.rows)
        per_row = row_words(p.fmt, p.cols)
        parts = []
        for i, (first, last) in enumerate(pairwise(bounds)):
            words = self.matrix.words[first * per_row : -(-last // 8) * 8 * per_row]
            at = put(f"w{i}", BufferKind.WEIGHTS, words, 4 * i)
            parts.append(Part(at.buffer, at.offset, first, last - first))
        x = put("x", BufferKind.SCRATCH, self.x, 4 + p.gap)
        y_values = np.full((p.tokens, y_stride), POISON)
        if p.epilogue in ("add", "gated"):
            y_values[:, : p.width] = self.before
        y_words = y_values.reshape(-1)
        if p.begins:
            y_words = np.append(y_words, np.full(p.tokens * begun_words(p.rows), POISON))
        y = put("y", BufferKind.SCRATCH, y_words, 3)
        state_values = np.zeros(st.BLOCK_TABLE, np.uint32)
        state_values[st.N_TOKENS if p.count == "tokens" else st.N_OUTPUTS] = p.used
        state = put("state", BufferKind.STATE, state_values, 0).buffer
        params = put("params", BufferKind.WEIGHTS, np.append(self.bias, self.next_weight), 5)
        bias = params if p.bias else None
        begin = None
        if p.begins:
            weight = Ref(params.buffer, params.offset + p.rows)
            begin = Begin(weight, Ref(y.buffer, y.offset + y_values.size))
        x_stride = self.x.shape[1]
        halves, steps = None, []
        if p.halves:
            room = np.full(halves_words(p.tokens, p.cols), POISON)
            halves = put("halves", BufferKind.SCRATCH, room, 4)
            steps = split_halves(x, x_stride, p.cols, halves, p.tokens, state, p.count)
        steps += linear(
            profile, p.fmt, parts, p.cols, x, x_stride, y, y_stride, p.tokens, state, bias, p.epilogue,
            p.count, halves=halves, choice=self.choice(profile), variant=variant, begin=begin,
            norm_eps=NORM_EPS if p.ends else None,
        )  # fmt: skip
        assert len(steps) == len(parts) + p.halves
        run(rt, steps)
        got = rt.read(y.buffer, 0, y.buffer.words)
        for buffer in buffers:
            rt.free(buffer)
        untouched = np.ones(got.size, bool)
        frame = np.zeros((p.tokens, y_stride), bool)
        width = 2 * -(-p.rows // argmax_rows(steps)) if p.epilogue == "argmax" else p.width
        frame[: p.used, :width] = True
        untouched[3 : 3 + frame.size] = ~frame.reshape(-1)
        expected = np.full(got.size, POISON).view(np.uint32)
        expected[3 : 3 + frame.size] = y_values.reshape(-1).view(np.uint32)
        values = got[3 : 3 + frame.size].view(np.float32).reshape(frame.shape)[: p.used, :width]
        if p.begins:
            begun_at = slice(3 + frame.size, 3 + frame.size + p.used * begun_words(p.rows))
            self.check_begun(values, got[begun_at].view(np.float32).reshape(p.used, -1))
            untouched[begun_at] = False
        wrong = np.flatnonzero(untouched & (got != expected))
        assert not wrong.size, f"{p}: wrote {wrong.size} words outside its rows, the first at {wrong[0]}"
        return values

    def check_begun(self, y: np.ndarray, rows: np.ndarray) -> None:
        """``rows``: what the product began of the norm of its result ``y``, one rounding from float64 or,
        of squares, five."""
        y, cols = y.astype(np.float64), y.shape[1]
        np.testing.assert_allclose(rows[:, :cols], y * self.next_weight, rtol=2 * EPS, atol=1e-37)
        squares = (y**2).reshape(len(y), cols // SUMMED, SUMMED).sum(axis=2)
        np.testing.assert_allclose(rows[:, cols:], squares, rtol=10 * EPS, atol=1e-37)

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """The result in float64 and how far a float32 computation may be from it."""
        p = self.product
        x = self.x_values.astype(np.float64)
        v = x @ self.matrix.dense.T
        tolerance = 4 * EPS * np.sqrt(p.cols) * (np.abs(x) @ self.matrix.magnitude.T)
        if p.ends:
            squares = self.x[: p.used, p.cols : begun_words(p.cols)].astype(np.float64)
            factor = 1 / np.sqrt(squares.sum(axis=1, keepdims=True) / p.cols + NORM_EPS)
            # The sum is of positive numbers; a root and a division may be off by 3 units each.
            v = v * factor
            tolerance = tolerance * factor + np.abs(v) * EPS * (4 * np.sqrt(p.cols / SUMMED) + 16)
        if p.bias:
            v = v + self.bias
            tolerance = tolerance + 4 * EPS * np.abs(self.bias)
        tolerance = tolerance + 2 * EPS * np.abs(v)
        if p.epilogue == "add":
            v = v + self.before[: p.used]
            tolerance = tolerance + 2 * EPS * (np.abs(v) + np.abs(self.before[: p.used]))
        elif p.epilogue in PAIRED:
            gate, up, gate_tol, up_tol = v[:, 0::2], v[:, 1::2], tolerance[:, 0::2], tolerance[:, 1::2]
            # Both are gate / (1 + exp(-t)). |silu'| and |gelu'| <= 1.2; Vulkan allows exp(t) an error of
            # 3 + 2|t| units in the last place, and t itself is off by some.
            cubic = 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
            t = gate if p.epilogue == "swiglu" else cubic
            activated = gate / (1 + np.exp(np.minimum(-t, 700)))
            v = activated * up
            tolerance = 1.2 * gate_tol * (np.abs(up) + up_tol) + np.abs(activated) * up_tol
            tolerance = tolerance + np.abs(v) * 2 * EPS * (8 + 4 * np.abs(t)) + 1e-30
        elif p.epilogue == "gated":
            gate = self.before[: p.used].astype(np.float64)
            silu = gate / (1 + np.exp(-gate))
            v, tolerance = silu * v, np.abs(silu) * (tolerance + np.abs(v) * 2 * EPS * (8 + 2 * np.abs(gate)))
        return v, tolerance


def run(rt: Any, steps: list[Step]) -> None:
    recorded = rt.prepare(Plan("test", tuple(steps)))
    recorded.run()
    if hasattr(recorded, "release"):
        recorded.release()


def check(product: Product, rt: Any, profile: DeviceProfile, variant: str | None = None) -> None:
    setup = Setup(product)
    want, tolerance = setup.expected()
    got = setup.run(rt, profile, variant)
    if product.epilogue == "argmax":
        got, want, tolerance = largest(got, want, tolerance)
    error = np.abs(got - want) / tolerance
    assert np.all(error <= 1), (
        f"{product}: {np.count_nonzero(~(error <= 1))} of {error.size} values are wrong, "
        f"the worst by {np.nanmax(error):.3g} of its tolerance"
    )


def largest(
    got: np.ndarray, want: np.ndarray, tolerance: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What the pairs ``got`` [tokens, 2 slices] say is the largest value of each slice of the rows of
    ``want``, what it should be, and how far it may be from that. Any that may be the largest is right."""
    pairs = got.reshape(len(got), -1, 2)
    each = next(n for n in (4, 8) if -(-want.shape[1] // n) == pairs.shape[1])
    index = pairs[:, :, 1].astype(int)
    np.testing.assert_array_equal(index // each, np.broadcast_to(np.arange(pairs.shape[1]), index.shape))
    padding = ((0, 0), (0, -want.shape[1] % each))
    least = np.pad(want - tolerance, padding, constant_values=-np.inf).reshape(*index.shape, each)
    want, tolerance = np.take_along_axis(want, index, 1), np.take_along_axis(tolerance, index, 1)
    assert np.all(want + tolerance >= least.max(axis=2))
    return pairs[:, :, 0], want, tolerance


def cols_for(fmt: str, i: int) -> int:
    """Whole blocks, an odd and an even number of them, and columns that are multiples of nothing."""
    blocks = (1, 3, 2, 5, 8, 9, 1, 3)[i]
    if fmt not in BLOCK_SIZES:
        return SIZES[i]
    return 32 * blocks if BLOCK_SIZES[fmt] == 32 else 256 * (blocks + 1 >> 1)


@pytest.fixture(params=sorted(PROFILES))
def profile(request: pytest.FixtureRequest, runtime: Any) -> DeviceProfile:
    without = runtime.profile.features - {"buffer_address"}  # test_kernels_matmul_lanes.py is about that
    return replace(runtime.profile, features=without, **PROFILES[request.param])


# What is the same code in every format (tiles of tokens, unused rows, epilogues) is tested in a few, for each
# tile is a shader of its own to compile, seconds on lavapipe. Here are units of one, two, four and eight
# weights, with and without levels, and super-blocks.
UNITS = ("f32", "f16", "q8_0", "q4_1", "q5_0", "q4_k", "q6_k")
SOME = ("f16", "q4_k")  # for what takes long and is the same code in every format


def skip_slow(profile: DeviceProfile, fmt: str, formats: tuple[str, ...] = SOME) -> None:
    """Each kind of kernel is tested in all formats on one of the two devices, where it compiles faster (a
    kernel for GPUs takes lavapipe 2 to 7 seconds, four times as long as SwiftShader); on the other in
    ``formats``, unless this is tier all."""
    lavapipe, swiftshader = "llvmpipe" in profile.name, "SwiftShader" in profile.name
    slow = swiftshader if profile.simd else lavapipe
    if slow and fmt not in formats and not runs_all():
        pytest.skip("this kind of kernel in every format on this device: in tier all")


def skip_emulated(profile: DeviceProfile, fmt: str) -> None:
    """Where there are no matrix units the same shader with ordinary arithmetic in their place is tested: it
    is made for a few formats, and on SwiftShader in tier all only, because it is slow to compile."""
    emulated = fmt in SOME and ("llvmpipe" in profile.name or runs_all())
    if not multiplies_halves(profile, 16) and not emulated:
        pytest.skip("no matrix units, and the format or the device is not one the shader is emulated for")


@pytest.mark.parametrize("fmt", FORMATS)
def test_products_of_few_tokens_equal_float64(fmt: str, runtime: Any, profile: DeviceProfile) -> None:
    """Of one token and by the largest tile in every format, by all tiles in some."""
    skip_slow(profile, fmt)
    for i, rows in enumerate(SIZES):
        tokens = (1, 2, 3, 7)[i % 4] if fmt in UNITS else (1, 7)[i % 2]
        check(Product(fmt, rows, cols_for(fmt, i), tokens, tokens), runtime, profile)


@pytest.mark.parametrize("fmt", FORMATS)
def test_products_of_many_tokens_equal_float64(fmt: str, runtime: Any, profile: DeviceProfile) -> None:
    """By the largest tile in every format, by all in some."""
    skip_slow(profile, fmt)
    sizes = [(257, 33, 1), (33, 63, 5), (7, 257, 0), (63, 65, 7)]
    for rows, tokens, i in [*sizes, (65, 31, 4), (1, 9, 2)] if fmt in UNITS else sizes:
        check(Product(fmt, rows, cols_for(fmt, i), tokens, tokens), runtime, profile)


@pytest.mark.parametrize("fmt", UNITS)
def test_unused_token_rows_are_neither_read_nor_written(
    fmt: str, runtime: Any, profile: DeviceProfile
) -> None:
    skip_slow(profile, fmt)
    for tokens, used in ((1, 0), (4, 3), (8, 1), (16, 0), (64, 33), (64, 8)):
        check(Product(fmt, 40, whole_blocks(fmt, 64), tokens, used), runtime, profile)


@pytest.mark.parametrize("fmt", ("q8_0", "q6_k"))
def test_products_need_no_subgroup_of_eight(fmt: str, runtime: Any) -> None:
    """SwiftShader has none: there every format is tested so. lavapipe takes seconds to compile one."""
    profile = replace(runtime.profile, simd=True, subgroup_size=4)
    for tokens, used in ((1, 1), (9, 9)):
        check(Product(fmt, 33, cols_for(fmt, 5), tokens, used), runtime, profile)
    check(Product(fmt, 34, cols_for(fmt, 3), 4, 4, "swiglu", bias=True, gap=1), runtime, profile)


@pytest.mark.parametrize("fmt", FORMATS)
def test_products_on_matrix_units_are_as_exact_as_f32(fmt: str, runtime: Any) -> None:
    profile = replace(runtime.profile, simd=False)
    skip_emulated(profile, fmt)
    check(
        Product(fmt, 150, cols_for(fmt, 5), 16, 11, bias=True, splits=(136,), halves=True), runtime, profile
    )
    if multiplies_halves(profile, 16):
        for rows, tokens, used, i in ((257, 33, 33, 1), (38, 64, 1, 4), (128, 257, 257, 0), (7, 9, 9, 7)):
            check(Product(fmt, rows, cols_for(fmt, i), tokens, used, halves=True), runtime, profile)
        for epilogue in EPILOGUES:
            check(
                Product(fmt, 70, whole_blocks(fmt, 64), 16, 13, epilogue, True, halves=True), runtime, profile
            )
        check(Product(fmt, 130, whole_blocks(fmt, 4096), 70, 70, halves=True, gap=1), runtime, profile)


def in_units(name: str) -> list[Any]:
    """A way to use a kernel, in a format of each size of units; in more of them in tier all."""
    whole = ("f32", "f16", "q4_1", "q4_k")
    return [pytest.param(f, name, marks=[] if f in whole else pytest.mark.tier_all) for f in UNITS]


# Other ways to use a kernel decode as its default does, which is tested in every format.
WAYS = in_units("matvec 64 subgroup x16") + [
    (fmt, name) for fmt in ("f32", "f16", "q4_1") for name in ("matvec 64 subgroup", "matvec 64 x16")
]


@pytest.mark.parametrize(("fmt", "name"), WAYS)
def test_other_ways_to_use_matvec_equal_float64(fmt: str, name: str, runtime: Any) -> None:
    """Rows that end in the first and in the second group of 8 of a workgroup, columns that end a run of units
    early, rows of x that begin anywhere, unused rows, and epilogues that read what is there."""
    profile = replace(runtime.profile, simd=False)
    skip_slow(profile, fmt)
    for rows, tokens, used, i, epilogue, gap in (
        (257, 1, 1, 7, "store", 0), (33, 1, 1, 6, "swiglu", 0), (74, 3, 3, 4, "add", 1),
        (8, 8, 5, 5, "store", 0),
    ):  # fmt: skip
        rows += rows % 2 if epilogue in PAIRED else 0
        product = Product(fmt, rows, cols_for(fmt, i), tokens, used, epilogue, bias=tokens == 3, gap=gap)
        assert name in variants(profile, fmt, product.cols, tokens, gap == 0)
        check(product, runtime, profile, name)
        if tokens == 3:
            check(replace(product, splits=(24,)), runtime, profile, name)
    both = Product(fmt, 32, whole_blocks(fmt, 96), 8, 5, "add", begins=True, ends=True)
    check(both, runtime, profile, name)


MATVECS_OF_16 = [(fmt, "matvec 64") for fmt in ("f32", "q8_0", "q4_1", "q4_k")] + [
    (fmt, "matvec 64 subgroup") for fmt in ("f16", "q4_1")
]


@pytest.mark.parametrize(("fmt", "name"), MATVECS_OF_16)
def test_matvec_of_16_tokens_equals_float64(fmt: str, name: str, runtime: Any) -> None:
    """A whole tile of them, unused rows, and rows of x that begin anywhere."""
    profile = replace(runtime.profile, simd=False)
    skip_slow(profile, fmt)
    for rows, tokens, used, i, epilogue, gap in (
        (33, 16, 16, 7, "store", 0), (74, 16, 9, 4, "add", 1), (38, 12, 11, 5, "swiglu", 0),
    ):  # fmt: skip
        product = Product(fmt, rows, cols_for(fmt, i), tokens, used, epilogue, bias=gap == 1, gap=gap)
        kernel, _, tile = variants(profile, fmt, product.cols, tokens, gap == 0)[name]
        assert tile == 16 and kernel.name.startswith("matvec.")
        check(product, runtime, profile, name)


def test_matvec_of_16_tokens_fits_the_shared_memory_there_is() -> None:
    gpu = replace(NumpyRuntime().profile, simd=False)
    lanes = {}
    for room in (16 << 10, 18 << 10):
        found = variants(replace(gpu, max_shared_bytes=room), "q4_0", 4096, 16, True)
        lanes[room >> 10] = [
            dict(kernel.spec)["local_size"] for name, (kernel, *_) in found.items() if "vec" in name
        ]
    assert lanes == {16: [32], 18: [64]}


MATMULS = in_units("matmul 32 double") + [
    (fmt, name) for fmt in ("f32", "f16", "q4_k") for name in ("matmul 64 ahead", "matmul 64 x128")
]


@pytest.mark.parametrize(("fmt", "name"), MATMULS)
def test_other_ways_to_use_matmul_equal_float64(fmt: str, name: str, runtime: Any) -> None:
    """One slice of 32 columns, two, an odd number and one that is not whole; rows that end in the first and
    in the second 64 of a workgroup; more tokens than a tile, and unused ones."""
    profile = replace(runtime.profile, simd=False)
    skip_slow(profile, fmt)
    for rows, tokens, used, i, epilogue in (
        (150, 33, 33, 5, "store"), (65, 64, 40, 0, "add"), (74, 64, 9, 2, "swiglu"), (7, 70, 70, 7, "store"),
    ):  # fmt: skip
        product = Product(fmt, rows, cols_for(fmt, i), tokens, used, epilogue, bias=epilogue == "add")
        assert name in variants(profile, fmt, product.cols, tokens, True)
        check(product, runtime, profile, name)
    check(Product(fmt, 66, whole_blocks(fmt, 96), 65, 33, gap=1), runtime, profile, name)


@pytest.mark.parametrize("lanes", (64, 128, 256))
def test_matvec_reduces_by_subgroup_for_any_number_of_them(lanes: int, runtime: Any) -> None:
    profile = replace(runtime.profile, simd=False)
    for fmt, cols in (("q4_1", 4864), ("f16", 4866)):
        check(Product(fmt, 17, cols, 1, 1), runtime, profile, f"matvec {lanes} subgroup")
        check(Product(fmt, 17, cols, 2, 2), runtime, profile, f"matvec {lanes} subgroup x16")


def test_subgroups_reduce_only_where_they_are_whole_and_full() -> None:
    full = frozenset({"subgroup_shuffle", "subgroup_size_control"})
    on_gpu = replace(NumpyRuntime().profile, simd=False, subgroup_size=32, features=full)

    def lanes(profile: DeviceProfile, tokens: int = 1) -> list[str]:
        names = [name for name in variants(profile, "q4_0", 4096, tokens, True) if "subgroup" in name]
        return [name.split()[1] for name in names if "x16" not in name]

    assert lanes(on_gpu) == ["64", "128", "256"] == lanes(on_gpu, 8)
    assert lanes(replace(on_gpu, subgroup_size=128)) == ["128", "256"]
    assert not lanes(replace(on_gpu, subgroup_size=1))
    for missing in full:
        assert not lanes(replace(on_gpu, features=full - {missing}))
    by_shuffles = variants(on_gpu, "q4_0", 4096, 1, True)["matvec 64 subgroup"][0]
    assert by_shuffles.full_subgroups and dict(by_shuffles.spec)["subgroup"] == 32


@pytest.mark.parametrize("fmt", FORMATS)
def test_teams_on_matrix_units_add_up_their_columns(fmt: str, runtime: Any) -> None:
    """Blocks that the teams do not divide evenly, and fewer blocks than teams; emulated as above."""
    profile = replace(runtime.profile, simd=False)
    skip_emulated(profile, fmt)
    for rows, i, teams in ((70, 5, 4), (33, 0, 4), (70, 4, 2)):
        product = Product(fmt, rows, cols_for(fmt, i), 16, 11, "add", bias=True, halves=True)
        check(product, runtime, profile, f"coop 16 teams {teams}")


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("fmt", UNITS)
def test_bias_and_epilogues_equal_float64(
    fmt: str, epilogue: str, runtime: Any, profile: DeviceProfile
) -> None:
    skip_slow(profile, fmt)
    for bias in (False, True):
        check(Product(fmt, 38, whole_blocks(fmt, 64), 4, 3, epilogue, bias), runtime, profile)
        check(Product(fmt, 70, whole_blocks(fmt, 64), 16, 13, epilogue, bias), runtime, profile)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_matrix_split_by_rows_gives_the_same_product(
    fmt: str, runtime: Any, profile: DeviceProfile
) -> None:
    skip_slow(profile, fmt)
    for tokens, epilogue in ((1, "swiglu"), (64, "store")):
        product = Product(
            fmt, 102, whole_blocks(fmt, 64), tokens, tokens, epilogue, bias=True, splits=(8, 72)
        )
        whole = Setup(replace(product, splits=())).run(runtime, profile)
        np.testing.assert_array_equal(whole, Setup(product).run(runtime, profile))
        check(product, runtime, profile)


@pytest.mark.parametrize("fmt", ("f32", "bf16", "q8_0", "q4_1", "q6_k"))
def test_rows_of_x_may_begin_anywhere(fmt: str, runtime: Any, profile: DeviceProfile) -> None:
    skip_slow(profile, fmt, ("bf16", "q4_1"))
    for gap in (1, 2, 4):
        for tokens in (3, 17):
            check(Product(fmt, 33, whole_blocks(fmt, 96), tokens, tokens, gap=gap), runtime, profile)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_product_ends_the_norm_of_what_it_multiplies(
    fmt: str, runtime: Any, profile: DeviceProfile
) -> None:
    skip_slow(profile, fmt)
    for tokens, used, epilogue in ((1, 1, "swiglu"), (8, 5, "store")):
        product = Product(fmt, 38, whole_blocks(fmt, 96), tokens, used, epilogue, bias=True, ends=True)
        check(product, runtime, profile)


@pytest.mark.parametrize("epilogue", ("store", "add", "gated"))
@pytest.mark.parametrize("fmt", ("f32", "q4_1", "q6_k"))
def test_a_product_begins_the_norm_of_what_it_stores(
    fmt: str, epilogue: str, runtime: Any, profile: DeviceProfile
) -> None:
    skip_slow(profile, fmt, ("q4_1",))
    product = Product(fmt, 96, whole_blocks(fmt, 64), 1, 1, epilogue, bias=True, begins=True)
    check(product, runtime, profile)
    check(replace(product, tokens=8, used=7, bias=False, splits=(40, 72)), runtime, profile)
    check(replace(product, tokens=16, used=9, gap=1), runtime, profile)  # by another family on GPUs


def test_norms_of_long_rows(runtime: Any, profile: DeviceProfile) -> None:
    check(Product("q8_0", 9, 8192, 2, 2, ends=True), runtime, profile)


@pytest.mark.parametrize("fmt", ("f32", "q4_1"))
def test_norms_need_no_subgroup_of_eight(fmt: str, runtime: Any) -> None:
    profile = replace(runtime.profile, simd=True, subgroup_size=4)
    for tokens in (1, 8):
        check(Product(fmt, 64, 96, tokens, tokens, "add", True, begins=True, ends=True), runtime, profile)


def test_outputs_are_counted_by_their_own_word_of_the_state(runtime: Any, profile: DeviceProfile) -> None:
    check(Product("q4_1", 33, 64, 8, 5, count="outputs"), runtime, profile)


def test_long_rows_equal_float64(runtime: Any, profile: DeviceProfile) -> None:
    for fmt, cols in (("q4_1", 4864), ("q8_0", 4864), ("f16", 4865), ("q4_k", 4864), ("q6_k", 4864)):
        check(Product(fmt, 17, cols, 1, 1), runtime, profile)
        check(Product(fmt, 17, cols, 9, 9), runtime, profile)


def test_more_rows_than_one_dimension_of_workgroups_times_one(runtime: Any, profile: DeviceProfile) -> None:
    check(Product("q8_0", 70001, 32, 1, 1), runtime, profile)


@pytest.mark.parametrize("fmt", ("int4_g128", "int4_row", "int8_row"))
def test_products_of_groups_of_any_size_equal_float64(fmt: str, runtime: Any, profile: DeviceProfile) -> None:
    """1184 columns are nine groups of 128, a chunk of scales and one more, and a quarter of a tenth."""
    for tokens in (1, 9):
        check(Product(fmt, 17, 1184, tokens, tokens), runtime, profile)


def test_products_are_the_same_from_run_to_run(runtime: Any, profile: DeviceProfile) -> None:
    for tokens in (1, 5, 33):
        setup = Setup(Product("q4_1", 65, 96, tokens, tokens))
        np.testing.assert_array_equal(setup.run(runtime, profile), setup.run(runtime, profile))


def test_a_token_gets_the_same_product_alone_and_in_any_batch(runtime: Any, profile: DeviceProfile) -> None:
    """Within a kernel family: what batch a sequence runs in should not change what it says."""
    batch = 9 if profile.simd else 8  # on GPUs more tokens go through another family
    rng = np.random.default_rng(5)
    x = rng.standard_normal((batch, 96)).astype(np.float32)
    together = Setup(Product("q4_1", 40, 96, batch, batch))
    together.x[:] = x
    alone = Setup(Product("q4_1", 40, 96, 1, 1))
    alone.matrix = together.matrix
    results = together.run(runtime, profile)
    for t in range(batch):
        alone.x[:] = x[t]
        np.testing.assert_array_equal(alone.run(runtime, profile)[0], results[t])


# --- the oracle itself, and what the builder refuses ---


@pytest.fixture
def reference() -> Iterator[NumpyRuntime]:
    rt = NumpyRuntime()
    yield rt
    rt.close()


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_oracle_equals_float64(fmt: str, reference: NumpyRuntime) -> None:
    for i, rows in enumerate(SIZES):
        for epilogue in EPILOGUES:
            even = rows + rows % 2 if epilogue in PAIRED else rows
            product = Product(fmt, even, cols_for(fmt, i), 5, 4, epilogue, bias=i % 2 == 0)
            check(product, reference, reference.profile)


@pytest.mark.parametrize("fmt", sorted({*FORMATS, *GROUPED}))
def test_unpacking_gives_back_every_weight(fmt: str) -> None:
    for i, rows in enumerate(SIZES):
        matrix = random_matrix(fmt, rows, cols_for(fmt, i), np.random.default_rng(i))
        assert matrix.words.size == matrix_words(fmt, rows, matrix.cols)
        dense = unpack(fmt, matrix.words, rows, matrix.cols)
        np.testing.assert_array_equal(dense, matrix.dense.astype(np.float32))
        some = np.array([rows - 1, 0, rows // 2])
        np.testing.assert_array_equal(unpack_rows(fmt, matrix.words, matrix.cols, some), dense[some])


OTHER = Buffer("other", 64, BufferKind.SCRATCH)


def _linear(**changed: Any) -> list[Step]:
    buffer = Buffer("all", 1 << 20, BufferKind.SCRATCH)
    arguments: dict[str, Any] = {
        "fmt": "q4_1", "parts": [Part(buffer, 0, 0, 64)], "cols": 64, "x": Ref(buffer), "x_stride": 64,
        "y": Ref(buffer), "y_stride": 64, "tokens": 1, "state": buffer, "bias": None, "epilogue": "store",
        "count": "tokens",
    }  # fmt: skip
    return linear(NumpyRuntime().profile, **{**arguments, **changed})


@pytest.mark.parametrize(
    ("changed", "named"),
    (
        ({"fmt": "q9_9"}, "q9_9"),
        ({"cols": 33}, "33 columns"),
        ({"fmt": "q4_k", "cols": 288}, "q4_k rows are blocks of 256 weights: 288 columns"),
        ({"epilogue": "gelu"}, "gelu"),
        ({"begin": Begin(Ref(OTHER), Ref(OTHER))}, "must lie in the buffers"),
        ({"begin": Begin(Ref(OTHER), Ref(OTHER)), "epilogue": "swiglu"}, "swiglu cannot begin a norm"),
        ({"begin": Begin(Ref(OTHER), Ref(OTHER)), "epilogue": "argmax"}, "argmax cannot begin a norm"),
        ({"fmt": "f32", "cols": 40, "norm_eps": 1e-6}, "cannot end a norm of 1 x 40"),
        ({"tokens": 9, "norm_eps": 1e-6}, "cannot end a norm of 9 x 64"),
        ({"count": "rows"}, "rows"),
        ({"parts": [Part(Buffer("w", 64, BufferKind.WEIGHTS), 2, 0, 8)]}, "word 2"),
        ({"parts": [Part(Buffer("w", 64, BufferKind.WEIGHTS), 0, 4, 8)]}, "row 4"),
        ({"parts": [Part(Buffer("w", 64, BufferKind.WEIGHTS), 0, 0, 7)], "epilogue": "swiglu"}, "7 rows"),
    ),
)
def test_what_cannot_be_computed_is_refused_by_name(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        _linear(**changed)


def test_tiles_fit_the_shared_memory_every_device_has() -> None:
    small = replace(NumpyRuntime().profile, simd=False, max_shared_bytes=16384)
    buffer = Buffer("all", 1 << 20, BufferKind.SCRATCH)
    part, at = Part(buffer, 0, 0, 64), Ref(buffer)
    (step,) = linear(small, "f16", [part], 64, at, 64, at, 64, 64, buffer, None, "store", "tokens")
    assert dict(step.kernel.spec)["tokens"] == 32
    assert step.groups == (1, 2, 1)


def test_parts_do_not_wait_for_one_another() -> None:
    buffer = Buffer("w", 1 << 20, BufferKind.WEIGHTS)
    steps = _linear(parts=[Part(buffer, 0, 0, 8), Part(buffer, 4096, 8, 8), Part(buffer, 8192, 16, 8)])
    assert [s.independent for s in steps] == [False, True, True]

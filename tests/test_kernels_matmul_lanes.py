"""The products of lavapipe (shaders/matmul_lanes.comp), against float64, with the tolerance of the others.

Compiling is what takes time here, more with every block that is unrolled, so rows are cut into chunks of
two blocks, except where a test is about something else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_kernels_matmul import EPILOGUES, Product, Setup, check
from weight_matrices import BLOCK_SIZES, FORMATS

from xinfer_vk.kernels import matmul_lanes
from xinfer_vk.kernels.matmul import planned_rows
from xinfer_vk.plan import DeviceProfile
from xinfer_vk.reference import NumpyRuntime


@pytest.fixture
def profile(runtime: Any) -> DeviceProfile:
    if not matmul_lanes.applies(runtime.profile):
        pytest.skip("the device has no buffer addresses, or subgroups of another size")
    return runtime.profile


@pytest.fixture(autouse=True)
def unrolled(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_blocks(count: int) -> None:
        for limits in (matmul_lanes.WHOLE_BLOCKS, matmul_lanes.CHUNK_BLOCKS):
            for tokens in matmul_lanes.TOKENS:
                monkeypatch.setitem(limits, tokens, count)

    set_blocks(2)
    return set_blocks


def columns(fmt: str, blocks: int) -> int:
    """So many blocks of 32, rounded up to super-blocks, and a rest where there can be one."""
    if fmt not in BLOCK_SIZES and not fmt.startswith("int"):
        return 32 * blocks + 3
    return -(-blocks * 32 // BLOCK_SIZES.get(fmt, 32)) * BLOCK_SIZES.get(fmt, 32)


@pytest.mark.parametrize("fmt", FORMATS)
def test_products_equal_float64(fmt: str, runtime: Any, profile: DeviceProfile) -> None:
    check(Product(fmt, 37, columns(fmt, 3), 1, 1), runtime, profile)  # the last chunk goes beyond the row
    check(Product(fmt, 70, columns(fmt, 2), 9, 7, "swiglu", bias=True, gap=1), runtime, profile)


@pytest.mark.parametrize("tokens", (2, 3))
@pytest.mark.parametrize("fmt", ("bf16", "q8_0", "q4_1", "q6_k"))
def test_products_of_two_and_three_tokens_equal_float64(
    fmt: str, tokens: int, runtime: Any, profile: DeviceProfile
) -> None:
    check(Product(fmt, 9, columns(fmt, 3), tokens, tokens, bias=True), runtime, profile)


@pytest.mark.parametrize("fmt", ("q4_0", "q4_k", "mxfp4"))
def test_chunks_that_begin_with_a_word_of_scales(
    fmt: str, runtime: Any, profile: DeviceProfile, unrolled: Any
) -> None:
    unrolled(8)
    check(Product(fmt, 9, 512, 1, 1), runtime, profile)


@pytest.mark.parametrize("fmt", ("int4_g128", "int4_row", "int8_row"))
def test_chunks_find_the_scales_of_their_groups(
    fmt: str, runtime: Any, profile: DeviceProfile, unrolled: Any
) -> None:
    unrolled(10)
    check(Product(fmt, 17, 1184, 1, 1), runtime, profile)


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_bias_and_epilogues_equal_float64(epilogue: str, runtime: Any, profile: DeviceProfile) -> None:
    for bias in (False, True):
        check(Product("q4_1", 38, 128, 1, 1, epilogue, bias), runtime, profile)
        check(Product("q4_1", 38, 128, 16, 13, epilogue, bias), runtime, profile)


@pytest.mark.parametrize("fmt", ("f32", "q4_1", "q6_k"))
def test_products_begin_and_end_norms(fmt: str, runtime: Any, profile: DeviceProfile) -> None:
    """Of rows that are one chunk, two with a block beyond the row, and more than there are tokens."""
    for tokens, used, blocks in ((1, 1, 2), (1, 1, 3), (2, 2, 3), (3, 3, 2), (8, 5, 2), (8, 8, 3)):
        whole = Product(fmt, 96, columns(fmt, blocks) // 32 * 32, tokens, used, ends=True)
        check(whole, runtime, profile)
        check(replace(whole, rows=70, epilogue="swiglu", bias=True, gap=1), runtime, profile)
        added = replace(whole, epilogue="add", begins=True, bias=used > 1)
        check(added, runtime, profile)
        check(replace(added, ends=False, splits=(40, 72)), runtime, profile)


def test_kernels_of_prompts_know_of_no_norms(runtime: Any, profile: DeviceProfile) -> None:
    for changed in ({"ends": True}, {"begins": True}):
        with pytest.raises(ValueError, match=r"cannot (begin|end) a norm of 16"):
            Setup(Product("q4_1", 96, 64, 16, 16, **changed)).run(runtime, profile)


@pytest.mark.parametrize("fmt", ("f32", "q4_0"))
def test_windows_of_x_meet(fmt: str, runtime: Any, profile: DeviceProfile, unrolled: Any) -> None:
    unrolled(9)
    check(Product(fmt, 9, columns(fmt, 17), 1, 1), runtime, profile)  # the last chunk goes beyond the row
    check(Product(fmt, 9, columns(fmt, 9), 8, 8), runtime, profile)


def test_more_chunks_than_tokens(runtime: Any, profile: DeviceProfile, unrolled: Any) -> None:
    unrolled(1)
    for tokens in (1, 4, 8):
        check(Product("q4_1", 40, 320, tokens, tokens, "add", bias=True), runtime, profile)


def test_unused_token_rows_are_neither_read_nor_written(runtime: Any, profile: DeviceProfile) -> None:
    for tokens, used in ((1, 0), (8, 0), (8, 5), (64, 33)):
        check(Product("q4_1", 40, 64, tokens, used), runtime, profile)


def test_many_rows_in_several_parts(runtime: Any, profile: DeviceProfile) -> None:
    """Workgroups of one row group and of sixteen, and more of them than one digit to base 16 counts."""
    check(Product("q8_0", 2500, 64, 1, 1, bias=True, splits=(8, 1600)), runtime, profile)
    check(Product("q8_0", 40001, 32, 1, 1), runtime, profile)


def test_a_token_gets_the_same_product_in_any_batch(runtime: Any, profile: DeviceProfile) -> None:
    x = np.random.default_rng(5).standard_normal((9, 96)).astype(np.float32)
    together = Setup(Product("q4_1", 40, 96, 9, 9))
    together.x[:] = x
    results = together.run(runtime, profile)
    alone = Setup(Product("q4_1", 40, 96, 3, 3))
    alone.matrix = together.matrix
    for t in range(0, 9, 3):
        alone.x[:] = x[t : t + 3]
        np.testing.assert_array_equal(alone.run(runtime, profile)[:3], results[t : t + 3])


def test_geometry() -> None:
    def chunk(fmt: str, cols: int, tokens: int) -> tuple[int, int]:
        return matmul_lanes.chunks(fmt, cols, tokens)

    assert [chunk("q4_1", cols, 1) for cols in (31, 64, 96, 160)] == [(0, 1), (2, 1), (2, 2), (2, 3)]
    wide = replace(
        NumpyRuntime().profile,
        subgroup_size=8, max_workgroup_invocations=1024, max_shared_bytes=32768,
        features=frozenset({"buffer_address", "subgroup_shuffle"}),
    )  # fmt: skip
    assert matmul_lanes.applies(wide)
    for lacking in ({"subgroup_size": 16}, {"features": frozenset({"subgroup_shuffle"})}, {"simd": False}):
        assert not matmul_lanes.applies(replace(wide, **lacking))
    counts = (0, 1, 3, 5, 9, 17, 63, 65, 257, 300, 512)
    assert [planned_rows(wide, n) for n in counts] == [0, 1, 4, 8, 16, 24, 64, 80, 320, 320, 512]
    assert [planned_rows(NumpyRuntime().profile, n) for n in counts[4:8]] == [16, 32, 64, 128]
    oracle = lambda call: None  # noqa: E731
    assert matmul_lanes.choose(wide, "f32", 8, 64 * 128, 1, oracle) is not None
    assert matmul_lanes.choose(wide, "f32", 8, 64 * 129, 1, oracle) is None  # 129 runs of 8 lanes

"""Mixture of experts: routing, grouping, products and sums, on every Vulkan device against the oracles,
and the oracles against plain float64 loops."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from conftest import POISON, CheckSteps
from weight_matrices import FORMATS, random_matrix, whole_blocks

from xinfer_vk.kernels import state as st
from xinfer_vk.kernels.base import Ref
from xinfer_vk.kernels.experts import ExpertPart, expert_linear, pairs_per_tile
from xinfer_vk.kernels.halves import halves_words, split_halves
from xinfer_vk.kernels.layout import matrix_words
from xinfer_vk.kernels.matmul import tuned_key, variants
from xinfer_vk.kernels.routing import (
    Routing,
    combine,
    group,
    read_tiles,
    route,
    routing_words,
    write_tiles,
)
from xinfer_vk.plan import Buffer, BufferKind, DeviceProfile, Plan, Step
from xinfer_vk.reference import NUMPY_PROFILE, NumpyRuntime

OFFSET = 5  # of the routing in its buffer
PROFILES = {"simd": True, "gpu": False}

# (experts, per_token): one expert, all of them, primes, Mixtral, Qwen3-MoE, more than a workgroup's lanes.
MIXTURES = ((1, 1), (5, 5), (7, 3), (8, 2), (128, 8), (257, 1))


@pytest.fixture(params=sorted(PROFILES))
def profile(request: pytest.FixtureRequest, runtime: Any) -> DeviceProfile:
    return replace(runtime.profile, simd=PROFILES[request.param])


def filled(rt: Any, name: str, values: np.ndarray, offset: int, kind: BufferKind) -> Ref:
    buffer = rt.allocate(name, -(-(offset + values.size) // 4) * 4, kind)
    rt.write(buffer, offset, np.ascontiguousarray(values).reshape(-1).view(np.uint32))
    return Ref(buffer, offset)


def state_of(rt: Any, used: int) -> Buffer:
    words = np.zeros(st.BLOCK_TABLE, np.uint32)
    words[st.N_TOKENS] = used
    return filled(rt, "state", words, 0, BufferKind.STATE).buffer


def routing_of(rt: Any, tokens: int, experts: int, per_token: int, tile: int) -> Routing:
    buffer = rt.allocate("routing", OFFSET + routing_words(tokens, per_token) + 3, BufferKind.SCRATCH)
    return Routing(buffer, OFFSET, tokens, experts, per_token, tile)


def choices(tokens: int, experts: int, per_token: int, kind: str = "any") -> np.ndarray:
    """[tokens, per_token] experts, no token's twice; "one": all alike, "few": none beyond the first ones."""
    rng = np.random.default_rng(tokens + experts)
    among = {"any": experts, "few": min(experts, per_token + 1), "one": per_token}[kind]
    return np.stack([rng.permutation(among)[:per_token] for _ in range(tokens)]).astype(np.uint32)


# -- the router ------------------------------------------------------------------------------------

# exp(x) may be off by 3 + 2|x| units in the last place (Vulkan); logits differ by up to 20 here.
WEIGHTS = 2 * (3 + 2 * 20) * 2.0**-24


def logits_of(tokens: int, experts: int) -> np.ndarray:
    rng = np.random.default_rng(experts)
    logits = rng.standard_normal((tokens, experts)).astype(np.float32) * 4
    logits[0] = rng.integers(0, 2, experts)  # ties
    logits[1:2] = 0.0
    logits[1:2, ::2] = -0.0  # equal to 0
    logits[2:3, experts // 2] = np.nan
    logits[3:4] = np.nan
    logits[4:5, experts - 1] = 20.0
    return logits


def routed(
    rt: Any, profile: DeviceProfile, tokens: int, used: int, experts: int, per_token: int, normalized: bool,
    tile: int,
) -> list[Step]:  # fmt: skip
    x = np.full((tokens, experts + 3), POISON.view(np.float32))
    x[:used, :experts] = logits_of(tokens, experts)[:used]
    logits = filled(rt, "logits", x, 2, BufferKind.SCRATCH)
    routing = routing_of(rt, tokens, experts, per_token, tile)
    return route(profile, logits, experts + 3, routing, normalized, state_of(rt, used))


@pytest.mark.parametrize(("experts", "per_token"), MIXTURES)
def test_the_router_equals_its_oracle(
    check_steps: CheckSteps, profile: DeviceProfile, experts: int, per_token: int
) -> None:
    for tokens, used, normalized, tile in (
        (1, 1, True, 1),
        (8, 5, False, 1),
        (9, 9, True, 4),
        (4, 0, True, 1),
    ):
        check_steps(
            lambda rt: routed(rt, profile, tokens, used, experts, per_token, normalized, tile),  # noqa: B023
            rtol=WEIGHTS,
        )  # fmt: skip


def run(rt: NumpyRuntime, steps: list[Step]) -> np.ndarray:
    """Words of the routing buffer after the steps."""
    rt.prepare(Plan("test", tuple(steps))).run()
    (buffer,) = {b for step in steps for b in step.buffers if b.name == "routing"}
    return rt.read(buffer, 0, buffer.words)


@pytest.mark.parametrize("normalized", (True, False))
def test_the_router_chooses_the_largest_logits_the_lower_number_first(
    numpy_runtime: NumpyRuntime, normalized: bool
) -> None:
    tokens, experts, per_token = 9, 12, 4
    steps = routed(numpy_runtime, NUMPY_PROFILE, tokens, tokens, experts, per_token, normalized, 1)
    words = run(numpy_runtime, steps)
    weights = words.view(np.float32)[OFFSET:][: tokens * per_token].reshape(tokens, per_token)
    chosen = words[OFFSET + tokens * per_token :][: tokens * per_token].reshape(tokens, per_token)
    for row, logits in enumerate(logits_of(tokens, experts).astype(np.float64)):
        order = sorted(range(experts), key=lambda e: (np.isnan(logits[e]), -logits[e], e))
        assert chosen[row].tolist() == order[:per_token]
        softmax = np.exp(logits) / np.exp(logits).sum()
        want = softmax[chosen[row]] / (softmax[chosen[row]].sum() if normalized else 1)
        np.testing.assert_allclose(weights[row], want, rtol=1e-6)
    assert np.isnan(weights[2:4]).all() and not np.isnan(np.delete(weights, (2, 3), 0)).any()


def test_what_cannot_be_chosen_is_refused(numpy_runtime: NumpyRuntime) -> None:
    for experts, per_token in ((2, 3), (2, 0), (2000, 2)):
        with pytest.raises(ValueError, match=f"{per_token} of {experts} experts"):
            routed(numpy_runtime, NUMPY_PROFILE, 1, 1, experts, per_token, True, 1)


# -- grouping --------------------------------------------------------------------------------------


def grouped(
    rt: Any, profile: DeviceProfile, tokens: int, used: int, experts: int, per_token: int, kind: str,
    tile: int,
) -> list[Step]:  # fmt: skip
    routing = routing_of(rt, tokens, experts, per_token, tile)
    rt.write(routing.buffer, routing.chosen, choices(tokens, experts, per_token, kind)[:used].reshape(-1))
    return group(profile, routing, state_of(rt, used))


@pytest.mark.parametrize("kind", ("any", "few", "one"))
@pytest.mark.parametrize(("experts", "per_token"), MIXTURES)
def test_grouping_equals_its_oracle(
    check_steps: CheckSteps, profile: DeviceProfile, experts: int, per_token: int, kind: str
) -> None:
    for tokens, used, tile in ((2, 2, 2), (16, 13, 4), (65, 65, 8), (4, 0, 2)):
        check_steps(
            lambda rt: grouped(rt, profile, tokens, used, experts, per_token, kind, tile),  # noqa: B023
            views={"routing": "u32"},
        )


@pytest.mark.parametrize("kind", ("any", "few", "one"))
def test_every_pair_is_in_one_tile_of_its_expert(numpy_runtime: NumpyRuntime, kind: str) -> None:
    for tokens, experts, per_token, tile in ((33, 7, 3, 4), (512, 128, 8, 64), (3, 8, 2, 2)):
        steps = grouped(numpy_runtime, NUMPY_PROFILE, tokens, tokens, experts, per_token, kind, tile)
        words = run(numpy_runtime, steps)
        routing = Routing(steps[0].buffers[1], OFFSET, tokens, experts, per_token, tile)
        tiles = read_tiles(words, routing.tiles)
        assert len(tiles) <= routing.max_tiles
        assert tiles[0, 1] == routing.pairs_list and tiles[-1, 2] == routing.pairs_list + routing.pairs
        assert all(a[2] == b[1] and a[0] <= b[0] for a, b in pairwise(tiles))
        chosen = choices(tokens, experts, per_token, kind).reshape(-1)
        for expert, first, end in tiles:
            assert 0 < end - first <= tile
            assert (chosen[words[first:end]] == expert).all()
        listed = words[routing.pairs_list :][: routing.pairs]
        assert sorted(listed) == list(range(routing.pairs))


def test_there_can_be_as_many_tiles_as_are_dispatched() -> None:
    buffer = Buffer("routing", 1 << 20, BufferKind.SCRATCH)
    assert Routing(buffer, 0, 1, 8, 2, 1).max_tiles == 2
    assert Routing(buffer, 0, 4, 2, 1, 2).max_tiles == 3  # 3 + 1, or 1 + 3: no more
    assert Routing(buffer, 0, 512, 8, 2, 64).max_tiles == 23  # 16 full ones at most, 8 that are not
    assert Routing(buffer, 0, 2, 128, 8, 8).max_tiles == 16


# -- products --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """One product of ``used`` of ``tokens`` rows of x with the experts they chose."""

    fmt: str
    rows: int
    cols: int
    tokens: int
    used: int
    experts: int = 5
    per_token: int = 2
    tile: int = 1
    epilogue: str = "store"
    shared_x: bool = True  # x has a row a token, not one a pair
    splits: tuple[int, ...] = ()  # first experts of the parts after the first
    kind: str = "any"
    halves: bool = False  # x in two f16 planes, as matrix units take it

    @property
    def width(self) -> int:
        return self.rows // 2 if self.epilogue == "swiglu" else self.rows

    @property
    def share(self) -> int:
        return self.per_token if self.shared_x else 1

    @property
    def chosen(self) -> np.ndarray:
        return choices(self.tokens, self.experts, self.per_token, self.kind)[: self.used].reshape(-1)

    def weights(self) -> list[Any]:
        rng = np.random.default_rng(self.rows)
        return [random_matrix(self.fmt, self.rows, self.cols, rng) for _ in range(self.experts)]

    def x(self) -> np.ndarray:
        """Rows whose products are of the order of one."""
        rows = self.used * self.per_token // self.share
        size = np.sqrt(np.mean(self.weights()[0].dense ** 2) * self.cols)
        return (np.random.default_rng(1).standard_normal((rows, self.cols)) / size).astype(np.float32)

    def before(self) -> np.ndarray:
        shape = (self.used * self.per_token, self.width)
        return np.random.default_rng(2).standard_normal(shape).astype(np.float32)

    def build(self, rt: Any, profile: DeviceProfile) -> list[Step]:
        """Steps whose buffers hold NaN in all that must not be read: unused rows, experts nobody chose."""
        routing = routing_of(rt, self.tokens, self.experts, self.per_token, self.tile)
        pairs = np.arange(self.chosen.size, dtype=np.uint32)
        rt.write(routing.buffer, routing.chosen, self.chosen)
        if self.tile == 1:  # as the router leaves it
            tiles = np.zeros(1 + 3 * pairs.size, np.uint32)
            write_tiles(tiles, 0, self.chosen, routing.pairs_list + pairs, routing.pairs_list + pairs + 1)
            rt.write(routing.buffer, routing.pairs_list, pairs)
            rt.write(routing.buffer, routing.tiles, tiles)
        steps = group(profile, routing, state_of(rt, self.used))

        words = -(-matrix_words(self.fmt, self.rows, self.cols) // 64) * 64
        parts = []
        weights, used = self.weights(), set(self.chosen.tolist())
        for first, last in pairwise((0, *self.splits, self.experts)):
            packed = np.full((last - first, words), POISON)
            for i in range(first, last):
                if i in used:
                    packed[i - first, : weights[i].words.size] = weights[i].words
            at = filled(rt, f"w{first}", packed, 4, BufferKind.WEIGHTS)
            parts.append(ExpertPart(at.buffer, at.offset, first, last - first, words))
        x_stride, y_stride = whole_blocks("q8_0", self.cols) + (0 if self.shared_x else 1), self.width + 3
        values = np.full((self.tokens * self.per_token // self.share, x_stride), POISON.view(np.float32))
        values[: len(self.x()), : self.cols] = self.x()
        x = filled(rt, "x", values, 4, BufferKind.SCRATCH)
        y = Ref(rt.allocate("y", 7 + self.tokens * self.per_token * y_stride, BufferKind.SCRATCH), 7)
        if self.epilogue in ("add", "gated"):
            for pair, row in enumerate(self.before()):
                rt.write(y.buffer, y.offset + pair * y_stride, row.view(np.uint32))
        halves, room = None, len(values)
        if self.halves:
            words = halves_words(room, self.cols)
            halves = Ref(rt.allocate("halves", 4 + words, BufferKind.SCRATCH), 4)
            in_use = np.array([self.used * self.per_token // self.share], np.uint32)
            rt.write(routing.buffer, routing.pairs_in_use, in_use)
            steps += split_halves(x, x_stride, self.cols, halves, room, routing.buffer, routing.pairs_in_use)
        return steps + expert_linear(
            profile, self.fmt, parts, self.rows, self.cols, routing, x, x_stride, self.shared_x, y, y_stride,
            self.epilogue, halves=halves,
        )  # fmt: skip


# A sum of n = 256 products whose absolute values add up to at most S = 40 here: 4 sqrt(n) 2^-24 S, see
# test_kernels_matmul.py.
CLOSE = {"atol": 2e-4, "rtol": 1e-5}


def check_product(check_steps: CheckSteps, profile: DeviceProfile, product: Product) -> None:
    views = {"routing": "u32", **{f"w{first}": "u32" for first in (0, *product.splits)}}
    check_steps(lambda rt: product.build(rt, profile), views=views, **CLOSE)


@pytest.mark.parametrize("fmt", FORMATS)
def test_products_of_every_format_equal_the_oracle(check_steps: CheckSteps, runtime: Any, fmt: str) -> None:
    product = Product(fmt, 22, whole_blocks(fmt, 67), 1, 1, epilogue="swiglu")
    check_product(check_steps, runtime.profile, product)


@pytest.mark.parametrize("fmt", ("bf16", "q4_k"))
def test_products_of_few_and_many_tokens_equal_the_oracle(
    check_steps: CheckSteps, profile: DeviceProfile, fmt: str
) -> None:
    tile = 8 if profile.simd else 16
    cols = whole_blocks(fmt, 67)
    for product in (
        Product(fmt, 22, cols, 3, 2, epilogue="swiglu"),
        Product(fmt, 22, cols, 33, 31, tile=tile, epilogue="swiglu"),
        Product(fmt, 70, cols, 33, 31, tile=tile, shared_x=False),
    ):
        check_product(check_steps, profile, product)


@pytest.mark.parametrize(
    ("tile", "variant"),
    ((1, "matvec 64 subgroup x16"), (8, "matvec 64 x16"), (16, "matvec 64"), (16, "matmul 16 double")),
)
def test_products_of_what_the_tuner_may_choose_equal_the_oracle(
    check_steps: CheckSteps, runtime: Any, tile: int, variant: str
) -> None:
    """Rows end in the first 8 of a workgroup's 16, and behind them lies another expert."""
    tuned = {tuned_key("q8_0", 38, 96, tile): variant}
    gpu = replace(runtime.profile, simd=False, tuned=tuned)
    product = Product("q8_0", 38, 96, 33, 31, tile=tile, epilogue="swiglu")
    wanted = dict(variants(gpu, "q8_0", 96, tile, True)[variant][0].spec)
    (*_, step) = product.build(NumpyRuntime(gpu), gpu)
    assert dict(step.kernel.spec) == {**wanted, "experts": 5}
    check_product(check_steps, gpu, product)


@pytest.mark.parametrize("fmt", ("f16", "q4_k"))
def test_products_of_halves_equal_the_oracle(check_steps: CheckSteps, runtime: Any, fmt: str) -> None:
    """What devices with matrix units run, with ordinary arithmetic where there are none."""
    gpu, cols = replace(runtime.profile, simd=False), whole_blocks(fmt, 67)
    for shared_x, epilogue in ((True, "swiglu"), (False, "store")):
        product = Product(fmt, 150, cols, 33, 31, 5, 2, 16, epilogue, shared_x, (2,), halves=True)
        check_product(check_steps, gpu, product)


def test_products_of_halves_take_the_tuners_teams(check_steps: CheckSteps, runtime: Any) -> None:
    """Each team has some of the columns of an expert's rows; a tile too small for the pairs is not taken."""
    for tile, name, teams, tokens in ((16, "coop 16 teams 4", 4, 16), (32, "coop 16 teams 2", 1, 32)):
        tuned = {tuned_key("f16", 70, 96, tile): name}
        gpu = replace(runtime.profile, simd=False, max_shared_bytes=48 << 10, tuned=tuned)
        product = Product("f16", 70, 96, 33, 31, tile=tile, epilogue="swiglu", splits=(2,), halves=True)
        (*_, step) = product.build(NumpyRuntime(gpu), gpu)
        assert dict(step.kernel.spec).items() >= {"teams": teams, "tokens": tokens, "experts": 5}.items()
        if teams > 1:
            check_product(check_steps, gpu, product)


@pytest.mark.parametrize("kind", ("any", "few", "one"))
@pytest.mark.parametrize("tile", (1, 2, 8, 64))
def test_products_of_any_grouping_equal_the_oracle(
    check_steps: CheckSteps, profile: DeviceProfile, tile: int, kind: str
) -> None:
    if profile.simd and tile > 8:
        pytest.skip("a workgroup of CPU devices takes 8 pairs")
    for tokens, used, epilogue, shared_x in (
        (17, 17, "store", True), (16, 3, "gated", False), (4, 0, "store", True), (70, 70, "add", True),
    ):  # fmt: skip
        product = Product("f32", 9, 33, tokens, used, 7, 3, tile, epilogue, shared_x, kind=kind)
        check_product(check_steps, profile, product)


def test_experts_in_several_buffers_give_the_same_products(
    check_steps: CheckSteps, profile: DeviceProfile
) -> None:
    for tokens, tile in ((1, 1), (9, 4)):
        for splits in ((1,), (2, 3)):
            check_product(
                check_steps, profile, Product("q4_1", 18, 64, tokens, tokens, tile=tile, splits=splits)
            )


@pytest.mark.parametrize("epilogue", ("store", "add", "swiglu", "gated"))
@pytest.mark.parametrize("fmt", ("f16", "q4_1"))
def test_the_oracle_equals_float64(numpy_runtime: NumpyRuntime, fmt: str, epilogue: str) -> None:
    product = Product(fmt, 14, whole_blocks(fmt, 67), 9, 7, 6, 3, 4, epilogue, splits=(2,))
    steps = product.build(numpy_runtime, NUMPY_PROFILE)
    run(numpy_runtime, steps)
    y = numpy_runtime.read(steps[-1].buffers[2], 7, 7 * 3 * (product.width + 3)).view(np.float32)
    weights, x = product.weights(), product.x().astype(np.float64)
    for pair, expert in enumerate(product.chosen):
        v, before = weights[expert].dense @ x[pair // 3], product.before()[pair].astype(np.float64)
        if epilogue == "swiglu":
            before, v = v[0::2], v[1::2]
        if epilogue in ("swiglu", "gated"):
            v = before / (1 + np.exp(-before)) * v
        elif epilogue == "add":
            v = v + before
        np.testing.assert_allclose(y.reshape(21, -1)[pair, : product.width], v, atol=1e-4)


def test_parts_do_not_wait_for_one_another(numpy_runtime: NumpyRuntime) -> None:
    steps = Product("f32", 8, 8, 1, 1, splits=(2, 4)).build(numpy_runtime, NUMPY_PROFILE)
    assert [step.independent for step in steps] == [False, True, True]
    assert [step.groups for step in steps] == [(1, 2, 1)] * 3


def test_products_refuse_what_they_cannot_compute(numpy_runtime: NumpyRuntime) -> None:
    with pytest.raises(ValueError, match="gelu"):
        Product("f32", 8, 8, 1, 1, epilogue="gelu").build(numpy_runtime, NUMPY_PROFILE)
    routing = Routing(Buffer("r", 100, BufferKind.SCRATCH), 0, 1, 2, 1, 1)
    part, at = ExpertPart(routing.buffer, 2, 0, 2, 64), Ref(routing.buffer)
    with pytest.raises(ValueError, match="word 2"):
        expert_linear(NUMPY_PROFILE, "f32", [part], 8, 8, routing, at, 8, True, at, 8, "store")


def test_a_tile_holds_the_mean_of_an_expert() -> None:
    gpu = replace(NUMPY_PROFILE, simd=False)
    mixtral, qwen3 = (8, 2), (128, 8)
    tiles = {
        (which, tokens, device.simd): pairs_per_tile(device, [("q4_k", 4096)], tokens, *which)
        for which in (mixtral, qwen3)
        for tokens in (1, 8, 64, 512)
        for device in (gpu, NUMPY_PROFILE)
    }
    assert [tiles[mixtral, t, False] for t in (1, 8, 64, 512)] == [1, 2, 16, 64]
    assert [tiles[qwen3, t, False] for t in (1, 8, 64, 512)] == [1, 1, 4, 32]
    assert [tiles[mixtral, t, True] for t in (1, 8, 64, 512)] == [1, 2, 8, 8]


# -- the sum -----------------------------------------------------------------------------------------


def test_the_weighted_sum_equals_its_oracle(check_steps: CheckSteps, profile: DeviceProfile) -> None:
    for tokens, used, per_token, dim in ((1, 1, 2, 1), (8, 5, 3, 67), (33, 33, 8, 257), (2, 0, 2, 3)):

        def build(
            rt: Any, tokens: int = tokens, used: int = used, n: int = per_token, dim: int = dim
        ) -> list[Step]:
            rng = np.random.default_rng(dim)
            routing = routing_of(rt, tokens, n, n, 1)
            rt.write(routing.buffer, routing.weights, rng.random(used * n, np.float32).view(np.uint32))
            x = np.full((tokens * n, dim + 1), POISON.view(np.float32))
            x[: used * n, :dim] = rng.standard_normal((used * n, dim))
            y = np.full((tokens, dim + 2), POISON.view(np.float32))
            y[:used, :dim] = rng.standard_normal((used, dim))
            at = filled(rt, "x", x, 3, BufferKind.SCRATCH), filled(rt, "y", y, 1, BufferKind.SCRATCH)
            return combine(profile, routing, at[0], dim + 1, at[1], dim + 2, dim, state_of(rt, used))

        check_steps(build, atol=2e-6, rtol=1e-6)  # nine sums of numbers of about 1

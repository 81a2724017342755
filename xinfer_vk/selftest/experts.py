"""Cases of the kernels of a mixture of experts: the router, the lists, the products and the sum."""

from __future__ import annotations

import numpy as np

from xinfer_vk.kernels.base import Ref
from xinfer_vk.kernels.experts import ExpertPart, expert_linear
from xinfer_vk.kernels.layout import matrix_words
from xinfer_vk.kernels.matmul import choose
from xinfer_vk.kernels.routing import Routing, combine, group, route, routing_words
from xinfer_vk.plan import BufferKind, Step
from xinfer_vk.selftest.batch import Batch
from xinfer_vk.selftest.case import EXACT, OWN_AND_GPU, Bench, Build, Case, Tolerance, kernel_cases
from xinfer_vk.selftest.weights import random_words

AT = 3  # of the routing in its buffer
ROUTE = Tolerance(0.0, 2e-5, "a share is an exp of up to 30, off by 63 units in the last place, over a sum")
COMBINE = Tolerance(2e-6, 1e-6, "a sum of up to nine numbers of about one")
PRODUCT = Tolerance(
    3e-4, 1e-5, "sums of 256 products whose absolute values add up to about 100; a wrong row changes 1"
)


def _routing(bench: Bench, tokens: int, experts: int, per_token: int, tile: int) -> Routing:
    buffer = bench.buffer("routing", AT + routing_words(tokens, per_token) + 2)
    return Routing(buffer, AT, tokens, experts, per_token, tile)


def _choices(used: int, experts: int, per_token: int) -> np.ndarray:
    """[used, per_token]: every third token chooses among the first experts only, so some are crowded."""
    rng = np.random.default_rng(experts)
    among = [per_token if token % 3 == 0 else experts for token in range(used)]
    return np.stack([rng.permutation(n)[:per_token] for n in among]).astype(np.uint32)


def _route(experts: int, per_token: int, used: int, tokens: int, normalized: bool, tile: int) -> Build:
    def build(bench: Bench) -> list[Step]:
        logits = np.full((tokens, experts + 3), np.nan, np.float32)
        logits[:used, :experts] = np.random.default_rng(experts).standard_normal((used, experts)) * 4
        logits[1:used:4, :experts] = np.round(logits[1:used:4, :experts] / 8)  # ties
        logits[2:used:4, experts // 2] = np.nan
        x = bench.filled("logits", logits)
        state = Batch(((0, used),), tokens).state_buffer(bench)
        routing = _routing(bench, tokens, experts, per_token, tile)
        return route(bench.profile, Ref(x), experts + 3, routing, normalized, state)

    return build


def _group(experts: int, per_token: int, used: int, tokens: int, tile: int) -> Build:
    def build(bench: Bench) -> list[Step]:
        routing = _routing(bench, tokens, experts, per_token, tile)
        bench.write(routing.buffer, routing.chosen, _choices(used, experts, per_token))
        return group(bench.profile, routing, Batch(((0, used),), tokens).state_buffer(bench))

    return build


def _combine(per_token: int, dim: int, used: int, tokens: int) -> Build:
    def build(bench: Bench) -> list[Step]:
        rng = np.random.default_rng(dim)
        routing = _routing(bench, tokens, per_token, per_token, 1)
        bench.write(routing.buffer, routing.weights, rng.random(used * per_token, np.float32))
        x = np.full((tokens * per_token, dim + 1), np.nan, np.float32)
        x[: used * per_token, :dim] = rng.standard_normal((used * per_token, dim))
        y = bench.buffer("y", 1 + tokens * (dim + 3))
        before = np.full((used, dim + 3), np.nan, np.float32)
        before[:, :dim] = rng.standard_normal((used, dim))
        bench.write(y, 1, before)
        state = Batch(((0, used),), tokens).state_buffer(bench)
        x_at = Ref(bench.filled("x", x))
        return combine(bench.profile, routing, x_at, dim + 1, Ref(y, 1), dim + 3, dim, state)

    return build


def _experts(fmt: str, used: int, tokens: int, wanted: int, epilogue: str) -> Build:
    """Six experts in two buffers, the last without tokens; tiles of ``wanted`` pairs if the device's kernels
    take so many, 1: as the router lists them."""
    rows, cols, experts, per_token, split = 70, 256, 6, 2, 2

    def build(bench: Bench) -> list[Step]:
        rng = np.random.default_rng(tokens)
        tile = min(wanted, choose(bench.profile, fmt, cols, wanted, True)[2])
        routing = _routing(bench, tokens, experts, per_token, tile)
        state = Batch(((0, used),), tokens).state_buffer(bench)
        if tile == 1:
            logits = rng.standard_normal((tokens, experts)).astype(np.float32)
            logits[:, experts - 1] = -9.0
            steps = route(bench.profile, Ref(bench.filled("logits", logits)), experts, routing, True, state)
        else:
            bench.write(routing.buffer, routing.chosen, _choices(used, experts - 1, per_token))
            steps = group(bench.profile, routing, state)
        words, parts = matrix_words(fmt, rows, cols) + 4, []
        for first, last in ((0, split), (split, experts)):
            buffer = bench.buffer(f"w{first}", 4 + (last - first) * words, BufferKind.WEIGHTS)
            parts.append(ExpertPart(buffer, 4, first, last - first, words))
            for i in range(min(last, experts - 1) - first):
                bench.write(buffer, 4 + i * words, random_words(fmt, rows, cols, rng))
        x = np.full((tokens, cols + 4), np.nan, np.float32)
        x[:used, :cols] = rng.standard_normal((used, cols))
        width = rows // 2 if epilogue == "swiglu" else rows
        y = bench.buffer("y", 1 + tokens * per_token * (width + 2))
        return steps + expert_linear(
            bench.profile, fmt, parts, rows, cols, routing, Ref(bench.filled("x", x)), cols + 4, True,
            Ref(y, 1), width + 2, epilogue,
        )  # fmt: skip

    return build


def _cases() -> list[Case]:
    cases: list[Case] = []
    for experts, per_token, used, tokens, normalized, tile in (
        (8, 2, 5, 8, True, 1), (128, 8, 31, 32, False, 8), (3, 3, 1, 1, True, 1), (300, 4, 2, 2, True, 1),
    ):  # fmt: skip
        name = f"{per_token} of {experts} experts, {used} of {tokens} tokens"
        build = _route(experts, per_token, used, tokens, normalized, tile)
        cases += kernel_cases("route_experts", name, build, ROUTE, classes=OWN_AND_GPU, quick=experts > 3)
    for experts, per_token, used, tokens, tile in (
        (8, 2, 5, 8, 4), (128, 8, 300, 512, 64), (7, 3, 33, 64, 8), (5, 1, 3, 4, 2),
    ):  # fmt: skip
        name = f"{per_token} of {experts} experts, {used} of {tokens} tokens"
        build = _group(experts, per_token, used, tokens, tile)
        cases += kernel_cases(
            "group_experts", name, build, EXACT, views={"routing": "u32"}, classes=OWN_AND_GPU
        )
    for per_token, dim, used, tokens in ((2, 67, 5, 8), (8, 257, 3, 4)):
        name = f"{per_token} experts, {dim} dims, {used} of {tokens} rows"
        cases += kernel_cases("combine_experts", name, _combine(per_token, dim, used, tokens), COMBINE)
    for fmt, used, tokens, tile, epilogue in (
        ("f16", 1, 1, 1, "swiglu"), ("q4_0", 5, 8, 4, "store"), ("q4_k", 1, 1, 1, "store"),
        ("q4_k", 33, 64, 16, "swiglu"), ("q8_0", 33, 64, 8, "store"),
    ):  # fmt: skip
        variant = f"{fmt}, {used} of {tokens} tokens, {tile} pairs a tile, {epilogue}"
        build = _experts(fmt, used, tokens, tile, epilogue)
        cases += kernel_cases("experts", variant, build, PRODUCT, classes=OWN_AND_GPU)
    return cases


CASES = _cases()

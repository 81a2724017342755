"""Matrix products with the experts of a mixture: ``y[pair] = W[expert of pair] x[pair or its token]``.

The shaders of :mod:`xinfer_vk.kernels.matmul`, with the specialization constant that makes a workgroup
take its rows, and its expert, from the lists of :mod:`xinfer_vk.kernels.routing`. So the weights of an
expert that nobody chose are not read, and those of a chosen one once for each tile of its pairs. The
group counts are those of the most tiles there can be; workgroups beyond the tiles in use return at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from xinfer_vk.kernels.base import Ref, ceil_div
from xinfer_vk.kernels.halves import read_halves
from xinfer_vk.kernels.layout import matrix_words, row_words
from xinfer_vk.kernels.matmul import (
    EPILOGUES,
    SPLIT_FAMILIES,
    Choice,
    apply_epilogue,
    choose,
    choose_halves,
    named,
    tuned_variant,
)
from xinfer_vk.kernels.routing import Routing, read_tiles
from xinfer_vk.kernels.split_norm import NOT_SPLIT
from xinfer_vk.kernels.unpack import unpack
from xinfer_vk.plan import Buffer, DeviceProfile, Kernel, OracleCall, Step, make_step


@dataclass(frozen=True)
class ExpertPart:
    """Experts ``first .. first + count`` of a layer's matrix: each has its ``rows`` in the x8 layout at
    ``offset + i * words`` of ``buffer``. Experts over the device's storage-buffer range are several of
    these; none lies in two buffers."""

    buffer: Buffer
    offset: int
    first: int
    count: int
    words: int


def pairs_per_tile(
    profile: DeviceProfile, products: Sequence[tuple[str, int]], tokens: int, experts: int, per_token: int
) -> int:
    """How many pairs a tile should hold: the mean of an expert, which wastes less on tiles that are not full
    than larger ones, and reads less weights than smaller ones; and at most what the kernels of the
    ``products`` (format, columns) take. 1 for few tokens, most of whose experts differ."""
    pairs = tokens * per_token
    wanted = 1 if tokens == 1 or 2 * pairs <= experts else max(2, ceil_div(pairs, experts))
    return min(choose(profile, fmt, cols, wanted, True)[2] for fmt, cols in products)


def expert_linear(
    profile: DeviceProfile,
    fmt: str,
    parts: Sequence[ExpertPart],
    rows: int,
    cols: int,
    routing: Routing,
    x: Ref,
    x_stride: int,
    x_of_tokens: bool,
    y: Ref,
    y_stride: int,
    epilogue: str,
    label: str = "experts",
    halves: Ref | None = None,
) -> list[Step]:
    """Steps that compute ``y[pair] = W_e x[row]``, ``e`` being the expert that the pair chose, for all
    pairs in use of ``routing``; ``W_e``: [rows, cols]. The row is the pair's token with ``x_of_tokens``,
    else the pair. ``epilogue`` as in :func:`xinfer_vk.kernels.matmul.linear`, and so ``halves``, with room
    for the tokens or for the pairs of ``routing``. One step a part; none waits for another.

    Raises ``ValueError`` for an epilogue or format that does not exist, and for experts that do not begin
    at a multiple of 4 words.
    """
    if epilogue not in EPILOGUES:
        raise ValueError(f"epilogue {epilogue!r} does not exist (there are: {', '.join(EPILOGUES)})")
    row_words(fmt, cols)  # refuses an unknown format, or cols that its blocks do not divide
    aligned = x.offset % 4 == 0 and x_stride % 4 == 0

    def kernel_of(name: str) -> Choice:
        if halves is not None:
            return choose_halves(profile, fmt, routing.tile, name)
        return named(profile, fmt, cols, routing.tile, aligned, name)

    plain, tile_rows, tile_pairs = kernel_of(tuned_variant(profile, fmt, rows, cols, routing.tile))
    if tile_pairs < routing.tile:  # a tile of pairs is one workgroup's
        plain, tile_rows, tile_pairs = kernel_of("default")
    if halves is not None:
        x, x_stride = halves, routing.tokens if x_of_tokens else routing.pairs
    assert tile_pairs >= routing.tile, f"{plain.name} takes {tile_pairs} of {routing.tile} pairs"
    kernel = _with_experts(plain, fmt, routing.experts)
    steps: list[Step] = []
    for part in parts:
        if part.offset % 4 or part.words % 4:
            raise ValueError(
                f"{label}: experts begin at word {part.offset} and every {part.words}: must be multiples of 4"
            )
        params: dict[str, int | float] = {
            "w_offset": part.offset, "rows": rows, "cols": cols, "first_row": 0, "x_offset": x.offset,
            "x_stride": x_stride, "y_offset": y.offset, "y_stride": y_stride, "bias_offset": 0, "has_bias": 0,
            "epilogue": EPILOGUES.index(epilogue), "count_at": routing.tiles, "expert_words": part.words,
            "first_expert": part.first, "experts": part.count, "per_token": routing.per_token,
            "x_of_tokens": int(x_of_tokens), **NOT_SPLIT,
        }  # fmt: skip
        lists = routing.buffer
        buffers = {"w": part.buffer, "x": x.buffer, "y": y.buffer, "state": lists, "bias": lists}
        groups = (ceil_div(rows, tile_rows), routing.max_tiles)
        steps.append(make_step(kernel, buffers, params, groups, label, independent=bool(steps)))
    return steps


@cache
def _with_experts(plain: Kernel, fmt: str, count: int) -> Kernel:
    spec = tuple((name, count if name == "experts" else value) for name, value in plain.spec)
    return replace(
        plain,
        name=f"{plain.name}.experts",
        spec=spec,
        oracle=_oracle(fmt, plain.name.split(".")[0] in SPLIT_FAMILIES),
    )


def _oracle(fmt: str, halves: bool) -> Callable[[OracleCall], None]:
    def oracle(call: OracleCall) -> None:
        p, routing, y = call.p, call.u32("state"), call.f32("y")
        swiglu = EPILOGUES[p.epilogue] == "swiglu"
        for expert, first, end in read_tiles(routing, p.count_at):
            if not p.first_expert <= expert < p.first_expert + p.experts:
                continue
            start = p.w_offset + (expert - p.first_expert) * p.expert_words
            words = matrix_words(fmt, p.rows, p.cols)

            def dense(start: int = start, words: int = words) -> np.ndarray:
                return unpack(fmt, call.u32("w")[start : start + words], p.rows, p.cols)

            weights = call.cached(("w", fmt, start, p.rows, p.cols), dense)  # [rows, cols]
            pairs = routing[first:end].astype(np.int64)[:, None]
            x_row = pairs // p.per_token if p.x_of_tokens else pairs
            if halves:
                used = int(x_row.max()) + 1
                x = read_halves(call.u32("x"), p.x_offset, p.x_stride, used, p.cols)[x_row[:, 0]]
            else:
                x = call.f32("x")[p.x_offset + x_row * p.x_stride + np.arange(p.cols)]
            y_at = p.y_offset + pairs * p.y_stride + np.arange(p.rows // 2 if swiglu else p.rows)
            y[y_at] = apply_epilogue(p.epilogue, x @ weights.T, y[y_at])

    return oracle

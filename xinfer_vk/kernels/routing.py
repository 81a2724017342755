"""Mixture of experts: which experts a token's row goes to, and the sum of what they give.

The steps around the products of :mod:`xinfer_vk.kernels.experts`, in the order of a layer:

- :func:`route` (shaders/route_experts.comp): for every token the ``per_token`` experts with the largest
  router logits, ties to the lower number, and their weights: softmax over all logits, divided by the sum
  of the chosen ones if ``normalized`` (``norm_topk_prob`` of Qwen3-MoE; Mixtral's softmax over the chosen
  logits is the same number);
- :func:`group` (shaders/group_experts.comp): the (token, slot) pairs listed by expert and cut into tiles;
- :func:`combine` (shaders/combine_experts.comp): the weighted sum over a token's slots.

What is chosen changes from run to run and never leaves the device: it is in the routing buffer, whose
places a plan's shape decides (:class:`Routing`), and so are the products' group counts: as many as there
can be tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xinfer_vk.kernels import state as st
from xinfer_vk.kernels.base import Ref, ceil_div
from xinfer_vk.plan import Buffer, DeviceProfile, Kernel, OracleCall, Step, make_step

COMBINE_LANES = 64
GROUP_ITEMS = 256  # pairs of (expert, chunk) that are counted side by side on a GPU
MAX_EXPERTS = 1024  # what the kernels' shared memory holds with room to spare


@dataclass(frozen=True)
class Routing:
    """What the router decides for a plan of ``tokens`` rows, in ``buffer`` from word ``offset`` on.

    A pair ``token * per_token + slot`` is a row of every intermediate result of the experts. ``tile``:
    the most pairs that a product takes at once. In words of the buffer: ``weights`` f32 and ``chosen``,
    one a pair; ``pairs_list``, the pairs tile by tile; ``tiles``: their number, then of each its expert
    and where its pairs begin and end (include/rows.glsl); ``pairs_in_use``: their number.
    """

    buffer: Buffer
    offset: int
    tokens: int
    experts: int
    per_token: int
    tile: int

    @property
    def pairs(self) -> int:
        return self.tokens * self.per_token

    @property
    def max_tiles(self) -> int:
        """Tiles there can be: each of the experts that are chosen may have one that is not full."""
        unfilled = min(self.experts, self.pairs) * (self.tile - 1)
        return (self.pairs + unfilled) // self.tile

    @property
    def weights(self) -> int:
        return self.offset

    @property
    def chosen(self) -> int:
        return self.offset + self.pairs

    @property
    def pairs_list(self) -> int:
        return self.offset + 2 * self.pairs

    @property
    def tiles(self) -> int:
        return self.offset + 3 * self.pairs

    @property
    def pairs_in_use(self) -> int:
        return self.offset + 6 * self.pairs + 1


def routing_words(tokens: int, per_token: int) -> int:
    """Words of a :class:`Routing`, whatever its tiles are."""
    return 6 * tokens * per_token + 2


def route(
    profile: DeviceProfile,
    logits: Ref,
    logits_stride: int,
    routing: Routing,
    normalized: bool,
    state: Buffer,
) -> list[Step]:
    """Choose experts and weights for the rows in use, from ``logits`` [tokens][experts] f32. A row with NaN
    gets experts like any other, and NaN weights. Complete where a tile is one pair; else :func:`group`
    must follow.

    Raises ``ValueError`` unless ``1 <= per_token <= experts <= MAX_EXPERTS``.
    """
    r = routing
    if not 1 <= r.per_token <= r.experts <= MAX_EXPERTS:
        raise ValueError(f"{r.per_token} of {r.experts} experts: at most all of at most {MAX_EXPERTS} exist")
    lanes = 8 if profile.simd else 64 if r.experts <= 64 else 128
    kernel = Kernel(
        name="route_experts",
        shader="route_experts",
        bindings=("logits", "state", "routing"),
        params=(
            "logits_offset:u", "logits_stride:u", "weights_at:u", "chosen_at:u", "list_at:u", "tiles_at:u",
            "pairs_at:u",
        ),
        spec=(
            ("local_size", lanes), ("experts", r.experts), ("per_token", r.per_token),
            ("normalized", int(normalized)), ("pair_tiles", int(r.tile == 1)),
        ),
        oracle=_route_oracle,
    )  # fmt: skip
    params = {
        "logits_offset": logits.offset, "logits_stride": logits_stride, "weights_at": r.weights,
        "chosen_at": r.chosen, "list_at": r.pairs_list, "tiles_at": r.tiles, "pairs_at": r.pairs_in_use,
    }  # fmt: skip
    buffers = {"logits": logits.buffer, "state": state, "routing": r.buffer}
    return [make_step(kernel, buffers, params, (r.tokens,), "route")]


def group(profile: DeviceProfile, routing: Routing, state: Buffer) -> list[Step]:
    """List the pairs by expert, if a tile is more than one pair (else :func:`route` has done it)."""
    r = routing
    if r.tile == 1:
        return []
    lanes = 8 if profile.simd else GROUP_ITEMS
    chunks = 1 if profile.simd else max(1, GROUP_ITEMS // r.experts)
    kernel = Kernel(
        name="group_experts",
        shader="group_experts",
        bindings=("state", "routing"),
        params=("chosen_at:u", "list_at:u", "tiles_at:u"),
        spec=(
            ("local_size", lanes), ("experts", r.experts), ("per_token", r.per_token), ("chunks", chunks),
            ("tile", r.tile),
        ),
        oracle=_group_oracle,
    )  # fmt: skip
    params = {"chosen_at": r.chosen, "list_at": r.pairs_list, "tiles_at": r.tiles}
    return [make_step(kernel, {"state": state, "routing": r.buffer}, params, (1,), "group")]


def combine(
    profile: DeviceProfile,
    routing: Routing,
    x: Ref,
    x_stride: int,
    y: Ref,
    y_stride: int,
    dim: int,
    state: Buffer,
) -> list[Step]:
    """``y[t] += sum_s weight[t, s] x[t * per_token + s]`` for the rows in use; x: [pairs][dim] f32."""
    r = routing
    params = {
        "x_offset": x.offset, "x_stride": x_stride, "weights_at": r.weights, "per_token": r.per_token,
        "y_offset": y.offset, "y_stride": y_stride, "dim": dim,
    }  # fmt: skip
    buffers = {"x": x.buffer, "routing": r.buffer, "state": state, "y": y.buffer}
    return [make_step(COMBINE, buffers, params, (ceil_div(dim, COMBINE_LANES), r.tokens), "combine")]


# -- oracles -------------------------------------------------------------------------------------------


def _route_oracle(call: OracleCall) -> None:
    p, spec = call.p, call.spec
    tokens, routing = int(call.u32("state")[st.N_TOKENS]), call.u32("routing")
    at = p.logits_offset + np.arange(tokens)[:, None] * p.logits_stride + np.arange(spec.experts)
    logits = call.f32("logits")[at].astype(np.float64)
    # NaN last; a stable sort leaves the lower of equal ones in front
    order = np.argsort(-logits, axis=1, kind="stable")
    chosen = order[:, : spec.per_token]
    shares = np.exp(logits - np.take_along_axis(logits, chosen[:, :1], 1))
    shares /= shares.sum(axis=1, keepdims=True)
    weights = np.take_along_axis(shares, chosen, 1)
    if spec.normalized:
        weights /= weights.sum(axis=1, keepdims=True)
    pairs = np.arange(chosen.size)
    call.f32("routing")[p.weights_at + pairs] = weights.reshape(-1)
    routing[p.chosen_at + pairs] = chosen.reshape(-1)
    routing[p.pairs_at] = chosen.size
    if spec.pair_tiles:
        routing[p.list_at + pairs] = pairs
        write_tiles(routing, p.tiles_at, chosen.reshape(-1), p.list_at + pairs, p.list_at + pairs + 1)


def _group_oracle(call: OracleCall) -> None:
    p, spec, routing = call.p, call.spec, call.u32("routing")
    pairs = int(call.u32("state")[st.N_TOKENS]) * spec.per_token
    chosen = routing[p.chosen_at : p.chosen_at + pairs]
    routing[p.list_at : p.list_at + pairs] = np.argsort(chosen, kind="stable")
    ends = np.cumsum(np.bincount(chosen, minlength=spec.experts))
    tiles = [
        (expert, first, min(first + spec.tile, end))
        for expert, (start, end) in enumerate(zip([0, *ends], ends))
        for first in range(start, end, spec.tile)
    ]
    expert, first, end = np.array(tiles, np.uint32).reshape(-1, 3).T
    write_tiles(routing, p.tiles_at, expert, p.list_at + first, p.list_at + end)


def write_tiles(routing: np.ndarray, at: int, expert: np.ndarray, first: np.ndarray, end: np.ndarray) -> None:
    routing[at] = expert.size
    routing[at + 1 : at + 1 + 3 * expert.size] = np.stack((expert, first, end), axis=1).reshape(-1)


def read_tiles(routing: np.ndarray, at: int) -> np.ndarray:
    """int64 ``[tiles, 3]``: expert, first word, word after the last."""
    return routing[at + 1 : at + 1 + 3 * int(routing[at])].reshape(-1, 3).astype(np.int64)


def _combine_oracle(call: OracleCall) -> None:
    p = call.p
    tokens, columns = int(call.u32("state")[st.N_TOKENS]), np.arange(p.dim)
    pairs = np.arange(tokens * p.per_token)
    x = call.f32("x")[p.x_offset + pairs[:, None] * p.x_stride + columns].astype(np.float64)
    x *= call.f32("routing")[p.weights_at + pairs, None]
    y, at = call.f32("y"), p.y_offset + np.arange(tokens)[:, None] * p.y_stride + columns
    y[at] += x.reshape(tokens, p.per_token, p.dim).sum(axis=1)


COMBINE = Kernel(
    name="combine_experts",
    shader="combine_experts",
    bindings=("x", "routing", "state", "y"),
    params=(
        "x_offset:u", "x_stride:u", "weights_at:u", "per_token:u", "y_offset:u", "y_stride:u", "dim:u",
    ),
    spec=(("local_size", COMBINE_LANES),),
    oracle=_combine_oracle,
)  # fmt: skip

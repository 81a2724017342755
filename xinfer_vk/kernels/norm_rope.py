"""RMSNorm of every head and rotary position embedding in one, in place (shaders/norm_rope.comp)."""

from __future__ import annotations

import numpy as np

from xinfer_vk.errors import UsageError
from xinfer_vk.kernels import state as st
from xinfer_vk.kernels.base import Ref
from xinfer_vk.kernels.rmsnorm import normalized
from xinfer_vk.plan import Buffer, DeviceProfile, Kernel, OracleCall, Step, make_step


def _oracle(call: OracleCall) -> None:
    p, state, x = call.p, call.u32("state"), call.f32("x")
    heads, tokens = call.groups[0], int(state[st.N_TOKENS])
    at = p.x_offset + np.arange(tokens)[:, None, None] * p.x_stride
    at = at + np.arange(heads)[:, None] * p.head_dim + np.arange(p.head_dim)  # [tokens, heads, head_dim]
    first = (np.arange(heads) < p.first)[:, None]
    weights = np.where(first, p.weight_offset, p.rest_weight_offset) + np.arange(p.head_dim)
    v = normalized(x[at], p.eps) * call.f32("weight")[weights]
    positions = state[st.POSITION : st.POSITION + tokens].astype(np.int64)
    rows = np.arange(tokens) if p.by_token else positions
    angle = p.table_offset + (rows[:, None] * p.pairs + np.arange(p.pairs)) * 2
    cos = call.f32("table")[angle][:, None].astype(np.float64)
    sin = call.f32("table")[angle + 1][:, None].astype(np.float64)
    a, b = v[..., : p.pairs].copy(), v[..., p.pairs : 2 * p.pairs].copy()
    v[..., : p.pairs], v[..., p.pairs : 2 * p.pairs] = a * cos - b * sin, b * cos + a * sin
    x[at] = v


def kernel(local_size: int) -> Kernel:
    return Kernel(
        name="norm_rope",
        shader="norm_rope",
        bindings=("x", "weight", "table", "state"),
        params=(
            "x_offset:u", "x_stride:u", "head_dim:u", "pairs:u", "first:u", "weight_offset:u",
            "rest_weight_offset:u", "table_offset:u", "by_token:u", "eps:f",
        ),
        spec=(("local_size", local_size),),
        oracle=_oracle,
    )  # fmt: skip


def norm_rope(
    P: DeviceProfile,
    x: Ref,
    x_stride: int,
    heads: tuple[int, int],
    weights: tuple[Ref, Ref],
    head_dim: int,
    rotary_dim: int,
    eps: float,
    table: Ref,
    tokens: int,
    state: Buffer,
    by_token: bool = False,
) -> list[Step]:
    """Normalize query and key heads, ``heads`` of each side by side in each row of ``x``, by their
    ``weights`` [head_dim], and turn them by the angles of the row's position (see :func:`~.rope.rope`).

    Raises :class:`UsageError` for a rotary dim that is odd or too large, ``ValueError`` for weights in
    two buffers.
    """
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise UsageError(f"rotary dim {rotary_dim} is not supported: it must be even and at most {head_dim}")
    if weights[0].buffer is not weights[1].buffer:
        raise ValueError("norm_rope: both weights must lie in one buffer")
    return [
        make_step(
            kernel(8 if P.simd else 64 if head_dim >= 128 else 32),
            {"x": x.buffer, "weight": weights[0].buffer, "table": table.buffer, "state": state},
            {
                "x_offset": x.offset, "x_stride": x_stride, "head_dim": head_dim, "pairs": rotary_dim // 2,
                "first": heads[0], "weight_offset": weights[0].offset,
                "rest_weight_offset": weights[1].offset, "table_offset": table.offset,
                "by_token": int(by_token), "eps": eps,
            },
            (sum(heads), tokens),
        )
    ]  # fmt: skip

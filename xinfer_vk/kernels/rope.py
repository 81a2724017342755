"""Rotary position embedding in the rotate-half order, in place (shaders/rope.comp)."""

from __future__ import annotations

import numpy as np

from xinfer_vk.errors import UsageError
from xinfer_vk.kernels import state as st
from xinfer_vk.kernels.base import Ref, ceil_div
from xinfer_vk.plan import Buffer, DeviceProfile, Kernel, OracleCall, Step, make_step

LOCAL_SIZE = 64


def rope_table(inv_freq: np.ndarray, positions: np.ndarray, factor: float = 1.0) -> np.ndarray:
    """The table the kernel reads, float32 [len(positions), len(inv_freq), 2]: cos and sin of
    ``position * inv_freq``, times ``factor``, computed in float64 here because a device's sin may be off by
    2⁻¹¹ (Vulkan spec, precision of core operations)."""
    angles = positions.astype(np.float64)[:, None] * inv_freq.astype(np.float64)
    return (np.stack([np.cos(angles), np.sin(angles)], axis=-1) * factor).astype(np.float32)


def _oracle(call: OracleCall) -> None:
    p, state, x = call.p, call.u32("state"), call.f32("x")
    tokens = int(state[st.N_TOKENS])
    positions = state[st.POSITION : st.POSITION + tokens].astype(np.int64)
    pairs = np.arange(p.pairs)
    table_rows = np.arange(tokens) if p.by_token else positions
    angle = p.table_offset + (table_rows[:, None] * p.pairs + pairs) * 2
    cos = call.f32("table")[angle][:, None].astype(np.float64)
    sin = call.f32("table")[angle + 1][:, None].astype(np.float64)
    rows, heads = np.arange(tokens)[:, None, None], np.arange(p.heads)[:, None]
    low = p.x_offset + rows * p.x_stride + heads * p.head_dim + pairs  # [tokens, heads, pairs]
    a, b = x[low], x[low + p.pairs]
    x[low], x[low + p.pairs] = a * cos - b * sin, b * cos + a * sin


KERNEL = Kernel(
    name="rope",
    shader="rope",
    bindings=("x", "table", "state"),
    params=(
        "x_offset:u", "x_stride:u", "heads:u", "head_dim:u", "pairs:u", "table_offset:u", "heads_each:u",
        "by_token:u",
    ),
    spec=(("local_size", LOCAL_SIZE),),
    oracle=_oracle,
)  # fmt: skip


def rope(
    P: DeviceProfile,
    x: Ref,
    x_stride: int,
    heads: int,
    head_dim: int,
    rotary_dim: int,
    table: Ref,
    tokens: int,
    state: Buffer,
    by_token: bool = False,
) -> list[Step]:
    """Turn ``heads`` neighbouring vectors of each row of ``x`` by the angles of the row's position.

    ``table`` is what :func:`rope_table` makes, for every position that can occur or, with ``by_token``,
    for the rows of ``x``. Dims from ``rotary_dim`` on are left alone.
    Raises :class:`UsageError` for a rotary dim that is odd or too large.
    """
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise UsageError(f"rotary dim {rotary_dim} is not supported: it must be even and at most {head_dim}")
    heads_each = heads if P.simd else 1
    pairs = rotary_dim // 2
    return [
        make_step(
            KERNEL,
            {"x": x.buffer, "table": table.buffer, "state": state},
            {
                "x_offset": x.offset, "x_stride": x_stride, "heads": heads, "head_dim": head_dim,
                "pairs": pairs, "table_offset": table.offset, "heads_each": heads_each,
                "by_token": int(by_token),
            },
            (ceil_div(pairs * ceil_div(heads, heads_each), LOCAL_SIZE), tokens),
        )
    ]  # fmt: skip

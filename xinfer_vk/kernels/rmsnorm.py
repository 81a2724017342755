"""RMSNorm: ``y = x / sqrt(mean(x²) + eps) * weight``, a workgroup a vector (shaders/rmsnorm.comp)."""

from __future__ import annotations

import numpy as np

from xinfer_vk.kernels import state as st
from xinfer_vk.kernels.base import Ref
from xinfer_vk.plan import Buffer, DeviceProfile, Kernel, OracleCall, Step, make_step


def _oracle(call: OracleCall) -> None:
    p, state = call.p, call.u32("state")
    vectors = call.groups[1]
    if call.spec.gather:
        count = int(state[st.N_OUTPUTS])
        rows = state[st.OUTPUT_ROW : st.OUTPUT_ROW + count].astype(np.int64)
    else:
        count = int(state[st.N_TOKENS])
        rows = np.arange(count)
    columns = np.arange(vectors * p.dim).reshape(vectors, p.dim)
    x = call.f32("x")[p.x_offset + rows[:, None, None] * p.x_stride + columns].astype(np.float64)
    offsets = np.where(np.arange(vectors) < p.first, p.weight_offset, p.rest_weight_offset)
    weight = call.f32("weight")[offsets[:, None] + np.arange(p.dim)]  # [vectors, dim]
    value = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + p.eps) * weight
    y, target = call.f32("y"), p.y_offset + np.arange(count)[:, None, None] * p.y_stride + columns
    y[target] = y[target] + value if call.spec.add else value


def kernel(local_size: int, gather: bool, add: bool) -> Kernel:
    return Kernel(
        name="rmsnorm" + ".gather" * gather + ".add" * add,
        shader="rmsnorm",
        bindings=("x", "weight", "state", "y"),
        params=(
            "x_offset:u", "x_stride:u", "weight_offset:u", "rest_weight_offset:u", "first:u", "y_offset:u",
            "y_stride:u", "dim:u", "eps:f",
        ),
        spec=(("local_size", local_size), ("gather", int(gather)), ("add", int(add))),
        oracle=_oracle,
    )  # fmt: skip


def rmsnorm(
    P: DeviceProfile,
    x: Ref,
    x_stride: int,
    weight: Ref,
    y: Ref,
    y_stride: int,
    dim: int,
    eps: float,
    tokens: int,
    state: Buffer,
    gather: bool = False,
    add: bool = False,
    vectors: int = 1,
    rest: tuple[Ref, int] | None = None,
) -> list[Step]:
    """``y[i] = x[i] / sqrt(mean(x[i]²) + eps) * weight`` for the rows in use of ``tokens``; with
    ``gather``, ``y[i]`` is made of ``x[output_row[i]]`` for the outputs in use of ``tokens``; with
    ``add``, it is added to ``y[i]``.

    A row is ``vectors`` vectors of ``dim`` side by side, each normalized by itself; ``rest`` = (weight,
    count) of more vectors behind them, whose weight is another one in the same buffer. ``y`` may be ``x``.
    """
    local_size = 8 if P.simd else 256 if dim >= 1024 else 64
    rest_weight, rest_count = rest or (weight, 0)
    if rest_weight.buffer is not weight.buffer:
        raise ValueError("rmsnorm: both weights must lie in one buffer")
    return [
        make_step(
            kernel(local_size, gather, add),
            {"x": x.buffer, "weight": weight.buffer, "state": state, "y": y.buffer},
            {
                "x_offset": x.offset, "x_stride": x_stride, "weight_offset": weight.offset,
                "rest_weight_offset": rest_weight.offset, "first": vectors, "y_offset": y.offset,
                "y_stride": y_stride, "dim": dim, "eps": eps,
            },
            (tokens, vectors + rest_count),
        )
    ]  # fmt: skip

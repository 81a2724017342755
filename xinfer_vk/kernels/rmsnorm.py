"""RMSNorm: ``y = x / sqrt(mean(x²) + eps) * weight``, a workgroup a row (shaders/rmsnorm.comp)."""

from __future__ import annotations

import numpy as np

from xinfer_vk.kernels import state as st
from xinfer_vk.kernels.base import Ref
from xinfer_vk.plan import Buffer, DeviceProfile, Kernel, OracleCall, Step, make_step


def _oracle(call: OracleCall) -> None:
    p, state = call.p, call.u32("state")
    if call.spec.gather:
        count = int(state[st.N_OUTPUTS])
        rows = state[st.OUTPUT_ROW : st.OUTPUT_ROW + count].astype(np.int64)
    else:
        count = int(state[st.N_TOKENS])
        rows = np.arange(count)
    columns = np.arange(p.dim)
    x = call.f32("x")[p.x_offset + rows[:, None] * p.x_stride + columns].astype(np.float64)
    weight = call.f32("weight")[p.weight_offset + columns]
    norm = np.sqrt((x * x).mean(axis=1, keepdims=True) + p.eps)
    call.f32("y")[p.y_offset + np.arange(count)[:, None] * p.y_stride + columns] = x / norm * weight


def kernel(local_size: int, gather: bool) -> Kernel:
    return Kernel(
        name="rmsnorm.gather" if gather else "rmsnorm",
        shader="rmsnorm",
        bindings=("x", "weight", "state", "y"),
        params=("x_offset:u", "x_stride:u", "weight_offset:u", "y_offset:u", "y_stride:u", "dim:u", "eps:f"),
        spec=(("local_size", local_size), ("gather", int(gather))),
        oracle=_oracle,
    )


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
) -> list[Step]:
    """``y[i] = x[i] / sqrt(mean(x[i]²) + eps) * weight`` for the rows in use of ``tokens``; with
    ``gather``, ``y[i]`` is made of ``x[output_row[i]]`` for the outputs in use of ``tokens``."""
    local_size = 8 if P.simd else 256 if dim >= 1024 else 64
    return [
        make_step(
            kernel(local_size, gather),
            {"x": x.buffer, "weight": weight.buffer, "state": state, "y": y.buffer},
            {
                "x_offset": x.offset, "x_stride": x_stride, "weight_offset": weight.offset,
                "y_offset": y.offset, "y_stride": y_stride, "dim": dim, "eps": eps,
            },
            (tokens,),
        )
    ]  # fmt: skip

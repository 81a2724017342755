"""RMSNorm: ``y = x / sqrt(mean(x²) + eps) * weight``, a workgroup a row (shaders/rmsnorm.comp)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xinfer_vk.kernels import state as st
from xinfer_vk.kernels.base import Ref
from xinfer_vk.plan import Buffer, DeviceProfile, Kernel, OracleCall, Step, make_step


@dataclass(frozen=True)
class Then:
    """A second norm, of the result of the first: ``z = y / sqrt(mean(y²) + eps) * weight``. ``weight`` and
    ``z`` lie in the buffers of the first norm's weight and ``y``."""

    weight: Ref
    z: Ref
    z_stride: int
    eps: float


def normalized(x: np.ndarray, eps: float) -> np.ndarray:
    """``x / sqrt(mean(x²) + eps)`` over the last axis, in float64."""
    x = x.astype(np.float64)
    out: np.ndarray = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    return out


def _oracle(call: OracleCall) -> None:
    p, state = call.p, call.u32("state")
    if call.spec.gather:
        count = int(state[st.N_OUTPUTS])
        rows = state[st.OUTPUT_ROW : st.OUTPUT_ROW + count].astype(np.int64)
    else:
        count = int(state[st.N_TOKENS])
        rows = np.arange(count)
    columns, weight, y = np.arange(p.dim), call.f32("weight"), call.f32("y")
    value = normalized(call.f32("x")[p.x_offset + rows[:, None] * p.x_stride + columns], p.eps)
    value *= weight[p.weight_offset + columns]
    target = p.y_offset + np.arange(count)[:, None] * p.y_stride + columns
    y[target] = y[target] + value if call.spec.add else value
    if call.spec.then:
        z = p.z_offset + np.arange(count)[:, None] * p.z_stride + columns
        y[z] = normalized(y[target], p.z_eps) * weight[p.z_weight_offset + columns]


def kernel(local_size: int, gather: bool, add: bool, then: bool, aligned: bool) -> Kernel:
    return Kernel(
        name="rmsnorm" + ".gather" * gather + ".add" * add + ".then" * then,
        shader="rmsnorm",
        bindings=("x", "weight", "state", "y"),
        params=(
            "x_offset:u", "x_stride:u", "weight_offset:u", "y_offset:u", "y_stride:u", "dim:u", "eps:f",
            "z_offset:u", "z_stride:u", "z_weight_offset:u", "z_eps:f",
        ),
        spec=(
            ("local_size", local_size), ("gather", int(gather)), ("add", int(add)), ("then", int(then)),
            ("aligned", int(aligned)),
        ),
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
    then: Then | None = None,
) -> list[Step]:
    """``y[i] = x[i] / sqrt(mean(x[i]²) + eps) * weight`` for the rows in use of ``tokens``; with
    ``gather``, ``y[i]`` is made of ``x[output_row[i]]`` for the outputs in use of ``tokens``; with
    ``add``, it is added to ``y[i]``; ``then``: what ``y[i]`` is now is normalized again. ``y`` or ``z`` may
    be ``x``. Raises ``ValueError`` for a second norm that lies elsewhere.
    """
    local_size = 8 if P.simd else 256 if dim >= 1024 else 64
    second = then or Then(weight, y, y_stride, eps)
    if second.weight.buffer is not weight.buffer or second.z.buffer is not y.buffer:
        raise ValueError("rmsnorm: a second norm must lie in the buffers of the first")
    places = (
        x.offset, x_stride, weight.offset, y.offset, y_stride, dim,
        second.weight.offset, second.z.offset, second.z_stride,
    )  # fmt: skip
    return [
        make_step(
            kernel(local_size, gather, add, then is not None, all(place % 4 == 0 for place in places)),
            {"x": x.buffer, "weight": weight.buffer, "state": state, "y": y.buffer},
            {
                "x_offset": x.offset, "x_stride": x_stride, "weight_offset": weight.offset,
                "y_offset": y.offset, "y_stride": y_stride, "dim": dim, "eps": eps,
                "z_offset": second.z.offset, "z_stride": second.z_stride,
                "z_weight_offset": second.weight.offset, "z_eps": second.eps,
            },
            (tokens,),
        )
    ]  # fmt: skip

"""SwiGLU and GeGLU, elementwise: ``y = act(gate) * up`` (shaders/swiglu.comp)."""

from __future__ import annotations

import numpy as np

from xinfer_vk.kernels import state as st
from xinfer_vk.kernels.base import Ref, ceil_div
from xinfer_vk.plan import Buffer, DeviceProfile, Kernel, OracleCall, Step, make_step

LOCAL_SIZE = 64


def silu(x: np.ndarray) -> np.ndarray:
    """``x / (1 + exp(-x))`` (Elfwing et al. 2017) in float64; 0 where exp(-x) would overflow f32, as
    shaders/include/silu.glsl has it."""
    x = x.astype(np.float64)
    return np.where(x < -88.0, 0.0, x / (1.0 + np.exp(-np.maximum(x, -88.0))))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """``x / 2 (1 + tanh u)``, ``u = sqrt(2 / pi) (x + 0.044715 x³)`` (Hendrycks & Gimpel 2016), in float64
    and without the tanh, as shaders/include/gelu.glsl has it."""
    x = x.astype(np.float64)
    twice_u = 2.0 * np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)
    return np.where(twice_u < -88.0, 0.0, x / (1.0 + np.exp(-np.maximum(twice_u, -88.0))))


# By the names of ModelConfig.hidden_act, in the order of the shader's push constant.
ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu_tanh}


def _oracle(call: OracleCall) -> None:
    p = call.p
    rows, columns = np.arange(int(call.u32("state")[st.N_TOKENS]))[:, None], np.arange(p.dim)
    gate = call.f32("gate")[p.gate_offset + rows * p.gate_stride + columns]
    up = call.f32("up")[p.up_offset + rows * p.up_stride + columns]
    act = list(ACTIVATIONS.values())[p.gelu]
    call.f32("y")[p.y_offset + rows * p.y_stride + columns] = act(gate) * up


KERNEL = Kernel(
    name="swiglu",
    shader="swiglu",
    bindings=("gate", "up", "state", "y"),
    params=(
        "gate_offset:u", "gate_stride:u", "up_offset:u", "up_stride:u", "y_offset:u", "y_stride:u", "dim:u",
        "gelu:u",
    ),
    spec=(("local_size", LOCAL_SIZE),),
    oracle=_oracle,
)  # fmt: skip


def swiglu(
    P: DeviceProfile,
    gate: Ref,
    up: Ref,
    y: Ref,
    gate_stride: int,
    up_stride: int,
    y_stride: int,
    dim: int,
    tokens: int,
    state: Buffer,
    activation: str = "silu",
) -> list[Step]:
    """``y[t] = act(gate[t]) * up[t]``, [tokens][dim], for the rows in use; ``activation``: "silu" or
    "gelu_tanh"."""
    return [
        make_step(
            KERNEL,
            {"gate": gate.buffer, "up": up.buffer, "state": state, "y": y.buffer},
            {
                "gate_offset": gate.offset, "gate_stride": gate_stride, "up_offset": up.offset,
                "up_stride": up_stride, "y_offset": y.offset, "y_stride": y_stride, "dim": dim,
                "gelu": list(ACTIVATIONS).index(activation),
            },
            (ceil_div(dim, LOCAL_SIZE), tokens),
        )
    ]  # fmt: skip

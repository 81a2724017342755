"""Soft cap of logits, in place: ``y = cap * tanh(y / cap)`` (shaders/softcap.comp)."""

from __future__ import annotations

import numpy as np

from xinfer_vk.kernels import state as st
from xinfer_vk.kernels.base import Ref, ceil_div
from xinfer_vk.plan import Buffer, DeviceProfile, Kernel, OracleCall, Step, make_step

LOCAL_SIZE = 64


def _oracle(call: OracleCall) -> None:
    p = call.p
    rows = np.arange(int(call.u32("state")[st.N_OUTPUTS]))[:, None]
    at = p.offset + rows * p.stride + np.arange(p.dim)
    y = call.f32("y")
    y[at] = p.cap * np.tanh(y[at].astype(np.float64) / p.cap)


KERNEL = Kernel(
    name="softcap",
    shader="softcap",
    bindings=("y", "state"),
    params=("offset:u", "stride:u", "dim:u", "cap:f"),
    spec=(("local_size", LOCAL_SIZE),),
    oracle=_oracle,
)


def softcap(
    P: DeviceProfile, y: Ref, stride: int, dim: int, cap: float, outputs: int, state: Buffer
) -> list[Step]:
    """``y[i] = cap * tanh(y[i] / cap)``, [outputs][dim], for the output rows in use."""
    return [
        make_step(
            KERNEL,
            {"y": y.buffer, "state": state},
            {"offset": y.offset, "stride": stride, "dim": dim, "cap": cap},
            (ceil_div(dim, LOCAL_SIZE), outputs),
        )
    ]

"""The columns of every token row in another order, for matrices whose columns are sorted by group."""

from __future__ import annotations

import numpy as np

from xinfer_vk.kernels.base import COUNTS, Ref, ceil_div
from xinfer_vk.plan import Buffer, DeviceProfile, Kernel, OracleCall, Step, make_step

LOCAL_SIZE = 64


def _oracle(call: OracleCall) -> None:
    p, rows, columns = call.p, np.arange(int(call.u32("state")[call.p.count_at])), np.arange(call.p.cols)
    order = call.u32("order")[p.order_offset : p.order_offset + p.cols].astype(np.int64)
    x = call.f32("x")[p.x_offset + rows[:, None] * p.x_stride + order]
    call.f32("y")[p.y_offset + rows[:, None] * p.y_stride + columns] = x


KERNEL = Kernel(
    name="order_columns",
    shader="order_columns",
    bindings=("x", "order", "state", "y"),
    params=(
        "x_offset:u", "x_stride:u", "order_offset:u", "y_offset:u", "y_stride:u", "cols:u", "count_at:u",
    ),
    spec=(("local_size", LOCAL_SIZE),),
    oracle=_oracle,
)  # fmt: skip


def order_columns(
    P: DeviceProfile,
    x: Ref,
    x_stride: int,
    order: Ref,
    y: Ref,
    y_stride: int,
    cols: int,
    tokens: int,
    state: Buffer,
    count: str,
) -> list[Step]:
    """``y[t, c] = x[t, order[c]]`` for the rows in use of ``tokens``, which the word ``count`` of the state
    says ("tokens" or "outputs"). ``x`` and ``y`` are f32 and may lie in one buffer but must not overlap;
    ``order`` is ``uint32 [cols]``."""
    return [
        make_step(
            KERNEL,
            {"x": x.buffer, "order": order.buffer, "state": state, "y": y.buffer},
            {
                "x_offset": x.offset, "x_stride": x_stride, "order_offset": order.offset,
                "y_offset": y.offset, "y_stride": y_stride, "cols": cols, "count_at": COUNTS[count],
            },
            (ceil_div(cols, LOCAL_SIZE), tokens),
        )
    ]  # fmt: skip

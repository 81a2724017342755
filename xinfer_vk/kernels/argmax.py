"""Argmax of rows of logits in two stages (shaders/argmax.comp, argmax_join.comp): four bytes a token
come back to the host instead of a vocabulary of logits."""

from __future__ import annotations

import numpy as np

from xinfer_vk.kernels import state as st
from xinfer_vk.kernels.base import Ref, ceil_div
from xinfer_vk.plan import Buffer, DeviceProfile, Kernel, OracleCall, Step, make_step

NAN_RESULT = 0xFFFFFFFF  # what a row with NaN anywhere gives


def order_keys(bits: np.ndarray) -> np.ndarray:
    """Order of f32 bit patterns as order of ``uint32``: -0 equals +0, NaN is above all."""
    bits = np.where(bits == 0x80000000, 0, bits).astype(np.uint32)
    keys = np.where(bits >> 31 != 0, ~bits, bits | np.uint32(0x80000000)).astype(np.uint32)
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, np.uint32(0xFFFFFFFF), keys)


def _oracle(call: OracleCall) -> None:
    p, spec = call.p, call.spec
    slices = call.groups[0] * spec.local_size
    rows = int(call.u32("state")[st.N_OUTPUTS])
    padded = np.zeros((rows, ceil_div(p.n, slices) * slices), np.uint32)
    at = p.x_offset + np.arange(rows)[:, None] * p.x_stride + np.arange(p.n)
    padded[:, : p.n] = order_keys(call.u32("x")[at])
    sliced = padded.reshape(rows, -1, slices)
    first = sliced.argmax(axis=1)  # the first of equals
    keys = np.take_along_axis(sliced, first[:, None], axis=1)[:, 0]
    index = np.where(keys == 0, NAN_RESULT, first * slices + np.arange(slices))
    pairs = np.stack([keys, index], axis=-1).reshape(-1)
    call.u32("partials")[p.partials_offset : p.partials_offset + pairs.size] = pairs


def _join_oracle(call: OracleCall) -> None:
    p = call.p
    rows = int(call.u32("state")[st.N_OUTPUTS])
    pairs = call.u32("partials")[p.partials_offset : p.partials_offset + rows * p.slices * 2]
    pairs = pairs.reshape(rows, p.slices, 2)
    for row in range(rows):
        keys, index = pairs[row, :, 0], pairs[row, :, 1]
        best = int(keys.max())
        result = NAN_RESULT if best == 0xFFFFFFFF else int(index[keys == best].min())
        call.u32("result")[p.result_offset + row] = result


def kernel(local_size: int) -> Kernel:
    return Kernel(
        name="argmax",
        shader="argmax",
        bindings=("x", "state", "partials"),
        params=("x_offset:u", "x_stride:u", "n:u", "partials_offset:u"),
        spec=(("local_size", local_size),),
        oracle=_oracle,
    )


def join_kernel(local_size: int) -> Kernel:
    return Kernel(
        name="argmax_join",
        shader="argmax_join",
        bindings=("partials", "state", "result"),
        params=("partials_offset:u", "slices:u", "result_offset:u"),
        spec=(("local_size", local_size),),
        oracle=_join_oracle,
    )


def _geometry(P: DeviceProfile, n: int) -> tuple[int, int]:
    """(workgroups, local size) of the first stage: a few long slices for the cores of a CPU, many for a
    GPU, and none of them empty."""
    local_size, most = (8, 8) if P.simd else (64, 64)
    return max(1, min(most, ceil_div(n, local_size * 4))), local_size


def argmax_partial_words(P: DeviceProfile, n: int, rows: int) -> int:
    """Words that argmax needs at ``partials``: [rows][slices][key, index]."""
    groups, local_size = _geometry(P, n)
    return rows * groups * local_size * 2


def argmax(
    P: DeviceProfile,
    x: Ref,
    x_stride: int,
    n: int,
    rows: int,
    result: Ref,
    partials: Ref,
    state: Buffer,
) -> list[Step]:
    """``result[i]`` = index of the largest of ``x[i][0 … n-1]`` for the outputs in use of ``rows``.

    The lowest index wins ties; a row with NaN gives 0xFFFFFFFF. ``partials`` has
    :func:`argmax_partial_words` words of room.
    """
    groups, local_size = _geometry(P, n)
    slices = groups * local_size
    return [
        make_step(
            kernel(local_size),
            {"x": x.buffer, "state": state, "partials": partials.buffer},
            {"x_offset": x.offset, "x_stride": x_stride, "n": n, "partials_offset": partials.offset},
            (groups, rows),
        ),
        make_step(
            join_kernel(8 if P.simd else 256),
            {"partials": partials.buffer, "state": state, "result": result.buffer},
            {"partials_offset": partials.offset, "slices": slices, "result_offset": result.offset},
            (rows,),
        ),
    ]

"""Argmax of rows of logits: four bytes a token come back to the host instead of a vocabulary of logits.

Two stages. The first finds the largest of each slice of a row: the product that makes the logits does, by the
epilogue "argmax" (:func:`xinfer_vk.kernels.matmul.linear`), so that these are never in memory; or
``shaders/argmax.comp``, for logits that go through something else before. The second joins the slices
(``shaders/argmax_join.comp``). Between them a slice is a pair of f32, (value, index).
"""

from __future__ import annotations

import numpy as np

from xinfer_vk.kernels import state as st
from xinfer_vk.kernels.base import Ref, ceil_div
from xinfer_vk.plan import Buffer, DeviceProfile, Kernel, OracleCall, Step, make_step

NAN_RESULT = 0xFFFFFFFF  # what a row with NaN or +inf anywhere gives
NONE_RESULT = 0xFFFFFFFE  # what a row of nothing but -inf gives
MINUS_INFINITY_KEY = 0x007FFFFF  # order_keys of -inf


def order_keys(bits: np.ndarray) -> np.ndarray:
    """Order of f32 bit patterns as order of ``uint32``: -0 equals +0, NaN is above all, and so is
    +inf, which is an overflow."""
    bits = np.where(bits == 0x80000000, 0, bits).astype(np.uint32)
    keys = np.where(bits >> 31 != 0, ~bits, bits | np.uint32(0x80000000)).astype(np.uint32)
    return np.where((bits == 0x7F800000) | ((bits & 0x7FFFFFFF) > 0x7F800000), np.uint32(0xFFFFFFFF), keys)


def best_pairs(values: np.ndarray, first: np.ndarray, step: int) -> np.ndarray:
    """The (value, index) pairs, f32 [rows, slices, 2], of ``values`` [rows, slices, n]: value ``i`` of a
    slice has the index ``first[slice] + step * i``. Of equals it is the first."""
    at = order_keys(values.view(np.uint32)).argmax(axis=2)[:, :, None]
    pairs = np.concatenate([np.take_along_axis(values, at, 2), first[:, None] + step * at], axis=2)
    return pairs.astype(np.float32)


def _oracle(call: OracleCall) -> None:
    p, spec = call.p, call.spec
    slices = call.groups[0] * spec.local_size
    rows = int(call.u32("state")[st.N_OUTPUTS])
    at = p.x_offset + np.arange(rows)[:, None] * p.x_stride + np.arange(p.n)
    padded = np.full((rows, ceil_div(p.n, slices) * slices), -np.inf, np.float32)
    padded[:, : p.n] = call.f32("x")[at]
    pairs = best_pairs(padded.reshape(rows, -1, slices).swapaxes(1, 2), np.arange(slices), slices)
    call.f32("partials")[p.partials_offset : p.partials_offset + pairs.size] = pairs.reshape(-1)


def _join_oracle(call: OracleCall) -> None:
    p = call.p
    rows = int(call.u32("state")[st.N_OUTPUTS])
    at = p.partials_offset + 2 * (np.arange(rows)[:, None] * p.stride + np.arange(p.slices))
    all_keys, all_indices = order_keys(call.u32("partials")[at]), call.f32("partials")[at + 1]
    for row, (keys, index) in enumerate(zip(all_keys, all_indices)):
        best = int(keys.max())
        result = NAN_RESULT if best == 0xFFFFFFFF else int(index[keys == best].min())
        if best <= MINUS_INFINITY_KEY:
            result = NONE_RESULT
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
        params=("partials_offset:u", "stride:u", "slices:u", "result_offset:u"),
        spec=(("local_size", local_size),),
        oracle=_join_oracle,
    )


def _geometry(P: DeviceProfile, n: int) -> tuple[int, int]:
    """(workgroups, local size) of the first stage: a few long slices for the cores of a CPU, many for a
    GPU, and none of them empty."""
    local_size, most = (8, 8) if P.simd else (64, 64)
    return max(1, min(most, ceil_div(n, local_size * 4))), local_size


def argmax_partial_words(P: DeviceProfile, n: int, rows: int) -> int:
    """Words that argmax needs at ``partials``: [rows][slices][value, index]."""
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

    The lowest index wins ties; a row with NaN or +inf gives 0xFFFFFFFF, one of nothing but -inf
    0xFFFFFFFE. ``partials`` has :func:`argmax_partial_words` words of room, from an even one on.
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
        join(P, partials, slices, slices, rows, result, state),
    ]


def join(
    P: DeviceProfile, partials: Ref, stride: int, slices: int, rows: int, result: Ref, state: Buffer
) -> Step:
    """The second stage, of ``slices`` pairs a row, the rows ``stride`` pairs apart."""
    most = 8 if P.simd else min(1024, P.max_workgroup_invocations)
    return make_step(
        join_kernel(1 << most.bit_length() - 1),
        {"partials": partials.buffer, "state": state, "result": result.buffer},
        {
            "partials_offset": partials.offset,
            "stride": stride,
            "slices": slices,
            "result_offset": result.offset,
        },
        (rows,),
    )

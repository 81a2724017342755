"""From one decode step to the next without the host (shaders/advance.comp): the tokens chosen become the
next inputs, and the state buffer moves on by one position."""

from __future__ import annotations

import numpy as np

from xinfer_vk.kernels import state as st
from xinfer_vk.kernels.base import Ref, ceil_div
from xinfer_vk.plan import Buffer, DeviceProfile, Kernel, OracleCall, Step, make_step


def _oracle(call: OracleCall) -> None:
    p, state = call.p, call.u32("state")
    rows = np.arange(int(state[st.N_OUTPUTS]))
    token = call.u32("result")[p.result_offset + rows]
    position = state[st.POSITION + rows] + 1
    table = st.BLOCK_TABLE + state[st.SEQUENCE + rows] * state[st.TABLE_STRIDE]
    blocks = state[table + position // st.BLOCK_TOKENS]
    state[st.TOKEN_ID + rows] = np.where(token < p.vocabulary, token, 0)
    state[st.POSITION + rows] = position
    state[st.SLOT + rows] = blocks * st.BLOCK_TOKENS + position % st.BLOCK_TOKENS


def advance(P: DeviceProfile, result: Ref, vocabulary: int, rows: int, state: Buffer) -> list[Step]:
    """Between two steps in which row ``i`` is one token of a sequence and output ``i``: ``result[i]`` becomes
    the row's token, at the next position, whose block must be in the block table already. ``rows``: of the
    plan; those in use are the outputs of ``state``."""
    local_size = 8 if P.simd else 64
    kernel = Kernel(
        name="advance",
        shader="advance",
        bindings=("result", "state"),
        params=("result_offset:u", "vocabulary:u"),
        spec=(("local_size", local_size),),
        oracle=_oracle,
    )
    return [
        make_step(
            kernel,
            {"result": result.buffer, "state": state},
            {"result_offset": result.offset, "vocabulary": vocabulary},
            (ceil_div(rows, local_size),),
        )
    ]

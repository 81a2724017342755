"""Token embedding: a row of the table for every token, decoded to f32 and multiplied by a constant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from xinfer_vk.kernels import state as state_words
from xinfer_vk.kernels.base import Part, Ref, ceil_div
from xinfer_vk.kernels.layout import matrix_words, row_words, shader_format, units
from xinfer_vk.kernels.unpack import unpack_rows
from xinfer_vk.plan import Buffer, DeviceProfile, Kernel, OracleCall, Step, make_step

LOCAL_SIZE = 64  # units of a row; on a CPU device, too, a few workgroups a token are enough


def _oracle(fmt: str) -> Callable[[OracleCall], None]:
    def oracle(call: OracleCall) -> None:
        p = call.p
        state, out = call.u32("state"), call.f32("y")
        ids = state[state_words.TOKEN_ID : state_words.TOKEN_ID + int(state[state_words.N_TOKENS])]
        here = (ids >= p.first_row) & (ids - p.first_row < p.rows)  # ids of other parts are other steps'
        tokens = np.flatnonzero(here)
        table = call.u32("w")[p.w_offset : p.w_offset + matrix_words(fmt, p.rows, p.cols)]
        rows = unpack_rows(fmt, table, p.cols, (ids[tokens] - p.first_row).astype(np.int64))
        for t, row in zip(tokens, rows):
            first = p.y_offset + int(t) * p.y_stride
            out[first : first + p.cols] = row * np.float32(p.scale)

    return oracle


@cache
def _kernel(fmt: str) -> Kernel:
    shader_fmt, fmt_spec = shader_format(fmt)
    return Kernel(
        name=f"embed.{fmt}",
        shader=f"embed.{shader_fmt}",
        bindings=("w", "y", "state"),
        params=(
            "w_offset:u", "rows:u", "cols:u", "first_row:u", "y_offset:u", "y_stride:u", "scale:f",
        ),
        spec=(("local_size", LOCAL_SIZE), *fmt_spec),
        oracle=_oracle(fmt),
    )  # fmt: skip


def embed(
    profile: DeviceProfile,
    fmt: str,
    parts: Sequence[Part],
    cols: int,
    state: Buffer,
    out: Ref,
    out_stride: int,
    tokens: int,
    scale: float = 1.0,
) -> list[Step]:
    """Steps that compute ``out[t, c] = scale * table[token_id[t], c]`` for the tokens in use.

    ``out``: [tokens][out_stride] f32. ``parts``: the table [vocabulary, cols], one step a part; each
    writes the rows of the tokens whose ids it holds. An id beyond the table writes nothing. Raises
    ``ValueError`` for an unknown format, or for a part that does not begin at a multiple of 4 words.
    """
    row_words(fmt, cols)  # refuses an unknown format, or cols that its blocks do not divide
    steps: list[Step] = []
    for part in parts:
        if part.offset % 4:
            raise ValueError(f"embed: a part begins at word {part.offset}: must be a multiple of 4")
        params: dict[str, int | float] = {
            "w_offset": part.offset,
            "rows": part.rows,
            "cols": cols,
            "first_row": part.first_row,
            "y_offset": out.offset,
            "y_stride": out_stride,
            "scale": scale,
        }
        buffers = {"w": part.buffer, "y": out.buffer, "state": state}
        groups = (ceil_div(units(fmt, cols), LOCAL_SIZE), tokens)
        steps.append(make_step(_kernel(fmt), buffers, params, groups, "embed", independent=bool(steps)))
    return steps

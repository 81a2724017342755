"""Activations in two planes of f16, which matrix units multiply (shaders/split_halves.comp).

A row is ``x = (high + low / 2048) * 2**e`` with an ``e`` of its own: 22 bits of every value. Layout of the
halves of ``rows`` rows, in words: the scale ``2**e`` of each row as f32, padded to a multiple of 4; then for
each row the words of ``high`` (two values a word) and those of ``low``, columns padded to a multiple of 32.
"""

from __future__ import annotations

import numpy as np

from xinfer_vk.kernels.base import COUNTS, Ref, ceil_div
from xinfer_vk.plan import Buffer, DeviceProfile, Kernel, OracleCall, Step, make_step

LOW = np.float32(2048.0)  # what low is multiplied by: 11 bits are in high
MIN_TOKENS = 2  # one is bound by reading the weights, which the mat-vec does better


def multiplies_halves(profile: DeviceProfile, tokens: int) -> bool:
    """Whether products of ``tokens`` rows can be made of halves: the device has matrix units. Whether
    they are is for the tuner to find out (:mod:`xinfer_vk.engine.tune`)."""
    return (
        not profile.simd
        and tokens >= MIN_TOKENS
        and {"cooperative_matrix", "float16", "subgroup_size_control"} <= profile.features
        and profile.subgroup_size in (16, 32, 64)
        and profile.max_workgroup_invocations >= 128
    )


def halves_words(rows: int, cols: int) -> int:
    """Words that the halves of ``rows`` rows of ``cols`` values take."""
    return ceil_div(rows, 4) * 4 + rows * ceil_div(cols, 32) * 32


def read_halves(words: np.ndarray, offset: int, rows: int, used: int, cols: int) -> np.ndarray:
    """``f32 [used, cols]``: the values of the first rows of halves with room for ``rows``."""
    padded = ceil_div(cols, 32) * 32
    scales = words[offset : offset + used].view(np.float32)
    first = offset + ceil_div(rows, 4) * 4
    planes = words[first : first + used * padded].view(np.float16).reshape(used, 2, padded).astype(np.float32)
    return (planes[:, 0, :cols] + planes[:, 1, :cols] / LOW) * scales[:, None]


def _oracle(call: OracleCall) -> None:
    p, words = call.p, call.u32("halves")
    used, padded = int(call.u32("state")[p.count_at]), ceil_div(p.cols, 32) * 32
    rows, columns = np.arange(used)[:, None], np.arange(p.cols)
    x = np.zeros((used, padded), np.float32)
    x[:, : p.cols] = call.f32("x")[p.x_offset + rows * p.x_stride + columns]
    bits = (x.view(np.uint32) & 0x7FFFFFFF).max(axis=1)
    exponent = np.maximum(bits >> 23, 11) - 10  # biased, of the scale
    x *= ((254 - exponent) << 23).astype(np.uint32).view(np.float32)[:, None]
    high = x.astype(np.float16)
    low = ((x - high) * LOW).astype(np.float16)
    words[p.offset : p.offset + used] = exponent << 23
    first = p.offset + ceil_div(p.tokens, 4) * 4
    planes = np.stack([high, low], axis=1).reshape(-1)
    words[first : first + used * padded] = planes.view(np.uint32)


_KERNEL = Kernel(
    name="split_halves",
    shader="split_halves",
    bindings=("x", "state", "halves"),
    params=("x_offset:u", "x_stride:u", "cols:u", "offset:u", "tokens:u", "count_at:u"),
    spec=(("local_size", 256),),
    oracle=_oracle,
)


def split_halves(
    x: Ref, x_stride: int, cols: int, halves: Ref, tokens: int, state: Buffer, count: str | int = "tokens"
) -> list[Step]:
    """The step that makes ``halves`` of the rows in use of ``x`` ([tokens][x_stride] f32, ``cols`` of each);
    ``halves`` has :func:`halves_words` words and begins at a multiple of 4. ``count``: see
    :func:`xinfer_vk.kernels.matmul.linear`, or the word of ``state`` with the number of rows in use."""
    if halves.offset % 4:
        raise ValueError(f"halves begin at word {halves.offset}: must be a multiple of 4")
    return [
        make_step(
            _KERNEL,
            {"x": x.buffer, "state": state, "halves": halves.buffer},
            {
                "x_offset": x.offset, "x_stride": x_stride, "cols": cols, "offset": halves.offset,
                "tokens": tokens, "count_at": COUNTS[count] if isinstance(count, str) else count,
            },
            (tokens,),
        )
    ]  # fmt: skip

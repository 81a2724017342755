"""Random weights made in place on the device, in any number format: what ``bench --synthetic`` runs.

Weights are uniform with a standard deviation near 0.02, as trained ones have, so that activations stay
finite through any number of layers. Every bit of a quantized weight is random; scales are constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from xinfer_vk.kernels.base import Ref, ceil_div
from xinfer_vk.kernels.copy_words import LOCAL_SIZE
from xinfer_vk.kernels.layout import GROUP_LAYOUTS, ROWS, matrix_words, row_words, scale_words
from xinfer_vk.plan import Kernel, OracleCall, Step, make_step

MAX_PATTERN = 5  # words of scales of the longest super-block
MAX_GROUPS = 4096


@dataclass(frozen=True)
class Pattern:
    """``scales``: the words of scales of one block or super-block, or of the blocks that share a word;
    ``keep`` and ``set``: the random and the fixed bits of a word of weights."""

    scales: tuple[int, ...] = (0,)
    keep: int = 0xFFFFFFFF
    set: int = 0


def _half(value: float) -> int:
    return int(np.float16(value).view(np.uint16))


def _halves(low: float, high: float) -> int:
    return _half(low) | _half(high) << 16


# 2^-6 to 2^-5 with either sign for the floats; for the others d (and m, which makes the mean zero) such
# that the integers' standard deviation becomes about 0.018. The bytes of 6-bit scales are GGML's, for
# s = t = 32 (q4_k, q5_k), s = 40 (q3_k), s = 34 (iq4_xs), s = 16 (q6_k), s = 8 and t = 12 (q2_k).
PATTERNS: Mapping[str, Pattern] = {
    "f32": Pattern(keep=0x807FFFFF, set=0x3C800000),
    "f16": Pattern(keep=0x83FF83FF, set=0x24002400),
    "bf16": Pattern(keep=0x807F807F, set=0x3C803C80),
    "q8_0": Pattern((_halves(2**-12, 2**-12),)),
    "q4_0": Pattern((_halves(2**-8, 2**-8),)),
    "q4_1": Pattern((_halves(2**-8, -7.5 * 2**-8),)),
    "q5_0": Pattern((_halves(2**-9, 2**-9),)),
    "q5_1": Pattern((_halves(2**-9, -15.5 * 2**-9),)),
    "iq4_nl": Pattern((_halves(2**-12, 2**-12),)),
    "mxfp4": Pattern((0x78787878,)),
    "q2_k": Pattern((_halves(2**-9, 2**-9), *[0xC8C8C8C8] * 4)),
    "q3_k": Pattern((_half(2**-10), 0x88888888, 0x88888888, 0xAAAAAAAA)),
    "q4_k": Pattern((_halves(2**-13, 7.5 * 2**-13), 0xA0A0A0A0, 0xA0A0A0A0, 0)),
    "q5_k": Pattern((_halves(2**-14, 15.5 * 2**-14), 0xA0A0A0A0, 0xA0A0A0A0, 0)),
    "q6_k": Pattern((_half(2**-14), *[0x10101010] * 4)),
    "iq4_xs": Pattern((_half(2**-13) | 0xAAAA0000, 0x22222222)),
    **{
        name: Pattern((0x88888888, *[_halves(2**-8, 2**-8)] * 4))
        if layout.bits == 4
        else Pattern((0, *[_halves(2**-12, 2**-12)] * 2))
        for name, layout in GROUP_LAYOUTS.items()
    },
}


def _hash(value: np.ndarray) -> np.ndarray:
    """shaders/fill_weights.comp has the source."""
    state = value * np.uint32(747796405) + np.uint32(2891336453)
    word = ((state >> ((state >> np.uint32(28)) + np.uint32(4))) ^ state) * np.uint32(277803737)
    return (word >> np.uint32(22)) ^ word


def _oracle(call: OracleCall) -> None:
    p = call.p
    i = np.arange(p.count, dtype=np.uint32)
    word = i // np.uint32(ROWS) % np.uint32(p.row_words)
    random = _hash(i + np.uint32(p.seed)) & np.uint32(p.keep) | np.uint32(p.set)
    pattern = np.array([p.scale0, p.scale1, p.scale2, p.scale3, p.scale4], np.uint32)
    values = np.where(word < p.scale_words, pattern[word % p.period], random)
    call.u32("target")[p.target_offset : p.target_offset + p.count] = values


KERNEL = Kernel(
    name="fill_weights",
    shader="fill_weights",
    bindings=("target",),
    params=(
        "target_offset:u", "count:u", "row_words:u", "scale_words:u", "period:u", "scale0:u", "scale1:u",
        "scale2:u", "scale3:u", "scale4:u", "keep:u", "set:u", "seed:u",
    ),
    spec=(("local_size", LOCAL_SIZE),),
    oracle=_oracle,
)  # fmt: skip


def fill_weights(target: Ref, fmt: str, rows: int, cols: int, seed: int) -> Step:
    """A step that makes a random matrix ``[rows, cols]`` in the x8 layout at ``target``.

    The rows that fill up the last group of eight are random too: no product reads them. Raises
    ``ValueError`` for a format that is not in :data:`PATTERNS`.
    """
    if fmt not in PATTERNS:
        raise ValueError(f"no random weights in {fmt!r} (there are: {', '.join(PATTERNS)})")
    pattern, count = PATTERNS[fmt], matrix_words(fmt, rows, cols)
    scales = (*pattern.scales, *[0] * (MAX_PATTERN - len(pattern.scales)))
    params = {
        "target_offset": target.offset,
        "count": count,
        "row_words": row_words(fmt, cols),
        "scale_words": scale_words(fmt, cols),
        "period": len(pattern.scales),
        **{f"scale{i}": word for i, word in enumerate(scales)},
        "keep": pattern.keep,
        "set": pattern.set,
        "seed": seed,
    }
    # A fixed number of groups for large matrices: matrices of one buffer share a pipeline.
    groups = min(MAX_GROUPS, ceil_div(count, LOCAL_SIZE))
    return make_step(KERNEL, {"target": target.buffer}, params, (groups,), "random weights")

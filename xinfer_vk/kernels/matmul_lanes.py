"""The matrix products of lavapipe: geometry and oracle of ``shaders/matmul_lanes.comp``, which says why.

A workgroup is runs of eight lanes. A run computes a group of eight rows times a *chunk* of blocks of 32
columns, in code without a loop; a row that is longer than a chunk takes as many runs as it has chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from xinfer_vk.kernels import split_norm
from xinfer_vk.kernels.base import ceil_div
from xinfer_vk.kernels.layout import BLOCK, BLOCK_LAYOUTS, ROWS, row_words, scale_words, shader_format
from xinfer_vk.plan import DeviceProfile, Kernel, OracleCall

BINDINGS = ("w", "x", "y", "state", "bias")
PARAMS = (
    "w_offset:u", "rows:u", "cols:u", "first_row:u", "x_offset:u", "x_stride:u", "y_offset:u", "y_stride:u",
    "bias_offset:u", "epilogue:u", "count_at:u", "last_token:u", "row_words:u", "data_first:u",
    "w_low:u", "w_high:u", "x_low:u", "x_high:u", "y_low:u", "y_high:u", *(f"digits{i}:u" for i in range(8)),
    *split_norm.PARAMS,
)  # fmt: skip
ADDRESSES = (("w_low", "w"), ("x_low", "x"), ("y_low", "y"))
NO_BIAS = 0xFFFFFFFF

TOKENS = (1, 2, 4, 8)  # of a workgroup
# Products of at most so many tokens can begin and end norms. Kernels of prompts would pay for that in vain.
NORM_TOKENS = TOKENS[-1]
# Blocks that are unrolled for so many tokens: of a whole row, and of a chunk of a longer one. More of them
# would run faster still, and take longer to compile: 18 blocks for 8 tokens take 1.8 s, 0.2 s of it at every
# start. Where they are the same a token gets the same sums in any batch: 1 and 2 tokens are one class, more
# than 2 another.
WHOLE_BLOCKS = {1: 24, 2: 24, 4: 18, 8: 18}
CHUNK_BLOCKS = {1: 24, 2: 24, 4: 12, 8: 12}
# Row groups of a workgroup, times chunks: what a workgroup costs is that of a part of a run. Few different
# numbers, because each is another pipeline; for small matrices 1.
RUNS = (8, 4)
WORKGROUPS = 8  # at least, for as many cores


def applies(profile: DeviceProfile) -> bool:
    """Whether the device is what this family is for: buffers have addresses, and subgroups eight lanes."""
    wanted = {"buffer_address", "subgroup_shuffle"}
    return profile.simd and profile.subgroup_size == ROWS and wanted <= profile.features


def chunks(fmt: str, cols: int, tokens: int) -> tuple[int, int]:
    """(blocks of a chunk, chunks of a row): as few chunks as may be, of whole words of scales if that costs
    no more than one block in eight that lies beyond the row."""
    blocks = cols // BLOCK  # what is left of a row of 16 or 32 bits is not unrolled
    if blocks <= WHOLE_BLOCKS[tokens]:
        return blocks, 1
    count = ceil_div(blocks, CHUNK_BLOCKS[tokens])
    each = ceil_div(blocks, count)
    period = BLOCK_LAYOUTS[fmt].columns // BLOCK if fmt in BLOCK_LAYOUTS else 1  # blocks of a word of scales
    rounded = max(each // period, 1) * period
    if rounded * ceil_div(blocks, rounded) <= blocks * 9 // 8:
        each, count = rounded, ceil_div(blocks, rounded)
    return each, count


def choose(
    profile: DeviceProfile,
    fmt: str,
    rows: int,
    cols: int,
    tokens: int,
    oracle: Callable[[OracleCall], None],
    argmax: bool = False,
) -> tuple[Kernel, int, int] | None:
    """(kernel, rows of W a workgroup computes, tokens it computes them for); None where a row takes more
    runs than a workgroup can have. ``argmax``: the epilogue of that name, for groups of ROWS rows."""
    tile = next((size for size in TOKENS if size >= tokens), TOKENS[-1])
    blocks, count = chunks(fmt, cols, tile)
    groups = ceil_div(rows, ROWS)
    fitting = (runs // count for runs in RUNS if groups * count >= WORKGROUPS * runs)
    each = max(1, next(fitting, 1))  # row groups of a workgroup
    lanes = ROWS * count * each
    norms = int(tokens <= NORM_TOKENS)
    shared = lanes * tile * 4 + norms * lanes // ROWS * tile * 4
    if lanes > profile.max_workgroup_invocations or shared > profile.max_shared_bytes:
        return None
    workgroups, digits = ceil_div(groups, each), 2  # or more: a small matrix takes a large one's kernel
    while workgroups > 8**digits:
        digits += 1
    whole = int(blocks * count == cols // BLOCK)
    spec = (
        ("local_size", lanes), ("tokens", tile), ("blocks", blocks), ("chunks", count), ("whole", whole),
        ("digits", digits), ("argmax", int(argmax)), ("norms", norms),
    )  # fmt: skip
    return _kernel(fmt, spec, oracle), each * ROWS, tile


def params_of(fmt: str, params: Mapping[str, int | float], tokens: int) -> dict[str, int | float]:
    """The push constants of this family from those of the others."""
    own: dict[str, int | float] = {field.split(":")[0]: 0 for field in PARAMS}
    own |= {name: value for name, value in params.items() if name in own}
    own |= {f"digits{i}": i for i in range(8)}  # see include/uniform.glsl
    cols = int(params["cols"])
    own["row_words"], own["data_first"] = row_words(fmt, cols), scale_words(fmt, cols)
    own["last_token"] = tokens - 1
    if not params["has_bias"]:
        own["bias_offset"] = NO_BIAS
    return own


@cache
def _kernel(fmt: str, spec: tuple[tuple[str, int], ...], oracle: Callable[[OracleCall], None]) -> Kernel:
    shader_fmt, fmt_spec = shader_format(fmt)

    def with_all_params(call: OracleCall) -> None:
        call.p.has_bias = int(call.p.bias_offset != NO_BIAS)
        oracle(call)

    name, shader = f"matmul_lanes.{fmt}", f"matmul_lanes.{shader_fmt}"
    return Kernel(name, shader, BINDINGS, PARAMS, spec + fmt_spec, with_all_params, ADDRESSES)

"""Matrix products with the weights of a model: ``y[t] = W x[t] (+ bias)`` for every token row ``t``.

Weights stay in their format (:data:`xinfer_vk.kernels.layout.FORMATS`) in the x8 layout and are decoded
in the kernels; arithmetic is f32 and activations are not quantized. Epilogues: ``store``; ``add``, the
residual connection; ``swiglu`` and ``geglu`` (Shazeer 2020), which take rows in pairs gate, up, gate, up, …
and store ``silu(gate) * up`` or ``gelu(gate) * up``; ``gated``, which multiplies by ``silu(y)`` of what y
holds, a gate; ``argmax``, which stores instead of every few rows the largest and its number.

Five shader families, chosen by :func:`linear` from the device and the number of token rows:

- ``matmul_lanes`` for lavapipe (:mod:`xinfer_vk.kernels.matmul_lanes`), any number of rows;
- ``matmul_simd`` for other CPU devices, any number of rows: no shared memory, no barriers;
- ``matvec`` for GPUs and few rows (decode): the inner dimension is split over a workgroup;
- ``matmul`` for GPUs and many rows (prefill): tiles decoded into shared memory;
- ``matmul_coop`` for GPUs with matrix units and many rows, from activations in two f16 planes
  (:mod:`xinfer_vk.kernels.halves`): as exact as f32 and several times as fast.

The same shaders multiply by the experts of a mixture: :mod:`xinfer_vk.kernels.experts`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeAlias

import numpy as np

from xinfer_vk.kernels import matmul_lanes, split_norm
from xinfer_vk.kernels.argmax import best_pairs
from xinfer_vk.kernels.base import COUNTS, Part, Ref, ceil_div
from xinfer_vk.kernels.halves import multiplies_halves, read_halves
from xinfer_vk.kernels.layout import ROWS, matrix_words, row_words, shader_format
from xinfer_vk.kernels.split_norm import SUMMED
from xinfer_vk.kernels.swiglu import gelu_tanh, silu
from xinfer_vk.kernels.unpack import unpack
from xinfer_vk.plan import Buffer, DeviceProfile, Kernel, OracleCall, Step, make_step

EPILOGUES = ("store", "add", "swiglu", "gated", "geglu", "argmax")
PAIRED = {"swiglu": silu, "geglu": gelu_tanh}

BINDINGS = ("w", "x", "y", "state", "bias")
PARAMS = (
    "w_offset:u", "rows:u", "cols:u", "first_row:u", "x_offset:u", "x_stride:u", "y_offset:u", "y_stride:u",
    "bias_offset:u", "has_bias:u", "epilogue:u", "count_at:u", "expert_words:u", "first_expert:u",
    "experts:u", "per_token:u", "x_of_tokens:u", *split_norm.PARAMS,
)  # fmt: skip
NO_EXPERTS = {"expert_words": 0, "first_expert": 0, "experts": 0, "per_token": 1, "x_of_tokens": 0}

# matmul_simd: 8 lanes hold 32 rows.
SIMD_LANES, SIMD_ROWS, SIMD_TOKENS = 8, 32, 8
# matvec: a workgroup computes groups of 8 rows. Enough lanes that each has about 4 words of a row to load. By
# default for up to 8 tokens; for twice as many the tuner may find it faster than matmul.
MATVEC_LANES, MATVEC_GROUPS, MATVEC_TOKENS, MATVEC_MOST = (64, 128, 256), (1, 2), 8, 16
MATVEC_TILES = (1, 2, 4, 8, 16)
MATVEC_SHARED = 1024  # vec4s: 16 KiB
# matmul: a workgroup computes 64 or 128 rows of up to 64 tokens, each lane 4 or 8 rows of TILE / 16 tokens.
TILE_LANES, TILE_ROWS, TILE_TOKENS = 256, 64, (16, 32, 64)  # 32 fit the 16 KiB every device has
# matmul_coop: a workgroup of 128 lanes computes 128 rows of up to 64 tokens; or, for few tokens, teams of
# them share the columns of as many times fewer rows.
COOP_LANES, COOP_ROWS, COOP_TOKENS = 128, 128, (16, 32, 64)
COOP_TEAMS, TEAM_TOKENS = (1, 2, 4, 8), 32
ARGMAX_ROWS = 4  # that the epilogue "argmax" makes a pair of; matmul_lanes of ROWS
NORM_FAMILIES = ("matvec", "matmul_simd", "matmul_lanes")  # can end norms
SPLIT_FAMILIES = ("matmul_coop", "matmul_coop_check")

Choice: TypeAlias = tuple[Kernel, int, int]  # and rows of W a workgroup computes, for how many tokens


def _x(call: OracleCall, tokens: int) -> np.ndarray:
    p = call.p
    return rows_view(call.f32("x"), p.x_offset, p.x_stride, tokens, p.cols)


def _halves(call: OracleCall, tokens: int) -> np.ndarray:
    return read_halves(call.u32("x"), call.p.x_offset, call.p.x_stride, tokens, call.p.cols)


@cache
def oracle_of(
    fmt: str,
    read_x: Callable[[OracleCall, int], np.ndarray] = _x,
    argmax_rows: int = ARGMAX_ROWS,
) -> Callable[[OracleCall], None]:
    """The oracle of products with weights in ``fmt``. ``read_x``: the first rows of x, f32 [tokens, cols].
    ``argmax_rows``: of a pair of the epilogue "argmax"."""

    def oracle(call: OracleCall) -> None:
        p = call.p
        words = matrix_words(fmt, p.rows, p.cols)

        def dense() -> np.ndarray:
            return unpack(fmt, call.u32("w")[p.w_offset : p.w_offset + words], p.rows, p.cols)

        weights = call.cached(("w", fmt, p.w_offset, p.rows, p.cols), dense)  # [rows, cols]
        tokens = int(call.u32("state")[p.count_at])
        v = read_x(call, tokens) @ weights.T  # [tokens, rows], accumulated in float32 by the BLAS
        if p.norm_eps >= 0:
            words = split_norm.begun_words(p.cols)
            x = rows_view(call.f32("x"), p.x_offset, p.x_stride, tokens, words)
            v *= split_norm.norm_factors(x, p.cols, p.norm_eps)
        if p.has_bias:
            first = p.bias_offset + p.first_row
            v += call.f32("bias")[first : first + p.rows]
        if EPILOGUES[p.epilogue] == "argmax":
            sliced = np.full((tokens, ceil_div(p.rows, argmax_rows) * argmax_rows), -np.inf, np.float32)
            sliced[:, : p.rows] = v
            first_rows = np.arange(p.first_row, p.first_row + p.rows, argmax_rows)
            pairs = best_pairs(sliced.reshape(tokens, -1, argmax_rows), first_rows, 1).reshape(tokens, -1)
            at = p.y_offset + p.first_row // argmax_rows * 2
            rows_view(call.f32("y"), at, p.y_stride, *pairs.shape)[:] = pairs
            return
        paired = EPILOGUES[p.epilogue] in PAIRED
        first, width = (p.first_row // 2, p.rows // 2) if paired else (p.first_row, p.rows)
        y = rows_view(call.f32("y"), p.y_offset + first, p.y_stride, tokens, width)
        y[:] = apply_epilogue(p.epilogue, v, y)
        if p.next_cols:
            words, first = split_norm.begun_words(p.next_cols), p.next_weight + p.first_row
            rows = split_norm.begun(y, call.f32("bias")[first : first + p.rows])
            place = rows_view(call.f32("y"), p.next_offset, words, tokens, words)
            place[:, p.first_row : p.first_row + p.rows] = rows[:, : p.rows]
            place[:, p.next_cols :][:, p.first_row // SUMMED :][:, : p.rows // SUMMED] = rows[:, p.rows :]

    return oracle


def apply_epilogue(index: int, v: np.ndarray, y: np.ndarray) -> np.ndarray:
    """What is stored for the products ``v`` where ``y`` was."""
    name = EPILOGUES[index]
    if name in PAIRED:
        pairs = y.shape[1]
        return PAIRED[name](v[:, 0 : 2 * pairs : 2]) * v[:, 1 : 2 * pairs : 2]
    if name == "gated":
        return silu(y) * v
    return y + v if name == "add" else v


def rows_view(words: np.ndarray, offset: int, stride: int, rows: int, cols: int) -> np.ndarray:
    """A view [rows, cols] of a matrix in a flat buffer."""
    if not rows:
        return words[:0].reshape(0, cols)
    last = offset + (rows - 1) * stride + cols
    if last > words.size:
        raise IndexError(f"rows end at word {last} of a buffer of {words.size}")
    return np.lib.stride_tricks.as_strided(
        words[offset:], (rows, cols), (stride * words.itemsize, words.itemsize)
    )


@cache
def _kernel(family: str, fmt: str, variant: str, spec: tuple[tuple[str, int], ...]) -> Kernel:
    shader_fmt, fmt_spec = shader_format(fmt)
    variant = f".{variant}" if variant else ""
    name, shader = f"{family}.{fmt}{variant}", f"{family}.{shader_fmt}{variant}"
    read_x = _halves if family in SPLIT_FAMILIES else _x
    full = family == "matmul_coop" or (family == "matvec" and variant == ".subgroup")
    oracle = oracle_of(fmt, read_x)
    return Kernel(name, shader, BINDINGS, PARAMS, spec + fmt_spec, oracle, full_subgroups=full)


def up_to(tokens: int, sizes: Sequence[int]) -> int:
    """The smallest of ``sizes`` that holds ``tokens``, else the largest."""
    return next((size for size in sizes if size >= tokens), sizes[-1])


def _tile_bytes(tokens: int, row_quads: int = 1, stages: int = 0) -> int:
    """Shared memory of a matmul workgroup: tiles of W and x, 32 columns each, rows padded by one, and where
    the rows of x begin."""
    tiles = 32 * ((row_quads * TILE_ROWS // 4 + 1) * 16 + (tokens + 1) * 4)
    return (2 if stages == 2 else 1) * tiles + tokens * 4


def _simd(profile: DeviceProfile, fmt: str, tokens: int, aligned: bool) -> Choice:
    tile = up_to(tokens, (1, 2, 4, SIMD_TOKENS))
    # A shuffle needs the 8 lanes of a workgroup in one subgroup.
    in_one = profile.subgroup_size >= SIMD_LANES and "subgroup_shuffle" in profile.features
    broadcast = "subgroup" if in_one else "none"
    spec = (("local_size", SIMD_LANES), ("tokens", tile), ("aligned", int(aligned)), ("experts", 0))
    return _kernel("matmul_simd", fmt, broadcast, spec), SIMD_ROWS, tile


def _matvec(
    profile: DeviceProfile, fmt: str, cols: int, tokens: int, aligned: bool,
    lanes: int = 0, groups: int = 1, reduce: str = "shared",
) -> Choice:  # fmt: skip
    """``lanes`` in a workgroup of ``8 groups`` rows, 0 for what suits the columns. ``reduce``: how their sums
    are added up, "shared" or "subgroup" (:func:`reduces_by_subgroup`)."""
    tile = up_to(tokens, MATVEC_TILES)
    lanes = lanes or up_to(2 * ceil_div(row_words(fmt, cols), 4), MATVEC_LANES)
    spec = [("tokens", tile), ("aligned", int(aligned)), ("experts", 0), ("row_groups", groups)]
    if reduce == "subgroup":
        spec.append(("subgroup", profile.subgroup_size))
    else:
        # a vec4 a lane, token and group; and 128 bytes a token where norms end
        room = profile.max_shared_bytes - 128 * tile
        most = MATVEC_SHARED if room >= 16 * MATVEC_SHARED else MATVEC_SHARED // 2
        lanes = min(lanes, most // (tile * groups))
    return _kernel("matvec", fmt, reduce, (("local_size", lanes), *spec)), 8 * groups, tile


def reduces_by_subgroup(profile: DeviceProfile, lanes: int, sums: int) -> bool:
    """Whether the lanes of a matvec workgroup can add up ``sums`` vec4s each by shuffles: they are whole
    subgroups, full ones, and what is left of each, two vec4s a sum, fits into shared memory."""
    return (
        {"subgroup_shuffle", "subgroup_size_control"} <= profile.features
        and 4 <= profile.subgroup_size <= lanes
        and lanes % profile.subgroup_size == 0
        and 2 * lanes // profile.subgroup_size * sums <= MATVEC_SHARED // 2
    )


def _matvecs(
    profile: DeviceProfile, fmt: str, cols: int, tokens: int, aligned: bool, quick: bool
) -> dict[str, Choice]:
    """Every way to use matvec, by name; those that ran first on a GPU come first. ``quick``: without those
    that hardly ever win: 16 rows do not pay for one token, whose x is small; nor do many lanes for several
    tokens. For 16 tokens the sums of 16 rows are more than a lane has registers for."""
    found, tile = {}, up_to(tokens, MATVEC_TILES)
    row_groups = MATVEC_GROUPS if tile <= MATVEC_TOKENS else MATVEC_GROUPS[:1]
    for groups, reduce, lanes in itertools.product(row_groups, ("shared", "subgroup"), MATVEC_LANES):
        by_subgroup, rare = reduce == "subgroup", groups > 1 if tokens == 1 else lanes > 128
        if (by_subgroup and not reduces_by_subgroup(profile, lanes, tile * groups)) or (quick and rare):
            continue
        name = f"matvec {lanes}" + (" subgroup" if by_subgroup else "") + (" x16" if groups > 1 else "")
        found[name] = _matvec(profile, fmt, cols, tokens, aligned, lanes, groups, reduce)
    return found


def _matmul(
    profile: DeviceProfile,
    fmt: str,
    tokens: int,
    aligned: bool,
    most: int = 64,
    row_quads: int = 1,
    stages: int = 0,
) -> Choice:
    """Of ``64 row_quads`` rows and at most ``most`` tokens a workgroup; ``stages``: see matmul.comp."""
    room = profile.max_shared_bytes
    fitting = [tile for tile in TILE_TOKENS if _tile_bytes(tile, row_quads, stages) <= room]
    tile = up_to(min(tokens, most), fitting)
    spec = (
        ("local_size", TILE_LANES), ("tokens", tile), ("aligned", int(aligned)), ("experts", 0),
        ("row_quads", row_quads), ("stages", stages),
    )  # fmt: skip
    return _kernel("matmul", fmt, "", spec), TILE_ROWS * row_quads, tile


def _matmuls(profile: DeviceProfile, fmt: str, tokens: int, aligned: bool, quick: bool) -> dict[str, Choice]:
    """Every way to use matmul, by name; those that ran first on a GPU come first. ``quick``: of the others
    only the largest tiles."""
    found = {f"matmul {most}": _matmul(profile, fmt, tokens, aligned, most) for most in TILE_TOKENS}
    for name, row_quads, stages in (("ahead", 1, 1), ("double", 1, 2), ("x128", 2, 1)):
        fitting = [t for t in TILE_TOKENS if _tile_bytes(t, row_quads, stages) <= profile.max_shared_bytes]
        largest = [t for t in fitting if t <= up_to(tokens, TILE_TOKENS)][-1:]
        for most in largest if quick else fitting:
            found[f"matmul {most} {name}"] = _matmul(profile, fmt, tokens, aligned, most, row_quads, stages)
    return found


def _coop(profile: DeviceProfile, fmt: str, tile: int, teams: int = 1) -> Choice:
    # Devices without matrix units get the variant that does without: slow, for tests.
    matrix_units = "cooperative_matrix" in profile.features
    spec = (
        ("local_size", COOP_LANES), ("tokens", tile), ("subgroups", _coop_subgroups(profile)),
        ("experts", 0), ("teams", teams),
    )  # fmt: skip
    family = "matmul_coop" if matrix_units else "matmul_coop_check"
    return _kernel(family, fmt, "", spec), COOP_ROWS // teams, tile


def _coop_subgroups(profile: DeviceProfile) -> int:
    """Of a matmul_coop workgroup."""
    return COOP_LANES // (profile.subgroup_size if "cooperative_matrix" in profile.features else 32)


def _coops(profile: DeviceProfile, fmt: str, tokens: int, quick: bool) -> dict[str, Choice]:
    """Every way to use matmul_coop, by name. ``quick``: of teams only the most."""
    found = {}
    for tile in COOP_TOKENS:
        if tile >= 2 * max(tokens, COOP_TOKENS[0]):
            continue
        fitting = [
            teams
            for teams in COOP_TEAMS
            if coop_bytes(tile, teams) <= profile.max_shared_bytes
            and (teams == 1 or (teams <= _coop_subgroups(profile) and tokens <= TEAM_TOKENS))
        ]
        for teams in sorted({fitting[0], fitting[-1]} if quick and fitting else fitting):
            name = f"coop {tile}" + (f" teams {teams}" if teams > 1 else "")
            found[name] = _coop(profile, fmt, tile, teams)
    return found


def choose(profile: DeviceProfile, fmt: str, cols: int, tokens: int, aligned: bool) -> Choice:
    """The kernel for ``tokens`` rows of x where nothing is known about the device but its profile."""
    if profile.simd:
        return _simd(profile, fmt, tokens, aligned)
    if tokens <= MATVEC_TOKENS:
        return _matvec(profile, fmt, cols, tokens, aligned)
    return _matmul(profile, fmt, tokens, aligned)


def choose_halves(profile: DeviceProfile, fmt: str, tokens: int, name: str = "default") -> Choice:
    """The kernel for the halves of ``tokens`` rows of x, on matrix units: the one of that name in
    :func:`_coops`, perhaps found for more rows of x: then in the tile that suits ``tokens``; the default for
    other names."""
    if name.startswith("coop"):
        words = name.split()
        tile = min(int(words[1]), up_to(tokens, COOP_TOKENS))
        return _coop(profile, fmt, tile, int(words[3]) if len(words) > 2 else 1)
    fitting = [tile for tile in COOP_TOKENS if coop_bytes(tile) <= profile.max_shared_bytes]
    return _coop(profile, fmt, up_to(tokens, fitting))


def _every_variant(
    profile: DeviceProfile, fmt: str, cols: int, tokens: int, aligned: bool, quick: bool = False
) -> dict[str, Choice]:
    """Those of :func:`variants`, some under several names: for few rows of x large tiles are smaller ones."""
    found = {"default": choose(profile, fmt, cols, tokens, aligned)}
    if profile.simd:
        return found
    if tokens > MATVEC_TOKENS:
        found |= _matmuls(profile, fmt, tokens, aligned, quick)
    if tokens <= MATVEC_MOST:
        found |= _matvecs(profile, fmt, cols, tokens, aligned, quick)
    if multiplies_halves(profile, tokens):
        found |= _coops(profile, fmt, tokens, quick)
    return found


def variants(
    profile: DeviceProfile, fmt: str, cols: int, tokens: int, aligned: bool, quick: bool = False
) -> dict[str, Choice]:
    """Every kernel that can make products of ``tokens`` rows of x, by name, the one of :func:`choose` first.
    Those whose name begins with "coop" take x in halves (:mod:`xinfer_vk.kernels.halves`). ``quick``: only
    those that are worth the time of trying them all."""
    return distinct(_every_variant(profile, fmt, cols, tokens, aligned, quick))


def named(profile: DeviceProfile, fmt: str, cols: int, tokens: int, aligned: bool, name: str) -> Choice:
    """The variant of that name, which may have been found for more rows of x. The default if there is none,
    and for one that takes halves."""
    if name == "default" or name.startswith("coop"):
        return choose(profile, fmt, cols, tokens, aligned)
    every = _every_variant(profile, fmt, cols, tokens, aligned)
    return every.get(name, every["default"])


def distinct(found: dict[str, Choice]) -> dict[str, Choice]:
    """Each kernel once, under its first name."""
    first: dict[int, str] = {}
    for name, (kernel, _, _) in found.items():
        first.setdefault(id(kernel), name)
    return {name: found[name] for name in first.values()}


def coop_bytes(tokens: int, teams: int = 1) -> int:
    """Shared memory of a matmul_coop workgroup."""
    return (COOP_ROWS + teams * tokens) * 160


def tuned_key(fmt: str, rows: int, cols: int, tokens: int) -> str:
    """What a choice of kernel is kept under in ``DeviceProfile.tuned``."""
    return f"{fmt} {rows}x{cols} for {tokens}"


def tuned_variant(profile: DeviceProfile, fmt: str, rows: int, cols: int, tokens: int) -> str:
    """The name of the variant that was found fastest on this device, "default" where none was looked for."""
    return profile.tuned.get(tuned_key(fmt, rows, cols, tokens), "default")


def planned_rows(profile: DeviceProfile, count: int) -> int:
    """For how many rows of x a plan is made whose runs use ``count`` of them or fewer, 0 for none: the next
    power of two. ``matmul_lanes`` computes rows that are not in use all the same: there it is the next
    multiple of a tile, or of an eighth of that power."""
    power = 0 if count == 0 else 1 << (count - 1).bit_length()
    tile = matmul_lanes.TOKENS[-1]
    if power <= tile or not matmul_lanes.applies(profile):
        return power
    step = max(tile, power // 8)
    return ceil_div(count, step) * step


def linear(
    profile: DeviceProfile,
    fmt: str,
    parts: Sequence[Part],
    cols: int,
    x: Ref,
    x_stride: int,
    y: Ref,
    y_stride: int,
    tokens: int,
    state: Buffer,
    bias: Ref | None,
    epilogue: str,
    count: str,
    label: str = "linear",
    halves: Ref | None = None,
    variant: str | None = None,
    choice: Choice | None = None,
    brief: bool = False,
    independent: bool = False,
    begin: split_norm.Begin | None = None,
    norm_eps: float | None = None,
) -> list[Step]:
    """Steps that compute ``y[t, r] = sum_c W[r, c] x[t, c] (+ bias[r])`` for all rows ``r`` of ``parts``.

    ``x``: [tokens][x_stride] f32, ``cols`` of each row are read. ``y``: [tokens][y_stride] f32; row
    ``r`` of W goes to column ``r``, or ``r / 2`` where gate and up are paired. ``tokens`` is the number of
    rows the plan is made for; ``count`` ("tokens" or "outputs") names the word of ``state`` with how many of
    them are in use in a run: rows beyond are neither read nor written. ``x`` and ``y`` may lie in one
    buffer but must not overlap. One step a part; none waits for another. ``halves``: the same rows of x as
    :func:`xinfer_vk.kernels.halves.split_halves` left them, with room for ``tokens``; then the product is
    made of these, on matrix units. ``variant``: one of :func:`variants`, else the tuned one; ``choice``:
    a kernel of another module. ``brief``: the product is for few rows and few runs, so that a kernel which
    takes long to compile would not pay. ``independent``: the steps before these are products too, of the same
    ``x`` and to other columns, so that none has to wait for another. ``begin``: an RMSNorm of y that the
    product begins; ``norm_eps``: epsilon of one that it ends: the rows of x are begun rows
    (:mod:`xinfer_vk.kernels.split_norm`). With the epilogue "argmax" y has a pair for every
    :func:`argmax_rows` rows, (value, index) as :func:`xinfer_vk.kernels.argmax.join` takes them.

    Raises ``ValueError`` for an epilogue, count or format that does not exist, for a part that does not
    begin at a multiple of 4 words and of 8 rows, for parts that cut a gate from its up, and for norms that
    the kernel cannot begin or end.
    """
    if epilogue not in EPILOGUES:
        raise ValueError(f"epilogue {epilogue!r} does not exist (there are: {', '.join(EPILOGUES)})")
    if count not in COUNTS:
        raise ValueError(f"count {count!r} does not exist (there are: {', '.join(COUNTS)})")
    row_words(fmt, cols)  # refuses an unknown format, or cols that its blocks do not divide
    aligned = x.offset % 4 == 0 and x_stride % 4 == 0
    if variant is None:
        variant = tuned_variant(profile, fmt, sum(part.rows for part in parts), cols, tokens)
    if choice is not None:
        kernel, tile_rows, tile_tokens = choice
    elif halves is not None:
        kernel, tile_rows, tile_tokens = choose_halves(profile, fmt, tokens, variant)
        x, x_stride = halves, tokens
    else:
        kernel, tile_rows, tile_tokens = named(profile, fmt, cols, tokens, aligned, variant)
    by_lanes = choice is None and halves is None and not brief and matmul_lanes.applies(profile)
    split = _split_norms(sum(part.rows for part in parts), y, bias, epilogue, begin, norm_eps)
    of_rows = bias.buffer if bias else begin.weight.buffer if begin else state
    steps: list[Step] = []
    for part in parts:
        if part.offset % 4 or part.first_row % 8 or (epilogue in PAIRED and part.rows % 2):
            raise ValueError(
                f"{label}: a part begins at word {part.offset}, row {part.first_row}, with {part.rows} rows: "
                "must be multiples of 4, 8 and, with swiglu or geglu, 2"
            )
        params: dict[str, int | float] = {
            "w_offset": part.offset,
            "rows": part.rows,
            "cols": cols,
            "first_row": part.first_row,
            "x_offset": x.offset,
            "x_stride": x_stride,
            "y_offset": y.offset,
            "y_stride": y_stride,
            "bias_offset": bias.offset if bias else 0,
            "has_bias": int(bias is not None),
            "epilogue": EPILOGUES.index(epilogue),
            "count_at": COUNTS[count],
            **NO_EXPERTS,
            **split,
        }
        buffers = {"w": part.buffer, "x": x.buffer, "y": y.buffer, "state": state, "bias": of_rows}
        chosen, found = (kernel, tile_rows, tile_tokens), None
        if by_lanes:
            found = matmul_lanes.choose(
                profile, fmt, part.rows, cols, tokens, oracle_of(fmt, argmax_rows=ROWS), epilogue == "argmax"
            )
        if found is not None:
            chosen, params = found, matmul_lanes.params_of(fmt, params, tokens)
        if begin is not None and found is not None and tokens > matmul_lanes.NORM_TOKENS:
            raise ValueError(f"{label}: {chosen[0].name} cannot begin a norm of {tokens} rows")
        can_end = split_norm.can_split(cols) and tokens <= MATVEC_TOKENS
        if norm_eps is not None and not (can_end and chosen[0].name.split(".")[0] in NORM_FAMILIES):
            raise ValueError(f"{label}: {chosen[0].name} cannot end a norm of {tokens} x {cols} values")
        groups = (ceil_div(part.rows, chosen[1]), ceil_div(tokens, chosen[2]))
        steps.append(make_step(chosen[0], buffers, params, groups, label, independent or bool(steps)))
    return steps


def argmax_rows(steps: Sequence[Step]) -> int:
    """Of how many rows the steps of a product with the epilogue "argmax" make a pair: all of them of as many,
    because it is the columns by which a family is chosen."""
    return ROWS if steps[0].kernel.name.startswith("matmul_lanes.") else ARGMAX_ROWS


def ends_norms(profile: DeviceProfile, fmt: str, rows: int, cols: int, tokens: int) -> bool:
    """Whether :func:`linear` can end an RMSNorm of ``tokens`` rows of f32 that such a matrix multiplies: for
    few rows."""
    return (
        split_norm.can_split(cols)
        and tokens <= MATVEC_TOKENS
        and not tuned_variant(profile, fmt, rows, cols, tokens).startswith("coop")
    )


def _split_norms(
    rows: int,
    y: Ref,
    bias: Ref | None,
    epilogue: str,
    begin: split_norm.Begin | None,
    norm_eps: float | None,
) -> dict[str, int | float]:
    """The push constants of norms that a product begins and ends."""
    found = dict(split_norm.NOT_SPLIT)
    if begin is not None:
        if not split_norm.can_split(rows) or epilogue in (*PAIRED, "argmax"):
            raise ValueError(f"a product of {rows} rows with the epilogue {epilogue} cannot begin a norm")
        if begin.out.buffer is not y.buffer or (bias and bias.buffer is not begin.weight.buffer):
            raise ValueError("a norm that a product begins must lie in the buffers of its result and bias")
        found |= {"next_weight": begin.weight.offset, "next_offset": begin.out.offset, "next_cols": rows}
    if norm_eps is not None:
        found["norm_eps"] = norm_eps
    return found

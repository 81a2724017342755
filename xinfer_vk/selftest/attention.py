"""Cases of attention: head shapes, cache formats, ragged batches, chunks, splits, NaN where it must not be
looked at, and tokens that it appends by itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xinfer_vk.kernels.append_kv import HeadNorms, Rotation
from xinfer_vk.kernels.attention import Append, attention, exchange, partial_words, query_tile
from xinfer_vk.kernels.base import Ref
from xinfer_vk.kernels.kv import QUANTIZED
from xinfer_vk.plan import BufferKind, DeviceProfile, Step
from xinfer_vk.selftest.batch import Batch, filled_cache
from xinfer_vk.selftest.case import Bench, Build, Case, Tolerance, kernel_cases
from xinfer_vk.selftest.small import any_angles, off_ties, quarter_turns

Sequences = tuple[tuple[int, int], ...]  # (tokens in the cache, new tokens) of each

ATTENTION = Tolerance(
    1e-5, 2e-6, "means of normal numbers, weighted by exp of f32 dot products up to about 8"
)
LARGE = Tolerance(
    2e-3, 0.0, "scores up to about 1000, whose f32 rounding of some 1e-4 is the relative error of a weight"
)
EVERY_CLASS = ("", "without subgroup operations", "as on a GPU")


def _attention(
    kv_dtype: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    sequences: Sequences,
    rows: int,
    *,
    max_context: int = 0,
    query_scale: float = 1.0,
    rising: bool = False,
    nan_at_last: bool = False,
    window: int | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
) -> Build:
    """``max_context``: of the plan, more than what the sequences need. ``rising``: later keys fit the
    queries better, so the running maximum moves in every block. ``nan_at_last``: the last token of each
    sequence has NaN keys and values, which only its own row may see. ``window``, ``softcap``, ``scale``: as
    in :func:`attention`; what has left the window of a sequence's first new token is NaN, and of two tokens
    or more what has left the second's."""

    def build(bench: Bench) -> list[Step]:
        P = bench.profile
        batch = Batch(sequences, rows, tile=query_tile(P, head_dim))
        rng = np.random.default_rng(head_dim * heads)
        lengths = [past + new for past, new in sequences]
        direction = rng.standard_normal(head_dim)
        keys = [rng.standard_normal((n, kv_heads, head_dim)) for n in lengths]
        values = [rng.standard_normal((n, kv_heads, head_dim)) for n in lengths]
        if rising:
            keys = [k + np.linspace(0, 3, len(k))[:, None, None] * direction for k in keys]
        if nan_at_last:
            for some in (*keys, *values):
                some[-1] = np.nan
        if window is not None:
            for i, (past, new) in enumerate(sequences):
                expired = max(past + 1 - window + (new > 1), 0)
                keys[i][:expired] = values[i][:expired] = np.nan
        q_stride, out_stride = heads * head_dim + 9, heads * head_dim + 2
        queries = rng.standard_normal((batch.tokens, heads * head_dim)) * query_scale
        if rising:
            queries += np.tile(direction, heads)
        padded = np.full((rows, q_stride), np.nan, np.float32)
        padded[: batch.tokens, : heads * head_dim] = queries
        q = bench.filled("q", np.full(5 + padded.size, np.nan, np.float32))
        bench.write(q, 5, padded)
        cache = filled_cache(bench, batch, kv_dtype, kv_heads, head_dim, keys, values)
        out = bench.buffer("out", 3 + rows * out_stride)
        context = max_context or batch.max_context
        words = partial_words(P, rows, heads, head_dim, context)
        partials = bench.buffer("partials", 4 + words)
        return attention(
            P, kv_dtype, Ref(q, 5), q_stride, Ref(out, 3), out_stride, cache.buffer, cache.k_offset,
            cache.v_offset, heads, kv_heads, head_dim, rows, context, batch.state_buffer(bench),
            Ref(partials, 4), window=window, softcap=softcap, scale=scale,
        )  # fmt: skip

    return build


@dataclass(frozen=True)
class _Appended:
    """One new token of each sequence, which attention appends: ``rotary_dim`` dims turned (0: they know no
    positions) by the angles of its position or ``by_token``. In an f32 cache, by angles that round; in others
    by quarter turns, and no norm, so that every device rounds the same numbers. ``nan``: the last sequence's
    new key and value are NaN. Others as in :func:`_attention`."""

    kv_dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    positions: tuple[int, ...]
    rows: int
    by_token: bool = False
    norm: bool = False
    nan: bool = False
    max_context: int = 0
    window: int | None = None
    softcap: float = 0.0

    def __str__(self) -> str:
        how = ", normalized" * self.norm + ", angles by token" * self.by_token + ", NaN" * self.nan
        how += f", window of {self.window}" * (self.window is not None) + ", capped" * (self.softcap > 0)
        how += f", for a context of {self.max_context}" * (self.max_context > 0)
        heads = f"{self.heads}/{self.kv_heads} heads of {self.head_dim}, {self.rotary_dim} turned"
        return f"appended, {self.kv_dtype}, {heads}{how}, {len(self.positions)} of {self.rows} rows"

    def __call__(self, bench: Bench) -> list[Step]:
        P, rng = bench.profile, np.random.default_rng(self.head_dim)
        batch = Batch(tuple((position, 1) for position in self.positions), self.rows)
        q_dim, kv_dim = self.heads * self.head_dim, self.kv_heads * self.head_dim
        old = [
            [rng.standard_normal((n, self.kv_heads, self.head_dim)) for n in self.positions] for _ in range(2)
        ]
        cache = filled_cache(bench, batch, self.kv_dtype, self.kv_heads, self.head_dim, *old)
        stride = q_dim + 2 * kv_dim + 7
        rows = np.full((self.rows, stride), np.nan, np.float32)
        new = rng.standard_normal((batch.tokens, q_dim + 2 * kv_dim)).astype(np.float32)
        if self.kv_dtype in QUANTIZED:
            new[:, q_dim:] = off_ties(rng, new[:, q_dim:], self.kv_dtype)
        if self.nan:
            new[-1, q_dim:] = np.nan
        rows[: batch.tokens, :-7] = new
        q = bench.buffer("q", 5 + rows.size)
        bench.write(q, 5, rows)
        weights = rng.standard_normal(2 * self.head_dim + 5).astype(np.float32)
        weight = bench.filled("weight", weights, BufferKind.WEIGHTS)
        norms = HeadNorms(Ref(weight, self.head_dim + 4), Ref(weight, 1), 1e-5) if self.norm else None
        table_rows = batch.tokens if self.by_token else batch.max_context
        table = bench.buffer("table", 5 + table_rows * self.rotary_dim, BufferKind.WEIGHTS)
        angles = any_angles if self.kv_dtype == "f32" else quarter_turns
        bench.write(table, 5, angles(table_rows, self.rotary_dim // 2))
        rotation = Rotation(Ref(table, 5), self.rotary_dim, self.by_token) if self.rotary_dim else None
        out = bench.buffer("out", 3 + self.rows * (q_dim + 2))
        context = self.max_context or batch.max_context
        words = partial_words(P, self.rows, self.heads, self.head_dim, context)
        return attention(
            P, self.kv_dtype, Ref(q, 5), stride, Ref(out, 3), q_dim + 2, cache.buffer, cache.k_offset,
            cache.v_offset, self.heads, self.kv_heads, self.head_dim, self.rows, context,
            batch.state_buffer(bench), Ref(bench.buffer("partials", 4 + words), 4), window=self.window,
            softcap=self.softcap, append=Append(norms, rotation),
        )  # fmt: skip


PREFILL: Sequences = ((0, 33), (40, 7), (31, 1), (0, 1), (63, 2))  # chunks that begin and end anywhere
# Octets whose rows see different numbers of tokens, the last of which ends a run of four.
AT_FOURTHS: Sequences = ((30, 6), (62, 2))
DECODE: Sequences = ((0, 1), (31, 1), (32, 1), (257, 1), (64, 1))


def _always(P: DeviceProfile) -> bool:
    return True


def _shares_anyway(P: DeviceProfile) -> bool:
    """Devices whose own variant is the one with barriers. lavapipe takes 10 s to compile it for large
    head dims: tests run it there for small ones."""
    return exchange(P) == "shared"


def _cases() -> list[Case]:
    cases: list[Case] = []
    shapes = (  # kv dtype, heads, KV heads, head dim, in the user's selftest
        ("f16", 9, 3, 64, True), ("f32", 9, 3, 64, True), ("f16", 14, 2, 64, True),
        ("f16", 4, 4, 32, False), ("f16", 8, 1, 128, True), ("f32", 8, 1, 128, False),
        ("f16", 5, 1, 80, False), ("f32", 2, 1, 96, False), ("f16", 4, 1, 256, True),
        ("f16", 3, 1, 34, True), ("f32", 7, 7, 18, False), ("f32", 3, 3, 2, False),
        ("q8_0", 9, 3, 64, True), ("q4_0", 9, 3, 64, True), ("q8_0", 3, 1, 160, False),
        ("q4_0", 3, 1, 96, False), ("q8_0", 2, 1, 32, False), ("q4_0", 2, 1, 256, False),
    )  # fmt: skip
    for kv_dtype, heads, kv_heads, head_dim, quick in shapes:
        shape = f"{kv_dtype}, {heads}/{kv_heads} heads of {head_dim}"
        classes: tuple[str, ...] = ("",)
        if head_dim in (2, 34, 128) or (heads == 9 and kv_dtype == "f16"):
            classes = EVERY_CLASS
        elif kv_dtype in QUANTIZED and head_dim == 64:
            classes = ("", "as on a GPU")
        applies = _shares_anyway if head_dim == 128 else _always
        for what, sequences, rows in (("prefill", PREFILL, 48), ("decode", DECODE, 8)):
            if kv_dtype in QUANTIZED and head_dim != 64 and what == "decode":
                continue  # what differs from the other head dims is the same in both
            build = _attention(kv_dtype, heads, kv_heads, head_dim, sequences, rows)
            name = f"{what}, {shape}"
            cases += kernel_cases(
                "attention", name, build, ATTENTION, classes=classes, quick=quick, applies=applies
            )
    for kv_dtype in ("f16", "f32"):
        build = _attention(kv_dtype, 3, 1, 64, ((2100, 1), (0, 1), (700, 1)), 4, max_context=4096)
        name = f"decode split for a context of 4096, {kv_dtype}"
        also = ("as on a GPU",) if kv_dtype == "f16" else ()
        cases += kernel_cases("attention", name, build, ATTENTION, classes=("", *also))
    build = _attention("f16", 3, 1, 64, ((4095, 1),), 1, max_context=4096)
    cases += kernel_cases("attention", "decode at position 4095, f16", build, ATTENTION, quick=False)
    one_long = _attention("f16", 3, 1, 64, ((0, 257),), 512)
    cases += kernel_cases("attention", "one chunk of 257 of 512 rows, f16", one_long, ATTENTION, quick=False)
    many = _attention("f16", 3, 1, 64, tuple((i, 1) for i in range(40)), 64)
    cases += kernel_cases("attention", "40 sequences in one batch, f16", many, ATTENTION, quick=False)
    for what, sequences, rows in (("prefill", PREFILL, 48), ("decode", DECODE, 8)):
        build = _attention("f32", 3, 1, 64, sequences, rows, query_scale=30.0, rising=True)
        cases += kernel_cases("attention", f"{what}, scores up to 1000, f32", build, LARGE)
    for what, sequences, rows in (("prefill", PREFILL + AT_FOURTHS, 64), ("decode", AT_FOURTHS, 8)):
        build = _attention("f16", 3, 1, 64, sequences, rows, nan_at_last=True)
        name = f"{what}, NaN in the last token of each sequence, f16"
        views = {"partials": "any"}  # max(x, NaN) is x or NaN, by device; what is joined is NaN either way
        cases += kernel_cases("attention", name, build, ATTENTION, classes=EVERY_CLASS, views=views)
    # Windows that begin in the first block and later, at its edges and inside, for chunks longer than the
    # window and tokens that stand before its end; a soft cap that matters, and a scale of its own.
    windows: tuple[tuple[int, float, float | None, str, int, int, int, Sequences, int], ...] = (
        (1, 0.0, None, "f32", 3, 1, 64, PREFILL, 48), (33, 0.0, None, "f16", 3, 1, 64, PREFILL, 48),
        (40, 50.0, 0.1, "f16", 4, 1, 256, ((0, 33), (70, 40), (100, 1)), 128),
        (32, 2.0, 0.2, "f16", 3, 1, 64, DECODE, 8), (100, 0.0, None, "f32", 3, 1, 80, DECODE, 8),
        (2049, 0.0, None, "f16", 3, 1, 64, ((2100, 1), (0, 1), (2900, 1)), 4),
    )  # fmt: skip
    for window, softcap, scale, kv_dtype, heads, kv_heads, head_dim, sequences, rows in windows:
        build = _attention(
            kv_dtype, heads, kv_heads, head_dim, sequences, rows, max_context=4096 if window > 2048 else 0,
            window=window, softcap=softcap, scale=scale,
        )  # fmt: skip
        shape = f"{kv_dtype}, {heads}/{kv_heads} heads of {head_dim}, {rows} rows"
        name = f"window of {window}, soft cap {softcap:g}, {shape}"
        quick = window in (32, 33)
        also = ("as on a GPU",) if quick else ()
        cases += kernel_cases("attention", name, build, ATTENTION, classes=("", *also), quick=quick)
    return cases + _appended_cases()


def _appended_cases() -> list[Case]:
    some, few = (0, 31, 32, 257, 64), (40, 0, 63)
    small, own_and_gpu = EVERY_CLASS, ("", "as on a GPU")
    cases: list[Case] = []
    for case, classes, quick in (
        (_Appended("f16", 9, 3, 64, 64, some, 8), own_and_gpu, True),
        (_Appended("f32", 9, 3, 64, 64, some, 8, norm=True), own_and_gpu, True),
        (_Appended("q8_0", 9, 3, 64, 64, some, 8), own_and_gpu, True),
        (_Appended("q4_0", 9, 3, 64, 64, some, 8), own_and_gpu, True),
        (_Appended("f32", 6, 2, 34, 18, few, 4, norm=True, by_token=True), small, False),
        (_Appended("f32", 3, 1, 34, 34, few, 4, window=33, softcap=2.0), small, False),
        (_Appended("f16", 4, 2, 18, 0, few, 4), small, False),
        (_Appended("f32", 2, 1, 80, 64, few, 4, norm=True), ("",), False),
        (_Appended("q8_0", 3, 1, 96, 64, few, 4, by_token=True), ("",), False),
        (_Appended("q4_0", 2, 1, 128, 128, few, 4), ("",), False),
        # two workgroups for the heads of a KV head, of which one writes
        (_Appended("f16", 14, 1, 32, 32, few, 4), own_and_gpu, False),
        # in the last split, where it is in use
        (_Appended("f16", 3, 1, 64, 64, (2100, 0, 700), 4, max_context=4096), own_and_gpu, True),
        (_Appended("f32", 3, 1, 34, 34, (2176, 96, 4064), 4, max_context=4096, window=2049), ("",), False),
        (_Appended("f16", 3, 1, 64, 64, few, 4, nan=True), own_and_gpu, False),
    ):  # fmt: skip
        view = "u32" if case.kv_dtype in QUANTIZED else case.kv_dtype
        cases += kernel_cases(
            "attention", str(case), case, ATTENTION, classes=classes, quick=quick,
            views={"cache": view, "partials": "any" if case.nan else "f32"},
        )  # fmt: skip
    return cases


CASES = _cases()

"""Token embedding: every format on every Vulkan device, bit for bit.

No tolerance: a decoded weight has one rounding at most (the sum d q + m; d q alone is exact, 11 bits
times at most 13 of scale and weight), and so has its product with the scale, so float64 rounded to
float32 is the answer.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from weight_matrices import BLOCK_SIZES, FORMATS, random_matrix, whole_blocks

from xinfer_vk.kernels import state as st
from xinfer_vk.kernels.base import Part, Ref
from xinfer_vk.kernels.embed import embed
from xinfer_vk.kernels.layout import row_words
from xinfer_vk.plan import Buffer, BufferKind, Plan
from xinfer_vk.reference import NumpyRuntime

POISON = np.float32(np.nan)


def run_embed(
    rt: Any,
    fmt: str,
    words: np.ndarray,
    rows: int,
    cols: int,
    ids: list[int],
    tokens: int,
    scale: float = 1.0,
    splits: tuple[int, ...] = (),
) -> np.ndarray:
    """Embed ``ids`` in a plan of ``tokens`` rows; returns all of ``out`` [tokens, cols + 3]."""
    buffers: list[Buffer] = []

    def put(name: str, kind: BufferKind, values: np.ndarray) -> Buffer:
        buffers.append(rt.allocate(name, values.size, kind))
        rt.write(buffers[-1], 0, values.reshape(-1).view(np.uint32))
        return buffers[-1]

    bounds = (0, *splits, rows)
    per_row, parts = row_words(fmt, cols), []
    for i, (first, last) in enumerate(pairwise(bounds)):
        piece = words[first * per_row : -(-last // 8) * 8 * per_row]
        padded = np.concatenate((np.full(4 * i, 0x7FC0DEAD, np.uint32), piece))
        parts.append(Part(put(f"w{i}", BufferKind.WEIGHTS, padded), 4 * i, first, last - first))
    state = np.zeros(st.BLOCK_TABLE, np.uint32)
    state[st.N_TOKENS] = len(ids)
    state[st.TOKEN_ID : st.TOKEN_ID + tokens] = rows - 1  # unused rows name a token, too
    state[st.TOKEN_ID : st.TOKEN_ID + len(ids)] = ids
    out = put("out", BufferKind.SCRATCH, np.full(5 + tokens * (cols + 3), POISON))
    steps = embed(
        rt.profile,
        fmt,
        parts,
        cols,
        put("state", BufferKind.STATE, state),
        Ref(out, 5),
        cols + 3,
        tokens,
        scale,
    )
    recorded = rt.prepare(Plan("test", tuple(steps)))
    recorded.run()
    if hasattr(recorded, "release"):
        recorded.release()
    result = rt.read(out, 0, out.words).view(np.float32)
    for buffer in buffers:
        rt.free(buffer)
    assert np.isnan(result[:5]).all(), "wrote before the output"
    return result[5:].reshape(tokens, cols + 3)


def check(rt: Any, fmt: str, rows: int, cols: int, ids: list[int], tokens: int, **options: Any) -> None:
    matrix = random_matrix(fmt, rows, cols, np.random.default_rng(rows + cols))
    got = run_embed(rt, fmt, matrix.words, rows, cols, ids, tokens, **options)
    want = matrix.dense[ids].astype(np.float32) * np.float32(options.get("scale", 1.0))
    np.testing.assert_array_equal(got[: len(ids), :cols], want)
    assert np.isnan(got[len(ids) :]).all(), "wrote an unused row"
    assert np.isnan(got[:, cols:]).all(), "wrote beyond a row"


def cases(fmt: str) -> list[tuple[int, int, list[int], int]]:
    widths = (32, 64, 96, 288, 1056) if fmt in BLOCK_SIZES else (1, 3, 31, 65, 257)
    widths = tuple(whole_blocks(fmt, cols) for cols in widths)
    return [
        (1, widths[0], [0], 1),
        (7, widths[1], [6, 0, 3], 4),
        (33, widths[2], [32, 8, 8, 31, 0, 7], 8),
        (65, widths[3], list(range(64, 33, -1)), 33),
        (257, widths[4], [256, 255, 0], 257),
    ]


@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_of_the_table_come_out_exactly(fmt: str, runtime: Any) -> None:
    for rows, cols, ids, tokens in cases(fmt):
        check(runtime, fmt, rows, cols, ids, tokens)


@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_are_scaled(fmt: str, runtime: Any) -> None:
    check(runtime, fmt, 33, whole_blocks(fmt, 64), [5, 30], 2, scale=float(np.float32(np.sqrt(640.0))))


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_table_in_parts_gives_the_same_rows(fmt: str, runtime: Any) -> None:
    check(runtime, fmt, 100, whole_blocks(fmt, 96), [99, 8, 7, 0, 71, 72, 15], 8, splits=(8, 72))


def test_an_id_beyond_the_table_writes_nothing(runtime: Any) -> None:
    matrix = random_matrix("q4_1", 9, 32, np.random.default_rng(0))
    got = run_embed(runtime, "q4_1", matrix.words, 9, 32, [9, 8, 0xFFFFFFFF], 3)
    assert np.isnan(got[[0, 2]]).all()
    assert np.isfinite(got[1, :32]).all()


def test_every_half_precision_number_is_decoded_exactly(runtime: Any) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).reshape(8, 8192)
    words = np.ascontiguousarray(halves.view(np.uint32).T).reshape(-1)  # one group: word by word, row by row
    got = run_embed(runtime, "f16", words, 8, 8192, list(range(8)), 8)[:, :8192]
    want = halves.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(got, want)
    upper = run_embed(runtime, "bf16", words, 8, 8192, list(range(8)), 8)[:, :8192]
    exact = (halves.astype(np.uint32) << 16).view(np.float32)
    normal = np.isfinite(exact) & (np.abs(exact) >= np.finfo(np.float32).tiny)  # denormals may be flushed
    np.testing.assert_array_equal(upper[normal], exact[normal])


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_oracle_gives_the_same_rows(fmt: str) -> None:
    rt = NumpyRuntime()
    for rows, cols, ids, tokens in cases(fmt):
        check(rt, fmt, rows, cols, ids, tokens)
    check(rt, fmt, 100, whole_blocks(fmt, 96), [99, 8, 7, 0, 71, 72, 15], 8, splits=(8, 72))


def test_a_misplaced_table_is_refused_by_name() -> None:
    rt = NumpyRuntime()
    buffer = rt.allocate("w", 64, BufferKind.WEIGHTS)
    with pytest.raises(ValueError, match="word 2"):
        embed(rt.profile, "f32", [Part(buffer, 2, 0, 8)], 4, buffer, Ref(buffer), 4, 1)
    with pytest.raises(ValueError, match="33 columns"):
        embed(rt.profile, "q8_0", [Part(buffer, 0, 0, 8)], 33, buffer, Ref(buffer), 4, 1)

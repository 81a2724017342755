"""Attention: every case on every device, and against dense softmax attention in float64, written here."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from xinfer_vk.errors import UsageError
from xinfer_vk.kernels import kv
from xinfer_vk.kernels.append_kv import HeadNorms, Rotation, append_kv
from xinfer_vk.kernels.attention import Append, attention, geometry, partial_words, query_tile
from xinfer_vk.kernels.base import Ref
from xinfer_vk.kernels.rope import rope_table
from xinfer_vk.plan import BufferKind
from xinfer_vk.reference import NUMPY_PROFILE, NumpyRuntime
from xinfer_vk.selftest import attention as cases
from xinfer_vk.selftest.batch import Batch, filled_cache
from xinfer_vk.selftest.case import Bench

TOLERANCE = 1e-5  # outputs are means of normal numbers; f32 scores up to about 8


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_device_equals_oracle(runtime, case):
    if not case.applies(runtime.profile):
        pytest.skip("the same as another case on this device, or too long to compile")
    assert case.run(runtime).problem == ""


def dense_attention(q, keys, values, past, window=None, softcap=0.0, scale=None):
    """softmax(scale q kᵀ) v with a causal mask, one head and one query at a time, in float64.

    A query at position i sees keys j with i - j < window.
    q [new, heads, d]; keys, values [past + new, kv_heads, d].
    """
    out = np.zeros(q.shape)
    for t in range(q.shape[0]):
        for h in range(q.shape[1]):
            g = h // (q.shape[1] // keys.shape[1])
            sees = slice(max(0, past + t + 1 - (window or past + t + 1)), past + t + 1)
            scores = keys[sees, g].astype(float) @ q[t, h].astype(float) * (scale or q.shape[2] ** -0.5)
            if softcap:
                scores = np.tanh(scores / softcap) * softcap
            p = np.exp(scores - scores.max())
            out[t, h] = p @ values[sees, g].astype(float) / p.sum()
    return out


def attend(
    runtime,
    sequences,
    rows,
    heads,
    kv_heads,
    head_dim,
    kv_dtype="f16",
    *,
    profile=None,
    context=0,
    seed=0,
    **options,
):
    """(device's output, dense output), both [tokens, heads, head_dim], of random numbers."""
    bench = Bench(runtime, profile or runtime.profile)
    rng = np.random.default_rng(seed)
    batch = Batch(sequences, rows, tile=query_tile(bench.profile, head_dim), seed=seed)

    def vectors(n):  # that the cache holds without rounding them
        return kv.unpack(kv.pack(rng.standard_normal((n, kv_heads, head_dim)), kv_dtype), kv_dtype)

    keys, values = [[vectors(past + new) for past, new in sequences] for _ in range(2)]
    q = rng.standard_normal((batch.tokens, heads, head_dim)).astype(np.float32)
    try:
        cache = filled_cache(bench, batch, kv_dtype, kv_heads, head_dim, keys, values)
        width, context = heads * head_dim, context or batch.max_context
        queries = bench.buffer("q", rows * width)
        bench.write(queries, 0, q)
        out = bench.buffer("out", rows * width)
        partials = bench.buffer("partials", 1 + partial_words(bench.profile, rows, heads, head_dim, context))
        steps = attention(
            bench.profile, kv_dtype, Ref(queries), width, Ref(out), width, cache.buffer, cache.k_offset,
            cache.v_offset, heads, kv_heads, head_dim, rows, context, batch.state_buffer(bench),
            Ref(partials), **options,
        )  # fmt: skip
        got = bench.run(steps)["out"].view(np.float32)[: batch.tokens * width].reshape(q.shape)
    finally:
        bench.close()
    want, row = [], 0
    for (past, new), k, v in zip(sequences, keys, values):
        want.append(dense_attention(q[row : row + new], k, v, past, **options))
        row += new
    return got, np.concatenate(want)


@pytest.mark.parametrize("heads, kv_heads", [(3, 1), (7, 1), (8, 1), (6, 2)])
def test_several_heads_share_a_kv_head(runtime, heads, kv_heads):
    for sequences, rows in ((((0, 5), (33, 1)), 8), (((30, 20), (0, 3)), 32)):
        got, want = attend(runtime, sequences, rows, heads, kv_heads, 16)
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("head_dim, kv_dtype", [(80, "f16"), (74, "f16"), (38, "f32")])
def test_head_dims_that_are_no_power_of_two(runtime, head_dim, kv_dtype):
    got, want = attend(runtime, ((61, 7), (0, 2)), 16, 2, 1, head_dim, kv_dtype)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kv_dtype", ["f16", "f32"])
@pytest.mark.parametrize("head_dim", [2, 6, 32, 38, 64, 74, 80, 96, 128, 256])
def test_oracle_equals_dense_attention(numpy_runtime, head_dim, kv_dtype):
    """Every shape; that devices equal the oracle is the cases' to show."""
    for heads, kv_heads in ((1, 1), (3, 1), (7, 1), (8, 1), (9, 3)):
        for sequences, rows in ((((61, 7), (0, 33)), 64), (((31, 1), (32, 1), (0, 1)), 4)):
            got, want = attend(numpy_runtime, sequences, rows, heads, kv_heads, head_dim, kv_dtype)
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 3, 7, 31, 33, 63, 65, 257])
def test_a_prompt_of_any_length(runtime, tokens):
    got, want = attend(runtime, ((0, tokens),), 1 << (tokens - 1).bit_length(), 2, 1, 16)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("position", [0, 30, 31, 32, 62, 63, 64, 255, 1000])
def test_a_token_at_any_position(runtime, position):
    got, want = attend(runtime, ((position, 1),), 1, 2, 1, 16)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


def test_random_ragged_batches(runtime):
    rng = np.random.default_rng(7)
    for _ in range(6):
        count = int(rng.integers(1, 9))
        sequences = tuple((int(rng.integers(0, 80)), int(rng.integers(1, 20))) for _ in range(count))
        tokens = sum(new for _, new in sequences)
        got, want = attend(
            runtime, sequences, 1 << (tokens - 1).bit_length(), 3, 1, 16, seed=int(rng.integers(1000))
        )
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("positions", [(0,), (31, 32, 2047), (4095, 0, 100, 700)])
def test_splits_that_a_short_context_leaves_unused_do_not_matter(runtime, positions):
    """The plan is split for a context of 4096 whatever the sequences' lengths are."""
    assert geometry(runtime.profile, 2, 1, 16, 4, 4096).splits > 1
    got, want = attend(runtime, tuple((p, 1) for p in positions), 4, 2, 1, 16, context=4096)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


def test_splits_cover_every_block_once(numpy_runtime):
    """Through the oracles, at every length up to 20 blocks, for both classes of device."""
    for simd in (True, False):
        profile = replace(NUMPY_PROFILE, simd=simd)
        for past in range(0, 640, 31):
            got, want = attend(numpy_runtime, ((past, 1),), 1, 2, 1, 4, profile=profile, context=4096)
            np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


OPTIONS = (
    {"window": 1}, {"window": 31}, {"window": 32}, {"window": 70, "softcap": 3.0},
    {"window": 1000, "scale": 0.5}, {"softcap": 0.5, "scale": 2.0},
)  # fmt: skip


def test_window_soft_cap_and_scale(runtime):
    """The cases have more of them; here against what is written above."""
    options = {"window": 70, "softcap": 3.0, "scale": 0.5}
    for sequences, rows in ((((0, 40), (61, 7), (100, 1)), 64), (((140, 1), (0, 1), (95, 1)), 4)):
        got, want = attend(runtime, sequences, rows, 3, 1, 16, context=4096, **options)
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_oracle_with_window_soft_cap_and_scale(numpy_runtime, options):
    for simd in (True, False):
        profile = replace(NUMPY_PROFILE, simd=simd)
        for sequences, rows in ((((0, 40), (61, 7), (100, 1)), 64), (((140, 1), (0, 1), (95, 1)), 4)):
            got, want = attend(
                numpy_runtime, sequences, rows, 3, 1, 8, profile=profile, context=4096, **options
            )
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def test_a_soft_cap_holds_where_tanh_overflows(runtime):
    """exp(2 x) is infinite from x = 45 on, and scores here go to hundreds."""
    options = {"softcap": 1.0, "scale": 100.0}
    got, want = attend(runtime, ((20, 5),), 8, 2, 1, 16, **options)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("simd", [True, False])
def test_appending_by_itself_equals_append_kv_before(runtime, simd):
    """Both make keys by the same code, which each shader's compiler may fuse in its own way: the tolerance is
    the rounding of products of about 5 in f32."""
    P, (heads, kv_heads, dim) = replace(runtime.profile, simd=simd), (6, 2, 24)
    batch, rng = Batch(((40, 1), (0, 1), (95, 1)), 4, seed=3), np.random.default_rng(5)
    old = [[rng.standard_normal((past, kv_heads, dim)) for past, _ in batch.sequences] for _ in range(2)]
    width = (heads + 2 * kv_heads) * dim
    numbers = rng.standard_normal((4, width)).astype(np.float32)
    results = []
    for together in (False, True):
        bench = Bench(runtime, P)
        try:
            cache = filled_cache(bench, batch, "f32", kv_heads, dim, *old)
            state, qkv = batch.state_buffer(bench), bench.filled("qkv", numbers)
            norm = bench.filled("norm", np.linspace(0.5, 2, 2 * dim, dtype=np.float32), BufferKind.WEIGHTS)
            norms = HeadNorms(Ref(norm), Ref(norm, dim), 1e-6)
            angles = rope_table(100.0 ** -np.linspace(0, 1, 8), np.arange(96))
            turn = Rotation(Ref(bench.filled("angles", angles, BufferKind.WEIGHTS)), 16)
            out, stride = bench.buffer("out", 4 * heads * dim), heads * dim
            where = cache.buffer, cache.k_offset, cache.v_offset
            steps = attention(
                P, "f32", Ref(qkv), width, Ref(out), stride, *where, heads, kv_heads, dim, 4, 96, state,
                Ref(out), append=Append(norms, turn) if together else None,
            )  # fmt: skip
            if not together:
                steps = [
                    *append_kv(
                        P, "f32", Ref(qkv), width, heads, kv_heads, dim, *where, 4, state, norms, turn
                    ),
                    *steps,
                ]
            results.append(bench.run(steps))
        finally:
            bench.close()
    apart, here = results
    np.testing.assert_array_equal(here["qkv"], numbers.reshape(-1).view(np.uint32))
    for name in ("cache", "out"):
        got, want = (result[name].view(np.float32) for result in (here, apart))
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)


def test_one_chunk_equals_token_by_token(runtime):
    """The two geometries give the same numbers up to rounding."""
    tokens, heads, dim = 8, 3, 64
    together = attend(runtime, ((90, tokens),), 64, heads, 1, dim)[0]
    apart = attend(runtime, ((90, tokens),), 8, heads, 1, dim)[0]
    np.testing.assert_allclose(together, apart, rtol=0, atol=2e-6)


def test_no_tokens_write_nothing(runtime):
    bench = Bench(runtime, runtime.profile)
    try:
        words = Batch(((0, 1),), 1).state()
        words[:3] = 0  # no tokens, no outputs, no tiles
        state = bench.filled("state", words, BufferKind.STATE)
        q, out = bench.buffer("q", 16 * 32), bench.buffer("out", 16 * 32)
        cache = bench.buffer("cache", 2 * 32 * 8, BufferKind.KV)
        for rows in (1, 16):
            steps = attention(
                bench.profile,
                "f16",
                Ref(q),
                32,
                Ref(out),
                32,
                cache,
                0,
                256,
                2,
                1,
                16,
                rows,
                64,
                state,
                Ref(out),
            )
            before = set(bench.run(steps)["out"].tolist())
            assert len(before) == 1, "some words are not poison any more"
    finally:
        bench.close()


@pytest.mark.parametrize("simd", [True, False])
def test_shared_memory_registers_and_groups_stay_within_what_every_device_has(simd):
    for features in (frozenset(), frozenset({"subgroup_shuffle"})):
        P = replace(NUMPY_PROFILE, simd=simd, features=features)
        for heads, kv_heads in ((9, 3), (14, 2), (32, 8), (64, 8), (8, 8), (71, 1)):
            for head_dim in (32, 64, 80, 96, 128, 256):
                for tokens in (1, 8, 16, 64, 512):
                    g = geometry(P, heads, kv_heads, head_dim, tokens, 131072)
                    octets = g.row_octets * g.kv_octets
                    quads = g.rows * (g.row_octets * (-(-head_dim // 8) * 2 + 1) + octets * (9 + 2))
                    assert 16 * quads <= 16 << 10, "more than 16 KiB of shared memory"
                    assert g.local_size <= 256
                    assert simd or g.rows * (head_dim // 8 + 4) <= 100, "more registers than a lane has"
                    joined = (g.kv_octets > 1) * octets * (head_dim + 2)  # words
                    # where it appends: queries, key and value in f32, what the cache gets, squares
                    own = g.rows * head_dim + 4 * head_dim + (g.rows + 1) * (g.local_size + 1)
                    assert 16 * quads + 4 * (joined + own * g.per_token) <= 32 << 10
                    assert g.kv_octets == 1 or g.exchange == "shared"
                    words = partial_words(P, tokens, heads, head_dim, 131072)
                    assert words == (tokens * heads * g.splits * (head_dim + 2) if g.splits > 1 else 0)
                    steps = _steps(P, heads, kv_heads, head_dim, tokens)
                    assert max(max(step.groups) for step in steps) <= 65535


def _steps(P, heads, kv_heads, head_dim, tokens):
    rt = NumpyRuntime(P)
    x = rt.allocate("x", 1, BufferKind.SCRATCH)
    args = (Ref(x), 1, Ref(x), 1, x, 0, 0, heads, kv_heads, head_dim, tokens, 131072, x, Ref(x))
    return attention(P, "f16", *args)


def test_shapes_that_the_kernel_cannot_do_are_refused(numpy_runtime):
    P, x = numpy_runtime.profile, numpy_runtime.allocate("x", 1, BufferKind.SCRATCH)

    def build(kv_dtype="f16", k_offset=0, heads=4, kv_heads=2, head_dim=16, **options):
        args = (Ref(x), 1, Ref(x), 1, x, k_offset, 0, heads, kv_heads, head_dim, 1, 64, x, Ref(x))
        return attention(P, kv_dtype, *args, **options)

    for arguments, message in (
        ({"heads": 5}, "5 query heads cannot share 2 KV heads"),
        ({"kv_heads": 0}, "share 0 KV heads"),
        ({"head_dim": 15}, "head dim 15"),
        ({"kv_dtype": "q8"}, "kv dtype 'q8'"),
        ({"k_offset": 6}, "k offset 6"),
        ({"window": 0}, "window of 0 positions"),
        ({"softcap": -1.0}, "soft cap of -1.0"),
    ):
        with pytest.raises(UsageError, match=message):
            build(**arguments)

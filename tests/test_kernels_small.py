"""RMSNorm, RoPE with the KV cache, SwiGLU, argmax: every case on every device, and against other formulas."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import pytest

from xinfer_vk.errors import UsageError
from xinfer_vk.kernels import kv
from xinfer_vk.kernels import state as st
from xinfer_vk.kernels.append_kv import HeadNorms, Rotation, append_kv
from xinfer_vk.kernels.argmax import NAN_RESULT, NONE_RESULT, argmax, argmax_partial_words
from xinfer_vk.kernels.base import Ref
from xinfer_vk.kernels.rmsnorm import rmsnorm
from xinfer_vk.kernels.rope import rope_table
from xinfer_vk.kernels.swiglu import swiglu
from xinfer_vk.plan import BufferKind
from xinfer_vk.selftest import device, small
from xinfer_vk.selftest.batch import Batch
from xinfer_vk.selftest.case import Bench
from xinfer_vk.selftest.small import HALF_EDGES, logits_of_every_kind

SHADERS = Path(__file__).resolve().parent.parent / "shaders"


@pytest.mark.parametrize("case", [*device.CASES, *small.CASES], ids=str)
def test_device_equals_oracle(runtime, case):
    if not case.applies(runtime.profile):
        pytest.skip("the same as another case on this device")
    assert case.run(runtime).problem == ""


def test_shaders_and_python_agree_on_the_state_buffer():
    """include/state.glsl, evaluated, is kernels/state.py."""
    text = (SHADERS / "include" / "state.glsl").read_text(encoding="utf-8")
    values: dict[str, int] = {}
    for name, expression in re.findall(r"^const uint (\w+) = ([^;]+);", text, re.M):
        values[name] = sum(
            values[term] if term in values else int(term.removesuffix("u"))
            for term in expression.split(" + ")
        )
    assert len(values) == text.count("const uint")
    python = {name: value for name, value in vars(st).items() if name.isupper()}
    assert {name.removeprefix("STATE_"): value for name, value in values.items()} == python


def test_state_arrays_do_not_overlap():
    starts = [
        st.TOKEN_ID,
        st.POSITION,
        st.SEQUENCE,
        st.SLOT,
        st.OUTPUT_ROW,
        st.TILE_START,
        st.TILE_COUNT,
        st.BLOCK_TABLE,
    ]
    assert np.diff(starts).tolist() == [st.MAX_TOKENS] * 7
    assert max(st.N_TOKENS, st.N_OUTPUTS, st.N_QUERY_TILES, st.TABLE_STRIDE) < st.TOKEN_ID


# -- against formulas that the oracles do not share ------------------------------------------------


@pytest.fixture
def bench(runtime):
    made = Bench(runtime, runtime.profile)
    yield made
    made.close()


def test_rmsnorm_is_as_exact_as_a_float32_computation_in_numpy(bench):
    rng = np.random.default_rng(0)
    dim = 2048
    x = (rng.standard_normal((3, dim)) * [[1.0], [300.0], [1e-3]]).astype(np.float32)
    weight = rng.standard_normal(dim).astype(np.float32)
    state = Batch(((0, 3),), 3).state_buffer(bench)
    buffers = bench.filled("x", x), bench.filled("weight", weight), bench.buffer("y", 3 * dim)
    a, w, y = (Ref(b) for b in buffers)
    got = bench.run(rmsnorm(bench.profile, a, dim, w, y, dim, dim, 1e-6, 3, state))["y"].view(np.float32)
    exact = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-6) * weight
    plain = weight * (x * (1 / np.sqrt((x * x).mean(1, keepdims=True) + np.float32(1e-6))))
    assert np.abs(got.reshape(3, dim) - exact).max() <= 2 * np.abs(plain - exact).max()


def appended(
    bench: Bench,
    batch: Batch,
    kv_dtype: str,
    vectors: tuple[np.ndarray, np.ndarray, np.ndarray],
    norms: tuple[np.ndarray, np.ndarray] | None = None,
    angles: np.ndarray | None = None,
) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """Queries, and keys and values of each sequence, after ``vectors`` (queries, keys, values
    [tokens, heads, head_dim] of new tokens) were appended to an empty cache."""
    _, heads, head_dim = vectors[0].shape
    kv_heads = vectors[1].shape[1]
    region = batch.blocks * kv_heads * kv.vector_words(kv_dtype, head_dim) * st.BLOCK_TOKENS
    qkv, stride = np.concatenate(vectors, axis=1), (heads + 2 * kv_heads) * head_dim
    cache, state = bench.buffer("cache", 2 * region, BufferKind.KV), batch.state_buffer(bench)
    by, turn = None, None
    if norms is not None:
        weight = bench.filled("weight", np.concatenate(norms), BufferKind.WEIGHTS)
        by = HeadNorms(Ref(weight), Ref(weight, head_dim), 1e-6)
    if angles is not None:
        table = bench.filled("table", angles, BufferKind.WEIGHTS)
        turn = Rotation(Ref(table), 2 * angles.shape[1])
    steps = append_kv(
        bench.profile, kv_dtype, Ref(bench.filled("qkv", qkv)), stride, heads, kv_heads, head_dim, cache, 0,
        region, batch.rows, state, by, turn,
    )  # fmt: skip
    words = bench.run(steps)
    cached = [
        kv.read_sequence(
            words["cache"], batch.state(), i, new, k_offset=0, v_offset=region, kv_heads=kv_heads,
            head_dim=head_dim, kv_dtype=kv_dtype,
        )
        for i, (_, new) in enumerate(batch.sequences)
    ]  # fmt: skip
    return words["qkv"].view(np.float32).reshape(qkv.shape)[:, :heads], cached


def rotate_half(x: np.ndarray, positions: np.ndarray, inv_freq: np.ndarray) -> np.ndarray:
    """What Hugging Face's ``apply_rotary_pos_emb`` does to [tokens, heads, head_dim]."""
    angles = np.concatenate([positions[:, None] * inv_freq] * 2, axis=1)[:, None]
    half = x.shape[-1] // 2
    rotated = np.concatenate([-x[..., half:], x[..., :half]], axis=-1)
    return np.asarray(x * np.cos(angles) + rotated * np.sin(angles))


def random_vectors(
    seed: int, tokens: int, heads: int, kv_heads: int, dim: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((tokens, n, dim)).astype(np.float32) for n in (heads, kv_heads, kv_heads))
    return q, k, v


@pytest.mark.parametrize("normed", [False, True])
def test_queries_and_keys_are_turned_as_hugging_face_does(bench, normed):
    dim, positions = 16, np.arange(41)
    q, k, v = random_vectors(0, 41, 3, 2, dim)
    inv_freq = 10000.0 ** -(np.arange(0, dim, 2) / dim)
    norms = tuple(np.random.default_rng(1).standard_normal((2, dim)).astype(np.float32)) if normed else None
    queries, [(keys, values)] = appended(
        bench, Batch(((0, 41),), 64, seed=3), "f32", (q, k, v), norms, rope_table(inv_freq, positions)
    )
    if norms is not None:
        q, k = (
            x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6) * w
            for x, w in zip((q, k), norms)
        )
    np.testing.assert_allclose(queries, rotate_half(q, positions, inv_freq), rtol=0, atol=3e-6)
    np.testing.assert_allclose(keys, rotate_half(k, positions, inv_freq), rtol=0, atol=3e-6)
    np.testing.assert_array_equal(values, v)


def test_without_positions_everything_is_cached_as_it_is(bench):
    """Of two sequences, through shuffled blocks; queries stay as they are, and f16 rounds as NumPy does."""
    q, k, v = random_vectors(0, 110, 3, 2, 24)
    v = np.resize(HALF_EDGES[np.isfinite(HALF_EDGES)], k.shape).astype(np.float32)
    queries, cached = appended(bench, Batch(((0, 40), (0, 70)), 110, seed=3), "f16", (q, k, v))
    np.testing.assert_array_equal(queries, q)
    for (keys, values), rows in zip(cached, (slice(0, 40), slice(40, 110))):
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(keys, k[rows].astype(np.float16))
            np.testing.assert_array_equal(values, v[rows].astype(np.float16))


@pytest.mark.parametrize("head_dim", [32, 64, 96])
@pytest.mark.parametrize("kv_dtype", kv.QUANTIZED)
def test_a_quantized_cache_reads_as_ggml_would(bench, kv_dtype, head_dim):
    """Within half a step of what was written, and within one of what the gguf package quantizes to, which
    may round the other way as it divides by a scale in f32. Zeros stay zero, and NaN is not hidden."""
    inv_freq = 10000.0 ** -(np.arange(0, head_dim, 2) / head_dim)
    q, k, v = random_vectors(head_dim, 45, 3, 2, head_dim)
    k, v = k * np.float32(3), v * np.float32(3)
    k[5] = 0.0
    v[7, 1, 3] = np.nan
    _, [(keys, values)] = appended(
        bench, Batch(((0, 45),), 64, seed=3), kv_dtype, (q, k, v), None, rope_table(inv_freq, np.arange(45))
    )
    k = rotate_half(k, np.arange(45), inv_freq).astype(np.float32)
    assert not keys[5].any()
    assert np.isnan(values[7, 1, :32]).all() and not np.isnan(values[7, 0]).any()
    v[7, 1, :32] = values[7, 1, :32] = 0.0
    kind = getattr(gguf.GGMLQuantizationType, kv_dtype.upper())
    for written, read in ((k, keys), (v, values)):
        by_gguf = gguf.dequantize(gguf.quantize(written, kind), kind)
        largest = np.abs(written.reshape(-1, 32)).max(axis=1, keepdims=True)
        step = largest / (127 if kv_dtype == "q8_0" else 8)
        off, other = (np.abs(x - read).reshape(-1, 32) for x in (written, by_gguf))
        # of q4_0's sixteen steps the last one is missing on the side away from the largest number
        most = np.where(off > 0.51 * step, 1.01, 0.51) if kv_dtype == "q4_0" else 0.51
        assert (off <= most * step).all() and (off > 0.51 * step).mean() < 0.02
        assert (other <= 1.01 * step).all() and (other > 0.1 * step).mean() < 0.01


def test_swiglu_neither_overflows_nor_hides_nan(bench):
    gate = np.array([[-1e30, -np.inf, 1e30, np.nan, 0.0, -20.0]], np.float32)
    up = np.array([[1e30, 1.0, 1.0, 1.0, 5.0, 1.0]], np.float32)
    state = Batch(((0, 1),), 1).state_buffer(bench)
    refs = Ref(bench.filled("gate", gate)), Ref(bench.filled("up", up)), Ref(bench.buffer("y", 6))
    got = bench.run(swiglu(bench.profile, *refs, 6, 6, 6, 6, 1, state))["y"].view(np.float32)
    np.testing.assert_allclose(got[[0, 1, 2, 4]], [0.0, 0.0, 1e30, 0.0], rtol=1e-6)
    assert np.isnan(got[3])
    np.testing.assert_allclose(got[5], -20 / (1 + np.exp(20.0)), rtol=1e-5)


@pytest.mark.parametrize("n", [1, 7, 257, 65537])
def test_argmax_is_numpys_argmax(bench, n):
    logits = logits_of_every_kind(n)
    rows = len(logits)
    state = Batch(((0, rows),), rows, outputs=tuple(range(rows))).state_buffer(bench)
    x, result = bench.filled("x", logits), bench.buffer("result", rows, BufferKind.RESULT)
    partials = bench.buffer("partials", argmax_partial_words(bench.profile, n, rows))
    steps = argmax(bench.profile, Ref(x), n, n, rows, Ref(result), Ref(partials), state)
    want = np.where((logits == -np.inf).all(axis=1), NONE_RESULT, logits.argmax(axis=1))
    want = np.where((np.isnan(logits) | (logits == np.inf)).any(axis=1), NAN_RESULT, want)
    assert bench.run(steps)["result"].tolist() == want.tolist()


def test_a_rotary_dim_that_cannot_be_is_refused(numpy_runtime):
    P, x = numpy_runtime.profile, numpy_runtime.allocate("x", 64, BufferKind.SCRATCH)
    for rotary_dim in (0, 7, 18):
        with pytest.raises(UsageError, match=f"rotary dim {rotary_dim} "):
            append_kv(P, "f16", Ref(x), 16, 1, 1, 16, x, 0, 0, 1, x, rotation=Rotation(Ref(x), rotary_dim))


def test_head_norms_of_two_buffers_are_refused(numpy_runtime):
    x, y = (numpy_runtime.allocate(name, 64, BufferKind.SCRATCH) for name in "xy")
    norms = HeadNorms(Ref(x), Ref(y), 1e-6)
    with pytest.raises(ValueError, match="one buffer"):
        append_kv(numpy_runtime.profile, "f16", Ref(x), 16, 1, 1, 16, x, 0, 0, 1, x, norms)

"""The model's logits are a reference's, on every device, and the cache does not change them.

Tolerance 1e-4 absolute with f32 KV: logits here are up to about 15 and pass some 20 sums of up to
100 terms, in another order than the reference's, each off by a few units of 2⁻²⁴ of its size.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import K_SIZES, tiny_config, write_gguf_model, write_hf_model

from xinfer_vk.cache import KVCache
from xinfer_vk.engine.runner import Chunk, ModelRunner
from xinfer_vk.models.registry import family
from xinfer_vk.reference import NumpyRuntime
from xinfer_vk.weights.device import WeightPlanner
from xinfer_vk.weights.formats import FORMATS
from xinfer_vk.weights.quantize.loading import quantized
from xinfer_vk.weights.source import open_model

MODELS = sorted(p.parent for p in (Path(__file__).parent / "fixtures" / "models").glob("*/reference.npz"))
TOLERANCE = 1e-4
CHUNKINGS = [1, 5, 32, None]  # prefill chunk sizes; None: the whole prompt


class Loaded:
    """A fixture model on a runtime, able to run several sequences."""

    def __init__(
        self,
        runtime: Any,
        path: Path,
        kv_dtype: str = "f32",
        sequences: int = 3,
        quantize: str | None = None,
        activation_dtype: str = "f32",
    ) -> None:
        source = open_model(path)
        if quantize is not None:
            source, _ = quantized(source, quantize)
        planner = WeightPlanner(source, runtime.profile)
        self.config = source.config
        self.weights = family(self.config.architecture).load(planner, self.config)
        planner.upload(runtime, None)
        self.planner, self.runtime = planner, runtime
        c = self.config
        self.cache = KVCache(
            runtime, layers=c.layers, kv_heads=c.kv_heads, head_dim=c.head_dim, kv_dtype=kv_dtype,
            capacity=3 * 96, sequences=sequences,
        )  # fmt: skip
        self.runner = ModelRunner(
            runtime, c, self.weights, self.cache, max_tokens=128, max_outputs=64,
            activation_dtype=activation_dtype,
        )  # fmt: skip
        source.close()

    def logits(self, token_ids: Sequence[int], chunk: int | None) -> np.ndarray:
        """Logits at every position of one sequence, fed ``chunk`` tokens at a time (32 at most at once)."""
        step = min(chunk or 32, 32)
        return self.logits_of(token_ids, [step] * -(-len(token_ids) // step))

    def logits_of(self, token_ids: Sequence[int], chunks: Sequence[int]) -> np.ndarray:
        """Logits at every position of one sequence, fed in chunks of these sizes."""
        sequence = self.cache.open(len(token_ids))
        rows, at = [], 0
        for size in chunks:
            rows.append(self.runner.run([Chunk(sequence, token_ids[at : at + size], "all")], "logits"))
            at += size
        self.cache.close(sequence)
        return np.concatenate(rows)

    def last_logits(self, token_ids: Sequence[int], chunk: int | None) -> np.ndarray:
        """Logits after the last token, the prompt fed ``chunk`` tokens at a time."""
        sequence = self.cache.open()
        step = chunk or len(token_ids)
        out = np.empty(0)
        for i in range(0, len(token_ids), step):
            out = self.runner.run([Chunk(sequence, token_ids[i : i + step])], "logits")
        self.cache.close(sequence)
        return out[0]

    def free(self) -> None:
        self.runner.free()
        self.cache.free()
        self.planner.free(self.runtime)


@pytest.fixture(scope="module", params=MODELS, ids=lambda p: p.name)
def reference(request: pytest.FixtureRequest) -> tuple[Path, np.ndarray, np.ndarray]:
    data = np.load(request.param / "reference.npz")
    return request.param, data["token_ids"], data["logits"]


@pytest.fixture(scope="module")  # a device compiles a model's plans once
def loaded(runtime: Any, reference: tuple[Path, np.ndarray, np.ndarray]) -> Iterator[Loaded]:
    model = Loaded(runtime, reference[0])
    yield model
    model.free()


def worst(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max())


def test_numpy_logits_equal_transformers(reference: tuple[Path, np.ndarray, np.ndarray]) -> None:
    path, token_ids, want = reference
    assert worst(Loaded(NumpyRuntime(), path).logits(token_ids, None), want) <= TOLERANCE


def test_device_logits_equal_transformers(
    loaded: Loaded, reference: tuple[Path, np.ndarray, np.ndarray], record_property: Any
) -> None:
    _, token_ids, want = reference
    error = worst(loaded.logits(token_ids, None), want)
    record_property("max_abs_error", error)
    assert error <= TOLERANCE


@pytest.mark.parametrize("chunk", CHUNKINGS)
def test_chunked_prefill_ends_in_the_same_logits(
    loaded: Loaded, reference: tuple[Path, np.ndarray, np.ndarray], chunk: int | None
) -> None:
    _, token_ids, want = reference
    assert worst(loaded.last_logits(token_ids, chunk), want[-1]) <= TOLERANCE


def test_cached_logits_equal_recomputed_logits(
    loaded: Loaded, reference: tuple[Path, np.ndarray, np.ndarray]
) -> None:
    """Every decode step over the cache against a fresh prefill of the whole history."""
    _, token_ids, _ = reference
    stepwise = loaded.logits(token_ids[:40], 1)
    for n in (1, 2, 31, 32, 33, 40):
        assert worst(stepwise[n - 1], loaded.last_logits(token_ids[:n], None)) <= TOLERANCE


@pytest.mark.parametrize("count", [2, 3])
def test_a_ragged_batch_gives_each_sequence_its_own_logits(
    loaded: Loaded, reference: tuple[Path, np.ndarray, np.ndarray], count: int
) -> None:
    """Sequences of different lengths: prefilled together, decoded together, then one finishes and its
    blocks are reused by a newcomer while the others go on."""
    _, token_ids, want = reference
    starts = [7, 33, 50][:count]
    cache, runner = loaded.cache, loaded.runner
    sequences = [cache.open() for _ in starts]
    out = runner.run([Chunk(s, token_ids[:n]) for s, n in zip(sequences, starts)], "logits")
    for row, n in zip(out, starts):
        assert worst(row, want[n - 1]) <= TOLERANCE
    for step in range(5):
        out = runner.run([Chunk(s, token_ids[n + step :][:1]) for s, n in zip(sequences, starts)], "logits")
        for row, n in zip(out, starts):
            assert worst(row, want[n + step]) <= TOLERANCE
    cache.close(sequences[0])
    sequences[0] = cache.open()
    mixed = [Chunk(sequences[0], token_ids[:40]), Chunk(sequences[1], token_ids[starts[1] + 5 :][:3])]
    out = runner.run(mixed, "logits")
    assert worst(out[0], want[39]) <= TOLERANCE
    assert worst(out[1], want[starts[1] + 7]) <= TOLERANCE
    for sequence in sequences:
        cache.close(sequence)
    assert cache.pool.free_blocks == cache.pool.count


def test_argmax_is_that_of_the_logits(loaded: Loaded, reference: tuple[Path, np.ndarray, np.ndarray]) -> None:
    _, token_ids, want = reference
    sequence = loaded.cache.open()
    got = loaded.runner.run([Chunk(sequence, token_ids[:32], "all")])
    loaded.cache.close(sequence)
    assert got.tolist() == want[:32].argmax(axis=1).tolist()


def k_quant_mix(name: str) -> str:
    """As Q4_K_M mixes formats: the layers are unlike, and so are q, k and v."""
    if "embed_tokens" in name or "lm_head" in name:
        return "q6_k"
    if "v_proj" in name or "down_proj" in name:
        return "q6_k" if ".layers.0." in name else "q5_0"
    return "q4_k"


def every_block_format(name: str) -> str:
    """One after the other, by the tensor's name."""
    kinds = [f.name for f in FORMATS.values() if f.block > 1]
    return kinds[zlib.crc32(name.encode()) % len(kinds)]


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
@pytest.mark.parametrize("mix", [k_quant_mix, every_block_format])
def test_logits_of_mixed_low_bit_files_equal_those_of_their_dequantized_weights(
    tmp_path: Path, mix: Callable[[str], str], architecture: str
) -> None:
    config = tiny_config(architecture, **K_SIZES)
    dense = write_gguf_model(tmp_path / "mixed.gguf", config, fmt=mix)
    write_hf_model(tmp_path / "dense", config, dense)
    tokens = list(range(7, 71, 3))
    want = Loaded(NumpyRuntime(), tmp_path / "dense").logits(tokens, None)
    assert np.ptp(want) > 1
    assert worst(Loaded(NumpyRuntime(), tmp_path / "mixed.gguf").logits(tokens, None), want) <= TOLERANCE


def test_device_logits_of_a_k_quant_mix_equal_those_of_its_dequantized_weights(
    runtime: Any, tmp_path: Path
) -> None:
    config = tiny_config("llama", **K_SIZES, num_hidden_layers=2)
    write_hf_model(tmp_path / "dense", config, write_gguf_model(tmp_path / "m.gguf", config, fmt=k_quant_mix))
    tokens = list(range(7, 71, 3))
    want = Loaded(NumpyRuntime(), tmp_path / "dense").logits(tokens, None)
    model = Loaded(runtime, tmp_path / "m.gguf")
    try:
        assert worst(model.logits(tokens, None), want) <= TOLERANCE
        assert worst(model.logits(tokens[:6], 1), want[:6]) <= TOLERANCE
    finally:
        model.free()


@pytest.mark.parametrize(("kv_dtype", "limit"), [("q8_0", 0.02), ("q4_0", 0.3)])
def test_quantized_caches_stay_near_the_f32_one(
    runtime: Any, tmp_path: Path, kv_dtype: str, limit: float
) -> None:
    """Keys and values are off by up to 1/254 and 1/16 of the largest of 32; ``limit``: of the largest logit.
    A token in a block is not changed when its neighbours are written: chunks of any size, tokens written once
    more after they were cut off, and a fork give the same, but for numbers that may round the other way."""
    path = tmp_path / "model"
    write_hf_model(path, tiny_config("llama", head_dim=32, initializer_range=0.1), seed=5)
    tokens = list(range(7, 71, 3)) * 2
    want = Loaded(NumpyRuntime(), path).logits(tokens, None)
    model = Loaded(runtime, path, kv_dtype=kv_dtype)
    try:
        size = float(np.abs(want).max())
        got = model.logits(tokens, None)
        assert limit / 100 * size < worst(got, want) <= limit * size
        oracle = Loaded(NumpyRuntime(), path, kv_dtype=kv_dtype).logits(tokens, None)
        assert worst(got, oracle) <= limit / 4 * size
        assert worst(model.logits(tokens, 7), got) <= limit / 4 * size
        sequence = model.cache.open()
        model.runner.run([Chunk(sequence, [*tokens[:37], 9, 8, 7])])
        model.cache.truncate(sequence, 37)
        again = model.runner.run([Chunk(sequence, tokens[37:], "all")], "logits")
        assert worst(again, got[37:]) <= limit / 4 * size
        fork = model.cache.fork(sequence, 37)  # of the first block
        again = model.runner.run([Chunk(fork, tokens[32:], "all")], "logits")
        assert worst(again, got[32:]) <= limit / 4 * size
    finally:
        model.free()


def test_f16_cache_stays_near_the_f32_one(runtime: Any) -> None:
    """f16 keeps 11 bits: K and V are off by up to 2⁻¹² of their size, and so, roughly, are the logits."""
    path = MODELS[0]
    data = np.load(path / "reference.npz")
    model = Loaded(runtime, path, kv_dtype="f16")
    error = worst(model.logits(data["token_ids"], None), data["logits"])
    model.free()
    assert 0 < error <= 15 * 2.0**-9

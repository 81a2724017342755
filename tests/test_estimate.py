"""``estimate`` tells what a run then allocates; nothing is allocated to tell it."""

from __future__ import annotations

import json
import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import assert_one_error, xinfer
from conftest import DeviceUnderTest
from model_files import QWEN2_5_0_5B, tensor_shapes, with_header

from xinfer_vk import LLM
from xinfer_vk.engine.config import EngineConfig
from xinfer_vk.engine.estimate import Estimator, shape_source
from xinfer_vk.errors import OutOfMemoryError, UsageError
from xinfer_vk.models.shapes import SHAPES
from xinfer_vk.reference import NUMPY_PROFILE
from xinfer_vk.vulkan.runtime import open_runtime
from xinfer_vk.weights.source import open_model


def test_a_run_allocates_what_was_told(device: DeviceUnderTest, tiny_model: Path) -> None:
    _check_run(str(device.index), tiny_model, "f16", 64, 1)


@pytest.mark.parametrize("kv_dtype", ["f32", "f16"])  # head dims of the tiny model are 8
@pytest.mark.parametrize(("context", "batch"), [(64, 1), (500, 3)])
def test_so_do_other_sizes_and_formats(tiny_model: Path, kv_dtype: str, context: int, batch: int) -> None:
    _check_run("numpy", tiny_model, kv_dtype, context, batch)


def _check_run(device: str, tiny_model: Path, kv_dtype: str, context: int, batch: int) -> None:
    """To the byte: weights, cache and activations; and what the sampler takes on top of that."""
    with open_model(tiny_model) as source, closing(open_runtime(device)) as runtime:
        told = Estimator(source, runtime.profile).estimate(context, batch, kv_dtype)
    with LLM(tiny_model, device=device, kv_dtype=kv_dtype, context=context, kv_memory=told.kv_bytes) as llm:
        assert llm.runtime.allocated_bytes == told.weight_bytes
        prompts = [[5 + i, 6, 7] for i in range(batch)]
        llm.batch(prompts, max_new_tokens=context - 3, ignore_eos=True, stop_token_ids=range(704))
        assert llm.runtime.allocated_bytes == told.total_bytes
        llm.batch(prompts, max_new_tokens=context - 3, temperature=1, stop_token_ids=range(704))
        assert llm.runtime.allocated_bytes == told.total_bytes + told.sampler_bytes


def test_on_discrete_memory_too(
    device: DeviceUnderTest, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    monkeypatch.setenv("XINFER_VK_MEMORY", "discrete")
    with LLM(tiny_model, device=str(device.index), context=64) as llm:
        profile = replace(llm.runtime.profile, unified_memory=False)
        with open_model(tiny_model) as source:
            told = Estimator(source, profile).estimate(64, 1, "f16")
        llm.generate([5, 6, 7], max_new_tokens=2)
        assert told.staging_bytes > 0
        assert llm.runtime.allocated_bytes == told.total_bytes


@pytest.mark.parametrize("quantize", ["q4_k", "q8_0"])
def test_of_a_model_that_is_quantized_while_it_loads(tiny_model: Path, quantize: str) -> None:
    with LLM(tiny_model, device="numpy", quantize=quantize, context=96) as llm:
        with open_model(tiny_model) as source:
            told = Estimator(source, NUMPY_PROFILE, EngineConfig(quantize=quantize)).estimate(96, 1, "f16")
        llm.generate([5, 6, 7], max_new_tokens=2)
        assert llm.runtime.allocated_bytes == told.total_bytes


@pytest.mark.parametrize("quantize", ["q8_0", "q4_0"])
def test_activations_in_8_bits_take_rows_of_their_own(tiny_model: Path, quantize: str) -> None:
    asked = {"quantize": quantize, "activations": "int8"}
    with LLM(tiny_model, device="numpy", context=96, **asked) as llm:
        with open_model(tiny_model) as source:
            told = Estimator(source, NUMPY_PROFILE, EngineConfig(**asked)).estimate(96, 1, "f16")
            exact = Estimator(source, NUMPY_PROFILE, EngineConfig(quantize=quantize)).estimate(96, 1, "f16")
        llm.generate([5, 6, 7], max_new_tokens=2)
        assert llm.runtime.allocated_bytes == told.total_bytes > exact.total_bytes
    command = ("estimate", str(tiny_model), "-d", "numpy", "--activations", "int8", "--json")
    record = json.loads(xinfer(*command, "--quantize", quantize, "-c", "96").stdout)
    assert (record["total_bytes"], record["activations"]) == (told.total_bytes, "int8")
    assert_one_error(xinfer(*command), 2, "activations in int8 need weights in q8_0")


def write_holes(folder: Path) -> Path:
    """A checkpoint of Qwen2.5-0.5B's shape whose data are a hole in the file."""
    header, at = {}, 0
    for name, shape in tensor_shapes(QWEN2_5_0_5B).items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    (folder / "config.json").write_text(json.dumps(QWEN2_5_0_5B))
    with open(folder / "model.safetensors", "wb") as file:
        file.write(with_header(header))
        file.truncate(file.tell() + at)
    return folder


@pytest.mark.parametrize("quantize", [None, "q4_0"])
def test_a_shape_is_the_file_it_stands_for(tmp_path: Path, quantize: str | None) -> None:
    with open_model(write_holes(tmp_path)) as source:
        of_file = Estimator(source, NUMPY_PROFILE, EngineConfig(quantize=quantize)).estimate(4096, 2, "f16")
    told = Estimator(shape_source("qwen2.5-0.5b"), NUMPY_PROFILE, EngineConfig(quantize=quantize))
    told = told.estimate(4096, 2, "f16")
    assert told == of_file
    tokens = 2 * 4096
    assert told.kv_tokens == tokens and told.kv_bytes == 2 * 24 * 2 * 64 * tokens * 2
    assert told.kv_full_heads_bytes == 7 * told.kv_bytes


@pytest.mark.parametrize("shape", SHAPES)
def test_every_known_shape_has_an_estimate(shape: str) -> None:
    assert Estimator(shape_source(shape), NUMPY_PROFILE).estimate(512, 1, "f16").weight_bytes > 1e8


def test_the_largest_context_is_the_largest(tiny_model: Path) -> None:
    with open_model(tiny_model) as source:
        estimator = Estimator(source, NUMPY_PROFILE)
    for context in (32, 96, 480):
        enough = estimator.estimate(context, 1, "f16").total_bytes
        assert estimator.largest_context(enough, 1, "f16") == context
        assert estimator.largest_context(enough - 1, 1, "f16") == context - 32
    assert estimator.largest_context(1 << 40, 1, "f16") == 512  # all the model was made for


def test_a_batch_beyond_what_the_device_binds_does_not_fit(tiny_model: Path) -> None:
    """The cache is cut to one buffer a layer, and sequences wait: that is told, and is no fit."""
    profile = replace(NUMPY_PROFILE, max_storage_range_bytes=1 << 20)
    with open_model(tiny_model) as source:
        estimator = Estimator(source, profile)
    told = estimator.estimate(512, 64, "f16")
    assert told.kv_tokens < 64 * 512
    most = estimator.largest_context(1 << 40, 64, "f16")
    assert estimator.estimate(most, 64, "f16").kv_tokens >= 64 * most > 0
    assert estimator.estimate(most + 32, 64, "f16").kv_tokens < 64 * (most + 32)
    result = xinfer("estimate", "--shape", "smollm2-135m", "-b", "100000", "-d", "numpy")
    assert "binds a KV cache of" in result.stdout and "not 409600000" in result.stdout


def test_counting_allocates_nothing(tiny_model: Path) -> None:
    import tracemalloc

    tracemalloc.start()
    estimator = Estimator(shape_source("qwen2.5-32b"), NUMPY_PROFILE)
    told = estimator.estimate(2048, 4, "f32")
    assert told.total_bytes > 60e9 and tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()


def test_mistakes_are_told_in_a_line(tiny_model: Path) -> None:
    with pytest.raises(UsageError, match="the shape 'qwen9' is not known: choose from smollm2-135m"):
        shape_source("qwen9")
    with pytest.raises(OutOfMemoryError, match="the device binds at most"):
        Estimator(shape_source("llama-2-7b"), NUMPY_PROFILE).estimate(1 << 20, 1, "f32")
    assert_one_error(xinfer("estimate"), 2, "--shape")
    assert_one_error(xinfer("estimate", str(tiny_model), "-c", "4096"), 2, "512 tokens", "use less")
    assert_one_error(xinfer("estimate", str(tiny_model), "--kv-dtype", "q3"), 2, "q3")


def test_command(tiny_model: Path, device: DeviceUnderTest) -> None:
    result = xinfer("estimate", "--shape", "qwen2.5-0.5b", "-c", "2048", "-d", device.name)
    assert result.returncode == 0, result.stderr
    assert (
        "KV cache       25.2 MB = 2 · 24 layers · 2 KV heads · 64 head dim · 2048 tokens · 2 bytes"
        in result.stdout
    )
    assert "2 KV heads for 14 query heads (GQA) save 151.0 MB of 176.2 MB of full heads" in result.stdout
    assert f"  {device.name}: fits; longest context 32768 tokens" in result.stdout
    record: dict[str, Any] = json.loads(xinfer("estimate", str(tiny_model), "--json", "-d", "numpy").stdout)
    assert record["context"] == 512 and record["devices"] == []
    parts = ("weight_bytes", "kv_bytes", "activation_bytes", "staging_bytes")
    assert record["total_bytes"] == sum(record[part] for part in parts)

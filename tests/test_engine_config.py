"""One description of how a model is opened: checked at construction, taken by everything that opens one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from xinfer_vk import LLM
from xinfer_vk.cli.options import MemorySize
from xinfer_vk.engine.config import EngineConfig
from xinfer_vk.engine.memory import kv_shape
from xinfer_vk.errors import ModelError, UsageError
from xinfer_vk.loading import declare, load, open_checkpoint
from xinfer_vk.reference import NUMPY_PROFILE, NumpyRuntime


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("context", 0, "context is 0: it must be at least 1 token"),
        ("context", True, "context is True"),
        ("prefill_chunk", -1, "prefill_chunk is -1"),
        ("kv_dtype", 16, "kv_dtype is 16"),
        ("kv_memory", 0, "kv_memory is 0: it is a number of bytes, or a share below 1.0"),
        ("kv_memory", 1.5, "kv_memory is 1.5"),
        ("kv_memory", "2GB", "kv_memory is '2GB'"),
        ("sampler", "gpu", "sampler is 'gpu': it is device or cpu"),
        ("activations", "int4", "activations is 'int4': it is f32 or int8"),
        ("tune", "slow", "tune is 'slow': it is off or quick or full"),
        ("quantize", "q9_9", "q9_9"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(field: str, value: Any, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        EngineConfig(**{field: value})
    assert message in str(raised.value)


def test_a_model_is_opened_with_a_whole_config_or_with_its_fields(tiny_model: Path) -> None:
    config = EngineConfig(tiny_model, device="numpy", kv_dtype="f32", context=96)
    with LLM(config) as one, LLM(tiny_model, device="numpy", kv_dtype="f32", context=96) as two:
        assert one.engine_config == two.engine_config
        assert (
            one.generate([5, 6], max_new_tokens=3).token_ids
            == two.generate([5, 6], max_new_tokens=3).token_ids
        )
    with pytest.raises(UsageError, match="put the others into it"):
        LLM(config, context=96)


def test_what_is_declared_is_what_is_loaded(tiny_model: Path) -> None:
    config = EngineConfig(tiny_model, quantize="q8_0")
    with open_checkpoint(config) as source:
        declared = declare(source, NUMPY_PROFILE, config)
        runtime = NumpyRuntime()
        loaded = load(source, runtime, config)
    assert declared.weight_bytes == loaded.weight_bytes == runtime.allocated_bytes
    assert loaded.fmt == "q8_0"
    loaded.free()
    assert runtime.allocated_bytes == 0


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="missing"):
        open_checkpoint(EngineConfig(tmp_path / "missing.gguf"))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GB", 2 * 10**9),
        ("512MiB", 512 << 20),
        ("1.5k", 1500),
        ("100", 100),
        ("50%", 0.5),
        ("1 gib", 1 << 30),
    ],
)
def test_a_size_of_memory_is_read_with_its_unit(text: str, size: float) -> None:
    assert MemorySize().convert(text, None, None) == size


@pytest.mark.parametrize("text", ["", "0", "-1GB", "GB", "2TBs", "101%", "0%", "half"])
def test_what_is_no_size_of_memory_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="write a size such as 2GB"):
        MemorySize().convert(text, None, None)


def test_a_context_that_nobody_asked_for_is_cut_to_what_is_free(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(tiny_model, device="numpy") as llm:
        block = kv_shape(llm.engine_config, llm.config).block_bytes
        assert llm.room == 512 and llm.notices == ()
    monkeypatch.setattr(NumpyRuntime, "free_bytes", lambda self, kind: 10 * block)
    with LLM(tiny_model, device="numpy") as llm:
        assert llm.room == 9 * 32
        assert llm.notices == (
            "context cut to 288 of the model's 512 tokens: NumPy reference has room for no more",
        )
        assert len(llm.generate([5] * 280, max_new_tokens=50, ignore_eos=True).token_ids) == 8
    with LLM(tiny_model, device="numpy", kv_memory=0.5) as llm:
        assert llm.room == 5 * 32
    with LLM(tiny_model, device="numpy", context=400) as llm:
        assert llm.room == 400 and llm.notices == ()


def test_the_first_batch_decides_how_many_contexts_the_pool_holds(tiny_model) -> None:
    """Else the sequences of a batch with a small context would take each other's blocks all the time."""
    for first, contexts in ((["one"], 1), (["one", "two", "three"], 3)):
        with LLM(tiny_model, device="numpy", context=64) as llm:
            llm.batch(first, max_new_tokens=1, raw=True)
            assert llm.cached_tokens == contexts * 64
            llm.batch(["a", "b", "c", "d"], max_new_tokens=1, raw=True)
            assert llm.cached_tokens == contexts * 64

"""One description of how a model is opened: checked at construction, taken by everything that opens one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from xinfer_vk import LLM
from xinfer_vk.engine.config import EngineConfig
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

"""Every model family against transformers: from safetensors and from GGUF, the prompt at once, in chunks and
step by step. The models are of 2 to 6 layers with windows of 19 positions; prompts have 75 tokens.

Tolerance as in test_logits.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_families import write_gguf_of
from test_logits import TOLERANCE, Loaded, worst

from xinfer_vk.reference import NumpyRuntime

FOLDER = Path(__file__).parent / "fixtures" / "models" / "families"
FAMILIES = sorted(p.name for p in FOLDER.iterdir())
# What GGUF cannot say.
NOT_IN_GGUF = {"qwen2-window-from-layer-1": "windows of Qwen2"}
CHUNK, STEPS = 32, 7  # of the prompt, and tokens at its end that are decoded one by one


def reference(name: str) -> tuple[np.ndarray, np.ndarray]:
    data = np.load(FOLDER / name / "reference.npz")
    return data["token_ids"], data["logits"]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(name: str, record_property: Any) -> None:
    token_ids, want = reference(name)
    error = worst(Loaded(NumpyRuntime(), FOLDER / name).logits(token_ids, None), want)
    record_property("max_abs_error", error)
    assert error <= TOLERANCE


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in NOT_IN_GGUF])
def test_logits_of_the_same_model_in_a_gguf_file_equal_transformers(
    tmp_path: Path, name: str, record_property: Any
) -> None:
    token_ids, want = reference(name)
    write_gguf_of(FOLDER / name, tmp_path / "m.gguf")
    error = worst(Loaded(NumpyRuntime(), tmp_path / "m.gguf").logits(token_ids, None), want)
    record_property("max_abs_error", error)
    assert error <= TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_device_logits_in_chunks_and_step_by_step_equal_transformers(
    runtime: Any, name: str, record_property: Any
) -> None:
    token_ids, want = reference(name)
    model = Loaded(runtime, FOLDER / name)
    try:
        got = model.logits_of(token_ids, [CHUNK, len(token_ids) - CHUNK - STEPS, *[1] * STEPS])
    finally:
        model.free()
    error = worst(got, want)
    record_property("max_abs_error", error)
    assert error <= TOLERANCE

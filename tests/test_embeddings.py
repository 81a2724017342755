"""Hidden states are what the head multiplies, on every device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_families import FAMILIES, FOLDER
from test_families import reference as reference_of
from test_logits import TOLERANCE, Loaded, worst

from xinfer_vk import LLM
from xinfer_vk.engine.embeddings import hidden_states
from xinfer_vk.errors import UsageError
from xinfer_vk.reference import NumpyRuntime


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_a_linear_function_of_the_hidden_states(name: str) -> None:
    token_ids, want = reference_of(name)
    model = Loaded(NumpyRuntime(), FOLDER / name)
    hidden, c = hidden_states(model.runner, token_ids), model.config
    assert hidden.shape == (len(token_ids), c.hidden_size) and c.hidden_size < len(token_ids)
    logits = want.astype(np.float64)
    if c.logit_softcap:
        logits = c.logit_softcap * np.arctanh(logits / c.logit_softcap)
    head, *_ = np.linalg.lstsq(hidden.astype(np.float64), logits, rcond=None)
    assert worst(hidden @ head, logits) <= 10 * TOLERANCE  # arctanh magnifies the reference's rounding


@pytest.mark.parametrize("name", ["llama-dynamic", "gemma3-multimodal"])
def test_device_hidden_states_equal_those_of_numpy(runtime: Any, name: str) -> None:
    token_ids, _ = reference_of(name)
    want = hidden_states(Loaded(NumpyRuntime(), FOLDER / name).runner, token_ids)
    model = Loaded(runtime, FOLDER / name)
    try:
        assert worst(hidden_states(model.runner, token_ids), want) <= TOLERANCE
    finally:
        model.free()


def test_one_token_alone_has_the_hidden_state_it_has_in_a_text(tiny_model: Path) -> None:
    with LLM(tiny_model, device="numpy", kv_dtype="f32") as llm:
        # The first row sees only itself; sums of other row counts have another order.
        assert worst(llm.hidden_states([5]), llm.hidden_states([5, 6, 7])[:1]) <= TOLERANCE


def test_an_empty_text_and_a_long_one_are_one_line(tiny_model: Path) -> None:
    with LLM(tiny_model, device="numpy", context=8) as llm:
        for ids in ([], [1] * 9):
            with pytest.raises(UsageError) as error:
                llm.hidden_states(ids)
            assert "\n" not in str(error.value)


def test_scores_are_the_log_softmax_of_the_logits(tiny_model: Path) -> None:
    prompt, answers = [3 + i % 11 for i in range(40)], [[5], [9, 8, 7], [4 + i % 5 for i in range(50)]]
    with LLM(tiny_model, device="numpy", kv_dtype="f32") as llm:
        scores = llm.score(prompt, answers)
        for answer, found in zip(answers, scores):
            rows = llm.logits([*prompt, *answer])[len(prompt) - 1 : -1].astype(np.float64)
            want = [row[t] - np.log(np.exp(row).sum()) for row, t in zip(rows, answer)]
            assert worst(np.array(found.logprobs), np.array(want)) <= TOLERANCE
            assert found.total == sum(found.logprobs) and found.token_ids == tuple(answer)
        for bad in ([], [[]], "text"):
            with pytest.raises(UsageError):
                llm.score(prompt, bad)


def test_no_product_of_the_head_runs_for_hidden_states() -> None:
    token_ids, _ = reference_of("llama-dynamic")
    model = Loaded(NumpyRuntime(), FOLDER / "llama-dynamic")
    model.logits(token_ids[:32], None)
    with_head = model.runner.last_plan
    hidden_states(model.runner, token_ids[:32])
    without = model.runner.last_plan
    assert with_head is not None and without is not None
    assert len(without.steps) < len(with_head.steps)

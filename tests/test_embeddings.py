"""Hidden states are what the head multiplies, on every device."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_families import FAMILIES, FOLDER
from test_families import reference as reference_of
from test_logits import TOLERANCE, Loaded, worst

from xinfer_vk import LLM
from xinfer_vk.engine.embeddings import hidden_states, pooling_of
from xinfer_vk.errors import ModelError, UsageError
from xinfer_vk.reference import NumpyRuntime


def hidden_of(model: Loaded, token_ids: np.ndarray) -> np.ndarray:
    sequence = model.runner.cache.open(len(token_ids))
    try:
        return hidden_states(model.runner, sequence, [int(i) for i in token_ids])
    finally:
        model.runner.cache.close(sequence)


def test_the_head_times_the_hidden_states_is_the_logits(tiny_model: Path) -> None:
    """With the checkpoint's own head, read by the library that safetensors' authors wrote."""
    from safetensors.numpy import load_file

    weights = load_file(tiny_model / "model.safetensors")
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).astype(np.float64)
    ids = [3 + i % 17 for i in range(70)]
    with LLM(tiny_model, device="numpy", kv_dtype="f32") as llm:
        assert worst(llm.hidden_states(ids) @ head.T, llm.logits(ids)) <= TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_a_linear_function_of_the_hidden_states(name: str) -> None:
    token_ids, want = reference_of(name)
    model = Loaded(NumpyRuntime(), FOLDER / name)
    hidden, c = hidden_of(model, token_ids), model.config
    assert hidden.shape == (len(token_ids), c.hidden_size) and c.hidden_size < len(token_ids)
    logits = want.astype(np.float64)
    if c.logit_softcap:
        logits = c.logit_softcap * np.arctanh(logits / c.logit_softcap)
    head, *_ = np.linalg.lstsq(hidden.astype(np.float64), logits, rcond=None)
    assert worst(hidden @ head, logits) <= 10 * TOLERANCE  # arctanh magnifies the reference's rounding


@pytest.mark.parametrize("name", ["llama-dynamic", "gemma3-multimodal"])
def test_device_hidden_states_equal_those_of_numpy(runtime: Any, name: str) -> None:
    token_ids, _ = reference_of(name)
    want = hidden_of(Loaded(NumpyRuntime(), FOLDER / name), token_ids)
    model = Loaded(runtime, FOLDER / name)
    try:
        assert worst(hidden_of(model, token_ids), want) <= TOLERANCE
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
    hidden_of(model, token_ids[:32])
    without = model.runner.last_plan
    assert with_head is not None and without is not None
    assert len(without.steps) < len(with_head.steps)


def test_a_text_is_embedded_by_the_mean_of_its_hidden_states_unless_the_checkpoint_says_how(
    tiny_model: Path, tmp_path: Path
) -> None:
    texts = ["rain", "a longer text about rain", [5, 6, 7]]
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    rows = {}
    for key, kind in ((None, "mean"), ("lasttoken", "last"), ("cls_token", "cls"), ("mean_tokens", "mean")):
        if key is not None:
            (model / "1_Pooling").mkdir(exist_ok=True)
            (model / "1_Pooling" / "config.json").write_text(
                json.dumps({"word_embedding_dimension": 8, f"pooling_mode_{key}": True})
            )
        with LLM(model, device="numpy", kv_dtype="f32") as llm:
            assert llm.pooling == kind
            rows[kind] = llm.embed(texts)
            for text, vector in zip(texts, rows[kind]):
                hidden = llm.hidden_states(text).astype(np.float64)
                want = {"mean": hidden.mean(axis=0), "last": hidden[-1], "cls": hidden[0]}[kind]
                assert np.allclose(vector, want / np.linalg.norm(want), atol=1e-6)
                raw = llm.embed([text], normalize=False)[0]
                assert np.allclose(raw, want, rtol=1e-6, atol=1e-6)
    assert not np.allclose(rows["mean"], rows["last"])


@pytest.mark.parametrize("number, kind", [(0, "mean"), (1, "mean"), (2, "cls"), (3, "last")])
def test_gguf_says_how_by_number(number: int, kind: str) -> None:
    source = SimpleNamespace(
        kind="gguf", path=Path("x.gguf"), metadata={"general.architecture": "a", "a.pooling_type": number}
    )
    assert pooling_of(source) == kind  # type: ignore[arg-type]


def test_a_pooling_that_is_none_of_ours_is_refused_by_name(tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(ModelError, match="pooling_mode_max_tokens"):
        LLM(model, device="numpy")
    with LLM(tiny_model, device="numpy") as llm:
        for texts, options in (([], {}), (["x"], {"pooling": "max"}), ([""], {})):
            with pytest.raises(UsageError):
                llm.embed(texts, **options)

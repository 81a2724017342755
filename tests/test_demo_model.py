"""A real model: SmolLM2-135M-Instruct in Q4_1, which every device must continue in the same way.

Greedy continuations can only differ where two logits are nearer to each other than the devices'
rounding; that these prompts have no such place is seen from the NumPy runtime's margins.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from xinfer_vk import LLM

PROMPTS = [
    ("What is the capital of France?", False),
    ("def fibonacci(n):\n    ", True),
    ("Water boils at", True),
]
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def expected(demo_model: Path) -> list[tuple[int, ...]]:
    """Continuations by the NumPy runtime, and a look at how safe each choice was."""
    with LLM(demo_model, device="numpy", kv_dtype="f32") as llm:
        out = []
        for prompt, raw in PROMPTS:
            ids = llm.encode(prompt, raw=raw)
            result = llm.generate(ids, max_new_tokens=NEW_TOKENS)
            history = [*ids, *result.token_ids]
            logits = llm.logits(history)[len(ids) - 1 : len(history) - 1]
            best = np.sort(logits, axis=1)[:, -2:]
            assert (best[:, 1] - best[:, 0]).min() > 0.01, "a margin too small to expect agreement"
            out.append(result.token_ids)
        assert llm.tokenizer.decode(out[0]) == "The capital of France is Paris."
        return out


def test_every_device_continues_as_numpy_does(
    device: object, demo_model: Path, expected: list[tuple[int, ...]]
) -> None:
    with LLM(demo_model, device=str(device.index), kv_dtype="f32", context=128) as llm:  # type: ignore
        for (prompt, raw), want in zip(PROMPTS, expected):
            got = llm.generate(llm.encode(prompt, raw=raw), max_new_tokens=NEW_TOKENS)
            assert got.token_ids == want, prompt
            assert got.metrics.bytes_read_per_token == 4


def test_the_f16_cache_gives_the_answer_too(demo_model: Path) -> None:
    with LLM(demo_model) as llm:
        result = llm.generate(PROMPTS[0][0])
    assert result.text == "The capital of France is Paris."
    assert result.finish_reason == "stop"

"""A real model: SmolLM2-135M-Instruct in Q4_1, which every device must continue in the same way.

Greedy continuations can only differ where two logits are nearer to each other than the devices'
rounding; that these prompts have no such place is seen from the NumPy runtime's margins.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from xinfer_vk import LLM

PROMPTS = [  # text, whether it is raw, and how the model continues it
    ("What is the capital of France?", False, (504, 3575, 282, 4649, 314, 7042, 30)),
    ("def fibonacci(n):\n    ", True, (753, 3987, 46477, 24, 94, 727, 466, 585)),
    ("Water boils at", True, (216, 33, 32, 32, 4742, 51, 28, 527)),
]


def test_exact_arithmetic_chooses_these_tokens_by_a_safe_margin(demo_model: Path) -> None:
    """In one forward pass of the NumPy runtime for each."""
    with LLM(demo_model, device="numpy", kv_dtype="f32") as llm:
        for prompt, raw, continuation in PROMPTS:
            ids = llm.encode(prompt, raw=raw)
            logits = llm.logits([*ids, *continuation[:-1]])[len(ids) - 1 :]
            assert tuple(logits.argmax(axis=1)) == continuation
            best = np.sort(logits, axis=1)[:, -2:]
            assert (best[:, 1] - best[:, 0]).min() > 0.01, "a margin too small to expect agreement"
        assert llm.tokenizer.decode(PROMPTS[0][2]) == "The capital of France is Paris."


def test_every_device_continues_as_exact_arithmetic_does(device: Any, demo_model: Path) -> None:
    """On SwiftShader a few tokens only: all of it takes 2 minutes of CPU, and agreed."""
    few = device.id == "swiftshader"
    with LLM(demo_model, device=str(device.index), kv_dtype="f32", context=128) as llm:
        for prompt, raw, continuation in PROMPTS[2:] if few else PROMPTS:
            tokens = 3 if few else 8
            got = llm.generate(llm.encode(prompt, raw=raw), max_new_tokens=tokens)
            assert got.token_ids == continuation[:tokens], prompt
            assert got.metrics.bytes_read_per_token == 4


def test_the_f16_cache_gives_the_answer_too(demo_model: Path) -> None:
    with LLM(demo_model) as llm:
        result = llm.generate(PROMPTS[0][0])
    assert result.text == "The capital of France is Paris."
    assert result.finish_reason == "stop"

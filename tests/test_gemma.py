"""A second real model: Gemma 3 270M in Q4_K_M (Q5_0, Q4_K, Q6_K and Q8_0 tensors), against exact arithmetic.

``gemma3-270m-reference.json`` is how transformers continues three prompts with the same weights, decoded to
f32 (by ``make_gemma_reference.py``), with the margin of each choice. Where it is under 0.01 another order
of summation may choose the other token, and then the rest cannot be compared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from xinfer_vk import LLM
from xinfer_vk.text.gguf_tokenizer import tokenizer_from_gguf
from xinfer_vk.weights.gguf_file import read_gguf

REFERENCE = Path(__file__).parent / "fixtures" / "gemma3-270m-reference.json"
MARGIN = 0.01


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, Any]]:
    return json.loads(REFERENCE.read_text(encoding="utf-8"))["prompts"]


def test_the_prompts_are_what_the_tokenizer_makes_of_their_texts(
    gemma_model: Path, prompts: list[dict[str, Any]]
) -> None:
    tokenizer = tokenizer_from_gguf(read_gguf(gemma_model).metadata, "gemma")
    assert len(prompts) == 3
    for prompt in prompts:
        assert tokenizer.encode(prompt["text"], parse_special=True) == prompt["ids"]
        assert len(prompt["continuation"]) == len(prompt["margins"]) == 32


def test_every_device_continues_as_exact_arithmetic_does(
    device: Any, gemma_model: Path, prompts: list[dict[str, Any]]
) -> None:
    """On SwiftShader the beginning only: all of it took 2 minutes of CPU when it was tried, and agreed."""
    tokens = 2 if device.id == "swiftshader" else 32
    chosen = prompts[:1] if device.id == "swiftshader" else prompts
    with LLM(gemma_model, device=str(device.index), kv_dtype="f32", context=64) as llm:
        results = llm.batch([prompt["ids"] for prompt in chosen], max_new_tokens=tokens, ignore_eos=True)
    for prompt, result in zip(chosen, results):
        wanted = prompt["continuation"]
        differs = next((i for i in range(tokens) if result.token_ids[i] != wanted[i]), None)
        if differs is not None:
            assert prompt["margins"][differs] < MARGIN, f"{prompt['text']}: token {differs}"
            assert differs > 8, "a prompt that says little"

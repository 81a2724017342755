"""The same thing twice gives the same bits: a missing barrier, or memory that nobody wrote, would not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from xinfer_vk import LLM
from xinfer_vk.selftest import all_cases

PROMPT = [11, 3, 77, 140, 5, 600, 42]


def test_the_same_prompt_twice_gives_the_same_logits_bit_for_bit(tiny_model: Path, device) -> None:
    with LLM(tiny_model, device=str(device.index)) as llm:
        first, second = (np.asarray(llm.logits(PROMPT)) for _ in range(2))
    with LLM(tiny_model, device=str(device.index)) as llm:
        third = np.asarray(llm.logits(PROMPT))
    np.testing.assert_array_equal(first.view(np.uint32), second.view(np.uint32))
    np.testing.assert_array_equal(first.view(np.uint32), third.view(np.uint32))


def test_sampled_texts_and_their_probabilities_are_the_same_again(tiny_model: Path, device) -> None:
    """Prompt and decode steps of two sequences, alone and after other work. Then the engine has the
    prompts in its cache and computes less, in chunks that round differently: so each is compared with its
    like in another LLM."""

    def texts(llm: LLM) -> list[tuple[list[int], list[float]]]:
        found = llm.batch(
            [PROMPT, PROMPT[:4]], max_new_tokens=24, ignore_eos=True, seed=5, temperature=1.0, logprobs=0
        )
        return [(r.token_ids, [t.logprob for t in r.logprobs]) for r in found]

    runs = []
    for _ in range(2):
        with LLM(tiny_model, device=str(device.index)) as llm:
            first = texts(llm)
            llm.generate(list(range(30, 90)), max_new_tokens=8, ignore_eos=True)
            runs.append((first, texts(llm)))
    assert runs[0] == runs[1]


def test_a_greedy_text_of_64_tokens_is_the_same_on_the_device_and_on_numpy(tiny_model: Path, device) -> None:
    texts = []
    for name in (str(device.index), "numpy"):
        with LLM(tiny_model, device=name) as llm:
            texts.append(llm.generate(PROMPT, max_new_tokens=64, ignore_eos=True).token_ids)
    assert len(texts[0]) == 64 and texts[0] == texts[1]


@pytest.mark.tier_all
def test_every_case_of_the_selftest_passes(runtime) -> None:
    """Also those of other devices: the kernels for GPUs in all formats, and matrix units where there are."""
    from xinfer_vk.selftest import run_cases

    cases = [case for case in all_cases() if case.applies(runtime.profile)]
    assert [f"{o.case}: {o.finding.problem}" for o in run_cases(runtime, cases) if not o.passed] == []

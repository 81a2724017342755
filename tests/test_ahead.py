"""Several decode steps in one submit give what steps one by one give: tokens, ends, cache and errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_model import in_words, write_chat_model

from xinfer_vk import LLM
from xinfer_vk.engine import runner as runner_module
from xinfer_vk.engine.runner import ModelRunner
from xinfer_vk.engine.session import ChatSession, ChatStream
from xinfer_vk.errors import NumericError
from xinfer_vk.text.chat import encode_chat

PROMPTS = [[5, 6, 7], list(range(20, 70)), [9] * 30, [100]]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.2, "top_k": 40, "top_p": 0.95, "seed": 3},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "seed": 4},
    "an earliest end": {"temperature": 1.0, "min_new_tokens": 7, "seed": 5},
}


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps run as one by each call: as many as are allowed, however slow the machine is."""
    told: list[int] = []
    real = ModelRunner.decode

    def decode(self: ModelRunner, sequences: Any, tokens: Any, head: Any, steps: int) -> list[list[int]]:
        if steps > 1:
            told.append(steps)
        return real(self, sequences, tokens, head, steps)

    monkeypatch.setattr(ModelRunner, "decode", decode)
    monkeypatch.setattr(runner_module, "AHEAD_S", 1e6)
    return told


@pytest.fixture(scope="module")
def on_numpy(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, device="numpy", kv_dtype="f32") as opened:
        yield opened


def one_by_one(llm: LLM, **fields: Any) -> list[Any]:
    before, runner_module.AHEAD_S = runner_module.AHEAD_S, 0.0
    try:
        return llm.batch(PROMPTS, **fields)
    finally:
        runner_module.AHEAD_S = before


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_is_the_same_in_steps_of_many(way: str, on_numpy: LLM, ahead: list[int]) -> None:
    fields = {"max_new_tokens": 21, "ignore_eos": way != "an earliest end", **WAYS[way]}
    want = one_by_one(on_numpy, **fields)
    assert not ahead
    got = on_numpy.batch(PROMPTS, **fields)
    assert 8 in ahead and {4, 2} & set(ahead)  # the last tokens come in smaller steps
    assert [r.token_ids for r in got] == [r.token_ids for r in want]
    assert [r.finish_reason for r in got] == [r.finish_reason for r in want]
    assert [len(r.metrics.token_s) for r in got] == [len(r.metrics.token_s) for r in want]


@pytest.mark.parametrize("memory", ["unified", "discrete"])
def test_a_device_gives_the_same(
    memory: str, device: Any, tiny_model: Path, ahead: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XINFER_VK_MEMORY", memory)
    with LLM(tiny_model, device=str(device.index), kv_dtype="f32", context=96) as llm:
        for way in ("greedy", "penalties"):
            fields = {"max_new_tokens": 13, "ignore_eos": True, **WAYS[way]}
            want = one_by_one(llm, **fields)
            assert [r.token_ids for r in llm.batch(PROMPTS, **fields)] == [r.token_ids for r in want]
        assert 8 in ahead


def test_ends_within_a_step_are_kept_and_the_rest_is_thrown_away(on_numpy: LLM, ahead: list[int]) -> None:
    whole = one_by_one(on_numpy, max_new_tokens=20, ignore_eos=True)
    ends = [r.token_ids[i] for r, i in zip(whole, (3, 5, 8, 13))]
    results = on_numpy.batch(PROMPTS, max_new_tokens=20, ignore_eos=True, stop_token_ids=ends)
    assert ahead
    for result, full in zip(results, whole):
        first = min(i for i, token in enumerate(full.token_ids) if token in ends)
        assert result.token_ids == full.token_ids[:first]
        assert result.finish_reason == "stop" and result.stop == full.token_ids[first]
    cache = on_numpy._runner.cache
    assert cache.pool.free_blocks == cache.pool.count and cache.in_use == 0


def test_a_conversation_goes_on_from_what_is_in_the_cache(
    ahead: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns that a token ends within a step: what was run beyond must not be taken for the conversation's."""
    with LLM(write_chat_model(tmp_path / "tiny"), device="numpy", kv_dtype="f32", context=256) as llm:

        def turns(**ends: Any) -> list[list[int]]:
            session = llm.chat(max_new_tokens=15, temperature=1.0, seed=2, **ends)
            answers = []
            for text in ("one", "two", "three"):
                stream = session.send(text)
                for _ in stream:
                    pass
                answers.append(list(stream.result.token_ids))
            return answers

        whole = turns()
        ends = {"stop_token_ids": [answer[4] for answer in whole]}
        got = turns(**ends)
        assert 8 in ahead
        monkeypatch.setattr(runner_module, "AHEAD_S", 0.0)
        assert turns(**ends) == got
        assert turns() == whole


def test_what_the_host_must_see_is_run_step_by_step(on_numpy: LLM, ahead: list[int]) -> None:
    for fields in ({"stop": ["zzz"]}, {"logprobs": 1}, {"bad_words": ["the"]}):
        on_numpy.generate(PROMPTS[0], max_new_tokens=6, ignore_eos=True, **fields)
    on_numpy.sampler = "cpu"
    on_numpy.generate(PROMPTS[0], max_new_tokens=6, ignore_eos=True, temperature=1.0)
    on_numpy.sampler = "device"
    assert not ahead


def test_a_slow_device_is_asked_for_every_token(on_numpy: LLM, ahead: list[int], monkeypatch) -> None:
    monkeypatch.setattr(runner_module, "AHEAD_S", 1e-9)
    on_numpy.generate(PROMPTS[0], max_new_tokens=6, ignore_eos=True)
    assert not ahead


def test_tokens_before_a_nan_are_kept(on_numpy: LLM, ahead: list[int], monkeypatch) -> None:
    """The fifth token's logits are NaN: four come out, and the error names its step."""
    whole = one_by_one(on_numpy, max_new_tokens=8, ignore_eos=True)[0].token_ids
    runner = on_numpy._runner
    assert runner is not None
    results = runner._results

    class Fourth:
        """The fourth step of several has NaN."""

        def __getitem__(self, words: slice) -> Any:
            return memoryview(np.array([0xFFFFFFFF], np.uint32)) if words.start == fourth else results[words]

    fourth = 3 * runner.max_outputs
    monkeypatch.setattr(runner, "_results", Fourth())
    out = on_numpy.generate(PROMPTS[0], max_new_tokens=8, ignore_eos=True)
    assert out.token_ids == whole  # the step is run again, as the first of others, and here it is right then
    assert ahead and max(ahead) >= 4

    fourth = 0
    with pytest.raises(NumericError, match="NaN"):
        on_numpy.generate(PROMPTS[0], max_new_tokens=12, ignore_eos=True)


def test_steps_that_have_become_long_are_seen_soon(on_numpy: LLM) -> None:
    """A context that grows long must not make everybody wait for eight of its steps for long."""
    on_numpy.generate(PROMPTS[0], max_new_tokens=2, ignore_eos=True)
    runner = on_numpy._runner
    assert runner is not None
    runner._step_s[1] = 1e-3
    assert runner.steps_ahead(1, 8) == 8
    for _ in range(5):
        runner._note_time(1, 0.04, growth=runner_module.GROWTH_AHEAD)
    assert runner.steps_ahead(1, 8) == 1


def test_a_stream_left_half_way_keeps_what_was_given_out_and_nothing_else(
    ahead: list[int], tmp_path: Path
) -> None:
    """A step made several tokens at once: those beyond the piece that the caller took last are in neither the
    conversation nor its cache. An answer that is cancelled keeps all that was made."""
    with LLM(write_chat_model(tmp_path / "tiny"), device="numpy", kv_dtype="f32", context=256) as llm:

        def begin() -> tuple[ChatSession, ChatStream]:
            session = in_words(llm, ignore_eos=True)
            return session, session.send("Tell me a story")

        whole = begin()[1].result
        for taken in range(1, 8):
            session, stream = begin()
            shown = [next(stream) for _ in range(taken)]
            made = len(stream.partial_result.token_ids)
            assert made > taken or taken != 2
            stream.close()
            left = stream.partial_result
            assert session.turns[0].assistant == left.text == "".join(shown)
            assert (left.token_ids, left.finish_reason) == (whole.token_ids[:taken], "interrupted")
            again = session.send("Go on").result
            prompt = encode_chat(llm.tokenizer, llm.chat_template, session.messages[:-1])
            assert again.token_ids == llm.generate(prompt, session.params).token_ids
        session, stream = begin()
        shown = [next(stream), next(stream)]
        stream.cancel()
        assert stream.result.token_ids == whole.token_ids[:5]
        assert session.turns[0].assistant == stream.result.text != "".join(shown)

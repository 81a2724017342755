"""The generation loop: batches, samples of one prompt, stops, interruption, what is read back.

Tiny models with random weights, whose text means nothing; a tokenizer of the fixtures makes it text. The
NumPy runtime runs them where the device does not matter.
"""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import tiny_config, write_hf_model

from xinfer_vk import LLM
from xinfer_vk.cache import CachedSequence
from xinfer_vk.engine.memory import kv_shape
from xinfer_vk.engine.runner import Chunk, ModelRunner, make_runner
from xinfer_vk.errors import NumericError, OutOfMemoryError, UsageError
from xinfer_vk.kernels import state as st
from xinfer_vk.plan import Step
from xinfer_vk.reference import NumpyRuntime
from xinfer_vk.sampling.params import SamplingParams
from xinfer_vk.text.stream import StreamDecoder

PROMPTS = [[5, 6, 7], list(range(20, 70)), [9] * 33, [100]]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, device="numpy", kv_dtype="f32") as opened:
        yield opened


def test_each_prompt_of_a_batch_gives_what_it_gives_alone(llm: LLM) -> None:
    together = llm.batch(PROMPTS, max_new_tokens=9, ignore_eos=True)
    for prompt, result in zip(PROMPTS, together):
        assert result.token_ids == llm.generate(prompt, max_new_tokens=9, ignore_eos=True).token_ids


def test_a_batch_on_a_device_gives_what_it_gives_alone(device: Any, tiny_model: Path) -> None:
    with LLM(tiny_model, device=str(device.index), kv_dtype="f32", context=96) as llm:
        together = llm.batch(PROMPTS, max_new_tokens=5, ignore_eos=True)
        sampled = llm.batch(PROMPTS, max_new_tokens=5, ignore_eos=True, temperature=1.0, top_k=20, seed=11)
        for prompt, result, drawn in zip(PROMPTS, together, sampled):
            assert result.token_ids == llm.generate(prompt, max_new_tokens=5, ignore_eos=True).token_ids
            alone = llm.generate(
                prompt, max_new_tokens=5, ignore_eos=True, temperature=1.0, top_k=20, seed=11
            )
            assert drawn.token_ids == alone.token_ids


def test_a_stream_of_a_closed_model_says_so(tiny_model: Path) -> None:
    for sampling in ({}, {"temperature": 1.0, "seed": 1}):
        with LLM(tiny_model, device="numpy", kv_dtype="f32") as llm:
            stream = llm.stream(PROMPTS[0], max_new_tokens=30, ignore_eos=True, **sampling)
            next(stream)
        with pytest.raises(UsageError, match="this LLM is closed"):
            list(stream)


def test_decode_steps_have_the_state_that_any_batch_has(llm: LLM) -> None:
    """Most of a decode step's state is taken over from the step before. Sequences that come and go, are cut
    back and get each other's blocks must leave nothing stale."""
    llm.generate(PROMPTS[0], max_new_tokens=1)
    runner = make_runner(llm.runtime, llm.config, llm.weights, "f32", capacity=128, sequences=5, total=400)
    rng = np.random.default_rng(0)
    open_now = [runner.cache.open() for _ in range(4)]
    try:
        for _ in range(300):
            event = rng.integers(6)
            if event == 0:
                for sequence in open_now:
                    runner.cache.truncate(sequence, int(rng.integers(sequence.length + 1)))
            elif event == 1 and len(open_now) > 1:
                runner.cache.close(open_now.pop(int(rng.integers(len(open_now)))))
            elif event == 2 and runner.cache.has_row:
                open_now.append(runner.cache.open())
            elif event == 3:
                runner._prepare([Chunk(open_now[0], [7] * 40, "last")] if open_now[0].length < 80 else [])
            batch = [s for s in open_now if s.length < 96 and rng.integers(3)] or open_now[:1]
            if batch[0].length >= 96:
                runner.cache.truncate(batch[0], 3)
            tokens = [int(t) for t in rng.integers(0, llm.config.vocab_size, len(batch))]
            runner._prepare_decode(batch, tokens, 2)
            got = runner._words.tolist()
            runner._decoding = [-1]
            runner._prepare([Chunk(s, [t]) for s, t in zip(batch, tokens)])
            assert used(got, batch, runner) == used(runner._words.tolist(), batch, runner)
            for sequence in batch:
                sequence.length += int(rng.integers(1, 3))
    finally:
        runner.free()
        runner.cache.free()


def test_text_is_made_when_someone_wants_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, step_by_step: None
) -> None:
    """Not between two steps of a batch, where the device waits; after each where it may end the answer."""
    read: list[int] = []
    real = StreamDecoder.push
    monkeypatch.setattr(StreamDecoder, "push", lambda self, token: read.append(token) or real(self, token))
    seen: list[int] = []
    for fields, each in (({}, 0), ({"stop": ["zzz"]}, len(PROMPTS))):
        read.clear()
        results = llm.batch(
            PROMPTS, max_new_tokens=5, ignore_eos=True, on_step=lambda made: seen.append(len(read)), **fields
        )
        assert seen[-2] == each * 4 and len(read) == 5 * len(PROMPTS)
        assert [r.text for r in results] == [llm.tokenizer.decode(r.token_ids) for r in results]


def used(words: list[int], batch: list[CachedSequence], runner: ModelRunner) -> list[list[int]]:
    """The parts of a state buffer that kernels read in a decode step."""
    arrays = (st.TOKEN_ID, st.POSITION, st.SEQUENCE, st.SLOT, st.OUTPUT_ROW, st.TILE_START, st.TILE_COUNT)
    tables = [st.BLOCK_TABLE + s.row * runner.cache.blocks_per_sequence for s in batch]
    return [
        words[:4],
        *(words[at : at + len(batch)] for at in arrays),
        *(words[at : at + len(s.blocks)] for at, s in zip(tables, batch)),
    ]


def test_more_prompts_than_rows_are_all_run_in_their_order(llm: LLM) -> None:
    prompts = [[i + 10, i + 11] for i in range(40)]
    ended: list[int] = []
    results = llm.batch(
        prompts, max_new_tokens=3, ignore_eos=True, on_result=lambda r: ended.append(r.prompt)
    )
    assert [list(r.prompt_token_ids) for r in results] == prompts
    assert sorted(ended) == list(range(40))


def test_samples_of_a_prompt_share_its_blocks_and_differ(llm: LLM) -> None:
    prompt = list(range(20, 120))  # three full blocks and a part
    results = llm.batch([prompt], n=4, max_new_tokens=12, ignore_eos=True, temperature=1.5, seed=5)
    assert len({r.token_ids for r in results}) == 4
    again = llm.batch([prompt], n=4, max_new_tokens=12, ignore_eos=True, temperature=1.5, seed=5)
    assert [r.token_ids for r in again] == [r.token_ids for r in results]
    alone = llm.generate(prompt, max_new_tokens=12, ignore_eos=True, temperature=1.5, seed=5)
    assert alone.token_ids == results[0].token_ids
    prompt_steps = [r.metrics.prefill_s for r in results]
    assert all(s > 0 for s in prompt_steps)


def test_shared_blocks_are_counted_and_given_back(llm: LLM) -> None:
    cache = llm._open_engine().runner.cache
    before = cache.pool.free_blocks
    parent = cache.open()
    cache.reserve(parent, 100)
    parent.length = 100
    child = cache.fork(parent, 99)
    assert child.blocks == parent.blocks[:3]
    assert child.length == 96
    cache.close(parent)
    assert cache.pool.free_blocks == before - 3
    cache.close(child)
    assert cache.pool.free_blocks == before


def test_the_cpu_sampler_chooses_as_the_device_does(device: Any, tiny_model: Path) -> None:
    fields: dict[str, Any] = {
        "max_new_tokens": 6,
        "temperature": 0.9,
        "top_k": 30,
        "top_p": 0.9,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.1,
        "logit_bias": {7: 2.0},
        "min_new_tokens": 3,
        "logprobs": 3,
        "seed": 9,
    }
    with LLM(tiny_model, device=str(device.index), kv_dtype="f32", context=96) as llm:
        on_device = llm.generate(PROMPTS[1], prompt_logprobs=True, **fields)
        llm.sampler = "cpu"
        on_cpu = llm.generate(PROMPTS[1], prompt_logprobs=True, **fields)
    assert on_device.token_ids == on_cpu.token_ids
    assert on_device.metrics.bytes_read_per_token < 2000 < on_cpu.metrics.bytes_read_per_token * 2
    for a, b in ((on_device.logprobs, on_cpu.logprobs), (on_device.prompt_logprobs, on_cpu.prompt_logprobs)):
        assert a is not None and b is not None and len(a) == len(b)
        for x, y in zip(a, b):
            assert x.token == y.token
            assert x.logprob == pytest.approx(y.logprob, abs=1e-4)


def test_prompt_logprobs_are_those_of_the_logits(llm: LLM) -> None:
    prompt = PROMPTS[1]
    result = llm.generate(prompt, max_new_tokens=1, logprobs=0, prompt_logprobs=True)
    logits = llm.logits(prompt).astype(np.float64)
    want = (
        logits
        - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        - logits.max(1, keepdims=True)
    )
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == len(prompt) - 1
    for i, entry in enumerate(result.prompt_logprobs):
        assert entry.token == prompt[i + 1]
        assert entry.logprob == pytest.approx(want[i, prompt[i + 1]], abs=1e-5)


def test_sampling_reads_four_bytes_a_token_back(llm: LLM) -> None:
    result = llm.generate([5], max_new_tokens=8, ignore_eos=True, temperature=1.0, top_p=0.9, seed=1)
    assert result.metrics.bytes_read_per_token == 4


def test_a_stop_token_ends_the_text_and_is_not_in_it(llm: LLM) -> None:
    free = llm.generate([5, 6], max_new_tokens=8, ignore_eos=True)
    stop = free.token_ids[3]
    first = free.token_ids.index(stop)
    stopped = llm.generate([5, 6], max_new_tokens=8, ignore_eos=True, stop_token_ids=[stop])
    assert stopped.token_ids == free.token_ids[:first]
    assert (stopped.finish_reason, stopped.stop) == ("stop", stop)


def test_text_ends_before_a_stop_string_that_tokens_cut_in_two(llm: LLM) -> None:
    free = llm.generate([5, 6], max_new_tokens=12, ignore_eos=True)
    stop = free.text[3:6]
    assert len(stop) == 3
    streamed = "".join(stream := llm.stream([5, 6], max_new_tokens=12, ignore_eos=True, stop=[stop]))
    assert streamed == free.text[: free.text.index(stop)]
    assert stream.result.text == streamed
    assert (stream.result.finish_reason, stream.result.stop) == ("stop", stop)


def test_a_banned_word_never_comes(llm: LLM) -> None:
    free = llm.generate([5, 6], max_new_tokens=8, ignore_eos=True)
    pair = free.token_ids[1:3]
    got = llm.generate([5, 6], max_new_tokens=8, ignore_eos=True, bad_words=[pair])
    assert pair not in list(zip(got.token_ids, got.token_ids[1:]))
    assert got.token_ids[0] == free.token_ids[0]


def test_an_event_from_another_thread_ends_within_a_step(llm: LLM) -> None:
    event = threading.Event()
    stream = llm.stream([5, 6], max_new_tokens=200, ignore_eos=True, stop_event=event)
    next(stream)
    threading.Thread(target=event.set).start()
    event.wait()
    made = len(stream.partial_result.token_ids)
    result = stream.result
    assert result.finish_reason == "interrupted"
    assert len(result.token_ids) <= made + 1


def test_a_prefill_ends_after_the_submit_under_way_if_nobody_waits_for_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = llm.generate([5, 6] * 20, max_new_tokens=3, ignore_eos=True).token_ids
    event, real, count = threading.Event(), NumpyRuntime.run_step, itertools.count(1)

    def run_step(self: NumpyRuntime, step: Step) -> None:
        real(self, step)
        if next(count) == 3:
            event.set()

    with monkeypatch.context() as patch:
        patch.setattr(NumpyRuntime, "run_step", run_step)
        result = llm.generate([5, 6] * 20, max_new_tokens=3, stop_event=event)
    assert (result.finish_reason, result.token_ids, next(count)) == ("interrupted", (), 4)
    assert result.metrics.prefilled_tokens == 0
    assert llm._runner is not None and llm._runner.cache.in_use == 0
    assert llm.generate([5, 6] * 20, max_new_tokens=3, ignore_eos=True).token_ids == wanted


def test_an_interrupted_batch_keeps_what_there_is(llm: LLM) -> None:
    event = threading.Event()
    results = llm.batch(
        [[5], [6]], [SamplingParams(max_new_tokens=2), SamplingParams(max_new_tokens=200)], ignore_eos=True,
        stop_event=event, on_result=lambda r: event.set(),
    )  # fmt: skip
    assert [r.finish_reason for r in results] == ["length", "interrupted"]
    assert len(results[1].token_ids) >= 2


def test_blocks_come_back_when_a_stream_is_dropped(llm: LLM) -> None:
    stream = llm.stream([5, 6], max_new_tokens=20, ignore_eos=True)
    next(stream)
    del stream
    cache = llm._open_engine().runner.cache
    assert cache.pool.free_blocks == cache.pool.count


def test_a_batch_beside_a_stream_under_way_runs_and_so_does_the_stream(llm: LLM) -> None:
    first = llm.stream([5, 6], max_new_tokens=20, ignore_eos=True)
    next(first)
    results = llm.batch([[5]] * 40, max_new_tokens=6, ignore_eos=True)
    assert [len(r.token_ids) for r in results] == [6] * 40
    assert first.result.token_ids == llm.generate([5, 6], max_new_tokens=20, ignore_eos=True).token_ids


def test_batches_and_long_texts_in_turn_keep_their_runner(tiny_model: Path) -> None:
    """Each would otherwise be given a cache that is too small for the other, and plans be recorded anew."""
    with LLM(tiny_model, device="numpy") as llm:
        runners = []
        for _ in range(3):
            llm.batch([[5], [6], [7]], max_new_tokens=2)
            llm.generate([5] * 200, max_new_tokens=2)
            runners.append(llm._runner)
        assert runners[0] is runners[1] is runners[2]


def test_what_cannot_be_is_told_before_anything_is_loaded(llm: LLM, tiny_model: Path) -> None:
    for kv_dtype, words in (("q9", "'q9' is not supported: choose from"), ("q8_0", "not a multiple of 32")):
        with pytest.raises(UsageError, match=words):
            LLM(tiny_model, device="numpy", kv_dtype=kv_dtype)
    with pytest.raises(UsageError, match="not bytes"):
        llm.generate(b"text")  # type: ignore[arg-type]


def test_nan_logits_are_an_error_that_names_the_step(tiny_model: Path) -> None:
    with LLM(tiny_model, device="numpy", kv_dtype="f32") as llm:
        part = llm.weights.embed.parts[0]
        llm.runtime.write(part.buffer, part.offset, np.full(8, np.nan, np.float32).view(np.uint32))
        for fields in ({}, {"temperature": 1.0}):
            with pytest.raises(NumericError, match=r"step \d+: the logits for position \d+ hold NaN"):
                llm.generate([0, 1], **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperatur": 1.0}, "temperatur"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"stop_token_ids": [10**6]}, "1000000"),
        ({"logit_bias": {704: 1.0}}, "704"),
    ],
)
def test_a_bad_parameter_is_refused_by_name(llm: LLM, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        llm.generate([5], **fields)


@pytest.mark.parametrize(
    ("prompt", "message"), [([], "empty"), ("", "empty"), ([704], "token id 704"), ([-1], "-1")]
)
def test_a_bad_prompt_is_refused(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        llm.generate(prompt)


def test_max_new_tokens_is_cut_to_the_context(tiny_model: Path) -> None:
    with LLM(tiny_model, device="numpy", context=40) as llm:
        assert len(llm.generate([5] * 30, max_new_tokens=100, ignore_eos=True).token_ids) == 10
        with pytest.raises(UsageError, match="40 tokens, longer than the context of 40"):
            llm.generate([5] * 40)


def test_threads_take_turns_and_get_what_they_get_alone(llm: LLM) -> None:
    llm.batch(PROMPTS, max_new_tokens=3, ignore_eos=True)  # leaves a cache of several rows
    alone = [llm.generate(p, max_new_tokens=12, ignore_eos=True).token_ids for p in PROMPTS]
    got: dict[int, tuple[int, ...]] = {}

    def run(i: int) -> None:
        got[i] = llm.generate(PROMPTS[i], max_new_tokens=12, ignore_eos=True).token_ids

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(len(PROMPTS))] == alone


def test_streams_are_read_in_turn(tiny_model: Path) -> None:
    with LLM(tiny_model, device="numpy", context=64) as llm:
        alone = [llm.generate([i], max_new_tokens=9, ignore_eos=True).token_ids for i in (5, 6)]
        first, second = (llm.stream([i], max_new_tokens=9, ignore_eos=True) for i in (5, 6))
        next(first), next(second), next(first)
        assert [second.result.token_ids, first.result.token_ids] == alone[::-1]


def test_requests_of_other_threads_go_on_while_nobody_reads_theirs(llm: LLM) -> None:
    """Whoever waits drives all: the stream's tokens are there when its reader comes back."""
    stream = llm.stream([5, 6], max_new_tokens=12, ignore_eos=True)
    next(stream)
    llm.generate([7, 8, 9], max_new_tokens=30, ignore_eos=True)
    assert len(stream.partial_result.token_ids) == 12


def test_streams_made_before_a_larger_one_still_run(tiny_model: Path) -> None:
    with LLM(tiny_model, device="numpy") as llm:
        small = llm.stream([5, 6], max_new_tokens=4, ignore_eos=True)
        large = llm.stream([7] * 90, max_new_tokens=4, ignore_eos=True)
        assert len(large.result.token_ids) == 4
        assert len(small.result.token_ids) == 4


@pytest.mark.usefixtures("step_by_step")
def test_an_error_hands_over_what_there_is(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = llm._open_engine().runner
    decode, calls = runner.decode, [0]

    def failing(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 5:
            raise NumericError("planted")
        return decode(*args)

    monkeypatch.setattr(runner, "decode", failing)
    seen: dict[int, Any] = {}
    with pytest.raises(NumericError, match="planted"):
        llm.batch(
            [[5], [6]],
            [SamplingParams(max_new_tokens=2), SamplingParams(max_new_tokens=30)],
            ignore_eos=True,
            on_result=lambda r: seen.__setitem__(r.prompt, r),
        )
    assert [seen[i].finish_reason for i in (0, 1)] == ["length", "error"]
    assert len(seen[1].token_ids) == 5
    calls[0] = 0
    stream = llm.stream([5], max_new_tokens=30, ignore_eos=True)
    with pytest.raises(NumericError):
        "".join(stream)
    assert (stream.partial_result.finish_reason, len(stream.partial_result.token_ids)) == ("error", 5)
    assert runner.cache.in_use == 0


def test_prefill_counts_only_what_was_run(llm: LLM) -> None:
    event = threading.Event()
    event.set()
    stopped = llm.generate([5] * 40, max_new_tokens=4, stop_event=event)
    assert (stopped.metrics.prefilled_tokens, stopped.finish_reason) == (0, "interrupted")
    assert llm.generate([5] * 40, max_new_tokens=1).metrics.prefilled_tokens == 40


def test_prompt_logprobs_do_not_keep_a_batch_from_running_together(llm: LLM) -> None:
    runner = llm._open_engine().runner
    before = runner.steps_run
    llm.batch(PROMPTS, max_new_tokens=9, ignore_eos=True, prompt_logprobs=True)
    assert llm._runner is runner
    assert runner.steps_run - before <= 9 + 2 * len(PROMPTS)


def test_no_memory_is_left_behind_when_a_runner_cannot_be_made(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(tiny_model, device="numpy") as llm:
        before = llm.runtime.allocated_bytes
        allocate = llm.runtime.allocate

        def failing(name: str, *args: Any) -> Any:
            if name == "activations":
                raise OutOfMemoryError("planted")
            return allocate(name, *args)

        monkeypatch.setattr(llm.runtime, "allocate", failing)
        for _ in range(2):
            with pytest.raises(OutOfMemoryError):
                llm.generate([5])
        assert llm.runtime.allocated_bytes == before


def test_a_batch_takes_turns_where_memory_is_short(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(tiny_model, device="numpy", kv_dtype="f32") as llm:
        want = [r.token_ids for r in llm.batch(PROMPTS, max_new_tokens=9, ignore_eos=True)]
        assert llm._runner is not None
        cache_words = llm._runner.cache.bytes // 4
    with LLM(tiny_model, device="numpy", kv_dtype="f32") as llm:
        allocate = llm.runtime.allocate

        def short(name: str, words: int, kind: Any) -> Any:
            if name.startswith("KV") and words > cache_words * 3 // 4:
                raise OutOfMemoryError("planted")
            return allocate(name, words, kind)

        monkeypatch.setattr(llm.runtime, "allocate", short)
        assert [r.token_ids for r in llm.batch(PROMPTS, max_new_tokens=9, ignore_eos=True)] == want


@pytest.mark.parametrize("prompts", ["ab", [], [5], [["a"]]])
def test_a_batch_refuses_what_is_no_list_of_prompts(llm: LLM, prompts: Any) -> None:
    with pytest.raises(UsageError):
        llm.batch(prompts)


def test_what_does_not_fit_at_once_waits_for_its_turn(tiny_model: Path) -> None:
    with LLM(tiny_model, device="numpy", context=96) as llm:
        alone = [llm.generate([i] * 60, max_new_tokens=30, ignore_eos=True).token_ids for i in (5, 6)]
    with LLM(tiny_model, device="numpy", context=96) as llm:
        first, second = (llm.stream([i] * 60, max_new_tokens=30, ignore_eos=True) for i in (5, 6))
        next(first), next(second)
        assert [first.result.token_ids, second.result.token_ids] == alone
        cache = llm._open_engine().runner.cache
        assert cache.pool.free_blocks == cache.pool.count == 3


def test_an_oversized_request_is_refused_and_a_pool_without_room_is_named(tiny_model: Path) -> None:
    with LLM(tiny_model, device="numpy") as llm:
        block = kv_shape(llm.engine_config, llm.config).block_bytes
    with LLM(tiny_model, device="numpy", kv_memory=3 * block + 1) as llm:
        assert llm.cached_tokens == 0 and llm.room == 96
        assert len(llm.generate([5] * 90, max_new_tokens=30, ignore_eos=True).token_ids) == 6
        assert llm.cached_tokens == 96
        with pytest.raises(UsageError, match="96 tokens, longer than the context of 96"):
            llm.generate([5] * 96)
    with pytest.raises(UsageError, match=r"kv_memory is .*, and 32 tokens take"):
        LLM(tiny_model, device="numpy", kv_memory=100)


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.3}])
def test_preempted_requests_give_what_they_give_alone(tiny_model: Path, fields: dict[str, Any]) -> None:
    more = {"max_new_tokens": 40, "ignore_eos": True, **fields}
    with LLM(tiny_model, device="numpy", kv_dtype="f32") as llm:
        alone = [llm.generate(prompt, **more).token_ids for prompt in PROMPTS]
        block = kv_shape(llm.engine_config, llm.config).block_bytes
    with LLM(tiny_model, device="numpy", kv_dtype="f32", kv_memory=4 * block) as llm:
        together = llm.batch(PROMPTS, **more)
        assert [r.token_ids for r in together] == alone
        assert llm._open_engine().scheduler.preemptions > 0


@pytest.mark.parametrize("sampler", ["device", "cpu"])
def test_a_row_with_nan_ends_its_request_and_no_other(tiny_model: Path, tmp_path: Path, sampler: Any) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "untied")
    write_hf_model(model, tiny_config("qwen2", vocab_size=704, tie_word_embeddings=False), seed=3)
    with LLM(model, device="numpy", kv_dtype="f32") as llm:
        want = llm.generate([5, 6], max_new_tokens=9, ignore_eos=True).token_ids
    with LLM(model, device="numpy", kv_dtype="f32", sampler=sampler) as llm:
        part = llm.weights.embed.parts[0]
        row = np.full(llm.config.hidden_size, np.nan, np.float32).view(np.uint32)
        llm.runtime.write(part.buffer, part.offset + 700 * row.size, row)
        seen: dict[int, Any] = {}
        for fields in ({}, {"temperature": 1e-6, "seed": 1}):
            seen.clear()
            with pytest.raises(NumericError, match="position 2 hold NaN"):
                llm.batch(
                    [[5, 6], [5, 700]], max_new_tokens=9, ignore_eos=True,
                    on_result=lambda r: seen.__setitem__(r.prompt, r), **fields,
                )  # fmt: skip
            assert seen[0].token_ids == want and seen[0].finish_reason == "length"
            assert seen[1].token_ids == () and seen[1].finish_reason == "error"


def test_a_request_for_which_every_token_is_banned_ends_alone(llm: LLM) -> None:
    everything = dict.fromkeys(range(704), -np.inf)
    seen: dict[int, Any] = {}
    params = [SamplingParams(max_new_tokens=4), SamplingParams(max_new_tokens=4, logit_bias=everything)]
    with pytest.raises(NumericError, match="no token is possible at position 1"):
        llm.batch([[5], [6]], params, ignore_eos=True, on_result=lambda r: seen.__setitem__(r.prompt, r))
    assert (len(seen[0].token_ids), seen[1].finish_reason) == (4, "error")


@pytest.mark.parametrize("shared", [n + d for n in (32, 64) for d in (-1, 0, 1)])
@pytest.mark.parametrize("more", [0, 1, 31])
def test_cached_logits_are_those_of_a_fresh_prefill(
    device: Any, tiny_model: Path, shared: int, more: int
) -> None:
    """At every block boundary: the log-probabilities agree as far as a chunk of another size rounds. A block
    that is only partly shared is copied on the device."""
    common, tail = list(range(100, 100 + shared)), [7] * more
    asked = {"max_new_tokens": 4, "ignore_eos": True, "logprobs": 3}
    with LLM(tiny_model, device=str(device.index), kv_dtype="f32", context=160) as llm:
        fresh = llm.generate([*common, *tail], **asked)
    with LLM(tiny_model, device=str(device.index), kv_dtype="f32", context=160) as llm:
        before = llm.generate([*common, 9, 9, 9], **asked)
        again = llm.generate([*common, *tail], **asked)
        assert llm.generate([*common, 9, 9, 9], **asked).token_ids == before.token_ids
    assert again.metrics.reused_tokens == min(shared, shared + more - 1)
    assert again.token_ids == fresh.token_ids
    for one, other in zip(again.logprobs or (), fresh.logprobs or ()):
        assert abs(one.logprob - other.logprob) <= 1e-4


def test_a_second_turn_of_many_requests_leaves_nothing_behind(llm: LLM) -> None:
    for _ in range(3):
        llm.batch([[i, i + 1] for i in range(50)], max_new_tokens=3, ignore_eos=True)
    cache = llm._open_engine().runner.cache
    assert cache.in_use == 0 and cache.pool.free_blocks == cache.pool.count and not cache.copies


def test_ctrl_c_ends_its_own_request_and_the_others_go_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    want = llm.generate([7, 8, 9], max_new_tokens=12, ignore_eos=True).token_ids
    other = llm.stream([7, 8, 9], max_new_tokens=12, ignore_eos=True)
    next(other)
    real, count = NumpyRuntime.run_step, itertools.count(1)

    def run_step(self: NumpyRuntime, step: Step) -> None:
        real(self, step)
        if next(count) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(NumpyRuntime, "run_step", run_step)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([5, 6], max_new_tokens=12, ignore_eos=True)
    assert other.result.token_ids == want
    cache = llm._open_engine().runner.cache
    assert cache.in_use == 0 and cache.pool.free_blocks == cache.pool.count

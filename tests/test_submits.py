"""Plans are cut into submits by the time they take: short pieces at first, then as few as time allows."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinfer_vk.engine.bench import Bench, Workload, load_subject
from xinfer_vk.errors import DeviceError
from xinfer_vk.kernels.copy_words import copy_words
from xinfer_vk.models import shapes
from xinfer_vk.plan import BufferKind, Plan
from xinfer_vk.vulkan import sequences
from xinfer_vk.vulkan.runtime import KomputeRuntime
from xinfer_vk.vulkan.sequences import PROBE_STEPS, SUBMIT_S, recut

STEPS = 5 * PROBE_STEPS - 3


@pytest.fixture
def chain(runtime, monkeypatch):
    """A plan in which each step needs the one before it; its first buffer and its last. A busy machine is no
    reason to cut it."""
    monkeypatch.setattr(sequences, "SUBMIT_S", 1.0)
    buffers = [runtime.allocate(f"b{i}", 64, BufferKind.SCRATCH) for i in range(STEPS + 1)]
    plan = Plan("chain", tuple(copy_words(a, 0, b, 0, 64) for a, b in pairwise(buffers)))
    yield plan, buffers[0], buffers[-1]
    for buffer in buffers:
        runtime.free(buffer)


def submits(runtime, prepared) -> int:
    before = runtime.counters()["submits"]
    prepared.run()
    return runtime.counters()["submits"] - before


def test_the_first_run_is_in_short_submits_and_the_next_in_one(runtime, chain):
    plan, first, last = chain
    prepared = runtime.prepare(plan)
    for run, expected in enumerate((5, 1, 1, 1)):
        data = np.random.default_rng(run).integers(0, 1 << 32, 64, np.uint32)
        runtime.write(first, 0, data)
        assert submits(runtime, prepared) == expected
        assert (runtime.read(last, 0, 64) == data).all()


def test_what_takes_too_long_is_cut_and_what_became_fast_is_joined(runtime, chain, monkeypatch):
    plan, first, last = chain
    prepared = runtime.prepare(plan)
    monkeypatch.setattr(sequences, "SUBMIT_S", 1e-9)
    counts = []
    for run in range(7):
        if run == 3:
            monkeypatch.setattr(sequences, "SUBMIT_S", 1.0)
        runtime.write(first, 0, np.full(64, run, np.uint32))
        counts.append(submits(runtime, prepared))
        assert (runtime.read(last, 0, 64) == run).all()
        assert (prepared.longest_step_s > 0) == (counts[-1] == STEPS)
    assert counts == [5, STEPS, STEPS, 1, 1, 1, 1]


def test_a_run_that_is_not_wanted_any_more_ends_after_the_submit_under_way(runtime, chain):
    plan, first, last = chain
    prepared = runtime.prepare(plan)
    before = runtime.counters()
    asked = iter((False, True))
    assert not prepared.run(lambda: next(asked))
    after = runtime.counters()
    assert after["submits"] - before["submits"] == 2
    assert after["dispatches"] - before["dispatches"] == 2 * PROBE_STEPS
    data = np.arange(64, dtype=np.uint32)
    runtime.write(first, 0, data)
    assert prepared.run(lambda: False)
    assert (runtime.read(last, 0, 64) == data).all()


def test_one_slow_run_is_no_reason_to_cut(runtime, chain, monkeypatch):
    prepared = runtime.prepare(chain[0])
    real, slow = prepared._recorder.evaluate, {3}
    runs = iter(range(100))

    def evaluate(*args):
        return [took + 60.0 * (run in slow) for run in [next(runs)] for took in real(*args)]

    monkeypatch.setattr(prepared._recorder, "evaluate", evaluate)
    assert [submits(runtime, prepared) for _ in range(6)] == [5, 1, 1, 1, 1, 1]
    slow.update(range(6, 9))
    assert [submits(runtime, prepared) for _ in range(3)] == [1, 1, STEPS]


def test_times_of_a_plan_that_is_being_cut_are_whole(runtime, chain, monkeypatch):
    if not runtime.info.timestamp_bits:
        pytest.skip("the device has no timestamps")
    prepared = runtime.prepare(chain[0], timed=True)
    for _ in range(3):
        prepared.run()
        assert prepared.times_ns().shape == (STEPS,)
        monkeypatch.setattr(sequences, "SUBMIT_S", 1e-9)


def test_steps_per_submit_is_obeyed_whatever_the_time(device, monkeypatch):
    monkeypatch.setattr(sequences, "SUBMIT_S", 1e-9)
    with KomputeRuntime(device.info, steps_per_submit=100) as rt:
        a, b = (rt.allocate(name, 64, BufferKind.SCRATCH) for name in "ab")
        prepared = rt.prepare(Plan("p", (copy_words(a, 0, b, 0, 64), copy_words(b, 0, a, 0, 64)) * 20))
        assert [submits(rt, prepared) for _ in range(3)] == [1, 1, 1]


def test_a_plan_that_cannot_be_recorded_anew_stays_as_it_was(runtime, chain, monkeypatch):
    prepared = runtime.prepare(chain[0])
    prepared.run()
    with monkeypatch.context() as patch:
        patch.setattr(prepared._recorder, "_fill", lambda *args: 1 / 0)
        with pytest.raises(DeviceError, match="recording plan 'chain'"):
            prepared.run()
    assert [submits(runtime, prepared) for _ in range(2)] == [1, 1]


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0, 3, exclude_min=True)), min_size=1, max_size=30))
def test_ranges_stay_whole_and_in_order_and_are_short(parts):
    ends = np.cumsum([steps for steps, _ in parts]).tolist()
    ranges = list(zip([0, *ends[:-1]], ends))
    seconds = [took for _, took in parts]
    cut = recut(ranges, seconds)
    assert cut[0][0] == 0 and cut[-1][1] == ends[-1]
    assert all(a[1] == b[0] for a, b in pairwise(cut)) and all(a < b for a, b in cut)
    rate = {i: took / (b - a) for (a, b), took in zip(ranges, seconds) for i in range(a, b)}  # by step
    for start, stop in cut:
        took = sum(rate[i] for i in range(start, stop))
        assert took <= 1.5 * SUBMIT_S * (1 + 1e-6) or stop - start == 1
    for (a, _), (_, b) in pairwise(cut):
        assert sum(rate[i] for i in range(a, b)) > SUBMIT_S * (1 - 1e-6)


def test_prefills_take_fewer_tokens_where_one_dispatch_takes_too_long(runtime, monkeypatch):
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 99,
        "max_position_embeddings": 1024,
    }  # fmt: skip
    monkeypatch.setitem(shapes.SHAPES, "tiny", config)
    monkeypatch.setattr(sequences, "SUBMIT_S", 1e-9)
    monkeypatch.setattr("xinfer_vk.engine.runner.LONG_STEP_S", 60.0)
    subject = load_subject(runtime, "tiny:f32", synthetic=True)
    bench = Bench(subject, [Workload("pp", 512)], "f16")
    try:
        assert bench.measure(Workload("pp", 512), repeats=2).steps == 1
        monkeypatch.setattr("xinfer_vk.engine.runner.LONG_STEP_S", 1e-9)
        assert bench.measure(Workload("pp", 512), repeats=1, warm_up=4).steps == 8
        assert bench.runner.prefill_tokens == 64
    finally:
        bench.free()
        subject.free()

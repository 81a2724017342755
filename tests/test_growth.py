"""A decode step leaves nothing behind: what thousands of them allocate is what their results hold."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from xinfer_vk import LLM
from xinfer_vk.engine.runner import make_runner
from xinfer_vk.sampling.params import SamplingParams
from xinfer_vk.sampling.program import RowParams

RUNS = 8


def settles(run: Callable[[int], object], steps: int, measure: Callable[[], int], below: float) -> bool:
    """Whether one of several runs of ``steps`` leaves fewer than ``below`` bytes a step behind.

    What leaks does so in every run. A cache that fills late, or a driver that takes buffers of 1 MiB
    until it has enough to go round (lavapipe: 5 MiB over 3000 submits, then none in 30 000), adds to
    some of them only.
    """
    for _ in range(RUNS):
        gc.collect()
        before = measure()
        run(steps)
        gc.collect()
        if measure() - before < steps * below:
            return True
    return False


def python_settles(run: Callable[[int], object], steps: int, below: float) -> bool:
    run(64)
    tracemalloc.start()
    try:
        run(64)  # tracemalloc sees what is replaced only if it saw it before
        return settles(run, steps, lambda: tracemalloc.get_traced_memory()[0], below)
    finally:
        tracemalloc.stop()


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * 4096


@pytest.mark.parametrize(("ahead", "sampled"), [(1, False), (8, True)])
def test_steps_on_a_device_leave_nothing(device: Any, tiny_model: Path, ahead: int, sampled: bool) -> None:
    with LLM(tiny_model, device=str(device.index), context=128) as llm:
        runner = make_runner(
            llm.runtime, llm.config, llm.weights, "f16", capacity=128, sequences=2, total=256
        )
        sequences = [runner.cache.open() for _ in range(2)]
        params = SamplingParams(temperature=0.9, top_k=30, top_p=0.9, seed=1)
        head: Any = "argmax"
        if sampled:
            head = runner.sampler.write_params([RowParams(params, seed=i, sequence=i) for i in range(2)])
        tokens = [5, 6]

        def run(steps: int) -> None:
            nonlocal tokens
            for _ in range(steps // ahead):
                if sequences[0].length + ahead > 128:
                    for sequence in sequences:
                        runner.cache.truncate(sequence, 0)
                tokens = runner.decode(sequences, tokens, head, ahead)[-1]

        assert python_settles(run, 512, below=16)  # no Python object is as small
        assert settles(run, 1024, resident_bytes, below=64)


def test_a_generation_keeps_what_its_result_holds(tiny_model: Path) -> None:
    """The token, its time, its text: some 200 bytes each."""
    with LLM(tiny_model, device="numpy", kv_dtype="f32", context=128) as llm:
        kept: list[Any] = []

        def run(steps: int) -> None:
            for _ in range(steps // 64):
                stream = llm.stream([5, 6, 7], max_new_tokens=64, ignore_eos=True, temperature=1.0, seed=2)
                for _ in stream:
                    pass
                kept[:] = [stream]

        assert python_settles(run, 128, below=16)

        def keep(steps: int) -> None:
            for _ in range(steps // 64):
                kept.append(
                    llm.generate([5, 6, 7], max_new_tokens=64, ignore_eos=True, temperature=1.0, seed=2)
                )

        assert python_settles(keep, 128, below=200)


def test_a_leak_does_not_settle() -> None:
    left: list[object] = []

    def leak(steps: int) -> None:
        left.extend(object() for _ in range(steps))

    assert not python_settles(leak, 128, below=16)

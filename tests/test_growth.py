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

STEPS = 1024
SLACK_BYTES = 16 << 10  # of Python's own, whatever the number of steps


def grown(run: Callable[[int], object], steps: int) -> int:
    """Bytes of Python objects that ``steps`` more steps leave behind, after some that fill every cache."""
    run(64)
    gc.collect()
    tracemalloc.start()
    try:
        run(64)  # tracemalloc sees what is replaced only if it saw it before
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        run(steps)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
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

        assert grown(run, STEPS) < SLACK_BYTES
        resident = resident_bytes()
        run(STEPS)
        assert resident_bytes() - resident < STEPS * 256  # of drivers that keep a little of each submit


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

        assert grown(run, 512) < SLACK_BYTES

        def keep(steps: int) -> None:
            for _ in range(steps // 64):
                kept.append(
                    llm.generate([5, 6, 7], max_new_tokens=64, ignore_eos=True, temperature=1.0, seed=2)
                )

        assert grown(keep, 512) < 512 * 200 + SLACK_BYTES

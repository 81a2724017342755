"""One LLM and one runtime used, and closed, from several threads."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from xinfer_vk import LLM
from xinfer_vk.errors import UsageError
from xinfer_vk.selftest import Case, all_cases
from xinfer_vk.vulkan.runtime import KomputeRuntime

MORE = {"max_new_tokens": 400, "ignore_eos": True}


@pytest.fixture(autouse=True)
def eager_switches() -> Iterator[None]:
    """Threads change places at every opportunity."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(*works: Callable[[], Any]) -> list[BaseException | None]:
    """Run functions at the same time; what each of them raised."""
    raised: list[BaseException | None] = [None] * len(works)

    def run(i: int) -> None:
        try:
            works[i]()
        except BaseException as error:
            raised[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


@pytest.mark.parametrize("kind", ["generate", "stream", "batch", "perplexity", "logits"])
def test_closing_while_another_thread_works_ends_it_with_an_error(
    tiny_model: Path, device: Any, kind: str
) -> None:
    llm = LLM(tiny_model, device=device.info.index)
    begun = threading.Event()
    calls: dict[str, Callable[[], Any]] = {
        "generate": lambda: llm.generate([5, 6], **MORE),
        "stream": lambda: list(llm.stream([5, 6], **MORE)),
        "batch": lambda: llm.batch([[5, 6], [7]], **MORE),
        "perplexity": lambda: llm.perplexity([5, 6] * 300, context=32),
        "logits": lambda: llm.logits([5] * 100),
    }

    def work() -> None:
        while True:
            calls[kind]()
            begun.set()

    def close() -> None:
        assert begun.wait(60)
        llm.close()

    failure, closing = together(work, close)
    assert isinstance(failure, UsageError) and "this LLM is closed" in str(failure)
    assert closing is None
    with pytest.raises(UsageError, match="this LLM is closed"):
        calls[kind]()


def test_threads_that_generate_and_measure_get_what_they_get_alone(tiny_model: Path, device: Any) -> None:
    with LLM(tiny_model, device=device.info.index) as llm:
        alone = llm.generate([5, 6], max_new_tokens=40, ignore_eos=True).token_ids
        measured = llm.perplexity([5, 6, 7] * 60, context=32).nll
        got: dict[str, Any] = {}

        def generate() -> None:
            got["ids"] = {
                llm.generate([5, 6], max_new_tokens=40, ignore_eos=True).token_ids for _ in range(3)
            }

        def measure() -> None:
            got["nll"] = {llm.perplexity([5, 6, 7] * 60, context=32).nll for _ in range(3)}

        assert together(generate, measure) == [None, None]
        assert got == {"ids": {alone}, "nll": {measured}}


class Yielding:
    """A layer whose :meth:`next_groups` gives another thread time to overwrite what it has set."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def next_groups(self, groups: tuple[int, int, int]) -> None:
        self._layer.next_groups(groups)
        time.sleep(1e-4)


def test_plans_recorded_at_the_same_time_keep_their_own_workgroups(device: Any) -> None:
    """The layer keeps the next dispatch's group counts for a device, not for a thread. With another kernel's,
    these leave rows out."""
    cases = {str(case): case for case in all_cases()}
    with KomputeRuntime(device.info) as runtime:
        recorder = runtime._recorder
        assert recorder._layer is not None
        recorder._layer = Yielding(recorder._layer)  # type: ignore[assignment]
        names = ("swiglu: 1537 dims, 3 of 4 rows", "rmsnorm: 896 dims, 31 of 32 rows")
        both = threading.Barrier(len(names), timeout=60)

        def work(case: Case) -> None:
            for _ in range(20):
                both.wait()  # then they record at the same time
                problem = case.run(runtime).problem
                if problem:
                    both.abort()
                    pytest.fail(problem)

        assert together(*(lambda name=name: work(cases[name]) for name in names)) == [None, None]

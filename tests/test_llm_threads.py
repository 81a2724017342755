"""One LLM and one runtime used, and closed, from several threads."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_model import write_chat_model

from xinfer_vk import LLM
from xinfer_vk.engine.scheduler import Scheduler
from xinfer_vk.errors import UsageError
from xinfer_vk.kernels.copy_words import copy_words
from xinfer_vk.plan import BufferKind, Plan
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


@pytest.mark.parametrize("kind", ["stream", "batch", "session"])
def test_a_cache_replaced_before_the_first_step_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Another thread needs a larger cache just when a generation has been given the small one."""
    with LLM(write_chat_model(tmp_path / "tiny"), device="numpy") as llm:
        few = {"max_new_tokens": 3, "ignore_eos": True}
        calls: dict[str, Callable[[], Any]] = {
            "stream": lambda: llm.stream([5, 6], **few).result.token_ids,
            "batch": lambda: [r.token_ids for r in llm.batch([[5, 6], [7]], **few)],
            "session": lambda: "".join(llm.session(context=100, **few).send("hello")),
        }
        alone = calls[kind]()
        made = Scheduler.__init__

        def generate_more() -> None:
            with contextlib.suppress(UsageError):  # where a conversation was first
                llm.generate([5] * 200, **few)

        others: list[threading.Thread] = []

        def replaced(self: Scheduler, *arguments: Any, **more: Any) -> None:
            made(self, *arguments, **more)
            monkeypatch.setattr(Scheduler, "__init__", made)
            other = threading.Thread(target=generate_more)
            others.append(other)
            other.start()
            other.join(3 if kind != "session" else 0.5)  # a conversation makes it wait

        monkeypatch.setattr(Scheduler, "__init__", replaced)
        assert calls[kind]() == alone
        others[0].join()


def test_plans_recorded_at_the_same_time_keep_their_own_workgroups(device: Any) -> None:
    """The layer keeps the next dispatch's group counts for a device, not for a thread."""
    with KomputeRuntime(device.info) as runtime:
        sizes = (300, 70_000)

        def work(count: int) -> None:
            source = runtime.allocate("source", count, BufferKind.SCRATCH)
            target = runtime.allocate("target", count, BufferKind.SCRATCH)
            words = np.arange(count, dtype=np.uint32) + 1
            runtime.write(source, 0, words)
            for _ in range(20):
                runtime.write(target, 0, np.zeros(count, np.uint32))
                plan = runtime.prepare(Plan("copy", (copy_words(source, 0, target, 0, count),) * 30))
                plan.run()
                assert np.array_equal(runtime.read(target, 0, count), words)
                plan.release()

        assert together(*(lambda count=count: work(count) for count in sizes)) == [None, None]

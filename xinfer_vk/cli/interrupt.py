"""Ctrl-C, and SIGTERM, while the model runs."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator

INTERRUPTED = 128 + signal.SIGINT  # exit codes, as shells have them
TERMINATED = 128 + signal.SIGTERM

_terminated = False


@contextlib.contextmanager
def interruptible(cancel: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C calls ``cancel``, which ends the work after the step under way; a second one ends it at once.
    SIGTERM does the same."""

    def interrupt(signum: int, frame: object) -> None:
        _note(signum)
        cancel()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, terminate)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def terminate(signum: int, frame: object) -> None:
    """A handler of SIGTERM that unwinds, as Ctrl-C does, so that everything is cleaned up."""
    _note(signum)
    raise KeyboardInterrupt


def terminated() -> bool:
    """Whether SIGTERM has come: then the program ends, even where Ctrl-C would only stop an answer."""
    return _terminated


def exit_code() -> int:
    """Of a program that was interrupted."""
    return TERMINATED if _terminated else INTERRUPTED


def _note(signum: int) -> None:
    global _terminated
    _terminated = _terminated or signum == signal.SIGTERM

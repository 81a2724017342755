"""Ctrl-C, SIGTERM, and SIGHUP (the terminal was closed), while the model runs."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator

ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]

_ended_by: int | None = None  # the first of ENDING that has come


@contextlib.contextmanager
def interruptible(cancel: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C calls ``cancel``, which ends the work after the step under way; a second one ends it at once.
    SIGTERM and SIGHUP do the same. What is ignored (nohup) stays so."""

    def interrupt(signum: int, frame: object) -> None:
        _note(signum)
        cancel()
        for number in before:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else terminate)

    heard = [n for n in (signal.SIGINT, *ENDING) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def unwind_when_ended() -> None:
    """Let SIGTERM and SIGHUP unwind the program, but for those that are ignored or handled."""
    for number in ENDING:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, terminate)


def terminate(signum: int, frame: object) -> None:
    """A handler that unwinds, as Ctrl-C does, so that everything is cleaned up."""
    _note(signum)
    raise KeyboardInterrupt


def terminated() -> bool:
    """Whether one of :data:`ENDING` has come: the program ends then, where Ctrl-C only stops an answer."""
    return _ended_by is not None


def exit_code() -> int:
    """Of a program that was interrupted, as shells have it."""
    return 128 + (signal.SIGINT if _ended_by is None else _ended_by)


def _note(signum: int) -> None:
    global _ended_by
    if _ended_by is None and signum in ENDING:
        _ended_by = signum

"""Ctrl-C while the model runs."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def interruptible(cancel: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C calls ``cancel``, which ends the work after the step under way; a second one ends it at once."""

    def interrupt(signum: int, frame: object) -> None:
        cancel()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

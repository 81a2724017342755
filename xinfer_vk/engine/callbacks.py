"""What callers give to be called or asked during work, checked before the work begins."""

from __future__ import annotations

import threading
from typing import Any

from xinfer_vk.errors import UsageError


def check_callable(name: str, value: Any, arguments: str) -> None:
    """Raise :class:`UsageError` for what is neither a function nor None. ``arguments``: what it is called
    with, in words."""
    if value is not None and not callable(value):
        raise UsageError(f"{name} is {value!r}: it is a function of {arguments}, or None")


def as_event(value: threading.Event | None) -> threading.Event:
    """The event that ends a generation; a new one for None. multiprocessing's and the like are as good."""
    if value is None:
        return threading.Event()
    if not callable(getattr(value, "is_set", None)):
        raise UsageError(f"stop_event is {value!r}: it is a threading.Event, or None")
    return value

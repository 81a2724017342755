"""Calling Kompute so that what goes wrong in it becomes one of our exceptions."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

from xinfer_vk.errors import DeviceError, DeviceLostError, UsageError, XinferError
from xinfer_vk.vulkan.layer import DeviceLayer

F = TypeVar("F", bound=Callable[..., Any])


def in_turn(method: F) -> F:
    """Hold the device's lock during a method. One thread at a time uses kp and the layer, which keeps notes
    for the next dispatch, pipeline or buffer of a device. In a fork the lock is free, and what the method
    calls refuses."""

    @functools.wraps(method)
    def locked(self: Any, *arguments: Any, **named: Any) -> Any:
        with self.turns:
            return method(self, *arguments, **named)

    return locked  # type: ignore[return-value]


class ForkableLock:
    """A re-entrant lock that is free in a fork of its process: the thread that held it does not exist there,
    so waiting for it would hang."""

    def __init__(self) -> None:
        self._locks = {os.getpid(): threading.RLock()}

    def __enter__(self) -> None:
        self._own().acquire()

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(RuntimeError):  # taken in the parent, left in a fork made meanwhile
            self._own().release()

    def _own(self) -> Any:
        return self._locks.setdefault(os.getpid(), threading.RLock())


class Process:
    """The process that opened a device. A fork of it lacks the driver's threads: a call there would hang."""

    def __init__(self) -> None:
        self._id = os.getpid()

    @property
    def is_another(self) -> bool:
        """Whether this code runs in a fork of it."""
        return os.getpid() != self._id

    def require(self) -> None:
        """Raise :class:`UsageError` in a fork."""
        if self.is_another:
            raise UsageError(
                f"process {os.getpid()} is a fork of process {self._id}, which has a Vulkan device open, and "
                "cannot use Vulkan: create the LLM after the fork only, or start processes with "
                "multiprocessing.get_context('spawn')"
            )


def never_let_go(thing: object) -> None:
    """Keep an object for good, with all it refers to: its destructor would call the driver."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


class Guard:
    """Wraps every call into ``kp`` for one device. kp ignores most of Vulkan's results and throws
    nondescript exceptions for the others; the layer, where it is active, kept the first failure."""

    def __init__(self, layer: DeviceLayer | None, turns: Any = None) -> None:
        self._layer = layer
        self.process = Process()
        self.turns = turns or ForkableLock()  # the device's
        self.lost = False

    @contextlib.contextmanager
    def __call__(self, doing: str, detail: str = "") -> Iterator[None]:
        """``doing`` completes "out of device memory while …". ``detail`` is added to the message."""
        self._refuse(doing)
        try:
            yield
        except XinferError:
            raise
        except Exception as error:
            self._failed(doing, detail, error)
        self.check(doing, detail)

    def call(self, function: Callable[[], object], doing: str) -> float:
        """The same around one call, for what is done at every step; how many seconds the call took."""
        self._refuse(doing)
        began = time.perf_counter()
        try:
            function()
        except Exception as error:
            self._failed(doing, "", error)
        seconds = time.perf_counter() - began
        self.check(doing)
        return seconds

    def _refuse(self, doing: str) -> None:
        self.process.require()
        if self.lost:
            raise DeviceLostError(f"{doing}: the device was lost earlier; open it again")

    def _failed(self, doing: str, detail: str, error: Exception) -> NoReturn:
        self.check(doing, detail, error)
        raise DeviceError(f"the device failed while {doing}: {' '.join(str(error).split())}") from error

    def check(self, doing: str, detail: str = "", cause: Exception | None = None) -> None:
        """Raise what the layer has seen fail, if anything."""
        failure = self._layer.take_failure() if self._layer else None
        if failure is not None:
            error = failure.error(doing, detail)
            self.lost = self.lost or isinstance(error, DeviceLostError)
            raise error from cause

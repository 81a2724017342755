"""The limits that are set on this process (``ulimit``), and what they leave.

Drivers, and LLVM in those for the CPU, crash where memory or file handles run out. So we check before we call
them, and the error names the limit.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from xinfer_vk.errors import DeviceError, OutOfMemoryError, setting
from xinfer_vk.units import format_bytes

resource: Any
try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None

COMPILE_BYTES = 64 << 20  # what LLVM took for the largest kernel, twice over
DRIVERS_BYTES = 512 << 20  # to load the drivers: Mesa's for the CPU maps 250 MB
OPEN_FILES = 16  # at once while a device is opened: lavapipe took 7
FEW_FILES = 64  # a limit below is on purpose, and may be met
FILE_SLACK_BYTES = 1 << 20  # of alignment, and what the driver keeps for itself

_M_ARENA_MAX = -8  # of glibc's malloc.h
_VULKAN_EXHAUSTED = ("VkErrorOutOfHostMemory", "VkErrorOutOfDeviceMemory")
_EXHAUSTED = ("failed to map segment", "cannot allocate memory", "can't start new thread")


@dataclass(frozen=True)
class Limit:
    """A limit that is set: the option of ``ulimit``, the value that it prints, and what is limited."""

    option: str
    value: int
    of: str

    def __str__(self) -> str:
        return f"`ulimit {self.option} {self.value}`"


def tight_limits() -> list[Limit]:
    """The limits that may end a program which would run without them."""
    found = []
    for name, option, unit, of, generous in (
        ("RLIMIT_AS", "-v", 1024, "memory", None),
        ("RLIMIT_DATA", "-d", 1024, "memory", None),
        ("RLIMIT_NOFILE", "-n", 1, "file handles", FEW_FILES),
        ("RLIMIT_FSIZE", "-f", 1024, "file size", None),
    ):
        soft = _soft(name)
        if soft is not None and (generous is None or soft < generous):
            found.append(Limit(option, soft // unit, of))
    return found


def _soft(name: str) -> int | None:
    if resource is None or not hasattr(resource, name):
        return None
    soft = resource.getrlimit(getattr(resource, name))[0]
    return None if soft == resource.RLIM_INFINITY else soft


def memory_headroom() -> int | None:
    """Bytes that this process may still map; None where nothing limits it, or the system does not tell."""
    soft = {name: _soft(name) for name in ("RLIMIT_AS", "RLIMIT_DATA")}
    if all(limit is None for limit in soft.values()):
        return None
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = file.read().split()
    except OSError:
        return None
    page = os.sysconf("SC_PAGE_SIZE")
    used = {"RLIMIT_AS": int(pages[0]) * page, "RLIMIT_DATA": int(pages[5]) * page}
    return min(max(0, limit - used[name]) for name, limit in soft.items() if limit is not None)


def memory_limit() -> Limit | None:
    return next((limit for limit in tight_limits() if limit.of == "memory"), None)


def require_memory(needed_bytes: int, doing: str) -> None:
    """Raise :class:`OutOfMemoryError` where a limit leaves less than that many bytes."""
    left = memory_headroom()
    if left is not None and left < needed_bytes:
        raise out_of_memory(f"{doing} takes {needed_bytes >> 20} MB, and {left >> 20} MB are left")


def out_of_memory(what: str) -> OutOfMemoryError:
    """The error of a process that a limit leaves too little memory."""
    limit = memory_limit()
    remedy = f"raise {limit}" if limit else "free some"
    smaller = setting("device", "numpy")
    return OutOfMemoryError(f"out of memory: {what}: {remedy}, or use {smaller}, which takes less")


def require_file_handles() -> None:
    """Raise :class:`DeviceError` unless a driver can open its files: some crash where they cannot."""
    held: list[int] = []
    try:
        held.append(os.open(os.devnull, os.O_RDONLY))
        while len(held) < OPEN_FILES:
            held.append(os.dup(held[0]))
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            return
        soft = _soft("RLIMIT_NOFILE")
        raise DeviceError(
            f"out of file handles: opening a device takes {OPEN_FILES}, and {len(held)} are left: raise "
            f"`ulimit -n {soft}`, or close files"
        ) from error
    finally:
        for handle in held:
            os.close(handle)


def spare_memory() -> None:
    """Where memory is limited, let all threads share a heap: glibc reserves 64 MB for each thread's own."""
    if memory_limit() is None:
        return
    import ctypes

    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def require_file_size(needed_bytes: int, taken_bytes: int, what: str) -> None:
    """Raise :class:`OutOfMemoryError` where a file of ``taken_bytes`` may not grow by those needed. A driver
    that keeps its memory in it would end with SIGBUS.
    """
    soft = _soft("RLIMIT_FSIZE")
    if soft is not None and needed_bytes + taken_bytes + FILE_SLACK_BYTES > soft:
        left = max(0, soft - taken_bytes - FILE_SLACK_BYTES)
        raise OutOfMemoryError(
            f"out of memory: {what} needs {format_bytes(needed_bytes)} of the file in which the driver keeps "
            f"its memory, and `ulimit -f {soft // 1024}` leaves {format_bytes(left)}: raise it, or use "
            f"{setting('device', 'numpy')}"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, whatever its class, says that there is no more memory."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    if type(error).__name__ in _VULKAN_EXHAUSTED:
        return True
    return isinstance(error, (ImportError, OSError, RuntimeError)) and any(
        words in str(error).lower() for words in _EXHAUSTED
    )

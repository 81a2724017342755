"""Where a limit (``ulimit``) is set under which libraries crash: run the program in a child. The parent names
the limit, where a shell would say "Segmentation fault".

The child has the terminal and everything else of the parent; the parent hands on what ends it.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from xinfer_vk.limits import Limit

CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
_TOLD = 1  # the program came to its end by itself


def supervised(program: Callable[[], int], limits: Sequence[Limit]) -> int:
    """The exit code of ``program``, which runs in a child."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # each thread of it reserves tens of megabytes
    shared = mmap.mmap(-1, 1)  # by which the child says that it ends by itself
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    child = os.fork()
    if child == 0:
        code = program()
        shared[0] = _TOLD
        return code
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda signum, frame: os.kill(child, signum))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the child has it, too
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status):
        code = os.WEXITSTATUS(status)
        return code if shared[0] == _TOLD or code == 0 else _tell(f"exit code {code}", limits)
    ended_by = os.WTERMSIG(status)
    if ended_by in CRASHES:
        return _tell(signal.Signals(ended_by).name, limits)
    with suppress(OSError):  # SIGKILL has no handler
        signal.signal(ended_by, signal.SIG_DFL)
    os.kill(os.getpid(), ended_by)
    return 128 + ended_by


def _tell(how: str, limits: Sequence[Limit]) -> int:
    lacking = " or ".join(dict.fromkeys(limit.of for limit in limits))
    named = ", ".join(map(str, limits))
    remedy = ", or use --device numpy" if any(limit.of == "memory" for limit in limits) else ""
    message = (
        f"error: out of {lacking}: a library ended the program ({how}) under {named}: raise it{remedy}\n"
    )
    os.write(2, message.encode())
    return 1

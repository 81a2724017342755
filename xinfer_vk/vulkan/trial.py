"""Where memory is limited: open the device in another process first, because drivers crash where it runs out.

The trial has as much memory left as this process. It opens the same device, compiles and runs a kernel, and
writes one line to its standard output. If that line is missing, a library ended the trial.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from xinfer_vk import limits
from xinfer_vk.errors import OutOfMemoryError, XinferError

WORKS, MEMORY, OTHER = "works", "out of memory", "another error"
TIMEOUT_S = (
    60  # a cold start of the slowest driver takes a tenth; some wait for threads that they did not get
)
_CODE = "from xinfer_vk.vulkan.trial import main; main()"


def check_memory(device: str) -> None:
    """Raise :class:`OutOfMemoryError` if the device cannot be opened with the memory that a limit leaves.
    Without a limit this does nothing."""
    left = limits.memory_headroom()
    if left is None or not sys.executable:
        return
    limits.spare_memory()
    package = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-c", _CODE, device, str(left)]
    try:
        done = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise limits.out_of_memory(
            f"the Vulkan driver hangs in the {left >> 20} MB that are left (a trial of {TIMEOUT_S} s)"
        ) from None
    except MemoryError:
        raise limits.out_of_memory(f"{left >> 20} MB are left to open a device in") from None
    except (OSError, subprocess.SubprocessError):
        return  # no process to try it in
    said = done.stdout.strip()
    if said == OTHER and left < limits.DRIVERS_BYTES:  # a driver that does not fit is not listed
        raise limits.out_of_memory(f"the device was not found in the {left >> 20} MB that are left")
    if said in (WORKS, OTHER):  # another error comes again here, with its own message
        return
    how = "" if said == MEMORY else f" (a trial ended by {_ended_by(done.returncode)})"
    raise limits.out_of_memory(f"the Vulkan driver cannot work in the {left >> 20} MB that are left{how}")


def _ended_by(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"code {code}"


def main() -> None:
    """The trial itself: ``trial.py DEVICE BYTES``."""
    device, left = sys.argv[1], int(sys.argv[2])
    signal.alarm(TIMEOUT_S)  # also where nobody waits any more
    try:
        said = _try(device, left)
    except (MemoryError, OutOfMemoryError):
        said = MEMORY
    except Exception as error:
        said = MEMORY if limits.is_out_of_memory(error) else OTHER
    print(said, flush=True)
    os._exit(0)  # what comes after is not part of the trial


def _try(device: str, left: int) -> str:
    import resource

    from xinfer_vk.kernels.peak import peak_fma
    from xinfer_vk.plan import BufferKind, Plan
    from xinfer_vk.vulkan.runtime import open_runtime

    limits.spare_memory()
    for name in ("RLIMIT_AS", "RLIMIT_DATA"):
        soft, hard = resource.getrlimit(getattr(resource, name))
        if soft != resource.RLIM_INFINITY:
            mine = limits.memory_headroom() or 0
            resource.setrlimit(getattr(resource, name), (max(0, soft - max(0, mine - left)), hard))
    try:
        opened = open_runtime(device, in_trial=True)
    except XinferError as error:
        return MEMORY if isinstance(error, OutOfMemoryError) else OTHER
    target = opened.allocate("trial", 1 << 16, BufferKind.RESULT)
    opened.prepare(Plan("trial", (peak_fma(target, 1, 1),))).run()
    limits.require_memory(limits.COMPILE_BYTES, "compiling a kernel")
    return WORKS

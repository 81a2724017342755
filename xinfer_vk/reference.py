"""The NumPy runtime: runs a plan by each kernel's oracle, in order, over plain arrays.

It is the reference every Vulkan device is compared with, and what ``--device numpy`` uses.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np

from xinfer_vk.errors import UsageError
from xinfer_vk.plan import Buffer, BufferKind, DeviceProfile, OracleCall, Plan, Step

NUMPY_PROFILE = DeviceProfile(
    name="NumPy reference",
    simd=True,
    subgroup_size=8,
    max_workgroup_invocations=256,
    max_shared_bytes=32 << 10,
    max_storage_range_bytes=1 << 30,
    unified_memory=True,
)


class NumpyRuntime:
    """A :class:`~xinfer_vk.plan.Runtime` without a device."""

    def __init__(self, profile: DeviceProfile = NUMPY_PROFILE) -> None:
        self.profile = profile
        self.notices: tuple[str, ...] = ()
        self._arrays: dict[Buffer, np.ndarray] = {}
        self._derived: dict[Buffer, dict[tuple[Any, ...], np.ndarray]] = {}
        self._views: dict[Buffer, memoryview] = {}
        self._closed = False

    @property
    def driver(self) -> str:
        return f"NumPy {np.__version__}"

    @property
    def allocated_bytes(self) -> int:
        return sum(array.nbytes for array in self._arrays.values())

    def require_free(self, needed_bytes: int, what: str, kind: BufferKind = BufferKind.WEIGHTS) -> None:
        """The host's memory is not counted."""

    def free_bytes(self, kind: BufferKind) -> int:
        """As much as any model wants: the host's memory is not counted."""
        return 1 << 62

    def allocate(self, name: str, words: int, kind: BufferKind) -> Buffer:
        self._require_open()
        buffer = Buffer(name, words, kind)
        self._arrays[buffer] = np.zeros(words, np.uint32)
        self._derived[buffer] = {}
        return buffer

    def free(self, buffer: Buffer) -> None:
        if not self._closed:
            del self._arrays[buffer], self._derived[buffer]
            if buffer in self._views:
                self._views.pop(buffer).release()

    def write(self, buffer: Buffer, offset: int, words: np.ndarray) -> None:
        self._require_open()
        self._arrays[buffer][offset : offset + words.size] = words.reshape(-1).view(np.uint32)
        self._derived[buffer].clear()

    def uploads(self) -> AbstractContextManager[None]:
        """Writes are whole at once."""
        return nullcontext()

    def read(self, buffer: Buffer, offset: int, count: int) -> np.ndarray:
        self._require_open()
        return self._arrays[buffer][offset : offset + count].copy()

    def mapped(self, buffer: Buffer) -> memoryview:
        self._require_open()
        return self._views.setdefault(buffer, self._arrays[buffer].data)

    def prepare(
        self, plan: Plan, *, progress: Callable[[int, int], None] | None = None, timed: bool = False
    ) -> RecordedOracles:
        """``timed``: the oracles' own time, which is always taken."""
        return RecordedOracles(self, plan)

    def run_step(self, step: Step) -> None:
        """Run one dispatch: what a step-by-step comparison with a device is made of."""
        self._require_open()
        kernel = step.kernel
        bound = dict(zip(kernel.bindings, step.buffers))

        def cached(key: tuple[Any, ...], make: Callable[[], np.ndarray]) -> np.ndarray:
            buffer = bound[key[0]]
            if buffer.kind is not BufferKind.WEIGHTS:
                return make()
            store = self._derived[buffer]
            if key not in store:
                store[key] = make()
            return store[key]

        call = OracleCall(
            buffers={name: self._arrays[buffer] for name, buffer in bound.items()},
            p=kernel.unpack(step.push),
            spec=SimpleNamespace(**dict(kernel.spec)),
            groups=step.groups,
            cached=cached,
        )
        with np.errstate(over="ignore", invalid="ignore"):  # devices do not trap either
            kernel.oracle(call)

    def close(self) -> None:
        self._closed = True
        for view in self._views.values():
            view.release()
        self._views.clear()
        self._arrays.clear()
        self._derived.clear()

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError("the runtime is closed: open a new one")


class RecordedOracles:
    """A plan bound to the NumPy runtime."""

    longest_step_s = 0.0  # nothing is submitted

    def __init__(self, runtime: NumpyRuntime, plan: Plan) -> None:
        self._runtime, self._steps = runtime, plan.steps
        self._ends_ns: list[int] = [0]  # of the last run: its start, then the end of each step

    def run(self, stopped: Callable[[], bool] | None = None) -> bool:
        self._ends_ns = [time.perf_counter_ns()]
        for step in self._steps:
            if stopped is not None and stopped():
                return False
            self._runtime.run_step(step)
            self._ends_ns.append(time.perf_counter_ns())
        return True

    @property
    def seconds(self) -> float:
        return (self._ends_ns[-1] - self._ends_ns[0]) / 1e9

    def times_ns(self) -> np.ndarray:
        return np.diff(self._ends_ns).astype(np.float64)

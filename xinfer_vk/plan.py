"""The plan: what a step of a model does, as plain data that any executor can run.

A model graph, for one batch shape, becomes a flat list of :class:`Step`: a kernel, the buffers it is
bound to, its push constants and its group counts. Nothing here knows Vulkan. Two runtimes execute
the same plan: :mod:`xinfer_vk.vulkan.runtime` records it into a Kompute sequence and replays it, and
:mod:`xinfer_vk.reference` runs each kernel's NumPy oracle over the same words.

Everything that changes between two replays (token ids, positions, block tables) lives in a buffer of
kind ``STATE``; push constants hold only what the shape of the plan decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

WORD_BYTES = 4
MAX_PUSH_WORDS = 32  # 128 bytes: what Vulkan guarantees


class BufferKind(str, Enum):
    """Who reads and writes a buffer, which decides the memory it is put in."""

    WEIGHTS = "weights"  # the host writes it once while loading, kernels read it
    SCRATCH = "scratch"  # kernels only
    KV = "kv"  # kernels only, lives as long as the sequences in it
    STATE = "state"  # the host writes it before every run, kernels read it
    RESULT = "result"  # kernels write it, the host reads it after every run: small


@dataclass(eq=False, frozen=True)
class Buffer:
    """An arena of 32-bit words on the device. Compared by identity; made by ``Runtime.allocate``."""

    name: str
    words: int
    kind: BufferKind


@dataclass(frozen=True)
class DeviceProfile:
    """What a kernel may ask about the device when it chooses a variant and a geometry.

    ``simd`` is true for CPU devices (lavapipe, SwiftShader): a subgroup is a vector register of one
    core, memory is the host's, and workgroups should be few and long.
    """

    name: str
    simd: bool
    subgroup_size: int
    max_workgroup_invocations: int
    max_shared_bytes: int
    max_storage_range_bytes: int
    max_group_count: int = 65535
    unified_memory: bool = False
    features: frozenset[str] = frozenset()
    tuned: Mapping[str, str] = field(default_factory=dict, compare=False)  # see kernels/matmul.py


@dataclass(eq=False)
class OracleCall:
    """One dispatch as an oracle sees it.

    ``buffers`` maps a binding name to the *whole* bound buffer as ``uint32`` words (use ``.view`` for
    floats); ``p`` and ``spec`` carry push and specialization constants by name; ``groups`` is the
    dispatch size. ``cached(key, make)`` keeps what is derived from a WEIGHTS buffer (a dequantized
    matrix) until the host writes that buffer again: ``key`` must begin with the binding's name.
    """

    buffers: Mapping[str, np.ndarray]
    p: SimpleNamespace
    spec: SimpleNamespace
    groups: tuple[int, int, int]
    cached: Callable[[tuple[Any, ...], Callable[[], np.ndarray]], np.ndarray]

    def u32(self, binding: str) -> np.ndarray:
        return self.buffers[binding]

    def f32(self, binding: str) -> np.ndarray:
        return self.buffers[binding].view(np.float32)


@dataclass(frozen=True)
class Kernel:
    """One shader variant with fixed specialization constants, and the NumPy function it must equal.

    ``bindings``: names in descriptor order. ``params``: push-constant fields in order, ``"rows:u"``
    or ``"eps:f"`` (each is one 32-bit word). ``spec``: ``(name, value)`` in ``constant_id`` order.
    ``addresses``: ``(field, binding)``: that field and the one after it are the low and the high word of the
    address of the buffer bound there. Steps have zeros in them, and the runtime puts the address in.
    ``full_subgroups``: the shader's lanes are those of subgroups, of ``DeviceProfile.subgroup_size`` each and
    none idle. Only for devices with the feature ``subgroup_size_control``, and workgroups of whole subgroups.
    """

    name: str
    shader: str
    bindings: tuple[str, ...]
    params: tuple[str, ...]
    spec: tuple[tuple[str, int], ...]
    oracle: Callable[[OracleCall], None] = field(repr=False)
    addresses: tuple[tuple[str, str], ...] = ()
    full_subgroups: bool = False

    def __post_init__(self) -> None:
        assert len(self.params) <= MAX_PUSH_WORDS, f"{self.name}: push constants exceed 128 bytes"

    def pack(self, values: Mapping[str, int | float]) -> np.ndarray:
        """Push constants as ``uint32`` words; every field must be given and no other."""
        names = [p.split(":")[0] for p in self.params]
        if set(names) != set(values):
            raise ValueError(f"{self.name} takes {names}, got {sorted(values)}")
        words = np.zeros(len(self.params), np.uint32)
        for i, param in enumerate(self.params):
            name, kind = param.split(":")
            value = values[name]
            if kind == "f":
                words[i] = np.float32(value).view(np.uint32)
            else:
                words[i] = np.uint32(int(value) & 0xFFFFFFFF)
        return words

    def unpack(self, words: np.ndarray) -> SimpleNamespace:
        out = SimpleNamespace()
        for param, word in zip(self.params, words):
            name, kind = param.split(":")
            value = float(np.uint32(word).view(np.float32)) if kind == "f" else int(word)
            setattr(out, name, value)
        return out


@dataclass(frozen=True)
class Step:
    """One dispatch. ``independent``: no barrier is wanted before it, because it needs nothing that the
    steps since the last one not so marked wrote (that one included), nor writes what they read or write."""

    kernel: Kernel
    buffers: tuple[Buffer, ...]
    push: np.ndarray
    groups: tuple[int, int, int]
    label: str = ""
    independent: bool = False

    def __post_init__(self) -> None:
        assert len(self.buffers) == len(self.kernel.bindings), self.kernel.name
        assert all(1 <= g <= 65535 for g in self.groups), (self.kernel.name, self.label, self.groups)


def make_step(
    kernel: Kernel,
    buffers: Mapping[str, Buffer],
    params: Mapping[str, int | float],
    groups: Sequence[int],
    label: str = "",
    independent: bool = False,
) -> Step:
    """A step with buffers and push constants given by name."""
    x, y, z = (*groups, 1, 1, 1)[:3]
    if set(buffers) != set(kernel.bindings):
        raise ValueError(f"{kernel.name} binds {kernel.bindings}, got {sorted(buffers)}")
    bound = tuple(buffers[name] for name in kernel.bindings)
    return Step(kernel, bound, kernel.pack(params), (x, y, z), label or kernel.name, independent)


@dataclass(frozen=True)
class Plan:
    """A named list of steps, recorded once and run many times."""

    name: str
    steps: tuple[Step, ...]


class Recorded(Protocol):
    """A plan made ready by a runtime. ``run`` returns when the device has finished, or, once ``stopped`` says
    so, after the submit under way; whether everything was run.

    ``seconds``: of the last run, the submits and the waiting for their ends. ``longest_step_s``: the
    longest time in it of a step that was submitted by itself because it takes so long; 0 if there was none.
    """

    @property
    def seconds(self) -> float: ...

    @property
    def longest_step_s(self) -> float: ...

    def run(self, stopped: Callable[[], bool] | None = None) -> bool: ...

    def times_ns(self) -> np.ndarray:
        """How long each step of the plan took in the last run, nanoseconds, ``float64 [steps]``. Raises
        :class:`~xinfer_vk.errors.UsageError` for a plan that was not prepared with ``timed``."""


class Runtime(Protocol):
    """What the rest of the program needs from a device. Implemented for Kompute and for NumPy.

    ``allocate`` raises :class:`~xinfer_vk.errors.OutOfMemoryError`; ``run`` may raise
    :class:`~xinfer_vk.errors.DeviceLostError`. New memory is zero.
    """

    profile: DeviceProfile
    notices: tuple[str, ...]  # what the user should be told about the device, a line each

    @property
    def driver(self) -> str:
        """Name and version of what runs the kernels."""

    @property
    def allocated_bytes(self) -> int:
        """Device memory in buffers now."""

    def require_free(self, needed_bytes: int, what: str, kind: BufferKind = BufferKind.WEIGHTS) -> None:
        """Raise :class:`~xinfer_vk.errors.OutOfMemoryError`, naming ``what``, unless that much memory for
        buffers of that kind is free: for those who know a sum before they allocate its parts."""

    def free_bytes(self, kind: BufferKind) -> int:
        """Memory that is free for buffers of that kind."""

    def allocate(self, name: str, words: int, kind: BufferKind) -> Buffer: ...

    def free(self, buffer: Buffer) -> None: ...

    def write(self, buffer: Buffer, offset: int, words: np.ndarray) -> None:
        """Copy ``uint32`` words to ``buffer`` at word ``offset``, any kind, whole before return."""

    def uploads(self) -> AbstractContextManager[None]:
        """For writing much: within it a write may return before it is whole, so that the host goes on while
        the device copies. All are whole at its end; until then nothing but writes may be done."""

    def read(self, buffer: Buffer, offset: int, count: int) -> np.ndarray:
        """A fresh ``uint32`` copy of ``count`` words at word ``offset``, any kind."""

    def mapped(self, buffer: Buffer) -> memoryview:
        """The words of a STATE or RESULT buffer in place: what the host writes there is what the next run's
        kernels read, and what they wrote is there after it. For what is done at every step: nothing is
        checked or copied. Once the buffer is freed or the runtime closed, using it raises ValueError."""

    def prepare(
        self, plan: Plan, *, progress: Callable[[int, int], None] | None = None, timed: bool = False
    ) -> Recorded:
        """Make a plan ready to run; ``progress(done, total)`` is called as pipelines compile.
        ``timed``: take the time of every step; raises :class:`~xinfer_vk.errors.DeviceError` if the device
        has no clock."""

    def close(self) -> None: ...

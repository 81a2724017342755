"""Buffers as Kompute tensors: which memory each kind gets, within which limits, and who can reach it.

On a device with unified memory (integrated, CPU) every buffer is a mapped ``host`` tensor: the host
writes and reads it in place. On a discrete device

* WEIGHTS, SCRATCH and KV are ``storage`` tensors: device memory that the host cannot reach and that
  Vulkan cannot copy to (kp gives it no transfer usage): transfers.py copies by shader;
* STATE is a ``storage`` tensor with a mapped twin. The host writes the twin; every recorded plan begins
  with a copy of it (see :meth:`DeviceMemory.twin`);
* RESULT is mapped: kernels write a few words to it across the bus.

kp's third type, ``device``, is not used: it keeps a second copy of everything in host memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from xinfer_vk.errors import OutOfMemoryError, UsageError, setting
from xinfer_vk.limits import require_file_size
from xinfer_vk.plan import WORD_BYTES, Buffer, BufferKind
from xinfer_vk.units import format_bytes
from xinfer_vk.vulkan.devices import DeviceInfo, available_host_bytes
from xinfer_vk.vulkan.guard import Guard
from xinfer_vk.vulkan.kompute import kompute
from xinfer_vk.vulkan.layer import DeviceLayer

KOMPUTE_LIMIT_BYTES = 1 << 32  # kp counts bytes in 32 bits, and wraps silently
BUFFER_ALIGNMENT = 64 << 10  # of lavapipe
DEVICE_ONLY = frozenset({BufferKind.WEIGHTS, BufferKind.SCRATCH, BufferKind.KV, BufferKind.STATE})

_ANOTHER = f"another {setting('device')} would fit"
REMEDIES = {
    BufferKind.WEIGHTS: f"a smaller model, one with fewer bits a weight, or {_ANOTHER}",
    BufferKind.KV: f"a smaller {setting('context')}, {setting('kv_dtype', 'q8_0')}, or {_ANOTHER}",
    BufferKind.SCRATCH: f"a smaller model or prefill chunk, or {_ANOTHER}",
}


@dataclass(frozen=True)
class _Slot:
    tensor: Any  # kp.Tensor
    view: np.ndarray | None  # its words, where it is mapped
    words: memoryview | None  # the same, for those who keep it: released with the buffer
    heap: int | None
    bytes: int
    address: int  # for shaders; 0 where buffers have none

    def destroy(self) -> None:
        if self.words is not None:
            self.words.release()
        self.tensor.destroy()


class DeviceMemory:
    """All buffers of one runtime. ``discrete``: whether to use memory the host cannot reach."""

    def __init__(
        self, manager: Any, info: DeviceInfo, guard: Guard, layer: DeviceLayer | None, *, discrete: bool
    ) -> None:
        self._manager, self._info, self._guard, self._layer = manager, info, guard, layer
        self.discrete = discrete
        self._slots: dict[Buffer, _Slot] = {}
        self._twins: dict[Buffer, Buffer] = {}
        self._heap_bytes: dict[int | None, int] = {}
        self.bytes = self.peak_bytes = 0

    # -- making and freeing -----------------------------------------------------------------------

    def allocate(self, name: str, words: int, kind: BufferKind) -> Buffer:
        """A buffer of ``words``; zero if it is mapped and no KV cache, anything otherwise (see :meth:`view`).

        Raises :class:`UsageError` for a size below one word and :class:`OutOfMemoryError` for one the
        device does not have or cannot bind.
        """
        if words < 1:
            raise UsageError(f"buffer {name!r} of {words} words: a buffer needs at least one")
        mapped = not self.discrete or kind not in DEVICE_ONLY
        self._check_size(name, words * WORD_BYTES, kind, mapped)
        buffer = self._make(Buffer(name, words, kind), mapped)
        if not mapped and kind is BufferKind.STATE:
            try:
                self._twins[buffer] = self._make(Buffer(f"{name} (host side)", words, kind), mapped=True)
            except OutOfMemoryError:
                self.free(buffer)
                raise
        return buffer

    def _make(self, buffer: Buffer, mapped: bool) -> Buffer:
        kp = kompute()
        size = buffer.words * WORD_BYTES
        # kp wants an array for the size, and as built here never reads it: so it costs no memory
        zeros = np.zeros(buffer.words, np.uint32)
        kind = kp.TensorTypes.host if mapped else kp.TensorTypes.storage
        if self._layer is not None and self.discrete and buffer.kind is BufferKind.RESULT:
            self._layer.next_is_read_back()
        tensor = None
        try:
            with self._guard(
                f"making buffer {buffer.name!r} of {format_bytes(size)}", self._remedy(buffer.kind)
            ):
                tensor = self._manager.tensor_t(zeros, kind)
        except Exception:
            if tensor is not None:  # a storage tensor without memory exists; a mapped one never came to be
                tensor.destroy()
            raise
        heap = self._info.heap_of(mapped=mapped)
        address = self._layer.newest_address() if self._layer is not None else 0
        view = tensor.data() if mapped else None
        if view is not None and buffer.kind is not BufferKind.KV:
            view.fill(0)  # of a KV cache no page is touched before it is used
        words = None if view is None else view.data
        self._slots[buffer] = _Slot(tensor, view, words, heap, size, address)
        self._heap_bytes[heap] = self._heap_bytes.get(heap, 0) + size
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        return buffer

    def free(self, buffer: Buffer) -> None:
        """Give a buffer's memory back; nothing may be bound to it any more."""
        slot = self._slots.pop(self._known(buffer))
        self._heap_bytes[slot.heap] -= slot.bytes
        self.bytes -= slot.bytes
        slot.destroy()
        if (twin := self._twins.pop(buffer, None)) is not None:
            self.free(twin)

    def close(self) -> None:
        for slot in self._slots.values():
            slot.destroy()
        self._slots.clear()
        self._twins.clear()
        self._heap_bytes.clear()
        self.bytes = 0

    # -- limits -----------------------------------------------------------------------------------

    def require(self, needed: int, what: str, kind: BufferKind = BufferKind.WEIGHTS) -> None:
        """Raise :class:`OutOfMemoryError` unless ``needed`` bytes of such buffers are free."""
        free = self.free_for(kind)
        if needed > free:
            raise OutOfMemoryError(
                f"{what} needs {format_bytes(needed)} and {self._info.name} has {format_bytes(free)} free: "
                f"{self._remedy(kind)}"
            )

    def free_for(self, kind: BufferKind) -> int:
        """What is free for buffers of a kind."""
        return self.free_bytes(mapped=not self.discrete or kind not in DEVICE_ONLY)

    def free_bytes(self, *, mapped: bool) -> int:
        """What the heap had free at the start less what we took; for a CPU device also what the machine
        has to give now."""
        heap = self._info.heap_of(mapped=mapped)
        free = max(0, self._info.heap_free_bytes(mapped=mapped) - self._heap_bytes.get(heap, 0))
        if self._info.is_cpu and (available := available_host_bytes()) is not None:
            free = min(free, available)
        return free

    def _check_size(self, name: str, size: int, kind: BufferKind, mapped: bool) -> None:
        limits = (
            (KOMPUTE_LIMIT_BYTES - WORD_BYTES, "the most a Kompute buffer can have"),
            (self._info.max_storage_range_bytes, "the most a kernel can bind (maxStorageBufferRange)"),
            (self._info.max_allocation_bytes, "the most one allocation can have (maxMemoryAllocationSize)"),
        )
        limit, reason = min(limits, key=lambda pair: pair[0])
        if size > limit:
            raise OutOfMemoryError(
                f"buffer {name!r} of {format_bytes(size)} is larger than {format_bytes(limit)}, {reason} on "
                f"{self._info.name}: split it, or use another {setting('device')}"
            )
        self.require(size, f"buffer {name!r}", kind)
        if self._info.keeps_memory_in_a_file:
            taken = self.bytes + BUFFER_ALIGNMENT * len(self._slots)
            require_file_size(size + BUFFER_ALIGNMENT, taken, f"buffer {name!r}")

    @staticmethod
    def _remedy(kind: BufferKind) -> str:
        return REMEDIES.get(kind, _ANOTHER)

    # -- reaching ---------------------------------------------------------------------------------

    def _known(self, buffer: Buffer) -> Buffer:
        if buffer not in self._slots:
            raise UsageError(
                f"buffer {buffer.name!r} is not one of this runtime: it was freed, or is another's"
            )
        return buffer

    def bound_tensor(self, buffer: Buffer) -> Any:
        """The tensor that kernels see."""
        return self._slots[self._known(buffer)].tensor

    def address(self, buffer: Buffer) -> int:
        """Where kernels find it that load by address (feature buffer_address); 0 on other devices."""
        return self._slots[self._known(buffer)].address

    def view(self, buffer: Buffer) -> np.ndarray | None:
        """A buffer's words as the host can reach them (a STATE buffer's twin's), or None. Valid until the
        buffer is freed: never hand it out."""
        return self._slots[self._twins.get(self._known(buffer), buffer)].view

    def words(self, buffer: Buffer) -> memoryview:
        """The same words of a STATE or RESULT buffer, which the host always reaches, for those who keep them:
        using them raises ValueError once the buffer is freed."""
        words = self._slots[self._twins.get(self._known(buffer), buffer)].words
        assert words is not None, f"buffer {buffer.name!r} is not mapped"
        return words

    def twin(self, buffer: Buffer) -> Buffer | None:
        """The mapped buffer that a STATE buffer must be copied from before kernels read it."""
        return self._twins.get(buffer)

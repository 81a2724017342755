"""The Kompute runtime: buffers, recorded plans and their execution on one Vulkan device.

This module puts the parts together: devices.py knows what there is, memory.py where buffers go,
programs.py turns shaders into pipelines, sequences.py records plans, transfers.py moves words where the
host cannot reach, and layer.py talks to the companion layer, which does what Kompute leaves out.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from xinfer_vk.errors import DeviceError, UsageError
from xinfer_vk.kernels.copy_words import copy_words
from xinfer_vk.limits import COMPILE_BYTES, is_out_of_memory, out_of_memory, require_memory
from xinfer_vk.plan import Buffer, BufferKind, Plan, Step
from xinfer_vk.vulkan import layer as companion
from xinfer_vk.vulkan.devices import (
    DeviceInfo,
    check_opens,
    choose_device,
    list_devices,
    vulkan_instance,
    wants_numpy,
)
from xinfer_vk.vulkan.guard import ForkableLock, Guard, in_turn, never_let_go
from xinfer_vk.vulkan.kompute import kompute
from xinfer_vk.vulkan.memory import DeviceMemory
from xinfer_vk.vulkan.pipeline_cache import PipelineCacheFile, pipeline_cache_folder
from xinfer_vk.vulkan.programs import Programs
from xinfer_vk.vulkan.sequences import RecordedPlan, Recorder, RunCounts
from xinfer_vk.vulkan.transfers import Transfers
from xinfer_vk.vulkan.trial import check_memory

if TYPE_CHECKING:
    from xinfer_vk.plan import Runtime

MEMORY_CHOICES = ("auto", "unified", "discrete")
CompileProgress = Callable[[int, int], None]  # pipelines made, of how many


def open_runtime(
    device: str | int | None = None,
    *,
    memory: str | None = None,
    steps_per_submit: int | None = None,
    in_trial: bool = False,
) -> Runtime:
    """Open the device that ``device`` means (see :func:`devices.choose_device`); "numpy" needs no Vulkan.

    ``memory`` and ``steps_per_submit`` are :class:`KomputeRuntime`'s; ``in_trial`` is for trial.py. Raises
    :class:`UsageError` for a device that does not exist and :class:`DeviceError` for one that cannot be used.
    """
    if wants_numpy(device):
        from xinfer_vk.reference import NumpyRuntime

        return NumpyRuntime()
    _refuse_fork()
    if not in_trial:
        check_memory("" if device is None else str(device))
    with vulkan_instance():  # so that the drivers stay loaded between looking and opening
        choice = choose_device(device)
        assert choice.device is not None, "NumPy was chosen above"
        return KomputeRuntime(
            choice.device, notices=choice.notices, memory=memory, steps_per_submit=steps_per_submit
        )


class KomputeRuntime:
    """A :class:`~xinfer_vk.plan.Runtime` on a Vulkan device, for the process that opened it, not for a fork.
    Calls from several threads take turns; what a mapped buffer holds is for the caller to guard.

    ``device``: what :func:`devices.list_devices` said of it, or its index. ``memory``: "unified" keeps all
    buffers mapped, "discrete" keeps in device memory what only kernels touch; "auto" (or None, and then
    ``XINFER_VK_MEMORY`` may say) does what suits the device. ``steps_per_submit`` (or
    ``XINFER_VK_STEPS_PER_SUBMIT``) cuts long plans into several submits, for drivers that give up on those
    that take seconds.

    A context manager; :meth:`close` may be called any number of times, and is at the end of the program.
    """

    def __init__(
        self,
        device: DeviceInfo | int,
        *,
        notices: Sequence[str] = (),
        memory: str | None = None,
        steps_per_submit: int | None = None,
    ) -> None:
        self.turns = ForkableLock()
        self._manager: Any = None  # first of all, so that close() works from anywhere below
        _refuse_fork()
        named = "memory" if memory else "XINFER_VK_MEMORY"
        memory = memory or os.environ.get("XINFER_VK_MEMORY") or "auto"
        if memory not in MEMORY_CHOICES:
            raise UsageError(f"{named} {memory!r}: it is one of {', '.join(MEMORY_CHOICES)}")
        steps_per_submit = _steps_per_submit(steps_per_submit)
        companion.environment_number("XINFER_VK_POLL_US", least=0)  # the layer, which reads it, cannot refuse
        self.info = _device_info(device)
        if self.info.rejected:
            raise DeviceError(f"{self.info.name} cannot be used: {self.info.rejected}")
        self._counts = RunCounts()
        self._plans: weakref.WeakSet[RecordedPlan] = weakref.WeakSet()

        with vulkan_instance():
            if not self.info.is_cpu:  # a CPU device has nothing that could keep it from opening
                check_opens(self.info)
            self._manager, self._layer, layer_notice = _open_manager(self.info)
        self._guard = Guard(self._layer, self.turns)
        _close_at_exit(self)
        self.notices: tuple[str, ...] = (*notices, layer_notice) if layer_notice else tuple(notices)
        self.profile = self.info.profile(self._layer.features if self._layer else frozenset())
        discrete = memory == "discrete" or (memory == "auto" and not self.info.unified_memory)
        self._memory = DeviceMemory(self._manager, self.info, self._guard, self._layer, discrete=discrete)
        self._programs = Programs(self._manager, self._memory, self._guard, self._layer)
        self._recorder = Recorder(self._manager, self._programs, self._layer, self._guard, steps_per_submit)
        self._transfers = Transfers(self._memory, self._recorder)
        self._uploading = False
        self._cache = self._open_pipeline_cache()

    # -- Properties -------------------------------------------------------------------------------

    @property
    def driver(self) -> str:
        """Name and version of the driver."""
        return self.info.driver

    @property
    def layer_active(self) -> bool:
        """Whether the companion layer is active: barriers, features, errors, pipeline cache."""
        return self._layer is not None

    @property
    def allocated_bytes(self) -> int:
        """Device memory in buffers now."""
        return self._memory.bytes

    @in_turn
    def counters(self) -> dict[str, int]:
        """What has been done so far: plans run, and the dispatches, submits and barriers of these and of
        transfers; bytes in buffers now and at most; pipelines made. Barriers are 0 without the layer."""
        layer = self._layer.counters() if self._layer else {}
        return {
            "runs": self._counts.runs,
            "dispatches": layer.get("dispatches_run", self._counts.dispatches),
            "submits": layer.get("submits", self._counts.submits),
            "barriers": layer.get("barriers_run", 0),
            "bytes": layer.get("bytes", self._memory.bytes),
            "peak_bytes": layer.get("peak_bytes", self._memory.peak_bytes),
            "pipelines": layer.get("pipelines", self._programs.made),
        }

    # -- buffers ----------------------------------------------------------------------------------

    @in_turn
    def require_free(self, needed_bytes: int, what: str, kind: BufferKind = BufferKind.WEIGHTS) -> None:
        """Raise :class:`OutOfMemoryError`, naming ``what``, unless that much memory for buffers of that
        kind is free: for those who know a sum before they allocate its parts."""
        self._open()
        self._memory.require(needed_bytes, what, kind)

    @in_turn
    def free_bytes(self, kind: BufferKind) -> int:
        """Memory that is free for buffers of that kind."""
        self._open()
        return self._memory.free_for(kind)

    @in_turn
    def allocate(self, name: str, words: int, kind: BufferKind) -> Buffer:
        """A new buffer, all zero (one of kind KV may hold anything). Raises :class:`OutOfMemoryError`."""
        self._open()
        buffer = self._memory.allocate(name, words, kind)
        if self._memory.view(buffer) is None:
            try:
                self._transfers.clear(buffer)
            except DeviceError:
                self.free(buffer)
                raise
        return buffer

    @in_turn
    def free(self, buffer: Buffer) -> None:
        """Give a buffer back. Plans that use it are released and cannot run again."""
        self._open()
        for plan in list(self._plans):
            if buffer in plan.buffers:
                plan.release(f"buffer {buffer.name!r}, which it uses, was freed")
        twin = self._memory.twin(buffer)
        self._programs.forget(buffer)
        if twin is not None:
            self._programs.forget(twin)
        self._memory.free(buffer)

    @in_turn
    def write(self, buffer: Buffer, offset: int, words: np.ndarray) -> None:
        """Copy 32-bit words to ``buffer`` at word ``offset``; done when it returns."""
        self._open()
        if words.dtype.itemsize != 4:
            raise UsageError(f"buffer {buffer.name!r} is made of 32-bit words, not of {words.dtype}")
        flat = np.ascontiguousarray(words).reshape(-1).view(np.uint32)
        _check_range(buffer, offset, flat.size)
        view = self._memory.view(buffer)
        if view is not None:
            view[offset : offset + flat.size] = flat
        else:
            self._transfers.upload(buffer, offset, flat)
            if not self._uploading:
                self._transfers.finish()

    @contextlib.contextmanager
    def uploads(self) -> Iterator[None]:
        """Within it, what is written may still be on its way when :meth:`write` returns; all of it is there
        at its end. Nothing else may be done with the buffers meanwhile."""
        with self.turns:
            self._open()
            self._uploading = True
            try:
                yield
            finally:
                self._uploading = False
                self._transfers.finish()

    @in_turn
    def read(self, buffer: Buffer, offset: int, count: int) -> np.ndarray:
        """A fresh ``uint32`` copy of ``count`` words at word ``offset``. Of a STATE buffer on a discrete
        device: what the host wrote last."""
        self._open()
        _check_range(buffer, offset, count)
        view = self._memory.view(buffer)
        if view is not None:
            return view[offset : offset + count].copy()
        return self._transfers.download(buffer, offset, count)

    @in_turn
    def mapped(self, buffer: Buffer) -> memoryview:
        """The words of a STATE or RESULT buffer in place, the host's side of a STATE buffer on a discrete
        device. Using it raises ValueError once the buffer is freed or the runtime closed."""
        self._open()
        return self._memory.words(buffer)

    # -- plans ------------------------------------------------------------------------------------

    @in_turn
    def prepare(
        self, plan: Plan, *, progress: CompileProgress | None = None, timed: bool = False
    ) -> RecordedPlan:
        """Make a plan's pipelines and record it. ``progress`` is called as new pipelines compile.
        ``timed``: take the device's time of every step (:meth:`RecordedPlan.times_ns`); needs the layer.
        """
        self._open()
        if not plan.steps:
            raise UsageError(f"plan {plan.name!r} has no steps")
        if timed and (self._layer is None or not self.info.timestamp_bits):
            lacking = (
                "the companion layer is not active" if self._layer is None else "the device has no timestamps"
            )
            raise DeviceError(f"plan {plan.name!r} cannot be timed: {lacking}")
        for step in plan.steps:
            if max(step.groups) > self.profile.max_group_count:
                raise DeviceError(
                    f"step {step.label!r} of plan {plan.name!r} has {max(step.groups)} workgroups in one "
                    f"dimension, and {self.info.name} takes {self.profile.max_group_count}"
                )
        steps = [*self._state_copies(plan), *plan.steps]
        missing = self._programs.missing(steps)
        for done, step in enumerate(missing):
            if progress:
                progress(done, len(missing))
            self._recorder.compile(step)
        if progress and missing:
            progress(len(missing), len(missing))
        if missing:  # some drivers compile as late as at the first run
            require_memory(COMPILE_BYTES, f"compiling plan {plan.name!r}")
        recorded = RecordedPlan(
            plan, steps, self._recorder, self._guard, self._layer, self.info, self._counts, timed
        )
        self._plans.add(recorded)
        return recorded

    def _state_copies(self, plan: Plan) -> list[Step]:
        """On a discrete device: what the host wrote to STATE buffers, brought over before the first step."""
        states = dict.fromkeys(b for step in plan.steps for b in step.buffers if b.kind is BufferKind.STATE)
        copies = []
        for state in states:
            twin = self._memory.twin(state)
            if twin is not None:
                copies.append(copy_words(twin, 0, state, 0, state.words))
        return copies

    # -- life -------------------------------------------------------------------------------------

    @in_turn
    def close(self) -> None:
        """Give everything back: recorded plans, pipelines, buffers, the device, in this order. The
        pipeline cache is saved."""
        if self._manager is None:
            return
        manager, self._manager = self._manager, None
        if self._guard.process.is_another:
            return  # all of it is the other process's
        if hasattr(self, "_cache"):  # not if __init__ failed before
            self._transfers.close()
            for plan in list(self._plans):
                plan.release("its runtime was closed")
            if not self._guard.lost:
                self._save_pipeline_cache()
            self._programs.close()
            self._memory.close()
        manager.destroy()
        _open_runtimes.discard(self)

    def __enter__(self) -> KomputeRuntime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the interpreter's end anything may be gone
            self.close()

    def check_process(self) -> None:
        """Raise :class:`UsageError` in a fork of the process that opened the device."""
        self._guard.process.require()

    def _open(self) -> None:
        if self._manager is None:
            raise UsageError("the runtime is closed: open a new one")
        self.check_process()

    def _open_pipeline_cache(self) -> PipelineCacheFile | None:
        folder = pipeline_cache_folder()
        if self._layer is None or folder is None:
            return None
        info = self.info
        file = PipelineCacheFile(
            folder,
            device_uuid=info.uuid,
            driver=f"{info.driver} {info.name}",
            vendor_id=info.vendor_id,
            device_id=info.device_id,
            cache_uuid=info.pipeline_cache_uuid,
        )
        opened = self._layer.open_cache(file.load()) or self._layer.open_cache(b"")
        return file if opened else None

    def _save_pipeline_cache(self) -> None:
        if self._cache is not None and self._layer is not None and self._programs.made:
            self._cache.save(self._layer.cache_data())


def _device_info(device: DeviceInfo | int) -> DeviceInfo:
    if isinstance(device, DeviceInfo):
        return device
    devices = list_devices()
    if not 0 <= device < len(devices):
        raise UsageError(f"device {device} does not exist: there are {len(devices)}")
    return devices[device]


def _steps_per_submit(given: int | None) -> int | None:
    if given is None:
        return companion.environment_number("XINFER_VK_STEPS_PER_SUBMIT", least=1)
    if given < 1:
        raise UsageError(f"steps per submit is {given}: it must be at least 1")
    return given


def _check_range(buffer: Buffer, offset: int, count: int) -> None:
    if offset < 0 or count < 0 or offset + count > buffer.words:
        raise UsageError(
            f"words {offset} to {offset + count} are not all in buffer {buffer.name!r} of {buffer.words}"
        )


def _open_manager(info: DeviceInfo) -> tuple[Any, companion.DeviceLayer | None, str]:
    """A Kompute manager on a device, with the companion layer if it can be had, else with a notice why not.

    The caller has made sure that the device opens: kp would abort or crash. A loader that does
    not know the layer's variables ignores them silently, so what counts is whether the layer answers.
    """
    kp = kompute()
    library, reason = companion.load_library()
    layer: companion.DeviceLayer | None = None
    manager: Any = None
    companion.inject_from_environment()
    for replace_path in (False, True) if library else ():
        try:
            with companion.enabled(replace_path), _opening(info):
                manager = kp.Manager(info.index, [], info.required_extensions)
        except OSError as error:
            reason = str(error)
            break
        layer = companion.DeviceLayer.of_newest_device()
        if layer is not None:
            break
        manager.destroy()
        reason = "the Vulkan loader did not load it"
    if layer is None:
        with _opening(info):
            manager = kp.Manager(info.index, [], info.required_extensions)
    _check_identity(info, manager, layer)
    if layer is not None:
        return manager, layer, ""
    return (
        manager,
        None,
        f"the companion layer is off ({reason}): every step is submitted by itself, which is slow",
    )


@contextlib.contextmanager
def _opening(info: DeviceInfo) -> Any:
    try:
        yield
    except Exception as error:
        said = " ".join(str(error).split())
        if is_out_of_memory(error) or "ErrorOutOf" in said:  # VK_ERROR_OUT_OF_{HOST,DEVICE}_MEMORY
            raise out_of_memory(f"opening {info.name} failed ({said})") from error
        raise DeviceError(f"cannot open {info.name}: {said}") from error


def _check_identity(info: DeviceInfo, manager: Any, layer: companion.DeviceLayer | None) -> None:
    """An index means a device only as long as the loader's list stays as it was."""
    name = manager.get_device_properties()["device_name"]
    if name != info.name or (layer is not None and layer.uuid != info.uuid):
        manager.destroy()
        raise DeviceError(
            f"device {info.index} is {name}, not {info.name} any more: the list of devices has changed"
        )


_open_runtimes: weakref.WeakSet[KomputeRuntime] = weakref.WeakSet()


def _close_at_exit(runtime: KomputeRuntime) -> None:
    """kp undoes itself at exit too: it was imported before, so that happens after what is registered here."""
    if not _open_runtimes:
        atexit.unregister(_close_all)
        atexit.register(_close_all)
    _open_runtimes.add(runtime)


def _close_all() -> None:
    for runtime in list(_open_runtimes):
        runtime.close()


def _refuse_fork() -> None:
    """Raise :class:`UsageError` in a fork of a process that has a device open."""
    for runtime in list(_open_runtimes):
        runtime._guard.process.require()


def _keep_all_after_fork() -> None:
    """What a fork has of a device is never destroyed: that would wait for threads of the other process."""
    for runtime in list(_open_runtimes):
        never_let_go(runtime)
        for plan in list(runtime._plans):
            plan.keep_for_good()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_all_after_fork)

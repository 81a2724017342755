"""The companion layer as Python sees it: switching it on for our own process, and asking it things.

The layer itself, and why it is needed, is layer/layer.c. The Vulkan loader finds a layer by a manifest
(a small JSON file beside the library, which build_support/layer.py writes) in a folder that
``VK_ADD_LAYER_PATH`` names, and turns it on when ``VK_INSTANCE_LAYERS`` names it. Both variables exist only
while an instance is being made (:func:`enabled`): child processes inherit nothing.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from xinfer_vk.errors import DeviceError, DeviceLostError, OutOfMemoryError, UsageError

LIBRARY = (
    Path(__file__).resolve().parent
    / "layer"
    / f"libxinfer_layer.{'dylib' if sys.platform == 'darwin' else 'so'}"
)
MANIFEST = "layer.json"
NAME = "VK_LAYER_XINFER_companion"
ABI_VERSION = 7  # of layer.c
MOST_NUMBER = 10**9  # that a variable may hold: a thousand times that fits 64 bits

# In the order of the FEATURE_* bits of layer.c; also the names that devices.py gives to what it probes.
FEATURES = (
    "storage_16bit",
    "storage_8bit",
    "float16",
    "int8",
    "int16",
    "integer_dot_product",
    "cooperative_matrix",
    "subgroup_size_control",
    "buffer_address",
)

# VkResult, from the registry: the errors that the functions kp calls may give.
RESULTS = {
    -1: "VK_ERROR_OUT_OF_HOST_MEMORY",
    -2: "VK_ERROR_OUT_OF_DEVICE_MEMORY",
    -3: "VK_ERROR_INITIALIZATION_FAILED",
    -4: "VK_ERROR_DEVICE_LOST",
    -5: "VK_ERROR_MEMORY_MAP_FAILED",
    -7: "VK_ERROR_EXTENSION_NOT_PRESENT",
    -8: "VK_ERROR_FEATURE_NOT_PRESENT",
    -9: "VK_ERROR_INCOMPATIBLE_DRIVER",
    -10: "VK_ERROR_TOO_MANY_OBJECTS",
    -12: "VK_ERROR_FRAGMENTED_POOL",
    -13: "VK_ERROR_UNKNOWN",
    -1000012000: "VK_ERROR_INVALID_SHADER_NV",
    -1000069000: "VK_ERROR_OUT_OF_POOL_MEMORY",
    -1000161000: "VK_ERROR_FRAGMENTATION",
}
DEVICE_LOST = -4
OUT_OF_MEMORY = frozenset({-1, -2, -5, -10, -12, -1000069000, -1000161000})


class _Failure(ctypes.Structure):
    _fields_ = (
        ("result", ctypes.c_int32),
        ("reserved", ctypes.c_uint32),
        ("size", ctypes.c_uint64),
        ("function", ctypes.c_char * 48),
    )


COUNTERS = (
    "dispatches_recorded",
    "barriers_recorded",
    "barriers_dropped",
    "dispatches_run",
    "barriers_run",
    "submits",
    "bytes",
    "peak_bytes",
    "allocations",
    "pipelines",
    "pipelines_full",
    "layouts",
    "submit_ns",
    "wait_ns",
)


class _Counters(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in COUNTERS)


@dataclass(frozen=True)
class Failure:
    """A Vulkan call that failed. ``size`` in bytes, where the call was about memory, else 0."""

    function: str
    result: int
    size: int

    def __str__(self) -> str:
        return f"{self.function} returned {RESULTS.get(self.result, f'VkResult {self.result}')}"

    def error(self, doing: str, detail: str = "") -> DeviceError:
        """The exception this is, saying what was being done; ``detail`` is added to its message."""
        message = f"{doing}: {self}" + (f"; {detail}" if detail else "")
        if self.result == DEVICE_LOST:
            return DeviceLostError(
                f"the device was lost while {message} (the driver gave up: the system's log may say why; "
                "a newer driver or XINFER_VK_STEPS_PER_SUBMIT=16 may help)"
            )
        if self.result in OUT_OF_MEMORY:
            return OutOfMemoryError(f"out of device memory while {message}")
        return DeviceError(f"the device failed while {message}")


_u64, _u32, _i32, _pointer = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int32, ctypes.c_void_p
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {  # without "xinfer_": result, arguments
    "take_newest_device": (_u64, ()),
    "features": (_u32, (_u64,)),
    "uuid": (None, (_u64, _pointer)),
    "counters": (None, (_u64, _pointer)),
    "take_failure": (_i32, (_u64, _pointer)),
    "next_is_independent": (None, (_u64,)),
    "next_groups": (None, (_u64, _u32, _u32, _u32)),
    "next_is_read_back": (None, (_u64,)),
    "next_subgroups_full": (None, (_u64, _i32)),
    "newest_address": (_u64, (_u64,)),
    "cached_type": (_u32, (_pointer, _pointer, _u32, _u32, _u32)),
    "set_barriers": (None, (_u64, _i32)),
    "time_next_recording": (None, (_u64, _u32)),
    "newest_recording": (_u64, (_u64,)),
    "timestamps": (_u32, (_u64, _u64, _pointer, _u32)),
    "cache_open": (_i32, (_u64, ctypes.c_char_p, ctypes.c_size_t)),
    "cache_data": (_i32, (_u64, _pointer, ctypes.POINTER(ctypes.c_size_t))),
    "inject": (_i32, (ctypes.c_char_p, _u32, _i32)),
}


def environment_number(name: str, least: int) -> int | None:
    """The whole number that a variable of the environment holds; None where it is empty or not set. Raises
    :class:`UsageError` for anything else."""
    text = os.environ.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and least <= int(text) <= MOST_NUMBER):
        raise UsageError(f"{name} {text!r}: it must be a whole number from {least} to {MOST_NUMBER}")
    return int(text)


@lru_cache
def load_library() -> tuple[ctypes.CDLL | None, str]:
    """The layer's shared object, or None and why not. ``XINFER_VK_LAYER=off`` turns the layer off;
    :class:`UsageError` if the variable is neither that nor on."""
    chosen = os.environ.get("XINFER_VK_LAYER", "")
    if chosen.lower() in ("off", "0", "no"):
        return None, f"XINFER_VK_LAYER={chosen}"
    if chosen.lower() not in ("", "on", "1", "yes"):
        raise UsageError(f"XINFER_VK_LAYER {chosen!r}: it is on or off")
    if not LIBRARY.exists():
        return None, f"{LIBRARY.name} was not built"
    try:
        library = ctypes.CDLL(str(LIBRARY))
        if (found := library.xinfer_abi_version()) != ABI_VERSION:
            return None, f"{LIBRARY.name} is of another version ({found}, not {ABI_VERSION}): build it again"
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, f"xinfer_{name}")
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        return None, f"{LIBRARY.name} does not load: {error}"
    return library, ""


_environment_lock = threading.Lock()


@contextmanager
def enabled(replace_path: bool = False) -> Iterator[None]:
    """While this lasts, an instance made by this process gets the layer, nearest to the application.

    The user's own ``VK_INSTANCE_LAYERS`` (a validation layer, say) stay on, behind ours.
    ``replace_path``: say where the layer is by ``VK_LAYER_PATH``, for loaders that do not know
    ``VK_ADD_LAYER_PATH``; it replaces the system's folders, so these are named too. Raises :class:`OSError`
    where the loader could not find the layer.
    """
    folder = str(LIBRARY.parent)
    if not (LIBRARY.parent / MANIFEST).is_file():
        raise OSError(f"{MANIFEST} is not beside it: build it again")
    if os.pathsep in folder:
        raise OSError(
            f"its folder {folder!r} has a {os.pathsep!r} in its name, which the loader takes for two"
        )
    with _environment_lock:
        variables = {"VK_INSTANCE_LAYERS": [NAME, os.environ.get("VK_INSTANCE_LAYERS", "")]}
        if "VK_LAYER_PATH" in os.environ:  # the loader then ignores VK_ADD_LAYER_PATH
            variables["VK_LAYER_PATH"] = [folder, os.environ["VK_LAYER_PATH"]]
        elif replace_path:
            variables["VK_LAYER_PATH"] = [folder, *_system_layer_folders()]
        else:
            variables["VK_ADD_LAYER_PATH"] = [folder, os.environ.get("VK_ADD_LAYER_PATH", "")]
        before = {name: os.environ.get(name) for name in variables}
        try:
            for name, values in variables.items():
                os.environ[name] = os.pathsep.join(filter(None, values))
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _system_layer_folders() -> list[str]:
    """Where a loader on Linux looks for explicit layers (LoaderLayerInterface.md, "Layer Discovery")."""
    home = Path(os.path.expanduser("~"))  # as it is where there is no home directory
    roots = [
        os.environ.get("XDG_CONFIG_HOME") or str(home / ".config"),
        *(os.environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep),
        "/etc",
        os.environ.get("XDG_DATA_HOME") or str(home / ".local/share"),
        *(os.environ.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share").split(os.pathsep),
    ]
    return [f"{root}/vulkan/explicit_layer.d" for root in roots]


class DeviceLayer:
    """The layer's side of one Vulkan device. Every method is harmless after the device is gone."""

    def __init__(self, library: ctypes.CDLL, device_id: int) -> None:
        self._library, self._id = library, device_id
        bits = library.xinfer_features(device_id)
        self.features = frozenset(name for i, name in enumerate(FEATURES) if bits >> i & 1)
        uuid = (ctypes.c_uint8 * 16)()
        library.xinfer_uuid(device_id, uuid)
        self.uuid = bytes(uuid).hex()
        counter = ctypes.c_uint32.in_dll(library, "xinfer_failures")
        self._failures, self._taken = memoryview(counter).cast("B").cast("I"), 0

    @classmethod
    def of_newest_device(cls) -> DeviceLayer | None:
        """The device this thread made last, if the layer was active and it was not asked for yet."""
        library, _ = load_library()
        device_id = library.xinfer_take_newest_device() if library else 0
        return cls(library, device_id) if library and device_id else None

    @property
    def has_failed(self) -> bool:
        """Whether :meth:`take_failure` may have something to tell."""
        return self._failures[0] != self._taken

    def take_failure(self) -> Failure | None:
        """The first failure since the last call. Until it is taken, the device makes nothing new."""
        if not self.has_failed:
            return None
        self._taken, failure = self._failures[0], _Failure()  # the count is of all devices
        if not self._library.xinfer_take_failure(self._id, ctypes.byref(failure)):
            return None
        return Failure(failure.function.decode(), failure.result, failure.size)

    def counters(self) -> dict[str, int]:
        counters = _Counters()
        self._library.xinfer_counters(self._id, ctypes.byref(counters))
        return {name: getattr(counters, name) for name in COUNTERS}

    def next_is_independent(self) -> None:
        """No barrier is wanted before the next dispatch that is recorded."""
        self._library.xinfer_next_is_independent(self._id)

    def next_groups(self, groups: tuple[int, int, int]) -> None:
        """The group counts of the next dispatch that is recorded, in place of its Algorithm's."""
        self._library.xinfer_next_groups(self._id, *groups)

    def next_is_read_back(self) -> None:
        """The next mapped memory is for what the host reads: let it be cached, where there is such."""
        self._library.xinfer_next_is_read_back(self._id)

    def next_subgroups_full(self, full: bool) -> None:
        """Whether the shader of the next pipeline needs subgroups with all their lanes (see ``Kernel``)."""
        self._library.xinfer_next_subgroups_full(self._id, full)

    def newest_address(self) -> int:
        """The device address of the buffer made last; 0 where buffers have none (feature buffer_address)."""
        return self._library.xinfer_newest_address(self._id)

    def set_barriers(self, on: bool) -> None:
        """Off: recordings get no barriers, which is wrong; for showing that validation sees it."""
        self._library.xinfer_set_barriers(self._id, on)

    def time_next_recording(self, dispatches: int) -> None:
        """The next command buffer takes a timestamp at its start and after each dispatch."""
        self._library.xinfer_time_next_recording(self._id, dispatches)

    def newest_recording(self) -> int:
        return self._library.xinfer_newest_recording(self._id)

    def timestamps(self, recording: int, dispatches: int) -> np.ndarray:
        """Ticks of a recording's last run, ``uint64 [1 + dispatches]``; empty if it was not timed."""
        ticks = np.zeros(dispatches + 1, np.uint64)
        count = self._library.xinfer_timestamps(self._id, recording, ticks.ctypes.data, ticks.size)
        return ticks[: min(count, ticks.size)]

    def open_cache(self, data: bytes) -> bool:
        """Make all pipelines through one cache that begins with ``data`` (b"" for an empty one)."""
        return self._library.xinfer_cache_open(self._id, data or None, len(data)) == 0

    def cache_data(self) -> bytes:
        """The pipeline cache's bytes; empty when there is none or the driver does not tell."""
        size = ctypes.c_size_t()
        if self._library.xinfer_cache_data(self._id, None, ctypes.byref(size)) != 0 or not size.value:
            return b""
        data = ctypes.create_string_buffer(size.value)
        if self._library.xinfer_cache_data(self._id, data, ctypes.byref(size)) != 0:
            return b""
        return data.raw[: size.value]


def inject(function: str, nth: int, result: int) -> None:
    """For tests: the nth call of a Vulkan function from now on fails with ``result`` (see layer.c)."""
    library, reason = load_library()
    if library is None:
        raise DeviceError(f"faults need the companion layer: {reason}")
    if library.xinfer_inject(function.encode(), nth, result):
        raise DeviceError("too many faults are planted already")


def inject_from_environment() -> None:
    """Plant the faults of ``XINFER_VK_INJECT``: ``function:nth:result``, separated by commas."""
    for fault in filter(None, os.environ.get("XINFER_VK_INJECT", "").split(",")):
        try:
            function, nth, result = fault.split(":")
            inject(function, int(nth), int(result))
        except ValueError as error:
            raise DeviceError(f"XINFER_VK_INJECT: {fault!r} is not function:nth:result") from error


def clear_injections() -> None:
    library, _ = load_library()
    if library is not None:
        library.xinfer_inject(b"", 0, 0)

"""Calling Kompute so that what goes wrong in it becomes one of our exceptions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from xinfer_vk.errors import DeviceError, DeviceLostError, XinferError
from xinfer_vk.vulkan.layer import DeviceLayer


class Guard:
    """Wraps every call into ``kp`` for one device. kp ignores most of Vulkan's results and throws
    nondescript exceptions for the others; the layer, where it is active, kept the first failure."""

    def __init__(self, layer: DeviceLayer | None) -> None:
        self._layer = layer
        self.lost = False

    @contextmanager
    def __call__(self, doing: str, detail: str = "") -> Iterator[None]:
        """``doing`` completes "out of device memory while …". ``detail`` is added to the message."""
        if self.lost:
            raise DeviceLostError(f"{doing}: the device was lost earlier; open it anew")
        try:
            yield
        except XinferError:
            raise
        except Exception as error:
            self.check(doing, detail, error)
            raise DeviceError(f"the device failed while {doing}: {' '.join(str(error).split())}") from error
        self.check(doing, detail)

    def check(self, doing: str, detail: str = "", cause: Exception | None = None) -> None:
        """Raise what the layer has seen fail, if anything."""
        failure = self._layer.take_failure() if self._layer else None
        if failure is not None:
            error = failure.error(doing, detail)
            self.lost = self.lost or isinstance(error, DeviceLostError)
            raise error from cause

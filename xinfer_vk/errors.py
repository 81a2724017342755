"""Every error a user can meet, and the exit code each one means.

A message is one line that names the thing, its value and the remedy. The CLI prints it without a
traceback; code that uses the package as a library catches :class:`XinferError`.
"""

from __future__ import annotations


class XinferError(Exception):
    """Base of all errors that are raised on purpose. ``exit_code`` is what the CLI exits with."""

    exit_code = 1


class UsageError(XinferError, ValueError):
    """The call itself is wrong: an option, an argument, a name that does not exist."""

    exit_code = 2


class ModelError(XinferError):
    """A model file is missing, damaged, or holds something that is not supported."""


class DeviceError(XinferError):
    """No Vulkan loader, no driver, no such device, or the device refused an operation."""


class OutOfMemoryError(DeviceError):
    """The device cannot hold what was asked for; the message says how much and what would help."""


class DeviceLostError(DeviceError):
    """The driver gave up on the device during a run."""


class NumericError(XinferError):
    """The model produced NaN logits; the message names the step."""


class DownloadError(XinferError):
    """A model could not be fetched, or what came is not what was expected."""

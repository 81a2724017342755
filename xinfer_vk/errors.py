"""Every error a user can meet, and the exit code each one means.

A message is one line that names the thing, its value and the remedy. The CLI prints it without a
traceback; code that uses the package as a library catches :class:`XinferError`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

_words = "python"  # whose words messages use
_CHOICE = re.compile("\ue000(.*?)\ue001(.*?)\ue002", re.DOTALL)


def said(python: str, shell: str) -> str:
    """Part of an error message that Python and the command line word differently."""
    return f"\ue000{python}\ue001{shell}\ue002"


def setting(name: str, value: str | int = "") -> str:
    """A setting in an error message, by its Python name: ``context`` or ``device="numpy"`` in Python,
    ``--context`` or ``--device numpy`` on the command line."""
    option = "--" + name.replace("_", "-")
    if value == "":
        return said(name, option)
    if value is True:
        return said(f"{name}=True", option)
    quoted = f'"{value}"' if isinstance(value, str) else str(value)
    return said(f"{name}={quoted}", f"{option} {value}")


@contextlib.contextmanager
def shell_words() -> Iterator[None]:
    """Errors made within it name options of the command line, not arguments of Python."""
    global _words
    before, _words = _words, "shell"
    try:
        yield
    finally:
        _words = before


def _spoken(message: str) -> str:
    return _CHOICE.sub(lambda found: found[1 if _words == "python" else 2], message)


class XinferError(Exception):
    """Base of all errors that are raised on purpose. ``exit_code`` is what the CLI exits with."""

    exit_code = 1

    def __init__(self, message: object = "") -> None:
        super().__init__(_spoken(str(message)))


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

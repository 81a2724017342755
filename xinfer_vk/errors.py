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


def setting(name: str, value: str | int = "", option: str = "") -> str:
    """A setting in an error message, by its Python name: ``context`` or ``device="numpy"`` in Python,
    ``--context`` or ``--device numpy`` on the command line. ``option``: its option, as an
    identifier, if that has another name."""
    option = "--" + (option or name).replace("_", "-")
    if value == "":
        return said(name, option)
    if value is True:
        return said(f"{name}=True", option)
    quoted = f'"{value}"' if isinstance(value, str) else str(value)
    return said(f"{name}={quoted}", f"{option} {value}")


@contextlib.contextmanager
def shell_words() -> Iterator[None]:
    """Errors made within it name options of the command line, not arguments of Python."""
    with _using("shell"):
        yield


@contextlib.contextmanager
def parameter_words() -> Iterator[None]:
    """Errors made within it name parameters as Python does: for the command line's other inputs that use
    these names, such as chat's ``/set`` and JSON files."""
    with _using("python"):
        yield


@contextlib.contextmanager
def _using(words: str) -> Iterator[None]:
    global _words
    before, _words = _words, words
    try:
        yield
    finally:
        _words = before


def _spoken(message: str) -> str:
    return _CHOICE.sub(lambda found: found[1 if _words == "python" else 2], message)


class XinferError(Exception):
    """Base of all errors of this package. ``exit_code``: the exit status of the command line."""

    exit_code = 1

    def __init__(self, message: object = "") -> None:
        super().__init__(_spoken(str(message)))


class UsageError(XinferError, ValueError):
    """The call is wrong: an argument, an option, an unknown name, a closed LLM. Also a ``ValueError``."""

    exit_code = 2


class ModelError(XinferError):
    """A model file is missing, damaged or not supported."""


class DeviceError(XinferError):
    """There is no Vulkan loader, driver or usable device, or a device operation failed."""


class OutOfMemoryError(DeviceError):
    """The device has too little memory. The message says how much is needed and what would help."""


class DeviceLostError(DeviceError):
    """The driver lost the device during a run. Open a new LLM."""


class NumericError(XinferError):
    """The model produced NaN logits. The message names the step."""


class DownloadError(XinferError):
    """A model could not be downloaded, or the download is not the expected file."""

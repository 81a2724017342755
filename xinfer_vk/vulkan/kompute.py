"""The one place that imports Kompute: the module built with the package, else an installed ``kp``.

``kp`` configures Python's root logger when it is imported (it calls ``logging.basicConfig()``); that is
undone here, so that the logging of the program that uses us stays its own.
"""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

from xinfer_vk.errors import DeviceError

REMEDY = "install the package with `pip install .` in its source directory, or run ./run, which builds it"

_module: ModuleType | None = None


def kompute() -> Any:
    """The ``kp`` module. Raises :class:`DeviceError` when there is none or it does not load."""
    global _module
    if _module is None:
        _module = _import_quietly()
    return _module


def _import_quietly() -> ModuleType:
    root = logging.getLogger()
    handlers = list(root.handlers)
    try:
        try:
            from xinfer_vk.vulkan._kompute import kp
        except ModuleNotFoundError:  # not built with the package; one that does not load is told below
            import kp
    except ModuleNotFoundError as error:
        raise DeviceError(f"Kompute's Python module (kp) is not there: {REMEDY}") from error
    except ImportError as error:
        raise DeviceError(f"Kompute's Python module does not load ({error}): {REMEDY}") from error
    finally:
        for handler in set(root.handlers) - set(handlers):
            root.removeHandler(handler)
    logging.getLogger("kp").addHandler(logging.NullHandler())
    return kp

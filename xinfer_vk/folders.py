"""Where files are kept that can be made or fetched again: models, compiled pipelines, built modules."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from xinfer_vk.errors import UsageError

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """``$XINFER_VK_CACHE``, else ``$XDG_CACHE_HOME/xinfer-vk``, else ``~/.cache/xinfer-vk``.

    ``./run`` and build_support/kompute.py choose in the same way. Raises :class:`UsageError`, which names
    XINFER_VK_CACHE, where a home directory is needed and there is none.
    """
    chosen, base = os.environ.get("XINFER_VK_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        if chosen:
            return Path(chosen).expanduser()
        return (Path(base) if base else Path.home() / ".cache") / "xinfer-vk"
    except RuntimeError:
        place = f"XINFER_VK_CACHE={chosen}" if chosen else "~/.cache/xinfer-vk"
        raise UsageError(
            f"{place}: there is no such home directory: set XINFER_VK_CACHE to a folder that can be written"
        ) from None


def optional_cache_folder(name: str) -> Path | None:
    """A folder for what only saves time; None where there is no home directory to keep it in."""
    try:
        return cache_folder() / name
    except UsageError as error:
        _log.info("%s are not kept: %s", name, error)
        return None


def keep(path: Path, data: bytes) -> bool:
    """Write a file whole, its folder too. One that cannot be written is no error: what is in it is made
    again. Returns whether it was written."""
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
        temporary = ""
    except OSError as error:
        _log.info("%s was not saved: %s", path, error)
        return False
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
    return True

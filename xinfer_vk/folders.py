"""Where files are kept that can be made or fetched again: models, compiled pipelines, built modules."""

from __future__ import annotations

import os
from pathlib import Path

from xinfer_vk.errors import UsageError


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

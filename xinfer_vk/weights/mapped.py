"""A file mapped into memory, whose pages can be handed back as they are used up."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from pathlib import Path

import numpy as np

from xinfer_vk.errors import ModelError

LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def require_file(path: Path) -> int:
    """The size of a regular file in bytes. Raises :class:`ModelError` saying what is there instead."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as e:  # ValueError: a NUL in the name
        raise ModelError(f"{path}: cannot be read: {getattr(e, 'strerror', None) or e}") from None
    if stat.S_ISDIR(status.st_mode):
        raise ModelError(f"{path}: is a directory, a file was expected")
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{path}: is not a regular file (a pipe, a socket or a device)")
    return status.st_size


def refuse_lfs_pointer(path: Path, start: bytes) -> None:
    """Raise :class:`ModelError` if a file that begins with ``start`` is what Git LFS puts in its place."""
    if start.startswith(LFS_POINTER):
        raise ModelError(f"{path}: is a Git LFS pointer, not the file itself: fetch it with `git lfs pull`")


def read_small_file(path: Path, limit: int) -> bytes:
    """The bytes of a file that has no business being larger than ``limit``."""
    size = require_file(path)
    if size > limit:
        raise ModelError(f"{path}: has {size} bytes, at most {limit} were expected")
    try:
        data = path.read_bytes()
    except OSError as e:
        raise ModelError(f"{path}: cannot be read: {e.strerror}") from None
    refuse_lfs_pointer(path, data)
    return data


class MappedFile:
    """A read-only mapping. ``bytes`` is ``uint8 [size]``; views of it stay valid after :meth:`close`.

    Pages that were read count as this process's memory until :meth:`release`: a loader that streams
    through a file and releases behind itself never holds more than one piece of it. The file must
    not be truncated by others meanwhile, which is true of every mapping.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = require_file(path)
        if self.size == 0:
            raise ModelError(f"{path}: is empty")
        try:
            with open(path, "rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as e:
            raise ModelError(f"{path}: cannot be read: {e.strerror}") from None
        except ValueError:  # truncated to nothing since we asked for its size
            raise ModelError(f"{path}: is empty") from None
        refuse_lfs_pointer(path, self.map[: len(LFS_POINTER)])
        self.size = len(self.map)
        self.bytes = np.frombuffer(self.map, np.uint8)

    def prefetch(self, start: int, stop: int) -> None:
        """Ask the system to read these bytes from the disk in the background."""
        self._advise("MADV_WILLNEED", start - start % mmap.PAGESIZE, stop)

    def release(self, start: int, stop: int) -> None:
        """Give back the pages that lie wholly in these bytes. Reading them again is still right."""
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = stop if stop == self.size else stop - stop % mmap.PAGESIZE
        self._advise("MADV_DONTNEED", first, last)

    def _advise(self, name: str, start: int, stop: int) -> None:
        advice = getattr(mmap, name, None)  # not on every system
        if advice is not None and stop > start and not self.map.closed:
            self.map.madvise(advice, start, stop - start)

    def close(self) -> None:
        """Drop the mapping; the system unmaps it when the last view is gone."""
        self.bytes = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):  # a tensor's view is still in use
            self.map.close()

"""Writes GGUF files; :mod:`xinfer_vk.weights.gguf_file` says what one looks like.

Our own eighty lines rather than the ``gguf`` package's writer: that one would bring four packages along to
every installation, wants whole tensors at once, and writes straight to the file's final name.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xinfer_vk.errors import UsageError, setting
from xinfer_vk.units import format_bytes
from xinfer_vk.weights.formats import FORMATS
from xinfer_vk.weights.gguf_file import ARRAY, BOOL, DEFAULT_ALIGNMENT, NUMBERS, STRING
from xinfer_vk.weights.tensors import TensorInfo

VERSION = 3
PIECE_BYTES = 4 << 20  # of a tensor, written at a time
U32, I32, F32 = 4, 5, 6  # type ids of numbers


def encoded(value: Any) -> bytes:
    """A metadata value with its type, as the file has it: text, true or false, an integer that is not
    negative (uint32), a number (float32), or a list of texts, of integers (int32) or of numbers."""
    if not isinstance(value, (list, tuple)):
        kind = _type_of(value)
        return struct.pack("<I", kind) + _bare(kind, value)
    kind = _type_of(value[0]) if value else I32
    kind = I32 if kind == U32 else kind
    return struct.pack("<IIQ", ARRAY, kind, len(value)) + b"".join(_bare(kind, v) for v in value)


def _type_of(value: Any) -> int:
    return {bool: BOOL, str: STRING, int: U32, float: F32}[type(value)]


def _bare(kind: int, value: Any) -> bytes:
    if kind == STRING:
        text = value.encode("utf-8")
        return struct.pack("<Q", len(text)) + text
    return struct.pack("<B" if kind == BOOL else "<" + NUMBERS[kind], value)


def write_gguf(
    path: Path,
    keys: Mapping[str, bytes],
    tensors: Sequence[TensorInfo],
    progress: Callable[[int, int], None],
    *,
    overwrite: bool = False,
) -> int:
    """Write a file and return its size in bytes. ``keys``: encoded values. ``tensors``: their ``read_rows``
    in the order given are what is written. ``progress(done, total)`` counts bytes.

    The file gets its name when it is complete and on the disk, so that there is never half a model under
    it. Raises :class:`UsageError` if there is a file already (unless ``overwrite``), or if it cannot be
    written; and whatever ``read_rows`` raises.
    """
    refuse_existing(path, overwrite)
    header = bytearray(struct.pack("<4sIQQ", b"GGUF", VERSION, len(tensors), len(keys)))
    for key, value in keys.items():
        header += _bare(STRING, key) + value
    sizes = [tensor.bytes for tensor in tensors]
    offset = 0
    for tensor, size in zip(tensors, sizes):
        shape = tuple(reversed(tensor.shape))  # columns first
        header += _bare(STRING, tensor.name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        header += struct.pack("<IQ", FORMATS[tensor.fmt].ggml_type, offset)
        offset += _padded(size)
    total = _padded(len(header)) + offset
    try:
        _require_space(path.parent, total)
        with _beside(path) as temporary:
            with open(temporary, "wb") as file:
                file.write(header)
                _pad(file, len(header))
                for tensor, size in zip(tensors, sizes):
                    for piece in _pieces(tensor):
                        file.write(piece.reshape(-1).data)
                        progress(file.tell(), total)
                    _pad(file, size)
                file.flush()
                os.fsync(file.fileno())
            refuse_existing(path, overwrite)
            os.replace(temporary, path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None
    return total


def refuse_existing(path: Path, overwrite: bool) -> None:
    """Raises :class:`UsageError` if a file may not be written there."""
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a directory")
    if os.path.lexists(path) and not overwrite:
        raise UsageError(f"{path} is there already: {setting('force')} overwrites it")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: the folder {path.parent} is not there")


def _require_space(folder: Path, needed: int) -> None:
    """Better told now than in an hour."""
    if (free := shutil.disk_usage(folder).free) < needed:
        raise UsageError(
            f"{folder} has {format_bytes(free)} free and the file needs {format_bytes(needed)}: make room, "
            "or write it elsewhere"
        )


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A new file in the same folder, gone afterwards if it is still there."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", suffix=".part", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # as any new file; mkstemp's is private
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _pieces(tensor: TensorInfo) -> Iterator[np.ndarray]:
    """The tensor's rows, some at a time, each given back to the system when the next is asked for."""
    rows = tensor.bytes // tensor.row_bytes
    step = max(1, PIECE_BYTES // tensor.row_bytes)
    tensor.prefetch()
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield np.ascontiguousarray(tensor.read_rows(slice(start, stop)))
        tensor.release_rows(start, stop)


def _padded(size: int) -> int:
    return -(-size // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _pad(file: Any, size: int) -> None:
    file.write(bytes(_padded(size) - size))

"""Reads GGUF files, trusting nothing they say.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), all little endian: magic
``GGUF``, version, tensor count, key count; the metadata, each a key, a value type and a value; the
tensor table, each a name, dimensions (columns first), type and offset; padding to the alignment; the
data. A string is its length in 8 bytes and its UTF-8 bytes.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xinfer_vk.errors import ModelError
from xinfer_vk.fields import quoted
from xinfer_vk.weights.formats import BY_GGML_TYPE
from xinfer_vk.weights.mapped import MappedFile
from xinfer_vk.weights.tensors import MAX_DIM, TensorInfo, element_count, refuse_overlaps

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 16
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_NAME_BYTES = 1 << 16
MAX_VALUES = 1 << 23  # of all lists together: a byte of one may take 60 in memory; a vocabulary has 2 million
MAX_METADATA_BYTES = 1 << 28  # of which a text may take four times as many
MAX_DIMS = 4
MAX_PARTS = 1000

PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")

# Value types of the metadata: struct codes of the numbers, by type id.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
BOOL, STRING, ARRAY = 7, 8, 9

GGML_TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K",
    11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32",
    27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
SUPPORTED_TYPES = ", ".join(GGML_TYPE_NAMES[i] for i in BY_GGML_TYPE)


@dataclass
class GGUFFile:
    """What a file, or a set of files, holds. ``metadata`` values are numbers, bools, strings, and
    lists of one of them; ``encoded`` has each with its type as the file has it (``uint8``, views of the
    file); ``tensors`` are under their names in the file, with ``shape`` reversed to (rows, columns)."""

    version: int
    metadata: dict[str, Any]
    encoded: dict[str, np.ndarray]
    tensors: dict[str, TensorInfo]
    bytes: int


def read_gguf(path: Path) -> GGUFFile:
    """Read the tables of a model that is one file, or several (``…-00001-of-00003.gguf``, any of
    which may be named).

    Raises :class:`ModelError` for any damage and for what is not supported (version 1, big endian,
    tensor types), naming the key or the tensor.
    """
    part = PART_NAME.fullmatch(path.name)
    if part is not None and int(part["number"]) != 1:
        path = path.with_name(f"{part['stem']}-{1:05d}-of-{part['count']}.gguf")
    whole = _read_file(path)
    count = whole.metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= MAX_PARTS:
        raise ModelError(f"{path}: split.count is {quoted(count)}, at most {MAX_PARTS} parts are supported")
    if count <= 1:
        return whole
    if part is None or int(part["count"]) != count or whole.metadata.get("split.no") != 0:
        raise ModelError(
            f"{path}: is one of {count} parts, and is not named …-00001-of-{count:05d}.gguf as it should"
        )
    for i in range(1, count):
        other_path = path.with_name(f"{part['stem']}-{i + 1:05d}-of-{part['count']}.gguf")
        if not other_path.exists():
            raise ModelError(f"{other_path}: is missing, and the model consists of {count} such parts")
        other = _read_file(other_path)
        if other.metadata.get("split.no") != i or other.metadata.get("split.count") != count:
            raise ModelError(
                f"{other_path}: does not say that it is part {i + 1} of {count}: parts of two models?"
            )
        for name, tensor in other.tensors.items():
            if name in whole.tensors:
                raise ModelError(f"{other_path}: the tensor {quoted(name)} is in another part, too")
            whole.tensors[name] = tensor
        whole.bytes += other.bytes
    total = whole.metadata.get("split.tensors.count", len(whole.tensors))
    if total != len(whole.tensors):
        raise ModelError(
            f"{path}: the parts have {len(whole.tensors)} tensors, {quoted(total)} were expected"
        )
    return whole


def _read_file(path: Path) -> GGUFFile:
    file = MappedFile(path)
    try:
        return _read(file)
    except BaseException:
        file.close()
        raise


class _Cursor:
    """Reads forward through the mapped file and never past its end."""

    def __init__(self, file: MappedFile) -> None:
        self.map, self.size, self.where, self.at = file.map, file.size, str(file.path), 0
        self.values = 0  # in the lists read so far

    def error(self, what: str) -> ModelError:
        return ModelError(f"{self.where}: {what}")

    def need(self, count: int, what: str) -> None:
        if count > self.size - self.at:
            raise self.error(f"is truncated or damaged: {what} at byte {self.at} needs {count} bytes more")

    def bound(self, what: str, more: int = 0) -> None:
        """Nothing that is read into Python's memory lies farther into the file."""
        if self.at + more > MAX_METADATA_BYTES:
            raise self.error(f"damaged: more than {MAX_METADATA_BYTES >> 20} MB of metadata ({what})")

    def number(self, code: str, what: str) -> Any:
        size = struct.calcsize("<" + code)
        self.need(size, what)
        (value,) = struct.unpack_from("<" + code, self.map, self.at)
        self.at += size
        return value

    def numbers(self, code: str, count: int, what: str) -> list[Any]:
        size = struct.calcsize("<" + code) * count
        self.need(size, what)
        values = np.frombuffer(self.map, np.dtype(code).newbyteorder("<"), count, self.at).tolist()
        self.at += size
        return list(values)

    def string(self, what: str, limit: int | None = None) -> str:
        length = self.number("Q", f"the length of {what}")
        if limit is not None and length > limit:
            raise self.error(f"damaged: {what} would be {length} bytes long")
        self.need(length, what)
        self.bound(what, length)
        raw = self.map[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.error(f"{what} is not UTF-8 text") from None

    def strings(self, count: int, what: str) -> list[str]:
        """``count`` strings: a vocabulary has 150,000, so the loop is kept tight."""
        self.need(8 * count, what)
        data, at, size = self.map, self.at, self.size
        length_of = struct.Struct("<Q").unpack_from
        out = []
        try:
            for _ in range(count):
                (length,) = length_of(data, at)
                at += 8
                end = at + length
                if end > size:
                    raise struct.error
                if end > MAX_METADATA_BYTES:
                    self.bound(what, end - self.at)
                out.append(data[at:end].decode("utf-8"))
                at = end
        except struct.error:
            raise self.error(
                f"is truncated or damaged: {what}, string {len(out)}, goes past the end"
            ) from None
        except UnicodeDecodeError:
            raise self.error(f"{what}, string {len(out)}, is not UTF-8 text") from None
        self.at = at
        return out


def _read(file: MappedFile) -> GGUFFile:
    c = _Cursor(file)
    if file.map[:4] != b"GGUF":
        raise c.error(f"not a GGUF file: it begins with {quoted(bytes(file.map[:4]))}, not with 'GGUF'")
    c.at = 4
    version = c.number("I", "the version")
    if version not in VERSIONS:
        if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, *VERSIONS):
            raise c.error("is a big-endian GGUF file, little-endian ones are supported")
        raise c.error(f"is GGUF version {version}, versions 2 and 3 are supported: convert the model again")
    tensor_count, key_count = c.number("Q", "the tensor count"), c.number("Q", "the key count")
    if tensor_count > min(MAX_TENSORS, file.size // 24) or key_count > min(MAX_KEYS, file.size // 13):
        raise c.error(f"damaged: it claims {tensor_count} tensors and {key_count} keys")

    metadata: dict[str, Any] = {}
    encoded: dict[str, np.ndarray] = {}
    for i in range(key_count):
        key = c.string(f"metadata key {i}", MAX_NAME_BYTES)
        if key in metadata:
            raise c.error(f"the key {quoted(key)} occurs twice")
        start = c.at
        metadata[key] = _value(c, c.number("I", f"the type of {quoted(key)}"), quoted(key))
        encoded[key] = file.bytes[start : c.at]
        c.bound(f"after {quoted(key)}")

    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise c.error(f"general.alignment is {quoted(alignment)}, a power of two from 8 on was expected")
    table = [_tensor_entry(c, i) for i in range(tensor_count)]
    data_start = -(-c.at // alignment) * alignment

    tensors: dict[str, TensorInfo] = {}
    spans = []
    for name, shape, type_id, offset in table:
        if name in tensors:
            raise c.error(f"the tensor {quoted(name)} occurs twice")
        if type_id not in BY_GGML_TYPE:
            kind = GGML_TYPE_NAMES.get(type_id, f"unknown ({type_id})")
            raise c.error(f"tensor {quoted(name)} has type {kind}, supported: {SUPPORTED_TYPES}")
        fmt = BY_GGML_TYPE[type_id]
        if shape[-1] % fmt.block:
            raise c.error(
                f"tensor {quoted(name)}: {shape[-1]} columns are not whole {fmt.name} blocks of {fmt.block}"
            )
        if offset % alignment:
            raise c.error(f"tensor {quoted(name)}: its offset {offset} is not a multiple of {alignment}")
        size = element_count(shape[:-1]) * fmt.row_bytes(shape[-1])
        start = data_start + offset
        if start + size > file.size:
            raise c.error(
                f"is truncated or damaged: tensor {quoted(name)} ends at byte {start + size}, "
                f"the file at {file.size}"
            )
        spans.append((start, start + size, name))
        data = file.bytes[start : start + size]
        tensors[name] = TensorInfo(name, shape, fmt.name, data, file=file, start=start)
    refuse_overlaps(spans, c.where)
    return GGUFFile(version, metadata, encoded, tensors, file.size)


def _value(c: _Cursor, kind: int, key: str) -> Any:
    if kind in NUMBERS:
        return c.number(NUMBERS[kind], key)
    if kind == BOOL:
        return _bool(c.number("B", key), c, key)
    if kind == STRING:
        return c.string(key)
    if kind != ARRAY:
        raise c.error(f"damaged: the key {key} has the unknown value type {kind}")
    kind, count = c.number("I", key), c.number("Q", key)
    c.values += count
    if c.values > MAX_VALUES:
        raise c.error(f"damaged: the lists up to {key} would have {c.values} values, more than {MAX_VALUES}")
    if kind in NUMBERS:
        return c.numbers(NUMBERS[kind], count, key)
    if kind == BOOL:
        return [_bool(b, c, key) for b in c.numbers("B", count, key)]
    if kind == STRING:
        return c.strings(count, key)
    what = "a list of lists" if kind == ARRAY else f"a list of the unknown value type {kind}"
    raise c.error(f"the key {key} is {what}, which is not supported")


def _bool(byte: int, c: _Cursor, key: str) -> bool:
    if byte > 1:
        raise c.error(f"damaged: {key} holds the truth value {byte}")
    return byte == 1


def _tensor_entry(c: _Cursor, index: int) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape, type id, offset) of a row of the tensor table; ``shape`` as (rows, columns)."""
    name = c.string(f"the name of tensor {index}", MAX_NAME_BYTES)
    what = f"tensor {quoted(name)}"
    dims = c.number("I", what)
    if not 1 <= dims <= MAX_DIMS:
        raise c.error(f"damaged: {what} has {dims} dimensions")
    shape = tuple(reversed(c.numbers("Q", dims, what)))
    if any(not 1 <= dim <= MAX_DIM for dim in shape):
        raise c.error(f"damaged: {what} has shape {quoted(shape)}")
    return name, shape, c.number("I", what), c.number("Q", what)

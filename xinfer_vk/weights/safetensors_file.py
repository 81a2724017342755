"""Reads safetensors files, trusting nothing they say.

The format (https://github.com/huggingface/safetensors#format): 8 bytes of header length, little
endian; a JSON object that maps each tensor's name to ``{"dtype", "shape", "data_offsets"}``, with
``__metadata__`` beside them; then the data, which the tensors cover without holes or overlaps.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xinfer_vk.errors import ModelError
from xinfer_vk.fields import parse_json, quoted
from xinfer_vk.weights.formats import BY_SAFETENSORS
from xinfer_vk.weights.mapped import MappedFile, read_small_file
from xinfer_vk.weights.tensors import MAX_DIM, TensorInfo, element_count, refuse_overlaps

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_INDEX_BYTES = 64 << 20
MAX_DIMS = 8
PLAIN_NAME = re.compile(r"[^/\\.][^/\\]{0,200}")  # of a file beside the index, not hidden
INDEX_NAME = "model.safetensors.index.json"

FLOATS = {dtype: fmt.name for dtype, fmt in BY_SAFETENSORS.items()}

# Bytes of one element of every dtype the format names, so that a tensor we ignore is measured too.
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2,
    "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


def read_safetensors(
    path: Path,
    ignore: Callable[[str], bool] = lambda name: False,
    dtypes: Mapping[str, str] = FLOATS,
) -> dict[str, TensorInfo]:
    """The tensors of one file, by name.

    ``ignore``: names to leave out (their place in the file is checked all the same). ``dtypes``: the number
    formats of those that are supported. Raises :class:`ModelError` for any damage, and for another dtype.
    """
    file = MappedFile(path)
    try:
        return _read(file, ignore, dtypes)
    except BaseException:
        file.close()
        raise


def read_sharded_safetensors(
    index: Path,
    ignore: Callable[[str], bool] = lambda name: False,
    dtypes: Mapping[str, str] = FLOATS,
) -> dict[str, TensorInfo]:
    """The tensors of all shards that an index file (``model.safetensors.index.json``) lists."""
    weight_map = parse_json(read_small_file(index, MAX_INDEX_BYTES), str(index)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(
            f"{index}: weight_map is {quoted(weight_map)}, a mapping of tensors to files was expected"
        )
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not PLAIN_NAME.fullmatch(shard) or not shard.isprintable():
            raise ModelError(
                f"{index}: the file of {quoted(name)} is {quoted(shard)}, a plain file name was expected"
            )
    tensors: dict[str, TensorInfo] = {}
    home: dict[str, str] = {}
    try:
        for shard in dict.fromkeys(weight_map.values()):
            path = index.with_name(shard)
            if not os.path.exists(path):
                raise ModelError(f"{path}: is missing, and {index.name} lists it: download the model again")
            for name, tensor in read_safetensors(path, ignore, dtypes).items():
                if name in tensors:
                    raise ModelError(f"{index}: the tensor {quoted(name)} is in {home[name]} and in {shard}")
                tensors[name], home[name] = tensor, shard
        for name, shard in weight_map.items():
            if home.get(name, shard if ignore(name) else None) != shard:
                raise ModelError(
                    f"{index}: the tensor {quoted(name)} is not in {quoted(shard)}, where the index has it"
                )
    except BaseException:
        close_all(tensors)
        raise
    return tensors


def close_all(tensors: dict[str, TensorInfo]) -> None:
    """Close every file behind ``tensors`` once."""
    files = {id(file): file for t in tensors.values() for file in t.files}
    tensors.clear()
    for file in files.values():
        file.close()


def _read(
    file: MappedFile, ignore: Callable[[str], bool], dtypes: Mapping[str, str]
) -> dict[str, TensorInfo]:
    where = str(file.path)
    if file.size < 8:
        raise ModelError(f"{where}: has {file.size} bytes, too few for a safetensors file")
    length = int.from_bytes(file.map[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise ModelError(f"{where}: not a safetensors file (its header would be {length} bytes long)")
    if 8 + length > file.size:
        raise ModelError(f"{where}: is truncated: the header is {length} bytes long, the file {file.size}")
    header_bytes = file.map[8 : 8 + length]
    if not header_bytes.startswith(b"{"):
        raise ModelError(f"{where}: not a safetensors file (its header is not a JSON object)")
    header = parse_json(header_bytes, f"{where}: header")
    header.pop("__metadata__", None)
    data_start, data_size = 8 + length, file.size - 8 - length

    tensors: dict[str, TensorInfo] = {}
    spans = []
    for name, entry in header.items():
        dtype, shape, begin, end = _entry(entry, f"{where}: tensor {quoted(name)}", dtypes)
        if end > data_size:
            raise ModelError(
                f"{where}: is truncated or damaged: tensor {quoted(name)} ends at byte {data_start + end}, "
                f"the file at {file.size}"
            )
        spans.append((begin, end, name))
        if ignore(name):
            continue
        if dtype not in dtypes:
            supported = ", ".join(dtypes)
            packed = name.endswith((".qweight", ".qzeros", ".g_idx"))
            hint = "; a GPTQ or AWQ checkpoint needs its quantization_config in config.json" * packed
            raise ModelError(
                f"{where}: tensor {quoted(name)} has dtype {dtype}, supported: {supported}{hint}"
            )
        data = file.bytes[data_start + begin : data_start + end]
        tensors[name] = TensorInfo(name, shape, dtypes[dtype], data, file=file, start=data_start + begin)
    refuse_overlaps(spans, where)
    covered = sum(end - begin for begin, end, _ in spans)
    if covered != data_size:
        raise ModelError(f"{where}: damaged: {data_size - covered} bytes of its data belong to no tensor")
    return tensors


def _entry(entry: Any, where: str, dtypes: Mapping[str, str]) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, begin, end) of a header entry, consistent with each other."""
    if not isinstance(entry, dict):
        raise ModelError(f"{where}: its header entry is {quoted(entry)}, an object was expected")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ModelError(f"{where}: dtype is {quoted(dtype)}, supported: {', '.join(dtypes)}")
    if not _naturals(shape) or len(shape) > MAX_DIMS or any(dim > MAX_DIM for dim in shape):
        raise ModelError(f"{where}: shape is {quoted(shape)}, a list of sizes was expected")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelError(f"{where}: data_offsets is {quoted(offsets)}, [begin, end] was expected")
    size = element_count(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != size:
        raise ModelError(
            f"{where}: {dtype} of shape {list(shape)} takes {size} bytes, data_offsets {list(offsets)} holds "
            f"{quoted(offsets[1] - offsets[0])}"
        )
    return dtype, tuple(shape), offsets[0], offsets[1]


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)

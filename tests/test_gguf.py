"""The GGUF reader: what the ``gguf`` package writes it reads, all else it refuses in one line."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import K_SIZES, random_tensors, tiny_config, write_gguf_model

from xinfer_vk.errors import ModelError
from xinfer_vk.weights import gguf_file
from xinfer_vk.weights.formats import FORMATS, as_f32
from xinfer_vk.weights.gguf_file import read_gguf
from xinfer_vk.weights.source import open_model

F32, Q4_0 = 0, 2
UINT8, UINT32, STRING, ARRAY, UINT64 = 0, 4, 8, 9, 10


def text(s: str | bytes) -> bytes:
    raw = s.encode() if isinstance(s, str) else s
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def row(name: str | bytes, dims: Sequence[int], kind: int = F32, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf_bytes(
    keys: Sequence[bytes] = (), rows: Sequence[bytes] = (), data: bytes = b"", *, magic: bytes = b"GGUF",
    version: int = 3, tensors: int | None = None, kvs: int | None = None, align: int = 32,
) -> bytes:  # fmt: skip
    """A file put together by hand, so that every part of it can be wrong."""
    counts = (len(rows) if tensors is None else tensors, len(keys) if kvs is None else kvs)
    out = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(rows)
    return out + bytes(-len(out) % align) + data


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        read_gguf(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def test_the_metadata_equals_the_gguf_packages(tmp_path: Path) -> None:
    from gguf import GGUFReader

    def extra(writer: Any) -> None:
        writer.add_bool("x.bool", True)
        writer.add_int8("x.int8", -3)
        writer.add_uint16("x.uint16", 65535)
        writer.add_int64("x.int64", -(2**60))
        writer.add_uint64("x.uint64", 2**64 - 1)
        writer.add_float32("x.float32", 0.5)
        writer.add_float64("x.float64", 1e300)
        writer.add_string("x.string", "Füße 🦶")
        writer.add_array("x.ints", [3, 1, 2])
        writer.add_array("x.floats", [0.5, -1.25])
        writer.add_array("x.bools", [True, False])
        writer.add_array("x.strings", ["", "a", "Ġthe", "日本"])

    path = tmp_path / "m.gguf"
    write_gguf_model(path, tiny_config("llama"), tokens=[f"<{i}>" for i in range(320)], extra=extra)
    got = read_gguf(path)
    want = {n: f.contents() for n, f in GGUFReader(path).fields.items() if not n.startswith("GGUF.")}
    assert got.metadata == want
    assert [type(v) for v in got.metadata.values()] == [type(v) for v in want.values()]


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_tensors_equal_the_gguf_packages(tmp_path: Path, fmt: str) -> None:
    from gguf import GGUFReader

    path = tmp_path / "m.gguf"
    write_gguf_model(path, tiny_config("qwen2", **(K_SIZES if FORMATS[fmt].block == 256 else {})), fmt=fmt)
    got = read_gguf(path).tensors
    want = {t.name: t for t in GGUFReader(path).tensors}
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].shape == tuple(int(n) for n in reversed(tensor.shape))
        assert got[name].fmt.upper() == tensor.tensor_type.name
        assert got[name].data.tobytes() == tensor.data.tobytes()


@pytest.mark.parametrize("version", [2, 3])
def test_versions_2_and_3_are_read(tmp_path: Path, version: int) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes([key("a", UINT32, b"\7\0\0\0")], [row("t", [2])], bytes(8), version=version))
    got = read_gguf(path)
    assert (got.version, got.metadata, got.tensors["t"].shape) == (version, {"a": 7}, (2,))


def test_metadata_that_no_model_needs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of bytes takes eight times its size in memory, a text four times."""
    path = tmp_path / "x.gguf"

    def lists(count: int) -> list[bytes]:
        part = struct.pack("<IQ", UINT8, 1000) + bytes(1000)
        return [key(f"list{i}", ARRAY, part) for i in range(count)]

    monkeypatch.setattr(gguf_file, "MAX_VALUES", 5000)
    path.write_bytes(gguf_bytes(lists(5), [row("a", [2])], bytes(32)))
    assert len(read_gguf(path).metadata) == 5
    path.write_bytes(gguf_bytes(lists(6), [row("a", [2])], bytes(32)))
    with pytest.raises(ModelError, match="the lists up to 'list5' would have 6000 values, more than 5000"):
        read_gguf(path)
    monkeypatch.setattr(gguf_file, "MAX_METADATA_BYTES", 1 << 20)
    long = struct.pack("<Q", 1 << 20) + b"x" * (1 << 20)
    texts = [long, struct.pack("<IQ", STRING, 2) + long + struct.pack("<Q", 0)]
    for kind, text in zip((STRING, ARRAY), texts):
        path.write_bytes(gguf_bytes([key("t", kind, text)], [row("a", [2])], bytes(32)))
        with pytest.raises(ModelError, match="more than 1 MB of metadata"):
            read_gguf(path)


def test_a_larger_alignment_is_honoured(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    aligned = [key("general.alignment", UINT32, struct.pack("<I", 256))]
    data = np.arange(64, dtype=np.float32).tobytes() + np.float32([7, 8]).tobytes()
    path.write_bytes(gguf_bytes(aligned, [row("a", [64]), row("b", [2], offset=256)], data, align=256))
    assert as_f32("f32", read_gguf(path).tensors["b"].data).tolist() == [7, 8]


def big_endian(version: int) -> int:
    return int.from_bytes(struct.pack(">I", version), "little")


DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "another magic": (b"GGML" + bytes(60), "not a GGUF file: it begins with b'GGML'"),
    "nothing but the magic": (b"GGUF", "truncated"),
    "version 1": (gguf_bytes(version=1), "is GGUF version 1, versions 2 and 3 are supported"),
    "version 4": (gguf_bytes(version=4), "is GGUF version 4"),
    "big endian": (gguf_bytes(version=big_endian(3)), "is a big-endian GGUF file"),
    "absurd tensor count": (gguf_bytes(tensors=2**60), f"claims {2**60} tensors"),
    "absurd key count": (gguf_bytes(kvs=2**63), f"{2**63} keys"),
    "more keys than there are": (gguf_bytes([key("a", UINT32, bytes(4))], data=bytes(64), kvs=5), "x.gguf: "),
    "a key longer than the file": (
        gguf_bytes([struct.pack("<Q", 60000)], data=bytes(99)),
        "truncated or damaged",
    ),
    "a key of many gigabytes": (gguf_bytes([struct.pack("<Q", 2**62)], data=bytes(99)), "would be"),
    "a key that is not UTF-8": (
        gguf_bytes([key(b"\xff\xfe", UINT32, bytes(4))]),
        "metadata key 0 is not UTF-8",
    ),
    "the same key twice": (gguf_bytes([key("a", UINT32, bytes(4))] * 2), "the key 'a' occurs twice"),
    "an unknown value type": (gguf_bytes([key("a", 99, bytes(4))]), "unknown value type 99"),
    "a truth value of 2": (gguf_bytes([key("a", 7, b"\2")]), "truth value 2"),
    "a string past the end": (
        gguf_bytes([key("a", STRING, struct.pack("<Q", 2**63))]),
        "truncated or damaged",
    ),
    "a string that is not UTF-8": (gguf_bytes([key("a", STRING, text(b"\xc0"))]), "'a' is not UTF-8"),
    "a list of absurd length": (
        gguf_bytes([key("a", ARRAY, struct.pack("<IQ", UINT64, 2**61))]),
        "would have",
    ),
    "a list longer than the file": (
        gguf_bytes([key("a", ARRAY, struct.pack("<IQ", UINT64, 2**20))]),
        "truncated or damaged",
    ),
    "strings past the end": (
        gguf_bytes([key("a", ARRAY, struct.pack("<IQ", STRING, 3) + text("x") + struct.pack("<Q", 999) * 2)]),
        "'a', string 1, goes past the end",
    ),
    "a list string that is not UTF-8": (
        gguf_bytes([key("a", ARRAY, struct.pack("<IQ", STRING, 1) + text(b"\xff"))]),
        "'a', string 0, is not UTF-8",
    ),
    "a list of lists": (gguf_bytes([key("a", ARRAY, struct.pack("<IQ", ARRAY, 1))]), "a list of lists"),
    "a list of an unknown type": (
        gguf_bytes([key("a", ARRAY, struct.pack("<IQ", 77, 1))]),
        "unknown value type 77",
    ),
    "alignment 0": (gguf_bytes([key("general.alignment", UINT32, bytes(4))]), "general.alignment is 0"),
    "alignment 24": (
        gguf_bytes([key("general.alignment", UINT32, b"\x18\0\0\0")]),
        "general.alignment is 24",
    ),
    "alignment as text": (
        gguf_bytes([key("general.alignment", STRING, text("32"))]),
        "general.alignment is '32'",
    ),
    "no dimensions": (gguf_bytes(rows=[row("t", [])], data=bytes(64)), "'t' has 0 dimensions"),
    "a billion dimensions": (
        gguf_bytes(rows=[text("t") + struct.pack("<I", 10**9)], data=bytes(64)),
        "has 1000000000 dimensions",
    ),
    "a dimension of zero": (gguf_bytes(rows=[row("t", [4, 0])], data=bytes(64)), "has shape (0, 4)"),
    "a negative dimension": (gguf_bytes(rows=[row("t", [2**64 - 1])], data=bytes(64)), "has shape"),
    "dimensions that overflow": (
        gguf_bytes(rows=[row("t", [2**31 - 1] * 4)], data=bytes(64)),
        "truncated or damaged: tensor 't' ends",
    ),
    "an unsupported type": (
        gguf_bytes(rows=[row("t", [256], 19)], data=bytes(999)),
        "'t' has type IQ1_S, supported: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, "
        "Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4",
    ),
    "an unknown type": (gguf_bytes(rows=[row("t", [256], 999)], data=bytes(999)), "has type unknown (999)"),
    "columns that are no whole super-blocks": (
        gguf_bytes(rows=[row("t", [288], 12)], data=bytes(999)),
        "'t': 288 columns are not whole q4_k blocks of 256",
    ),
    "a truncated super-block": (gguf_bytes(rows=[row("t", [256], 14)], data=bytes(209)), "is truncated"),
    "columns that are no whole blocks": (
        gguf_bytes(rows=[row("t", [33], Q4_0)], data=bytes(99)),
        "not whole q4_0",
    ),
    "an offset between alignments": (
        gguf_bytes(rows=[row("t", [2], offset=8)], data=bytes(64)),
        "not a multiple of",
    ),
    "an offset outside": (
        gguf_bytes(rows=[row("t", [2], offset=2**62)], data=bytes(64)),
        "truncated or damaged",
    ),
    "truncated data": (gguf_bytes(rows=[row("t", [16])], data=bytes(60)), "truncated or damaged"),
    "overlapping tensors": (
        gguf_bytes(rows=[row("a", [16]), row("b", [2], offset=32)], data=bytes(64)),
        "'a' and 'b' overlap",
    ),
    "the same tensor twice": (
        gguf_bytes(rows=[row("t", [2]), row("t", [2], offset=32)], data=bytes(64)),
        "the tensor 't' occurs twice",
    ),
    "a tensor name that is not UTF-8": (gguf_bytes(rows=[row(b"\xff", [2])], data=bytes(64)), "not UTF-8"),
    "a tensor name of control characters": (
        gguf_bytes(rows=[row("\x1b[2J\n", [2], 19)], data=bytes(64)),
        r"'\x1b[2J\n' has type IQ1_S",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    data, expected = DAMAGED[case]
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    assert expected in refusal(path)


def test_what_is_not_a_readable_file_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "missing.gguf")
    assert "is a directory" in refusal(tmp_path)
    os.mkfifo(tmp_path / "fifo.gguf")
    assert "not a regular file" in refusal(tmp_path / "fifo.gguf")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    """Cut a valid file anywhere, and it is never read as something shorter."""
    path = tmp_path / "x.gguf"
    keys = [
        key("general.name", STRING, text("x")),
        key("a", ARRAY, struct.pack("<IQ", STRING, 2) + text("bc") * 2),
    ]
    whole = gguf_bytes(keys, [row("t", [8, 2]), row("u", [2], offset=64)], bytes(72))
    path.write_bytes(whole)
    read_gguf(path)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        refusal(path)


# -- whole models --------------------------------------------------------------------------------


def test_a_directory_with_one_gguf_file_is_that_model(tmp_path: Path) -> None:
    write_gguf_model(tmp_path / "a.gguf", tiny_config("qwen2"))
    with open_model(tmp_path) as source:
        assert (source.kind, source.name, source.path) == ("gguf", "a", tmp_path / "a.gguf")
    write_gguf_model(tmp_path / "b.gguf", tiny_config("qwen2"))
    with pytest.raises(ModelError, match="several"):
        open_model(tmp_path)


def test_a_tensor_without_a_place_in_the_family_is_refused(tmp_path: Path) -> None:
    def extra(writer: Any) -> None:
        writer.add_tensor("blk.0.ssm_in.weight", np.ones(16, np.float32))

    write_gguf_model(tmp_path / "m.gguf", tiny_config("qwen2"), extra=extra)
    with pytest.raises(ModelError, match=r"'blk\.0\.ssm_in\.weight' has no place in a qwen2 model"):
        open_model(tmp_path / "m.gguf")


def test_two_tensors_for_one_place_are_refused(tmp_path: Path) -> None:
    def extra(writer: Any) -> None:
        writer.add_tensor("blk.0.post_attention_norm.weight", np.ones(64, np.float32))

    write_gguf_model(tmp_path / "m.gguf", tiny_config("qwen2"), extra=extra)
    with pytest.raises(ModelError, match=r"and another are both a model\.layers\.0\.post_attention_l"):
        open_model(tmp_path / "m.gguf")


def test_rope_factors_are_part_of_the_config(tmp_path: Path) -> None:
    factors = np.array([1, 1, 1, 2, 4, 8, 8, 8], np.float32)
    write_gguf_model(tmp_path / "m.gguf", tiny_config("llama"), rope_factors=factors)
    with open_model(tmp_path / "m.gguf") as source:
        assert source.config.rope_scaling is not None
        assert source.config.rope_scaling.factors == tuple(factors.tolist())
        assert "rope_freqs.weight" not in source.tensors
    write_gguf_model(tmp_path / "m.gguf", tiny_config("llama"), rope_factors=factors[:7])
    with pytest.raises(ModelError, match=r"rope_freqs\.weight is f32 of shape \[7\]"):
        open_model(tmp_path / "m.gguf")
    write_gguf_model(tmp_path / "m.gguf", tiny_config("llama"), rope_factors=factors * 0)
    with pytest.raises(ModelError, match="not a positive number"):
        open_model(tmp_path / "m.gguf")


def test_a_model_in_parts_is_put_together(tmp_path: Path) -> None:
    config = tiny_config("llama")
    want = random_tensors(config)
    write_gguf_model(tmp_path / "m.gguf", config, want, tensors_per_file=8)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) == 3
    for path in (parts[0], parts[2], tmp_path):
        with open_model(path) as source:
            assert source.tensors.keys() == want.keys()
            assert source.file_bytes == sum(p.stat().st_size for p in parts)


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    write_gguf_model(tmp_path / "m.gguf", tiny_config("llama"), tensors_per_file=8)
    first, second, third = sorted(tmp_path.glob("m-*.gguf"))
    kept = second.read_bytes()
    second.write_bytes(third.read_bytes())
    with pytest.raises(ModelError, match="part 2 of 3"):
        open_model(first)
    second.unlink()
    with pytest.raises(ModelError, match="is missing"):
        open_model(first)
    second.write_bytes(kept)
    with pytest.raises(ModelError, match="is one of 3 parts"):
        open_model(first.rename(tmp_path / "other.gguf"))

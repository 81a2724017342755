"""The safetensors reader: what the format allows it reads, all else it refuses in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import safetensors_bytes, tiny_config, with_header, write_hf_model

from xinfer_vk.errors import ModelError
from xinfer_vk.weights.formats import as_f32
from xinfer_vk.weights.safetensors_file import INDEX_NAME, read_safetensors, read_sharded_safetensors
from xinfer_vk.weights.source import open_model


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def refusal(path: Path) -> str:
    """The one line that ``path`` is refused with."""
    with pytest.raises(ModelError) as caught:
        read_safetensors(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def test_files_of_the_safetensors_package_are_read(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    want = {"a": rng.standard_normal((3, 5), np.float32), "b": rng.standard_normal(7).astype(np.float16)}
    save_file(want, tmp_path / "x.safetensors", {"format": "np"})
    got = read_safetensors(tmp_path / "x.safetensors")
    assert {name: t.shape for name, t in got.items()} == {"a": (3, 5), "b": (7,)}
    assert {name: t.fmt for name, t in got.items()} == {"a": "f32", "b": "f16"}
    for name, values in want.items():
        assert got[name].data.tobytes() == values.tobytes()


def test_files_we_write_are_read_by_the_safetensors_package(tmp_path: Path) -> None:
    """Our own test writer is not a dialect."""
    from safetensors.numpy import load_file

    want = write_hf_model(tmp_path, tiny_config("qwen2"))
    got = load_file(tmp_path / "model.safetensors")
    assert got.keys() == want.keys()
    assert all(np.array_equal(got[name], want[name]) for name in want)


def test_data_is_a_view_of_the_file_and_not_a_copy(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes({"a": ("F32", (2,), bytes(8))}))
    tensor = read_safetensors(path)["a"]
    assert not tensor.data.flags.owndata
    assert not tensor.data.flags.writeable
    assert tensor.file is not None
    assert np.shares_memory(tensor.data, tensor.file.bytes)


def test_a_file_with_no_tensors_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(with_header({}))
    assert read_safetensors(path) == {}


def test_shards_are_put_together(tmp_path: Path) -> None:
    want = write_hf_model(tmp_path, tiny_config("llama"), shards=3)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    with open_model(tmp_path) as source:
        assert source.tensors.keys() == want.keys()
        assert source.file_bytes == sum(p.stat().st_size for p in tmp_path.glob("*.safetensors"))
        for name, values in want.items():
            assert np.array_equal(as_f32("f32", source.tensors[name].data), values.reshape(-1))


@pytest.mark.parametrize("dtype", ["F64", "I64", "I8", "U8", "BOOL", "F8_E4M3"])
def test_other_dtypes_are_refused_by_name(tmp_path: Path, dtype: str) -> None:
    size = {"F64": 8, "I64": 8}.get(dtype, 1)
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes({"some.weight": (dtype, (3,), bytes(3 * size))}))
    assert f"tensor 'some.weight' has dtype {dtype}, supported: F32, F16, BF16" in refusal(path)
    assert read_safetensors(path, ignore=lambda name: name == "some.weight") == {}


DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "too short": (b"\x01\x02\x03", "too few"),
    "wrong magic": (b"PK\x03\x04" + b"x" * 60, "not a safetensors file"),
    "a huge header length": ((2**63).to_bytes(8, "little") + b"{}", "not a safetensors file"),
    "a header longer than the file": ((1000).to_bytes(8, "little") + b"{}", "is truncated"),
    "a header that is no object": (with_header([1, 2]), "is not a JSON object"),
    "broken JSON": (with_header(b'{"a": '), "not valid JSON"),
    "a header that is not UTF-8": (with_header(b'{"\xff": 1}'), "not UTF-8"),
    "NaN in the header": (with_header(b'{"a": NaN}'), "NaN"),
    "deep nesting": (with_header(b'{"a": ' + b"[" * 200000), "nested too deeply"),
    "a number of a million digits": (with_header(b'{"a": ' + b"9" * 1000000 + b"}"), "too many digits"),
    "the same tensor twice": (
        with_header(b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, "a": {}}'),
        "'a' occurs twice",
    ),
    "an entry that is a number": (with_header({"a": 7}), "an object was expected"),
    "no dtype": (with_header({"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)), "dtype is None"),
    "an unknown dtype": (with_header({"a": entry("F24")}, bytes(8)), "dtype is 'F24'"),
    "a dtype that is a list": (with_header({"a": entry(["F32"])}, bytes(8)), "dtype is"),
    "a negative size": (with_header({"a": entry(shape=[-2])}, bytes(8)), "shape is [-2]"),
    "a fractional size": (with_header({"a": entry(shape=[2.0])}, bytes(8)), "shape is [2.0]"),
    "a true size": (with_header({"a": entry(shape=[True, 2])}, bytes(8)), "shape is [True, 2]"),
    "a size that is a list": (with_header({"a": entry(shape=[[2]])}, bytes(8)), "shape is [[2]]"),
    "sizes that overflow": (with_header({"a": entry(shape=[2**31 - 1] * 6)}, bytes(8)), "takes"),
    "a size beyond all": (with_header({"a": entry(shape=[2**63])}, bytes(8)), "shape is"),
    "a thousand dimensions": (with_header({"a": entry(shape=[1] * 1000)}, bytes(8)), "a list of 1000"),
    "one offset": (with_header({"a": entry(offsets=[0])}, bytes(8)), "data_offsets is [0]"),
    "offsets backwards": (with_header({"a": entry(offsets=[8, 0])}, bytes(8)), "data_offsets is [8, 0]"),
    "a negative offset": (with_header({"a": entry(offsets=[-8, 0])}, bytes(8)), "data_offsets is [-8, 0]"),
    "an enormous offset": (
        with_header({"a": entry(offsets=[10**4000, 10**4000 + 8])}, bytes(8)),
        "data_offsets",
    ),
    "a size that is not the shape's": (with_header({"a": entry(offsets=[0, 4])}, bytes(4)), "takes 8 bytes"),
    "offsets outside": (with_header({"a": entry(offsets=[8, 16])}, bytes(8)), "truncated or damaged"),
    "truncated data": (with_header({"a": entry()}, bytes(5)), "truncated or damaged"),
    "overlapping tensors": (
        with_header({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12)),
        "'a' and 'b' overlap",
    ),
    "a hole": (with_header({"a": entry(), "b": entry(offsets=[12, 20])}, bytes(20)), "4 bytes of its data"),
    "bytes after the last tensor": (with_header({"a": entry()}, bytes(11)), "3 bytes of its data"),
    "a name of control characters": (with_header({"a\n\x1b[31m": entry("F24")}, bytes(8)), r"a\n\x1b[31m"),
    "a name of a million letters": (with_header({"a" * 1000000: entry("F24")}, bytes(8)), "aaa"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    data, expected = DAMAGED[case]
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    message = refusal(path)
    assert expected in message
    assert len(message) < 600 + len(str(path))


def test_what_is_not_a_readable_file_is_refused(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in refusal(tmp_path / "missing.safetensors")
    assert "is a directory" in refusal(tmp_path)
    fifo = tmp_path / "fifo.safetensors"
    os.mkfifo(fifo)
    assert "not a regular file" in refusal(fifo)
    locked = tmp_path / "locked.safetensors"
    locked.write_bytes(with_header({}))
    locked.chmod(0)
    if not os.access(locked, os.R_OK):  # root reads everything
        assert "Permission denied" in refusal(locked)


# -- the index of shards -------------------------------------------------------------------------


def sharded(folder: Path) -> tuple[Path, dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    write_hf_model(folder, tiny_config("llama"), shards=2)
    index = folder / INDEX_NAME
    return index, json.loads(index.read_text())


@pytest.mark.parametrize(
    ("weight_map", "expected"),
    [
        (None, "weight_map is None"),
        ([], "weight_map is []"),
        ({}, "a mapping of tensors to files was expected"),
        ({"a": 1}, "the file of 'a' is 1"),
        ({"a": "../secret.safetensors"}, "a plain file name was expected"),
        ({"a": "/etc/passwd"}, "a plain file name was expected"),
        ({"a": ".."}, "a plain file name was expected"),
        ({"a": "x\0y"}, "a plain file name was expected"),
        ({"a": "gone.safetensors"}, "gone.safetensors: is missing"),
    ],
)
def test_a_wrong_index_is_refused(tmp_path: Path, weight_map: Any, expected: str) -> None:
    index = tmp_path / INDEX_NAME
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError) as caught:
        read_sharded_safetensors(index)
    assert expected in str(caught.value)


def test_an_index_that_disagrees_with_the_shards_is_refused(tmp_path: Path) -> None:
    index, content = sharded(tmp_path)
    first, second = sorted(set(content["weight_map"].values()))
    swapped = {n: first if s == second else second for n, s in content["weight_map"].items()}
    index.write_text(json.dumps({"weight_map": swapped}))
    with pytest.raises(ModelError, match="where the index has it"):
        read_sharded_safetensors(index)
    index.write_text(json.dumps({"weight_map": {**content["weight_map"], "more.weight": first}}))
    with pytest.raises(ModelError, match=r"'more\.weight' is not in"):
        read_sharded_safetensors(index)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    index, content = sharded(tmp_path)
    first, second = sorted(set(content["weight_map"].values()))
    (tmp_path / second).write_bytes((tmp_path / first).read_bytes())
    with pytest.raises(ModelError, match=r"is in .* and in"):
        read_sharded_safetensors(index)


# -- the directory -------------------------------------------------------------------------------


def test_a_directory_without_weights_says_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither a config\.json nor a \.gguf file"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama")))
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json$"):
        open_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"only 'pytorch_model\.bin': convert it"):
        open_model(tmp_path)


def test_a_weights_file_alone_is_not_a_model(tmp_path: Path) -> None:
    write_hf_model(tmp_path, tiny_config("llama"))
    with pytest.raises(ModelError, match="give the model's directory"):
        open_model(tmp_path / "model.safetensors")


def test_a_path_that_does_not_exist_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file or directory"):
        open_model(tmp_path / "gone")


def test_a_directory_in_the_hubs_cache_is_called_by_its_repository(tmp_path: Path) -> None:
    folder = (
        tmp_path / "models--Qwen--Qwen2.5-0.5B" / "snapshots" / "c291d6fce4804a1d39305f388dd32897d1f7acc4"
    )
    write_hf_model(folder, tiny_config("qwen2"))
    with open_model(folder) as source:
        assert source.name == "Qwen/Qwen2.5-0.5B"
    with open_model(folder, "mine") as source:
        assert source.name == "mine"

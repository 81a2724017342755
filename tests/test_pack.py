"""Packing for the device keeps every value: checked against the ``gguf`` package's own decoder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import (
    K_SIZES,
    decoded,
    encode,
    random_tensors,
    tiny_config,
    write_gguf_model,
    write_hf_model,
    write_qwen2_5_0_5b,
)

from xinfer_vk.errors import ModelError
from xinfer_vk.errors import OutOfMemoryError as DeviceMemoryError
from xinfer_vk.kernels.layout import matrix_words, row_words
from xinfer_vk.kernels.unpack import unpack
from xinfer_vk.models.config import ModelConfig
from xinfer_vk.plan import Buffer, BufferKind
from xinfer_vk.reference import NUMPY_PROFILE, NumpyRuntime
from xinfer_vk.weights import device
from xinfer_vk.weights.device import Matrix, WeightPlanner
from xinfer_vk.weights.formats import FORMATS, as_f32, pack_x8
from xinfer_vk.weights.mapped import MappedFile
from xinfer_vk.weights.source import ModelSource, open_model


def _cols(fmt: str) -> list[int]:
    return {1: [1, 2, 3, 31, 64, 65], 32: [32, 64, 96, 288], 256: [256, 512, 768]}[FORMATS[fmt].block]


def _sizes(fmt: str) -> dict[str, int]:
    """Of a tiny model whose matrices can be in that format."""
    return K_SIZES if FORMATS[fmt].block == 256 else {}


def _weights(rows: int, cols: int) -> np.ndarray:
    return np.random.default_rng(rows * 1000 + cols).standard_normal((rows, cols), np.float32)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 31, 64])
@pytest.mark.parametrize(("fmt", "cols"), [(fmt, cols) for fmt in FORMATS for cols in _cols(fmt)])
def test_packed_weights_decode_to_the_values_of_the_file(fmt: str, rows: int, cols: int) -> None:
    weights = _weights(rows, cols)
    words = pack_x8(fmt, encode(weights, fmt).reshape(rows, -1), cols)
    assert words.shape == (-(-rows // 8), row_words(fmt, cols), 8)
    assert np.array_equal(unpack(fmt, words.reshape(-1), rows, cols), decoded(weights, fmt))


@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_that_pad_a_group_are_zero(fmt: str) -> None:
    cols = max(32, FORMATS[fmt].block)
    words = pack_x8(fmt, encode(_weights(3, cols), fmt).reshape(3, -1), cols)
    assert words[0, :, :3].any()
    assert not words[0, :, 3:].any()


@pytest.mark.parametrize("fmt", FORMATS)
def test_packing_does_not_need_aligned_data(fmt: str) -> None:
    cols = max(64, FORMATS[fmt].block)
    rows = encode(_weights(16, cols), fmt).reshape(16, -1)
    shifted = np.zeros(rows.size + 1, np.uint8)[1:]
    shifted[:] = rows.reshape(-1)
    assert np.array_equal(pack_x8(fmt, shifted.reshape(16, -1), cols), pack_x8(fmt, rows, cols))


def _extreme_blocks(fmt: str, rng: np.random.Generator) -> np.ndarray:
    """Blocks [n, bytes] of random bits, of zeros, of ones, and with every kind of f16 where the scales
    may be: the largest, subnormal, negative zero, infinite, NaN."""
    size = FORMATS[fmt].block_bytes
    random = rng.integers(0, 256, (96, size), np.uint8)
    for i, half in enumerate((0x7BFF, 0xFBFF, 0x0001, 0x8000, 0x7C00, 0xFC00, 0x7E01, 0x0400)):
        for at in (0, 2, size - 4, size - 2):
            random[i * 12 + at % 7, at : at + 2] = (half & 255, half >> 8)
    return np.concatenate((random, np.zeros((4, size), np.uint8), np.full((4, size), 255, np.uint8)))


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
@pytest.mark.parametrize("fmt", [f.name for f in FORMATS.values() if f.block > 1])
def test_any_blocks_decode_as_the_gguf_package_decodes_them(fmt: str) -> None:
    """Infinite and NaN scales give what they give there; all else is equal, which is less than the
    2^-20 of a block's largest value that is promised."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    blocks = _extreme_blocks(fmt, np.random.default_rng(len(fmt)))
    for per_row in (1, 2, 13):
        rows = blocks.reshape(-1, per_row * FORMATS[fmt].block_bytes)
        cols = per_row * FORMATS[fmt].block
        got = unpack(fmt, pack_x8(fmt, rows, cols).reshape(-1), len(rows), cols)
        want = dequantize(rows, GGMLQuantizationType[fmt.upper()])
        np.testing.assert_array_equal(got, want)


def test_device_words_are_at_most_2_percent_more_than_the_blocks_of_the_file() -> None:
    for f in FORMATS.values():
        for cols in (1024, 4096, 4864):
            assert row_words(f.name, cols) * 4 <= 1.02 * f.row_bytes(cols), (f.name, cols)


def test_bits_that_are_not_numbers_survive_packing() -> None:
    """NaN payloads, infinities and subnormals are copied, never converted."""
    bits = np.array([[0x7C01, 0xFE55, 0x7C00, 0x0001] * 8] * 8, np.uint16)
    for fmt in ("f16", "bf16"):
        words = pack_x8(fmt, bits.view(np.uint8), 32)
        assert np.array_equal(words[0].T.copy().view(np.uint16), bits)


def test_floats_become_f32_exactly() -> None:
    values = _weights(1, 257)[0]
    for fmt in ("f32", "f16", "bf16"):
        assert np.array_equal(as_f32(fmt, encode(values, fmt).reshape(-1)), decoded(values, fmt))


# -- the planner ---------------------------------------------------------------------------------


def declare(planner: WeightPlanner, c: ModelConfig) -> dict[str, Any]:
    """Every tensor of a decoder, as the family files declare them."""
    handles: dict[str, Any] = {}
    handles["embed"] = planner.stack([("model.embed_tokens", c.vocab_size)], c.hidden_size)
    for i in range(c.layers):
        name = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            handles[f"{i}.{norm}"] = planner.vector(f"{name}.{norm}.weight", c.hidden_size)
        qkv = [(f"{name}.self_attn.{x}_proj", c.q_dim if x == "q" else c.kv_dim) for x in "qkv"]
        gate_up = [(f"{name}.mlp.{x}_proj", c.intermediate_size) for x in ("gate", "up")]
        handles[f"{i}.qkv"] = planner.stack(qkv, c.hidden_size, bias=c.attention_bias)
        handles[f"{i}.o"] = planner.stack(
            [(f"{name}.self_attn.o_proj", c.hidden_size)], c.q_dim, bias=c.attention_output_bias
        )
        handles[f"{i}.gate_up"] = planner.stack(gate_up, c.hidden_size, bias=c.mlp_bias, interleave=True)
        handles[f"{i}.down"] = planner.stack(
            [(f"{name}.mlp.down_proj", c.hidden_size)], c.intermediate_size, bias=c.mlp_bias
        )
    handles["norm"] = planner.vector("model.norm.weight", c.hidden_size)
    if not c.tie_word_embeddings:
        handles["head"] = planner.stack([("lm_head", c.vocab_size)], c.hidden_size)
    return handles


def load(
    source: ModelSource, range_bytes: int = 1 << 30
) -> tuple[NumpyRuntime, dict[str, Any], WeightPlanner]:
    runtime = NumpyRuntime(replace(NUMPY_PROFILE, max_storage_range_bytes=range_bytes))
    planner = WeightPlanner(source, runtime.profile)
    handles = declare(planner, source.config)
    planner.upload(runtime)
    return runtime, handles, planner


def matrix_values(runtime: NumpyRuntime, matrix: Matrix) -> np.ndarray:
    """A matrix read back from its arenas: float32 [rows, cols]."""
    out = []
    for part in matrix.parts:
        assert part.first_row % 8 == 0
        assert part.first_row == sum(len(rows) for rows in out)
        words = runtime.read(part.buffer, part.offset, matrix_words(matrix.fmt, part.rows, matrix.cols))
        out.append(unpack(matrix.fmt, words, part.rows, matrix.cols))
    return np.concatenate(out)


def vector_values(runtime: NumpyRuntime, ref: Any, n: int) -> np.ndarray:
    return runtime.read(ref.buffer, ref.offset, n).view(np.float32)


def interleave(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.stack([a, b], axis=1).reshape(-1, *a.shape[1:])


def assert_holds(runtime: NumpyRuntime, handles: dict[str, Any], want: dict[str, np.ndarray]) -> None:
    """Every handle, read back from the device, has the values that were written to the file."""

    def check(handle: Any, names: list[str], interleaved: bool = False) -> None:
        joined = interleave if interleaved else lambda *parts: np.concatenate(parts)
        if interleaved and len(handle) == 2:
            joined = lambda *parts: np.concatenate(parts)  # noqa: E731
        got = np.concatenate([matrix_values(runtime, m) for m in handle])
        assert np.array_equal(got, joined(*(want[f"{name}.weight"] for name in names))), names
        if f"{names[0]}.bias" in want:
            bias = np.concatenate([vector_values(runtime, m.bias, m.rows) for m in handle])
            assert np.array_equal(bias, joined(*(want[f"{name}.bias"] for name in names))), names
        else:
            assert all(m.bias is None for m in handle)

    check(handles["embed"], ["model.embed_tokens"])
    for i in range(2):
        layer = f"model.layers.{i}"
        check(handles[f"{i}.qkv"], [f"{layer}.self_attn.{x}_proj" for x in "qkv"])
        check(handles[f"{i}.o"], [f"{layer}.self_attn.o_proj"])
        check(handles[f"{i}.gate_up"], [f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"], interleaved=True)
        check(handles[f"{i}.down"], [f"{layer}.mlp.down_proj"])
        for norm in ("input_layernorm", "post_attention_layernorm"):
            values = want[f"{layer}.{norm}.weight"]
            assert np.array_equal(vector_values(runtime, handles[f"{i}.{norm}"], values.size), values)
    norm = want["model.norm.weight"]
    assert np.array_equal(vector_values(runtime, handles["norm"], norm.size), norm)
    if "head" in handles:
        check(handles["head"], ["lm_head"])


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
@pytest.mark.parametrize("fmt", ["f32", "f16", "bf16"])
def test_safetensors_weights_reach_the_device(tmp_path: Path, architecture: str, fmt: str) -> None:
    want = write_hf_model(tmp_path, tiny_config(architecture), fmt=fmt)
    with open_model(tmp_path) as source:
        runtime, handles, _ = load(source)
        assert_holds(runtime, handles, want)


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_gguf_weights_reach_the_device(tmp_path: Path, architecture: str, fmt: str) -> None:
    """Llama's queries and keys come back in the order Hugging Face has, out of the converter's."""
    want = write_gguf_model(tmp_path / "m.gguf", tiny_config(architecture, **_sizes(fmt)), fmt=fmt)
    with open_model(tmp_path / "m.gguf") as source:
        runtime, handles, _ = load(source)
        assert_holds(runtime, handles, want)


def test_all_biases_reach_the_device(tmp_path: Path) -> None:
    config = tiny_config("llama", attention_bias=True, mlp_bias=True)
    want = write_hf_model(tmp_path / "hf", config)
    write_gguf_model(tmp_path / "m.gguf", config)
    for path in (tmp_path / "hf", tmp_path / "m.gguf"):
        with open_model(path) as source:
            runtime, handles, _ = load(source)
            assert_holds(runtime, handles, want)


def test_weights_split_over_small_buffers_stay_whole(tmp_path: Path) -> None:
    """With buffers of 8 KiB every matrix is cut by rows, and no buffer is larger."""
    want = write_hf_model(tmp_path, tiny_config("llama"))
    with open_model(tmp_path) as source:
        runtime, handles, _ = load(source, range_bytes=8 << 10)
        assert_holds(runtime, handles, want)
        assert len(handles["embed"][0].parts) > 1
        buffers = {part.buffer for m in handles["embed"] for part in m.parts}
        assert all(b.words * 4 <= 8 << 10 for b in buffers)


def test_parts_of_a_matrix_are_aligned_and_nearly_equal(tmp_path: Path) -> None:
    """No part is a sliver: a last dispatch of a few rows costs as much as a full one."""
    write_hf_model(tmp_path, tiny_config("llama", hidden_size=72, intermediate_size=13))
    with open_model(tmp_path) as source:
        _, handles, _ = load(source, range_bytes=27 << 10)  # 96 rows of the embedding's 320
        assert [part.rows for part in handles["embed"][0].parts] == [80, 80, 80, 80]
        _, handles, _ = load(source)
        matrices = [m for handle in handles.values() if isinstance(handle, tuple) for m in handle]
        assert all(part.offset % 64 == 0 for m in matrices for part in m.parts)


def test_shapes_that_are_multiples_of_nothing(tmp_path: Path) -> None:
    """13 rows a head and an odd MLP: groups of eight cross from one stacked tensor into the next."""
    sizes = {"hidden_size": 21, "intermediate_size": 13, "head_dim": 6, "vocab_size": 37}
    config = tiny_config("llama", num_attention_heads=3, num_key_value_heads=1, **sizes)
    for fmt in ("f32", "bf16"):
        want = write_hf_model(tmp_path / fmt, config, fmt=fmt)
        with open_model(tmp_path / fmt) as source:
            runtime, handles, _ = load(source)
            got = np.concatenate([matrix_values(runtime, m) for m in handles["1.qkv"]])
            names = [f"model.layers.1.self_attn.{x}_proj.weight" for x in "qkv"]
            assert np.array_equal(got, np.concatenate([want[n] for n in names]))
            pair = interleave(*(want[f"model.layers.0.mlp.{x}_proj.weight"] for x in ("gate", "up")))
            assert np.array_equal(matrix_values(runtime, handles["0.gate_up"][0]), pair)


def test_tensors_of_unlike_formats_are_not_stacked(tmp_path: Path) -> None:
    def fmt(name: str) -> str:
        return "q8_0" if "v_proj" in name or "up_proj" in name else "q4_0"

    want = write_gguf_model(tmp_path / "m.gguf", tiny_config("llama"), fmt=fmt)
    with open_model(tmp_path / "m.gguf") as source:
        runtime, handles, _ = load(source)
        assert [(m.fmt, m.rows) for m in handles["0.qkv"]] == [("q4_0", 96), ("q8_0", 32)]
        assert [(m.fmt, m.interleaved) for m in handles["0.gate_up"]] == [("q4_0", False), ("q8_0", False)]
        assert_holds(runtime, handles, want)


def test_device_bytes_stay_near_the_file(tmp_path: Path) -> None:
    config = tiny_config("llama", **K_SIZES, vocab_size=1024)
    for fmt in FORMATS:
        write_gguf_model(tmp_path / f"{fmt}.gguf", config, fmt=fmt)
        with open_model(tmp_path / f"{fmt}.gguf") as source:
            _, _, planner = load(source)
            assert planner.total_bytes <= 1.02 * source.file_bytes


def test_a_missing_an_extra_and_a_misshapen_tensor_are_named(tmp_path: Path) -> None:
    config = tiny_config("qwen2")
    tensors = random_tensors(config)
    k_bias = "model.layers.1.self_attn.k_proj.bias"
    cases = {
        "missing": ({n: v for n, v in tensors.items() if n != k_bias}, f"tensor '{k_bias}' is missing"),
        "extra": (
            {**tensors, "model.layers.2.mlp.x": np.ones(3)},
            "tensor 'model.layers.2.mlp.x' has no place",
        ),
        "shape": ({**tensors, k_bias: np.ones(33)}, rf"'{k_bias}' has shape \[33\], the config says \[32\]"),
    }
    for name, (changed, message) in cases.items():
        write_hf_model(tmp_path / name, config, changed)
        with open_model(tmp_path / name) as source, pytest.raises(ModelError, match=message):
            load(source)


def test_a_stored_tied_head_must_equal_the_embedding(tmp_path: Path) -> None:
    config = tiny_config("qwen2")
    tensors = random_tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    write_hf_model(tmp_path / "same", config, tensors)
    with open_model(tmp_path / "same") as source:
        load(source)
    write_hf_model(tmp_path / "other", config, {**tensors, "lm_head.weight": tensors["lm_head.weight"] + 1})
    with (
        open_model(tmp_path / "other") as source,
        pytest.raises(ModelError, match=r"lm_head\.weight differs"),
    ):
        load(source)


def test_buffers_that_rebuild_the_rotary_table_are_ignored(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config("llama"))
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    write_hf_model(tmp_path, tiny_config("llama"), tensors)
    with open_model(tmp_path) as source:
        load(source)


def test_a_row_longer_than_the_devices_buffers_is_refused(tmp_path: Path) -> None:
    write_hf_model(tmp_path, tiny_config("llama"))
    with (
        open_model(tmp_path) as source,
        pytest.raises(ModelError, match="a buffer of this device holds 1024"),
    ):
        load(source, range_bytes=1024)


def test_a_failed_upload_frees_what_it_allocated(tmp_path: Path) -> None:
    class Small(NumpyRuntime):
        live = 0

        def allocate(self, name: str, words: int, kind: BufferKind) -> Buffer:
            if self.live == 2:
                raise DeviceMemoryError("full")
            self.live += 1
            return super().allocate(name, words, kind)

        def free(self, buffer: Buffer) -> None:
            self.live -= 1
            super().free(buffer)

    write_hf_model(tmp_path, tiny_config("llama"))
    runtime = Small(replace(NUMPY_PROFILE, max_storage_range_bytes=64 << 10))
    with open_model(tmp_path) as source:
        planner = WeightPlanner(source, runtime.profile)
        handles = declare(planner, source.config)
        with pytest.raises(DeviceMemoryError):
            planner.upload(runtime)
        assert runtime.live == 0
        with pytest.raises(RuntimeError, match="not on the device"):
            handles["norm"].buffer


def test_a_model_larger_than_the_devices_memory_allocates_nothing(tmp_path: Path) -> None:
    class Full(NumpyRuntime):
        def require_free(self, needed_bytes: int, what: str, kind: BufferKind = BufferKind.WEIGHTS) -> None:
            raise DeviceMemoryError(f"{what} needs {needed_bytes}")

    write_hf_model(tmp_path / "tiny", tiny_config("llama"))
    runtime = Full()
    with open_model(tmp_path / "tiny") as source:
        planner = WeightPlanner(source, runtime.profile)
        declare(planner, source.config)
        with pytest.raises(DeviceMemoryError, match=f"loading tiny needs {planner.total_bytes}"):
            planner.upload(runtime)
        assert runtime.allocated_bytes == 0


def test_progress_rises_to_the_whole(tmp_path: Path) -> None:
    write_hf_model(tmp_path, tiny_config("llama"))
    with open_model(tmp_path) as source:
        runtime = NumpyRuntime()
        planner = WeightPlanner(source, runtime.profile)
        declare(planner, source.config)
        seen: list[tuple[int, int]] = []
        planner.upload(runtime, lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (planner.total_bytes, planner.total_bytes)
    assert {total for _, total in seen} == {planner.total_bytes}


def test_pages_of_the_file_are_given_back_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[tuple[int, int]] = []
    monkeypatch.setattr(device, "PIECE_BYTES", 8 << 10)
    monkeypatch.setattr(MappedFile, "release", lambda self, start, stop: given_back.append((start, stop)))
    write_hf_model(tmp_path, tiny_config("llama"))
    with open_model(tmp_path) as source:
        head = source.tensors["lm_head.weight"]
        start, stop = head.start, head.start + head.data.size
        load(source)
    pieces = [(a, b) for a, b in given_back if start <= a and b <= stop]
    assert pieces[:-1] == [(a, a + (8 << 10)) for a in range(start, stop, 8 << 10)]
    assert pieces[-1] == (start, stop)  # and the pages that two pieces shared


def test_the_disk_reads_the_next_matrix_while_one_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int]] = []
    for what in ("prefetch", "release"):
        monkeypatch.setattr(MappedFile, what, lambda self, start, stop, what=what: told.append((what, start)))
    write_hf_model(tmp_path, tiny_config("llama"))
    with open_model(tmp_path) as source:
        starts = {t.start: t.name for t in source.tensors.values() if len(t.shape) == 2}
        load(source)
    events = [(what, starts[start]) for what, start in told if start in starts]
    assert {name for what, name in events if what == "prefetch"} == set(starts.values())
    names = list(dict.fromkeys(name for what, name in events if what == "release"))
    last = {name: max(i for i, e in enumerate(events) if e == ("release", name)) for name in names}
    asked = {name: events.index(("prefetch", name)) for name in names}
    assert all(asked[b] < last[a] for a, b in pairwise(names))


PEAK_OF_A_LOAD = """
import sys
from pathlib import Path
from test_pack import load
from xinfer_vk.weights.source import open_model

with open_model(Path(sys.argv[1])) as source:
    runtime, handles, planner = load(source, range_bytes=128 << 20)
    peak_kb = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
    print(peak_kb * 1024, source.file_bytes, planner.total_bytes, len(handles["embed"][0].parts))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for the peak memory")
def test_a_model_of_qwen2_5_0_5bs_shape_loads_within_its_own_size(tmp_path: Path) -> None:
    """988 MB of bf16: one copy on the (NumPy) device, and little beside it. Its embedding of 272 MB is
    three buffers where a buffer holds 128 MiB."""
    folder = write_qwen2_5_0_5b(tmp_path / "qwen")
    try:
        here = Path(__file__).resolve().parent
        path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-c", PEAK_OF_A_LOAD, str(folder)],
            capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False,
        )  # fmt: skip
    finally:
        shutil.rmtree(folder)
    assert done.returncode == 0, done.stderr
    peak, file_bytes, device_bytes, parts = map(int, done.stdout.split())
    assert file_bytes > 988e6
    assert device_bytes <= 1.02 * file_bytes
    assert peak <= 1.15 * file_bytes  # 1.3 is what is promised of a whole run
    assert parts == 3


def test_nothing_is_left_of_a_closed_model(tmp_path: Path) -> None:
    """Views taken before stay valid; the model itself holds no tensors any more."""
    want = write_hf_model(tmp_path, tiny_config("llama"))
    source = open_model(tmp_path)
    norm = source.tensors["model.norm.weight"]
    source.close()
    assert not source.tensors
    assert np.array_equal(as_f32("f32", norm.data), want["model.norm.weight"])

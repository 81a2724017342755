"""``xinfer-vk quantize``: the file is what loading with --quantize computes with, and others read it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_helpers import assert_one_error, xinfer
from gguf_families import write_gguf_of
from model_files import K_SIZES, permute, random_tensors, tiny_config, write_gguf_model, write_hf_model
from quantized_files import Recipe, write_quantized_model
from test_logits import TOLERANCE, Loaded, worst
from text_helpers import FIXTURES, PRE
from text_helpers import metadata as converter_metadata

from xinfer_vk import LLM
from xinfer_vk.engine.quantize import FILE_TYPES, quantize_model
from xinfer_vk.errors import ModelError, UsageError
from xinfer_vk.reference import NumpyRuntime
from xinfer_vk.text.eos import ends_by_name
from xinfer_vk.text.gguf_export import _cut, tokenizer_metadata
from xinfer_vk.text.pretokenizers import BY_NAME, PreTokenization
from xinfer_vk.weights.formats import as_f32
from xinfer_vk.weights.gguf_export import exported_config, exported_tensors
from xinfer_vk.weights.gguf_file import read_gguf
from xinfer_vk.weights.gguf_writer import encoded, write_gguf
from xinfer_vk.weights.quantize.choice import TYPES
from xinfer_vk.weights.quantize.rows import quantize_rows
from xinfer_vk.weights.source import open_model

IDS = [int(i) for i in np.random.default_rng(7).integers(3, 300, 50)]
MODELS = FIXTURES.parent / "models"
TOKENIZERS = {"llama": "llama3", "qwen2": "qwen2", "qwen3": "qwen2"}
TEXT = "Hello world, it's 12345 o'clock!\n\n  naïve 你好 🚀<|im_end|>"


def write_model(path: Path, architecture: str, *, fmt: str = "bf16", **changes: Any) -> Path:
    """A tiny model in Hugging Face layout with a tokenizer."""
    changes = {**K_SIZES, "vocab_size": 720, **changes}
    config = tiny_config("llama" if architecture == "llama" else "qwen2", **changes)
    if architecture == "qwen3":
        config.update(architectures=["Qwen3ForCausalLM"], model_type="qwen3")
    tensors = random_tensors(config)
    if architecture == "qwen3":
        for layer in range(config["num_hidden_layers"]):
            for name in ("q_norm", "k_norm"):
                tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = tensors["model.norm.weight"][:64]
    write_hf_model(path, config, tensors, fmt=fmt, generation_config={"eos_token_id": [2, 5]})
    for file in (FIXTURES / TOKENIZERS[architecture]).iterdir():
        shutil.copy(file, path)
    return path


def peer(path: Path) -> Any:
    from gguf import GGUFReader

    return GGUFReader(path)


@pytest.mark.parametrize(
    ("kind", "architecture"), [*((kind, "llama") for kind in TYPES), ("q4_k", "qwen2"), ("q4_k", "qwen3")]
)
def test_the_file_computes_what_loading_with_quantize_does(
    kind: str, architecture: str, tmp_path: Path
) -> None:
    """Every logit is the same to the last bit: the same blocks, in the same order, whatever the file's
    order of rows is. So are the tokens, the ends and the chat template."""
    model = write_model(tmp_path / "m", architecture)
    quantize_model(model, tmp_path / "m.gguf", kind)
    with (
        LLM(model, device="numpy", kv_dtype="f32", quantize=kind) as one,
        LLM(tmp_path / "m.gguf", device="numpy", kv_dtype="f32") as other,
    ):
        np.testing.assert_array_equal(one.logits(IDS), other.logits(IDS))
        named = ends_by_name(
            [other.tokenizer._backend.id_to_token(i) for i in range(one.tokenizer.vocab_size)]
        )
        assert other.eos_ids == one.eos_ids | named, "a GGUF file's ends are those by name, too"
        assert one.encode(TEXT) == other.encode(TEXT)
        assert one.encode(TEXT, raw=True) == other.encode(TEXT, raw=True)
        assert one.chat_template.text == other.chat_template.text
        assert one.config.rope_theta == other.config.rope_theta


@pytest.mark.parametrize("kind", FILE_TYPES)
def test_the_gguf_package_reads_the_same_weights(kind: str, tmp_path: Path) -> None:
    from gguf import GGMLQuantizationType, LlamaFileType
    from gguf.quants import dequantize

    model = write_model(tmp_path / "m", "qwen2", fmt="f32")
    written = quantize_model(model, tmp_path / "m.gguf", kind)
    reader = peer(tmp_path / "m.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    ours = read_gguf(tmp_path / "m.gguf").tensors
    assert list(tensors) == list(ours)
    assert written.bytes == (tmp_path / "m.gguf").stat().st_size
    weights = random_tensors(json.loads((model / "config.json").read_text()))
    for name, hf, fmt in (
        ("blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight", kind),
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight", kind),
        ("blk.0.attn_q.bias", "model.layers.0.self_attn.q_proj.bias", "f32"),
        ("output_norm.weight", "model.norm.weight", "f32"),
        (
            "token_embd.weight",
            "model.embed_tokens.weight",
            "q6_k" if kind in ("q4_0", "q4_1", "q4_k") else kind,
        ),
    ):
        assert tensors[name].tensor_type == GGMLQuantizationType[fmt.upper()]
        values = np.atleast_2d(weights[hf])
        want = dequantize(
            quantize_rows(fmt, values, "w").reshape(len(values), -1), GGMLQuantizationType[fmt.upper()]
        )
        got = dequantize(tensors[name].data, tensors[name].tensor_type)
        np.testing.assert_array_equal(got.reshape(want.shape), want)
    assert "output.weight" not in tensors  # tied
    fields = {key: field.contents() for key, field in reader.fields.items()}
    assert fields["general.architecture"] == "qwen2" and fields["general.name"] == "m"
    assert LlamaFileType(fields["general.file_type"]).name.startswith(f"MOSTLY_{kind.upper()}")
    assert fields["qwen2.attention.head_count_kv"] == 2
    assert len(fields["tokenizer.ggml.tokens"]) == 720


def test_llama_rows_are_permuted_as_llama_cpps_converter_does(tmp_path: Path) -> None:
    """The test's own converter writes the same tensors; biases are permuted with their rows."""
    changes = {"attention_bias": True, "vocab_size": 720, **K_SIZES}
    model = write_model(tmp_path / "m", "llama", fmt="f32", **changes)
    write_gguf_model(tmp_path / "theirs.gguf", tiny_config("llama", **changes), fmt="f16")
    quantize_model(model, tmp_path / "ours.gguf", "f16")
    ours, theirs = (read_gguf(tmp_path / name).tensors for name in ("ours.gguf", "theirs.gguf"))
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert np.array_equal(ours[name].data, tensor.data), name


def _written(folder: Path, path: Path) -> None:
    """A fixture model, which has no tokenizer, as a GGUF file of the same number format."""
    with open_model(folder) as source:
        tensors = exported_tensors(source)
        keys = exported_config(source.config, [tensor.name for tensor in tensors], str(folder))
        values = {key: encoded(value) for key, value in keys.items()}
        write_gguf(path, values, tensors, lambda done, total: None)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-yarn", "smollm3", "granite", "olmo2"])
def test_families_are_written_as_llama_cpps_converter_does(name: str, tmp_path: Path) -> None:
    """With the tensors that the tests' own converter writes, and the logits of transformers."""
    folder = MODELS / "families" / name
    _written(folder, tmp_path / "ours.gguf")
    write_gguf_of(folder, tmp_path / "theirs.gguf")
    ours, theirs = (read_gguf(tmp_path / file) for file in ("ours.gguf", "theirs.gguf"))
    assert set(ours.tensors) == set(theirs.tensors)
    for tensor_name, tensor in theirs.tensors.items():
        mine = ours.tensors[tensor_name]
        assert np.array_equal(as_f32(mine.fmt, mine.data), as_f32(tensor.fmt, tensor.data)), tensor_name
    reference = np.load(folder / "reference.npz")
    got = Loaded(NumpyRuntime(), tmp_path / "ours.gguf").logits(reference["token_ids"], None)
    assert worst(got, reference["logits"]) <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("qwen2-window-from-layer-1", "GGUF files of qwen2 models cannot say that layer_windows is"),
        ("mistral", "GGUF files of mistral models cannot say that layer_windows is"),
        ("llama-dynamic", "GGUF files of llama models cannot say that rope_scaling is"),
        ("gemma3", "is a gemma3 model, those that can be written to GGUF are llama, mistral"),
    ],
)
def test_what_gguf_cannot_say_is_refused(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        _written(MODELS / "families" / name, tmp_path / "m.gguf")


def test_llama3_rope_scaling_becomes_a_tensor(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = write_model(tmp_path / "m", "llama", rope_scaling=scaling)
    quantize_model(model, tmp_path / "m.gguf", "q8_0")
    with (
        LLM(model, device="numpy", kv_dtype="f32", quantize="q8_0") as one,
        LLM(tmp_path / "m.gguf", device="numpy", kv_dtype="f32") as other,
    ):
        np.testing.assert_allclose(one.logits(IDS), other.logits(IDS), atol=1e-4)  # factors are f32 there
    with pytest.raises(ModelError, match="GGUF files of qwen2 models cannot say that rope_scaling is"):
        quantize_model(
            write_model(tmp_path / "q", "qwen2", rope_scaling=scaling), tmp_path / "q.gguf", "q8_0"
        )


def test_a_gguf_file_keeps_all_it_says(tmp_path: Path) -> None:
    """Metadata byte by byte, floats on their way to low bits, vectors as they are."""

    def extra(writer: Any) -> None:
        writer.add_array("custom.numbers", [1.5, -2.5])
        writer.add_uint64("custom.large", 1 << 40)
        writer.add_string("tokenizer.ggml.model", "gpt2")

    config = tiny_config("llama", **K_SIZES)
    write_gguf_model(
        tmp_path / "in.gguf", config, fmt="f16", extra=extra, tokens=["a"] * 320, tensors_per_file=9
    )
    first = next(tmp_path.glob("in-00001*.gguf"))
    quantize_model(first, tmp_path / "out.gguf", "q4_k")
    before, after = read_gguf(first), read_gguf(tmp_path / "out.gguf")
    dropped = {key for key in before.encoded if key.startswith("split.")}
    assert dropped and not dropped & set(after.encoded)
    for key in set(before.encoded) - dropped - {"general.file_type"}:
        assert np.array_equal(before.encoded[key], after.encoded[key]), key
    assert list(before.tensors) == list(after.tensors)
    assert after.tensors["blk.0.attn_q.weight"].fmt == "q4_k"
    assert after.tensors["output.weight"].fmt == "q6_k"
    assert np.array_equal(before.tensors["output_norm.weight"].data, after.tensors["output_norm.weight"].data)


def test_experts_are_quantized_and_their_router_is_not(tmp_path: Path) -> None:
    write_gguf_of(MODELS / "families" / "mixtral", tmp_path / "in.gguf")
    quantize_model(tmp_path / "in.gguf", tmp_path / "out.gguf", "q8_0")
    before, after = (read_gguf(tmp_path / f"{name}.gguf").tensors for name in ("in", "out"))
    experts, router = "blk.1.ffn_up_exps.weight", "blk.1.ffn_gate_inp.weight"
    assert len(before[experts].shape) == 3
    values = before[experts].data.view(np.float32).reshape(-1, before[experts].shape[-1])
    assert np.array_equal(after[experts].rows(), quantize_rows("q8_0", values, "w"))
    assert after[router].fmt == "f32" and np.array_equal(after[router].data, before[router].data)


def test_a_low_bit_file_needs_a_word_to_be_converted(tmp_path: Path) -> None:
    config = tiny_config("qwen2", **K_SIZES)
    values = write_gguf_model(tmp_path / "in.gguf", config, fmt="q4_1")
    with pytest.raises(UsageError, match=r"in is quantized already \(q4_1\)"):
        quantize_model(tmp_path / "in.gguf", tmp_path / "out.gguf", "q8_0")
    assert not (tmp_path / "out.gguf").exists()
    quantize_model(tmp_path / "in.gguf", tmp_path / "out.gguf", "q8_0", requantize=True)
    tensor = read_gguf(tmp_path / "out.gguf").tensors["blk.0.ffn_up.weight"]
    want = quantize_rows("q8_0", values["model.layers.0.mlp.up_proj.weight"], "w")
    assert np.array_equal(tensor.rows(), want)


def test_gptq_weights_become_those_of_a_gguf_file(tmp_path: Path) -> None:
    """Their columns are in order of activation, and queries' and keys' rows in GGUF's."""
    config = tiny_config("llama", vocab_size=720, intermediate_size=96, num_hidden_layers=1)
    model = tmp_path / "low"
    dense = write_quantized_model(model, config, Recipe(desc_act=True, sym=False))
    for file in (FIXTURES / "llama3").iterdir():
        shutil.copy(file, model)
    with pytest.raises(UsageError, match=r"low has tensors in int4_g32 \(GPTQ or AWQ\), which GGUF"):
        quantize_model(model, tmp_path / "out.gguf", "q8_0")
    quantize_model(model, tmp_path / "out.gguf", "q8_0", requantize=True)
    tensors = read_gguf(tmp_path / "out.gguf").tensors
    for name, hf, heads in (("attn_k", "self_attn.k_proj", 2), ("ffn_down", "mlp.down_proj", 0)):
        values = dense[f"model.layers.0.{hf}.weight"]
        want = quantize_rows("q8_0", permute(values, heads) if heads else values, "w")
        assert np.array_equal(tensors[f"blk.0.{name}.weight"].rows(), want)


# -- the tokenizer --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in PRE if name != "gpt2"])
def test_tokenizer_metadata_is_the_converters(name: str, tmp_path: Path) -> None:
    for file in (FIXTURES / name).iterdir():
        shutil.copy(file, tmp_path)
    want = converter_metadata(name, unused=3)
    rows = len(want["tokenizer.ggml.tokens"])
    write_hf_model(tmp_path, tiny_config("llama", vocab_size=rows))
    with open_model(tmp_path) as source:
        got = tokenizer_metadata(source)
    for key, value in want.items():
        assert got[key] == value, key


def test_no_two_ways_of_cutting_words_are_taken_for_each_other() -> None:
    seen: dict[tuple[str, ...], PreTokenization] = {}
    for rules in BY_NAME.values():
        key = (*_cut(rules.normalizer(), rules.pre_tokenizer()), str(rules.ignore_merges))
        assert seen.setdefault(key, rules) == rules


def test_a_tokenizer_that_gguf_cannot_express_is_refused(tmp_path: Path) -> None:
    for name, words in (("llama2", "BPE with SentencePiece's spaces tokenizer"),):
        model = write_model(tmp_path / name, "llama", vocab_size=1000)
        for file in (FIXTURES / name).iterdir():
            shutil.copy(file, model)
        with pytest.raises(ModelError, match=words):
            quantize_model(model, tmp_path / "out.gguf", "q8_0")
    model = write_model(tmp_path / "cuts", "qwen2")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ]}  # fmt: skip
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match="cuts text into words in a way that has no name"):
        quantize_model(model, tmp_path / "out.gguf", "q8_0")
    assert not (tmp_path / "out.gguf").exists()


# -- the file -------------------------------------------------------------------------------------


def test_values_are_encoded_as_the_gguf_package_reads_them(tmp_path: Path) -> None:
    values = {"a.text": "größe", "a.flag": True, "a.number": 7, "a.real": 0.5, "a.texts": ["x", "", "ü"],
              "a.numbers": [1, -2], "a.reals": [0.25, 2.0]}  # fmt: skip
    keys = {"general.architecture": encoded("llama"), **{k: encoded(v) for k, v in values.items()}}
    write_gguf(tmp_path / "v.gguf", keys, [], lambda done, total: None)
    fields = peer(tmp_path / "v.gguf").fields
    for key, value in values.items():
        assert fields[key].contents() == value, key
    assert {k: v for k, v in read_gguf(tmp_path / "v.gguf").metadata.items() if k in values} == values


def test_nothing_is_left_of_a_run_that_failed(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config("qwen2", vocab_size=720))
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = np.inf
    model = write_model(tmp_path / "m", "qwen2")
    write_hf_model(model, tiny_config("qwen2", vocab_size=720), tensors)
    with pytest.raises(ModelError, match=r"'blk.1.ffn_down.weight' holds weights that are NaN or infinite"):
        quantize_model(model, tmp_path / "out.gguf", "q8_0")
    assert os.listdir(tmp_path) == ["m"]


def test_a_disk_without_room_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "model", "llama")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(9, 9, 1000))
    with pytest.raises(UsageError, match=r"has 1\.0 kB free and the file needs"):
        quantize_model(model, tmp_path / "x.gguf", "q8_0", progress=lambda done, total: pytest.fail("began"))


def test_a_model_is_not_replaced_by_its_own_copy(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", "qwen2")
    out = tmp_path / "out.gguf"
    quantize_model(model, out, "f16")
    before = out.read_bytes()
    (tmp_path / "soft.gguf").symlink_to(out)
    (tmp_path / "hard.gguf").hardlink_to(out)
    (tmp_path / "weights.gguf").hardlink_to(model / "model.safetensors")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "only.gguf").symlink_to(out)
    cases = [
        (out, out), (tmp_path / "soft.gguf", out), (out, tmp_path / "soft.gguf"),
        (tmp_path / "hard.gguf", out), (model, tmp_path / "weights.gguf"), (tmp_path / "folder", out),
    ]  # fmt: skip
    for source, target in cases:
        for overwrite in (True, False):
            if not overwrite and source in (model, tmp_path / "folder"):
                continue  # that it is there is told before
            with pytest.raises(UsageError, match="is the model that is read"):
                quantize_model(source, target, "q8_0", overwrite=overwrite)
    assert out.read_bytes() == before
    quantize_model(out, tmp_path / "other.gguf", "q8_0")


def test_command(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", "qwen2", hidden_size=96, head_dim=24)
    out = tmp_path / "out.gguf"
    result = xinfer("quantize", str(model), str(out), "--type", "q4_k")
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines() == [
        "q8_0 instead of q6_k: 96 columns are not whole blocks of 256 (1 tensor)",
        "q5_0 instead of q4_k: 96 columns are not whole blocks of 256 (12 tensors)",
    ]
    assert "bits per weight; tensors: " in result.stdout and "12 in q5_0" in result.stdout
    before = out.read_bytes()
    assert_one_error(
        xinfer("quantize", str(model), str(out), "--type", "q8_0"), 2, "is there already", "--force"
    )
    assert out.read_bytes() == before
    result = xinfer("quantize", str(model), str(out), "--type", "q8_0", "--force", "--json")
    record = json.loads(result.stdout)
    assert record["bytes"] == out.stat().st_size and record["formats"]["q8_0"] == 15
    assert record["bits_per_weight"] == pytest.approx(8 * record["weight_bytes"] / record["weights"])
    assert_one_error(
        xinfer("quantize", str(model), str(tmp_path / "x.bin"), "--type", "q8_0"), 2, "ends in .gguf"
    )
    part = tmp_path / "m-00001-of-00002.gguf"
    assert_one_error(xinfer("quantize", str(model), str(part), "--type", "q8_0"), 2, "one part of several")
    missing = tmp_path / "no" / "x.gguf"
    assert_one_error(xinfer("quantize", str(model), str(missing), "--type", "q8_0"), 2, "is not there")
    assert sorted(os.listdir(tmp_path)) == ["m", "out.gguf"]

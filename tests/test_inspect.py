"""``inspect`` tells what a model is, and what keeps it from being run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_helpers import assert_one_error, xinfer
from model_files import random_tensors, tiny_config, write_gguf_model, write_hf_model

from xinfer_vk.engine.inspect import FormatCount, inspect_model
from xinfer_vk.models.config_hf import config_from_hf


def test_a_model_that_can_be_run(tiny_model: Path) -> None:
    found = inspect_model(tiny_model)
    config = json.loads((tiny_model / "config.json").read_text())
    assert found.unsupported == ()
    assert (found.name, found.kind, found.path) == ("tiny", "safetensors", tiny_model)
    assert found.config["kv_heads"] == 2 and set(found.config) == set(vars(config_from_hf(config)))
    weights = sum(t.size for t in random_tensors(config).values())
    tensors = len(random_tensors(config))
    assert found.formats == {"f32": FormatCount(tensors, weights, 4 * weights)}
    assert found.weights == weights and found.bits_per_weight == 32
    assert found.tokenizer["kind"] == "byte-level BPE" and found.tokenizer["around_a_text"] == {}
    assert "<|im_end|>" in found.tokenizer["ends"].values()
    assert found.chat_template["present"] and found.chat_template["variables"] == ["tools"]


def test_formats_of_a_gguf_file(tmp_path: Path) -> None:
    config = tiny_config("llama")
    write_gguf_model(tmp_path / "m.gguf", config, fmt=lambda name: "q4_1" if "mlp" in name else "q8_0")
    found = inspect_model(tmp_path / "m.gguf")
    assert found.formats["q4_1"] == FormatCount(6, 6 * 64 * 96, 6 * 64 * 96 * 20 // 32)
    assert found.formats["q8_0"].tensors == 10 and found.formats["f32"].tensors == 5
    assert found.unsupported and "has no tokenizer" in found.unsupported[0]


def test_what_keeps_a_model_from_being_run_is_listed(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config("llama"))
    tensors["model.layers.0.extra.weight"] = tensors["model.norm.weight"]
    write_hf_model(tmp_path / "extra", tiny_config("llama"), tensors)
    found = inspect_model(tmp_path / "extra")
    assert len(found.unsupported) == 2  # no tokenizer, and:
    assert "'model.layers.0.extra.weight' has no place in a llama model" in found.unsupported[1]

    write_hf_model(tmp_path / "mamba", tiny_config("llama", architectures=["Mamba2ForCausalLM"]))
    found = inspect_model(tmp_path / "mamba")
    assert found.config == {"architecture": "Mamba2ForCausalLM"}
    assert len(found.unsupported) == 1 and "architectures" in found.unsupported[0]
    write_hf_model(tmp_path / "seven", tiny_config("llama", architectures=7))
    assert "architectures is 7" in inspect_model(tmp_path / "seven").unsupported[0]

    config = tiny_config("llama")
    write_gguf_model(tmp_path / "m.gguf", config, extra=lambda writer: writer.add_clamp_kqv(0.5))
    found = inspect_model(tmp_path / "m.gguf")
    assert found.config == {"architecture": "llama"} and found.formats["f32"].tensors == 21
    assert "attention.clamp_kqv" in found.unsupported[0]


def test_command(tiny_model: Path, tmp_path: Path) -> None:
    result = xinfer("inspect", str(tiny_model))
    assert result.returncode == 0, result.stderr
    for words in (
        "2 layers, hidden 64, MLP 96",
        "4 heads, 2 KV heads, head dim 16",
        "tie_word_embeddings yes",
        "theta 10000",
        "byte-level BPE, 653 tokens",
        "can be run",
    ):
        assert words in result.stdout
    record = json.loads(xinfer("inspect", str(tiny_model), "--json").stdout)
    assert record["config"]["layers"] == 2 and record["weights"] == record["formats"]["f32"]["weights"]
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\x03\0\0\0")
    result = xinfer("inspect", str(tmp_path / "broken.gguf"))
    assert result.returncode == 1 and "  not supported " in result.stdout and "truncated" in result.stdout
    assert_one_error(xinfer("inspect", str(tmp_path / "nowhere.gguf")), 1, "nowhere.gguf")


@pytest.mark.parametrize("name", ["model.safetensors"])
def test_a_path_that_is_no_model(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    found = inspect_model(tmp_path / name)
    assert found.unsupported and "give the model's directory" in found.unsupported[0]

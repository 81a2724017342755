"""Directories and files as newcomers have them: each loads, or the error names what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from cli_helpers import assert_one_error, xinfer
from model_files import tiny_config, write_gguf_model

from xinfer_vk.engine.inspect import inspect_model
from xinfer_vk.engine.llm import LLM
from xinfer_vk.errors import ModelError, UsageError
from xinfer_vk.fields import parse_json
from xinfer_vk.weights.gguf_file import read_gguf
from xinfer_vk.weights.gguf_writer import write_gguf
from xinfer_vk.weights.source import open_model

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 9\n"


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_model, tmp_path / "model")
    return tmp_path / "model"


def test_one_weight_file_of_any_name_is_the_model(model: Path) -> None:
    (model / "model.safetensors").rename(model / "gptq_model-4bit-32g.safetensors")
    (model / "adapter_model.safetensors").write_bytes(b"")
    with open_model(model) as source:
        assert source.tensors


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], "download the index, too"),
        (
            ["a.safetensors", "b.safetensors"],
            "but 'a.safetensors', 'b.safetensors': name the model",
        ),
        (["adapter_model.safetensors"], "only an adapter: merge it into its base model"),
        (["pytorch_model.bin"], "only 'pytorch_model.bin': convert it with transformers' save_pretrained"),
        ([], "has neither model.safetensors nor model.safetensors.index.json"),
    ],
)
def test_other_weight_files_are_told_with_what_to_do(model: Path, names: list[str], words: str) -> None:
    for name in names:
        shutil.copy(model / "model.safetensors", model / name)
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError) as caught:
        open_model(model)
    assert words in str(caught.value)


def test_an_image_encoder_beside_a_gguf_model_is_not_the_model(tmp_path: Path) -> None:
    write_gguf_model(tmp_path / "tiny-q8_0.gguf", tiny_config("llama"))
    shutil.copy(tmp_path / "tiny-q8_0.gguf", tmp_path / "mmproj-tiny-f16.gguf")
    with open_model(tmp_path) as source:
        assert source.path.name == "tiny-q8_0.gguf"
    (tmp_path / "tiny-q8_0.gguf").unlink()
    with pytest.raises(
        ModelError, match=r"only 'mmproj-tiny-f16\.gguf', an image encoder: add the model's file"
    ):
        open_model(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_git_lfs_pointer_is_told_as_one(model: Path, name: str) -> None:
    (model / name).write_text(POINTER)
    with pytest.raises(ModelError, match=rf"{name}: is a Git LFS pointer, .*`git lfs pull`"):
        LLM(model, device="numpy")
    (model.parent / "x.gguf").write_text(POINTER)
    with pytest.raises(ModelError, match="is a Git LFS pointer"):
        open_model(model.parent / "x.gguf")


def test_a_gguf_file_without_tensors_is_a_vocabulary(tmp_path: Path) -> None:
    write_gguf_model(tmp_path / "full.gguf", tiny_config("llama"))
    keys = {key: value.tobytes() for key, value in read_gguf(tmp_path / "full.gguf").encoded.items()}
    write_gguf(tmp_path / "vocab.gguf", keys, [], lambda done, total: None)
    with open_model(tmp_path / "vocab.gguf") as source, pytest.raises(ModelError, match="has no tensors"):
        from xinfer_vk.loading import main_format

        main_format(source)


def test_named_templates_without_a_usual_one_leave_raw_prompts(model: Path) -> None:
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": name, "template": "x"} for name in ("rag", "tool_use")]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    with LLM(model, device="numpy") as llm:
        assert llm.generate("hello", raw=True, max_new_tokens=1).token_ids
        with pytest.raises(
            ModelError, match="templates 'rag, tool_use', none is named 'default': use raw=True"
        ):
            llm.generate("hello")
    found = inspect_model(model)
    assert not found.unsupported and any("none is named 'default'" in note for note in found.notes)


@pytest.mark.parametrize("value", ["\\ud800", "a\\uDFFFb", "\\ude00\\ud83d"])
def test_half_of_a_character_in_a_file_is_refused(model: Path, value: str) -> None:
    (model / "tokenizer_config.json").write_text(f'{{"bos_token": "{value}"}}')
    with pytest.raises(
        ModelError, match=r"tokenizer_config\.json: not valid Unicode: .* is half of a character"
    ):
        LLM(model, device="numpy")
    assert parse_json(b'{"a": "\\ud83d\\ude00"}', "x") == {"a": "\U0001f600"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"progress": 5}, "progress is 5: it is a function"),
        ({"context": True}, "context is True: it must be at least 1 token"),
        ({"prefill_chunk": True}, "prefill_chunk is True"),
        ({"kv_dtype": []}, r"kv_dtype is \[\]"),
    ],
)
def test_arguments_of_the_wrong_type_are_refused(tiny_model: Path, arguments: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LLM(tiny_model, device="numpy", **arguments)
    with LLM(tiny_model, device="numpy") as llm, pytest.raises(UsageError, match="n is True"):
        llm.batch(["x"], n=True)


def test_a_byte_order_mark_is_not_part_of_a_text(tiny_model: Path, tmp_path: Path) -> None:
    tokens = []
    for mark in (b"", b"\xef\xbb\xbf"):
        (tmp_path / "text").write_bytes(mark + b"The quick brown fox jumps.")
        args = ("-m", str(tiny_model), "--device", "numpy", "-f", str(tmp_path / "text"), "--json")
        tokens.append(json.loads(xinfer("perplexity", *args).stdout)["tokens"])
    assert tokens[0] == tokens[1]
    assert_one_error(
        xinfer("generate", "-p", "x", "-m", str(tiny_model), "--penalty-window", "0"),
        2,
        "--penalty-window is 0",
    )


def test_an_unusual_weight_file_is_computed_as_the_usual_one(model: Path) -> None:
    with LLM(model, device="numpy") as llm:
        want = llm.logits([1, 2, 3])
    (model / "model.safetensors").rename(model / "weights.safetensors")
    with LLM(model, device="numpy") as llm:
        np.testing.assert_array_equal(llm.logits([1, 2, 3]), want)

"""Errors speak Python to Python and options to the command line."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from xinfer_vk import LLM
from xinfer_vk.cli.chat_settings import settings_from_record
from xinfer_vk.cli.generate import command as generate
from xinfer_vk.cli.main import main
from xinfer_vk.engine.config import EngineConfig
from xinfer_vk.errors import UsageError, parameter_words, said, setting, shell_words
from xinfer_vk.sampling.params import SamplingParams, named

TRANSLATORS = ("said", "setting", "named", "_refused", "_two_limits")
SOURCES = Path(__file__).parent.parent / "xinfer_vk"


def test_a_setting_is_named_as_whoever_asks_writes_it() -> None:
    text = (
        f"use {setting('kv_dtype', 'q8_0')}, {setting('context', 64)}, {setting('raw', True)}"
        f" or {setting('on_full')}{said('!', '?')}"
    )
    assert str(UsageError(text)) == 'use kv_dtype="q8_0", context=64, raw=True or on_full!'
    with shell_words():
        assert str(UsageError(text)) == "use --kv-dtype q8_0, --context 64, --raw or --on-full?"


def test_no_module_below_the_command_line_writes_an_option_into_a_message() -> None:
    """But for what only a command line can do, given as a whole command, and what is said() in two ways."""
    option = re.compile(r"""(?<!said\()["'][^"'\n]*(?<![\w-])--[a-z]{3,}[^"'\n]*["']""")
    allowed = ("said(", "xinfer-vk ", "--no-", "--only-binary", "--disable-pip", "pip", '"""')
    found = [
        f"{path.relative_to(SOURCES)}:{number}: {line.strip()}"
        for path in sorted(SOURCES.rglob("*.py"))
        if "cli" not in path.relative_to(SOURCES).parts
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if option.search(line) and not any(word in line for word in allowed)
    ]
    assert found == []


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda llm: llm.logits("text"), r"llm\.encode\(text\)"),
        (lambda llm: llm.generate(""), "give some text$"),
        (lambda llm: llm.generate([5] * 70), "a larger context or a shorter"),
        (lambda llm: llm.generate("x", raw=True, system="y"), "leave out raw,"),
        (lambda llm: llm.perplexity(" "), "give some$"),
    ],
)
def test_a_mistake_in_python_is_answered_in_python(tiny_model: Path, call: Any, words: str) -> None:
    with LLM(tiny_model, device="numpy", context=64) as llm, pytest.raises(UsageError, match=words) as info:
        call(llm)
    assert "--" not in str(info.value)


def test_the_same_mistake_on_the_command_line_names_options(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["-m", str(tiny_model), "--device", "numpy", "--context", "8", "--raw"]
    with pytest.raises(SystemExit):
        main(["generate", *options, "-p", "hello world " * 20])
    assert "a larger --context or a shorter prompt" in capsys.readouterr().err


REFUSED = [  # options of generate, what the command line says of them, what Python says
    (["--top-k", "-3"], "--top-k is -3: it must be 0", {"top_k": -3}, "top_k is -3"),
    (["--temperature", "1e9"], "--temperature is 1e+09", {"temperature": 1e9}, r"temperature is 1e\+09"),
    (
        ["--stop-token-id", "-2"],
        "--stop-token-id names -2",
        {"stop_token_ids": [-2]},
        "stop_token_ids names -2",
    ),
    (
        ["--stop-token-id", "99999"],
        "--stop-token-id names token 99999",
        {"stop_token_ids": [99999]},
        "stop_token_ids",
    ),
    (["--bad-word", " "], "--bad-word has ' '", {"bad_words": [" "]}, "bad_words has ' '"),
    (
        ["--logit-bias", "1=nan"],
        "--logit-bias of token 1 is nan",
        {"logit_bias": {1: float("nan")}},
        "logit_bias of",
    ),
    (
        ["--min-new-tokens", "9", "-n", "3"],
        "--min-new-tokens is 9 and --max-new-tokens 3",
        {"min_new_tokens": 9, "max_new_tokens": 3},
        "min_new_tokens is 9 and max_new_tokens 3",
    ),
    (
        ["--sampler-order", "top_q"],
        "--sampler-order names 'top_q'",
        {"sampler_order": ["top_q"]},
        "sampler_order",
    ),
    (
        ["--logprobs", "21"],
        "--logprobs is 21: it must be between 0 and 20\n",
        {"logprobs": 21},
        "logprobs is 21",
    ),
]


@pytest.mark.parametrize(("options", "shell", "fields", "python"), REFUSED, ids=lambda value: str(value)[:30])
def test_sampling_parameters_are_named_as_options_on_the_command_line(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], options: Any, shell: str, fields: Any, python: str
) -> None:
    model = ["-m", str(tiny_model), "--device", "numpy"]
    with pytest.raises(SystemExit):
        main(["generate", *model, "-p", "hello", *options])
    assert f"error: {shell}" in capsys.readouterr().err
    with pytest.raises(UsageError, match=python) as info:  # noqa: SIM117
        with LLM(tiny_model, device="numpy") as llm:
            llm.generate([5], **fields)
    assert "--" not in str(info.value)


def test_every_sampling_field_has_the_option_that_its_errors_name() -> None:
    options = {option for param in generate.params for option in param.opts}
    with shell_words():
        for field in dataclasses.fields(SamplingParams):
            name = str(UsageError(named(field.name)))
            assert name in options or field.name == "logits_processors", name


def test_prompts_in_a_file_and_settings_of_a_chat_keep_the_names_that_they_use(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "hello", "top_k": -3}\n{"prompt": "hello", "stop_token_ids": [99999]}\n')
    with pytest.raises(SystemExit):
        options = ["-m", str(tiny_model), "--device", "numpy", "--keep-going"]
        main(["generate", *options, "--prompts", str(lines)])
    told = capsys.readouterr().err
    assert "jsonl:1: top_k is -3" in told and "jsonl:2: stop_token_ids names token 99999" in told
    with shell_words(), parameter_words(), pytest.raises(UsageError, match=r"^top_k is"):
        SamplingParams(top_k=-3)
    with shell_words(), pytest.raises(UsageError, match=r"^top_k is"):
        settings_from_record({"top_k": -3})


def texts_of(node: ast.AST) -> Iterator[str]:
    """The string literals of an expression, but for names given to those who translate them."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in TRANSLATORS:
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    for child in ast.iter_child_nodes(node):
        yield from texts_of(child)


def test_no_error_of_the_engine_names_a_python_parameter_that_the_command_line_spells_otherwise() -> None:
    """Parameters with an underscore, in texts of errors below the command line, must be settings."""
    names = {f.name for f in (*dataclasses.fields(SamplingParams), *dataclasses.fields(EngineConfig))}
    bare = re.compile("|".join(rf"(?<![\w.'\"]){name}(?![\w'\"])" for name in names if "_" in name))
    found = []
    for path in sorted(SOURCES.rglob("*.py")):
        if "cli" in path.relative_to(SOURCES).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                found += [(path.name, text) for text in texts_of(node.exc) if bare.search(text)]
    assert found == []

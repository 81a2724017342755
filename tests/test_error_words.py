"""Errors speak Python to Python and options to the command line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from xinfer_vk import LLM
from xinfer_vk.cli.main import main
from xinfer_vk.errors import UsageError, said, setting, shell_words

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

"""The programs of examples/ run, each on a small model."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from chat_model import write_chat_model

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize(
    "name, shows",
    [
        ("generate", ["<LLM tiny", "tok/s"]),
        ("batch", ['{"prompt": 0, "text":', '{"prompt": 2']),
        ("chat", ["once:", "you: And of Italy?", "tokens were in the cache"]),
        ("logits", ["logits: (", "most likely next:", " of '", "without digits:"]),
    ],
)
def test_an_example_runs(
    name: str,
    shows: list[str],
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XINFER_VK_DEVICE", "numpy")
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](str(model))
    printed = capsys.readouterr().out
    assert [text for text in shows if text not in printed] == []


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"generate", "batch", "chat", "logits"}


def test_examples_are_typed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *map(str, sorted(EXAMPLES.glob("*.py")))],
        capture_output=True, text=True, timeout=300, cwd=EXAMPLES.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout

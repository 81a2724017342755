"""Standard output that fails, descriptors that are closed, signals, encodings, and --debug."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_model import write_chat_model
from cli_helpers import assert_one_error, xinfer

from xinfer_vk import LLM
from xinfer_vk.cli import generate
from xinfer_vk.cli.output import printable
from xinfer_vk.cli.progress import ProgressBar
from xinfer_vk.errors import DeviceError, UsageError
from xinfer_vk.folders import cache_folder
from xinfer_vk.sampling.params import SamplingParams
from xinfer_vk.vulkan.pipeline_cache import pipeline_cache_folder
from xinfer_vk.weights.pull import models_dir


@pytest.fixture
def common(tiny_model: Path) -> list[str]:
    return ["generate", "--model", str(tiny_model), "--device", "numpy", "--kv-dtype", "f32", "--ignore-eos",
            "--max-new-tokens", "6"]  # fmt: skip


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a context long enough for a signal to come in the middle."""
    return write_chat_model(
        tmp_path_factory.mktemp("model") / "long", max_position_embeddings=8192, num_hidden_layers=1
    )


def shell(redirection: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The program, with what the shell does to its descriptors."""
    return subprocess.run(
        ["bash", "-c", f'exec "$@" {redirection}', "bash", sys.executable, "-m", "xinfer_vk", *args],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **env},
    )


# -- standard output, standard error, standard input ----------------------------------------------


@pytest.mark.parametrize(
    ("redirection", "why"), [(">/dev/full", "No space left on device"), (">&-", "it is closed")]
)
@pytest.mark.parametrize("more", [[], ["--json"], ["-p", "b"]], ids=["stream", "json", "batch"])
def test_results_that_cannot_be_printed_are_one_line(
    common: list[str], redirection: str, why: str, more: list[str]
) -> None:
    result = shell(redirection, *common, "-p", "a", "-q", *more)
    assert result.returncode == 1
    assert result.stderr == f"error: cannot write to standard output: {why}\n"


@pytest.mark.parametrize("args", [["--version"], ["devices"], ["--help"]])
def test_other_commands_say_so_too(args: list[str]) -> None:
    result = shell(">/dev/full", *args)
    assert (result.returncode, result.stderr) == (
        1,
        "error: cannot write to standard output: No space left on device\n",
    )


def test_results_that_cannot_be_written_are_one_line(common: list[str]) -> None:
    result = xinfer(*common, "-p", "a", "-o", "/dev/full", "-q")
    assert (result.returncode, result.stderr) == (
        1,
        "error: cannot write to /dev/full: No space left on device\n",
    )


@pytest.mark.parametrize("redirection", ["2>&-", "<&-", "2>/dev/full", "<&- 2>&-"])
def test_the_answer_comes_whatever_else_is_closed(common: list[str], redirection: str) -> None:
    result = shell(redirection, *common, "-p", "a", "-v")
    assert result.returncode == 0
    assert result.stdout == xinfer(*common, "-p", "a").stdout


def test_a_closed_standard_input_has_no_prompt(common: list[str]) -> None:
    assert_one_error(shell("<&-", *common), 2, "no prompt")
    assert_one_error(shell("<&-", *common, "--prompts", "-"), 2, "standard input", "closed")


def test_json_is_ascii_where_the_output_is_not_utf8(common: list[str]) -> None:
    result = xinfer(*common, "-p", "naïve", "--json", "-q", PYTHONIOENCODING="latin-1", PYTHONUTF8="0")
    assert result.stdout.isascii()
    assert json.loads(result.stdout)["prompt"] == "naïve"
    assert "naïve" in xinfer(*common, "-p", "naïve", "--json", "-q", PYTHONIOENCODING="utf-8").stdout


def test_a_terminal_is_not_steered() -> None:
    code = "from xinfer_vk.cli.output import say; say('\\x1b[31mred')"
    pid, fd = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", code])
    shown = os.read(fd, 1000).decode()
    os.waitpid(pid, 0)
    os.close(fd)
    assert shown.strip() == "␛[31mred"
    piped = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert piped == "\x1b[31mred\n"
    assert printable("a\tb\n") == "a\tb\n"


def test_a_reader_that_has_seen_enough_is_no_error(long_model: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "xinfer_vk", "generate", "--model", str(long_model), "--device", "numpy",
         "-p", "a", "-n", "4000", "--ignore-eos"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert "rror" not in process.stderr.read()
    process.stderr.close()


@pytest.mark.parametrize("option", ["--prompt", "--system", "--stop", "--bad-word"])
def test_an_argument_that_is_not_utf8_is_one_line(common: list[str], option: str) -> None:
    assert_one_error(xinfer(*common, "-p", "a", option, "\udcff"), 2, "udcff", "no UTF-8")


# -- what there is when something goes wrong ------------------------------------------------------


class Failing:
    """A stream of two pieces, then an error."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.closed = stream, False

    def __iter__(self) -> Iterator[str]:
        yield next(self._stream)
        yield next(self._stream)
        raise DeviceError("the device was lost")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> Failing:
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()
        self.closed = True


def test_json_of_what_there_is_comes_before_the_error(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with LLM(tiny_model, device="numpy", kv_dtype="f32") as llm:
        params = SamplingParams(max_new_tokens=9, ignore_eos=True)
        failing = Failing(llm.stream("a", params))
        monkeypatch.setattr(llm, "stream", lambda *args, **more: failing)
        batch = generate.Batch(
            llm, [generate.PromptLine("prompt 1", "a", None, None, {})], params, raw=False, system=None,
            template_args={}, prompt_logprobs=False, samples=1, keep_going=False, named=False,
        )  # fmt: skip
        show = generate.Shown(as_json=True, quiet=True, verbose=False, speed=False)
        with pytest.raises(DeviceError), ProgressBar(enabled=False) as progress:
            generate.run_one(batch, show, progress)
    record = json.loads(capsys.readouterr().out)
    assert record["finish_reason"] == "error"
    assert 2 <= len(record["token_ids"]) < 9
    assert failing.closed


# -- signals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_that_end_the_program_keep_what_there_is(
    long_model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "out.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-m", "xinfer_vk", "generate", "--model", str(long_model), "--device", "numpy", "-v",
         "-p", "a", "-p", "b", "-n", "4000", "--ignore-eos", "-o", str(out)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    while not process.stderr.readline().startswith("loaded"):
        pass
    time.sleep(1)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["finish_reason"] for r in records] == ["interrupted"] * 2
    assert all(r["token_ids"] for r in records)


@pytest.mark.parametrize("line", ["", "Tell me a story\n"], ids=["waiting", "answering"])
def test_sigterm_ends_a_chat(long_model: Path, line: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "xinfer_vk", "chat", "--model", str(long_model), "--device", "numpy", "-v",
         "-n", "4000", "--ignore-eos"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    while not process.stderr.readline().startswith("loaded"):
        pass
    process.stdin.write(line)
    process.stdin.flush()
    first = process.stdout.read(1) if line else ""
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=60)  # while standard input is still open
    out, err = process.communicate()
    assert process.returncode == 143, err
    assert "Traceback" not in err
    assert bool((first + out).strip()) == bool(line)


def test_ctrl_c_during_the_imports_is_quiet() -> None:
    code = (
        "import sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'click': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from xinfer_vk.cli.main import main\n"
        "main([])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (130, "")


# -- --debug ----------------------------------------------------------------------------------------


def test_debug_is_an_option_and_not_the_value_of_another(common: list[str]) -> None:
    record = json.loads(xinfer(*common, "--json", "-q", "-p", "--debug").stdout)
    assert record["prompt"] == "--debug"
    wrong = ["generate", "-p", "x", "--model", "/no/such/model"]
    for args in (["--debug", *wrong], [*wrong, "--debug"]):
        assert "Traceback" in xinfer(*args).stderr
    assert_one_error(xinfer(*wrong, XINFER_VK_DEBUG="0"), 1, "/no/such/model")
    assert "Traceback" in xinfer(*wrong, XINFER_VK_DEBUG="1").stderr


# -- folders and variables ----------------------------------------------------------------------------


def test_the_cache_folder_is_chosen_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XINFER_VK_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/me/.cache/xinfer-vk")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/xinfer-vk")
    monkeypatch.setenv("XINFER_VK_CACHE", "~/mine")
    assert models_dir() == Path("/home/me/mine/models")
    assert pipeline_cache_folder() == Path("/home/me/mine/pipelines")


def test_without_a_home_directory_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XINFER_VK_CACHE", "~nobody-of-this-name/x")
    assert pipeline_cache_folder() is None
    with pytest.raises(UsageError, match="XINFER_VK_CACHE"):
        models_dir()


@pytest.mark.parametrize(("name", "value"), [("XINFER_VK_MEMORY", "plenty"), ("XINFER_VK_LAYER", "maybe")])
def test_nonsense_in_a_variable_names_it(tiny_model: Path, name: str, value: str) -> None:
    result = xinfer("generate", "-m", str(tiny_model), "-p", "a", "-n", "1", **{name: value})
    assert_one_error(result, 2, name, value)

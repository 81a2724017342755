"""What `generate` looks like on a terminal: bars, answers, and what is timed as compiling."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import xinfer

from xinfer_vk import LLM
from xinfer_vk.cli.output import printable
from xinfer_vk.cli.progress import ProgressBar, batch_speed

SLOW_COMPILER = """
import sys, time
from xinfer_vk.cli import progress, wrap
wrap.WordWrapper.push = lambda self, text: text
from xinfer_vk.engine import runner
progress.SHOW_AFTER_S = 0.0
from xinfer_vk.vulkan.sequences import Recorder
from xinfer_vk.cli.main import main
compile = Recorder.compile
def slow(self, step):
    time.sleep(0.05)
    compile(self, step)
Recorder.compile = slow
runner.LONG_COMPILE_S = float(sys.argv[1])
main(sys.argv[2:])
"""


def on_terminal(*argv: str, columns: int = 500, **env: str) -> tuple[int, str]:
    """Run a Python program whose streams are a terminal; its exit code and all that it wrote there."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, *argv],
        stdin=subprocess.DEVNULL, stdout=slave, stderr=slave, env={**environment, "TERM": "xterm", **env},
    )  # fmt: skip
    os.close(slave)
    seen = b""
    with contextlib.suppress(OSError):  # the terminal ends with its last writer
        while chunk := os.read(master, 4096):
            seen += chunk
    os.close(master)
    return process.wait(timeout=60), seen.decode()


@pytest.fixture
def common(tiny_model: Path, device: Any) -> list[str]:
    if device.id != "lavapipe":
        pytest.skip("compiles for long, and draws the same")
    return ["generate", "-m", str(tiny_model), "--device", str(device.info.index),
            "--ignore-eos", "-n", "12"]  # fmt: skip


@pytest.mark.parametrize("patience", ["0.5", "inf"])
def test_nothing_is_drawn_over_an_answer_however_long_kernels_compile(
    common: list[str], patience: str
) -> None:
    """With patience without end the kernels of decoding compile after the first piece was printed, since
    here no word wrap holds it back."""
    with LLM(common[2], device="numpy") as llm:
        (letter,) = llm.encode("a", raw=True)
    common = [*common, "--logit-bias", f"{letter}=1000"]
    answer = printable(xinfer(*common, "-p", "hello", "-q").stdout).replace("\n", "\r\n")
    code, seen = on_terminal("-c", SLOW_COMPILER, patience, *common, "-p", "hello")
    assert code == 0, seen
    assert "compiling kernels" in seen, "the bar was there"
    assert answer in seen, "nothing stands within the answer"
    before = seen[: seen.index(answer)]
    assert "compiling kernels" in before
    assert "compiling kernels" not in seen[len(before) :]


def test_a_bar_that_is_held_does_not_open(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("xinfer_vk.cli.progress.SHOW_AFTER_S", 0.0)
    progress = ProgressBar(enabled=True)
    progress.hold()
    progress("compiling kernels", 1, 3)
    assert capsys.readouterr().err == ""
    progress.release()
    progress("compiling kernels", 1, 3)
    progress.close()
    assert capsys.readouterr().err != ""


def test_the_first_dispatch_of_a_pipeline_counts_as_compiling(
    tiny_model: Path, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that is slow adds to the time of compiling, and to no rate."""
    from xinfer_vk.vulkan.sequences import Recorder

    compiled: list[float] = []
    compile = Recorder.compile
    now = [0.0]

    def slow(self: Recorder, step: Any) -> None:
        compiled.append(1.0)
        now[0] += 1.0
        compile(self, step)

    monkeypatch.setattr(Recorder, "compile", slow)
    import time

    real = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: real() + now[0])
    with LLM(tiny_model, device=str(device.info.index)) as llm:
        metrics = llm.generate("hello", max_new_tokens=4, ignore_eos=True).metrics
    assert metrics.compile_s >= sum(compiled) > 0
    assert metrics.ttft_compile_s <= metrics.ttft_s
    assert metrics.ttft_compile_s <= metrics.compile_s
    assert metrics.prefill_s < 1 and metrics.decode_s < 1, "no second of the slow compiler is in a rate"


def test_the_speed_of_a_batch_is_that_of_all_its_prompts() -> None:
    assert batch_speed(0, 0, 10, 1.0) == ""
    assert batch_speed(200, 0, 10, 2.0) == "100 tok/s"
    assert batch_speed(200, 5, 10, 2.0) == "100 tok/s, 0:02 left"
    assert batch_speed(200, 1, 10000, 2.0) == "100 tok/s, 5:33:18 left"
    assert batch_speed(200, 10, 10, 2.0) == "100 tok/s"

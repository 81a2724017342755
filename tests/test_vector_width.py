"""lavapipe with 4 and with 16 lanes instead of the processor's own: nothing leans on a width."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.tier_all


def run(bits: int, device: str, *arguments: str) -> str:
    env = {**os.environ, "LP_NATIVE_VECTOR_WIDTH": str(bits)}
    command = [sys.executable, "-m", "xinfer_vk", *arguments, "--device", device]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def lavapipe_only(device) -> str:
    if device.id != "lavapipe":
        pytest.skip("the width of vectors is lavapipe's setting")
    return str(device.index)


@pytest.mark.parametrize("bits", [128, 512])
def test_selftest_passes_with_vectors_of_another_width(device, bits: int) -> None:
    assert "checks passed on" in run(bits, lavapipe_only(device), "selftest", "--full")


@pytest.mark.parametrize("bits", [128, 512])
def test_the_demo_answers_with_vectors_of_another_width(device, demo_model: Path, bits: int) -> None:
    question = ["--prompt", "What is the capital of France?", "--temperature", "0", "--max-new-tokens", "16"]
    answer = run(bits, lavapipe_only(device), "generate", "--model", str(demo_model), *question)
    assert "Paris" in answer

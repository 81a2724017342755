"""Runs the real program in a process of its own, and reads what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys

TIMING = re.compile(
    r"^prefill: \d+ tok in [\d.]+ m?s \([\d.]+ tok/s\) \| decode: \d+ tok in [\d.]+ m?s \([\d.]+ tok/s\)"
    r"( \| compiling: [\d.]+ m?s)?$"
)


def xinfer(*args: str, stdin: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "xinfer_vk", *args],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **env},
    )


def assert_one_error(result: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """One line beginning with ``error:`` (or click's usage lines) that holds the words; no traceback."""
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    errors = [line for line in result.stderr.splitlines() if line.lower().startswith("error:")]
    assert len(errors) == 1, result.stderr
    for word in words:
        assert word.lower() in errors[0].lower(), f"{word!r} not in {errors[0]!r}"

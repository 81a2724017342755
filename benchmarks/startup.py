"""Process start to first token of `xinfer-vk generate`, with every cache empty and with warm ones.

    python benchmarks/startup.py --model smollm2-135m --device llvmpipe --rounds 5

A fresh process a round, and for each two runs: cold with empty Mesa, pipeline and kernel caches (the model
file is in the page cache), warm after it. `xinfer-vk bench` measures everything that comes later.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from xinfer_vk.errors import XinferError

FIRST_TOKEN = [
    sys.executable,
    "-m",
    "xinfer_vk",
    "generate",
    "--max-new-tokens",
    "1",
    "--quiet",
    "--prompt",
    "Hello",
]


def time_first_token(model: str, device: str | None, environment: dict[str, str]) -> float:
    """Seconds from process start to the first piece of text on standard output."""
    command = [*FIRST_TOKEN, "--model", model, *(["--device", device] if device else [])]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **environment}) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.stdout.read()
    if process.returncode:
        sys.exit(f"generate exited with {process.returncode}")
    return seconds


@click.command()
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option("--device", help="As for xinfer-vk generate.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1))
@click.option("--json", "as_json", is_flag=True)
def main(model: str, device: str | None, rounds: int, as_json: bool) -> None:
    """Time the start of the program."""
    from xinfer_vk.weights.hub import resolve_model

    path = str(resolve_model(model))
    seconds: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as empty:
            fresh = {
                "MESA_SHADER_CACHE_DIR": str(Path(empty) / "mesa"),
                "XDG_CACHE_HOME": str(Path(empty) / "xdg"),
                "XINFER_VK_CACHE": str(Path(empty) / "xinfer-vk"),
            }
            for values in seconds.values():
                values.append(time_first_token(path, device, fresh))
    if as_json:
        click.echo(json.dumps({"model": path, "device": device, "first_token_s": seconds}))
        return
    for caches, values in seconds.items():
        middle = statistics.median(values)
        click.echo(f"first token, {caches} caches: {middle:.2f} s [{min(values):.2f}–{max(values):.2f}]")


if __name__ == "__main__":
    try:
        main()
    except XinferError as error:
        sys.exit(f"error: {error}")

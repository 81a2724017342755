"""Compares xinfer-vk with other engines on the same file: in turn, on the same cores, as ratios.

    python benchmarks/peers.py --model FILE.gguf --device llvmpipe --llama-python VENV/bin/python
    python benchmarks/peers.py --model FILE.gguf --llama-bench PATH --backend cpu --backend gpu
    python benchmarks/peers.py --model DIRECTORY --transformers-python VENV/bin/python

Each engine is a process with the model loaded once (benchmarks/peer_worker.py); llama-bench loads it anew
at each turn, which its figures leave out. A round runs every test on every engine, one after the other
(A B A B …), so that a machine whose speed drifts treats them alike; the rest wait and use no core. Printed:
the median of each engine's rates with its range, and the median of the rounds' ratios with theirs.

An engine's environment (``pip install llama-cpp-python``) is named by its Python. llama.cpp's Vulkan back
end uses a CPU device only if GGML_VK_VISIBLE_DEVICES names it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

HERE = Path(__file__).resolve().parent
OURS = "xinfer-vk"


@dataclass(frozen=True)
class Test:
    kind: str  # pp or tg
    tokens: int
    depth: int

    def __str__(self) -> str:
        return f"{self.kind}{self.tokens}" + (f" @ d{self.depth}" if self.depth else "")


@dataclass
class Worker:
    """An engine that runs peer_worker.py."""

    name: str
    python: str
    model: str
    cores: list[int]
    longest: int
    device: str = ""
    about: str = ""

    def start(self) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as the process)
        environment = {**os.environ, "LP_NUM_THREADS": str(len(self.cores))}  # lavapipe's
        worker, cores = str(HERE / "peer_worker.py"), ",".join(map(str, self.cores))
        self._process = subprocess.Popen(
            [self.python, worker, self.name, self.model, cores, str(self.longest), self.device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        self.about = str(self._answer()["about"])

    def rate(self, test: Test) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{test.kind} {test.tokens} {test.depth}\n")
        self._process.stdin.flush()
        return test.tokens / float(self._answer()["seconds"])

    def stop(self) -> None:
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        """The next line of JSON; engines print other things too."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        self._errors.seek(0)
        last = self._errors.read().strip().splitlines()[-1:] or ["no message"]
        raise click.ClickException(f"{self.name} ended: {last[0]}")


@dataclass
class LlamaBench:
    """llama.cpp's own program, with its CPU back end or with what GPU it finds."""

    path: str
    backend: str
    model: str
    cores: list[int]
    name: str = field(init=False)
    about: str = ""

    def __post_init__(self) -> None:
        self.name = f"llama-bench {self.backend}"

    def start(self) -> None:
        self.about = f"{self.path}, {self.backend}"

    def rate(self, test: Test) -> float:
        where = ["-ngl", "0", "-dev", "none"] if self.backend == "cpu" else ["-ngl", "99"]
        sizes = (test.tokens, 0) if test.kind == "pp" else (0, test.tokens)
        command = [
            self.path, "-m", self.model, "-r", "1", "-o", "json", "-t", str(len(self.cores)), *where,
            "-p", str(sizes[0]), "-n", str(sizes[1]), "-d", str(test.depth),
        ]  # fmt: skip
        done = subprocess.run(
            command, capture_output=True, text=True, preexec_fn=lambda: os.sched_setaffinity(0, self.cores)
        )
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["no message"]
            raise click.ClickException(f"{self.name} ended with {done.returncode}: {last[0]}")
        (row,) = json.loads(done.stdout)
        return float(row["avg_ts"])

    def stop(self) -> None:
        """It has ended already."""


def spread(values: Sequence[float], digits: int) -> str:
    """``0.41 [0.38–0.44]``"""
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}–{max(values):.{digits}f}]"


def counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if int(part)]


@click.command()
@click.option("--model", "-m", required=True, type=click.Path(exists=True), help="The file that all run.")
@click.option("--device", default="", help="Ours, as for xinfer-vk.")
@click.option("--llama-python", help="Python of an environment with llama-cpp-python.")
@click.option("--llama-bench", help="llama.cpp's llama-bench.")
@click.option(
    "--backend", type=click.Choice(["cpu", "gpu"]), multiple=True, default=["cpu"], help="Of llama-bench."
)
@click.option("--transformers-python", help="Python of an environment with transformers and torch.")
@click.option("--prompt-tokens", "-p", default="512", help="Prefills: 128,512; 0: none. [default: 512]")
@click.option("--new-tokens", "-n", default="128", help="Decodes, as -p. [default: 128]")
@click.option("--depth", "-d", default="0", help="Tokens in the cache before. [default: 0]")
@click.option("--rounds", "-r", default=5, show_default=True, type=click.IntRange(min=1))
@click.option("--cores", help="Numbers with commas. [default: all that this process may use]")
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help="Write every sample there too.")
def main(
    model: str,
    device: str,
    llama_python: str | None,
    llama_bench: str | None,
    backend: tuple[str, ...],
    transformers_python: str | None,
    prompt_tokens: str,
    new_tokens: str,
    depth: str,
    rounds: int,
    cores: str | None,
    json_file: str | None,
) -> None:
    """Compare with other engines, in turn."""
    depths = [int(part) for part in depth.split(",")]
    tests = [Test("pp", n, d) for d in depths for n in counts(prompt_tokens)]
    tests += [Test("tg", n, d) for d in depths for n in counts(new_tokens)]
    longest = max(t.tokens + t.depth for t in tests)
    pinned = counts(cores) if cores else sorted(os.sched_getaffinity(0))
    engines: list[Worker | LlamaBench] = [Worker(OURS, sys.executable, model, pinned, longest, device)]
    if llama_python:
        engines.append(Worker("llama.cpp", llama_python, model, pinned, longest))
    if transformers_python:
        engines.append(Worker("transformers", transformers_python, model, pinned, longest))
    if llama_bench:
        engines += [LlamaBench(llama_bench, each, model, pinned) for each in backend]
    if len(engines) == 1:
        raise click.UsageError("no peer: give --llama-python, --llama-bench or --transformers-python")

    rates: dict[Test, dict[str, list[float]]] = {t: {e.name: [] for e in engines} for t in tests}
    started: list[Worker | LlamaBench] = []
    try:
        for engine in engines:
            started.append(engine)
            engine.start()
            click.echo(f"{engine.name}: {engine.about}", err=True)
        for turn in range(rounds + 1):
            for test in tests:
                for engine in engines:
                    rate = engine.rate(test)
                    if turn:  # the first is for warming up
                        rates[test][engine.name].append(rate)
    finally:
        for engine in started:
            engine.stop()

    click.echo(f"{Path(model).name}, {len(pinned)} cores, {rounds} rounds in turn, tok/s: median [range]")
    for engine in engines:
        click.echo(f"{engine.name}: {engine.about}")
    if os.getloadavg()[0] > len(pinned) + 0.5:
        click.echo(
            f"The machine has been busy with other things too (load {os.getloadavg()[0]:.1f}): engines whose "
            "threads wait by spinning suffer most from that, so measure again on a quiet one."
        )
    peers = [e.name for e in engines[1:]]
    titles = ["test", *(e.name for e in engines), *(f"÷ {name}" for name in peers)]
    click.echo(f"\n| {' | '.join(titles)} |\n| --- |{' ---: |' * (len(titles) - 1)}")
    for test, by_engine in rates.items():
        cells = [str(test), *(spread(values, 1) for values in by_engine.values())]
        ours = by_engine[OURS]
        cells += [f"**{spread([a / b for a, b in zip(ours, by_engine[p])], 2)}**" for p in peers]
        click.echo("| " + " | ".join(cells) + " |")
    if json_file:
        record = {
            "model": model,
            "cores": pinned,
            "engines": {e.name: e.about for e in engines},
            "tok_per_s": {str(t): values for t, values in rates.items()},
        }
        Path(json_file).write_text(json.dumps(record, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Compares xinfer-vk with other engines on the same files: in turn, on the same cores, as ratios.

    python benchmarks/peers.py -m smollm2-135m --llama-python VENV/bin/python --json peers.json
    python benchmarks/peers.py -m A.gguf -m B.gguf --device lavapipe --llama-python VENV/bin/python \\
        --backend cpu --backend gpu --gpu-prompt-tokens 128 --gpu-new-tokens 16 --gpu-rounds 3
    python benchmarks/peers.py -m FILE.gguf --llama-bench PATH --transformers-python VENV/bin/python

Each engine is a process with the model loaded once (benchmarks/peer_worker.py); llama-bench loads it anew
at each turn, which its figures leave out. For each peer a round runs every test on both sides, one after
the other (A B A B …), so that a machine whose speed drifts treats them alike; the rest wait and use no
core. The first round only warms up (plans, shader caches). A row has the median of each side's rates with
its range, and the median of the rounds' ratios with theirs.

An engine's environment (``pip install llama-cpp-python``, built with Vulkan for --backend gpu) is named by
its Python. The back end "gpu" is llama.cpp's Vulkan on the device that we run on, of the same driver, with
every layer on it; for "cpu" all devices are hidden from it, because a build with Vulkan would give a GPU
the products of long prompts even where no layer is offloaded. Both are checked, and told with the rows.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from xinfer_vk.cli.bench import COUNTS  # noqa: E402
from xinfer_vk.errors import XinferError  # noqa: E402

OURS = "xinfer-vk"


@dataclass(frozen=True)
class Test:
    kind: str  # pp or tg
    tokens: int
    depth: int

    def __str__(self) -> str:
        return f"{self.kind}{self.tokens}" + (f" @ d{self.depth}" if self.depth else "")


@dataclass(frozen=True)
class Sizes:
    """What is run against a peer, and how often."""

    prompts: tuple[int, ...]
    new: tuple[int, ...]
    depths: tuple[int, ...]
    rounds: int

    @property
    def tests(self) -> list[Test]:
        tests = [Test("pp", n, d) for d in self.depths for n in self.prompts]
        return tests + [Test("tg", n, d) for d in self.depths for n in self.new]


def environment(cores: Sequence[int], backend: str, index: int | None) -> dict[str, str]:
    """Of an engine's process: lavapipe's threads, and the one device that llama.cpp's Vulkan may see, by its
    place in the loader's list, or none."""
    visible = str(index) if backend == "gpu" else ""
    return {**os.environ, "LP_NUM_THREADS": str(len(cores)), "GGML_VK_VISIBLE_DEVICES": visible}


@dataclass
class Worker:
    """An engine that runs peer_worker.py. ``backend``: of llama.cpp, "cpu" or "gpu"; ``device`` is then the
    name of the one that it must run on, and ``index`` where the loader has it."""

    engine: str
    python: str
    model: str
    cores: list[int]
    longest: int
    device: str = ""
    backend: str = "cpu"
    index: int | None = None
    activations: str = "f32"
    flash_attention: bool = False
    about: str = ""

    @property
    def name(self) -> str:
        return f"llama.cpp {self.backend}" if self.engine == "llama.cpp" else self.engine

    def start(self) -> dict[str, Any]:
        """What it says about itself."""
        self._process: subprocess.Popen[str] | None = None
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as the process)
        asked = {
            "engine": self.engine, "model": self.model, "cores": self.cores, "longest": self.longest,
            "device": self.device, "backend": self.backend, "activations": self.activations,
            "flash_attention": self.flash_attention,
        }  # fmt: skip
        try:
            self._process = subprocess.Popen(
                [self.python, str(HERE / "peer_worker.py"), json.dumps(asked)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env=environment(self.cores, self.backend, self.index),
            )
        except OSError as error:
            raise click.ClickException(f"{self.name} cannot be started: {error}") from error
        told = self._answer()
        self.about = str(told["text"])
        return told

    def rate(self, test: Test) -> float:
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: its last words are read below
            self._process.stdin.write(f"{test.kind} {test.tokens} {test.depth}\n")
            self._process.stdin.flush()
        return test.tokens / float(self._answer()["seconds"])

    def stop(self) -> None:
        if self._process is not None:
            self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        """The next line of JSON; engines print other things too."""
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        code = self._process.wait()
        self._errors.seek(0)
        last = self._errors.read().strip().splitlines()[-1:] or ["no message"]
        raise click.ClickException(f"{self.name} ended with {code}: {last[0]}")


@dataclass
class LlamaBench:
    """llama.cpp's own program; ``backend``, ``device`` and ``index`` as of a worker."""

    path: str
    model: str
    cores: list[int]
    device: str
    backend: str
    index: int | None
    about: str = field(default="", init=False)

    @property
    def name(self) -> str:
        return f"llama-bench {self.backend}"

    def start(self) -> dict[str, Any]:
        self.about = f"{self.path}, {self.backend}"  # until a row says more
        return {}

    def rate(self, test: Test) -> float:
        where = ["-ngl", "99"] if self.backend == "gpu" else ["-ngl", "0"]
        sizes = (test.tokens, 0) if test.kind == "pp" else (0, test.tokens)
        command = [
            self.path, "-m", self.model, "-r", "1", "-o", "json", "-t", str(len(self.cores)), *where,
            "-p", str(sizes[0]), "-n", str(sizes[1]), "-d", str(test.depth),
        ]  # fmt: skip
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=environment(self.cores, self.backend, self.index),
            preexec_fn=lambda: os.sched_setaffinity(0, self.cores),
        )
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["no message"]
            raise click.ClickException(f"{self.name} ended with {done.returncode}: {last[0]}")
        (row,) = json.loads(done.stdout)
        gpu, wanted = row.get("gpu_info", ""), self.device if self.backend == "gpu" else ""
        if gpu != wanted:
            raise click.ClickException(f"{self.name} ran on {gpu or 'the CPU'}, not on {wanted or 'the CPU'}")
        build, backends = row.get("build_commit", "?"), row.get("backends", "?")
        self.about = f"llama-bench {build} ({backends}), {gpu or row.get('cpu_info', 'CPU')}"
        return float(row["avg_ts"])

    def stop(self) -> None:
        """It has ended already."""


def spread(values: Sequence[float], digits: int) -> str:
    """``0.41 [0.38–0.44]``"""
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}–{max(values):.{digits}f}]"


def compare(ours: Worker, peer: Worker | LlamaBench, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """A row for each test, after the last round."""
    rates: dict[Test, tuple[list[float], list[float]]] = {test: ([], []) for test in sizes.tests}
    for turn in range(sizes.rounds + 1):
        for test, samples in rates.items():
            for engine, values in zip((ours, peer), samples):
                rate = engine.rate(test)
                if turn:  # the first is for warming up
                    values.append(rate)
    for test, (mine, theirs) in rates.items():
        ratios = [a / b for a, b in zip(mine, theirs)]
        yield {
            "model": Path(ours.model).name,
            "peer": peer.name,
            "test": str(test),
            "rounds": sizes.rounds,
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "ours_tok_per_s": mine,
            "peer_tok_per_s": theirs,
            "ours_about": ours.about,
            "peer_about": peer.about,
            "cores": ours.cores,
            "load_average": os.getloadavg()[0],
        }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows, and who ran, with versions and devices."""
    titles = ("model", "peer", "test", "rounds", "xinfer-vk tok/s", "peer tok/s", "xinfer-vk ÷ peer")
    lines = [f"| {' | '.join(titles)} |", "| --- | --- | --- |" + " ---: |" * (len(titles) - 3)]
    for r in rows:
        rates = [spread(r[side], 1) for side in ("ours_tok_per_s", "peer_tok_per_s")]
        cells = (r["model"], r["peer"], r["test"], str(r["rounds"]), *rates, f"**{spread(r['ratios'], 2)}**")
        lines.append(f"| {' | '.join(cells)} |")
    engines = dict.fromkeys(about for r in rows for about in (r["ours_about"], r["peer_about"]))
    load, cores = max(r["load_average"] for r in rows), len(rows[0]["cores"])
    notes = [f"On {cores} cores, rounds in turn after one to warm up: median [range].", *engines]
    if load > cores + 0.5:
        notes.append(
            f"The machine has been busy with other things too (load {load:.1f}): engines whose threads wait "
            "by spinning suffer most from that, so measure again on a quiet one."
        )
    return "\n".join([*lines, "", *notes])


def positive(numbers: Sequence[int]) -> tuple[int, ...]:
    return tuple(number for number in numbers if number)


@click.command()
@click.option(
    "--model", "-m", "models", multiple=True, required=True, help="As for xinfer-vk. May be repeated."
)
@click.option("--device", default="", help="Ours, as for xinfer-vk.")
@click.option("--llama-python", help="Python of an environment with llama-cpp-python.")
@click.option("--llama-bench", help="llama.cpp's llama-bench.")
@click.option(
    "--backend",
    type=click.Choice(["cpu", "gpu"]),
    multiple=True,
    default=["cpu"],
    help="Of llama.cpp; gpu: its Vulkan on our device. May be repeated. [default: cpu]",
)
@click.option("--flash-attention", is_flag=True, help="Turn llama.cpp's on (--llama-python).")
@click.option(
    "--transformers-python",
    help="Python of an environment with torch, transformers and, for GGUF, gguf and accelerate.",
)
@click.option("--prompt-tokens", "-p", type=COUNTS, default=(512,), help="Prefills; 0: none. [default: 512]")
@click.option("--new-tokens", "-n", type=COUNTS, default=(128,), help="Decodes; 0: none. [default: 128]")
@click.option("--depth", "-d", type=COUNTS, default=(0,), help="Tokens in the cache before. [default: 0]")
@click.option("--rounds", "-r", default=5, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--gpu-prompt-tokens", type=COUNTS, help="Against the back end gpu, where that is slow. [default: as -p]"
)
@click.option("--gpu-new-tokens", type=COUNTS, help="Likewise. [default: as -n]")
@click.option("--gpu-rounds", type=click.IntRange(min=1), help="Likewise. [default: as -r]")
@click.option("--activations", type=click.Choice(["f32", "int8"]), default="f32", help="Ours. [default: f32]")
@click.option("--cores", type=COUNTS, help="Both run on these. [default: all that this process may use]")
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, writable=True),
    help="Write every sample there too.",
)
def main(
    models: tuple[str, ...],
    device: str,
    llama_python: str | None,
    llama_bench: str | None,
    backend: tuple[str, ...],
    flash_attention: bool,
    transformers_python: str | None,
    prompt_tokens: tuple[int, ...],
    new_tokens: tuple[int, ...],
    depth: tuple[int, ...],
    rounds: int,
    gpu_prompt_tokens: tuple[int, ...] | None,
    gpu_new_tokens: tuple[int, ...] | None,
    gpu_rounds: int | None,
    activations: str,
    cores: tuple[int, ...] | None,
    json_file: str | None,
) -> None:
    """Compare with other engines, in turn: a row for each model, peer and test.

    Rows that were measured are printed and written even if something ends it early.
    """
    from xinfer_vk.weights.hub import resolve_model

    if not (llama_python or llama_bench or transformers_python):
        raise click.UsageError("no peer: give --llama-python, --llama-bench or --transformers-python")
    usual = Sizes(positive(prompt_tokens), positive(new_tokens), depth, rounds)
    slow = Sizes(
        usual.prompts if gpu_prompt_tokens is None else positive(gpu_prompt_tokens),
        usual.new if gpu_new_tokens is None else positive(gpu_new_tokens),
        depth,
        gpu_rounds or rounds,
    )
    backends = tuple(dict.fromkeys(backend))
    wanted = [usual, *([slow] if "gpu" in backends else [])]
    longest = max((t.tokens + t.depth for sizes in wanted for t in sizes.tests), default=0)
    if not longest:
        raise click.UsageError("nothing to measure: -p and -n are both 0")
    usable = sorted(os.sched_getaffinity(0))
    pinned = usable if cores is None else sorted(set(cores))
    if not set(pinned) <= set(usable):
        raise click.UsageError(
            f"--cores {','.join(map(str, pinned))}: this process may use {', '.join(map(str, usable))}"
        )
    if json_file and not Path(json_file).absolute().parent.is_dir():
        raise click.UsageError(f"--json {json_file}: there is no such folder")

    def peers(model: str, told: dict[str, Any]) -> Iterator[tuple[Worker | LlamaBench, Sizes]]:
        """Those of one model. ``told``: what ours says of its device."""
        for each in backends:
            sizes, on = (slow, told["device"]) if each == "gpu" else (usual, "")
            if each == "gpu" and told["index"] is None:
                raise click.UsageError("--backend gpu: the device numpy is none of Vulkan")
            if llama_python:
                yield (
                    Worker(
                        "llama.cpp", llama_python, model, pinned, longest, on, each, told["index"],
                        flash_attention=flash_attention,
                    ),
                    sizes,
                )  # fmt: skip
            if llama_bench:
                yield LlamaBench(llama_bench, model, pinned, on, each, told["index"]), sizes
        if transformers_python:
            yield Worker("transformers", transformers_python, model, pinned, longest), usual

    rows: list[dict[str, Any]] = []
    try:
        for name in models:
            model = str(resolve_model(name))
            ours = Worker(OURS, sys.executable, model, pinned, longest, device, activations=activations)
            try:
                for peer, sizes in peers(model, ours.start()):
                    click.echo(f"{Path(model).name}: {peer.name}, {len(sizes.tests)} tests", err=True)
                    try:
                        peer.start()
                        for row in compare(ours, peer, sizes):
                            rows.append(row)
                            click.echo(f"  {row['test']}: {row['ratio']:.2f} ×", err=True)
                    finally:
                        peer.stop()
            finally:
                ours.stop()
    finally:
        if rows:
            click.echo(table(rows))
        if rows and json_file:
            Path(json_file).write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except XinferError as error:
        sys.exit(f"error: {error}")

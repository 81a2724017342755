"""``bench --against OTHER``: two versions of the program, or two models or formats, measured in turns.

Each turn is a process that runs ``bench`` once. So any version of the program can be a side, and a slow spell
of the machine slows both sides.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xinfer_vk.cli.bench_compare import KEY, T_975, described, differences
from xinfer_vk.cli.bench_report import ROOT, as_csv, fitted_table
from xinfer_vk.cli.options import QUANTIZE_TYPES
from xinfer_vk.cli.output import say, say_json, terminal_columns
from xinfer_vk.engine.metrics import format_rate
from xinfer_vk.errors import UsageError, XinferError

Progress = Callable[[str, int, int], None]
Row = Mapping[str, Any]
# Puts one folder first on the path and runs the program from there, whatever the working directory holds.
START = "import sys; sys.path[0] = {root!r}; from xinfer_vk.cli.main import main; main()"
PROGRAMS = ("bin/python", ".venv/bin/python", "Scripts/python.exe", ".venv/Scripts/python.exe")


@dataclass(frozen=True)
class Side:
    """One of the two: how to start the program, and which model it measures."""

    name: str
    program: tuple[str, ...]
    model: str
    synthetic: bool
    quantize: str | None = None

    def command(self, options: Sequence[str]) -> list[str]:
        model = ["--synthetic" if self.synthetic else "--model", self.model]
        quantize = ["--quantize", self.quantize] if self.quantize else []
        return [*self.program, "bench", *model, *quantize, *options]


def this_side(model: str, synthetic: bool, quantize: str | None) -> Side:
    return Side("this", (sys.executable, "-c", START.format(root=str(ROOT))), model, synthetic, quantize)


def other_side(other: str, this: Side) -> Side:
    """What OTHER means: a checkout, an environment or a program of another version; a number format; or
    another model. Raises :class:`UsageError` for a folder that is neither."""
    path = Path(other).expanduser()
    if path.is_dir() and not _is_model(path):
        return replace(this, name=other, program=_program(path))
    if path.is_file() and path.suffix != ".gguf" and os.access(path, os.X_OK):
        return replace(this, name=other, program=(str(path.absolute()),))
    if this.synthetic:
        shape = this.model.partition(":")[0]
        return replace(this, name=other, model=other if ":" in other else f"{shape}:{other}")
    if other.lower() in QUANTIZE_TYPES:
        return replace(this, name=other, quantize=other.lower())
    return replace(this, name=other, model=other, synthetic=":" in other and not path.exists())


def _is_model(path: Path) -> bool:
    return (path / "config.json").exists() or any(path.glob("*.gguf"))


def _program(path: Path) -> tuple[str, ...]:
    python = next((str(path.absolute() / p) for p in PROGRAMS if (path / p).exists()), None)
    if (path / "xinfer_vk" / "__init__.py").exists():
        return python or sys.executable, "-c", START.format(root=str(path.absolute()))
    if python is None:
        raise UsageError(
            f"--against {path}: give the folder of a checkout of xinfer-vk, a virtual environment or a model"
        )
    return python, "-I", "-m", "xinfer_vk"


def check_other(other: Side, this: Side) -> None:
    """Raise :class:`UsageError` if OTHER is no model or shape that there is, before the first turn is run."""
    if other.model == this.model:
        return
    from xinfer_vk.weights.hub import resolve_model
    from xinfer_vk.weights.synthetic import open_synthetic

    try:
        if other.synthetic:
            open_synthetic(other.model)[0].close()
        else:
            resolve_model(other.model)
    except XinferError as error:
        end = "" if str(error).endswith("?") or other.synthetic else "; or a checkout, a program or a format"
        raise UsageError(f"--against {error}{end}") from None


def run_once(side: Side, options: Sequence[str]) -> list[dict[str, Any]]:
    """One turn: the rows that ``bench`` prints. Raises :class:`XinferError` with the error that ended it."""
    done = subprocess.run(side.command(options), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode < 0 or done.returncode in (130, 143):
        raise KeyboardInterrupt
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise XinferError(f"{side.name}: {lines[-1].removeprefix('error: ').removeprefix('Error: ')}")
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def measure_in_turns(
    this: Side, other: Side, options: Sequence[str], rounds: int, progress: Progress, report: Against
) -> None:
    """Run both sides ``rounds`` times, the one that goes first alternating, into ``report``."""
    for i in range(rounds):
        order = (this, other) if i % 2 == 0 else (other, this)
        turn = {}
        for j, side in enumerate(order):
            progress("measuring in turns", 2 * i + j, 2 * rounds)
            turn[side is this] = run_once(side, options)
        report.add(turn[True], turn[False])
    progress("measuring in turns", 2 * rounds, 2 * rounds)


class Against:
    """Collects rounds, and prints the ratios at the end, also of those that Ctrl-C or an error left."""

    def __init__(self, this: Side, other: Side, form: str) -> None:
        self._this, self._other, self._form = this, other, form
        self._rounds: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = []

    def add(self, this: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
        self._rounds.append((this, other))

    def rows(self) -> list[dict[str, Any]]:
        if not self._rounds:
            return []
        out = []
        for i, (row, was) in enumerate(zip(*self._rounds[0])):
            ours = [this[i]["tok_per_s"] for this, _ in self._rounds]
            theirs = [other[i]["tok_per_s"] for _, other in self._rounds]
            out.append(
                {**{name: row[name] for name in KEY}, "other_model": was["model"], **ratios(ours, theirs)}
            )
        return out

    def __enter__(self) -> Against:
        return self

    def __exit__(self, *exc: object) -> None:
        rows = self.rows()
        if not rows:
            return
        changed = differences(list(zip(*self._rounds[0]))[:1])
        if self._form == "md":
            self._print(rows, changed)
        elif self._form == "csv":
            say(as_csv(rows), end="")
        elif self._form == "jsonl":
            for row in rows:
                say_json(row)
        else:
            sides = {"this": self._this.name, "other": self._other.name, "different": changed}
            say(json.dumps({**sides, "rows": rows}, indent=1))

    def _print(self, rows: Sequence[Row], changed: Mapping[str, tuple[Any, Any]]) -> None:
        count = len(self._rounds)
        say(f"this against {self._other.name}, {count} round{'s' if count > 1 else ''} in turns")
        for name, (now, was) in changed.items():
            say(f"{name}: {described(was, now)}")
        cells = [
            [
                row["model"]
                if row["model"] == row["other_model"]
                else f"{row['model']} / {row['other_model']}",
                row["kv_dtype"],
                row["test"],
                format_rate(row["this_tok_per_s"]),
                format_rate(row["other_tok_per_s"]),
                f"{row['ratio']:.3f}",
                f"{row['ratio_min']:.3f}–{row['ratio_max']:.3f}",
                row["verdict"],
            ]
            for row in rows
        ]
        titles = ("model", "KV", "test", "this tok/s", "other tok/s", "ratio", "range", "")
        say("\n".join(["", *fitted_table(titles, cells, len(KEY), terminal_columns())]))


def ratios(this: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    """The ratios of rounds: above 1 where this is faster. ``noise``: the 95 % interval of their mean is this
    factor up and down (Student's t on the logarithms); None for a single round."""
    each = [a / b for a, b in zip(this, other)]
    logs = [math.log(ratio) for ratio in each]
    noise = None
    verdict = "one round: unknown"
    if len(logs) > 1:
        half = T_975[min(len(logs) - 1, len(T_975)) - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
        mean, noise = statistics.fmean(logs), math.exp(half)
        verdict = "within noise" if abs(mean) <= half else "faster" if mean > 0 else "slower"
    return {
        "this_tok_per_s": statistics.median(this),
        "other_tok_per_s": statistics.median(other),
        "ratio": statistics.median(each),
        "ratio_min": min(each),
        "ratio_max": max(each),
        "noise": noise,
        "verdict": verdict,
        "rounds": each,
    }

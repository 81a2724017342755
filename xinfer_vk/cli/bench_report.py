"""What ``bench`` prints: records with everything that makes two figures comparable, as a table or as data."""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from xinfer_vk.cli.bench_plot import save_plots
from xinfer_vk.cli.output import say, say_json, terminal_columns
from xinfer_vk.engine.metrics import format_rate, peak_host_bytes
from xinfer_vk.errors import UsageError
from xinfer_vk.units import format_bytes

if TYPE_CHECKING:
    from xinfer_vk.cli.progress import ProgressBar
    from xinfer_vk.engine.bench import Bench, Measurement, Peak, Profile
    from xinfer_vk.plan import Runtime

FORMATS = ("md", "json", "jsonl", "csv")
ROOT = Path(__file__).resolve().parents[2]


@cache
def commit() -> str | None:
    """The commit of the source tree that runs, with "+" if it has changes; None for an installed package."""
    if not (ROOT / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=10"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


@cache
def processor() -> str:
    """The CPU's name, as Linux tells it, and how many of its cores this process may use."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            name = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"


def environment(runtime: Runtime) -> dict[str, Any]:
    """What runs the kernels, and on what."""
    import numpy as np

    from xinfer_vk import __version__

    info = getattr(runtime, "info", None)
    return {
        "version": __version__,
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": runtime.profile.name,
        "device_index": info.index if info else None,
        "device_type": info.type if info else "cpu",
        "driver": runtime.driver,
        "api_version": ".".join(map(str, info.api_version)) if info else None,
        "subgroup_size": runtime.profile.subgroup_size,
        "layer": getattr(runtime, "layer_active", False),
        "unified_memory": runtime.profile.unified_memory,
        "features": sorted(runtime.profile.features),
        "cpu": processor(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def as_record(bench: Bench, m: Measurement, peak: Peak, repeats: int, warm_up: int) -> dict[str, Any]:
    """One row. Times in seconds, rates of a second; a repetition's cost over the median's time."""
    subject, int8 = bench.subject, bench.activations == "int8"
    decode = m.test.kind == "tg"
    bytes_per_s, flops_per_s = m.cost.bytes / m.median_s, m.cost.flops / m.median_s
    return {
        **environment(subject.runtime),
        "model": f"{subject.name}, int8 activations" if int8 else subject.name,
        "synthetic": subject.synthetic,
        "format": subject.fmt,
        "architecture": subject.config.architecture,
        "kv_dtype": bench.kv_dtype,
        "activations": bench.activations,
        "test": str(m.test),
        "kind": m.test.kind,
        "prompt_tokens": 0 if decode else m.test.tokens,
        "new_tokens": m.test.tokens if decode else 0,
        "depth": m.test.depth,
        "batch": m.test.batch,
        "repeats": repeats,
        "warm_up": warm_up,
        "tune": subject.tune,
        "load_included": False,
        "synchronised": "every submit",
        "tok_per_s": statistics.median(m.rates),
        "tok_per_s_min": min(m.rates),
        "tok_per_s_max": max(m.rates),
        "run_s": list(m.run_s),
        "ttft_s": None if decode else m.median_s,
        "tpot_s": statistics.median(m.step_s) if decode else None,
        "tpot_p99_s": _percentile(m.step_s, 99) if decode else None,
        "bytes_per_s": bytes_per_s,
        "copy_bytes_per_s": peak.copy_bytes_per_s,
        "bandwidth_share": bytes_per_s / peak.copy_bytes_per_s,
        "flops_per_s": flops_per_s,
        "fma_flops_per_s": peak.flops_per_s,
        "flops_share": flops_per_s / peak.flops_per_s,
        "steps": m.steps,
        "dispatches_per_step": m.dispatches / m.steps,
        "barriers_per_step": m.barriers / m.steps,
        "submits_per_step": m.submits / m.steps,
        "dispatches_per_token": m.dispatches / m.tokens,
        "barriers_per_token": m.barriers / m.tokens,
        "host_s_per_step": m.host_step_s,
        "bytes_read_per_token": m.bytes_read / m.tokens,
        "read_per_step_bytes": m.cost.bytes / m.steps,
        "weight_bytes": subject.weight_bytes,
        "kv_bytes": m.kv_bytes,
        "device_bytes": subject.runtime.allocated_bytes,
        "peak_host_bytes": peak_host_bytes(),
        "load_s": subject.load_s,
        "tune_s": subject.tune_s,
    }


def profile_record(profile: Profile, peak: Peak) -> dict[str, Any]:
    """One step by kernel, the device's time in seconds. Bytes and flops of kernels that read neither
    weights nor cache are 0: what they touch is in the caches."""
    return {
        "step": profile.what,
        "seconds": profile.seconds,
        "kernels": [
            {
                "label": k.label,
                "kernel": k.kernel,
                "calls": k.calls,
                "seconds": k.seconds,
                "share": k.seconds / profile.seconds if profile.seconds else 0.0,
                "bytes_per_s": k.cost.bytes / k.seconds if k.seconds else 0.0,
                "bandwidth_share": k.cost.bytes / k.seconds / peak.copy_bytes_per_s if k.seconds else 0.0,
                "flops_per_s": k.cost.flops / k.seconds if k.seconds else 0.0,
                "flops_share": k.cost.flops / k.seconds / peak.flops_per_s if k.seconds else 0.0,
            }
            for k in profile.kernels
        ],
    }


def _percentile(values: Sequence[float], percent: float) -> float:
    """By nearest rank."""
    rank = max(1, -(-len(values) * percent // 100))
    return sorted(values)[int(rank) - 1]


class Report:
    """Collects rows and prints them: at the end, or, as JSON lines, each as it comes. ``plots``: a folder to
    draw them in at the end too."""

    def __init__(self, form: str, plots: str | None, progress: ProgressBar) -> None:
        self._form, self._plots, self._progress = form, plots, progress
        self.records: list[dict[str, Any]] = []
        self._streams = form == "md" and terminal_columns() is None  # a table in a pipe grows row by row
        self._device_rows: list[dict[str, Any]] = []  # of the table that grows

    def add(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        if self._streams:
            self._stream(record)
        if self._form == "jsonl":
            say_json(self.records[-1])

    def __enter__(self) -> Report:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Print and draw what there is, also when an error or Ctrl-C ended it early."""
        self._progress.close()
        if not self.records:
            return
        try:
            self._print()
        finally:  # the plots are files of their own
            self._draw(error)

    def _print(self) -> None:
        if self._form == "json":
            say(json.dumps(self.records, indent=1))
        elif self._form == "csv":
            say(as_csv(self.records), end="")
        elif self._streams:
            self._end_table()
        elif self._form == "md":
            say(as_markdown(self.records, terminal_columns()))

    def _stream(self, record: dict[str, Any]) -> None:
        """Print a row; it is padded as the first one of its device is."""
        if self._device_rows and _device(self._device_rows[0]) != _device(record):
            self._end_table()
            say("")
        if not self._device_rows:
            table = markdown_table(COLUMNS, [cells(record)])
            say("\n".join([headline(record), "", *table]))
        else:
            say(markdown_table(COLUMNS, [cells(self._device_rows[0]), cells(record)])[-1])
        self._device_rows.append(record)

    def _end_table(self) -> None:
        """What follows the rows of a device."""
        for part in below_table(self._device_rows, None):
            say(f"\n{part}")
        self._device_rows = []

    def _draw(self, error: BaseException | None) -> None:
        if self._plots is None:
            return
        try:
            for path in save_plots(self._plots, self.records):
                self._progress.tell(f"plot: {path}")
        except UsageError as problem:
            if error is None:
                raise
            self._progress.tell(f"error: {problem}")  # what ended it is told last


def as_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """Lists within a field are separated by spaces; a profile is JSON, and empty where a row has none."""
    out = io.StringIO()
    fields = list(dict.fromkeys(name for record in records for name in record))
    writer = csv.DictWriter(out, fields, lineterminator="\n")
    writer.writeheader()
    for record in records:
        writer.writerow({k: _field(v) for k, v in record.items()})
    return out.getvalue()


def _field(value: Any) -> Any:
    if isinstance(value, dict):
        return json.dumps(value)
    return " ".join(map(str, value)) if isinstance(value, list) else value


COLUMNS = (
    "model", "KV", "test", "tok/s", "range", "TTFT or TPOT", "GB/s", "of copy", "GFLOP/s", "of FMA",
    "dispatches", "barriers", "host µs",
)  # fmt: skip
KEYS = 3  # of these say which row it is


def as_markdown(records: Sequence[Mapping[str, Any]], columns: int | None = None) -> str:
    """A table for each device, with what all its rows share above it. ``columns``: of the terminal."""
    parts = []
    for device in dict.fromkeys(map(_device, records)):
        rows = [r for r in records if _device(r) == device]
        table = fitted_table(COLUMNS, [cells(r) for r in rows], KEYS, columns)
        parts.append("\n".join([headline(rows[0]), "", *table]))
        parts += below_table(rows, columns)
    return "\n\n".join(parts)


def below_table(rows: Sequence[Mapping[str, Any]], columns: int | None) -> list[str]:
    """Memory of each model, and the profiles, of one device's rows."""
    models = {(r["model"], r["kv_dtype"]): r for r in rows}  # the last of each: it knows the peak
    memory = "\n".join(map(memory_line, models.values()))
    return [memory, *(profile_table(r, columns) for r in rows if "profile" in r)]


def _device(r: Mapping[str, Any]) -> tuple[Any, ...]:
    """Two cards may be the same in all but their place."""
    return r["device"], r["driver"], r["device_index"]


PROFILE_COLUMNS = (
    "step", "kernel", "calls", "µs a call", "ms", "share", "GB/s", "of copy", "GFLOP/s", "of FMA",
)  # fmt: skip


def profile_table(r: Mapping[str, Any], columns: int | None = None) -> str:
    """Where the time of a row's step goes, the largest share first."""
    profile = r["profile"]
    rows = []
    for k in sorted(profile["kernels"], key=lambda k: -k["seconds"]):
        reads, computes = k["bytes_per_s"] > 0, k["flops_per_s"] > 0
        rows.append(
            [
                k["label"],
                k["kernel"],
                str(k["calls"]),
                f"{k['seconds'] / k['calls'] * 1e6:.1f}",
                f"{k['seconds'] * 1e3:.3f}",
                f"{100 * k['share']:.1f} %",
                f"{k['bytes_per_s'] / 1e9:.1f}" if reads else "",
                f"{100 * k['bandwidth_share']:.0f} %" if reads else "",
                f"{k['flops_per_s'] / 1e9:.0f}" if computes else "",
                f"{100 * k['flops_share']:.0f} %" if computes else "",
            ]
        )
    title = f"{r['model']}, {r['test']}: {_ms(profile['seconds'])} of the device for {profile['step']}"
    if r["tpot_s"] is not None:
        title += f", {_ms(r['tpot_s'])} as the host sees it"
    return "\n".join([title, "", *fitted_table(PROFILE_COLUMNS, rows, 1, columns)])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"


def headline(r: Mapping[str, Any]) -> str:
    copies, computes = r["copy_bytes_per_s"] / 1e9, r["fma_flops_per_s"] / 1e9
    version = " ".join(filter(None, (r["version"], r["commit"])))
    return (
        f"{r['device']} ({r['driver']}, layer {'on' if r['layer'] else 'off'}), xinfer-vk {version}; "
        f"copies {copies:.1f} GB/s, computes {computes:.0f} GFLOP/s; median of {r['repeats']} after "
        f"{r['warm_up']} to warm up, loading left out, every submit waited for"
    )


def memory_line(r: Mapping[str, Any]) -> str:
    sizes = ("weight_bytes", "kv_bytes", "device_bytes", "peak_host_bytes")
    weights, kv, device, host = (format_bytes(r[name]) for name in sizes)
    back = f"; {r['bytes_read_per_token']:.0f} bytes read back a token" if r["new_tokens"] else ""
    return (
        f"{r['model']}: {weights} of weights, {kv} of KV cache in {r['kv_dtype']}, loaded in "
        f"{r['load_s']:.2f} s, tuned in {r['tune_s']:.2f} s; {device} on the device, {host} at most of the "
        f"process{back}"
    )


def cells(r: Mapping[str, Any]) -> list[str]:
    seconds = r["ttft_s"] if r["ttft_s"] is not None else r["tpot_s"]
    return [
        r["model"],
        r["kv_dtype"],
        r["test"],
        format_rate(r["tok_per_s"]),
        f"{format_rate(r['tok_per_s_min'])}–{format_rate(r['tok_per_s_max'])}",
        _ms(seconds),
        f"{r['bytes_per_s'] / 1e9:.1f}",
        f"{100 * r['bandwidth_share']:.0f} %",
        f"{r['flops_per_s'] / 1e9:.0f}",
        f"{100 * r['flops_share']:.0f} %",
        f"{r['dispatches_per_step']:.0f}",
        f"{r['barriers_per_step']:.0f}",
        f"{r['host_s_per_step'] * 1e6:.0f}",
    ]


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a GitHub table that also reads as plain text: text to the left, numbers to the right."""
    rows = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]  # names of files
    widths = [max(map(len, column)) for column in zip(titles, *rows)]
    numeric = [all(not row[i] or row[i][0].isdigit() for row in rows) for i in range(len(titles))]

    def line(values: Sequence[str]) -> str:
        padded = (v.rjust(w) if right else v.ljust(w) for v, w, right in zip(values, widths, numeric))
        return f"| {' | '.join(padded)} |"

    rule = ("-" * (w - 1) + ":" if right else "-" * w for w, right in zip(widths, numeric))
    return [line(titles), f"| {' | '.join(rule)} |", *map(line, rows)]


def fitted_table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], keys: int, columns: int | None
) -> list[str]:
    """The table, or, where its lines are longer than ``columns``, several that are not, one below the other:
    each begins with the first ``keys`` columns, of which those that are the same in every row stand above."""
    whole = markdown_table(titles, rows)
    if columns is None or len(whole[0]) <= columns:
        return whole
    same = [i for i in range(keys - 1) if len({row[i] for row in rows}) == 1]
    named = [i for i in range(keys) if i not in same]
    parts = [[*named, keys]]
    for i in range(keys + 1, len(titles)):
        more = [*parts[-1], i]
        if len(_columns(titles, rows, more)[0]) <= columns:
            parts[-1] = more
        else:
            parts.append([*named, i])
    above = [", ".join(f"{titles[i]} {rows[0][i]}" for i in same), ""] if same else []
    tables = [_columns(titles, rows, part) for part in parts]
    return [*above, *(line for table in tables for line in (*table, ""))][:-1]


def _columns(titles: Sequence[str], rows: Sequence[Sequence[str]], chosen: Sequence[int]) -> list[str]:
    """The table of some of its columns."""
    return markdown_table([titles[i] for i in chosen], [[row[i] for i in chosen] for row in rows])

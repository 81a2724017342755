"""``xinfer-vk bench compare A.json B.json``: ratios of two files of results, and how far to trust them."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from xinfer_vk.cli.bench_report import fitted_table
from xinfer_vk.cli.output import say, say_json, terminal_columns
from xinfer_vk.engine.metrics import format_rate
from xinfer_vk.errors import UsageError

KEY = ("model", "kv_dtype", "test")  # rows that can be compared
TOLD = (
    "version", "commit", "device", "driver", "layer", "features", "subgroup_size", "cpu", "system", "format",
    "tune", "warm_up", "repeats", "synchronised",
)  # fmt: skip
YARDSTICK_NOISE = 0.05  # by which a yardstick varies on a quiet machine
OTHERS_LOAD = 0.5  # more processes that want the cores, which slow a benchmark down
# Student's t, 97.5 %, by degrees of freedom from 1: how many standard errors a difference must be to mean
# something, when the errors themselves come from so few runs.
T_975 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


@click.command("compare", short_help="Compare two files of results.")
@click.argument("before", type=click.Path(dir_okay=False))
@click.argument("after", type=click.Path(dir_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(before: str, after: str, as_json: bool) -> None:
    """Compare two files that bench wrote with --output json or jsonl: two commits, devices or machines.

    A ratio above 1 means that AFTER is faster. The noise is a 95 % interval from the spread of the runs. On
    the same machine, the copy and FMA speeds and the load that both files hold are compared too: if they
    explain a difference, the verdict is "the machine was slower" (or faster). bench --against measures in
    turns, which is more reliable.
    """
    a, b = read_results(before), read_results(after)
    if max(len({r["device"] for r in side.values()}) for side in (a, b)) == 1:  # two vendors, two machines
        a, b = ({key[1:]: r for key, r in side.items()} for side in (a, b))
    rows = [compared(a[key], b[key]) for key in a if key in b]
    if not rows:
        sides = "; ".join(f"{name} has {listed(side)}" for name, side in ((before, a), (after, b)))
        raise UsageError(f"no row of the same model, KV format and test (and device, of several): {sides}")
    changed = differences([(a[key], b[key]) for key in a if key in b])
    only = {before: [" ".join(k) for k in a if k not in b], after: [" ".join(k) for k in b if k not in a]}
    if as_json:
        say_json({"before": before, "after": after, "different": changed, "only_in": only, "rows": rows})
        return
    for name, (was, now) in changed.items():
        say(f"{name}: {described(was, now)}")
    machine = next((row["machine"] for row in rows if row["machine"]), None)
    if machine:
        say(machine_line(machine))
    cells = [
        [
            *(str(row[name]) for name in KEY),
            format_rate(row["before_tok_per_s"]),
            format_rate(row["after_tok_per_s"]),
            f"{row['ratio']:.3f}",
            "?" if row["noise"] is None else f"± {row['noise']:.3f}",
            row["verdict"],
        ]
        for row in rows
    ]
    titles = ("model", "KV", "test", "before tok/s", "after tok/s", "ratio", "noise", "")
    above = [""] if changed or machine else []
    say("\n".join([*above, *fitted_table(titles, cells, len(KEY), terminal_columns())]))
    if len(rows) > 1:
        mean = statistics.geometric_mean(row["ratio"] for row in rows)
        say(f"\ngeometric mean of {len(rows)} ratios: {mean:.3f}")
    if any("machine" in row["verdict"] for row in rows):
        say("\nthe machine changed between the two files: `xinfer-vk bench --against` measures in turns")
    for name, keys in only.items():
        if keys:
            say(f"only in {name}: {', '.join(keys)}")


def read_results(path: str) -> dict[tuple[str, ...], dict[str, Any]]:
    """Rows by device, model, KV format and test; of several with the same, the last. Raises
    :class:`UsageError` for a file that cannot be read or holds something else."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # Windows may have put a mark in front
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        if text.lstrip().startswith("["):
            records = json.loads(text)
        else:
            records = [json.loads(line) for line in text.splitlines() if line.strip()]
        found = {tuple(str(r[name]) for name in ("device", *KEY)): dict(r) for r in records}
        for record in found.values():
            if not rates(record) or not all(0 < rate < math.inf for rate in rates(record)):
                raise ValueError("run_s has no seconds in it")
    except KeyError as error:
        raise UsageError(f"{path}: no results of bench --output json or jsonl (no {error})") from error
    except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
        raise UsageError(f"{path}: no results of bench --output json or jsonl ({error})") from error
    if not found:
        raise UsageError(f"{path}: there are no results in it")
    return found


def rates(record: Mapping[str, Any]) -> list[float]:
    """Tokens a second of each repetition."""
    tokens = (record["prompt_tokens"] or record["new_tokens"]) * record["batch"]
    return [tokens / float(seconds) for seconds in record["run_s"]]


def compared(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """One row: the ratio of the medians, and half the width of its 95 % interval, None where that is not
    known."""
    before, after = rates(a), rates(b)
    ratio = statistics.median(after) / statistics.median(before)
    runs = min(len(before), len(after))
    t = T_975[min(runs - 1, len(T_975)) - 1]  # the fewer runs decide: a little too cautious (Welch)
    noise = t * ratio * math.hypot(relative_error(before), relative_error(after))
    machine = machine_change(a, b)
    verdict = "within noise" if abs(ratio - 1) <= noise else "faster" if ratio > 1 else "slower"
    verdict = explained(verdict, ratio, noise, machine)
    return {
        **{name: a[name] for name in KEY},
        "before_tok_per_s": statistics.median(before),
        "after_tok_per_s": statistics.median(after),
        "ratio": ratio,
        "noise": noise if math.isfinite(noise) else None,
        "verdict": verdict if math.isfinite(noise) else "one run: unknown",
        "machine": machine,
    }


def machine_change(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any] | None:
    """How the yardsticks and the load of one machine changed between two rows; None for two machines or
    devices, and where a row does not have them."""
    names = ("copy_bytes_per_s", "fma_flops_per_s")
    if any(a.get(name) != b.get(name) for name in ("device", "driver", "cpu")):
        return None
    if not all(isinstance(r.get(name), (int, float)) and r[name] > 0 for r in (a, b) for name in names):
        return None
    return {
        **{name: (a[name], b[name]) for name in names},
        "copy_ratio": b[names[0]] / a[names[0]],
        "fma_ratio": b[names[1]] / a[names[1]],
        "load_average": (a.get("load_average"), b.get("load_average")),
        "others_load": (others_load(a), others_load(b)),
    }


def others_load(r: Mapping[str, Any]) -> float:
    """The part of the load that cannot be the benchmark's own: what is above the number of its cores."""
    load = r.get("load_average")
    cores = re.search(r"(\d+) cores$", str(r.get("cpu", "")))
    return max(0.0, float(load) - int(cores[1])) if isinstance(load, (int, float)) and cores else 0.0


def explained(verdict: str, ratio: float, noise: float, machine: Mapping[str, Any] | None) -> str:
    """The verdict, or that it was the machine: a difference no larger than that of its yardsticks, or one
    under another load."""
    if machine is None or verdict not in ("faster", "slower"):
        return verdict
    changes = machine["copy_ratio"], machine["fma_ratio"]
    was, now = machine["others_load"]
    if verdict == "slower":
        least, busier = min(changes), now - was >= OTHERS_LOAD
        if busier or (least < 1 - YARDSTICK_NOISE and ratio + noise >= least * (1 - YARDSTICK_NOISE)):
            return "the machine was slower"
    else:
        most, idler = max(changes), was - now >= OTHERS_LOAD
        if idler or (most > 1 + YARDSTICK_NOISE and ratio - noise <= most * (1 + YARDSTICK_NOISE)):
            return "the machine was faster"
    return verdict


def machine_line(machine: Mapping[str, Any]) -> str:
    """The yardsticks and loads of both sides, in a line."""
    copies, computes = (
        f"{name} {was / 1e9:.1f} → {now / 1e9:.1f} {unit} ({machine[ratio]:.2f} ×)"
        for name, (was, now), unit, ratio in (
            ("copies", machine["copy_bytes_per_s"], "GB/s", "copy_ratio"),
            ("computes", machine["fma_flops_per_s"], "GFLOP/s", "fma_ratio"),
        )
    )
    loads = machine["load_average"]
    load = f", load {loads[0]:.1f} → {loads[1]:.1f}" if None not in loads else ""
    return f"machine: {copies}, {computes}{load}"


def relative_error(values: Sequence[float]) -> float:
    """Standard error of the median over the median, from the spread of a few runs: 1.25 standard errors
    of the mean, as for normal noise. Infinite for one run, which tells nothing of its noise."""
    if len(values) < 2:
        return math.inf
    return 1.2533 * statistics.stdev(values) / math.sqrt(len(values)) / statistics.median(values)


def listed(keys: Iterable[Sequence[str]], most: int = 3) -> str:
    names = [" ".join(key) for key in keys]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def described(was: Any, now: Any) -> str:
    """``a → b``, or for lists what came and what went."""
    if isinstance(was, list) and isinstance(now, list):
        came, went = [f"+{x}" for x in now if x not in was], [f"-{x}" for x in was if x not in now]
        return " ".join([*came, *went])
    return f"{was} → {now}"


def differences(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, tuple[Any, Any]]:
    """What is not the same about the two sides: of the first row that differs."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in TOLD:
        for a, b in pairs:
            if a.get(name) != b.get(name):
                found[name] = (a.get(name), b.get(name))
                break
    return found

"""``xinfer-vk selftest``: can this device and its driver be trusted? Every kernel against its reference."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import click

from xinfer_vk.cli.output import say_json, tell
from xinfer_vk.cli.progress import ProgressBar
from xinfer_vk.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from xinfer_vk.plan import Runtime
    from xinfer_vk.selftest import Case, Outcome

PIPE_WIDTH = 120  # columns of the table when nobody says how wide the terminal is


@click.command("selftest")
@click.option("--device", "-d", help="Device index, part of its name, or numpy. [default: best GPU]")
@click.option("--kernel", "-k", metavar="FILTER", help="Run only checks with FILTER in their name.")
@click.option("--full", is_flag=True, help="Run every check of this device's kernels, not a selection.")
@click.option(
    "--all", "everything", is_flag=True, help="Also run the long checks and the variants for other devices."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def command(device: str | None, kernel: str | None, full: bool, everything: bool, as_json: bool) -> None:
    """Check every kernel on a device against its NumPy reference.

    Each line is one check, with the largest absolute error found and the error allowed there. By default a
    selection runs that covers every kernel family and memory kind. The exit code is 1 if a check fails: do
    not trust this device with this driver then.
    """
    from xinfer_vk.selftest import run_cases, short
    from xinfer_vk.vulkan.runtime import open_runtime

    chosen = choose_cases(kernel, everything)
    started = time.perf_counter()
    runtime = open_runtime(device)
    try:
        for notice in getattr(runtime, "notices", ()):
            tell(notice)
        cases = [case for case in chosen if case.applies(runtime.profile)]
        if not (full or everything or kernel):
            cases = short(cases)
        outcomes: list[Outcome] = []
        with ProgressBar() as progress:
            progress("checking kernels", 0, len(cases))
            for outcome in run_cases(runtime, cases):
                outcomes.append(outcome)
                progress("checking kernels", len(outcomes), len(cases))
        seconds = time.perf_counter() - started
        if as_json:
            say_json(as_record(runtime, outcomes, seconds))
        else:
            show(runtime, outcomes, seconds)
    finally:
        runtime.close()
    if not all(outcome.passed for outcome in outcomes):
        raise click.exceptions.Exit(1)


def choose_cases(kernel: str | None, everything: bool) -> list[Case]:
    """The checks asked for. Raises :class:`UsageError` when the filter fits none."""
    from xinfer_vk.selftest import all_cases

    cases = [case for case in all_cases() if everything or case.quick]
    if kernel is None:
        return cases
    fitting = [case for case in cases if kernel.lower() in str(case).lower()]
    if not fitting:
        names = ", ".join(dict.fromkeys(case.kernel for case in cases))
        raise UsageError(f"no check has {kernel!r} in its name: the kernels are {names}")
    return fitting


def as_record(runtime: Runtime, outcomes: list[Outcome], seconds: float) -> dict[str, Any]:
    """What ``--json`` prints. An error that is no number (nothing was computed) is null."""
    from xinfer_vk import __version__

    return {
        "version": __version__,
        "device": runtime.profile.name,
        "driver": getattr(runtime, "driver", ""),
        "companion_layer": getattr(runtime, "layer_active", False),
        "passed": all(outcome.passed for outcome in outcomes),
        "seconds": round(seconds, 3),
        "checks": [
            {
                "kernel": outcome.case.kernel,
                "variant": outcome.case.variant,
                "passed": outcome.passed,
                "error": outcome.finding.error if math.isfinite(outcome.finding.error) else None,
                "bound": outcome.finding.bound,
                "absolute_tolerance": outcome.case.tolerance.absolute,
                "relative_tolerance": outcome.case.tolerance.relative,
                "tolerance_reason": outcome.case.tolerance.reason,
                "problem": outcome.finding.problem,
            }
            for outcome in outcomes
        ],
    }


def show(runtime: Runtime, outcomes: list[Outcome], seconds: float) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH)
    console.print(table(outcomes))
    failed = [outcome for outcome in outcomes if not outcome.passed]
    for outcome in failed:
        console.print(
            f"FAIL {outcome.case}: {outcome.finding.problem}", style="red", markup=False, highlight=False
        )
    where = " ".join(filter(None, (runtime.profile.name, getattr(runtime, "driver", ""))))
    if failed:
        text = f"{len(failed)} of {len(outcomes)} checks failed on {where} ({seconds:.1f} s): do not trust it"
    else:
        text = f"all {len(outcomes)} checks passed on {where} ({seconds:.1f} s)"
    console.print(text, style="bold red" if failed else "bold green", markup=False, highlight=False)


def table(outcomes: list[Outcome]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title, justify in (("kernel", "left"), ("variant", "left"), ("error", "right"), ("allowed", "left")):
        result.add_column(title, justify=justify)  # type: ignore[arg-type]
    result.add_column("verdict")
    kernel = ""
    for outcome in outcomes:
        case, error = outcome.case, outcome.finding.error
        result.add_row(
            Text(case.kernel if case.kernel != kernel else ""),
            Text(case.variant),
            "exact" if error == 0 else f"{error:.1e}" if math.isfinite(error) else "–",
            allowed(case, outcome.finding.bound),
            Text("PASS", "green") if outcome.passed else Text("FAIL", "bold red"),
        )
        kernel = case.kernel
    return result


def allowed(case: Case, bound: float | None) -> str:
    """The bound that was applied at the largest error, or ``1e-06 + 4e-06 |x|`` where that is not known."""
    if bound:
        return f"{bound:.1e}"
    tolerance = case.tolerance
    parts = [f"{tolerance.absolute:.0e}"] if tolerance.absolute else []
    parts += [f"{tolerance.relative:.0e} |x|"] if tolerance.relative else []
    return " + ".join(parts) or "none"

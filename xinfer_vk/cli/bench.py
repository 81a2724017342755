"""``xinfer-vk bench``: how fast a model prefills and decodes on a device, and how near its limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import click

from xinfer_vk.cli.bench_compare import command as compare
from xinfer_vk.cli.bench_plot import check_plot_folder
from xinfer_vk.cli.bench_report import FORMATS, Report, as_record, profile_record
from xinfer_vk.cli.options import ACTIVATIONS_OPTION, KV_DTYPES, QUANTIZE_TYPES, TUNE_OPTION
from xinfer_vk.cli.progress import ProgressBar
from xinfer_vk.errors import DeviceError, DeviceLostError, UsageError, XinferError

if TYPE_CHECKING:
    from xinfer_vk.engine.bench import Bench, Peak, Workload
    from xinfer_vk.engine.tune import Tune

DEFAULT_MODEL = "smollm2-135m"


class Counts(click.ParamType):
    """Numbers separated by commas: ``0,512,4096``."""

    name = "N,N,…"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 128,512", param, ctx)
        if min(numbers) < 0:
            self.fail(f"{value!r} has a negative number in it", param, ctx)
        return numbers


COUNTS = Counts()


@click.group("bench", invoke_without_command=True)
@click.option("--model", "-m", "models", multiple=True, help="As for generate. May be repeated.")
@click.option(
    "--synthetic",
    "-s",
    multiple=True,
    metavar="SHAPE:FORMAT",
    help="Random weights of a known shape, made on the device. May be repeated, or a list with commas.",
)
@click.option("--device", "devices", multiple=True, help="As for generate, or all. May be repeated.")
@click.option("--prompt-tokens", "-p", type=COUNTS, default=(512,), help="Prefill so many. [default: 512]")
@click.option("--new-tokens", "-n", type=COUNTS, default=(128,), help="Decode so many. [default: 128]")
@click.option("--depth", "-d", type=COUNTS, default=(0,), help="Tokens in the cache before. [default: 0]")
@click.option("--batch", "-b", type=COUNTS, default=(1,), help="Sequences at once. [default: 1]")
@click.option("--repeats", "-r", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--warm-up", type=click.IntRange(min=0), default=1, show_default=True, help="Runs left out.")
@click.option(
    "--kv-dtype",
    type=click.Choice(KV_DTYPES),
    default=("f16",),
    multiple=True,
    help="Format of the KV cache. May be repeated. [default: f16]",
)
@click.option(
    "--quantize", type=click.Choice(QUANTIZE_TYPES), help="As for generate, of the models that are files."
)
@ACTIVATIONS_OPTION
@TUNE_OPTION
@click.option("--profile", is_flag=True, help="Also the time of each kernel in a step of each row.")
@click.option("--plot", type=click.Path(file_okay=False), metavar="DIR", help="Also draw plots there.")
@click.option("--output", "-o", type=click.Choice(FORMATS), default="md", show_default=True)
@click.option("--quiet", "-q", is_flag=True, help="Print the results and nothing else.")
@click.pass_context
def command(
    ctx: click.Context,
    models: tuple[str, ...],
    synthetic: tuple[str, ...],
    devices: tuple[str, ...],
    prompt_tokens: tuple[int, ...],
    new_tokens: tuple[int, ...],
    depth: tuple[int, ...],
    batch: tuple[int, ...],
    repeats: int,
    warm_up: int,
    kv_dtype: tuple[str, ...],
    quantize: str | None,
    activations: str,
    tune: Tune,
    profile: bool,
    plot: str | None,
    output: str,
    quiet: bool,
) -> None:
    """Measure prefill (pp) and decode (tg), every combination of the lists a row.

    Rates are medians over the repetitions with their range; beside them the bytes of weights and KV cache
    and the flops of a second, and their share of what small kernels of ours copy and compute on the same
    device in the same run. docs/benchmarks.md explains every column. -p 0 or -n 0 leaves a kind out.
    """
    if ctx.invoked_subcommand is not None:
        return
    from xinfer_vk.engine.bench import Bench, Workload, check_workloads, load_subject, measure_peak
    from xinfer_vk.vulkan.runtime import open_runtime
    from xinfer_vk.weights.synthetic import open_synthetic

    tests = [
        Workload(kind, tokens, d, b)
        for d, b, (kind, counts) in product(depth, batch, (("pp", prompt_tokens), ("tg", new_tokens)))
        for tokens in counts
        if tokens
    ]
    if not tests:
        raise UsageError("nothing to measure: -p and -n are both 0")
    if 0 in batch:
        raise UsageError("-b 0: a batch has at least one sequence")
    if plot is not None:
        check_plot_folder(plot)
    made = [name for text in synthetic for name in text.split(",")]
    subjects = [*((m, False) for m in models), *((s, True) for s in made)] or [(DEFAULT_MODEL, False)]
    for name in made:
        check_workloads(open_synthetic(name)[0].config, tests)  # before anything is measured
    several = len(subjects) * len(kv_dtype) * len(devices) > 1 or "all" in devices
    failed = False
    with (
        ProgressBar(enabled=False if quiet else None) as progress,
        Report(output, plot, progress) as report,
    ):
        for device in _devices(devices):
            runtime = open_runtime(device)
            try:
                if not quiet:
                    for notice in runtime.notices:
                        progress.tell(notice)
                progress("measuring the device", 0, 1)
                peak = measure_peak(runtime)
                progress("measuring the device", 1, 1)
                for (model, is_synthetic), kv in product(subjects, kv_dtype):
                    try:
                        subject = load_subject(
                            runtime,
                            model,
                            synthetic=is_synthetic,
                            quantize=quantize,
                            tune=tune,
                            progress=progress,
                        )
                        try:
                            bench = Bench(subject, tests, kv, progress, activations)
                            _measure(bench, tests, repeats, warm_up, profile, peak, report, progress)
                        finally:
                            subject.free()
                    except XinferError as error:
                        if not several:
                            raise
                        failed = True  # the others may do
                        progress.tell(f"error: {model} on {runtime.profile.name}: {error}")
            finally:
                runtime.close()
    if failed:
        raise click.exceptions.Exit(1)


command.add_command(compare)


def _measure(
    bench: Bench,
    tests: Sequence[Workload],
    repeats: int,
    warm_up: int,
    profile: bool,
    peak: Peak,
    report: Report,
    progress: ProgressBar,
) -> None:
    """Every test of one model on one device."""
    doing = f"measuring {bench.subject.name}"
    try:
        for i, test in enumerate(tests):
            progress(doing, i, len(tests))
            measured = bench.measure(test, repeats, warm_up)
            record = as_record(bench, measured, peak, repeats, warm_up)
            if profile:
                try:
                    record["profile"] = profile_record(bench.profile(test, repeats), peak)
                except DeviceLostError:
                    raise
                except DeviceError as error:  # no layer, or no clock: the row is worth having anyway
                    progress.tell(f"no profile of {test}: {error}")
            report.add(record)
        progress(doing, len(tests), len(tests))
    finally:
        bench.free()


def _devices(wanted: Sequence[str]) -> Iterator[str | None]:
    """What to open, in turn. "all" is every device that can be used."""
    if not wanted:
        yield None
    for name in wanted:
        if name.lower() != "all":
            yield name
            continue
        from xinfer_vk.vulkan.devices import list_devices

        yield from (str(device.index) for device in list_devices() if not device.rejected)

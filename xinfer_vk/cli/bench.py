"""``xinfer-vk bench``: how fast a model prefills and decodes on a device, and how near its limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import product
from typing import TYPE_CHECKING, Any

import click

from xinfer_vk.cli.bench_compare import command as compare
from xinfer_vk.cli.bench_plot import check_plot_folder
from xinfer_vk.cli.bench_report import FORMATS, Report, as_record, profile_record
from xinfer_vk.cli.completion import complete_model, complete_shape
from xinfer_vk.cli.mistakes import Group
from xinfer_vk.cli.options import ACTIVATIONS_OPTION, KV_DTYPES, QUANTIZE_TYPES, TUNE_OPTION
from xinfer_vk.cli.output import OutputError, say, tell
from xinfer_vk.cli.progress import ProgressBar
from xinfer_vk.errors import DeviceError, DeviceLostError, UsageError, XinferError

if TYPE_CHECKING:
    from xinfer_vk.engine.bench import Bench, Peak, Workload
    from xinfer_vk.engine.config import Activations, Tune

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


@click.group("bench", cls=Group, invoke_without_command=True)
@click.option(
    "--model",
    "-m",
    "models",
    multiple=True,
    shell_complete=complete_model,
    help="Model to measure, as in generate. May be repeated.",
)
@click.option(
    "--synthetic",
    multiple=True,
    metavar="SHAPE:FORMAT",
    shell_complete=complete_shape,
    help="Random weights of a known shape, such as qwen2.5-0.5b:q4_0; needs no download. May be repeated; "
    "commas separate several.",
)
@click.option("--list-shapes", is_flag=True, help="Print the shapes and formats for --synthetic.")
@click.option("--device", "devices", multiple=True, help="Device, as in generate, or all. May be repeated.")
@click.option("--prompt-tokens", "-p", type=COUNTS, default=(512,), help="Prompt tokens. [default: 512]")
@click.option("--new-tokens", "-n", type=COUNTS, default=(128,), help="Tokens to decode. [default: 128]")
@click.option("--depth", "-d", type=COUNTS, default=(0,), help="Tokens already in the KV cache. [default: 0]")
@click.option("--batch", "-b", type=COUNTS, default=(1,), help="Sequences per batch. [default: 1]")
@click.option("--repeats", "-r", type=click.IntRange(min=1), default=5, show_default=True, help="Timed runs.")
@click.option("--warm-up", type=click.IntRange(min=0), default=1, show_default=True, help="Untimed runs.")
@click.option(
    "--kv-dtype",
    type=click.Choice(KV_DTYPES),
    default=("f16",),
    multiple=True,
    help="Number format of the KV cache. May be repeated. [default: f16]",
)
@click.option("--quantize", type=click.Choice(QUANTIZE_TYPES), help="As in generate; not for --synthetic.")
@ACTIVATIONS_OPTION
@TUNE_OPTION
@click.option(
    "--against",
    metavar="OTHER",
    help="Measure in turns with another version (its checkout or virtual environment), format or model, and "
    "report the ratios; --repeats is the number of rounds.",
)
@click.option("--profile", is_flag=True, help="Also report the time of each kernel.")
@click.option(
    "--plot",
    type=click.Path(file_okay=False, writable=True),
    metavar="DIR",
    help="Write plots to this directory.",
)
@click.option(
    "--output",
    "-o",
    type=click.Choice(FORMATS),
    default="md",
    show_default=True,
    help="Output format: a table, or all figures as data. jsonl, and md in a pipe, print each row at once.",
)
@click.option("--quiet", "-q", is_flag=True, help="Print only the results.")
@click.pass_context
def command(
    ctx: click.Context,
    models: tuple[str, ...],
    synthetic: tuple[str, ...],
    list_shapes: bool,
    devices: tuple[str, ...],
    prompt_tokens: tuple[int, ...],
    new_tokens: tuple[int, ...],
    depth: tuple[int, ...],
    batch: tuple[int, ...],
    repeats: int,
    warm_up: int,
    kv_dtype: tuple[str, ...],
    quantize: str | None,
    activations: Activations,
    tune: Tune,
    against: str | None,
    profile: bool,
    plot: str | None,
    output: str,
    quiet: bool,
) -> None:
    """Measure prefill (pp) and decode (tg) speed. Each combination of the lists is one row.

    A rate is the median of the timed runs, shown with its range. The table also shows memory traffic and
    arithmetic, each as a share of what the device reaches in small copy and FMA kernels. -p 0 or -n 0 skips
    prefill or decode. Ctrl-C prints the rows measured so far. docs/benchmarks.md explains every column.

    -p, -n and -d mean what they mean in llama-bench (prompt tokens, new tokens, depth), not what they mean
    in the other commands (prompt, most new tokens, device).
    """
    if ctx.invoked_subcommand is not None:
        return
    if list_shapes:
        return _list_shapes()
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
    made = [name for text in synthetic for name in text.split(",")]
    subjects = [*((m, False) for m in models), *((s, True) for s in made)] or [(DEFAULT_MODEL, False)]
    for name in made:
        check_workloads(open_synthetic(name)[0].config, tests)  # before anything is measured
    if quantize is not None and made and not models:
        raise UsageError(
            f"--quantize {quantize} is for models that are files (-m): write a shape's format behind it, "
            f"as in --synthetic {made[0].partition(':')[0]}:{quantize}"
        )
    if against is not None:
        if len(subjects) > 1 or len(devices) > 1 or profile or plot is not None:
            raise UsageError("--against takes one model and one device, and neither --profile nor --plot")
        options = [
            *(f"--prompt-tokens={_commas(prompt_tokens)}", f"--new-tokens={_commas(new_tokens)}"),
            *(f"--depth={_commas(depth)}", f"--batch={_commas(batch)}", f"--warm-up={warm_up}"),
            *(f"--kv-dtype={kv}" for kv in kv_dtype),
            *(f"--device={device}" for device in devices),
            *([f"--activations={activations}"] if activations != "f32" else []),
            *([f"--tune={tune}"] if tune != "quick" else []),
            *("--repeats=1", "--output=json", "--quiet"),
        ]
        return _against(against, *subjects[0], quantize, options, repeats, output, quiet)
    wanted = list(dict.fromkeys(_devices(devices)))
    if plot is not None:
        check_plot_folder(plot)
    several = len(subjects) * len(kv_dtype) * len(wanted) > 1
    failed = False

    @contextmanager
    def others_may_do(what: str) -> Iterator[None]:
        """Of several, one that fails is told, and does not take the others along."""
        nonlocal failed
        try:
            yield
        except OutputError:
            raise
        except XinferError as error:
            if not several:
                raise
            failed = True
            progress.tell(f"error: {what}: {error}")

    with (
        ProgressBar(enabled=False if quiet else None) as progress,
        Report(output, plot, progress) as report,
    ):
        for device in wanted:
            with others_may_do(f"device {device}"), closing(open_runtime(device)) as runtime:
                if not quiet:
                    for notice in runtime.notices:
                        progress.tell(notice)
                progress("measuring the device", 0, 1)
                peak = measure_peak(runtime)
                progress("measuring the device", 1, 1)
                for (model, is_synthetic), kv in product(subjects, kv_dtype):
                    with others_may_do(f"{model} on {runtime.profile.name}"):
                        subject = load_subject(
                            runtime,
                            model,
                            synthetic=is_synthetic,
                            quantize=None if is_synthetic else quantize,
                            activations=activations,
                            tune=tune,
                            tests=tests,
                            progress=progress,
                        )
                        try:
                            if not quiet:
                                for note in subject.notices:
                                    progress.tell(note)
                            bench = Bench(subject, tests, kv, progress, activations)
                            _measure(bench, tests, repeats, warm_up, profile, peak, report, progress)
                        finally:
                            subject.free()
    if failed:
        raise click.exceptions.Exit(1)


command.add_command(compare)


def _against(
    other: str,
    model: str,
    synthetic: bool,
    quantize: str | None,
    options: Sequence[str],
    rounds: int,
    output: str,
    quiet: bool,
) -> None:
    from xinfer_vk.cli.bench_against import Against, check_other, measure_in_turns, other_side, this_side

    this = this_side(model, synthetic, quantize)
    against = other_side(other, this)
    check_other(against, this)
    with Against(this, against, output) as report, ProgressBar(enabled=False if quiet else None) as progress:
        measure_in_turns(this, against, options, rounds, progress, report)


def _commas(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _list_shapes() -> None:
    from xinfer_vk.kernels.synthetic import PATTERNS
    from xinfer_vk.models.shapes import SHAPES

    say("\n".join(SHAPES))
    tell(f"formats: {', '.join(PATTERNS)}")


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
    """What to open, in turn; "all" is every device that can be used. Raises :class:`UsageError` for a name
    that fits none and :class:`DeviceError` for one that cannot be used: now, not after an hour of others."""
    from xinfer_vk.vulkan.devices import choose_device, list_devices

    if not wanted:
        yield None
    for name in wanted:
        if name.lower() != "all":
            chosen = choose_device(name).device
            yield str(chosen.index) if chosen else "numpy"
            continue
        found = list_devices()
        if all(device.rejected for device in found):
            reasons = "; ".join(f"{device.name}: {device.rejected}" for device in found)
            raise DeviceError(f"--device all: none can be used ({reasons}); --device numpy needs none")
        yield from (str(device.index) for device in found if not device.rejected)

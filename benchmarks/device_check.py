"""Everything worth knowing of a device in a few minutes: is it right, and how fast is it.

    python benchmarks/device_check.py --seconds 240 --output device_check.json

Runs in turn, each part in a process of its own, so that none can take the others along (a crash, a hang or
a lost device ends its part): the device's properties; the kernel tests; hundreds of dependent dispatches
against NumPy, many times; whole models against NumPy; prefill and decode of synthetic models from 0.5B to
8B in bf16, q8_0 and q4_k, with GB/s and the shares of what the device copies and computes. A part that
runs out of its share of the time keeps what it has. The JSON file is written after every part; a short
table comes last.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
SHAPES = ("qwen2.5-0.5b", "llama-3.1-8b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b")
FORMATS = ("q8_0", "bf16", "q4_k")
OUT_OF_TIME = "not run: out of time"


@dataclass
class Part:
    """``arguments`` of a Python process that prints JSON lines. ``seconds``: it gets at most."""

    name: str
    arguments: list[str]
    seconds: float
    records: list[dict[str, Any]] = field(default_factory=list)
    took_s: float = 0.0
    problem: str = ""


def parts(device: str, tokens: int, repeats: int, tune: str) -> list[Part]:
    """In the order of what one wants to know first."""
    here = [str(Path(__file__).resolve()), "--device", device]
    bench = [
        "-m",
        "xinfer_vk",
        "bench",
        *(["--device", device] if device else []),
        "-o",
        "jsonl",
        "-q",
        "-r",
        str(repeats),
        "--tune",
        tune,
    ]
    found = [
        Part("device", [*here, "--part", "device"], 20),
        Part("synchronization", [*here, "--part", "synchronization"], 20),
        Part("kernels", [*here, "--part", "kernels"], 60),
        Part("models", [*here, "--part", "models"], 40),
    ]
    measure = ["-p", "512", "-n", str(tokens)]
    for shape in SHAPES:
        for fmt in FORMATS:
            profile = ["--profile"] if shape in SHAPES[:2] else []
            found.append(
                Part(f"{shape}:{fmt}", [*bench, *measure, *profile, "--synthetic", f"{shape}:{fmt}"], 60)
            )
        if shape == SHAPES[1]:  # the ends of the scale first, then what depth and batches do
            more = ["--synthetic", f"{SHAPES[0]}:q8_0,{SHAPES[1]}:q8_0", "-p", "0", "-n", str(tokens)]
            found.append(Part("depth 4096", [*bench, *more, "-d", "4096"], 40))
            found.append(Part("variants", [*here, "--part", "variants"], 60))
            found.append(Part("batch", [*bench, *more, "-b", "8,32"], 40))
    return found


# -- parts that are not the program's own commands ------------------------------------------------


def device_part(device: str) -> Iterator[dict[str, Any]]:
    from xinfer_vk.engine.bench import measure_peak
    from xinfer_vk.vulkan.devices import choose_device, list_devices
    from xinfer_vk.vulkan.runtime import open_runtime

    chosen = choose_device(device or None, list_devices()).device
    if chosen is not None:
        yield chosen.as_dict()
    runtime = open_runtime(device or None)
    try:
        yield {"layer": getattr(runtime, "layer_active", False), "features": sorted(runtime.profile.features)}
        peak = measure_peak(runtime)
        yield {"copy_bytes_per_s": peak.copy_bytes_per_s, "fma_flops_per_s": peak.flops_per_s}
    finally:
        runtime.close()


def checks(device: str, choose: Callable[[Any], bool], rounds: int = 1) -> Iterator[dict[str, Any]]:
    """Quick cases of the selftest."""
    from xinfer_vk.selftest import all_cases, run_cases
    from xinfer_vk.vulkan.runtime import open_runtime

    runtime = open_runtime(device or None)
    try:
        cases = [c for c in all_cases() if c.quick and choose(c) and c.applies(runtime.profile)]
        for _ in range(rounds):
            for outcome in run_cases(runtime, cases):
                yield {
                    "check": str(outcome.case),
                    "passed": outcome.passed,
                    "error": outcome.finding.error if outcome.finding.error < float("inf") else None,
                    "problem": outcome.finding.problem,
                }
    finally:
        runtime.close()


def kernels_part(device: str) -> Iterator[dict[str, Any]]:
    return checks(device, lambda case: case.kernel != "synchronization")


def synchronization_part(device: str) -> Iterator[dict[str, Any]]:
    return checks(device, lambda case: case.kernel == "synchronization", rounds=20)


def models_part(device: str) -> Iterator[dict[str, Any]]:
    """Logits of random models of one or two layers, prefill and then decode, against the NumPy reference."""
    import numpy as np

    from xinfer_vk.engine.runner import Chunk, make_runner
    from xinfer_vk.models.registry import family
    from xinfer_vk.reference import NumpyRuntime
    from xinfer_vk.vulkan.runtime import open_runtime
    from xinfer_vk.weights.synthetic import SyntheticPlanner, open_synthetic

    def logits(runtime: Any, name: str, layers: int) -> Any:
        source, fmt = open_synthetic(name)
        config = replace(source.config, layers=layers, vocab_size=8192)
        planner = SyntheticPlanner(source, runtime.profile, fmt)
        weights = family(config.architecture).load(planner, config)
        planner.upload(runtime)
        runner = make_runner(runtime, config, weights, "f32", capacity=128)
        sequence, rows = runner.cache.open(), []
        for ids in ([(7919 * i) % 8192 for i in range(100)], [5], [77], [4242]):
            rows.append(runner.run([Chunk(sequence, ids)], "logits"))
        runner.free()
        runner.cache.free()
        planner.free(runtime)
        return np.concatenate(rows)

    vulkan, reference = open_runtime(device or None), NumpyRuntime()
    try:
        small = [(f"qwen2.5-0.5b:{fmt}", 2) for fmt in (*FORMATS, "f16", "q4_0", "q6_k")]
        for name, layers in [*small, ("llama-3.1-8b:q4_k", 1)]:
            got, want = logits(vulkan, name, layers), logits(reference, name, layers)
            error, allowed = float(np.abs(got - want).max()), 1e-3 * float(want.std())
            yield {
                "check": f"logits of {name}, {layers} layers, {len(got)} steps",
                "passed": error <= allowed,  # NaN is not
                "error": error if np.isfinite(error) else None,
                "problem": "" if error <= allowed else f"off by {error:.3g}, {allowed:.3g} is allowed",
            }
    finally:
        vulkan.close()


def variants_part(device: str) -> Iterator[dict[str, Any]]:
    """Every variant of a product with a matrix of an 8B model, for one row of x to 512: its time."""
    from xinfer_vk.engine.tune import QUICK_TOKENS, Shape, Tuner
    from xinfer_vk.errors import XinferError
    from xinfer_vk.kernels.layout import row_words
    from xinfer_vk.kernels.matmul import variants
    from xinfer_vk.models.registry import family
    from xinfer_vk.vulkan.runtime import open_runtime
    from xinfer_vk.weights.synthetic import SyntheticPlanner, open_synthetic

    runtime = open_runtime(device or None)
    try:
        for fmt in FORMATS:
            source, _ = open_synthetic(f"llama-3.1-8b:{fmt}")
            config = replace(source.config, layers=4, vocab_size=8192)
            planner = SyntheticPlanner(source, runtime.profile, fmt)
            weights = family(config.architecture).load(planner, config)
            planner.upload(runtime)
            matrices = [matrix for layer in weights.layers for matrix in layer.down]
            rows, cols = matrices[0].rows, matrices[0].cols
            shapes = [Shape(fmt, rows, cols, tokens) for tokens in QUICK_TOKENS]
            tuner = Tuner(runtime, shapes)
            for shape in shapes:
                for name in variants(runtime.profile, fmt, cols, shape.tokens, True):
                    record = {
                        "variant": name,
                        "format": fmt,
                        "rows": rows,
                        "cols": cols,
                        "tokens": shape.tokens,
                    }
                    try:
                        seconds, _ = tuner.time(shape, name, matrices)
                    except XinferError as error:
                        yield {**record, "problem": str(error)}
                        continue
                    yield {
                        **record,
                        "seconds": seconds,
                        "bytes_per_s": rows * row_words(fmt, cols) * 4 / seconds,
                        "flops_per_s": 2 * rows * cols * shape.tokens / seconds,
                    }
            tuner.free()
            planner.free(runtime)
    finally:
        runtime.close()


OWN_PARTS: dict[str, Callable[[str], Iterator[dict[str, Any]]]] = {
    "device": device_part,
    "kernels": kernels_part,
    "synchronization": synchronization_part,
    "models": models_part,
    "variants": variants_part,
}


# -- running them ---------------------------------------------------------------------------------


def run(part: Part, seconds: float) -> None:
    """Run a part for at most that long; what it printed until then counts."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, *part.arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    ) as process:
        errors: list[str] = []
        assert process.stdout is not None and process.stderr is not None
        reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()))
        reader.start()
        watch = threading.Timer(seconds, process.kill)
        watch.start()
        for line in process.stdout:
            try:
                part.records.append(json.loads(line))
            except ValueError:
                errors.append(line)
        process.wait()
        timed_out = not watch.is_alive()
        watch.cancel()
        reader.join()
    part.took_s = time.monotonic() - began
    failed = [r for r in part.records if not r.get("passed", True)]
    if failed:
        part.problem = f"{len(failed)} of {len(part.records)} checks failed, first {failed[0]['check']}: "
        part.problem += failed[0]["problem"]
    elif timed_out:
        part.problem = f"stopped after {seconds:.0f} s"
    elif process.returncode:
        last = next((line.strip() for line in reversed(errors) if line.strip()), "no message")
        part.problem = f"exit code {process.returncode}: {last[:300]}"


def speed_line(r: dict[str, Any]) -> str:
    return (
        f"{r['model']:18} {r['test']:12} {r['tok_per_s']:9.1f} tok/s "
        f"[{r['tok_per_s_min']:.1f}–{r['tok_per_s_max']:.1f}] "
        f"{r['bytes_per_s'] / 1e9:7.0f} GB/s {100 * r['bandwidth_share']:3.0f} % "
        f"{r['flops_per_s'] / 1e12:7.2f} TFLOP/s {100 * r['flops_share']:3.0f} %  "
        f"{r['dispatches_per_step']:.0f} dispatches"
    )


def variant_line(r: dict[str, Any]) -> str:
    what = f"{r['format']:5} {r['rows']} × {r['cols']}, {r['tokens']:3} tokens: {r['variant']:16}"
    if "seconds" not in r:
        return f"{what} PROBLEM: {r['problem']}"
    return (
        f"{what} {r['seconds'] * 1e6:9.1f} µs {r['bytes_per_s'] / 1e9:6.0f} GB/s "
        f"{r['flops_per_s'] / 1e12:6.2f} TFLOP/s"
    )


def kernel_lines(r: dict[str, Any], most: int = 4) -> list[str]:
    """Where a step's time goes: the kernels with the largest shares."""
    profile, wall = r["profile"], r["tpot_s"]
    text = f"{r['model']} {r['test']}: {profile['seconds'] * 1e3:.2f} ms of the device"
    lines = [text + (f", {wall * 1e3:.2f} ms of the host" if wall else "")]
    for k in sorted(profile["kernels"], key=lambda k: -k["seconds"])[:most]:
        lines.append(
            f"  {100 * k['share']:3.0f} % {k['label']:16} {k['kernel']:26} {k['calls']:3} × "
            f"{k['seconds'] / k['calls'] * 1e6:8.1f} µs  {k['bytes_per_s'] / 1e9:6.0f} GB/s "
            f"{k['flops_per_s'] / 1e12:6.2f} TFLOP/s"
        )
    return lines


def table(done: list[Part]) -> str:
    lines = []
    skipped = [part.name for part in done if part.problem == OUT_OF_TIME]
    for part in done:
        if part.name in skipped:
            continue
        speeds = [r for r in part.records if "tok_per_s" in r]
        checked = [r for r in part.records if "check" in r]
        text = f"{sum(r['passed'] for r in checked)} of {len(checked)} passed" if checked else ""
        if part.name == "device":
            known = {k: v for r in part.records for k, v in r.items()}
            text = f"{known.get('name')}, {known.get('driver_name')} {known.get('driver_version')}"
            if "copy_bytes_per_s" in known:
                text += f", copies {known['copy_bytes_per_s'] / 1e9:.0f} GB/s, "
                text += f"computes {known['fma_flops_per_s'] / 1e12:.2f} TFLOP/s"
        problem = f"  PROBLEM: {part.problem}" if part.problem else ""
        if not speeds or problem:
            lines.append(f"{part.name:18} {part.took_s:5.1f} s  {text}{problem}")
        lines += [speed_line(r) for r in speeds]
    lines += [variant_line(r) for part in done for r in part.records if "variant" in r]
    lines += [line for part in done for r in part.records if "profile" in r for line in kernel_lines(r)]
    if skipped:
        lines.append(f"{OUT_OF_TIME}: {', '.join(skipped)}")
    return "\n".join(lines)


@click.command()
@click.option("--device", default="", help="As for xinfer-vk. [default: the best there is]")
@click.option("--seconds", default=240.0, show_default=True, type=click.FloatRange(min=1), help="In all.")
@click.option(
    "--output", default="device_check.json", show_default=True, type=click.Path(dir_okay=False, writable=True)
)
@click.option("--only", help="Only parts whose name contains this.")
@click.option("--new-tokens", default=64, show_default=True, type=click.IntRange(min=1))
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--tune",
    type=click.Choice(["off", "quick", "full"]),
    default="quick",
    show_default=True,
    help="As for xinfer-vk bench.",
)
@click.option("--part", type=click.Choice(list(OWN_PARTS)), hidden=True)
def main(
    device: str,
    seconds: float,
    output: str,
    only: str | None,
    new_tokens: int,
    repeats: int,
    tune: str,
    part: str | None,
) -> None:
    """Check a device and measure it."""
    if part is not None:
        for record in OWN_PARTS[part](device):
            print(json.dumps(record), flush=True)
        return
    ends = time.monotonic() + seconds
    if not Path(output).absolute().parent.is_dir():
        raise click.UsageError(f"--output {output}: there is no such folder")
    every = parts(device, new_tokens, repeats, tune)
    todo = [p for p in every if only is None or only in p.name]
    if not todo:
        raise click.UsageError(f"--only {only}: no part; there are {', '.join(p.name for p in every)}")
    for each in todo:
        left = ends - time.monotonic()
        if left < 3:
            each.problem = OUT_OF_TIME
        else:
            run(each, min(left, each.seconds))
        print(f"{each.name}: {each.took_s:.1f} s {each.problem or 'ok'}", flush=True)
        records = {p.name: {"problem": p.problem, "seconds": p.took_s, "records": p.records} for p in todo}
        Path(output).write_text(json.dumps(records, indent=1), encoding="utf-8")
    print(f"\n{table(todo)}\n\nJSON: {output}")
    sys.exit(any(p.problem for p in todo))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()

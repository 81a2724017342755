"""Every figure of README.md and docs/ that comes out of this program, made again and put in its place.

    python benchmarks/readme_figures.py --list
    python benchmarks/readme_figures.py --exact                # what no machine changes: prints it
    python benchmarks/readme_figures.py --exact --write        # and puts it into the pages
    python benchmarks/readme_figures.py --write                # everything, on a quiet machine
    python benchmarks/readme_figures.py --picture              # draws README's terminal
    python benchmarks/readme_figures.py --only cost,bench --write
    python benchmarks/readme_figures.py --only peers --llama-python ~/peer/bin/python --write

A page marks the place of a block with <!-- figures: NAME --> and <!-- /figures -->. Exact blocks hold counts,
bytes and errors; tests/test_readme_figures.py compares them with a run. Timed blocks end with a line that has
the date, the processor and the commit. Both need lavapipe, and the model of `xinfer-vk pull smollm2-135m`.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
DEVICE = "llvmpipe"
MODEL = "smollm2-135m"
ALICE = "tests/fixtures/alice.txt"
QUESTION = "What is the capital of France?"
PLACE = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- /figures -->)", re.DOTALL)
PROMPTS = (
    "Name a tree.",
    "Name a river.",
    "Write one sentence about rain.",
    QUESTION,
    "Tell me a joke.",
    "Why is the sky blue?",
    "Give me a recipe for soup.",
    "Who wrote Hamlet?",
)
SAMPLED = "T 0.8, top-k 50, top-p 0.95"


class Failed(Exception):
    """A command of a block failed; the message has its last words."""


# -- running things -------------------------------------------------------------------------------


def run(command: Sequence[str], both: bool = False, cwd: Path | None = None, **environment: str) -> str:
    """Standard output of a command, at 140 columns; with ``both`` standard error before it. Raises Failed."""
    env = {**os.environ, "COLUMNS": "140", "XINFER_VK_DEVICE": DEVICE, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd or ROOT)
    if done.returncode:
        raise Failed(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stderr + done.stdout if both else done.stdout


def program(*arguments: str, **options: Any) -> str:
    return run([sys.executable, "-m", "xinfer_vk", *arguments], **options)


def script(name: str, *arguments: str) -> str:
    return run([sys.executable, str(ROOT / "benchmarks" / name), *arguments])


def transcript(*commands: Sequence[str], both: bool = False, cwd: Path | None = None) -> str:
    """A console block: each command of the program with what it prints."""
    lines = []
    for arguments in commands:
        shown = " ".join(f'"{a}"' if " " in a else a for a in arguments)
        lines += [f"$ xinfer-vk {shown}", program(*arguments, both=both, cwd=cwd).rstrip()]
    return "```console\n" + "\n".join(lines) + "\n```\n"


@cache
def bench(*arguments: str) -> list[dict[str, Any]]:
    return json.loads(program("bench", "-m", MODEL, *arguments, "--quiet", "-o", "json"))


def processor() -> str:
    """``AMD EPYC (Zen 4), 2 cores``: virtual machines hide the model's name, not its family."""
    about = {}
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            key, _, value = line.partition(":")
            about.setdefault(key.strip(), value.strip())
    family, model = int(about.get("cpu family", 0)), int(about.get("model", 0))
    zen = {23: "Zen 2", 26: "Zen 5"}.get(family, "")
    if family == 25:
        zen = "Zen 4" if model in range(0x10, 0x20) or model >= 0x60 else "Zen 3"
    name = about.get("model name", "unknown")
    if about.get("vendor_id") == "AuthenticAMD" and zen:
        name += f" ({zen})"
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def provenance() -> str:
    from xinfer_vk.cli.bench_report import commit

    return f"\n({date.today()}, commit {commit()}, {processor()}, load {os.getloadavg()[1]:.1f}.)\n"


def spread(values: Sequence[float], digits: int = 0) -> str:
    low, middle, high = (f"{f(values):.{digits}f}" for f in (min, statistics.median, max))
    return f"{middle} [{low}–{high}]"


def rates(record: dict[str, Any]) -> str:
    return f"{record['tok_per_s']:.0f} [{record['tok_per_s_min']:.0f}–{record['tok_per_s_max']:.0f}]"


# -- exact: the same on every machine -------------------------------------------------------------


def tokens() -> str:
    """What a prompt and a decode step are made of."""
    from xinfer_vk import LLM

    with LLM(MODEL, device=DEVICE) as llm:
        prompt = len(llm.encode(QUESTION))
        m = llm.generate(QUESTION, max_new_tokens=16).metrics
    return (
        f"A decode step of SmolLM2-135M takes {m.dispatches_per_token} dispatches and reads "
        f"{m.bytes_read_per_token:.0f} bytes back.\n"
        f"The question above is {prompt} tokens with its chat template.\n"
    )


def estimate() -> str:
    return transcript(
        ["estimate", "--shape", "qwen2.5-7b", "--quantize", "q4_k", "--context", "8192", "--device", DEVICE]
    )


def estimate_kv() -> str:
    return transcript(
        [
            "estimate",
            "--shape",
            "qwen2.5-0.5b",
            "--quantize",
            "q4_k",
            "--context",
            "32768",
            "--device",
            DEVICE,
        ]
    )


def inspect() -> str:
    return transcript(["inspect", MODEL])


def quantize() -> str:
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["quantize", MODEL, "smollm2-q4_k.gguf", "--type", "q4_k", "--allow-requantize"]
        return transcript(arguments, both=True, cwd=Path(folder))


def quantization_errors() -> str:
    """Ours against the plain rule and the gguf package; llama.cpp's column needs its library."""
    lines = script("quantization.py", "errors").splitlines()
    return "".join("|".join(line.split("|")[:-2]) + "|\n" for line in lines if line)


def kv_perplexity() -> str:
    bits = {"f32": 32.0, "f16": 16.0, "q8_0": 8.5, "q4_0": 4.5}
    found = {}
    for kind in bits:
        text = program("perplexity", "-m", MODEL, "--file", ALICE, "--kv-dtype", kind, "--json")
        found[kind] = json.loads(text)["perplexity"]
    lines = ["| `--kv-dtype` | bits a value | of f16 | perplexity | against f32 |", "|---|---|---|---|---|"]
    for kind, value in found.items():
        more = "" if kind == "f32" else f"{100 * (value / found['f32'] - 1):+.2g} %"
        lines.append(f"| {kind} | {bits[kind]:g} | {bits[kind] / 16:.0%} | {value:.3f} | {more} |")
    return "\n".join(lines) + "\n"


def windows() -> str:
    """Perplexity by the length of windows and their distance."""
    lines = ["| context | stride | tokens run | perplexity |", "|---|---|---|---|"]
    for context, stride in ((64, 32), (256, 128), (512, 512), (512, 256), (512, 64), (1024, 1024)):
        arguments = ["-m", MODEL, "--file", ALICE, "--context", str(context), "--stride", str(stride)]
        r = json.loads(program("perplexity", *arguments, "--json"))
        value = f"{r['perplexity']:.1f} ± {r['standard_error']:.1f}"
        lines.append(f"| {context} | {stride} | {r['tokens_run']} | {value} |")
    return "\n".join(lines) + "\n"


# -- timed: of one machine ------------------------------------------------------------------------


def peak_memory(**environment: str) -> int:
    """Peak bytes of a `generate` of 64 tokens."""
    code = (
        "import resource, subprocess, sys\n"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    generate = [sys.executable, "-m", "xinfer_vk", "generate", "-m", MODEL, "-n", "64", "-q", "-p", QUESTION]
    return 1024 * int(run([sys.executable, "-c", code, *generate], **environment))


def cost() -> str:
    """README's table of what everything costs."""
    started = json.loads(script("startup.py", "--model", MODEL, "--json"))["first_token_s"]
    prefill = {r["test"]: r for r in bench("-p", "128,512", "-n", "0")}
    decode = {r["test"]: r for r in bench("-p", "0", "-n", "128", "-b", "1,2,4,8")}
    deep = {r["test"]: r for r in bench("-p", "0", "-n", "64", "-d", "0,4096")}
    sampled = json.loads(script("sampling.py", "--model", MODEL, "--json"))["tok_per_s"]
    ratio = spread([a / b for a, b in zip(sampled["device"], sampled["greedy"])], 2)
    one, *batches = decode.values()
    shallow, full = deep.values()
    warm = peak_memory()
    from xinfer_vk.weights.hub import resolve_model

    with tempfile.TemporaryDirectory() as empty:
        fresh = {"MESA_SHADER_CACHE_DIR": f"{empty}/mesa", "XINFER_VK_CACHE": f"{empty}/cache"}
        Path(empty, "cache", "models").mkdir(parents=True)
        shutil.copy(resolve_model(MODEL), Path(empty, "cache", "models"))
        cold = peak_memory(**fresh)
    rows = [
        ("process start to first token, caches warm", spread(started["warm"], 1) + " s"),
        ("the same with every cache empty", spread(started["cold"], 1) + " s"),
        ("prefill of 128 tokens", rates(prefill["pp128"]) + " tok/s"),
        ("prefill of 512 tokens", rates(prefill["pp512"]) + " tok/s"),
        (
            "decode of 128 tokens",
            f"{rates(one)} tok/s: {one['bytes_per_s'] / 1e9:.1f} GB/s of weights and cache",
        ),
        ("2, 4 and 8 sequences together", ", ".join(rates(r) for r in batches) + " tok/s"),
        (
            "decode with 4096 tokens in the cache",
            f"{full['tok_per_s'] / shallow['tok_per_s']:.2f} × the rate with none",
        ),
        (f"sampled ({SAMPLED}) against greedy decode", ratio + " ×"),
        ("peak memory of `generate`, caches warm and empty", f"{warm / 1e6:.0f} MB, {cold / 1e6:.0f} MB"),
    ]
    return "| | |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in rows) + provenance()


def bench_table() -> str:
    return transcript(["bench", "-p", "128,512", "-n", "64", "-d", "0,4096", "-r", "3"]) + provenance()


def bench_synthetic() -> str:
    shapes = f"{MODEL}:q4_0,{MODEL}:q8_0"
    return transcript(["bench", "-s", shapes, "-p", "64", "-n", "16", "-r", "3"]) + provenance()


def bench_profile() -> str:
    """The profile's own table, without the rates before it."""
    text = program("bench", "-m", MODEL, "-p", "0", "-n", "128", "-r", "3", "--profile")
    at = text.index(", tg128: ")
    return "```\n" + text[text.rindex("\n", 0, at) + 1 :].strip() + "\n```\n" + provenance()


def bench_compare() -> str:
    """SwiftShader against lavapipe: minutes."""
    with tempfile.TemporaryDirectory() as folder:
        shown = []
        for device in ("swiftshader", "llvmpipe"):
            arguments = [
                "bench",
                "--device",
                device,
                "-s",
                f"{MODEL}:q4_0",
                *["-p", "32", "-n", "8", "-r", "3", "-o", "json"],
            ]
            Path(folder, f"{device}.json").write_text(program(*arguments, **swiftshader()))
            shown.append(f"$ xinfer-vk {' '.join(arguments)} > {device}.json")
        compared = transcript(["bench", "compare", "swiftshader.json", "llvmpipe.json"], cwd=Path(folder))
    return compared.replace("```console\n", "```console\n" + "\n".join(shown) + "\n") + provenance()


def swiftshader() -> dict[str, str]:
    """The environment in which the loader finds it, where `./run test` has put it."""
    from xinfer_vk.folders import cache_folder

    manifest = cache_folder() / "swiftshader" / "vk_swiftshader_icd.json"
    if not manifest.exists():
        raise Failed(f"{manifest}: no such file: `./run test --collect-only` fetches SwiftShader")
    return {"VK_ADD_DRIVER_FILES": str(manifest)}


@cache
def format_tables() -> tuple[str, str]:
    """Losses of the number formats, and their speed: one run makes both."""
    text = script("quantization.py", "models", "--device", DEVICE)
    found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    if len(found) != 2:
        raise Failed("benchmarks/quantization.py models: two tables were expected")
    return found[0], found[1]


def formats() -> str:
    return format_tables()[0] + provenance()


def format_speed() -> str:
    return format_tables()[1] + provenance()


def seeds() -> str:
    """How many of eight prompts get in a batch the tokens that they get alone."""
    from xinfer_vk import LLM

    prompts = list(PROMPTS)
    parts = []
    for kind in ("f16", "f32"):
        with LLM(MODEL, device=DEVICE, kv_dtype=kind) as llm:  # type: ignore[arg-type]
            for name, fields in (("sampled", {"temperature": 0.8, "top_p": 0.95, "seed": 7}), ("greedy", {})):
                together = llm.batch(prompts, max_new_tokens=24, **fields)  # type: ignore[arg-type]
                alone = [llm.generate(p, max_new_tokens=24, **fields) for p in prompts]  # type: ignore[arg-type]
                same = sum(list(a.token_ids) == list(b.token_ids) for a, b in zip(alone, together))
                parts.append(f"{same} of {len(prompts)} {name} answers with an {kind} cache")
    lines = "".join(f"- {part}\n" for part in parts)
    return (
        f"Eight prompts on lavapipe, in one batch and each alone, gave the same tokens for\n{lines}"
        + provenance()
    )


def peers(python: str | None) -> str:
    """Ratios to llama.cpp's CPU back end, from --llama-python."""
    if python is None:
        raise Failed("--llama-python names the Python that has llama-cpp-python (docs/benchmarks.md)")
    arguments = [
        "-m",
        MODEL,
        "--device",
        DEVICE,
        "-p",
        "128,512",
        "-n",
        "128",
        "-r",
        "5",
        "--llama-python",
        python,
    ]
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder, "peers.json")
        script("peers.py", *arguments, "--json", str(kept))
        records = json.loads(kept.read_text())
    lines = ["| test | ours, tok/s | llama.cpp, tok/s | ratio |", "|---|---|---|---|"]
    for r in records:
        row = (
            r["test"],
            spread(r["ours_tok_per_s"]),
            spread(r["peer_tok_per_s"]),
            spread(r["ratios"], 2) + " ×",
        )
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n" + provenance()


def exactness(python: str | None) -> str:
    """Distance from float64, from --torch-python."""
    if python is None:
        raise Failed("--torch-python names a Python with torch, transformers, gguf and what xinfer-vk needs")
    quiet = {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    arguments = ["--device", DEVICE, "--tokens", "64,256,785,1500,3000"]
    text = run([python, str(ROOT / "benchmarks" / "exactness.py"), *arguments], **quiet)
    return text[text.index("|") :] + provenance()


# -- which block stands where ---------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """``exact``: no machine changes it. ``fast``: it takes seconds, so that a test can make it."""

    name: str
    page: str
    make: Callable[[], str]
    exact: bool = False
    fast: bool = False


def blocks(llama: str | None = None, torch: str | None = None) -> list[Block]:
    return [
        Block("tokens", "README.md", tokens, exact=True, fast=True),
        Block("inspect", "docs/models.md", inspect, exact=True, fast=True),
        Block("estimate", "docs/models.md", estimate, exact=True, fast=True),
        Block("estimate-kv", "docs/quantization.md", estimate_kv, exact=True, fast=True),
        Block("quantize", "docs/quantization.md", quantize, exact=True, fast=True),
        Block("quantization-errors", "docs/quantization.md", quantization_errors, exact=True),
        Block("kv-perplexity", "docs/quantization.md", kv_perplexity, exact=True),
        Block("windows", "docs/perplexity.md", windows, exact=True),
        Block("seeds", "docs/sampling.md", seeds),
        Block("exactness", "docs/models.md", lambda: exactness(torch)),
        Block("cost", "README.md", cost),
        Block("bench", "docs/benchmarks.md", bench_table),
        Block("synthetic", "docs/benchmarks.md", bench_synthetic),
        Block("profile", "docs/benchmarks.md", bench_profile),
        Block("compare", "docs/benchmarks.md", bench_compare),
        Block("formats", "docs/quantization.md", formats),
        Block("format-speed", "docs/quantization.md", format_speed),
        Block("peers", "docs/benchmarks.md", lambda: peers(llama)),
    ]


def places(page: str) -> dict[str, str]:
    """What a page has between its markers, by name."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return {m[2]: m[0].removeprefix(m[1]).removesuffix(m[3]) for m in PLACE.finditer(text)}


def write(block: Block, made: str) -> None:
    """Put a block in its place. Raises Failed where the page has none for it."""
    path = ROOT / block.page
    text = path.read_text(encoding="utf-8")
    if block.name not in places(block.page):
        raise Failed(f"{block.page} has no place <!-- figures: {block.name} -->")
    path.write_text(
        PLACE.sub(lambda m: m[1] + made + m[3] if m[2] == block.name else m[0], text), encoding="utf-8"
    )


def chosen(all_: list[Block], only: str | None, exact: bool) -> Iterator[Block]:
    wanted = None if only is None else only.split(",")
    unknown = set(wanted or ()) - {block.name for block in all_}
    if unknown:
        raise click.UsageError(f"--only {','.join(sorted(unknown))}: not a block; --list shows them")
    for block in all_:
        if (wanted is None or block.name in wanted) and (block.exact or not exact):
            yield block


def picture() -> Path:
    """README's picture of a terminal: real commands and what they print, as an SVG."""
    from rich.console import Console
    from rich.text import Text

    console = Console(
        record=True, width=104, file=io.StringIO(), color_system="truecolor", force_terminal=True
    )
    commands = (
        ["generate", "--prompt", QUESTION],
        ["generate", "--prompt", "Write one sentence about rain.", "--temperature", "0.8", "--seed", "7"],
        ["estimate", "--shape", "qwen2.5-0.5b", "--quantize", "q4_k", "--context", "32768"],
    )
    environment = {**os.environ, "COLUMNS": "104", "XINFER_VK_DEVICE": DEVICE, "PYTHONPATH": str(ROOT)}
    for arguments in commands:
        shown = " ".join(f'"{a}"' if " " in a else a for a in arguments)
        console.print(Text.assemble(("$ ", "bold green"), (f"xinfer-vk {shown}", "bold")))
        command = [sys.executable, "-m", "xinfer_vk", *arguments]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                ours = line.startswith(("using ", "prefill: "))
                console.print(Text(line.rstrip(), style="dim" if ours else ""))
        if process.returncode:
            raise Failed(f"xinfer-vk {shown}: exit code {process.returncode}")
    path = ROOT / "docs" / "images" / "terminal.svg"
    path.write_text(console.export_svg(title="xinfer-vk", unique_id="terminal") + "\n", encoding="utf-8")
    return path


@click.command()
@click.option("--picture", "draw", is_flag=True, help="Make docs/images/terminal.svg, and nothing else.")
@click.option("--only", metavar="NAME,NAME,…", help="These blocks.")
@click.option("--exact", is_flag=True, help="Only what no machine changes.")
@click.option("--write", "put", is_flag=True, help="Put what is made into README.md and docs/.")
@click.option("--list", "show", is_flag=True, help="List the blocks.")
@click.option("--llama-python", metavar="PYTHON", help="With llama-cpp-python, for peers.")
@click.option("--torch-python", metavar="PYTHON", help="With torch and transformers, for exactness.")
def main(
    draw: bool,
    only: str | None,
    exact: bool,
    put: bool,
    show: bool,
    llama_python: str | None,
    torch_python: str | None,
) -> None:
    """Make the figures of README and docs."""
    if draw:
        click.echo(picture())
        return
    wanted = list(chosen(blocks(llama_python, torch_python), only, exact))
    failed = 0
    for block in wanted:
        if show:
            click.echo(f"{block.name:20} {block.page:22} {'exact' if block.exact else 'timed'}")
            continue
        try:
            made = block.make()
            click.echo(f"\n<!-- {block.page}: {block.name} -->\n{made}", nl=False)
            if put:
                write(block, made)
        except Failed as error:
            failed += 1
            click.echo(f"{block.name}: not made: {error}", err=True)
    sys.exit(min(failed, 1))


if __name__ == "__main__":
    main()

"""The tables of docs/quantization.md: what each format loses, takes, and gives.

    python benchmarks/quantization.py errors [--ggml …/libggml-base.so]
    python benchmarks/quantization.py models [--device lavapipe]

``errors``: mean squared error of our quantizers against the plain absmax rule, the ``gguf`` package's
``quantize``, and llama.cpp's if its library is given. ``models``: SmolLM2-135M as it ships (Q4_1) and
requantized from that by our own ``quantize``, and a tiny model with random weights whose rows are whole
blocks of 256: bits per weight, file size, device memory, perplexity and prefill and decode rates, for every
format of the KV cache and with activations in 8 bits. Rates are measured in turn, round by round, so that a
busy machine slows all alike.
"""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

TESTS = Path(__file__).resolve().parent.parent / "tests"
ALICE = TESTS / "fixtures" / "alice.txt"
sys.path.insert(0, str(TESTS))

BLOCK_TYPES = ("q8_0", "q6_k", "q5_0", "q4_k", "q4_1", "q4_0")
TYPES = ("q8_0", "q6_k", "q4_k", "q4_1", "q4_0")
COLS = 1024


@click.group()
def main() -> None:
    """Measure number formats of weights."""


# -- errors of single tensors ---------------------------------------------------------------------


def distributions(rows: int) -> dict[str, np.ndarray]:
    """Normal weights; with outliers, as Student's t with four degrees of freedom has them; and one matrix
    of the demo model (from its Q4_1, so Q4_1 finds it easy), if it is there."""
    from xinfer_vk.weights.pull import DEMO, is_present
    from xinfer_vk.weights.quantize.rows import dequantize_rows
    from xinfer_vk.weights.source import open_model

    rng = np.random.default_rng(0)
    out = {
        "normal": (rng.standard_normal((rows, COLS)) * 0.02).astype(np.float32),
        "Student's t, 4": (rng.standard_t(4, (rows, COLS)) * 0.02).astype(np.float32),
    }
    if is_present(DEMO):
        with open_model(DEMO.path()) as source:
            tensor = source.tensors["model.layers.10.mlp.down_proj.weight"]
            out["SmolLM2 blk.10.ffn_down"] = dequantize_rows(tensor.fmt, tensor.rows(), tensor.shape[1])
    return out


def decoded(fmt: str, rows: np.ndarray) -> np.ndarray:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return dequantize(rows, GGMLQuantizationType[fmt.upper()])


def of_gguf_package(fmt: str, x: np.ndarray) -> np.ndarray | None:
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    try:
        return decoded(fmt, quantize(x, GGMLQuantizationType[fmt.upper()]))
    except NotImplementedError:
        return None


def of_llama_cpp(library: str | None, fmt: str, x: np.ndarray) -> np.ndarray | None:
    """What ``ggml_quantize_chunk`` of llama.cpp makes of the rows, without an importance matrix."""
    from xinfer_vk.weights.formats import FORMATS

    if library is None:
        return None
    quantize = ctypes.CDLL(library).ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    quantize.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        *[ctypes.c_int64] * 3,
        ctypes.c_void_p,
    ]
    out = np.empty((len(x), FORMATS[fmt].row_bytes(x.shape[1])), np.uint8)
    x = np.ascontiguousarray(x)
    written = quantize(FORMATS[fmt].ggml_type, x.ctypes.data, out.ctypes.data, 0, *x.shape, None)
    assert written == out.nbytes
    return decoded(fmt, out)


@main.command()
@click.option("--ggml", help="llama.cpp's libggml-base.so, to compare with its quantizers too.")
@click.option("--rows", default=512, show_default=True, help="Rows of 1024 weights.")
def errors(ggml: str | None, rows: int) -> None:
    """Mean squared error by format and distribution."""
    from plain_rounding import plain

    from xinfer_vk.weights.formats import FORMATS
    from xinfer_vk.weights.quantize.rows import quantize_rows

    def cell(ours: float, theirs: np.ndarray | None) -> str:
        if theirs is None:
            return "–"
        return f"{ours / mse(theirs):.3f}" if mse(theirs) else "exact"

    print("| format | bits | weights | RMS error | MSE ÷ absmax's | ÷ `gguf` package's | ÷ llama.cpp's |")
    print("|---|---|---|---|---|---|---|")
    samples = distributions(rows)
    for fmt in BLOCK_TYPES:
        bits = f"{8 * FORMATS[fmt].block_bytes / FORMATS[fmt].block:g}"
        for name, x in samples.items():
            x = x[:, : x.shape[1] // 256 * 256]

            def mse(y: np.ndarray, x: np.ndarray = x) -> float:
                return float(np.mean((x.astype(np.float64) - y) ** 2))

            ours = mse(decoded(fmt, quantize_rows(fmt, x, name)))
            rms = np.sqrt(ours / np.mean(x.astype(np.float64) ** 2))
            others = (plain(fmt, x), of_gguf_package(fmt, x), of_llama_cpp(ggml, fmt, x))
            print(f"| {fmt} | {bits} | {name} | {rms:.2%} | {' | '.join(cell(ours, y) for y in others)} |")


# -- models ---------------------------------------------------------------------------------------


@dataclass
class Variant:
    """A model in one form."""

    label: str
    path: Path


def variants(folder: Path) -> Iterator[Variant]:
    from xinfer_vk.engine.quantize import quantize_model
    from xinfer_vk.weights.hub import resolve_model

    demo = resolve_model("smollm2-135m")
    yield Variant("SmolLM2-135M, Q4_1 as shipped", demo)
    for kind in TYPES:
        if kind == "q4_1":
            continue
        path = folder / f"smollm2-{kind}.gguf"
        quantize_model(demo, path, kind, requantize=True)
        yield Variant(f"SmolLM2-135M, {kind} from that", path)
    tiny = write_tiny(folder / "tiny")
    yield Variant("tiny random, bf16", tiny)
    for kind in TYPES:
        path = folder / f"tiny-{kind}.gguf"
        quantize_model(tiny, path, kind)
        yield Variant(f"tiny random, {kind}", path)


def write_tiny(path: Path) -> Path:
    """A Llama 256 wide with random weights, whose logits are spread as a trained model's are."""
    import shutil

    from model_files import K_SIZES, random_tensors, tiny_config, write_hf_model

    sizes = {**K_SIZES, "num_hidden_layers": 8, "intermediate_size": 768, "vocab_size": 656}
    config = tiny_config("llama", **sizes, max_position_embeddings=2048)
    tensors = random_tensors(config)
    tensors["lm_head.weight"] *= np.float32(2)
    write_hf_model(path, config, tensors, fmt="bf16")
    for file in (TESTS / "fixtures" / "text" / "smollm").iterdir():
        shutil.copy(file, path)
    return path


def sizes(variant: Variant) -> tuple[str, float, int]:
    """(formats of the matrices by share of weights, bits per weight, bytes of the files)."""
    from xinfer_vk.weights.source import open_model
    from xinfer_vk.weights.tensors import element_count

    with open_model(variant.path) as source:
        counts: Counter[str] = Counter()
        for tensor in source.tensors.values():
            if len(tensor.shape) > 1:
                counts[tensor.fmt] += element_count(tensor.shape)
        total = sum(element_count(t.shape) for t in source.tensors.values())
        bits = 8 * sum(t.bytes for t in source.tensors.values()) / total
        shares = ", ".join(f"{fmt} {count / counts.total():.0%}" for fmt, count in counts.most_common())
        return shares, bits, source.file_bytes


# (KV cache, activations) of the columns.
WAYS = (("f32", "f32"), ("f16", "f32"), ("q8_0", "f32"), ("q4_0", "f32"), ("f16", "int8"))


def heading(kv_dtype: str, activations: str) -> str:
    return f"KV {kv_dtype}" + (f", {activations}" if activations != "f32" else "")


@main.command()
@click.option("--device", help="As for xinfer-vk generate.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--only", help="Only variants whose label has this in it.")
@click.option("--numpy/--no-numpy", "with_numpy", default=True, help="Perplexity by the NumPy runtime too.")
def models(device: str | None, rounds: int, only: str | None, with_numpy: bool) -> None:
    """Sizes, perplexities and rates of models."""
    from xinfer_vk.units import format_bytes
    from xinfer_vk.vulkan.runtime import open_runtime

    with tempfile.TemporaryDirectory() as folder:
        chosen = [v for v in variants(Path(folder)) if only is None or only in v.label]
        runtime = open_runtime(device)
        print(
            f"{runtime.profile.name} ({runtime.driver}); perplexity of {ALICE.name}, windows of 512 by 256\n"
        )
        runtime.close()
        ways = [("numpy", "f32", "f32")] * with_numpy + [(device, *way) for way in WAYS]
        columns = [*["NumPy, KV f32"] * with_numpy, *(heading(*way) for way in WAYS)]
        print(f"| weights | formats | bits | file | on the device | {' | '.join(columns)} |")
        print("|---" * (5 + len(columns)) + "|")
        for variant in chosen:
            formats, bits, size = sizes(variant)
            figures = [perplexity(variant, *way) for way in ways]
            memory = next(memory for _, memory in figures if memory)
            cells = [f"{value:.3f}" if value else "–" for value, _ in figures]
            row = [variant.label, formats, f"{bits:.2f}", format_bytes(size), format_bytes(memory), *cells]
            print(f"| {' | '.join(row)} |", flush=True)
        print()
        speeds(chosen, device, rounds)


def perplexity(variant: Variant, device: str | None, kv_dtype: str, activations: str) -> tuple[float, int]:
    """(perplexity of the text, bytes of the weights on the device); zeros for a model whose weights have no
    kernels for ``activations``."""
    from xinfer_vk import LLM
    from xinfer_vk.errors import UsageError

    try:
        with LLM(variant.path, device=device, kv_dtype=kv_dtype, activations=activations) as llm:
            text = ALICE.read_text(encoding="utf-8")
            return llm.perplexity(text, context=512).perplexity, llm.weight_bytes
    except UsageError:
        if activations == "f32":
            raise
        return 0.0, 0


def speeds(chosen: Sequence[Variant], device: str | None, rounds: int) -> None:
    """Prefill and decode rates: medians over rounds in which every variant has its turn."""
    from xinfer_vk.engine.bench import Bench, Workload, load_subject
    from xinfer_vk.errors import UsageError
    from xinfer_vk.vulkan.runtime import open_runtime

    ways = [way for way in WAYS if way[0] in ("f16", "q8_0")]
    tests = [Workload("pp", 128), Workload("tg", 16, depth=128)]
    rates: dict[tuple[int, tuple[str, str], str], list[float]] = {}
    runtime = open_runtime(device)
    try:
        subjects = [load_subject(runtime, str(v.path), synthetic=False) for v in chosen]
        benches = {}
        for i, subject in enumerate(subjects):
            for way in ways:
                with contextlib.suppress(UsageError):  # no kernels for these weights and activations
                    benches[i, way] = Bench(subject, tests, way[0], activations=way[1])
        for turn in range(rounds + 1):
            for (i, way), bench in benches.items():
                for test in tests:
                    rate = bench.measure(test, 1, warm_up=0).rates[0]
                    if turn:  # the first warms up
                        rates.setdefault((i, way, test.kind), []).append(rate)
    finally:
        runtime.close()
    heads = [f"{kind}, {heading(*way)}" for way in ways for kind in ("PP", "TG")]
    print(f"| weights | {' | '.join(heads)} |")
    print("|---" * (1 + len(heads)) + "|")
    for i, variant in enumerate(chosen):
        cells = []
        for way in ways:
            for kind in ("pp", "tg"):
                own = rates.get((i, way, kind))
                if own is None:
                    cells.append("–")
                    continue
                ratio = statistics.median(a / b for a, b in zip(own, rates[0, ways[0], kind]))
                cells.append(f"{statistics.median(own):.1f} ({ratio:.2f} ×)")
        print(f"| {variant.label} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

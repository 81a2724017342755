"""Start-up, prefill and decode of `xinfer-vk generate` on one device, as medians with their spread.

    python benchmarks/generate.py --model smollm2-135m --device llvmpipe --rounds 5

Three tables: process start to first token (a fresh process a round: cold means empty Mesa, pipeline and
kernel caches, the model file in the page cache; warm means the second run), and prefill (PP) and decode (TG)
rates in one process after a warm-up run, device synchronised at every token, batch 1, greedy.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

FIRST_TOKEN = [
    sys.executable,
    "-m",
    "xinfer_vk",
    "generate",
    "--max-new-tokens",
    "1",
    "--quiet",
    "--prompt",
    "Hello",
]


def spread(values: list[float], unit: str, scale: float = 1.0) -> str:
    scaled = sorted(v * scale for v in values)
    return f"{statistics.median(scaled):.3g} {unit} [{scaled[0]:.3g}–{scaled[-1]:.3g}]"


def time_first_token(model: str, device: str | None, environment: dict[str, str]) -> float:
    """Seconds from process start to the first piece of text on standard output."""
    command = [*FIRST_TOKEN, "--model", model, *(["--device", device] if device else [])]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **environment}) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.stdout.read()
    if process.returncode:
        sys.exit(f"generate exited with {process.returncode}")
    return seconds


@click.command()
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option("--device", help="As for xinfer-vk generate.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1))
@click.option("--prompt-tokens", default=128, show_default=True, type=click.IntRange(min=1))
@click.option("--new-tokens", default=32, show_default=True, type=click.IntRange(min=2))
@click.option("--kv-dtype", default="f16", show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(
    model: str,
    device: str | None,
    rounds: int,
    prompt_tokens: int,
    new_tokens: int,
    kv_dtype: str,
    as_json: bool,
) -> None:
    """Time start-up, prefill and decode."""
    from xinfer_vk import LLM, __version__
    from xinfer_vk.weights.hub import resolve_model

    path = str(resolve_model(model))
    cold, warm = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as empty:
            fresh = {
                "MESA_SHADER_CACHE_DIR": str(Path(empty) / "mesa"),
                "XDG_CACHE_HOME": str(Path(empty) / "xdg"),
                "XINFER_VK_CACHE": str(Path(empty) / "xinfer-vk"),
            }
            cold.append(time_first_token(path, device, fresh))
            warm.append(time_first_token(path, device, fresh))
    with LLM(path, device=device, kv_dtype=kv_dtype, context=prompt_tokens + new_tokens) as llm:
        ids = [(7919 * i) % llm.config.vocab_size for i in range(prompt_tokens)]
        runs = [
            llm.generate(ids, max_new_tokens=new_tokens, ignore_eos=True).metrics for _ in range(rounds + 1)
        ][1:]
        m = runs[-1]
        record = {
            "version": __version__,
            "model": llm.name,
            "device": llm.runtime.profile.name,
            "driver": llm.runtime.driver,
            "kv_dtype": kv_dtype,
            "prompt_tokens": prompt_tokens,
            "new_tokens": new_tokens,
            "first_token_cold_s": cold,
            "first_token_warm_s": warm,
            "prefill_tok_per_s": [r.prefill_rate for r in runs],
            "decode_tok_per_s": [r.decode_rate for r in runs],
            "weight_gb_per_s": [r.decode_rate * r.weight_bytes / 1e9 for r in runs],
            "dispatches_per_token": m.dispatches_per_token,
            "bytes_read_per_token": m.bytes_read_per_token,
            "weight_bytes": m.weight_bytes,
            "kv_bytes": m.kv_bytes,
            "peak_host_bytes": m.peak_host_bytes,
        }
    if as_json:
        click.echo(json.dumps(record))
        return
    click.echo(
        f"{record['model']} on {record['device']} ({record['driver']}), KV {kv_dtype}, {rounds} rounds"
    )
    click.echo(f"first token, cold caches: {spread(cold, 's')}")
    click.echo(f"first token, warm caches: {spread(warm, 's')}")
    click.echo(f"prefill pp{prompt_tokens}: {spread([r.prefill_rate for r in runs], 'tok/s')}")
    click.echo(
        f"decode tg{new_tokens}: {spread([r.decode_rate for r in runs], 'tok/s')}, "
        f"{spread([r.decode_rate * r.weight_bytes / 1e9 for r in runs], 'GB/s')} of weights read"
    )
    click.echo(
        f"{m.dispatches_per_token} dispatches, {m.bytes_read_per_token:.1f} bytes read back per token; "
        f"peak host memory {m.peak_host_bytes / 1e6:.0f} MB"
    )


if __name__ == "__main__":
    main()

"""What sampling costs: decode rate of greedy, of the device sampler, and of the CPU reference, in turn.

    python benchmarks/sampling.py --rounds 7

One process, one model, one device; the three take turns (A B C A B C …) so that a machine whose speed drifts
treats them alike. Printed: the median rate of each with its spread, and the median of the rounds' ratios to
greedy. Batch 1, the device synchronised at every token, loading and the first round (warm-up) left out.
"""

from __future__ import annotations

import json
import statistics
import sys

import click

from xinfer_vk.errors import XinferError

SAMPLED = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "seed": 7}


@click.command()
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option("--device", help="As for xinfer-vk generate.")
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(min=1))
@click.option("--new-tokens", default=32, show_default=True, type=click.IntRange(min=2))
@click.option("--json", "as_json", is_flag=True)
def main(model: str, device: str | None, rounds: int, new_tokens: int, as_json: bool) -> None:
    """Compare the samplers' speed."""
    from xinfer_vk import LLM

    ways = {"greedy": ({}, "device"), "device": (SAMPLED, "device"), "cpu": (SAMPLED, "cpu")}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    read: dict[str, float] = {}
    with LLM(model, device=device, context=64 + new_tokens) as llm:
        prompt = llm.encode("Write one sentence about rain.")
        for turn in range(rounds + 1):
            for name, (fields, sampler) in ways.items():
                llm.sampler = sampler  # type: ignore[assignment]
                m = llm.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True, **fields).metrics  # type: ignore[arg-type]
                read[name] = m.bytes_read_per_token
                if turn:
                    rates[name].append(m.decode_rate)
        described = f"{llm.name} on {llm.runtime.profile.name} ({llm.runtime.driver}), tg{new_tokens}"
    ratios = {name: [a / b for a, b in zip(rates[name], rates["greedy"])] for name in ways}
    if as_json:
        click.echo(json.dumps({"what": described, "tok_per_s": rates, "bytes_read_per_token": read}))
        return
    click.echo(f"{described}, {rounds} rounds in turn; sampled: {SAMPLED}")
    for name in ways:
        rate, ratio = rates[name], ratios[name]
        click.echo(
            f"{name:8} {statistics.median(rate):6.1f} tok/s [{min(rate):.1f}–{max(rate):.1f}]  "
            f"{statistics.median(ratio):.2f} × greedy [{min(ratio):.2f}–{max(ratio):.2f}]  "
            f"{read[name]:.0f} bytes read back a token"
        )


if __name__ == "__main__":
    try:
        main()
    except XinferError as error:
        sys.exit(f"error: {error}")

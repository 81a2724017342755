"""``xinfer-vk quantize``: a model as a GGUF file in another number format."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from xinfer_vk.cli.completion import complete_model
from xinfer_vk.cli.options import QUANTIZE_TYPES
from xinfer_vk.cli.output import say, say_json, tell
from xinfer_vk.cli.progress import ProgressBar


@click.command("quantize")
@click.argument("model", shell_complete=complete_model)
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--type",
    "kind",
    type=click.Choice([*QUANTIZE_TYPES, "f16", "bf16"]),
    required=True,
    help="Number format for the matrices.",
)
@click.option("--force", is_flag=True, help="Overwrite OUT if it exists.")
@click.option(
    "--allow-requantize",
    is_flag=True,
    help="Also convert tensors that are quantized already. Errors add up: prefer 16-bit weights.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing.")
def command(
    model: str, out: Path, kind: str, force: bool, allow_requantize: bool, as_json: bool, quiet: bool
) -> None:
    """Convert MODEL (a Hugging Face directory, .gguf file, hub name or downloaded model) to the quantized
    GGUF file OUT, which xinfer-vk and llama.cpp read.

    Norms and biases stay floats. With 4-bit types the output head gets 6 bits. Rows that are not a multiple
    of 256 long get the nearest type with blocks of 32. The command prints which type each tensor got.
    """
    from xinfer_vk.engine.quantize import quantize_model
    from xinfer_vk.units import format_bytes
    from xinfer_vk.weights.hub import resolve_model

    with ProgressBar(enabled=False if quiet else None) as progress:
        written = quantize_model(
            resolve_model(model, progress),
            out,
            kind,
            overwrite=force,
            requantize=allow_requantize,
            progress=lambda done, total: progress(f"quantizing to {kind}", done, total),
        )
    if as_json:
        record = {**asdict(written), "path": str(written.path), "bits_per_weight": written.bits_per_weight}
        say_json(record)
    elif not quiet:
        for note in written.notes:
            tell(note)
        formats = ", ".join(f"{count} in {fmt}" for fmt, count in written.formats.items())
        say(
            f"{written.path}: {format_bytes(written.bytes)}, {written.bits_per_weight:.2f} bits per weight; "
            f"tensors: {formats}"
        )

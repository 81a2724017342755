"""``xinfer-vk list``: the downloaded models."""

from __future__ import annotations

import time

import click

from xinfer_vk.cli.output import printable, say, say_json, tell
from xinfer_vk.units import format_bytes

AGES = (("day", 86400), ("hour", 3600), ("minute", 60))


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def command(as_json: bool) -> None:
    """List the downloaded models: the names that --model takes, file size and age.

    Models are files in ~/.cache/xinfer-vk/models, or in the models folder of $XINFER_VK_CACHE. Every GGUF
    file in it is listed, also one that you put there. Models from the Hugging Face hub are in the hub's own
    cache: use hf cache ls.
    """
    from xinfer_vk.weights.local import local_models
    from xinfer_vk.weights.pull import DEMO, models_dir

    models = list(local_models().values())
    if as_json:
        say_json(
            [
                {"name": m.name, "bytes": m.bytes, "modified_s": m.modified_s, "path": str(m.path)}
                for m in models
            ]
        )
        return
    if not models:
        tell(f"no models in {models_dir()}: `xinfer-vk pull` downloads {DEMO.name}")
        return
    width = max(4, *(len(printable(m.name)) for m in models))
    say(f"{'NAME':<{width}}  {'SIZE':>9}  MODIFIED")
    for model in models:
        age = describe_age(time.time() - model.modified_s)
        say(f"{printable(model.name):<{width}}  {format_bytes(model.bytes):>9}  {age}")


def describe_age(seconds: float) -> str:
    """``3 days ago``, in the largest unit that fits."""
    for unit, size in AGES:
        if (count := int(seconds // size)) >= 1:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"

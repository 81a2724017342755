"""``xinfer-vk rm``: delete downloaded models."""

from __future__ import annotations

import click

from xinfer_vk.cli.completion import complete_local_model
from xinfer_vk.cli.output import say
from xinfer_vk.units import format_bytes


@click.command("rm")
@click.argument("models", metavar="MODEL...", nargs=-1, required=True, shell_complete=complete_local_model)
def command(models: tuple[str, ...]) -> None:
    """Delete downloaded models by the names that xinfer-vk list shows.

    Deletes files in xinfer-vk's own cache folder only, without asking. xinfer-vk pull downloads a model
    again.
    """
    from xinfer_vk.weights.local import remove_model

    for name in models:
        removed_bytes, removed = remove_model(name)
        say(f"deleted {removed} ({format_bytes(removed_bytes)})")

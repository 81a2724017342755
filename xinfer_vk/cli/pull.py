"""``xinfer-vk pull``: download a model."""

from __future__ import annotations

import click

from xinfer_vk.cli.output import say
from xinfer_vk.cli.progress import ProgressBar
from xinfer_vk.weights.pull import DEMO, pull


@click.command("pull")
@click.argument("model", default=DEMO.name)
@click.option("--quiet", "-q", is_flag=True, help="Show no progress.")
def command(model: str, quiet: bool) -> None:
    """Download MODEL (default: smollm2-135m) and print its path.

    Models are kept in ~/.cache/xinfer-vk/models, or where XINFER_VK_CACHE says. A model that is
    already there is checked, and fetched again only if it is damaged.
    """
    with ProgressBar(enabled=False if quiet else None) as progress:
        path = pull(model, progress)
    say(str(path))

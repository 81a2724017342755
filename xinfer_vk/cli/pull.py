"""``xinfer-vk pull``: download a model."""

from __future__ import annotations

import click

from xinfer_vk.cli.output import say
from xinfer_vk.cli.progress import ProgressBar
from xinfer_vk.weights.pull import DEMO, pull


@click.command("pull")
@click.argument("model", default=DEMO.name)
@click.option("--accept-terms", is_flag=True, help="You agree to the terms of the model's makers.")
@click.option("--quiet", "-q", is_flag=True, help="Show no progress.")
def command(model: str, accept_terms: bool, quiet: bool) -> None:
    """Download MODEL and print its path: smollm2-135m (default, 98 MB) or gemma3-270m (253 MB, which needs
    --accept-terms).

    Models are kept in ~/.cache/xinfer-vk/models, or where XINFER_VK_CACHE says. A model that is
    already there is checked, and fetched again only if it is damaged. An interrupted download goes on
    with the files that had arrived whole, of which smollm2-135m is one and gemma3-270m four.
    """
    with ProgressBar(enabled=False if quiet else None) as progress:
        path = pull(model, progress, accept_terms=accept_terms)
    say(str(path))

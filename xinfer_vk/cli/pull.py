"""``xinfer-vk pull``: download a model."""

from __future__ import annotations

import click

from xinfer_vk.cli.completion import complete_pull
from xinfer_vk.cli.output import say
from xinfer_vk.cli.progress import ProgressBar
from xinfer_vk.weights.pull import DEMO, pull


@click.command("pull")
@click.argument("model", default=DEMO.name, shell_complete=complete_pull)
@click.option("--accept-terms", is_flag=True, help="Accept the license terms of the model.")
@click.option("--quiet", "-q", is_flag=True, help="Show no progress.")
def command(model: str, accept_terms: bool, quiet: bool) -> None:
    """Download MODEL and print its path: smollm2-135m (default, 98 MB) or gemma3-270m (253 MB, requires
    --accept-terms).

    Models are stored in ~/.cache/xinfer-vk/models, or in the models folder of $XINFER_VK_CACHE. If the model
    is already there, its checksum is verified; a damaged file is downloaded again. An interrupted download
    resumes at the first incomplete file (smollm2-135m is one file, gemma3-270m is four).
    """
    with ProgressBar(enabled=False if quiet else None) as progress:
        path = pull(model, progress, accept_terms=accept_terms)
    say(str(path))

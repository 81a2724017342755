"""``xinfer-vk pull``: download a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from xinfer_vk.weights.pull import DEMO, Progress, pull


@click.command("pull")
@click.argument("model", default=DEMO.name)
@click.option("--quiet", "-q", is_flag=True, help="Print nothing but the path.")
def command(model: str, quiet: bool) -> None:
    """Download MODEL (default: smollm2-135m) and print its path.

    Models are kept in ~/.cache/xinfer-vk/models, or where XINFER_VK_CACHE says. A model that is
    already there is checked, and fetched again only if it is damaged.
    """
    with _progress_bar(enabled=not quiet and sys.stderr.isatty()) as progress:
        path = pull(model, progress)
    click.echo(str(path))


@contextmanager
def _progress_bar(enabled: bool) -> Iterator[Progress | None]:
    """A bar on standard error whose label is the stage; None (silence) where nobody would see it."""
    if not enabled:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, int] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)  # type: ignore[arg-type]

        yield report

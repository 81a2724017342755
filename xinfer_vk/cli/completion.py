"""What the shell completes after options and arguments: names of models and shapes, else files."""

from __future__ import annotations

from collections.abc import Iterable

import click
from click.shell_completion import CompletionItem


def complete_model(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Downloaded models and those to pull; files where no name fits."""
    from xinfer_vk.weights.local import known_names

    return _fitting(incomplete, known_names()) or [CompletionItem(incomplete, type="file")]


def complete_local_model(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from xinfer_vk.weights.local import local_models

    return _fitting(incomplete, local_models())


def complete_pull(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from xinfer_vk.weights.pull import MODELS

    return _fitting(incomplete, MODELS)


def complete_shape(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from xinfer_vk.models.shapes import SHAPES

    return _fitting(incomplete, SHAPES)


def _fitting(incomplete: str, names: Iterable[str]) -> list[CompletionItem]:
    lower = incomplete.lower()
    return [CompletionItem(name) for name in names if name.lower().startswith(lower)]

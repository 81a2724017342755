"""Whether the user wants tracebacks: ``--debug``, before or after the command's name, or XINFER_VK_DEBUG."""

from __future__ import annotations

import os

import click

_asked = False


def _ask(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    global _asked
    _asked = _asked or value


def debug_option(hidden: bool = False) -> click.Option:
    """The option, for the group and for each command."""
    return click.Option(
        ["--debug"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_ask,
        hidden=hidden,
        help="Show the traceback of an error.",
    )


def wants_traceback() -> bool:
    return _asked or os.environ.get("XINFER_VK_DEBUG", "").strip().lower() in ("1", "true")

"""Mistakes on the command line, each in one line: what is wrong, its value and the remedy."""

from __future__ import annotations

import re
from typing import Any

import click

from xinfer_vk.cli.output import tell
from xinfer_vk.names import did_you_mean

HELP_WANTED: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())  # since click 8.2
RANGE = re.compile(r"(\S+) is not in the range (.*?)\.?$")
BOUND = re.compile(r"x(>=|<=|>|<)(\S+)")
WORDS = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}


class Group(click.Group):
    """A group of commands that suggests a name for one that is misspelt."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None and not ctx.resilient_parsing:
            commands = self.list_commands(ctx)
            remedy = did_you_mean(name, commands) or f"choose from {', '.join(commands)}"
            raise click.UsageError(f"no such command {name!r}: {remedy}", ctx)
        return super().resolve_command(ctx, args)


def show_mistake(error: click.ClickException) -> None:
    """Print click's complaint as one ``error:`` line on standard error; no command at all prints its help."""
    if isinstance(error, HELP_WANTED):
        error.show()
    else:
        tell(f"error: {one_line(error)}")


def one_line(error: click.ClickException) -> str:
    """The mistake without the usage that click puts before it."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    help_line = f"see `{context.command_path} --help`" if context is not None else "see `xinfer-vk --help`"
    if isinstance(error, click.MissingParameter):
        return f"{_parameter(error)} is missing: {help_line}"
    if isinstance(error, click.NoSuchOption):
        return f"no such option {error.option_name}: {_near_option(error) or help_line}"
    if isinstance(error, click.BadParameter):
        return f"{_parameter(error)}: {_value(_flat(error.message))}"
    text = _flat(error.format_message())
    if isinstance(error, click.BadOptionUsage):
        return re.sub(r"^Option '(\S+)' requires an? argument$", r"\1 needs a value: ", text) + help_line
    if unexpected := re.match(r"Got unexpected extra arguments? \((.*)\)$", text):
        return f"unexpected argument {unexpected[1]}: {help_line}"
    return text


def _flat(text: str) -> str:
    return " ".join(text.split()).rstrip(".")


def _parameter(error: click.BadParameter) -> str:
    """``--max-new-tokens`` or ``MODEL``."""
    if error.param is None:
        return str(error.param_hint or "an argument")
    if isinstance(error.param, click.Option):
        return max(error.param.opts, key=len)
    return error.param.human_readable_name


def _value(message: str) -> str:
    """A range in words; another message as it is."""
    found = RANGE.match(message)
    if found is None:
        return message.replace("integer range", "integer").replace("float range", "number")
    both = re.match(r"(\S+?)<=x<=(\S+)$", found[2])
    bounds = " and ".join(f"{WORDS[sign]} {bound}" for sign, bound in BOUND.findall(found[2]))
    return f"{found[1]} is out of range: use {f'{both[1]} to {both[2]}' if both else bounds}"


def _near_option(error: click.NoSuchOption) -> str:
    if error.ctx is None:
        return ""
    options = [
        name
        for parameter in error.ctx.command.params
        if isinstance(parameter, click.Option) and not parameter.hidden
        for name in (*parameter.opts, *parameter.secondary_opts)
        if name.startswith("--")
    ]
    return did_you_mean(error.option_name, options)

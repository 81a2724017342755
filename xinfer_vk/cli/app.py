"""The group of commands, each in a file of its own that is imported only when used; and how errors end."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Sequence

import click

from xinfer_vk import __version__
from xinfer_vk.cli.debug import debug_option, wants_traceback
from xinfer_vk.cli.interrupt import exit_code, unwind_when_ended
from xinfer_vk.cli.mistakes import Group, show_mistake
from xinfer_vk.cli.output import ReaderGone, guard_streams, tell
from xinfer_vk.errors import XinferError, shell_words
from xinfer_vk.limits import is_out_of_memory, out_of_memory

COMMANDS = {
    "generate": "Generate text from a prompt.",
    "chat": "Chat with a model in the terminal.",
    "perplexity": "Measure perplexity on a text.",
    "compare-decoding": "Compare decoding strategies on one prompt.",
    "bench": "Measure prefill and decode speed against the device's limits.",
    "devices": "List the Vulkan devices and their features.",
    "pull": "Download a model.",
    "list": "List the downloaded models.",
    "rm": "Delete downloaded models.",
    "inspect": "Show what a model contains and whether it can run.",
    "estimate": "Estimate how much device memory a model needs.",
    "quantize": "Convert a model to a quantized GGUF file.",
    "selftest": "Check every kernel on a device against its NumPy reference.",
}


class LazyGroup(Group):
    """Imports ``xinfer_vk.cli.<name>``, with underscores for dashes, when its command is used, so that
    ``--help`` is instant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"xinfer_vk.cli.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        if not any(parameter.name == "debug" for parameter in command.params):
            command.params.append(debug_option(hidden=True))  # accepted after the command's name too
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, params=[debug_option()])
@click.version_option(__version__, prog_name="xinfer-vk")
def cli() -> None:
    """Run language models on any Vulkan GPU."""


def run(args: Sequence[str]) -> int:
    """Run a command line; errors become one line on standard error. Returns the exit code."""
    guard_streams()
    unwind_when_ended()
    try:
        with shell_words():
            code = cli.main(args=list(args), prog_name="xinfer-vk", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        show_mistake(error)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return exit_code()
    except ReaderGone:
        return 0
    except XinferError as error:
        if wants_traceback():
            raise
        tell(f"error: {error}")
        return error.exit_code
    except Exception as error:
        if wants_traceback():
            raise
        if is_out_of_memory(error):
            tell(f"error: {out_of_memory(' '.join(str(error).split()) or type(error).__name__)}")
            return 1
        text = " ".join(str(error).split()) or "no message"
        tell(f"error: unexpected {type(error).__name__}: {text} (this is a bug; --debug shows where it is)")
        return 1
    finally:
        with contextlib.suppress(XinferError, ReaderGone):  # it has been told, if it could be
            sys.stdout.flush()

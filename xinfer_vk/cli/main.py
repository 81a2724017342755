"""The command line: one group, each command in a file of its own that is imported only when used."""

from __future__ import annotations

import importlib
import os
import sys

import click

from xinfer_vk import __version__
from xinfer_vk.errors import XinferError

COMMANDS = {
    "generate": "Generate text from a prompt.",
    "chat": "Chat with a model in the terminal.",
    "perplexity": "Tell how well a model predicts a text.",
    "compare-decoding": "Show side by side what ways of choosing tokens make of a prompt.",
    "devices": "List the Vulkan devices and what they can do.",
    "pull": "Download a model.",
    "selftest": "Check every kernel on a device against its NumPy reference.",
}
INTERRUPTED = 130  # 128 + SIGINT


class LazyGroup(click.Group):
    """Imports ``xinfer_vk.cli.<name>``, with underscores for dashes, when its command is wanted, so that
    ``--help`` is instant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"xinfer_vk.cli.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="xinfer-vk")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Run language models on any Vulkan GPU."""


def main(argv: list[str] | None = None) -> None:
    """Entry point of ``xinfer-vk``: errors become one line on standard error and an exit code."""
    args = sys.argv[1:] if argv is None else argv
    debug = "--debug" in args or bool(os.environ.get("XINFER_VK_DEBUG"))
    args = [a for a in args if a != "--debug"]  # accepted before and after the command's name
    try:
        code = cli.main(args=args, prog_name="xinfer-vk", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe went away: not an error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except XinferError as error:
        if debug:
            raise
        click.echo(f"error: {error}", err=True)
        code = error.exit_code
    except Exception as error:
        if debug:
            raise
        text = " ".join(str(error).split()) or "no message"
        click.echo(
            f"error: unexpected {type(error).__name__}: {text} (this is a bug; --debug shows where it is)",
            err=True,
        )
        code = 1
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()

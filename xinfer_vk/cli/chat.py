"""``xinfer-vk chat``: a conversation in the terminal, or over pipes."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xinfer_vk.cli.debug import wants_traceback
from xinfer_vk.cli.interrupt import exit_code, terminated
from xinfer_vk.cli.options import (
    KV_MEMORY_OPTION,
    TEMPLATE_OPTION,
    model_options,
    params_from_options,
    sampling_options,
    template_args_from_options,
)
from xinfer_vk.cli.output import OutputError
from xinfer_vk.cli.progress import ProgressBar
from xinfer_vk.cli.source import check_unicode
from xinfer_vk.errors import XinferError

if TYPE_CHECKING:
    from xinfer_vk.cli.chat_commands import Chat
    from xinfer_vk.cli.chat_input import LineEditor
    from xinfer_vk.engine.session import ChatSession

MAX_ANSWER_TOKENS = 512
MAX_THINKING_TOKENS = 4096  # of an answer and the thinking before it


@click.command("chat")
@model_options
@click.option("--system", "-s", help="System message. [default: from the chat template]")
@click.option(
    "--max-new-tokens",
    "-n",
    type=click.IntRange(min=1),
    help=f"Most tokens of an answer. [default: {MAX_ANSWER_TOKENS}; {MAX_THINKING_TOKENS} if it thinks]",
)
@click.option(
    "--context",
    "-c",
    type=click.IntRange(min=1),
    help="Context length in tokens. [default: 4096, or the model's maximum if less]",
)
@KV_MEMORY_OPTION
@click.option(
    "--on-full",
    type=click.Choice(["drop-oldest", "refuse"]),
    default="drop-oldest",
    show_default=True,
    help="When the context is full: drop the oldest turns, or refuse the message.",
)
@click.option("--load", type=click.Path(), help="Continue a conversation that /save wrote.")
@TEMPLATE_OPTION
@click.option("--ignore-eos", is_flag=True, help="Do not stop at the end-of-sequence token.")
@sampling_options
@click.option("--no-history", is_flag=True, help="Do not save input in a history file.")
@click.option("--quiet", "-q", is_flag=True, help="Print no notices.")
@click.option("--verbose", "-v", is_flag=True, help="Print load time, and speed and memory of each answer.")
def command(
    chosen: dict[str, Any],
    system: str | None,
    max_new_tokens: int | None,
    context: int | None,
    kv_memory: int | float | None,
    on_full: str,
    load: str | None,
    template_arg: tuple[str, ...],
    ignore_eos: bool,
    no_history: bool,
    quiet: bool,
    verbose: bool,
    sampler: str,
    **options: Any,
) -> None:
    """Chat with a model.

    In a terminal, /help lists the commands, Ctrl-C stops the answer and Ctrl-D quits. In a pipe, each line
    of standard input is a message (a backslash at its end continues it). Answers go to standard output,
    everything else to standard error, and the first error ends the chat. In both, a line that begins with /
    is a command.
    """
    fields: dict[str, Any] = {"max_new_tokens": max_new_tokens or MAX_ANSWER_TOKENS, "ignore_eos": ignore_eos}
    check_unicode(system or "", "the system text")
    template_args = template_args_from_options(template_arg)
    params_from_options({**options, "recommended": False}, **fields)  # a mistake is told before loading
    terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()

    with ProgressBar(enabled=False if quiet else None) as progress:
        from xinfer_vk.cli.chat_commands import Chat
        from xinfer_vk.cli.chat_file import load_chat
        from xinfer_vk.cli.chat_view import PlainView, TerminalView
        from xinfer_vk.engine.llm import LLM

        saved = None if load is None else load_chat(Path(load))

        def open_model(name: str) -> LLM:
            return LLM(
                **{**chosen, "model": name},
                context=context,
                kv_memory=kv_memory,
                sampler=sampler,  # type: ignore[arg-type]
                progress=progress,
            )

        with open_model(chosen["model"]) as llm:
            if max_new_tokens is None and llm.thinks:
                fields["max_new_tokens"] = MAX_THINKING_TOKENS
            params = params_from_options(options, llm.generation_config, **fields)
            session = llm.session(
                system=system, params=params, on_full=on_full, template_args=template_args  # type: ignore[arg-type]
            )  # fmt: skip
            view = (TerminalView if terminal else PlainView)(quiet=quiet, progress=progress)
            for notice in llm.notices:
                view.notice(notice)
            from xinfer_vk.cli.report import describe, describe_recommended, recommends

            if verbose:
                view.notice(describe(llm))
            if options["recommended"] and (verbose or not recommends(llm.generation_config)):
                view.notice(describe_recommended(llm, params))
            chat = Chat(
                session, view, verbose=verbose, draft=terminal, progress=progress, open_model=open_model
            )
            from xinfer_vk.cli.chat_input import LineEditor, history_file, plain_lines

            try:
                if terminal:
                    view.notice(greeting(session))
                if saved is not None:
                    chat.take(saved, Path(str(load)))
                    if system is not None:
                        session.system = system
                if terminal:
                    talk(chat, LineEditor(chat.toolbar, None if no_history else history_file()))
                else:
                    converse(chat, plain_lines())
            finally:
                chat.session.llm.close()  # /model may have brought another one


def greeting(session: ChatSession) -> str:
    llm = session.llm
    return (
        f"{llm.name} on {llm.runtime.profile.name}, a context of {session.context} tokens. "
        "/help lists commands, Ctrl-C stops an answer, Ctrl-D quits."
    )


def talk(chat: Chat, editor: LineEditor) -> None:
    """A conversation in the terminal, until the user leaves. Whatever goes wrong with a line is shown,
    and the conversation goes on."""
    from xinfer_vk.cli.chat_commands import Quit

    leaving = False  # whether the last thing was Ctrl-C in an empty line
    while True:
        try:
            draft, chat.draft = chat.draft, ""
            line = editor.read(draft)
        except EOFError:
            return
        except KeyboardInterrupt:
            if terminated():
                raise
            if leaving:
                return
            leaving, chat.editing = True, False
            chat.view.notice("Ctrl-C again quits, and so does Ctrl-D")
            continue
        leaving = False
        try:
            chat.handle(line)
        except Quit:
            return
        except KeyboardInterrupt:
            if terminated():
                raise
            chat.view.notice("(stopped)")
        except XinferError as error:
            chat.view.error(str(error))
        except Exception as error:
            if wants_traceback():
                raise
            text = " ".join(str(error).split()) or "no message"
            chat.view.error(f"unexpected {type(error).__name__}: {text} (this is a bug; /save still works)")
        if terminated():
            raise click.exceptions.Exit(exit_code())


def converse(chat: Chat, lines: Iterable[tuple[int, str]]) -> None:
    """A conversation over pipes, until they end. The first error ends it too, with the number of its line,
    and so does Ctrl-C, after it has stopped the answer."""
    from xinfer_vk.cli.chat_commands import Quit

    for number, line in lines:
        try:
            chat.handle(line)
        except Quit:
            return
        except OutputError:
            raise
        except XinferError as error:
            error.args = (f"line {number}: {error}",)
            raise
        if chat.interrupted:
            raise click.exceptions.Exit(exit_code())

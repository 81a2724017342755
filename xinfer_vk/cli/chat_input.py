"""Where a chat's lines come from: an editor in the terminal, or plain lines of a pipe."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from xinfer_vk.cli.chat_commands import ALIASES, COMMANDS, is_open
from xinfer_vk.cli.chat_settings import DEFAULTS
from xinfer_vk.errors import UsageError
from xinfer_vk.folders import cache_folder

if TYPE_CHECKING:
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

PROMPT, CONTINUATION = "> ", "… "


def plain_lines(source: IO[bytes] | None = None) -> Iterator[tuple[int, str]]:
    """Messages of a pipe, one a line, each with the number of its line; empty lines are left out.

    A line that ends with a backslash goes on in the next one, and three quotes hold all lines up to the next
    three. Raises :class:`UsageError` for bytes that
    are not UTF-8.
    """
    held: list[str] = []
    first = 1
    if source is None:
        source = io.BytesIO() if sys.stdin is None else sys.stdin.buffer
    for number, data in enumerate(source, 1):
        try:
            line = data.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise UsageError(
                f"line {number} of standard input is not UTF-8 (byte {error.start}): convert it"
            ) from error
        if not held:
            first = number
        text = "\n".join([*held, line])
        if is_open(text):
            held.append(line)
            continue
        if line.endswith("\\"):
            held.append(line[:-1])
            continue
        held = []
        if text.strip():
            yield first, text
    if is_open("\n".join(held)):
        raise UsageError(f'line {first} of standard input begins a block with """ that has no end')
    if "".join(held).strip():
        yield first, "\n".join(held)


class LineEditor:
    """The input line of a terminal: several lines, history, completion of commands.

    ``toolbar`` gives the text below the input, for so many columns. ``history`` is the file that what was
    typed is kept in, if any. ``terminal`` are arguments for ``prompt_toolkit.PromptSession``: another input
    and output.
    """

    def __init__(self, toolbar: Callable[[int], str], history: Path | None, **terminal: Any) -> None:
        from prompt_toolkit import PromptSession

        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation=CONTINUATION,
            key_bindings=_keys(),
            completer=_completer(),
            complete_while_typing=True,
            history=_history(history),
            bottom_toolbar=lambda: toolbar(self._session.output.get_size().columns),
            tempfile_suffix=".md",
            enable_suspend=True,
            **terminal,
        )

    def read(self, draft: str = "") -> str:
        """What the user enters, ``draft`` being there already. Raises :class:`EOFError` for Ctrl-D in an
        empty line and :class:`KeyboardInterrupt` for Ctrl-C there; in a line with text it clears it."""
        return self._session.prompt(default=draft)


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.insert_text("\n")
        elif (
            buffer.document.current_line_before_cursor.endswith("\\") and buffer.document.is_cursor_at_the_end
        ):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        elif buffer.text.strip():
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-x", "c-e")
    def editor(event: KeyPressEvent) -> None:
        event.current_buffer.open_in_editor()  # $VISUAL or $EDITOR; the text comes back to be sent

    @keys.add("c-c")
    def interrupt(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    return keys


def _completer() -> Completer:
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    class CommandCompleter(Completer):
        """Commands, and what follows them: parameters of ``/set``, files of ``/save`` and ``/load``."""

        _paths = PathCompleter(expanduser=True)

        def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
            text = document.text_before_cursor
            if not text.startswith("/") or "\n" in text:
                return
            name, space, rest = text[1:].partition(" ")
            if not space:
                aliases = {alias: COMMANDS[known] for alias, known in ALIASES.items()}
                for known, command in {**COMMANDS, **aliases}.items():
                    if known.startswith(name) and (name or known in COMMANDS):
                        yield Completion(known, -len(name), f"/{known}", command.does)
            elif name == "set":
                word = rest.rpartition(" ")[2]
                for field in DEFAULTS:
                    if field.startswith(word):
                        yield Completion(f"{field}=", -len(word), field)
            elif name in ("save", "load", "read"):
                path = rest.removeprefix("-f ")
                yield from self._paths.get_completions(Document(path, len(path)), event)

    return CommandCompleter()


def _history(path: Path | None) -> History:
    """The history in a file that only the user can read; one that is forgotten where there can be none."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class QuietFileHistory(FileHistory):
        """What cannot be kept (the disk is full, the text is no Unicode) must not stop the user."""

        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError, UnicodeError):
                super().store_string(string)

    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError:
        return InMemoryHistory()
    return QuietFileHistory(str(path))


def history_file() -> Path | None:
    """Where what was typed is kept: in the cache folder, if there is one."""
    try:
        return cache_folder() / "chat_history"
    except UsageError:
        return None

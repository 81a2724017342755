"""What a line typed into a chat means: a message to the model, or a command that begins with ``/``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from xinfer_vk.cli.chat_file import SavedChat, load_chat, save_chat
from xinfer_vk.cli.chat_settings import settings_table, with_settings
from xinfer_vk.cli.chat_stats import Totals, fill, stats_table, turns
from xinfer_vk.cli.interrupt import interruptible
from xinfer_vk.cli.source import check_unicode
from xinfer_vk.errors import UsageError
from xinfer_vk.fields import quoted

if TYPE_CHECKING:
    from xinfer_vk.cli.chat_view import View
    from xinfer_vk.engine.generation import GenerationResult
    from xinfer_vk.engine.session import ChatSession, ChatStream


class Closable(Protocol):
    """A progress bar, as far as it matters here."""

    def close(self) -> None: ...


class Quit(Exception):
    """The user wants to leave."""


@dataclass(frozen=True)
class Command:
    """``usage``: what follows the name. ``does``: a line for ``/help``. ``run``: gets what followed."""

    usage: str
    does: str
    run: Callable[[Chat, str], None]


class Chat:
    """A conversation and the commands that work on it. :meth:`handle` takes a line and shows what comes of
    it; errors are raised, and leave the conversation as it was.

    ``verbose``: tell what each answer cost. ``draft``: whether there is an input line that :attr:`draft` can
    be put into. ``progress``: a bar that is to be gone when an answer ends.
    """

    def __init__(
        self,
        session: ChatSession,
        view: View,
        *,
        verbose: bool = False,
        draft: bool = False,
        progress: Closable | None = None,
    ) -> None:
        self.session, self.view, self.verbose, self._progress = session, view, verbose, progress
        self.can_draft = draft
        self.draft = ""  # what the input line begins with next
        self.editing = False  # whether the next message replaces the last one
        self.interrupted = False  # whether the last answer was
        self._saved = session.messages
        self._totals = Totals()

    def handle(self, line: str) -> None:
        """A message, or a command. ``//`` at the beginning is a message that begins with ``/``.

        Raises :class:`Quit`, and :class:`XinferError` for what cannot be done.
        """
        self.interrupted = False
        check_unicode(line, "the line")
        if line.startswith("/") and not line.startswith("//"):
            name, _, text = line[1:].partition(" ")
            command = COMMANDS.get(name.strip())
            if command is None:
                raise UsageError(
                    f"there is no command {quoted('/' + name.strip())}: /help lists them, and a message that "
                    "begins with / is written with //"
                )
            command.run(self, text.strip())
            return
        text = line[1:] if line.startswith("//") else line
        if self.editing:
            self._answer(self.session.edit(text))
        else:
            self._answer(self.session.send(text))

    def toolbar(self) -> str:
        """How full the context is, the model and the device."""
        session = self.session
        parts = [f"context {fill(session)}", session.llm.name, session.llm.runtime.profile.name]
        if self.editing:
            parts.insert(0, "changing the last message")
        return " " + " · ".join(parts)

    def _answer(self, stream: ChatStream) -> None:
        """Run and show an answer. Ctrl-C ends it after the step under way, a second one at once."""
        if stream.newly_dropped:
            self.view.notice(
                f"(the context is full: the oldest {turns(stream.newly_dropped)} will not be read any more; "
                "/save still has everything)"
            )
        try:
            with interruptible(stream.cancel):
                for piece in stream:
                    self.view.piece(piece)
        finally:
            stream.close()  # if it has not ended: not some time later
            if self._progress is not None:
                self._progress.close()
            so_far = stream.partial_result
            self.interrupted = so_far.finish_reason == "interrupted"
            if not self.interrupted or so_far.text or so_far.thinking:
                self.view.end_answer()
        result = stream.result
        self.editing = False
        self._totals.add(result)
        self._comment(result)

    def _comment(self, result: GenerationResult) -> None:
        session = self.session
        if session.unanswered is not None:
            self.view.notice("(stopped before the answer began: /retry sends the message again)")
        elif result.finish_reason == "interrupted":
            self.view.notice("(stopped: the answer stays as it is)")
        elif result.finish_reason == "length":
            full = len(result.prompt_token_ids) + len(result.token_ids) >= session.context
            reason = "the context is full" if full else f"max_new_tokens={len(result.token_ids)} is reached"
            when = " while it was thinking" if result.thinking and not result.text else ""
            self.view.notice(f"(cut off{when}: {reason})")
        if self.verbose:
            m = result.metrics
            self.view.notice(f"reused {m.reused_tokens} tok | {m.timing_line()}")

    # -- commands -----------------------------------------------------------------------------

    def help(self, text: str) -> None:
        rows = [(f"/{name} {c.usage}".rstrip(), c.does) for name, c in COMMANDS.items()]
        rows.append(("//TEXT", "Say something that begins with /."))
        if self.can_draft:
            rows.append(("Alt-Enter, or \\ then Enter", "A new line in the message."))
            rows.append(("Ctrl-C", "Stop the answer; clear the input; twice in an empty line: quit."))
        self.view.table(rows)

    def system(self, text: str) -> None:
        session = self.session
        if not text:
            self.view.table(
                [("system", session.system if session.system is not None else "(the model's own)")]
            )
            return
        session.system = None if text == "-" else text
        self.view.notice("system text removed" if text == "-" else "system text set")

    def reset(self, text: str) -> None:
        self.session.reset()
        self.editing = False
        self.view.notice("a new conversation" + (", same system text" if self.session.system else ""))

    def undo(self, text: str) -> None:
        message = self.session.undo()
        self.editing = False
        self.view.notice(f"took back: {shortened(message)}")

    def edit(self, text: str) -> None:
        if text:
            self._answer(self.session.edit(text))
            return
        last = self.session.unanswered
        if last is None and self.session.turns:
            last = self.session.turns[-1].user
        if last is None:
            raise UsageError("there is no message to change: the conversation is empty")
        if not self.can_draft:
            raise UsageError("/edit needs the new text: /edit TEXT")
        self.draft, self.editing = last, True

    def retry(self, text: str) -> None:
        stream = self.session.retry()
        params = self.session.params
        if self.session.unanswered is None and (params.is_greedy or params.seed is not None):
            why = "temperature is 0" if params.is_greedy else "seed is set"
            self.view.notice(
                f"({why}, so the answer will be the same; /set temperature=0.8 seed=none varies it)"
            )
        self._answer(stream)

    def save(self, text: str) -> None:
        overwrite, path = file_argument("save", text)
        chat = SavedChat(self.session.llm.name, self.session.params, self.session.messages)
        save_chat(path, chat, overwrite=overwrite)
        self._saved = self.session.messages
        self.view.notice(f"saved {turns(len(self.session.turns))} in {path}")

    def load(self, text: str) -> None:
        session = self.session
        anyway, path = file_argument("load", text)
        chat = load_chat(path)
        if session.turns and session.messages != self._saved and not anyway:
            raise UsageError(
                f"this conversation is not saved: /save it first, or /load -f {path} gives it up"
            )
        chat.params.check_vocabulary(session.llm.config.vocab_size)  # all is checked before anything changes
        session.messages = chat.messages  # refuses what the template does not take
        session.params = chat.params
        self._saved, self.editing = session.messages, False
        self.view.notice(f"loaded {turns(len(session.turns))} from {path}, with its settings")
        if chat.model != session.llm.name:
            self.view.notice(f"(it was saved with {chat.model}; this is {session.llm.name})")

    def stats(self, text: str) -> None:
        self.view.table(stats_table(self.session, self._totals))

    def set(self, text: str) -> None:
        if not text:
            self.view.table(settings_table(self.session.params))
            return
        before = dict(settings_table(self.session.params))
        self.session.params = with_settings(self.session.params, text)
        changed = [row for row in settings_table(self.session.params) if before[row[0]] != row[1]]
        if changed:
            self.view.table(changed)
        else:
            self.view.notice("nothing changed")

    def quit(self, text: str) -> None:
        raise Quit


COMMANDS = {
    "help": Command("", "Show this.", Chat.help),
    "system": Command("[TEXT]", "Show or set the system text; - removes it.", Chat.system),
    "reset": Command("", "Begin a new conversation; the system text stays.", Chat.reset),
    "undo": Command("", "Take back the last message and its answer.", Chat.undo),
    "edit": Command("[TEXT]", "Change the last message, and have it answered.", Chat.edit),
    "retry": Command("", "Answer the last message again.", Chat.retry),
    "save": Command("[-f] FILE", "Write the conversation to a JSON file; -f overwrites.", Chat.save),
    "load": Command("[-f] FILE", "Go on with a saved one; -f gives up what is not saved.", Chat.load),
    "stats": Command("", "Show how full the context is, and speeds.", Chat.stats),
    "set": Command("[NAME=VALUE …]", "Show or change sampling parameters.", Chat.set),
    "quit": Command("", "Leave; so does Ctrl-D.", Chat.quit),
}


def shortened(text: str, most: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def file_argument(command: str, text: str) -> tuple[bool, Path]:
    """Whether ``-f`` was given, and the file: all the rest, spaces included."""
    force = text == "-f" or text.startswith("-f ")
    name = text[2:].strip() if force else text
    if not name:
        raise UsageError(f"/{command} needs a file: /{command} FILE")
    if "\0" in name:
        raise UsageError(f"{quoted(name)} cannot be the name of a file: it holds a NUL")
    try:
        return force, Path(name).expanduser()
    except RuntimeError:
        raise UsageError(f"{quoted(name)}: there is no such home directory: write out the path") from None

"""What a line typed into a chat means: a message to the model, or a command that begins with ``/``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rich.cells import cell_len, set_cell_size

from xinfer_vk.cli.chat_file import SavedChat, load_chat, save_chat
from xinfer_vk.cli.chat_settings import settings_table, with_settings
from xinfer_vk.cli.chat_stats import Totals, fill, stats_table, turns
from xinfer_vk.cli.interrupt import interruptible
from xinfer_vk.cli.same_file import refuse_inputs
from xinfer_vk.cli.source import check_unicode
from xinfer_vk.errors import ModelError, UsageError, parameter_words
from xinfer_vk.fields import quoted
from xinfer_vk.text.thinking import Piece
from xinfer_vk.units import format_bytes
from xinfer_vk.weights.mapped import read_small_file

if TYPE_CHECKING:
    from xinfer_vk.cli.chat_view import View
    from xinfer_vk.engine.generation import GenerationResult
    from xinfer_vk.engine.llm import LLM
    from xinfer_vk.engine.session import ChatSession, ChatStream
    from xinfer_vk.sampling.params import SamplingParams


QUOTES = '"""'
BLOCK = re.compile(r'(\s*(?:/\S+\s+)?)"""')  # at the beginning, or after a command
MAX_FILE_BYTES = 1 << 24  # of /read: far beyond any context
SHOWN_TURNS = 3  # of a conversation that was loaded


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
    be put into. ``progress``: a bar that is to be gone when an answer ends. ``open_model`` loads another
    model for ``/model NAME``.
    """

    def __init__(
        self,
        session: ChatSession,
        view: View,
        *,
        verbose: bool = False,
        draft: bool = False,
        progress: Closable | None = None,
        open_model: Callable[[str], LLM] | None = None,
    ) -> None:
        self._open_model = open_model
        self._read_files: list[str] = []  # texts for the next message, from /read
        self.session, self.view, self.verbose, self._progress = session, view, verbose, progress
        self.can_draft = draft
        self.draft = ""  # what the input line begins with next
        self.editing = False  # whether the next message replaces the last one
        self.interrupted = False  # whether the last answer was
        self._saved = session.messages
        self._totals = Totals()

    def handle(self, line: str) -> None:
        """A message, or a command. ``//`` at the beginning is a message that begins with ``/``; text
        between three quotes is taken as it is.

        Raises :class:`Quit`, and :class:`XinferError` for what cannot be done.
        """
        self.interrupted = False
        check_unicode(line, "the line")
        if line.startswith("/") and not line.startswith("//"):
            name, _, rest = re.sub(r"\s", " ", line[1:], count=1).partition(" ")
            command = COMMANDS.get(ALIASES.get(name, name))
            if command is None:
                raise UsageError(
                    f"there is no command {quoted('/' + name)}: /help lists them, and a message that "
                    "begins with / is written with //"
                )
            command.run(self, unquoted(rest.strip()))
            return
        text = unquoted(line[1:] if line.startswith("//") else line)
        text = "\n\n".join([*self._read_files, text])
        stream = self.session.edit(text) if self.editing else self.session.send(text)
        self._read_files = []
        self._answer(stream)

    def toolbar(self, columns: int = 80) -> str:
        """How full the context is, the model and the device, as far as they fit."""
        session = self.session
        parts = [
            f"context {fill(session)}",
            session.llm.name,
            session.llm.runtime.profile.name.partition(" (")[0],
        ]
        if self._read_files:
            parts.insert(0, f"{len(self._read_files)} read")
        if self.editing:
            parts.insert(0, "changing the last message")
        while len(parts) > 1 and cell_len(" · ".join(parts)) + 2 > columns:
            parts.pop()
        return " " + set_cell_size(line := " · ".join(parts), min(cell_len(line), max(columns - 2, 0)))

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
        rows = [(f"/{name} {c.usage}".rstrip(), c.does + _also(name)) for name, c in COMMANDS.items()]
        rows.append(("//TEXT", "Say something that begins with /."))
        rows.append(('"""TEXT"""', "A message of several lines."))
        if self.can_draft:
            rows.append(("Alt-Enter, or \\ then Enter", "A new line in the message."))
            rows.append(("Ctrl-X Ctrl-E", "Write the message in $EDITOR."))
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
        for file in self.session.llm.model_files:
            refuse_inputs("/save", str(path), {"the model": str(file)})
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
        self.take(chat, path)

    def take(self, chat: SavedChat, path: Path) -> None:
        """Go on with a saved conversation, and show its end."""
        session = self.session
        with parameter_words():  # all is checked before anything changes
            chat.params.check_vocabulary(session.llm.config.vocab_size)
        session.messages = chat.messages  # refuses what the template does not take
        session.params = chat.params
        self._saved, self.editing = session.messages, False
        self.view.notice(f"loaded {turns(len(session.turns))} from {path}, with its settings")
        if chat.model != session.llm.name:
            self.view.notice(f"(it was saved with {chat.model}; this is {session.llm.name})")
        if self.can_draft:
            self._show_turns()

    def _show_turns(self) -> None:
        """The last turns, as they looked when they were made."""
        if self.session.system:
            self.view.notice(f"system: {shortened(self.session.system)}")
        earlier = len(self.session.turns) - SHOWN_TURNS
        if earlier > 0:
            self.view.notice(f"({turns(earlier)} before these)")
        for turn in self.session.turns[-SHOWN_TURNS:]:
            self.view.notice(f"> {turn.user}")
            self.view.piece(Piece(turn.assistant))
            self.view.end_answer()

    def read(self, text: str) -> None:
        if text == "-":
            self._read_files = []
            self.view.notice("what was read is forgotten")
            return
        path = file_path("read", text)
        try:
            data = read_small_file(path, MAX_FILE_BYTES)
            content = data.decode("utf-8-sig").strip("\n")
        except ModelError as error:
            raise UsageError(str(error)) from error
        except UnicodeDecodeError as error:
            raise UsageError(f"{path} is not UTF-8 text (byte {error.start}): convert it") from error
        if not content.strip():
            raise UsageError(f"{path} is empty: there is nothing to read")
        self._read_files.append(content)
        tokens = len(self.session.llm.tokenizer.encode(content, parse_special=False, add_bos=False))
        self.view.notice(f"read {path}, {tokens} tokens: your next message follows it (/read - forgets it)")

    def model(self, text: str) -> None:
        if not text:
            llm = self.session.llm
            profile = llm.runtime.profile
            self.view.table(
                [
                    ("model", f"{llm.name} ({llm.config.architecture})"),
                    ("weights", f"{format_bytes(llm.weight_bytes)}, {llm.dtype}"),
                    ("context", f"{self.session.context} of at most {llm.config.max_position} tokens"),
                    ("device", f"{profile.name} ({llm.runtime.driver})"),
                ]
            )
            return
        if self._open_model is None:
            raise UsageError("/model alone shows the model: another one needs a new chat")
        before, session = self.session.llm, self.session
        llm = self._open_model(text)
        try:
            self.session = llm.chat(
                system=session.system,
                params=session.params,
                on_full=session.on_full,
                messages=session.messages,
                template_args=session.template_args,
            )
        except BaseException:
            llm.close()
            raise
        before.close()
        for line in llm.notices:
            self.view.notice(line)
        self.view.notice(f"{llm.name} goes on with {turns(len(session.turns))}")

    def stats(self, text: str) -> None:
        self.view.table(stats_table(self.session, self._totals))

    def set(self, text: str) -> None:
        if not text:
            self.view.table(settings_table(self.session.params))
            return
        before = dict(settings_table(self.session.params))
        with parameter_words():
            changed_params = with_settings(self.session.params, text)
            self._check_settings(changed_params)
        self.session.params = changed_params
        changed = [row for row in settings_table(self.session.params) if before[row[0]] != row[1]]
        if changed:
            self.view.table(changed)
        else:
            self.view.notice("nothing changed")

    def _check_settings(self, params: SamplingParams) -> None:
        """What a model and its context allow, beyond what SamplingParams checks by itself."""
        session = self.session
        params.check_vocabulary(session.llm.config.vocab_size)
        session.llm.check_fits([], params)
        if params.max_new_tokens > session.context:
            raise UsageError(
                f"max_new_tokens is {params.max_new_tokens}: the context has {session.context} tokens"
            )

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
    "read": Command("FILE", "Put a text file in front of the next message; - forgets it.", Chat.read),
    "model": Command("[NAME]", "Show the model, or go on with another one.", Chat.model),
    "stats": Command("", "Show how full the context is, and speeds.", Chat.stats),
    "set": Command("[NAME=VALUE …]", "Show or change sampling parameters.", Chat.set),
    "quit": Command("", "Leave; so does Ctrl-D.", Chat.quit),
}
ALIASES: Mapping[str, str] = {"?": "help", "clear": "reset", "bye": "quit", "exit": "quit"}


def _also(name: str) -> str:
    """The other names of a command, for the help."""
    others = [f"/{alias}" for alias, command in ALIASES.items() if command == name]
    return f" Also {', '.join(others)}." if others else ""


def is_open(text: str) -> bool:
    """Whether three quotes at the beginning of a message are still to be closed."""
    found = BLOCK.match(text)
    return found is not None and not text[found.end() :].rstrip().endswith(QUOTES)


def unquoted(text: str) -> str:
    """What is between three quotes, without the line breaks next to them; other text as it is."""
    found = BLOCK.match(text)
    if found is None or found[1].strip() or is_open(text):
        return text
    return text[found.end() :].rstrip()[: -len(QUOTES)].strip("\n")


def shortened(text: str, most: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def file_argument(command: str, text: str) -> tuple[bool, Path]:
    """Whether ``-f`` was given, and the file: all the rest, spaces included."""
    force = text == "-f" or text.startswith("-f ")
    return force, file_path(command, text[2:].strip() if force else text)


def file_path(command: str, name: str) -> Path:
    """The file that a command names. Raises :class:`UsageError` for what can be none."""
    if not name:
        raise UsageError(f"/{command} needs a file: /{command} FILE")
    if "\0" in name:
        raise UsageError(f"{quoted(name)} cannot be the name of a file: it holds a NUL")
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise UsageError(f"{quoted(name)}: there is no such home directory: write out the path") from None

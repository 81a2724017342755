"""``xinfer-vk chat``: its commands, its input line, pipes, and a real terminal.

Most of it talks to a tiny model in this process; pipes and the terminal run the program itself.
"""

from __future__ import annotations

import codecs
import io
import json
import math
import os
import pty
import re
import select
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_model import in_words, words, write_chat_model
from cli_helpers import assert_one_error, xinfer

from xinfer_vk import LLM
from xinfer_vk.cli import chat_file
from xinfer_vk.cli.chat import converse, talk
from xinfer_vk.cli.chat_commands import COMMANDS, Chat, Quit
from xinfer_vk.cli.chat_file import SavedChat, load_chat, save_chat
from xinfer_vk.cli.chat_input import LineEditor, plain_lines
from xinfer_vk.cli.chat_settings import (
    DEFAULTS,
    settings_from_record,
    settings_record,
    settings_table,
    with_settings,
)
from xinfer_vk.cli.chat_view import PlainView, TerminalView
from xinfer_vk.cli.output import printable
from xinfer_vk.errors import DeviceError, UsageError, XinferError
from xinfer_vk.sampling.params import SamplingParams
from xinfer_vk.text.thinking import Piece

CONTEXT = 256
ESCAPE = "\x1b"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(
        tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=4096, num_hidden_layers=1
    )


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, device="numpy", kv_dtype="f32", context=CONTEXT) as opened:
        yield opened


class Seen:
    """A view that remembers. ``on_piece`` is called at each piece of an answer."""

    def __init__(self) -> None:
        self.answers: list[str] = [""]
        self.notices: list[str] = []
        self.errors: list[str] = []
        self.tables: list[dict[str, str]] = []
        self.on_piece: Callable[[], None] = lambda: None

    def piece(self, text: str) -> None:
        self.answers[-1] += text
        self.on_piece()

    def end_answer(self) -> None:
        self.answers.append("")

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def error(self, text: str) -> None:
        self.errors.append(text)

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        self.tables.append(dict(rows))


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def chat(llm: LLM, seen: Seen) -> Chat:
    return Chat(in_words(llm), seen)


def users(chat: Chat) -> list[str]:
    return [turn.user for turn in chat.session.turns]


# -- commands ------------------------------------------------------------------------------------


def test_a_line_is_a_message_and_its_answer_is_shown(chat: Chat, seen: Seen) -> None:
    chat.handle("Hello there")
    chat.handle("//usr is a directory")
    assert users(chat) == ["Hello there", "/usr is a directory"]
    assert seen.answers[:2] == [turn.assistant for turn in chat.session.turns]
    assert seen.notices == ["(cut off: max_new_tokens=8 is reached)"] * 2


def test_help_tells_every_command(chat: Chat, seen: Seen) -> None:
    chat.handle("/help")
    shown = " ".join(seen.tables[0])
    assert {f"/{name}" for name in COMMANDS} <= set(shown.split())
    promised = {"help", "system", "reset", "undo", "retry", "save", "load", "stats", "set", "quit"}
    assert promised <= set(COMMANDS)


def test_the_system_text_is_shown_set_and_removed(chat: Chat, seen: Seen) -> None:
    for line in ("/system", "/system be  terse", "/system", "/system -", "/system"):
        chat.handle(line)
    assert [table["system"] for table in seen.tables] == [
        "(the model's own)",
        "be  terse",
        "(the model's own)",
    ]
    assert chat.session.system is None


def test_reset_keeps_the_system_text(chat: Chat, seen: Seen) -> None:
    chat.handle("/system be terse")
    chat.handle("Hello")
    chat.handle("/reset")
    assert chat.session.messages == [{"role": "system", "content": "be terse"}]
    assert "same system text" in seen.notices[-1]


def test_undo_takes_turns_back_until_there_are_none(chat: Chat, seen: Seen) -> None:
    chat.handle("One")
    chat.handle("Two " * 40)
    chat.handle("/undo")
    assert seen.notices[-1].startswith("took back: Two Two") and len(seen.notices[-1]) < 80
    chat.handle("/undo")
    with pytest.raises(UsageError, match="no message to take back"):
        chat.handle("/undo")
    assert users(chat) == []


def test_retry_says_so_when_the_answer_cannot_differ(chat: Chat, seen: Seen) -> None:
    chat.handle("Hello")
    chat.handle("/retry")
    assert any("temperature is 0, so the answer will be the same" in n for n in seen.notices)
    assert seen.answers[0] == seen.answers[1]
    assert users(chat) == ["Hello"]
    seen.notices.clear()
    chat.handle("/set temperature=1 seed=none")
    chat.handle("/retry")
    assert not any("same" in notice for notice in seen.notices)


def test_edit_with_a_text_replaces_the_last_message(chat: Chat) -> None:
    chat.handle("One")
    chat.handle("Two")
    chat.handle("/edit Three")
    assert users(chat) == ["One", "Three"]


def test_edit_alone_puts_the_last_message_into_the_input_line(llm: LLM, seen: Seen) -> None:
    chat = Chat(in_words(llm), seen, draft=True)
    chat.handle("One")
    chat.handle("/edit")
    assert (chat.draft, users(chat)) == ("One", ["One"])
    assert "changing the last message" in chat.toolbar()
    chat.handle("Two")
    chat.handle("Three")
    assert users(chat) == ["Two", "Three"]


def test_stats_count_what_was_reused(chat: Chat, seen: Seen) -> None:
    chat.handle("/stats")
    chat.handle("Hello there")
    chat.handle("And now?")
    chat.handle("/stats")
    before, after = seen.tables
    assert before["context"] == "0 of 256 tokens (0 %)" and "last prompt" not in before
    assert re.fullmatch(r"\d+ of 256 tokens \(\d+ %\)", after["context"])
    found = re.fullmatch(r"(\d+) tokens: (\d+) reused, (\d+) run", after["last prompt"])
    assert found is not None
    prompt, reused, run = map(int, found.groups())
    assert prompt == reused + run and reused > 60 > run
    assert re.match(r"\d+ prompt tokens reused, \d+ run; 16 tokens generated", after["all answers"])
    assert chat.toolbar().startswith(f" context {after['context']} · tiny")


def test_an_unknown_command_tells_how_to_say_it(chat: Chat) -> None:
    for line in ("/usr/bin is a path", "/", "/Help"):
        with pytest.raises(UsageError, match=r"there is no command '/.*': /help .* //"):
            chat.handle(line)
    assert users(chat) == []


def test_quit_quits(chat: Chat) -> None:
    with pytest.raises(Quit):
        chat.handle("/quit")


def test_verbose_tells_what_an_answer_cost(llm: LLM, seen: Seen) -> None:
    chat = Chat(in_words(llm), seen, verbose=True)
    chat.handle("Hello")
    assert re.match(r"reused \d+ tok \| prefill: \d+ tok in .* \| decode: 7 tok in ", seen.notices[-1])


def test_dropped_turns_are_told_and_still_saved(llm: LLM, seen: Seen, tmp_path: Path) -> None:
    chat = Chat(in_words(llm), seen)
    for i in range(6):
        chat.handle(f"the cat {i} and " * 5)
    told = [notice for notice in seen.notices if "context is full" in notice]
    assert re.match(r"\(the context is full: the oldest \d+ turns? will not be read any more", told[0])
    chat.handle(f"/save {tmp_path / 'chat.json'}")
    assert len(load_chat(tmp_path / "chat.json").messages) == 12
    assert f"{chat.session.dropped_turns} turn" in chat.toolbar()


# -- Ctrl-C --------------------------------------------------------------------------------------


def test_ctrl_c_stops_the_answer_and_keeps_it(chat: Chat, seen: Seen) -> None:
    before = signal.getsignal(signal.SIGINT)
    seen.on_piece = lambda: signal.raise_signal(signal.SIGINT)
    chat.handle("Tell me a story")
    assert chat.interrupted
    assert seen.notices == ["(stopped: the answer stays as it is)"]
    assert chat.session.turns[0].assistant == seen.answers[0] != ""
    seen.on_piece = lambda: None
    chat.handle("Go on")
    assert not chat.interrupted and len(users(chat)) == 2
    assert signal.getsignal(signal.SIGINT) is before


def test_a_progress_bar_does_not_outlive_the_answer(llm: LLM, seen: Seen) -> None:
    class Bar:
        closed = 0

        def close(self) -> None:
            self.closed += 1

    bar = Bar()
    chat = Chat(in_words(llm), seen, progress=bar)
    chat.handle("Hello")
    seen.on_piece = lambda: signal.raise_signal(signal.SIGINT)
    chat.handle("Hello")
    assert bar.closed == 2


def test_a_second_ctrl_c_ends_the_answer_at_once(chat: Chat, seen: Seen) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    seen.on_piece = twice
    with pytest.raises(KeyboardInterrupt):
        chat.handle("Tell me a story")
    seen.on_piece = lambda: None
    chat.handle("Go on")
    assert users(chat) == ["Tell me a story", "Go on"]
    assert chat.session.turns[0].assistant == seen.answers[0]


# -- /set ----------------------------------------------------------------------------------------

EXAMPLES = {
    "temperature": ("0.7", 0.7),
    "top_k": ("40", 40),
    "top_p": ("0.9", 0.9),
    "min_p": (".05", 0.05),
    "typical_p": ("0.95", 0.95),
    "repetition_penalty": ("1.1", 1.1),
    "presence_penalty": ("-1", -1.0),
    "frequency_penalty": ("0.5", 0.5),
    "penalty_window": ("64", 64),
    "logit_bias": ("42:-1.5,7:-inf", {42: -1.5, 7: -math.inf}),
    "seed": ("18446744073709551615", 2**64 - 1),
    "stop": ('["\\n\\n", "User:"]', ("\n\n", "User:")),
    "stop_token_ids": ("2,3", (2, 3)),
    "ignore_eos": ("on", True),
    "min_new_tokens": ("5", 5),
    "max_new_tokens": ("100", 100),
    "logprobs": ("3", 3),
    "bad_words": ('["no", [5, 6]]', ("no", (5, 6))),
    "sampler_order": ("top-k,temperature,penalties,bias,typical,top_p,min_p", None),
}


def test_there_is_an_example_of_every_parameter() -> None:
    assert list(EXAMPLES) == list(DEFAULTS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_parameter_can_be_set_and_put_back(name: str) -> None:
    text, value = EXAMPLES[name]
    params = with_settings(SamplingParams(), f"{name}={text}")
    if value is not None:
        assert getattr(params, name) == value
    assert params != SamplingParams()
    shown = dict(settings_table(params))[name]
    assert shown.partition("  (default ")[2]
    assert with_settings(SamplingParams(), f"{name}={shown.partition('  (')[0]}") == params
    assert with_settings(params, f"{name}=default") == SamplingParams()
    assert settings_from_record(json.loads(json.dumps(settings_record(params), allow_nan=False))) == params


def test_several_are_set_at_once_or_not_at_all() -> None:
    params = with_settings(SamplingParams(), 'temperature = 0.5  stop="a b" top-k=3 bad_words=no')
    assert (params.temperature, params.stop, params.top_k, params.bad_words) == (0.5, ("a b",), 3, ("no",))
    assert with_settings(params, "stop=none seed=none bad_words=none").stop == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("temperature=7e9", "temperature is 7e+09: it must be 0 or less (greedy), or between 1e-6 and 100"),
        ("temperature=hot", "temperature is 'hot': it must be a number"),
        ("temperature=nan", "temperature is nan"),
        ("top_k=1.5", "top_k is '1.5': it must be a whole number, 0 (off) or more"),
        ("top_p=", "top_p is '': it must be a number"),
        ("seed=-1", "seed is -1: it must be between 0 and 2^64 - 1"),
        ("ignore_eos=maybe", "ignore_eos is 'maybe': it must be true or false"),
        ("stop_token_ids=2,x", "stop_token_ids names 'x'"),
        ("sampler_order=top_k,heat", "sampler_order names 'heat'"),
        ("logit_bias=5", "logit_bias is '5': write TOKEN_ID:VALUE"),
        ('logit_bias={"x": 1}', "logit_bias names 'x'"),
        ("heat=1", "there is no sampling parameter 'heat': they are temperature, top_k"),
        ("temperature", "'temperature' sets nothing: write NAME=VALUE"),
        ("temperature=1 0.5", "'0.5' sets nothing"),
        ("temperature=1 temperature=2", "temperature is set twice"),
        ('stop=["a"', "stop: '[\"a\"' is not valid JSON"),
        ("stop=" + "[" * 100000, "stop: "),
        ("min_new_tokens=9 max_new_tokens=8", "min_new_tokens is 9 and max_new_tokens 8"),
    ],
)
def test_a_bad_setting_says_why_and_changes_nothing(chat: Chat, text: str, message: str) -> None:
    before = chat.session.params
    with pytest.raises(UsageError) as raised:
        chat.handle(f"/set {text}")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert chat.session.params == before


def test_a_setting_for_a_token_that_the_model_lacks_is_refused(chat: Chat) -> None:
    with pytest.raises(UsageError, match="stop_token_ids names token 656"):
        chat.handle("/set stop_token_ids=656")


def test_set_shows_what_changed_or_everything(chat: Chat, seen: Seen) -> None:
    chat.handle("/set top_k=5")
    assert seen.tables[-1] == {"top_k": "5  (default 0)"}
    chat.handle("/set top_k=5")
    assert seen.notices[-1] == "nothing changed"
    chat.handle("/set")
    assert list(seen.tables[-1]) == list(DEFAULTS)


# -- /save and /load -----------------------------------------------------------------------------


def test_a_saved_chat_is_loaded_as_it_was(chat: Chat, seen: Seen, llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "a chat.json"
    chat.handle("/system be terse")
    chat.handle('/set logit_bias={"5": "-inf"} temperature=0.5')
    chat.handle("Hello \u00fc\n\x1b")
    chat.handle(f"/save {path}")
    assert seen.notices[-1] == f"saved 1 turn in {path}"
    other = Chat(in_words(llm), seen)
    other.handle(f"/load {path}")
    assert other.session.messages == chat.session.messages
    assert other.session.params == chat.session.params
    record = json.loads(path.read_text(encoding="utf-8"))
    assert (record["format"], record["version"], record["model"]) == ("xinfer-vk chat", 1, "tiny")


@pytest.mark.parametrize("line", ["a \udcff", '/set stop="\\ud800"', "/system \udcff"])
def test_half_a_character_is_refused(chat: Chat, line: str) -> None:
    with pytest.raises(UsageError, match="half of a character"):
        chat.handle(line)


@pytest.mark.parametrize("name", ["~nobody-of-this-name/x", "a\0b", "x" * 5000])
@pytest.mark.parametrize("command", ["save", "load"])
def test_names_that_no_file_can_have_are_refused(chat: Chat, command: str, name: str) -> None:
    with pytest.raises(UsageError):
        chat.handle(f"/{command} {name}")


def test_a_chat_that_the_template_refuses_changes_nothing(tmp_path: Path) -> None:
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system text') }}{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    save_chat(
        tmp_path / "x",
        SavedChat("other", SamplingParams(temperature=0.5), [{"role": "system", "content": "be terse"}]),
    )
    with LLM(write_chat_model(tmp_path / "m", template), device="numpy", kv_dtype="f32") as llm:
        session = llm.chat()
        before = session.params
        with pytest.raises(XinferError, match="no system text"):
            Chat(session, Seen()).handle(f"/load {tmp_path / 'x'}")
        assert session.params == before


def test_another_models_chat_is_loaded_with_a_notice(chat: Chat, seen: Seen, tmp_path: Path) -> None:
    save_chat(tmp_path / "x", SavedChat("other", SamplingParams(), []))
    chat.handle(f"/load {tmp_path / 'x'}")
    assert seen.notices[-1] == "(it was saved with other; this is tiny)"


def test_nothing_is_overwritten_or_given_up_unasked(chat: Chat, tmp_path: Path) -> None:
    path, other = tmp_path / "chat.json", tmp_path / "other.json"
    chat.handle("Hello")
    chat.handle(f"/save {path}")
    with pytest.raises(UsageError, match=r"chat\.json exists: /save -f .* overwrites it"):
        chat.handle(f"/save {path}")
    chat.handle(f"/load {path}")  # it is saved: nothing is lost
    chat.handle("More")
    with pytest.raises(UsageError, match="not saved: /save it first, or /load -f"):
        chat.handle(f"/load {path}")
    assert len(users(chat)) == 2
    chat.handle(f"/save -f {path}")
    assert len(load_chat(path).messages) == 4
    chat.handle("And more")
    chat.handle(f"/load -f {path}")
    assert len(users(chat)) == 2
    assert not other.exists() and [p.name for p in tmp_path.iterdir()] == ["chat.json"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, chat = tmp_path / "chat.json", SavedChat("m", SamplingParams(), [])
    save_chat(path, chat)
    old = path.read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(chat_file.os, "fsync", full)
    with pytest.raises(UsageError, match=r"chat\.json cannot be written: No space left on device"):
        save_chat(path, chat, overwrite=True)
    assert path.read_bytes() == old and list(tmp_path.iterdir()) == [path]


def test_a_save_does_not_replace_the_model(chat: Chat, model: Path, tmp_path: Path) -> None:
    chat.handle("Hello")
    link = tmp_path / "link.json"
    link.symlink_to(model / "config.json")
    before = (model / "config.json").read_bytes()
    for path in (model / "config.json", model / "model.safetensors", link):
        with pytest.raises(
            UsageError, match=r"/save .* is in the directory of the model: write to another file"
        ):
            chat.handle(f"/save -f {path}")
    assert (model / "config.json").read_bytes() == before
    part = tmp_path / "model-00002-of-00002.gguf"
    part.write_bytes(b"a part")
    files, chat.session.llm.model_files = chat.session.llm.model_files, (tmp_path / "one.gguf", part)
    try:
        with pytest.raises(UsageError, match="is the file of the model"):
            chat.handle(f"/save -f {part}")
    finally:
        chat.session.llm.model_files = files


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    save_chat(link, SavedChat("m", SamplingParams(), []), overwrite=True)
    assert link.is_symlink() and load_chat(target).model == "m"


@pytest.mark.parametrize("command", ["save", "load", "save -f", "load -f"])
def test_a_file_must_be_named(chat: Chat, command: str) -> None:
    with pytest.raises(UsageError, match="needs a file: /"):
        chat.handle(f"/{command}")


def test_what_cannot_be_written_is_one_clear_line(chat: Chat, tmp_path: Path) -> None:
    for name, words_ in (("no/such/x", "No such file"), ("", "is a directory")):
        with pytest.raises(UsageError, match=words_):
            chat.handle(f"/save -f {tmp_path}/{name}")
    assert list(tmp_path.iterdir()) == []


GOOD: dict[str, Any] = {
    "format": "xinfer-vk chat", "version": 1, "model": "m", "settings": {}, "messages": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"\xff", "not UTF-8"),
        (b"[1]", "holds a JSON list"),
        (b'{"format": "x", "format": "y"}', "occurs twice"),
        ({**GOOD, "format": "chat"}, "is not a saved chat: its format is 'chat'"),
        ({}, "is not a saved chat"),
        ({**GOOD, "version": 2}, "is of version 2, and this program reads version 1"),
        ({**GOOD, "model": 5}, "model is 5, a text was expected"),
        ({**GOOD, "settings": []}, "settings is []"),
        ({**GOOD, "settings": {"heat": 1}}, "there is no sampling parameter 'heat'"),
        ({**GOOD, "settings": {"temperature": "x"}}, "temperature is 'x'"),
        ({**GOOD, "settings": {"logit_bias": {"x": 1}}}, "logit_bias names 'x'"),
        ({**GOOD, "settings": {"logit_bias": 5}}, "logit_bias is 5"),
        ({**GOOD, "messages": {}}, "messages is"),
        ({**GOOD, "messages": [{"role": "user", "content": "x"}]}, "message 1, the last one, has no answer"),
    ],
)
def test_a_bad_file_is_one_clear_line_and_changes_nothing(
    chat: Chat, tmp_path: Path, content: Any, message: str
) -> None:
    chat.handle("Hello")
    before = (chat.session.messages, chat.session.params)
    path = tmp_path / "bad.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(UsageError) as raised:
        chat.handle(f"/load -f {path}")
    assert str(path) in str(raised.value) and message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert (chat.session.messages, chat.session.params) == before


def test_what_is_no_file_is_one_clear_line(chat: Chat, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("missing", "pipe", ""):
        with pytest.raises(UsageError, match=re.escape(str(tmp_path))):
            chat.handle(f"/load {tmp_path}/{name}")


# -- the conversation in a terminal ----------------------------------------------------------------


class Script:
    """An input line that a script types into; exceptions in it are raised."""

    def __init__(self, *lines: str | BaseException) -> None:
        self.lines, self.drafts = list(lines), list[str]()

    def read(self, draft: str = "") -> str:
        self.drafts.append(draft)
        line = self.lines.pop(0) if self.lines else EOFError()
        if isinstance(line, BaseException):
            raise line
        return line


def test_errors_are_shown_and_the_conversation_goes_on(chat: Chat, seen: Seen) -> None:
    talk(chat, Script("/nonsense", "Hello", "/set top_p=-1", "/quit", "never"))  # type: ignore[arg-type]
    assert users(chat) == ["Hello"]
    assert len(seen.errors) == 2 and "/nonsense" in seen.errors[0] and "top_p" in seen.errors[1]


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (DeviceError("the device is gone"), "the device is gone"),
        (ZeroDivisionError("x"), "unexpected ZeroDivisionError: x (this is a bug; /save still works)"),
    ],
)
def test_a_failing_device_or_a_bug_does_not_cost_the_conversation(
    chat: Chat, seen: Seen, monkeypatch: pytest.MonkeyPatch, error: Exception, shown: str
) -> None:
    chat.handle("Hello")

    def fail(text: str) -> None:
        raise error

    monkeypatch.setattr(chat.session, "send", fail)
    talk(chat, Script("And now?", "/undo"))  # type: ignore[arg-type]
    assert seen.errors == [shown]
    assert seen.notices[-1] == "took back: Hello"


def test_ctrl_c_twice_in_an_empty_line_quits_and_once_does_not(chat: Chat, seen: Seen) -> None:
    stop = KeyboardInterrupt()
    script = Script(stop, "Hello", stop, stop, "never")
    talk(chat, script)  # type: ignore[arg-type]
    assert users(chat) == ["Hello"] and script.lines == ["never"]
    assert seen.notices.count("Ctrl-C again quits, and so does Ctrl-D") == 2


def test_ctrl_d_quits(chat: Chat) -> None:
    script = Script("Hello", EOFError(), "never")
    talk(chat, script)  # type: ignore[arg-type]
    assert script.lines == ["never"]


def test_an_edit_begins_with_the_message_and_ctrl_c_leaves_it(llm: LLM, seen: Seen) -> None:
    chat = Chat(in_words(llm), seen, draft=True)
    script = Script("One", "/edit", KeyboardInterrupt(), "Two", "/edit", "Three")
    talk(chat, script)  # type: ignore[arg-type]
    assert users(chat) == ["One", "Three"]
    assert script.drafts[2:4] == ["One", ""] and script.drafts[5] == "Two"


# -- the input line ------------------------------------------------------------------------------


def typed(keys: str, history: Path | None = None) -> list[str]:
    """The messages that these keys enter, until Ctrl-D. Before an arrow key, the history has been read."""
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    out = []
    with create_pipe_input() as source:
        editor = LineEditor(lambda columns: "toolbar", history, input=source, output=DummyOutput())

        def press() -> None:
            for i, part in enumerate(keys.split(UP)):
                end = time.monotonic() + 10
                while i and len(editor._session.default_buffer._working_lines) < 2:
                    assert time.monotonic() < end, "no history"
                    time.sleep(0.01)
                source.send_bytes((UP * (i > 0) + part).encode("utf-8", "surrogateescape"))

        threading.Thread(target=press, daemon=True).start()
        while True:
            try:
                out.append(editor.read())
            except EOFError:
                return out
            except KeyboardInterrupt:
                out.append("^C")


ENTER, ALT_ENTER, CTRL_C, CTRL_D, UP = "\r", "\x1b\r", "\x03", "\x04", "\x1b[A"


def test_ctrl_x_ctrl_e_opens_the_message_in_the_editor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    program, came_back = tmp_path / "editor", tmp_path / "came_back"
    program.write_text(f'#!/bin/sh\nprintf "in the editor\\n" >> "$1"\ntouch {came_back}\n')
    program.chmod(0o700)
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", str(program))
    with create_pipe_input() as source:
        editor = LineEditor(lambda columns: "", None, input=source, output=DummyOutput())

        def press() -> None:
            source.send_text("Written \x18\x05")
            end = time.monotonic() + 10
            while not (came_back.exists() and "editor" in editor._session.default_buffer.text):
                if time.monotonic() > end:
                    break
                time.sleep(0.01)
            source.send_text(ENTER)

        threading.Thread(target=press, daemon=True).start()
        assert editor.read() == "Written in the editor"


@pytest.mark.parametrize(
    ("keys", "messages"),
    [
        ("Hello" + ENTER, ["Hello"]),
        ("one" + ALT_ENTER + "two" + ENTER, ["one\ntwo"]),
        ("one\\" + ENTER + "two" + ENTER, ["one\ntwo"]),
        (ENTER + " " + ENTER + "x" + ENTER, [" x"]),
        ("\x1b[200~one\r\ntwo\nthree\x1b[201~" + ENTER, ["one\ntwo\nthree"]),
        ("nonsense" + CTRL_C + "Hello" + ENTER, ["Hello"]),
        (CTRL_C + "Hello" + ENTER, ["^C", "Hello"]),
        ('"""one' + ENTER + ENTER + 'two"""' + ENTER, ['"""one\n\ntwo"""']),
        ("one" + ENTER + UP + ENTER, ["one", "one"]),
    ],
    ids=["enter", "alt-enter", "backslash", "empty", "paste", "ctrl-c", "empty-ctrl-c", "quotes", "history"],
)
def test_keys_enter_messages(keys: str, messages: list[str]) -> None:
    assert typed(keys + CTRL_D) == messages


def test_history_is_kept_in_a_file_of_the_users_own(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "chat_history"
    typed("one" + ALT_ENTER + "two" + ENTER + CTRL_D, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert typed(UP + ENTER + CTRL_D, path) == ["one\ntwo"]


def test_a_history_that_cannot_be_kept_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert typed("x" + ENTER + UP + ENTER + CTRL_D, tmp_path / "file" / "chat_history") == ["x", "x"]


def test_bytes_that_are_no_text_are_told_and_stop_nobody(chat: Chat, seen: Seen, tmp_path: Path) -> None:
    text = typed("caf\udce9" + ENTER + CTRL_D, tmp_path / "chat_history")[0]
    assert text == "caf\udce9"
    talk(chat, Script(text, f"/system {text}", "Hello"))  # type: ignore[arg-type]
    assert ["not valid Unicode" in error for error in seen.errors] == [True, True]
    assert chat.session.system is None and users(chat) == ["Hello"]
    assert chat.toolbar()


def completions(text: str) -> list[str]:
    from prompt_toolkit.completion import CompleteEvent
    from prompt_toolkit.document import Document

    from xinfer_vk.cli.chat_input import _completer

    return [
        text[: c.start_position or None] + c.text
        for c in _completer().get_completions(Document(text), CompleteEvent())
    ]


def test_commands_parameters_and_files_are_completed(tmp_path: Path) -> None:
    (tmp_path / "chat.json").write_text("")
    assert completions("/s") == ["/system", "/save", "/stats", "/set"]
    assert completions("/set top_k=1 temp") == ["/set top_k=1 temperature="]
    assert completions(f"/load {tmp_path}/ch") == [f"/load {tmp_path}/chat.json"]
    assert completions(f"/save -f {tmp_path}/ch") == [f"/save -f {tmp_path}/chat.json"]
    for text in ("", "s", "hello /s", "one\n/s", "/undo x", "//s"):
        assert completions(text) == []


# -- what is shown -------------------------------------------------------------------------------


def test_a_model_cannot_steer_the_terminal() -> None:
    out = io.StringIO()
    view = TerminalView(out)
    view.piece(Piece("a\x1b[2J\x07\x9b\r\tb\n"))
    view.end_answer()
    assert out.getvalue() == "a␛[2J␇\N{REPLACEMENT CHARACTER}␍\tb\n\n"
    assert printable("é ü 漢 🎉\n") == "é ü 漢 🎉\n"


def test_an_answer_ends_on_a_line_of_its_own() -> None:
    out = io.StringIO()
    view = TerminalView(out)
    for text in ("one", "two\n"):
        view.piece(Piece(text))
        view.end_answer()
    assert out.getvalue() == "one\n\ntwo\n\n"


def test_notices_on_a_terminal_may_hold_anything() -> None:
    from rich.console import Console

    out = io.StringIO()
    view = TerminalView(io.StringIO(), Console(file=out, force_terminal=True, width=200))
    view.notice("[bold]not markup[/] \x1b[2J")
    view.error("no")
    view.table([("[name]", "[/value]")])
    text = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())
    assert "[bold]not markup[/] ␛[2J" in text and "error: no" in text and "[name]  [/value]" in text
    assert ESCAPE not in text


def test_a_pipe_into_a_terminal_is_shown_as_in_a_terminal() -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, want in ((Screen(), "␛"), (io.StringIO(), ESCAPE)):
        view = PlainView(stream, stream)
        view.piece(Piece(ESCAPE))
        view.notice(ESCAPE)
        assert stream.getvalue() == want + want + "\n"


def test_quiet_shows_errors_and_what_was_asked_for() -> None:
    out, err = io.StringIO(), io.StringIO()
    view = PlainView(out, err, quiet=True)
    view.notice("no")
    view.error("x")
    view.table([("a", "1"), ("bcd", "2")])
    view.piece(Piece("answer"))
    view.end_answer()
    assert (out.getvalue(), err.getvalue()) == ("answer\n", "error: x\na    1\nbcd  2\n")


# -- pipes ---------------------------------------------------------------------------------------


def test_a_line_of_a_pipe_is_a_message() -> None:
    data = b"one\r\n\n  \ntwo \\\nthree\nfour\\\n\nlast\\"
    assert list(plain_lines(io.BytesIO(data))) == [
        (1, "one"),
        (4, "two \nthree"),
        (6, "four\n"),
        (8, "last"),
    ]


def test_a_pipe_that_is_not_utf8_names_the_line() -> None:
    lines = plain_lines(io.BytesIO(b"one\n\xff\n"))
    assert next(lines) == (1, "one")
    with pytest.raises(UsageError, match="line 2 of standard input is not UTF-8"):
        next(lines)


def test_the_first_error_of_a_pipe_ends_it_and_names_its_line(chat: Chat) -> None:
    with pytest.raises(UsageError, match=r"^line 7: there is no command"):
        converse(chat, [(1, "Hello"), (7, "/nonsense"), (8, "never")])
    assert users(chat) == ["Hello"]


def arguments(model: Path, llm: LLM, *more: str) -> list[str]:
    bias = [part for token in words(llm) for part in ("--logit-bias", f"{token}=100")]
    return ["chat", "--model", str(model), "--device", "numpy", *bias, *more]


def test_pipes_get_answers_and_nothing_else(model: Path, llm: LLM) -> None:
    result = xinfer(
        *arguments(model, llm, "-n", "5", "--kv-dtype", "f32"),
        stdin="Hello there\n/stats\n/system be terse\nAnd now?\n/quit\nnever\n",
        FORCE_COLOR="",
    )
    assert result.returncode == 0, result.stderr
    session = in_words(llm)
    want = [session.send("Hello there", max_new_tokens=5).result.text]
    session.system = "be terse"
    want.append(session.send("And now?", max_new_tokens=5).result.text)
    assert result.stdout == "".join(f"{text}\n" for text in want)
    assert "system text set" in result.stderr and "of 4096 tokens" in result.stderr
    assert ESCAPE not in result.stdout + result.stderr


def test_an_error_in_a_pipe_is_one_line_and_an_exit_code(model: Path, llm: LLM) -> None:
    result = xinfer(*arguments(model, llm, "-n", "2"), stdin="Hello\n\n/set top_p=-1\nnever\n")
    assert_one_error(result, 2, "line 3: top_p is -1")
    assert len(result.stdout.splitlines()) == 1
    full = xinfer(
        *arguments(model, llm, "-n", "2", "-c", "80", "--on-full", "refuse"), stdin="Hello\nAgain\n"
    )
    assert_one_error(full, 2, "line 2: the context is full", "--on-full drop-oldest")


@pytest.mark.parametrize(
    ("args", "words_"),
    [
        (["--temperature", "-x"], ["temperature"]),
        (["--top-p", "-1"], ["--top-p is -1"]),
        (["--on-full", "explode"], ["on-full", "drop-oldest"]),
        (["--context", "5000"], ["context 5000", "4096"]),
    ],
)
def test_a_bad_option_is_one_clear_line(model: Path, args: list[str], words_: list[str]) -> None:
    result = xinfer("chat", "--model", str(model), "--device", "numpy", *args, stdin="Hello\n")
    assert result.returncode == 2 and result.stdout == ""
    assert_one_error(result, 2, *words_)


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    path = write_chat_model(tmp_path / "base")
    (path / "chat_template.jinja").unlink()
    result = xinfer("chat", "--model", str(path), "--device", "numpy", stdin="Hello\n")
    assert_one_error(result, 2, "base has no chat template", "xinfer-vk generate")


def test_ctrl_c_stops_a_pipe_and_keeps_what_there_is(model: Path, llm: LLM) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "xinfer_vk", *arguments(model, llm, "-n", "3000")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"Tell me a story\nnever\n")
    process.stdin.flush()
    first = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    assert process.returncode == 130, err.decode()
    assert (first + rest).endswith(b"\n") and (first + rest).count(b"\n") == 1
    assert b"(stopped" in err and b"Traceback" not in err


# -- a real terminal -----------------------------------------------------------------------------


class Terminal:
    """The program in a pseudo terminal."""

    def __init__(self, args: Sequence[str], **env: str) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.environ.update({"TERM": "xterm", **env})
            os.execv(sys.executable, [sys.executable, "-m", "xinfer_vk", *args])
        self.shown = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def wait_for(self, pattern: str, timeout: float = 120) -> re.Match[str]:
        """Until the screen has shown this since the last wait."""
        end = time.monotonic() + timeout
        while True:
            if found := re.search(pattern, self.shown):
                self.shown = self.shown[found.end() :]
                return found
            ready, _, _ = select.select([self._fd], [], [], max(0, end - time.monotonic()))
            assert ready, f"{pattern!r} was not shown: {self.shown!r}"
            try:
                data = os.read(self._fd, 65536)
            except OSError:
                data = b""
            assert data, f"the program ended before {pattern!r}: {self.shown!r}"
            if b"\x1b[6n" in data:  # prompt_toolkit asks where the cursor is
                os.write(self._fd, b"\x1b[1;1R")
            self.shown += self._decoder.decode(data)

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def exit_code(self) -> int:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self._fd)
                return os.waitstatus_to_exitcode(status)
            if select.select([self._fd], [], [], 0.05)[0]:
                try:
                    self.shown += self._decoder.decode(os.read(self._fd, 65536))
                except OSError:
                    time.sleep(0.05)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise AssertionError(f"the program does not end: {self.shown!r}")


@pytest.mark.parametrize("answering", [False, True])
def test_sigterm_ends_a_conversation_in_a_terminal(model: Path, llm: LLM, answering: bool) -> None:
    terminal = Terminal([*arguments(model, llm, "-n", "3000"), "--no-history"])
    terminal.wait_for("context 0 of 4096")
    if answering:
        terminal.type("Tell me a story\r")
        terminal.wait_for(r"( [a-z]+){12}")
    os.kill(terminal.pid, signal.SIGTERM)
    assert terminal.exit_code() == 143
    assert "Traceback" not in terminal.shown


def test_a_conversation_in_a_terminal(model: Path, llm: LLM, tmp_path: Path) -> None:
    """A message, Ctrl-C in its answer, another message, a command, and out."""
    args = [*arguments(model, llm, "-n", "3000"), "--system", "be terse"]
    terminal = Terminal(args, XINFER_VK_CACHE=str(tmp_path))
    terminal.wait_for("/help lists commands")
    terminal.wait_for("context 0 of 4096")
    terminal.type("Tell me a story\r")
    terminal.wait_for(r"( [a-z]+){12}")  # the answer's words
    terminal.type(CTRL_C)
    terminal.wait_for("stopped: the answer stays as it is")
    terminal.wait_for(r"context [1-9]\d* of 4096")
    terminal.type("/set max_new_tokens=3\r")
    terminal.wait_for("default 256")
    terminal.type("And now?\r")
    terminal.wait_for("cut off: max_new_tokens=3 is reached")
    path = tmp_path / "chat.json"
    terminal.type(f"/save {path}\r")
    terminal.wait_for("saved 2 turns")
    terminal.wait_for("context")
    terminal.type(CTRL_D)
    assert terminal.exit_code() == 0
    messages = load_chat(path).messages
    assert [m["content"] for m in messages if m["role"] == "user"] == ["Tell me a story", "And now?"]
    assert 12 <= len(messages[2]["content"].split()) < 3000
    assert (tmp_path / "chat_history").read_text().count("+") == 4


# -- what other programs' users try ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["/bye", "/exit", "/quit"])
def test_every_way_to_leave_leaves(chat: Chat, name: str) -> None:
    with pytest.raises(Quit):
        chat.handle(name)


def test_clear_and_question_mark_are_reset_and_help(chat: Chat, seen: Seen) -> None:
    chat.handle("Hello")
    chat.handle("/clear")
    assert users(chat) == []
    chat.handle("/?")
    assert "/clear" in seen.tables[-1]["/reset"]


def test_text_between_three_quotes_is_taken_as_it_is(chat: Chat) -> None:
    chat.handle('"""\n/one\n\n  two\n"""')
    chat.handle('/system """a\nb"""')
    chat.handle('say """" twice')
    assert users(chat) == ["/one\n\n  two", 'say """" twice']
    assert chat.session.system == "a\nb"


def test_three_quotes_hold_the_lines_of_a_pipe_together() -> None:
    assert list(plain_lines(io.BytesIO(b'"""a\n\nb\\\n"""\nc\n'))) == [(1, '"""a\n\nb\\\n"""'), (5, "c")]
    with pytest.raises(UsageError, match=r"line 2 .* has no end"):
        list(plain_lines(io.BytesIO(b'x\n"""a\nb\n')))


def test_a_file_that_was_read_stands_before_the_next_message(chat: Chat, seen: Seen, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("\ufeffone\ntwo\n", encoding="utf-8")
    chat.handle(f"/read {tmp_path}/notes.txt")
    assert "notes.txt" in seen.notices[-1] and "1 read" in chat.toolbar()
    chat.handle("Sum up")
    chat.handle("Again")
    chat.handle(f"/read {tmp_path}/notes.txt")
    chat.handle("/read -")
    chat.handle("Last")
    assert users(chat) == ["one\ntwo\n\nSum up", "Again", "Last"]


@pytest.mark.parametrize(
    ("data", "words"), [(None, "No such file"), (b"\xff", "not UTF-8"), (b" \n", "is empty")]
)
def test_what_cannot_be_read_is_one_line(chat: Chat, tmp_path: Path, data: bytes | None, words: str) -> None:
    path = tmp_path / "notes.txt"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(XinferError, match=words):
        chat.handle(f"/read {path}")


def test_another_model_goes_on_with_the_conversation(model: Path, seen: Seen) -> None:
    opened: list[LLM] = []

    def open_model(name: str) -> LLM:
        opened.append(LLM(name, device="numpy", kv_dtype="f32", context=CONTEXT))
        return opened[-1]

    first = open_model(str(model))
    chat = Chat(in_words(first), seen, open_model=open_model)
    chat.handle("Hello")
    chat.handle("/model")
    assert seen.tables[-1]["model"].startswith("tiny")
    with pytest.raises(XinferError):
        chat.handle("/model /no/such/model")
    assert chat.session.llm is first
    chat.handle(f"/model {model}")
    assert chat.session.llm is opened[-1] is not first
    chat.handle("And now?")
    assert users(chat) == ["Hello", "And now?"]
    opened[-1].close()


@pytest.mark.parametrize("columns", [10, 40, 80, 120])
def test_the_bar_fits_the_terminal(chat: Chat, columns: int) -> None:
    assert 0 < len(chat.toolbar(columns)) < columns
    assert "tiny" in chat.toolbar(80) and "NumPy" in chat.toolbar(80)


def test_a_setting_that_the_context_has_no_room_for_is_refused(chat: Chat) -> None:
    with pytest.raises(UsageError, match=f"the context has {CONTEXT} tokens"):
        chat.handle(f"/set max_new_tokens={CONTEXT + 1}")


def test_load_shows_the_end_of_what_it_loads(llm: LLM, seen: Seen, tmp_path: Path) -> None:
    chat = Chat(in_words(llm), seen, draft=True)
    for i in range(4):
        chat.handle(f"m{i}")
    chat.handle(f"/save {tmp_path}/c.json")
    answers, seen.notices[:] = seen.answers[:-1], []
    seen.answers[:] = [""]
    chat.handle(f"/load {tmp_path}/c.json")
    assert [n for n in seen.notices if n.startswith("> ")] == ["> m1", "> m2", "> m3"]
    assert "(1 turn before these)" in seen.notices
    assert seen.answers[:-1] == answers[1:]


def test_a_chat_begins_with_the_conversation_of_load(model: Path, chat: Chat, tmp_path: Path) -> None:
    chat.handle("Hello")
    chat.handle(f"/save {tmp_path}/c.json")
    args = [
        "chat",
        "-m",
        str(model),
        "--device",
        "numpy",
        "--kv-dtype",
        "f32",
        "--load",
        f"{tmp_path}/c.json",
    ]
    result = xinfer(*args, stdin="/stats\n")
    assert result.returncode == 0 and re.search(r"turns +1\n", result.stderr), result.stderr
    assert result.stdout == ""
    assert_one_error(xinfer(*args[:-1], "/no/such.json", stdin=""), 2, "/no/such.json")

"""Words wrapped at the terminal's edge, in pieces as they come."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.cells import cell_len

from xinfer_vk import cli
from xinfer_vk.cli.answer import AnswerWriter
from xinfer_vk.cli.output import wrapped
from xinfer_vk.cli.wrap import WordWrapper, wrap
from xinfer_vk.text.thinking import Piece

PROSE = "The sky is blue because of a process called Rayleigh scattering.\n\n  - a list,  with two spaces\n"
WIDE = "天空は青い。光が散乱するから、青く見える。 and words 中文字符"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("columns", [11, 12, 20, 79])
@pytest.mark.parametrize(
    "text", [PROSE, "天空は青い。光が散乱するから、青く見える。 and words 中文字符", "a b\n" * 3]
)
def test_no_line_is_too_long_and_nothing_is_lost_however_it_is_cut(
    text: str, columns: int, size: int
) -> None:
    wrapper = WordWrapper(lambda: columns)
    out = "".join(wrapper.push(text[i : i + size]) for i in range(0, len(text), size)) + wrapper.end()
    assert "".join(out.split()) == "".join(text.split())
    assert out == wrap(text, columns)
    assert max(map(cell_len, out.splitlines())) <= columns


@pytest.mark.parametrize(
    ("text", "columns", "lines"),
    [
        ("one two three", 7, ["one two", "three"]),
        ("one two three", 8, ["one two", "three"]),
        ("exactly ten chars", 11, ["exactly ten", "chars"]),
        ("a  b", 4, ["a  b"]),
        ("a\tb c", 10, ["a\tb", "c"]),
        ("see https://example.org/path for", 10, ["see https://example.org/path", "for"]),
        ("青い空。青い", 6, ["青い", "空。青", "い"]),
        ("cafe\u0301 x", 6, ["cafe\u0301 x"]),
        ("trailing   \nnext", 8, ["trailing", "next"]),
        ("", 5, []),
    ],
)
def test_lines_break_between_words(text: str, columns: int, lines: list[str]) -> None:
    assert wrap(text, columns).splitlines() == lines


def test_code_between_fences_is_left_alone() -> None:
    code = "```python\nprint('a long line of code   with spaces')\n```\n"
    assert wrap(f"some words before\n{code}and words behind", 10) == (
        f"some words\nbefore\n{code}and words\nbehind"
    )
    inner = "````\n```\nstill code that is long\n````\n"  # a shorter fence does not end a longer one
    assert wrap(inner, 10).startswith("````\n```\n")


def test_code_within_a_line_begins_no_block() -> None:
    assert wrap("```x``` is code and\nthese words wrap", 12) == "```x``` is\ncode and\nthese words\nwrap"
    assert wrap("~~~ `x`\nlong code stays whole\n~~~\n", 12) == "~~~ `x`\nlong code stays whole\n~~~\n"


def test_joined_emoji_stay_together() -> None:
    family = "\U0001f469\u200d\U0001f469\u200d\U0001f467"
    assert wrap(f"abcdef {family} b", 10).count("\u200d") == 2
    assert family in wrap(f"abcdef {family} b", 10)


def test_a_word_is_shown_once_the_space_behind_it_has_come() -> None:
    wrapper = WordWrapper(lambda: 80)
    assert [wrapper.push(p) for p in ("Par", "is", " is", " big")] == ["", "", "Paris", " is"]
    assert wrapper.flush() == " big"


def test_answers_wrap_on_a_terminal_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "10")
    for stream, want in ((Terminal(), "words that\nare long\n"), (io.StringIO(), "words that are long\n")):
        writer = AnswerWriter(stream)
        for piece in ("words th", "at are", " long"):
            writer.write(Piece(piece))
        writer.end("\n")
        assert stream.getvalue() == want
    assert wrapped("a notice that is long", Terminal()) == "a notice\nthat is\nlong"
    assert wrapped("a notice that is long", io.StringIO()) == "a notice that is long"


def test_notices_of_every_command_wrap() -> None:
    commands = Path(cli.__file__).parent.glob("*.py")
    bare = [p.name for p in commands if re.search(r"click\.echo\([^#]*?err=True", p.read_text())]
    assert bare == []  # `tell` wraps

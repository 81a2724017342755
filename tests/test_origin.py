"""Traced strings: every operation that templates use keeps each character with its origin."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinfer_vk.text.origin import MODEL, TEMPLATE, UNKNOWN, USER, Traced, concat, origin_of, traced

# Every character once, each with an origin of its own: what an operation did is read off its result.
DISTINCT = "aBcD \t1.2\n-é<|>xßYz"


def checked(result: Any, *sources: Traced) -> None:
    origins = {
        char: level for source in sources for char, level in zip(str.__str__(source), origin_of(source))
    }
    assert isinstance(result, Traced)
    assert list(origin_of(result)) == [origins[char] for char in str.__str__(result)]


@pytest.mark.parametrize(
    "operation",
    [
        lambda s: s,
        lambda s: str(s),
        lambda s: f"{s}",
        lambda s: s[3:9],
        lambda s: s[::-1],
        lambda s: s[-3],
        lambda s: s * 2,
        lambda s: 2 * s,
        lambda s: s * -1,
        lambda s: s.strip(),
        lambda s: s.strip("aBz"),
        lambda s: s.lstrip("aB"),
        lambda s: s.rstrip("z"),
        lambda s: s.removeprefix("aB"),
        lambda s: s.removeprefix("no"),
        lambda s: s.removesuffix("Yz"),
        lambda s: s.removesuffix(""),
        lambda s: s + "",
        lambda s: "" + s,
        lambda s: concat([s, s]),
        lambda s: s.replace("no", "x"),
        lambda s: s.replace("D", s),
        lambda s: s.replace("a", "").replace("z", ""),
        lambda s: s.replace("c", "", 0),
        lambda s: Traced("").join(s),
        lambda s: Traced("").join(reversed(list(s))),
    ],
)
@pytest.mark.parametrize("padding", ["", "  "])
def test_operations_keep_every_characters_origin(operation: Any, padding: str) -> None:
    text = DISTINCT if not padding else "\u2003\u2002" + DISTINCT + "\u2001\u2000"
    source = Traced(text, bytes(i % 4 for i in range(len(text))))
    checked(operation(source), source)
    assert str.__str__(operation(source)) == operation(text if not isinstance(operation, Traced) else source)


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("split", ()),
        ("split", (None, 1)),
        ("split", ("D",)),
        ("split", ("no",)),
        ("split", (" ", 1)),
        ("rsplit", ()),
        ("rsplit", (None, 1)),
        ("rsplit", ("x", 1)),
        ("splitlines", ()),
        ("splitlines", (True,)),
        ("partition", ("1.2",)),
        ("partition", ("no",)),
        ("rpartition", ("1.2",)),
        ("rpartition", ("no",)),
    ],
)
@pytest.mark.parametrize("text", [DISTINCT, "\r\u2028" + DISTINCT + "\u2003\v", " ", "", "\n", "ab"])
def test_cutting_keeps_every_characters_origin(method: str, args: tuple[Any, ...], text: str) -> None:
    source = Traced(text, bytes(i % 4 for i in range(len(text))))
    pieces = getattr(source, method)(*args)
    assert list(pieces) == list(getattr(text, method)(*args))
    for piece in pieces:
        checked(piece, source)


@given(
    st.lists(st.sampled_from(["ab", "a", "b", "aab", " ", "\n", "\r\n", ""]), max_size=8).map("".join),
    st.sampled_from(["a", "ab", "aa", " ", "\n"]),
    st.integers(-1, 3),
)
def test_repeated_pieces_are_cut_in_order(text: str, sep: str, count: int) -> None:
    source = Traced(text, bytes(i % 256 for i in range(len(text))))
    for pieces in (
        source.split(sep, count),
        source.rsplit(sep, count),
        source.split(None, count),
        source.splitlines(),
    ):
        at = -1
        for piece in pieces:
            for char, level in zip(piece, origin_of(piece)):
                assert level > at and text[level] == char
                at = level
    new = Traced("XY", bytes([200, 201]))
    out = source.replace(sep, new, count)
    assert out == text.replace(sep, "XY", count)
    assert [text[o] if o < 200 else "XY"[o - 200] for o in origin_of(out)] == list(out)


def test_joining_and_adding_keep_origins_apart() -> None:
    a, b = Traced("ab", TEMPLATE), Traced("cd", USER)
    assert list(origin_of(a + b)) == [TEMPLATE, TEMPLATE, USER, USER]
    assert list(origin_of(a + "x")) == [TEMPLATE, TEMPLATE, UNKNOWN]
    assert list(origin_of("x" + a)) == [UNKNOWN, TEMPLATE, TEMPLATE]
    assert list(origin_of(Traced(", ", MODEL).join([a, "x", b]))) == [3, 3, 2, 2, 0, 2, 2, 1, 1]
    assert (
        list(origin_of(a.upper() + a.title() + a.capitalize() + a.swapcase() + a.casefold()))
        == [TEMPLATE] * 10
    )
    assert origin_of(Traced("ß", TEMPLATE).upper()) == bytes([UNKNOWN] * 2), "no telling which is which"
    with pytest.raises(TypeError):
        a + 1  # type: ignore[operator]
    assert traced({"a": ["x", 1, None], "b": ("y",)}, USER) == {"a": ["x", 1, None], "b": ["y"]}


def test_a_traced_string_is_the_string_it_is() -> None:
    s = Traced("key", TEMPLATE)
    assert s == "key" and hash(s) == hash("key") and {"key": 1}[s] == 1 and "key".startswith(s)
    assert json.dumps([s]) == '["key"]'

"""Stop strings: found across pieces, text ends exactly before them, nothing is held back for good."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xinfer_vk.text.stop import StopStrings


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    checker = StopStrings(stops)
    out = "".join(checker.push(piece) for piece in pieces)
    if checker.found is None:
        out += checker.finish()
    return out, checker.found


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "found"),
    [
        (["END"], ["abE", "N", "Dxyz"], "ab", "END"),
        (["END"], ["abE", "N", "xyz"], "abENxyz", None),
        (["END"], ["abEN"], "abEN", None),
        (["\n\n"], ["a\n", "b\n", "\nc"], "a\nb", "\n\n"),
        (["aab"], ["aaa", "b"], "a", "aab"),
        (["bc", "abcd"], ["abc", "d"], "a", "bc"),
        (["xyz", "y"], ["axyzb"], "a", "xyz"),
        ([""], ["abc"], "abc", None),
        ([], ["abc"], "abc", None),
        (["é"], ["caf", "é!"], "caf", "é"),
    ],
)
def test_text_ends_before_the_first_stop(
    stops: list[str], pieces: list[str], text: str, found: str | None
) -> None:
    assert run(stops, pieces) == (text, found)


def test_only_what_may_become_a_stop_is_held_back() -> None:
    checker = StopStrings(["STOP"])
    assert checker.push("hello S") == "hello "
    assert checker.push("un") == "Sun"


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=3), max_size=3),
)
def test_cuts_do_not_matter(pieces: list[str], stops: list[str]) -> None:
    """With stops of one length, where the text was cut into pieces changes nothing."""
    stops = [s for s in stops if len(s) == len(stops[0])]
    assert run(stops, pieces) == run(stops, ["".join(pieces)])

"""Stop strings: found across pieces, text ends exactly before them, nothing is held back for good."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_helpers import xinfer
from hypothesis import given, settings
from hypothesis import strategies as st

from xinfer_vk.engine.llm import LLM
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


@pytest.mark.parametrize("stop", ["<|im_end|>", "<|im_start|>"])
def test_the_text_of_a_special_token_stops_at_that_token(tiny_model: Path, stop: str) -> None:
    with LLM(tiny_model, device="numpy") as llm:
        token = llm.tokenizer.id_of(stop)
        assert token is not None and llm.tokenizer.is_special(token)
        fields = {"logit_bias": {token: 1e4}, "ignore_eos": True, "max_new_tokens": 4}
        assert llm.generate("x", **fields).finish_reason == "length"
        for given in (stop, [stop], ("END", stop)):
            result = llm.generate("x", stop=given, **fields)
            assert (result.finish_reason, result.stop, result.token_ids) == ("stop", token, ())


def test_a_line_of_prompts_may_stop_at_a_special_token(tiny_model: Path, tmp_path: Path) -> None:
    with LLM(tiny_model, device="numpy") as llm:
        token = llm.tokenizer.id_of("<|im_start|>")
    line = {"prompt": "x", "stop": "<|im_start|>", "logit_bias": {str(token): 1e4}, "max_new_tokens": 4}
    (tmp_path / "lines").write_text(json.dumps(line))
    args = ("-m", str(tiny_model), "--device", "numpy", "--prompts", str(tmp_path / "lines"), "--output", "-")
    out = json.loads(xinfer("generate", *args).stdout)
    assert (out["finish_reason"], out["stop"], out["token_ids"]) == ("stop", token, [])


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=3), max_size=3),
)
def test_cuts_do_not_matter(pieces: list[str], stops: list[str]) -> None:
    """With stops of one length, where the text was cut into pieces changes nothing."""
    stops = [s for s in stops if len(s) == len(stops[0])]
    assert run(stops, pieces) == run(stops, ["".join(pieces)])

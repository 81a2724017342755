"""Streams that nobody reads to the end: they free their room at once, or when another call needs it."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from chat_model import write_chat_model

from xinfer_vk import LLM
from xinfer_vk.errors import UsageError

MORE = {"max_new_tokens": 20, "ignore_eos": True}


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    gc.disable()  # nothing here may wait for the cyclic collector
    try:
        with LLM(write_chat_model(tmp_path / "tiny"), device="numpy", kv_dtype="f32", context=128) as opened:
            yield opened
    finally:
        gc.enable()


def rows_in_use(llm: LLM) -> int:
    assert llm._runner is not None
    return llm._runner.cache.in_use


def first_piece(llm: LLM) -> str:
    for piece in llm.stream([5, 6], **MORE):
        return piece
    raise AssertionError("no text")


def test_break_return_and_exceptions_free_the_row_at_once(llm: LLM) -> None:
    for _ in llm.stream([5, 6], **MORE):
        break
    assert rows_in_use(llm) == 0
    first_piece(llm)
    assert rows_in_use(llm) == 0
    with pytest.raises(ZeroDivisionError):
        for _ in llm.stream([5, 6], **MORE):
            1 / 0
    assert rows_in_use(llm) == 0
    assert len(llm.generate([5, 6], **MORE).token_ids) == 20


def test_a_conversation_whose_answer_was_dropped_leaves_its_room_to_others(llm: LLM) -> None:
    session = llm.chat(**MORE)
    for _ in session.send("Hello"):
        break
    assert rows_in_use(llm) == 0
    assert [turn.user for turn in session.turns] == ["Hello"]
    assert len(llm.generate([5, 6], **MORE).token_ids) == 20


@pytest.mark.parametrize("how", ["left", "cancelled"])
def test_a_stream_still_held_gives_way_when_a_call_needs_its_room(llm: LLM, how: str) -> None:
    stream = llm.stream([5, 6], **MORE)
    if how == "left":
        for _ in stream:
            break
    else:
        next(stream)
        stream.cancel()
    assert rows_in_use(llm) == 1
    assert len(llm.generate([7, 8], **MORE).token_ids) == 20
    assert stream.partial_result.finish_reason == "interrupted"
    with pytest.raises(UsageError, match="was left"):
        next(stream)


def test_a_stream_that_was_left_goes_on_if_nothing_came_between(llm: LLM) -> None:
    whole = llm.generate([5, 6], **MORE).text
    stream = llm.stream([5, 6], **MORE)
    text = ""
    for piece in stream:
        text += piece
        break
    assert text + "".join(stream) == whole


@pytest.mark.parametrize("ending", ["llm.close()", "pass", "del llm"])
@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_left_open_at_exit_prints_nothing(tmp_path: Path, ending: str, chat: bool) -> None:
    program = f"""
from xinfer_vk import LLM
llm = LLM({str(write_chat_model(tmp_path / "tiny"))!r}, device="numpy")
more = dict(max_new_tokens=20, ignore_eos=True)
stream = llm.chat(**more).send("hello") if {chat} else llm.stream([5, 6], **more)
for piece in stream:
    break
other = iter(stream)
{ending}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

"""The streaming decoder prints what decoding everything at once gives, and never half a character."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_helpers import both_ways, gguf, hf

from xinfer_vk.text.stream import StreamDecoder
from xinfer_vk.text.tokenizer import Tokenizer

TOKENIZERS = dict(both_ways())
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())


def stream(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> list[str]:
    decoder = StreamDecoder(tokenizer, skip_special)
    return [*(decoder.push(i) for i in ids), decoder.finish()]


@every_tokenizer
@given(ids=st.lists(st.integers(0, 700), max_size=40), skip_special=st.booleans())
@settings(max_examples=200, deadline=None)
def test_streaming_equals_decoding_everything(
    tokenizer: Tokenizer, ids: list[int], skip_special: bool
) -> None:
    assert "".join(stream(tokenizer, ids, skip_special)) == tokenizer.decode(ids, skip_special)


@every_tokenizer
@pytest.mark.parametrize("before", ["", "The capital of France is", " ", "a:\n"])
def test_text_that_goes_on_with_a_prompt_is_all_without_the_prompt(tokenizer: Tokenizer, before: str) -> None:
    prompt = tokenizer.encode(before, parse_special=False)
    ids = tokenizer.encode("Paris, of course", parse_special=False, add_bos=False)
    decoder = StreamDecoder(tokenizer, after=prompt)
    text = "".join([*(decoder.push(i) for i in ids), decoder.finish()])
    assert tokenizer.decode(prompt) + text == tokenizer.decode(prompt + ids)
    assert text.strip() == "Paris, of course"


@every_tokenizer
@given(text=st.text(max_size=30))
@settings(max_examples=100, deadline=None)
def test_streaming_valid_text_never_shows_a_broken_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, parse_special=False, add_bos=False)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert pieces[-1] == ""
    assert "".join(pieces).count("\ufffd") == text.count("\ufffd")


@pytest.mark.parametrize(
    "tokenizer", [hf("qwen2"), gguf("llama3"), hf("llama2")], ids=["qwen2", "llama3", "llama2"]
)
def test_a_character_of_several_tokens_comes_when_it_is_whole(tokenizer: Tokenizer) -> None:
    for char in "👩🏽🇫\u0921":
        ids = tokenizer.encode("a" + char, parse_special=False, add_bos=False)
        head = tokenizer.encode("a", parse_special=False, add_bos=False)
        ids = ids[len(head) :]
        assert len(ids) > 1, "the test needs a character of several tokens"
        *before, last, end = stream(tokenizer, ids)
        assert "".join(before) == "" and (last, end) == (char, "")


@every_tokenizer
def test_unfinished_bytes_at_the_end_become_one_replacement_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a👩", parse_special=False, add_bos=False)
    *_, end = stream(tokenizer, ids[:-1])
    assert end == "\ufffd"
    assert tokenizer.decode(ids[:-1]) == "a\ufffd"


@every_tokenizer
def test_unfinished_bytes_before_other_text_become_one_replacement_character(tokenizer: Tokenizer) -> None:
    head = tokenizer.encode("a👩", parse_special=False, add_bos=False)[:-1]
    tail = tokenizer.encode("b", parse_special=False, add_bos=False)
    assert "".join(stream(tokenizer, head + tail)).replace(" ", "") == "a\ufffdb"


def test_the_first_space_is_dropped_as_the_decoder_does() -> None:
    sentencepiece, byte_level = hf("llama2"), gguf("smollm")
    ids = sentencepiece.encode("The capital", parse_special=False, add_bos=False)
    assert sentencepiece.token_bytes(ids[0]).startswith(b" ")
    assert "".join(stream(sentencepiece, ids)) == "The capital"
    assert "".join(stream(sentencepiece, [1, *ids])) == "The capital", "after a special token too"
    assert "".join(stream(sentencepiece, [1, *ids], skip_special=False)) == "<s> The capital"
    assert "".join(stream(sentencepiece, ids + ids)) == "The capital The capital"
    assert "".join(stream(byte_level, byte_level.encode(" The", parse_special=False))) == " The"


@every_tokenizer
def test_special_tokens_are_shown_only_when_wanted(tokenizer: Tokenizer) -> None:
    end = max(tokenizer.eos_ids)
    ids = [*tokenizer.encode("a", parse_special=False, add_bos=False), end]
    assert "".join(stream(tokenizer, ids)) == "a"
    assert (
        "".join(stream(tokenizer, ids, skip_special=False))
        == tokenizer.decode(ids, skip_special=False)
        != "a"
    )


def test_the_work_for_a_token_does_not_grow_with_the_text() -> None:
    """Counted, not timed: how often the bytes of a token are asked for."""
    tokenizer = gguf("qwen2")
    asked = []

    class Counting:
        pieces = tokenizer.pieces
        special_ids = tokenizer.special_ids

        @staticmethod
        def token_bytes(token_id: int) -> bytes:
            asked.append(token_id)
            return tokenizer.token_bytes(token_id)

    decoder = StreamDecoder(Counting)  # type: ignore[arg-type]
    ids = tokenizer.encode("The capital of France is Paris. " * 50, parse_special=False)
    for i in ids:
        decoder.push(i)
    assert asked == ids

"""SentencePiece's tokenizers out of GGUF metadata give what SentencePiece gives.

``tests/fixtures/sentencepiece`` holds tiny models and what the package ``sentencepiece`` does with them (by
``make_sentencepiece_fixtures.py``); ``gemma3-270m.json`` what Gemma's own ``tokenizer.json`` does. Published
vocabularies of other models were compared once, see ``tests/fixtures/check_real_tokenizers.py``.
"""

from __future__ import annotations

import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xinfer_vk.errors import ModelError
from xinfer_vk.text import gguf_sentencepiece
from xinfer_vk.text.gguf_sentencepiece import merges_by_score
from xinfer_vk.text.gguf_tokenizer import named_texts, tokenizer_from_gguf
from xinfer_vk.text.stream import StreamDecoder
from xinfer_vk.text.tokenizer import Tokenizer
from xinfer_vk.weights.gguf_file import read_gguf

FIXTURES = Path(__file__).parent / "fixtures" / "sentencepiece"
NAMES = ["llama", "gemma", "t5", "unigram-bytes"]
TOKENS, TYPES, SCORES, CHARSMAP = (
    f"tokenizer.ggml.{key}" for key in ("tokens", "token_type", "scores", "precompiled_charsmap")
)
each = pytest.mark.parametrize("name", NAMES)


@cache
def fixture(name: str) -> dict[str, Any]:
    return json.loads((FIXTURES / f"{name}.json").read_text(encoding="utf-8"))


@cache
def tokenizer(name: str) -> Tokenizer:
    return tokenizer_from_gguf(fixture(name)["metadata"], f"{name}.gguf")


def changed(name: str, **changes: Any) -> Tokenizer:
    values = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return tokenizer_from_gguf({**fixture(name)["metadata"], **values}, "model.gguf")


def ids_of(name: str, *tokens: str) -> list[int]:
    return [fixture(name)["metadata"][TOKENS].index(token) for token in tokens]


@each
def test_ids_and_texts_are_sentencepieces(name: str) -> None:
    cases = fixture(name)["texts"]
    assert len(cases) > 40
    for case in cases:
        if name in ("t5", "unigram-bytes") and "<s>" in case["text"]:
            continue  # what spells a control token, or a byte, is cut otherwise
        ids = tokenizer(name).encode(case["text"], parse_special=False, add_bos=False)
        assert ids == case["ids"], case["text"]
        # An unknown character is " ⁇ " to SentencePiece, and the token's name here and in transformers.
        decoded = tokenizer(name).decode(ids, skip_special=False).replace("<unk>", " ⁇ ")
        assert decoded == case["decoded"], case["text"]


@each
@given(text=st.text(max_size=40))
@settings(max_examples=50, deadline=None)
def test_text_survives_a_round_trip_where_every_character_has_a_token(name: str, text: str) -> None:
    """But for "▁", which is a space to SentencePiece."""
    ids = tokenizer(name).encode(text, parse_special=False, add_bos=False)
    stream = StreamDecoder(tokenizer(name))
    assert "".join(map(stream.push, ids)) + stream.finish() == tokenizer(name).decode(ids)
    if name != "t5" and not re.search("▁|<0x", text):
        assert tokenizer(name).decode(ids, skip_special=False) == text


def test_begin_and_end_of_sequence_are_as_the_file_says_or_the_kind() -> None:
    assert tokenizer("llama").encode("a", parse_special=False)[0] == tokenizer("llama").bos_id == 1
    assert tokenizer("t5").encode("a", parse_special=False)[-1:] == [2]
    flags = {"add_bos_token": None, "add_eos_token": None}
    ids = {"bos_token_id": None, "eos_token_id": None, "unknown_token_id": None}
    bare = changed("llama", **flags, **ids)
    assert (bare.bos_id, bare.eos_ids) == (1, {2})
    assert bare.encode("a", parse_special=False)[0] == 1
    assert bare.encode("a", parse_special=False)[-1] != 2
    t5 = changed("t5", **flags, bos_token_id=None, eos_token_id=None)
    assert (t5.bos_id, t5.eos_ids) == (None, {1})
    assert t5.encode("a", parse_special=False)[-1] == 1
    assert (
        named_texts({**fixture("llama")["metadata"], "tokenizer.ggml.bos_token_id": None})["bos_token"]
        == "<s>"
    )


def test_the_space_before_a_text_goes_behind_control_tokens_too() -> None:
    (user,) = ids_of("llama", "<|user|>")
    llama = tokenizer("llama")
    alone = llama.encode("The", parse_special=False, add_bos=False)
    assert llama.encode("The<|user|>The", parse_special=True, add_bos=False) == [*alone, user, *alone]
    assert llama.decode([*alone, user]) == "The"
    without = changed("llama", add_space_prefix=False)
    bare = without.encode("The", parse_special=False, add_bos=False)
    assert bare != alone and without.decode(bare) == "The"
    assert without.encode(" The", parse_special=False, add_bos=False) == alone


def test_phi3s_markup_takes_the_spaces_after_it_along() -> None:
    (user,) = ids_of("llama", "<|user|>")
    phi3 = tokenizer_from_gguf({**fixture("llama")["metadata"], "general.architecture": "phi3"}, "x")
    for text in ("<|user|>\n The", "<|user|>The"):
        assert phi3.encode(text, parse_special=True, add_bos=False) == phi3.encode(
            "<|user|>The", parse_special=True, add_bos=False
        )
    assert tokenizer("llama").encode("<|user|>\n", parse_special=True, add_bos=False) != [user]
    (begin,) = ids_of("llama", "<s>")
    assert phi3.encode("<s>\n", parse_special=True, add_bos=False) != [begin]


def test_user_defined_pieces_that_are_text_stay_text_and_markup_does_not() -> None:
    gemma = tokenizer("gemma")
    lines, bold, marker, user = ids_of("gemma", "\n\n", "<b>", "[multimodal]", "<|user|>")
    for parse_special in (True, False):
        ids = gemma.encode("a\n\n<b>", parse_special=parse_special, add_bos=False)
        assert ids[-2:] == [lines, bold]
    assert gemma.encode("[multimodal]<|user|>", parse_special=True, add_bos=False) == [marker, user]
    plain = gemma.encode("[multimodal]<|user|>", parse_special=False, add_bos=False)
    assert not {marker, user} & set(plain)
    assert gemma.decode(plain) == "[multimodal]<|user|>"


def test_a_run_of_spaces_is_one_piece() -> None:
    two, four = ids_of("gemma", "  ", "    ")
    gemma = tokenizer("gemma")
    assert gemma.encode("    ", parse_special=False, add_bos=False) == [four]
    assert gemma.token_bytes(two) == b"  "


@pytest.mark.parametrize("score", [-1e6, 0.0, 1e6])
def test_scores_of_control_tokens_do_not_matter(score: float) -> None:
    """An unknown character's score is 10 below the worst of a piece: here, -30 and -1 beat twice -20."""
    tiny = changed(
        "t5",
        tokens=["<pad>", "</s>", "<unk>", "ab", "c", "bc", "<s>"],
        token_type=[3, 3, 2, 1, 1, 1, 3],
        scores=[score, score, score, -20.0, -20.0, -1.0, score],
        add_space_prefix=False,
        bos_token_id=6,
        unknown_token_id=2,
        eos_token_id=1,
    )
    assert tiny.encode("abc", parse_special=False) == [2, 5, 1]


def test_merges_are_ordered_by_the_score_of_what_they_make() -> None:
    scores = {"a": 0.0, "b": 0.0, "ab": -2.0, "ba": -1.0, "aba": -3.0, "x": -9.0, "xy": 0.0}
    assert merges_by_score(scores) == [("b", "a"), ("a", "b"), ("ab", "a"), ("a", "ba")]


def test_a_piece_that_no_vocabulary_has_is_refused() -> None:
    with pytest.raises(ModelError, match="of 3000000 characters, at most 1024 are supported"):
        changed(
            "gemma",
            tokens=["<pad>", "</s>", "<unk>", "<s>", "x" * 3_000_000],
            token_type=[3, 3, 2, 3, 1],
            scores=[0.0] * 5,
            bos_token_id=3,
            unknown_token_id=2,
            eos_token_id=1,
        )


def test_more_pairs_than_any_vocabulary_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = {"a" * n: 0.0 for n in range(1, 20)}
    everything = merges_by_score(pieces)
    assert everything is not None and len(everything) == 171
    monkeypatch.setattr(gguf_sentencepiece, "MAX_MERGES", 170)
    assert merges_by_score(pieces) is None


def test_gemma_3_tokenizes_as_its_own_tokenizer_json(gemma_model: Path) -> None:
    """The whole real vocabulary, in many languages."""
    gemma = tokenizer_from_gguf(read_gguf(gemma_model).metadata, "gemma")
    cases = json.loads((FIXTURES / "gemma3-270m.json").read_text(encoding="utf-8"))
    assert len(cases) > 30
    for case in cases:
        assert gemma.encode(case["text"], parse_special=True) == [2, *case["ids"]], case["text"]
        assert gemma.decode(case["ids"], skip_special=False) == case["text"]
    assert gemma.eos_ids == {1, 106}, "the end of a text and of a turn"


# -- damage -------------------------------------------------------------------------------------

LLAMA_COUNT = len(fixture("llama")["metadata"][TOKENS])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama", {"scores": None}, r"the key 'tokenizer\.ggml\.scores' is missing"),
        ("llama", {"scores": [1]}, "scores is .*, a list of numbers was expected"),
        ("llama", {"scores": "abc"}, "a list of numbers was expected"),
        ("llama", {"scores": [0.0]}, r"scores has 1 entries for \d+ tokens"),
        ("llama", {"scores": [float("nan")] * LLAMA_COUNT}, "has the entry nan"),
        ("llama", {"unknown_token_id": 10**6}, "unknown_token_id is no token of this vocabulary"),
        ("llama", {"add_space_prefix": 1}, "add_space_prefix is 1, true or false was expected"),
        ("t5", {"precompiled_charsmap": "abc"}, "is 'abc', a list of bytes was expected"),
        ("t5", {"precompiled_charsmap": [1, 2]}, "precompiled_charsmap is damaged"),
        ("t5", {"remove_extra_whitespaces": "no"}, "true or false was expected"),
    ],
)  # fmt: skip
def test_damaged_metadata_is_refused_by_key(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        changed(name, **change)
    assert str(caught.value).startswith("model.gguf: ") and "\n" not in str(caught.value)


@each
def test_randomly_damaged_metadata_loads_or_is_refused(name: str) -> None:
    rng = random.Random(6)
    junk: list[Any] = [None, "", "▁", "x", -1, 0, 3, 2**63, 1.5, float("inf"), True, [], [1], ["a"], "\x00"]
    outcomes = set()
    for _ in range(100):
        values = {key: list(v) if isinstance(v, list) else v for key, v in fixture(name)["metadata"].items()}
        for _ in range(rng.randint(1, 3)):
            key = rng.choice(list(values))
            if isinstance(values[key], list) and values[key] and rng.random() < 0.8:
                i = rng.randrange(len(values[key]))
                values[key][i] = rng.choice([*junk, values[key][rng.randrange(len(values[key]))]])
            else:
                values[key] = rng.choice(junk)
        try:
            damaged = tokenizer_from_gguf(values, "model.gguf")
            damaged.decode(damaged.encode("The capital <s> 12 é", parse_special=False))
            outcomes.add("loaded")
        except ModelError as e:
            assert "\n" not in str(e)
            outcomes.add("refused")
    assert outcomes == {"loaded", "refused"}

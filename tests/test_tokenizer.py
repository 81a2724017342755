"""Tokenizers give what the originals give, refuse what is damaged, and keep markup out of people's text.

``tests/fixtures/text`` holds small tokenizers and what Hugging Face transformers does with them (made by
``make_text_fixtures.py``). The definitions behind the GGUF names were compared the same way with the full
vocabularies of published models, on 3,000 random texts: ``tests/fixtures/check_real_tokenizers.py``.
"""

from __future__ import annotations

import json
import random
import shutil
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_helpers import (
    CONTROL,
    FIXTURES,
    NAMES,
    PRE,
    SENTENCEPIECE,
    USER_DEFINED,
    both_ways,
    gguf,
    hf,
    metadata,
    reference,
)

from xinfer_vk.errors import ModelError, UsageError
from xinfer_vk.text.byte_level import BYTE_OF_CHAR, CHAR_OF_BYTE, token_to_bytes
from xinfer_vk.text.eos import ends_by_name, eos_ids
from xinfer_vk.text.gguf_tokenizer import tokenizer_from_gguf
from xinfer_vk.text.guard import guarded
from xinfer_vk.text.hf_tokenizer import tokenizer_from_directory
from xinfer_vk.text.pretokenizers import BY_NAME
from xinfer_vk.text.tokenizer import Tokenizer, load_tokenizer
from xinfer_vk.weights.source import open_model

TOKENIZERS = dict(both_ways())
COUNT = len(metadata("qwen2", unused=0)["tokenizer.ggml.tokens"])
PADDED = COUNT + 3
END, THINK = (metadata("qwen2")["tokenizer.ggml.tokens"].index(token) for token in ("<|im_end|>", "<think>"))
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())

# -- the same as the originals ------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_directory_encodes_and_decodes_as_transformers(name: str) -> None:
    tokenizer = hf(name)
    for case in reference(name)["texts"]:
        assert tokenizer.encode(case["text"], parse_special=True, add_bos=False) == case["ids"], case["text"]
        assert tokenizer.encode(case["text"], parse_special=True) == case["with_bos"], case["text"]
        assert tokenizer.decode(case["ids"], skip_special=False) == case["decoded"]
        assert tokenizer.decode(case["ids"]) == case["decoded_without_special"]


@pytest.mark.parametrize("name", ["smollm", "qwen2", "llama3", SENTENCEPIECE])
def test_gguf_metadata_encodes_and_decodes_as_transformers(name: str) -> None:
    tokenizer = gguf(name)
    for case in reference(name)["texts"]:
        assert tokenizer.encode(case["text"], parse_special=True, add_bos=False) == case["ids"], case["text"]
        assert tokenizer.encode(case["text"], parse_special=True) == case["with_bos"], case["text"]
        assert tokenizer.decode(case["ids"], skip_special=False) == case["decoded"]
        assert tokenizer.decode(case["ids"]) == case["decoded_without_special"]


def test_gguf_metadata_of_gpt2_encodes_as_transformers() -> None:
    """GGUF does not say which added tokens take the spaces beside them or stand alone."""
    tokenizer = gguf("gpt2")
    for case in reference("gpt2")["texts"]:
        if "<mask>" not in case["text"]:
            assert tokenizer.encode(case["text"], parse_special=True) == case["ids"], case["text"]


NO_BOS = {"tokenizer.ggml.add_bos_token": False}


@pytest.mark.parametrize("name", PRE)
def test_no_pre_tokenizer_can_stand_in_for_another(name: str) -> None:
    """The fixtures' texts tell the four definitions apart."""
    for other in set(PRE.values()) - {PRE[name]}:
        tokenizer = tokenizer_from_gguf({**metadata(name), "tokenizer.ggml.pre": other, **NO_BOS}, "x")
        cases = [case for case in reference(name)["texts"] if "<mask>" not in case["text"]]
        assert any(tokenizer.encode(case["text"], parse_special=True) != case["ids"] for case in cases), other


def test_aliases_mean_what_they_stand_for() -> None:
    assert BY_NAME["starcoder"] == BY_NAME["refact"] == BY_NAME["smollm"]
    assert BY_NAME["llama3"] == BY_NAME["llama-v3"] == BY_NAME["llama-bpe"]
    assert BY_NAME["deepseek-r1-qwen"] == BY_NAME["qwen2"]
    assert BY_NAME["dbrx"] == BY_NAME["smaug-bpe"] and BY_NAME["olmo"] == BY_NAME["gpt-2"]


@pytest.mark.parametrize(
    ("pre", "cuts"),
    [
        ("gpt-2", "CamelCase|'s| ABCdef| 12345| | a| (/|\n\n"),
        ("smollm", "CamelCase|'s| ABCdef| |1|2|3|4|5| | a| (/|\n\n"),
        ("qwen2", "CamelCase|'s| ABCdef| |1|2|3|4|5| | a| (/\n\n"),
        ("llama-bpe", "CamelCase|'s| ABCdef| |123|45| | a| (/\n\n"),
        ("dbrx", "CamelCase|'s| ABCdef| |123|45| | a| (/\n\n"),
        ("gpt-4o", "Camel|Case's| ABCdef| |123|45| | a| (/\n\n"),
        ("tekken", "Camel|Case|'s| ABCdef| |1|2|3|4|5| | a| (/\n\n"),
    ],
)
def test_words_are_cut_as_the_pre_tokenizer_says(pre: str, cuts: str) -> None:
    text = cuts.replace("|", "")
    found = BY_NAME[pre].pre_tokenizer().pre_tokenize_str(text)
    assert [token_to_bytes(word).decode() for word, _ in found] == cuts.split("|")


def test_a_word_of_the_vocabulary_is_taken_whole_by_llama3_only() -> None:
    tokens = metadata("llama3")
    whole = tokens["tokenizer.ggml.tokens"].index("Ġwhole")
    assert tokenizer_from_gguf(tokens, "x").encode(" whole", parse_special=True, add_bos=False) == [whole]
    tokens["tokenizer.ggml.pre"] = "gpt-2"
    assert len(tokenizer_from_gguf(tokens, "x").encode(" whole", parse_special=True)) > 1


def test_the_demo_models_tokens_are_those_that_llama_cpp_finds(demo_model: Path) -> None:
    """The whole real vocabulary, against an implementation that shares nothing with this one."""
    with open_model(demo_model) as model:
        tokenizer = load_tokenizer(model)
        assert eos_ids(model, tokenizer) == {0, 2}, "the end of a text and of a turn"
        assert tokenizer.vocab_size == tokenizer.model_vocab_size == model.config.vocab_size
    cases = json.loads((FIXTURES / "smollm2-135m.json").read_text(encoding="utf-8"))
    assert len(cases) > 20
    for case in cases:
        assert tokenizer.encode(case["text"], parse_special=True) == case["ids"], case["text"]
        assert tokenizer.encode(case["text"], parse_special=False) == case["plain"], case["text"]


def test_the_byte_alphabet_is_one_to_one_and_printable() -> None:
    assert sorted(BYTE_OF_CHAR.values()) == list(range(256))
    assert all(char.isprintable() and not char.isspace() for char in BYTE_OF_CHAR)
    assert (CHAR_OF_BYTE[0x20], CHAR_OF_BYTE[0x0A], CHAR_OF_BYTE[ord("A")]) == ("Ġ", "Ċ", "A")
    assert token_to_bytes("Ġé") == b" \xe9"
    assert token_to_bytes("日") == "日".encode()


@every_tokenizer
@given(text=st.text(max_size=60))
@settings(max_examples=60, deadline=None)
def test_plain_text_survives_a_round_trip(tokenizer: Tokenizer, text: str) -> None:
    """Except for what a tokenizer normalizes, and for SentencePiece's spaces: "▁" is one to it, and it does
    not see whether there was one at the start."""
    if "llama2" in tokenizer.where and ("▁" in text or text.startswith(" ")):
        return
    expected = unicodedata.normalize("NFC", text) if "qwen2" in tokenizer.where else text
    ids = tokenizer.encode(text, parse_special=False, add_bos=False)
    assert tokenizer.decode(ids, skip_special=False) == expected


# -- markup in plain text -----------------------------------------------------------------------


@every_tokenizer
def test_plain_text_never_becomes_markup(tokenizer: Tokenizer) -> None:
    texts = [token.content for token in tokenizer._added.values() if not token.content.isspace()]
    for text in [*texts, "".join(texts), " ".join(texts), "\n".join(texts) + " x"]:
        ids = tokenizer.encode(text, parse_special=False, add_bos=False)
        assert not set(ids) & tokenizer._markup
        assert tokenizer.decode(ids, skip_special=False) == text
    assert tokenizer.encode(texts[0], parse_special=True, add_bos=False)[0] in tokenizer._markup


def test_added_tokens_that_are_runs_of_spaces_stay_text() -> None:
    """They are how such a vocabulary spells indentation, so plain text has them too."""
    text = "      six    four  two"
    ids = next(case["ids"] for case in reference("gpt2")["texts"] if case["text"] == text)
    assert hf("gpt2").encode(text, parse_special=False) == ids
    assert gguf("gpt2").encode(text, parse_special=False) == ids


def test_runs_of_spaces_are_text_as_sentencepiece_spells_them_too(tmp_path: Path) -> None:
    """Gemma's ``tokenizer.json`` has added tokens of "▁", which only its merges ever lead to."""
    path = changed(tmp_path, "llama2")
    tokenizer = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    model = tokenizer["model"]
    two = model["vocab"].setdefault("▁▁", len(model["vocab"]))
    model["merges"].insert(0, ["▁", "▁"])
    added = {"id": two, "content": "▁▁", "special": False, "normalized": False}
    tokenizer["added_tokens"].append({**added, "single_word": False, "lstrip": False, "rstrip": False})
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    spaced = tokenizer_from_directory(path)
    for parse_special in (True, False):
        ids = spaced.encode("a  b", parse_special=parse_special, add_bos=False)
        assert two in ids and spaced.decode(ids) == "a  b"


def test_markup_that_merges_lead_to_is_spelled_out() -> None:
    """A vocabulary may have made an ordinary word an added token."""
    tokens = metadata("qwen2", unused=0)
    word = tokens["tokenizer.ggml.tokens"].index("Ġthe")
    for kind in (CONTROL, USER_DEFINED):
        tokens["tokenizer.ggml.token_type"][word] = kind
        tokenizer = tokenizer_from_gguf(tokens, "x")
        ids = tokenizer.encode("on the way", parse_special=False)
        assert word not in ids and tokenizer.decode(ids) == "on the way"


def test_a_character_that_the_vocabulary_lacks_is_unknown_not_markup(tmp_path: Path) -> None:
    path = changed(tmp_path, "llama2")
    tokenizer = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["byte_fallback"] = False
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    for parse_special in (True, False):
        ids = tokenizer_from_directory(path).encode("a\x07b", parse_special=parse_special, add_bos=False)
        assert ids[1:-1] == [0], "<unk>"
        assert (
            0 in tokenizer_from_directory(path).encode("<unk>", parse_special=parse_special)
        ) == parse_special


@every_tokenizer
def test_text_that_is_not_unicode_is_refused(tokenizer: Tokenizer) -> None:
    for parse_special in (True, False):
        with pytest.raises(UsageError, match=r"character 2 is '\\udc80'"):
            tokenizer.encode("ab\udc80", parse_special=parse_special)


# -- begin and end of sequence ------------------------------------------------------------------


def test_begin_of_sequence_is_added_as_the_model_was_trained() -> None:
    bos = hf("llama3").bos_id
    for tokenizer in (hf("llama3"), gguf("llama3")):
        assert tokenizer.bos_id == bos
        assert tokenizer.encode("a", parse_special=False)[0] == bos
        assert tokenizer.encode("a", parse_special=False, add_bos=False)[0] != bos
    assert gguf("smollm").bos_id is not None
    assert gguf("smollm").encode("a", parse_special=False)[0] != gguf("smollm").bos_id
    assert gguf("smollm").encode("a", parse_special=False, add_bos=True)[0] == gguf("smollm").bos_id
    with pytest.raises(UsageError, match="no begin-of-sequence token"):
        gguf("qwen2").encode("a", parse_special=False, add_bos=True)


def test_gguf_flags_override_the_family() -> None:
    tokens = metadata("llama3")
    bare = tokenizer_from_gguf({**tokens, **NO_BOS}, "x")
    assert bare.encode("a", parse_special=True) == gguf("llama3").encode("a", parse_special=True)[1:]
    both = tokenizer_from_gguf({**tokens, "tokenizer.ggml.add_eos_token": True}, "x").encode(
        "a", parse_special=True
    )
    assert both[1:-1] == bare.encode("a", parse_special=True)
    assert both[-1] == tokens["tokenizer.ggml.eos_token_id"]


def test_tokenizer_config_overrides_the_post_processor(tmp_path: Path) -> None:
    path = changed(tmp_path, "llama3", add_bos_token=False)
    assert tokenizer_from_directory(path).encode("a", parse_special=True)[0] != hf("llama3").bos_id
    path = changed(tmp_path, "smollm", add_bos_token=True, add_eos_token=True)
    ids = tokenizer_from_directory(path).encode("a", parse_special=True)
    assert (ids[0], ids[-1]) == (hf("smollm").id_of("<|im_start|>"), hf("smollm").id_of("<|im_end|>"))


@pytest.mark.parametrize("add_eos", [True, False])
def test_add_eos_token_alone_does_not_cost_the_begin_of_sequence(tmp_path: Path, add_eos: bool) -> None:
    path = changed(tmp_path, "llama3", add_eos_token=add_eos)
    assert tokenizer_from_directory(path).encode("a", parse_special=True) == hf("llama3").encode(
        "a", parse_special=True
    )


def source(
    kind: str, values: dict[str, Any], generation: dict[str, Any], config_eos: tuple[int, ...] = ()
) -> Any:
    config = SimpleNamespace(eos_token_ids=config_eos, vocab_size=700)
    return SimpleNamespace(
        kind=kind, metadata=values, generation_config=generation, config=config, path=Path("model")
    )


def test_every_place_that_names_an_end_of_sequence_counts() -> None:
    tokenizer = hf("qwen2")
    end = tokenizer.id_of("<|im_end|>")
    assert eos_ids(source("hf", {}, {}), tokenizer) == {end}
    assert eos_ids(source("hf", {"eos_token_id": 3}, {"eos_token_id": [4, 5]}, (6,)), tokenizer) == {
        3,
        4,
        5,
        6,
        end,
    }
    assert eos_ids(source("hf", {"eos_token_id": None}, {"eos_token_id": 7}), tokenizer) == {7, end}


def test_end_of_sequence_ids_outside_the_vocabulary_are_left_out() -> None:
    assert eos_ids(source("hf", {"eos_token_id": [-1, 700, 2**70, 5]}, {}), hf("llama2")) == {2, 5}


@pytest.mark.parametrize("value", ["2", 2.0, True, [2, None], {"id": 2}])
def test_an_end_of_sequence_id_of_the_wrong_type_is_refused(value: object) -> None:
    with pytest.raises(ModelError, match=r"eos_token_id in generation_config\.json is"):
        eos_ids(source("hf", {}, {"eos_token_id": value}), hf("llama2"))


def test_gguf_ends_of_sequence_turn_and_message_count() -> None:
    tokens = metadata("llama3")
    ids = {
        name: tokens["tokenizer.ggml.tokens"].index(f"<|{name}|>")
        for name in ("end_of_text", "eot_id", "eom_id")
    }
    tokens["tokenizer.ggml.eos_token_id"] = ids["end_of_text"]
    assert tokenizer_from_gguf(tokens, "x").eos_ids == set(ids.values()), "by their names"
    tokens["tokenizer.ggml.eot_token_id"] = 7
    assert tokenizer_from_gguf(tokens, "x").eos_ids == {*ids.values(), 7}, "the file's keys besides"
    tokens["tokenizer.ggml.eom_token_id"] = 8
    assert tokenizer_from_gguf(tokens, "x").eos_ids == {*ids.values(), 7, 8}


@pytest.mark.parametrize("kind", range(1, 7))
@pytest.mark.parametrize(
    "name", ["<|im_end|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "<|return|>"]
)
def test_a_token_whose_name_is_an_end_ends_a_text_whatever_its_type(name: str, kind: int) -> None:
    tokens = metadata("llama2")
    tokens[TOKENS], tokens[TYPES] = [*tokens[TOKENS], name], [*tokens[TYPES], kind]
    tokens["tokenizer.ggml.scores"] = [*tokens["tokenizer.ggml.scores"], 0.0]
    assert tokenizer_from_gguf(tokens, "x").eos_ids == {2, len(tokens[TOKENS]) - 1}


def test_a_message_that_is_one_of_several_does_not_end_the_text() -> None:
    assert ends_by_name(["a", "<|end|>"]) == {1}
    assert ends_by_name(["<|return|>", "<|end|>", "<|call|>"]) == {0, 2}
    assert ends_by_name(["</s>", "<|im_start|>", "<think>"]) == frozenset()


# -- vocabulary ---------------------------------------------------------------------------------


def test_tokens_are_found_by_name_and_number() -> None:
    for tokenizer in (hf("qwen2"), gguf("qwen2")):
        end = tokenizer.id_of("<|im_end|>")
        assert end is not None and tokenizer.is_special(end) and end in tokenizer.eos_ids
        assert tokenizer.token_bytes(end) == b"<|im_end|>"
        think = tokenizer.id_of("<think>")
        assert think is not None and not tokenizer.is_special(think)
        assert tokenizer.id_of("no such token") is None
        assert tokenizer.token_bytes(tokenizer.id_of("Ġthe") or 0) == b" the"
        assert tokenizer.vocab_size == COUNT
        assert tokenizer.decode([-1, PADDED, 2**31, 2**40]) == "", "ids that do not exist are nothing"


def test_an_added_token_is_its_own_text() -> None:
    """Whatever its characters would mean in the byte alphabet."""
    tokens = metadata("qwen2")
    tokens[TOKENS][COUNT], tokens[TYPES][COUNT] = "<éĠ>", CONTROL
    tokenizer = tokenizer_from_gguf(tokens, "x")
    assert tokenizer.encode("<éĠ>", parse_special=True) == [COUNT]
    assert tokenizer.token_bytes(COUNT) == "<éĠ>".encode()
    assert tokenizer.decode([COUNT], skip_special=False) == "<éĠ>"


def test_named_tokens_are_known_to_templates() -> None:
    assert gguf("smollm").special_texts == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert hf("llama2").special_texts == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_a_token_beyond_the_embedding_is_refused() -> None:
    tokenizer = tokenizer_from_directory(FIXTURES / "qwen2")
    tokenizer.model_vocab_size = END
    assert tokenizer.encode("plain", parse_special=True)
    with pytest.raises(
        ModelError, match=rf"'<\|im_end\|>' has id {END}, and the model has only {END} tokens"
    ):
        tokenizer.encode("<|im_end|>", parse_special=True)


def test_load_tokenizer_reads_both_kinds_of_models(tmp_path: Path) -> None:
    config = SimpleNamespace(vocab_size=700)
    directory = SimpleNamespace(kind="hf", path=FIXTURES / "qwen2", config=config)
    file = SimpleNamespace(kind="gguf", path=tmp_path / "m.gguf", metadata=metadata("qwen2"), config=config)
    for model in (directory, file):
        tokenizer = load_tokenizer(model)  # type: ignore[arg-type]
        assert tokenizer.model_vocab_size == 700
        assert tokenizer.encode("<|im_end|>", parse_special=True) == [END]


# -- damage -------------------------------------------------------------------------------------

TOKENS, TYPES, MERGES = (f"tokenizer.ggml.{key}" for key in ("tokens", "token_type", "merges"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": None}, "has no tokenizer"),
        ({"tokenizer.ggml.model": "bert"}, r"is 'bert' \(WordPiece\), supported: gpt2"),
        ({"tokenizer.ggml.model": "new"}, r"is 'new', supported: gpt2 \(byte-level BPE\), llama"),
        ({"tokenizer.ggml.model": 3}, "is 3, text was expected"),
        ({"tokenizer.ggml.pre": None}, "pre is missing, so the file does not say how to cut words"),
        ({"tokenizer.ggml.pre": "default"}, 'pre is "default", so the file does not say'),
        ({"tokenizer.ggml.pre": "poro-chat"}, "pre is 'poro-chat', supported: gpt-2, olmo, smollm"),
        ({"tokenizer.ggml.pre": ["qwen2"]}, "text was expected"),
        ({TOKENS: None}, "the key 'tokenizer.ggml.tokens' is missing"),
        ({TOKENS: []}, "a list of texts was expected"),
        ({TOKENS: "abc"}, "a list of texts was expected"),
        ({TOKENS: ["a", 1]}, "a list of texts was expected"),
        ({TOKENS: ["a", "b"]}, f"token_type has {PADDED} entries for 2 tokens"),
        ({TYPES: [1]}, f"token_type has 1 entries for {PADDED} tokens"),
        ({TYPES: 1}, "a list of numbers was expected"),
        ({TYPES: [1.0] * PADDED}, "a list of numbers was expected"),
        ({TYPES: [7] * PADDED}, "has the type 7, known are 1 to 6"),
        ({MERGES: "a b"}, "a list of texts was expected"),
        ({MERGES: [1]}, "a list of texts was expected"),
        ({MERGES: ["a"]}, "merges entry 0 is 'a', two tokens that make a third were expected"),
        ({MERGES: [""]}, "merges entry 0 is ''"),
        ({MERGES: ["a b c"]}, "merges entry 0 is 'a b c'"),
        ({MERGES: ["Ġ t", "zz zz"]}, "merges entry 1 is 'zz zz'"),
        ({MERGES: ["z q"]}, "merges entry 0 is 'z q'"),
        ({MERGES: ["Ġ t", "i n", "Ġ t"]}, r"has '\\u0120 t' twice, as entries 0 and 2"),
        ({"tokenizer.ggml.add_bos_token": True}, r"bos_token_id is None, no token .*add_bos_token wants it"),
        ({"tokenizer.ggml.add_bos_token": 1}, "true or false was expected"),
        ({"tokenizer.ggml.bos_token_id": PADDED, "tokenizer.ggml.add_bos_token": True}, f"is {PADDED}, no"),
        ({"tokenizer.ggml.eos_token_id": "2"}, "an integer was expected"),
        ({"tokenizer.ggml.eot_token_id": [2]}, "an integer was expected"),
    ],
)  # fmt: skip
def test_damaged_gguf_metadata_is_refused_by_key(change: dict[str, Any], message: str) -> None:
    values = {**metadata("qwen2"), **change}
    with pytest.raises(ModelError, match=message) as caught:
        tokenizer_from_gguf(values, "model.gguf")
    assert str(caught.value).startswith("model.gguf: ") and "\n" not in str(caught.value)


def test_a_panic_of_the_library_is_an_error_and_an_interrupt_is_not() -> None:
    class PanicException(BaseException):
        """As PyO3 names it: not an Exception."""

    def fail(error: BaseException) -> None:
        raise error

    with pytest.raises(ModelError, match=r"^where: what: index out of bounds$"):
        guarded("where", "what", fail, PanicException("index out\nof bounds"))
    with pytest.raises(ModelError, match=r"^where: what: unknown error$"):
        guarded("where", "what", fail, ValueError())
    with pytest.raises(KeyboardInterrupt):
        guarded("where", "what", fail, KeyboardInterrupt())


def test_a_token_that_occurs_twice_or_is_empty_is_refused() -> None:
    values = metadata("qwen2")
    values[TOKENS][300] = values[TOKENS][7]
    with pytest.raises(ModelError, match=r"twice, as 7 and 300"):
        tokenizer_from_gguf(values, "model.gguf")
    values[TOKENS][300] = ""
    with pytest.raises(ModelError, match="has an empty token, id 300"):
        tokenizer_from_gguf(values, "model.gguf")


def test_randomly_damaged_gguf_metadata_loads_or_is_refused() -> None:
    rng = random.Random(4)
    junk: list[Any] = [
        None,
        "",
        "x",
        "Ġ",
        -1,
        0,
        3,
        2**63,
        1.5,
        True,
        [],
        [1],
        ["a"],
        ["a", "b c"],
        {},
        "\x00",
    ]
    outcomes = set()
    for _ in range(400):
        values = metadata("smollm")
        for _ in range(rng.randint(1, 3)):
            key = rng.choice(list(values))
            if isinstance(values[key], list) and values[key] and rng.random() < 0.8:
                i = rng.randrange(len(values[key]))
                action = rng.randrange(4)
                if action == 0:
                    values[key][i] = rng.choice(junk)
                elif action == 1:
                    del values[key][i:]
                elif action == 2:
                    values[key].insert(i, values[key][rng.randrange(len(values[key]))])
                else:
                    j = rng.randrange(len(values[key]))
                    values[key][i], values[key][j] = values[key][j], values[key][i]
            else:
                values[key] = rng.choice(junk)
        try:
            tokenizer = tokenizer_from_gguf(values, "model.gguf")
            ids = tokenizer.encode("The capital <|im_end|> 12 é", parse_special=False)
            tokenizer.decode(ids)
            assert all(0 <= i < tokenizer.vocab_size for i in ids)
            outcomes.add("loaded")
        except ModelError as e:
            assert "\n" not in str(e)
            outcomes.add("refused")
    assert outcomes == {"loaded", "refused"}


def changed(tmp_path: Path, name: str, **config: Any) -> Path:
    """A copy of a fixture with other values in its ``tokenizer_config.json``."""
    path = tmp_path / name
    shutil.copytree(FIXTURES / name, path, dirs_exist_ok=True)
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return path


def test_a_missing_tokenizer_is_said_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer: tokenizer\.json is missing, copy it"):
        tokenizer_from_directory(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(
        ModelError, match=r"has vocab\.json, merges\.txt but no tokenizer\.json: make it with"
    ):
        tokenizer_from_directory(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"not json", b"\xff\xfe", b'{"model": {"type": "BPE"}}', b"{" * 100_000]
)
def test_a_damaged_tokenizer_json_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a tokenizer") as caught:
        tokenizer_from_directory(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_randomly_damaged_tokenizer_json_loads_or_is_refused(tmp_path: Path) -> None:
    rng = random.Random(5)
    whole = (FIXTURES / "llama2" / "tokenizer.json").read_bytes()
    outcomes = set()
    for _ in range(300):
        data = bytearray(whole)
        # Most of the file is the vocabulary; the structure before it is where damage is interesting.
        limit = rng.choice([1800, len(data)])
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(limit)
            data[at : at + rng.randrange(3)] = rng.choice(
                [b"", b'"', b"}", b"0", b"null", bytes([rng.randrange(256)])]
            )
        (tmp_path / "tokenizer.json").write_bytes(data)
        try:
            tokenizer = tokenizer_from_directory(tmp_path)
            tokenizer.decode(tokenizer.encode("The capital </s> 12 é", parse_special=True))
            outcomes.add("loaded")
        except ModelError as e:
            assert "\n" not in str(e)
            outcomes.add("refused")
    assert outcomes == {"loaded", "refused"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bos_token": 5}, r"tokenizer_config\.json: bos_token is 5, the text of a token was expected"),
        ({"eos_token": {"text": "x", "content": 1}}, "eos_token is 1, the text of a token"),
        ({"eos_token": ""}, "eos_token is '', the text of a token"),
        ({"add_bos_token": "yes"}, "add_bos_token is 'yes', true or false was expected"),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder is .*, an object was expected"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, r"added_tokens_decoder\['x'\] is"),
        ({"added_tokens_decoder": {"9": "a"}}, r"added_tokens_decoder\['9'\] is 'a'"),
        ({"added_tokens_decoder": {"9": {}}}, r"added_tokens_decoder\['9'\] has no content"),
        ({"added_tokens_decoder": {"9": {"content": "a", "special": 1}}}, "special is 1, true or false"),
        ({"added_tokens_decoder": {"9": {"content": "<new>"}}}, f"'<new>' the id 9, .* leads to {COUNT}"),
    ],
)  # fmt: skip
def test_a_damaged_tokenizer_config_is_refused_by_key(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        tokenizer_from_directory(changed(tmp_path, "qwen2", **change))


def test_tokenizer_config_adds_tokens_and_changes_their_flags(tmp_path: Path) -> None:
    added = {
        str(THINK): {"content": "<think>", "special": True, "normalized": False},
        str(COUNT): {"content": "<new>", "special": True},
    }
    tokenizer = tokenizer_from_directory(changed(tmp_path, "qwen2", added_tokens_decoder=added))
    assert tokenizer.encode("a<new>b", parse_special=True)[1] == COUNT
    assert tokenizer.id_of("<think>") == THINK
    assert tokenizer.is_special(THINK) and not hf("qwen2").is_special(THINK)


def test_special_tokens_may_be_objects_or_in_the_older_file(tmp_path: Path) -> None:
    path = changed(tmp_path, "llama2", bos_token={"content": "<s>", "lstrip": False}, eos_token=None)
    (path / "special_tokens_map.json").write_text('{"eos_token": "</s>", "bos_token": "<unk>"}')
    tokenizer = tokenizer_from_directory(path)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, frozenset()), "the config says: there is no eos token"
    config = json.loads((path / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    assert tokenizer_from_directory(path).eos_ids == {2}


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_a_metaspace_decoder_decodes_as_tokenizers_does(tmp_path: Path, scheme: str) -> None:
    """Unigram models have it."""
    path = changed(tmp_path, "llama2")
    state = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    state["decoder"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": True}
    (path / "tokenizer.json").write_text(json.dumps(state), encoding="utf-8")
    tokenizer = tokenizer_from_directory(path)
    for case in reference("llama2")["texts"]:
        if not any(tokenizer.token_bytes(i).startswith(b"<") for i in case["ids"]):
            assert tokenizer.decode(case["ids"]) == tokenizer._backend.decode(case["ids"]), case["text"]


def test_the_way_from_text_to_tokens_decides_what_they_stand_for(tmp_path: Path) -> None:
    """Some converted models have a decoder of the other kind."""
    kept = {
        name: json.loads((FIXTURES / name / "tokenizer.json").read_text("utf-8"))
        for name in ("qwen2", "llama2")
    }
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    cases = {
        "byte-level": ("qwen2", {"decoder": kept["llama2"]["decoder"]}),
        "byte-level with Metaspace's": ("qwen2", {"decoder": metaspace}),
        "SentencePiece": ("llama2", {"pre_tokenizer": metaspace, "normalizer": None, "decoder": {
            "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True,
        }}),
    }  # fmt: skip
    for case, (name, changes) in cases.items():
        path = changed(tmp_path, name)
        (path / "tokenizer.json").write_text(json.dumps({**kept[name], **changes}), encoding="utf-8")
        tokenizer = tokenizer_from_directory(path)
        ids = tokenizer.encode("two words, é", parse_special=False, add_bos=False)
        assert tokenizer.decode(ids) == "two words, é", case


FATAL = {
    "a prefix": ('"continuing_subword_prefix": null', '"continuing_subword_prefix": "##"', "prefix is '##'"),
    "an escaped prefix": ('"continuing_subword_prefix": null', '"continuing\\u005fsubword_prefix": "b"',
                          "prefix is 'b': BPE with such a prefix is not supported"),
    "a second model": ('"model": {', '"model": {"type": "BPE", "vocab": {}, "merges": [], '
                       '"continuing_subword_prefix": "x"}, "model": {', "prefix is 'x'"),
    "a huge table": ('"normalizer": null', '"normalizer": {"type": "Precompiled", "precompiled_charsmap": '
                     '"/////w=="}', "charsmap is damaged: it has 4 bytes, .* would have 4294967295"),
}  # fmt: skip


@pytest.mark.parametrize("case", FATAL)
def test_what_would_end_the_process_is_refused_before(tmp_path: Path, case: str) -> None:
    """The library panics twice over one, and allocates 8 GB for the other: neither can be caught."""
    before, after, message = FATAL[case]
    path = changed(tmp_path, "llama3")
    tokenizer = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["continuing_subword_prefix"] = tokenizer["normalizer"] = None
    text = json.dumps(tokenizer)
    assert before in text
    (path / "tokenizer.json").write_text(text.replace(before, after, 1), encoding="utf-8")
    with pytest.raises(ModelError, match=message):
        tokenizer_from_directory(path)


def test_a_token_may_have_the_name_of_a_field(tmp_path: Path) -> None:
    path = changed(tmp_path, "llama3")
    tokenizer = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["added_tokens"].append(
        {**tokenizer["added_tokens"][-1], "content": "continuing_subword_prefix"}
    )
    tokenizer["added_tokens"][-1]["id"] = (
        len(tokenizer["model"]["vocab"]) + len(tokenizer["added_tokens"]) - 1
    )
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    assert tokenizer_from_directory(path).id_of("continuing_subword_prefix") is not None


def test_a_decoder_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = changed(tmp_path, "llama2")
    tokenizer = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    for decoder, message in [
        (None, "has no decoder"),
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "the decoder 'WordPiece' is not supported"),
        ({"type": "Sequence", "decoders": [{"type": "Fuse"}]}, "the decoder Fuse is not supported"),
    ]:
        (path / "tokenizer.json").write_text(json.dumps({**tokenizer, "decoder": decoder}), encoding="utf-8")
        with pytest.raises(ModelError, match=message):
            tokenizer_from_directory(path)

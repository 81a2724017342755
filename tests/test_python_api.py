"""The Python API as people who know other engines expect it."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_model import write_chat_model

import xinfer_vk
from xinfer_vk import LLM, ChatSession, SamplingParams
from xinfer_vk.engine.generation import GenerationResult
from xinfer_vk.engine.metrics import Metrics
from xinfer_vk.errors import UsageError
from xinfer_vk.options import SamplingOptions
from xinfer_vk.text.chat import encode_chat

ROOT = Path(__file__).parent.parent
USER = {"role": "user", "content": "Hello"}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write_chat_model(tmp_path_factory.mktemp("model") / "tiny")
    with LLM(path, device="numpy", kv_dtype="f32", n_ctx=200) as opened:
        yield opened


# -- names ----------------------------------------------------------------------------------------


def test_max_tokens_is_another_name_of_max_new_tokens(llm: LLM) -> None:
    assert SamplingParams(max_tokens=5) == SamplingParams(max_new_tokens=5)
    params = SamplingParams(max_new_tokens=9)
    assert params.max_tokens == 9
    assert params.replace(max_tokens=4).max_new_tokens == params.replace(max_new_tokens=4).max_tokens == 4
    assert params.replace(seed=1).max_new_tokens == 9
    assert SamplingParams.from_dict({"max_tokens": 3}).max_new_tokens == 3
    assert len(llm.generate([5], max_tokens=3, ignore_eos=True).token_ids) == 3
    for call in (
        lambda: SamplingParams(max_tokens=5, max_new_tokens=6),
        lambda: params.replace(max_tokens=0),
    ):
        with pytest.raises(UsageError, match="max_new_tokens is"):
            call()


def test_n_ctx_is_another_name_of_context(llm: LLM, tiny_model: Path) -> None:
    assert llm.context == 200
    with pytest.raises(UsageError, match="one setting"):
        LLM(tiny_model, device="numpy", context=10, n_ctx=20)


def test_a_text_becomes_tokens_and_text_again(llm: LLM) -> None:
    ids = llm.tokenize("hello world")
    assert ids == llm.tokenizer.encode("hello world", parse_special=False)
    assert llm.detokenize(ids) == llm.decode(np.array(ids)) == "hello world"
    assert llm.decode([]) == ""
    marked = llm.tokenize("<|im_end|>", special=True)
    assert len(marked) == 1 < len(llm.tokenize("<|im_end|>"))
    assert (llm.decode(marked), llm.decode(marked, skip_special=False)) == ("", "<|im_end|>")
    with pytest.raises(UsageError, match="outside the vocabulary"):
        llm.decode([10**6])
    with pytest.raises(UsageError, match="encode"):
        llm.decode("text")  # type: ignore[arg-type]


def test_calling_the_model_generates(llm: LLM) -> None:
    assert llm("Hello", max_tokens=4).token_ids == llm.generate("Hello", max_tokens=4).token_ids


def test_the_package_shows_what_it_offers() -> None:
    public = {name for name in dir(xinfer_vk) if not name.startswith("__")}
    assert public == {name for name in xinfer_vk.__all__ if not name.startswith("__")}  # no imports of ours
    for name in xinfer_vk.__all__:
        assert getattr(xinfer_vk, name)


# -- chat -----------------------------------------------------------------------------------------


def test_a_list_of_messages_is_answered_once(llm: LLM) -> None:
    messages = [{"role": "system", "content": "Be terse."}, USER]
    result = llm.chat(messages, max_tokens=4, ignore_eos=True)
    assert isinstance(result, GenerationResult) and len(result.token_ids) == 4
    assert list(result.prompt_token_ids) == encode_chat(llm.tokenizer, llm.chat_template, messages)
    with llm.session(system="Be terse.", ignore_eos=True).send("Hello", max_tokens=4) as stream:
        assert stream.result.token_ids == result.token_ids


def test_messages_are_a_prompt_wherever_a_text_is(llm: LLM) -> None:
    messages = [{"role": "system", "content": "Be terse."}, USER]
    wanted = llm.chat(messages, max_tokens=4, ignore_eos=True)
    stream = llm.stream(messages, max_tokens=4, ignore_eos=True)
    assert "".join(stream) == wanted.text and stream.result.token_ids == wanted.token_ids
    options = {"max_tokens": 4, "ignore_eos": True}
    for result in (llm(messages, **options), *llm.batch([messages, "Hello", messages], **options)[::2]):
        assert (result.prompt_token_ids, result.token_ids) == (wanted.prompt_token_ids, wanted.token_ids)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda llm: llm.stream([USER], system="Be terse."), "make the text the first message"),
        (lambda llm: llm.stream([USER], raw=True), "leave out raw, or give a text"),
        (lambda llm: llm.stream([USER, 5]), "message 1 is 5|last message"),
        (lambda llm: llm.stream([{"role": "assistant", "content": "x"}]), "last message must be the user's"),
        (lambda llm: llm.stream([USER], template_args={"no_such": 1}), "no variable 'no_such'"),
        (lambda llm: llm.batch([USER, USER]), "each conversation into a list of its own"),
        (lambda llm: llm.stream([]), "the prompt is empty"),
    ],
)
def test_messages_that_cannot_be_a_prompt_are_refused(llm: LLM, call: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call(llm)


def test_chat_without_messages_goes_on_to_make_a_session(llm: LLM) -> None:
    for session in (llm.chat(system="Be terse."), llm.session(system="Be terse.")):
        assert isinstance(session, ChatSession) and session.system == "Be terse."


@pytest.mark.parametrize(
    "messages",
    ["Hello", USER, [], [{"role": "assistant", "content": "x"}], [USER, USER], [{"role": "user"}], 5],
)
def test_messages_that_are_no_conversation_are_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(UsageError, match="message"):
        llm.chat(messages)


# -- batches --------------------------------------------------------------------------------------


def test_a_batch_takes_any_iterable(llm: LLM) -> None:
    listed = [r.token_ids for r in llm.batch([[5], [6]], max_tokens=3)]
    assert [r.token_ids for r in llm.batch(([i] for i in (5, 6)), max_tokens=3)] == listed
    assert [r.token_ids for r in llm.batch({(5,): 1, (6,): 2}.keys(), max_tokens=3)] == listed
    for wrong in ("text", iter(()), 5):
        with pytest.raises(UsageError, match="prompts"):
            llm.batch(wrong)  # type: ignore[arg-type]


# -- results --------------------------------------------------------------------------------------


def test_a_result_as_dict_is_json_and_whole(llm: LLM) -> None:
    result = llm.generate("Hello", max_tokens=3, logprobs=2, prompt_logprobs=True)
    out = json.loads(json.dumps(result.as_dict()))
    assert set(out) == {f.name for f in dataclasses.fields(result)}
    assert out["text"] == result.text and len(out["prompt_logprobs"]) == len(result.prompt_token_ids) - 1
    assert "logprobs" not in llm.generate("Hello", max_tokens=1).as_dict()


def test_log_probabilities_come_with_their_texts(llm: LLM) -> None:
    result = llm.generate("Hello", max_tokens=3, logprobs=2, ignore_eos=True)
    assert result.logprobs is not None
    for entry in result.logprobs:
        assert entry.text == llm.decode([entry.token], skip_special=False)
        assert entry.top_texts == tuple(llm.decode([t], skip_special=False) for t, _ in entry.top)
        assert entry.as_dict()["top"][0]["token"] == entry.top_texts[0]


def test_reprs_are_short(llm: LLM) -> None:
    result = llm.generate("Hello", max_tokens=150, ignore_eos=True)
    stream = llm.stream("Hello")
    things = [llm, result, result.metrics, llm.session(), stream, llm.perplexity([5] * 20), SamplingParams()]
    for thing in things:
        assert len(repr(thing)) < 140 and "object at" not in repr(thing) and "\n" not in repr(thing)
    assert repr(SamplingParams(seed=7, max_tokens=5)) == "SamplingParams(seed=7, max_new_tokens=5)"


# -- logits processors ----------------------------------------------------------------------------


def test_a_logits_processor_sees_the_tokens_so_far_and_decides(llm: LLM) -> None:
    seen: list[list[int]] = []

    def only_next(token_ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
        assert (logits.dtype, logits.shape) == (np.float32, (llm.config.vocab_size,))
        seen.append(list(token_ids))
        out = np.full_like(logits, -np.inf)
        out[token_ids[-1] + 1] = 0
        return out

    result = llm.generate([5, 6], max_tokens=3, ignore_eos=True, logits_processors=only_next)
    assert result.token_ids == (7, 8, 9)
    assert seen == [[5, 6], [5, 6, 7], [5, 6, 7, 8]]


def test_rows_beside_a_logits_processor_get_what_they_get_alone(llm: LLM) -> None:
    plain = SamplingParams(max_tokens=6, temperature=0.8, seed=3, repetition_penalty=1.3, ignore_eos=True)
    kept = plain.replace(logits_processors=[lambda ids, logits: logits])
    alone = llm.generate([5, 6], plain).token_ids
    assert [r.token_ids for r in llm.batch([[5, 6], [5, 6]], [plain, kept])] == [alone, alone]


def test_log_probabilities_are_the_models_not_the_processors(llm: LLM) -> None:
    ban = llm.generate([5, 6], max_tokens=1, logprobs=1, ignore_eos=True).logprobs[0]  # type: ignore[index]

    def without(ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
        logits[ban.token] = -np.inf
        return logits

    entry = llm.generate([5, 6], max_tokens=1, logprobs=1, ignore_eos=True, logits_processors=without)
    assert entry.logprobs is not None and entry.logprobs[0].rank == 2
    assert entry.logprobs[0].top[0][0] == ban.token


@pytest.mark.parametrize("wrong", [lambda i, x: None, lambda i, x: x[:5], lambda i, x: x * np.nan])
def test_what_a_logits_processor_must_return_is_checked(llm: LLM, wrong: Any) -> None:
    with pytest.raises(UsageError, match="logits processor"):
        llm.generate([5], max_tokens=1, logits_processors=wrong)
    with pytest.raises(UsageError, match="logits_processors"):
        SamplingParams(logits_processors="ban")  # type: ignore[arg-type]


# -- types ----------------------------------------------------------------------------------------


def test_the_typed_options_are_the_fields_of_sampling_params() -> None:
    fields = {f.name for f in dataclasses.fields(SamplingParams)}
    assert set(SamplingOptions.__annotations__) == fields | {"max_tokens"}


def test_a_type_checker_sees_wrong_options_and_what_chat_returns(tmp_path: Path) -> None:
    snippet = tmp_path / "snippet.py"
    snippet.write_text(
        """from xinfer_vk import LLM

llm = LLM()
llm.generate("x", max_new_tokens=5, stop="y", max_tokens=5)
llm.generate("x", max_new_token=5)
llm.stream("x", temperature="hot")
llm.batch((p for p in "ab"), seeds=1)
reveal_type(llm.chat([{"role": "user", "content": "x"}], top_k=5))
reveal_type(llm.chat(system="x"))
reveal_type(llm.session(top_k=5))
reveal_type(llm("x", top_k=5))
"""
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(snippet)],
        capture_output=True, text=True, timeout=300, cwd=ROOT,
    )  # fmt: skip
    # By the file's name: what mypy has in its cache names the folder of an earlier run.
    told = re.findall(r"snippet\.py:(\d+): ((?:error|note: Revealed).*)", done.stdout)
    lines = {int(number): text for number, text in told}
    assert sorted(lines) == [5, 6, 7, 8, 9, 10, 11], done.stdout
    assert '"max_new_token"' in lines[5] and '"temperature"' in lines[6] and '"seeds"' in lines[7]
    assert "GenerationResult" in lines[8] and "GenerationResult" in lines[11]
    assert "ChatSession" in lines[9] and "ChatSession" in lines[10]


# -- documentation --------------------------------------------------------------------------------


def test_the_python_page_names_all_that_the_package_offers() -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    assert [name for name in xinfer_vk.__all__ if name not in page and name != "__version__"] == []
    methods = [name for name, value in vars(LLM).items() if callable(value) and not name.startswith("_")]
    checks = ("check_fits", "check_prompt")  # what every call does first; docs/api.md has them
    assert [name for name in methods if f"llm.{name}(" not in page and name not in checks] == []


def test_every_public_name_has_a_docstring() -> None:
    for name in xinfer_vk.__all__:
        if isinstance(owner := getattr(xinfer_vk, name), type):
            members = {k: v for k, v in vars(owner).items() if not k.startswith("_")}
            functions = {k: getattr(v, "fget", v) for k, v in members.items()}
            assert owner.__doc__, name
            assert [k for k, f in functions.items() if callable(f) and not f.__doc__] == [], name


def test_the_timing_line_says_what_went_into_compiling() -> None:
    """A cold first run is seconds long, and its rates leave them out."""
    assert Metrics(compile_s=25.3).timing_line().endswith(" tok/s) | compiling: 25.30 s")
    assert "compiling" not in Metrics(compile_s=0.01).timing_line()


@pytest.mark.parametrize("name", ["stop_event", "on_result", "on_step", "on_estimate"])
def test_what_cannot_be_called_is_refused_before_the_work(tmp_path: Path, name: str) -> None:
    wrong: dict[str, Any] = {name: 5}
    with LLM(write_chat_model(tmp_path / "tiny"), device="numpy") as llm:
        calls = {"stop_event": (llm.generate, llm.batch, llm.perplexity, llm.session().send)}.get(
            name, (llm.perplexity,) if name == "on_estimate" else (llm.batch,)
        )
        for call in calls:
            given: Any = "hello" if call.__name__ == "send" else [[5, 6]] if call == llm.batch else [5, 6]
            with pytest.raises(UsageError, match=f"{name} is 5"):
                call(given, **wrong)
        assert llm.capacity == 0

"""What a model thinks before its answer is told apart: while it comes, in the result, and on a terminal."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from chat_model import write_chat_model
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from model_files import tiny_config, write_hf_model
from text_helpers import FIXTURES, TEMPLATES, hf

from xinfer_vk import LLM
from xinfer_vk.cli.answer import AnswerWriter
from xinfer_vk.cli.app import cli
from xinfer_vk.engine.generation import Generation
from xinfer_vk.errors import UsageError
from xinfer_vk.text.chat import ChatTemplate
from xinfer_vk.text.hf_tokenizer import tokenizer_from_directory
from xinfer_vk.text.stream import StreamDecoder
from xinfer_vk.text.thinking import Piece, ThinkingSplitter, opened_by, tag_ids, thinks

# -- splitting ----------------------------------------------------------------------------------

CASES = [
    # (the prompt has the tag, what the model writes, thinking, answer)
    (False, "<think>\nOne.\n\nTwo.\n</think>\n\nYes.\n", "One.\n\nTwo.", "Yes.\n"),
    (True, "One.\n</think>\n\nYes.", "One.", "Yes."),
    (False, "\n <think> a < b </ think> </thin </think>c", "a < b </ think> </thin", "c"),
    (False, "<think>\n\n</think>\n\nYes.", "", "Yes."),
    (False, "<think>cut", "cut", ""),
    (False, "<think>cut </thi", "cut </thi", ""),
    (True, "", "", ""),
    (False, "<thi", "", "<thi"),
    (False, " Say <think>no</think>.", "", " Say <think>no</think>."),
    (False, "<think>a</think> <think>b</think>", "a", "<think>b</think>"),
    (False, "</think>", "", "</think>"),
    (False, "  \n", "", "  \n"),
]


def split(pieces: list[str], opened: bool) -> tuple[str, str, list[Piece]]:
    splitter = ThinkingSplitter(opened)
    out = [piece for text in pieces for piece in splitter.push(text)] + splitter.finish()
    assert all(out), "no empty pieces"
    thinking = "".join(piece for piece in out if piece.thinking)
    return thinking, "".join(piece for piece in out if not piece.thinking), out


@pytest.mark.parametrize(("opened", "text", "thinking", "answer"), CASES)
def test_thoughts_and_answer_are_the_same_however_the_text_comes(
    opened: bool, text: str, thinking: str, answer: str
) -> None:
    for size in range(1, len(text) + 1):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert split(pieces, opened)[:2] == (thinking, answer), size
    assert split([text], opened)[:2] == (thinking, answer)


@given(text=st.lists(st.sampled_from(["<think>", "</think>", "<th", "ink>", "a", " ", "\n"])), data=st.data())
def test_the_cuts_between_tokens_never_matter(text: list[str], data: st.DataObject) -> None:
    whole = "".join(text)
    opened = data.draw(st.booleans())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)])]
    assert split(pieces, opened)[:2] == split([whole], opened)[:2]


def test_text_is_shown_as_soon_as_it_is_certain() -> None:
    splitter = ThinkingSplitter()
    assert splitter.push("<think>\n") == []
    assert splitter.push("a b") == ["a b"]
    assert splitter.push(" c\n") == [" c"], "white space may be the last before the tag"
    assert splitter.push("d<") == ["\nd"]
    assert splitter.push("/p") == ["</p"]
    assert splitter.push("</think>\n") == []
    assert splitter.push("\nYes") == ["Yes"]
    assert splitter.push(" <think>") == [" <think>"]


def test_a_model_thinks_if_it_has_the_tags() -> None:
    assert thinks(hf("qwen2"), "")
    assert not thinks(hf("llama3"), "{{ messages }}")
    assert thinks(hf("llama3"), "{{ messages }}</think>")


def test_a_prompt_that_opens_the_tag_is_seen() -> None:
    qwen = hf("qwen2")
    for text, opened in (
        ("<think>", True),
        ("a<think>\n", True),
        ("<think>\n\n</think>\n\n", False),
        ("", False),
    ):
        assert opened_by(qwen, qwen.encode(text, parse_special=True)) == opened, text


def test_tags_are_seen_that_a_vocabulary_counts_among_the_special_tokens(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "qwen2", tmp_path / "qwen2")
    file = tmp_path / "qwen2" / "tokenizer_config.json"
    tags = {str(hf("qwen2").id_of(tag)): {"content": tag, "special": True} for tag in ("<think>", "</think>")}
    file.write_text(json.dumps({**json.loads(file.read_text()), "added_tokens_decoder": tags}))
    tokenizer = tokenizer_from_directory(tmp_path / "qwen2")
    ids = tokenizer.encode("<think>a</think>b<|im_end|>", parse_special=True)
    assert all(tokenizer.is_special(i) for i in (ids[0], ids[2]))
    decoder = StreamDecoder(tokenizer, shown=tag_ids(tokenizer))
    assert "".join(map(decoder.push, ids)) == "<think>a</think>b"


# -- on a screen --------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, *pieces: Piece) -> str:
    writer = AnswerWriter(stream)
    for piece in pieces:
        writer.write(piece)
    writer.end()
    return stream.getvalue()


THOUGHT, ANSWER = (Piece("a", True), Piece("b\x1b[1m", True)), (Piece("c"), Piece("d\n"))


def test_thinking_is_dim_on_a_terminal_and_tagged_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert shown(Terminal(), *THOUGHT, *ANSWER) == "\x1b[2mab␛[1m\x1b[0m\n\ncd\n"
    assert shown(Terminal(), *THOUGHT) == "\x1b[2mab␛[1m\x1b[0m", (
        "the style does not outlast an answer cut short"
    )
    assert shown(Terminal(), *ANSWER) == "cd\n"
    assert shown(io.StringIO(), *THOUGHT, *ANSWER) == "<think>\nab\x1b[1m\n</think>\n\ncd\n"
    assert shown(io.StringIO(), *THOUGHT) == "<think>\nab\x1b[1m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown(Terminal(), *THOUGHT, *ANSWER) == "ab␛[1m\n\ncd\n"


# -- in a generation ----------------------------------------------------------------------------

SWITCH = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}
    {%- elif open_thinking %}{{ '<think>\\n' }}{% endif %}
{%- endif %}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("thinks") / "tiny"
    write_hf_model(path, tiny_config("qwen2", vocab_size=704), seed=3)
    for file in (FIXTURES / "qwen2").iterdir():
        shutil.copy(file, path)
    (path / "chat_template.jinja").write_text(SWITCH)
    return path


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, device="numpy", context=256) as llm:
        yield llm


@pytest.fixture
def writes(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """What the model writes: put the ids of a text into it."""
    ids: list[int] = []
    accept = Generation.accept

    def scripted(self: Generation, token: int, *rest: object) -> None:
        end = next(iter(llm.eos_ids))
        accept(self, ids[len(self.generated)] if len(self.generated) < len(ids) else end, *rest)  # type: ignore

    monkeypatch.setattr(Generation, "accept", scripted)
    yield ids


def ids_of(llm: LLM, text: str) -> list[int]:
    return llm.tokenizer.encode(text, parse_special=True, add_bos=False)


TEXT = "<think>\nIt is 4.\n</think>\n\nFour <think>."


def test_the_result_has_the_thinking_apart(llm: LLM, writes: list[int]) -> None:
    writes[:] = ids_of(llm, TEXT)
    stream = llm.stream("2 + 2?", max_new_tokens=50)
    pieces = list(stream)
    result = stream.result
    assert (result.thinking, result.text) == ("It is 4.", "Four <think>.")
    assert "".join(piece for piece in pieces if piece.thinking) == result.thinking
    assert "".join(piece for piece in pieces if not piece.thinking) == result.text
    assert list(result.token_ids) == writes, "the tokens are all there"
    assert llm.batch(["2 + 2?"], n=2, max_new_tokens=50)[1].thinking == "It is 4."


def test_a_prompt_may_have_opened_the_thinking_or_closed_it(llm: LLM, writes: list[int]) -> None:
    writes[:] = ids_of(llm, "It is 4.\n</think>\n\nFour.")
    result = llm.generate("2 + 2?", max_new_tokens=50, template_args={"open_thinking": True})
    assert (result.thinking, result.text) == ("It is 4.", "Four.")
    result = llm.generate("2 + 2?", max_new_tokens=50, template_args={"enable_thinking": False})
    assert (result.thinking, result.text) == ("", "It is 4.\n</think>\n\nFour.")


def test_a_stop_string_counts_in_thoughts_too(llm: LLM, writes: list[int]) -> None:
    writes[:] = ids_of(llm, TEXT)
    result = llm.generate("2 + 2?", max_new_tokens=50, stop=(" 4",))
    assert (result.thinking, result.text, result.finish_reason) == ("It is", "", "stop")


def test_a_conversation_goes_on_without_the_thinking(llm: LLM, writes: list[int]) -> None:
    writes[:] = ids_of(llm, TEXT)
    session = llm.chat(max_new_tokens=50)
    assert session.send("2 + 2?").result.thinking == "It is 4."
    assert session.messages[-1] == {"role": "assistant", "content": "Four <think>."}
    after = session.send("And 3 + 3?").result
    told = llm.tokenizer.decode(after.prompt_token_ids, skip_special=False)
    assert "It is 4." not in told and "Four <think>." in told
    assert after.metrics.reused_tokens > 0, "the cache is used up to where the answers differ"


def test_an_answer_stopped_while_it_was_thinking_is_none(llm: LLM, writes: list[int]) -> None:
    writes[:] = ids_of(llm, TEXT)
    session = llm.chat(max_new_tokens=50)
    stream = session.send("2 + 2?")
    assert next(stream).thinking
    stream.cancel()
    assert stream.result.finish_reason == "interrupted"
    assert session.unanswered == "2 + 2?" and not session.turns


def test_template_arguments_must_be_the_templates(llm: LLM) -> None:
    for wrong in ("enable_thinkin", "messages", "add_generation_prompt", "eos_token"):
        with pytest.raises(
            UsageError, match=f"no variable '{wrong}' to set; it has enable_thinking, open_thinking$"
        ):
            llm.encode("a", template_args={wrong: True})
        with pytest.raises(UsageError, match=wrong):
            llm.chat(template_args={wrong: True})
    with pytest.raises(UsageError, match="template arguments need a chat template"):
        llm.encode("a", raw=True, template_args={"enable_thinking": False})
    with pytest.raises(UsageError, match="no variable 'tools' to set; it has none"):
        TEMPLATES["smollm"].check_variables(["tools"])
    TEMPLATES["qwen2"].check_variables(["tools"])
    assert ChatTemplate("{% if %}", "x").variables == frozenset(), "rendering says what is wrong with it"


def test_every_turn_of_a_chat_gets_the_template_arguments(llm: LLM, writes: list[int]) -> None:
    writes[:] = ids_of(llm, "Four.")
    session = llm.chat(max_new_tokens=50, template_args={"enable_thinking": False})
    for text in ("2 + 2?", "Sure?"):
        prompt = session.send(text).result.prompt_token_ids
        assert llm.tokenizer.decode(prompt, skip_special=False).endswith("<think>\n\n</think>\n\n")


# -- on the command line ------------------------------------------------------------------------


def test_generate_shows_tags_in_a_pipe_and_has_them_apart_in_json(
    model: Path, llm: LLM, writes: list[int]
) -> None:
    writes[:] = ids_of(llm, TEXT)
    run = ["generate", "-m", str(model), "-d", "numpy", "-q", "-p", "2 + 2?"]
    assert CliRunner().invoke(cli, run).stdout == TEXT + "\n"
    record = json.loads(CliRunner().invoke(cli, [*run, "--json"]).stdout)
    assert (record["thinking"], record["text"]) == ("It is 4.", "Four <think>.")
    both = CliRunner().invoke(cli, [*run, "-p", "3 + 3?"]).stdout
    assert f"==> prompt 2 <==\n{TEXT}\n\n" in both


def test_the_template_argument_switches_the_thinking_off(model: Path, llm: LLM, writes: list[int]) -> None:
    writes[:] = ids_of(llm, "Four.")
    run = ["generate", "-m", str(model), "-d", "numpy", "-q", "-p", "2?", "--json"]
    record = json.loads(CliRunner().invoke(cli, [*run, "--template-arg", "enable_thinking=false"]).stdout)
    assert record["prompt_tokens"] > json.loads(CliRunner().invoke(cli, run).stdout)["prompt_tokens"]
    for wrong, said in (
        (["--template-arg", "enable_thinking"], "write it as NAME=VALUE"),
        (["--template-arg", "a b=1"], "write it as NAME=VALUE"),
        (["--template-arg", "x=1", "--template-arg", "x=2"], "sets x twice"),
        (["--template-arg", "x=1"], "no variable 'x' to set; it has enable_thinking"),
    ):
        error = CliRunner().invoke(cli, [*run, *wrong]).exception
        assert isinstance(error, UsageError) and said in str(error)


def test_chat_shows_the_thinking_and_forgets_it(model: Path, llm: LLM, writes: list[int]) -> None:
    writes[:] = ids_of(llm, TEXT)
    run = ["chat", "-m", str(model), "-d", "numpy", "-q"]
    result = CliRunner().invoke(cli, run, input="2 + 2?\nSure?\n")
    assert result.stdout == f"{TEXT}\n{TEXT}\n", result.stderr
    writes[:] = ids_of(llm, "<think>\nIt is")
    result = CliRunner().invoke(cli, [*run[:-1], "-n", "4"], input="2 + 2?\n")
    assert "(cut off while it was thinking: max_new_tokens=4 is reached)" in result.stderr


def test_an_answer_with_thinking_may_be_longer(model: Path, tmp_path: Path) -> None:
    run = ["chat", "-d", "numpy", "-m"]
    shown = CliRunner().invoke(cli, [*run, str(model)], input="/set\n").stderr
    assert "max_new_tokens" in shown and "4096  (default" in shown
    plain = write_chat_model(tmp_path / "plain")
    assert "4096" not in CliRunner().invoke(cli, [*run, str(plain)], input="/set\n").stderr

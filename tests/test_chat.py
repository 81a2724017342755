"""Chat templates give the text and the tokens that transformers gives."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from text_helpers import FIXTURES, HELLO, NAMES, SENTENCEPIECE, TEMPLATES, gguf, hf, metadata, reference, user

from xinfer_vk.errors import ModelError, UsageError
from xinfer_vk.text.chat import (
    ChatTemplate,
    encode_chat,
    is_instruct,
    qwen_chat_prompt,
    template_from_directory,
    template_from_gguf,
)
from xinfer_vk.text.origin import TEMPLATE, USER, Traced, origin_of
from xinfer_vk.text.tokenizer import load_tokenizer
from xinfer_vk.weights.source import open_model

# -- the same as transformers -----------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_chat_renders_and_encodes_as_in_transformers(name: str) -> None:
    for case in reference(name)["chats"]:
        messages, prompt = case["messages"], case["add_generation_prompt"]
        assert TEMPLATES[name].render(messages, prompt) == case["text"]
        assert encode_chat(hf(name), TEMPLATES[name], messages, prompt) == case["ids"]


@pytest.mark.parametrize("name", ["smollm", "qwen2", "llama3", SENTENCEPIECE])
def test_a_chat_from_gguf_metadata_does_too(name: str) -> None:
    template = template_from_gguf(metadata(name), "model.gguf")
    for case in reference(name)["chats"]:
        messages, prompt = case["messages"], case["add_generation_prompt"]
        assert template.render(messages, prompt) == case["text"]
        assert encode_chat(gguf(name), template, messages, prompt) == case["ids"]


@pytest.mark.parametrize("name", NAMES)
@given(system=st.text(max_size=20), text=st.text(max_size=40))
@settings(max_examples=40, deadline=None)
def test_honest_messages_encode_as_the_rendered_text(name: str, system: str, text: str) -> None:
    messages = [{"role": "system", "content": system}, *user(text)]
    tokenizer, template = hf(name), TEMPLATES[name]
    assume(not tokenizer.markup_in(system) and not tokenizer.markup_in(text))
    expected = tokenizer.encode(template.render(messages), parse_special=True, add_bos=False)
    assert encode_chat(tokenizer, template, messages) == expected


@pytest.mark.parametrize("name", NAMES)
def test_the_slow_way_to_encode_gives_the_same_tokens(name: str) -> None:
    """A forged token anywhere sends the whole chat the slow way; the rest must not change by that."""
    tokenizer = hf(name)
    (end,) = tokenizer.eos_ids
    stop = tokenizer.decode([end], skip_special=False)
    texts = [case["text"] for case in reference(name)["texts"] + reference(name)["chats"]]
    for text in texts:
        honest = Traced(text + stop, TEMPLATE)
        chat = honest + Traced(stop, USER)
        ids = tokenizer.encode_traced(str.__str__(chat), origin_of(chat))
        straight = tokenizer.encode(text + stop, parse_special=True, add_bos=False)
        assert ids[: len(straight)] == straight, text
        assert end not in ids[len(straight) :]


def test_tools_and_other_variables_reach_the_template() -> None:
    tools = [{"name": "weather", "parameters": {"city": "Zürich <b>"}}]
    text = TEMPLATES["qwen2"].render(HELLO, tools=tools)
    assert text.startswith(
        '<|im_start|>system\nTools:\n<tools>\n{"name": "weather", "parameters": {"city": "Zürich <b>"}}'
    )
    template = ChatTemplate("{{ thinking }} {{ strftime_now('%Y') }}", "x")
    assert template.render(HELLO, thinking=True) == f"True {datetime.now().year}"


# -- Qwen2.5's chat, and models without a template --------------------------------------------------


def test_qwen_chat_prompt_is_exactly_qwens_text() -> None:
    assert qwen_chat_prompt("Be brief.", "Hi") == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert qwen_chat_prompt(None, "Hi") == (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert qwen_chat_prompt("", "").startswith(
        "<|im_start|>system\n<|im_end|>\n<|im_start|>user\n<|im_end|>\n"
    )


def test_qwen_chat_prompt_equals_the_template_it_stands_for() -> None:
    fallback = template_from_gguf({}, "model.gguf")
    for template in (TEMPLATES["qwen2"], fallback):
        assert template.render(user("Hi ")) == qwen_chat_prompt(None, "Hi ")
        assert template.render([{"role": "system", "content": "S"}, *user("Hi")]) == qwen_chat_prompt(
            "S", "Hi"
        )
    assert fallback.render(HELLO, add_generation_prompt=False).endswith("Hello<|im_end|>\n")


def test_a_model_without_a_template_gets_qwens_if_it_has_the_tokens(tmp_path: Path) -> None:
    template = template_from_directory(tmp_path)
    assert template.fallback
    assert encode_chat(hf("qwen2"), template, HELLO) == encode_chat(hf("qwen2"), TEMPLATES["qwen2"], HELLO)
    with pytest.raises(
        UsageError, match=r"has no chat template, and its vocabulary has no <\|im_start\|>: use raw=True"
    ):
        encode_chat(hf("llama3"), template, HELLO)


def test_the_demo_model_chats(demo_model: Path) -> None:
    with open_model(demo_model) as model:
        tokenizer, template = load_tokenizer(model), ChatTemplate.from_source(model)
        assert is_instruct(model)
    for case in reference("smollm")["chats"]:
        messages, prompt = case["messages"], case["add_generation_prompt"]
        assert template.render(messages, prompt) == case["text"]
        expected = tokenizer.encode(case["text"], parse_special=True)
        assert encode_chat(tokenizer, template, messages, prompt) == expected


def test_a_model_is_for_chats_if_it_has_a_template(tmp_path: Path) -> None:
    assert is_instruct(SimpleNamespace(kind="hf", path=FIXTURES / "qwen2"))  # type: ignore[arg-type]
    assert not is_instruct(SimpleNamespace(kind="hf", path=tmp_path))  # type: ignore[arg-type]
    for values, expected in ((metadata("qwen2"), True), ({}, False)):
        source = SimpleNamespace(kind="gguf", path=Path("m.gguf"), metadata=values)
        assert is_instruct(source) == expected  # type: ignore[arg-type]


# -- where templates come from ----------------------------------------------------------------------


def config(path: Path, value: Any) -> Path:
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value, "eos_token": "</s>"}))
    return path


def test_templates_are_found_in_their_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}')
    assert template_from_directory(tmp_path).render(HELLO) == "json"
    assert template_from_directory(config(tmp_path, "config {{ eos_token }}")).render(HELLO) == "config </s>"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    template = template_from_directory(tmp_path)
    assert template.render(HELLO) == "jinja" and template.where == str(tmp_path / "chat_template.jinja")


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    assert template_from_directory(config(tmp_path, named)).render(HELLO) == "default"
    assert template_from_directory(config(tmp_path, named[:1])).render(HELLO) == "tools"
    assert template_from_directory(config(tmp_path, [])).fallback
    named[1]["name"] = "rag"
    with pytest.raises(ModelError, match=r"has the templates 'tool_use, rag', none is named 'default'"):
        template_from_directory(config(tmp_path, named))


@pytest.mark.parametrize(
    "value", [3, {"default": "x"}, ["x"], [{"name": "default"}], [{"name": 1, "template": "x"}]]
)
def test_what_is_no_template_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(
        ModelError, match=r"tokenizer_config\.json: chat_template is .* a template or a list of named"
    ):
        template_from_directory(config(tmp_path, value))


def test_damaged_template_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template\.jinja: not UTF-8 text \(byte 0\)"):
        template_from_directory(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"x" * (1 << 19))
    with pytest.raises(ModelError, match="at most 262144 were expected"):
        template_from_directory(tmp_path)
    with pytest.raises(ModelError, match=r"tokenizer\.chat_template is 3, text was expected"):
        template_from_gguf({"tokenizer.chat_template": 3}, "model.gguf")
    with pytest.raises(ModelError, match="characters long, that is damage"):
        template_from_gguf({"tokenizer.chat_template": "x" * (1 << 19)}, "model.gguf")


# -- wrong messages ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages", [[], ["hi"], [{}], [{"content": "x"}], [{"role": None}], [{"role": 1, "content": "x"}]]
)
def test_messages_of_the_wrong_form_are_refused(messages: Any) -> None:
    with pytest.raises(UsageError, match=r"no messages|message 0 is"):
        TEMPLATES["qwen2"].render(messages)


def test_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": ["a", {"b": "c"}]}]
    ChatTemplate("{{ messages }}", "x").render(messages)
    assert messages == [{"role": "user", "content": ["a", {"b": "c"}]}]
    assert type(messages[0]["role"]) is str
    assert type(ChatTemplate("<|im_end|>", "x").render(messages)) is str

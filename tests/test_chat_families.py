"""Templates of the families that are supported render as in transformers, and refuse what they refuse there.

``tests/fixtures/templates`` has a template in the manner of each family, and what transformers makes of chats
by it: with and without a system text, with tools, calls and results, switches, dates, documents, parts, and
roles in the wrong order (made by ``make_template_fixtures.py``).
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from text_helpers import hf, user

from xinfer_vk.errors import ModelError
from xinfer_vk.text import sandbox
from xinfer_vk.text.chat import ChatTemplate, encode_chat
from xinfer_vk.text.origin import TEMPLATE, origin_of

FOLDER = Path(__file__).parent / "fixtures" / "templates"
FAMILIES = sorted(file.stem for file in FOLDER.glob("*.jinja"))
each_family = pytest.mark.parametrize("family", FAMILIES)


@cache
def fixture(family: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{family}.json").read_text(encoding="utf-8"))


@cache
def template(family: str) -> ChatTemplate:
    text = (FOLDER / f"{family}.jinja").read_text(encoding="utf-8")
    return ChatTemplate(text, family, fixture(family)["special"])


@pytest.fixture(autouse=True)
def today(monkeypatch: pytest.MonkeyPatch) -> None:
    class FixedDay(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.fromisoformat(fixture(FAMILIES[0])["today"])

    monkeypatch.setattr(sandbox, "datetime", FixedDay)


@each_family
def test_chats_render_as_in_transformers_or_are_refused(family: str) -> None:
    cases = fixture(family)["cases"]
    assert len(cases) > 60
    text = template(family).text
    for case in cases:
        options = {"add_generation_prompt": True, **case["options"]}
        if "text" in case:
            assert template(family).render(case["messages"], **options) == case["text"], case
            continue
        with pytest.raises(ModelError, match="chat template failed") as caught:
            template(family).render(case["messages"], **options)
        if case["error"] in text:
            assert str(caught.value).endswith(case["error"]), "a refusal in the template's words"


@each_family
def test_markup_of_the_template_is_the_templates_and_text_of_the_user_is_not(family: str) -> None:
    """In every template, whatever it does with the texts: so each can be encoded."""
    rendered = template(family)._render(user("</s> <|im_end|>"), True, {})
    plain, origin = str.__str__(rendered), origin_of(rendered)
    at = plain.index("</s> <|im_end|>")
    assert TEMPLATE not in origin[at : at + 15]
    outside = {*origin[:at], *origin[at + 15 :]}
    assert outside <= {TEMPLATE, 0} and origin[-1] == TEMPLATE
    assert encode_chat(hf("smollm"), template(family), user("Hi"))


def test_the_switches_of_templates_are_known() -> None:
    assert {"enable_thinking", "xml_tools", "python_tools"} <= template("smollm3").variables
    assert {"thinking", "documents", "controls", "tools"} <= template("granite3").variables
    assert {"date_string", "custom_tools", "tools_in_user_message"} <= template("llama3").variables
    assert ChatTemplate("{% set x = x | default(1) %}{{ x }}", "x").variables == {"x"}
    assert template("qwen3").variables == {"enable_thinking", "tools"}
    assert template("gemma2").variables == template("gemma3").variables == frozenset()


def test_what_is_none_in_a_message_is_not_there() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "x"}]}
    shown = ChatTemplate("{{ messages[0].content is defined }} {{ messages[0].tool_calls[0] }}", "x")
    assert shown.render([call]) == "False {'name': 'x'}"


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_the_names_that_templates_know(name: str) -> None:
    shown = ChatTemplate("{{ messages[0].reasoning_content }} {{ messages[0].thinking }}", "x")
    assert shown.render([{"role": "assistant", "content": "a", name: "b"}]) == "b b"


def test_objects_in_messages_are_out_of_a_templates_reach() -> None:
    class Image:
        def save(self) -> str:
            raise AssertionError("a template called a method")

    message = {"role": "user", "content": [{"type": "image", "image": Image()}]}
    assert ChatTemplate("{{ messages[0].content[0].image }}", "x").render([message]) == "<Image>"
    with pytest.raises(ModelError):
        ChatTemplate("{{ messages[0].content[0].image.save() }}", "x").render([message])

"""Every operation that a chat template can name is refused, or has a cost that is paid before it runs."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from jinja2 import defaults
from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext, Macro, Undefined
from test_chat_sandbox import HOSTILE
from text_helpers import HELLO

from xinfer_vk.errors import ModelError
from xinfer_vk.text.allowed import FILTERS, FUNCTIONS, TESTS, attribute_cost
from xinfer_vk.text.budget import Budget
from xinfer_vk.text.chat import ChatTemplate
from xinfer_vk.text.origin import TEMPLATE, Traced
from xinfer_vk.text.sandbox import ChatEnvironment

ENVIRONMENT = ChatEnvironment()


def made_by(template: str) -> Any:
    """The value of ``x`` after a template has run."""
    return ENVIRONMENT.from_string(template).module.x  # type: ignore[attr-defined]


VALUES: dict[str, Any] = {
    "str": "text",
    "traced": Traced("text", TEMPLATE),
    "bytes": b"text",
    "list": [1, 2],
    "tuple": (1, 2),
    "dict": {"a": 1},
    "keys": {"a": 1}.keys(),
    "values": {"a": 1}.values(),
    "items": {"a": 1}.items(),
    "int": 3,
    "bool": True,
    "float": 1.5,
    "none": None,
    "range": range(3),
    "iterator": iter([1]),
    "generator": (i for i in ()),
    "markup": made_by("{% set x = 'a' | e %}"),
    "group": made_by("{% set x = ([{'a': 1}] | groupby('a'))[0] %}"),
    "cycler": made_by("{% set x = cycler(1, 2) %}"),
    "joiner": made_by("{% set x = joiner() %}"),
    "macro": made_by("{% macro x() %}{% endmacro %}"),
    "loop": LoopContext([1], Undefined),
    "undefined": Undefined(),
    **{f"function {name}": ENVIRONMENT.globals[name] for name in FUNCTIONS},
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_every_attribute_of_what_a_template_holds_is_refused_plain_or_paid_for(value: Any) -> None:
    ENVIRONMENT.budget = Budget()
    for name in dir(value):
        try:
            found = getattr(value, name)
            got = ENVIRONMENT.getattr(value, name)
        except Exception:
            continue
        if isinstance(got, Undefined):  # refused: a call, or printing it, is an error
            continue
        assert not name.startswith("_"), name
        cost = attribute_cost(value, name)  # KeyError: it is on no list
        if not callable(found):
            continue
        assert cost is not None or isinstance(found, Macro), f"{name} can be called without a cost"


def test_filters_tests_and_functions_are_those_of_the_lists() -> None:
    assert ENVIRONMENT.filters.keys() == FILTERS.keys()
    assert ENVIRONMENT.tests.keys() == TESTS.keys()
    assert ENVIRONMENT.globals.keys() == FUNCTIONS.keys()
    removed = {"pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr"}
    assert defaults.DEFAULT_FILTERS.keys() - FILTERS.keys() == removed
    assert defaults.DEFAULT_TESTS.keys() == TESTS.keys()


def test_what_is_on_no_list_cannot_be_called() -> None:
    ENVIRONMENT.budget = Budget()
    context = ENVIRONMENT.from_string("").new_context()
    for function in (len, "x".encode, "x".translate, [].append, {}.update, (1).to_bytes, open, type, print):
        with pytest.raises(SecurityError, match="cannot be called"):
            ENVIRONMENT.call(context, function)


def test_every_operator_is_paid_for() -> None:
    for expression in ("2 + 1", "2 - 1", "2 * 1", "2 / 1", "2 // 1", "2 % 1", "2 ** 1", "-y", "+y", "y[::2]",
                       "y ~ y", "y == y", "y in z", "y.a", "z[y]", "[y]", "{y: y}",):  # fmt: skip
        ENVIRONMENT.budget = budget = Budget()
        before = budget.left
        with suppress(TypeError):
            ENVIRONMENT.from_string("{% if " + expression + " %}{% endif %}").render(y="yy", z=[1])
        assert before - budget.left >= 10, expression


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_templates_stay_within_the_limits_of_a_process(template: str) -> None:
    """The promise is a second and 256 MB for short chats. Ten seconds of CPU time: the cost of a unit
    differs between processors, and shared ones are slower; without the budget these take minutes."""
    child = os.fork()
    if child == 0:
        code = 9
        try:
            mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (mapped + (256 << 20),) * 2)
            used = resource.getrusage(resource.RUSAGE_SELF)
            resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 10,) * 2)
            ChatTemplate(template, "x").render(HELLO)
        except ModelError as error:
            code = 3 if "MemoryError" in str(error) else 0
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, {3: "it needed more than 256 MB", 9: "it rendered"}.get(status, f"ended by {-status}")


@pytest.mark.parametrize("name", ["25 loops in loops", "a number of 100,000 digits", "nesting", "no end"])
def test_what_python_cannot_compile_is_an_error_of_the_template(name: str) -> None:
    template = ChatTemplate(HOSTILE[name], "model/chat_template.jinja")
    assert template.variables == frozenset()
    with pytest.raises(ModelError, match=r"^model/chat_template\.jinja: the chat template failed: "):
        template.check()

"""A chat template is a stranger's program: it reaches nothing, and it comes to an end."""

from __future__ import annotations

import resource
import time
from contextlib import suppress

import pytest
from text_helpers import HELLO, NAMES, TEMPLATES, user

from xinfer_vk.errors import ModelError
from xinfer_vk.text.budget import MIN_BUDGET, Budget
from xinfer_vk.text.chat import ChatTemplate


def turns(work: str) -> str:
    lists = "{% set r = range(99999) %}{% set a = r | list %}{% set b = r | list %}"
    return lists + "{% for i in r %}" + work + "{% endfor %}"


def grow(start: str, step: str, end: str = "ns.x") -> str:
    loop = "{% for i in range(99) %}{% set ns.x = " + step + " %}{% endfor %}"
    return "{% set ns = namespace(x=" + start + ") %}" + loop + "{{ " + end + " }}"


def long_turns(work: str) -> str:
    """A turn after the other over two texts of a million characters."""
    texts = "{% set t = 'x' * 1000000 %}{% set v = 'x' * 1000000 %}{% set u = 'z' * 99999 %}"
    return "{% set ns = namespace(x=1) %}" + texts + "{% for i in range(99999) %}" + work + "{% endfor %}"


HOSTILE = {
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "a loop that skips all": "{% for i in range(99999) if range(99999) | list | length == 0 %}{% endfor %}",
    "loops that do nothing": turns("{% for j in r %}{% endfor %}"),
    "loops that skip without a look": turns("{% for j in r if none %}{% endfor %}"),
    "a filter in every turn": turns("{{ r | max }}"),
    "a comparison in every turn": turns("{{ r | list == a }}"),
    "a comparison of what is there": turns("{{ a == b }}"),
    "a comparison of lists in lists": turns("{{ p == q }}").replace(
        "{% for", "{% set p = [a, a, a] %}{% set q = [b, b, b] %}{% for", 1
    ),
    "a search in every turn": "{{ range(99999) | select('in', range(99999) | list) | list | length }}",
    "sorting in every turn": "{% for i in range(9999) %}{{ range(99999) | sort | length }}{% endfor %}",
    "a macro without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "twice as many macros": "{% macro f(n) %}{{ f(n-1) ~ f(n-1) if n }}{% endmacro %}{{ f(60) }}",
    "a recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "text doubled by +": grow("'xxxxxxxx'", "ns.x + ns.x"),
    "text doubled by ~": grow("'xxxxxxxx'", "ns.x ~ ns.x"),
    "text doubled by join": grow("'xxxxxxxx'", "[ns.x, ns.x] | join"),
    "text doubled by replace": grow("'xxxxxxxx'", "ns.x.replace('x', 'xx')"),
    "text doubled by format": grow("'xxxxxxxx'", "'%s%s' | format(ns.x, ns.x)"),
    "lists doubled": grow("[1]", "ns.x + ns.x"),
    "lists of lists": grow("[1]", "[ns.x, ns.x]"),
    "lists of lists in a filter": grow("[1]", "[ns.x, ns.x]", "ns.x | string"),
    "tuples of tuples": grow("(1,)", "(ns.x, ns.x)"),
    "tuples of tuples in a format": grow("(1,)", "(ns.x, ns.x)", "'{}'.format(ns.x)"),
    "lists of lists compared": grow("[1]", "[ns.x, ns.x]", "ns.x == messages"),
    "objects of objects": grow("{}", "{'a': ns.x, 'b': ns.x}", "ns.x | tojson"),
    "batches of batches": grow("[1]", "[ns.x] | batch(9, ns.x) | list"),
    "numbers squared": grow("10", "ns.x * ns.x"),
    "a text times a lot": "{{ 'x' * 2000000000 }}",
    "a list times a lot": "{{ 200000000 * [1] }}",
    "a replacement": "{{ ('x' * 20000).replace('x', 'y' * 99999) }}",
    "a separator": "{{ ('x' * 99999).join(range(20000) | map('string')) }}",
    "a power": "{{ 10 ** 10000000 }}",
    "a width in %": "{{ '%10000000000d' % 1 }}",
    "a width for %*d": "{{ '%*d' % (1000000000, 1) }}",
    "a width in format": "{{ '{:>1000000000}'.format(1) }}",
    "a width in a nested format": "{{ '{:>{}}'.format('x', '1000000000') }}",
    "a width in format_map": "{{ '{x:>1000000000}'.format_map({'x': 1}) }}",
    "centering": "{{ 'x'.center(1000000000) }}",
    "centering by a filter": "{{ 'x' | center(1000000000) }}",
    "tabs": "{{ ('\t' * 1000).expandtabs(99999) }}",
    "indentation": "{{ ('\n' * 90000) | indent('x' * 90000) }}",
    "indented JSON": "{{ [[[[1]]]] | tojson(indent=100000000) }}",
    "translation": "{{ ('a' * 99999).translate({97: 'x' * 99999}) }}",
    "separators": "{{ range(99999) | join('x' * 99999) }}",
    "slices": "{{ [1] | slice(100000000) | list }}",
    "bytes": "{{ (1).to_bytes(10000000000, 'big') }}",
    "rounding": "{{ 1.5 | round(100000000, 'ceil') }}",
    "a date": "{{ strftime_now('%Y' * 5000000) }}",
    "nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "a long sum": "{{ " + "+".join(["1"] * 20000) + " }}",
    "blocks in blocks": "{% if 1 %}" * 300 + "{% endif %}" * 300,
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "classes by name": "{{ ''['__class__']['__mro__'] }}",
    "classes in a format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "globals of a function": "{{ namespace.__init__.__globals__ }}",
    "private names": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "private names from the start": "{{ namespace(_x=1) }}",
    "changing a message": "{{ messages[0].update(role='system') }}",
    "changing a message by its class": "{{ dict.update(messages[0], role='system') }}",
    "adding a message": "{{ messages.append(1) }}",
    "a file": "{% include '/etc/passwd' %}",
    "a module": "{% import 'os' as os %}",
    "a range without end": "{{ range(10 ** 9) | list }}",
    "ranges in ranges": "{{ range(99999) | map('string') | map('center', 99999) | list }}",
    "a block that calls itself": "{% block b %}{{ self.b() }}{% endblock %}",
    "macros that call each other": "{% macro f() %}{{ g() }}{% endmacro %}"
    "{% macro g() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a call block in itself": "{% macro f() %}{% call f() %}{% endcall %}{% endmacro %}{{ f() }}",
    "a loop in a filter": "{{ range(99999) | groupby('real') | list | length }}" * 200,
    "turns that do nothing": "{% for i in range(99999) %}{% for j in range(99999) %}{% continue %}"
    "{% endfor %}{% endfor %}",
    "generation in loops": "{% for i in range(99999) %}{% generation %}{% for j in range(999) %}x{% endfor %}"
    "{% endgeneration %}{% endfor %}",
    "counting in every turn": turns("{{ a.count(b) }}"),
    "counting in a range": turns("{{ r.count('x') }}"),
    "looking in a list": turns("{{ a.index(-1) if false else a.count(-1) }}"),
    "looking in a range": turns("{{ r.index(1.5) if false else r.count(1.5) }}"),
    "counting in a text": long_turns("{% if t.count('x') %}{% endif %}"),
    "finding in a text": long_turns("{% if t.find('y') %}{% endif %}"),
    "finding from the right": long_turns("{% if t.rfind('y' ~ u) %}{% endif %}"),
    "finding by in": long_turns("{% if 'y' in t %}{% endif %}"),
    "equal long texts": long_turns("{% if t == v %}{% endif %}"),
    "splitting": long_turns("{% if t.split('y') %}{% endif %}"),
    "splitting into characters": long_turns("{% if t.split('x') %}{% endif %}"),
    "stripping": long_turns("{% if t.strip('x') %}{% endif %}"),
    "stripping many": long_turns("{% if t.strip(u ~ 'y') %}{% endif %}"),
    "is it digits": long_turns("{% if t.isdigit() %}{% endif %}"),
    "is it letters": long_turns("{% if t.isalpha() %}{% endif %}"),
    "upper case": long_turns("{% if t.upper() %}{% endif %}"),
    "slices with a step": long_turns("{% if t[::2] %}{% endif %}"),
    "slices of a list": turns("{% if a[::-1] %}{% endif %}"),
    "slices kept": long_turns("{% set ns.x = [ns.x, t[1:]] %}"),
    "150 assignments of slices": "{% set t = 'x' * 4000000 %}"
    + "".join(f"{{% set a{i} = t[{i}:] %}}" for i in range(150)),
    "hashing a long text": long_turns("{% if {}[t ~ i] %}{% endif %}"),
    "hashing a tuple": grow("(1,)", "(ns.x, ns.x)", "{}[ns.x]"),
    "hashing tuples in every turn": turns("{% if {}[p] %}{% endif %}").replace(
        "{% for", "{% set p = (r, a | join) %}{% for", 1
    ),
    "cyclers": turns("{% set c = cycler(*r) %}"),
    "cyclers of texts": long_turns("{% set c = cycler(*t) %}"),
    "loop.cycle": turns("{{ loop.cycle(*r) }}"),
    "loop.changed": turns("{{ loop.changed(a) }}"),
    "calls of macros": turns("{{ f(*r) }}").replace(
        "{% for", "{% macro f() %}{{ varargs[0] }}{% endmacro %}{% for", 1
    ),
    "a format that repeats": "{% set x = {'a': 'x' * 99999} %}{{ '%(a)s' * 99999 % x }}",
    "a format filter that repeats": "{{ ('%(a)s' * 99999) | format(a='x' * 99999) }}",
    "a format method that repeats": "{{ ('{0}' * 99999).format('x' * 99999) }}",
    "a format method with many names": "{{ ('{a}' * 99999).format_map({'a': 'x' * 99999}) }}",
    "many widths": "{{ ('%99999d' * 9999) % ((1,) * 9999) }}",
    "many starred widths": "{{ ('%*d' * 5000) % ((99999, 1) * 5000) }}",
    "a format in a test": "{{ ('%99999s' * 9999) is divisibleby(1) }}",
    "a format in another test": "{{ ('%(a)s' * 99999) is divisibleby({'a': 'x' * 99999}) }}",
    "joining bytes": "{{ ('x' * 99999).encode().join(['y'.encode()] * 99999) }}",
    "replacing by name": "{{ ('x' * 99999) | replace(new='y' * 99999, old='x') }}",
    "replacing in a list": "{{ (['x'] * 9999) | replace('x', 'y' * 99999) }}",
    "replacing nothing": "{{ ('x' * 99999).replace('', 'y' * 99999) }}",
    "adding lists": "{{ ([[1] * 999] * 9999) | sum(start=[]) }}",
    "adding tuples": "{{ ([(1,) * 999] * 9999) | sum(start=()) }}",
    "filters of filters": "{{ range(99999) " + "| select " * 300 + "| list | length }}" * 1,
    "JSON with deep indents": "{% set ns = namespace(x=[1] * 999) %}{% for i in range(200) %}"
    "{% set ns.x = [ns.x] %}{% endfor %}" + "{{ ns.x | tojson(indent=16) }}" * 9,
    "JSON in every turn": turns("{% if p | tojson %}{% endif %}").replace(
        "{% for", "{% set p = [a] %}{% for", 1
    ),
    "copies of objects": turns("{% if dict(d) %}{% endif %}").replace(
        "{% for", "{% set d = dict(r | batch(2)) %}{% for", 1
    ),
    "copies of lists": turns("{% if a.copy() %}{% endif %}"),
    "large numbers from text": "{{ ('f' * 99999) | int(base=16) }}",
    "large numbers divided": "{{ 0x" + "f" * 99999 + " // 0x" + "f" * 49999 + " }}",
    "a number of 100,000 digits": "{{ " + "9" * 100_000 + " }}",
    "25 loops in loops": "{% for i in [1] %}" * 25 + "{% endfor %}" * 25,
    "dates in every turn": turns("{% if strftime_now('%c' * 99) %}{% endif %}"),
    "escaping": "{% autoescape true %}{{ '&' * 9000000 }}{{ '&' * 9000000 }}{% endautoescape %}",
    "a refusal": "{{ raise_exception('Only user and assistant roles') }}",
    "something undefined": "{{ nope.nope }}",
    "a division by zero": "{{ 1 / 0 }}",
    "text and number": "{{ 'a' + 1 }}",
    "bad syntax": "{% for %}",
    "no end": "{{",
    "an unknown filter": "{{ 1 | nope }}",
    "an unknown tag": "{% do 1 %}",
}


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_template_that_does_harm_is_an_error(template: str) -> None:
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    with pytest.raises(
        ModelError, match=r"^model/chat_template\.jinja: the chat template failed: "
    ) as caught:
        ChatTemplate(template, "model/chat_template.jinja").render(HELLO)
    assert "\n" not in str(caught.value)
    # Both bounds are far from what is needed; without a budget these take minutes and gigabytes.
    assert time.perf_counter() - started < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000, "kilobytes"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ '' | attr('__class__') }}",
        "{{ self._TemplateReference__context }}",
        "{{ lipsum.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ joiner.__init__.__globals__ }}",
        "{{ strftime_now.__globals__ }}",
        "{{ nope.__class__ }}",
        "{{ (1).__class__.__base__ }}",
        "{{ [].__class__.__base__.__subclasses__() }}",
        "{{ messages[0].__getattribute__('pop') }}",
        "{{ messages[0]['content'].__add__.__self__.__class__ }}",
        "{{ messages | map(attribute='__class__') | join }}",
        "{{ messages | selectattr('__class__') | list | length or '' }}",
        "{{ (messages | map('upper')).gi_frame }}",
        "{% macro f() %}{% endmacro %}{{ f._func.__code__ }}",
        "{% for m in messages %}{{ loop.__class__ }}{% endfor %}",
        "{% set n = namespace(a='') %}{{ n._Namespace__attrs }}",
        "{{ ''.join.__self__.__class__ }}",
        "{{ '%s' | format(messages.__class__) }}",
        "{{ ('{0.' ~ '__class__}').format('') }}",
        "{{ '{a.__class__}'.format_map({'a': 1}) }}",
        "{{ messages | attr('append') | attr('__self__') | attr('__class__') }}",
        "{{ dict.__init__.__objclass__ }}",
        "{{ dict.fromkeys.__self__ }}",
    ],
)
def test_private_attributes_are_nothing_or_an_error(template: str) -> None:
    with suppress(ModelError):
        assert ChatTemplate(template, "x").render(HELLO) == ""


def test_a_refusal_says_why() -> None:
    with pytest.raises(ModelError, match="failed: Only user and assistant roles"):
        ChatTemplate(HOSTILE["a refusal"], "x").render(HELLO)


def test_a_failed_rendering_does_not_spoil_the_next() -> None:
    template = ChatTemplate(
        "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}{{ n }}", "x"
    )
    for _ in range(2):
        with pytest.raises(ModelError):
            template.render(HELLO, n=99999)
        assert template.render(HELLO, n=3) == "3"


@pytest.mark.parametrize("name", NAMES)
def test_long_chats_are_within_the_budget(name: str) -> None:
    many = [{"role": ("user", "assistant")[i % 2], "content": f"message {i} " * 20} for i in range(2001)]
    long = user("The capital of France is Paris.\n" * 30_000)
    for messages in (many, long):
        assert len(TEMPLATES[name].render(messages)) > 100 or name == "gpt2"


def test_the_budget_grows_with_the_input() -> None:
    assert Budget("x" * 1000).left == Budget([["x" * 500], "x" * 498]).left > MIN_BUDGET

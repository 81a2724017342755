"""Runs the Jinja templates that come with models: code written by strangers.

Jinja's sandbox keeps a template from reaching Python. Two things are added here. A budget
(:mod:`xinfer_vk.text.budget`) bounds what a template may do, so that one that loops or grows without end
is an error, not a hang. And every string knows its origin (:mod:`xinfer_vk.text.origin`), so that the
template's own markup can be told from the text it was given.

Both are put in where Jinja compiles a template: its literals become traced strings; the turns of its
loops, its calls, operators and lists go through the environment, which has the budget.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import TemplateError, nodes, pass_environment
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from xinfer_vk.text.budget import FORMATTING, Budget
from xinfer_vk.text.origin import TEMPLATE, Traced, concat

# For HTML pages or debugging; some take quadratic time.
REMOVED_FILTERS = ("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """One template's environment, with the filters and functions that ``transformers`` gives chat templates.

    Set ``budget`` before every rendering. One rendering at a time.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[loopcontrols, _GenerationTag]
        )
        self.budget = Budget()
        self.concat = concat  # type: ignore[assignment]
        self.finalize = self.printable
        self.filters.update(join=_join, tojson=_tojson)
        self.filters = {
            name: self._bounded(name, function)
            for name, function in self.filters.items()
            if name not in REMOVED_FILTERS
        }
        self.tests = {name: self._bounded_test(function) for name, function in self.tests.items()}
        self.globals.pop("lipsum", None)  # random text
        self.globals.update(
            dict=_dict, namespace=_Namespace, raise_exception=_raise_exception, strftime_now=_strftime_now
        )

    # -- what compiled templates call ---------------------------------------------------------------

    def step(self) -> bool:
        """A turn of a loop."""
        self.budget.spend()
        return True

    def made(self, value: Any) -> Any:
        """A value that was just made."""
        self.budget.spend_value(value)
        return value

    def compared(self, value: Any) -> Any:
        """A value that is about to be compared."""
        self.budget.spend(0 if isinstance(value, str) else self.budget.size(value))
        return value

    def printable(self, value: Any) -> str:
        """What ``{{ value }}`` prints."""
        self.budget.spend(self.budget.size(value))
        text = str(value)
        self.budget.spend(len(text))
        return text

    def joined(self, *parts: Any) -> str:
        """``a ~ b``."""
        return concat([self.printable(part) for part in parts])

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        name = getattr(function, "__name__", "")
        method = getattr(function, "__wrapped__", function) if name in FORMATTING else function
        if name == "join" and len(args) == 1 and not isinstance(args[0], (str, list, tuple)):
            args = (list(args[0]),)  # a generator can be measured only when it is done
        self.budget.check_call(name, getattr(method, "__self__", None), args, kwargs)
        return self.made(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.budget.check_operator(operator, left, right)
        return self.made(super().call_binop(context, operator, left, right))

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        passed = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context or environment, first

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            value = args[passed] if len(args) > passed else None
            self.budget.check_filter(name, value, args[passed + 1 :], kwargs)
            return self.made(function(*args, **kwargs))

        return bounded

    def _bounded_test(self, function: Any) -> Callable[..., Any]:
        @wraps(function)
        def bounded(*args: Any) -> Any:
            self.budget.check_test(args)
            return function(*args)

        return bounded

    # -- compilation ----------------------------------------------------------------------------------

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Instrument(self).visit(source), *args, **kwargs)

    def literal(self, text: str) -> nodes.EnvironmentAttribute:
        """An expression for a text of the template itself."""
        name = f"literal_{len(self.__dict__)}"
        setattr(self, name, Traced(text, TEMPLATE))
        return nodes.EnvironmentAttribute(name)


class _Instrument(NodeTransformer):
    """Rewrites a parsed template so that it traces its text and spends from the budget."""

    def __init__(self, environment: ChatEnvironment) -> None:
        self.environment = environment

    def _call(self, method: str, *args: nodes.Expr) -> nodes.Call:
        return nodes.Call(nodes.EnvironmentAttribute(method), list(args), [], None, None)

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        return self.environment.literal(node.value) if isinstance(node.value, str) else node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return self.environment.literal(node.data)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        node.node = self.visit(node.node)
        if not isinstance(node.arg, nodes.Const):  # a key is looked up, not printed
            node.arg = self.visit(node.arg)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call("joined", *node.nodes)

    def _visit_collection(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return self._call("made", node) if getattr(node, "ctx", "load") == "load" else node

    visit_List = visit_Tuple = visit_Dict = _visit_collection

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = self._call("compared", node.expr)
        for operand in node.ops:
            operand.expr = self._call("compared", operand.expr)
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        if node.test is not None:
            node.test = nodes.And(self._call("step"), node.test)
        node.body.insert(0, nodes.ExprStmt(self._call("step")))
        return node


class _GenerationTag(Extension):
    """``{% generation %}`` marks the model's words for training; what is inside is printed."""

    tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Jinja's ``namespace()``, without private names."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]  # so that "self" can be a name
        values = dict(*args, **kwargs)
        for name in values:
            _refuse_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:  # not what it holds: that has no bound
        return "<namespace>"


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold the private name {name!r}")


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """``dict()`` without the methods of the class, which would change what they are given."""
    return dict(*args, **kwargs)


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; Jinja's own filter escapes it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@pass_environment
def _join(environment: ChatEnvironment, value: Any, d: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    parts = [str(part) for part in value]
    environment.budget.check_join(str(d), parts)
    return (d if isinstance(d, Traced) else Traced(str(d))).join(parts)

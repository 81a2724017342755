"""Runs the Jinja templates that come with models: code written by strangers.

Jinja's sandbox keeps a template from reaching Python. Two things are added here. A budget
(:mod:`xinfer_vk.text.budget`) bounds what a template may do, so that one that loops or grows without end
is an error, not a hang. And every string knows its origin (:mod:`xinfer_vk.text.origin`), so that the
template's own markup can be told from the text it was given.

Both are put in where Jinja compiles a template: its literals become traced strings; the turns of its
loops, its calls, operators, slices and lists go through the environment, which has the budget. Attributes,
filters, tests and functions are those of :mod:`xinfer_vk.text.allowed`, paid for before they run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import TemplateError, nodes, pass_environment
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

from xinfer_vk.text.allowed import (
    FILTERS,
    FUNCTIONS,
    OWN_CODE,
    TESTS,
    Cost,
    attribute_cost,
    cheap,
    may_use,
)
from xinfer_vk.text.budget import ITEM_COST, LOOKUP_COST, Budget, check_literal
from xinfer_vk.text.origin import TEMPLATE, Traced, concat


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """One template's environment, with the filters and functions that ``transformers`` gives chat templates.

    Set ``budget`` before every rendering. One rendering at a time.
    """

    intercepted_unops = frozenset(ImmutableSandboxedEnvironment.default_unop_table)
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[loopcontrols, _GenerationTag]
        )
        self.budget = Budget()
        self.concat = concat  # type: ignore[assignment]
        self.finalize = self.printable
        self.filters.update(join=_join, tojson=_tojson)
        self.filters = {name: self._bounded(cost, self.filters[name]) for name, cost in FILTERS.items()}
        self.tests = {name: self._bounded_test(cost, self.tests[name]) for name, cost in TESTS.items()}
        functions: dict[str, Callable[..., Any]] = {
            "cycler": Cycler,
            "dict": _dict,
            "joiner": Joiner,
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "range": safe_range,
            "strftime_now": _strftime_now,
        }
        self.globals = dict(functions)
        self._function_costs = {id(function): FUNCTIONS[name] for name, function in functions.items()}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return super().is_safe_attribute(obj, attr, value) and may_use(obj, attr)

    # -- what compiled templates call ---------------------------------------------------------------

    def step(self) -> bool:
        """A turn of a loop."""
        self.budget.spend()
        return True

    def made(self, value: Any) -> Any:
        """A value that was just made."""
        self.budget.spend_value(value)
        return self.budget.items(value) if isinstance(value, Iterator) else value

    def compared(self, value: Any) -> Any:
        """A value that is about to be compared."""
        self.budget.spend(ITEM_COST)
        self.budget.spend_comparison(value)
        return value

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.budget.spend_key(argument)
        return super().getitem(obj, argument)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.budget.spend(LOOKUP_COST)
        return super().getattr(obj, attribute)

    def sliced(self, obj: Any, *bounds: Any) -> Any:
        """``obj[start:stop:step]``"""
        part = slice(*bounds)
        if hasattr(obj, "__len__"):
            self.budget.spend(len(range(*part.indices(len(obj)))))
        return self.made(obj[part])

    def printable(self, value: Any) -> str:
        """What ``{{ value }}`` prints."""
        self.budget.spend((1 if isinstance(value, str) else ITEM_COST) * self.budget.size(value))
        text = str(value)
        self.budget.spend(len(text))
        return text

    def joined(self, *parts: Any) -> str:
        """``a ~ b``."""
        return self.made(concat([self.printable(part) for part in parts]))

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        if getattr(function, "__self__", None) is self:  # what _Instrument put in; it pays for itself
            return function(*args)
        if not isinstance(function, Undefined):  # Jinja says what is undefined
            receiver, cost = self._cost_of(function)
            if args and getattr(function, "__name__", "") == "join" and isinstance(args[0], Iterator):
                args = (list(args[0]), *args[1:])  # it can be measured only when it is done
            cost(self.budget, receiver, args, kwargs)
        return self.made(super().call(context, function, *args, **kwargs))

    def _cost_of(self, function: Any) -> tuple[Any, Cost]:
        """What is called, as ``(receiver, cost)``. Raises :class:`SecurityError` if it is not on the list."""
        if isinstance(function, OWN_CODE):
            return None, cheap
        if id(function) in self._function_costs:
            return None, self._function_costs[id(function)]
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
        receiver, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        try:
            cost = attribute_cost(receiver, name)
        except KeyError:
            cost = None
        if cost is None:
            raise SecurityError(f"a {type(function).__name__} cannot be called in a chat template")
        return receiver, cost

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.budget.check_operator(operator, left, right)
        return self.made(super().call_binop(context, operator, left, right))

    def call_unop(self, context: Context, operator: str, arg: Any) -> Any:
        self.budget.spend()
        return super().call_unop(context, operator, arg)

    def _bounded(self, cost: Cost, function: Callable[..., Any]) -> Callable[..., Any]:
        passed = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context or environment, first

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            value = args[passed] if len(args) > passed else None
            cost(self.budget, value, args[passed + 1 :], kwargs)
            return self.made(function(*args, **kwargs))

        return bounded

    def _bounded_test(self, cost: Cost, function: Any) -> Callable[..., Any]:
        passed = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def bounded(*args: Any) -> Any:
            value = args[passed] if len(args) > passed else None
            cost(self.budget, value, args[passed + 1 :], {})
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
        check_literal(node.value)
        return self.environment.literal(node.value) if isinstance(node.value, str) else node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return self.environment.literal(node.data)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        node.node = self.visit(node.node)
        if isinstance(node.arg, nodes.Slice):
            bounds = (node.arg.start, node.arg.stop, node.arg.step)
            none = nodes.Const(None)
            return self._call(
                "sliced", node.node, *(self.visit(b) if b is not None else none for b in bounds)
            )
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
    parts = [environment.printable(part) for part in value]
    environment.budget.check_join(str(d), parts)
    return (d if isinstance(d, Traced) else Traced(str(d))).join(parts)

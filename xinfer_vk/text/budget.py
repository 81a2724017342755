"""How much a chat template may do: bounds on its time and memory, in units of work.

A step (a call, an operator, a turn of a loop) costs 100 units, a character or list item that is made
costs 1, one that a filter goes through 10. What would make more than is left is refused before it is made.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from jinja2 import TemplateError

STEP_COST = 100
FILTER_COST = 10
MIN_BUDGET = 10_000_000  # about a second
BUDGET_PER_UNIT = 100  # of input: long chats are more work
MAX_NUMBER_BITS = 4096
MAX_WIDTH = 100_000

# Functions, by name, whose result may be far larger than what they are given: by a number or a text.
PADDING = {"center", "expandtabs", "indent", "ljust", "rjust", "zfill"}
GROWING = frozenset(PADDING | {"batch", "round", "slice", "to_bytes", "tojson", "translate"})
FORMATTING = frozenset({"format", "format_map"})
CHEAP_FILTERS = frozenset({"count", "default", "d", "first", "last", "length"})  # however long their value


class BudgetError(TemplateError):
    """The template did more than any chat template needs to."""


class Budget:
    """What is left for one rendering of ``inputs``."""

    def __init__(self, inputs: Any = None) -> None:
        # Containers that were measured, kept alive so that no other takes their id. They do not change:
        # the sandbox is immutable.
        self._sizes: dict[int, tuple[Any, int]] = {}
        self.left = 1 << 62
        self.left = MIN_BUDGET + BUDGET_PER_UNIT * self.size(inputs)

    def spend(self, amount: int = STEP_COST) -> None:
        self.left -= amount
        if self.left < 0:
            raise BudgetError("it does too much work: an endless loop, or text that grows without end")

    def size(self, value: Any) -> int:
        """Characters and items in a value, as they would be printed.

        A list that holds one list twice, which holds another twice, and so on, is small in memory and
        exponentially large in print.
        """
        if isinstance(value, (str, bytes)):
            return len(value)
        if not isinstance(value, (list, tuple, dict)):
            return 1
        known = self._sizes.get(id(value))
        if known is None:
            parts: Iterable[Any] = [*value.keys(), *value.values()] if isinstance(value, dict) else value
            known = self._sizes[id(value)] = (value, 1 + sum(map(self.size, parts)))
        if known[1] > self.left:
            raise BudgetError("it makes a list that grows without end")
        return known[1]

    def spend_value(self, value: Any) -> None:
        """Pay for a value that was just made."""
        self.spend(STEP_COST + _length(value))
        self.size(value)

    # -- before something is made -------------------------------------------------------------------

    def check_filter(self, name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A filter is about to be applied to ``value``."""
        if name not in CHEAP_FILTERS:
            self.spend(FILTER_COST * _length(value))
        self.check_call(name, value, args, kwargs)

    def check_test(self, values: tuple[Any, ...]) -> None:
        """A test is about to compare these values, or look for one in another."""
        self.spend(sum(map(self.size, values)))

    def check_call(self, name: str, receiver: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A function is about to be called, the method ``name`` of ``receiver`` if it is a method."""
        values = (*args, *kwargs.values())
        if name in GROWING:
            factor = max((abs(v) if isinstance(v, int) else self.size(v) for v in values), default=1)
            if factor > MAX_WIDTH:
                raise BudgetError(f"{name} is asked for a larger result than chat templates need")
            self.spend(factor * self.size(receiver))
        elif name in FORMATTING:
            self.check_format(receiver, values)
        elif name == "replace" and isinstance(receiver, str) and len(values) >= 2:
            self.spend(receiver.count(str(values[0])) * self.size(values[1]))
        elif name == "join" and isinstance(receiver, str) and args:
            self.check_join(receiver, args[0])

    def check_join(self, separator: str, parts: Any) -> None:
        count = len(parts) if isinstance(parts, (list, tuple)) else 1
        self.spend(self.size(parts) + count * len(separator))

    def check_format(self, text: Any, values: Iterable[Any]) -> None:
        """Widths and precisions are numbers in the format, or values given for ``*`` or ``{:{}}``."""
        if isinstance(text, str) and (
            re.search(r"[0-9]{6}|:[^{}]*\{", text)
            or any(isinstance(v, int) and abs(v) > MAX_WIDTH for v in values)
        ):
            raise BudgetError("a format asks for a larger width than chat templates need")

    def check_operator(self, operator: str, left: Any, right: Any) -> None:
        if operator == "%" and isinstance(left, str):
            self.check_format(left, right if isinstance(right, tuple) else (right,))
        elif operator == "+":
            for side in (left, right):
                if isinstance(side, (str, bytes, list, tuple)):
                    self.spend(len(side))
        elif isinstance(left, int) and isinstance(right, int):
            if operator == "**":
                bits = left.bit_length() * abs(right)
            else:
                bits = left.bit_length() + right.bit_length()
            if bits > MAX_NUMBER_BITS:
                raise BudgetError("it computes with larger numbers than chat templates need")
        elif operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(count, int) and isinstance(sequence, (str, bytes, list, tuple)):
                    self.spend(max(count, 0) * max(len(sequence), 1))


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple, dict, range)) else 0

"""How much a chat template may do: bounds on its time and memory, in units of work.

A step (a call, an operator, a turn of a loop) costs 100 units, a look-up 30, an item that is made into an
object 10, a character that is copied 1. :mod:`xinfer_vk.text.allowed` lists the operations and their costs.
What would cost more than is left is refused before it runs. 10 million units take at most about a second
and 256 MB.
"""

from __future__ import annotations

import re
from collections.abc import ItemsView, Iterable, Iterator, KeysView, ValuesView
from typing import Any

from jinja2 import TemplateError

STEP_COST = 100
LOOKUP_COST = 30
ITEM_COST = 10
MIN_BUDGET = 10_000_000  # about a second
BUDGET_PER_UNIT = 100  # of input: long chats are more work
MAX_NUMBER_BITS = 4096
MAX_DIGITS = 4300  # of a number that is read from text, as Python has it
MAX_WIDTH = 100_000
MAX_INDENT = 16
TEXT_RATE = 8  # characters that are compared or hashed for one unit
CONTAINERS = (list, tuple, dict, KeysView, ValuesView, ItemsView)


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
        if isinstance(value, str):
            return len(value)
        if isinstance(value, range):
            return 1 + len(value)
        if not isinstance(value, CONTAINERS):
            return 1
        known = self._sizes.get(id(value))
        if known is None:
            parts: Iterable[Any] = [*value.keys(), *value.values()] if isinstance(value, dict) else value
            self.spend(2 * len(value))  # to measure it is work, too
            known = self._sizes[id(value)] = (value, 1 + sum(map(self.size, parts)))
        if known[1] > self.left:
            raise BudgetError("it makes a list that grows without end")
        return known[1]

    def depth(self, value: Any) -> int:
        """How many lists and objects are inside one another."""
        known: dict[int, int] = {}

        def look(part: Any) -> int:
            if not isinstance(part, (list, tuple, dict)):
                return 0
            if id(part) not in known:
                parts = part.values() if isinstance(part, dict) else part
                known[id(part)] = 1 + max(map(look, parts), default=0)
            return known[id(part)]

        return look(value)

    def spend_value(self, value: Any) -> None:
        """Pay for a value that was just made."""
        if isinstance(value, int):
            _check_number(value)
        per_item = ITEM_COST if isinstance(value, dict) else 1
        self.spend(STEP_COST + per_item * length(value))
        if isinstance(value, dict):  # keys are hashed, tuples with all that they hold
            self.spend(sum(self.size(key) for key in value if isinstance(key, tuple)))
        self.size(value)

    def spend_key(self, key: Any) -> None:
        """Pay for looking something up: a key is hashed."""
        self.spend(LOOKUP_COST + (len(key) // TEXT_RATE if isinstance(key, str) else self.size(key)))

    def spend_comparison(self, value: Any) -> None:
        self.spend(len(value) // TEXT_RATE if isinstance(value, str) else self.size(value))

    def items(self, values: Iterator[Any]) -> Iterator[Any]:
        """What a lazy filter makes, each item paid for when it is asked for."""
        for value in values:
            self.spend(ITEM_COST + length(value))
            yield value

    # -- before something is made -------------------------------------------------------------------

    def check_join(self, separator: str, parts: Any) -> None:
        self.spend(ITEM_COST * length(parts) + self.size(parts) + length(parts) * len(separator))

    def check_format(self, text: Any, values: Iterable[Any]) -> None:
        """Any field may print any value. Widths and precisions are numbers in the format, or values given
        for ``*`` or ``{:{}}``."""
        if not isinstance(text, str):
            self.spend(ITEM_COST * self.size(text))
            return
        values = tuple(values)
        self.spend(len(text))
        if re.search(r"[0-9]{6}|:[^{}]*\{", text) or any(
            isinstance(v, int) and abs(v) > MAX_WIDTH for v in values
        ):
            raise BudgetError("a format asks for a larger width than chat templates need")
        fields = text.count("%") + text.count("{")
        starred = max((abs(v) for v in values if isinstance(v, int)), default=0) if "*" in text else 0
        largest = max(map(self.size, values), default=1)
        self.spend(fields * (STEP_COST + starred + ITEM_COST * largest))
        self.spend(sum(int(width) for width in re.findall(r"[0-9]+", text)))

    def check_operator(self, operator: str, left: Any, right: Any) -> None:
        if operator == "%" and isinstance(left, str):
            self.check_format(left, right if isinstance(right, tuple) else (right,))
        elif operator == "+":
            for side in (left, right):
                if isinstance(side, (str, list, tuple)):
                    self.spend(len(side))
        elif operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(count, int) and isinstance(sequence, (str, list, tuple)):
                    self.spend(max(count, 0) * max(len(sequence), 1))
        if isinstance(left, int) and isinstance(right, int):
            _check_number(left, abs(right) if operator == "**" else 1)
            _check_number(right)


def check_literal(value: Any) -> None:
    """A number that stands in a template."""
    if isinstance(value, int):
        _check_number(value)


def _check_number(value: int, times: int = 1) -> None:
    if value.bit_length() * times > MAX_NUMBER_BITS:
        raise BudgetError("it computes with larger numbers than chat templates need")


def length(value: Any) -> int:
    """Items that a value has, without those of its items."""
    return len(value) if isinstance(value, (str, range, *CONTAINERS)) else 0

"""What a chat template may use, by list, and what each operation costs before it runs.

An attribute, filter, test or function that is not listed here is refused. A cost is a function of the
budget, the receiver (the value of a filter or test), and the arguments; it spends, or raises
:class:`BudgetError`, before the operation begins. So a new Python method is refused until someone writes
down its cost. Costs are upper bounds: what an operation reads, compares, hashes or makes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from jinja2.runtime import BlockReference, LoopContext, Macro
from jinja2.utils import Cycler, Joiner, Namespace

from xinfer_vk.text.budget import (
    ITEM_COST,
    MAX_DIGITS,
    MAX_INDENT,
    MAX_WIDTH,
    Budget,
    BudgetError,
    length,
)

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
Cost = Callable[[Budget, Any, Args, Kwargs], None]


def _value(args: Args, kwargs: Kwargs, position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


# -- costs -----------------------------------------------------------------------------------------------


def cheap(budget: Budget, receiver: Any, args: Args, kwargs: Kwargs) -> None:
    """Takes the same time whatever it is given; only the arguments themselves are paid for."""
    budget.spend(2 * ITEM_COST * (len(args) + len(kwargs)))


def shallow(budget: Budget, receiver: Any, args: Args, kwargs: Kwargs) -> None:
    """Goes through the items of the receiver, or makes one for each."""
    cheap(budget, receiver, args, kwargs)
    budget.spend(ITEM_COST * length(receiver))


def once(budget: Budget, receiver: Any, args: Args, kwargs: Kwargs) -> None:
    """Reads all that it is given once, however deep."""
    cheap(budget, receiver, args, kwargs)
    budget.spend(sum(map(budget.size, (receiver, *args, *kwargs.values()))))


def deep(budget: Budget, receiver: Any, args: Args, kwargs: Kwargs) -> None:
    """Prints, orders or hashes all that it is given, however deep; a character may become ten."""
    cheap(budget, receiver, args, kwargs)
    budget.spend(ITEM_COST * sum(map(budget.size, (receiver, *args, *kwargs.values()))))


def _search(budget: Budget, receiver: Any, args: Args, kwargs: Kwargs) -> None:
    """Searches from the right, and sets of characters, may take the product of both lengths."""
    once(budget, receiver, args, kwargs)
    budget.spend(length(receiver) * max(map(length, (*args, *kwargs.values())), default=0) // 16)


def _split(budget: Budget, receiver: Any, args: Args, kwargs: Kwargs) -> None:
    _search(budget, receiver, args, kwargs)
    separator = _value(args, kwargs, 0, "sep", None)
    if isinstance(separator, str) and separator:
        pieces = str.count(receiver, separator)
    else:
        pieces = len(receiver)
    budget.spend(2 * ITEM_COST * pieces)


def _width(budget: Budget, receiver: Any, args: Args, kwargs: Kwargs) -> int:
    """The largest number or text among the arguments."""
    values = (*args, *kwargs.values())
    width = max((abs(int(v)) if isinstance(v, (int, float)) else budget.size(v) for v in values), default=8)
    if width > MAX_WIDTH:
        raise BudgetError("it asks for a larger width than chat templates need")
    return width


def _padding(budget: Budget, receiver: Any, args: Args, kwargs: Kwargs) -> None:
    deep(budget, receiver, (), {})
    budget.spend(_width(budget, receiver, args, kwargs))


def _growing(budget: Budget, receiver: Any, args: Args, kwargs: Kwargs) -> None:
    """Each item or character may become as many as an argument says."""
    deep(budget, receiver, (), {})
    budget.spend(_width(budget, receiver, args, kwargs) * budget.size(receiver))


def _replace(budget: Budget, receiver: Any, args: Args, kwargs: Kwargs) -> None:
    deep(budget, receiver, args, kwargs)
    old, new = (str(_value(args, kwargs, i, name, "")) for i, name in enumerate(("old", "new")))
    places = str.count(str(receiver), old)
    budget.spend(places * (len(new) + 2 * ITEM_COST))


def _join_text(budget: Budget, receiver: Any, args: Args, kwargs: Kwargs) -> None:
    for parts in args:
        budget.check_join(receiver, parts)


def _format_text(budget: Budget, receiver: Any, args: Args, kwargs: Kwargs) -> None:
    deep(budget, None, args, kwargs)
    budget.check_format(receiver, (*args, *kwargs.values()))


def _number(budget: Budget, receiver: Any, args: Args, kwargs: Kwargs) -> None:
    cheap(budget, receiver, args, kwargs)
    if length(receiver) > MAX_DIGITS:
        raise BudgetError("it reads a larger number than chat templates need")


def _remainder(budget: Budget, receiver: Any, args: Args, kwargs: Kwargs) -> None:
    """The tests for numbers compute ``value % number``, which formats where the value is a text."""
    cheap(budget, receiver, args, kwargs)
    budget.check_operator("%", receiver, args[0] if args else 2)


def _sum(budget: Budget, receiver: Any, args: Args, kwargs: Kwargs) -> None:
    shallow(budget, receiver, args, kwargs)
    if not isinstance(_value(args, kwargs, 1, "start", 0), (int, float)):
        raise BudgetError("sum adds numbers only")  # each list that is added copies all before it


def _tojson(budget: Budget, receiver: Any, args: Args, kwargs: Kwargs) -> None:
    deep(budget, receiver, args, kwargs)
    indent, separators = _value(args, kwargs, 1, "indent", None), _value(args, kwargs, 2, "separators", None)
    width = indent if isinstance(indent, int) else length(indent)
    if abs(width) > MAX_INDENT or budget.size(separators) > MAX_INDENT:
        raise BudgetError("tojson is asked for more space than chat templates need")
    budget.spend(abs(width) * budget.depth(receiver) * budget.size(receiver))


def _changed(budget: Budget, receiver: Any, args: Args, kwargs: Kwargs) -> None:
    """Compares with the arguments of the call before."""
    once(budget, None, args, kwargs)


def _date(budget: Budget, receiver: Any, args: Args, kwargs: Kwargs) -> None:
    text = _value(args, kwargs, 0, "format", "")
    budget.spend(ITEM_COST * ITEM_COST * length(text))
    if isinstance(text, str) and re.search(r"[0-9]{4}", text):  # some C libraries read widths
        raise BudgetError("a date asks for a larger width than chat templates need")


def _mapping(budget: Budget, receiver: Any, args: Args, kwargs: Kwargs) -> None:
    """A copy of a mapping, whose keys are hashed."""
    once(budget, None, args, kwargs)
    budget.spend(ITEM_COST * (sum(map(length, args)) + len(kwargs)))


# -- attributes, by type -----------------------------------------------------------------------------------

# Attributes that are no methods: numbers and texts that are there.
PLAIN = None


def _all(names: str, cost: Cost | None) -> dict[str, Cost | None]:
    return dict.fromkeys(names.split(), cost)


NUMBER = _all("real imag numerator denominator", PLAIN)
SEQUENCE = _all("count index", deep)

ATTRIBUTES: Mapping[type, Mapping[str, Cost | None]] = {
    str: {
        **_all("capitalize casefold lower swapcase title upper", deep),
        **_all("count endswith find index removeprefix removesuffix startswith", once),
        **_all("isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric", once),
        **_all("isprintable isspace istitle isupper", once),
        **_all("lstrip partition rfind rindex rpartition rstrip strip", _search),
        **_all("rsplit split splitlines", _split),
        **_all("center ljust rjust zfill", _padding),
        "expandtabs": _growing,
        "replace": _replace,
        "join": _join_text,
        **_all("format format_map", _format_text),
    },
    list: {**SEQUENCE, "copy": shallow},
    tuple: {**SEQUENCE, **_all("grouper list", PLAIN)},  # the last two: of what groupby makes
    dict: {"get": _changed, **_all("items keys values", cheap), "copy": shallow},
    range: {**SEQUENCE, **_all("start stop step", PLAIN)},
    bool: NUMBER,
    int: {**NUMBER, "bit_length": cheap},
    float: {**_all("real imag", PLAIN), "is_integer": cheap},
    Cycler: {"current": PLAIN, **_all("next reset", cheap)},
    LoopContext: {
        **_all("depth depth0 first index index0 last length nextitem previtem revindex revindex0", PLAIN),
        "changed": _changed,
        "cycle": cheap,
    },
    BlockReference: {"super": PLAIN},
    Macro: _all("name arguments catch_kwargs catch_varargs caller", PLAIN),
    Joiner: {},
}


def attribute_cost(value: Any, name: str) -> Cost | None:
    """What a call of this attribute costs; ``PLAIN`` if it is no method. Raises KeyError if it is not to be
    used at all."""
    for kind in type(value).__mro__:
        if kind in ATTRIBUTES:
            return ATTRIBUTES[kind][name]
    raise KeyError(name)


def may_use(value: Any, name: str) -> bool:
    if isinstance(value, Namespace):  # holds what the template puts into it
        return not name.startswith("_")
    try:
        attribute_cost(value, name)
    except KeyError:
        return False
    return True


# -- filters, tests and functions, by name -------------------------------------------------------------

# Not listed: what is for HTML pages or debugging (pprint, striptags, urlize, wordwrap, xmlattr), and random.
FILTERS: Mapping[str, Cost] = {
    **_all("attr count d default first last length safe", cheap),  # type: ignore[dict-item]
    **_all("items list map reject rejectattr reverse select selectattr", shallow),  # type: ignore[dict-item]
    **_all("capitalize dictsort e escape forceescape groupby join lower max min", deep),  # type: ignore[dict-item]
    **_all("sort string title truncate unique upper urlencode wordcount", deep),  # type: ignore[dict-item]
    **_all("abs filesizeformat float int", _number),  # type: ignore[dict-item]
    **_all("batch indent round slice", _growing),  # type: ignore[dict-item]
    "center": _padding,
    "format": _format_text,
    "replace": _replace,
    "sum": _sum,
    "tojson": _tojson,
    "trim": _search,
}

TESTS: Mapping[str, Cost] = {
    **_all("boolean callable defined escaped false filter float integer iterable mapping", cheap),  # type: ignore[dict-item]
    **_all("none number sameas sequence string test true undefined", cheap),  # type: ignore[dict-item]
    **_all("!= < <= == > >= eq equalto ge greaterthan gt in le lessthan lt ne", once),  # type: ignore[dict-item]
    **_all("lower upper", deep),  # type: ignore[dict-item]
    **_all("divisibleby even odd", _remainder),  # type: ignore[dict-item]
}

FUNCTIONS: Mapping[str, Cost] = {
    **_all("cycler joiner range", cheap),  # type: ignore[dict-item]
    **_all("dict namespace", _mapping),  # type: ignore[dict-item]
    "raise_exception": deep,
    "strftime_now": _date,
}

# Objects that a template calls, and what runs in them is the template's own and paid for there.
OWN_CODE = (Macro, LoopContext, BlockReference, Joiner)

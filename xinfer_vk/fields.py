"""Typed reads from mappings that came out of a file, and nothing is believed.

A model's config and a GGUF file's metadata are written by strangers. Every read here says what type
and range it wants, and raises one :class:`~xinfer_vk.errors.ModelError` line that names the file, the
key and the value when it finds something else.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from xinfer_vk.errors import ModelError

SHOWN_CHARACTERS = 80
HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")  # or one of a pair


def quoted(value: object) -> str:
    """``value`` for an error message: one line, printable, and short whatever the file holds."""
    if isinstance(value, Mapping):
        return f"a mapping of {len(value)} keys"
    if isinstance(value, (list, tuple)) and len(value) > 8:
        return f"a list of {len(value)} values"
    if isinstance(value, str) and len(value) > SHOWN_CHARACTERS:
        value = value[:SHOWN_CHARACTERS] + "…"
    elif isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    text = ascii(value)
    return text if len(text) <= 2 * SHOWN_CHARACTERS else text[: 2 * SHOWN_CHARACTERS] + "…"


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object from bytes, as strictly as :func:`parse_json_value`."""
    out = parse_json_value(data, where)
    if not isinstance(out, dict):
        raise ModelError(f"{where}: holds a JSON {type(out).__name__}, an object was expected")
    return out


def parse_json_value(data: bytes, where: str) -> Any:
    """A JSON value from bytes, strictly.

    Refused besides bad syntax: text that is not UTF-8, a key that occurs twice in one object, NaN and
    infinities (which Python's parser takes), half of a surrogate pair (``\\ud800``), nesting deeper than the
    interpreter's stack.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ModelError(f"{where}: the key {quoted(twice)} occurs twice")
        return out

    def refuse_constant(name: str) -> float:
        raise ModelError(f"{where}: {name} is not a JSON number")

    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise ModelError(f"{where}: not UTF-8 text (byte {e.start})") from None
    try:
        value = json.loads(text, object_pairs_hook=unique, parse_constant=refuse_constant)
        if HALF_CHARACTER.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except UnicodeEncodeError as e:
        half = quoted(e.object[e.start])
        raise ModelError(f"{where}: not valid Unicode: {half} is half of a character") from None
    except json.JSONDecodeError as e:
        raise ModelError(f"{where}: not valid JSON: {e.msg} at line {e.lineno}, column {e.colno}") from None
    except RecursionError:
        raise ModelError(f"{where}: the JSON is nested too deeply") from None
    except ValueError:  # an integer with more digits than Python converts
        raise ModelError(f"{where}: a number in the JSON has too many digits") from None


def token_ids(value: Any, where: str) -> tuple[int, ...]:
    """A token id, a list of them, or None, as a tuple."""
    if value is None:
        return ()
    ids = value if isinstance(value, (list, tuple)) else [value]
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int):
            raise ModelError(f"{where} is {quoted(value)}, a token id or a list of them was expected")
    return tuple(ids)


class _Required:
    pass


REQUIRED: Final = _Required()


class Fields:
    """Typed reads by key. A key that is absent or ``null`` takes the default, as in transformers."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def raw(self, key: str, default: Any = REQUIRED) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is REQUIRED:
            raise ModelError(f"{self.where}: the key {quoted(key)} is missing")
        return default

    def wrong(self, key: str, wanted: str) -> ModelError:
        return ModelError(f"{self.where}: {key} is {quoted(self.values.get(key))}, {wanted}")

    def integer(self, key: str, default: Any = REQUIRED, *, low: int = 0, high: int = 2**31 - 1) -> int:
        """An integer in ``low..high``; the default is returned as it is."""
        value = self.raw(key, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, "an integer was expected")
        if not low <= value <= high:
            raise self.wrong(key, f"a value from {low} to {high} was expected")
        return value

    def number(self, key: str, default: Any = REQUIRED, *, low: float = 0.0, high: float = 1e30) -> float:
        """A finite number in ``low..high``, as float; the default is returned as it is."""
        value = self.raw(key, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(key, "a number was expected")
        if not (math.isfinite(value) if isinstance(value, float) else True) or not low <= value <= high:
            raise self.wrong(key, f"a number from {low:g} to {high:g} was expected")
        return float(value)

    def flag(self, key: str, default: Any = REQUIRED) -> bool:
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false was expected")
        return value

    def text(self, key: str, default: Any = REQUIRED) -> str:
        value = self.raw(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "text was expected")
        return value

    def choice(self, key: str, supported: Sequence[str], default: Any = REQUIRED) -> str:
        value = self.raw(key, default)
        if value not in supported:
            raise self.wrong(key, f"supported: {', '.join(supported)}")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id, a list of them, or nothing, as a tuple without repeats. They may be outside the
        vocabulary: some models carry -1 or a padding id there."""
        return tuple(dict.fromkeys(token_ids(self.values.get(key), f"{self.where}: {key}")))

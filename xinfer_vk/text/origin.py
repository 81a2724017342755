"""Text that knows where each of its characters comes from.

A chat template mixes its own markup with what people wrote, and only the markup may become control
tokens. Searching the finished text for the pieces cannot tell them apart: templates strip, split and
compare, and people can write markup too. So the strings carry the answer: :class:`Traced` is a ``str``
with a byte for every character, and the operations that templates use keep the two together. An operation
that is not here returns an ordinary ``str``, of unknown origin: what is lost is trust, never safety.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, SupportsIndex

UNKNOWN = 0  # an ordinary string: treated as if people had written it
USER = 1  # people wrote it
MODEL = 2  # the model wrote it earlier
TEMPLATE = 3  # the template's own text


class Traced(str):
    """A string with the origin of every character: ``origin_of(s)``, a byte each.

    As a value it is the string it is: it compares, hashes and measures like one.
    """

    __slots__ = ("_origin",)
    _origin: bytes

    def __new__(cls, text: str, origin: bytes | int = UNKNOWN) -> Traced:
        self = super().__new__(cls, text)
        self._origin = origin if isinstance(origin, bytes) else bytes([origin]) * len(text)
        assert len(self._origin) == len(self)
        return self

    def __str__(self) -> str:
        return self  # str(x) in a template must not lose the origin

    def __add__(self, other: str) -> str:
        if type(other) not in (str, Traced):  # jinja2's Markup has rules of its own
            return NotImplemented
        return Traced(str.__add__(self, other), self._origin + origin_of(other))

    def __radd__(self, other: str) -> str:
        if type(other) not in (str, Traced):
            return NotImplemented
        return Traced(str.__add__(other, self), origin_of(other) + self._origin)

    def __mul__(self, count: SupportsIndex) -> str:
        return Traced(str.__mul__(self, count), self._origin * count.__index__())

    __rmul__ = __mul__

    def __getitem__(self, key: Any) -> str:
        origin = self._origin[key]
        return Traced(str.__getitem__(self, key), origin)

    def __iter__(self) -> Iterator[str]:
        return (Traced(char, origin) for char, origin in zip(str.__iter__(self), self._origin))

    def __format__(self, spec: str) -> str:
        return self if not spec else str.__format__(self, spec)

    # -- methods that cut: what is left is a slice ---------------------------------------------

    def _slice(self, start: int, end: int) -> Traced:
        return Traced(str.__getitem__(self, slice(start, end)), self._origin[start:end])

    def strip(self, chars: str | None = None) -> str:  # type: ignore[override]
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> str:  # type: ignore[override]
        return self._slice(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None) -> str:  # type: ignore[override]
        return self._slice(0, len(str.rstrip(self, chars)))

    def removeprefix(self, prefix: str) -> str:
        return self._slice(len(prefix) if str.startswith(self, prefix) else 0, len(self))

    def removesuffix(self, suffix: str) -> str:
        return self._slice(0, len(self) - (len(suffix) if suffix and str.endswith(self, suffix) else 0))

    # -- methods that cut into several: the pieces are there in order ----------------------------

    def _pieces(self, pieces: Iterable[str], gap: int) -> list[str]:
        """``gap``: characters left out between two pieces, -1 if that differs."""
        out: list[str] = []
        at = 0
        for piece in pieces:
            if gap < 0:
                at = str.index(self, piece, at)
            out.append(self._slice(at, at + len(piece)))
            at += len(piece) + max(gap, 0)
        return out

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:  # type: ignore[override]
        return self._pieces(str.split(self, sep, maxsplit), -1 if sep is None else len(sep))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:  # type: ignore[override]
        return self._pieces(str.rsplit(self, sep, maxsplit), -1 if sep is None else len(sep))

    def splitlines(self, keepends: bool = False) -> list[str]:  # type: ignore[override]
        lines = self._pieces(str.splitlines(self, True), 0)
        if keepends:
            return lines
        return [line[: len(bare)] for line, bare in zip(lines, str.splitlines(self))]

    def partition(self, sep: str) -> tuple[str, str, str]:  # type: ignore[override]
        head, middle, tail = self._pieces(str.partition(self, sep), 0)
        return head, middle, tail

    def rpartition(self, sep: str) -> tuple[str, str, str]:  # type: ignore[override]
        head, middle, tail = self._pieces(str.rpartition(self, sep), 0)
        return head, middle, tail

    # -- methods that put together ---------------------------------------------------------------

    def join(self, parts: Iterable[str]) -> str:  # type: ignore[override]
        parts = list(parts)
        text = str.join(self, parts)
        return Traced(text, self._origin.join(origin_of(part) for part in parts))

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:  # type: ignore[override]
        if old == "":
            return str.replace(self, old, new, count)
        pieces, origins, at = str.split(self, old, count), [], 0
        for piece in pieces:
            origins.append(self._origin[at : at + len(piece)])
            at += len(piece) + len(old)
        return Traced(str.join(new, pieces), origin_of(new).join(origins))

    # -- methods that change characters one by one -----------------------------------------------

    def _same_length(self, text: str) -> str:
        return Traced(text, self._origin) if len(text) == len(self) else text

    def upper(self) -> str:
        return self._same_length(str.upper(self))

    def lower(self) -> str:
        return self._same_length(str.lower(self))

    def casefold(self) -> str:
        return self._same_length(str.casefold(self))

    def capitalize(self) -> str:
        return self._same_length(str.capitalize(self))

    def title(self) -> str:
        return self._same_length(str.title(self))

    def swapcase(self) -> str:
        return self._same_length(str.swapcase(self))


def origin_of(text: str) -> bytes:
    """The origin of every character of a string, a byte each."""
    return text._origin if isinstance(text, Traced) else bytes(len(text))


def traced(value: Any, origin: int) -> Any:
    """``value``, a tree of mappings, lists and plain values, with every text traced to ``origin``. Of any
    other object, whose methods a template could call, only the name of its type is left."""
    if isinstance(value, str):
        return Traced(value, origin)
    if isinstance(value, Mapping):
        return {key: traced(item, origin) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [traced(item, origin) for item in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return Traced(f"<{type(value).__name__}>", origin)


def concat(parts: Iterable[str]) -> str:
    """``"".join(parts)``, with origins."""
    return Traced("").join(parts)

"""A tensor as a model file holds it, and the checks every file format shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from xinfer_vk.errors import ModelError
from xinfer_vk.fields import quoted
from xinfer_vk.weights.formats import FORMATS
from xinfer_vk.weights.mapped import MappedFile

D = TypeVar("D", bound="DerivedTensor")

MAX_DIM = 2**31 - 1  # a dimension above is damage: no kernel could index it


@dataclass(frozen=True, eq=False)
class TensorInfo:
    """One tensor. Nothing is read until ``data`` is.

    ``shape`` is ``(rows, columns)`` or ``(n,)``, as Hugging Face has it; ``data`` is ``uint8 [bytes]``,
    a view of the mapped file. ``permuted_heads``: the rows are that many heads, each reordered for
    interleaved RoPE as llama.cpp's converter does to the queries and keys of Llama models; 0: in the
    usual (rotate-half) order. ``plus``: what is to be added to a vector's values, 1 where a norm's weight
    is stored as the w of ``1 + w``. ``order``: which input of the matrix each place of a row is for,
    ``int64 [columns]``; None: its own.
    """

    name: str
    shape: tuple[int, ...]
    fmt: str
    data: np.ndarray = field(repr=False)
    permuted_heads: int = 0
    plus: float = 0.0
    file: MappedFile | None = field(default=None, repr=False)
    start: int = 0  # of data in the file, bytes
    order: np.ndarray | None = field(default=None, repr=False)

    @property
    def permuted(self) -> bool:
        return self.permuted_heads > 0

    @property
    def where(self) -> str:
        """The file, for messages."""
        return str(self.file.path) if self.file else "the model"

    @property
    def row_bytes(self) -> int:
        return FORMATS[self.fmt].row_bytes(self.shape[-1])

    @property
    def files(self) -> tuple[MappedFile, ...]:
        """The files that it is read from."""
        return () if self.file is None else (self.file,)

    @property
    def bytes(self) -> int:
        """Of the whole tensor in format ``fmt``."""
        return element_count(self.shape[:-1]) * self.row_bytes

    def rows(self) -> np.ndarray:
        """All rows: ``uint8 [rows, row_bytes]``."""
        return self.data.reshape(-1, self.row_bytes)

    def read_rows(self, which: slice | np.ndarray) -> np.ndarray:
        """Some rows by number, in format ``fmt``: ``uint8 [n, row_bytes]``."""
        return self.rows()[which]

    def prefetch(self) -> None:
        if self.file is not None:
            self.file.prefetch(self.start, self.start + self.data.size)

    def release(self, start: int = 0, stop: int | None = None) -> None:
        """Give back the pages of ``data[start:stop]``."""
        if self.file is not None:
            stop = self.data.size if stop is None else stop
            self.file.release(self.start + start, self.start + stop)

    def release_rows(self, start: int, stop: int) -> None:
        """Give back the pages under rows ``start..stop``."""
        self.release(start * self.row_bytes, stop * self.row_bytes)


@dataclass(frozen=True, eq=False)
class DerivedTensor(TensorInfo):
    """A tensor whose rows are made from those of ``stored`` when they are asked for: ``read_rows`` of a
    subclass does it. ``data`` is what the file has."""

    stored: TensorInfo = field(kw_only=True)

    @classmethod
    def of(cls: type[D], stored: TensorInfo, **changes: Any) -> D:
        """``stored`` with other rows, and other fields."""
        fields = {name: getattr(stored, name) for name in TensorInfo.__dataclass_fields__}
        return cls(**{**fields, **changes}, stored=stored)

    @property
    def files(self) -> tuple[MappedFile, ...]:
        return self.stored.files

    def rows(self) -> np.ndarray:
        return self.read_rows(slice(None))

    def prefetch(self) -> None:
        self.stored.prefetch()

    def release(self, start: int = 0, stop: int | None = None) -> None:
        self.stored.release(start, stop)

    def release_rows(self, start: int, stop: int) -> None:
        self.stored.release_rows(start, stop)


def element_count(shape: Sequence[int]) -> int:
    """The product of the dimensions (Python's integers do not overflow)."""
    count = 1
    for dim in shape:
        count *= dim
    return count


def refuse_overlaps(spans: list[tuple[int, int, str]], where: str) -> None:
    """Each span is (first byte, byte after the last, tensor name); raises for two that share a byte."""
    spans = sorted(span for span in spans if span[1] > span[0])
    for (_, stop, name), (start, _, other) in pairwise(spans):
        if start < stop:
            raise ModelError(f"{where}: the tensors {quoted(name)} and {quoted(other)} overlap")

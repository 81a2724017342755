"""Puts a model's weights on the device: declare first, then upload once.

A family file declares every tensor it uses with its expected shape (:meth:`WeightPlanner.stack`,
:meth:`WeightPlanner.vector`) and keeps the handles; nothing is read but the file's tables, so a model
that does not fit is refused before anything is allocated. :meth:`WeightPlanner.upload` then allocates
a few large buffers ("arenas"), streams the file into them piece by piece, and gives the pages of the
file back behind itself: the peak is one copy of the weights and a few MB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from xinfer_vk.errors import ModelError
from xinfer_vk.fields import quoted
from xinfer_vk.kernels.base import Part, Ref, ceil_div
from xinfer_vk.kernels.experts import ExpertPart
from xinfer_vk.kernels.layout import ROWS, matrix_words, row_words
from xinfer_vk.plan import WORD_BYTES, Buffer, BufferKind, DeviceProfile, Runtime
from xinfer_vk.weights.formats import as_f32, pack_x8
from xinfer_vk.weights.grouped import GroupedTensor
from xinfer_vk.weights.source import ModelSource
from xinfer_vk.weights.tensors import TensorInfo

PIECE_BYTES = 2 << 20  # packed at a time: stays in a core's cache
ALIGN_WORDS = 64  # 256 bytes: what any device wants of a tensor's beginning
MAX_ARENA_BYTES = 1 << 30  # below every driver's limit for one allocation

FLOAT_FORMATS = ("f32", "f16", "bf16")


@dataclass(eq=False)
class Arena:
    """A buffer to be: ``words`` grows while weights are declared, ``buffer`` is there after upload."""

    name: str
    words: int = 0
    buffer: Buffer | None = None

    def reserve(self, words: int) -> int:
        """A place for ``words``; returns its offset."""
        offset = ceil_div(self.words, ALIGN_WORDS) * ALIGN_WORDS
        self.words = offset + words
        return offset

    def room(self, limit: int) -> int:
        return limit - ceil_div(self.words, ALIGN_WORDS) * ALIGN_WORDS

    def uploaded(self) -> Buffer:
        if self.buffer is None:
            raise RuntimeError("the weights are not on the device yet: call WeightPlanner.upload first")
        return self.buffer


class ArenaRef(Ref):
    """A :class:`Ref` into an arena that is allocated later."""

    def __init__(self, arena: Arena, offset: int) -> None:
        object.__setattr__(self, "arena", arena)
        object.__setattr__(self, "offset", offset)

    @property
    def buffer(self) -> Buffer:  # type: ignore[override]
        return self.arena.uploaded()  # type: ignore[attr-defined, no-any-return]


@dataclass(frozen=True)
class _Span:
    """Rows of a matrix in an arena, before the arena has a buffer."""

    arena: Arena
    offset: int  # words
    first_row: int
    rows: int


@dataclass(eq=False)
class Matrix:
    """A weight matrix ``[rows, cols]`` on the device, packed x8, in one or several parts by rows.

    It may be several tensors of the file stacked, or interleaved row by row. ``bias``: f32
    ``[rows]``, in the same order. ``order``: ``uint32 [cols]``, if its columns are not in the order of
    the inputs: place ``k`` of a row is for input ``order[k]``. ``parts`` may be asked for after the upload.
    """

    fmt: str
    rows: int
    cols: int
    tensors: tuple[TensorInfo, ...] = field(repr=False)
    interleaved: bool
    bias: Ref | None = None
    order: Ref | None = None
    spans: tuple[_Span, ...] = field(default=(), repr=False)

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(Part(s.arena.uploaded(), s.offset, s.first_row, s.rows) for s in self.spans)


@dataclass(frozen=True)
class _ExpertSpan:
    """Experts ``first .. first + count`` in an arena, before the arena has a buffer."""

    arena: Arena
    offset: int  # words
    first: int
    count: int


@dataclass(eq=False)
class ExpertMatrix:
    """The matrix ``[rows, cols]`` of every expert of a layer, ``matrices``, each in one part, ``words`` from
    one to the next. ``parts`` may be asked for after the upload."""

    fmt: str
    rows: int
    cols: int
    words: int
    matrices: tuple[Matrix, ...] = field(repr=False)
    spans: tuple[_ExpertSpan, ...] = field(repr=False)

    @property
    def parts(self) -> tuple[ExpertPart, ...]:
        return tuple(
            ExpertPart(s.arena.uploaded(), s.offset, s.first, s.count, self.words) for s in self.spans
        )


class WeightPlanner:
    """Declares and uploads the weights of ``source``; every tensor of the file must be asked for."""

    def __init__(self, source: ModelSource, profile: DeviceProfile) -> None:
        self.source = source
        limit = min(profile.max_storage_range_bytes, MAX_ARENA_BYTES)
        self._limit_words = limit // WORD_BYTES // ALIGN_WORDS * ALIGN_WORDS
        self._params = Arena("norms and biases")
        self._arenas: list[Arena] = []
        self._vectors: list[tuple[int, int, Callable[[], np.ndarray]]] = []  # offset, n, values
        self._orders: list[tuple[int, np.ndarray]] = []  # offset in the same arena, what stands there
        self._matrices: list[Matrix] = []
        self._used: set[str] = set()

    def stack(
        self, parts: Sequence[tuple[str, int]], cols: int, *, bias: bool = False, interleave: bool = False
    ) -> tuple[Matrix, ...]:
        """Declare matrices that are multiplied by the same input, as few as their formats allow.

        ``parts``: ``(name without ".weight", rows)`` of each, stacked by rows in this order where
        neighbours have the same format and order of columns. ``interleave``: if all have, row ``i`` of each
        stands side by side instead (gate and up of an MLP). ``bias``: each has a bias ``[rows]``.
        Raises :class:`ModelError` for a tensor that is missing or has another shape.
        """
        tensors = [self._tensor(f"{name}.weight", (rows, cols)) for name, rows in parts]
        biases = [self._tensor(f"{name}.bias", (rows,)) for name, rows in parts] if bias else []
        out = []
        at = 0
        for (fmt, order), run in groupby(tensors, key=_format_and_order):
            members = tuple(run)
            whole = len(members) == len(tensors) > 1
            matrix = Matrix(fmt, sum(t.shape[0] for t in members), cols, members, interleave and whole)
            matrix.spans = tuple(self._place(matrix))
            if biases:
                matrix.bias = self._vector(tuple(biases[at : at + len(members)]), matrix.interleaved)
            if order:
                matrix.order = self._order(np.frombuffer(order, np.int64))
            at += len(members)
            self._matrices.append(matrix)
            out.append(matrix)
        return tuple(out)

    def experts(
        self, name: str, count: int, parts: Sequence[tuple[str, int]], cols: int, *, interleave: bool = False
    ) -> tuple[ExpertMatrix, ...]:
        """Declare matrices of ``count`` experts that are multiplied by the same input, as few as their
        formats allow: tensors ``name.<expert>.<part>.weight``, as :meth:`stack` has them for each expert.

        Raises :class:`ModelError` for a tensor that is missing or has another shape, for formats that are
        not alike in all experts, and for an expert that no buffer of the device holds.
        """
        tensors = [
            [self._tensor(f"{name}.{expert}.{part}.weight", (rows, cols)) for part, rows in parts]
            for expert in range(count)
        ]
        for alike in zip(*tensors):
            _refuse_unlike(alike)
        out = []
        for fmt, run in groupby(range(len(parts)), key=lambda i: tensors[0][i].fmt):
            members = tuple(run)
            rows, whole = sum(parts[i][1] for i in members), len(members) == len(parts) > 1
            words = ceil_div(matrix_words(fmt, rows, cols), ALIGN_WORDS) * ALIGN_WORDS
            spans = tuple(self._place_experts(f"{name}.0.{parts[members[0]][0]}", count, words))
            matrices = []
            for span in spans:
                for i in range(span.count):
                    chosen = tuple(tensors[span.first + i][k] for k in members)
                    matrix = Matrix(fmt, rows, cols, chosen, interleave and whole)
                    matrix.spans = (_Span(span.arena, span.offset + i * words, 0, rows),)
                    matrices.append(matrix)
            self._matrices += matrices
            out.append(ExpertMatrix(fmt, rows, cols, words, tuple(matrices), spans))
        return tuple(out)

    def vector(self, name: str, n: int, *, scale: float = 1.0) -> Ref:
        """Declare a vector ``[n]``, which is f32 on the device whatever float the file has, times
        ``scale``."""
        return self._vector((self._tensor(name, (n,)),), False, scale)

    @property
    def total_bytes(self) -> int:
        """Bytes on the device of all that was declared."""
        return sum(arena.words for arena in (self._params, *self._arenas)) * WORD_BYTES

    def check(self) -> None:
        """Raises :class:`ModelError` for a tensor in the file that nothing asked for."""
        self._refuse_unused()

    def upload(self, runtime: Runtime, progress: Callable[[int, int], None] | None = None) -> None:
        """Allocate the arenas and fill them. ``progress(done, total)`` counts bytes.

        Raises :class:`ModelError` for a tensor in the file that nothing asked for, and
        :class:`OutOfMemoryError` from the runtime, after freeing what was allocated.
        """
        self.check()
        runtime.require_free(self.total_bytes, f"loading {self.source.name}")
        arenas = [arena for arena in (self._params, *self._arenas) if arena.words]
        try:
            for arena in arenas:
                arena.buffer = runtime.allocate(arena.name, arena.words, BufferKind.WEIGHTS)
            done, total = 0, self.total_bytes
            with runtime.uploads():
                for words in self._write_all(runtime):
                    done += words * WORD_BYTES
                    if progress is not None:
                        progress(min(done, total), total)
            if progress is not None:
                progress(total, total)
        except BaseException:
            self.free(runtime)
            raise

    def free(self, runtime: Runtime) -> None:
        """Give the device memory back."""
        for arena in (self._params, *self._arenas):
            if arena.buffer is not None:
                runtime.free(arena.buffer)
                arena.buffer = None

    def _tensor(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        tensor = self.source.tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self.source.path}: the tensor {quoted(name)} is missing")
        if tensor.shape != shape:
            raise ModelError(
                f"{tensor.where}: the tensor {quoted(name)} has shape {list(tensor.shape)}, the config says "
                f"{list(shape)}"
            )
        if len(shape) == 1 and tensor.fmt not in FLOAT_FORMATS:
            raise ModelError(
                f"{tensor.where}: the vector {quoted(name)} is {tensor.fmt}, supported: "
                f"{', '.join(FLOAT_FORMATS)}"
            )
        self._used.add(name)
        return tensor

    def _refuse_unused(self) -> None:
        unused = sorted(set(self.source.tensors) - self._used)
        if unused == ["lm_head.weight"] and self.source.config.tie_word_embeddings:
            # Some checkpoints store the tied head too. What it says must be what we use.
            head, embedding = (
                self.source.tensors["lm_head.weight"],
                self.source.tensors["model.embed_tokens.weight"],
            )
            if not _same_bytes(head, embedding):
                raise ModelError(
                    f"{self.source.path}: tie_word_embeddings is true, but lm_head.weight differs from the "
                    "embedding: set it to false in config.json to use the head that is there"
                )
            unused = []
        unused = [name for name in unused if not self._is_empty_bias(name)]
        if unused:
            more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            raise ModelError(
                f"{self.source.path}: the tensor {quoted(unused[0])}{more} has no place in a "
                f"{self.source.config.architecture} model of this config"
            )

    def _is_empty_bias(self, name: str) -> bool:
        """Whether it is the zeros that AutoGPTQ stores where a quantized matrix has no bias."""
        weight = self.source.tensors.get(name.removesuffix("bias") + "weight")
        bias = self.source.tensors[name]
        return name.endswith(".bias") and isinstance(weight, GroupedTensor) and not bias.data.any()

    def _vector(self, tensors: tuple[TensorInfo, ...], interleaved: bool, scale: float = 1.0) -> Ref:
        n = sum(t.shape[0] for t in tensors)
        offset = self._params.reserve(n)
        self._vectors.append((offset, n, lambda: _vector_values(tensors, interleaved, scale)))
        return ArenaRef(self._params, offset)

    def _order(self, order: np.ndarray) -> Ref:
        offset = self._params.reserve(order.size)
        self._orders.append((offset, order.astype(np.uint32)))
        return ArenaRef(self._params, offset)

    def _place(self, matrix: Matrix) -> Iterator[_Span]:
        """Find room for a matrix: whole if it fits into an arena, else in parts of equal size."""
        group_words = ROWS * row_words(matrix.fmt, matrix.cols)
        per_arena = self._limit_words // group_words
        if per_arena == 0:
            first_name = matrix.tensors[0].name
            raise ModelError(
                f"{self.source.path}: eight rows of {quoted(first_name)} take {group_words * WORD_BYTES} "
                f"bytes, a buffer of this device holds {self._limit_words * WORD_BYTES}"
            )
        groups = ceil_div(matrix.rows, ROWS)
        count = ceil_div(groups, per_arena)
        per_part = ceil_div(groups, count)
        for first in range(0, groups, per_part):
            arena, offset = self._reserve(min(per_part, groups - first) * group_words)
            rows = min(per_part * ROWS, matrix.rows - first * ROWS)
            yield _Span(arena, offset, first * ROWS, rows)

    def _place_experts(self, name: str, count: int, words: int) -> Iterator[_ExpertSpan]:
        """Find room for ``count`` experts of ``words`` each: together if they fit into an arena, else in
        parts of equal size."""
        per_arena = self._limit_words // words
        if per_arena == 0:
            raise ModelError(
                f"{self.source.path}: the expert matrix {quoted(name)} takes {words * WORD_BYTES} bytes, a "
                f"buffer of this device holds {self._limit_words * WORD_BYTES}"
            )
        per_part = ceil_div(count, ceil_div(count, per_arena))
        for first in range(0, count, per_part):
            here = min(per_part, count - first)
            yield _ExpertSpan(*self._reserve(here * words), first, here)

    def _reserve(self, words: int) -> tuple[Arena, int]:
        """The first arena with room for ``words``, and where."""
        arena = next((a for a in self._arenas if a.room(self._limit_words) >= words), None)
        if arena is None:
            arena = Arena(f"weights {len(self._arenas)}")
            self._arenas.append(arena)
        return arena, arena.reserve(words)

    def _write_all(self, runtime: Runtime) -> Iterator[int]:
        """Write everything; yields the words of each piece after it is written."""
        for tensor in self._matrices[0].tensors if self._matrices else ():
            tensor.prefetch()
        for offset, n, values in self._vectors:
            runtime.write(self._params.uploaded(), offset, values().view(np.uint32))
            yield n
        for offset, order in self._orders:
            runtime.write(self._params.uploaded(), offset, order)
            yield order.size
        for matrix, following in zip(self._matrices, [*self._matrices[1:], None]):
            for tensor in following.tensors if following is not None else ():
                tensor.prefetch()  # so that the disk reads on while this one is packed
            words_per_row = row_words(matrix.fmt, matrix.cols)
            piece = max(1, PIECE_BYTES // WORD_BYTES // words_per_row // ROWS) * ROWS
            for span in matrix.spans:
                for row in range(0, span.rows, piece):
                    count = min(piece, span.rows - row)
                    rows = gather_rows(matrix.tensors, matrix.interleaved, span.first_row + row, count)
                    packed = pack_x8(matrix.fmt, rows, matrix.cols)
                    runtime.write(
                        span.arena.uploaded(), span.offset + row * words_per_row, packed.reshape(-1)
                    )
                    release_rows(matrix.tensors, matrix.interleaved, span.first_row + row, count)
                    yield packed.size
            for tensor in matrix.tensors:
                tensor.release()


def _refuse_unlike(tensors: Sequence[TensorInfo]) -> None:
    """Experts are multiplied by one kernel and one input: in one format, their columns in its order."""
    for tensor in tensors:
        if tensor.fmt != tensors[0].fmt:
            raise ModelError(
                f"{tensor.where}: {quoted(tensor.name)} is {tensor.fmt} and {quoted(tensors[0].name)} is "
                f"{tensors[0].fmt}: only experts of one format are supported"
            )
        if tensor.order is not None:
            raise ModelError(
                f"{tensor.where}: {quoted(tensor.name)} has its columns in an order of its own (desc_act), "
                "which is not supported for experts: use a checkpoint with desc_act false"
            )


def _format_and_order(tensor: TensorInfo) -> tuple[str, bytes]:
    return tensor.fmt, b"" if tensor.order is None else tensor.order.tobytes()


def gather_rows(tensors: Sequence[TensorInfo], interleaved: bool, first: int, count: int) -> np.ndarray:
    """Rows ``first .. first + count`` of the stacked or interleaved tensors: ``uint8 [count, row_bytes]``.

    A view of the file where the rows lie together there, else a copy.
    """
    if interleaved:
        out = np.empty((count, tensors[0].row_bytes), np.uint8)
        for lane, start, stop in _lanes(len(tensors), first, count):
            out[(lane - first) % len(tensors) :: len(tensors)] = _ordered_rows(tensors[lane], start, stop)
        return out
    pieces = [_ordered_rows(t, start, stop) for t, start, stop in _overlaps(tensors, first, count)]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def release_rows(tensors: Sequence[TensorInfo], interleaved: bool, first: int, count: int) -> None:
    """Give back the file's pages under those rows."""
    if interleaved:
        used = [(tensors[lane], start, stop) for lane, start, stop in _lanes(len(tensors), first, count)]
    else:
        used = list(_overlaps(tensors, first, count))
    for tensor, start, stop in used:
        if not tensor.permuted:  # those rows were read out of order; they go with the whole tensor
            tensor.release_rows(start, stop)


def _lanes(tensors: int, first: int, count: int) -> Iterator[tuple[int, int, int]]:
    """(tensor, first row, row after the last) of each tensor's share in interleaved rows."""
    for lane in range(tensors):
        yield lane, ceil_div(first - lane, tensors), ceil_div(first + count - lane, tensors)


def _overlaps(tensors: Sequence[TensorInfo], first: int, count: int) -> Iterator[tuple[TensorInfo, int, int]]:
    """(tensor, first row, row after the last) of each stacked tensor that has some of the rows."""
    base = 0
    for tensor in tensors:
        start, stop = max(first - base, 0), min(first + count - base, tensor.shape[0])
        if start < stop:
            yield tensor, start, stop
        base += tensor.shape[0]


def _ordered_rows(tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
    return tensor.read_rows(_permuted_index(tensor, start, stop) if tensor.permuted else slice(start, stop))


def _permuted_index(tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
    """Where the file has rows ``start..stop`` of a tensor whose heads are in interleaved RoPE order.

    The converter put row ``half * d/2 + j`` of each head of ``d`` rows at ``2 j + half``.
    """
    row = np.arange(start, stop)
    dim = tensor.shape[0] // tensor.permuted_heads
    within = row % dim
    half, j = within // (dim // 2), within % (dim // 2)
    return row - within + 2 * j + half


def _vector_values(tensors: Sequence[TensorInfo], interleaved: bool, scale: float = 1.0) -> np.ndarray:
    """Vectors stacked or interleaved, times ``scale``, float32 ``[n]``."""
    values = []
    for tensor in tensors:
        v = as_f32(tensor.fmt, tensor.data)
        if tensor.plus or scale != 1.0:
            v = (v + np.float32(tensor.plus)) * np.float32(scale)
        values.append(v[_permuted_index(tensor, 0, v.size)] if tensor.permuted else v)
    return np.ascontiguousarray(
        np.stack(values, axis=1).reshape(-1) if interleaved else np.concatenate(values)
    )


def _same_bytes(a: TensorInfo, b: TensorInfo) -> bool:
    if a.shape != b.shape or a.fmt != b.fmt:
        return False
    for start in range(0, a.data.size, PIECE_BYTES):
        stop = start + PIECE_BYTES
        if not np.array_equal(a.data[start:stop], b.data[start:stop]):
            return False
        a.release(start, stop)
        b.release(start, stop)
    return True

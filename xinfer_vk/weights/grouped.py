"""Weights of GPTQ and AWQ checkpoints: integers with a scale and a zero for every group of columns.

A quantized ``Linear`` ``y = W x`` with W ``[N, K]`` is three tensors, of which ``weight`` is made here:
``W[n, k] = scales[g, n] * (q[k, n] - zeros[g, n])``, where column ``k`` is in group ``g``. All have the rows
of W side by side, so a row is gathered from the whole tensor.

=========  ============================  ==============================  ==================
tensor     GPTQ                          AWQ (GEMM)                      what it holds
=========  ============================  ==============================  ==================
qweight    int32 ``[K bits / 32, N]``    int32 ``[K, N / 8]``            q
qzeros     int32 ``[G, N bits / 32]``    int32 ``[G, N / 8]``            zeros
scales     float ``[G, N]``              float ``[G, N]``                scales
g_idx      int ``[K]``, or absent        absent                          group of each column
=========  ============================  ==============================  ==================

GPTQ (Frantar et al. 2022) packs along the first dimension of qweight and the second of qzeros, lowest bits
first; its first format stores ``zeros - 1`` (modulo 2^bits, as AutoGPTQ decodes it), "gptq_v2" the zeros.
AWQ (Lin et al. 2023) packs along the second dimension, eight of N in the order :data:`AWQ_ORDER`.

With activation order (``desc_act``) a group's columns lie anywhere. They are sorted by group here, and the
kernels get the inputs in that order (``order``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from xinfer_vk.errors import ModelError
from xinfer_vk.fields import quoted
from xinfer_vk.kernels.layout import BLOCK, GROUP_LAYOUTS, row_words
from xinfer_vk.plan import WORD_BYTES
from xinfer_vk.weights.formats import as_f32
from xinfer_vk.weights.mapped import MappedFile
from xinfer_vk.weights.quantization_config import Quantization
from xinfer_vk.weights.tensors import MAX_DIM, TensorInfo

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight neighbours the lowest, second lowest, … bits hold
INTEGERS = "i32"  # the format of a tensor that is no weight by itself
LONG_INTEGERS = "i64"  # the same for the groups of columns, as some programs write them


@dataclass(frozen=True, eq=False)
class GroupedTensor(TensorInfo):
    """A weight whose rows are made when they are asked for, in the words of its device format and in the
    order of ``order``."""

    quantization: Quantization = field(kw_only=True)
    qweight: TensorInfo = field(kw_only=True, repr=False)
    qzeros: TensorInfo = field(kw_only=True, repr=False)
    scales: TensorInfo = field(kw_only=True, repr=False)

    @property
    def files(self) -> tuple[MappedFile, ...]:
        return (*self.qweight.files, *self.qzeros.files, *self.scales.files)

    @property
    def row_bytes(self) -> int:
        return row_words(self.fmt, self.shape[1]) * WORD_BYTES

    def prefetch(self) -> None:
        for tensor in (self.qweight, self.qzeros, self.scales):
            tensor.prefetch()

    def release(self, start: int = 0, stop: int | None = None) -> None:
        for tensor in (self.qweight, self.qzeros, self.scales):
            tensor.release()

    def release_rows(self, start: int, stop: int) -> None:
        """Rows have no pages of their own."""

    def rows(self) -> np.ndarray:
        return self.read_rows(slice(None))

    def read_rows(self, which: slice | np.ndarray) -> np.ndarray:
        """Raises :class:`ModelError` for a scale that is no finite f16."""
        if not isinstance(which, slice):
            return self.rows()[which]
        start, stop, _ = which.indices(self.shape[0])
        layout, cols = GROUP_LAYOUTS[self.fmt], self.shape[1]
        words = np.zeros((row_words(self.fmt, cols), stop - start), np.uint32)
        scales, zeros = self._scales(start, stop), self._zeros(start, stop)  # [G, rows]
        for g in range(len(scales)):
            chunk, i = divmod(g, layout.zeros)
            at = chunk * layout.chunk_words
            words[at] |= zeros[g].astype(np.uint32) << np.uint32(layout.bits * i)
            words[at + 1 + i // 2] |= scales[g].view(np.uint16).astype(np.uint32) << np.uint32(16 * (i % 2))
        words[layout.scale_words(cols) :] = self._weights(start, stop)
        return np.ascontiguousarray(words.T).view(np.uint8)

    def _weights(self, start: int, stop: int) -> np.ndarray:
        """Words of weights, the same for neighbouring rows side by side: ``uint32 [words, rows]``."""
        q = self._integers(start, stop)
        if self.order is not None:
            q = q[self.order]
        if self.quantization.bits == 8:
            return _joined((q ^ np.uint8(0x80)).reshape(-1, 4, stop - start))
        halves = q.reshape(-1, 2, 4, 4, stop - start)  # [block of 32][half][word][byte][row]
        pairs = halves[:, 0] | halves[:, 1] << np.uint8(4)
        return _joined(pairs.reshape(-1, 4, stop - start))

    def _integers(self, start: int, stop: int) -> np.ndarray:
        """q: ``uint8 [K, rows]``"""
        quantization, words = self.quantization, _words(self.qweight)
        if quantization.method == "awq":
            return _columns(words, start, stop, 4, AWQ_ORDER)
        return _split(words[:, start:stop], quantization.bits).reshape(-1, stop - start)

    def _zeros(self, start: int, stop: int) -> np.ndarray:
        """Zeros as the device has them: ``uint8 [G, rows]``"""
        quantization = self.quantization
        order = AWQ_ORDER if quantization.method == "awq" else tuple(range(32 // quantization.bits))
        zeros = _columns(_words(self.qzeros), start, stop, quantization.bits, order)
        zeros = zeros + np.uint8(quantization.zero_offset) & np.uint8((1 << quantization.bits) - 1)
        return zeros ^ np.uint8(0x80) if quantization.bits == 8 else zeros

    def _scales(self, start: int, stop: int) -> np.ndarray:
        """f16 ``[G, rows]``"""
        values = as_f32(self.scales.fmt, self.scales.data).reshape(self.scales.shape)[:, start:stop]
        with np.errstate(over="ignore"):
            halves = values.astype(np.float16)
        wrong = ~np.isfinite(halves) | (halves.astype(np.float32) != values)
        if wrong.any():
            raise ModelError(
                f"{self.scales.where}: the tensor {quoted(self.scales.name)} holds the scale "
                f"{values[wrong][0]}, finite f16 numbers were expected"
            )
        return halves


def grouped_tensors(tensors: Mapping[str, TensorInfo], quantization: Quantization) -> dict[str, TensorInfo]:
    """The tensors of a checkpoint with those of each quantized module replaced by its ``weight``.

    Nothing but the groups of columns is read. Raises :class:`ModelError` for a tensor that is missing, has
    another shape than its neighbours, or is an integer that belongs to no module.
    """
    out = dict(tensors)
    modules = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    for module in modules:
        if module.endswith("embed_tokens"):
            raise ModelError(
                f"{tensors[f'{module}.qweight'].where}: the embedding {quoted(module)} is quantized, and "
                "only linear layers are supported: quantize the model without it"
            )
        weight = _grouped(module, tensors, quantization)
        if weight.name in out:
            raise ModelError(f"{weight.where}: {quoted(module)} has both a qweight and a weight")
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            out.pop(f"{module}.{part}", None)
        out[weight.name] = weight
    for name, tensor in out.items():
        if tensor.fmt in (INTEGERS, LONG_INTEGERS):
            fmt = tensor.fmt.upper()
            raise ModelError(f"{tensor.where}: the tensor {quoted(name)} is {fmt} and belongs to no qweight")
    if not modules:
        where = next(iter(tensors.values())).where if tensors else "the model"
        raise ModelError(f"{where}: quant_method is {quantization.method}, but no tensor is a qweight")
    return out


def _grouped(module: str, tensors: Mapping[str, TensorInfo], quantization: Quantization) -> GroupedTensor:
    def part(kind: str) -> TensorInfo:
        name = f"{module}.{kind}"
        tensor = tensors.get(name)
        if tensor is None:
            raise ModelError(f"{tensors[f'{module}.qweight'].where}: the tensor {quoted(name)} is missing")
        integers = tensor.fmt == INTEGERS or (tensor.fmt == LONG_INTEGERS and kind == "g_idx")
        if integers == (kind == "scales") or (kind == "scales" and tensor.fmt == LONG_INTEGERS):
            kinds = "floats were" if kind == "scales" else "I32 was"
            raise ModelError(f"{tensor.where}: the tensor {quoted(name)} is {tensor.fmt}, {kinds} expected")
        return tensor

    def require(tensor: TensorInfo, *shape: int) -> None:
        if tensor.shape != shape:
            raise ModelError(
                f"{tensor.where}: the tensor {quoted(tensor.name)} has shape {list(tensor.shape)}, "
                f"{list(shape)} was expected beside {module}.qweight"
            )

    qweight, qzeros, scales = part("qweight"), part("qzeros"), part("scales")
    if len(qweight.shape) != 2 or 0 in qweight.shape:
        raise ModelError(
            f"{qweight.where}: the tensor {quoted(qweight.name)} has shape {list(qweight.shape)}, a matrix "
            "was expected"
        )
    per_word = 32 // quantization.bits
    rows, cols = qweight.shape[1], qweight.shape[0] * per_word
    if quantization.method == "awq":
        rows, cols = qweight.shape[1] * per_word, qweight.shape[0]
    if cols % BLOCK or rows % per_word or max(rows, cols) > MAX_DIM:
        raise ModelError(
            f"{qweight.where}: {quoted(module)} has {cols} columns and {rows} rows: multiples of {BLOCK} and "
            f"{per_word} were expected"
        )
    groups = GROUP_LAYOUTS[quantization.fmt].groups(cols)
    require(qzeros, groups, rows // per_word)
    require(scales, groups, rows)
    order = None
    if quantization.needs_order or f"{module}.g_idx" in tensors:
        g_idx = part("g_idx")
        require(g_idx, cols)
        order = _order(g_idx, quantization.group, groups)
    return GroupedTensor(
        f"{module}.weight", (rows, cols), quantization.fmt, qweight.data, file=qweight.file,
        start=qweight.start, order=order, quantization=quantization, qweight=qweight, qzeros=qzeros,
        scales=scales,
    )  # fmt: skip


def _order(g_idx: TensorInfo, group: int, groups: int) -> np.ndarray | None:
    """The columns sorted by group; None if they are."""
    of_column = g_idx.data.view("<i8" if g_idx.fmt == LONG_INTEGERS else "<i4").reshape(g_idx.shape)
    wrong = of_column[(of_column < 0) | (of_column >= groups)]
    if wrong.size:
        raise ModelError(
            f"{g_idx.where}: the tensor {quoted(g_idx.name)} names group {wrong[0]}, there are {groups}"
        )
    order = np.argsort(of_column, kind="stable")
    if not np.array_equal(of_column[order], np.arange(order.size) // group):
        counts = np.bincount(of_column, minlength=groups)
        sizes = np.minimum(group, order.size - np.arange(groups) * group)
        at = int(np.flatnonzero(counts != sizes)[0])
        raise ModelError(
            f"{g_idx.where}: the tensor {quoted(g_idx.name)} puts {counts[at]} columns into group {at}, "
            f"{sizes[at]} were expected"
        )
    return None if np.array_equal(order, np.arange(order.size)) else order


def _words(tensor: TensorInfo) -> np.ndarray:
    """An integer tensor's values, ``uint32`` in its shape."""
    return tensor.data.view("<u4").reshape(tensor.shape)


def _split(words: np.ndarray, bits: int) -> np.ndarray:
    """Words ``[n, m]`` -> their integers, lowest bits first: ``uint8 [n, 32 / bits, m]``."""
    n, m = words.shape
    out = np.empty((n, 32 // bits, m), np.uint8)
    for i in range(32 // bits):
        out[:, i] = words >> np.uint32(bits * i) & np.uint32((1 << bits) - 1)
    return out


def _columns(words: np.ndarray, start: int, stop: int, bits: int, order: tuple[int, ...]) -> np.ndarray:
    """Columns ``start..stop`` of integers packed along the second dimension: words ``[n, m]`` -> ``uint8
    [n, stop - start]``. ``order``: which of a word's columns each of its integers is."""
    per_word = 32 // bits
    first = start // per_word
    split = _split(words[:, first : -(-stop // per_word)], bits)  # [n, place, word]
    out = np.empty((len(words), split.shape[2], per_word), np.uint8)
    out[:, :, list(order)] = split.transpose(0, 2, 1)
    return out.reshape(len(words), -1)[:, start - first * per_word :][:, : stop - start]


def _joined(parts: np.ndarray) -> np.ndarray:
    """Bytes ``[n, 4, m]`` -> words ``[n, m]``, the first in the lowest bits."""
    out = parts[:, 0].astype(np.uint32)
    for i in range(1, 4):
        out |= parts[:, i].astype(np.uint32) << np.uint32(8 * i)
    return out

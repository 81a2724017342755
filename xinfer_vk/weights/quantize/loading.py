"""A model whose matrices are quantized as they are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from xinfer_vk.errors import UsageError
from xinfer_vk.fields import quoted
from xinfer_vk.weights.quantize.choice import check_type, choose
from xinfer_vk.weights.quantize.rows import FLOATS, dequantize_rows, quantize_rows
from xinfer_vk.weights.source import ModelSource
from xinfer_vk.weights.tensors import DerivedTensor, TensorInfo


class QuantizedTensor(DerivedTensor):
    """A tensor whose rows are quantized when they are asked for."""

    def read_rows(self, which: slice | np.ndarray) -> np.ndarray:
        """Raises :class:`ModelError`, with the tensor's name, for weights that are NaN or infinite."""
        values = dequantize_rows(self.stored.fmt, self.stored.read_rows(which), self.shape[-1])
        if self.stored.order is not None:
            values = values[:, np.argsort(self.stored.order)]
        return quantize_rows(self.fmt, values, f"{self.where}: the tensor {quoted(self.name)}")


def quantized_tensors(
    tensors: Mapping[str, TensorInfo], kind: str, *, tied: bool, requantize: bool, where: str
) -> tuple[dict[str, TensorInfo], tuple[str, ...]]:
    """``(tensors, notes)``: the tensors as they become in a model quantized to ``kind``, and what the
    user should know of it, a line each. ``requantize``: those that are low-bit already, too.

    Raises :class:`UsageError` if there is nothing to quantize.
    """
    notes: Counter[str] = Counter()
    out: dict[str, TensorInfo] = {}
    low_bit: Counter[str] = Counter()
    for name, tensor in tensors.items():
        choice = choose(kind, name, tensor.shape, tied=tied)
        if choice.fmt is None or choice.fmt == tensor.fmt:
            out[name] = tensor
        elif tensor.fmt not in FLOATS and not requantize:
            out[name] = tensor
            low_bit[tensor.fmt] += 1
            continue
        else:
            out[name] = QuantizedTensor.of(tensor, fmt=choice.fmt, order=None)
        if choice.fallback:
            notes[choice.fallback] += 1
    formats = ", ".join(low_bit)
    if low_bit and not any(isinstance(tensor, QuantizedTensor) for tensor in out.values()):
        raise UsageError(
            f"{where} is quantized already ({formats}), and doing it again would lose more: use it as it is, "
            "or a model in f16, bf16 or f32 (xinfer-vk quantize --allow-requantize does it all the same)"
        )
    told = [f"{what} ({_tensors(count)})" for what, count in notes.items()]
    if low_bit:
        told.append(f"left as they are: {_tensors(low_bit.total())} in {formats}")
    return out, tuple(told)


def quantized(source: ModelSource, kind: str) -> tuple[ModelSource, tuple[str, ...]]:
    """``(source, notes)``: the model with its matrices in low-bit form; see :func:`quantized_tensors`.

    Raises :class:`UsageError` for an unknown ``kind`` and for a model that is quantized already.
    """
    check_type(kind)
    tied = source.config.tie_word_embeddings
    tensors, notes = quantized_tensors(source.tensors, kind, tied=tied, requantize=False, where=source.name)
    return replace(source, tensors=tensors), notes


def _tensors(count: int) -> str:
    return "1 tensor" if count == 1 else f"{count} tensors"

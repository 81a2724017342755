"""Random weights of a model's exact shape, made on the device: no file, no download, no upload.

A family file declares the tensors it wants (see :mod:`xinfer_vk.weights.device`); the planner here makes
up each one that is asked for, so any family that has a shape in :mod:`xinfer_vk.models.shapes` works.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from xinfer_vk.errors import UsageError
from xinfer_vk.kernels.base import Ref
from xinfer_vk.kernels.copy_words import fill_words
from xinfer_vk.kernels.synthetic import PATTERNS, fill_weights
from xinfer_vk.models.shapes import shape_config
from xinfer_vk.plan import DeviceProfile, Plan, Runtime, Step
from xinfer_vk.weights.device import WeightPlanner
from xinfer_vk.weights.formats import fitting_format
from xinfer_vk.weights.source import ModelSource
from xinfer_vk.weights.tensors import TensorInfo

ONE = int(np.float32(1).view(np.uint32))


def open_synthetic(name: str) -> tuple[ModelSource, str]:
    """The source of ``SHAPE:FORMAT`` ("qwen2.5-0.5b:q4_0"), which has no tensors of its own, and the format.

    Raises :class:`UsageError` for a shape or a format that is not known.
    """
    shape, _, fmt = name.lower().partition(":")
    if fmt not in PATTERNS:
        raise UsageError(
            f"synthetic model {name!r}: write it as SHAPE:FORMAT, for example qwen2.5-0.5b:q4_0; the formats "
            f"are {', '.join(PATTERNS)}"
        )
    config, metadata = shape_config(shape)
    source = ModelSource(f"{shape}:{fmt}", Path(f"synthetic {shape}"), "hf", {}, config, metadata, 0)
    return source, fmt


class SyntheticPlanner(WeightPlanner):
    """Makes up every tensor that is declared: matrices in ``fmt``, or what :func:`fitting_format` says;
    vectors (norms, biases) of ones."""

    def __init__(self, source: ModelSource, profile: DeviceProfile, fmt: str) -> None:
        super().__init__(source, profile)
        self._fmt = fmt

    def _tensor(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        fmt = fitting_format(self._fmt, shape[-1]) if len(shape) > 1 else "f32"
        return TensorInfo(name, shape, fmt, np.empty(0, np.uint8))

    def _refuse_unused(self) -> None:
        """There is no file that could hold more."""

    def _write_all(self, runtime: Runtime) -> Iterator[int]:
        yield from self._fill(runtime, [fill_words(self._params.uploaded(), 0, self._params.words, ONE)])
        for arena in self._arenas:
            steps = []
            for seed, matrix in enumerate(self._matrices):
                for span in matrix.spans:
                    if span.arena is arena:
                        target = Ref(arena.uploaded(), span.offset)
                        first = seed << 20 ^ span.first_row
                        steps.append(fill_weights(target, matrix.fmt, span.rows, matrix.cols, first))
            yield from self._fill(runtime, steps)

    @staticmethod
    def _fill(runtime: Runtime, steps: list[Step]) -> Iterator[int]:
        if steps:
            runtime.prepare(Plan("random weights", tuple(steps))).run()
            yield sum(step.kernel.unpack(step.push).count for step in steps)

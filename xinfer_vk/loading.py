"""One way from a path to a model on a device: open the files, declare the tensors, put them there."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from xinfer_vk.engine.config import EngineConfig
from xinfer_vk.engine.tune import tune
from xinfer_vk.errors import ModelError, UsageError, setting
from xinfer_vk.kernels.matmul_a8 import FORMATS as A8_FORMATS
from xinfer_vk.models.config import ModelConfig
from xinfer_vk.models.decoder import DecoderWeights, matrices
from xinfer_vk.models.registry import family
from xinfer_vk.plan import DeviceProfile, Runtime
from xinfer_vk.weights.device import WeightPlanner
from xinfer_vk.weights.hub import resolve_model
from xinfer_vk.weights.quantize.loading import quantized
from xinfer_vk.weights.source import ModelSource, open_model

Progress = Callable[[str, int, int], None]  # what is being done, how much is done, of how much


def open_checkpoint(config: EngineConfig, progress: Progress | None = None) -> ModelSource:
    """The files of ``config.model``, downloaded if need be; their tensors as they are stored. Raises
    :class:`ModelError`, :class:`DownloadError` and :class:`UsageError`."""
    return open_model(resolve_model(str(config.model), progress))


@dataclass(frozen=True)
class Declared:
    """The weights of a model as handles: shapes, formats and sizes are known, nothing is on a device."""

    weights: DecoderWeights
    planner: WeightPlanner = field(repr=False)
    notices: tuple[str, ...]

    @property
    def weight_bytes(self) -> int:
        return self.planner.total_bytes


def declare(
    source: ModelSource,
    profile: DeviceProfile,
    config: EngineConfig,
    planner: WeightPlanner | None = None,
) -> Declared:
    """Declare what a model's family uses, for a device of this profile. ``planner``: of weights that are in
    no file; the source's otherwise, quantized if ``config`` says so.

    Raises :class:`ModelError` for a tensor that is missing or has another shape, and :class:`UsageError` for
    a model that is quantized already or has no products in 8 bits.
    """
    notices = source.notices
    if planner is None:
        if config.quantize is not None:
            source, notes = quantized(source, config.quantize)
            notices += notes
        planner = WeightPlanner(source, profile)
    weights: DecoderWeights = family(source.config.architecture).load(planner, source.config)
    if config.activations == "int8":
        notices += check_int8(weights, source.config.experts is not None)
    return Declared(weights, planner, notices)


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model's weights on a device. ``notices``: what the user should know, a line each."""

    name: str
    fmt: str  # of most of the weights' bytes
    config: ModelConfig
    weights: DecoderWeights
    weight_bytes: int
    notices: tuple[str, ...]
    load_s: float
    tune_s: float
    runtime: Runtime = field(repr=False)
    planner: WeightPlanner = field(repr=False)

    def free(self) -> None:
        """Give the weights' memory back; the runtime stays open."""
        self.planner.free(self.runtime)


def load(
    source: ModelSource,
    runtime: Runtime,
    config: EngineConfig,
    progress: Progress | None = None,
    planner: WeightPlanner | None = None,
    fmt: str | None = None,
) -> LoadedModel:
    """Put an open model on a device and choose its kernels. ``planner`` and ``fmt``: of weights without a
    file. Raises what :func:`declare` raises, and :class:`OutOfMemoryError`."""
    tell = progress or (lambda stage, done, total: None)
    began = time.perf_counter()
    declared = declare(source, runtime.profile, config, planner)
    stage = "loading weights" if config.quantize is None else f"quantizing to {config.quantize}"
    declared.planner.upload(runtime, lambda done, total: tell(stage, done, total))
    loaded = time.perf_counter()
    notes = tune(
        runtime, matrices(declared.weights), config.tune, activations=config.activations,
        progress=lambda done, total: tell("choosing kernels", done, total),
    )  # fmt: skip
    return LoadedModel(
        source.name, fmt or main_format(declared.planner.source), source.config, declared.weights,
        declared.weight_bytes, (*declared.notices, *notes), loaded - began, time.perf_counter() - loaded,
        runtime, declared.planner,
    )  # fmt: skip


def main_format(source: ModelSource) -> str:
    """The number format most of the weights' bytes are in. Raises :class:`ModelError` for no weights."""
    if not source.tensors:
        raise ModelError(
            f"{source.path}: has no tensors: it is a vocabulary without a model, use another file"
        )
    sizes: dict[str, int] = {}
    for tensor in source.tensors.values():
        sizes[tensor.fmt] = sizes.get(tensor.fmt, 0) + tensor.bytes
    return max(sizes, key=lambda fmt: sizes[fmt])


def check_int8(weights: DecoderWeights, experts: bool) -> tuple[str, ...]:
    """What the user should know of products in integers with these weights, a line each. ``experts``: some
    are experts. Raises :class:`UsageError` if there are none, naming the formats."""
    formats = {m.fmt for layer in (*weights.layers, weights.head) for m in matrices(layer)}
    exact = sorted(formats - set(A8_FORMATS))
    if len(exact) == len(formats):
        raise UsageError(
            f"activations in int8 need weights in {', '.join(A8_FORMATS)}; this model's are in "
            f"{', '.join(exact)}: leave {setting('activations')} out, or use "
            f"{setting('quantize', 'q8_0')} with a model in 16 or 32 bits"
        )
    notes = [f"activations stay exact where weights are in {', '.join(exact)}"] if exact else []
    return (*notes, "activations of experts stay exact") if experts else tuple(notes)

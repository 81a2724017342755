"""What a model needs of a device's memory, told before anything is allocated.

No size is worked out a second time here: the weights are declared, and the runner with its KV cache and
activations is made, as for a run, on a runtime that counts what it is asked for and allocates nothing.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from xinfer_vk.engine.config import EngineConfig
from xinfer_vk.engine.memory import blocks_of, engine_runner, kv_shape
from xinfer_vk.engine.runner import ModelRunner
from xinfer_vk.errors import OutOfMemoryError
from xinfer_vk.kernels.state import BLOCK_TOKENS
from xinfer_vk.loading import declare
from xinfer_vk.models.shapes import shape_config
from xinfer_vk.plan import WORD_BYTES, Buffer, BufferKind, DeviceProfile
from xinfer_vk.reference import NumpyRuntime
from xinfer_vk.vulkan.devices import DeviceInfo, available_host_bytes
from xinfer_vk.vulkan.transfers import STAGING_WORDS
from xinfer_vk.weights.device import WeightPlanner
from xinfer_vk.weights.quantize.choice import choose
from xinfer_vk.weights.source import ModelSource
from xinfer_vk.weights.tensors import TensorInfo

SHAPE_FORMAT = "bf16"  # in which models are published


class CountingRuntime(NumpyRuntime):
    """Allocates nothing and knows how much it would have been, of each kind of buffer. Nothing can be run
    on it."""

    def __init__(self, profile: DeviceProfile) -> None:
        super().__init__(profile)
        self.bytes = dict.fromkeys(BufferKind, 0)

    @property
    def allocated_bytes(self) -> int:
        return sum(self.bytes.values())

    def allocate(self, name: str, words: int, kind: BufferKind) -> Buffer:
        buffer = Buffer(name, words, kind)
        self.bytes[kind] += self._bytes_of(buffer)
        return buffer

    def free(self, buffer: Buffer) -> None:
        self.bytes[buffer.kind] -= self._bytes_of(buffer)

    def write(self, buffer: Buffer, offset: int, words: np.ndarray) -> None:
        """Nothing is kept."""

    def mapped(self, buffer: Buffer) -> memoryview:
        """Of a few words, which go with it."""
        return np.zeros(buffer.words, np.uint32).data

    def _bytes_of(self, buffer: Buffer) -> int:
        discrete_state = buffer.kind is BufferKind.STATE and not self.profile.unified_memory
        return (2 if discrete_state else 1) * buffer.words * WORD_BYTES  # with the host's copy


class ShapePlanner(WeightPlanner):
    """Declares the weights of a known shape, of which there is no file: in bf16, or as they become when
    they are quantized to ``kind``."""

    def __init__(self, source: ModelSource, profile: DeviceProfile, kind: str | None) -> None:
        super().__init__(source, profile)
        self._kind = kind

    def _tensor(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        fmt = "f32" if len(shape) == 1 else SHAPE_FORMAT
        if self._kind is not None:
            tied = self.source.config.tie_word_embeddings
            fmt = choose(self._kind, name, shape, tied=tied).fmt or fmt
        return TensorInfo(name, shape, fmt, np.empty(0, np.uint8))


@dataclass(frozen=True)
class Estimate:
    """Bytes on a device. ``kv_tokens``: that the KV cache has room for, in whole blocks;
    ``kv_full_heads_bytes``: of one with a key and a value for every query head. ``activation_bytes``: of a
    step, with the rotary table, the step's state and the results; ``sampler_bytes``: more, once tokens are
    sampled. ``staging_bytes``: what a discrete device's uploads go through."""

    weight_bytes: int
    kv_bytes: int
    kv_tokens: int
    kv_full_heads_bytes: int
    activation_bytes: int
    sampler_bytes: int
    staging_bytes: int

    @property
    def total_bytes(self) -> int:
        """What is allocated for greedy decoding."""
        return self.weight_bytes + self.kv_bytes + self.activation_bytes + self.staging_bytes


class Estimator:
    """Estimates of one model on devices of one profile."""

    def __init__(
        self, source: ModelSource, profile: DeviceProfile, config: EngineConfig | None = None
    ) -> None:
        """``source`` without tensors: of a shape. ``config``: how the model would be opened. Raises what
        :func:`~xinfer_vk.loading.declare` raises."""
        self.profile, self.model = profile, source.config
        self.config = config = config or EngineConfig()
        planner = None if source.tensors else ShapePlanner(source, profile, config.quantize)
        declared = declare(source, profile, config, planner)
        self.weights, self.weight_bytes = declared.weights, declared.weight_bytes

    def estimate(self, context: int, batch: int, kv_dtype: str) -> Estimate:
        """With a KV cache that holds ``batch`` sequences of ``context`` tokens: a run's with a ``kv_memory``
        of ``kv_bytes``. Raises :class:`OutOfMemoryError` where the device could not bind one layer's cache,
        :class:`UsageError` for an unknown ``kv_dtype``."""
        runtime, runner = self._made(context, batch, kv_dtype)
        kv, greedy = runtime.bytes[BufferKind.KV], runtime.allocated_bytes
        _ = runner.sampler  # made when it is first asked for
        return Estimate(
            weight_bytes=self.weight_bytes,
            kv_bytes=kv,
            kv_tokens=runner.cache.pool.count * BLOCK_TOKENS,
            kv_full_heads_bytes=kv * self.model.heads // self.model.kv_heads,
            activation_bytes=greedy - kv,
            sampler_bytes=runtime.allocated_bytes - greedy,
            staging_bytes=self._staging_bytes,
        )

    def largest_context(self, free_bytes: int, batch: int, kv_dtype: str) -> int:
        """The most tokens, whole blocks of them, that ``batch`` sequences can have in ``free_bytes``; 0 if
        not even a block fits."""

        def fits(blocks: int) -> bool:
            try:
                runtime, runner = self._made(blocks * BLOCK_TOKENS, batch, kv_dtype)
            except OutOfMemoryError:
                return False
            if runner.cache.pool.count < batch * blocks:
                return False  # the cache was cut to what the device binds
            return self.weight_bytes + runtime.allocated_bytes + self._staging_bytes <= free_bytes

        low, high = 0, max(1, self.model.max_position // BLOCK_TOKENS)
        if fits(high):
            return min(high * BLOCK_TOKENS, self.model.max_position)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low * BLOCK_TOKENS

    @property
    def _staging_bytes(self) -> int:
        return 0 if self.profile.unified_memory else STAGING_WORDS * WORD_BYTES

    def _made(self, context: int, batch: int, kv_dtype: str) -> tuple[CountingRuntime, ModelRunner]:
        """A runner as a run would have it, and the runtime that counted it."""
        runtime = CountingRuntime(self.profile)
        config = replace(self.config, context=context, kv_dtype=kv_dtype)
        each, most = blocks_of(context), kv_shape(config, self.model).most_blocks(self.profile)
        blocks = max(each, min(batch * each, most))
        runner = engine_runner(runtime, config, self.model, self.weights, blocks)
        return runtime, runner


@dataclass(frozen=True)
class Fit:
    """A device of this machine: what it has free, and the longest context that fits (0: none) for all
    sequences at once."""

    device: DeviceInfo
    free_bytes: int
    total_bytes: int | None  # of the estimate there; None: it cannot be
    largest_context: int

    @property
    def fits(self) -> bool:
        return self.total_bytes is not None and self.total_bytes <= self.free_bytes


def fit(
    source: ModelSource,
    device: DeviceInfo,
    context: int,
    batch: int,
    kv_dtype: str,
    config: EngineConfig | None = None,
) -> Fit:
    """Whether a model fits a device as it is now. Raises as :class:`Estimator` does."""
    estimator = Estimator(source, device.profile(device.features), config)
    free = device.heap_free_bytes(mapped=device.unified_memory)
    if device.is_cpu and (available := available_host_bytes()) is not None:
        free = min(free, available)
    total = None
    with contextlib.suppress(OutOfMemoryError):
        made = estimator.estimate(context, batch, kv_dtype)
        total = made.total_bytes if made.kv_tokens >= context * batch else None
    return Fit(device, free, total, estimator.largest_context(free, batch, kv_dtype))


def shape_source(name: str) -> ModelSource:
    """A known shape as a model without tensors. Raises :class:`UsageError` for one that is not known."""
    config, metadata = shape_config(name.lower())
    return ModelSource(name.lower(), Path(name), "hf", {}, config, metadata, 0)

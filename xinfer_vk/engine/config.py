"""Everything a model is opened with, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from xinfer_vk.errors import UsageError, setting

if TYPE_CHECKING:
    from xinfer_vk.models.config import ModelConfig

Sampler = Literal["device", "cpu"]
Tune = Literal["off", "quick", "full"]
Activations = Literal["f32", "int8"]

DEFAULT_MODEL = "smollm2-135m"
PREFILL_CHUNK = 512


@dataclass(frozen=True)
class EngineConfig:
    """How a model is opened.

    ``model``: a directory in Hugging Face layout, a ``.gguf`` file, a hub name, or the name of a
    pulled model. ``device``: an index, part of a name, "numpy" for no Vulkan, or None for the best device.
    ``kv_dtype``: "f16", "f32", "q8_0" or "q4_0". ``quantize``: "q8_0", "q6_k", "q4_k", "q4_1" or "q4_0"
    converts the matrices of a model in f16, bf16 or f32 while it loads. ``activations``: "f32", or "int8",
    which rounds the inputs of matrix products to 8 bits. ``context``: the most tokens of one sequence; None:
    what the model was made for. ``kv_memory``: of the KV cache, which all sequences share: bytes (int), or a
    share of the free memory (float); None holds one context. ``prefill_chunk``: the most prompt tokens in one
    step. ``sampler``: "device", or "cpu" for the NumPy reference. ``tune``: how thoroughly to search for the
    fastest kernels when a GPU first meets such matrices ("off", "quick", "full").

    Raises :class:`UsageError`, naming the field, for a value that cannot be.
    """

    model: str | Path = DEFAULT_MODEL
    device: str | int | None = None
    kv_dtype: str = "f16"
    quantize: str | None = None
    activations: Activations = "f32"
    context: int | None = None
    kv_memory: int | float | None = None
    prefill_chunk: int = PREFILL_CHUNK
    sampler: Sampler = "device"
    tune: Tune = "quick"

    def __post_init__(self) -> None:
        for name, value in (("context", self.context), ("prefill_chunk", self.prefill_chunk)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise UsageError(f"{setting(name)} is {value!r}: it must be at least 1 token")
        if not isinstance(self.kv_dtype, str):
            raise UsageError(f"{setting('kv_dtype')} is {self.kv_dtype!r}: it is the name of a number format")
        memory = self.kv_memory
        if memory is not None:
            share = isinstance(memory, float) and 0 < memory <= 1
            if not share and (not isinstance(memory, int) or isinstance(memory, bool) or memory < 1):
                raise UsageError(
                    f"{setting('kv_memory')} is {memory!r}: it is a number of bytes, or a share below 1.0"
                )
        choices: tuple[tuple[str, Any], ...] = (
            ("sampler", Sampler),
            ("activations", Activations),
            ("tune", Tune),
        )
        for name, allowed in choices:
            if getattr(self, name) not in get_args(allowed):
                one_of = " or ".join(get_args(allowed))
                raise UsageError(f"{setting(name)} is {getattr(self, name)!r}: it is {one_of}")
        if self.quantize is not None:
            from xinfer_vk.weights.quantize.choice import check_type  # slow to import

            check_type(self.quantize)

    def check_model(self, config: ModelConfig, name: str) -> None:
        """Raise :class:`UsageError` for a context or a KV cache that a model cannot have."""
        from xinfer_vk.kernels.kv import vector_words

        if self.context is not None and self.context > config.max_position:
            raise UsageError(
                f"{setting('context')} {self.context} is more than the {config.max_position} tokens that "
                f"{name} was made for: use less"
            )
        vector_words(self.kv_dtype, config.head_dim)

    def room(self, config: ModelConfig) -> int:
        """The most tokens of one sequence."""
        return self.context or config.max_position

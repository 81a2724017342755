"""How much of a device's memory the KV cache takes: one pool of blocks for all sequences, sized once."""

from __future__ import annotations

from collections.abc import Callable

from xinfer_vk.cache import KVShape
from xinfer_vk.engine.config import EngineConfig
from xinfer_vk.engine.runner import MAX_OUTPUTS, ModelRunner, make_runner
from xinfer_vk.errors import OutOfMemoryError, UsageError, setting
from xinfer_vk.kernels.state import BLOCK_TOKENS
from xinfer_vk.models.config import ModelConfig
from xinfer_vk.models.decoder import DecoderWeights
from xinfer_vk.plan import BufferKind, Runtime
from xinfer_vk.units import format_bytes

SHARE = 0.9  # of what is free: activations and the driver take some, too


def kv_shape(config: EngineConfig, model: ModelConfig) -> KVShape:
    return KVShape(model.layers, model.kv_heads, model.head_dim, config.kv_dtype)


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def pool_blocks(
    config: EngineConfig, model: ModelConfig, runtime: Runtime, sequences: int = 1
) -> tuple[int, tuple[str, ...]]:
    """``(blocks, notices)``: the size of the pool. By default it holds one context. One that was asked for
    fits ``sequences`` times if memory holds them; one that was not is cut to what is free. Raises
    :class:`UsageError` for a ``kv_memory`` without room for a block."""
    shape, room = kv_shape(config, model), config.room(model)
    most, wanted, name = shape.most_blocks(runtime.profile), blocks_of(room), runtime.profile.name
    if config.kv_memory is None:
        free = int(SHARE * runtime.free_bytes(BufferKind.KV)) // shape.block_bytes
        if config.context is not None:
            return max(wanted, min(sequences * wanted, most, free)), ()
        fitting = max(1, min(wanted, most, free))
        if fitting == wanted:
            return wanted, ()
        why = "has room for" if free < most else "binds"
        return fitting, (
            f"context cut to {fitting * BLOCK_TOKENS} of the model's {room} tokens: {name} {why} no more",
        )
    limit = config.kv_memory
    size = limit if isinstance(limit, int) else int(limit * runtime.free_bytes(BufferKind.KV))
    blocks = size // shape.block_bytes
    if blocks < 1:
        raise UsageError(
            f"{setting('kv_memory')} is {format_bytes(size)}, and {BLOCK_TOKENS} tokens take "
            f"{format_bytes(shape.block_bytes)}: use more"
        )
    if blocks > most:
        return most, (f"KV cache cut to {most * BLOCK_TOKENS} tokens: {name} binds no more",)
    return blocks, ()


def engine_runner(
    runtime: Runtime,
    config: EngineConfig,
    model: ModelConfig,
    weights: DecoderWeights,
    blocks: int,
    progress: Callable[[int, int], None] | None = None,
) -> ModelRunner:
    """A runner whose pool has ``blocks`` blocks. Nothing stays allocated if it raises
    :class:`OutOfMemoryError`."""
    return make_runner(
        runtime,
        model,
        weights,
        config.kv_dtype,
        capacity=min(config.room(model), blocks * BLOCK_TOKENS),
        sequences=MAX_OUTPUTS,
        blocks=blocks,
        max_tokens=config.prefill_chunk,
        progress=progress,
        activation_dtype=config.activations,
    )


def fitting_runner(
    runtime: Runtime,
    config: EngineConfig,
    model: ModelConfig,
    weights: DecoderWeights,
    blocks: int,
    progress: Callable[[int, int], None] | None = None,
) -> ModelRunner:
    """The same with fewer blocks, down to what was asked for, where the memory went elsewhere."""
    least = 1 if config.context is None else blocks_of(config.context)
    while True:
        try:
            return engine_runner(runtime, config, model, weights, blocks, progress)
        except OutOfMemoryError:
            if blocks <= least or config.kv_memory is not None:
                raise
            blocks = max(least, blocks // 2)

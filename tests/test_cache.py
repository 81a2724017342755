"""The paged cache's book-keeping; what the device does with it is in test_logits, the pool of blocks in
test_engine_scheduler."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xinfer_vk.cache import KV_BYTES, CachedSequence, KVCache
from xinfer_vk.errors import OutOfMemoryError, UsageError
from xinfer_vk.kernels.state import BLOCK_TOKENS
from xinfer_vk.reference import NUMPY_PROFILE, NumpyRuntime


def make_cache(capacity: int = 100, sequences: int = 2, kv_dtype: str = "f16", **changes: int) -> KVCache:
    shape = {"layers": 3, "kv_heads": 2, "head_dim": 8, **changes}
    return KVCache(NumpyRuntime(), kv_dtype=kv_dtype, capacity=capacity, sequences=sequences, **shape)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60)), max_size=40))
def test_sequences_never_share_a_slot_and_blocks_are_never_lost(actions: list[tuple[int, int]]) -> None:
    cache = make_cache(capacity=128, sequences=3)
    open_: dict[int, CachedSequence] = {}
    for who, tokens in actions:
        if who not in open_:
            open_[who] = cache.open()
        sequence = open_[who]
        if tokens == 0:
            cache.close(open_.pop(who))
        elif tokens > 50:
            cache.truncate(sequence, sequence.length // 2)
        else:
            before = (list(sequence.blocks), cache.pool.free_blocks)
            try:
                cache.reserve(sequence, tokens)
                sequence.length += tokens
            except OutOfMemoryError:
                assert before == (sequence.blocks, cache.pool.free_blocks)
        slots = [s.slot(p) for s in open_.values() for p in range(s.length)]
        assert len(slots) == len(set(slots))
        held = sum(len(s.blocks) for s in open_.values())
        assert held + cache.pool.free_blocks == cache.pool.count
    assert len({s.row for s in open_.values()}) == len(open_)


def test_a_sequence_takes_only_the_blocks_it_needs() -> None:
    cache = make_cache()
    sequence = cache.open()
    cache.reserve(sequence, BLOCK_TOKENS)
    assert len(sequence.blocks) == 1
    sequence.length = BLOCK_TOKENS
    cache.reserve(sequence, 1)
    assert len(sequence.blocks) == 2


@pytest.mark.parametrize(
    ("kv_dtype", "size"), [("f32", 4), ("f16", 2), ("q8_0", 1 + 2 / 32), ("q4_0", 1 / 2 + 2 / 32)]
)
def test_kv_bytes_are_two_layers_heads_dims_tokens_bytes(kv_dtype: str, size: float) -> None:
    cache = make_cache(capacity=64, sequences=1, kv_dtype=kv_dtype, head_dim=64)
    assert cache.bytes == 2 * 3 * 64 * 2 * 64 * size
    assert KV_BYTES[kv_dtype] == size


def test_a_block_of_scales_that_stands_alone_takes_a_word() -> None:
    cache = make_cache(capacity=64, sequences=1, kv_dtype="q8_0", head_dim=96)
    assert cache.bytes == 2 * 3 * 64 * 2 * (96 + 2 * 4)


def test_layers_are_spread_over_buffers_that_the_device_can_bind() -> None:
    from dataclasses import replace

    layer_bytes = 2 * 128 * 2 * 8 * 4
    runtime = NumpyRuntime(replace(NUMPY_PROFILE, max_storage_range_bytes=2 * layer_bytes + 8))
    cache = KVCache(runtime, layers=5, kv_heads=2, head_dim=8, kv_dtype="f32", capacity=128)
    assert len({layer.buffer for layer in cache.layers}) == 3
    for layer in cache.layers:
        assert layer.v_offset + layer_bytes // 8 <= layer.buffer.words
        assert layer.buffer.words * 4 <= runtime.profile.max_storage_range_bytes


def test_a_context_whose_layer_cannot_be_bound_names_one_that_can() -> None:
    from dataclasses import replace

    runtime = NumpyRuntime(replace(NUMPY_PROFILE, max_storage_range_bytes=2 * 64 * 2 * 8 * 4))
    with pytest.raises(OutOfMemoryError, match=r"context=64 or less, or kv_dtype=.f16"):
        KVCache(runtime, layers=1, kv_heads=2, head_dim=8, kv_dtype="f32", capacity=65)
    runtime = NumpyRuntime(replace(NUMPY_PROFILE, max_storage_range_bytes=2 * 64 * 2 * 64 * 2))
    with pytest.raises(OutOfMemoryError, match=r"context=64 or less, or kv_dtype=.q8_0"):
        KVCache(runtime, layers=1, kv_heads=2, head_dim=64, kv_dtype="f16", capacity=65)


@pytest.mark.parametrize(
    ("kv_dtype", "head_dim", "message"),
    [
        ("q3", 8, "'q3' is not supported: choose from f32, f16, q8_0, q4_0"),
        ("f16", 7, "head dim 7 is not supported"),
        ("q8_0", 80, "head dim 80 is not a multiple of 32, as a q8_0 KV cache needs: use kv_dtype=.f16"),
        ("q4_0", 48, "head dim 48 is not a multiple of 32, as a q4_0 KV cache needs"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(kv_dtype: str, head_dim: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_cache(kv_dtype=kv_dtype, head_dim=head_dim)


def test_more_sequences_than_rows_are_refused() -> None:
    cache = make_cache(sequences=1)
    cache.open()
    with pytest.raises(OutOfMemoryError, match="1 sequences"):
        cache.open()

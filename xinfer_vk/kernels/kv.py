"""Layout of the paged KV cache, and its oracle. Mirrors shaders/include/kv.glsl.

The cache of a layer is a region of keys and one of values, ``blocks`` blocks of 32 tokens each. A
word holds two f16 dims (the even one in the low half) or one f32 dim; ``E`` words make a vector:

    keys    [block][kv_head][E][32 tokens]   tokens innermost: lanes of a score are tokens
    values  [block][kv_head][32 tokens][E]   dims innermost: lanes of a weighted sum are dims

The sequence's block table says which block holds positions ``32 i … 32 i + 31``. Both regions begin
at multiples of 4 words, so that they can be read 16 bytes at a time.
"""

from __future__ import annotations

import numpy as np

from xinfer_vk.errors import UsageError
from xinfer_vk.kernels.state import BLOCK_TABLE, BLOCK_TOKENS, TABLE_STRIDE

WORD_DIMS = {"f32": 1, "f16": 2}


def vector_words(kv_dtype: str, head_dim: int) -> int:
    """Words of one key or value vector. Raises :class:`UsageError` for what the cache cannot hold."""
    if kv_dtype not in WORD_DIMS:
        raise UsageError(f"kv dtype {kv_dtype!r} is not supported: choose from {', '.join(WORD_DIMS)}")
    if head_dim <= 0 or head_dim % 2:
        raise UsageError(f"head dim {head_dim} is not supported by attention: it must be even")
    return head_dim // WORD_DIMS[kv_dtype]


def check_region(k_offset: int, v_offset: int) -> None:
    """Raises :class:`UsageError` for a region that cannot be read 16 bytes at a time."""
    for name, offset in (("k", k_offset), ("v", v_offset)):
        if offset % 4:
            raise UsageError(f"{name} offset {offset} of the KV cache is not a multiple of 4 words")


def pack(vectors: np.ndarray, kv_dtype: str) -> np.ndarray:
    """Float vectors ``[..., head_dim]`` as words ``[..., E]``; f16 rounds to nearest, ties to even."""
    dtype = np.float16 if kv_dtype == "f16" else np.float32
    return np.ascontiguousarray(vectors.astype(dtype)).view(np.uint32)


def unpack(words: np.ndarray, kv_dtype: str) -> np.ndarray:
    """Words ``[..., E]`` as float32 vectors ``[..., head_dim]``."""
    dtype = np.float16 if kv_dtype == "f16" else np.float32
    return np.ascontiguousarray(words).view(dtype).astype(np.float32)


def read_sequence(
    cache: np.ndarray,
    state: np.ndarray,
    sequence: int,
    length: int,
    *,
    k_offset: int,
    v_offset: int,
    kv_heads: int,
    head_dim: int,
    kv_dtype: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of positions ``0 … length-1`` of a sequence: float32 [length, kv_heads, head_dim]."""
    e = vector_words(kv_dtype, head_dim)
    count = -(-length // BLOCK_TOKENS)
    table = BLOCK_TABLE + sequence * int(state[TABLE_STRIDE])
    blocks = state[table : table + count].astype(np.int64)
    block_words = kv_heads * e * BLOCK_TOKENS
    words = blocks[:, None] * block_words + np.arange(block_words)
    keys = cache[k_offset + words].reshape(count, kv_heads, e, BLOCK_TOKENS)
    values = cache[v_offset + words].reshape(count, kv_heads, BLOCK_TOKENS, e)
    k = unpack(keys.transpose(0, 3, 1, 2), kv_dtype).reshape(-1, kv_heads, head_dim)
    v = unpack(values.transpose(0, 2, 1, 3), kv_dtype).reshape(-1, kv_heads, head_dim)
    return k[:length], v[:length]

"""Layout and number formats of the paged KV cache, and its oracle. Mirrors shaders/include/kv.glsl.

The cache of a layer is a region of keys and one of values, ``blocks`` blocks of 32 tokens each. A vector
(the key or the value of one token and KV head) is E words: W words of dims, the first dim in the lowest
bits, then S words of scales:

    keys    [block][kv_head][W + S][32 tokens]               tokens innermost: lanes of a score are tokens
    values  [block][kv_head]{[32 tokens][W], [S][32 tokens]}  dims innermost: lanes of a weighted sum are dims

    f32     1 dim a word, f16 2; no scales
    q8_0    4 dims a word, signed: x = d q. d is an f16 for 32 neighbouring dims of the vector
    q4_0    8 dims a word, unsigned: x = d (q - 8)

q8_0 and q4_0 are ggml's block formats, laid along the dims of one token, and numbers are quantized as ggml
does (quantize_row_q8_0_ref and quantize_row_q4_0_ref in ggml-quants.c), except that the scale is rounded to
f16 before it divides. A word of scales holds those of two neighbouring blocks of one vector. So every word
belongs to one token: a token is appended without reading or changing what its neighbours have.

The sequence's block table says which block holds positions ``32 i … 32 i + 31``. Both regions begin
at multiples of 4 words, so that they can be read 16 bytes at a time.
"""

from __future__ import annotations

import numpy as np

from xinfer_vk.errors import UsageError, setting
from xinfer_vk.kernels.state import BLOCK_TABLE, BLOCK_TOKENS, TABLE_STRIDE

WORD_DIMS = {"f32": 1, "f16": 2, "q8_0": 4, "q4_0": 8}
QUANTIZED = ("q8_0", "q4_0")
SCALE_DIMS = 32  # dims that share a scale


def data_words(kv_dtype: str, head_dim: int) -> int:
    """W: words of dims in one key or value vector. Raises :class:`UsageError` for what cannot be held."""
    if kv_dtype not in WORD_DIMS:
        raise UsageError(f"kv dtype {kv_dtype!r} is not supported: choose from {', '.join(WORD_DIMS)}")
    if head_dim <= 0 or head_dim % 2:
        raise UsageError(f"head dim {head_dim} is not supported by attention: it must be even")
    if kv_dtype in QUANTIZED and head_dim % SCALE_DIMS:
        raise UsageError(
            f"head dim {head_dim} is not a multiple of {SCALE_DIMS}, as a {kv_dtype} KV cache needs: "
            f"use {setting('kv_dtype', 'f16')}"
        )
    return head_dim // WORD_DIMS[kv_dtype]


def vector_words(kv_dtype: str, head_dim: int) -> int:
    """E: words of one key or value vector with its scales. Raises like :func:`data_words`."""
    scales = -(-head_dim // (2 * SCALE_DIMS)) if kv_dtype in QUANTIZED else 0
    return data_words(kv_dtype, head_dim) + scales


def check_region(k_offset: int, v_offset: int) -> None:
    """Raises :class:`UsageError` for a region that cannot be read 16 bytes at a time."""
    for name, offset in (("k", k_offset), ("v", v_offset)):
        if offset % 4:
            raise UsageError(f"{name} offset {offset} of the KV cache is not a multiple of 4 words")


def pack(vectors: np.ndarray, kv_dtype: str) -> np.ndarray:
    """Float vectors ``[..., head_dim]`` as words ``[..., E]``; f16 rounds to nearest, ties to even."""
    if kv_dtype not in QUANTIZED:
        dtype = np.float16 if kv_dtype == "f16" else np.float32
        return np.ascontiguousarray(vectors.astype(dtype)).view(np.uint32)
    scales, numbers = _quantize(vectors, kv_dtype)
    if kv_dtype == "q4_0":
        numbers = numbers[..., ::2] | numbers[..., 1::2] << 4
    if scales.shape[-1] % 2:
        scales = np.concatenate([scales, np.zeros_like(scales[..., :1])], axis=-1)
    parts = [np.ascontiguousarray(part).view(np.uint32) for part in (numbers, scales)]
    return np.concatenate(parts, axis=-1)


def _quantize(vectors: np.ndarray, kv_dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """f16 scales ``[..., head_dim / 32]`` and a ``uint8`` for each dim. A block with an infinity or NaN gets
    a scale that is not finite, and reads as NaN."""
    x = vectors.astype(np.float32).reshape(*vectors.shape[:-1], vectors.shape[-1] // SCALE_DIMS, SCALE_DIMS)
    with np.errstate(over="ignore", invalid="ignore"):
        size = (x.view(np.uint32) & 0x7FFFFFFF).argmax(axis=-1)  # by bits, so that NaN is the largest
        extreme = np.take_along_axis(x, size[..., None], axis=-1)[..., 0]
        if kv_dtype == "q8_0":
            scale = (np.abs(extreme) * np.float32(1 / 127)).astype(np.float16)
        else:
            scale = (extreme * np.float32(-0.125)).astype(np.float16)
    d = scale.astype(np.float32)
    usable = np.isfinite(d) & (d != 0)
    inverse = np.where(usable, np.float32(1) / np.where(usable, d, np.float32(1)), np.float32(0))
    q = np.rint(np.where(usable[..., None], x, np.float32(0)) * inverse[..., None])
    q = np.clip(q, -127, 127) if kv_dtype == "q8_0" else np.clip(q + 8, 0, 15)
    return scale, q.astype(np.int8).view(np.uint8).reshape(vectors.shape)


def unpack(words: np.ndarray, kv_dtype: str) -> np.ndarray:
    """Words ``[..., E]`` as float32 vectors ``[..., head_dim]``."""
    if kv_dtype not in QUANTIZED:
        dtype = np.float16 if kv_dtype == "f16" else np.float32
        return np.ascontiguousarray(words).view(dtype).astype(np.float32)
    # E = W + ceil(head_dim / 64), and 64 dims are 64 / WORD_DIMS words of W
    w = words.shape[-1] - -(-words.shape[-1] // (2 * SCALE_DIMS // WORD_DIMS[kv_dtype] + 1))
    numbers = np.ascontiguousarray(words[..., :w]).view(np.uint8)
    if kv_dtype == "q4_0":
        numbers = np.stack([numbers & 15, numbers >> 4], axis=-1).reshape(*words.shape[:-1], -1)
        q = numbers.astype(np.float32) - 8
    else:
        q = numbers.view(np.int8).astype(np.float32)
    blocks = q.reshape(*q.shape[:-1], -1, SCALE_DIMS)
    scales = np.ascontiguousarray(words[..., w:]).view(np.float16)[..., : blocks.shape[-2]]
    with np.errstate(invalid="ignore"):
        x = blocks * scales.astype(np.float32)[..., None]
    return np.asarray(x.reshape(q.shape), np.float32)


def place_values(packed: np.ndarray, kv_dtype: str, head_dim: int) -> np.ndarray:
    """Packed values ``[..., 32 tokens, E]`` as a block of one head has them: ``[..., 32 E]``."""
    w, lead = data_words(kv_dtype, head_dim), packed.shape[:-2]
    scales = np.swapaxes(packed[..., w:], -1, -2)
    return np.concatenate([packed[..., :w].reshape(*lead, -1), scales.reshape(*lead, -1)], axis=-1)


def take_values(block: np.ndarray, kv_dtype: str, head_dim: int) -> np.ndarray:
    """The inverse of :func:`place_values`."""
    w, lead = data_words(kv_dtype, head_dim), block.shape[:-1]
    data = block[..., : w * BLOCK_TOKENS].reshape(*lead, BLOCK_TOKENS, w)
    scales = block[..., w * BLOCK_TOKENS :].reshape(*lead, -1, BLOCK_TOKENS)
    return np.concatenate([data, np.swapaxes(scales, -1, -2)], axis=-1)


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
    values = take_values(cache[v_offset + words].reshape(count, kv_heads, -1), kv_dtype, head_dim)
    k = unpack(keys.transpose(0, 3, 1, 2), kv_dtype).reshape(-1, kv_heads, head_dim)
    v = unpack(values.transpose(0, 2, 1, 3), kv_dtype).reshape(-1, kv_heads, head_dim)
    return k[:length], v[:length]

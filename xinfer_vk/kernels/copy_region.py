"""Writes each token's keys and values to its slot of the paged KV cache, in the cache's number format
(shaders/copy_region.comp)."""

from __future__ import annotations

from functools import partial

import numpy as np

from xinfer_vk.kernels import kv
from xinfer_vk.kernels import state as st
from xinfer_vk.kernels.base import Ref, ceil_div
from xinfer_vk.plan import Buffer, DeviceProfile, Kernel, OracleCall, Step, make_step

LOCAL_SIZE = 64


def _oracle(call: OracleCall, kv_dtype: str) -> None:
    p, state, cache = call.p, call.u32("state"), call.u32("cache")
    tokens = int(state[st.N_TOKENS])
    slots = state[st.SLOT : st.SLOT + tokens].astype(np.int64)
    block, place = (x[:, None, None] for x in np.divmod(slots, st.BLOCK_TOKENS))
    heads, words = np.arange(p.kv_heads)[:, None], np.arange(p.vector_words)
    start = (block * p.kv_heads + heads) * p.vector_words * st.BLOCK_TOKENS
    data = kv.data_words(kv_dtype, p.head_dim)
    of_key = words * st.BLOCK_TOKENS + place
    of_value = np.where(words < data, place * data + words, of_key)  # the scales stand as in a key
    for source, offset, stride, to in (
        ("k", p.k_offset, p.k_stride, p.cache_k_offset + start + of_key),
        ("v", p.v_offset, p.v_stride, p.cache_v_offset + start + of_value),
    ):
        dims = np.arange(p.kv_heads * p.head_dim)
        vectors = call.f32(source)[offset + np.arange(tokens)[:, None] * stride + dims]
        cache[to] = kv.pack(vectors.reshape(tokens, p.kv_heads, -1), kv_dtype)


KERNELS = {
    kv_dtype: Kernel(
        name=f"copy_region.{kv_dtype}",
        shader=f"copy_region.{kv_dtype}",
        bindings=("k", "v", "state", "cache"),
        params=(
            "k_offset:u", "k_stride:u", "v_offset:u", "v_stride:u", "cache_k_offset:u", "cache_v_offset:u",
            "kv_heads:u", "head_dim:u", "vector_words:u",
        ),
        spec=(("local_size", LOCAL_SIZE),),
        oracle=partial(_oracle, kv_dtype=kv_dtype),
    )
    for kv_dtype in kv.WORD_DIMS
}  # fmt: skip


def copy_kv(
    P: DeviceProfile,
    kv_dtype: str,
    k: Ref,
    k_stride: int,
    v: Ref,
    v_stride: int,
    cache: Buffer,
    k_offset: int,
    v_offset: int,
    kv_heads: int,
    head_dim: int,
    tokens: int,
    state: Buffer,
) -> list[Step]:
    """Write ``k`` and ``v``, [tokens][kv_heads * head_dim], of the rows in use to the slots the state
    names. ``cache`` as in :mod:`xinfer_vk.kernels.kv`."""
    words = kv.vector_words(kv_dtype, head_dim)
    kv.check_region(k_offset, v_offset)
    units = kv_heads * words  # of work: a word of K and V, or two blocks of dims of one of them
    if kv_dtype in kv.QUANTIZED:
        units = 2 * kv_heads * ceil_div(head_dim, 2 * kv.SCALE_DIMS)
    return [
        make_step(
            KERNELS[kv_dtype],
            {"k": k.buffer, "v": v.buffer, "state": state, "cache": cache},
            {
                "k_offset": k.offset, "k_stride": k_stride, "v_offset": v.offset, "v_stride": v_stride,
                "cache_k_offset": k_offset, "cache_v_offset": v_offset, "kv_heads": kv_heads,
                "head_dim": head_dim, "vector_words": words,
            },
            (ceil_div(units, LOCAL_SIZE), tokens),
        )
    ]  # fmt: skip

"""Queries and keys made ready for attention, in one dispatch: RMSNorm of every head, rotary position
embedding, and each token's keys and values written to its slot of the paged KV cache, in the cache's number
format (shaders/append_kv.comp). In decode steps attention does the same by itself, with the same code
(shaders/include/append.glsl), oracle and arguments."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from xinfer_vk.kernels import kv
from xinfer_vk.kernels import state as st
from xinfer_vk.kernels.base import Ref, ceil_div
from xinfer_vk.kernels.rmsnorm import normalized
from xinfer_vk.kernels.rope import check_rotary_dim, turned
from xinfer_vk.plan import Buffer, DeviceProfile, Kernel, OracleCall, Step, make_step

# Of the keys, and of the values, that a workgroup has in its shared memory: 8 KiB each.
STAGED_DIMS = 2048


@dataclass(frozen=True)
class HeadNorms:
    """RMSNorm of every query and every key head by itself: weights [head_dim], in one buffer."""

    q_weight: Ref
    k_weight: Ref
    eps: float


@dataclass(frozen=True)
class Rotation:
    """``table``: what :func:`xinfer_vk.kernels.rope.rope_table` makes, for every position that can occur or,
    with ``by_token``, for the rows of a batch. Dims of a head from ``rotary_dim`` on are not turned."""

    table: Ref
    rotary_dim: int
    by_token: bool = False


def _oracle(call: OracleCall, kv_dtype: str) -> None:
    p, tokens, x = call.p, int(call.u32("state")[st.N_TOKENS]), call.f32("qkv")
    heads = p.heads + 2 * p.kv_heads
    at = p.qkv_offset + np.arange(tokens)[:, None] * p.qkv_stride + np.arange(heads * p.head_dim)
    q, k, v = ready(call, x[at].reshape(tokens, heads, p.head_dim))
    if p.first == 0:
        x[at[:, : p.heads * p.head_dim]] = q.reshape(tokens, -1)
    store(call, kv_dtype, k, v)


def ready(call: OracleCall, qkv: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values of the first rows of the batch, ``qkv`` [rows, heads + 2 kv_heads, head_dim]:
    float64, keys and values as the f32 that the cache rounds."""
    p, state, vectors = call.p, call.u32("state"), qkv.astype(np.float64)
    tokens, kv_heads = len(qkv), p.kv_heads
    qk, v = vectors[:, :-kv_heads], vectors[:, -kv_heads:]
    if call.spec.norm:
        of_query = (np.arange(qk.shape[1]) < qk.shape[1] - kv_heads)[:, None]
        weight = np.where(of_query, p.q_weight_offset, p.k_weight_offset) + np.arange(qkv.shape[2])
        qk = normalized(qk, p.eps) * call.f32("weight")[weight]
    rows = np.arange(tokens) if p.by_token else state[st.POSITION : st.POSITION + tokens].astype(np.int64)
    angles = p.table_offset + (rows[:, None] * p.pairs + np.arange(p.pairs)) * 2
    qk = turned(qk, call.f32("table")[angles[..., None] + np.arange(2)])
    return qk[:, :-kv_heads], qk[:, -kv_heads:].astype(np.float32), v.astype(np.float32)


def store(call: OracleCall, kv_dtype: str, k: np.ndarray, v: np.ndarray) -> None:
    """Into the cache: ``k`` and ``v`` [tokens, kv_heads, head_dim] of the first rows of the batch."""
    p, cache = call.p, call.u32("cache")
    slots = call.u32("state")[st.SLOT : st.SLOT + len(k)].astype(np.int64)
    block, place = (x[:, None, None] for x in np.divmod(slots, st.BLOCK_TOKENS))
    data, count = kv.data_words(kv_dtype, k.shape[2]), kv.vector_words(kv_dtype, k.shape[2])
    heads, words = np.arange(p.kv_heads)[:, None], np.arange(count)
    start = (block * p.kv_heads + heads) * count * st.BLOCK_TOKENS
    of_key = words * st.BLOCK_TOKENS + place
    of_value = np.where(words < data, place * data + words, of_key)  # the scales stand as in a key
    cache[p.k_offset + start + of_key] = kv.pack(k, kv_dtype)
    cache[p.v_offset + start + of_value] = kv.pack(v, kv_dtype)


READY_PARAMS = (
    "pairs:u", "table_offset:u", "by_token:u", "q_weight_offset:u", "k_weight_offset:u", "eps:f",
)  # fmt: skip


def ready_arguments(
    state: Buffer, head_dim: int, norms: HeadNorms | None, rotation: Rotation | None
) -> tuple[dict[str, Buffer], dict[str, int | float]]:
    """The buffers and the parameters (:data:`READY_PARAMS`) that say how heads are made ready.

    Raises :class:`~xinfer_vk.errors.UsageError` for a rotary dim that cannot be, ``ValueError`` for norms in
    two buffers.
    """
    if rotation is not None:
        check_rotary_dim(rotation.rotary_dim, head_dim)
    if norms is not None and norms.q_weight.buffer is not norms.k_weight.buffer:
        raise ValueError("the weights of the norms of queries and keys must lie in one buffer")
    table = rotation.table if rotation else Ref(state)  # of which nothing is read then
    q_weight, k_weight, eps = (
        (norms.q_weight, norms.k_weight, norms.eps) if norms else (Ref(state), Ref(state), 0.0)
    )
    return {"weight": q_weight.buffer, "table": table.buffer}, {
        "pairs": rotation.rotary_dim // 2 if rotation else 0, "table_offset": table.offset,
        "by_token": int(rotation is not None and rotation.by_token), "q_weight_offset": q_weight.offset,
        "k_weight_offset": k_weight.offset, "eps": eps,
    }  # fmt: skip


@cache
def kernel(kv_dtype: str, local_size: int, norm: bool, each: int, staged: int) -> Kernel:
    return Kernel(
        name=f"append_kv.{kv_dtype}",
        shader=f"append_kv.{kv_dtype}",
        bindings=("qkv", "weight", "table", "state", "cache"),
        params=(
            "qkv_offset:u", "qkv_stride:u", "heads:u", "kv_heads:u", "head_dim:u", "first:u", *READY_PARAMS,
            "k_offset:u", "v_offset:u", "vector_words:u",
        ),
        spec=(("local_size", local_size), ("norm", int(norm)), ("each", each), ("staged", staged)),
        oracle=partial(_oracle, kv_dtype=kv_dtype),
    )  # fmt: skip


def append_kv(
    P: DeviceProfile,
    kv_dtype: str,
    qkv: Ref,
    stride: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    cache: Buffer,
    k_offset: int,
    v_offset: int,
    tokens: int,
    state: Buffer,
    norms: HeadNorms | None = None,
    rotation: Rotation | None = None,
) -> list[Step]:
    """Normalize and turn the queries and keys in each row in use of ``qkv``, and write the keys and values to
    the slot the state names. A row is [heads + 2 kv_heads][head_dim]: queries, which are changed in place,
    keys and values, which are not. ``cache`` as in :mod:`xinfer_vk.kernels.kv`.

    Raises :class:`~xinfer_vk.errors.UsageError` for dims and offsets that cannot be, ``ValueError`` for norms
    in two buffers.
    """
    words = kv.vector_words(kv_dtype, head_dim)
    kv.check_region(k_offset, v_offset)
    buffers, how = ready_arguments(state, head_dim, norms, rotation)
    first = 0 if norms or rotation else heads
    each = max(1, min(heads + kv_heads - first, STAGED_DIMS // head_dim)) if P.simd else 1
    return [
        make_step(
            kernel(
                kv_dtype, 8 if P.simd else 64 if head_dim >= 128 else 32, norms is not None, each,
                min(each, kv_heads) * head_dim,
            ),
            {"qkv": qkv.buffer, "state": state, "cache": cache, **buffers},
            {
                "qkv_offset": qkv.offset, "qkv_stride": stride, "heads": heads, "kv_heads": kv_heads,
                "head_dim": head_dim, "first": first, **how, "k_offset": k_offset, "v_offset": v_offset,
                "vector_words": words,
            },
            (ceil_div(heads + kv_heads - first, each), tokens),
        )
    ]  # fmt: skip

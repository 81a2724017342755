"""Attention over the paged KV cache: exact, causal, grouped-query, for any ragged batch. A layer may
have a sliding window, a soft cap on its logits, and a scale of its own.

One kernel (shaders/attention.comp) in two geometries. Prefill: a workgroup takes a *query tile*,
neighbouring tokens of one sequence, so that keys and values are read once for many query rows.
Decode: a workgroup takes one token, and a long sequence may be split into stretches that run in
parallel and are joined by shaders/attention_combine.comp (flash-decoding). Where each sequence has one new
token, attention also does what :mod:`xinfer_vk.kernels.append_kv` does before it otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from xinfer_vk.errors import UsageError
from xinfer_vk.kernels import kv
from xinfer_vk.kernels import state as st
from xinfer_vk.kernels.append_kv import READY_PARAMS, HeadNorms, Rotation, ready, ready_arguments, store
from xinfer_vk.kernels.base import Ref, ceil_div
from xinfer_vk.plan import Buffer, DeviceProfile, Kernel, OracleCall, Step, make_step

OCTET = 8  # lanes that share query rows
ALL_POSITIONS = 0xFFFFFFFF  # a window that ends nowhere
SPLIT_CONTEXT = 2048  # CPU devices: the second dispatch costs more than it brings for less context
COMBINE_LOCAL_SIZE = 64
GPU_KV_OCTETS = 8


@dataclass(frozen=True)
class Append:
    """What attention does first where it appends: as :func:`xinfer_vk.kernels.append_kv.append_kv`."""

    norms: HeadNorms | None = None
    rotation: Rotation | None = None


@dataclass(frozen=True)
class Geometry:
    """How a dispatch cuts its work. ``rows``: query rows of an octet, held in registers;
    ``row_octets`` octets of a workgroup take different rows, ``kv_octets`` different stretches of a sequence,
    which they join (by shared memory); ``splits`` workgroups share a sequence."""

    exchange: str  # "subgroup" or "shared": how the lanes of an octet exchange numbers
    rows: int
    row_octets: int
    kv_octets: int
    per_token: bool
    splits: int

    @property
    def local_size(self) -> int:
        return OCTET * self.row_octets * self.kv_octets


def query_tile(P: DeviceProfile, head_dim: int) -> int:
    """Most tokens of one query tile (state TILE_COUNT)."""
    return 16 if P.simd else 32


def exchange(P: DeviceProfile) -> str:
    """CPU devices with whole octets in a subgroup shuffle; others, and GPUs, use shared memory."""
    shuffles = "subgroup_shuffle" in P.features and P.subgroup_size % OCTET == 0
    return "subgroup" if P.simd and shuffles else "shared"


def per_token(P: DeviceProfile, tokens: int) -> bool:
    """Whether a batch of at most ``tokens`` is decoded token by token. A GPU wants the parallelism of
    split sequences for longer than a CPU, whose caches are close."""
    return tokens <= (8 if P.simd else 32)


def appends(P: DeviceProfile, tokens: int) -> bool:
    """Whether attention can append by itself where each of at most ``tokens`` is of another sequence. Query
    tiles cannot: a workgroup of theirs would make keys ready that others read from the cache."""
    return per_token(P, tokens)


def split_count(P: DeviceProfile, tokens: int, heads: int, max_context: int) -> int:
    """Workgroups that share a sequence: enough to fill the device, from what a plan knows. Short contexts
    use fewer of them: an octet's stretch is at least one block, and unused workgroups return at once."""
    if not per_token(P, tokens):
        return 1
    blocks = ceil_div(max_context, st.BLOCK_TOKENS)
    if P.simd:
        wanted = ceil_div(24, tokens * heads) if max_context >= SPLIT_CONTEXT else 1
        return max(1, min(wanted, blocks))
    return max(1, min(ceil_div(2048, tokens * heads), blocks // GPU_KV_OCTETS, 64))


def planned_context(P: DeviceProfile, tokens: int, heads: int, longest: int, capacity: int) -> int:
    """The context to plan for, where the longest sequence of a batch has ``longest`` tokens with its new ones
    and could have ``capacity``: as many as need no splits, and so no second dispatch, or all."""
    unsplit = SPLIT_CONTEXT - 1 if P.simd else (2 * GPU_KV_OCTETS - 1) * st.BLOCK_TOKENS
    short = longest <= unsplit and split_count(P, tokens, heads, capacity) > 1
    return unsplit if short else capacity


def geometry(
    P: DeviceProfile, heads: int, kv_heads: int, head_dim: int, tokens: int, max_context: int
) -> Geometry:
    """A row has head_dim / 8 sums, as many dims of its query and 4 scores in a lane. A GPU holds them in
    registers. CPU devices keep most of them on the stack and gain by many rows all the same: a load of K or
    V, some 200 instructions for an octet, then serves more of them. What bounds their rows is the time that
    compilation takes (1.5 s for 12 rows of head dim 64; with barriers several times as long)."""
    group = heads // kv_heads
    single = per_token(P, tokens)
    if P.simd:
        rows = min(12, 1024 // head_dim) if exchange(P) == "subgroup" else min(6, 384 // head_dim)
    elif single:
        rows = min(8, 512 // head_dim)
    else:
        rows = min(4, 256 // head_dim)
    rows = max(1, rows)
    together = group * (1 if single else query_tile(P, head_dim))  # rows of an item
    if single or P.simd:  # evenly: 7 rows as 4 + 3, not as 6 + 1
        rows = ceil_div(together, ceil_div(together, rows))
    splits = split_count(P, tokens, heads, max_context)
    if P.simd:
        return Geometry(exchange(P), rows, 1, 1, single, splits)
    if single:
        return Geometry(exchange(P), rows, 1, GPU_KV_OCTETS, True, splits)
    return Geometry(exchange(P), rows, 8, 1, False, 1)


def partial_words(P: DeviceProfile, tokens: int, heads: int, head_dim: int, max_context: int) -> int:
    """Words that attention needs at ``partials``: [tokens][heads][splits][head_dim + 2], or 0."""
    splits = split_count(P, tokens, heads, max_context)
    return tokens * heads * splits * (head_dim + 2) if splits > 1 else 0


def _window_start(seen: np.ndarray, window: int) -> np.ndarray:
    """First position that a query sees, ``seen`` being the one after its own."""
    return np.maximum(seen - window, 0)


def _weighted_sums(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """weights [rows, positions] @ values [positions, dims], where weight 0 means "not seen": a value
    there does not count even if it is not finite."""
    bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
    clean = values.copy()
    clean[bad] = 0.0
    out = weights @ clean
    for j in bad:
        rows = weights[:, j] != 0.0
        out[rows] += weights[rows, j, None] * values[j]
    return out


def _oracle(call: OracleCall, kv_dtype: str, append: bool) -> None:
    """Dense softmax attention, in float64 but for the inputs. [tokens, heads, head_dim]"""
    p, s = call.p, call.spec
    state, q, target = call.u32("state"), call.f32("q"), call.f32("target")
    dim, group, heads = s.head_dim, s.group, s.group * p.kv_heads
    if s.per_token:
        tokens = np.arange(state[st.N_TOKENS])
    else:
        count = int(state[st.N_QUERY_TILES])
        starts = state[st.TILE_START : st.TILE_START + count].astype(np.int64)
        counts = state[st.TILE_COUNT : st.TILE_COUNT + count].astype(np.int64)
        tokens = np.concatenate([np.arange(a, a + n) for a, n in zip(starts, counts)] or [np.arange(0)])
    rows = p.q_offset + tokens[:, None] * p.q_stride + np.arange(heads * dim)
    if append:
        new = rows[:, :1] + np.arange((heads + 2 * p.kv_heads) * dim)
        every_query, new_k, new_v = ready(call, q[new].reshape(len(tokens), -1, dim))
        store(call, kv_dtype, new_k, new_v)
    else:
        every_query = q[rows].astype(np.float64)
    every_query = every_query.reshape(len(tokens), p.kv_heads, group, dim)
    positions = state[st.POSITION + tokens].astype(np.int64)
    sequences = state[st.SEQUENCE + tokens]
    for sequence in np.unique(sequences):
        here = tokens[sequences == sequence]
        seen = positions[sequences == sequence] + 1  # positions each token attends to
        k, v = kv.read_sequence(
            call.u32("cache"), state, int(sequence), int(seen.max()), k_offset=p.k_offset,
            v_offset=p.v_offset, kv_heads=p.kv_heads, head_dim=dim, kv_dtype=kv_dtype,
        )  # fmt: skip
        queries = every_query[sequences == sequence]
        start = _window_start(seen, p.window)
        at = np.arange(len(k))
        visible = (at >= start[:, None]) & (at < seen[:, None])  # [tokens, positions]
        skipped = start // st.BLOCK_TOKENS
        blocks = -(-seen // st.BLOCK_TOKENS) - skipped
        # blocks in one split, of each token
        stretch = -(-blocks // (p.splits * s.kv_octets)) * s.kv_octets
        parts = (at // st.BLOCK_TOKENS - skipped[:, None]) // stretch[:, None]  # [tokens, positions]
        for h in range(p.kv_heads):
            scores = queries[:, h] @ k[:, h].T.astype(np.float64) * p.scale  # [tokens, group, positions]
            if s.capped:
                scores = p.softcap * np.tanh(scores / p.softcap)
            for part in range(p.splits):
                inside = visible & (parts == part)
                some = np.flatnonzero(inside.any(axis=1))
                if not some.size:
                    continue
                shown = np.where(inside[some, None], scores[some], -np.inf)
                highest = shown.max(axis=-1, keepdims=True)  # [tokens, group, 1]
                weights = np.where(inside[some, None], np.exp(shown - highest), 0.0)
                total = weights.sum(axis=-1, keepdims=True)
                sums = _weighted_sums(weights.reshape(-1, len(k)), v[:, h].astype(np.float64))
                sums = sums.reshape(*total.shape[:2], dim)
                for g in range(group):
                    head = h * group + g
                    if s.partial:
                        at = p.target_offset + ((here[some] * heads + head) * p.splits + part) * (dim + 2)
                        words = np.concatenate([sums[:, g], highest[:, g], total[:, g]], axis=1)
                    else:
                        at = p.target_offset + here[some] * p.out_stride + head * dim
                        words = sums[:, g] / total[:, g]
                    target[at[:, None] + np.arange(words.shape[1])] = words


def kernel(
    kv_dtype: str, g: Geometry, head_dim: int, group: int, capped: bool, append: bool, norm: bool
) -> Kernel:
    name = f"attention.{kv_dtype}.{g.exchange}.{'appended' if append else 'cached'}"
    return Kernel(
        name=name,
        shader=name,
        bindings=("q", "cache", "cache4", "state", "target", *(("weight", "table") if append else ())),
        params=(
            "q_offset:u", "q_stride:u", "target_offset:u", "out_stride:u", "k_offset:u", "v_offset:u",
            "kv_heads:u", "splits:u", "row_groups:u", "window:u", "scale:f", "softcap:f",
            *(READY_PARAMS if append else ()),
        ),
        spec=(
            ("local_size", g.local_size), ("head_dim", head_dim), ("group", group), ("rows", g.rows),
            ("row_octets", g.row_octets), ("kv_octets", g.kv_octets), ("per_token", int(g.per_token)),
            ("partial", int(g.splits > 1)), ("capped", int(capped)), ("norm", int(norm)),
        ),
        oracle=partial(_oracle, kv_dtype=kv_dtype, append=append),
    )  # fmt: skip


def _combine_oracle(call: OracleCall) -> None:
    p, state = call.p, call.u32("state")
    tokens = int(state[st.N_TOKENS])
    shape = (tokens, p.heads, p.splits, p.head_dim + 2)
    partials = call.f32("partials")[p.partials_offset :][: np.prod(shape)].reshape(shape).astype(np.float64)
    target = call.f32("target")
    for t in range(tokens):
        position = state[st.POSITION + t].astype(np.int64)
        skipped = _window_start(position + 1, p.window) // st.BLOCK_TOKENS
        blocks = int(position // st.BLOCK_TOKENS + 1 - skipped)
        used = -(-blocks // (-(-blocks // (p.splits * p.octets)) * p.octets))
        mine = partials[t, :, :used]
        highest = mine[..., -2]
        weights = np.exp(highest - highest.max(axis=1, keepdims=True))[..., None]
        out = (weights * mine[..., : p.head_dim]).sum(axis=1) / (weights * mine[..., -1:]).sum(axis=1)
        at = p.target_offset + t * p.out_stride
        target[at : at + p.heads * p.head_dim] = out.reshape(-1)


COMBINE = Kernel(
    name="attention_combine",
    shader="attention_combine",
    bindings=("partials", "state", "target"),
    params=(
        "partials_offset:u",
        "target_offset:u",
        "out_stride:u",
        "head_dim:u",
        "heads:u",
        "splits:u",
        "window:u",
        "octets:u",
    ),
    spec=(("local_size", COMBINE_LOCAL_SIZE),),
    oracle=_combine_oracle,
)


def attention(
    P: DeviceProfile,
    kv_dtype: str,
    q: Ref,
    q_stride: int,
    out: Ref,
    out_stride: int,
    cache: Buffer,
    k_offset: int,
    v_offset: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    tokens: int,
    max_context: int,
    state: Buffer,
    partials: Ref,
    *,
    window: int | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    append: Append | None = None,
) -> list[Step]:
    """``out[t, h] = softmax(cap(scale q[t, h] · K)) V`` over positions ``0 … position[t]`` of the token's
    own sequence, for the rows in use of a batch of at most ``tokens``.

    ``window``: only the last so many of those positions are seen, the token's own included
    (``sliding_window`` of transformers' Mistral, Gemma and others), and only their blocks are visited;
    None: all.
    ``softcap``: ``cap(x) = softcap tanh(x / softcap)`` (``attn_logit_softcapping`` of Gemma 2); 0: none.
    ``scale``: None means ``1 / sqrt(head_dim)``.
    ``append``: ``q`` has each row's keys and values behind its queries, all as the product made them, and
    what append_kv does is done here first; ``q`` stays as it is. For batches that :func:`appends` allows.

    ``q`` and ``out`` are [tokens][heads * head_dim] with their strides; ``cache`` as in
    :mod:`xinfer_vk.kernels.kv`. Batches too large for :func:`per_token` need the state's query tiles, of at
    most :func:`query_tile` tokens each. ``partials`` has :func:`partial_words` words of room.
    Raises :class:`UsageError` for shapes that the kernel cannot do.
    """
    if kv_heads < 1 or heads % kv_heads:
        raise UsageError(f"{heads} query heads cannot share {kv_heads} KV heads: they must divide evenly")
    kv.vector_words(kv_dtype, head_dim)
    kv.check_region(k_offset, v_offset)
    if window is not None and not 1 <= window < ALL_POSITIONS:
        raise UsageError(f"an attention window of {window} positions is not possible: it must be at least 1")
    if not 0.0 <= softcap < np.inf:
        raise UsageError(
            f"an attention soft cap of {softcap} is not possible: it must be positive, or 0 for none"
        )
    if window is not None:  # a plan never visits more blocks than a window can touch
        max_context = min(max_context, window + st.BLOCK_TOKENS)
    g = geometry(P, heads, kv_heads, head_dim, tokens, max_context)
    assert append is None or appends(P, tokens), "query tiles cannot append"
    reach = ALL_POSITIONS if window is None else window
    group = heads // kv_heads
    tile = 1 if g.per_token else query_tile(P, head_dim)
    row_groups = ceil_div(tile * group, g.rows * g.row_octets)
    target = partials if g.splits > 1 else out
    ready_buffers, how = (
        ready_arguments(state, head_dim, append.norms, append.rotation) if append else ({}, {})
    )
    items = tokens
    if not g.per_token:
        # Full tiles are few. Only a ragged batch has more, and the kernel strides over those: an unused
        # workgroup would cost a CPU device 60 ns, a tenth of the whole for 512 tokens.
        items = min(tokens, max(16, (1 if P.simd else 4) * ceil_div(tokens, tile)))
    steps = [
        make_step(
            kernel(
                kv_dtype, g, head_dim, group, softcap > 0.0, append is not None,
                append is not None and append.norms is not None,
            ),
            {
                "q": q.buffer, "cache": cache, "cache4": cache, "state": state, "target": target.buffer,
                **ready_buffers,
            },
            {
                "q_offset": q.offset, "q_stride": q_stride, "target_offset": target.offset,
                "out_stride": out_stride, "k_offset": k_offset, "v_offset": v_offset, "kv_heads": kv_heads,
                "splits": g.splits, "row_groups": row_groups, "window": reach,
                "scale": float(head_dim**-0.5 if scale is None else scale), "softcap": softcap,
                **how,
            },
            (items, kv_heads, row_groups * g.splits),
            "attention",
        )
    ]  # fmt: skip
    if g.splits > 1:
        steps.append(
            make_step(
                COMBINE,
                {"partials": partials.buffer, "state": state, "target": out.buffer},
                {
                    "partials_offset": partials.offset, "target_offset": out.offset, "out_stride": out_stride,
                    "head_dim": head_dim, "heads": heads, "splits": g.splits, "window": reach,
                    "octets": g.kv_octets,
                },
                (ceil_div(heads * head_dim, COMBINE_LOCAL_SIZE), tokens),
                "attention combine",
            )
        )  # fmt: skip
    return steps

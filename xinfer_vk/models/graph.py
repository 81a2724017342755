"""The vocabulary a model file is written in: each method adds one operation's steps to a plan.

A graph is made for one batch shape: ``tokens`` rows enter, ``outputs`` rows leave as logits. All
mutable activations are declared in one place, :class:`Activations`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from xinfer_vk.cache import KVCache
from xinfer_vk.kernels.advance import advance
from xinfer_vk.kernels.append_kv import HeadNorms, Rotation, append_kv
from xinfer_vk.kernels.argmax import argmax, argmax_partial_words, join
from xinfer_vk.kernels.attention import Append, appends, attention, partial_words
from xinfer_vk.kernels.base import Ref, ceil_div
from xinfer_vk.kernels.embed import embed
from xinfer_vk.kernels.experts import expert_linear, pairs_per_tile
from xinfer_vk.kernels.halves import halves_words, multiplies_halves, split_halves
from xinfer_vk.kernels.matmul import (
    ARGMAX_ROWS,
    argmax_rows,
    ends_norms,
    linear,
    planned_rows,
    tuned_variant,
)
from xinfer_vk.kernels.matmul_a8 import FORMATS as A8_FORMATS
from xinfer_vk.kernels.matmul_a8 import tuned_choice as tuned_a8
from xinfer_vk.kernels.order_columns import order_columns
from xinfer_vk.kernels.quantize_rows import quantize_rows
from xinfer_vk.kernels.rmsnorm import Then, rmsnorm
from xinfer_vk.kernels.routing import Routing, combine, group, route, routing_words
from xinfer_vk.kernels.softcap import softcap
from xinfer_vk.kernels.split_norm import Begin, begun_words, can_split
from xinfer_vk.kernels.swiglu import swiglu
from xinfer_vk.models.config import ModelConfig
from xinfer_vk.plan import Buffer, BufferKind, DeviceProfile, Plan, Runtime, Step
from xinfer_vk.weights.device import ExpertMatrix, Matrix

BRIEF_TOKENS = 64  # of a prompt that is read before kernels that take seconds to compile would pay


@dataclass(frozen=True)
class Rows:
    """A row-major f32 matrix on the device: row ``i`` begins at ``ref.offset + i * stride``."""

    ref: Ref
    stride: int

    def columns(self, first: int) -> Rows:
        """The same rows from column ``first`` on."""
        return Rows(Ref(self.ref.buffer, self.ref.offset + first), self.stride)


@dataclass(frozen=True)
class RopeTable:
    """Cosines and sines, ``[rows, rotary_dim / 2, 2]``: a row for each position or, ``by_token``, for each
    token of the batch."""

    ref: Ref
    by_token: bool = False


@dataclass(frozen=True)
class Product:
    """A product by one matrix into ``rows`` is the steps ``first`` to ``end`` of a graph. ``again``: makes
    them anew, with another ``epilogue`` or a norm of the result that they ``begin``."""

    rows: Rows
    first: int
    end: int
    epilogue: str
    again: Callable[..., list[Step]]


class Activations:
    """Every intermediate result of a step, in one device buffer, for at most ``tokens`` rows in and
    ``outputs`` rows out. A plan for a smaller batch uses the first rows. ``ordered_width``: columns of the
    widest matrix with an order of its own; ``quantized_width``: words of the widest quantized row.

    ``partials`` is working space of attention and argmax, which never run at the same time.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: ModelConfig,
        *,
        tokens: int,
        outputs: int,
        max_context: int,
        ordered_width: int = 0,
        quantized_width: int = 0,
    ) -> None:
        c, profile = config, runtime.profile
        q_dim, kv_dim = c.heads * c.head_dim, c.kv_heads * c.head_dim
        planned = sorted({planned_rows(profile, count) for count in range(1, tokens + 1)}) or [1]
        partials = max(
            *(partial_words(profile, t, c.heads, c.head_dim, max_context) for t in planned),
            argmax_partial_words(profile, c.vocab_size, outputs),
            1,
        )
        most, widest = max(tokens, outputs), max(c.hidden_size, q_dim, c.intermediate_size)
        e, dense = c.experts, tokens if c.experts is None or not all(c.experts.layers) else 0
        pairs = 0 if e is None else tokens * e.per_token  # of a token and one of its experts
        halves = max(halves_words(most, widest), halves_words(pairs, e.width) if e else 0)
        halves = halves if multiplies_halves(profile, most) else 0
        normed = begun_words(c.hidden_size) if can_split(c.hidden_size) else c.hidden_size
        sizes = {
            "residual": (tokens, c.hidden_size),  # x: the residual stream
            "normed": (tokens, normed),  # RMSNorm(x), or the rows of a begun one
            "qkv": (tokens, q_dim + 2 * kv_dim),  # queries, keys, values side by side
            "attended": (tokens, q_dim),  # attention's output, all heads
            "gate_up": (dense, 2 * c.intermediate_size),  # only where gate and up cannot be fused
            "hidden": (dense, c.intermediate_size),  # act(gate) * up
            "router": (tokens, e.count if e else 0),  # logits of the experts
            "routing": (1, routing_words(tokens, e.per_token) if e else 0),  # what was chosen
            "expert_hidden": (pairs, e.width if e else 0),  # silu(gate) * up
            "expert_out": (pairs, c.hidden_size),  # of each expert
            "final": (outputs, c.hidden_size),  # RMSNorm(x) of the rows that want logits
            "logits": (outputs, c.vocab_size),
            "ordered": (most, ordered_width),  # a product's input in its matrix' order
            "halves": (1, halves),  # a product's input in two f16 planes, for matrix units
            "quantized": (most, quantized_width),  # a product's input in 8 bits
            "partials": (1, partials),
        }
        total, offsets = 0, {}
        for name, (rows, width) in sizes.items():
            offsets[name] = total
            total += -(-rows * width // 64) * 64  # 256-byte aligned
        self.buffer = runtime.allocate("activations", total, BufferKind.SCRATCH)
        rows_of = {name: Rows(Ref(self.buffer, offsets[name]), width) for name, (_, width) in sizes.items()}
        self.residual = rows_of["residual"]
        self.normed = rows_of["normed"]
        self.qkv = rows_of["qkv"]
        self.attended = rows_of["attended"]
        self.gate_up = rows_of["gate_up"]
        self.hidden = rows_of["hidden"]
        self.router = rows_of["router"]
        self.routing = rows_of["routing"].ref
        self.expert_hidden = rows_of["expert_hidden"]
        self.expert_out = rows_of["expert_out"]
        self.final = rows_of["final"]
        self.logits = rows_of["logits"]
        self.ordered = rows_of["ordered"]
        self.halves = rows_of["halves"].ref
        self.quantized = rows_of["quantized"]
        self.partials = rows_of["partials"].ref


class Graph:
    """Collects the steps of one plan. Shapes in the methods' comments are ``[rows, columns]``;
    T is ``tokens``, R is ``outputs``. ``max_context``: of any sequence, with its new tokens.
    ``decoding``: each token is of another sequence.
    ``activation_dtype``: of the inputs of products, "f32" or "int8"."""

    def __init__(
        self,
        profile: DeviceProfile,
        config: ModelConfig,
        *,
        tokens: int,
        outputs: int,
        activations: Activations,
        state: Buffer,
        cache: KVCache,
        rope_tables: Mapping[str, RopeTable],
        max_context: int,
        decoding: bool,
        activation_dtype: str = "f32",
    ) -> None:
        self.profile, self.config, self.activation_dtype = profile, config, activation_dtype
        self.tokens, self.outputs, self.max_context, self.decoding = tokens, outputs, max_context, decoding
        self.act, self.state, self.cache, self.rope_tables = activations, state, cache, rope_tables
        self.steps: list[Step] = []
        self._product: Product | None = None  # the last one
        self.ends_at_final_norm = False  # hidden states are wanted: no product of the head

    def embed(self, table: Matrix, out: Rows) -> None:
        """``out[t] = scale * table[token_id[t]]``, the beginning of the residual stream, which is kept
        divided by ``config.residual_scale``: what a block adds need not be scaled then.  [T, hidden]"""
        c = self.config
        self.steps += embed(
            self.profile, table.fmt, table.parts, table.cols, self.state, out.ref, out.stride, self.tokens,
            c.embedding_scale / c.residual_scale,
        )  # fmt: skip

    def rms_norm(self, x: Rows, weight: Ref, out: Rows, dim: int) -> None:
        """``out = x / sqrt(mean(x²) + eps) * weight`` of the residual stream  [T, dim]"""
        self.steps += rmsnorm(
            self.profile, x.ref, x.stride, weight, out.ref, out.stride, dim,
            self.config.residual_norm_eps, self.tokens, self.state,
        )  # fmt: skip

    def rms_norm_add(
        self, x: Rows, weight: Ref, residual: Rows, dim: int, then: tuple[Ref, Rows] | None = None
    ) -> None:
        """``residual += x / sqrt(mean(x²) + eps) * weight``: a norm after a block, and the residual
        connection. ``then`` = (weight, out): in the same pass, ``out = RMSNorm(residual)``, the norm
        before the next block.  [T, dim]"""
        c = self.config
        second = Then(then[0], then[1].ref, then[1].stride, c.residual_norm_eps) if then else None
        self.steps += rmsnorm(
            self.profile, x.ref, x.stride, weight, residual.ref, residual.stride, dim,
            c.rms_norm_eps, self.tokens, self.state, add=True, then=second,
        )  # fmt: skip

    def linear(
        self,
        x: Rows,
        weights: Sequence[Matrix],
        out: Rows,
        epilogue: str = "store",
        label: str = "linear",
        norm: Ref | None = None,
    ) -> None:
        """``out = x Wᵀ + b`` for matrices stacked by rows: each fills the next columns of ``out``.

        ``epilogue``: "store", "add" (``out += …``, the residual connection), "swiglu" or "geglu" (rows
        come in gate/up pairs, ``out[i] = silu(v[2i]) * v[2i+1]`` or gelu). ``norm``: the weight of an RMSNorm
        of x, the residual stream, before all that.  [T, out features]
        """
        norm_eps = None
        if norm is not None:
            if self._begins_norm(x, norm, weights, self.tokens):
                norm_eps = self.config.residual_norm_eps
            else:
                self.rms_norm(x, norm, self.act.normed, self.config.hidden_size)
            x = self.act.normed
        self._multiply(x, weights, out, self.tokens, "tokens", epilogue, label, norm_eps)

    def _begins_norm(self, x: Rows, weight: Ref, weights: Sequence[Matrix], rows: int) -> bool:
        """Whether ``act.normed`` holds the begun rows of an RMSNorm of x, which the products by ``weights``
        then must end: makes the product that has just added to x begin it, if it is one and they all can."""
        added, act = self._product, self.act
        if (
            added is None
            or added.epilogue != "add"
            or added.rows != x
            or added.end != len(self.steps)
            or not all(
                w.order is None
                and not self._takes_8_bits(w)
                and ends_norms(self.profile, w.fmt, w.rows, w.cols, rows)
                for w in weights
            )
        ):
            return False
        self.steps[added.first :] = added.again(begin=Begin(weight, act.normed.ref))
        return True

    def _multiply(
        self,
        x: Rows,
        weights: Sequence[Matrix],
        out: Rows,
        rows: int,
        count: str,
        epilogue: str,
        label: str,
        norm_eps: float | None = None,
    ) -> None:
        """Products of one input, which is brought into the order and the format that each matrix wants.
        ``norm_eps``: the input is rows of a begun norm."""
        halves: Ref | None = None  # of x, in its own order
        quantized: Rows | None = None
        end_of_products = -1
        for w in weights:
            at = self._ordered(x, w, rows, count)
            product: Callable[..., list[Step]] = partial(linear, brief=self.outputs < rows <= BRIEF_TOKENS)
            if self._takes_8_bits(w):
                if quantized is None or w.order is not None:
                    quantized = self._quantized(at, w.cols, rows, count)
                at = quantized
                product = partial(linear, choice=tuned_a8(self.profile, w.fmt, w.rows, w.cols, rows))
                quantized = None if w.order is not None else quantized
            elif self._takes_halves(w, rows):
                if halves is None or w.order is not None:
                    halves = self._halves(at, w.cols, rows, count)
                product = partial(linear, halves=halves)
                halves = None if w.order is not None else halves
            first = len(self.steps)
            product = partial(
                product, self.profile, w.fmt, w.parts, w.cols, at.ref, at.stride, out.ref,
                y_stride=out.stride, tokens=rows, state=self.state, bias=w.bias, epilogue=epilogue,
                count=count, label=label, independent=first == end_of_products, norm_eps=norm_eps,
            )  # fmt: skip
            self.steps += product()
            end_of_products = len(self.steps)
            if len(weights) == 1:
                self._product = Product(out, first, end_of_products, epilogue, product)
            out = out.columns(w.rows)

    def _takes_8_bits(self, w: Matrix) -> bool:
        return self.activation_dtype == "int8" and w.fmt in A8_FORMATS

    def _quantized(self, x: Rows, cols: int, rows: int, count: str) -> Rows:
        """The rows of ``x`` in 8 bits."""
        out = self.act.quantized
        self.steps += quantize_rows(
            self.profile, x.ref, x.stride, out.ref, out.stride, cols, rows, self.state, count
        )
        return out

    def _takes_halves(self, w: Matrix | ExpertMatrix, rows: int) -> bool:
        return tuned_variant(self.profile, w.fmt, w.rows, w.cols, rows).startswith("coop")

    def _halves(self, x: Rows, cols: int, rows: int, count: str) -> Ref:
        """The rows of ``x`` for matrix units."""
        self.steps += split_halves(x.ref, x.stride, cols, self.act.halves, rows, self.state, count)
        return self.act.halves

    def _ordered(self, x: Rows, w: Matrix, rows: int, count: str) -> Rows:
        """``x`` with its columns in the order of those of a matrix (GPTQ's activation order)."""
        if w.order is None:
            return x
        out = self.act.ordered
        self.steps += order_columns(
            self.profile, x.ref, x.stride, w.order, out.ref, out.stride, w.cols, rows, self.state, count
        )
        return out

    def gated_mlp_input(self, x: Rows, gate_up: Sequence[Matrix], out: Rows, norm: Ref | None = None) -> None:
        """``out = act(x Wgᵀ) * (x Wuᵀ)`` with the config's activation: one pass when gate and up are
        interleaved in one matrix, two products and an elementwise kernel when their formats differ.
        ``norm`` as in :meth:`linear`.  [T, intermediate]"""
        act = self.config.hidden_act
        if len(gate_up) == 1:
            self.linear(x, gate_up, out, {"silu": "swiglu", "gelu_tanh": "geglu"}[act], "gate_up", norm)
            return
        pair, width = self.act.gate_up, self.config.intermediate_size
        self.linear(x, gate_up, pair, label="gate, up", norm=norm)
        up = pair.columns(width)
        self.steps += swiglu(
            self.profile,
            pair.ref,
            up.ref,
            out.ref,
            pair.stride,
            up.stride,
            out.stride,
            width,
            self.tokens,
            self.state,
            act,
        )

    def route(self, logits: Rows, products: Sequence[ExpertMatrix]) -> Routing:
        """Which experts each row goes to, after the router's ``logits`` [T, experts], and with what weight;
        listed for the ``products`` that follow."""
        e, at = self.config.experts, self.act.routing
        assert e is not None
        tile = pairs_per_tile(
            self.profile, [(w.fmt, w.cols) for w in products], self.tokens, e.count, e.per_token
        )
        routing = Routing(at.buffer, at.offset, self.tokens, e.count, e.per_token, tile)
        self.steps += route(self.profile, logits.ref, logits.stride, routing, e.normalized, self.state)
        self.steps += group(self.profile, routing, self.state)
        return routing

    def experts(
        self,
        routing: Routing,
        x: Rows,
        weights: ExpertMatrix,
        out: Rows,
        epilogue: str,
        label: str,
        *,
        x_of_tokens: bool = False,
    ) -> None:
        """``out[pair] = x[pair] W_eᵀ``, or x of the pair's token, with the expert e that the pair chose;
        ``epilogue`` as in :func:`xinfer_vk.kernels.matmul.linear`.  [T * per_token, out features]"""
        halves, r = None, routing
        if self._takes_halves(weights, r.tile):
            rows, counted = (r.tokens, self.state) if x_of_tokens else (r.pairs, r.buffer)
            halves = self.act.halves
            self.steps += split_halves(
                x.ref, x.stride, weights.cols, halves, rows, counted,
                "tokens" if x_of_tokens else r.pairs_in_use,
            )  # fmt: skip
        self.steps += expert_linear(
            self.profile, weights.fmt, weights.parts, weights.rows, weights.cols, r, x.ref, x.stride,
            x_of_tokens, out.ref, out.stride, epilogue, label, halves,
        )  # fmt: skip

    def combine(self, routing: Routing, x: Rows, out: Rows) -> None:
        """``out += `` the weighted sum of x over the pairs of each token  [T, hidden]"""
        self.steps += combine(
            self.profile, routing, x.ref, x.stride, out.ref, out.stride, self.config.hidden_size, self.state
        )

    def attention(
        self,
        layer: int,
        rope: str | None,
        head_norms: tuple[Ref, Ref] | None = None,
        *,
        window: int | None = None,
        softcap: float = 0.0,
        scale: float | None = None,
    ) -> None:
        """``attended = softmax(scale q Kᵀ) V`` over each token's own sequence up to its position, of the
        queries, keys and values in ``act.qkv``. First every query and key head is turned by rotary position
        embedding (Su et al. 2021), and keys and values go to the token's slot of the paged cache.

        ``rope``: kind of the table, see :meth:`ModelConfig.rope`; None for a layer that knows no positions.
        ``head_norms``: weights [head_dim] of an RMSNorm of each query and each key head before it.
        ``scale``: 1 / √d unless another is given; ``window`` and ``softcap`` as in
        :func:`xinfer_vk.kernels.attention.attention`."""
        c, x, out, where = self.config, self.act.qkv, self.act.attended, self.cache.layers[layer]
        table = self.rope_tables[rope] if rope is not None else None
        norms = HeadNorms(*head_norms, c.rms_norm_eps) if head_norms else None
        rotation = Rotation(table.ref, c.rotary_dim, table.by_token) if table else None
        together = self.decoding and appends(self.profile, self.tokens)
        if not together:
            self.steps += append_kv(
                self.profile, self.cache.kv_dtype, x.ref, x.stride, c.heads, c.kv_heads, c.head_dim,
                where.buffer, where.k_offset, where.v_offset, self.tokens, self.state, norms, rotation,
            )  # fmt: skip
        self.steps += attention(
            self.profile, self.cache.kv_dtype, x.ref, x.stride, out.ref, out.stride, where.buffer,
            where.k_offset, where.v_offset, c.heads, c.kv_heads, c.head_dim, self.tokens,
            self.max_context, self.state, self.act.partials, window=window, softcap=softcap, scale=scale,
            append=Append(norms, rotation) if together else None,
        )  # fmt: skip

    def head(self, x: Rows, norm: Ref, weights: Matrix) -> None:
        """``logits[i] = RMSNorm(x[output_row[i]]) Wᵀ`` of the rows of the residual stream that want logits,
        with the config's soft cap if it has one  [R, vocabulary]"""
        logits, final, norm_eps = self.act.logits, self.act.final, self.config.residual_norm_eps
        # A plan for one row has nothing to gather: if logits are wanted, then its.
        wants_logits = not self.ends_at_final_norm
        begun = wants_logits and self.tokens == 1 and self._begins_norm(x, norm, (weights,), self.outputs)
        if not begun:
            self.steps += rmsnorm(
                self.profile, x.ref, x.stride, norm, final.ref, final.stride, self.config.hidden_size,
                norm_eps, self.outputs, self.state, gather=True,
            )  # fmt: skip
        if not wants_logits:
            return
        self._multiply(
            self.act.normed if begun else final, (weights,), logits, self.outputs, "outputs", "store", "head",
            norm_eps if begun else None,
        )  # fmt: skip
        if cap := self.config.logit_softcap:
            self.steps += softcap(
                self.profile, logits.ref, logits.stride, self.config.vocab_size, cap, self.outputs, self.state
            )

    def argmax(self, result: Ref) -> None:
        """``result[i] = argmax(logits[i])``; a row with NaN gives 0xFFFFFFFF. Of logits that a product has
        just made only the largest of every few are kept, where the logits would be."""
        logits, made = self.act.logits, self._product
        if made is not None and made.rows == logits and made.end == len(self.steps):
            stride = ceil_div(self.config.vocab_size, ARGMAX_ROWS)
            steps = made.again(epilogue="argmax", y_stride=2 * stride)
            slices = ceil_div(self.config.vocab_size, argmax_rows(steps))
            joined = join(self.profile, logits.ref, stride, slices, self.outputs, result, self.state)
            self.steps[made.first :] = [*steps, joined]
            return
        self.steps += argmax(
            self.profile, logits.ref, logits.stride, self.config.vocab_size, self.outputs, result,
            self.act.partials, self.state,
        )  # fmt: skip

    def advance(self, result: Ref) -> None:
        """``result[i]``, the token that row ``i`` chose, is its input of the next step."""
        self.steps += advance(self.profile, result, self.config.vocab_size, self.outputs, self.state)

    def plan(self, name: str) -> Plan:
        return Plan(name, tuple(self.steps))

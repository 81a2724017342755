"""What the families' decoders are built of: their weights, and the blocks that several of them share.

A family file (``llama.py``, ``gemma3.py``, …) says which tensors there are and assembles these blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from xinfer_vk.kernels.base import Ref
from xinfer_vk.models.config import ModelConfig
from xinfer_vk.models.experts import Experts, add_experts, load_experts
from xinfer_vk.models.graph import Graph
from xinfer_vk.weights.device import Matrix, WeightPlanner

# The norms before attention and before the MLP, by their names in Hugging Face's checkpoints.
INPUT_NORM = "input_layernorm"
MLP_NORM = "post_attention_layernorm"


@dataclass(frozen=True)
class Layer:
    """One block's weights. A projection is one matrix, or several stacked ones of unlike formats.
    ``norms``: by Hugging Face's name within the layer, as ``norms["input_layernorm"]``."""

    norms: Mapping[str, Ref]
    qkv: tuple[Matrix, ...]  # [(heads + 2 kv_heads) * head_dim, hidden]
    output: tuple[Matrix, ...]  # [hidden, heads * head_dim]
    gate_up: tuple[Matrix, ...]  # [2 * intermediate, hidden], rows interleaved when it is one matrix
    down: tuple[Matrix, ...]  # [hidden, intermediate]
    experts: Experts | None = None  # instead of gate_up and down


@dataclass(frozen=True)
class DecoderWeights:
    embed: Matrix  # [vocabulary, hidden]
    layers: tuple[Layer, ...]
    final_norm: Ref  # [hidden]
    head: Matrix  # [vocabulary, hidden]; the embedding itself when tied


def matrices(weights: Any) -> Iterator[Matrix]:
    """Every matrix in a family's weights: dataclasses and tuples of them."""
    if isinstance(weights, Matrix):
        yield weights
    elif isinstance(weights, tuple):
        for item in weights:
            yield from matrices(item)
    elif is_dataclass(weights) and not isinstance(weights, Ref):
        for item in fields(weights):
            yield from matrices(getattr(weights, item.name))


def load_layer(planner: WeightPlanner, c: ModelConfig, index: int, norms: Mapping[str, int]) -> Layer:
    """Declare the tensors of block ``index``; they are on the device after ``planner.upload``."""
    name = f"model.layers.{index}"
    q_dim, kv_dim = c.heads * c.head_dim, c.kv_heads * c.head_dim

    def stack(
        parts: dict[str, int], cols: int, bias: bool = False, interleave: bool = False
    ) -> tuple[Matrix, ...]:
        return planner.stack(
            [(f"{name}.{part}", rows) for part, rows in parts.items()], cols, bias=bias, interleave=interleave
        )

    experts = load_experts(planner, c, f"{name}.mlp") if c.has_experts(index) else None
    return Layer(
        norms={norm: planner.vector(f"{name}.{norm}.weight", size) for norm, size in norms.items()},
        qkv=stack(
            {"self_attn.q_proj": q_dim, "self_attn.k_proj": kv_dim, "self_attn.v_proj": kv_dim},
            c.hidden_size,
            bias=c.attention_bias,
        ),
        output=stack({"self_attn.o_proj": c.hidden_size}, q_dim, bias=c.attention_output_bias),
        gate_up=()
        if experts
        else stack(
            {"mlp.gate_proj": c.intermediate_size, "mlp.up_proj": c.intermediate_size},
            c.hidden_size,
            bias=c.mlp_bias,
            interleave=True,
        ),
        down=() if experts else stack({"mlp.down_proj": c.hidden_size}, c.intermediate_size, bias=c.mlp_bias),
        experts=experts,
    )


def load_decoder(
    planner: WeightPlanner, c: ModelConfig, norms: Mapping[str, int] | None = None
) -> DecoderWeights:
    """Declare every tensor of a decoder with ``c.layers`` blocks. ``norms``: name within the layer and
    length of each block's norms, by default :data:`INPUT_NORM` and :data:`MLP_NORM`."""
    norms = norms or {INPUT_NORM: c.hidden_size, MLP_NORM: c.hidden_size}
    (embed,) = planner.stack([("model.embed_tokens", c.vocab_size)], c.hidden_size)
    layers = tuple(load_layer(planner, c, i, norms) for i in range(c.layers))
    # A scale of the logits is as well one of what the head multiplies.
    final_norm = planner.vector("model.norm.weight", c.hidden_size, scale=c.logit_scale)
    head = embed
    if not c.tie_word_embeddings:
        (head,) = planner.stack([("lm_head", c.vocab_size)], c.hidden_size)
    return DecoderWeights(embed, layers, final_norm, head)


def attention_block(g: Graph, index: int, layer: Layer) -> None:
    """``x += Wo · attention(rope(Wq h), rope(Wk h), Wv h)`` with ``h = RMSNorm(x)``."""
    act = g.act
    g.linear(act.residual, layer.qkv, act.qkv, label="qkv", norm=layer.norms[INPUT_NORM])
    attend(g, index)
    g.linear(act.attended, layer.output, act.residual, "add", "attention output")


def attend(g: Graph, index: int, head_norms: tuple[Ref, Ref] | None = None) -> None:
    """``attended = attention(rope(q), rope(k), v)`` of what :attr:`~Activations.qkv` holds, over the
    cache, with the window and the positions of layer ``index``. ``head_norms``: weights by which each query
    and each key head is normalized first."""
    c = g.config
    g.attention(
        index,
        c.rope(index),
        head_norms,
        window=c.window(index),
        softcap=c.attention_softcap,
        scale=c.attention_scale,
    )


def mlp_block(g: Graph, layer: Layer) -> None:
    """``x += Wd · (act(Wg h) * Wu h)`` with ``h = RMSNorm(x)`` (Shazeer 2020, SwiGLU), or what the layer's
    experts make of h."""
    act, norm = g.act, layer.norms[MLP_NORM]
    if layer.experts is not None:
        g.rms_norm(act.residual, norm, act.normed, g.config.hidden_size)
        add_experts(g, layer.experts)
        return
    g.gated_mlp_input(act.residual, layer.gate_up, act.hidden, norm)
    g.linear(act.hidden, layer.down, act.residual, "add", "down")


def output_head(g: Graph, w: DecoderWeights) -> None:
    """Logits of the rows that want them; a prefill chunk that is not the last wants none."""
    if g.outputs:
        g.head(g.act.residual, w.final_norm, w.head)

"""The pre-norm decoder block that Llama and its relatives share: attention, then a gated MLP.

A family file (``llama.py``, ``qwen2.py``) says which tensors there are and assembles these blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from xinfer_vk.kernels.base import Ref
from xinfer_vk.models.config import ModelConfig
from xinfer_vk.models.graph import Graph
from xinfer_vk.weights.device import Matrix, WeightPlanner


@dataclass(frozen=True)
class Layer:
    """One block's weights. A projection is one matrix, or several stacked ones of unlike formats."""

    attention_norm: Ref  # [hidden]
    qkv: tuple[Matrix, ...]  # [(heads + 2 kv_heads) * head_dim, hidden]
    output: tuple[Matrix, ...]  # [hidden, heads * head_dim]
    mlp_norm: Ref  # [hidden]
    gate_up: tuple[Matrix, ...]  # [2 * intermediate, hidden], rows interleaved when it is one matrix
    down: tuple[Matrix, ...]  # [hidden, intermediate]


@dataclass(frozen=True)
class DecoderWeights:
    embed: Matrix  # [vocabulary, hidden]
    layers: tuple[Layer, ...]
    final_norm: Ref  # [hidden]
    head: Matrix  # [vocabulary, hidden]; the embedding itself when tied


def load_layer(planner: WeightPlanner, c: ModelConfig, index: int, *, qkv_bias: bool) -> Layer:
    """Declare the tensors of block ``index``; they are on the device after ``planner.upload``."""
    name = f"model.layers.{index}"
    q_dim, kv_dim = c.heads * c.head_dim, c.kv_heads * c.head_dim

    def stack(
        parts: dict[str, int], cols: int, bias: bool = False, interleave: bool = False
    ) -> tuple[Matrix, ...]:
        return planner.stack(
            [(f"{name}.{part}", rows) for part, rows in parts.items()], cols, bias=bias, interleave=interleave
        )

    return Layer(
        attention_norm=planner.vector(f"{name}.input_layernorm.weight", c.hidden_size),
        qkv=stack(
            {"self_attn.q_proj": q_dim, "self_attn.k_proj": kv_dim, "self_attn.v_proj": kv_dim},
            c.hidden_size,
            bias=qkv_bias,
        ),
        output=stack({"self_attn.o_proj": c.hidden_size}, q_dim, bias=c.attention_output_bias),
        mlp_norm=planner.vector(f"{name}.post_attention_layernorm.weight", c.hidden_size),
        gate_up=stack(
            {"mlp.gate_proj": c.intermediate_size, "mlp.up_proj": c.intermediate_size},
            c.hidden_size,
            bias=c.mlp_bias,
            interleave=True,
        ),
        down=stack({"mlp.down_proj": c.hidden_size}, c.intermediate_size, bias=c.mlp_bias),
    )


def load_decoder(planner: WeightPlanner, c: ModelConfig, *, qkv_bias: bool) -> DecoderWeights:
    """Declare every tensor of a decoder with ``c.layers`` blocks."""
    (embed,) = planner.stack([("model.embed_tokens", c.vocab_size)], c.hidden_size)
    layers = tuple(load_layer(planner, c, i, qkv_bias=qkv_bias) for i in range(c.layers))
    final_norm = planner.vector("model.norm.weight", c.hidden_size)
    head = embed
    if not c.tie_word_embeddings:
        (head,) = planner.stack([("lm_head", c.vocab_size)], c.hidden_size)
    return DecoderWeights(embed, layers, final_norm, head)


def attention_block(g: Graph, index: int, layer: Layer) -> None:
    """``x += Wo · attention(rope(Wq h), rope(Wk h), Wv h)`` with ``h = RMSNorm(x)``."""
    c, act = g.config, g.act
    q, k = act.qkv, act.qkv.columns(c.heads * c.head_dim)
    v = k.columns(c.kv_heads * c.head_dim)

    g.rms_norm(act.residual, layer.attention_norm, act.normed, c.hidden_size)
    g.linear(act.normed, layer.qkv, act.qkv, label="qkv")
    g.rope(q, heads=c.heads + c.kv_heads)  # keys follow the queries in memory
    g.append_kv(index, k, v)
    g.attention(index, q, act.attended)
    g.linear(act.attended, layer.output, act.residual, "add", "attention output")


def mlp_block(g: Graph, layer: Layer) -> None:
    """``x += Wd · (silu(Wg h) * Wu h)`` with ``h = RMSNorm(x)`` (Shazeer 2020, SwiGLU)."""
    c, act = g.config, g.act
    g.rms_norm(act.residual, layer.mlp_norm, act.normed, c.hidden_size)
    g.swiglu_mlp_input(act.normed, layer.gate_up, act.hidden)
    g.linear(act.hidden, layer.down, act.residual, "add", "down")


def output_head(g: Graph, w: DecoderWeights) -> None:
    """Logits of the rows that want them; a prefill chunk that is not the last wants none."""
    if g.outputs:
        g.rms_norm_outputs(g.act.residual, w.final_norm, g.act.final, g.config.hidden_size)
        g.head(w.head)

"""Qwen3 (Yang et al. 2025): Llama's decoder, and every query and key head normalized before it is rotated.

    tokens → embed → [ x += attention(RMSNorm(x)) → x += SwiGLU MLP(RMSNorm(x)) ] × layers
           → RMSNorm → head → logits

No biases. The head dimension is a number of its own, 128, not the width over the heads.
"""

from __future__ import annotations

from xinfer_vk.models.config import ModelConfig
from xinfer_vk.models.decoder import (
    INPUT_NORM,
    MLP_NORM,
    DecoderWeights,
    Layer,
    attend,
    load_decoder,
    mlp_block,
    output_head,
)
from xinfer_vk.models.graph import Graph
from xinfer_vk.weights.device import WeightPlanner


def norms(c: ModelConfig) -> dict[str, int]:
    """Names and lengths of a block's norms."""
    return {
        INPUT_NORM: c.hidden_size,
        "self_attn.q_norm": c.head_dim,
        "self_attn.k_norm": c.head_dim,
        MLP_NORM: c.hidden_size,
    }


def load(planner: WeightPlanner, c: ModelConfig) -> DecoderWeights:
    """Declare the tensors under their Hugging Face names."""
    return load_decoder(planner, c, norms(c))


def forward(g: Graph, w: DecoderWeights) -> None:
    """Add one pass over the batch to the graph."""
    g.embed(w.embed, g.act.residual)
    for index, layer in enumerate(w.layers):
        attention_block(g, index, layer)
        mlp_block(g, layer)
    output_head(g, w)


def attention_block(g: Graph, index: int, layer: Layer) -> None:
    """``x += Wo · attention(rope(norm(Wq h)), rope(norm(Wk h)), Wv h)`` with ``h = RMSNorm(x)``."""
    act, norms = g.act, layer.norms
    g.linear(act.residual, layer.qkv, act.qkv, label="qkv", norm=norms[INPUT_NORM])
    attend(g, index, (norms["self_attn.q_norm"], norms["self_attn.k_norm"]))
    g.linear(act.attended, layer.output, act.residual, "add", "attention output")

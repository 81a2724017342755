"""Gemma 2 (Gemma Team 2024): norms before *and* after attention and MLP, soft caps, a window on every
second layer.

    tokens → embed · √hidden
           → [ x += RMSNorm(attention(RMSNorm(x))) → x += RMSNorm(GeGLU MLP(RMSNorm(x))) ] × layers
           → RMSNorm → head → cap · tanh(logits / cap)

Layers 0, 2, 4 … attend to the last ``sliding_window`` positions, the others to all; scores are capped as
logits are. The norms' weights are ``1 + w`` of the checkpoint's w; the 1 is added while loading.
"""

from __future__ import annotations

from xinfer_vk.models.config import ModelConfig
from xinfer_vk.models.decoder import INPUT_NORM, DecoderWeights, Layer, attend, load_decoder, output_head
from xinfer_vk.models.graph import Graph
from xinfer_vk.weights.device import WeightPlanner

NORMS = (
    INPUT_NORM, "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip


def load(planner: WeightPlanner, c: ModelConfig) -> DecoderWeights:
    """Declare the tensors under their Hugging Face names."""
    return load_decoder(planner, c, dict.fromkeys(NORMS, c.hidden_size))


def forward(g: Graph, w: DecoderWeights) -> None:
    """Add one pass over the batch to the graph. The norm before a block is made with the one after the
    block before it."""
    act = g.act
    g.embed(w.embed, act.residual)
    g.rms_norm(act.residual, w.layers[0].norms[INPUT_NORM], act.normed, g.config.hidden_size)
    for index, layer in enumerate(w.layers):
        g.linear(act.normed, layer.qkv, act.qkv, label="qkv")
        attend(g, index)
        add_attention(g, layer)
        add_mlp(g, w, index)
    output_head(g, w)


def add_attention(g: Graph, layer: Layer) -> None:
    """``x += RMSNorm(Wo · attended)``, and ``h = RMSNorm(x)`` for the MLP."""
    act, norms = g.act, layer.norms
    g.linear(act.attended, layer.output, act.normed, label="attention output")
    g.rms_norm_add(
        act.normed, norms["post_attention_layernorm"], act.residual, g.config.hidden_size,
        then=(norms["pre_feedforward_layernorm"], act.normed),
    )  # fmt: skip


def add_mlp(g: Graph, w: DecoderWeights, index: int) -> None:
    """``x += RMSNorm(Wd · (gelu(Wg h) * Wu h))`` (Shazeer 2020, GeGLU), and ``h = RMSNorm(x)`` for the next
    layer's attention."""
    act, layer = g.act, w.layers[index]
    g.gated_mlp_input(act.normed, layer.gate_up, act.hidden)
    g.linear(act.hidden, layer.down, act.normed, label="down")
    last = index + 1 == len(w.layers)
    g.rms_norm_add(
        act.normed, layer.norms["post_feedforward_layernorm"], act.residual, g.config.hidden_size,
        then=None if last else (w.layers[index + 1].norms[INPUT_NORM], act.normed),
    )  # fmt: skip

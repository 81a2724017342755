"""Gemma 3 (Gemma Team 2025), the text model: Gemma 2's decoder without soft caps; queries and keys are
normalized instead, and positions are encoded in two ways.

    tokens → embed · √hidden
           → [ x += RMSNorm(attention(RMSNorm(x))) → x += RMSNorm(GeGLU MLP(RMSNorm(x))) ] × layers
           → RMSNorm → head → logits

Five layers of six attend to the last ``sliding_window`` positions, with a RoPE of their own ("local"); the
sixth attends to all, with another base and, in the larger models, scaled positions ("global").
"""

from __future__ import annotations

from xinfer_vk.models import gemma2
from xinfer_vk.models.config import ModelConfig
from xinfer_vk.models.decoder import INPUT_NORM, DecoderWeights, attend, load_decoder, output_head
from xinfer_vk.models.graph import Graph
from xinfer_vk.weights.device import WeightPlanner


def load(planner: WeightPlanner, c: ModelConfig) -> DecoderWeights:
    """Declare the tensors under their Hugging Face names."""
    heads = {"self_attn.q_norm": c.head_dim, "self_attn.k_norm": c.head_dim}
    return load_decoder(planner, c, {**dict.fromkeys(gemma2.NORMS, c.hidden_size), **heads})


def forward(g: Graph, w: DecoderWeights) -> None:
    """Add one pass over the batch to the graph."""
    act = g.act
    g.embed(w.embed, act.residual)
    g.rms_norm(act.residual, w.layers[0].norms[INPUT_NORM], act.normed, g.config.hidden_size)
    for index, layer in enumerate(w.layers):
        g.linear(act.normed, layer.qkv, act.qkv, label="qkv")
        attend(g, index, (layer.norms["self_attn.q_norm"], layer.norms["self_attn.k_norm"]))
        gemma2.add_attention(g, layer)
        gemma2.add_mlp(g, w, index)
    output_head(g, w)

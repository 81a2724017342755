"""Llama (Touvron et al. 2023) and what has its shape: Llama 2 and 3, SmolLM2.

    tokens → embed → [ x += attention(RMSNorm(x)) → x += SwiGLU MLP(RMSNorm(x)) ] × layers
           → RMSNorm → head → logits

Rotary positions in the rotate-half order, grouped-query attention, no biases unless
``attention_bias`` or ``mlp_bias`` says so, the head tied to the embedding where the config says so.
"""

from __future__ import annotations

from xinfer_vk.models.config import ModelConfig
from xinfer_vk.models.decoder import DecoderWeights, attention_block, load_decoder, mlp_block, output_head
from xinfer_vk.models.graph import Graph
from xinfer_vk.weights.device import WeightPlanner


def load(planner: WeightPlanner, c: ModelConfig) -> DecoderWeights:
    """Declare the tensors under their Hugging Face names."""
    return load_decoder(planner, c)


def forward(g: Graph, w: DecoderWeights) -> None:
    """Add one pass over the batch to the graph."""
    g.embed(w.embed, g.act.residual)
    for index, layer in enumerate(w.layers):
        attention_block(g, index, layer)
        mlp_block(g, layer)
    output_head(g, w)

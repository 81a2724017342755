"""OLMo 2 (OLMo Team 2024): norms after attention and MLP instead of before them, and queries and keys
normalized as a whole.

    tokens → embed → [ x += RMSNorm(attention(x)) → x += RMSNorm(SwiGLU MLP(x)) ] × layers
           → RMSNorm → head → logits
"""

from __future__ import annotations

from xinfer_vk.models.config import ModelConfig
from xinfer_vk.models.decoder import DecoderWeights, Layer, attend, load_decoder, output_head
from xinfer_vk.models.graph import Graph
from xinfer_vk.weights.device import WeightPlanner


def load(planner: WeightPlanner, c: ModelConfig) -> DecoderWeights:
    """Declare the tensors under their Hugging Face names."""
    norms = {
        "self_attn.q_norm": c.q_dim,
        "self_attn.k_norm": c.kv_dim,
        "post_attention_layernorm": c.hidden_size,
        "post_feedforward_layernorm": c.hidden_size,
    }
    return load_decoder(planner, c, norms)


def forward(g: Graph, w: DecoderWeights) -> None:
    """Add one pass over the batch to the graph."""
    g.embed(w.embed, g.act.residual)
    for index, layer in enumerate(w.layers):
        attention_block(g, index, layer)
        mlp_block(g, layer)
    output_head(g, w)


def attention_block(g: Graph, index: int, layer: Layer) -> None:
    """``x += RMSNorm(Wo · attention(rope(RMSNorm(Wq x)), rope(RMSNorm(Wk x)), Wv x))``."""
    c, act, norms = g.config, g.act, layer.norms
    q, k = act.qkv, act.qkv.columns(c.q_dim)
    g.linear(act.residual, layer.qkv, act.qkv, label="qkv")
    g.rms_norm(q, norms["self_attn.q_norm"], q, c.q_dim)
    g.rms_norm(k, norms["self_attn.k_norm"], k, c.kv_dim)
    attend(g, index)
    g.linear(act.attended, layer.output, act.normed, label="attention output")
    g.rms_norm_add(act.normed, norms["post_attention_layernorm"], act.residual, c.hidden_size)


def mlp_block(g: Graph, layer: Layer) -> None:
    """``x += RMSNorm(Wd · (silu(Wg x) * Wu x))``."""
    c, act = g.config, g.act
    g.gated_mlp_input(act.residual, layer.gate_up, act.hidden)
    g.linear(act.hidden, layer.down, act.normed, label="down")
    g.rms_norm_add(act.normed, layer.norms["post_feedforward_layernorm"], act.residual, c.hidden_size)

"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama's decoder with biases on the query, key and value
projections, and nowhere else. The small models tie the head to the embedding, the large ones have
their own ``lm_head``.
"""

from __future__ import annotations

from xinfer_vk.models.config import ModelConfig
from xinfer_vk.models.decoder import DecoderWeights, load_decoder
from xinfer_vk.models.llama import forward
from xinfer_vk.weights.device import WeightPlanner

__all__ = ["forward", "load"]


def load(planner: WeightPlanner, c: ModelConfig) -> DecoderWeights:
    """Declare the tensors under their Hugging Face names."""
    return load_decoder(planner, c, qkv_bias=True)

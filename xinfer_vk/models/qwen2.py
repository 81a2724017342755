"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama's decoder with biases on the query, key and value
projections (``config.attention_bias`` is always true here), and nowhere else. The small models tie the
head to the embedding, the large ones have their own ``lm_head``.
"""

from __future__ import annotations

from xinfer_vk.models.llama import forward, load

__all__ = ["forward", "load"]

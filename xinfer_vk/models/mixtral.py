"""Mixtral (Jiang et al. 2024): Mistral's decoder, that is Llama's, with a mixture of experts in every layer
instead of the MLP.

    tokens → embed → [ x += attention(RMSNorm(x)) → x += experts(RMSNorm(x)) ] × layers
           → RMSNorm → head → logits

A token uses two of eight experts; their weights are the softmax over the two's logits. In GGUF files a
Mixtral is a Llama with an ``expert_count``.
"""

from __future__ import annotations

from xinfer_vk.models.llama import forward, load

__all__ = ["forward", "load"]

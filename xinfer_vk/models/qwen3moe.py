"""Qwen3's mixtures of experts (Yang et al. 2025), such as Qwen3-30B-A3B: Qwen3's decoder with experts in some
layers, by default all, and its MLP in the others.

    tokens → embed → [ x += attention(RMSNorm(x)) → x += experts(RMSNorm(x)) ] × layers
           → RMSNorm → head → logits

Many small experts, 8 of 128 for a token, none of them shared.
"""

from __future__ import annotations

from xinfer_vk.models.qwen3 import forward, load

__all__ = ["forward", "load"]

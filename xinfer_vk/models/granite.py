"""Granite 3 (Granite Team 2024): Llama's decoder with four multipliers, after maximal update
parametrization (Yang et al. 2022).

    tokens → embed · embedding_scale
           → [ x += residual_scale · attention(RMSNorm(x)) → x += residual_scale · MLP(RMSNorm(x)) ] × layers
           → RMSNorm → head → logits · logit_scale

The graph is Llama's, because none of the four costs an operation: scores are multiplied by
``attention_scale`` instead of 1 / √d; the final norm's weight is multiplied by ``logit_scale`` while
loading; and the residual stream is kept divided by ``residual_scale``. That divides the embedding, what a
block adds needs no factor, and RMSNorm undoes it: norm(x / s) with epsilon / s² is norm(x) with epsilon
(:attr:`ModelConfig.residual_norm_eps`).
"""

from __future__ import annotations

from xinfer_vk.models.llama import forward, load

__all__ = ["forward", "load"]

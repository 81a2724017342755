"""Phi-3, Phi-3.5 and Phi-4-mini (Abdin et al. 2024): Llama's decoder, of which RoPE may turn only the first
dimensions of a head (``config.rotary_dim``), with longrope for long contexts.

The checkpoint has queries, keys and values in one matrix, and gate and up in another; they are taken apart
by weights/unify.py, and put together again on the device as those of all families are.
"""

from __future__ import annotations

from xinfer_vk.models.llama import forward, load

__all__ = ["forward", "load"]

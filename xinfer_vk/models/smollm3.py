"""SmolLM3 (Bakouch et al. 2025): Llama's decoder, in which every fourth layer knows no positions (NoPE, Yang
et al. 2025): ``config.rope`` is None there, and queries and keys are not rotated.
"""

from __future__ import annotations

from xinfer_vk.models.llama import forward, load

__all__ = ["forward", "load"]

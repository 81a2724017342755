"""Mistral 7B (Jiang et al. 2023) and its relatives: Llama's decoder, whose tokens attend to the last
``sliding_window`` positions where the config gives a window. Later Mistrals have none.
"""

from __future__ import annotations

from xinfer_vk.models.llama import forward, load

__all__ = ["forward", "load"]

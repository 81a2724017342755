"""Which file implements which architecture."""

from __future__ import annotations

from typing import Protocol

from xinfer_vk.errors import ModelError
from xinfer_vk.models import (
    gemma2,
    gemma3,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    qwen3moe,
    smollm3,
)
from xinfer_vk.models.config import ModelConfig
from xinfer_vk.models.decoder import DecoderWeights
from xinfer_vk.models.graph import Graph
from xinfer_vk.weights.device import WeightPlanner


class Family(Protocol):
    """What a family file offers."""

    def load(self, planner: WeightPlanner, c: ModelConfig) -> DecoderWeights: ...

    def forward(self, g: Graph, w: DecoderWeights) -> None: ...


FAMILIES: dict[str, Family] = {
    "gemma2": gemma2,
    "gemma3": gemma3,
    "granite": granite,
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "olmo2": olmo2,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3moe": qwen3moe,
    "smollm3": smollm3,
}


def family(architecture: str) -> Family:
    """The module for ``config.architecture``. Raises :class:`ModelError` for one that is not there."""
    if architecture not in FAMILIES:
        raise ModelError(
            f"architecture {architecture!r} is not supported: choose a model of {', '.join(FAMILIES)}"
        )
    return FAMILIES[architecture]

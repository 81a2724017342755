"""Language-model inference on any Vulkan GPU.

The whole of it in three lines::

    from xinfer_vk import LLM
    with LLM("smollm2-135m") as llm:
        print(llm.generate("What is the capital of France?").text)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
_PLACES = {
    "LLM": "xinfer_vk.engine.llm",
    "ChatSession": "xinfer_vk.engine.session",
    "ChatStream": "xinfer_vk.engine.session",
    "EngineConfig": "xinfer_vk.engine.config",
    "GenerationResult": "xinfer_vk.engine.generation",
    "GenerationStream": "xinfer_vk.engine.stream",
    "SamplingParams": "xinfer_vk.sampling.params",
    "TokenLogprobs": "xinfer_vk.sampling.logprobs",
    "DeviceError": "xinfer_vk.errors",
    "DeviceLostError": "xinfer_vk.errors",
    "DownloadError": "xinfer_vk.errors",
    "ModelError": "xinfer_vk.errors",
    "NumericError": "xinfer_vk.errors",
    "OutOfMemoryError": "xinfer_vk.errors",
    "UsageError": "xinfer_vk.errors",
    "XinferError": "xinfer_vk.errors",
}
__all__ = [
    "LLM",
    "ChatSession",
    "ChatStream",
    "DeviceError",
    "DeviceLostError",
    "DownloadError",
    "EngineConfig",
    "GenerationResult",
    "GenerationStream",
    "ModelError",
    "NumericError",
    "OutOfMemoryError",
    "SamplingParams",
    "TokenLogprobs",
    "UsageError",
    "XinferError",
    "__version__",
]

if TYPE_CHECKING:
    from xinfer_vk.engine.config import EngineConfig
    from xinfer_vk.engine.generation import GenerationResult
    from xinfer_vk.engine.llm import LLM
    from xinfer_vk.engine.session import ChatSession, ChatStream
    from xinfer_vk.engine.stream import GenerationStream
    from xinfer_vk.errors import (
        DeviceError,
        DeviceLostError,
        DownloadError,
        ModelError,
        NumericError,
        OutOfMemoryError,
        UsageError,
        XinferError,
    )
    from xinfer_vk.sampling.logprobs import TokenLogprobs
    from xinfer_vk.sampling.params import SamplingParams


def __getattr__(name: str) -> Any:
    """Import on first use: ``import xinfer_vk`` alone costs nothing."""
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})

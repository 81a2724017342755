"""Language-model inference on any Vulkan GPU.

The whole of it in three lines::

    from xinfer_vk import LLM
    with LLM("smollm2-135m") as llm:
        print(llm.generate("What is the capital of France?").text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "GenerationResult", "SamplingParams", "XinferError", "__version__"]

if TYPE_CHECKING:
    from xinfer_vk.engine.llm import LLM, GenerationResult
    from xinfer_vk.errors import XinferError
    from xinfer_vk.sampling.params import SamplingParams


def __getattr__(name: str) -> Any:
    """Import on first use: ``import xinfer_vk`` alone costs nothing."""
    if name in ("LLM", "GenerationResult", "SamplingParams"):
        from xinfer_vk.engine import llm

        return getattr(llm, name)
    if name == "XinferError":
        from xinfer_vk.errors import XinferError

        return XinferError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""What a call may say about sampling, as keyword arguments that type checkers know.

:class:`SamplingOptions` has the fields of :class:`~xinfer_vk.sampling.params.SamplingParams`, with the same
meaning; a test keeps the two alike. It exists so that ``llm.generate(prompt, max_new_token=5)`` is an error
before the program runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

if TYPE_CHECKING:
    from xinfer_vk.sampling.params import LogitsProcessor


class Message(TypedDict):
    """One message of a conversation. ``role``: "system", "user" or "assistant"."""

    role: str
    content: str


# A text, token ids, or a conversation to answer.
Prompt: TypeAlias = "str | Sequence[int] | Sequence[Message] | Sequence[Mapping[str, Any]]"


class SamplingOptions(TypedDict, total=False):
    """The fields of SamplingParams, and ``max_tokens``, another name of ``max_new_tokens``."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    penalty_window: int
    logit_bias: Mapping[int, float]
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    min_new_tokens: int
    max_new_tokens: int
    max_tokens: int
    logprobs: int | None
    bad_words: str | Sequence[str | Sequence[int]]
    sampler_order: Sequence[str]
    logits_processors: LogitsProcessor | Sequence[LogitsProcessor]


def shown_fields(owner: str, **fields: Any) -> str:
    """``Owner(name=value, …)``, for short reprs."""
    return f"{owner}({', '.join(f'{name}={value!r}' for name, value in fields.items())})"

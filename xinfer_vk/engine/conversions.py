"""What callers give, made into what the engine takes: token ids, messages, lists of prompts."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from xinfer_vk.engine.session import read_messages
from xinfer_vk.errors import UsageError
from xinfer_vk.options import Prompt


def as_ids(tokens: Sequence[int]) -> list[int]:
    """Token ids as Python integers. Raises :class:`UsageError` for anything else."""
    try:
        if not isinstance(tokens, (bytes, bytearray)):  # which are sequences of integers too
            return [operator.index(token) for token in tokens]
    except TypeError:
        pass
    raise UsageError(
        f"token ids are a list of whole numbers, not {type(tokens).__name__}"
        + (": llm.encode(text) makes them from a text" if isinstance(tokens, str) else "")
    )


def is_messages(prompt: object) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Whether a prompt is meant as a list of messages."""
    return isinstance(prompt, Sequence) and any(isinstance(item, Mapping) for item in prompt)


def as_prompts(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The prompts of a batch, from any iterable. Raises :class:`UsageError` if there are none."""
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        raise UsageError(
            f"prompts are a list of prompts, not {type(prompts).__name__}: for one, use llm.generate"
        )
    listed = list(prompts)
    if not listed:
        raise UsageError("there are no prompts: give at least one")
    if is_messages(listed):
        raise UsageError("prompts are a list of prompts: put each conversation into a list of its own")
    return listed


def as_messages(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """A conversation whose last message is the user's, checked as :func:`read_messages` does."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise UsageError(
            f'messages are a list such as [{{"role": "user", "content": "…"}}], not {type(messages).__name__}'
            + (": for a text, use llm.generate" if isinstance(messages, str) else "")
        )
    listed = list(messages)
    if not listed or not isinstance(listed[-1], Mapping) or listed[-1].get("role") != "user":
        raise UsageError("the last message must be the user's: that is the one to answer")
    read_messages([*listed, {"role": "assistant", "content": ""}])
    return listed

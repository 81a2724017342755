"""One request as the scheduler sees it: tokens, how far they are computed, and what it may still need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from xinfer_vk.blocks import CachedSequence


@dataclass(eq=False)
class Request:
    """``tokens``: the prompt's, and then those that were chosen. ``most``: how many may be chosen.
    ``priority``: smaller ones go first. ``salt``: requests of another salt share no blocks with it.
    ``every_row``: the logits of all prompt tokens are wanted, so none is taken from the cache, and they are
    computed in steps of their own. ``watched``: the host must see each token before the next one is chosen.
    ``owner``: whose request it is; nothing here looks at it.
    """

    tokens: list[int]
    most: int
    priority: int = 0
    salt: bytes = b""
    every_row: bool = False
    watched: bool = False
    owner: Any = field(default=None, repr=False)

    prompt: int = 0  # tokens
    arrival: int = -1  # the scheduler's number for it
    sequence: CachedSequence | None = None  # while it runs
    reused: int = 0  # prompt tokens that were in the cache when it was admitted first
    preempted: int = 0  # times
    ended: bool = False

    def __post_init__(self) -> None:
        self.prompt = self.prompt or len(self.tokens)

    @property
    def computed(self) -> int:
        """Tokens in the cache."""
        return 0 if self.sequence is None else self.sequence.length

    @property
    def left(self) -> int:
        """Tokens to compute before the next one can be chosen; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        return self.left == 1 and self.computed >= self.prompt

    @property
    def wants_rows(self) -> bool:
        """Whether the logits of prompt tokens are still to come, the last one's aside."""
        return self.every_row and len(self.tokens) == self.prompt and self.computed < self.prompt - 1

    @property
    def may_choose(self) -> int:
        """Tokens that may still be chosen."""
        return self.most - (len(self.tokens) - self.prompt)

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first, and, from the other end, who gives way."""
        return self.priority, self.arrival

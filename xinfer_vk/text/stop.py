"""Stop strings: the text ends just before the first of them, wherever tokens happen to be cut."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text through, holding back what may still become a stop string.

    ``push`` returns the text that is safe to show; once :attr:`found` is set the text is complete and
    nothing more comes. Among stops that end up in the text the one that begins first counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(s for s in stops if s))
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        if not self._stops:
            return text
        if self.found is not None:
            return ""
        self._held += text
        hits = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if hits:
            at, self.found = min(hits, key=lambda hit: hit[0])
            # A longer stop may have begun before this one and still be incomplete: it did not happen.
            out, self._held = self._held[:at], ""
            return out
        keep = self._held_back()
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out

    def finish(self) -> str:
        """What was held back and became no stop string, when the text ends."""
        out, self._held = self._held, ""
        return out

    def _held_back(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        longest = max(len(s) for s in self._stops) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-size:]) for s in self._stops):
                return size
        return 0

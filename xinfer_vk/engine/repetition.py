"""How much a text repeats itself, by its tokens."""

from __future__ import annotations

from collections.abc import Sequence


def repeats(tokens: Sequence[int], n: int = 4) -> list[bool]:
    """For each token, whether the ``n`` tokens that end with it have come before, in the same order."""
    seen: set[tuple[int, ...]] = set()
    out = [False] * min(n - 1, len(tokens))  # no n tokens end there yet
    for end in range(n, len(tokens) + 1):
        gram = tuple(tokens[end - n : end])
        out.append(gram in seen)
        seen.add(gram)
    return out


def repeated_ngrams(tokens: Sequence[int], n: int = 4) -> float | None:
    """The share of n-grams that came before: ``1 - distinct / all``. None for fewer than ``n`` tokens.

    seq-rep-n of Welleck et al. 2020, "Neural Text Generation with Unlikelihood Training". 0 where no n
    tokens come twice, near 1 in a loop; text by people has few percent at most for n = 4.
    """
    grams = len(tokens) - n + 1
    return sum(repeats(tokens, n)) / grams if grams > 0 else None


def distinct_ngrams(tokens: Sequence[int], n: int = 2) -> float | None:
    """How many different n-grams there are, for each token. None for no tokens.

    distinct-n of Li et al. 2016, "A Diversity-Promoting Objective Function for Neural Conversation Models",
    who divide by the number of tokens, so that at most ``(tokens - n + 1) / tokens`` can be reached. It
    falls with the length of a text: compare texts of the same length.
    """
    grams = {tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)}
    return len(grams) / len(tokens) if tokens else None

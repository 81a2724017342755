"""Tokens that must not come next: words that are not wanted, and ends that come too early."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from xinfer_vk.errors import UsageError
from xinfer_vk.sampling.params import SamplingParams, named


def bad_word_ids(
    params: SamplingParams, encode: Callable[[str], Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """``bad_words`` as token ids. Byte-level vocabularies write a word differently at the start of a text
    and after a space, so a string is banned both as it is and with a space before it.

    ``encode``: text to ids, no special tokens added. Raises :class:`UsageError` for a word that has none.
    """
    sequences: dict[tuple[int, ...], None] = {}  # a set that keeps the order
    for word in params.bad_words:
        if not isinstance(word, str):
            sequences[tuple(word)] = None
            continue
        forms = {word: None, " " + word.lstrip(): None}
        for ids in (tuple(int(i) for i in encode(form)) for form in forms):
            if not ids:
                raise UsageError(
                    f"{named('bad_words')} has {word!r}, which the tokenizer turns into no tokens: "
                    "leave it out"
                )
            sequences[ids] = None
    return tuple(sequences)


class BannedWords:
    """Which tokens would complete a banned sequence: a function of the tokens before.

    One token alone is always banned. ``always`` says whether there are only such: then nothing has to be
    looked up between two steps.
    """

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        sequences = [tuple(s) for s in sequences]
        self._single = tuple(sorted({s[0] for s in sequences if len(s) == 1}))
        self._longer = tuple(s for s in sequences if len(s) > 1)
        self._longest = max((len(s) for s in self._longer), default=1)

    @property
    def always(self) -> bool:
        return not self._longer

    def after(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The tokens that must not follow ``tokens``."""
        if not self._longer:
            return self._single
        end = tuple(tokens[max(0, len(tokens) - self._longest + 1) :])
        completed = {
            s[-1] for s in self._longer if end[len(end) - len(s) + 1 :] == s[:-1] and len(end) >= len(s) - 1
        }
        return tuple(sorted({*self._single, *completed})) if completed else self._single

"""Token ids to text, one at a time, never half a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from xinfer_vk.text.tokenizer import Tokenizer


class StreamDecoder:
    """Decodes a generation as it comes.

    The pieces that :meth:`push` and :meth:`finish` return, joined, equal ``tokenizer.decode(all ids)``.
    A token may end inside a character; what is incomplete waits for the next token. The work for a
    token is proportional to its own bytes. ``shown``: special tokens that are not left out.
    ``after``: tokens before the generation whose text it goes on with: the space that SentencePiece drops at
    the start of a text is then theirs, as in ``decode(after + ids)``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special: bool = True,
        shown: frozenset[int] = frozenset(),
        after: Iterable[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids - shown if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._drop_space = tokenizer.pieces.drop_first_space and not any(
            tokenizer.token_bytes(i) for i in after if i not in self._hidden
        )

    def push(self, token_id: int) -> str:
        """The characters that this token completes; maybe none."""
        if token_id in self._hidden:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._drop_space and data:
            self._drop_space = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself; U+FFFD for what is no whole character."""
        return self._tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")

    def finish(self) -> str:
        """What is left at the end: one U+FFFD if the text stopped inside a character, else nothing."""
        return self._utf8.decode(b"", final=True)

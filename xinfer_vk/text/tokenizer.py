"""Text to token ids and back, over Hugging Face ``tokenizers``.

One class for every model: :func:`load_tokenizer` builds it from ``tokenizer.json`` or from the metadata of a
GGUF file. What a caller must decide at every call is whether text may name *added tokens* (``<|im_end|>``
and the like): text that people wrote must not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

from xinfer_vk.errors import ModelError, UsageError
from xinfer_vk.fields import quoted
from xinfer_vk.text.byte_level import CHAR_OF_BYTE
from xinfer_vk.text.eos import eos_ids
from xinfer_vk.text.guard import guarded
from xinfer_vk.text.origin import MODEL, TEMPLATE
from xinfer_vk.text.pieces import BYTE_LEVEL, Pieces

if TYPE_CHECKING:
    import tokenizers

    from xinfer_vk.weights.source import ModelSource

# As Gemma's vocabulary has them.
HTML_TAG = re.compile(
    "</?(?:a|b|bbox|blockquote|body|caption|code|div|em|footer|h[1-6]|html|i|iframe|img|li|s|span|strong|sub|sup|table"
    "|tbody|td|tfoot|th|thead|tr|u|ul)>"
)

__all__ = ["Tokenizer", "eos_ids", "load_tokenizer"]


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer of an open model. Raises :class:`ModelError` when it is missing, damaged or of a kind
    that is not supported."""
    if source.kind == "gguf":
        from xinfer_vk.text.gguf_tokenizer import tokenizer_from_gguf

        tokenizer = tokenizer_from_gguf(source.metadata, str(source.path))
    else:
        from xinfer_vk.text.hf_tokenizer import tokenizer_from_directory

        tokenizer = tokenizer_from_directory(source.path)
    tokenizer.model_vocab_size = source.config.vocab_size
    return tokenizer


class Tokenizer:
    """Encodes and decodes for one model.

    ``bos_id``: the begin-of-sequence token, if there is one. ``eos_ids``: what the tokenizer itself says
    ends a text (the model's configuration may say more: :func:`xinfer_vk.text.eos.eos_ids`).
    ``special_texts``: the texts of its named tokens, ``{"bos_token": …, "eos_token": …}``, as chat
    templates know them. ``model_vocab_size``: rows of the model's embedding; ids beyond are refused.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        pieces: Pieces,
        where: str,
        *,
        prefix: Iterable[int] = (),
        suffix: Iterable[int] = (),
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        special_texts: Mapping[str, str] | None = None,
    ) -> None:
        self.where, self.pieces = where, pieces
        self.bos_id, self.eos_ids = bos_id, frozenset(eos_ids)
        self.special_texts = dict(special_texts or {})
        self.model_vocab_size: int | None = None
        self._backend = backend
        self._prefix, self._suffix = list(prefix), list(suffix)
        self._added: dict[int, Any] = backend.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in self._added.items() if token.special)
        # Runs of spaces and the tags of HTML are added tokens in some vocabularies. They are text, not
        # markup: everyone may write them.
        self._text = frozenset(i for i, token in self._added.items() if _is_text(token))
        self._markup = frozenset(self._added) - self._text
        self.vocab_size = 1 + max([backend.get_vocab_size(with_added_tokens=True) - 1, *self._added])
        self._plain = _PlainEncoder(self)
        self._bytes: dict[int, bytes] = {}

    # -- text to ids --------------------------------------------------------------------------

    def encode(self, text: str, *, parse_special: bool, add_bos: bool | None = None) -> list[int]:
        """Token ids of a text.

        ``parse_special``: text that spells an added token becomes that token; else it is encoded as the
        characters it is. ``add_bos``: put the begin-of-sequence token first; None does what the model
        was trained with, which may also add tokens at the end. Raises :class:`UsageError` for text
        that is not valid Unicode, and for ``add_bos=True`` when there is no such token.
        """
        if parse_special:
            ids = self._run(self._backend, text).ids
        else:
            ids = self._plain.encode(text, at_start=True)
        if add_bos is None:
            ids = self._prefix + ids + self._suffix
        elif add_bos:
            if self.bos_id is None:
                raise UsageError(f"{self.where}: the tokenizer has no begin-of-sequence token to add")
            ids = [self.bos_id, *ids]
        return self._checked(ids)

    def encode_traced(self, text: str, origin: bytes) -> list[int]:
        """Token ids of a text of which some is trusted to name added tokens.

        ``origin`` has a byte for every character, see :mod:`xinfer_vk.text.origin`: an added token is
        read as one only where all of its characters come from the template, or, if it is not a special
        token, all from the model's own earlier words. No token is added before or after.
        """
        assert len(text) == len(origin)
        encoding = self._run(self._backend, text)
        found = zip(encoding.ids, encoding.offsets)
        if all(self._allowed(i, origin[start:end]) for i, (start, end) in found):
            return self._checked(encoding.ids)
        ids: list[int] = []
        done = 0
        for start, end, token_id in self._allowed_matches(text, origin):
            ids += self._plain.encode(text[done:start], at_start=done == 0)
            ids.append(token_id)
            done = end
        ids += self._plain.encode(text[done:], at_start=done == 0)
        return self._checked(ids)

    def _allowed(self, token_id: int, origin: bytes) -> bool:
        if token_id not in self._markup:
            return True
        came_from = set(origin)
        return came_from == {TEMPLATE} or (came_from == {MODEL} and token_id not in self._special)

    def _allowed_matches(self, text: str, origin: bytes) -> list[tuple[int, int, int]]:
        """(start, end, id) of added tokens in the trusted stretches of a text, from left to right, the
        longest where several begin: the rules of ``tokenizers``, which cannot be told to look only here.
        As there, a token that takes the spaces after it along does not hide a token in those spaces."""
        readable = {
            TEMPLATE: self._pattern(self._added),
            MODEL: self._pattern(self._added.keys() - self._special),
        }
        matches, at, done = [], 0, 0
        for level, stretch in groupby(origin):
            start, at = at, at + sum(1 for _ in stretch)
            if level not in readable:
                continue
            for found in readable[level].finditer(text, start, at):
                token_id = self.id_of(found[0])
                token = self._added[token_id] if token_id is not None else None
                if token is None or token_id is None:
                    continue
                first, last = found.span()
                if token.single_word and re.search(r"\w", text[first - 1 : first] + text[last : last + 1]):
                    continue
                if token.lstrip:
                    first = max(done, len(text[:first].rstrip()))
                if token.rstrip:
                    last = len(text) - len(text[last:].lstrip())
                matches.append((first, last, token_id))
                done = last
        return matches

    def markup_in(self, text: str) -> list[tuple[int, int]]:
        """(start, end) of what spells an added token, whoever wrote it."""
        return [found.span() for found in self._pattern(self._markup).finditer(text)]

    def _pattern(self, ids: Iterable[int]) -> re.Pattern[str]:
        """What spells one of these added tokens, the longest first."""
        texts = sorted((self._added[i].content for i in ids), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    def _run(self, backend: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as e:
            raise UsageError(
                f"the text is not valid Unicode: character {e.start} is {quoted(text[e.start])}, half of a "
                "character; was a file read in the wrong encoding?"
            ) from None
        return guarded(self.where, "the tokenizer failed", backend.encode, text, add_special_tokens=False)

    def _checked(self, ids: list[int]) -> list[int]:
        limit = self.model_vocab_size
        if limit is not None and ids and max(ids) >= limit:
            text = self._backend.id_to_token(max(ids))
            raise ModelError(
                f"{self.where}: the token {quoted(text)} has id {max(ids)}, and the model has only {limit} "
                "tokens: the tokenizer does not belong to this model"
            )
        return ids

    # -- ids to text --------------------------------------------------------------------------

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of token ids. Bytes that are no valid UTF-8 become U+FFFD; ids that the tokenizer does
        not have are nothing, as in transformers. ``skip_special`` leaves out special tokens."""
        data = b"".join(self.token_bytes(i) for i in ids if not (skip_special and self.is_special(i)))
        if self.pieces.drop_first_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for: whole characters, or a part of one."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._bytes_of(token_id)
        return found

    def _bytes_of(self, token_id: int) -> bytes:
        if not 0 <= token_id < 2**32:
            return b""
        if token_id in self._added and not _is_run_of_spaces(self._added[token_id].content):
            return self._added[token_id].content.encode("utf-8")
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self.pieces.to_bytes(token)

    # -- tokens by name -----------------------------------------------------------------------

    def id_of(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it (``"<|im_end|>"``, ``"Ġthe"``), if it has it."""
        return self._backend.token_to_id(token)

    @property
    def special_ids(self) -> frozenset[int]:
        """The model's control tokens."""
        return self._special

    def special_ids_of(self, texts: Iterable[str]) -> frozenset[int]:
        """The ids of the control tokens among texts. These are never part of a generation's text, so a stop
        string of that name is found by its id."""
        wanted = set(texts)
        return frozenset(i for i in self._special if wanted and self._added[i].content in wanted)

    def is_special(self, token_id: int) -> bool:
        """Whether a token is one of the model's control tokens."""
        return token_id in self._special


def _is_text(token: tokenizers.AddedToken) -> bool:
    """Whether an added token is something that people write as a part of their text."""
    text = token.content
    return not token.special and (
        text.isspace() or _is_run_of_spaces(text) or HTML_TAG.fullmatch(text) is not None
    )


def _is_run_of_spaces(text: str) -> bool:
    """As SentencePiece spells them, and the added tokens of Gemma's ``tokenizer.json`` do too."""
    return not text.strip("▁")


class _PlainEncoder:
    """Encodes text that may not name added tokens: the same model, without its added tokens."""

    def __init__(self, owner: Tokenizer) -> None:
        self._owner = owner
        self._first = self._without_markup(owner._backend.pre_tokenizer)
        later = _without_first_prefix(owner._backend.pre_tokenizer)
        self._later = self._first if later is None else self._without_markup(later)
        # Such a text that is not in the model's own vocabulary has another id here.
        contents = {i: owner._added[i].content for i in owner._text}
        self._renamed = {self._first.token_to_id(text): i for i, text in contents.items()}
        # A character that the vocabulary does not have becomes the unknown token; that is not markup.
        byte_level = owner.pieces is BYTE_LEVEL  # such have no unknown characters
        unknown = None if byte_level else owner.special_texts.get("unk_token")
        self._banned = owner._markup - {owner.id_of(unknown) if unknown else None}

    def _without_markup(self, pre_tokenizer: Any) -> tokenizers.Tokenizer:
        import tokenizers

        backend = self._owner._backend
        plain = tokenizers.Tokenizer(backend.model)  # shares the vocabulary, copies nothing
        if backend.normalizer is not None:
            plain.normalizer = backend.normalizer
        if pre_tokenizer is not None:
            plain.pre_tokenizer = pre_tokenizer
        plain.add_tokens([self._owner._added[i] for i in sorted(self._owner._text)])
        return plain

    def encode(self, text: str, at_start: bool) -> list[int]:
        """``at_start``: whether ``text`` begins the whole text, which SentencePiece puts a space before."""
        if not text:
            return []
        owner = self._owner
        ids = owner._run(self._first if at_start else self._later, text).ids
        if self._renamed:
            ids = [self._renamed.get(i, i) for i in ids]
        if self._banned.isdisjoint(ids):
            return ids
        # The merges themselves lead to an added token (it is an ordinary word of the vocabulary).
        return [part for i in ids for part in (self._spelled(i) if i in self._banned else [i])]

    def _spelled(self, token_id: int) -> list[int]:
        """The tokens of the single bytes that the model itself takes this token for."""
        ids, to_id = [], self._owner._backend.model.token_to_id
        byte_level = self._owner.pieces is BYTE_LEVEL
        for byte in self._owner.pieces.to_bytes(self._owner._added[token_id].content):
            found = to_id(CHAR_OF_BYTE[byte]) if byte_level else to_id(f"<0x{byte:02X}>")
            if found is None and byte < 0x80:
                found = to_id(chr(byte))
            if found is None or found in self._banned:
                text = self._owner._added[token_id].content
                raise ModelError(
                    f"{self._owner.where}: the text {quoted(text)} is a token of that name and nothing else: "
                    "the vocabulary does not have its single bytes"
                )
            ids.append(found)
        return ids


def _without_first_prefix(pre_tokenizer: Any) -> Any:
    """The same pre-tokenizer without the space it puts before a text's first word only, or None when it
    puts none. A piece from the middle of a text must not get that space."""
    from tokenizers import pre_tokenizers

    if pre_tokenizer is None:
        return None
    state = json.loads(pre_tokenizer.__getstate__())
    steps = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    found = [s for s in steps if s["type"] == "Metaspace" and s.get("prepend_scheme") == "first"]
    for step in found:
        step["prepend_scheme"] = "never"
    if not found:
        return None
    out = pre_tokenizers.Sequence([])
    out.__setstate__(json.dumps({"type": "Sequence", "pretokenizers": steps}).encode())
    return out

"""SentencePiece tokenizers out of a GGUF file: BPE (``tokenizer.ggml.model`` "llama") and Unigram ("t5").

The file has SentencePiece's list of pieces with scores. "▁" is a space in it, ``<0x0A>`` a byte, for
characters that no piece has. Its BPE has no list of merges: any two neighbours that make a piece may be
merged, the pair with the best score first. ``tokenizers`` wants merges in order, so all that there can be are
listed, in the order in which ``transformers`` lists them when it converts such a model. Sources: Kudo and
Richardson, "SentencePiece", 2018; ``convert_slow_tokenizer.py`` of transformers; the space before a text goes
before the text after a control token too, which SentencePiece itself does not know, as in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from xinfer_vk.errors import ModelError
from xinfer_vk.fields import Fields, quoted
from xinfer_vk.text.gguf_vocabulary import BYTE, CONTROL, NORMAL, TOKENS, UNKNOWN, USER_DEFINED, Vocabulary
from xinfer_vk.text.guard import guarded
from xinfer_vk.text.pieces import Pieces, sentencepiece_pieces
from xinfer_vk.text.tokenizer_file import check_charsmap

SPACE = "▁"
SCORES, CHARSMAP = "tokenizer.ggml.scores", "tokenizer.ggml.precompiled_charsmap"
MAX_PIECE = 1024  # characters: pairs take time by its square. The longest of known models are 100
MAX_MERGES = 1 << 22  # Gemma 3 has 515,000
USER_DEFINED_SCORE = 0.0  # SentencePiece's own: above that of every other piece
PHI3_KEEPS_SPACES_AFTER = ("<unk>", "<s>", "<|endoftext|>")


def sentencepiece_backend(
    fields: Fields, vocabulary: Vocabulary, unknown_id: int | None
) -> tuple[Any, Pieces]:
    """The ``tokenizers`` pipeline, and the pieces that decode it.

    ``unknown_id``: the token for a character that is no piece, where there are no bytes. Raises
    :class:`ModelError` for scores or a character map that are missing, of the wrong type or damaged.
    """
    from tokenizers import AddedToken, decoders, normalizers
    from tokenizers import Tokenizer as Backend

    types = vocabulary.types
    prefix = fields.flag("tokenizer.ggml.add_space_prefix", True)
    if unknown_id is None:
        raise ModelError(f"{fields.where}: tokenizer.ggml.unknown_token_id is no token of this vocabulary")
    # Runs of spaces are pieces of their own in some vocabularies, and written as spaces in the file.
    pieces = [
        text.replace(" ", SPACE) if kind == USER_DEFINED and not text.strip(" ") else text
        for text, kind in zip(vocabulary.tokens, types)
    ]
    if fields.text("tokenizer.ggml.model") == "t5":
        model, steps = _unigram(fields, pieces, types, unknown_id), _cleaning(fields)
    else:
        model, steps = _bpe(fields, pieces, vocabulary, unknown_id), []
    if prefix:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))

    backend = Backend(model)
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([decoders.Strip(" ", 1, 0)] if prefix else [])
    )
    # Phi-3's markup takes the spaces after it along, which the file does not say.
    strips = fields.values.get("general.architecture") == "phi3"
    added = [
        AddedToken(
            text,
            special=kind != USER_DEFINED,
            normalized=False,
            rstrip=strips and text not in PHI3_KEEPS_SPACES_AFTER,
        )
        for text, kind, piece in zip(vocabulary.tokens, types, pieces)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and piece.strip(SPACE)
    ]
    guarded(fields.where, "the added tokens are damaged", backend.add_tokens, added)
    return backend, sentencepiece_pieces(SPACE, _has_bytes(types), prefix)


def _bpe(fields: Fields, pieces: list[str], vocabulary: Vocabulary, unknown_id: int) -> Any:
    from tokenizers import models

    types, scores = vocabulary.types, _scores(fields, len(pieces))
    ids = {pieces[i]: i for i in vocabulary.ids.values()}
    if len(ids) != len(vocabulary.ids):
        raise ModelError(f"{fields.where}: {TOKENS} has a run of spaces twice, as spaces and as {SPACE}")
    mergeable = {
        piece: USER_DEFINED_SCORE if types[i] == USER_DEFINED else scores[i]
        for piece, i in ids.items()
        if types[i] == NORMAL or (types[i] == USER_DEFINED and not piece.strip(SPACE))
    }
    longest = max(mergeable, key=len, default="")
    if len(longest) > MAX_PIECE:
        raise ModelError(
            f"{fields.where}: {TOKENS} has the piece {quoted(longest)} of {len(longest)} characters, "
            f"at most {MAX_PIECE} are supported"
        )
    merges = merges_by_score(mergeable)
    if merges is None:
        raise ModelError(f"{fields.where}: {TOKENS} makes more than {MAX_MERGES} pairs, that is damage")
    return guarded(
        fields.where, "the tokenizer is damaged", models.BPE, ids, merges,
        unk_token=pieces[unknown_id], fuse_unk=True, byte_fallback=_has_bytes(types),
    )  # fmt: skip


def _unigram(fields: Fields, pieces: list[str], types: list[int], unknown_id: int) -> Any:
    """The most likely pieces of a text are chosen, by the scores, which are logarithms of probabilities. What
    is not for texts must not make an unknown character, 10 below the worst score, less likely."""
    from tokenizers import models

    scores = _scores(fields, len(pieces))
    worst = min((score for score, kind in zip(scores, types) if kind == NORMAL), default=0.0)
    entries = [
        (piece, score if kind in (NORMAL, USER_DEFINED) else worst)
        for piece, score, kind in zip(pieces, scores, types)
    ]
    options = (entries, unknown_id, _has_bytes(types))
    return guarded(fields.where, "the tokenizer is damaged", models.Unigram, *options)


def _cleaning(fields: Fields) -> list[Any]:
    """What a Unigram tokenizer does to a text first: replace characters by its map, and drop spaces."""
    from tokenizers import Regex, normalizers

    steps: list[Any] = []
    if CHARSMAP in fields:
        charsmap = _bytes(fields, CHARSMAP)
        check_charsmap(charsmap, f"{fields.where}: {CHARSMAP}")
        steps.append(guarded(fields.where, f"{CHARSMAP} is damaged", normalizers.Precompiled, charsmap))
    if fields.flag("tokenizer.ggml.remove_extra_whitespaces", False):
        steps.append(normalizers.Replace(Regex("^ +| +$"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    return steps


def _has_bytes(types: list[int]) -> bool:
    """Whether there is a token for every byte, so that no character is unknown."""
    return types.count(BYTE) == 256


def merges_by_score(scores: dict[str, float]) -> list[tuple[str, str]] | None:
    """Every pair of pieces that makes a piece, the best score of what it makes first; among equals the pair
    with the longer first half, then with the longer second. None for more than :data:`MAX_MERGES`."""
    pairs = islice(_pairs(scores), MAX_MERGES + 1)
    merges = [(scores[left + right], len(left), len(right), left, right) for left, right in pairs]
    if len(merges) > MAX_MERGES:
        return None
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in merges]


def _pairs(pieces: dict[str, float]) -> Iterator[tuple[str, str]]:
    lengths = frozenset(map(len, pieces))
    for piece in pieces:
        for cut in range(1, len(piece)):
            if cut not in lengths or len(piece) - cut not in lengths:
                continue
            left = piece[:cut]
            if left in pieces:
                right = piece[cut:]
                if right in pieces:
                    yield left, right


def _scores(fields: Fields, count: int) -> list[float]:
    scores = fields.raw(SCORES)
    if not isinstance(scores, list) or set(map(type, scores)) - {float}:
        raise fields.wrong(SCORES, "a list of numbers was expected")
    if len(scores) != count:
        raise ModelError(f"{fields.where}: {SCORES} has {len(scores)} entries for {count} tokens")
    bad = next((score for score in scores if score != score), None)
    if bad is not None:
        raise ModelError(f"{fields.where}: {SCORES} has the entry {quoted(bad)}")
    return scores


def _bytes(fields: Fields, key: str) -> bytes:
    values = fields.raw(key)
    try:
        return bytes(v & 0xFF for v in values)  # some writers take them for signed
    except (TypeError, ValueError):
        raise fields.wrong(key, "a list of bytes was expected") from None

"""Which tokens end a generation. Models say it in several places, and each place may name others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xinfer_vk.errors import ModelError
from xinfer_vk.fields import quoted

if TYPE_CHECKING:
    from xinfer_vk.text.tokenizer import Tokenizer
    from xinfer_vk.weights.source import ModelSource


def eos_ids(source: ModelSource, tokenizer: Tokenizer) -> frozenset[int]:
    """Every id that ends a generation: ``eos_token_id`` of ``generation_config.json`` and of the config (a
    number or a list), and the tokenizer's own (for GGUF: the end of sequence, of turn and of message).

    An id outside the vocabulary can never be generated and is left out: some models carry -1 or a
    padding id there. What is not an integer is refused with :class:`ModelError`.
    """
    places = {"generation_config.json": source.generation_config}
    if source.kind == "hf":
        places["config.json"] = source.metadata
    ids = set(tokenizer.eos_ids) | set(source.config.eos_token_ids)
    for name, values in places.items():
        ids |= set(token_ids(values.get("eos_token_id"), f"{source.path}: eos_token_id in {name}"))
    return frozenset(i for i in ids if 0 <= i < source.config.vocab_size)


def token_ids(value: Any, where: str) -> tuple[int, ...]:
    """A token id, a list of them, or None, as a tuple."""
    if value is None:
        return ()
    ids = value if isinstance(value, (list, tuple)) else [value]
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int):
            raise ModelError(f"{where} is {quoted(value)}, a token id or a list of them was expected")
    return tuple(ids)

"""Which tokens end a generation. Models say it in several places, and each place may name others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from xinfer_vk.fields import token_ids

if TYPE_CHECKING:
    from xinfer_vk.text.tokenizer import Tokenizer
    from xinfer_vk.weights.source import ModelSource

# Tokens that end a text, a turn or a message, by name; llama.cpp has the same list. An ending too many hurts
# only where a model writes such a token inside an answer, which none is trained to do. One that is missed
# hurts every answer: it goes on to the limit, with turns that the model makes up.
END_NAMES = frozenset(
    {
        "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>",  # Llama 3, Granite
        "<|im_end|>", "<|endoftext|>",  # ChatML, GPT-2
        "<|end|>",  # Phi
        "<end_of_turn>",  # Gemma
        "<|return|>", "<|call|>",  # Harmony
        "<|flush|>", "<|calls|>",  # Solar
        "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>", "<｜end▁of▁sentence｜>",
    }
)  # fmt: skip
HARMONY = frozenset({"<|return|>", "<|call|>"})  # beside these, <|end|> ends one of several messages


def ends_by_name(tokens: Sequence[str]) -> frozenset[int]:
    """The ids of a vocabulary's tokens whose names say that they end a text."""
    found = {text: i for i, text in enumerate(tokens) if text in END_NAMES}
    if found.keys() >= HARMONY:
        found.pop("<|end|>", None)
    return frozenset(found.values())


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

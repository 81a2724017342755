"""Checkpoints of multimodal models, of which the text model is used and the rest is left out.

Their ``config.json`` has the text model's keys in ``text_config``. Its tensors have a prefix, which
transformers 4 and 5 write in two ways: ``language_model.model.layers…`` and
``model.language_model.layers…``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xinfer_vk.errors import ModelError
from xinfer_vk.fields import quoted

# Classes whose text model reads text as the same model without images does, and the model type of
# theirs that transformers takes where ``text_config`` names none.
WRAPPERS = {
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Mistral3ForConditionalGeneration": "mistral",
    "LlavaForConditionalGeneration": "llama",
    "LlavaNextForConditionalGeneration": "llama",
}
# What the outer config says of the text model. It outranks text_config.
OUTER_KEYS = ("bos_token_id", "eos_token_id", "quantization_config", "tie_word_embeddings")
PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("lm_head.", "lm_head."),
)


def text_config(config: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """The configuration of the text model in a multimodal one; None if ``config`` is not one of
    :data:`WRAPPERS`. Raises :class:`ModelError` if it is, and has no text model."""
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and len(named) == 1 else None
    if not isinstance(name, str) or name not in WRAPPERS:
        return None
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ModelError(f"{where}: text_config is {quoted(text)}, a mapping was expected of a {name}")
    outer = {key: config[key] for key in OUTER_KEYS if config.get(key) is not None}
    inner = {key: value for key, value in text.items() if key != "architectures"}
    return {"model_type": WRAPPERS[name], **inner, **outer}


def text_name(name: str) -> str | None:
    """What a tensor is called in the text model alone; None for one that is not part of it."""
    for prefix, replacement in PREFIXES:
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return None

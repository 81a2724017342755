"""A tiny model that can chat, shared by the tests of sessions and of the chat command."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from model_files import tiny_config, write_hf_model

from xinfer_vk import LLM
from xinfer_vk.engine.session import ChatSession

TEXT = Path(__file__).parent / "fixtures" / "text" / "smollm"


def write_chat_model(path: Path, template: str | None = None, seed: int = 3, **changes: Any) -> Path:
    """A Llama with random weights, and a tokenizer and a chat template that its vocabulary has room for."""
    write_hf_model(path, tiny_config("llama", vocab_size=656, **changes), seed=seed)
    for file in TEXT.iterdir():
        shutil.copy(file, path)
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def words(llm: LLM) -> dict[int, float]:
    """A bias towards tokens of a space and letters, which the tokenizer cuts as they are."""
    texts = {i: llm.tokenizer.token_bytes(i) for i in range(llm.tokenizer.vocab_size)}
    return {i: 100.0 for i, text in texts.items() if text[:1] == b" " and text[1:].isalpha()}


def in_words(llm: LLM, **changes: Any) -> ChatSession:
    """A conversation in which the model's answers are eight such words."""
    return llm.chat(logit_bias=words(llm), max_new_tokens=8, **changes)

"""Completions go on with the prompt's text: its white space counts, and so does the space after it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cli_helpers import assert_one_error, xinfer
from model_files import tiny_config, write_hf_model

from xinfer_vk.engine.llm import LLM
from xinfer_vk.errors import UsageError

TEXT = Path(__file__).parent / "fixtures" / "text"


@pytest.fixture(scope="module")
def spaced_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with SentencePiece's vocabulary, which begins words with their space."""
    path = tmp_path_factory.mktemp("model") / "spaced"
    write_hf_model(path, tiny_config("llama", vocab_size=704), seed=3)
    for file in (TEXT / "llama2").iterdir():
        shutil.copy(file, path)
    return path


def test_a_completion_has_the_space_between_prompt_and_text(spaced_model: Path) -> None:
    with LLM(spaced_model, device="numpy") as llm:
        (word,) = llm.tokenizer.encode("the", parse_special=False, add_bos=False)
        fields = {"logit_bias": {word: 1e4}, "max_new_tokens": 3}
        ids = llm.encode("all of", raw=True)
        for prompt in ("all of", ids):
            result = llm.generate(prompt, raw=True, **fields)
            assert result.text == " the the the"
            everything = llm.tokenizer.decode([*result.prompt_token_ids, *result.token_ids])
            assert llm.tokenizer.decode(result.prompt_token_ids) + result.text == everything
        (one, other) = llm.batch(["all of", ids[:1]], raw=True, n=1, **fields)
        assert one.text == " the the the"
        assert other.text == "the the the", "nothing but a begin of sequence: the text begins here"
        assert "".join(llm.stream("all of", raw=False, **fields)) == "the the the", "an answer begins anew"


def test_white_space_is_a_text_to_go_on_with(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "spaces").write_text("  ")
    with LLM(tiny_model, device="numpy") as llm:
        assert llm.generate("\n", raw=True, max_new_tokens=1).prompt_token_ids
        for prompt, raw in (("", True), ("", False), (" \n", False), (" ", None)):
            with pytest.raises(UsageError, match="the prompt is empty"):
                llm.generate(prompt, raw=raw)
    run = ("generate", "-m", str(tiny_model), "--device", "numpy", "-n", "1")
    for given in (("--prompt", " "), ("--file", str(tmp_path / "spaces"))):
        assert xinfer(*run, *given, "--raw").returncode == 0
        assert_one_error(xinfer(*run, *given), 2, "the prompt is empty")

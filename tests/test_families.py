"""Every model family against transformers: from safetensors and from GGUF, the prompt at once, in chunks and
step by step. The models are of 2 to 6 layers with windows of 19 positions; prompts have 75 tokens.

Tolerance as in test_logits.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from gguf_families import write_gguf_of
from model_files import random_tensors, tiny_config, write_hf_model
from test_logits import TOLERANCE, Loaded, worst

from xinfer_vk.engine.engine import Engine
from xinfer_vk.engine.generation import Generation
from xinfer_vk.engine.inspect import inspect_model
from xinfer_vk.engine.runner import Chunk
from xinfer_vk.errors import ModelError
from xinfer_vk.reference import NumpyRuntime
from xinfer_vk.sampling.params import SamplingParams
from xinfer_vk.sampling.rules import BannedWords
from xinfer_vk.text.stream import StreamDecoder
from xinfer_vk.weights.source import open_model

FOLDER = Path(__file__).parent / "fixtures" / "models" / "families"
FAMILIES = sorted(p.name for p in FOLDER.iterdir())
# What GGUF cannot say.
NOT_IN_GGUF = {
    "qwen2-window-from-layer-1": "windows of Qwen2",
    "llama-dynamic": "dynamic scaling",
    "qwen3moe-every-second-layer": "MLPs of Qwen3-MoE",
    "gemma3-multimodal": "towers: its file has the text model alone",
    "mistral3-multimodal": "towers: its file has the text model alone",
}
CHUNK, STEPS = 32, 7  # of the prompt, and tokens at its end that are decoded one by one


def reference(name: str) -> tuple[np.ndarray, np.ndarray]:
    data = np.load(FOLDER / name / "reference.npz")
    return data["token_ids"], data["logits"]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(name: str, record_property: Any) -> None:
    token_ids, want = reference(name)
    error = worst(Loaded(NumpyRuntime(), FOLDER / name).logits(token_ids, None), want)
    record_property("max_abs_error", error)
    assert error <= TOLERANCE


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in NOT_IN_GGUF])
def test_logits_of_the_same_model_in_a_gguf_file_equal_transformers(
    tmp_path: Path, name: str, record_property: Any
) -> None:
    token_ids, want = reference(name)
    write_gguf_of(FOLDER / name, tmp_path / "m.gguf")
    error = worst(Loaded(NumpyRuntime(), tmp_path / "m.gguf").logits(token_ids, None), want)
    record_property("max_abs_error", error)
    assert error <= TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_device_logits_in_chunks_and_step_by_step_equal_transformers(
    runtime: Any, name: str, record_property: Any
) -> None:
    token_ids, want = reference(name)
    model = Loaded(runtime, FOLDER / name)
    try:
        got = model.logits_of(token_ids, [CHUNK, len(token_ids) - CHUNK - STEPS, *[1] * STEPS])
    finally:
        model.free()
    error = worst(got, want)
    record_property("max_abs_error", error)
    assert error <= TOLERANCE


# -- RoPE that depends on how long the sequence is ---------------------------------------------------

BY_LENGTH = ("phi3-longrope", "llama-dynamic")


class NoText:
    """Stands for the decoder of a generation whose text nobody reads."""

    def push(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def generation(prompt: list[int], new_tokens: int) -> Generation:
    return Generation(
        prompt_ids=prompt,
        params=SamplingParams(max_new_tokens=new_tokens, temperature=0.0),
        end_ids=frozenset(),
        decoder=cast(StreamDecoder, NoText()),
        banned=BannedWords([]),
        seed=0,
        started=0.0,
    )


@pytest.mark.parametrize("name", BY_LENGTH)
@pytest.mark.parametrize("others", [0, 2])
def test_greedy_answers_beyond_the_original_context_are_those_of_transformers(name: str, others: int) -> None:
    """The context is 32 tokens, the prompt 20 and the answer 40, alone and in a batch."""
    token_ids, _ = reference(name)
    want = np.load(FOLDER / name / "reference.npz")["greedy"].tolist()
    model = Loaded(NumpyRuntime(), FOLDER / name)
    engine = Engine(model.runner)
    prompt = token_ids[:20].tolist()
    generations = [generation(prompt[:length], len(want)) for length in (20, 3, 17)[: 1 + others]]
    for one in generations:
        engine.add(one)
    while engine.busy:
        engine.advance(lambda: False)
    assert generations[0].generated == want
    assert model.cache.pool.free_blocks == model.cache.pool.count


def test_cached_keys_are_used_again_only_where_they_are_rotated_alike() -> None:
    token_ids, want = reference("phi3-longrope")
    model = Loaded(NumpyRuntime(), FOLDER / "phi3-longrope")
    rope, cache = model.runner.rope, model.cache
    sequence = cache.open(20)
    model.runner.run([Chunk(sequence, token_ids[:20])], "logits")
    assert sequence.rope_key == rope.key(32) != rope.key(33) and rope.renews
    model.runner.run([Chunk(sequence, token_ids[20:32])], "logits")
    cache.truncate(sequence, 0)
    sequence.expected = 40
    out = model.runner.run([Chunk(sequence, token_ids[:10])], "logits")
    assert sequence.rope_key == rope.key(75) != rope.key(32)
    assert worst(out[0], want[9]) <= TOLERANCE  # with the long factors, as all 75 tokens were run
    child = cache.fork(sequence, 10)
    assert child.rope_key == sequence.rope_key


# -- multimodal checkpoints ----------------------------------------------------------------------------


def test_the_text_model_of_a_multimodal_checkpoint_is_said_to_be_all() -> None:
    with open_model(FOLDER / "gemma3-multimodal") as source:
        assert source.notices == (
            "gemma3-multimodal: only the text model is used; 34 tensors of multi_modal_projector, "
            "vision_tower are left out",
        )
        assert inspect_model(source.path).notes == source.notices


@pytest.mark.parametrize("shards", [1, 3])
def test_both_ways_to_name_a_text_model_in_a_multimodal_checkpoint(tmp_path: Path, shards: int) -> None:
    text = tiny_config("llama", model_type=None)
    tensors = random_tensors(text)
    wrapped = {f"language_model.{name}": values for name, values in tensors.items()}
    wrapped["vision_tower.patch_embedding.weight"] = np.zeros((3, 4), np.float32)
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": text,
        "eos_token_id": [7, 2],
    }
    write_hf_model(tmp_path, config, wrapped, shards=shards)
    with open_model(tmp_path) as source:
        assert list(source.tensors) == sorted(tensors, key=list(source.tensors).index)
        assert source.left_out == ("vision_tower.patch_embedding.weight",)
        assert source.config.eos_token_ids == (7, 2)
        assert not source.config.tie_word_embeddings


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"architectures": ["Gemma3ForConditionalGeneration"]},
            "text_config is None, a mapping was expected",
        ),
        (
            {
                "architectures": ["Mistral3ForConditionalGeneration"],
                "text_config": {"model_type": "ministral3"},
            },
            "text_config: model_type is 'ministral3', supported: ",
        ),
        (
            {"architectures": ["Qwen2VLForConditionalGeneration"], "vision_config": {"depth": 32}},
            "the multimodal models whose text model is supported are Gemma3ForConditionalGeneration, ",
        ),
    ],
)
def test_multimodal_models_that_are_not_supported_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], expected: str
) -> None:
    write_hf_model(tmp_path, config, {"x.weight": np.zeros((1, 1), np.float32)})
    with pytest.raises(ModelError) as caught:
        open_model(tmp_path)
    assert expected in str(caught.value)


# -- fused projections -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_fused_projections_are_those_that_a_llama_has_apart(tmp_path: Path, kind: str) -> None:
    config = tiny_config("llama", head_dim=None)
    apart = random_tensors(config)
    fused = {}
    for name, values in apart.items():
        module = name.split(".")[-2]
        if module in ("q_proj", "gate_proj"):
            others = ("q_proj", "k_proj", "v_proj") if module == "q_proj" else ("gate_proj", "up_proj")
            name_of = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}[module]
            parts = [apart[name.replace(module, other)] for other in others]
            fused[name.replace(module, name_of)] = np.concatenate(parts)
        elif module not in ("k_proj", "v_proj", "up_proj"):
            fused[name] = values
    write_hf_model(tmp_path / "llama", config, apart)
    phi3 = {**config, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
    write_hf_model(tmp_path / "phi3", phi3, fused)
    tokens = list(range(7, 71, 3))
    want, got = (
        Loaded(NumpyRuntime(), tmp_path / name, quantize=None if kind == "f32" else kind).logits(tokens, None)
        for name in ("llama", "phi3")
    )
    np.testing.assert_array_equal(got, want)

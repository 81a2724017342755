"""Configs are read as transformers reads them, and what is not supported is refused by key and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import tiny_config, write_gguf_model, write_hf_model

from xinfer_vk.errors import ModelError
from xinfer_vk.models.config import ModelConfig
from xinfer_vk.models.config_gguf import config_from_gguf
from xinfer_vk.models.config_hf import config_from_hf
from xinfer_vk.models.rope_scaling import RopeScaling, rope_inv_freq
from xinfer_vk.weights.source import open_model

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def gguf_metadata(arch: str = "llama", **changes: Any) -> dict[str, Any]:
    """Keys of a tiny GGUF model; a name without a dot gets the architecture before it."""
    metadata: dict[str, Any] = {
        "general.architecture": arch,
        f"{arch}.block_count": 2,
        f"{arch}.context_length": 512,
        f"{arch}.embedding_length": 64,
        f"{arch}.feed_forward_length": 96,
        f"{arch}.attention.head_count": 4,
        f"{arch}.attention.head_count_kv": 2,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0,
        f"{arch}.vocab_size": 320,
        "tokenizer.ggml.eos_token_id": 2,
    }
    metadata.update(changes)
    return metadata


# -- Hugging Face --------------------------------------------------------------------------------


def test_qwen2_5_0_5b_instruct_reads_as_published() -> None:
    """The config.json of Qwen/Qwen2.5-0.5B-Instruct, as it is on the hub."""
    published = {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": 896,
        "initializer_range": 0.02,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 21,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.1",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    generation = {"bos_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643], "top_k": 20}
    config = config_from_hf(published, generation)
    assert config == ModelConfig(
        architecture="qwen2",
        hidden_size=896,
        intermediate_size=4864,
        layers=24,
        heads=14,
        kv_heads=2,
        head_dim=64,
        rotary_dim=64,
        vocab_size=151936,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=None,
        max_position=32768,
        tie_word_embeddings=True,
        attention_bias=True,
        attention_output_bias=False,
        mlp_bias=False,
        hidden_act="silu",
        eos_token_ids=(151645, 151643),
        bos_token_id=151643,
    )


def test_llama_3_2_1b_instruct_reads_as_published() -> None:
    """The config.json of meta-llama/Llama-3.2-1B-Instruct, as it is on the hub."""
    published = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0",
        "use_cache": True,
        "vocab_size": 128256,
    }
    config = config_from_hf(published)
    assert (config.heads, config.kv_heads, config.head_dim, config.max_position) == (32, 8, 64, 131072)
    assert (config.rope_theta, config.rope_scaling) == (5e5, RopeScaling("llama3", 32.0, 1.0, 4.0, 8192))
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert (config.attention_bias, config.attention_output_bias, config.mlp_bias) == (False, False, False)


def test_missing_keys_take_the_defaults_of_transformers() -> None:
    """What ``LlamaConfig()`` and ``Qwen2Config()`` of transformers 5 have."""
    llama = config_from_hf({"architectures": ["LlamaForCausalLM"]})
    assert (llama.hidden_size, llama.intermediate_size, llama.layers, llama.heads) == (4096, 11008, 32, 32)
    assert (llama.kv_heads, llama.head_dim, llama.vocab_size, llama.max_position) == (32, 128, 32000, 2048)
    assert (llama.rms_norm_eps, llama.rope_theta, llama.tie_word_embeddings) == (1e-6, 10000.0, False)
    assert (llama.bos_token_id, llama.eos_token_ids, llama.attention_bias, llama.mlp_bias) == (
        1,
        (2,),
        False,
        False,
    )
    qwen2 = config_from_hf({"model_type": "qwen2"})
    assert (qwen2.intermediate_size, qwen2.vocab_size, qwen2.max_position) == (22016, 151936, 32768)
    assert (qwen2.kv_heads, qwen2.bos_token_id, qwen2.eos_token_ids) == (32, None, ())
    assert (qwen2.attention_bias, qwen2.attention_output_bias) == (True, False)


def test_null_is_as_good_as_absent() -> None:
    config = {**tiny_config("llama"), "head_dim": None, "num_key_value_heads": None, "rope_scaling": None}
    read = config_from_hf(
        {**config, "quantization_config": None, "sliding_window": None, "bos_token_id": None}
    )
    assert (read.head_dim, read.kv_heads, read.rope_scaling, read.bos_token_id) == (16, 4, None, None)


def test_both_spellings_of_rope_settings_read_the_same() -> None:
    """transformers 4 (``rope_scaling``, early on with ``type``) and 5 (``rope_parameters``)."""
    base = {k: v for k, v in tiny_config("llama").items() if k != "rope_theta"}
    want = RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
    for settings in (
        {"rope_theta": 5000.0, "rope_scaling": {**LLAMA3, "rope_type": "llama3"}},
        {"rope_theta": 5000.0, "rope_scaling": {**LLAMA3, "type": "llama3"}},
        {"rope_parameters": {**LLAMA3, "rope_type": "llama3", "rope_theta": 5000.0}},
    ):
        config = config_from_hf({**base, **settings})
        assert (config.rope_theta, config.rope_scaling) == (5000.0, want)
    plain = config_from_hf({**base, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}})
    assert (plain.rope_theta, plain.rope_scaling) == (5000.0, None)
    assert config_from_hf({**base, "dtype": "bfloat16"}).rope_theta == 10000.0


def test_end_of_sequence_ids_come_from_both_files() -> None:
    config = tiny_config("qwen2", eos_token_id=[7, 2])
    assert config_from_hf(config, {"eos_token_id": 9}).eos_token_ids == (9, 7, 2)
    assert config_from_hf(config, {"eos_token_id": [2, 9]}).eos_token_ids == (2, 9, 7)
    assert config_from_hf(config, {}).eos_token_ids == (7, 2)


@pytest.mark.parametrize(
    "harmless",
    [
        {"use_sliding_window": False, "sliding_window": 4096},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 0},  # as long as the context
        {
            "use_sliding_window": True,
            "sliding_window": 64,
            "max_window_layers": 2,
        },  # begins after the last layer
        {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["full_attention"] * 2},
    ],
)
def test_a_sliding_window_without_effect_is_accepted(harmless: dict[str, Any]) -> None:
    assert config_from_hf({**tiny_config("qwen2"), **harmless}).layer_windows == ()


REFUSED_HF: list[tuple[dict[str, Any], str]] = [
    (
        {"architectures": ["BertForMaskedLM"]},
        "architectures is ['BertForMaskedLM'], supported: Qwen2ForCausalLM",
    ),
    ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'"),
    ({"architectures": [7]}, "architectures is [7]"),
    ({"architectures": [], "model_type": "gemma"}, "model_type is 'gemma', supported: qwen2, llama, qwen3"),
    ({"architectures": [], "model_type": ["qwen2"]}, "model_type is ['qwen2']"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu', supported: silu"),
    ({"hidden_size": "64"}, "hidden_size is '64', an integer was expected"),
    ({"hidden_size": True}, "hidden_size is True, an integer was expected"),
    ({"hidden_size": 64.5}, "hidden_size is 64.5"),
    ({"hidden_size": -64}, "hidden_size is -64, a value from 1 to"),
    ({"hidden_size": 0}, "hidden_size is 0"),
    ({"hidden_size": 10**100}, "hidden_size is an integer of 333 bits"),
    ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, a value from 1 to"),
    ({"vocab_size": [320]}, "vocab_size is [320]"),
    (
        {"num_key_value_heads": 3},
        "num_attention_heads is 4, not a multiple of num_key_value_heads, which is 3",
    ),
    (
        {"head_dim": None, "hidden_size": 66},
        "the width 66 is not a multiple of num_attention_heads, which is 4",
    ),
    ({"head_dim": 15}, "head_dim is 15, an even number was expected"),
    ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6', a number was expected"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06"),
    ({"rope_theta": float("inf")}, "rope_theta is inf"),
    ({"rope_theta": 0}, "rope_theta is 0"),
    ({"rope_theta": 10**400}, "rope_theta is an integer of"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', true or false was expected"),
    ({"rope_scaling": "llama3"}, "rope_scaling is 'llama3', a mapping or null was expected"),
    (
        {"rope_scaling": {"rope_type": "proportional", "factor": 4.0}},
        "rope_scaling: rope_type is 'proportional', supported: default",
    ),
    ({"rope_scaling": {"type": "mrope", "factor": 4.0}}, "rope_scaling: type is 'mrope'"),
    ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_scaling: the key 'factor' is missing"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters: the key 'long_factor' is missing"),
    (
        {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0] * 7, "short_factor": [1.0] * 8}},
        "rope_parameters: long_factor is [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], a list of 8 positive",
    ),
    (
        {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0] * 8, "short_factor": [0.0] * 8}},
        "short_factor is [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], a list of 8 positive numbers was expected",
    ),
    ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: the key 'factor' is missing"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "factor is 0.0"),
    (
        {"rope_scaling": {**LLAMA3, "rope_type": "llama3", "high_freq_factor": 1.0}},
        "high_freq_factor is 1.0, more",
    ),
    (
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor is 0.5, only 1.0 is supported",
    ),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters is given per layer type"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, only 1.0 is supported"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0, it must be absent"),
    ({"logit_scale": 0.0625}, "logit_scale is 0.0625, only 1.0 is supported"),
    ({"num_experts": 8}, "num_experts is 8, only 0 is supported"),
    (
        {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}},
        "a model that brings its own code is not supported",
    ),
    (
        {"sliding_window": 64},
        "sliding_window is 64 of 512 positions, and llama models are supported with full attention only",
    ),
    ({"eos_token_id": [2, "x"]}, "eos_token_id is [2, 'x'], a token id or a list of them"),
    ({"eos_token_id": 2.0}, "eos_token_id is 2.0, a token id or a list of them"),
    ({"bos_token_id": "1"}, "bos_token_id is '1', a token id or a list of them"),
]


@pytest.mark.parametrize(("changes", "expected"), REFUSED_HF, ids=[next(iter(c)) for c, _ in REFUSED_HF])
def test_an_unsupported_value_is_refused_by_key_and_value(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ModelError) as caught:
        config_from_hf({**tiny_config("llama"), **changes}, {}, "models/x/config.json")
    message = str(caught.value)
    assert message.startswith("models/x/config.json: ")
    assert expected in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("settings", "windows"),
    [
        ({"max_window_layers": 1}, (None, 64)),
        ({"max_window_layers": 0}, (64, 64)),
        ({"layer_types": ["sliding_attention", "full_attention"]}, (64, None)),
    ],
)
def test_windows_of_qwen2_are_by_layer(settings: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    config = config_from_hf(
        {**tiny_config("qwen2"), "use_sliding_window": True, "sliding_window": 64, **settings}
    )
    assert config.layer_windows == windows


NOT_SUPPORTED = [
    ("GptOssForCausalLM", "attention sinks are"),
    ("DeepseekV3ForCausalLM", "multi-head latent attention (MLA) is"),
    ("MambaForCausalLM", "state-space layers are"),
    ("GraniteMoeHybridForCausalLM", "state-space layers are"),
    ("Qwen3NextForCausalLM", "linear-attention, convolution and recurrent layers are"),
    ("T5ForConditionalGeneration", "encoder-decoder models are"),
]


@pytest.mark.parametrize(("name", "why"), NOT_SUPPORTED)
def test_what_is_not_supported_is_refused_by_name(name: str, why: str) -> None:
    with pytest.raises(ModelError) as caught:
        config_from_hf({"architectures": [name]})
    assert f"architectures is ['{name}'], {why} not supported; supported: " in str(caught.value)


@pytest.mark.parametrize(
    ("name", "why"), [("gpt-oss", "sinks"), ("deepseek2", "MLA"), ("mamba2", "state-space")]
)
def test_what_is_not_supported_in_a_gguf_file_is_refused_by_name(name: str, why: str) -> None:
    with pytest.raises(ModelError, match=f"general.architecture is '{name}', .*{why}.* not supported"):
        config_from_gguf(gguf_metadata(name))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "holds a JSON list, an object was expected"),
        (b'{"hidden_size": NaN}', "NaN is not a JSON number"),
        (b'{"hidden_size": 1, "hidden_size": 2}', "the key 'hidden_size' occurs twice"),
        (b"\xff\xfe{}", "not UTF-8 text"),
        (b"[" * 100000, "nested too deeply"),
    ],
)
def test_a_broken_config_file_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    write_hf_model(tmp_path, tiny_config("llama"))
    for name in ("config.json", "generation_config.json"):
        kept = (tmp_path / name).read_bytes() if (tmp_path / name).exists() else b"{}"
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ModelError) as caught:
            open_model(tmp_path)
        assert str(caught.value).startswith(f"{tmp_path / name}: ")
        assert expected in str(caught.value)
        (tmp_path / name).write_bytes(kept)


def test_special_ids_outside_the_vocabulary_are_left_out_with_a_notice(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"eos_token_id": [2, 320], "bos_token_id": -1}
    write_hf_model(tmp_path, tiny_config("llama", **changes), generation_config={"eos_token_id": 2**70})
    with open_model(tmp_path, "tiny") as source:
        assert (source.config.eos_token_ids, source.config.bos_token_id) == ((2,), None)
        (notice,) = source.notices
    assert notice == (
        f"tiny: left out eos_token_id {2**70}, eos_token_id 320, bos_token_id -1: "
        "outside the vocabulary of 320 tokens"
    )
    ids = {"eos_token_id": 320, "eot_token_id": 5, "bos_token_id": 2**32 - 1}
    config = config_from_gguf(gguf_metadata(**{f"tokenizer.ggml.{key}": i for key, i in ids.items()}))
    assert (config.eos_token_ids, config.bos_token_id) == ((5,), None)
    assert config.ids_left_out == (
        "tokenizer.ggml.eos_token_id 320",
        "tokenizer.ggml.bos_token_id 4294967295",
    )


def test_a_familys_default_id_outside_the_vocabulary_is_no_notice() -> None:
    config = config_from_hf(tiny_config("llama", vocab_size=2, bos_token_id=None, eos_token_id=None))
    assert (config.bos_token_id, config.eos_token_ids, config.ids_left_out) == (1, (), ())


def test_an_error_in_generation_config_names_that_file(tmp_path: Path) -> None:
    write_hf_model(tmp_path, tiny_config("llama"), generation_config={"eos_token_id": "</s>"})
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id is '</s>'"):
        open_model(tmp_path)


# -- GGUF ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_gguf_and_hugging_face_files_of_one_model_have_one_config(tmp_path: Path, architecture: str) -> None:
    config = tiny_config(architecture)
    write_hf_model(tmp_path / "hf", config)
    write_gguf_model(tmp_path / "m.gguf", config)
    with open_model(tmp_path / "hf") as hf, open_model(tmp_path / "m.gguf") as gguf:
        assert gguf.tensors.keys() == hf.tensors.keys()
        assert gguf.config.rms_norm_eps == np.float32(hf.config.rms_norm_eps)
        assert gguf.config == ModelConfig(**{**vars(hf.config), "rms_norm_eps": gguf.config.rms_norm_eps})


def test_a_head_is_tied_when_the_file_has_none() -> None:
    assert config_from_gguf(gguf_metadata(), {"token_embd.weight"}).tie_word_embeddings
    assert not config_from_gguf(gguf_metadata(), {"token_embd.weight", "output.weight"}).tie_word_embeddings


def test_the_vocabulary_is_counted_where_it_is_not_given() -> None:
    metadata = gguf_metadata(**{"tokenizer.ggml.tokens": ["a"] * 300})
    del metadata["llama.vocab_size"]
    assert config_from_gguf(metadata).vocab_size == 300
    del metadata["tokenizer.ggml.tokens"]
    with pytest.raises(ModelError, match=r"neither llama\.vocab_size nor tokenizer\.ggml\.tokens"):
        config_from_gguf(metadata)


def test_head_counts_and_lengths_default_as_in_llama_cpp() -> None:
    metadata = gguf_metadata()
    del metadata["llama.attention.head_count_kv"], metadata["llama.rope.freq_base"]
    config = config_from_gguf(metadata)
    assert (config.kv_heads, config.head_dim, config.rope_theta) == (4, 16, 10000.0)
    lengths = {"llama.attention.key_length": 32, "llama.attention.value_length": 32}
    assert config_from_gguf(gguf_metadata(**lengths)).head_dim == 32


def test_a_gguf_list_of_one_number_for_all_layers_is_that_number() -> None:
    plain = gguf_metadata()
    keys = ("attention.head_count", "attention.head_count_kv", "feed_forward_length", "rope.freq_base")
    lists = {f"llama.{key}": [plain[f"llama.{key}"]] * plain["llama.block_count"] for key in keys}
    assert config_from_gguf({**plain, **lists}) == config_from_gguf(plain)


def test_gguf_end_of_sequence_ids_are_eos_eot_and_eom() -> None:
    ids = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2}
    assert config_from_gguf(gguf_metadata(**ids)).eos_token_ids == (2, 5)


def test_gguf_scaling_is_read() -> None:
    scaled = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert config_from_gguf(gguf_metadata(**scaled)).rope_scaling == RopeScaling("linear", 4.0)
    assert config_from_gguf(gguf_metadata(**{"llama.rope.scale_linear": 4.0})).rope_scaling == RopeScaling(
        "linear", 4.0
    )
    none = {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}
    assert config_from_gguf(gguf_metadata(**none)).rope_scaling is None


REFUSED_GGUF: list[tuple[dict[str, Any], str]] = [
    ({"general.architecture": "bert"}, "general.architecture is 'bert', supported: llama, qwen2"),
    ({"general.architecture": None}, "the key 'general.architecture' is missing"),
    ({"llama.block_count": None}, "the key 'llama.block_count' is missing"),
    ({"llama.embedding_length": None}, "the key 'llama.embedding_length' is missing"),
    ({"llama.attention.head_count": None}, "the key 'llama.attention.head_count' is missing"),
    ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon' is missing"),
    ({"llama.attention.head_count": [4, 2]}, "llama.attention.head_count is [4, 2], an integer was expected"),
    ({"llama.attention.head_count": [4] * 3}, "head_count is [4, 4, 4], an integer was expected"),
    ({"llama.attention.head_count": [True, True]}, "head_count is [True, True], an integer was expected"),
    ({"llama.feed_forward_length": 0}, "llama.feed_forward_length is 0"),
    ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8, only the whole head dimension 16"),
    (
        {"llama.attention.key_length": 32, "llama.attention.value_length": 16},
        "value_length is 16, only keys and",
    ),
    ({"llama.rope.scaling.type": "mrope"}, "llama.rope.scaling.type is 'mrope', supported: none, linear"),
    ({"llama.expert_count": 8}, "the key 'llama.expert_used_count' is missing"),
    ({"llama.expert_shared_count": 1}, "llama.expert_shared_count is 1, only 0 is supported"),
    ({"llama.attention.scale": 0.5}, "llama.attention.scale is 0.5, it must be absent"),
    ({"llama.logit_scale": 0.5}, "llama.logit_scale is 0.5"),
    ({"tokenizer.ggml.eos_token_id": "2"}, "eos_token_id is '2', a token id or a list of them"),
]


@pytest.mark.parametrize(("changes", "expected"), REFUSED_GGUF, ids=[next(iter(c)) for c, _ in REFUSED_GGUF])
def test_unsupported_gguf_metadata_is_refused_by_key(changes: dict[str, Any], expected: str) -> None:
    metadata = {k: v for k, v in gguf_metadata(**changes).items() if v is not None}
    with pytest.raises(ModelError) as caught:
        config_from_gguf(metadata, (), "x.gguf")
    assert str(caught.value).startswith("x.gguf: ")
    assert expected in str(caught.value)


# -- rotary frequencies --------------------------------------------------------------------------


def rope_config(**changes: Any) -> ModelConfig:
    return config_from_hf({**tiny_config("llama"), "rope_theta": 5000.0, **changes})


def test_frequencies_equal_the_definition() -> None:
    freq = rope_inv_freq(rope_config())
    assert freq.dtype == np.float64
    assert np.allclose(freq, [5000.0 ** (-2 * i / 16) for i in range(8)], rtol=1e-15)


def test_scaled_frequencies_equal_transformers() -> None:
    """Computed by transformers 5.24 (``LlamaRotaryEmbedding``, head_dim 16, theta 5000), in float32."""
    linear = [
        0.25,
        0.08621221,
        0.029730178,
        0.010252417,
        0.003535534,
        0.0012192247,
        0.0004204482,
        0.00014499106,
    ]
    llama3 = [
        1.0,
        0.29582581,
        0.022194639,
        0.0051262085,
        0.001767767,
        0.00060961233,
        0.0002102241,
        7.2495532e-05,
    ]
    got = rope_inv_freq(rope_config(rope_scaling={"rope_type": "linear", "factor": 4.0}))
    assert np.allclose(got, linear, rtol=1e-6)
    got = rope_inv_freq(rope_config(rope_scaling={**LLAMA3, "rope_type": "llama3"}))
    assert np.allclose(got, llama3, rtol=1e-6)


@pytest.mark.parametrize(
    ("scaling", "reach"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "dynamic", "factor": 2.0}, 1024),
        ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({**LLAMA3, "rope_type": "llama3"}, 512),
    ],
)
def test_a_scaled_model_reaches_as_far_as_its_scaling(scaling: dict[str, Any], reach: int) -> None:
    """``max_position_embeddings`` is 512: before scaling or after it, by the type."""
    assert rope_config(rope_scaling=scaling).max_position == reach


def test_phi3_is_read_as_published() -> None:
    """What matters of the config.json of microsoft/Phi-4-mini-instruct, with shorter lists of factors."""
    factors = {"long_factor": [1.0 + i for i in range(6)], "short_factor": [1.0] * 6}
    published = {
        "architectures": ["Phi3ForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
        "model_type": "phi3",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "longrope", **factors},
        "rope_theta": 10000.0,
        "sliding_window": 262144,
    }
    config = config_from_hf(published)
    assert (config.head_dim, config.rotary_dim, config.max_position) == (16, 12, 131072)
    assert config.layer_windows == ()
    scaling = config.rope_scaling
    assert scaling is not None
    assert (scaling.type, scaling.original_max_position) == ("longrope", 4096)
    assert scaling.attention_factor == pytest.approx(1.1902380714238083)  # sqrt(1 + ln 32 / ln 4096)
    assert np.allclose(rope_inv_freq(config, length=4096), 10000.0 ** -(np.arange(6) / 6))
    assert np.allclose(
        rope_inv_freq(config, length=4097), 10000.0 ** -(np.arange(6) / 6) / factors["long_factor"]
    )
    older = config_from_hf({**published, "rope_scaling": {"type": "su", **factors}})
    assert older == config


def test_gemma_3_4b_is_read_as_published() -> None:
    """The text_config of google/gemma-3-4b-it, which leaves the most to the defaults."""
    config = config_from_hf(
        {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
            "eos_token_id": [1, 106],
        }
    )
    assert (config.heads, config.kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert (config.max_position, config.eos_token_ids, config.tie_word_embeddings) == (131072, (1, 106), True)
    assert (config.rope_theta, config.rope_scaling) == (1e6, RopeScaling("linear", 8.0))
    assert (config.local_rope_theta, config.attention_scale, config.hidden_act) == (1e4, 1 / 16, "gelu_tanh")
    assert config.layer_windows[:12] == ((1024,) * 5 + (None,)) * 2
    assert config.layer_ropes[:12] == (("local",) * 5 + ("global",)) * 2
    assert np.allclose(rope_inv_freq(config), 1e6 ** -(np.arange(128) / 128) / 8)
    assert np.allclose(rope_inv_freq(config, "local"), 1e4 ** -(np.arange(128) / 128))


def test_gemma_scales_scores_by_its_own_number() -> None:
    config = {"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": 144}
    assert config_from_hf(config).attention_scale == pytest.approx(1 / 12)
    sizes = {"gemma2.embedding_length": 4608, "gemma2.attention.head_count": 32, "gemma2.block_count": 46}
    lengths = {"gemma2.attention.key_length": 128, "gemma2.attention.value_length": 128}
    metadata = gguf_metadata("gemma2", **sizes, **lengths, **{"gemma2.attention.head_count_kv": 16})
    assert config_from_gguf(metadata).attention_scale == pytest.approx(1 / 12)
    assert (config_from_gguf(metadata).attention_softcap, config_from_gguf(metadata).logit_softcap) == (
        50,
        30,
    )
    metadata["gemma2.block_count"] = 42
    assert config_from_gguf(metadata).attention_scale == pytest.approx(128**-0.5)


def test_factors_of_a_gguf_file_divide(tmp_path: Path) -> None:
    factors = np.array([1, 1, 1.5, 2, 4, 8, 8, 8], np.float32)
    write_gguf_model(tmp_path / "m.gguf", tiny_config("llama", rope_theta=5000.0), rope_factors=factors)
    with open_model(tmp_path / "m.gguf") as source:
        assert np.allclose(rope_inv_freq(source.config) * factors, rope_inv_freq(rope_config()), rtol=1e-15)


def test_configs_survive_json(tmp_path: Path) -> None:
    """What a test writes and what a user's file holds take the same way."""
    write_hf_model(tmp_path, tiny_config("qwen2"))
    with open_model(tmp_path) as source:
        assert source.metadata == json.loads((tmp_path / "config.json").read_text())
        assert source.config == config_from_hf(tiny_config("qwen2"))

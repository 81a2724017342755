"""Models with mixtures of experts: batches, files in all their forms, and that unchosen experts are not read.

Against transformers (the fixtures, see test_families.py too), and against the same model in another form,
whose logits must be the same bits. The fixtures' prompts are such that no router is undecided: the last
expert chosen is 1e-3 ahead of the next, so that rounding (1e-6) chooses no other.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_families import write_gguf_of
from model_files import (
    K_SIZES,
    encode,
    random_tensors,
    safetensors_bytes,
    tiny_config,
    write_gguf_model,
    write_hf_model,
)
from test_families import FOLDER, reference
from test_logits import TOLERANCE, Loaded, worst

from xinfer_vk.engine.runner import Chunk
from xinfer_vk.errors import ModelError, NumericError
from xinfer_vk.kernels.layout import row_words
from xinfer_vk.models.config_gguf import config_from_gguf
from xinfer_vk.models.config_hf import config_from_hf
from xinfer_vk.models.expert_config import ExpertConfig
from xinfer_vk.reference import NUMPY_PROFILE, NumpyRuntime
from xinfer_vk.weights import device
from xinfer_vk.weights.expert_tensors import one_by_one
from xinfer_vk.weights.formats import FORMATS, as_f32
from xinfer_vk.weights.safetensors_file import read_safetensors
from xinfer_vk.weights.source import open_model
from xinfer_vk.weights.tensors import TensorInfo

TOKENS = list(range(7, 71, 3))


def values_of(folder: Path) -> dict[str, np.ndarray]:
    tensors = read_safetensors(folder / "model.safetensors")
    return {name: as_f32(t.fmt, t.data).reshape(t.shape) for name, t in tensors.items()}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    write_hf_model(folder, config, tensors)
    return folder


def numpy_logits(path: Path) -> np.ndarray:
    return Loaded(NumpyRuntime(), path).logits(TOKENS, None)


# -- batches -----------------------------------------------------------------------------------------


def test_sequences_of_a_batch_get_their_own_logits(runtime: Any) -> None:
    """Tokens of several sequences are grouped by expert; each gets what it would get alone."""
    token_ids, want = reference("qwen3moe")
    model = Loaded(runtime, FOLDER / "qwen3moe")
    starts = [7, 33, 50]
    sequences = [model.cache.open() for _ in starts]
    out = model.runner.run([Chunk(s, token_ids[:n]) for s, n in zip(sequences, starts)], "logits")
    rows = [worst(row, want[n - 1]) for row, n in zip(out, starts)]
    for step in range(3):
        chunks = [Chunk(s, token_ids[n + step :][:1]) for s, n in zip(sequences, starts)]
        out = model.runner.run(chunks, "logits")
        rows += [worst(row, want[n + step]) for row, n in zip(out, starts)]
    mixed = [Chunk(sequences[0], token_ids[10:13]), Chunk(sequences[1], token_ids[36:52])]
    out = model.runner.run(mixed, "logits")
    rows += [worst(out[0], want[12]), worst(out[1], want[51])]
    model.free()
    assert max(rows) <= TOLERANCE


def test_experts_that_are_not_chosen_are_not_read(runtime: Any, tmp_path: Path) -> None:
    """With NaN for one expert's weights a token is as before, or NaN: as its routers chose."""
    folder = FOLDER / "mixtral"
    config, tensors = json.loads((folder / "config.json").read_text()), values_of(folder)
    for name in tensors:
        if ".experts.3." in name:
            tensors[name] = np.full_like(tensors[name], np.nan)
    clean, poisoned = Loaded(NumpyRuntime(), folder), Loaded(runtime, write(tmp_path, config, tensors))
    same = unlike = 0
    for token in range(24):
        sequence = poisoned.cache.open()
        try:
            got = poisoned.runner.run([Chunk(sequence, [token])], "logits")
            assert worst(got, clean.logits([token], None)) <= TOLERANCE
            same += 1
        except NumericError:
            unlike += 1
        poisoned.cache.close(sequence)
    poisoned.free()
    assert same >= 5 and unlike >= 5  # (3/5)² of the tokens choose others in both layers


def test_experts_on_matrix_units_give_the_same_logits() -> None:
    """Where the tuner found them fastest for such a matrix; by the oracles here."""
    units = {"cooperative_matrix", "float16", "subgroup_size_control"}
    tuned = {
        "bf16 80x32 for 16": "coop 16",
        "bf16 32x40 for 16": "matmul 16",
        "bf16 80x32 for 1": "matvec 256",
    }
    profile = replace(NUMPY_PROFILE, simd=False, subgroup_size=32, features=frozenset(units), tuned=tuned)
    token_ids, want = reference("mixtral")
    model = Loaded(NumpyRuntime(profile), FOLDER / "mixtral")
    assert worst(model.logits(token_ids[:64], None), want[:64]) <= TOLERANCE
    kernels = [step.kernel.name for step in model.runner.last_plan.steps]
    assert kernels.count("matmul_coop.bf16.experts") == 2 and kernels.count("split_halves") == 2
    assert kernels.count("matmul.bf16.experts") == 2
    model.logits(token_ids[:1], None)
    lanes = [
        dict(step.kernel.spec)["local_size"]
        for step in model.runner.last_plan.steps
        if step.kernel.name == "matvec.bf16.shared.experts"
    ]
    assert lanes == [256, 64] * 2


# -- files -------------------------------------------------------------------------------------------


def test_stacked_experts_of_transformers_5_are_the_same_model(tmp_path: Path) -> None:
    """What ``save_pretrained(save_original_format=False)`` writes: a tensor for all experts of a layer."""
    folder = FOLDER / "qwen3moe"
    config, tensors = json.loads((folder / "config.json").read_text()), values_of(folder)
    for layer in range(config["num_hidden_layers"]):
        experts = f"model.layers.{layer}.mlp.experts"
        parts: dict[str, list[np.ndarray]] = {
            kind: [tensors.pop(f"{experts}.{e}.{kind}.weight") for e in range(config["num_local_experts"])]
            for kind in ("gate_proj", "up_proj", "down_proj")
        }
        gate, up, down = (np.stack(matrices) for matrices in parts.values())
        tensors[f"{experts}.gate_up_proj"] = np.concatenate((gate, up), axis=1)
        tensors[f"{experts}.down_proj"] = down
    np.testing.assert_array_equal(numpy_logits(write(tmp_path, config, tensors)), numpy_logits(folder))


def test_gguf_files_with_a_tensor_for_each_expert_are_the_same_model(tmp_path: Path) -> None:
    """As converters wrote Mixtrals until the spring of 2024: ``blk.0.ffn_gate.3.weight``."""
    write_gguf_of(FOLDER / "mixtral", tmp_path / "new.gguf")
    reader = gguf.GGUFReader(tmp_path / "new.gguf")
    writer = gguf.GGUFWriter(str(tmp_path / "old.gguf"), "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        if "_exps" not in tensor.name:
            writer.add_tensor(tensor.name, tensor.data)
            continue
        for expert, matrix in enumerate(tensor.data):
            writer.add_tensor(tensor.name.replace("_exps", f".{expert}"), matrix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    np.testing.assert_array_equal(numpy_logits(tmp_path / "old.gguf"), numpy_logits(tmp_path / "new.gguf"))


def low_bit_mix(name: str) -> str:
    """Experts of two formats, and in one layer a gate that is not in its up's."""
    if ".experts." not in name:
        return "f32"
    return "q8_0" if "down_proj" in name or ("gate_proj" in name and ".layers.1." in name) else "q4_k"


@pytest.mark.parametrize("fmt", [f.name for f in FORMATS.values() if f.ggml_type is not None])
def test_logits_of_experts_in_every_format_equal_those_of_their_dequantized_weights(
    tmp_path: Path, fmt: str
) -> None:
    def fmt_of(name: str) -> str:
        return fmt if ".experts." in name else "f32"

    sizes = {**K_SIZES, "intermediate_size": 256} if FORMATS[fmt].block == 256 else {}
    config = tiny_config("mixtral", **sizes, num_hidden_layers=1, num_local_experts=2)
    dense = write_gguf_model(tmp_path / "m.gguf", config, fmt=fmt_of)
    want = numpy_logits(write(tmp_path / "dense", config, dense))
    assert np.ptp(want) > 1
    assert worst(numpy_logits(tmp_path / "m.gguf"), want) <= TOLERANCE


def test_device_logits_of_low_bit_experts_equal_those_of_their_dequantized_weights(
    runtime: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In small buffers, so that the experts of a layer are in several."""
    config = tiny_config("mixtral", **{**K_SIZES, "intermediate_size": 256}, num_local_experts=3)
    dense = write_gguf_model(tmp_path / "m.gguf", config, fmt=low_bit_mix)
    want = numpy_logits(write(tmp_path / "dense", config, dense))
    monkeypatch.setattr(device, "MAX_ARENA_BYTES", 200 << 10)
    model = Loaded(runtime, tmp_path / "m.gguf")
    try:
        experts = [layer.experts for layer in model.weights.layers if layer.experts is not None]
        assert [len(e.gate_up) for e in experts] == [1, 2]
        assert any(len(matrix.parts) > 1 for e in experts for matrix in (*e.gate_up, *e.down))
        assert worst(model.logits(TOKENS, None), want) <= TOLERANCE
        assert worst(model.logits(TOKENS[:6], 1), want[:6]) <= TOLERANCE
    finally:
        model.free()


def test_experts_keep_their_bytes_and_lie_whole_in_a_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config("mixtral", hidden_size=64, intermediate_size=100)
    tensors = random_tensors(config)
    want = numpy_logits(write(tmp_path, config, tensors))
    monkeypatch.setattr(device, "MAX_ARENA_BYTES", 120 << 10)
    model = Loaded(NumpyRuntime(), tmp_path)
    (gate_up,) = model.weights.layers[0].experts.gate_up
    assert gate_up.words == 200 * row_words("f32", 64)
    assert [(part.first, part.count) for part in gate_up.parts] == [(0, 2), (2, 2), (4, 1)]
    for part in gate_up.parts:
        assert part.offset + part.count * part.words <= part.buffer.words <= 120 << 8
    np.testing.assert_array_equal(model.logits(TOKENS, None), want)
    monkeypatch.setattr(device, "MAX_ARENA_BYTES", 48 << 10)
    with pytest.raises(
        ModelError, match=r"the expert matrix '.*experts.0.gate_proj' takes 51200 bytes, a buf"
    ):
        Loaded(NumpyRuntime(), tmp_path)


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.pop(name)


def add(name: str, shape: tuple[int, ...]) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.update({name: np.zeros(shape, np.float32)})


EXPERT = "model.layers.1.mlp.experts"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (drop(f"{EXPERT}.4.up_proj.weight"), f"the tensor '{EXPERT}.4.up_proj.weight' is missing"),
        (drop("model.layers.0.mlp.gate.weight"), "the tensor 'model.layers.0.mlp.gate.weight' is missing"),
        (add(f"{EXPERT}.5.up_proj.weight", (96, 64)), "experts.5.up_proj.weight' has no place in a mixtral"),
        (add(f"{EXPERT}.2.down_proj.weight", (64, 95)), "has shape [64, 95], the config says [64, 96]"),
        (add("model.layers.0.mlp.shared_expert.up_proj.weight", (8, 8)), "up_proj.weight' has no place in"),
        (add(f"{EXPERT}.gate_up_proj", (5, 3, 8)), "mlp.experts.gate_up_proj' has no place in a mixtral"),
    ],
)  # fmt: skip
def test_files_that_are_not_what_the_config_says_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], expected: str
) -> None:
    config = tiny_config("mixtral")
    tensors = random_tensors(config)
    change(tensors)
    with pytest.raises(ModelError) as caught:
        Loaded(NumpyRuntime(), write(tmp_path, config, tensors))
    assert expected in str(caught.value)


def test_experts_of_unlike_formats_are_refused(tmp_path: Path) -> None:
    config = tiny_config("mixtral")
    write(tmp_path, config, random_tensors(config))
    stored = {
        name: ("F32", values.shape, encode(values, "f32").tobytes())
        for name, values in random_tensors(config).items()
    }
    name = f"{EXPERT}.3.down_proj.weight"
    stored[name] = ("F16", (64, 96), bytes(2 * 64 * 96))
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(stored))
    with pytest.raises(
        ModelError, match=r"experts.3.down_proj.weight' is f16 and .* is f32: only experts of on"
    ):
        Loaded(NumpyRuntime(), tmp_path)


def test_experts_with_an_order_of_columns_are_refused() -> None:
    tensor = TensorInfo("w", (8, 8), "f32", np.empty(0, np.uint8), order=np.arange(8))
    with pytest.raises(ModelError, match=r"'w' has its columns in an order of its own \(desc_act\)"):
        device._refuse_unlike([tensor, tensor])


def test_names_of_mixtral_and_stacks_become_one_name_each() -> None:
    stack = TensorInfo("", (2, 6, 4), "f16", np.arange(96, dtype=np.uint8), start=1000)
    names = {
        "model.layers.7.block_sparse_moe.gate.weight": TensorInfo("", (2, 4), "f32", np.zeros(32, np.uint8)),
        "model.layers.7.block_sparse_moe.experts.11.w3.weight": TensorInfo(
            "", (3, 4), "f32", np.zeros(48, np.uint8)
        ),
        "model.layers.8.mlp.experts.gate_up_proj": stack,
        "model.layers.9.mlp.gate_up_proj": stack,
    }
    got = one_by_one(names)
    assert sorted(got) == [
        "model.layers.7.mlp.experts.11.up_proj.weight", "model.layers.7.mlp.gate.weight",
        "model.layers.8.mlp.experts.0.gate_proj.weight", "model.layers.8.mlp.experts.0.up_proj.weight",
        "model.layers.8.mlp.experts.1.gate_proj.weight", "model.layers.8.mlp.experts.1.up_proj.weight",
        "model.layers.9.mlp.gate_up_proj",
    ]  # fmt: skip
    last = got["model.layers.8.mlp.experts.1.up_proj.weight"]
    assert last.shape == (3, 4) and last.start == 1072 and last.data.tolist() == list(range(72, 96))
    assert all(name == tensor.name for name, tensor in got.items() if tensor is not stack)


# -- configs -----------------------------------------------------------------------------------------


def test_published_configs_are_read_as_published() -> None:
    """What decides the experts in the config.json of mistralai/Mixtral-8x7B-v0.1 and Qwen/Qwen3-30B-A3B."""
    mixtral = {
        "architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False,
        "vocab_size": 32000,
    }  # fmt: skip
    config = config_from_hf(mixtral)
    assert config.experts == ExpertConfig(8, 2, 14336, True, (True,) * 32)
    assert config.architecture == "mixtral" and not config.layer_windows
    qwen = {
        "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "head_dim": 128,
        "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
        "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": None, "use_sliding_window": False, "vocab_size": 151936,
    }  # fmt: skip
    assert config_from_hf(qwen).experts == ExpertConfig(128, 8, 768, True, (True,) * 48)
    some = {**qwen, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    sparse = (False, True, False, False, False, True)
    assert config_from_hf(some).experts == ExpertConfig(128, 8, 768, True, sparse)
    assert not config_from_hf(some).has_experts(0) and config_from_hf(some).has_experts(1)
    assert config_from_hf({**some, "mlp_only_layers": [1, 3, 5]}).experts is None
    del qwen["num_experts"], qwen["norm_topk_prob"]
    assert config_from_hf({**qwen, "num_local_experts": 64}).experts == ExpertConfig(
        64, 8, 768, False, (True,) * 48
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_experts_per_tok": 6}, "num_experts_per_tok is 6, a value from 1 to 5 was expected"),
        ({"num_local_experts": 4096}, "num_local_experts is 4096, a value from 1 to 1024 was expected"),
        ({"n_shared_experts": 1}, "n_shared_experts is 1, only 0 is supported"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor is 2.5, only 1.0 is supported"),
        ({"architectures": ["Qwen2MoeForCausalLM"]}, "shared experts are not supported"),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": "all"},
            "mlp_only_layers is 'all', a list of layers was expected",
        ),
    ],
)  # fmt: skip
def test_other_mixtures_are_refused_by_key(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ModelError) as caught:
        config_from_hf(tiny_config("mixtral", **changes))
    assert expected in str(caught.value)


def test_gguf_keys_of_experts(tmp_path: Path) -> None:
    write_gguf_model(tmp_path / "m.gguf", tiny_config("mixtral"))
    with open_model(tmp_path / "m.gguf") as source:
        assert source.config.experts == ExpertConfig(5, 2, 96, True, (True, True))
        metadata = source.metadata
    names = {"blk.1.ffn_gate_inp.weight"}
    more = {"llama.expert_feed_forward_length": 40, "llama.expert_weights_norm": False}
    assert config_from_gguf({**metadata, **more}, names).experts == ExpertConfig(
        5, 2, 40, False, (False, True)
    )
    for key, value in (("expert_gating_func", 2), ("expert_weights_scale", 2.5), ("expert_used_count", 6)):
        with pytest.raises(ModelError, match=f"llama.{key} is {value}, "):
            config_from_gguf({**metadata, f"llama.{key}": value}, names)

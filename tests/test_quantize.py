"""Quantizing: blocks that others read as we do, closer to the weights than plain rounding makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_helpers import assert_one_error, xinfer
from conftest import DeviceUnderTest
from model_files import (
    K_SIZES,
    encode,
    permute,
    random_tensors,
    tiny_config,
    write_gguf_model,
    write_hf_model,
)
from plain_rounding import plain

from xinfer_vk import LLM
from xinfer_vk.cli.options import QUANTIZE_TYPES
from xinfer_vk.errors import ModelError, UsageError
from xinfer_vk.weights.formats import FORMATS
from xinfer_vk.weights.quantize.choice import TYPES, Choice, choose
from xinfer_vk.weights.quantize.loading import quantized
from xinfer_vk.weights.quantize.rows import AT_ONCE, ENCODERS, dequantize_rows, quantize_rows
from xinfer_vk.weights.source import open_model

BLOCKS = tuple(ENCODERS)
IDS = [int(i) for i in np.random.default_rng(7).integers(3, 300, 70)]


def gguf_decoded(fmt: str, rows: np.ndarray) -> np.ndarray:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return dequantize(rows, GGMLQuantizationType[fmt.upper()])


def weights(kind: str, rows: int = 64, cols: int = 512) -> np.ndarray:
    """Weights as they are found (normal, with outliers), and as they are not."""
    rng = np.random.default_rng(len(kind))
    normal = rng.standard_normal((rows, cols), np.float32) * np.float32(0.02)
    if kind == "normal":
        return normal
    if kind == "outliers":
        return (rng.standard_t(3, (rows, cols)) * 0.02).astype(np.float32)
    if kind == "positive":
        return np.abs(normal) + np.float32(0.1)
    if kind == "negative":
        return -np.abs(normal) - np.float32(0.1)
    if kind == "sparse":
        return np.where(rng.random((rows, cols)) < 0.03, normal, 0).astype(np.float32)
    if kind == "tiny":  # scales are subnormal f16, or nothing
        return normal * np.float32(2e-6) * (10 ** rng.uniform(-8, 0, (rows, 1))).astype(np.float32)
    if kind == "large":
        return rng.uniform(-65504, 65504, (rows, cols)).astype(np.float32)
    assert kind == "constant"
    return np.broadcast_to(rng.standard_normal((rows, 1)).astype(np.float32), (rows, cols)).copy()


def block_errors(x: np.ndarray, y: np.ndarray, block: int) -> np.ndarray:
    """Squared error of each block, in float64."""
    return ((x.astype(np.float64) - y) ** 2).reshape(-1, block).sum(axis=1)


@pytest.mark.parametrize("kind", ["normal", "outliers", "positive", "negative", "sparse", "tiny", "constant"])
@pytest.mark.parametrize("fmt", BLOCKS)
def test_no_block_is_further_off_than_with_the_plain_rule(fmt: str, kind: str) -> None:
    x = weights(kind)
    rows = quantize_rows(fmt, x, "x")
    assert rows.shape == (len(x), FORMATS[fmt].row_bytes(x.shape[1]))
    y = gguf_decoded(fmt, rows)
    np.testing.assert_array_equal(dequantize_rows(fmt, rows, x.shape[1]), y)
    ours = block_errors(x, y, FORMATS[fmt].block)
    theirs = block_errors(x, plain(fmt, x), FORMATS[fmt].block)
    floor = 1e-13 * float((x.astype(np.float64) ** 2).max())  # of float32 arithmetic
    good = ours <= theirs * (1 + 1e-4) + floor
    assert ours.sum() <= theirs.sum() + len(ours) * floor
    if fmt.endswith("k"):  # whose scales are rounded to whole numbers: float32 may see a tie, float64 none
        assert good.mean() >= 0.97
    else:
        assert good.all()


@pytest.mark.parametrize("fmt", ["q8_0", "q4_0", "q4_1", "q5_0"])
def test_less_error_than_the_gguf_package_makes(fmt: str) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    for kind, at_most in (("normal", 0.92), ("outliers", 0.97)):
        x = weights(kind)
        theirs = block_errors(x, gguf_decoded(fmt, quantize(x, GGMLQuantizationType[fmt.upper()])), 32)
        ours = block_errors(x, gguf_decoded(fmt, quantize_rows(fmt, x, "x")), 32)
        assert ours.sum() < at_most * theirs.sum()
        assert (ours <= theirs * (1 + 1e-4)).all()


@pytest.mark.parametrize("fmt", ["q4_k", "q6_k"])
def test_k_quants_gain_from_the_fit(fmt: str) -> None:
    x = weights("normal")
    ours = block_errors(x, gguf_decoded(fmt, quantize_rows(fmt, x, "x")), 256).sum()
    assert ours < 0.88 * block_errors(x, plain(fmt, x), 256).sum()


@pytest.mark.parametrize("fmt", BLOCKS)
def test_large_weights_stay_finite_and_near(fmt: str) -> None:
    x = weights("large", rows=8)
    y = gguf_decoded(fmt, quantize_rows(fmt, x, "x"))
    assert np.abs(x - y).max() <= 65504 * {"q8_0": 0.01, "q6_k": 0.05, "q5_0": 0.1}.get(fmt, 0.2)


@pytest.mark.parametrize("fmt", BLOCKS)
def test_zeros_stay_zeros(fmt: str) -> None:
    assert not gguf_decoded(fmt, quantize_rows(fmt, np.zeros((3, 512), np.float32), "x")).any()


@pytest.mark.parametrize("fmt", [*BLOCKS, "f16", "bf16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_refused_with_the_name(fmt: str, bad: float) -> None:
    x = weights("normal", 4)
    x[2, 300] = bad
    with pytest.raises(ModelError, match=r"tensor 'w' holds weights that are NaN or infinite"):
        quantize_rows(fmt, x, "the tensor 'w'")


@pytest.mark.parametrize("fmt", [*BLOCKS, "f16"])
def test_weights_beyond_f16_are_refused(fmt: str) -> None:
    x = weights("normal", 4)
    x[1, 7] = -65600
    with pytest.raises(ModelError, match=r"holds weights up to 65600, \w+ can hold 65504 at most"):
        quantize_rows(fmt, x, "w")


def test_floats_are_rounded_to_nearest() -> None:
    x = np.concatenate((weights("normal"), weights("large")))
    assert np.array_equal(quantize_rows("f16", x, "x"), encode(x, "f16"))
    assert np.array_equal(quantize_rows("bf16", x, "x"), encode(x, "bf16"))
    with pytest.raises(ModelError, match="too large for bf16"):
        quantize_rows("bf16", np.full((1, 2), 3.4e38, np.float32), "x")


@pytest.mark.parametrize("fmt", BLOCKS)
def test_pieces_make_no_difference(fmt: str) -> None:
    """More than one thread's share of rows gives the same bytes as row by row."""
    x = weights("normal", 2 * AT_ONCE // 512 + 3)
    whole = quantize_rows(fmt, x, "x")
    some = [0, AT_ONCE // 512, len(x) - 1]
    assert np.array_equal(whole[some], np.concatenate([quantize_rows(fmt, x[i : i + 1], "x") for i in some]))


# -- which tensor gets which format ---------------------------------------------------------------


def test_each_tensor_gets_its_format() -> None:
    def fmt(kind: str, name: str, *shape: int, tied: bool = False) -> Choice:
        return choose(kind, name, shape, tied=tied)

    assert fmt("q4_k", "model.layers.0.mlp.up_proj.weight", 512, 256) == Choice("q4_k")
    assert fmt("q4_k", "model.layers.0.input_layernorm.weight", 256).fmt is None
    assert fmt("q8_0", "model.layers.0.mlp.gate.weight", 8, 256).fmt is None  # a router
    assert fmt("q8_0", "model.layers.0.mlp.gate_proj.weight", 8, 256).fmt == "q8_0"
    for kind in ("q4_k", "q4_0", "q4_1"):
        assert fmt(kind, "lm_head.weight", 320, 256).fmt == "q6_k"
        assert fmt(kind, "model.embed_tokens.weight", 320, 256, tied=True).fmt == "q6_k"
        assert fmt(kind, "token_embd.weight", 320, 256).fmt == kind
    assert fmt("q8_0", "output.weight", 320, 256).fmt == "q8_0"
    assert fmt("q4_0", "output.weight", 320, 576) == Choice(
        "q8_0", "q8_0 instead of q6_k: 576 columns are not whole blocks of 256"
    )
    assert fmt("q4_k", "w", 4, 96).fmt == "q5_0"
    assert fmt("q4_1", "w", 4, 96) == Choice("q4_1")
    for kind in TYPES:
        assert fmt(kind, "w", 4, 40) == Choice(None, "not quantized: 40 columns are not whole blocks of 32")


def test_the_options_types_are_those_there_are() -> None:
    assert QUANTIZE_TYPES == TYPES


# -- while loading --------------------------------------------------------------------------------


def sharp(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights whose logits are far from each other, so that an error shows in the perplexity."""
    tensors = random_tensors(config, seed)
    head = "lm_head.weight" if "lm_head.weight" in tensors else "model.embed_tokens.weight"
    tensors[head] = tensors[head] * np.float32(4)
    return tensors


def k_config(architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    return tiny_config(architecture, **{**K_SIZES, "num_hidden_layers": 2, "vocab_size": 704, **changes})


@pytest.fixture(scope="module")
def float_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in bf16 whose rows are whole blocks of 256."""
    path = tmp_path_factory.mktemp("float") / "tiny"
    write_hf_model(path, k_config(), sharp(k_config()), fmt="bf16")
    _add_tokenizer(path)
    return path


def _add_tokenizer(path: Path) -> None:
    import shutil

    for file in (Path(__file__).parent / "fixtures" / "text" / "qwen2").iterdir():
        shutil.copy(file, path)


@pytest.mark.parametrize("kind", TYPES)
def test_a_model_quantized_while_it_loads_computes_with_what_its_blocks_decode_to(
    kind: str, float_model: Path, tmp_path: Path
) -> None:
    """Equal to a model in f32 that holds the decoded weights: q, k and v stacked, gate and up interleaved,
    the embedding and the head each in their format."""
    with open_model(float_model) as source:
        changed, notes = quantized(source, kind)
        decoded = {
            name: dequantize_rows(t.fmt, t.rows(), t.shape[-1]).reshape(t.shape)
            for name, t in changed.tensors.items()
        }
        formats = {name: t.fmt for name, t in changed.tensors.items() if len(t.shape) == 2}
    assert not notes
    assert formats.pop("lm_head.weight") == ("q8_0" if kind == "q8_0" else "q6_k")
    assert set(formats.values()) == {kind}
    write_hf_model(tmp_path / "decoded", k_config(), decoded)
    _add_tokenizer(tmp_path / "decoded")
    with LLM(float_model, device="numpy", kv_dtype="f32", quantize=kind) as llm:
        assert llm.dtype == kind
        got = llm.logits(IDS)
    with LLM(tmp_path / "decoded", device="numpy", kv_dtype="f32") as llm:
        want = llm.logits(IDS)
    np.testing.assert_allclose(got, want, atol=2e-4)  # sums of 256 products in another order, times 4


def test_rows_that_a_gguf_file_has_permuted_are_put_in_order_first(tmp_path: Path) -> None:
    config = k_config()
    write_hf_model(tmp_path / "hf", config, fmt="f16")
    write_gguf_model(tmp_path / "llama.gguf", config, fmt="f16")
    with open_model(tmp_path / "hf") as a, open_model(tmp_path / "llama.gguf") as b:
        name = "model.layers.1.self_attn.k_proj.weight"
        one, other = (quantized(source, "q4_k")[0].tensors[name] for source in (a, b))
        assert other.permuted
        heads = config["num_key_value_heads"]
        assert np.array_equal(permute(one.rows(), heads), other.rows())


@pytest.mark.parametrize("kind", TYPES)
def test_perplexity_on_the_device_is_that_of_numpy(
    kind: str, device: DeviceUnderTest, float_model: Path
) -> None:
    values = []
    for where in (str(device.index), "numpy"):
        with LLM(float_model, device=where, kv_dtype="f32", quantize=kind) as llm:
            values.append(llm.perplexity(IDS, context=64).perplexity)
    assert values[0] == pytest.approx(values[1], rel=1e-3)


def test_rows_of_576_say_what_they_became(tmp_path: Path) -> None:
    config = k_config(hidden_size=96, intermediate_size=256, head_dim=24)
    write_hf_model(tmp_path / "m", config)
    _add_tokenizer(tmp_path / "m")
    with LLM(tmp_path / "m", device="numpy", quantize="q4_k") as llm:
        assert llm.notices == (
            "q5_0 instead of q4_k: 96 columns are not whole blocks of 256 (13 tensors)",
            "q8_0 instead of q6_k: 96 columns are not whole blocks of 256 (1 tensor)",
        )


def test_a_quantized_model_is_not_quantized_again(tmp_path: Path) -> None:
    config = tiny_config("qwen2")
    write_gguf_model(tmp_path / "low.gguf", config, fmt="q4_1")
    with (
        open_model(tmp_path / "low.gguf") as source,
        pytest.raises(UsageError, match=r"low is quantized already \(q4_1\)"),
    ):
        quantized(source, "q8_0")


def test_what_is_low_bit_in_a_mixed_file_stays(tmp_path: Path) -> None:
    config = tiny_config("qwen2", tie_word_embeddings=False)
    write_gguf_model(tmp_path / "mixed.gguf", config, fmt=lambda name: "q5_1" if "mlp" in name else "f16")
    with open_model(tmp_path / "mixed.gguf") as source:
        mixed, notes = quantized(source, "q8_0")
    assert {t.fmt for name, t in mixed.tensors.items() if "mlp" in name} == {"q5_1"}
    assert {t.fmt for name, t in mixed.tensors.items() if "q_proj.weight" in name} == {"q8_0"}
    assert notes == ("left as they are: 6 tensors in q5_1",)


def test_mistakes_are_told_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="cannot quantize to 'q3': supported are q8_0, q6_k, q4_k, q4_1, q4_0"
    ):
        LLM(tmp_path, quantize="q3")
    tensors = random_tensors(tiny_config("qwen2"))
    tensors["model.layers.1.mlp.up_proj.weight"][5, 5] = np.nan
    write_hf_model(tmp_path / "bad", tiny_config("qwen2"), tensors)
    _add_tokenizer(tmp_path / "bad")
    result = xinfer(
        "generate", "-m", str(tmp_path / "bad"), "-p", "a", "--raw", "-d", "numpy", "--quantize", "q8_0"
    )
    assert_one_error(result, 1, "model.layers.1.mlp.up_proj.weight", "NaN or infinite")

"""Activations in 8 bits: the rounding, the products of integers, and what a model makes of them.

Tolerance of the products, as in test_kernels_matmul.py: the sums of integers are exact, and those of the
blocks' scaled sums are f32, over as many terms as there are blocks or units.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import CheckSteps
from model_files import K_SIZES, tiny_config, write_gguf_model, write_hf_model
from quantized_files import Recipe, write_quantized_model
from test_kernels_matmul import PROFILES, Product, Setup, run
from test_logits import Loaded

from xinfer_vk.engine.llm import LLM
from xinfer_vk.errors import UsageError
from xinfer_vk.kernels import matmul_a8
from xinfer_vk.kernels import state as st
from xinfer_vk.kernels.base import Ref
from xinfer_vk.kernels.matmul import Choice
from xinfer_vk.kernels.quantize_rows import dequantize, quantize, quantize_rows, quantized_words
from xinfer_vk.plan import BufferKind, DeviceProfile
from xinfer_vk.reference import NumpyRuntime

FORMATS = ("q8_0", "q4_0", "q4_1", "int4_g32", "int8_g64")


@pytest.fixture(params=sorted(PROFILES))
def profile(request: pytest.FixtureRequest, runtime: Any) -> DeviceProfile:
    return replace(runtime.profile, **PROFILES[request.param])


# -- rounding ------------------------------------------------------------------------------------


def test_every_value_is_within_half_a_step_of_itself() -> None:
    x = (np.random.default_rng(0).standard_normal((5, 96)) * 10.0 ** np.arange(-3, 2)[:, None]).astype("f4")
    steps = np.abs(x).reshape(5, 3, 32).max(axis=2) / 127
    assert np.all(np.abs(dequantize(quantize(x), 96) - x).reshape(5, 3, 32) <= steps[:, :, None] * 0.50001)


def test_zeros_and_the_largest_values_are_exact() -> None:
    x = np.zeros((1, 64), np.float32)
    x[0, 32:34] = (1e30, -1e30)
    np.testing.assert_allclose(dequantize(quantize(x), 64), x, rtol=1e-6)
    np.testing.assert_array_equal(dequantize(quantize(np.full((1, 32), 1e-38, np.float32)), 32), 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_none(bad: float) -> None:
    x = np.ones((1, 64), np.float32)
    x[0, 40] = bad
    out = dequantize(quantize(x), 64)
    np.testing.assert_allclose(out[0, :32], 1)
    assert np.isnan(out[0, 40])


def test_the_device_rounds_as_numpy_does(check_steps: CheckSteps) -> None:
    """Of values that are whole steps, so that the last bit of a division decides nothing; a NaN, infinity
    and zeros among them."""
    for cols, tokens, used, count in ((32, 1, 1, "tokens"), (96, 3, 2, "outputs"), (2080, 5, 5, "tokens")):

        def build(rt: Any, cols=cols, tokens=tokens, used=used, count=count) -> Any:
            rng = np.random.default_rng(cols)
            steps = rng.integers(-127, 128, (tokens, cols)).astype(np.float32)
            steps[:, ::32] = 127
            x = np.full((tokens, cols + 1), np.nan, np.float32)
            x[:, :cols] = steps * np.repeat(2.0 ** rng.integers(-9, 9, (tokens, cols // 32)), 32, axis=1)
            x[-1, :32] = 1e-38 if cols == 96 else 0
            if cols > 64:
                x[0, 40] = np.inf
            state = np.zeros(st.BLOCK_TABLE, np.uint32)
            state[st.N_TOKENS if count == "tokens" else st.N_OUTPUTS] = used

            def put(name: str, kind: BufferKind, values: np.ndarray) -> Ref:
                buffer = rt.allocate(name, values.size, kind)
                rt.write(buffer, 0, values.reshape(-1).view(np.uint32))
                return Ref(buffer)

            x_at, state_at = put("x", BufferKind.SCRATCH, x), put("state", BufferKind.STATE, state)
            stride = quantized_words(cols) + 1
            y = Ref(rt.allocate("y", 3 + tokens * stride, BufferKind.SCRATCH), 3)
            return quantize_rows(rt.profile, x_at, cols + 1, y, stride, cols, tokens, state_at.buffer, count)

        # words of bytes are no normal floats or far from one another; scales may differ in the last bits
        check_steps(build, rtol=1e-6, views={"state": "u32"})


def test_the_device_rounds_any_values_to_the_nearest(runtime: Any, profile: DeviceProfile) -> None:
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((3, 256)) * 10.0 ** rng.integers(-6, 6, (3, 1))).astype(np.float32)
    buffers = [rt_put(runtime, "x", BufferKind.SCRATCH, x)]
    state = np.zeros(st.BLOCK_TABLE, np.uint32)
    state[st.N_TOKENS] = 3
    buffers.append(rt_put(runtime, "state", BufferKind.STATE, state))
    words = quantized_words(256)
    buffers.append(runtime.allocate("y", 3 * words, BufferKind.SCRATCH))
    run(runtime, quantize_rows(
        profile, Ref(buffers[0]), 256, Ref(buffers[2]), words, 256, 3, buffers[1], "tokens"
    ))  # fmt: skip
    got = runtime.read(buffers[2], 0, 3 * words).reshape(3, words)
    for buffer in buffers:
        runtime.free(buffer)
    steps = np.abs(x).reshape(3, 8, 32).max(axis=2) / 127
    error = np.abs(dequantize(got, 256) - x).reshape(3, 8, 32)
    assert np.all(error <= steps[:, :, None] * 0.5001)
    q = np.ascontiguousarray(got[:, :64]).view(np.int8).reshape(3, 8, 32)
    pairs = np.ascontiguousarray(got[:, 64:]).view(np.float32).reshape(3, 8, 2)
    np.testing.assert_allclose(pairs[:, :, 1], pairs[:, :, 0] * q.sum(axis=2), rtol=1e-6)


def rt_put(rt: Any, name: str, kind: BufferKind, values: np.ndarray) -> Any:
    buffer = rt.allocate(name, values.size, kind)
    rt.write(buffer, 0, values.reshape(-1).view(np.uint32))
    return buffer


# -- products ------------------------------------------------------------------------------------


class QuantizedSetup(Setup):
    """A product whose x is in 8 bits."""

    def __init__(self, product: Product) -> None:
        super().__init__(product)
        p = product
        x = np.random.default_rng(7).standard_normal((p.used, p.cols)).astype(np.float32)
        self.x = np.full((p.tokens, quantized_words(p.cols) + p.gap), np.float32(np.nan))
        self.x[: p.used, : quantized_words(p.cols)] = quantize(x).view(np.float32)
        self.x_values = dequantize(quantize(x), p.cols)

    def choice(self, profile: DeviceProfile) -> Choice:
        return matmul_a8.choose(profile, self.product.fmt, self.product.cols, self.product.tokens)


def check(product: Product, rt: Any, profile: DeviceProfile) -> None:
    setup = QuantizedSetup(product)
    want, tolerance = setup.expected()
    error = np.abs(setup.run(rt, profile) - want) / tolerance
    assert np.all(error <= 1), f"{product}: wrong by {np.nanmax(error):.3g} of the tolerance"


@pytest.mark.parametrize("fmt", FORMATS)
def test_products_of_integers_equal_float64(fmt: str, runtime: Any, profile: DeviceProfile) -> None:
    for rows, cols, tokens, used in (
        (33, 288, 1, 1), (1, 32, 2, 2), (65, 160, 8, 5), (130, 288, 65, 65),
    ):  # fmt: skip
        check(Product(fmt, rows, cols, tokens, used, gap=rows % 3), runtime, profile)


@pytest.mark.parametrize("fmt", ("q8_0", "q4_1"))
def test_products_of_integers_need_no_dot_product(fmt: str, runtime: Any, profile: DeviceProfile) -> None:
    plain = replace(profile, features=profile.features - {"integer_dot_product"})
    for rows, cols, tokens in ((33, 96, 1), (65, 160, 17)):
        check(Product(fmt, rows, cols, tokens, tokens), runtime, plain)


@pytest.mark.parametrize("epilogue", ("store", "add", "swiglu"))
def test_epilogues_of_products_of_integers(runtime: Any, profile: DeviceProfile, epilogue: str) -> None:
    for tokens, used in ((3, 2), (16, 9)):
        product = Product("q4_1", 102, 64, tokens, used, epilogue, bias=True, splits=(8, 72))
        check(product, runtime, profile)
    check(Product("q4_0", 40, 64, 4, 0), runtime, profile)


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_oracle_of_products_of_integers_equals_float64(fmt: str) -> None:
    rt = NumpyRuntime()
    for rows, tokens in ((1, 1), (65, 5)):
        check(Product(fmt, rows, 160, tokens, tokens, bias=True), rt, rt.profile)


def test_tiles_fit_the_shared_memory_every_device_has() -> None:
    assert matmul_a8.tile_bytes(32) <= 16384
    small = replace(NumpyRuntime().profile, simd=False, max_shared_bytes=16384)
    kernel, _, tile = matmul_a8.choose(small, "q4_0", 64, 64)
    assert tile == 32
    assert kernel.shader == "matmul_a8.q4_0.plain"


# -- models --------------------------------------------------------------------------------------

TOKENS = list(range(7, 71, 3))


def q8(folder: Path) -> Path:
    write_gguf_model(folder / "m.gguf", tiny_config("llama", num_hidden_layers=1), fmt="q8_0")
    return folder / "m.gguf"


def mixed(folder: Path) -> Path:
    """Matrices of one input in formats of which one has no product in integers."""
    kinds = {"q_proj": "q4_0", "k_proj": "q5_0", "v_proj": "q4_1", "lm_head": "f16"}
    config = tiny_config("llama", num_hidden_layers=1)

    def fmt(name: str) -> str:
        return next((kind for part, kind in kinds.items() if part in name), "q4_1")

    write_gguf_model(folder / "m.gguf", config, fmt=fmt)
    return folder / "m.gguf"


def gptq(folder: Path) -> Path:
    config = tiny_config("qwen2", num_hidden_layers=1)
    write_quantized_model(folder / "m", config, Recipe(desc_act=True, shared=False, sym=False))
    return folder / "m"


@pytest.mark.parametrize("make", (q8, mixed, gptq))
def test_a_models_device_logits_are_those_of_numpy(
    runtime: Any, tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    """Rounded activations are near the exact ones, and where a value lies on the edge between two steps a
    last bit decides: so to a step, not to 1e-4."""
    path = make(tmp_path)
    exact = Loaded(NumpyRuntime(), path).logits(TOKENS, None)
    want = Loaded(NumpyRuntime(), path, activation_dtype="int8").logits(TOKENS, None)
    distance = np.abs(want - exact).max()
    assert 1e-4 < distance < 0.05 * np.ptp(exact)
    model = Loaded(runtime, path, activation_dtype="int8")
    try:
        steps = model.runner._make_plan(4, 1, "logits", ahead=1, decoding=True).steps
        assert {"quantize_rows", "matvec_a8"} <= {step.kernel.shader.split(".")[0] for step in steps}
        for chunk in (None, 1):
            got = model.logits(TOKENS, chunk)
            assert np.abs(got - want).mean() < 0.1 * np.abs(want - exact).mean() + 1e-6
    finally:
        model.free()


def test_a_model_in_a_format_without_such_products_is_refused_by_name(tmp_path: Path) -> None:
    path = chat_ready(tmp_path, fmt="bf16")
    with pytest.raises(UsageError, match=r"need weights in q8_0, q4_0, q4_1, int4_g32.*are in bf16: leave"):
        LLM(path, device="numpy", activations="int8")
    with pytest.raises(UsageError, match="activations is 'int4': it is f32 or int8"):
        LLM(path, device="numpy", activations="int4")


def test_formats_that_stay_exact_are_named(tmp_path: Path) -> None:
    path = chat_ready(tmp_path, fmt="bf16")
    with LLM(path, device="numpy", activations="int8", quantize="q4_0") as llm:
        assert llm.notices[-1] == "activations stay exact where weights are in q6_k"
        exact = LLM(path, device="numpy", quantize="q4_0")
        rounded, want = llm.logits([5, 6, 7]), exact.logits([5, 6, 7])
        assert 0 < np.abs(rounded - want).max() < 0.1 * np.ptp(want)
        text = "".join(chr(97 + i % 26) for i in range(200))
        assert llm.perplexity(text).perplexity != exact.perplexity(text).perplexity
        exact.close()


def chat_ready(folder: Path, fmt: str) -> Path:
    """A tiny model with a tokenizer."""
    write_hf_model(folder, tiny_config("qwen2", **K_SIZES, vocab_size=704), fmt=fmt)
    for file in (Path(__file__).parent / "fixtures" / "text" / "qwen2").iterdir():
        shutil.copy(file, folder)
    return folder

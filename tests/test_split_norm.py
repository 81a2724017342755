"""Norms that the products around them begin and end: which are, in a plan, and that logits stay as they were.

The products themselves are tested in test_kernels_matmul.py. Tolerance as in test_logits.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import tiny_config
from quantized_files import Recipe, write_quantized_model
from test_families import FOLDER, reference
from test_logits import MODELS, TOLERANCE, Loaded, worst

from xinfer_vk.kernels.rmsnorm import normalized
from xinfer_vk.kernels.split_norm import begun, begun_words, norm_factors
from xinfer_vk.plan import DeviceProfile
from xinfer_vk.reference import NUMPY_PROFILE, NumpyRuntime

ON_GPU = replace(NUMPY_PROFILE, simd=False)
ON_LAVAPIPE = replace(
    NUMPY_PROFILE, subgroup_size=8, features=frozenset({"buffer_address", "subgroup_shuffle"})
)


def separate(model: Loaded, tokens: int, outputs: int) -> int:
    """Norms of a plan that are dispatches of their own."""
    steps = model.runner._make_plan(tokens, outputs, "logits", ahead=1, decoding=True).steps
    return sum(step.kernel.name.startswith("rmsnorm") for step in steps)


def test_the_two_halves_of_a_norm_are_the_whole() -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((3, 64)) * [[1e-4], [1], [1e4]]).astype(np.float32)
    weight, w = rng.standard_normal(64).astype(np.float32), rng.standard_normal((5, 64))
    rows = begun(x, weight)
    assert rows.shape == (3, begun_words(64))
    got = rows[:, :64] @ w.T * norm_factors(rows, 64, 1e-5)
    np.testing.assert_allclose(got, (normalized(x, 1e-5) * weight) @ w.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ("qwen3", "mistral", "granite", "smollm3", "phi3-longrope", "mixtral"))
def test_logits_step_by_step_and_by_few_equal_transformers(name: str) -> None:
    token_ids, want = reference(name)
    model = Loaded(NumpyRuntime(ON_GPU), FOLDER / name)
    got = model.logits_of(token_ids, [40, *[1] * 6, 8, 3, 4, len(token_ids) - 61])
    assert worst(got, want) <= TOLERANCE


@pytest.mark.parametrize("name", ("llama-biases-bf16", "qwen2-gqa1-separate-head-f16"))
def test_device_logits_with_the_kernels_of_a_gpu_equal_transformers(
    runtime: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "profile", replace(runtime.profile, simd=False))
    path = next(p for p in MODELS if p.name == name)
    data = np.load(path / "reference.npz")
    model = Loaded(runtime, path)
    try:
        assert separate(model, 1, 1) == 1
        got = model.logits_of(data["token_ids"][:16], [4, 1, 1, 7, 3])
    finally:
        model.free()
    assert worst(got, data["logits"][:16]) <= TOLERANCE


@pytest.mark.parametrize("profile", (NUMPY_PROFILE, ON_GPU, ON_LAVAPIPE), ids=("cpu", "gpu", "lavapipe"))
def test_plans_for_few_tokens_have_the_first_norm_and_one_that_gathers(profile: DeviceProfile) -> None:
    model = Loaded(NumpyRuntime(profile), FOLDER / "qwen3")
    norms = 2 * model.config.layers + 1
    assert [separate(model, *shape) for shape in ((1, 1), (1, 0), (8, 8), (4, 1))] == [1, 1, 2, 2]
    assert separate(model, 16, 16) == norms
    experts = Loaded(NumpyRuntime(profile), FOLDER / "mixtral")  # the norm before a router stays
    assert separate(experts, 1, 1) == 1 + 2 * experts.config.layers
    post = Loaded(NumpyRuntime(profile), FOLDER / "olmo2")  # norms after the blocks, and of q and k
    assert separate(post, 1, 1) == 4 * post.config.layers + 1


def test_matrices_with_an_order_of_their_own_keep_the_norm(tmp_path: Path) -> None:
    config = tiny_config("llama", num_hidden_layers=2)
    write_quantized_model(tmp_path / "m", config, Recipe(desc_act=True, shared=False, sym=False))
    tokens = [1, 5, 9, 3, 7, 2]
    want = Loaded(NumpyRuntime(), tmp_path / "m").logits(tokens, None)
    model = Loaded(NumpyRuntime(ON_GPU), tmp_path / "m")
    assert separate(model, 1, 1) == 4 < 5  # all but that of the head, which has no order
    assert worst(model.logits(tokens, 1), want) <= TOLERANCE


def test_products_of_integers_and_matrix_units_keep_the_norm(tmp_path: Path) -> None:
    write_quantized_model(tmp_path / "m", tiny_config("llama", num_hidden_layers=2), Recipe())
    rounded = Loaded(NumpyRuntime(ON_GPU), tmp_path / "m", activation_dtype="int8")
    assert separate(rounded, 1, 1) == 4
    units = {"cooperative_matrix", "float16"}
    c = Loaded(NumpyRuntime(ON_GPU), FOLDER / "phi3-longrope").config
    tuned = {f"bf16 {2 * c.intermediate_size}x{c.hidden_size} for 8": "coop 16"}
    profile = replace(ON_GPU, subgroup_size=32, features=frozenset(units), tuned=tuned)
    assert separate(Loaded(NumpyRuntime(profile), FOLDER / "phi3-longrope"), 8, 8) == 2 + c.layers

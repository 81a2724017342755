"""GPTQ and AWQ checkpoints compute what their dequantized weights do; what is not understood is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import CheckSteps
from model_files import safetensors_bytes, tiny_config, with_header, write_hf_model
from quantized_files import Recipe, pack, write_quantized_model
from test_logits import TOLERANCE, Loaded, worst
from test_pack import load, matrix_values

from xinfer_vk.errors import ModelError
from xinfer_vk.kernels import state as st
from xinfer_vk.kernels.base import Ref
from xinfer_vk.kernels.layout import GROUP_LAYOUTS, WHOLE_ROW, row_words
from xinfer_vk.kernels.order_columns import order_columns
from xinfer_vk.plan import BufferKind
from xinfer_vk.reference import NumpyRuntime
from xinfer_vk.weights.device import Matrix, WeightPlanner
from xinfer_vk.weights.quantize.loading import quantized_tensors
from xinfer_vk.weights.quantize.rows import dequantize_rows
from xinfer_vk.weights.source import open_model

RECIPES = {
    "gptq 4 bit, group 32": Recipe(),
    "gptq 4 bit, group 64, asymmetric": Recipe(group=64, sym=False),
    "gptq 4 bit, group 128, v2, asymmetric": Recipe(group=128, sym=False, v2=True),
    "gptq 4 bit, whole column, v2": Recipe(group=-1, v2=True),
    "gptq 4 bit, group 128, activation order": Recipe(group=128, desc_act=True),
    "gptq 4 bit, group 32, activation order, asymmetric": Recipe(desc_act=True, sym=False),
    "gptq 4 bit, group 32, an order for each matrix": Recipe(desc_act=True, sym=False, v2=True, shared=False),
    "gptq 8 bit, group 32, asymmetric, activation order": Recipe(bits=8, sym=False, desc_act=True),
    "gptq 8 bit, group 64": Recipe(bits=8, group=64),
    "gptq 8 bit, group 128, v2, asymmetric": Recipe(bits=8, group=128, sym=False, v2=True),
    "gptq 8 bit, whole column, asymmetric": Recipe(bits=8, group=-1, sym=False),
    "awq, group 32": Recipe("awq"),
    "awq, group 64": Recipe("awq", group=64),
    "awq, group 128": Recipe("awq", group=128),
}
TOKENS = list(range(7, 71, 3))


def sizes(recipe: Recipe) -> dict[str, int]:
    """Of a model whose rows are several groups; the MLP's are 2.25 of 128."""
    if recipe.group == 128:
        return {"hidden_size": 256, "intermediate_size": 288, "head_dim": 32, "num_hidden_layers": 1}
    return {"intermediate_size": 96, "num_hidden_layers": 1}


def assert_holds(runtime: NumpyRuntime, matrix: Matrix, want: np.ndarray) -> None:
    """The matrix is ``want`` bit for bit, once its columns are put back."""
    got = matrix_values(runtime, matrix)
    if matrix.order is not None:
        order = runtime.read(matrix.order.buffer, matrix.order.offset, matrix.cols)
        assert sorted(order) == list(range(matrix.cols))
        back = np.empty_like(got)
        back[:, order] = got
        got = back
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_every_value_is_exactly_that_of_the_checkpoint(tmp_path: Path, recipe: Recipe) -> None:
    want = write_quantized_model(tmp_path, tiny_config("llama", **sizes(recipe)), recipe)
    with open_model(tmp_path) as source:
        runtime, handles, _ = load(source)
        ordered = recipe.desc_act and recipe.group != -1
        formats = {matrix.fmt for matrix in handles["0.qkv"]}
        name = "row" if recipe.group == -1 else f"g{recipe.group}"
        assert formats == {f"int{recipe.bits}_{name}"}
        assert (handles["0.down"][0].order is not None) == ordered
        for handle, part in (("0.o", "self_attn.o_proj"), ("0.down", "mlp.down_proj")):
            assert_holds(runtime, handles[handle][0], want[f"model.layers.0.{part}.weight"])
        stacked = [want[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"]
        pair = [want[f"model.layers.0.mlp.{x}_proj.weight"] for x in ("gate", "up")]
        if recipe.shared:
            assert len(handles["0.qkv"]) == len(handles["0.gate_up"]) == 1
            assert_holds(runtime, handles["0.qkv"][0], np.concatenate(stacked))
            both = np.stack(pair, axis=1).reshape(-1, pair[0].shape[1])
            assert_holds(runtime, handles["0.gate_up"][0], both)
        else:
            assert [len(handles["0.qkv"]), len(handles["0.gate_up"])] == [3, 2]
            for matrix, values in zip((*handles["0.qkv"], *handles["0.gate_up"]), (*stacked, *pair)):
                assert_holds(runtime, matrix, values)
        for handle, name in (("embed", "model.embed_tokens.weight"), ("head", "lm_head.weight")):
            assert handles[handle][0].fmt == "f16"
            assert_holds(runtime, handles[handle][0], want[name])


def logits_of_dense(folder: Path, config: dict[str, Any], dense: dict[str, np.ndarray]) -> np.ndarray:
    write_hf_model(folder, config, dense)
    want = Loaded(NumpyRuntime(), folder).logits(TOKENS, None)
    assert np.ptp(want) > 1
    return want


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_logits_equal_those_of_the_dequantized_weights(tmp_path: Path, recipe: Recipe) -> None:
    config = tiny_config("llama", **sizes(recipe))
    dense = write_quantized_model(tmp_path / "low", config, recipe)
    want = logits_of_dense(tmp_path / "dense", config, dense)
    assert worst(Loaded(NumpyRuntime(), tmp_path / "low").logits(TOKENS, None), want) <= TOLERANCE


@pytest.mark.parametrize(
    "name",
    (
        "gptq 4 bit, group 32, activation order, asymmetric",
        "gptq 4 bit, group 32, an order for each matrix",
        "gptq 8 bit, whole column, asymmetric",
        "awq, group 64",
    ),
)
def test_device_logits_equal_those_of_the_dequantized_weights(
    runtime: Any, tmp_path: Path, name: str
) -> None:
    recipe = RECIPES[name]
    config = tiny_config("qwen2", **sizes(recipe), tie_word_embeddings=not recipe.desc_act)
    keep = ("embed_tokens",) if recipe.desc_act else ("lm_head", "embed_tokens")  # with a quantized head
    want = logits_of_dense(
        tmp_path / "dense", config, write_quantized_model(tmp_path / "low", config, recipe, keep=keep)
    )
    model = Loaded(runtime, tmp_path / "low")
    try:
        assert worst(model.logits(TOKENS, None), want) <= TOLERANCE
        assert worst(model.logits(TOKENS[:6], 1), want[:6]) <= TOLERANCE
    finally:
        model.free()


def test_the_configuration_may_be_in_a_file_of_its_own(tmp_path: Path) -> None:
    config = tiny_config("llama", num_hidden_layers=1)
    write_quantized_model(tmp_path, config, Recipe(), own_file=True, changes={"quant_method": "absent"})
    with open_model(tmp_path) as source:
        assert source.tensors["model.layers.0.mlp.up_proj.weight"].fmt == "int4_g32"


def test_modules_that_are_not_converted_load_as_they_are(tmp_path: Path) -> None:
    config = tiny_config("llama", num_hidden_layers=1)
    changes = {"modules_to_not_convert": ["v_proj", "down_proj"]}
    keep = ("lm_head", "embed_tokens", "v_proj", "down_proj")
    want = write_quantized_model(tmp_path, config, Recipe("awq"), keep=keep, changes=changes)
    with open_model(tmp_path) as source:
        runtime, handles, _ = load(source)
        assert [m.fmt for m in handles["0.qkv"]] == ["int4_g32", "f16"]
        assert_holds(runtime, handles["0.qkv"][1], want["model.layers.0.self_attn.v_proj.weight"])
        assert_holds(runtime, handles["0.down"][0], want["model.layers.0.mlp.down_proj.weight"])


def test_the_first_format_stores_a_zero_of_zero_as_all_ones(tmp_path: Path) -> None:
    """As AutoGPTQ decodes it: the stored number plus one, modulo 2^bits."""
    write_quantized_model(tmp_path, tiny_config("llama", num_hidden_layers=1), Recipe(v2=True))
    tensors, name = read_back(tmp_path), f"{UP}.qzeros"
    zeros = np.random.default_rng(0).integers(0, 16, (2, 96))
    loaded = []
    for form, stored in (("gptq_v2", zeros), ("gptq", (zeros - 1) % 16)):
        packed = pack(stored, 4, 1, range(8)).astype("<u4")
        tensors[name] = ("I32", packed.shape, packed.tobytes())
        (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(tensors))
        edit_config(tmp_path, {"checkpoint_format": form})
        with open_model(tmp_path) as source:
            loaded.append(source.tensors[f"{UP}.weight"].rows().copy())
    np.testing.assert_array_equal(*loaded)


def test_weights_split_over_small_buffers_stay_whole(tmp_path: Path) -> None:
    want = write_quantized_model(tmp_path, tiny_config("llama", num_hidden_layers=1), Recipe("awq"))
    with open_model(tmp_path) as source:
        runtime, handles, _ = load(source, range_bytes=2 << 10)
        assert len(handles["0.down"][0].parts) > 1
        assert_holds(runtime, handles["0.down"][0], want["model.layers.0.mlp.down_proj.weight"])


def test_device_words_are_at_most_2_percent_more_than_the_tensors_of_the_file() -> None:
    for fmt, layout in GROUP_LAYOUTS.items():
        for cols in (576, 896, 1024, 1536, 4096, 4864, 11008):
            groups = 1 if layout.group == WHOLE_ROW else -(-cols // layout.group)
            in_file = (cols * layout.bits + groups * (16 + layout.bits)) / 8
            assert row_words(fmt, cols) * 4 <= 1.02 * in_file, (fmt, cols)


def test_order_columns_gathers_the_rows_in_use(check_steps: CheckSteps) -> None:
    for cols, tokens, used, count in ((1, 1, 1, "tokens"), (65, 3, 2, "outputs"), (200, 7, 7, "tokens")):

        def build(
            rt: Any, cols: int = cols, tokens: int = tokens, used: int = used, count: str = count
        ) -> Any:
            rng = np.random.default_rng(cols)
            x = rng.standard_normal((tokens, cols + 3)).astype(np.float32)
            state = np.zeros(st.BLOCK_TABLE, np.uint32)
            state[st.N_TOKENS if count == "tokens" else st.N_OUTPUTS] = used
            order = np.concatenate((np.zeros(2), rng.permutation(cols))).astype(np.uint32)

            def put(name: str, kind: BufferKind, values: np.ndarray) -> Ref:
                buffer = rt.allocate(name, values.size, kind)
                rt.write(buffer, 0, values.reshape(-1).view(np.uint32))
                return Ref(buffer)

            x_at = put("x", BufferKind.SCRATCH, x)
            order_at = put("order", BufferKind.WEIGHTS, order)
            state_at = put("state", BufferKind.STATE, state)
            y = Ref(rt.allocate("y", 5 + tokens * (cols + 1), BufferKind.SCRATCH), 5)
            return order_columns(
                rt.profile, x_at, cols + 3, Ref(order_at.buffer, 2), y, cols + 1, cols, tokens,
                state_at.buffer, count,
            )  # fmt: skip

        check_steps(build, views={"order": "u32", "state": "u32"})


# -- what is refused -----------------------------------------------------------------------------


def edit_config(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {**config["quantization_config"], **changes}
    path.write_text(json.dumps(config))


def read_back(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The tensors of a model as :func:`safetensors_bytes` takes them."""
    whole = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    header.pop("__metadata__", None)
    return {
        name: (entry["dtype"], tuple(entry["shape"]), data[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each method; a test that changes it writes back what it was."""
    folder = tmp_path_factory.mktemp("quantized")
    config = tiny_config("llama", num_hidden_layers=1, vocab_size=40)
    write_quantized_model(folder / "gptq", config, Recipe(desc_act=True))
    write_quantized_model(folder / "awq", config, Recipe("awq"))
    return {"gptq": folder / "gptq", "awq": folder / "awq"}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gptq", {"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes', supported: gptq, awq"),
    ("gptq", {"quant_method": "compressed-tensors"}, "quant_method is 'compressed-tensors', supported"),
    ("gptq", {"quant_method": "fp8"}, "quant_method is 'fp8', supported: gptq, awq"),
    ("gptq", {"quant_method": "exl2"}, "quant_method is 'exl2', supported: gptq, awq"),
    ("gptq", {"quant_method": None}, "the key 'quant_method' is missing"),
    ("gptq", {"quant_method": ["gptq"]}, "quant_method is ['gptq'], supported"),
    ("gptq", {"bits": 2}, "bits is 2, supported by gptq: 4, 8"),
    ("gptq", {"bits": 3}, "bits is 3, supported by gptq: 4, 8"),
    ("gptq", {"bits": True}, "bits is True, supported by gptq: 4, 8"),
    ("awq", {"bits": 8}, "bits is 8, supported by awq: 4"),
    ("gptq", {"group_size": 16}, "group_size is 16, supported: 32, 64, 128, -1"),
    ("gptq", {"group_size": None}, "the key 'group_size' is missing"),
    (
        "gptq",
        {"checkpoint_format": "marlin"},
        "checkpoint_format is 'marlin', supported by gptq: gptq,",
    ),
    ("gptq", {"format": "bitblas"}, "format is 'bitblas', supported by gptq: gptq, gptq_v2"),
    (
        "gptq",
        {"checkpoint_format": "gptq", "format": "gptq_v2"},
        "format is 'gptq_v2', another key says gptq",
    ),
    ("gptq", {"is_marlin_format": True}, "is_marlin_format is True, supported: false"),
    ("gptq", {"pack_dtype": "int16"}, "pack_dtype is 'int16', supported: int32"),
    (
        "gptq",
        {"dynamic": {"-:.*down.*": {}}},
        "dynamic is a mapping of 1 keys, rules for single modules are not supported",
    ),
    ("gptq", {"desc_act": "yes"}, "desc_act is 'yes', true or false was expected"),
    (
        "gptq",
        {"rotation": "hadamard"},
        "the key 'rotation' with the value 'hadamard' is not understood",
    ),
    ("awq", {"version": "gemv"}, "version is 'gemv', supported by awq: gemm"),
    ("awq", {"version": "exllama"}, "version is 'exllama', supported by awq: gemm"),
    ("awq", {"zero_point": False}, "zero_point is False, supported: true"),
    ("awq", {"backend": "llm-awq"}, "backend is 'llm-awq', supported: autoawq"),
]


@pytest.mark.parametrize(("method", "changes", "message"), REFUSED)
def test_a_configuration_that_is_not_understood_is_refused(
    checkpoints: dict[str, Path], method: str, changes: dict[str, Any], message: str
) -> None:
    path = checkpoints[method] / "config.json"
    kept = path.read_text()
    try:
        edit_config(checkpoints[method], changes)
        with pytest.raises(ModelError) as caught:
            open_model(checkpoints[method])
    finally:
        path.write_text(kept)
    assert "\n" not in str(caught.value)
    assert f"{path}: quantization_config: {message}" in str(caught.value)


def test_a_configuration_that_is_no_object_is_refused(checkpoints: dict[str, Path]) -> None:
    path = checkpoints["gptq"] / "config.json"
    kept = path.read_text()
    try:
        path.write_text(json.dumps({**json.loads(kept), "quantization_config": "gptq"}))
        with pytest.raises(ModelError, match="quantization_config is 'gptq', an object was expected"):
            open_model(checkpoints["gptq"])
    finally:
        path.write_text(kept)


def i32(*values: int) -> tuple[str, tuple[int, ...], bytes]:
    return "I32", (len(values),), np.array(values, "<i4").tobytes()


def scale(value: float, dtype: str = "F16") -> Callable[[Any], Any]:
    """A change of one scale to ``value``, and of all to ``dtype``."""

    def change(old: Any) -> Any:
        values = np.frombuffer(old[2], np.float16).astype(np.float32)
        values[7] = value
        if dtype == "BF16":
            return dtype, old[1], (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        return dtype, old[1], values.astype({"F16": np.float16, "F32": np.float32}[dtype]).tobytes()

    return change


UP = "model.layers.0.mlp.up_proj"
DAMAGED: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "no zeros": (f"{UP}.qzeros", lambda t: None, f"the tensor '{UP}.qzeros' is missing"),
    "no scales": (f"{UP}.scales", lambda t: None, f"the tensor '{UP}.scales' is missing"),
    "no groups": (f"{UP}.g_idx", lambda t: None, f"the tensor '{UP}.g_idx' is missing"),
    "no weights": (f"{UP}.qweight", lambda t: None, "is I32 and belongs to no qweight"),
    "float zeros": (f"{UP}.qzeros", lambda t: ("F32", *t[1:]), "is f32, I32 was expected"),
    "integer scales": (
        f"{UP}.scales",
        lambda t: ("I32", (t[1][0], t[1][1] // 2), t[2]),
        "is i32, floats were expected",
    ),
    "flat weights": (
        f"{UP}.qweight",
        lambda t: (t[0], (t[1][0] * t[1][1],), t[2]),
        "has shape [768], a matrix was expected",
    ),
    "fewer groups of scales": (
        f"{UP}.scales",
        lambda t: (t[0], (1, t[1][1]), t[2][: 2 * t[1][1]]),
        "has shape [1, 96], [2, 96] was expected",
    ),
    "zeros that are not whole words": (
        f"{UP}.qweight",
        lambda t: (t[0], (t[1][0], 95), t[2][: 4 * t[1][0] * 95]),
        "has 64 columns and 95 rows: multiples of 32 and 8 were expected",
    ),
    "rows that are not whole blocks": (
        f"{UP}.qweight",
        lambda t: (t[0], (7, t[1][1]), t[2][: 28 * t[1][1]]),
        "has 56 columns and 96 rows",
    ),
    "another size than the config's": (
        f"{UP}.qweight",
        lambda t: (t[0], (4, t[1][1]), t[2][: 16 * t[1][1]]),
        "has shape [2, 12], [1, 12] was expected",
    ),
    "a group below 0": (f"{UP}.g_idx", lambda t: i32(*[0, 1] * 31, -1, 1), "names group -1, there are 2"),
    "a group beyond": (f"{UP}.g_idx", lambda t: i32(*[0, 1] * 31, 0, 2), "names group 2, there are 2"),
    "uneven groups": (
        f"{UP}.g_idx",
        lambda t: i32(*[0] * 40, *[1] * 24),
        "puts 40 columns into group 0, 32 were expected",
    ),
    "groups of fewer columns": (f"{UP}.g_idx", lambda t: i32(0, 1), "has shape [2], [64] was expected"),
    "an infinite scale": (f"{UP}.scales", scale(np.inf), "holds the scale inf, finite f16 numbers were"),
    "a scale that is not a number": (f"{UP}.scales", scale(np.nan), "holds the scale nan, finite f16"),
    "an f32 scale that no f16 is": (f"{UP}.scales", scale(1 + 2**-20, "F32"), "holds the scale 1.00000"),
    "a bf16 scale too large": (f"{UP}.scales", scale(2.0**17, "BF16"), "holds the scale"),
    "weights twice": (f"{UP}.weight", lambda t: ("F16", (1,), bytes(2)), "has both a qweight and a weight"),
    "a stray integer": ("model.layers.0.x", lambda t: i32(1), "'model.layers.0.x' is I32 and belongs to no"),
    "a quantized embedding": ("model.embed_tokens.qweight", lambda t: i32(1), "only linear layers"),
    "a bias that is not the config's": (f"{UP}.bias", lambda t: ("F16", (96,), b"\1" * 192), "has no place"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_checkpoint_is_refused_in_one_line(checkpoints: dict[str, Path], case: str) -> None:
    name, change, message = DAMAGED[case]
    folder = checkpoints["gptq"]
    path = folder / "model.safetensors"
    kept = path.read_bytes()
    tensors: dict[str, Any] = read_back(folder)
    tensors[name] = change(tensors.get(name))
    try:
        path.write_bytes(safetensors_bytes({n: t for n, t in tensors.items() if t is not None}))
        with pytest.raises(ModelError) as caught, open_model(folder) as source:
            load(source)
    finally:
        path.write_bytes(kept)
    assert "\n" not in str(caught.value)
    assert message in str(caught.value)


def test_scales_in_other_floats_load_where_f16_holds_them(tmp_path: Path) -> None:
    config = tiny_config("llama", num_hidden_layers=1, vocab_size=40)
    want = write_quantized_model(tmp_path, config, Recipe())
    tensors = read_back(tmp_path)
    values = np.frombuffer(tensors[f"{UP}.scales"][2], np.float16).astype("<f4")
    tensors[f"{UP}.scales"] = ("F32", tensors[f"{UP}.scales"][1], values.tobytes())
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    with open_model(tmp_path) as source:
        runtime, handles, _ = load(source)
        assert_holds(runtime, handles["0.gate_up"][0], np.stack(
            [want[f"model.layers.0.mlp.{x}_proj.weight"] for x in ("gate", "up")], axis=1
        ).reshape(-1, 64))  # fmt: skip


def test_groups_may_be_64_bit_integers(checkpoints: dict[str, Path]) -> None:
    folder = checkpoints["gptq"]
    path = folder / "model.safetensors"
    kept = path.read_bytes()
    tensors = read_back(folder)
    with open_model(folder) as source:
        want = {name: tensor.rows().copy() for name, tensor in source.tensors.items()}
    for name, (_, shape, data) in tensors.items():
        if name.endswith(".g_idx"):
            tensors[name] = ("I64", shape, np.frombuffer(data, "<i4").astype("<i8").tobytes())
    try:
        path.write_bytes(safetensors_bytes(tensors))
        with open_model(folder) as source:
            for name, rows in want.items():
                np.testing.assert_array_equal(source.tensors[name].rows(), rows)
    finally:
        path.write_bytes(kept)


def test_biases_of_zeros_that_the_model_does_not_have_are_ignored(tmp_path: Path) -> None:
    """AutoGPTQ gave every matrix a bias once."""
    write_quantized_model(tmp_path, tiny_config("llama", num_hidden_layers=1), Recipe())
    tensors = read_back(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(
        safetensors_bytes({**tensors, f"{UP}.bias": ("F16", (96,), bytes(192))})
    )
    with open_model(tmp_path) as source:
        load(source)


def test_a_configuration_without_quantized_tensors_is_refused(tmp_path: Path) -> None:
    config = {**tiny_config("llama"), "quantization_config": Recipe().config}
    write_hf_model(tmp_path, config)
    with pytest.raises(ModelError, match="quant_method is gptq, but no tensor is a qweight"):
        open_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(with_header({}))
    with pytest.raises(ModelError, match="no tensor is a qweight"):
        open_model(tmp_path)


def test_quantized_tensors_without_a_configuration_are_refused(checkpoints: dict[str, Path]) -> None:
    path = checkpoints["gptq"] / "config.json"
    kept = path.read_text()
    try:
        path.write_text(json.dumps({**json.loads(kept), "quantization_config": None}))
        with pytest.raises(ModelError, match=r"dtype I32, supported: F32, F16, BF16; .* quantization_config"):
            open_model(checkpoints["gptq"])
    finally:
        path.write_text(kept)


def test_requantizing_puts_columns_back_into_the_order_of_the_inputs(tmp_path: Path) -> None:
    want = write_quantized_model(
        tmp_path, tiny_config("llama", num_hidden_layers=1), Recipe(desc_act=True, sym=False)
    )
    with open_model(tmp_path) as source:
        name = f"{UP}.weight"
        tensors, _ = quantized_tensors(
            {name: source.tensors[name]}, "q8_0", tied=False, requantize=True, where="x"
        )
        got = dequantize_rows("q8_0", tensors[name].read_rows(slice(None)), 64)
        assert tensors[name].order is None
        np.testing.assert_allclose(got, want[name], atol=np.abs(want[name]).max() / 200)


def test_experts_in_activation_order_are_refused_by_name(tmp_path: Path) -> None:
    config = tiny_config("llama", num_hidden_layers=1)
    write_quantized_model(tmp_path, config, Recipe(desc_act=True))
    with open_model(tmp_path) as source:
        renamed = {n.replace("mlp.up_proj", "mlp.experts.0.up_proj"): t for n, t in source.tensors.items()}
        planner = WeightPlanner(replace(source, tensors=renamed), NumpyRuntime().profile)
        with pytest.raises(
            ModelError, match="not supported for experts: use a checkpoint with desc_act false"
        ):
            planner.experts("model.layers.0.mlp.experts", 1, [("up_proj", 96)], 64)

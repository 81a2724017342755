"""Damage small valid models at random places: what comes is one error line, or a correct load.

Seeds are fixed; a failure prints the seed, the case and the damage, so that it can be made again.
"""

from __future__ import annotations

import itertools
import json
import random
import resource
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from model_files import (
    FIRST_SCALES,
    K_SIZES,
    safetensors_bytes,
    tiny_config,
    with_header,
    write_gguf_model,
    write_hf_model,
)
from quantized_files import Recipe, write_quantized_model
from test_logits import Loaded
from test_pack import declare, load, matrix_values

from xinfer_vk.errors import ModelError, NumericError
from xinfer_vk.reference import NUMPY_PROFILE, NumpyRuntime
from xinfer_vk.weights.device import WeightPlanner
from xinfer_vk.weights.formats import FORMATS
from xinfer_vk.weights.source import open_model

SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
SMALL |= {"vocab_size": 40, "num_hidden_layers": 1, "head_dim": None}
MAX_GROWTH_BYTES = 256 << 20  # the models are 50 KB: an allocation for an absurd count shows

HOSTILE_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 10**30, 0.0, -0.0, 0.5, 1e308,
    "", "x", "F64", "../x", "\0", "\ud800", "é" * 1000, ["LlamaForCausalLM", 1],
    [], [0], [[]], [None], [1] * 100, {}, {"a": {}},
]  # fmt: skip
HOSTILE_WORDS = [
    b"\x00",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\x01",
    b"\x00" * 4,
    b"\xff" * 4,
    b"\xff" * 8,
    b"\x00" * 8,
]


def damage_bytes(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    """One to three of: flipped bits, overwritten, cut, removed, inserted, repeated, swapped bytes.

    Half of the places are in the first 300 bytes, where the counts and lengths are.
    """
    out, story = bytearray(data), []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(min(300, len(out)) if rng.random() < 0.5 else len(out)) if out else 0
        length = rng.choice((1, 1, 2, 4, 8, 16, 64))
        kind = rng.choice(
            ("flip", "flip", "write", "write", "random", "cut", "remove", "insert", "repeat", "swap")
        )
        story.append(f"{kind}@{at}+{length}")
        if kind == "flip" and out:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == "write":
            word = rng.choice(HOSTILE_WORDS)
            out[at : at + len(word)] = word
        elif kind == "random":
            out[at : at + length] = rng.randbytes(length)
        elif kind == "cut":
            del out[at:]
        elif kind == "remove":
            del out[at : at + length]
        elif kind == "insert":
            out[at:at] = rng.randbytes(length)
        elif kind == "repeat":
            out[at:at] = out[at : at + length]
        elif kind == "swap" and out:
            other = rng.randrange(len(out))
            out[at], out[other] = out[other], out[at]
    return bytes(out), " ".join(story)


def damage_json(rng: random.Random, value: Any) -> tuple[Any, str]:
    """The same JSON with one or two values, keys or entries replaced, removed or added."""
    value = deepcopy(value)
    story = []
    for _ in range(rng.choice((1, 1, 2))):
        places: list[tuple[Any, Any]] = []

        def collect(node: Any, places: list[tuple[Any, Any]] = places) -> None:
            for key in node if isinstance(node, dict) else range(len(node)):
                places.append((node, key))
                if isinstance(node[key], (dict, list)):
                    collect(node[key])

        collect(value)
        if not places:
            break
        node, key = rng.choice(places)
        kind = rng.choice(("replace", "replace", "replace", "remove", "copy", "nudge"))
        story.append(f"{kind} {str(key)[:60]}")
        if kind == "replace":
            node[key] = deepcopy(rng.choice(HOSTILE_VALUES))
        elif kind == "remove":
            del node[key]
        elif kind == "copy":
            node[key] = deepcopy(rng.choice(places)[0])
        elif type(node[key]) is int:
            node[key] += rng.choice((-8, -4, -1, 1, 4, 8, 32))
    return value, " ".join(story)


def attempt(path: Path, upload: bool, story: str) -> bool:
    """Open, declare and perhaps upload; whether it loaded. Anything but :class:`ModelError` fails."""
    try:
        with open_model(path) as source:
            if upload:
                load(source)
            else:
                declare(WeightPlanner(source, NUMPY_PROFILE), source.config)
    except ModelError as e:
        assert "\n" not in str(e), story
        assert len(str(e)) < 2000, story
        return False
    except Exception as e:
        raise AssertionError(f"{story}: {type(e).__name__}: {e}") from e
    return True


def fuzz(cases: int, seed: int, case: Callable[[random.Random], tuple[Path, str]]) -> None:
    """Run ``cases`` damaged models made by ``case``; some must load and some must not."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loaded = 0
    for i in range(cases):
        path, story = case(rng)
        loaded += attempt(path, upload=i % 4 == 0, story=f"seed {seed}, case {i}: {story}")
    print(f"{loaded} of {cases} loaded")
    assert 0 < loaded < cases
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MAX_GROWTH_BYTES


@pytest.mark.parametrize("seed", [1, 2])
def test_damaged_gguf_files(tmp_path: Path, seed: int) -> None:
    kinds = []
    for architecture in ("llama", "qwen2"):
        for fmt in ("f32", "q4_0", "q8_0"):
            path = tmp_path / f"{architecture}-{fmt}.gguf"
            tokens = [f"t{i}" for i in range(40)]
            write_gguf_model(path, tiny_config(architecture, **SMALL), fmt=fmt, tokens=tokens)
            kinds.append(path.read_bytes())
    mixed = iter(itertools.cycle([f.name for f in FORMATS.values() if f.ggml_type > 3]))
    write_gguf_model(
        path, tiny_config("llama", **{**SMALL, **K_SIZES, "head_dim": 128}), fmt=lambda name: next(mixed)
    )
    kinds.append(path.read_bytes())
    target = tmp_path / "x.gguf"

    def case(rng: random.Random) -> tuple[Path, str]:
        whole = rng.choice(kinds)
        # Most damage to a few hundred KB of weights is none that a reader can see: keep to the tables.
        tables = whole.index(b"output_norm.weight") + 40 if rng.random() < 0.9 else len(whole)
        damaged, story = damage_bytes(rng, whole[:tables])
        target.write_bytes(damaged + whole[tables:])
        return target, story

    fuzz(1500, seed, case)


# Where a block's f16 scales are; any bits in the rest of a block are weights.
SCALES = FIRST_SCALES | {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,),
}  # fmt: skip
NO_SCALES = [np.inf, -np.inf, np.nan, 65504.0, -65504.0, 2.0**-24, 0.0, -0.0]
TOKENS = list(range(3, 9))


@pytest.mark.parametrize("rounds", [4, pytest.param(60, marks=pytest.mark.tier_all)])
@pytest.mark.parametrize("fmt", sorted(SCALES))
def test_scales_that_are_no_numbers_give_no_number_or_an_error(tmp_path: Path, fmt: str, rounds: int) -> None:
    """The ``gguf`` package says what is a number in such a block; logits are numbers, or there are none."""
    path, kind = tmp_path / "x.gguf", gguf.GGMLQuantizationType[fmt.upper()]
    config = tiny_config("llama", **{**SMALL, **K_SIZES, "head_dim": 128})
    write_gguf_model(path, config, fmt=lambda name: fmt if "o_proj" in name else "f32")
    (tensor,) = (t for t in gguf.GGUFReader(path).tensors if "attn_output" in t.name)
    begin, whole = int(tensor.data_offset), path.read_bytes()
    _, size = gguf.GGML_QUANT_SIZES[kind]
    rng, ends = np.random.default_rng(9), set()
    for i in range(rounds):
        raw = np.frombuffer(whole, np.uint8, tensor.n_bytes, begin).reshape(-1, size).copy()
        for at in SCALES[fmt]:
            damaged = rng.choice(len(raw), rng.choice((1, 3, len(raw))), replace=False)
            raw[damaged, at : at + 2] = rng.choice(NO_SCALES, (len(damaged), 1)).astype("<f2").view(np.uint8)
        path.write_bytes(whole[:begin] + raw.tobytes() + whole[begin + raw.size :])
        with open_model(path) as source, np.errstate(all="ignore"):
            runtime, handles, _ = load(source)
            got = matrix_values(runtime, handles["0.o"][0])
            want = gguf.quants.dequantize(raw.reshape(tensor.data.shape), kind)
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want), err_msg=f"round {i}")
        exact = np.isfinite(want)
        np.testing.assert_allclose(got[exact], want[exact], rtol=1e-6, err_msg=f"round {i}")
        try:
            with np.errstate(all="ignore"):
                logits = Loaded(NumpyRuntime(), path).logits(TOKENS, None)
        except NumericError as e:
            assert "\n" not in str(e)
            assert not exact.all() or np.abs(want).max() > 100, f"round {i}: all weights are small"
            ends.add("error")
        else:
            assert np.isfinite(logits).all(), f"round {i}"
            ends.add("logits")
    assert ends == {"error", "logits"} or rounds < 10


@pytest.mark.parametrize("seed", [3, 4])
def test_damaged_safetensors_files(tmp_path: Path, seed: int) -> None:
    models = []
    for architecture, fmt in (("llama", "f32"), ("qwen2", "bf16"), ("llama", "f16")):
        folder = tmp_path / f"{architecture}-{fmt}"
        write_hf_model(folder, tiny_config(architecture, **SMALL), fmt=fmt)
        whole = (folder / "model.safetensors").read_bytes()
        length = int.from_bytes(whole[:8], "little")
        models.append((folder, whole, json.loads(whole[8 : 8 + length]), whole[8 + length :]))

    def case(rng: random.Random) -> tuple[Path, str]:
        folder, whole, header, data = rng.choice(models)
        if rng.random() < 0.5:
            changed, story = damage_json(rng, header)
            damaged = with_header(changed, data)
        else:
            tables = len(whole) - len(data) if rng.random() < 0.9 else len(whole)
            damaged, story = damage_bytes(rng, whole[:tables])
            damaged += whole[tables:]
        (folder / "model.safetensors").write_bytes(damaged)
        return folder, story

    fuzz(1500, seed, case)


def test_damaged_quantized_checkpoints(tmp_path: Path) -> None:
    """Of the data, mostly what says where columns and how large weights are: groups, scales and zeros."""
    models = []
    sizes = {**SMALL, "hidden_size": 64, "intermediate_size": 64}
    for recipe in (Recipe(desc_act=True), Recipe(bits=8, group=-1), Recipe("awq")):
        folder = tmp_path / f"{recipe.method}-{recipe.bits}"
        write_quantized_model(folder, tiny_config("llama", **sizes), recipe)
        whole = (folder / "model.safetensors").read_bytes()
        length = int.from_bytes(whole[:8], "little")
        header = json.loads(whole[8 : 8 + length])
        config = json.loads((folder / "config.json").read_text())
        models.append((folder, header, whole[8 + length :], config))

    def case(rng: random.Random) -> tuple[Path, str]:
        folder, header, data, config = rng.choice(models)
        changed_config, changed_header, changed = deepcopy(config), header, data
        kind = rng.random()
        if kind < 0.3:
            changed_config["quantization_config"], story = damage_json(rng, config["quantization_config"])
        elif kind < 0.6:
            changed_header, story = damage_json(rng, header)
        else:
            name = rng.choice([n for n in header if n.endswith(("g_idx", "scales", "qzeros"))])
            begin, end = header[name]["data_offsets"]
            part = bytearray(data[begin:end])
            for _ in range(rng.choice((1, 2, 8))):
                at = rng.randrange(len(part) // 2) * 2
                part[at : at + 2] = rng.choice(
                    (b"\x00\x7c", b"\x00\xfc", b"\x01\x7e", b"\x00\x00", rng.randbytes(2))
                )
            changed, story = data[:begin] + bytes(part) + data[end:], f"data of {name}"
        (folder / "config.json").write_text(json.dumps(changed_config))
        (folder / "model.safetensors").write_bytes(with_header(changed_header, changed))
        return folder, story

    fuzz(600, 7, case)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_damaged_json_files(tmp_path: Path, name: str) -> None:
    config = tiny_config("llama", **SMALL, rope_scaling={"rope_type": "linear", "factor": 2.0})
    write_hf_model(tmp_path, config, shards=2, generation_config={"eos_token_id": [2, 3], "top_k": 20})
    target = tmp_path / name
    text = target.read_bytes()

    def case(rng: random.Random) -> tuple[Path, str]:
        if rng.random() < 0.6:
            changed, story = damage_json(rng, json.loads(text))
            target.write_text(json.dumps(changed))
        else:
            damaged, story = damage_bytes(rng, text)
            target.write_bytes(damaged)
        return tmp_path, story

    fuzz(1000, 5, case)


def test_random_bytes_are_never_a_model(tmp_path: Path) -> None:
    """Not even behind a right beginning."""
    config = tiny_config("llama", **SMALL)
    write_hf_model(tmp_path / "hf", config)
    rng = random.Random(6)
    begins: dict[Path, list[bytes]] = {
        tmp_path / "x.gguf": [b"", b"GGUF", b"GGUF\3\0\0\0", b"GGUF\3\0\0\0" + bytes(8) + b"\3" + bytes(7)],
        tmp_path / "hf" / "model.safetensors": [b"", b"\x20" + bytes(7) + b"{", with_header({})[:16]],
    }
    for i in range(300):
        for target, starts in begins.items():
            target.write_bytes(rng.choice(starts) + rng.randbytes(rng.randrange(200)))
            path = target if target.suffix == ".gguf" else target.parent
            assert not attempt(path, upload=True, story=f"seed 6, case {i}")


def test_swapped_shards_of_another_model_are_refused(tmp_path: Path) -> None:
    """Every file is whole, and they do not belong together."""
    write_hf_model(tmp_path / "a", tiny_config("llama", **SMALL), shards=2)
    other = safetensors_bytes({"model.norm.weight": ("F32", (32,), bytes(128))})
    for shard in sorted((tmp_path / "a").glob("*.safetensors")):
        kept = shard.read_bytes()
        shard.write_bytes(other)
        assert not attempt(tmp_path / "a", upload=False, story=shard.name)
        shard.write_bytes(kept)
    assert attempt(tmp_path / "a", upload=True, story="whole again")
    shutil.rmtree(tmp_path / "a")

"""Small models with every product in several steps, marked independent: what the validation layer watches
(see test_validation.py).

Each area of the activations is a buffer of its own here, so that a missing barrier between two areas can be
told from two steps that write different columns of one, which are all that marks are for.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import encode, safetensors_bytes
from test_logits import Loaded, worst

from xinfer_vk.engine import runner
from xinfer_vk.engine.runner import Chunk
from xinfer_vk.kernels.base import Ref
from xinfer_vk.models.graph import Activations, Rows
from xinfer_vk.plan import BufferKind
from xinfer_vk.reference import NumpyRuntime
from xinfer_vk.vulkan.layer import DeviceLayer
from xinfer_vk.weights import device as weights_device
from xinfer_vk.weights.formats import as_f32
from xinfer_vk.weights.safetensors_file import read_safetensors

FOLDER = Path(__file__).resolve().parent.parent / "fixtures" / "models" / "families"
FORMATS = {"k_proj": "f16", "v_proj": "f32", "up_proj": "f16", "w3": "f16"}  # the others are bf16
BUFFER_BYTES = 6144  # less than the embedding and than the experts of a layer, more than any other matrix
NAMES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
TOKENS = list(range(7, 27))
TOLERANCE = 1e-4  # as in test_logits.py


class ApartActivations(Activations):
    """Every area in a buffer of its own, but for the two that a kernel knows as one."""

    def __init__(self, runtime: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(runtime, *arguments, **options)
        areas = {name: area for name, area in vars(self).items() if isinstance(area, (Rows, Ref))}
        del areas["normed"], areas["residual"]
        begins = {name: getattr(area, "ref", area).offset for name, area in areas.items()}
        ends = [*sorted(set(begins.values())), self.buffer.words]
        for name, area in areas.items():
            words = next(end for end in ends if end > begins[name]) - begins[name]
            own = Ref(runtime.allocate(name, words, BufferKind.SCRATCH), 0)
            setattr(self, name, Rows(own, area.stride) if isinstance(area, Rows) else own)


def mixed(family: str, folder: Path) -> Path:
    """A fixture model whose queries, keys and values, and gates and ups, are of different formats."""
    folder.mkdir()
    for file in (FOLDER / family).glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = {}
    for name, tensor in read_safetensors(FOLDER / family / "model.safetensors").items():
        fmt = FORMATS.get(name.split(".")[-2], tensor.fmt)
        values = encode(as_f32(tensor.fmt, tensor.data).reshape(tensor.shape), fmt)
        tensors[name] = (NAMES[fmt], tuple(tensor.shape), values.tobytes())
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return folder


@pytest.mark.parametrize("family", ["gemma3", "mixtral"])
def test_a_model_with_marks(
    runtime: Any, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = itertools.count()
    mark = DeviceLayer.next_is_independent
    monkeypatch.setattr(DeviceLayer, "next_is_independent", lambda self: (next(marks), mark(self))[1])
    monkeypatch.setattr(runner, "Activations", ApartActivations)
    monkeypatch.setattr(weights_device, "MAX_ARENA_BYTES", BUFFER_BYTES)
    path = mixed(family, tmp_path / "model")
    want = Loaded(NumpyRuntime(), path).logits(TOKENS, None)
    model = Loaded(runtime, path)
    assert len(model.weights.embed.parts) > 1 and len(model.weights.layers[0].qkv) == 3
    assert worst(model.logits(TOKENS, None), want) <= TOLERANCE
    assert worst(model.logits(TOKENS, 1), want) <= TOLERANCE
    one, two = model.cache.open(), model.cache.open()
    chosen = model.runner.run([Chunk(one, TOKENS[:9]), Chunk(two, TOKENS[:1])], "argmax")
    assert chosen[0] == np.argmax(want[8])
    assert next(marks) > 20


@pytest.mark.tier_all
def test_the_demo_model(runtime: Any, demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "Activations", ApartActivations)
    model = Loaded(runtime, demo_model)
    whole, stepwise = model.logits(TOKENS, None), model.logits(TOKENS[:4], 1)
    assert (whole[:4].argmax(-1) == stepwise.argmax(-1)).all()

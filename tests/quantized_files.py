"""Writes tiny GPTQ and AWQ checkpoints: weights are rounded, and packed bit by bit as the formats' papers
and programs say. It shares no code with what reads them.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from model_files import encode, random_tensors, safetensors_bytes

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # AutoAWQ: in which of a word's nibbles each of 8 columns lies


@dataclass(frozen=True)
class Recipe:
    """``group``: -1 is the whole column. ``v2``: zeros are stored as they are. ``desc_act``: groups are
    formed along a random order of columns, the same for matrices that share an input with ``shared``."""

    method: str = "gptq"
    bits: int = 4
    group: int = 32
    sym: bool = True
    v2: bool = False
    desc_act: bool = False
    shared: bool = True

    @property
    def config(self) -> dict[str, Any]:
        """The ``quantization_config``."""
        common = {"quant_method": self.method, "bits": self.bits, "group_size": self.group}
        if self.method == "awq":
            return {**common, "version": "gemm", "zero_point": True, "modules_to_not_convert": None}
        form = {"checkpoint_format": "gptq_v2"} if self.v2 else {}
        return {**common, "sym": self.sym, "desc_act": self.desc_act, "damp_percent": 0.01, **form}


def quantize(
    weights: np.ndarray, recipe: Recipe, module: str
) -> tuple[dict[str, tuple[str, tuple[int, ...], bytes]], np.ndarray]:
    """(tensors of a module by their last name, the weights they hold as float32): ``weights [N, K]``."""
    rows, cols = weights.shape
    group, top = cols if recipe.group == -1 else recipe.group, (1 << recipe.bits) - 1
    group_of = np.arange(cols) // group
    if recipe.desc_act:
        share = re.sub("(q|k|v|gate|up)_proj", "one", module) if recipe.shared else module
        group_of = group_of[np.random.default_rng(zlib.crc32(share.encode())).permutation(cols)]
    groups = group_of.max() + 1
    scales, zeros = np.zeros((groups, rows), np.float16), np.zeros((groups, rows), np.int64)
    q, dense = np.zeros((cols, rows), np.int64), np.zeros((rows, cols), np.float32)
    for g in range(groups):
        for n in range(rows):
            values = weights[n, group_of == g]
            low, high = min(values.min(), -0.02), max(values.max(), 0.02)
            if recipe.sym and recipe.method == "gptq":
                scales[g, n], zeros[g, n] = 2 * max(-low, high) / top, (top + 1) // 2
            else:
                scales[g, n] = (high - low) / top
                lowest = 0 if recipe.v2 or recipe.method == "awq" else 1  # what the first format stores as 0
                zeros[g, n] = np.clip(np.round(-low / np.float32(scales[g, n])), lowest, top)
            codes = np.clip(np.round(values / np.float32(scales[g, n])) + zeros[g, n], 0, top)
            q[group_of == g, n] = codes
            dense[n, group_of == g] = np.float32(scales[g, n]) * (codes - zeros[g, n]).astype(np.float32)
    stored_zeros = zeros if recipe.v2 or recipe.method == "awq" else zeros - 1
    places = AWQ_PLACES if recipe.method == "awq" else range(32 // recipe.bits)
    along = 1 if recipe.method == "awq" else 0
    words = {
        "qweight": pack(q, recipe.bits, along, places),
        "qzeros": pack(stored_zeros, recipe.bits, 1, places),
    }
    if recipe.method == "gptq":
        words["g_idx"] = group_of
    out = {
        name: ("I32", values.shape, values.astype(np.uint32).astype("<u4").tobytes())
        for name, values in words.items()
    }
    return {**out, "scales": ("F16", scales.shape, scales.tobytes())}, dense


def pack(values: np.ndarray, bits: int, axis: int, places: Any) -> np.ndarray:
    """Integers -> words, ``32 / bits`` neighbours along ``axis`` in one: neighbour ``i`` at ``places[i]``."""
    values = np.moveaxis(values, axis, 0)
    per_word = 32 // bits
    out = np.zeros((values.shape[0] // per_word, values.shape[1]), np.uint64)
    for k in range(values.shape[0]):
        out[k // per_word] |= values[k].astype(np.uint64) << np.uint64(bits * places[k % per_word])
    return np.moveaxis(out, 0, axis)


def write_quantized_model(
    folder: Path,
    config: Mapping[str, Any],
    recipe: Recipe,
    *,
    keep: tuple[str, ...] = ("lm_head", "embed_tokens"),
    changes: Mapping[str, Any] | None = None,
    own_file: bool = False,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """A checkpoint whose matrices are quantized but for those whose names end so. Returns the values it
    holds. ``changes`` of the ``quantization_config``, which is in a ``quantize_config.json`` with
    ``own_file``."""
    folder.mkdir(parents=True, exist_ok=True)
    stored, dense = {}, {}
    for name, values in random_tensors(config, seed).items():
        module = name.removesuffix(".weight")
        if values.ndim == 2 and not module.endswith(keep):
            tensors, dense[name] = quantize(values, recipe, module)
            stored.update({f"{module}.{part}": tensor for part, tensor in tensors.items()})
        else:
            half = values.astype(np.float16)
            stored[name] = ("F16", values.shape, encode(values, "f16").tobytes())
            dense[name] = half.astype(np.float32)
    quantization = {k: v for k, v in {**recipe.config, **(changes or {})}.items() if v != "absent"}
    if own_file:
        (folder / "quantize_config.json").write_text(json.dumps(quantization))
        (folder / "config.json").write_text(json.dumps(config))
    else:
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(stored, {"format": "pt"}))
    return dense

"""Hidden states of a text, the rows of the final norm without the head, and one vector made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from xinfer_vk.blocks import CachedSequence
from xinfer_vk.engine.runner import ModelRunner
from xinfer_vk.errors import ModelError
from xinfer_vk.fields import parse_json
from xinfer_vk.weights.source import ModelSource

Pooling = Literal["mean", "last", "cls"]

# The keys of sentence-transformers' 1_Pooling/config.json, and llama.cpp's LLAMA_POOLING_TYPE_….
MODES: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "cls",
}
GGUF_TYPES: dict[int, Pooling] = {0: "mean", 1: "mean", 2: "cls", 3: "last"}  # 0: none is said


def hidden_states(runner: ModelRunner, sequence: CachedSequence, token_ids: Sequence[int]) -> np.ndarray:
    """The final norm's rows of each token, ``float32 [tokens, hidden size]``. ``sequence`` is empty and has
    room. Raises what :meth:`ModelRunner.run` raises."""
    # Loading multiplies the norm's weight by the scale of the logits.
    return runner.rows_of(sequence, token_ids, "hidden") / np.float32(runner.config.logit_scale)


def pool(rows: np.ndarray, pooling: Pooling, normalize: bool) -> np.ndarray:
    """One vector of a text's hidden states: ``float32 [tokens, hidden size] → [hidden size]``. The mean is
    taken in f64, so that it does not depend on the order of tokens' sums."""
    if pooling == "mean":
        vector = rows.mean(axis=0, dtype=np.float64)
    else:
        vector = rows[-1 if pooling == "last" else 0].astype(np.float64)
    if normalize:
        vector /= max(float(np.linalg.norm(vector)), 1e-12)  # of zeros stays zero
    return vector.astype(np.float32)


def pooling_of(source: ModelSource) -> Pooling:
    """How the makers of a checkpoint pool; "mean" where they say nothing. Raises :class:`ModelError` for a
    pooling that is none of ours, by its name."""
    if source.kind == "gguf":
        key = f"{source.metadata.get('general.architecture')}.pooling_type"
        said = source.metadata.get(key, 0)
        if said not in GGUF_TYPES:
            raise ModelError(f"{source.path}: {key} is {said!r}: it is one of {sorted(GGUF_TYPES)}")
        return GGUF_TYPES[said]
    path = source.path / "1_Pooling" / "config.json"
    if not path.is_file():
        return "mean"
    config = parse_json(path.read_bytes(), str(path))
    on = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if len(on) != 1 or on[0] not in MODES:
        raise ModelError(f"{path}: pools by {', '.join(on) or 'nothing'}: it is one of {', '.join(MODES)}")
    return MODES[on[0]]

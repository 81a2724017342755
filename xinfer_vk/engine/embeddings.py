"""Hidden states of a text: the rows of the final norm, without the head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xinfer_vk.engine.runner import Chunk, ModelRunner


def hidden_states(runner: ModelRunner, token_ids: Sequence[int]) -> np.ndarray:
    """The final norm's rows of each token, ``float32 [tokens, hidden size]``, in chunks of as many tokens as
    a step returns rows. The cache must have a free row. Raises what :meth:`ModelRunner.run` raises."""
    sequence, step = runner.cache.open(len(token_ids)), runner.max_outputs
    try:
        rows = [
            runner.run([Chunk(sequence, token_ids[i : i + step], "all")], "hidden")
            for i in range(0, len(token_ids), step)
        ]
    finally:
        runner.cache.close(sequence)
    # Loading multiplies the norm's weight by the scale of the logits.
    return np.concatenate(rows) / np.float32(runner.config.logit_scale)

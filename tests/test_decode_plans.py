"""Plans of decode steps: which dispatches they have, and that the choice among them follows the batch.

That logits and texts stay the same, whatever the plan, is for test_logits.py, test_families.py and
test_ahead.py to show, whose decode steps run through these.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_families import FOLDER
from test_logits import Loaded

from xinfer_vk.engine.runner import Chunk, make_runner
from xinfer_vk.kernels.attention import planned_context, split_count
from xinfer_vk.plan import Plan
from xinfer_vk.reference import NUMPY_PROFILE, NumpyRuntime


def dispatches(plan: Plan | None, kernel: str) -> int:
    assert plan is not None
    return sum(step.kernel.name.split(".")[0] == kernel for step in plan.steps)


def test_attention_appends_where_every_token_is_of_another_sequence() -> None:
    model = Loaded(NumpyRuntime(), FOLDER / "gemma3")
    a, b = model.cache.open(), model.cache.open()
    layers = model.config.layers
    for chunks, separate in (
        ([Chunk(a, [1, 2, 3]), Chunk(b, [4])], layers),
        ([Chunk(a, [5]), Chunk(b, [6])], 0),
        ([Chunk(a, [7, 8])], layers),  # a plan for as many rows
        ([Chunk(a, [9])], 0),
    ):
        model.runner.run(chunks)
        assert dispatches(model.runner.last_plan, "append_kv") == separate
    model.runner.decode([a, b], [10, 11], steps=4)
    assert dispatches(model.runner.last_plan, "append_kv") == 0
    assert dispatches(model.runner.last_plan, "attention") == 4 * layers


@pytest.mark.parametrize("simd, most", [(True, 8), (False, 32)])
def test_query_tiles_do_not_append(simd: bool, most: int) -> None:
    model = Loaded(NumpyRuntime(replace(NUMPY_PROFILE, simd=simd)), FOLDER / "qwen3")
    for rows, separate in ((most, 0), (2 * most, model.config.layers)):
        plan = model.runner._make_plan(rows, rows, "argmax", 1, decoding=True)
        assert dispatches(plan, "append_kv") == separate


@pytest.mark.parametrize("simd, longest", [(True, 2047), (False, 480)])
def test_only_long_sequences_are_split_and_combined(simd: bool, longest: int) -> None:
    """In a cache for longer ones, up to the last step of a plan."""
    P = replace(NUMPY_PROFILE, simd=simd)
    model = Loaded(NumpyRuntime(P), FOLDER / "qwen3")
    layers = model.config.layers
    runner = make_runner(model.runtime, model.config, model.weights, "f32", capacity=4096)
    sequence = runner.cache.open()
    ids = (np.arange(longest + 4) * 7 % 90).astype(np.int64).tolist()
    for at in range(0, longest - 2, 512):
        runner.run([Chunk(sequence, ids[at : min(at + 512, longest - 2)], "none")])
    for steps, combined in ((1, 0), (1, 0), (1, layers)):
        runner.decode([sequence], [ids[sequence.length]], steps=steps)
        assert dispatches(runner.last_plan, "attention_combine") == combined
    after = runner.run([Chunk(sequence, [ids[sequence.length]])], "logits")
    runner.cache.truncate(sequence, longest - 1)
    runner.decode([sequence], [ids[longest - 1]], steps=2)
    assert dispatches(runner.last_plan, "attention_combine") == 2 * layers  # its second step is long
    runner.cache.truncate(sequence, longest - 2)
    again = runner.run([Chunk(sequence, ids[longest - 2 : longest + 2])], "logits")
    np.testing.assert_allclose(again, after, rtol=0, atol=1e-4)


def test_a_context_without_splits_has_none() -> None:
    for simd in (True, False):
        P = replace(NUMPY_PROFILE, simd=simd)
        for tokens in (1, 4, 8, 64):
            for heads in (1, 9, 64):
                context = planned_context(P, tokens, heads, 100, 8192)
                assert split_count(P, tokens, heads, context) == 1
                assert planned_context(P, tokens, heads, 8000, 8192) == 8192
                assert planned_context(P, tokens, heads, 100, 400) == 400

"""Plans of decode steps: which dispatches they have, and that the choice among them follows the batch.

That logits and texts stay the same, whatever the plan, is for test_logits.py, test_families.py and
test_ahead.py to show, whose decode steps run through these.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_families import FOLDER
from test_logits import Loaded

from xinfer_vk.engine.runner import Chunk
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

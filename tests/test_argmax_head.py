"""Argmax by the product that makes the logits: the token is that of the logits, in every kernel family.

Weights are whole eighths and rows of x have a single 1, so that every product is exact and ties are ties.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import POISON
from test_families import FOLDER
from test_logits import MODELS, Loaded

from xinfer_vk.engine.runner import Chunk
from xinfer_vk.kernels import state as st
from xinfer_vk.kernels.argmax import NAN_RESULT, join
from xinfer_vk.kernels.base import Part, Ref
from xinfer_vk.kernels.halves import halves_words, multiplies_halves, split_halves
from xinfer_vk.kernels.matmul import argmax_rows, linear, variants
from xinfer_vk.plan import BufferKind, DeviceProfile, Plan, Step
from xinfer_vk.reference import NUMPY_PROFILE, NumpyRuntime

COLS = 32


def columns_of_every_kind(rows: int) -> np.ndarray:
    """Weights [rows, COLS] whose columns are logits that an argmax could get wrong."""
    rng = np.random.default_rng(rows)
    w = (rng.integers(-400, 400, (rows, COLS)) / 8).astype(np.float32)
    w[rng.integers(rows), 1] = 100  # one clear winner
    w[:, 2] = rng.integers(0, 3, rows)  # ties everywhere
    w[:, 3] = -1 - np.abs(w[:, 3])  # all negative: the padding is none of them
    w[:, 4] = np.where(rng.integers(0, 2, rows), 0.0, -0.0)  # equal, whatever the sign
    w[:, 5] = 7  # the first of all
    w[-1, 6] = 100  # the last
    return w


class Head:
    """A product with the matrix ``w``, in parts that begin at ``splits``, and the join of what it leaves."""

    def __init__(self, rt: Any, w: np.ndarray, splits: tuple[int, ...] = ()) -> None:
        self.rt, self.rows = rt, len(w)
        padded = np.zeros((-(-len(w) // 8) * 8, COLS), np.float32)
        padded[: len(w)] = w
        x8 = padded.reshape(-1, 8, COLS).swapaxes(1, 2).reshape(-1).view(np.uint32)
        self.parts = []
        for first, last in pairwise((0, *splits, len(w))):
            words = x8[first * COLS : -(-last // 8) * 8 * COLS]
            self.parts.append(Part(self.put("w", words, BufferKind.WEIGHTS), 0, first, last - first))

    def put(self, name: str, words: np.ndarray, kind: BufferKind = BufferKind.SCRATCH) -> Any:
        buffer = self.rt.allocate(name, words.size, kind)
        self.rt.write(buffer, 0, np.ascontiguousarray(words).reshape(-1).view(np.uint32))
        return buffer

    def choose(
        self, profile: DeviceProfile, x: np.ndarray, used: int, variant: str | None = None
    ) -> list[int]:
        """What the rows of ``x`` choose; those not in use must stay poison."""
        tokens, stride = len(x), -(-self.rows // 4)
        at = Ref(self.put("x", x))
        state = np.zeros(st.BLOCK_TABLE, np.uint32)
        state[st.N_OUTPUTS] = used
        state_buffer = self.put("state", state, BufferKind.STATE)
        pairs = Ref(self.put("pairs", np.full(2 + 2 * tokens * stride, POISON)), 2)
        result = Ref(self.put("result", np.full(tokens + 1, POISON), BufferKind.RESULT), 1)
        halves, steps = None, []
        if variant and variant.startswith("coop"):
            halves = Ref(self.put("halves", np.full(halves_words(tokens, COLS), POISON)))
            steps = split_halves(at, COLS, COLS, halves, tokens, state_buffer, "outputs")
        product = linear(
            profile, "f32", self.parts, COLS, at, COLS, pairs, 2 * stride, tokens, state_buffer, None,
            "argmax", "outputs", halves=halves, variant=variant,
        )  # fmt: skip
        slices = -(-self.rows // argmax_rows(product))
        steps += [*product, join(profile, pairs, stride, slices, tokens, result, state_buffer)]
        recorded = self.rt.prepare(Plan("test", tuple(steps)))
        recorded.run()
        got = self.rt.read(result.buffer, 0, tokens + 1)
        assert np.all(got[[0, *range(used + 1, tokens + 1)]] == POISON)
        if hasattr(recorded, "release"):
            recorded.release()
        for buffer in {b for step in steps for b in step.buffers if b.kind is not BufferKind.WEIGHTS}:
            self.rt.free(buffer)
        chosen: list[int] = got[1 : used + 1].tolist()
        return chosen

    def free(self) -> None:
        for part in self.parts:
            self.rt.free(part.buffer)


WAYS = {
    "as it is": ({}, None),
    "simd": ({"simd": True, "features": frozenset()}, None),
    "gpu": ({"simd": False}, None),
    "subgroup": ({"simd": False}, "matvec 64 subgroup x16"),
    "coop": ({"simd": False}, "coop 16 teams 2"),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_token_is_that_of_the_logits(way: str, runtime: Any) -> None:
    changed, variant = WAYS[way]
    profile = replace(runtime.profile, **changed)
    shapes = ((1, 1), (8, 7), (16, 16)) if variant is None else ((8, 7),)
    if way == "subgroup" and variant not in variants(profile, "f32", COLS, 8, True):
        pytest.skip("the device cannot add up by subgroup")
    if way == "coop" and "llvmpipe" not in profile.name and not multiplies_halves(profile, 8):
        pytest.skip("no matrix units, and the shader is emulated on one device: it is slow to compile")
    if way == "simd" and runtime.profile.subgroup_size < 8:
        pytest.skip("as it is")
    for rows, splits in ((1, ()), (7, ()), (70, (8, 32)), (1500, (1024,))):
        w = columns_of_every_kind(rows)
        head = Head(runtime, w, splits)
        for tokens, used in shapes:
            x = np.full((tokens, COLS), np.nan, np.float32)
            columns = np.arange(used) if used > 1 else np.array([2])
            x[:used] = np.eye(COLS, dtype=np.float32)[columns]
            want = w[:, columns].argmax(axis=0).tolist()
            assert head.choose(profile, x, used, variant) == want, (rows, tokens)
            x[used - 1, 5] = np.nan  # in every logit of a row
            assert head.choose(profile, x, used, variant) == [*want[:-1], NAN_RESULT], (rows, tokens)
        head.free()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_one_logit_that_is_nan_or_infinite_is_found_wherever_it_is(runtime: Any, value: float) -> None:
    x = np.zeros((1, COLS), np.float32)
    x[0, 9] = 1.0
    for simd in (runtime.profile.simd, False):
        for row in (0, 3, 68, 69):
            w = columns_of_every_kind(70)
            w[row, 9] = value
            head = Head(runtime, w)
            assert head.choose(replace(runtime.profile, simd=simd), x, 1) == [NAN_RESULT]
            head.free()


# -- in a plan ---------------------------------------------------------------------------------------


def kernels(steps: tuple[Step, ...]) -> list[str]:
    return [step.kernel.name.split(".")[0] for step in steps]


def test_a_greedy_step_ends_with_the_head_and_the_join() -> None:
    for profile in (NUMPY_PROFILE, replace(NUMPY_PROFILE, simd=False)):
        runner = Loaded(NumpyRuntime(profile), FOLDER / "qwen3").runner
        for tokens, outputs in ((1, 1), (8, 8), (64, 1), (64, 32)):
            greedy = kernels(runner._make_plan(tokens, outputs, "argmax", 1).steps)
            logits = kernels(runner._make_plan(tokens, outputs, "logits", 1).steps)
            assert greedy == [*logits, "argmax_join"]
        ahead = kernels(runner._make_plan(1, 1, "argmax", 4).steps)
        assert ahead.count("argmax_join") == 4 and "argmax" not in ahead
    assert kernels(runner._make_plan(4, 0, "argmax", 1).steps).count("argmax_join") == 0


def test_capped_logits_stay_in_memory() -> None:
    runner = Loaded(NumpyRuntime(), FOLDER / "gemma2").runner
    assert kernels(runner._make_plan(1, 1, "argmax", 1).steps)[-3:] == ["softcap", "argmax", "argmax_join"]


@pytest.mark.parametrize("simd", (True, False))
def test_greedy_tokens_are_those_of_the_logits(
    runtime: Any, simd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "profile", replace(runtime.profile, simd=simd))
    path = next(p for p in MODELS if p.name == "llama-biases-bf16")
    token_ids: list[int] = np.load(Path(path) / "reference.npz")["token_ids"][:24].tolist()
    model = Loaded(runtime, path)
    try:
        want = model.logits_of(token_ids, [16, 1, 1, 1, 5]).argmax(axis=1).tolist()
        sequence, got, at = model.cache.open(), [], 0
        for size in (16, 1, 1, 1, 5):
            got += model.runner.run([Chunk(sequence, token_ids[at : at + size], "all")]).tolist()
            at += size
        assert got == want
    finally:
        model.free()

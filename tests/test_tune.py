"""The autotuner: what it chooses, what it refuses, and what it keeps for the next start."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from weight_matrices import random_matrix

from xinfer_vk.engine import tune as tuning
from xinfer_vk.engine.tune import tune
from xinfer_vk.errors import DeviceError, UsageError
from xinfer_vk.kernels import matmul, matmul_a8
from xinfer_vk.kernels.base import Part
from xinfer_vk.plan import BufferKind
from xinfer_vk.reference import NumpyRuntime
from xinfer_vk.weights.device import Matrix

ROWS, COLS = 40, 64
MATRIX_UNITS = frozenset({"cooperative_matrix", "float16", "subgroup_size_control"})


class OnDevice(Matrix):
    """A matrix whose words are on a device already."""

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part(self.bias.buffer, self.bias.offset, 0, self.rows),)  # where the words are


def put(rt: Any, fmt: str = "q4_0") -> OnDevice:
    cols = 256 if fmt == "q4_k" else COLS
    words = random_matrix(fmt, ROWS, cols, np.random.default_rng(3)).words
    buffer = rt.allocate("w", -(-words.size // 4) * 4, BufferKind.WEIGHTS)
    rt.write(buffer, 0, words)
    return OnDevice(fmt, ROWS, cols, (), False, tuning.Ref(buffer))


@pytest.fixture
def gpu() -> NumpyRuntime:
    """A device of another class than this machine's: there is something to choose."""
    rt = NumpyRuntime()
    rt.profile = replace(rt.profile, simd=False)
    return rt


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Makes "matvec 128" and "matmul 16" fast; ``calls`` tells what was tried, ``results`` may spoil one."""
    told: dict[str, Any] = {"calls": [], "results": {}, "raises": {}}
    real = tuning.Tuner.time

    def time(self: Any, shape: Any, name: str, matrices: Any) -> tuple[float, np.ndarray]:
        told["calls"].append((shape.tokens, name))
        if name in told["raises"]:
            raise told["raises"][name]
        _, y = real(self, shape, name, matrices)
        return (1.0 if name in ("matvec 128", "matmul 16") else 2.0), y * told["results"].get(name, 1.0)

    monkeypatch.setattr(tuning.Tuner, "time", time)
    return told


def chosen(rt: Any, tokens: int) -> str:
    return matmul.tuned_variant(rt.profile, "q4_0", ROWS, COLS, tokens)


def test_the_fastest_variant_is_chosen_and_buckets_between_follow(gpu, timed, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    notes = tune(gpu, [put(gpu)], "quick", folder=tmp_path, progress=lambda *done: seen.append(done))
    assert notes == ()
    assert [chosen(gpu, t) for t in (1, 2, 4, 8)] == ["matvec 128"] * 4
    assert [chosen(gpu, t) for t in (32, 64, 128, 512)] == ["matmul 16"] * 4
    assert chosen(gpu, 16) == "default"  # which is matmul 16
    assert seen[0] == (0, 5) and seen[-1] == (5, 5)
    assert chosen(gpu, 1024) == "default"


def test_a_choice_for_more_rows_gets_the_tile_of_fewer(gpu) -> None:
    units = {"subgroup_size": 32, "features": MATRIX_UNITS}
    for name, tile, kind in (("matmul 64 double", 32, {"stages": 2}), ("coop 64", 32, {"teams": 1})):
        tuned = {matmul.tuned_key("q4_0", ROWS, COLS, 32): name}
        profile = replace(gpu.profile, tuned=tuned, max_shared_bytes=48 << 10, **units)
        at = tuning.Ref(gpu.allocate(name, 4096, BufferKind.SCRATCH))
        part = Part(at.buffer, 0, 0, ROWS)
        (step,) = matmul.linear(
            profile, "q4_0", [part], COLS, at, COLS, at, ROWS, 32, at.buffer, None, "store", "tokens",
            halves=at if name.startswith("coop") else None,
        )  # fmt: skip
        assert step.kernel.shader.split(".")[0] == ("matmul_coop" if "coop" in name else "matmul")
        assert kind.items() <= dict(step.kernel.spec).items() and dict(step.kernel.spec)["tokens"] == tile


def test_choices_are_kept_and_a_damaged_file_is_made_again(gpu, timed, tmp_path: Path) -> None:
    tune(gpu, [put(gpu)], folder=tmp_path)
    first = len(timed["calls"])
    (file,) = tmp_path.iterdir()
    again = NumpyRuntime()
    again.profile = replace(again.profile, simd=False)
    tune(again, [put(again)], folder=tmp_path)
    assert len(timed["calls"]) == first and chosen(again, 8) == "matvec 128"
    odd = '{"choices": {}, "crashed": [], "running": [], "thorough": [1, "a"]}'
    for damage in (
        "",
        "{",
        "[]",
        '{"choices": {"a": 1}, "crashed": [], "running": []}',
        '{"choices": 3}',
        odd,
    ):
        file.write_text(damage)
        tune(again, [put(again)], folder=tmp_path)
        assert json.loads(file.read_text())["choices"], damage
    assert len(timed["calls"]) == 7 * first


def test_full_tries_what_quick_left_out_and_quick_keeps_what_full_found(gpu, timed, tmp_path: Path) -> None:
    tune(gpu, [put(gpu)], "quick", folder=tmp_path)
    quick = set(timed["calls"])
    assert (1, "matvec 64 x16") not in quick and (8, "matvec 64 x16") in quick
    timed["calls"].clear()
    tune(gpu, [put(gpu)], "full", folder=tmp_path)
    assert set(timed["calls"]) > quick and (1, "matvec 64 x16") in timed["calls"]
    timed["calls"].clear()
    for how in ("full", "quick"):
        tune(gpu, [put(gpu)], how, folder=tmp_path)
    assert not timed["calls"] and chosen(gpu, 1) == "matvec 128"


def test_a_variant_that_computes_something_else_is_not_used(gpu, timed, tmp_path: Path) -> None:
    timed["results"] = {"matvec 128": 1.001, "matmul 16": np.nan}
    notes = tune(gpu, [put(gpu)], folder=tmp_path)
    assert chosen(gpu, 1) == chosen(gpu, 512) == "default"
    assert any("matvec 128" in note and "off by 0.001" in note for note in notes)
    assert any("matmul 16" in note and "off by nan" in note for note in notes)


def test_a_variant_that_fails_is_told_and_not_used(gpu, timed, tmp_path: Path) -> None:
    timed["raises"] = {"matmul 16": DeviceError("the driver refuses")}
    notes = tune(gpu, [put(gpu)], folder=tmp_path)
    assert chosen(gpu, 512) == "default" and chosen(gpu, 8) == "matvec 128"
    assert any("the driver refuses" in note for note in notes)


def test_a_variant_that_ended_the_program_is_left_alone(gpu, timed, tmp_path: Path) -> None:
    timed["raises"] = {"matvec 128": SystemExit()}  # leaves the file as a crash would
    with pytest.raises(SystemExit):
        tune(gpu, [put(gpu)], folder=tmp_path)
    timed["raises"] = {}
    notes = tune(gpu, [put(gpu)], folder=tmp_path)
    assert chosen(gpu, 1) == "default" and chosen(gpu, 8) == "matvec 128"
    (file,) = tmp_path.iterdir()
    assert any("ended the program" in note and str(file) in note for note in notes)


def test_ctrl_c_and_another_process_that_tunes_are_no_crash(gpu, timed, tmp_path: Path) -> None:
    timed["raises"] = {"matvec 128": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        tune(gpu, [put(gpu)], folder=tmp_path)
    timed["raises"] = {}
    (file,) = tmp_path.iterdir()
    record = json.loads(file.read_text())
    assert record["running"] == []
    record["running"] = [tuning.Shape("q4_0", ROWS, COLS, 1).key, "matvec 128", os.getppid()]
    file.write_text(json.dumps(record))
    assert tune(gpu, [put(gpu)], folder=tmp_path) == () and chosen(gpu, 1) == "matvec 128"


def test_off_and_devices_without_a_choice_try_nothing(gpu, timed, tmp_path: Path) -> None:
    assert tune(gpu, [put(gpu)], "off", folder=tmp_path) == ()
    cpu = NumpyRuntime()
    cpu.profile = replace(cpu.profile, simd=True)
    assert tune(cpu, [put(cpu)], folder=tmp_path) == ()
    (note,) = tune(cpu, [put(cpu)], "full", folder=tmp_path)
    assert note == "NumPy reference has one kernel for each product: tuning changes nothing"
    assert not timed["calls"] and not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match="off, quick, full"):
        tune(gpu, [], "fast")  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_written_only_costs_time(gpu, timed, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    tune(gpu, [put(gpu)], folder=tmp_path / "file")
    assert chosen(gpu, 8) == "matvec 128"


def test_every_variant_runs_and_is_right_on_the_device(runtime: Any, tmp_path: Path) -> None:
    before = runtime.profile
    runtime.profile = replace(before, simd=False)
    try:
        assert tune(runtime, [put(runtime), put(runtime, "f16")], folder=tmp_path, max_tokens=64) == ()
        assert runtime.profile.tuned
    finally:
        runtime.profile = before


def test_products_in_8_bits_are_tuned_apart(gpu, timed, tmp_path: Path) -> None:
    weights = [put(gpu), put(gpu, "q4_k")]  # the latter has none
    assert tune(gpu, weights, folder=tmp_path, activations="int8") == ()
    tried = len(timed["calls"])
    assert chosen(gpu, 8) == "default" and "q4_k 40x256 for 8" in gpu.profile.tuned
    kernel, _, _ = matmul_a8.tuned_choice(gpu.profile, "q4_0", ROWS, COLS, 8)
    assert kernel.shader.startswith("matvec_a8") and dict(kernel.spec)["local_size"] == 128
    kernel, _, tile = matmul_a8.tuned_choice(gpu.profile, "q4_0", ROWS, COLS, 512)
    assert kernel.shader.startswith("matmul_a8") and tile == 16
    assert matmul_a8.choose(gpu.profile, "q4_0", COLS, 512)[2] == 64
    tune(gpu, weights, folder=tmp_path, activations="int8")
    assert len(timed["calls"]) == tried
    tune(gpu, weights, folder=tmp_path)
    assert len(timed["calls"]) > tried and chosen(gpu, 8) == "matvec 128"


def test_every_variant_in_8_bits_is_right_on_the_device(runtime: Any, tmp_path: Path) -> None:
    before = runtime.profile
    runtime.profile = replace(before, simd=False)
    try:
        weights = [put(runtime), put(runtime, "q8_0")]
        assert tune(runtime, weights, folder=tmp_path, max_tokens=64, activations="int8") == ()
        assert "q4_0 int8 40x64 for 64" in runtime.profile.tuned
    finally:
        runtime.profile = before


def test_matrix_units_are_offered_where_there_are_some(gpu) -> None:
    profile = replace(gpu.profile, subgroup_size=32, features=MATRIX_UNITS)
    names = list(matmul.variants(profile, "q4_k", 256, 64, True))
    assert names[0] == "default" and {"coop 16", "coop 32", "coop 64"} <= set(names)
    assert not any(n.startswith("coop") for n in matmul.variants(profile, "q4_k", 256, 1, True))
    few = [n for n in matmul.variants(profile, "q4_k", 256, 8, True) if n.startswith("coop")]
    assert few == ["coop 16", "coop 16 teams 2", "coop 16 teams 4"]
    quick = [n for n in matmul.variants(profile, "q4_k", 256, 8, True, True) if n.startswith("coop")]
    assert quick == ["coop 16", "coop 16 teams 4"]
    assert not any("teams" in n for n in names)
    wide = replace(profile, subgroup_size=64)
    assert "coop 16 teams 4" not in matmul.variants(wide, "q4_k", 256, 8, True)
    assert not any(n.startswith("coop") for n in matmul.variants(gpu.profile, "q4_k", 256, 64, True))


def test_without_a_home_directory_choices_are_made_and_not_kept(gpu, timed, monkeypatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("XINFER_VK_CACHE", "~nobody-of-that-name/cache")
    tune(gpu, [put(gpu)])
    assert chosen(gpu, 8) == "matvec 128"

"""The selftest itself: it finds what is wrong, says so in a row, goes on, and exits as it should."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from xinfer_vk.cli.selftest import allowed, as_record, choose_cases, command
from xinfer_vk.errors import DeviceError, DeviceLostError, UsageError
from xinfer_vk.kernels.copy_words import copy_words
from xinfer_vk.plan import BufferKind
from xinfer_vk.reference import NumpyRuntime
from xinfer_vk.selftest import Case, Finding, all_cases, run_cases, short
from xinfer_vk.selftest.case import EXACT, POISON, Tolerance, compare, compare_with_oracles
from xinfer_vk.selftest.short import KERNELS, NAMES
from xinfer_vk.selftest.weights import FORMATS, QUICK_FORMATS
from xinfer_vk.vulkan.runtime import KomputeRuntime

TENTH = Tolerance(0.1, 0.0, "for this test")


def words(*values: float) -> np.ndarray:
    return np.array(values, np.float32).view(np.uint32)


@pytest.mark.parametrize(
    "got, want, ok",
    [
        (1.05, 1.0, True), (1.2, 1.0, False), (np.nan, 1.0, False), (1.0, np.nan, False),
        (np.nan, np.nan, True), (np.inf, np.inf, True), (np.inf, -np.inf, False), (np.inf, 1.0, False),
        (1.0, np.inf, False),
    ],
)  # fmt: skip
def test_comparison_of_one_number(got, want, ok):
    error, problem = compare(words(0.0, got), words(0.0, want), "f32", TENTH)
    assert (problem == "") == ok
    if not ok:
        assert problem.startswith("[1] is ") and error > 0.1


def test_a_word_that_only_one_side_wrote_is_found():
    poison, written = np.array([POISON, 0], np.uint32), words(1.0, 0.0)
    assert "was not written" in compare(poison, written, "f32", TENTH)[1]
    assert "must not be written" in compare(written, poison, "u32", TENTH)[1]


def test_halves_and_integers_are_compared_as_such():
    one, more = np.array([1.0, 2.0], np.float16), np.array([1.0, 2.5], np.float16)
    assert compare(one.view(np.uint32), more.view(np.uint32), "f16", TENTH)[0] == 0.5
    assert compare(np.array([3], np.uint32), np.array([4], np.uint32), "u32", TENTH)[1]


def test_every_case_has_a_name_of_its_own_and_a_reason():
    cases = all_cases()
    assert len({str(case) for case in cases}) == len(cases)
    assert all(len(case.tolerance.reason) > 20 for case in cases)


def test_every_kernel_family_and_format_has_a_quick_case():
    names = [str(case) for case in all_cases() if case.quick]
    for kernel in (
        "copy_words",
        "copy_region",
        "rmsnorm",
        "swiglu",
        "order_columns",
        "geglu",
        "softcap",
        "experts",
        "route_experts",
        "group_experts",
        "combine_experts",
        "quantize_rows",
        "argmax",
        "sample",
        "synchronization",
        "memory",
    ):
        assert any(name.startswith(kernel) for name in names)
    for fmt in FORMATS:
        assert sum(name.startswith(f"linear: {fmt},") for name in names) >= (3 if fmt in QUICK_FORMATS else 1)
        assert f"embed: {fmt}" in names
    for kv_dtype in ("f32", "f16"):
        for start in (
            f"append_kv: {kv_dtype}",
            f"attention: prefill, {kv_dtype}",
            f"attention: decode, {kv_dtype}",
        ):
            assert any(name.startswith(start) for name in names)


def test_a_kernel_that_computes_something_else_fails(runtime):
    def build(bench):
        source = bench.filled("source", np.arange(10, dtype=np.uint32))
        wrong = 3 if isinstance(bench.runtime, NumpyRuntime) else 2
        return [copy_words(source, wrong, bench.buffer("target", 8, BufferKind.RESULT), 0, 4)]

    finding = compare_with_oracles(runtime, build, EXACT, {"target": "u32"})
    assert finding.problem.startswith("target[0] is 0x2, not 0x3")


def raising(error: Exception) -> Case:
    def run(rt):
        raise error

    return Case("broken", type(error).__name__, EXACT, run)


def fine(name: str) -> Case:
    return Case("fine", name, EXACT, lambda rt: Finding(0.0))


def test_what_a_driver_refuses_is_a_failed_row_and_the_rest_goes_on(numpy_runtime):
    cases = [raising(DeviceError("no pipeline")), raising(RuntimeError("oh")), fine("after")]
    outcomes = list(run_cases(numpy_runtime, cases))
    assert [outcome.passed for outcome in outcomes] == [False, False, True]
    assert [outcome.finding.problem for outcome in outcomes] == ["no pipeline", "RuntimeError: oh", ""]


def test_after_a_lost_device_nothing_more_is_run(numpy_runtime):
    outcomes = list(run_cases(numpy_runtime, [raising(DeviceLostError("gone")), fine("after")]))
    assert [outcome.finding.problem for outcome in outcomes] == [
        "gone", "not run: the device was lost in an earlier case",
    ]  # fmt: skip


def test_the_record_is_json_even_when_nothing_was_computed(numpy_runtime):
    outcomes = list(run_cases(numpy_runtime, [raising(DeviceError("no")), fine("one")]))
    record = json.loads(json.dumps(as_record(numpy_runtime, outcomes, 1.0), allow_nan=False))
    assert record["passed"] is False
    assert [check["error"] for check in record["checks"]] == [None, 0.0]


def test_filter_chooses_by_part_of_the_name():
    assert {case.kernel for case in choose_cases("PPEND_KV", False)} == {"append_kv"}
    with pytest.raises(UsageError, match=r"'nothing'.*attention"):
        choose_cases("nothing", False)
    assert len(choose_cases(None, True)) > len(choose_cases(None, False))


def dispatched(runtime, cases, monkeypatch) -> set[str]:
    """The kernel families whose steps ``cases`` would run."""
    families = set()

    def note(bench, steps):
        families.update(step.kernel.name.partition(".")[0] for step in steps)
        return {}

    monkeypatch.setattr("xinfer_vk.selftest.case.Bench.run", note)
    for case in cases:
        if case.kernel not in ("memory", "synchronization"):
            case.run(runtime)
    return families


def test_the_default_covers_every_kernel_family_and_memory_kind_that_the_full_one_does(runtime, monkeypatch):
    quick = [case for case in all_cases() if case.quick and case.applies(runtime.profile)]
    chosen = short(quick)
    assert {c.variant for c in chosen if c.kernel == "memory"} == {
        c.variant for c in quick if c.kernel == "memory"
    }
    own = [case for case in quick if "as on a GPU" not in case.variant]
    assert dispatched(runtime, own, monkeypatch) == dispatched(runtime, chosen, monkeypatch)
    for kv_dtype in ("f32", "f16", "q8_0", "q4_0"):
        for kernel in ("append_kv", "attention"):
            assert any(case.kernel == kernel and kv_dtype in case.variant for case in chosen)
    assert len(chosen) < 0.35 * len(quick)


def test_every_name_in_the_short_list_is_a_case():
    assert {str(case) for case in all_cases()} >= NAMES
    assert {case.kernel for case in all_cases()} >= set(KERNELS)


def test_the_table_shows_the_bound_that_was_applied(numpy_runtime):
    def build(bench):
        value = 1000.01 if bench.runtime is numpy_runtime else 1000.0
        return bench.filled("x", np.array([1.0, value], np.float32)) and []

    finding = compare_with_oracles(numpy_runtime, build, Tolerance(1e-3, 1e-3, "for this test"))
    assert finding.problem == "" and 0.009 < finding.error < 0.011
    assert finding.bound == pytest.approx(1e-3 + 1.0)
    assert allowed(fine("x"), finding.bound) == "1.0e+00"


def test_command_prints_a_table_and_exits_0(device):
    result = CliRunner().invoke(command, ["--device", str(device.index), "--kernel", "append_kv"])
    assert result.exit_code == 0, result.output
    assert "append_kv" in result.stdout and "PASS" in result.stdout and "FAIL" not in result.stdout
    count = len(choose_cases("append_kv", False))
    assert f"all {count} checks passed on {device.name}" in result.stdout


def test_command_as_json(device):
    result = CliRunner().invoke(command, ["--device", str(device.index), "--kernel", "argmax", "--json"])
    record = json.loads(result.stdout)
    assert record["passed"] and record["device"] == device.name
    assert {check["kernel"] for check in record["checks"]} == {"argmax"}


def test_command_exits_1_on_a_failure(monkeypatch):
    monkeypatch.setattr(
        "xinfer_vk.selftest.all_cases", lambda: [fine("one"), raising(DeviceError("no pipeline"))]
    )
    result = CliRunner().invoke(command, ["--device", "numpy", "--full"])
    assert result.exit_code == 1
    assert (
        "FAIL" in result.stdout and "no pipeline" in result.stdout and "1 of 2 checks failed" in result.stdout
    )


def test_all_quick_cases_pass_on_the_device(runtime):
    assert isinstance(runtime, KomputeRuntime)
    cases = [
        c for c in all_cases() if c.quick and c.kernel in ("embed", "linear") and c.applies(runtime.profile)
    ]  # the others: test_kernels_*
    assert [str(o.case) + ": " + o.finding.problem for o in run_cases(runtime, cases) if not o.passed] == []

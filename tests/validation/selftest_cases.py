"""Every case of the selftest on a device: what the validation layer watches (see test_validation.py)."""

from __future__ import annotations

from xinfer_vk.selftest import all_cases, run_cases


def test_the_quick_cases_pass(runtime):
    cases = [case for case in all_cases() if case.quick and case.applies(runtime.profile)]
    failed = [f"{o.case}: {o.finding.problem}" for o in run_cases(runtime, cases) if not o.passed]
    assert not failed

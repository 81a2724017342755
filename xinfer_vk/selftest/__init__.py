"""Checks that ship with the package: every kernel on a device against its NumPy oracle.

A :class:`~xinfer_vk.selftest.case.Case` is data: a kernel, a variant, and a function that runs it and
says how far off the result was. ``xinfer-vk selftest`` runs the quick ones on the user's device; the
test suite runs all of them on every device it finds, and adds what needs another reference.
"""

from __future__ import annotations

from xinfer_vk.selftest.case import Case, Finding, Outcome, run_cases

__all__ = ["Case", "Finding", "Outcome", "all_cases", "run_cases"]


def all_cases() -> list[Case]:
    """Every case, in the order of a token's way through the model."""
    from xinfer_vk.selftest import attention, device, experts, sample, small, weights

    return [*device.CASES, *weights.CASES, *experts.CASES, *small.CASES, *attention.CASES, *sample.CASES]

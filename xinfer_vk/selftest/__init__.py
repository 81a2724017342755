"""Checks that ship with the package: every kernel on a device against its NumPy oracle.

A :class:`~xinfer_vk.selftest.case.Case` is data: a kernel, a variant, and a function that runs it and
says how far off the result was. ``xinfer-vk selftest`` runs the short list (short.py) on the user's device,
with ``--full`` all quick cases. The test suite runs all cases on every device it finds, and adds what needs
another reference.
"""

from __future__ import annotations

from xinfer_vk.selftest.case import Case, Finding, Outcome, run_cases
from xinfer_vk.selftest.short import short

__all__ = ["Case", "Finding", "Outcome", "all_cases", "run_cases", "short"]


def all_cases() -> list[Case]:
    """Every case, in the order of a token's way through the model."""
    from xinfer_vk.selftest import attention, device, experts, sample, small, weights

    return [*device.CASES, *weights.CASES, *experts.CASES, *small.CASES, *attention.CASES, *sample.CASES]

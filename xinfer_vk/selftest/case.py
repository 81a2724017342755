"""What a case is, how a kernel is compared with its oracle, and how a list of cases is run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xinfer_vk.errors import DeviceLostError, XinferError
from xinfer_vk.plan import Buffer, BufferKind, DeviceProfile, Plan, Runtime, Step
from xinfer_vk.reference import NumpyRuntime

POISON = np.uint32(0x7FC0DEAD)  # a NaN with a payload of its own: what nobody has written
HALF_NANS = np.uint32(0x7E007E00)  # the same idea for a pair of f16


@dataclass(frozen=True)
class Tolerance:
    """``|got - want| <= absolute + relative * |want|``, and why that much."""

    absolute: float
    relative: float
    reason: str


EXACT = Tolerance(0.0, 0.0, "bits are moved or compared, nothing is rounded")


@dataclass(frozen=True)
class Finding:
    """``error``: the largest absolute error. ``problem``: what is wrong, "" if nothing is. ``bound``: what
    was allowed where the largest error is; None where the case does not compare numbers one by one."""

    error: float
    problem: str = ""
    bound: float | None = None


@dataclass(frozen=True)
class Case:
    """``run`` checks the kernel on a runtime. ``quick`` cases are those of ``xinfer-vk selftest --full``.
    ``applies`` is false on devices where the case would repeat another one."""

    kernel: str
    variant: str
    tolerance: Tolerance
    run: Callable[[Runtime], Finding] = field(repr=False)
    quick: bool = True
    applies: Callable[[DeviceProfile], bool] = field(repr=False, default=lambda profile: True)

    def __str__(self) -> str:
        return f"{self.kernel}: {self.variant}"


@dataclass(frozen=True)
class Outcome:
    case: Case
    finding: Finding

    @property
    def passed(self) -> bool:
        return not self.finding.problem


def run_cases(runtime: Runtime, cases: Iterable[Case]) -> Iterator[Outcome]:
    """Run cases in turn. What a driver refuses is a failure of that case; a lost device fails the rest."""
    lost = ""
    for case in cases:
        if lost:
            yield Outcome(case, Finding(np.nan, lost))
            continue
        try:
            finding = case.run(runtime)
        except DeviceLostError as error:
            finding = Finding(np.nan, str(error))
            lost = "not run: the device was lost in an earlier case"
        except XinferError as error:
            finding = Finding(np.nan, str(error))
        except Exception as error:  # a driver may fail in ways of its own, and the table must go on
            finding = Finding(np.nan, f"{type(error).__name__}: {error}")
        yield Outcome(case, finding)


# -- a kernel against its oracle ------------------------------------------------------------------

Build = Callable[["Bench"], Sequence[Step]]


class Bench:
    """Where a case builds its buffers: on the device, and once more on the NumPy runtime.

    ``profile`` is the one the kernels are built for. Whatever the builder does not write is poison.
    """

    def __init__(self, runtime: Runtime, profile: DeviceProfile) -> None:
        self.runtime, self.profile = runtime, profile
        self._contents: dict[Buffer, np.ndarray] = {}

    def buffer(self, name: str, words: int, kind: BufferKind = BufferKind.SCRATCH) -> Buffer:
        """A buffer of poison."""
        buffer = self.runtime.allocate(name, words, kind)
        self._contents[buffer] = np.full(words, POISON)
        return buffer

    def filled(self, name: str, data: np.ndarray, kind: BufferKind = BufferKind.SCRATCH) -> Buffer:
        """A buffer that holds an array of 32-bit numbers."""
        buffer = self.buffer(name, data.size, kind)
        self.write(buffer, 0, data)
        return buffer

    def write(self, buffer: Buffer, offset: int, data: np.ndarray) -> None:
        words = np.ascontiguousarray(data).reshape(-1).view(np.uint32)
        self._contents[buffer][offset : offset + words.size] = words

    def run(self, steps: Sequence[Step]) -> dict[str, np.ndarray]:
        """Fill the buffers, run the steps once, and return every buffer's words by name."""
        for buffer, words in self._contents.items():
            self.runtime.write(buffer, 0, words)
        recorded: Any = self.runtime.prepare(Plan("selftest", tuple(steps)))
        recorded.run()
        if hasattr(recorded, "release"):
            recorded.release()
        return {b.name: self.runtime.read(b, 0, b.words) for b in self._contents}

    def close(self) -> None:
        for buffer in self._contents:
            self.runtime.free(buffer)
        self._contents.clear()


def compare_with_oracles(
    runtime: Runtime,
    build: Build,
    tolerance: Tolerance,
    views: Mapping[str, str] | None = None,
    profile: DeviceProfile | None = None,
) -> Finding:
    """Build the same steps on the device and on NumPy, run both, and compare every word of every buffer.

    ``views`` says how a buffer's words compare: "f32" (the default), "f16" (pairs), "u32" (equal) or
    "any" (not at all).
    """
    profile = profile or runtime.profile
    reference = NumpyRuntime(profile)
    results = []
    for side in (Bench(reference, profile), Bench(runtime, profile)):
        try:
            results.append(side.run(build(side)))
        finally:
            side.close()
    want, got = results
    worst, bound = 0.0, None
    for name in want:
        view = (views or {}).get(name, "f32")
        if view == "any":
            continue
        error, problem = compare(got[name], want[name], view, tolerance)
        if view != "u32" and (error > worst or bound is None):
            bound = bound_applied(got[name], want[name], view, tolerance)
        worst = max(worst, error)
        if problem:
            return Finding(worst, f"{name}{problem}", bound)
    return Finding(worst, bound=bound)


def bound_applied(got: np.ndarray, want: np.ndarray, view: str, tolerance: Tolerance) -> float:
    """The error that :func:`compare` allows at the word that is furthest off."""
    dtype = np.float16 if view == "f16" else np.float32
    with np.errstate(invalid="ignore"):
        a, b = got.view(dtype).astype(np.float64), want.view(dtype).astype(np.float64)
        error = np.where(np.isfinite(a) & np.isfinite(b), np.abs(a - b), 0.0)
    return tolerance.absolute + tolerance.relative * float(abs(b[error.argmax()])) if error.any() else 0.0


def compare(got: np.ndarray, want: np.ndarray, view: str, tolerance: Tolerance) -> tuple[float, str]:
    """(largest absolute error, problem or "") of two arrays of words.

    Poison on one side only is a word that was not written, or should not have been. NaN must be NaN on
    both sides, and an infinity the same one.
    """
    wrong = np.flatnonzero((got != want) & ((got == POISON) | (want == POISON)))
    if wrong.size:
        i = int(wrong[0])
        what = "was not written" if got[i] == POISON else "must not be written"
        return np.inf, f"[{i}] {what} ({wrong.size} such words)"
    if view == "u32":
        wrong = np.flatnonzero(got != want)
        text = f"[{wrong[0]}] is {got[wrong[0]]:#x}, not {want[wrong[0]]:#x}" if wrong.size else ""
        return (np.inf, f"{text} ({wrong.size} words differ)") if text else (0.0, "")
    dtype = np.float16 if view == "f16" else np.float32
    with np.errstate(invalid="ignore"):  # NaNs that signal
        a, b = got.view(dtype).astype(np.float64), want.view(dtype).astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(a - b))
        bad = ~same & (~(error <= tolerance.absolute + tolerance.relative * np.abs(b)) | np.isinf(b))
    error[np.isnan(error)] = np.inf
    worst = float(error.max(initial=0.0))
    wrong = np.flatnonzero(bad)
    if not wrong.size:
        return worst, ""
    i = int(wrong[0])
    return worst, f"[{i}] is {a[i]:.9g}, not {b[i]:.9g} ({wrong.size} of {a.size} are off)"


# -- kinds of device -----------------------------------------------------------------------------------

# A kernel has geometries for CPU devices and for GPUs, and variants that need subgroup operations. On
# any device the others are correct too: tests run them all, a user's selftest only what the device uses.
DEVICE_CLASSES: Mapping[str, Callable[[DeviceProfile], DeviceProfile]] = {
    "": lambda p: p,
    "without subgroup operations": lambda p: dataclasses.replace(
        p, features=frozenset(f for f in p.features if not f.startswith("subgroup_"))
    ),
    "as on a GPU": lambda p: dataclasses.replace(p, simd=False),
    "as on a CPU device": lambda p: dataclasses.replace(p, simd=True),
}
OWN_AND_GPU = ("", "as on a GPU")


def kernel_cases(
    kernel: str,
    variant: str,
    build: Build,
    tolerance: Tolerance,
    *,
    views: Mapping[str, str] | None = None,
    classes: Sequence[str] = ("",),
    quick: bool = True,
    applies: Callable[[DeviceProfile], bool] = lambda profile: True,
) -> list[Case]:
    """A case for each device class named; only the device's own class can be quick. ``applies`` limits
    the others further."""

    def make(name: str) -> Case:
        adapt = DEVICE_CLASSES[name]
        return Case(
            kernel=kernel,
            variant=f"{variant}, {name}" if name else variant,
            tolerance=tolerance,
            run=lambda rt: compare_with_oracles(rt, build, tolerance, views, adapt(rt.profile)),
            quick=quick and not name,
            applies=lambda profile: not name or (adapt(profile) != profile and applies(profile)),
        )

    return [make(name) for name in classes]

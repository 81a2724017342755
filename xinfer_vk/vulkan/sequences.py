"""Recorded plans: Kompute sequences that are recorded once and replayed.

With the layer one sequence holds many steps, and the layer puts the barriers in. Without it Kompute
has no barrier between dispatches, so only steps that are independent of each other share a sequence,
and the fence at the end of each submit is what orders them: slow and right.

Drivers give up on a submit that takes seconds (Windows after two, amdgpu after ten), and nobody knows
beforehand how long a plan takes on the device at hand. So a plan is first recorded in short pieces, whose
times say how it is recorded for good: in as few submits as take :data:`SUBMIT_S` at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xinfer_vk.errors import DeviceError, UsageError
from xinfer_vk.plan import Buffer, Plan, Step
from xinfer_vk.vulkan.devices import DeviceInfo
from xinfer_vk.vulkan.guard import Guard, in_turn, never_let_go
from xinfer_vk.vulkan.kompute import kompute
from xinfer_vk.vulkan.layer import DeviceLayer
from xinfer_vk.vulkan.programs import Programs

SUBMIT_S = 0.2  # a submit should take no longer
PROBE_STEPS = 8  # of a submit in a plan's first run: about a layer

Range = tuple[int, int]  # steps, from and up to


@dataclass
class RunCounts:
    """What the plans of a runtime have run so far."""

    runs: int = 0
    dispatches: int = 0
    submits: int = 0


class Recorder:
    """Turns steps into sequences on one device. ``steps_per_submit``: the steps of a sequence at most; None:
    as many as time allows, where plans can be cut anywhere."""

    def __init__(
        self,
        manager: Any,
        programs: Programs,
        layer: DeviceLayer | None,
        guard: Guard,
        steps_per_submit: int | None,
    ) -> None:
        self._manager, self._programs, self._layer, self._guard = manager, programs, layer, guard
        self._steps_per_submit = steps_per_submit

    @property
    def adapts(self) -> bool:
        """Whether plans are cut by time."""
        return self._steps_per_submit is None and self._layer is not None

    def ranges(self, steps: Sequence[Step]) -> list[Range]:
        """How a plan that has not been run is cut into submits."""
        limit = self._steps_per_submit or (PROBE_STEPS if self.adapts else len(steps))
        cuts, start = [], 0
        for i in range(1, len(steps) + 1):
            ends = i == len(steps) or i - start >= limit
            if ends or (self._layer is None and not steps[i].independent):
                cuts.append((start, i))
                start = i
        return cuts

    def record(
        self, steps: Sequence[Step], ranges: Sequence[Range], doing: str, timed: bool = False
    ) -> tuple[list[Any], list[tuple[int, int]]]:
        """The sequences of those ranges, ready to evaluate; with ``timed`` also the layer's number and the
        dispatches of each recording."""
        sequences: list[Any] = []
        recordings: list[tuple[int, int]] = []
        for start, stop in ranges:
            part = steps[start:stop]
            algorithms = [self._programs.algorithm(step) for step in part]
            with self._guard(doing):
                sequence = self._manager.sequence()
            with self._guard(doing):
                self._fill(sequence, part, algorithms, timed)
            sequences.append(sequence)
            if timed and self._layer is not None:
                recordings.append((self._layer.newest_recording(), len(part)))
        return sequences, recordings

    def compile(self, step: Step) -> None:
        """Make a step's pipeline ready. Drivers may compile at the first dispatch instead of at creation
        (lavapipe does), so the layer dispatches it once, with no workgroups: nothing is read or written."""
        algorithm = self._programs.algorithm(step)
        if self._layer is None:
            return
        doing = f"compiling {step.kernel.name}"
        with self._guard(doing):
            sequence = self._manager.sequence()
        try:
            with self._guard(doing):
                self._layer.next_groups((1, 0, 1))
                sequence.record(kompute().OpAlgoDispatch(algorithm, self._programs.push(step)))
            self._guard.call(sequence.eval, doing)
        finally:
            sequence.destroy()

    def evaluate(
        self, sequences: Sequence[Any], doing: str, stopped: Callable[[], bool] | None = None
    ) -> list[float]:
        """Run sequences one after the other, each to its end, until ``stopped`` says so. Seconds of each that
        was run."""
        seconds: list[float] = []
        for sequence in sequences:
            if stopped is not None and seconds and stopped():
                break
            seconds.append(self._guard.call(sequence.eval, doing))
        return seconds

    def begin(self, sequence: Any, doing: str) -> None:
        """Submit a sequence and do not wait; :meth:`end` must follow, unless this raises."""

        def submit() -> None:
            sequence.eval_async()
            if self._layer is not None and self._layer.has_failed:
                sequence.eval_await()  # kp destroys the fence there; the layer lets nobody wait for a failure

        self._guard.call(submit, doing)

    def end(self, sequence: Any, doing: str) -> None:
        """Wait for a sequence that was begun."""
        self._guard.call(sequence.eval_await, doing)

    def _fill(self, sequence: Any, steps: Sequence[Step], algorithms: Sequence[Any], timed: bool) -> None:
        """kp begins the command buffer at the first record and ends it at the first eval. A sequence is
        never recorded again: kp's command pools do not allow it."""
        dispatch, layer = kompute().OpAlgoDispatch, self._layer
        if layer is not None and timed:
            layer.time_next_recording(len(steps))
        for i, (step, algorithm) in enumerate(zip(steps, algorithms)):
            if layer is not None:
                layer.next_groups(step.groups)
                if step.independent and i:
                    layer.next_is_independent()
            sequence.record(dispatch(algorithm, self._programs.push(step)))


def recut(ranges: Sequence[Range], seconds: Sequence[float]) -> list[Range]:
    """Ranges of steps that took so long, cut so that each takes :data:`SUBMIT_S` at most (one that was
    measured whole, half as much again), in as few as neighbours can be joined to. The steps of a range are
    taken to be alike; a single step is a range however long it takes."""
    pieces: list[tuple[int, int, float]] = []
    for (start, stop), took in zip(ranges, seconds):
        each, size = took / (stop - start), stop - start
        if took > 1.5 * SUBMIT_S:
            size = max(1, int(SUBMIT_S / each))
        for a in range(start, stop, size):
            b = min(a + size, stop)
            pieces.append((a, b, each * (b - a)))
    joined: list[tuple[int, int, float]] = []
    for start, stop, took in pieces:
        if joined and joined[-1][2] + took <= SUBMIT_S:
            joined[-1] = (joined[-1][0], stop, joined[-1][2] + took)
        else:
            joined.append((start, stop, took))
    return [(start, stop) for start, stop, _ in joined]


class RecordedPlan:
    """A plan made ready on a device. It keeps what it needs alive; :meth:`release` (or dropping it) gives
    its command buffers back, and so does freeing one of its buffers."""

    def __init__(
        self,
        plan: Plan,
        steps: Sequence[Step],
        recorder: Recorder,
        guard: Guard,
        layer: DeviceLayer | None,
        info: DeviceInfo,
        counts: RunCounts,
        timed: bool,
    ) -> None:
        self.name, self.dispatches = plan.name, len(steps)
        self.turns = guard.turns
        self.buffers: frozenset[Buffer] = frozenset(b for step in steps for b in step.buffers)
        self._doing = f"running plan {plan.name!r}"
        self._extra = len(steps) - len(plan.steps)  # copies of state that the runtime put in front
        self._recorder, self._guard, self._layer, self._info, self._counts = (
            recorder,
            guard,
            layer,
            info,
            counts,
        )
        self._released = ""
        self._steps, self._timed = steps, timed
        self._sequences: list[Any] = []
        self._seconds: list[list[float]] = []  # of each range, in its last two runs
        self.seconds = 0.0  # of the last run: the submits and the waiting for their ends
        self._probing = recorder.adapts  # until it was run once
        self._failed = False
        self._record(recorder.ranges(steps))

    @in_turn
    def run(self, stopped: Callable[[], bool] | None = None) -> bool:
        """Run every step and wait, while other Python threads run. Between two submits ``stopped`` may say
        that the others are not wanted any more; returns whether all were run.

        Raises :class:`DeviceLostError` when the driver gave up, :class:`OutOfMemoryError` when it could
        not submit (the plan can run again), :class:`UsageError` when the plan was released.
        """
        if self._released:
            raise UsageError(f"plan {self.name!r} cannot run: {self._released}")
        if self._failed:
            self._record(self._ranges)
        elif self._recorder.adapts:
            self._adapt()  # now, not after the last run: its timestamps may have been wanted
        self._failed = True  # unless it ends well: kp takes a sequence that failed halfway for a running one
        took = self._recorder.evaluate(self._sequences, self._doing, stopped)
        self._failed = False
        self.seconds = sum(took)
        counts = self._counts
        counts.submits += len(took)
        if len(took) < len(self._sequences):
            counts.dispatches += sum(stop - start for start, stop in self._ranges[: len(took)])
            return False
        self._seconds = [*self._seconds[-1:], took]
        counts.runs += 1
        counts.dispatches += self.dispatches
        return True

    @property
    def longest_step_s(self) -> float:
        """Of the last run, where it was measured: steps that have a submit of their own. Nothing of a first
        run, which may compile."""
        if self._probing:
            return 0.0
        spans = zip(self._ranges, self._seconds[-1] if self._seconds else ())
        return max((took for (start, stop), took in spans if stop - start == 1), default=0.0)

    def _adapt(self) -> None:
        """Record the plan again if its last two runs say that it should be cut in another way; the first one
        alone may. Of the two the shorter times count: the machine may have been busy with something else."""
        if len(self._seconds) < (1 if self._probing else 2):
            return
        if len(self._ranges) == 1 and self._seconds[-1][0] <= SUBMIT_S:  # nearly always
            self._probing = False
            return
        seconds = [min(each) for each in zip(*self._seconds)]
        ranges = recut(self._ranges, seconds)
        if len(ranges) > len(self._ranges) or 2 * len(ranges) <= len(self._ranges):
            self._record(ranges)
        self._probing = False

    def _record(self, ranges: list[Range]) -> None:
        doing, before = f"recording plan {self.name!r}", self._sequences
        self._sequences, self._recordings = self._recorder.record(self._steps, ranges, doing, self._timed)
        self._ranges = ranges
        self._seconds = []
        for sequence in before:
            sequence.destroy()

    @in_turn
    def times_ns(self) -> np.ndarray:
        """How long each step of the plan took on the device in the last run, ``float64 [steps]``, in
        nanoseconds, the barrier before it included. Steps marked independent overlap: what is given for
        one is the time from the end of the step before it to its own end.

        Raises :class:`UsageError` unless the plan was prepared with ``timed=True``.
        """
        if not self._recordings or self._layer is None:
            raise UsageError(f"plan {self.name!r} was not prepared with timed=True")
        mask = np.uint64((1 << self._info.timestamp_bits) - 1)
        spans: list[np.ndarray] = []
        for recording, dispatches in self._recordings:
            ticks = self._layer.timestamps(recording, dispatches)
            self._guard.check(f"reading the times of plan {self.name!r}")
            if ticks.size != dispatches + 1:
                raise DeviceError(
                    f"{self._info.name} gave {ticks.size} timestamps for {dispatches} dispatches"
                )
            spans.append((np.diff(ticks) & mask).astype(np.float64) * self._info.timestamp_period_ns)
        return np.concatenate(spans)[self._extra :]

    def keep_for_good(self) -> None:
        """In a fork: see that no destructor calls the driver."""
        never_let_go(self._sequences)

    @in_turn
    def release(self, reason: str = "it was released") -> None:
        """Destroy the command buffers; harmless when done before."""
        if not self._released:
            self._released = reason
            if self._guard.process.is_another:
                return  # the sequences are the other process's
            for sequence in self._sequences:
                sequence.destroy()
            self._sequences = []

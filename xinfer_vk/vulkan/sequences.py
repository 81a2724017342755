"""Recorded plans: Kompute sequences that are recorded once and replayed.

With the layer one sequence holds many steps, and the layer puts the barriers in. Without it Kompute
has no barrier between dispatches, so only steps that are independent of each other share a sequence,
and the fence at the end of each submit is what orders them: slow and right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xinfer_vk.errors import DeviceError, UsageError
from xinfer_vk.plan import Buffer, Plan, Step
from xinfer_vk.vulkan.devices import DeviceInfo
from xinfer_vk.vulkan.guard import Guard
from xinfer_vk.vulkan.kompute import kompute
from xinfer_vk.vulkan.layer import DeviceLayer
from xinfer_vk.vulkan.programs import Programs


@dataclass
class RunCounts:
    """What the plans of a runtime have run so far."""

    runs: int = 0
    dispatches: int = 0
    submits: int = 0


class Recorder:
    """Turns steps into sequences on one device. ``steps_per_submit`` limits the steps of a sequence."""

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

    def record(
        self, steps: Sequence[Step], doing: str, timed: bool = False
    ) -> tuple[list[Any], list[tuple[int, int]]]:
        """The sequences of some steps, ready to evaluate; with ``timed`` also the layer's number and the
        dispatches of each recording."""
        sequences: list[Any] = []
        recordings: list[tuple[int, int]] = []
        for part in self._parts(steps):
            algorithms = [self._programs.algorithm(step) for step in part]
            with self._guard(doing):
                sequence = self._manager.sequence()
            with self._guard(doing):
                self._fill(sequence, part, algorithms, timed)
            sequences.append(sequence)
            if timed and self._layer is not None:
                recordings.append((self._layer.newest_recording(), len(part)))
        return sequences, recordings

    def evaluate(self, sequences: Sequence[Any], doing: str) -> None:
        """Run sequences one after the other, each to its end."""
        for sequence in sequences:
            with self._guard(doing):
                sequence.eval()

    def _fill(self, sequence: Any, steps: Sequence[Step], algorithms: Sequence[Any], timed: bool) -> None:
        """kp begins the command buffer at the first record and ends it at the first eval. A sequence is
        never recorded again: kp's command pools do not allow it."""
        dispatch, layer = kompute().OpAlgoDispatch, self._layer
        if layer is not None and timed:
            layer.time_next_recording(len(steps))
        for i, (step, algorithm) in enumerate(zip(steps, algorithms)):
            if layer is not None and step.independent and i:
                layer.next_is_independent()
            sequence.record(dispatch(algorithm, np.ascontiguousarray(step.push, np.uint32)))

    def _parts(self, steps: Sequence[Step]) -> Iterator[Sequence[Step]]:
        limit = self._steps_per_submit or len(steps)
        start = 0
        for i in range(1, len(steps) + 1):
            ends = i == len(steps) or i - start >= limit
            if ends or (self._layer is None and not steps[i].independent):
                yield steps[start:i]
                start = i


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
        self._sequences, self._recordings = recorder.record(steps, f"recording plan {plan.name!r}", timed)

    def run(self) -> None:
        """Run every step and wait. kp holds the GIL meanwhile.

        Raises :class:`DeviceLostError` when the driver gave up, :class:`OutOfMemoryError` when it could
        not submit, :class:`UsageError` when the plan was released.
        """
        if self._released:
            raise UsageError(f"plan {self.name!r} cannot run: {self._released}")
        self._recorder.evaluate(self._sequences, self._doing)
        counts = self._counts
        counts.runs += 1
        counts.dispatches += self.dispatches
        counts.submits += len(self._sequences)

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

    def release(self, reason: str = "it was released") -> None:
        """Destroy the command buffers; harmless when done before."""
        if not self._released:
            self._released = reason
            for sequence in self._sequences:
                sequence.destroy()
            self._sequences = []

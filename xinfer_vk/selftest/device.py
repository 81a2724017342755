"""Cases of the runtime rather than of a kernel: memory of every kind, and the order of dependent steps."""

from __future__ import annotations

import numpy as np

from xinfer_vk.kernels.copy_words import copy_words
from xinfer_vk.plan import BufferKind, Plan, Runtime, Step
from xinfer_vk.selftest.case import EXACT, Case, Finding

CHAIN_STEPS = 300
CHAIN_WORDS = 1 << 15
CHAIN_SHIFTS = (97, 4099, 211, 12345)  # a few, so that a few pipelines serve all steps
MEMORY_WORDS = (1 << 20) + 3  # more than a staging buffer may hold


def _memory(kind: BufferKind) -> Case:
    """New memory is zero (a KV cache may hold anything), and the host reads back what it writes in pieces."""
    cleared = kind is not BufferKind.KV

    def run(runtime: Runtime) -> Finding:
        words = np.random.default_rng(0).integers(0, 1 << 32, MEMORY_WORDS, np.uint32)
        want = np.zeros(MEMORY_WORDS, np.uint32)
        buffer = runtime.allocate("memory", MEMORY_WORDS, kind)
        try:
            if not cleared:
                runtime.write(buffer, 0, want)
            if runtime.read(buffer, 0, MEMORY_WORDS).any():
                return Finding(np.inf, "new memory is not zero")
            for start, count in ((0, 1), (5, 1000), (65535, 3), (100_001, 800_000), (MEMORY_WORDS - 7, 7)):
                runtime.write(buffer, start, words[start : start + count])
                want[start : start + count] = words[start : start + count]
            wrong = np.flatnonzero(runtime.read(buffer, 0, MEMORY_WORDS) != want)
            if wrong.size:
                return Finding(np.inf, f"word {wrong[0]} is not what was written ({wrong.size} differ)")
            if not np.array_equal(runtime.read(buffer, 99_999, 77), want[99_999 : 99_999 + 77]):
                return Finding(np.inf, "a read in the middle gives other words than one of the whole")
            return Finding(0.0)
        finally:
            runtime.free(buffer)

    new = "zero when new, " if cleared else ""
    return Case("memory", f"{kind.value}: {new}written and read in pieces", EXACT, run)


def _chain(in_place: bool) -> Case:
    """Every step rotates the whole of what the step before it wrote: one pair of workgroups out of order,
    anywhere, leaves words in the wrong place."""

    def run(runtime: Runtime) -> Finding:
        data = np.random.default_rng(1).integers(0, 1 << 32, CHAIN_WORDS, np.uint32)
        first = runtime.allocate("first", 2 * CHAIN_WORDS, BufferKind.SCRATCH)
        second = first if in_place else runtime.allocate("second", CHAIN_WORDS, BufferKind.SCRATCH)
        places = [(first, 0), (second, CHAIN_WORDS if in_place else 0)]
        try:
            runtime.write(first, 0, data)
            steps: list[Step] = []
            for i in range(CHAIN_STEPS):
                (source, a), (target, b) = places[i % 2], places[(i + 1) % 2]
                shift = CHAIN_SHIFTS[i % len(CHAIN_SHIFTS)]
                steps.append(copy_words(source, a + shift, target, b, CHAIN_WORDS - shift))
                steps.append(copy_words(source, a, target, b + CHAIN_WORDS - shift, shift))
                data = np.roll(data, -shift)
            recorded = runtime.prepare(Plan("synchronization", tuple(steps)))
            for repeat in range(3):  # the first run is in short submits, the next ones are in one
                if repeat:
                    runtime.write(first, 0, data)
                    data = np.roll(data, -sum(CHAIN_SHIFTS) * CHAIN_STEPS // len(CHAIN_SHIFTS))
                recorded.run()
                buffer, at = places[CHAIN_STEPS % 2]
                wrong = np.flatnonzero(runtime.read(buffer, at, CHAIN_WORDS) != data)
                if wrong.size:
                    return Finding(
                        np.inf,
                        f"after {len(steps)} dependent dispatches word {wrong[0]} is wrong "
                        f"({wrong.size} of {CHAIN_WORDS}): the device runs them out of order",
                    )
            return Finding(0.0)
        finally:
            runtime.free(first)
            if not in_place:
                runtime.free(second)

    where = "within one buffer" if in_place else "between two buffers"
    return Case("synchronization", f"{2 * CHAIN_STEPS} dependent dispatches {where}", EXACT, run)


CASES = [*(_memory(kind) for kind in BufferKind), _chain(False), _chain(True)]

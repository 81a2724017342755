"""Moving words to and from memory that the host cannot reach: through a small mapped buffer, by shader.

kp's ``storage`` tensors have no transfer usage, so Vulkan's own copies are not allowed on them.
An upload takes the two halves of that buffer in turn: the host fills one while the device empties the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xinfer_vk.errors import DeviceError
from xinfer_vk.kernels.copy_words import copy_words, fill_words
from xinfer_vk.plan import Buffer, BufferKind, Step
from xinfer_vk.vulkan.memory import DeviceMemory
from xinfer_vk.vulkan.sequences import Recorder

STAGING_WORDS = 2 << 20  # 8 MiB: large enough that a submit costs little beside it
# A dispatch's group count is fixed in its pipeline; with two counts there are at most two pipelines for
# each buffer and direction, whatever the sizes.
SMALL_GROUPS, LARGE_GROUPS = 16, 4096  # of 256 invocations


class Transfers:
    """Copies between the host and the device-only buffers of one runtime."""

    def __init__(self, memory: DeviceMemory, recorder: Recorder, staging_words: int = STAGING_WORDS) -> None:
        self._memory, self._recorder, self._words = memory, recorder, staging_words
        self._staging: Buffer | None = None
        self._half = 0  # to be filled next
        self._running: dict[int, tuple[Any, str]] = {}  # what empties a half, and what it is doing

    def upload(self, target: Buffer, offset: int, words: np.ndarray) -> None:
        """The words are taken when it returns; they are in ``target`` after :meth:`finish`."""
        staging, view = self._staging_buffer()
        size = self._words // 2
        for start in range(0, words.size, size):
            part = words[start : start + size]
            half, self._half = self._half, 1 - self._half
            self._finish(half)
            view[half * size : half * size + part.size] = part
            step = copy_words(staging, half * size, target, offset + start, part.size, _groups(part.size))
            doing = f"uploading to buffer {target.name!r}"
            (sequence,), _ = self._recorder.record([step], [(0, 1)], doing)
            self._recorder.begin(sequence, doing)
            self._running[half] = sequence, doing

    def finish(self) -> None:
        """Wait for the uploads that are still running: for all of them, also where one fails."""
        failure: DeviceError | None = None
        for half in tuple(self._running):
            try:
                self._finish(half)
            except DeviceError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def close(self) -> None:
        """End what is still running, whatever became of it; the device is about to go."""
        while self._running:
            _, (sequence, _) = self._running.popitem()
            sequence.eval_await()

    def download(self, source: Buffer, offset: int, count: int) -> np.ndarray:
        staging, view = self._staging_buffer()
        words = np.empty(count, np.uint32)
        for start in range(0, count, self._words):
            part = words[start : start + self._words]
            step = copy_words(source, offset + start, staging, 0, part.size, _groups(part.size))
            self._run(step, f"reading buffer {source.name!r}")
            part[:] = view[: part.size]
        return words

    def clear(self, target: Buffer) -> None:
        step = fill_words(target, 0, target.words, 0, _groups(target.words))
        self._run(step, f"clearing buffer {target.name!r}")

    def _staging_buffer(self) -> tuple[Buffer, np.ndarray]:
        if self._staging is None:
            self._staging = self._memory.allocate("staging", self._words, BufferKind.RESULT)
        view = self._memory.view(self._staging)
        assert view is not None, "RESULT buffers are mapped"
        return self._staging, view

    def _finish(self, half: int) -> None:
        if half in self._running:
            self._recorder.end(*self._running.pop(half))

    def _run(self, step: Step, doing: str) -> None:
        sequences, _ = self._recorder.record([step], [(0, 1)], doing)
        self._recorder.evaluate(sequences, doing)


def _groups(count: int) -> int:
    return SMALL_GROUPS if count <= SMALL_GROUPS * 256 * 4 else LARGE_GROUPS

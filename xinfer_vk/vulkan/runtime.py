"""The Kompute runtime: buffers, recorded plans and their execution on one Vulkan device."""

from __future__ import annotations

import json
from pathlib import Path

import kp
import numpy as np

from xinfer_vk.kernels.copy_words import copy_words
from xinfer_vk.plan import Buffer, BufferKind, DeviceProfile, Plan, Step

SPIRV = Path(__file__).resolve().parent.parent / "spirv"


class KomputeRuntime:
    def __init__(self, index: int) -> None:
        self._manager = kp.Manager(index)
        props = self._manager.get_device_properties()
        name = props["device_name"]
        simd = "llvmpipe" in name or "SwiftShader" in name
        self.profile = DeviceProfile(
            name=name, simd=simd,
            subgroup_size=8 if "llvmpipe" in name else 4,
            max_workgroup_invocations=256, max_shared_bytes=32 << 10,
            max_storage_range_bytes=128 << 20, unified_memory=True)
        self._tensors: dict[Buffer, kp.Tensor] = {}
        self._algorithms: dict[tuple, kp.Algorithm] = {}
        self._manifest = json.loads((SPIRV / "manifest.json").read_text())

    def allocate(self, name: str, words: int, kind: BufferKind) -> Buffer:
        buffer = Buffer(name, words, kind)
        self._tensors[buffer] = self._manager.tensor_t(np.zeros(words, np.uint32), kp.TensorTypes.host)
        return buffer

    def free(self, buffer: Buffer) -> None:
        self._tensors.pop(buffer).destroy()

    def write(self, buffer: Buffer, offset: int, words: np.ndarray) -> None:
        self._tensors[buffer].data()[offset : offset + words.size] = words.reshape(-1).view(np.uint32)

    def read(self, buffer: Buffer, offset: int, count: int) -> np.ndarray:
        return self._tensors[buffer].data()[offset : offset + count].copy()

    def _algorithm(self, step: Step) -> kp.Algorithm:
        kernel = step.kernel
        key = (kernel.shader, kernel.spec, step.buffers, step.groups, len(kernel.params))
        if key not in self._algorithms:
            spirv = (SPIRV / self._manifest[kernel.shader]["file"]).read_bytes()
            self._algorithms[key] = self._manager.algorithm(
                [self._tensors[b] for b in step.buffers], spirv, step.groups,
                np.array([v for _, v in kernel.spec], np.uint32), step.push.astype(np.uint32))
        return self._algorithms[key]

    def prepare(self, plan: Plan) -> "RecordedSequence":
        sequence = self._manager.sequence()
        for step in plan.steps:
            sequence.record(kp.OpAlgoDispatch(self._algorithm(step), step.push))
        return RecordedSequence(sequence)

    def close(self) -> None:
        self._algorithms.clear(); self._tensors.clear(); self._manager.destroy()


class RecordedSequence:
    def __init__(self, sequence: kp.Sequence) -> None:
        self._sequence = sequence

    def run(self) -> None:
        self._sequence.eval()

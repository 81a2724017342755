"""Shaders as Kompute algorithms: one for each (shader, constants, buffers), shared by all steps.

A Kompute Algorithm owns a pipeline and a descriptor set, and costs milliseconds to make (and megabytes, on
lavapipe); each dispatch sets its own push constants. So steps that differ only in push constants share
one. It also fixes its group counts, which the companion layer puts right as a dispatch is recorded
(:meth:`DeviceLayer.next_groups`); without the layer there is one for each of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from xinfer_vk.errors import DeviceError
from xinfer_vk.limits import COMPILE_BYTES, require_memory
from xinfer_vk.plan import Buffer, Kernel, Step
from xinfer_vk.vulkan.guard import Guard
from xinfer_vk.vulkan.layer import DeviceLayer
from xinfer_vk.vulkan.memory import DeviceMemory

SPIRV = Path(__file__).resolve().parent.parent / "spirv"
REMEDY = "run `python build_shaders.py` in the source directory, or install the package again"

_Key = tuple[str, tuple[tuple[str, int], ...], tuple[Buffer, ...], tuple[int, ...], int]


class ShaderLibrary:
    """The compiled shaders of the package, read when they are wanted."""

    def __init__(self, folder: Path = SPIRV) -> None:
        self._folder = folder
        self._manifest: dict[str, dict[str, Any]] = {}
        self._code: dict[str, bytes] = {}

    def code(self, kernel: Kernel) -> bytes:
        """SPIR-V of a kernel's shader. Raises :class:`DeviceError` when it was not built, when its file is
        damaged, or when bindings, push constants or specialization constants are not the kernel's."""
        name = kernel.shader
        if name not in self._code:
            if name not in self._manifest:
                self._manifest = self._read_manifest()
            if name not in self._manifest:
                raise DeviceError(f"shader {name!r} was not compiled: {REMEDY}")
            self._code[name] = self._read(self._manifest[name])
        self._check(kernel, self._manifest[name])
        return self._code[name]

    def _read(self, shader: dict[str, Any]) -> bytes:
        """A shader's file, which must be the one that was compiled: drivers may crash on any other."""
        file = self._folder / str(shader.get("file"))
        try:
            code = file.read_bytes()
        except OSError as error:
            raise DeviceError(f"cannot read {file}: {error.strerror}; {REMEDY}") from error
        if len(code) != shader.get("bytes"):
            raise DeviceError(
                f"{file} is damaged: it has {len(code)} bytes, not {shader.get('bytes')}; {REMEDY}"
            )
        if hashlib.sha256(code).hexdigest() != shader.get("sha256"):
            raise DeviceError(f"{file} is damaged: it is not what was compiled (SHA-256); {REMEDY}")
        return code

    def _read_manifest(self) -> dict[str, dict[str, Any]]:
        path = self._folder / "manifest.json"
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise DeviceError(f"the shaders are not compiled ({path} is missing): {REMEDY}") from error
        except (OSError, ValueError) as error:
            raise DeviceError(f"cannot read {path}: {error}; {REMEDY}") from error
        if not isinstance(manifest, dict) or not all(isinstance(e, dict) for e in manifest.values()):
            raise DeviceError(f"{path} is damaged: it is no list of shaders; {REMEDY}")
        return manifest

    @staticmethod
    def _check(kernel: Kernel, shader: dict[str, Any]) -> None:
        """What the compiler wrote down about the shader (build_shaders.py) must be what Python will bind."""
        if "push" not in shader:
            return
        ours: dict[str, list[Any]] = {
            "bindings": list(kernel.bindings),
            "push": [p.split(":")[0] for p in kernel.params],
            "spec": [len(kernel.spec)],
        }
        theirs = {
            "bindings": [b.split(":")[0] for b in shader["bindings"]],
            "push": [p.split(":")[0] for p in shader["push"]],
            "spec": [len(shader["spec"])],
        }
        # Names of bindings are the author's choice in each language; their number is not.
        ours["bindings"], theirs["bindings"] = [len(ours["bindings"])], [len(theirs["bindings"])]
        for what, value in ours.items():
            if value != theirs[what]:
                raise DeviceError(
                    f"kernel {kernel.name} and shader {kernel.shader} disagree about {what}: "
                    f"{value} and {theirs[what]}; {REMEDY}"
                )


def _bound(step: Step) -> tuple[Buffer, ...]:
    """The buffers that a step is bound to. What a kernel finds by its address is not bound: in its
    place stands another, so that one pipeline (5 MB and tens of milliseconds on lavapipe) serves the matrices
    of all buffers."""
    by_address = {binding for _, binding in step.kernel.addresses}
    named = list(zip(step.kernel.bindings, step.buffers))
    other = next((buffer for name, buffer in named if name not in by_address), None)
    return tuple(other if other and name in by_address else buffer for name, buffer in named)


class Programs:
    """The algorithms of one Kompute manager."""

    def __init__(
        self, manager: Any, memory: DeviceMemory, guard: Guard, layer: DeviceLayer | None = None
    ) -> None:
        self._manager, self._memory, self._guard, self._layer = manager, memory, guard, layer
        self._shaders = ShaderLibrary()
        self._algorithms: dict[_Key, Any] = {}
        self.made = 0  # pipelines so far

    def _key(self, step: Step) -> _Key:
        kernel, groups = step.kernel, step.groups if self._layer is None else ()
        return kernel.shader, kernel.spec, _bound(step), groups, len(kernel.params)

    def missing(self, steps: Iterable[Step]) -> list[Step]:
        """One step for each algorithm that does not exist yet."""
        wanted = {self._key(step): step for step in steps}
        return [step for key, step in wanted.items() if key not in self._algorithms]

    def algorithm(self, step: Step) -> Any:
        """The algorithm of a step, made if it is new. kp takes constants right only as ``uint32`` arrays,
        both kinds, and gives the pipeline a push-constant range only if it is given some values."""
        key = self._key(step)
        algorithm = self._algorithms.get(key)
        if algorithm is None:
            kernel = step.kernel
            require_memory(COMPILE_BYTES, f"compiling {kernel.name}")
            code = self._shaders.code(kernel)
            spec = np.array([value for _, value in kernel.spec], np.uint32)
            tensors = [self._memory.bound_tensor(buffer) for buffer in _bound(step)]
            with self._guard(f"compiling {kernel.name}"):
                if self._layer is not None:
                    self._layer.next_subgroups_full(kernel.full_subgroups)
                algorithm = self._manager.algorithm(
                    tensors, code, step.groups, spec, np.zeros(len(kernel.params), np.uint32)
                )
            self._algorithms[key] = algorithm
            self.made += 1
        return algorithm

    def push(self, step: Step) -> np.ndarray:
        """A step's push constants, with the addresses of its buffers where the kernel wants them."""
        kernel, words = step.kernel, np.array(step.push, np.uint32)
        fields = [p.split(":")[0] for p in kernel.params] if kernel.addresses else []
        for field, binding in kernel.addresses:
            address = self._memory.address(step.buffers[kernel.bindings.index(binding)])
            at = fields.index(field)
            words[at : at + 2] = address & 0xFFFFFFFF, address >> 32
        return words

    def forget(self, buffer: Buffer) -> None:
        """Destroy every algorithm that is bound to a buffer."""
        for key in [key for key in self._algorithms if buffer in key[2]]:
            self._algorithms.pop(key).destroy()

    def close(self) -> None:
        for algorithm in self._algorithms.values():
            algorithm.destroy()
        self._algorithms.clear()

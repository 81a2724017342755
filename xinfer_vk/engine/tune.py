"""The autotuner: for a device and a model's matrices, which variant of the product is the fastest.

Every candidate runs over the model's own matrices (as many of one shape as there are, so that they come
from memory and not from a cache), and its result is compared with the default's: one that is not right on
this device is not used, whatever its speed. What was found is kept in the cache folder by device, driver,
version of this program and shaders. A file that is damaged is made again.

While a candidate runs its name and the process are in the file: if the driver takes the process along, the
next start knows which variant to leave alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from xinfer_vk import __version__
from xinfer_vk.engine.config import Tune
from xinfer_vk.errors import DeviceLostError, OutOfMemoryError, UsageError, XinferError
from xinfer_vk.folders import keep, optional_cache_folder
from xinfer_vk.kernels import matmul_a8
from xinfer_vk.kernels import state as state_layout
from xinfer_vk.kernels.base import Ref
from xinfer_vk.kernels.halves import halves_words, split_halves
from xinfer_vk.kernels.matmul import Choice, linear, tuned_key, variants
from xinfer_vk.kernels.quantize_rows import quantize_rows, quantized_words
from xinfer_vk.plan import Buffer, BufferKind, DeviceProfile, Plan, Runtime, Step
from xinfer_vk.weights.device import Matrix

TUNE_CHOICES: tuple[Tune, ...] = ("off", "quick", "full")
# Rows of x that are tried; the buckets between go with the next one above.
QUICK_TOKENS, FULL_TOKENS = (1, 8, 16, 64, 512), (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MATRICES = 8  # of a shape in one plan
REPEATS = 3
LARGEST_RESULT = 1 << 25  # words; what would give more, such as a head of many tokens, is not tried
CHECKED_ROWS = 32  # of the result, the last ones
LARGEST_ERROR = 1e-4  # of the largest product: far above what f32 rounds, far below a wrong weight
NO_BETTER = 0.97  # a variant must be this much faster than the default to take its place

_log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Shape:
    """Matrices of one format and size, and for how many rows of x a product with them is wanted; ``int8``:
    these are in 8 bits."""

    fmt: str
    rows: int
    cols: int
    tokens: int
    int8: bool = False

    @property
    def key(self) -> str:
        fmt = matmul_a8.tuned_format(self.fmt) if self.int8 else self.fmt
        return tuned_key(fmt, self.rows, self.cols, self.tokens)

    def variants(self, profile: DeviceProfile, quick: bool) -> dict[str, Choice]:
        if self.int8:
            return matmul_a8.variants(profile, self.fmt, self.cols, self.tokens)
        return variants(profile, self.fmt, self.cols, self.tokens, True, quick)


def tune(
    runtime: Runtime,
    matrices: Iterable[Matrix],
    how: Tune = "quick",
    *,
    activations: str = "f32",
    max_tokens: int = state_layout.MAX_TOKENS,
    progress: Progress | None = None,
    folder: Path | None = None,
) -> tuple[str, ...]:
    """Find the fastest variants for ``matrices`` and put them into ``runtime.profile``; what the user should
    be told, a line each. ``quick`` tries five numbers of rows and the likely variants, ``full`` all of both;
    ``off`` does nothing, and neither does a device with nothing to choose; ``full`` reports what it did.
    ``activations``: "f32" or "int8", in which the matrices' products are made where their format allows.
    ``folder``: where choices are kept."""
    if how not in TUNE_CHOICES:
        raise UsageError(f"tune is {how!r}: it is one of {', '.join(TUNE_CHOICES)}")
    if how == "off":
        return ()
    tried = [t for t in (QUICK_TOKENS if how == "quick" else FULL_TOKENS) if t <= max_tokens]
    by_shape: dict[Shape, list[Matrix]] = {}  # of any number of tokens
    for m in dict.fromkeys(matrices):
        int8 = activations == "int8" and m.fmt in matmul_a8.FORMATS
        by_shape.setdefault(Shape(m.fmt, m.rows, m.cols, 0, int8), []).append(m)
    shapes = {
        shape: same[:MATRICES]
        for of_any, same in by_shape.items()
        for shape in (replace(of_any, tokens=tokens) for tokens in tried)
        if shape.rows * shape.tokens <= LARGEST_RESULT and len(shape.variants(runtime.profile, True)) > 1
    }
    if not shapes:
        device = runtime.profile.name
        return (f"{device} has one kernel for each product: tuning changes nothing",) if how == "full" else ()
    file = ChoiceFile(folder or optional_cache_folder("tuned"), runtime)
    known = file.choices.keys() if how == "quick" else file.thorough
    missing = [shape for shape in shapes if shape.key not in known]
    problems: list[str] = []
    if missing:
        try:
            tuner = Tuner(runtime, missing, how == "quick")
        except OutOfMemoryError as error:
            return (f"kernels were not tuned: {error}",)
        try:
            for done, shape in enumerate(missing):
                if progress:
                    progress(done, len(missing))
                try:
                    file.choices[shape.key] = tuner.fastest(shape, shapes[shape], file, problems)
                    if how == "full":
                        file.thorough.add(shape.key)
                except KeyboardInterrupt:  # the user's doing, not the variant's
                    file.end()
                    file.save()
                    raise
                file.save()
            if progress:
                progress(len(missing), len(missing))
        finally:
            tuner.free()
    tuned = dict(file.choices)
    for of_any in by_shape:
        _fill_buckets(tuned, of_any, tried)
    runtime.profile = replace(runtime.profile, tuned=tuned)
    if how == "full":
        faster = sum(file.choices[shape.key] != "default" for shape in shapes)
        problems.append(
            f"tuned {len(shapes)} products, {len(missing)} of them now: {faster} use another kernel than the "
            "default"
        )
    return tuple(problems)


def _fill_buckets(tuned: dict[str, str], shape: Shape, tried: Sequence[int]) -> None:
    """The buckets that were not tried take the choice of the next one above that was."""
    for tokens in FULL_TOKENS:
        above = next((t for t in tried if t >= tokens), None)
        if above is not None and (choice := tuned.get(replace(shape, tokens=above).key)):
            tuned.setdefault(replace(shape, tokens=tokens).key, choice)


class Tuner:
    """Times candidates, with ``quick`` the likely ones. Its buffers are for the largest of ``shapes``."""

    def __init__(self, runtime: Runtime, shapes: Sequence[Shape], quick: bool = True) -> None:
        self._runtime, self._quick = runtime, quick
        self._buffers: list[Buffer] = []
        try:
            words = max(s.tokens * s.cols for s in shapes)
            self._x = self._allocate("tuner: x", words)
            self._y = self._allocate("tuner: y", max(s.tokens * s.rows for s in shapes))
            halves = max(halves_words(s.tokens, s.cols) for s in shapes)
            self._halves = self._allocate("tuner: halves", halves)
            quantized = max((s.tokens * quantized_words(s.cols) for s in shapes if s.int8), default=1)
            self._quantized = self._allocate("tuner: x in 8 bits", quantized)
            words = state_layout.state_words(1, 1)
            self._state = self._allocate("tuner: state", words, BufferKind.STATE)
            values = np.random.default_rng(0).standard_normal(self._x.words).astype(np.float32)
            runtime.write(self._x, 0, values.view(np.uint32))
        except BaseException:
            self.free()
            raise

    def fastest(self, shape: Shape, matrices: Sequence[Matrix], file: ChoiceFile, problems: list[str]) -> str:
        """The name of the variant. Those that fail or compute something else are told in ``problems``."""
        best, best_s, reference = "default", np.inf, np.empty(0, np.float32)
        for name in shape.variants(self._runtime.profile, self._quick):
            if file.crashed(shape, name):
                problems.append(
                    f"{name} for {shape.key} ended the program last time: it is not used; without "
                    f"{file.path} it is tried again"
                )
                continue
            file.begin(shape, name)
            try:
                seconds, y = self.time(shape, name, matrices)
            except DeviceLostError:
                raise
            except XinferError as error:
                if name == "default":
                    raise
                problems.append(f"{name} for {shape.key} is not used: {error}")
                continue
            if name == "default":
                reference, best_s = y, seconds
                continue
            off = float(np.abs(y - reference).max()) / max(float(np.abs(reference).max()), 1e-30)
            if not off <= LARGEST_ERROR:
                problems.append(f"{name} for {shape.key} is off by {off:.2g} here: it is not used")
            elif seconds < best_s * (NO_BETTER if best == "default" else 1.0):
                best, best_s = name, seconds
        file.end()
        return best

    def time(self, shape: Shape, name: str, matrices: Sequence[Matrix]) -> tuple[float, np.ndarray]:
        """Seconds of a product and its result with the last matrix."""
        words = np.zeros(self._state.words, np.uint32)
        words[state_layout.N_TOKENS] = shape.tokens
        self._runtime.write(self._state, 0, words)
        steps: list[Step] = []
        profile, state = self._runtime.profile, self._state
        for m in matrices:
            x, x_stride, halves, choice = Ref(self._x), shape.cols, None, None
            if shape.int8:
                x, x_stride = Ref(self._quantized), quantized_words(shape.cols)
                steps += quantize_rows(
                    profile, Ref(self._x), shape.cols, x, x_stride, shape.cols, shape.tokens, state, "tokens"
                )
                choice = shape.variants(profile, self._quick)[name]
            elif name.startswith("coop"):
                halves = Ref(self._halves)
                steps += split_halves(x, x_stride, shape.cols, halves, shape.tokens, state)
            steps += linear(
                profile, m.fmt, m.parts, m.cols, x, x_stride, Ref(self._y), m.rows, shape.tokens, state, None,
                "store", "tokens", halves=halves, variant=name, choice=choice,
            )  # fmt: skip
        recorded = self._runtime.prepare(Plan(f"{name} for {shape.key}", tuple(steps)))
        recorded.run()
        took = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            recorded.run()
            took.append(time.perf_counter() - began)
        rows = min(shape.tokens, CHECKED_ROWS)
        first = (shape.tokens - rows) * shape.rows
        y = self._runtime.read(self._y, first, rows * shape.rows).view(np.float32)
        return min(took) / len(matrices), y

    def _allocate(self, name: str, words: int, kind: BufferKind = BufferKind.SCRATCH) -> Buffer:
        self._buffers.append(self._runtime.allocate(name, -(-words // 4) * 4, kind))
        return self._buffers[-1]

    def free(self) -> None:
        for buffer in self._buffers:
            self._runtime.free(buffer)
        self._buffers.clear()


class ChoiceFile:
    """Choices of one device, driver and version of the shaders, as JSON: ``choices`` by
    :attr:`Shape.key`; ``thorough``, the keys of those that all variants were tried for; and ``running``, what
    was being tried when the file was written last, and by which process."""

    def __init__(self, folder: Path | None, runtime: Runtime) -> None:
        info: Any = getattr(runtime, "info", None)
        device = f"{getattr(info, 'uuid', '')} {runtime.profile.name}"
        kernels = "".join(map(str, (shader_fingerprint(), sorted(runtime.profile.features))))
        said = f"{device} {runtime.driver} {__version__} {kernels}"
        name = f"{hashlib.sha256(said.encode()).hexdigest()[:32]}.json"
        self.path = folder / name if folder else None
        self.choices: dict[str, str] = {}
        self.thorough: set[str] = set()
        self._running: list[str | int] = []
        self._crashed: list[list[str]] = []
        self._load()

    def crashed(self, shape: Shape, name: str) -> bool:
        return [shape.key, name] in self._crashed

    def begin(self, shape: Shape, name: str) -> None:
        self._running = [shape.key, name, os.getpid()]
        self.save()

    def end(self) -> None:
        self._running = []

    def save(self) -> None:
        """Write the file whole. A folder that cannot be written is no error: the next start tunes again."""
        record = {
            "choices": self.choices, "thorough": sorted(self.thorough), "running": self._running,
            "crashed": self._crashed,
        }  # fmt: skip
        if self.path is not None:
            keep(self.path, json.dumps(record, indent=1).encode())

    def _load(self) -> None:
        if self.path is None:
            return
        try:
            record = json.loads(self.path.read_text(encoding="utf-8"))
            choices, crashed, running = record["choices"], record["crashed"], record["running"]
            thorough = set(record["thorough"])
            if not all(isinstance(v, str) for v in (*choices, *choices.values(), *thorough)):
                raise ValueError("a choice that is no text")
            if not isinstance(crashed, list) or not isinstance(running, list):
                raise ValueError("no lists")
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            _log.info("ignoring %s: %s", self.path, error)
            return
        self.choices, self.thorough, self._crashed = choices, thorough, crashed
        if len(running) == 3 and running[1] != "default" and not _runs(running[2]):
            self._crashed.append(running[:2])


def shader_fingerprint() -> str:
    """Changes whenever a shader does."""
    manifest = Path(__file__).resolve().parent.parent / "spirv" / "manifest.json"
    try:
        return hashlib.sha256(manifest.read_bytes()).hexdigest()
    except OSError:
        return ""


def _runs(pid: Any) -> bool:
    """Whether another process has that number: one that is tuning too."""
    if not isinstance(pid, int) or pid <= 0 or pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:  # it is someone else's
        return True
    except (OSError, OverflowError):
        return False
    return True

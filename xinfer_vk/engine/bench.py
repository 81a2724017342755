"""Measures prefill (PP) and decode (TG) of a model on a device, and the device's own limits beside them.

Tokens are made up (their values do not change the work), the device is synchronised at every step, and
nothing but the step is timed: loading, compiling and a warm-up run of every shape come before.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xinfer_vk.cache import CachedSequence
from xinfer_vk.engine.config import PREFILL_CHUNK, Activations, EngineConfig, Tune
from xinfer_vk.engine.costs import Batch, Cost, plan_cost, step_cost
from xinfer_vk.engine.metrics import reset_peak_host_bytes
from xinfer_vk.engine.runner import MAX_OUTPUTS, Chunk, ModelRunner, make_runner
from xinfer_vk.errors import UsageError
from xinfer_vk.kernels.peak import FLOPS_PER_ROUND, FMA_LOCAL_SIZE, peak_copy, peak_fma
from xinfer_vk.loading import LoadedModel, Progress, check_int8, load, open_checkpoint
from xinfer_vk.models.config import ModelConfig
from xinfer_vk.plan import WORD_BYTES, BufferKind, Plan, Runtime
from xinfer_vk.sampling.device import check_tokens
from xinfer_vk.weights.synthetic import SyntheticPlanner, open_synthetic

PEAK_S = 0.05  # a yardstick's run takes at least this long
PEAK_RUNS = 5
COPY_BYTES = 256 << 20  # of each buffer: many times the caches of any device
FMA_GROUPS, FMA_ROUNDS = 4096, 512


@dataclass(frozen=True, eq=False)
class Subject(LoadedModel):
    """A model on a device, ready to be measured."""

    synthetic: bool
    tune: Tune


def load_subject(
    runtime: Runtime,
    model: str,
    *,
    synthetic: bool,
    quantize: str | None = None,
    activations: Activations = "f32",
    tune: Tune = "quick",
    tests: Sequence[Workload] = (),
    progress: Progress | None = None,
) -> Subject:
    """Put a model on the device: ``model`` as for :class:`~xinfer_vk.engine.llm.LLM`, or SHAPE:FORMAT if
    ``synthetic``. ``quantize`` and ``activations`` as there. ``tests`` that it cannot run are refused before
    anything is loaded. No tokenizer is read. Raises what these raise."""
    reset_peak_host_bytes()  # each model is to show its own
    config = EngineConfig(model, quantize=quantize, activations=activations, tune=tune)
    planner, fmt = None, None
    if synthetic:
        source, fmt = open_synthetic(model)
        planner = SyntheticPlanner(source, runtime.profile, fmt)
    else:
        source = open_checkpoint(config, progress)
    with source:
        if tests:
            check_workloads(source.config, tests)
        loaded = load(source, runtime, config, progress, planner, fmt)
    return Subject(**vars(loaded), synthetic=synthetic, tune=tune)


# -- the device's limits --------------------------------------------------------------------------


@dataclass(frozen=True)
class Peak:
    """The best of several runs: bytes moved (read and written) and floating-point operations a second."""

    copy_bytes_per_s: float
    flops_per_s: float


def measure_peak(runtime: Runtime) -> Peak:
    """The copy bandwidth and the f32 rate that kernels of ours reach on the device."""
    profile = runtime.profile
    words = min(COPY_BYTES, profile.max_storage_range_bytes) // WORD_BYTES // 4 * 4
    if profile.simd:
        words //= 4  # 64 MB: caches of a CPU are small, and so is its patience
    source = runtime.allocate("bench: source", words, BufferKind.SCRATCH)
    target = runtime.allocate("bench: target", words, BufferKind.SCRATCH)
    try:
        step = peak_copy(profile, source, target, words)
        copies = _rate(runtime, lambda count: Plan("copy", (step,) * count))
        groups = FMA_GROUPS // 64 if profile.simd else FMA_GROUPS
        groups = min(groups, words // FMA_LOCAL_SIZE)
        fma = peak_fma(target, groups, FMA_ROUNDS)
        loops = _rate(runtime, lambda count: Plan("fma", (fma,) * count))
    finally:
        runtime.free(source)
        runtime.free(target)
    flops = groups * FMA_LOCAL_SIZE * FMA_ROUNDS * FLOPS_PER_ROUND
    return Peak(copies * 2 * words * WORD_BYTES, loops * flops)


def _rate(runtime: Runtime, make: Callable[[int], Plan]) -> float:
    """Dispatches a second, by the fastest of a few runs that are long enough for a host's clock."""
    count = 1
    while True:
        recorded = runtime.prepare(make(count))
        recorded.run()
        seconds = min(_timed(recorded.run) for _ in range(PEAK_RUNS))
        if seconds >= PEAK_S or count >= 4096:
            return count / seconds
        count = min(4096, max(2 * count, int(count * 1.5 * PEAK_S / seconds)))


def _timed(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


# -- what is measured -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """``kind`` "pp": ``tokens`` prompt tokens of each of ``batch`` sequences that hold ``depth`` tokens
    already; "tg": as many decode steps."""

    kind: str
    tokens: int
    depth: int = 0
    batch: int = 1

    def __str__(self) -> str:
        """``tg128 @ d512, b4``"""
        depth = f" @ d{self.depth}" if self.depth else ""
        return f"{self.kind}{self.tokens}{depth}" + (f", b{self.batch}" if self.batch > 1 else "")


def check_workloads(config: ModelConfig, tests: Sequence[Workload]) -> None:
    """Raise :class:`UsageError` for what a model of this shape cannot run."""
    longest, batch = max(t.depth + t.tokens for t in tests), max(t.batch for t in tests)
    if longest > config.max_position:
        raise UsageError(
            f"{longest} tokens are more than the {config.max_position} that the model was made for: use "
            "fewer with -p, -n or -d"
        )
    if batch > MAX_OUTPUTS:
        raise UsageError(f"a batch of {batch}: at most {MAX_OUTPUTS} sequences run together")


@dataclass(frozen=True)
class Measurement:
    """One test's samples. ``step_s``: of every decode step of every repetition (the whole prefill for
    "pp"); ``cost``: of one repetition."""

    test: Workload
    run_s: tuple[float, ...]  # of each repetition
    step_s: tuple[float, ...]
    steps: int  # of one repetition
    cost: Cost
    dispatches: int  # of one repetition
    barriers: int
    submits: int
    bytes_read: int
    device_s: float  # of one repetition, from submits to their ends
    kv_bytes: int

    @property
    def host_step_s(self) -> float:
        """What a step takes besides waiting for the device: a mean."""
        return max(0.0, sum(self.run_s) / len(self.run_s) - self.device_s) / self.steps

    @property
    def tokens(self) -> int:
        """Of one repetition, all sequences together."""
        return self.test.tokens * self.test.batch

    @property
    def rates(self) -> list[float]:
        """Tokens a second of each repetition."""
        return [self.tokens / seconds for seconds in self.run_s]

    @property
    def median_s(self) -> float:
        return statistics.median(self.run_s)


@dataclass(frozen=True)
class KernelTime:
    """Steps of one label and kernel within a run of a plan, together: ``seconds`` is the median over runs."""

    label: str
    kernel: str
    calls: int
    seconds: float
    cost: Cost


@dataclass(frozen=True)
class Profile:
    """One step of a workload by the device's own clock: ``kernels`` in the order they first run."""

    what: str
    kernels: tuple[KernelTime, ...]

    @property
    def seconds(self) -> float:
        return sum(k.seconds for k in self.kernels)


class Bench:
    """Runs tests of one subject, in a KV cache made for the largest of them."""

    def __init__(
        self,
        subject: Subject,
        tests: Sequence[Workload],
        kv_dtype: str,
        progress: Progress | None = None,
        activations: str = "f32",
    ) -> None:
        self.subject, self.kv_dtype, self.activations = subject, kv_dtype, activations
        if activations == "int8":
            check_int8(subject.weights, subject.config.experts is not None)
        self._ahead: int | None = None  # decode steps in a submit, once that is decided
        self._cost: Cost | None = None  # of the repetition under way, where it is wanted
        tell = progress or (lambda stage, done, total: None)
        check_workloads(subject.config, tests)
        longest, batch = max(t.depth + t.tokens for t in tests), max(t.batch for t in tests)
        total = max((t.depth + t.tokens) * t.batch for t in tests)
        self.runner: ModelRunner = make_runner(
            subject.runtime, subject.config, subject.weights, kv_dtype, capacity=longest, sequences=batch,
            total=total, max_tokens=PREFILL_CHUNK,
            progress=lambda done, all_: tell("compiling kernels", done, all_), activation_dtype=activations,
        )  # fmt: skip

    def free(self) -> None:
        self.runner.free()
        self.runner.cache.free()

    def measure(self, test: Workload, repeats: int, warm_up: int = 1) -> Measurement:
        """Run a test ``warm_up`` times, then ``repeats`` times that count. Between them the cache is cut
        back to the test's depth, which is filled once."""
        cache = self.runner.cache
        sequences = [cache.open() for _ in range(test.batch)]
        try:
            if test.depth:
                self._prefill(sequences, test.depth)
            self._cost = None
            self._warm_up(test, sequences, warm_up)
            before, device_s = self._counts(), self.runner.device_s
            runs = []
            for repeat in range(repeats):
                self._cost = Cost() if repeat == repeats - 1 else None
                runs.append(self._repeat(test, sequences))
            device_s = (self.runner.device_s - device_s) / repeats
            counts = [(now - then) // repeats for now, then in zip(self._counts(), before)]
        finally:
            for sequence in sequences:
                cache.close(sequence)
        dispatches, barriers, submits, bytes_read = counts
        times = [sum(steps) for steps in runs]
        steps = tuple(times) if test.kind == "pp" else tuple(s for run in runs for s in run)
        assert self._cost is not None, "the last repetition counts"
        return Measurement(
            test, tuple(times), steps, len(runs[0]), self._cost, dispatches, barriers, submits, bytes_read,
            device_s, cache.bytes,
        )  # fmt: skip

    def profile(self, test: Workload, repeats: int) -> Profile:
        """The time of each kernel in one step: a decode step, or the first chunk of a prefill."""
        cache = self.runner.cache
        sequences = [cache.open() for _ in range(test.batch)]
        try:
            if test.depth:
                self._prefill(sequences, test.depth)
            size = (
                1 if test.kind == "tg" else max(1, min(self.runner.prefill_tokens // test.batch, test.tokens))
            )
            chunks = [Chunk(s, [self._token(i) for i in range(size)]) for s in sequences]
            plan, times_ns = self.runner.time_steps(chunks, 1 + repeats)
            batch = Batch(size * test.batch, test.batch, [(test.depth + size, size)] * test.batch)
        finally:
            for sequence in sequences:
                cache.close(sequence)
        times = times_ns[1:].T / 1e9  # [steps, repeats]; the first run warms up
        groups: dict[tuple[str, str], list[int]] = {}
        for i, step in enumerate(plan.steps):
            groups.setdefault((step.label, step.kernel.name), []).append(i)
        kernels = tuple(
            KernelTime(
                *key,
                len(at),
                float(np.median(times[at].sum(axis=0))),
                sum((step_cost(plan.steps[i], batch) for i in at), Cost()),
            )
            for key, at in groups.items()
        )
        what = f"{size * test.batch} token{'s' if size * test.batch > 1 else ''} at depth {test.depth}"
        return Profile(what, kernels)

    def _warm_up(self, test: Workload, sequences: list[CachedSequence], runs: int) -> None:
        """Run a test so many times, decide how many decode steps are one submit, and go on until everything
        that takes has been recorded and has settled (a plan does in its second run)."""
        self._ahead, compiled = None, self.runner.compile_s
        for _ in range(runs):
            compiled = self.runner.compile_s
            self._repeat(test, sequences)
        if runs and test.kind == "tg":
            self._ahead, compiled = self.runner.steps_ahead(test.batch, test.tokens), -1.0
        while runs and compiled != self.runner.compile_s:
            compiled = self.runner.compile_s
            self._repeat(test, sequences)

    def _repeat(self, test: Workload, sequences: list[CachedSequence]) -> list[float]:
        """Run a test once, from its depth on. Seconds of each step."""
        for sequence in sequences:
            self.runner.cache.truncate(sequence, test.depth)
        if test.kind == "pp":
            return self._prefill(sequences, test.tokens)
        tokens = [self._token(i) for i in range(test.batch)]
        seconds: list[float] = []
        while len(seconds) < test.tokens:
            # What comes next depends on what came, and several steps run at once, both as in use.
            left = test.tokens - len(seconds)
            if self._ahead is None:
                ahead = self.runner.steps_ahead(test.batch, left)
            else:
                ahead = min(self._ahead, 1 << left.bit_length() - 1)
            began = time.perf_counter()
            chosen = self.runner.decode(sequences, tokens, "argmax", ahead)
            for step in chosen:
                check_tokens(step, [s.length for s in sequences], self.runner.steps_run)
            seconds += [(time.perf_counter() - began) / len(chosen)] * len(chosen)
            tokens = chosen[-1]
            # Costs are linear in the lengths (a window apart): the first step's and the last's, averaged.
            for back in (len(chosen) - 1, 0):
                self._add_cost([(s.length - back, 1) for s in sequences], test.batch, 0.5)
        return seconds

    def _prefill(self, sequences: list[CachedSequence], count: int) -> list[float]:
        """Append ``count`` tokens to every sequence, in full chunks as the scheduler makes them; the last
        token of each gives a token."""
        left = dict.fromkeys(range(len(sequences)), count)
        seconds = []
        while left:
            room, chunks = self.runner.prefill_tokens, []
            for i in list(left):
                size = min(room, left[i])
                if size == 0:
                    break
                room, left[i] = room - size, left[i] - size
                ids = [self._token(count - left[i] + j) for j in range(size)]
                chunks.append(Chunk(sequences[i], ids, "none" if left[i] else "last"))
                if not left[i]:
                    del left[i]
            began = time.perf_counter()
            self.runner.run(chunks)
            seconds.append(time.perf_counter() - began)
            outputs = sum(chunk.outputs == "last" for chunk in chunks)
            self._add_cost([(c.sequence.length, len(c.token_ids)) for c in chunks], outputs)
        return seconds

    def _token(self, i: int) -> int:
        return 7919 * (i + 1) % self.subject.config.vocab_size

    def _add_cost(self, contexts: list[tuple[int, int]], outputs: int, share: float = 1.0) -> None:
        if self._cost is None:
            return
        assert self.runner.last_plan is not None, "a step was run"
        batch = Batch(sum(new for _, new in contexts), outputs, contexts)
        self._cost += plan_cost(self.runner.last_plan, batch) * share

    def _counts(self) -> tuple[int, int, int, int]:
        """Dispatches, barriers and submits of the device so far, and bytes read back. The NumPy
        reference counts none."""
        counters: dict[str, int] = getattr(self.subject.runtime, "counters", dict)()
        named = (counters.get(name, 0) for name in ("dispatches", "barriers", "submits"))
        return (*named, self.runner.bytes_read)  # type: ignore[return-value]

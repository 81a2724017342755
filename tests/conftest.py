"""Fixtures every test shares: the Vulkan devices, the NumPy reference, and how one is checked by the other.

A test that asks for ``runtime`` runs once per Vulkan device found. ``check_steps`` is what a kernel
test is made of: it builds the same steps on the device and on the NumPy runtime, over the same
contents, runs both, and compares every word of every buffer.

Environment: ``XINFER_VK_SWIFTSHADER_ICD`` names SwiftShader's ICD file (else it is looked for in the
cache directory, where ``./run test`` puts it). ``XINFER_VK_TEST_DEVICES=lavapipe,swiftshader``
restricts the devices by id. With ``CI=true`` both must be there: a missing one is a failure.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xinfer_vk.errors import DeviceError
from xinfer_vk.folders import cache_folder
from xinfer_vk.plan import Buffer, BufferKind, Plan, Step
from xinfer_vk.reference import NumpyRuntime
from xinfer_vk.vulkan.devices import DeviceInfo, list_devices
from xinfer_vk.vulkan.layer import DeviceLayer

POISON = np.uint32(0x7FC0DEAD)  # a quiet NaN with a payload of its own: "nobody wrote this word"
CI = os.environ.get("CI", "").lower() in ("1", "true")


def _add_swiftshader() -> None:
    """Put SwiftShader beside the system's drivers. The loader reads this when an instance is made."""
    named = os.environ.get("XINFER_VK_SWIFTSHADER_ICD")
    icd = Path(named) if named else cache_folder() / "swiftshader" / "vk_swiftshader_icd.json"
    known = os.environ.get("VK_ADD_DRIVER_FILES", "")
    chosen = os.environ.get("VK_DRIVER_FILES") or os.environ.get("VK_ICD_FILENAMES")
    if icd.exists() and str(icd) not in known and not chosen:
        os.environ["VK_ADD_DRIVER_FILES"] = f"{icd}:{known}" if known else str(icd)


_add_swiftshader()

# A background job of a script ignores SIGINT, one under nohup SIGHUP; so do its children, which tests stop.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

if os.environ.get("XINFER_VK_TEST_EVERY_BARRIER"):
    # For validation, which knows a bound buffer only as a whole: steps that are marked independent because
    # they use different parts of one arena look like a hazard to it. test_validation.py shows in another
    # way that they are independent.
    DeviceLayer.next_is_independent = lambda self: None  # type: ignore[method-assign]


@dataclass(frozen=True)
class DeviceUnderTest:
    id: str  # short, stable: what the test's name shows
    info: DeviceInfo

    @property
    def index(self) -> int:
        return self.info.index

    @property
    def name(self) -> str:
        return self.info.name


def _short(name: str) -> str:
    for part, short in (("llvmpipe", "lavapipe"), ("SwiftShader", "swiftshader")):
        if part in name:
            return short
    return "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-")


def vulkan_devices() -> list[DeviceUnderTest]:
    try:
        found = list_devices()
    except DeviceError:
        return []
    wanted = os.environ.get("XINFER_VK_TEST_DEVICES")
    devices = [DeviceUnderTest(_short(info.name), info) for info in found]
    return [d for d in devices if not wanted or d.id in wanted.split(",")]


DEVICES = vulkan_devices()


TIERS = ("quick", "whole", "all")
_tier: list[str] = []  # the one that was asked for


def runs_all() -> bool:
    """Whether this is tier all, for tests that run some of their cases only there."""
    return _tier == ["all"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier", choices=TIERS, default="whole", help="how much to run: quick, whole (the default) or all"
    )


def pytest_configure(config: pytest.Config) -> None:
    _tier[:] = [config.getoption("--tier")]
    config.addinivalue_line("markers", "tier_all: takes too long for every change; run by --tier all only")
    config.addinivalue_line("markers", "invalid_on_purpose: breaks Vulkan's rules; not run under validation")


# The files that take longest, the longest first: where there are several processes, the last to finish should
# have little left.
LONGEST = (
    "kernels_matmul", "validation", "gemma", "growth", "kernels_matmul_lanes", "families", "logits",
    "demo_model", "kernels_experts", "kernels_attention", "kernels_sample", "full_shape", "experts", "bench",
    "chat_sandbox", "chat_allowed", "fuzz_files", "activations_int8", "runtime", "repeat",
)  # fmt: skip

# More that the quick tier leaves out, since they start programs, compile or build for 10 to 40 seconds.
LONG = (
    "cli", "cli_batch", "packaging", "pull", "cli_streams", "build_shaders", "pack", "benchmarks",
    "perplexity", "quantize", "compare_decoding", "llm_threads", "readme_figures", "terminal",
)  # fmt: skip


def in_tier(tier: str, item: pytest.Item) -> bool:
    """Whether a test runs in a tier. The quick one leaves out the long files and all devices but one:
    lavapipe, if it is there, which compiles fastest."""
    if tier == "quick":
        *others, _ = sorted((d.id for d in DEVICES), key=lambda name: name == "lavapipe") or [""]
        other = any(f"{name}]" in item.name or f"[{name}" in item.name for name in others)
        if other or item.path.stem.removeprefix("test_") in (*LONGEST, *LONG):
            return False
    return tier == "all" or item.get_closest_marker("tier_all") is None


SECONDS: dict[str, float] = {}  # by file: set-up, tests and tear-down


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    file = report.nodeid.partition("::")[0]
    SECONDS[file] = SECONDS.get(file, 0.0) + report.duration


def pytest_terminal_summary(terminalreporter: Any) -> None:
    slowest = sorted(SECONDS.items(), key=lambda item: -item[1])[:10]
    if len(SECONDS) > 1:
        terminalreporter.section("slowest files")
        for file, seconds in slowest:
            terminalreporter.write_line(f"{seconds:7.1f} s  {file}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = [item for item in items if in_tier(config.getoption("--tier"), item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept
    if hasattr(config, "workerinput"):  # one process of several; in one alone each device is opened once
        rank = {f"test_{name}": i for i, name in enumerate(LONGEST)}
        items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


def pytest_sessionstart(session: pytest.Session) -> None:
    expected = set((os.environ.get("XINFER_VK_TEST_DEVICES") or "lavapipe,swiftshader").split(","))
    missing = expected - {d.id for d in DEVICES}
    if CI and missing:
        pytest.exit(f"CI needs these Vulkan devices, which were not found: {', '.join(sorted(missing))}", 1)


def pytest_report_header() -> str:
    return "vulkan devices: " + (", ".join(f"{d.id} ({d.name})" for d in DEVICES) or "none")


_none = [pytest.param(None, marks=pytest.mark.skip(reason="no Vulkan device"), id="no-device")]
_devices = [pytest.param(d, id=d.id) for d in DEVICES] or _none


@pytest.fixture(scope="session", params=_devices)
def device(request: pytest.FixtureRequest) -> DeviceUnderTest:
    """Each Vulkan device in turn."""
    found: DeviceUnderTest = request.param
    return found


@pytest.fixture(scope="session")
def runtime(device: DeviceUnderTest) -> Iterator[Any]:
    """A Kompute runtime on each Vulkan device in turn, shared by the whole session."""
    from xinfer_vk.vulkan.runtime import KomputeRuntime

    opened = KomputeRuntime(device.info)
    yield opened
    opened.close()


def _pulled(name: str, how: str) -> Path:
    """A model that CI fetches; elsewhere its tests are skipped until it is pulled."""
    from xinfer_vk.weights.pull import MODELS, is_present, pull

    if is_present(MODELS[name]):
        return MODELS[name].path()
    if not CI:
        pytest.skip(f"{name} is not there: {how}")
    return pull(name, accept_terms=True)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """SmolLM2-135M-Instruct in Q4_1."""
    return _pulled("smollm2-135m", "xinfer-vk pull smollm2-135m")


@pytest.fixture(scope="session")
def gemma_model() -> Path:
    """Gemma 3 270M, pretrained, in Q4_K_M; under Google's terms, https://ai.google.dev/gemma/terms."""
    return _pulled("gemma3-270m", "xinfer-vk pull gemma3-270m --accept-terms")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 with random weights, a vocabulary of 704, a tokenizer and a chat template: a directory."""
    from model_files import tiny_config, write_hf_model

    path = tmp_path_factory.mktemp("model") / "tiny"
    write_hf_model(path, tiny_config("qwen2", vocab_size=704), seed=3)
    for file in (Path(__file__).parent / "fixtures" / "text" / "qwen2").iterdir():
        shutil.copy(file, path)
    return path


@pytest.fixture
def numpy_runtime() -> Iterator[NumpyRuntime]:
    reference = NumpyRuntime()
    yield reference
    reference.close()


class Recorder:
    """A runtime that remembers the buffers made through it, and which words the builder wrote."""

    def __init__(self, runtime: Any, profile: Any) -> None:
        self._runtime, self.profile = runtime, profile
        self.buffers: list[Buffer] = []
        self._written: dict[Buffer, np.ndarray] = {}

    def allocate(self, name: str, words: int, kind: BufferKind) -> Buffer:
        buffer = self._runtime.allocate(name, words, kind)
        self.buffers.append(buffer)
        self._written[buffer] = np.zeros(words, bool)
        return buffer

    def write(self, buffer: Buffer, offset: int, words: np.ndarray) -> None:
        self._written[buffer][offset : offset + words.size] = True
        self._runtime.write(buffer, offset, words)

    def read(self, buffer: Buffer, offset: int, count: int) -> np.ndarray:
        return self._runtime.read(buffer, offset, count)

    def free(self, buffer: Buffer) -> None:
        raise AssertionError("a step builder frees nothing")

    def poison(self) -> None:
        """Fill every word that the builder did not write."""
        for buffer in self.buffers:
            written = self._written[buffer]
            if not written.all():
                words = self._runtime.read(buffer, 0, buffer.words)
                words[~written] = POISON
                self._runtime.write(buffer, 0, words)

    def run(self, steps: Sequence[Step]) -> None:
        recorded = self._runtime.prepare(Plan("test", tuple(steps)))
        recorded.run()
        if hasattr(recorded, "release"):
            recorded.release()

    def contents(self) -> dict[str, np.ndarray]:
        names = [b.name for b in self.buffers]
        assert len(set(names)) == len(names), f"give the buffers of a test different names: {names}"
        return {b.name: self._runtime.read(b, 0, b.words) for b in self.buffers}

    def release(self) -> None:
        for buffer in self.buffers:
            self._runtime.free(buffer)


def _as_floats(words: np.ndarray, view: str) -> np.ndarray:
    return words.view(np.float16).astype(np.float32) if view == "f16" else words.view(np.float32)


def compare(name: str, got: np.ndarray, want: np.ndarray, view: str, atol: float, rtol: float) -> float:
    """Largest absolute error between two buffers of words; raises AssertionError where they differ by more.

    Words nobody wrote must still be poison, bit for bit. ``view`` is "f32", "f16" (packed pairs) or
    "u32" (bits must be equal). As f32, words that are no normal numbers on either side (small
    integers look like that) must be equal bit for bit too, so an index that is off by one cannot hide
    behind a tolerance; a true zero may stand for a flushed denormal only if ``view`` is "f32-flush".
    """
    untouched = (want == POISON) | (got == POISON)
    wrong = np.flatnonzero(untouched & (got != want))
    if wrong.size:
        i = int(wrong[0])
        who = (
            "left unwritten by the kernel" if got[i] == POISON else "written by the kernel, not by the oracle"
        )
        raise AssertionError(f"{name}[{i}] {who} ({wrong.size} words): got {got[i]:#x}, want {want[i]:#x}")
    if view == "u32":
        wrong = np.flatnonzero(got != want)
        if wrong.size:
            i = int(wrong[0])
            raise AssertionError(
                f"{name}[{i}]: got {got[i]:#x}, want {want[i]:#x} ({wrong.size} words differ)"
            )
        return 0.0
    same = got == want
    if same.all():
        return 0.0
    a, b = _as_floats(got, view), _as_floats(want, view)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(a.astype(np.float64) - b)
        bad = ~(error <= atol + rtol * np.abs(b.astype(np.float64)))
    bad &= ~((np.isnan(a) & np.isnan(b)) | (a == b))
    if view == "f32":
        tiny = np.finfo(np.float32).tiny
        bad |= ~same & (np.abs(a) < tiny) & (np.abs(b) < tiny) & (a != b)
    wrong = np.flatnonzero(bad)
    if wrong.size:
        i = int(wrong[0])
        raise AssertionError(
            f"{name}[{i}] as {view}: got {a[i]!r}, want {b[i]!r}; {wrong.size} of {a.size} differ "
            f"by more than {atol} + {rtol}*|want|, largest error {np.nanmax(error)}"
        )
    error = error[np.isfinite(error)]
    return float(error.max()) if error.size else 0.0


CheckSteps = Callable[..., dict[str, float]]


@pytest.fixture
def check_steps(runtime: Any) -> CheckSteps:
    """``check_steps(build, atol=…, rtol=…)``: run steps on the device and by their oracles, compare all.

    ``build(rt)`` allocates and writes buffers on the runtime it is given (it must do the same each
    time: seed inside) and returns a Step or a list of them; ``rt.profile`` is the device's on both.
    Whatever it does not write is poisoned with NaN. ``views`` says how a buffer's words are compared,
    by name: "f32" (default), "f16", "u32" (exactly); ``ignore`` names buffers not compared (scratch
    whose contents the oracle does not model). Returns the largest absolute error by buffer name.
    """

    def check(
        build: Callable[[Any], Step | Sequence[Step]],
        atol: float = 0.0,
        rtol: float = 0.0,
        views: Mapping[str, str] | None = None,
        ignore: Collection[str] = (),
    ) -> dict[str, float]:
        reference = NumpyRuntime(runtime.profile)
        on_device, on_host = Recorder(runtime, runtime.profile), Recorder(reference, runtime.profile)
        try:
            for side in (on_host, on_device):
                steps = build(side)
                side.poison()
                side.run([steps] if isinstance(steps, Step) else steps)
            got, want = on_device.contents(), on_host.contents()
        finally:
            on_device.release()
            reference.close()
        assert got.keys() == want.keys()
        view = dict(views or {})
        assert view.keys() <= got.keys(), f"views names unknown buffers: {sorted(view.keys() - got.keys())}"
        return {
            name: compare(name, got[name], want[name], view.get(name, "f32"), atol, rtol)
            for name in got
            if name not in ignore
        }

    return check


@pytest.fixture
def step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each decode step is a step of its own, for tests that count them."""
    from xinfer_vk.engine import runner

    monkeypatch.setattr(runner, "AHEAD_S", 0.0)

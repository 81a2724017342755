"""The tests that use a device, once more under the Khronos validation layer with synchronization
validation: any message fails.

Each run is a process of its own (tests/validation/driver.py), because the layer is chosen when Vulkan
starts. It ends with a canary, a hazard made on purpose, so that silence is known to mean something.
Validation writes its log to a named pipe: it opens the file anew, and empties it, at each instance.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import CI, DEVICES, DeviceUnderTest
from model_files import K_SIZES, tiny_config, write_gguf_model
from test_logits import Loaded
from validation.driver import CANARY

from xinfer_vk.plan import Plan, Step
from xinfer_vk.reference import NumpyRuntime, RecordedOracles
from xinfer_vk.selftest import all_cases, run_cases
from xinfer_vk.vulkan import layer

TESTS = Path(__file__).resolve().parent
LAYER = "VK_LAYER_KHRONOS_validation"
MESSAGE = re.compile(r"\[ ?(SYNC|VUID|UNASSIGNED)")
TIMEOUT_S = 600
EVERY_BARRIER = {"XINFER_VK_TEST_EVERY_BARRIER": "1"}  # see conftest.py

# Without the heuristic, newer layers do not look at what shaders access.
SETTINGS = """\
khronos_validation.enables = VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT
khronos_validation.validate_sync = true
khronos_validation.syncval_shader_accesses_heuristic = true
khronos_validation.debug_action = VK_DBG_LAYER_ACTION_LOG_MSG
khronos_validation.log_filename = {log}
khronos_validation.report_flags = error,warn
"""


def validation_is_installed() -> bool:
    try:
        import vulkan as vk

        return LAYER in {p.layerName for p in vk.vkEnumerateInstanceLayerProperties()}
    except (ImportError, OSError):
        return False


if not validation_is_installed():
    if CI:
        raise RuntimeError(f"CI needs {LAYER} (Debian: vulkan-validationlayers)")
    pytest.skip(f"{LAYER} is not installed", allow_module_level=True)
if layer.load_library()[0] is None:
    pytest.skip(
        "without the companion layer the canary has no barriers to leave out", allow_module_level=True
    )


def run_validated(
    device: DeviceUnderTest, folder: Path, *arguments: str, **environment: str
) -> tuple[str, str]:
    """Run pytest with ``arguments`` and the canary under validation: what was reported before the canary,
    and what since. Fails if pytest did."""
    log = folder / "validation.log"
    os.mkfifo(log)
    (folder / "vk_layer_settings.txt").write_text(SETTINGS.format(log=log), encoding="utf-8")
    env = {
        **os.environ,
        "VK_INSTANCE_LAYERS": LAYER,
        "VK_LAYER_SETTINGS_PATH": str(folder),
        "XINFER_VK_TEST_DEVICES": device.id,
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")]),
        **environment,
    }
    reported = bytearray()
    reader = os.open(log, os.O_RDWR)  # also a writer, so that a writer that closes does not end the reading

    def read() -> None:
        while True:
            part = os.read(reader, 1 << 16)
            reported.extend(part)
            if part.endswith(b"\0"):
                return

    thread = threading.Thread(target=read)
    thread.start()
    try:
        command = [
            sys.executable,
            str(TESTS / "validation" / "driver.py"),
            str(log),
            str(device.index),
            *arguments,
        ]
        done = subprocess.run(
            command, env=env, cwd=TESTS.parent, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    finally:
        os.write(reader, b"\0")
        thread.join()
        os.close(reader)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    before, separator, since = reported.decode("utf-8", "replace").partition(CANARY)
    assert separator, "the run ended before its canary"
    return before, since


def messages(log: str) -> list[str]:
    return [line for line in log.splitlines() if MESSAGE.search(line)]


def assert_clean(before: str, since: str) -> None:
    canary = messages(since)
    assert canary, f"validation did not report the canary's hazard, so its silence means nothing: {since!r}"
    assert all("READ-AFTER-WRITE" in message for message in canary), canary
    found = messages(before)
    assert not found, f"{len(found)} messages, the first:\n{found[0]}"
    assert not before.strip(), f"validation said: {before[:2000]}"


devices = pytest.mark.parametrize("device", [pytest.param(d, id=d.id) for d in DEVICES])


@devices
def test_the_canary_is_seen_and_nothing_else(device, tmp_path):
    assert_clean(*run_validated(device, tmp_path))


@devices
def test_the_runtime_and_its_failures_are_valid_vulkan(device, tmp_path):
    """In both kinds of memory, and after failures that a test planted: nothing leaks, nothing is misused."""
    slow = "not many_times and not never_closes and not through_the_environment"
    files = [str(TESTS / f"test_{name}.py") for name in ("runtime", "layer", "submits")]
    assert_clean(*run_validated(device, tmp_path, *files, "-k", slow))


@devices
def test_every_kernel_is_valid_vulkan(device, tmp_path):
    arguments = [str(TESTS / "validation" / "selftest_cases.py")]
    assert_clean(*run_validated(device, tmp_path, *arguments, **EVERY_BARRIER))


@devices
def test_whole_models_are_valid_vulkan(device, tmp_path):
    """Prefill, decode and a ragged batch: every dispatch waits for what it reads. In device-only memory,
    where the state's copy goes before each step too."""
    files = [str(TESTS / f"test_{name}.py") for name in ("logits", "split_norm")]
    arguments = [*files, "-k", "device_logits or ragged or argmax"]
    environment = {"XINFER_VK_MEMORY": "discrete", **EVERY_BARRIER}
    assert_clean(*run_validated(device, tmp_path, *arguments, **environment))


@devices
@pytest.mark.parametrize("models", ["small", pytest.param("demo", marks=pytest.mark.tier_all)])
def test_models_with_marks_have_every_barrier_that_they_need(device, models, tmp_path):
    """Marked steps write different columns of one buffer, which validation knows only as a whole: newer
    layers report that."""
    file, which = str(TESTS / "validation" / "marked_models.py"), "demo" if models == "demo" else "not demo"
    before, since = run_validated(device, tmp_path, file, "--tier", "all", "-k", which)
    needed = [line for line in before.splitlines() if line.strip() and "WRITE-AFTER-WRITE" not in line]
    assert_clean("\n".join(needed), since)


class AnyOrder(NumpyRuntime):
    """Runs steps that are marked independent before the one they are said not to depend on."""

    def prepare(self, plan: Plan, **options: Any) -> RecordedOracles:
        groups: list[list[Step]] = []
        for step in plan.steps:
            if step.independent and groups:
                groups[-1].append(step)
            else:
                groups.append([step])
        steps = tuple(step for group in groups for step in reversed(group))
        return super().prepare(Plan(plan.name, steps), **options)


def test_steps_marked_independent_can_run_in_any_order():
    """What validation cannot see in a shared arena: no barrier between them is safe only if this holds."""
    runtime = AnyOrder()
    cases = [case for case in all_cases() if case.quick]
    failed = [f"{o.case}: {o.finding.problem}" for o in run_cases(runtime, cases) if not o.passed]
    assert not failed


@pytest.mark.parametrize("activations", ["f32", "int8"])
def test_products_of_one_input_can_run_in_any_order(tmp_path: Path, activations: str) -> None:
    """Where q, k and v are in several formats they are several products; int8 rounds x for the second."""
    formats = {"q_proj": "q4_k", "k_proj": "q8_0", "v_proj": "q4_0"}
    config = tiny_config("llama", **K_SIZES)
    write_gguf_model(
        tmp_path / "mixed.gguf", config, fmt=lambda name: formats.get(name.split(".")[-2], "q5_0")
    )
    results = []
    for runtime in (NumpyRuntime(), AnyOrder()):
        model = Loaded(runtime, tmp_path / "mixed.gguf", activation_dtype=activations)
        results.append(model.logits(list(range(7, 27)), None))
        assert any(step.independent for step in model.runner.last_plan.steps)
    np.testing.assert_array_equal(results[0], results[1])


FAMILIES = sorted(p for p in (TESTS / "fixtures" / "models" / "families").iterdir() if p.is_dir())


@pytest.mark.parametrize("path", FAMILIES, ids=lambda path: path.name)
def test_a_model_of_each_family_gives_the_same_bits_in_any_order(path: Path) -> None:
    results = [
        Loaded(runtime, path).logits(list(range(7, 27)), None) for runtime in (NumpyRuntime(), AnyOrder())
    ]
    np.testing.assert_array_equal(results[0], results[1])

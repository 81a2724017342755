"""The companion layer: barriers, features, failures that would crash Kompute, counters, timestamps."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from xinfer_vk.errors import DeviceError, DeviceLostError, OutOfMemoryError, UsageError
from xinfer_vk.kernels.copy_words import copy_words
from xinfer_vk.kernels.peak import FMA_LOCAL_SIZE, peak_fma
from xinfer_vk.plan import Buffer, BufferKind, Plan
from xinfer_vk.vulkan import layer
from xinfer_vk.vulkan.runtime import KomputeRuntime

invalid_on_purpose = pytest.mark.invalid_on_purpose  # not to be run under validation
pytestmark = pytest.mark.skipif(
    layer.load_library()[0] is None, reason=f"no layer: {layer.load_library()[1]}"
)

OUT_OF_HOST_MEMORY, OUT_OF_DEVICE_MEMORY, LOST, UNKNOWN = -1, -2, -4, -13


@pytest.fixture(params=["unified", "discrete"])
def fresh(request, device) -> Iterator[KomputeRuntime]:
    """A runtime of the test's own, which it may break."""
    opened = KomputeRuntime(device.info, memory=request.param)
    yield opened
    layer.clear_injections()
    opened.close()


def chain(rt, steps=3, words=64):
    """A plan whose every step reads what the step before wrote, its first buffer and its last."""
    buffers = [rt.allocate(f"b{i}", words, BufferKind.RESULT) for i in range(steps + 1)]
    plan = Plan("chain", tuple(copy_words(a, 0, b, 0, words) for a, b in pairwise(buffers)))
    return plan, buffers[0], buffers[-1]


def works(rt) -> bool:
    plan, first, last = chain(rt)
    rt.write(first, 0, np.arange(64, dtype=np.uint32))
    rt.prepare(plan).run()
    return bool((rt.read(last, 0, 64) == np.arange(64)).all())


# -- barriers -------------------------------------------------------------------------------------


def recorded(rt, plan):
    """The plan made ready, and what that counted: without its pipelines, which are compiled before."""
    rt.prepare(plan)
    before = rt._layer.counters()
    prepared = rt.prepare(plan)
    after = rt._layer.counters()
    return prepared, {name: after[name] - before[name] for name in after}


def test_one_barrier_stands_before_each_dispatch_and_one_before_the_host(fresh):
    plan, _, _ = chain(fresh, steps=5)
    prepared, made = recorded(fresh, plan)
    assert made["dispatches_recorded"] == 5
    assert made["barriers_recorded"] == 5  # the last, for the host, comes when the recording ends
    assert made["barriers_dropped"] == 10  # kp's, one for each of a step's two buffers
    before = fresh.counters()
    prepared.run()
    after = fresh.counters()
    assert after["barriers"] - before["barriers"] == 6
    assert after["dispatches"] - before["dispatches"] == 5
    assert after["submits"] - before["submits"] == 1


@invalid_on_purpose
def test_an_independent_step_gets_no_barrier_unless_it_is_the_first(fresh):
    plan, _, _ = chain(fresh, steps=4)
    steps = [dataclasses.replace(s, independent=i in (0, 2)) for i, s in enumerate(plan.steps)]
    _, made = recorded(fresh, Plan("independent", tuple(steps)))
    assert made["dispatches_recorded"] == 4
    assert made["barriers_recorded"] == 3


def test_independence_is_not_carried_over_to_another_recording(fresh):
    plan, _, _ = chain(fresh, steps=2)
    fresh.prepare(plan)
    fresh._layer.next_is_independent()
    before = fresh._layer.counters()["barriers_recorded"]
    fresh.prepare(plan)
    assert fresh._layer.counters()["barriers_recorded"] - before == 2


# -- features -------------------------------------------------------------------------------------


def test_what_the_device_offers_is_on(fresh):
    assert fresh._layer.features == fresh.info.features
    assert fresh.profile.features >= fresh.info.features


def test_full_subgroups_are_asked_for_where_a_kernel_needs_them_and_only_there(fresh):
    plans = [chain(fresh, steps=1)[0] for _ in range(3)]  # each with a pipeline of its own
    (step,) = plans[1].steps
    kernel = dataclasses.replace(step.kernel, full_subgroups=True)
    fresh.prepare(plans[0])
    assert fresh._layer.counters()["pipelines_full"] == 0
    fresh.prepare(Plan("full", (dataclasses.replace(step, kernel=kernel),)))
    assert fresh._layer.counters()["pipelines_full"] == 1
    fresh.prepare(plans[2])
    assert fresh._layer.counters()["pipelines_full"] == 1


def test_kernels_that_are_alike_share_their_layouts(fresh):
    """And those that come later do: SwiftShader compiles a shader anew for each layout it is used with."""
    counts = []
    for _ in range(3):
        plan, _, _ = chain(fresh)
        fresh.prepare(plan).run()
        counts.append(fresh._layer.counters())
        for buffer in {buffer for step in plan.steps for buffer in step.buffers}:
            fresh.free(buffer)
    assert counts[0]["pipelines"] < counts[1]["pipelines"] < counts[2]["pipelines"]
    assert 2 <= counts[0]["layouts"] == counts[2]["layouts"]
    target = fresh.allocate("target", FMA_LOCAL_SIZE, BufferKind.SCRATCH)
    fresh.prepare(Plan("other", (peak_fma(target, 1, 1),)))
    assert fresh._layer.counters()["layouts"] > counts[2]["layouts"]


def test_the_layer_names_the_device_that_was_opened(fresh):
    assert fresh._layer.uuid == fresh.info.uuid


# -- failures -------------------------------------------------------------------------------------

CREATIONS = [
    "vkCreateDescriptorPool",
    "vkCreateDescriptorSetLayout",
    "vkAllocateDescriptorSets",
    "vkCreateShaderModule",
    "vkCreatePipelineLayout",
    "vkCreatePipelineCache",
    "vkCreateComputePipelines",
    "vkCreateCommandPool",
    "vkAllocateCommandBuffers",
]


@pytest.mark.parametrize("function", CREATIONS)
@pytest.mark.parametrize("nth", [1, 2])
def test_a_failed_creation_is_an_exception_and_the_device_goes_on(fresh, function, nth):
    plan, first, last = chain(fresh)
    steps = tuple(dataclasses.replace(s, groups=(i + 1, 1, 1)) for i, s in enumerate(plan.steps))
    plans = [Plan("a", steps[:2]), Plan("b", steps[2:])]
    layer.inject(function, nth, OUT_OF_HOST_MEMORY)
    with pytest.raises(OutOfMemoryError, match=f"{function} returned VK_ERROR_OUT_OF_HOST_MEMORY"):
        for plan in plans:
            fresh.prepare(plan)
    fresh.write(first, 0, np.arange(64, dtype=np.uint32))
    for prepared in [fresh.prepare(plan) for plan in plans]:
        prepared.run()
    assert (fresh.read(last, 0, 64) == np.arange(64)).all()


ALLOCATIONS = [(f, kind) for f in ("vkCreateBuffer", "vkAllocateMemory") for kind in BufferKind]


@pytest.mark.parametrize(("function", "kind"), [*ALLOCATIONS, ("vkMapMemory", BufferKind.RESULT)])
def test_a_failed_allocation_tells_what_was_wanted_and_loses_nothing(fresh, kind, function):
    assert works(fresh)
    before = fresh.counters()["bytes"], fresh.allocated_bytes
    layer.inject(function, 1, OUT_OF_DEVICE_MEMORY)
    with pytest.raises(OutOfMemoryError, match=r"'big' of 65\.5 kB.*VK_ERROR_OUT_OF_DEVICE_MEMORY"):
        fresh.allocate("big", 16 << 10, kind)
    assert (fresh.counters()["bytes"], fresh.allocated_bytes) == before
    assert works(fresh)


@invalid_on_purpose
def test_an_allocation_the_driver_refuses_is_an_exception_not_a_crash(device):
    """More than the driver says it gives at once, past the check that would have refused it before. Kompute
    alone crashes there. (A driver may give it all the same: lavapipe does.)"""
    size = device.info.max_allocation_bytes + (1 << 22)
    if size >= 1 << 32:
        pytest.skip("Kompute cannot ask for more than the device gives")
    with KomputeRuntime(device.info, memory="discrete") as rt:
        buffer = Buffer("huge", size // 4, BufferKind.SCRATCH)
        try:
            rt._memory._make(buffer, mapped=False)  # device-only memory, which nothing touches
        except DeviceError as error:
            assert "making buffer 'huge'" in str(error)
        assert works(rt)


def test_a_failed_submit_does_not_wait_for_ever(fresh):
    plan, _, _ = chain(fresh)
    prepared = fresh.prepare(plan)
    layer.inject("vkQueueSubmit", 1, OUT_OF_HOST_MEMORY)
    with pytest.raises(OutOfMemoryError, match="running plan 'chain': vkQueueSubmit"):
        prepared.run()
    prepared.run()
    assert works(fresh)


@pytest.mark.parametrize("function", ["vkCreateFence", "vkQueueSubmit", "vkWaitForFences"])
def test_an_upload_that_fails_is_an_exception_that_names_its_buffer(device, function):
    with KomputeRuntime(device.info, memory="discrete") as rt:
        target = rt.allocate("target", 8, BufferKind.WEIGHTS)
        numbers = np.arange(8, dtype=np.uint32)
        rt.write(target, 0, numbers)  # the staging buffer is there
        layer.inject(function, 1, OUT_OF_HOST_MEMORY)
        with pytest.raises(OutOfMemoryError, match=f"uploading to buffer 'target': {function}"), rt.uploads():
            rt.write(target, 0, numbers)
        rt.write(target, 0, numbers)
        assert (rt.read(target, 0, 8) == numbers).all() and works(rt)


def test_an_upload_that_fails_leaves_none_running(device):
    """The caller frees the buffers then: nothing may be on its way to them."""
    with KomputeRuntime(device.info, memory="discrete") as rt:
        target = rt.allocate("target", 8, BufferKind.WEIGHTS)
        with pytest.raises(OutOfMemoryError), rt.uploads():
            rt.write(target, 0, np.arange(4, dtype=np.uint32))
            rt.write(target, 4, np.arange(4, dtype=np.uint32))
            assert len(rt._transfers._running) == 2
            layer.inject("vkWaitForFences", 1, OUT_OF_HOST_MEMORY)
        assert not rt._transfers._running
        assert works(rt)


def test_a_failed_fence_is_an_exception(fresh):
    plan, _, _ = chain(fresh)
    prepared = fresh.prepare(plan)
    layer.inject("vkCreateFence", 1, OUT_OF_HOST_MEMORY)
    with pytest.raises(OutOfMemoryError, match="vkCreateFence"):
        prepared.run()
    assert works(fresh)


RUNNING = ["vkCreateFence", "vkQueueSubmit", "vkWaitForFences"]


@pytest.mark.parametrize("function", RUNNING)
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_plan_whose_run_failed_can_run_again(device, function, nth):
    """In its first submit or a later one, untimed or timed."""
    with KomputeRuntime(device.info, steps_per_submit=2) as rt:
        plan, first, last = chain(rt, steps=6)
        for timed in {False, bool(device.info.timestamp_bits)}:
            prepared = rt.prepare(plan, timed=timed)
            rt.write(first, 0, np.arange(64, dtype=np.uint32))
            layer.inject(function, nth, OUT_OF_HOST_MEMORY)
            with pytest.raises(OutOfMemoryError, match=f"running plan 'chain': {function}"):
                prepared.run()
            rt.write(last, 0, np.zeros(64, np.uint32))
            assert prepared.run()
            assert (rt.read(last, 0, 64) == np.arange(64)).all()
            assert not timed or prepared.times_ns().shape == (6,)


@pytest.mark.parametrize("function", [*CREATIONS, *RUNNING])
@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_a_plan_that_could_not_be_recorded_again_can_run_later(fresh, function, nth):
    """What fails when a plan is cut anew, or recorded anew after a failure, leaves it as it was before."""
    plan, first, last = chain(fresh, steps=6)
    prepared = fresh.prepare(plan)
    fresh.write(first, 0, np.arange(64, dtype=np.uint32))
    for _ in range(2):
        prepared._failed = True
        layer.inject(function, nth, OUT_OF_HOST_MEMORY)
        with contextlib.suppress(OutOfMemoryError):
            prepared.run()
    layer.clear_injections()
    fresh.write(last, 0, np.zeros(64, np.uint32))
    assert prepared.run()
    assert (fresh.read(last, 0, 64) == np.arange(64)).all()


@pytest.mark.parametrize("function", ["vkQueueSubmit", "vkWaitForFences"])
def test_a_lost_device_is_told_at_once_and_ever_after(fresh, function):
    plan, first, _ = chain(fresh)
    prepared = fresh.prepare(plan)
    prepared.run()
    layer.inject(function, 1, LOST)
    with pytest.raises(
        DeviceLostError, match=f"running plan 'chain': {function} returned VK_ERROR_DEVICE_LOST"
    ):
        prepared.run()
    with pytest.raises(DeviceLostError, match="lost earlier"):
        prepared.run()
    with pytest.raises(DeviceLostError, match="lost earlier"):
        fresh.allocate("late", 16, BufferKind.SCRATCH)
    assert (fresh.read(first, 0, 4) == 0).all()  # what is mapped can still be read
    fresh.close()


def test_another_failure_names_the_function_and_the_result(fresh):
    plan, _, _ = chain(fresh)
    layer.inject("vkCreateComputePipelines", 1, UNKNOWN)
    with pytest.raises(DeviceError, match="vkCreateComputePipelines returned VK_ERROR_UNKNOWN") as caught:
        fresh.prepare(plan)
    assert not isinstance(caught.value, (OutOfMemoryError, DeviceLostError))


def test_faults_can_be_planted_through_the_environment(device):
    code = (
        "import sys\n"
        "from xinfer_vk.vulkan.runtime import open_runtime\n"
        "from xinfer_vk.plan import BufferKind\n"
        "from xinfer_vk.errors import OutOfMemoryError\n"
        "with open_runtime(sys.argv[1]) as rt:\n"
        "    rt.allocate('first', 8, BufferKind.RESULT)\n"
        "    try: rt.allocate('second', 8, BufferKind.RESULT)\n"
        "    except OutOfMemoryError as error: print('refused:', error)\n"
    )
    env = {**os.environ, "XINFER_VK_INJECT": "vkAllocateMemory:2:-2", "XINFER_VK_MEMORY": "unified"}
    command = [sys.executable, "-c", code, str(device.index)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused: out of device memory while making buffer 'second'")


def test_a_wrong_fault_in_the_environment_is_named(device, monkeypatch):
    monkeypatch.setenv("XINFER_VK_INJECT", "vkQueueSubmit:often")
    with pytest.raises(DeviceError, match="'vkQueueSubmit:often' is not function:nth:result"):
        KomputeRuntime(device.info)


# -- memory that is read back ---------------------------------------------------------------------

LOCAL, VISIBLE, COHERENT, CACHED = 1, 2, 4, 8
WRITTEN, READ_BACK = VISIBLE | COHERENT, VISIBLE | COHERENT | CACHED


@pytest.mark.parametrize(
    ("types", "asked", "bits", "given"),
    [  # (flags, heap) of each type
        ([(LOCAL, 0), (WRITTEN, 1), (READ_BACK, 1), (LOCAL | WRITTEN, 0)], 1, 0b1111, 2),
        ([(LOCAL, 0), (WRITTEN, 1), (LOCAL | WRITTEN, 0), (READ_BACK, 1)], 1, 0b1111, 3),
        ([(LOCAL, 0), (WRITTEN, 1), (READ_BACK, 1)], 1, 0b0011, 1),  # the buffer cannot have it
        ([(LOCAL, 0), (WRITTEN, 1), (READ_BACK, 0)], 1, 0b1111, 1),  # in another heap
        ([(LOCAL, 0), (WRITTEN, 1), (VISIBLE | CACHED, 1)], 1, 0b1111, 1),  # not coherent: kp never flushes
        ([(LOCAL | READ_BACK, 0)], 0, 0b1, 0),
        ([(LOCAL, 0), (WRITTEN, 1), (READ_BACK | 64, 1)], 1, 0b1111, 1),  # with a property nobody asked for
    ],
)
def test_what_the_host_reads_back_is_cached_where_it_can_be(types, asked, bits, given):
    library, _ = layer.load_library()
    flags, heaps = (np.array(column, np.uint32) for column in zip(*types))
    got = library.xinfer_cached_type(flags.ctypes.data, heaps.ctypes.data, len(types), asked, bits)
    assert got == given


# -- counters and times ---------------------------------------------------------------------------


def test_counters_follow_memory_up_and_down(fresh):
    start = fresh.counters()["bytes"]
    buffers = [fresh.allocate(f"b{i}", 1 << 16, BufferKind.RESULT) for i in range(3)]
    assert fresh.counters()["bytes"] - start >= 3 << 18
    for buffer in buffers:
        fresh.free(buffer)
    assert fresh.counters()["bytes"] == start
    assert fresh.counters()["peak_bytes"] >= start + (3 << 18)


def test_steps_of_one_geometry_share_a_pipeline(fresh):
    before = fresh.counters()["pipelines"]
    a, b = (fresh.allocate(n, 512, BufferKind.RESULT) for n in "ab")
    plan = Plan("shared", tuple(copy_words(a, i, b, i, 1) for i in range(40)))
    fresh.prepare(plan)
    fresh.prepare(plan)
    assert fresh.counters()["pipelines"] == before + 1


def test_steps_of_any_size_share_a_pipeline(fresh):
    """The layer gives each dispatch its own group counts, also where a sequence is recorded anew."""
    before = fresh.counters()["pipelines"]
    target = fresh.allocate("target", 8 * FMA_LOCAL_SIZE, BufferKind.RESULT)
    for groups in ([3, 1], [1, 2], [8]):
        prepared = fresh.prepare(Plan("sizes", tuple(peak_fma(target, g, 1) for g in groups)))
        for _ in range(2):  # the second run is of one that was recorded for good
            fresh.write(target, 0, np.zeros(target.words, np.uint32))
            prepared.run()
            assert np.count_nonzero(fresh.read(target, 0, target.words)) == max(groups) * FMA_LOCAL_SIZE
    assert fresh.counters()["pipelines"] == before + 1


def test_a_timed_plan_gives_the_time_of_each_step_anew_at_each_run(fresh):
    if not fresh.info.timestamp_bits:
        pytest.skip("the device has no timestamps")
    large, small = 1 << 20, 16
    a, b = (fresh.allocate(n, large, BufferKind.SCRATCH) for n in "ab")
    state = fresh.allocate("state", 8, BufferKind.STATE)
    plan = Plan(
        "timed",
        (copy_words(a, 0, b, 0, small), copy_words(a, 0, b, 0, large), copy_words(state, 0, b, 0, 8)),
    )
    prepared = fresh.prepare(plan, timed=True)
    prepared.run()
    first = prepared.times_ns()
    prepared.run()
    second = prepared.times_ns()
    assert first.shape == second.shape == (3,)  # the state's copy on a discrete device is not the plan's
    assert (first > 0).all() and (second > 0).all()
    assert (first != second).any()
    assert min(first[1], second[1]) > min(first[0], second[0])


def test_a_plan_in_several_submits_is_timed_whole(device):
    with KomputeRuntime(device.info, steps_per_submit=2) as rt:
        plan, _, _ = chain(rt, steps=5)
        prepared = rt.prepare(plan, timed=True)
        prepared.run()
        assert prepared.times_ns().shape == (5,)


def test_times_of_an_untimed_plan_are_refused(fresh):
    plan, _, _ = chain(fresh)
    prepared = fresh.prepare(plan)
    prepared.run()
    with pytest.raises(UsageError, match="timed=True"):
        prepared.times_ns()


# -- being switched on ----------------------------------------------------------------------------


def test_the_environment_is_as_it_was_after_opening(device, monkeypatch):
    monkeypatch.setenv("VK_INSTANCE_LAYERS", "VK_LAYER_that_is_not_there")
    before = dict(os.environ)
    with KomputeRuntime(device.info) as rt:
        assert rt.layer_active
        assert dict(os.environ) == before


@pytest.mark.parametrize("variable", ["VK_LAYER_PATH", "VK_ADD_LAYER_PATH"])
def test_the_users_own_layer_folders_do_not_hide_the_layer(device, monkeypatch, tmp_path, variable):
    monkeypatch.setenv(variable, str(tmp_path))
    with KomputeRuntime(device.info) as rt:
        assert rt.layer_active


def test_a_loader_that_knows_only_the_old_variable_is_served(device, monkeypatch):
    """The second attempt, for loaders that do not know VK_ADD_LAYER_PATH."""
    real = layer.enabled

    def old_loader(replace_path: bool = False):
        context = real(replace_path)

        class Hiding:
            def __enter__(self):
                context.__enter__()
                os.environ.pop("VK_ADD_LAYER_PATH", None)

            def __exit__(self, *error):
                return context.__exit__(*error)

        return Hiding()

    monkeypatch.setattr(layer, "enabled", old_loader)
    with KomputeRuntime(device.info) as rt:
        assert rt.layer_active


def test_a_layer_that_does_not_load_is_told_and_done_without(device, monkeypatch, tmp_path):
    broken = tmp_path / "libxinfer_layer.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(layer, "LIBRARY", broken)
    layer.load_library.cache_clear()
    try:
        with KomputeRuntime(device.info) as rt:
            assert not rt.layer_active
            assert any(
                "the companion layer is off (libxinfer_layer.so does not load" in n for n in rt.notices
            )
            assert works(rt)
    finally:
        layer.load_library.cache_clear()


def test_a_layer_the_loader_refuses_is_told_and_done_without(device, monkeypatch):
    monkeypatch.setattr(layer.DeviceLayer, "of_newest_device", classmethod(lambda cls: None))
    with KomputeRuntime(device.info) as rt:
        assert not rt.layer_active
        assert any("the Vulkan loader did not load it" in n for n in rt.notices)
        assert works(rt)


@pytest.mark.parametrize(
    ("folder", "manifest", "reason"),
    [("no-manifest", False, "layer.json is not beside it"), ("a:b", True, "has a ':' in its name")],
)
def test_a_layer_that_the_loader_cannot_find_is_told_and_done_without(
    device, monkeypatch, tmp_path, folder, manifest, reason
):
    copy = tmp_path / folder / layer.LIBRARY.name
    copy.parent.mkdir()
    shutil.copy(layer.LIBRARY, copy)
    if manifest:
        shutil.copy(layer.LIBRARY.parent / layer.MANIFEST, copy.parent)
    monkeypatch.setattr(layer, "LIBRARY", copy)
    with KomputeRuntime(device.info) as rt:
        assert not rt.layer_active
        assert any(reason in n for n in rt.notices)
        assert works(rt)


def test_opening_a_device_writes_no_files(device, monkeypatch, tmp_path):
    """What a process that dies meanwhile would leave."""
    made: list[str] = []
    real = layer.DeviceLayer.of_newest_device

    def look():
        made.extend(p.name for p in tmp_path.rglob("*"))
        return real()

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "mkdtemp", lambda *a, **k: pytest.fail("a temporary folder was made"))
    monkeypatch.setattr(layer.DeviceLayer, "of_newest_device", look)
    with KomputeRuntime(device.info) as rt:
        assert rt.layer_active and not made


def test_the_build_and_the_program_call_the_layer_the_same():
    from build_support import layer as built

    assert (layer.NAME, layer.MANIFEST, layer.LIBRARY.name) == (built.NAME, built.MANIFEST, built.LIBRARY)


def test_two_devices_are_kept_apart(device):
    """Two managers at once, on the same device: each has its own counters and failures."""
    with KomputeRuntime(device.info) as one, KomputeRuntime(device.info) as other:
        plan, _, _ = chain(one)
        prepared = one.prepare(plan)
        assert other.counters()["pipelines"] == 0
        layer.inject("vkQueueSubmit", 1, LOST)
        with pytest.raises(DeviceLostError):
            prepared.run()
        assert works(other)


def test_devices_of_several_threads_are_kept_apart(device):
    """One runtime a thread, opened and used at the same time."""
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(3):
                with KomputeRuntime(device.info) as rt:
                    assert rt.layer_active
                    assert works(rt)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_calls_for_a_device_that_is_gone_do_nothing(device):
    rt = KomputeRuntime(device.info)
    gone = rt._layer
    rt.close()
    assert gone.take_failure() is None
    assert gone.counters()["pipelines"] == 0
    assert gone.cache_data() == b""
    assert not gone.open_cache(b"")
    assert gone.timestamps(1, 4).size == 0
    gone.next_is_independent()
    gone.set_barriers(False)

"""The Kompute runtime: buffers, transfers, plans, their order and their end."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from xinfer_vk.errors import DeviceError, OutOfMemoryError, UsageError
from xinfer_vk.kernels.copy_words import KERNEL, copy_words, fill_words
from xinfer_vk.plan import BufferKind, Plan, Step
from xinfer_vk.reference import NumpyRuntime
from xinfer_vk.vulkan import layer, memory, programs, transfers
from xinfer_vk.vulkan.devices import MemoryHeap
from xinfer_vk.vulkan.pipeline_cache import MAGIC, PipelineCacheFile, pipeline_cache_folder
from xinfer_vk.vulkan.runtime import KomputeRuntime, open_runtime

WORD = 4


@pytest.fixture(params=["unified", "discrete", "no layer"])
def fresh(request, device, monkeypatch) -> Iterator[KomputeRuntime]:
    """A runtime of the test's own: mapped memory, device-only memory, and without the companion layer."""
    if request.param == "no layer":
        monkeypatch.setenv("XINFER_VK_LAYER", "off")
    layer.load_library.cache_clear()
    opened = KomputeRuntime(device.info, memory="unified" if request.param == "unified" else "discrete")
    yield opened
    opened.close()
    layer.load_library.cache_clear()


def words(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 32, count, np.uint32)


def chain(rt, steps=3, count=64, kind=BufferKind.SCRATCH, **changes):
    """A plan whose every step reads what the step before wrote, its first buffer and its last."""
    buffers = [rt.allocate(f"b{i}", count, kind) for i in range(steps + 1)]
    made = [replace(copy_words(a, 0, b, 0, count), **changes) for a, b in pairwise(buffers)]
    return Plan("chain", tuple(made)), buffers[0], buffers[-1]


# -- kernels of this room -------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 255, 257, 70000])
@pytest.mark.parametrize("groups", [None, 1, 5])
def test_copy_words_moves_exactly_the_words_asked_for(check_steps, count, groups):
    def build(rt):
        source = rt.allocate("source", count + 7, BufferKind.WEIGHTS)
        target = rt.allocate("target", count + 9, BufferKind.SCRATCH)
        rt.write(source, 0, words(count + 7, count))
        return copy_words(source, 5, target, 3, count, groups)

    check_steps(build, views={"source": "u32", "target": "u32"})


@pytest.mark.parametrize("count", [1, 3, 255, 257, 70000])
@pytest.mark.parametrize("groups", [None, 1, 5])
def test_fill_words_sets_exactly_the_words_asked_for(check_steps, count, groups):
    def build(rt):
        target = rt.allocate("target", count + 9, BufferKind.SCRATCH)
        return fill_words(target, 3, count, 0xDEADBEEF, groups)

    check_steps(build, views={"target": "u32"})


def test_one_copy_covers_more_words_than_a_dispatch_has_invocations(check_steps):
    """65535 workgroups of 256 are the most there can be; here 1 of 256 copies 1001 words."""

    def build(rt):
        source, target = (rt.allocate(n, 1001, BufferKind.SCRATCH) for n in ("source", "target"))
        rt.write(source, 0, words(1001))
        return copy_words(source, 0, target, 0, 1001, groups=1)

    check_steps(build, views={"source": "u32", "target": "u32"})


def test_a_step_of_too_many_groups_cannot_be_built(numpy_runtime):
    a, b = (numpy_runtime.allocate(n, 8, BufferKind.SCRATCH) for n in "ab")
    with pytest.raises((AssertionError, ValueError)):
        copy_words(a, 0, b, 0, 8, groups=65536)


# -- buffers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(BufferKind))
@pytest.mark.parametrize("count", [1, 3, 1025])
def test_a_new_buffer_is_zero_and_keeps_what_is_written(fresh, kind, count):
    used = fresh.allocate("used", count, kind)  # so that the next is not zero by luck
    fresh.write(used, 0, words(count))
    fresh.free(used)
    buffer = fresh.allocate("new", count, kind)
    if kind is not BufferKind.KV:  # sized for a whole context: its pages stay untouched until they are used
        assert (fresh.read(buffer, 0, count) == 0).all()
    data = words(count, 1)
    fresh.write(buffer, 0, data)
    assert (fresh.read(buffer, 0, count) == data).all()
    fresh.write(buffer, count - 1, np.array([7], np.uint32))
    assert fresh.read(buffer, count - 1, 1) == 7
    assert (fresh.read(buffer, 0, count - 1) == data[:-1]).all()


def test_transfers_longer_than_the_staging_buffer_arrive_whole(device, monkeypatch):
    with KomputeRuntime(device.info, memory="discrete") as rt:
        rt._transfers._words = 1000
        buffer = rt.allocate("b", 5003, BufferKind.WEIGHTS)
        data = words(4001)
        rt.write(buffer, 501, data)
        assert (rt.read(buffer, 501, 4001) == data).all()
        assert (rt.read(buffer, 0, 501) == 0).all() and (rt.read(buffer, 4502, 501) == 0).all()


def test_uploads_go_on_while_the_host_fills_the_other_half(device):
    with KomputeRuntime(device.info, memory="discrete") as rt:
        rt._transfers._words = 1000
        buffers = [rt.allocate(name, 7000, BufferKind.WEIGHTS) for name in "ab"]
        data = words(14000).reshape(2, 7000)
        with rt.uploads():
            for start, count in ((0, 1), (1, 499), (500, 3000), (3500, 501), (4001, 2999)):
                for buffer, row in zip(buffers, data):
                    rt.write(buffer, start, row[start : start + count])
                assert len(rt._transfers._running) == 2
        assert not rt._transfers._running
        for buffer, row in zip(buffers, data):
            assert (rt.read(buffer, 0, 7000) == row).all()
        rt.write(buffers[0], 0, data[1])
        assert not rt._transfers._running


@pytest.mark.parametrize("count", [1, 65536, 65537, 300000])
def test_transfers_of_any_length_arrive_whole(fresh, count):
    buffer = fresh.allocate("b", count + 2, BufferKind.KV)
    data = words(count)
    fresh.write(buffer, 1, data)
    assert (fresh.read(buffer, 1, count) == data).all()
    assert fresh.read(buffer, 0, 1) == fresh.read(buffer, count + 1, 1) == 0


def test_a_transfer_of_nothing_does_nothing(fresh):
    buffer = fresh.allocate("b", 4, BufferKind.SCRATCH)
    fresh.write(buffer, 4, np.zeros(0, np.uint32))
    assert fresh.read(buffer, 4, 0).size == 0


def test_what_is_read_is_a_copy(fresh):
    buffer = fresh.allocate("b", 4, BufferKind.RESULT)
    got = fresh.read(buffer, 0, 4)
    fresh.write(buffer, 0, np.ones(4, np.uint32))
    assert (got == 0).all()
    fresh.free(buffer)
    assert (got == 0).all()


def test_floats_strides_and_shapes_are_written_as_words(fresh):
    buffer = fresh.allocate("b", 6, BufferKind.SCRATCH)
    data = np.arange(12, dtype=np.float32).reshape(2, 6)[:, ::2]
    fresh.write(buffer, 0, data)
    assert (fresh.read(buffer, 0, 6).view(np.float32) == data.reshape(-1)).all()


def test_what_is_no_word_is_refused(fresh):
    buffer = fresh.allocate("b", 8, BufferKind.SCRATCH)
    with pytest.raises(UsageError, match="32-bit words, not of int64"):
        fresh.write(buffer, 0, np.arange(4))


@pytest.mark.parametrize(("offset", "count"), [(-1, 2), (0, 9), (8, 1), (7, 2), (1 << 40, 1), (0, -1)])
def test_what_is_outside_a_buffer_is_refused(fresh, offset, count):
    buffer = fresh.allocate("b", 8, BufferKind.SCRATCH)
    with pytest.raises(UsageError, match="'b'"):
        fresh.read(buffer, offset, count)
    if count > 0:
        with pytest.raises(UsageError, match="'b'"):
            fresh.write(buffer, offset, np.zeros(count, np.uint32))


@pytest.mark.parametrize("count", [0, -1])
def test_a_buffer_of_nothing_is_refused(fresh, count):
    with pytest.raises(UsageError, match=f"'empty' of {count} words"):
        fresh.allocate("empty", count, BufferKind.SCRATCH)


def test_a_freed_or_foreign_buffer_is_refused(fresh, numpy_runtime):
    freed = fresh.allocate("mine", 8, BufferKind.STATE)
    fresh.free(freed)
    foreign = numpy_runtime.allocate("foreign", 8, BufferKind.SCRATCH)
    target = fresh.allocate("target", 8, BufferKind.SCRATCH)
    for buffer in (freed, foreign):
        with pytest.raises(UsageError, match="freed, or is another's"):
            fresh.read(buffer, 0, 8)
        with pytest.raises(UsageError, match="freed, or is another's"):
            fresh.free(buffer)
        with pytest.raises(UsageError, match="freed, or is another's"):
            fresh.prepare(Plan("stale", (copy_words(buffer, 0, target, 0, 8),)))


def test_freed_memory_is_given_back(fresh):
    fresh.read(
        fresh.allocate("first", 8, BufferKind.KV), 0, 8
    )  # makes the staging buffer, where there is one
    before = fresh.allocated_bytes
    for kind in BufferKind:
        fresh.free(fresh.allocate("b", 1 << 16, kind))
    assert fresh.allocated_bytes == before
    assert fresh.counters()["peak_bytes"] >= before + (1 << 18)


# -- limits ---------------------------------------------------------------------------------------


def test_what_kompute_would_wrap_at_4_gib_is_refused(fresh):
    huge = replace(fresh.info, max_storage_range_bytes=1 << 40, max_allocation_bytes=1 << 40)
    fresh._memory._info = huge
    for count in (1 << 30, (1 << 30) + 1):
        with pytest.raises(OutOfMemoryError, match=r"'wraps' of 4\.3 GB is larger than .* a Kompute buffer"):
            fresh.allocate("wraps", count, BufferKind.KV)


@pytest.mark.parametrize("limit", ["max_storage_range_bytes", "max_allocation_bytes"])
def test_what_the_device_cannot_bind_or_give_is_refused_before_kompute_sees_it(fresh, limit):
    fresh._memory._info = replace(fresh.info, **{limit: 4096})
    fresh.allocate("fits", 1024, BufferKind.WEIGHTS)
    with pytest.raises(OutOfMemoryError, match=r"'large' of 4\.1 kB is larger than 4\.1 kB, the most"):
        fresh.allocate("large", 1025, BufferKind.WEIGHTS)


def small_heap(fresh, size: int):
    heaps = tuple(MemoryHeap(size, None, True) for _ in fresh.info.heaps)
    return replace(fresh.info, heaps=heaps)


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [(BufferKind.WEIGHTS, "fewer bits a weight"), (BufferKind.KV, "smaller context, kv_dtype=.q8_0")],
)
def test_more_than_is_free_is_refused_with_both_sizes_and_what_helps(fresh, kind, remedy):
    fresh.read(fresh.allocate("first", 8, kind), 0, 8)
    heap = fresh.info.heap_of(mapped=not fresh._memory.discrete)  # staging may lie in another one
    fresh._memory._info = small_heap(fresh, fresh._memory._heap_bytes[heap] + (1 << 20))
    fresh.allocate("half", 1 << 17, kind)
    with pytest.raises(
        OutOfMemoryError, match=rf"'rest' needs 1\.0 MB and .* has 524\.3 kB free: .*{remedy}"
    ):
        fresh.allocate("rest", 1 << 18, kind)
    with pytest.raises(OutOfMemoryError, match=r"the model needs 2\.1 GB and .* has 524\.3 kB free"):
        fresh.require_free(2 << 30, "the model", kind)
    fresh.require_free(1 << 19, "the model", kind)


def test_a_cpu_device_has_no_more_than_the_machine(fresh, monkeypatch):
    if not fresh.info.is_cpu:
        pytest.skip("a device with memory of its own")
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 1 << 20)
    with pytest.raises(OutOfMemoryError, match=r"has 1\.0 MB free"):
        fresh.allocate("b", 1 << 19, BufferKind.SCRATCH)


# -- plans ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps_per_submit", [None, 1, 2, 3, 100])
@pytest.mark.parametrize("mode", ["on", "off"])
def test_dependent_steps_run_in_order_however_they_are_submitted(device, monkeypatch, steps_per_submit, mode):
    monkeypatch.setenv("XINFER_VK_LAYER", mode)
    layer.load_library.cache_clear()
    try:
        with KomputeRuntime(device.info, steps_per_submit=steps_per_submit) as rt:
            plan, first, last = chain(rt, steps=7)
            prepared = rt.prepare(plan)
            for seed in range(3):
                data = words(64, seed)
                rt.write(first, 0, data)
                prepared.run()
                assert (rt.read(last, 0, 64) == data).all()
            one_each = 7 if not rt.layer_active else -(-7 // (steps_per_submit or 7))
            assert prepared_submits(prepared) == one_each
    finally:
        layer.load_library.cache_clear()


def test_the_environment_can_cut_plans_too(device, monkeypatch):
    monkeypatch.setenv("XINFER_VK_STEPS_PER_SUBMIT", "1")
    with KomputeRuntime(device.info) as rt:
        plan, _, _ = chain(rt, steps=5)
        assert prepared_submits(rt.prepare(plan)) == 5


def prepared_submits(prepared) -> int:
    return len(prepared._sequences)


def test_without_the_layer_independent_steps_share_a_submit_and_dependent_ones_do_not(device, monkeypatch):
    monkeypatch.setenv("XINFER_VK_LAYER", "off")
    layer.load_library.cache_clear()
    try:
        with KomputeRuntime(device.info) as rt:
            assert not rt.layer_active
            assert any("the companion layer is off (XINFER_VK_LAYER=off)" in notice for notice in rt.notices)
            a, b, c, d = (rt.allocate(n, 8, BufferKind.SCRATCH) for n in "abcd")
            one, two = copy_words(a, 0, b, 0, 8), replace(copy_words(a, 0, c, 0, 8), independent=True)
            three = copy_words(c, 0, d, 0, 8)
            assert prepared_submits(rt.prepare(Plan("p", (one, two, three)))) == 2
    finally:
        layer.load_library.cache_clear()


def test_a_plan_sees_the_state_as_it_is_when_it_runs(fresh):
    state = fresh.allocate("state", 16, BufferKind.STATE)
    result = fresh.allocate("result", 16, BufferKind.RESULT)
    other = fresh.allocate("other state", 16, BufferKind.STATE)
    plan = Plan("p", (copy_words(state, 0, result, 0, 8), copy_words(other, 0, result, 8, 8)))
    prepared = fresh.prepare(plan)
    for seed in range(3):
        fresh.write(state, 0, words(16, seed))
        fresh.write(other, 0, words(16, seed + 10))
        prepared.run()
        want = np.concatenate([words(16, seed)[:8], words(16, seed + 10)[:8]])
        assert (fresh.read(result, 0, 16) == want).all()


def test_push_constants_belong_to_the_step_and_not_to_the_shared_pipeline(fresh):
    a = fresh.allocate("a", 100, BufferKind.SCRATCH)
    b = fresh.allocate("b", 100, BufferKind.RESULT)
    fresh.write(a, 0, words(100))
    steps = tuple(copy_words(a, i, b, 99 - i, 1) for i in range(100))
    fresh.prepare(Plan("reverse", steps)).run()
    assert (fresh.read(b, 0, 100) == words(100)[::-1]).all()


def test_several_plans_live_side_by_side(fresh):
    plans = [chain(fresh, steps=2) for _ in range(5)]
    prepared = [fresh.prepare(plan) for plan, _, _ in plans]
    for i, (_, first, _) in enumerate(plans):
        fresh.write(first, 0, words(64, i))
    for one in reversed(prepared):
        one.run()
    for i, (_, _, last) in enumerate(plans):
        assert (fresh.read(last, 0, 64) == words(64, i)).all()


def test_a_long_plan_runs_whole(fresh):
    a, b = (fresh.allocate(n, 64, BufferKind.RESULT) for n in "ab")
    fresh.write(a, 0, words(64))
    steps = tuple(copy_words(a, i % 64, b, i % 64, 1) for i in range(1500))
    fresh.prepare(Plan("long", steps)).run()
    assert (fresh.read(b, 0, 64) == words(64)).all()


def test_a_plan_without_steps_is_refused(fresh):
    with pytest.raises(UsageError, match="'nothing' has no steps"):
        fresh.prepare(Plan("nothing", ()))


def test_more_groups_than_the_device_takes_are_refused(fresh):
    plan, _, _ = chain(fresh, groups=(1, 300, 1))
    fresh.profile = replace(fresh.profile, max_group_count=200)
    with pytest.raises(DeviceError, match=r"has 300 workgroups in one dimension, and .* takes 200"):
        fresh.prepare(plan)


def test_progress_hears_of_new_pipelines_only(fresh):
    plan, _, _ = chain(fresh, steps=3)
    heard: list[tuple[int, int]] = []
    fresh.prepare(plan, progress=lambda done, total: heard.append((done, total)))
    assert heard == [(0, 3), (1, 3), (2, 3), (3, 3)]
    heard.clear()
    fresh.prepare(plan, progress=lambda done, total: heard.append((done, total)))
    assert heard == []


def test_freeing_a_buffer_releases_the_plans_that_use_it_and_no_others(fresh):
    plan, first, _ = chain(fresh)
    other, _, _ = chain(fresh)
    prepared, unrelated = fresh.prepare(plan), fresh.prepare(other)
    fresh.free(first)
    with pytest.raises(UsageError, match="'chain' cannot run: buffer 'b0', which it uses, was freed"):
        prepared.run()
    unrelated.run()


def test_a_released_plan_cannot_run_and_can_be_prepared_again(fresh):
    plan, _, _ = chain(fresh)
    prepared = fresh.prepare(plan)
    prepared.release()
    prepared.release()
    with pytest.raises(UsageError, match="it was released"):
        prepared.run()
    fresh.prepare(plan).run()


def test_a_dropped_plan_gives_its_command_buffers_back(fresh):
    plan, _, _ = chain(fresh)
    prepared = fresh.prepare(plan)
    prepared.run()
    del prepared
    gc.collect()
    assert not list(fresh._plans)
    fresh.prepare(plan).run()


def test_runs_are_counted(fresh):
    plan, _, _ = chain(fresh, steps=4)
    prepared = fresh.prepare(plan)
    before = fresh.counters()
    for _ in range(3):
        prepared.run()
    after = fresh.counters()
    assert after["runs"] - before["runs"] == 3
    assert after["dispatches"] - before["dispatches"] == 12
    assert after["submits"] - before["submits"] == 3 * prepared_submits(prepared)
    if fresh.layer_active:
        assert after["barriers"] - before["barriers"] == 3 * 5  # before each dispatch, and before the host


# -- shaders --------------------------------------------------------------------------------------


def test_shaders_that_were_not_compiled_are_told_with_the_remedy(fresh, tmp_path):
    plan, _, _ = chain(fresh)
    for content in (None, "{}", "not json", "[]", '{"copy_words": 3}'):
        fresh._programs._shaders = programs.ShaderLibrary(tmp_path)
        if content is not None:
            (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(DeviceError, match=r"build_shaders\.py"):
            fresh.prepare(plan)


def test_a_shader_file_that_is_missing_is_told_with_the_remedy(fresh, tmp_path):
    plan, _, _ = chain(fresh)
    (tmp_path / "manifest.json").write_text(json.dumps({"copy_words": {"file": "gone.spv"}}))
    fresh._programs._shaders = programs.ShaderLibrary(tmp_path)
    with pytest.raises(DeviceError, match=r"cannot read .*gone\.spv.*build_shaders\.py"):
        fresh.prepare(plan)


def changed(code: bytes, at: int) -> bytes:
    return code[:at] + bytes([code[at] ^ 1]) + code[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda code: b"",
        lambda code: b"not SPIR-V",
        lambda code: code[:20],
        lambda code: code[: len(code) // 8 * 4],
        lambda code: code[:-4],
        lambda code: code + bytes(4),
        lambda code: changed(code, 0),
        lambda code: changed(code, len(code) // 2),
        lambda code: (programs.SPIRV / "fill_words.spv").read_bytes(),
    ],
)
def test_a_shader_file_that_is_not_what_was_compiled_never_reaches_the_driver(fresh, tmp_path, damage):
    plan, _, _ = chain(fresh)
    shutil.copy(programs.SPIRV / "manifest.json", tmp_path)
    file = tmp_path / "copy_words.spv"
    file.write_bytes(damage((programs.SPIRV / file.name).read_bytes()))
    fresh._programs._shaders = programs.ShaderLibrary(tmp_path)
    with pytest.raises(DeviceError, match=r"copy_words\.spv is damaged: .*build_shaders\.py") as caught:
        fresh.prepare(plan)
    assert "\n" not in str(caught.value)


def test_a_manifest_of_an_older_build_is_told_with_the_remedy(fresh, tmp_path):
    plan, _, _ = chain(fresh)
    (tmp_path / "manifest.json").write_text(json.dumps({"copy_words": {"file": "copy_words.spv"}}))
    shutil.copy(programs.SPIRV / "copy_words.spv", tmp_path)
    fresh._programs._shaders = programs.ShaderLibrary(tmp_path)
    with pytest.raises(DeviceError, match=r"copy_words\.spv is damaged.*build_shaders\.py"):
        fresh.prepare(plan)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"bindings": ("a", "b", "c")}, "bindings"),
        ({"params": ("source_offset:u", "target_offset:u")}, "push"),
        ({"params": ("count:u", "source_offset:u", "target_offset:u")}, "push"),
        ({"spec": (("local_size", 64), ("more", 1))}, "spec"),
    ],
)
def test_a_kernel_that_does_not_fit_its_shader_is_told(changes, what):
    with pytest.raises(DeviceError, match=f"kernel copy_words and shader copy_words disagree about {what}"):
        programs.ShaderLibrary().code(replace(KERNEL, **changes))


# -- the pipeline cache ---------------------------------------------------------------------------


@pytest.fixture
def cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XINFER_VK_CACHE", str(tmp_path))
    return tmp_path / "pipelines"


def compile_something(device, size=3) -> dict[str, int]:
    with KomputeRuntime(device.info) as rt:
        if not rt.layer_active:
            pytest.skip("the pipeline cache is the layer's")
        plan, first, last = chain(rt, steps=size)
        rt.write(first, 0, words(64))
        rt.prepare(plan).run()
        assert (rt.read(last, 0, 64) == words(64)).all()
        return rt.counters()


def cache_file(device, folder) -> PipelineCacheFile:
    info = device.info
    return PipelineCacheFile(
        folder,
        device_uuid=info.uuid,
        driver=f"{info.driver} {info.name}",
        vendor_id=info.vendor_id,
        device_id=info.device_id,
        cache_uuid=info.pipeline_cache_uuid,
    )


def test_pipelines_are_kept_between_runs(device, cache_folder):
    compile_something(device)
    (file,) = cache_folder.iterdir()
    assert file.read_bytes().startswith(MAGIC)
    assert cache_file(device, cache_folder).load()
    compile_something(device)
    assert [p.name for p in cache_folder.iterdir()] == [file.name]


def test_the_cache_is_written_only_when_it_changes(device, cache_folder):
    compile_something(device)
    file = cache_file(device, cache_folder)
    data, stamp = file.load(), file.path.stat().st_mtime_ns
    assert not file.save(data)
    assert file.path.stat().st_mtime_ns == stamp
    assert file.save(data + b"more")
    assert file.load() == data + b"more"


def test_a_run_that_makes_no_pipeline_writes_no_cache(device, cache_folder):
    with KomputeRuntime(device.info):
        pass
    assert not cache_folder.exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: b"\0" * len(data),
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: data[: len(MAGIC) + 10],
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: MAGIC + data[len(MAGIC) + 1 :],
        lambda data: b"something else",
    ],
)
def test_a_damaged_pipeline_cache_is_ignored_and_replaced(device, cache_folder, damage):
    compile_something(device)
    (file,) = cache_folder.iterdir()
    good = file.read_bytes()
    file.write_bytes(damage(good))
    compile_something(device)
    assert file.read_bytes().startswith(MAGIC)
    assert cache_file(device, cache_folder).load()


def test_a_cache_of_another_driver_is_not_given_to_this_one(cache_folder):
    def file(**changes):
        known = {
            "device_uuid": "ab" * 16,
            "driver": "d 1",
            "vendor_id": 1,
            "device_id": 2,
            "cache_uuid": "cd" * 16,
        }
        return PipelineCacheFile(cache_folder, **{**known, **changes})

    def header(size=32, version=1, vendor=1, device=2, uuid=b"\xcd" * 16):
        return b"".join(int(n).to_bytes(4, "little") for n in (size, version, vendor, device)) + uuid

    assert file().save(header() + b"pipelines")
    assert file().load() == header() + b"pipelines"
    assert file(driver="d 2").path != file().path
    for other in ({"vendor_id": 9}, {"device_id": 9}, {"cache_uuid": "ee" * 16}):
        assert file(**other).load() == b""
    for wrong in (b"", b"short", header(size=4), header(size=99), header(version=2), header(vendor=7)):
        assert not file().save(wrong)
    assert file().load() == header() + b"pipelines"


def test_a_folder_that_cannot_be_written_is_no_error(device, monkeypatch, tmp_path):
    blocked = tmp_path / "a file, where a folder should be"
    blocked.write_text("")
    monkeypatch.setenv("XINFER_VK_CACHE", str(blocked))
    compile_something(device)
    assert blocked.read_text() == ""


def test_a_cache_folder_without_permission_is_no_error(device, monkeypatch, tmp_path):
    (tmp_path / "pipelines").mkdir()
    (tmp_path / "pipelines").chmod(0o500)
    monkeypatch.setenv("XINFER_VK_CACHE", str(tmp_path))
    compile_something(device)


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XINFER_VK_CACHE", str(tmp_path))
    assert pipeline_cache_folder() == tmp_path / "pipelines"
    monkeypatch.delenv("XINFER_VK_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert pipeline_cache_folder() == tmp_path / ".cache" / "xinfer-vk" / "pipelines"


# -- life -----------------------------------------------------------------------------------------


def check_mapped(rt):
    """Kernels read what the host writes in place, the host reads in place what they wrote, and no view
    outlives its buffer."""
    state, result = (rt.allocate(k.value, 8, k) for k in (BufferKind.STATE, BufferKind.RESULT))
    recorded = rt.prepare(Plan("copy", (copy_words(state, 2, result, 1, 5),)))
    words, found = rt.mapped(state), rt.mapped(result)
    assert len(words) == 8 and found.tolist() == [0] * 8
    for base in (10, 0xFFFFFF00):
        words[2:7] = np.arange(base, base + 5, dtype=np.uint32)
        recorded.run()
        assert found.tolist() == [0, *range(base, base + 5), 0, 0]
        assert rt.read(state, 2, 5).tolist() == list(range(base, base + 5))
    rt.free(result)
    with pytest.raises(ValueError, match="released"):
        found[0]
    rt.close()
    with pytest.raises(ValueError, match="released"):
        words[0] = 1


def test_buffers_can_be_used_in_place(fresh):
    check_mapped(fresh)


def test_buffers_of_numpy_can_be_used_in_place():
    check_mapped(NumpyRuntime())


def test_closing_is_final_and_may_be_repeated(fresh):
    plan, first, _ = chain(fresh)
    prepared = fresh.prepare(plan)
    fresh.close()
    fresh.close()
    with pytest.raises(UsageError, match="'chain' cannot run: its runtime was closed"):
        prepared.run()
    for use in (
        lambda: fresh.allocate("late", 8, BufferKind.SCRATCH),
        lambda: fresh.read(first, 0, 1),
        lambda: fresh.write(first, 0, np.zeros(1, np.uint32)),
        lambda: fresh.free(first),
        lambda: fresh.mapped(first),
        lambda: fresh.prepare(plan),
        lambda: fresh.require_free(1, "it"),
    ):
        with pytest.raises(UsageError, match="the runtime is closed"):
            use()


def test_nothing_runs_on_numpy_once_it_is_closed():
    numpy = NumpyRuntime()
    first = numpy.allocate("first", 8, BufferKind.SCRATCH)
    numpy.close()
    numpy.free(first)
    for use in (
        lambda: numpy.allocate("late", 8, BufferKind.SCRATCH),
        lambda: numpy.read(first, 0, 1),
        lambda: numpy.write(first, 0, np.zeros(1, np.uint32)),
        lambda: numpy.mapped(first),
    ):
        with pytest.raises(UsageError, match="the runtime is closed"):
            use()


def test_other_threads_run_while_the_device_works(device):
    """In the middle half of a submit, where they could not if Kompute held the global lock."""
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.001):
            ticks.append(time.perf_counter())

    runtime = KomputeRuntime(device.info, steps_per_submit=40)  # one submit
    try:
        a, b = (runtime.allocate(name, 1 << 23, BufferKind.SCRATCH) for name in "ab")
        there, back = copy_words(a, 0, b, 0, a.words), copy_words(b, 0, a, 0, a.words)
        recorded = runtime.prepare(Plan("long", (there, back) * 20))
        with ThreadPoolExecutor(1) as pool:
            pool.submit(tick)
            began = time.perf_counter()
            recorded.run()
            quarter = (time.perf_counter() - began) / 4
            done.set()
    finally:
        runtime.close()
    assert any(began + quarter < t < began + 3 * quarter for t in ticks), (quarter, len(ticks))


def test_what_outlives_its_runtime_may_be_dropped_in_any_order(device):
    rt = KomputeRuntime(device.info)
    plan, _, _ = chain(rt)
    prepared = rt.prepare(plan)
    prepared.run()
    del rt
    gc.collect()
    with pytest.raises(UsageError):
        prepared.run()
    del prepared


def test_a_program_that_never_closes_ends_cleanly(device):
    code = (
        "import sys\n"
        "from xinfer_vk.vulkan.runtime import KomputeRuntime\n"
        "from xinfer_vk.kernels.copy_words import copy_words\n"
        "from xinfer_vk.plan import BufferKind, Plan\n"
        "rt = KomputeRuntime(int(sys.argv[1]))\n"
        "a, b = (rt.allocate(n, 64, BufferKind.SCRATCH) for n in 'ab')\n"
        "prepared = rt.prepare(Plan('p', (copy_words(a, 0, b, 0, 64),)))\n"
        "prepared.run()\n"
        "print('done')\n"
        "if sys.argv[2] == 'error': raise SystemExit(3)\n"
    )
    for how, expected in (("end", 0), ("error", 3)):
        command = [sys.executable, "-c", code, str(device.index), how]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (expected, "done\n", "")


def test_two_devices_work_side_by_side(device):
    with KomputeRuntime(device.info) as one, KomputeRuntime(device.info) as other:
        plans = [chain(rt) for rt in (one, other)]
        prepared = [rt.prepare(plan) for rt, (plan, _, _) in zip((one, other), plans)]
        for seed in range(3):
            for i, rt in enumerate((one, other)):
                rt.write(plans[i][1], 0, words(64, seed + i))
            for p in prepared:
                p.run()
            for i, rt in enumerate((one, other)):
                assert (rt.read(plans[i][2], 0, 64) == words(64, seed + i)).all()
        buffer = one.allocate("mine", 8, BufferKind.SCRATCH)
        with pytest.raises(UsageError, match="another's"):
            other.read(buffer, 0, 8)


def test_runtimes_can_be_opened_and_closed_many_times(device):
    for _ in range(70):
        with KomputeRuntime(device.info) as rt:
            assert rt.layer_active or layer.load_library()[0] is None


def test_any_number_of_runtimes_can_be_open_at_once(device):
    """The 65th once corrupted the heap: the layer's tables had 64 places."""
    opened = [KomputeRuntime(device.info) for _ in range(66)]
    try:
        assert all(rt.layer_active for rt in opened) or layer.load_library()[0] is None
        assert opened[-1].read(opened[-1].allocate("buffer", 4, BufferKind.RESULT), 0, 4).tolist() == [0] * 4
    finally:
        for rt in opened:
            rt.close()


def test_a_runtime_is_opened_by_name(device):
    with open_runtime(str(device.index)) as rt:
        assert rt.profile.name == device.name
        assert rt.driver == device.info.driver
        assert rt.info.name == device.name


def test_numpy_is_a_runtime_too():
    rt = open_runtime("numpy")
    assert isinstance(rt, NumpyRuntime)
    rt.close()


def test_wrong_arguments_are_refused(device, monkeypatch):
    with pytest.raises(UsageError, match="memory 'fast': it is one of auto, unified, discrete"):
        KomputeRuntime(device.info, memory="fast")
    with pytest.raises(UsageError, match="steps per submit is 0"):
        KomputeRuntime(device.info, steps_per_submit=0)
    with pytest.raises(UsageError, match="device 99 does not exist"):
        KomputeRuntime(99)
    with pytest.raises(DeviceError, match="cannot be used: it is old"):
        KomputeRuntime(replace(device.info, rejected="it is old"))
    monkeypatch.setenv("XINFER_VK_MEMORY", "none")
    with pytest.raises(UsageError, match="XINFER_VK_MEMORY 'none'"):
        KomputeRuntime(device.info)


@pytest.mark.parametrize(("name", "least"), [("XINFER_VK_STEPS_PER_SUBMIT", 1), ("XINFER_VK_POLL_US", 0)])
def test_a_number_of_the_environment_is_checked(device, monkeypatch, name, least):
    """The layer itself would take what is no number for 0, and a negative one for centuries."""
    for text in ("some", "20ms", "1e3", "-1", " ", "99999999999999999999", *(["0"] if least else [])):
        monkeypatch.setenv(name, text)
        with pytest.raises(UsageError, match=rf"{name} '{text}': it must be a whole number from {least} to"):
            KomputeRuntime(device.info)
    for text in ("", "50"):
        monkeypatch.setenv(name, text)
        KomputeRuntime(device.info).close()


def test_so_is_where_memory_lies(device, monkeypatch):
    monkeypatch.setenv("XINFER_VK_MEMORY", "none")
    with pytest.raises(UsageError, match="XINFER_VK_MEMORY 'none'"):
        KomputeRuntime(device.info)


def test_a_device_that_is_no_longer_the_same_is_not_used(device):
    with pytest.raises(DeviceError, match="not Voodoo 2 any more: the list of devices has changed"):
        KomputeRuntime(replace(device.info, name="Voodoo 2"))
    with pytest.raises(DeviceError, match="cannot open"):
        KomputeRuntime(replace(device.info, index=99))


def test_loading_kompute_leaves_the_users_logging_alone():
    code = (
        "import logging\n"
        "from xinfer_vk.vulkan.kompute import kompute\n"
        "kompute()\n"
        "assert logging.getLogger().handlers == [], logging.getLogger().handlers\n"
        "import sys; from io import StringIO; out = StringIO()\n"
        "logging.basicConfig(stream=out, format='%(message)s'); logging.warning('mine')\n"
        "assert out.getvalue() == 'mine\\n'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))


def test_the_staging_buffer_is_bound_through_two_pipelines_at_most(device):
    """Transfers of many lengths to one buffer make no more pipelines than the two group counts need."""
    with KomputeRuntime(device.info, memory="discrete") as rt:
        buffer = rt.allocate("b", 1 << 17, BufferKind.WEIGHTS)
        before = rt.counters()["pipelines"]
        for count in (1, 2, 3, 100, 5000, 1 << 14, (1 << 14) + 1, 1 << 16, 1 << 17):
            rt.write(buffer, 0, words(count))
        assert rt.counters()["pipelines"] - before <= 2
        assert transfers.SMALL_GROUPS < transfers.LARGE_GROUPS


def test_steps_hold_nothing_of_a_runtime(numpy_runtime):
    """The same step can be run by any runtime that knows its buffers: it is plain data."""
    a, b = (numpy_runtime.allocate(n, 8, BufferKind.SCRATCH) for n in "ab")
    step = copy_words(a, 0, b, 0, 8)
    assert isinstance(step, Step) and step.buffers == (a, b)

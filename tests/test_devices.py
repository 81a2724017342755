"""Which Vulkan devices there are, what is known of them, and which one is chosen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from click.testing import CliRunner

from xinfer_vk.errors import DeviceError, UsageError
from xinfer_vk.vulkan import devices as module
from xinfer_vk.vulkan.devices import (
    Choice,
    DeviceInfo,
    MemoryHeap,
    MemoryType,
    available_host_bytes,
    check_opens,
    choose_device,
    list_devices,
    vulkan_instance,
)

GIB = 1 << 30
DEVICE_LOCAL, HOST_VISIBLE, HOST_COHERENT = 1, 2, 4


def made(index: int = 0, name: str = "Radeon", kind: str = "discrete", **changes) -> DeviceInfo:
    """A device as one might be probed."""
    info = DeviceInfo(
        index=index,
        name=name,
        type=kind,
        vendor="AMD",
        vendor_id=0x1002,
        device_id=1,
        uuid="00" * 16,
        pipeline_cache_uuid="00" * 16,
        driver_name="radv",
        driver_version="Mesa 25.0.7",
        api_version=(1, 3, 0),
        heaps=(MemoryHeap(8 * GIB, 6 * GIB, True), MemoryHeap(16 * GIB, None, False)),
        memory_types=(MemoryType(0, DEVICE_LOCAL), MemoryType(1, HOST_VISIBLE | HOST_COHERENT)),
        max_storage_range_bytes=4 * GIB - 1,
        max_allocation_bytes=4 * GIB,
        max_storage_buffers=32,
        max_push_bytes=256,
        max_shared_bytes=64 << 10,
        max_workgroup_invocations=1024,
        max_workgroup_size=(1024, 1024, 1024),
        max_group_count=(65535, 65535, 65535),
        subgroup_size=64,
        subgroup_operations=("basic", "shuffle"),
        timestamp_bits=64,
        timestamp_period_ns=10.0,
        unified_memory=kind in ("integrated", "cpu"),
        features=frozenset({"float16"}),
    )
    return replace(info, **changes)


DISCRETE = made(2, "NVIDIA GeForce RTX 4090", vendor="NVIDIA", driver_name="NVIDIA")
INTEGRATED = made(1, "Intel(R) UHD Graphics 620", "integrated", vendor="Intel", driver_name="Intel ANV")
VIRTUAL = made(3, "Virtio-GPU Venus", "virtual", vendor="Red Hat")
LAVAPIPE = made(0, "llvmpipe (LLVM 19.1)", "cpu", vendor="Mesa", driver_name="llvmpipe", subgroup_size=8)
SWIFTSHADER = made(
    4, "SwiftShader Device", "cpu", vendor="Google", driver_name="SwiftShader", subgroup_size=4
)
ALL = [LAVAPIPE, INTEGRATED, DISCRETE, VIRTUAL, SWIFTSHADER]


@pytest.fixture(autouse=True)
def no_default(monkeypatch):
    monkeypatch.delenv("XINFER_VK_DEVICE", raising=False)


# -- choosing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "best"),
    [
        (ALL, DISCRETE),
        ([LAVAPIPE, VIRTUAL, INTEGRATED], INTEGRATED),
        ([LAVAPIPE, VIRTUAL], VIRTUAL),
        ([SWIFTSHADER, LAVAPIPE], LAVAPIPE),
        ([made(5, "other", "other"), SWIFTSHADER], SWIFTSHADER),
        ([made(1, "second"), made(0, "first")], made(0, "first")),
    ],
)
def test_a_gpu_of_its_own_is_preferred_to_a_shared_one_and_that_to_the_cpu(there, best):
    assert choose_device(None, there).device == best


def test_a_gpu_is_taken_without_a_word():
    assert choose_device(None, ALL) == Choice(DISCRETE)


def test_a_cpu_device_taken_for_lack_of_a_gpu_is_told_with_the_reason():
    (notice,) = choose_device(None, [LAVAPIPE]).notices
    assert "llvmpipe (LLVM 19.1)" in notice and "runs on the CPU: no GPU" in notice
    assert choose_device("0", [LAVAPIPE]).notices == ()  # it was asked for


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"api_version": (1, 0, 3)}, "it speaks Vulkan 1.0.3, and 1.1 is needed"),
        ({"max_storage_buffers": 4}, "it has 4 storage buffers a kernel can bind, and 8 are needed"),
        ({"max_workgroup_invocations": 128}, "it has 128 invocations in a workgroup, and 256 are needed"),
        ({"max_workgroup_size": (128, 128, 64)}, "it has 128 invocations in a workgroup, and 256 are needed"),
        ({"max_push_bytes": 64}, "it has 64 bytes of push constants, and 128 are needed"),
        ({"max_shared_bytes": 8192}, "it has 8192 bytes of shared memory, and 16384 are needed"),
        ({"memory_types": (MemoryType(0, DEVICE_LOCAL),)}, "it has no memory that the host can write"),
    ],
)
def test_a_device_that_lacks_something_is_rejected_by_name(changes, reason):
    assert module._rejection(made(**changes), has_compute_queue=True) == reason


def test_a_device_without_a_compute_queue_is_rejected():
    assert module._rejection(made(), has_compute_queue=False) == "it has no queue for compute work"
    assert module._rejection(made(), has_compute_queue=True) == ""


def test_a_rejected_device_is_passed_over_and_told():
    old = replace(DISCRETE, rejected="it speaks Vulkan 1.0.3, and 1.1 is needed")
    choice = choose_device(None, [old, LAVAPIPE])
    assert choice.device == LAVAPIPE
    assert choice.notices[0] == f"not using {old.name}: {old.rejected}"
    assert "no GPU here can be used" in choice.notices[1]


def test_a_rejected_device_asked_for_is_an_error_that_names_the_others():
    old = replace(DISCRETE, index=0, rejected="it has no queue for compute work")
    with pytest.raises(DeviceError, match=r"RTX 4090 cannot be used: it has no queue.*device 1 .*or numpy"):
        choose_device("nvidia", [old, replace(LAVAPIPE, index=1)])


def test_no_usable_device_is_an_error_that_says_why():
    with pytest.raises(DeviceError, match=r"not using Radeon: too old"):
        choose_device(None, [made(rejected="too old")])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("2", DISCRETE),
        (" 2 ", DISCRETE),
        (2, DISCRETE),
        (0, choose_device("0", ALL).device),
        ("rtx", DISCRETE),
        ("UHD graphics", INTEGRATED),
        ("lavapipe", LAVAPIPE),  # which calls itself llvmpipe
        ("anv", INTEGRATED),
        ("google", SWIFTSHADER),
    ],
)
def test_a_device_is_named_by_index_or_by_part_of_its_name_in_any_case(text, wanted):
    assert choose_device(text, ALL).device == wanted


def test_a_whole_name_is_taken_before_longer_ones_that_contain_it():
    short, long = made(0, "Radeon"), made(1, "Radeon Pro")
    assert choose_device("radeon", [long, short]).device == short


@pytest.mark.parametrize("text", ["5", "-1", "+9", "99999999999999999999"])
def test_an_index_that_does_not_exist_lists_those_that_do(text):
    with pytest.raises(UsageError, match=r"there is no such device; there are: 0 \(llvmpipe.*numpy"):
        choose_device(text, ALL)


def test_an_unknown_name_lists_the_devices():
    with pytest.raises(UsageError, match="'voodoo': no device has that in its name; there are: 0"):
        choose_device("voodoo", ALL)


def test_a_name_that_fits_several_lists_them():
    twins = [made(0, "Radeon A"), made(1, "Radeon B"), LAVAPIPE]
    with pytest.raises(UsageError, match=r"fits several devices: 0 \(Radeon A\), 1 \(Radeon B\); name one"):
        choose_device("radeon", twins)


@pytest.mark.parametrize("text", ["numpy", "NumPy", " NUMPY "])
def test_numpy_needs_no_vulkan(text, monkeypatch):
    monkeypatch.setattr(module, "list_devices", lambda: pytest.fail("Vulkan was asked"))
    assert choose_device(text) == Choice(None)


def test_the_environment_chooses_where_the_call_does_not(monkeypatch):
    monkeypatch.setenv("XINFER_VK_DEVICE", "uhd")
    assert choose_device(None, ALL).device == INTEGRATED
    assert choose_device("rtx", ALL).device == DISCRETE
    monkeypatch.setenv("XINFER_VK_DEVICE", "9")
    with pytest.raises(UsageError, match="XINFER_VK_DEVICE 9"):
        choose_device(None, ALL)


@pytest.mark.parametrize(
    ("version", "warned"),
    [
        ("Mesa 22.3.6 (LLVM 15.0.6)", True),
        ("Mesa 23.0.4", True),
        ("Mesa 23.1.0", False),
        ("Mesa 25.0.7-2~bpo12+1 (LLVM 15.0.6)", False),
        ("", False),
    ],
)
def test_an_old_lavapipe_is_warned_of_with_the_remedy(version, warned):
    warning = module._warning("llvmpipe (LLVM 15)", "llvmpipe", version)
    assert bool(warning) is warned
    if warned:
        assert version.split(" (")[0] in warning and "bookworm-backports" in warning
    assert module._warning("AMD Radeon (RADV)", "radv", version) == ""


def test_the_warning_of_a_chosen_device_is_a_notice():
    old = replace(LAVAPIPE, warning="slow")
    assert choose_device("0", [old]).notices == ("slow",)
    assert choose_device(None, [old]).notices[-1] == "slow"


# -- what a device is -----------------------------------------------------------------------------


def test_memory_comes_from_the_heap_that_kompute_takes():
    assert DISCRETE.heap_free_bytes(mapped=False) == 6 * GIB
    assert DISCRETE.heap_free_bytes(mapped=True) == 16 * GIB  # the driver does not tell: its size
    no_mapped = replace(DISCRETE, memory_types=(MemoryType(0, DEVICE_LOCAL),))
    assert no_mapped.heap_free_bytes(mapped=True) == 0


def test_the_profile_is_what_kernels_may_use():
    profile = DISCRETE.profile(frozenset({"float16"}))
    assert not profile.simd and LAVAPIPE.profile().simd
    assert profile.features == {"float16", "subgroup_basic", "subgroup_shuffle"}
    assert profile.max_storage_range_bytes == 4 * GIB - 1
    narrow = replace(DISCRETE, max_workgroup_size=(256, 64, 64), max_allocation_bytes=GIB)
    assert narrow.profile().max_workgroup_invocations == 256
    assert narrow.profile().max_storage_range_bytes == GIB


@pytest.mark.parametrize(
    ("kind", "heaps", "types", "unified"),
    [
        ("cpu", 1, [(0, 15)], True),
        ("integrated", 2, [(0, 1), (1, 6)], True),
        ("discrete", 2, [(0, 1), (1, 6)], False),
        ("discrete", 2, [(0, 7), (1, 6)], False),  # resizable BAR: host memory is still another
        ("virtual", 1, [(0, 15)], True),
        ("virtual", 1, [(0, 1)], False),
    ],
)
def test_memory_is_unified_where_there_is_no_better_than_what_the_host_reaches(kind, heaps, types, unified):
    made_heaps = tuple(MemoryHeap(GIB, None, i == 0) for i in range(heaps))
    assert module._is_unified(kind, made_heaps, tuple(MemoryType(*t) for t in types)) is unified


def test_available_memory_is_positive_and_within_the_machine():
    available = available_host_bytes()
    if available is None:
        pytest.skip("this system does not tell")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < available <= total


# -- the devices that are here --------------------------------------------------------------------


def test_indices_are_those_of_kompute(device):
    from xinfer_vk.vulkan.kompute import kompute

    manager = kompute().Manager(device.index)
    assert manager.get_device_properties()["device_name"] == device.name
    assert [d["device_name"] for d in manager.list_devices()] == [d.name for d in list_devices()]
    manager.destroy()


def test_a_probed_device_is_told_completely(device):
    info = device.info
    assert info.type in module.TYPES
    assert info.driver_name and info.driver_version
    assert info.api_version >= (1, 1, 0)
    assert all(
        h.size_bytes > 0 and (h.free_bytes is None or h.free_bytes <= h.size_bytes) for h in info.heaps
    )
    assert info.subgroup_size >= 1 and "basic" in info.subgroup_operations
    assert info.max_storage_range_bytes >= 128 << 20
    assert info.uuid != "00" * 16
    assert not info.rejected


def test_a_device_is_tried_before_kompute_gets_it(device):
    check_opens(device.info)
    with pytest.raises(DeviceError, match=r"cannot open device 99 .*there are \d+ now"):
        check_opens(replace(device.info, index=99))


def test_a_device_that_does_not_open_is_an_error_and_not_a_crash(device, monkeypatch):
    import vulkan as vk

    from xinfer_vk.vulkan.runtime import KomputeRuntime

    def refuse(*arguments):
        raise vk.VkErrorInitializationFailed

    monkeypatch.setattr(vk, "vkCreateDevice", refuse)
    with pytest.raises(DeviceError, match=r"its driver .* says VkErrorInitializationFailed"):
        KomputeRuntime(replace(device.info, type="discrete"))


def test_an_instance_within_another_is_the_same(device):
    with vulkan_instance() as (_, outer):
        with vulkan_instance() as (_, inner):
            assert inner is outer
        assert [d.name for d in list_devices()] == [d.name for d in list_devices()]
    with vulkan_instance() as (_, after):
        assert after is not outer


def test_importing_the_package_does_not_import_vulkan_or_kompute():
    code = (
        "import sys, xinfer_vk, xinfer_vk.vulkan.devices, xinfer_vk.vulkan.runtime\n"
        "assert not {'vulkan', 'kp', 'rich', 'click'} & set(sys.modules), set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    drop = ("VK_ADD_DRIVER_FILES", "VK_DRIVER_FILES", "VK_ICD_FILENAMES")
    env = {k: v for k, v in os.environ.items() if k not in drop}
    return subprocess.run(
        [sys.executable, "-c", code], env={**env, **environment}, capture_output=True, text=True
    )


def test_a_machine_without_a_driver_is_told_what_to_install():
    code = "from xinfer_vk.cli.main import main; main(['devices'])"
    done = run_python(code, VK_DRIVER_FILES="/nonexistent.json", VK_ICD_FILENAMES="/nonexistent.json")
    assert done.returncode == 1
    assert done.stderr.startswith("error: no Vulkan device was found")
    assert "mesa-vulkan-drivers" in done.stderr and done.stderr.count("\n") == 1


def test_a_machine_without_the_loader_is_told_what_to_install():
    code = (
        "import ctypes.util, sys\n"
        "class Absent:\n"  # the package raises OSError when it does not find libvulkan
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'vulkan': raise OSError('Cannot find Vulkan SDK version')\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from xinfer_vk.cli.main import main; main(['devices'])"
    )
    done = run_python(code)
    assert done.returncode == 1
    assert done.stderr.startswith("error: the Vulkan loader (libvulkan.so.1) is not installed")
    assert "apt install libvulkan1" in done.stderr and done.stderr.count("\n") == 1


# -- the command ----------------------------------------------------------------------------------


@pytest.fixture
def cli(monkeypatch):
    from xinfer_vk.cli.devices import command

    monkeypatch.setattr(module, "list_devices", lambda: ALL)

    def run(*arguments: str):
        return CliRunner().invoke(command, arguments, standalone_mode=False)

    return run


def test_the_table_shows_every_device_and_marks_the_default(cli):
    result = cli()
    assert result.exception is None
    for device in ALL:
        assert f"{device.index}  {device.name}" in result.output
    assert "* 2  NVIDIA GeForce RTX 4090" in result.output
    assert result.output.count("*") == 1
    for text in ("8.6 GB (device), 6.4 GB free", "17.2 GB (host)", "Mesa 25.0.7, Vulkan 1.3.0", "float16"):
        assert text in result.output


def test_the_table_says_why_a_device_is_not_used(cli, monkeypatch):
    old = replace(DISCRETE, rejected="it has no queue for compute work", warning="beware")
    monkeypatch.setattr(module, "list_devices", lambda: [old, LAVAPIPE])
    output = cli().output
    assert "not usable  it has no queue for compute work" in output and "beware" in output
    assert "* 0  llvmpipe" in output


def test_json_holds_everything_and_nothing_else_is_on_standard_output(cli):
    listing = json.loads(cli("--json").stdout)
    assert [d["name"] for d in listing] == [d.name for d in ALL]
    assert [d["default"] for d in listing] == [d is DISCRETE for d in ALL]
    assert listing[2]["heaps"][0] == {"size_bytes": 8 * GIB, "free_bytes": 6 * GIB, "device_local": True}
    assert listing[2]["features"] == ["float16"] and listing[2]["api_version"] == "1.3.0"


def test_a_wrong_default_still_shows_the_devices_and_then_fails(cli, monkeypatch):
    monkeypatch.setenv("XINFER_VK_DEVICE", "voodoo")
    result = cli()
    assert isinstance(result.exception, UsageError)
    assert "RTX 4090" in result.output

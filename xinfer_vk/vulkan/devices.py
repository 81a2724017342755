"""The Vulkan devices of this machine: what they are, what they can do, and which one to use.

Everything is asked through the PyPI package ``vulkan``, without a Kompute manager: Kompute aborts the
process where there is no driver, and says little about a device. ``vulkan`` is imported when it is
needed only. Device indices are those of ``kp.Manager(index)``: both ask the same loader in the same way.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from xinfer_vk.errors import DeviceError, UsageError, setting
from xinfer_vk.limits import (
    DRIVERS_BYTES,
    memory_headroom,
    out_of_memory,
    require_file_handles,
    spare_memory,
)
from xinfer_vk.plan import DeviceProfile

NUMPY = "numpy"  # the name that chooses no Vulkan device at all

# What a device must have to run our kernels (shaders/, plan.py); nearly every one has.
MIN_API = (1, 1)  # Kompute makes its instance for it
MIN_STORAGE_BUFFERS = 8  # a kernel binds at most that many
MIN_INVOCATIONS = 256
MIN_PUSH_BYTES = 128
MIN_SHARED_BYTES = 16 << 10

PORTABILITY_ENUMERATION = "VK_KHR_portability_enumeration"
PORTABILITY_SUBSET = "VK_KHR_portability_subset"  # must be enabled on devices that have it

OLD_LAVAPIPE = (23, 1)  # Mesa before this: 22.3 ran trial kernels 4 to 8 times slower than 25.0

TYPES = ("other", "integrated", "discrete", "virtual", "cpu")  # by VkPhysicalDeviceType
PREFERENCE = ("discrete", "integrated", "virtual", "cpu", "other")
VENDORS = {
    0x1002: "AMD", 0x10DE: "NVIDIA", 0x8086: "Intel", 0x13B5: "Arm", 0x5143: "Qualcomm", 0x106B: "Apple",
    0x1010: "Imagination", 0x14E4: "Broadcom", 0x144D: "Samsung", 0x19E5: "Huawei", 0x1AE0: "Google",
    0x1AF4: "Red Hat", 0x10001: "Vivante", 0x10002: "VeriSilicon", 0x10003: "Kazan", 0x10004: "Codeplay",
    0x10005: "Mesa", 0x10006: "PoCL", 0x10007: "Mobileye",
}  # fmt: skip
SUBGROUP_OPERATIONS = (
    "basic", "vote", "arithmetic", "ballot", "shuffle", "shuffle_relative", "clustered", "quad",
)  # fmt: skip

# Bits of the specification that the package does not need to be asked for.
_ENUMERATE_PORTABILITY = 1
_HEAP_DEVICE_LOCAL, _DEVICE_LOCAL, _HOST_VISIBLE, _HOST_COHERENT, _QUEUE_COMPUTE = 1, 1, 2, 4, 2

NO_LOADER = (
    "the Vulkan loader (libvulkan.so.1) is not installed: install it (Debian, Ubuntu: `apt install "
    "libvulkan1 mesa-vulkan-drivers`; Fedora: `dnf install vulkan-loader mesa-vulkan-drivers`), "
    f"or use {setting('device', 'numpy')}"
)
NO_DRIVER = (
    "no Vulkan device was found, because no driver is installed or none of them works here: install the "
    "driver of your GPU (Debian, Ubuntu: `apt install mesa-vulkan-drivers`, which also has one for the CPU), "
    f"or use {setting('device', 'numpy')}"
)


@dataclass(frozen=True)
class MemoryHeap:
    """``free_bytes`` is None where the driver does not tell (no VK_EXT_memory_budget)."""

    size_bytes: int
    free_bytes: int | None
    device_local: bool


@dataclass(frozen=True)
class MemoryType:
    """A kind of memory: which heap it comes from, and its VkMemoryPropertyFlags."""

    heap: int
    flags: int


@dataclass(frozen=True)
class DeviceInfo:
    """What is known of a Vulkan device without opening it.

    ``type``: one of TYPES. ``features``: names of layer.FEATURES that the device offers (what is on is
    the runtime's to say). ``portability_subset``: it lacks a part of Vulkan (MoltenVK).
    ``rejected``: why it cannot be used, "" if it can. ``warning``: what its user
    should be told, "" if nothing.
    """

    index: int
    name: str
    type: str
    vendor: str
    vendor_id: int
    device_id: int
    uuid: str
    pipeline_cache_uuid: str
    driver_name: str
    driver_version: str
    api_version: tuple[int, int, int]
    heaps: tuple[MemoryHeap, ...]
    memory_types: tuple[MemoryType, ...]
    max_storage_range_bytes: int
    max_allocation_bytes: int
    max_storage_buffers: int
    max_push_bytes: int
    max_shared_bytes: int
    max_workgroup_invocations: int
    max_workgroup_size: tuple[int, int, int]
    max_group_count: tuple[int, int, int]
    subgroup_size: int
    subgroup_operations: tuple[str, ...]
    timestamp_bits: int
    timestamp_period_ns: float
    unified_memory: bool
    features: frozenset[str]
    rejected: str = ""
    warning: str = ""
    portability_subset: bool = False

    @property
    def driver(self) -> str:
        return f"{self.driver_name} {self.driver_version}".strip()

    @property
    def is_cpu(self) -> bool:
        return self.type == "cpu"

    @property
    def required_extensions(self) -> list[str]:
        """What every device of it must enable."""
        return [PORTABILITY_SUBSET] if self.portability_subset else []

    @property
    def keeps_memory_in_a_file(self) -> bool:
        """Whether buffers lie in one file in memory, which the limit on file sizes bounds (lavapipe)."""
        return self.is_cpu and "llvmpipe" in self.name

    def heap_of(self, *, mapped: bool) -> int | None:
        """The heap that Kompute's memory comes from: of the first memory type that fits, as it chooses."""
        flags = _HOST_VISIBLE | _HOST_COHERENT if mapped else _DEVICE_LOCAL
        return next((t.heap for t in self.memory_types if t.flags & flags == flags), None)

    def heap_free_bytes(self, *, mapped: bool) -> int:
        """What that heap had free when the device was probed; its size where the driver does not tell."""
        heap = self.heap_of(mapped=mapped)
        if heap is None:
            return 0
        free = self.heaps[heap].free_bytes
        return self.heaps[heap].size_bytes if free is None else free

    def profile(self, features: frozenset[str] = frozenset()) -> DeviceProfile:
        """What kernels may ask. ``features``: those that are on. Subgroup operations need no switching on,
        and are added to them as ``subgroup_shuffle`` and so on."""
        return DeviceProfile(
            name=self.name,
            simd=self.is_cpu,
            subgroup_size=self.subgroup_size,
            max_workgroup_invocations=min(self.max_workgroup_invocations, self.max_workgroup_size[0]),
            max_shared_bytes=self.max_shared_bytes,
            max_storage_range_bytes=min(self.max_storage_range_bytes, self.max_allocation_bytes),
            max_group_count=min(65535, *self.max_group_count),
            unified_memory=self.unified_memory,
            features=features | {f"subgroup_{name}" for name in self.subgroup_operations},
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        data = asdict(self)
        data["features"] = sorted(self.features)
        data["api_version"] = ".".join(map(str, self.api_version))
        data["usable"] = not self.rejected
        return data


@dataclass(frozen=True)
class Choice:
    """The device to use (None: the NumPy reference) and what the user should be told of the choice."""

    device: DeviceInfo | None
    notices: tuple[str, ...] = field(default=())


def available_host_bytes() -> int | None:
    """Memory that this process may still take from the machine: the kernel's estimate, and what the
    control group (a container's limit) leaves. None where neither is told."""
    found: list[int] = []
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found += [int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):
        pass
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            with open(limit, encoding="ascii") as file, open(used, encoding="ascii") as current:
                # page cache counts as used but is given back on demand; MemAvailable knows, this does not
                found.append(max(0, int(file.read()) - int(current.read())) + _reclaimable_bytes(limit))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return min(found) if found else None


def _reclaimable_bytes(limit_file: str) -> int:
    """The file-backed pages of a control group."""
    try:
        with open(os.path.join(os.path.dirname(limit_file), "memory.stat"), encoding="ascii") as file:
            stat = dict(line.split() for line in file)
        return int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
    except (OSError, ValueError):
        return 0


def list_devices() -> list[DeviceInfo]:
    """Every Vulkan device, in the loader's order. Raises :class:`DeviceError` when there is none."""
    with vulkan_instance() as (vk, found):
        return [_probe(vk, physical, index) for index, physical in enumerate(found)]


def check_opens(info: DeviceInfo) -> None:
    """Open a device for compute work as Kompute will, and close it: where this fails Kompute would crash.
    Raises :class:`DeviceError`."""
    with vulkan_instance() as (vk, found):
        if info.index >= len(found):
            raise DeviceError(f"cannot open device {info.index} ({info.name}): there are {len(found)} now")
        physical = found[info.index]
        families = vk.vkGetPhysicalDeviceQueueFamilyProperties(physical)
        family = next(i for i, f in enumerate(families) if f.queueFlags & _QUEUE_COMPUTE)
        queue = vk.VkDeviceQueueCreateInfo(queueFamilyIndex=family, queueCount=1, pQueuePriorities=[1.0])
        try:
            wanted = vk.VkDeviceCreateInfo(
                pQueueCreateInfos=[queue], ppEnabledExtensionNames=info.required_extensions
            )
            device = vk.vkCreateDevice(physical, wanted, None)
        except (vk.VkError, vk.VkException) as error:
            raise DeviceError(
                f"cannot open {info.name}: its driver ({info.driver}) says {type(error).__name__}; "
                f"look whether another program holds it, or use another {setting('device')}"
            ) from error
        vk.vkDestroyDevice(device, None)


_thread = threading.local()


@contextmanager
def vulkan_instance() -> Iterator[tuple[Any, list[Any]]]:
    """The package ``vulkan`` and the physical devices of an instance, which lives as long as this lasts.

    Inside another one in the same thread it is that one again: loading the drivers is most of the cost.
    Raises :class:`DeviceError` when there is no loader, no driver or no device.
    """
    current = getattr(_thread, "current", None)
    if current is not None:
        yield current
        return
    require_file_handles()
    spare_memory()
    vk = _import_vulkan()
    try:
        instance = vk.vkCreateInstance(_instance_info(vk), None)
    except (vk.VkError, vk.VkException) as error:
        raise _not_loaded(f"{NO_DRIVER} ({type(error).__name__})") from error
    try:
        try:
            found = list(vk.vkEnumeratePhysicalDevices(instance))
        except (vk.VkError, vk.VkException) as error:
            raise _not_loaded(f"{NO_DRIVER} ({type(error).__name__})") from error
        if not found:
            raise _not_loaded(NO_DRIVER)
        _thread.current = (vk, found)
        yield vk, found
    finally:
        _thread.current = None
        vk.vkDestroyInstance(instance, None)


def _instance_info(vk: Any) -> Any:
    """Asks for portability drivers (MoltenVK) too, which the loader does not list else. Kompute asks as well
    (build_support/portability.hpp), so indices agree."""
    application = vk.VkApplicationInfo(pApplicationName="xinfer-vk", apiVersion=vk.VK_MAKE_VERSION(1, 1, 0))
    offered = {e.extensionName for e in vk.vkEnumerateInstanceExtensionProperties(None)}
    if PORTABILITY_ENUMERATION not in offered:
        return vk.VkInstanceCreateInfo(pApplicationInfo=application)
    return vk.VkInstanceCreateInfo(
        flags=_ENUMERATE_PORTABILITY,
        pApplicationInfo=application,
        ppEnabledExtensionNames=[PORTABILITY_ENUMERATION],
    )


def choose_device(wanted: str | int | None = None, devices: Sequence[DeviceInfo] | None = None) -> Choice:
    """The device that ``wanted`` means: an index, a part of a name (in any case), "numpy", or, when it is
    None or empty, what ``XINFER_VK_DEVICE`` says, else the first discrete GPU, then integrated, virtual, CPU.

    Raises :class:`UsageError` for a name or index that fits no device or several, and
    :class:`DeviceError` when there is no usable device or the one asked for cannot be used.
    """
    named, source = _wanted(wanted)
    if named.lower() == NUMPY:
        return Choice(None)
    devices = list_devices() if devices is None else devices
    if named:
        device = _named(named, devices, source)
        if device.rejected:
            raise DeviceError(f"{device.name} cannot be used: {device.rejected}{_others(device, devices)}")
        return Choice(device, (device.warning,) if device.warning else ())

    usable = [d for d in devices if not d.rejected]
    notices = [f"not using {d.name}: {d.rejected}" for d in devices if d.rejected]
    if not usable:
        raise DeviceError(
            f"no Vulkan device here can be used ({'; '.join(notices)}); "
            f"{setting('device', 'numpy')} needs none"
        )
    # of several CPU devices, the one that computes on wider vectors
    device = min(usable, key=lambda d: (PREFERENCE.index(d.type), -d.subgroup_size * d.is_cpu, d.index))
    if device.is_cpu:
        gpus = any(not d.is_cpu for d in devices)
        why = "no GPU here can be used" if gpus else "no GPU with a working Vulkan driver was found"
        notices.append(f"using {device.name}, which runs on the CPU: {why}")
    if device.warning:
        notices.append(device.warning)
    return Choice(device, tuple(notices))


def _wanted(wanted: str | int | None) -> tuple[str, str]:
    """What is asked for ("" if nothing), and by what."""
    if wanted is not None and (text := str(wanted).strip()):
        return text, setting("device")
    return os.environ.get("XINFER_VK_DEVICE", "").strip(), "XINFER_VK_DEVICE"


def wants_numpy(wanted: str | int | None) -> bool:
    """Whether :func:`choose_device` would answer without asking Vulkan."""
    return _wanted(wanted)[0].lower() == NUMPY


def _named(wanted: str, devices: Sequence[DeviceInfo], source: str) -> DeviceInfo:
    listing = ", ".join([*(f"{d.index} ({d.name})" for d in devices), NUMPY])
    if re.fullmatch(r"[+-]?\d+", wanted):
        index = int(wanted)
        if not 0 <= index < len(devices):
            raise UsageError(f"{source} {wanted}: there is no such device; there are: {listing}")
        return devices[index]
    exact = [d for d in devices if d.name.lower() == wanted.lower()]
    found = exact or [d for d in devices if wanted.lower() in _names_of(d)]
    if not found:
        raise UsageError(f"{source} {wanted!r}: no device has that in its name; there are: {listing}")
    if len(found) > 1:
        several = ", ".join(f"{d.index} ({d.name})" for d in found)
        raise UsageError(f"{source} {wanted!r} fits several devices: {several}; name one by its index")
    return found[0]


def _names_of(device: DeviceInfo) -> str:
    """All that a device is called, in lower case. Mesa's lavapipe calls itself llvmpipe."""
    names = f"{device.name} {device.driver_name} {device.vendor}".lower()
    return names + " lavapipe" if "llvmpipe" in names else names


def _others(device: DeviceInfo, devices: Sequence[DeviceInfo]) -> str:
    usable = [f"{d.index} ({d.name})" for d in devices if not d.rejected and d is not device]
    return f"; use {setting('device')} {' or '.join([*usable, NUMPY])}"


# -- asking Vulkan --------------------------------------------------------------------------------


def _import_vulkan() -> Any:
    try:
        import vulkan
    except ModuleNotFoundError as error:
        raise DeviceError("the Python package `vulkan` is not installed: `pip install vulkan`") from error
    except OSError as error:  # what it raises when it does not find the loader's library
        raise _not_loaded(NO_LOADER) from error
    return vulkan


def _not_loaded(message: str) -> DeviceError:
    """Why no driver was found: what a limit leaves may be too little to load one."""
    left = memory_headroom()
    if left is not None and left < DRIVERS_BYTES:
        return out_of_memory(f"no Vulkan driver could be loaded in the {left >> 20} MB that are left")
    return DeviceError(message)


def _probe(vk: Any, physical: Any, index: int) -> DeviceInfo:
    properties = vk.vkGetPhysicalDeviceProperties(physical)
    limits = properties.limits
    api = _version(properties.apiVersion)
    extensions = {e.extensionName for e in vk.vkEnumerateDeviceExtensionProperties(physical, None)}
    ids, subgroup, maintenance, driver = _properties2(vk, physical, api, extensions)
    kind = TYPES[properties.deviceType] if properties.deviceType < len(TYPES) else "other"
    heaps, types = _memory(vk, physical, api, extensions)
    # Kompute takes the first queue family that can compute
    families = vk.vkGetPhysicalDeviceQueueFamilyProperties(physical)
    queue = next((f for f in families if f.queueFlags & _QUEUE_COMPUTE), None)
    driver_name, driver_version = _driver(vk, properties, driver)

    # subgroup operations count only where compute shaders may use them
    in_compute = subgroup is not None and subgroup.supportedStages & vk.VK_SHADER_STAGE_COMPUTE_BIT
    subgroup_bits = subgroup.supportedOperations if in_compute else 0

    name = properties.deviceName
    info = DeviceInfo(
        index=index,
        name=name,
        type=kind,
        vendor=VENDORS.get(properties.vendorID, f"vendor {properties.vendorID:#06x}"),
        vendor_id=properties.vendorID,
        device_id=properties.deviceID,
        uuid=bytes(ids.deviceUUID).hex() if ids else "",
        pipeline_cache_uuid=bytes(properties.pipelineCacheUUID).hex(),
        driver_name=driver_name,
        driver_version=driver_version,
        api_version=api,
        heaps=heaps,
        memory_types=types,
        max_storage_range_bytes=limits.maxStorageBufferRange,
        max_allocation_bytes=maintenance.maxMemoryAllocationSize if maintenance else 1 << 30,
        max_storage_buffers=min(
            limits.maxPerStageDescriptorStorageBuffers,
            limits.maxDescriptorSetStorageBuffers,
            limits.maxPerStageResources,
        ),
        max_push_bytes=limits.maxPushConstantsSize,
        max_shared_bytes=limits.maxComputeSharedMemorySize,
        max_workgroup_invocations=limits.maxComputeWorkGroupInvocations,
        max_workgroup_size=tuple(limits.maxComputeWorkGroupSize),
        max_group_count=tuple(limits.maxComputeWorkGroupCount),
        subgroup_size=subgroup.subgroupSize if subgroup else 1,
        subgroup_operations=tuple(n for i, n in enumerate(SUBGROUP_OPERATIONS) if subgroup_bits >> i & 1),
        timestamp_bits=queue.timestampValidBits if queue else 0,
        timestamp_period_ns=limits.timestampPeriod,
        unified_memory=_is_unified(kind, heaps, types),
        features=_features(vk, physical, api, extensions, kind == "cpu"),
        warning=_warning(name, driver_name, driver_version),
        portability_subset=PORTABILITY_SUBSET in extensions,
    )
    rejected = _rejection(info, has_compute_queue=queue is not None)
    return info if not rejected else DeviceInfo(**{**vars(info), "rejected": rejected})


def _version(packed: int) -> tuple[int, int, int]:
    return packed >> 22 & 0x7F, packed >> 12 & 0x3FF, packed & 0xFFF


def _chain(vk: Any, head: str, head_type: int, *members: tuple[str, int]) -> tuple[Any, list[Any]]:
    """A structure that Vulkan fills, with others chained behind it by pNext."""
    made: list[Any] = []
    for name, structure_type in ((head, head_type), *members):
        structure = vk.ffi.new(f"{name}*")
        structure.sType = structure_type
        if made:
            made[-1].pNext = structure
        made.append(structure)
    return made[0], made[1:]


def _properties2(
    vk: Any, physical: Any, api: tuple[int, int, int], extensions: set[str]
) -> tuple[Any, Any, Any, Any]:
    """VkPhysicalDevice{ID,Subgroup,Maintenance3,Driver}Properties; None where the device is too old."""
    if api < (1, 1, 0):
        return None, None, None, None
    members = [
        ("VkPhysicalDeviceIDProperties", vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_ID_PROPERTIES),
        ("VkPhysicalDeviceSubgroupProperties", vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_PROPERTIES),
        (
            "VkPhysicalDeviceMaintenance3Properties",
            vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MAINTENANCE_3_PROPERTIES,
        ),
    ]
    if api >= (1, 2, 0) or "VK_KHR_driver_properties" in extensions:
        members.append(
            ("VkPhysicalDeviceDriverProperties", vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_DRIVER_PROPERTIES)
        )
    head, filled = _chain(
        vk, "VkPhysicalDeviceProperties2", vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2, *members
    )
    vk.lib.vkGetPhysicalDeviceProperties2(physical, head)
    ids, subgroup, maintenance, *driver = filled
    return ids, subgroup, maintenance, driver[0] if driver else None


def _driver(vk: Any, properties: Any, driver: Any) -> tuple[str, str]:
    """Name and version. Where the driver does not spell them out, its number is read its vendor's way."""
    if driver:
        name, version = (
            vk.ffi.string(s).decode("utf-8", "replace") for s in (driver.driverName, driver.driverInfo)
        )
    else:
        name, version = VENDORS.get(properties.vendorID, "unknown driver"), ""
    number = properties.driverVersion
    if not version and properties.vendorID == 0x10DE:
        version = f"{number >> 22}.{number >> 14 & 0xFF}.{number >> 6 & 0xFF}"
    return name, version or ".".join(map(str, _version(number)))


def _memory(
    vk: Any, physical: Any, api: tuple[int, int, int], extensions: set[str]
) -> tuple[tuple[MemoryHeap, ...], tuple[MemoryType, ...]]:
    memory = vk.vkGetPhysicalDeviceMemoryProperties(physical)
    free: list[int | None] = [None] * memory.memoryHeapCount
    if api >= (1, 1, 0) and "VK_EXT_memory_budget" in extensions:
        head, (budget,) = _chain(
            vk,
            "VkPhysicalDeviceMemoryProperties2",
            vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_PROPERTIES_2,
            (
                "VkPhysicalDeviceMemoryBudgetPropertiesEXT",
                vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_BUDGET_PROPERTIES_EXT,
            ),
        )
        vk.lib.vkGetPhysicalDeviceMemoryProperties2(physical, head)
        free = [max(0, budget.heapBudget[i] - budget.heapUsage[i]) for i in range(len(free))]
    heaps = tuple(
        MemoryHeap(heap.size, free[i], bool(heap.flags & _HEAP_DEVICE_LOCAL))
        for i, heap in enumerate(memory.memoryHeaps[0 : memory.memoryHeapCount])
    )
    kinds = memory.memoryTypes[0 : memory.memoryTypeCount]
    return heaps, tuple(MemoryType(t.heapIndex, t.propertyFlags) for t in kinds)


def _is_unified(kind: str, heaps: tuple[MemoryHeap, ...], types: tuple[MemoryType, ...]) -> bool:
    """Whether mapped memory is as good as any: integrated and CPU devices, and whatever has no other."""
    if kind in ("integrated", "cpu"):
        return True
    mapped = {
        t.heap for t in types if t.flags & (_HOST_VISIBLE | _HOST_COHERENT) == _HOST_VISIBLE | _HOST_COHERENT
    }
    return all(heap.device_local for heap in heaps) and mapped == set(range(len(heaps)))


def _features(
    vk: Any, physical: Any, api: tuple[int, int, int], extensions: set[str], is_cpu: bool
) -> frozenset[str]:
    """Names of layer.FEATURES, by the same conditions under which layer.c turns them on."""
    if api < (1, 1, 0):
        return frozenset()
    known = {
        "VkPhysicalDevice8BitStorageFeatures": ("VK_KHR_8bit_storage", "8BIT_STORAGE"),
        "VkPhysicalDeviceShaderFloat16Int8Features": ("VK_KHR_shader_float16_int8", "SHADER_FLOAT16_INT8"),
        "VkPhysicalDeviceShaderIntegerDotProductFeatures": (
            "VK_KHR_shader_integer_dot_product", "SHADER_INTEGER_DOT_PRODUCT",
        ),
        "VkPhysicalDeviceSubgroupSizeControlFeatures": (
            "VK_EXT_subgroup_size_control", "SUBGROUP_SIZE_CONTROL",
        ),
        "VkPhysicalDeviceVulkanMemoryModelFeatures": ("VK_KHR_vulkan_memory_model", "VULKAN_MEMORY_MODEL"),
        "VkPhysicalDeviceCooperativeMatrixFeaturesKHR": ("VK_KHR_cooperative_matrix", "COOPERATIVE_MATRIX"),
        "VkPhysicalDeviceBufferDeviceAddressFeatures": (
            "VK_KHR_buffer_device_address", "BUFFER_DEVICE_ADDRESS",
        ),
    }  # fmt: skip
    members = [
        ("VkPhysicalDevice16BitStorageFeatures", vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_16BIT_STORAGE_FEATURES)
    ]
    for structure, (extension, name) in known.items():
        suffix = "_FEATURES_KHR" if structure.endswith("KHR") else "_FEATURES"
        value = getattr(vk, f"VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_{name}{suffix}", None)
        if extension in extensions and value is not None:
            members.append((structure, value))
    head, filled = _chain(
        vk, "VkPhysicalDeviceFeatures2", vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2, *members
    )
    vk.lib.vkGetPhysicalDeviceFeatures2(physical, head)
    got = {name: structure for (name, _), structure in zip(members, filled)}

    def on(structure: str, *fields: str) -> bool:
        return structure in got and all(getattr(got[structure], f) for f in fields)

    offered = {
        "storage_16bit": on("VkPhysicalDevice16BitStorageFeatures", "storageBuffer16BitAccess"),
        "storage_8bit": on("VkPhysicalDevice8BitStorageFeatures", "storageBuffer8BitAccess"),
        "float16": on("VkPhysicalDeviceShaderFloat16Int8Features", "shaderFloat16"),
        "int8": on("VkPhysicalDeviceShaderFloat16Int8Features", "shaderInt8"),
        "int16": bool(head.features.shaderInt16),
        "integer_dot_product": on(
            "VkPhysicalDeviceShaderIntegerDotProductFeatures", "shaderIntegerDotProduct"
        ),
        "cooperative_matrix": on("VkPhysicalDeviceCooperativeMatrixFeaturesKHR", "cooperativeMatrix")
        and on("VkPhysicalDeviceVulkanMemoryModelFeatures", "vulkanMemoryModel"),
        "subgroup_size_control": on(
            "VkPhysicalDeviceSubgroupSizeControlFeatures", "subgroupSizeControl", "computeFullSubgroups"
        ),
        "buffer_address": is_cpu and on("VkPhysicalDeviceBufferDeviceAddressFeatures", "bufferDeviceAddress"),
    }
    return frozenset(name for name, is_on in offered.items() if is_on)


def _warning(name: str, driver_name: str, driver_version: str) -> str:
    mesa = re.search(r"Mesa (\d+)\.(\d+)[\w.~+-]*", driver_version)
    if "llvmpipe" in (driver_name + name).lower() and mesa and (int(mesa[1]), int(mesa[2])) < OLD_LAVAPIPE:
        return (
            f"{name} is of {mesa[0]}, which is several times slower than newer ones: install a newer Mesa "
            "(Debian 12: `apt install -t bookworm-backports mesa-vulkan-drivers`)"
        )
    return ""


def _rejection(info: DeviceInfo, has_compute_queue: bool) -> str:
    """Why our kernels cannot run on a device, or ""."""
    if info.api_version[:2] < MIN_API:
        return f"it speaks Vulkan {'.'.join(map(str, info.api_version))}, and 1.1 is needed"
    if not has_compute_queue:
        return "it has no queue for compute work"
    if info.heap_of(mapped=True) is None:
        return "it has no memory that the host can write"
    invocations = min(info.max_workgroup_invocations, info.max_workgroup_size[0])
    for has, needed, what in (
        (info.max_storage_buffers, MIN_STORAGE_BUFFERS, "storage buffers a kernel can bind"),
        (invocations, MIN_INVOCATIONS, "invocations in a workgroup"),
        (info.max_push_bytes, MIN_PUSH_BYTES, "bytes of push constants"),
        (info.max_shared_bytes, MIN_SHARED_BYTES, "bytes of shared memory"),
    ):
        if has < needed:
            return f"it has {has} {what}, and {needed} are needed"
    return ""

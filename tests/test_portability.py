"""Devices that lack a part of Vulkan (MoltenVK): the loader lists them only for programs that ask for them.

No such driver runs here, so lavapipe's manifest says that it is one; the loader treats it so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from xinfer_vk.vulkan import devices

FOLDERS = "/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d", "/usr/local/share/vulkan/icd.d"
CODE = """
from xinfer_vk.vulkan.devices import list_devices
from xinfer_vk.vulkan.runtime import KomputeRuntime
(info,) = list_devices()
with KomputeRuntime(info) as rt:
    print(rt.profile.name)
"""


@pytest.fixture
def portability_driver(tmp_path: Path) -> Path:
    found = [p for folder in FOLDERS for p in Path(folder).glob("lvp_icd*.json")]
    if not found:
        pytest.skip("lavapipe's manifest was not found")
    manifest = json.loads(found[0].read_text())
    manifest["file_format_version"] = "1.0.1"
    manifest["ICD"]["is_portability_driver"] = True
    path = tmp_path / "portability_icd.json"
    path.write_text(json.dumps(manifest))
    return path


def test_a_portability_driver_is_listed_and_opened(portability_driver):
    drop = ("VK_ADD_DRIVER_FILES", "VK_ICD_FILENAMES")
    env = {k: v for k, v in os.environ.items() if k not in drop} | {
        "VK_DRIVER_FILES": str(portability_driver)
    }
    done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "llvmpipe" in done.stdout, done.stderr


class FakeVulkan:
    """What :func:`devices._instance_info` asks."""

    def __init__(self, extensions: tuple[str, ...]) -> None:
        self._extensions = extensions

    VkApplicationInfo = VkInstanceCreateInfo = staticmethod(lambda **fields: fields)

    @staticmethod
    def VK_MAKE_VERSION(*parts: int) -> tuple[int, ...]:
        return parts

    def vkEnumerateInstanceExtensionProperties(self, layer: None) -> list[SimpleNamespace]:
        return [SimpleNamespace(extensionName=name) for name in self._extensions]


def test_an_old_loader_is_not_asked_for_what_it_does_not_know():
    asked = devices._instance_info(FakeVulkan(("VK_KHR_surface",)))
    assert asked.keys() == {"pApplicationInfo"}
    asked = devices._instance_info(FakeVulkan(("VK_KHR_surface", "VK_KHR_portability_enumeration")))
    assert asked["flags"] == 1  # VK_INSTANCE_CREATE_ENUMERATE_PORTABILITY_BIT_KHR
    assert asked["ppEnabledExtensionNames"] == ["VK_KHR_portability_enumeration"]


def test_a_device_with_the_subset_enables_it_and_no_other_does(device):
    assert device.info.required_extensions == []
    assert replace(device.info, portability_subset=True).required_extensions == ["VK_KHR_portability_subset"]

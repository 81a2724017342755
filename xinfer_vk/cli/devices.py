"""``xinfer-vk devices``: the Vulkan devices of this machine, which one is used by default, and why."""

from __future__ import annotations

import json
import shutil
import textwrap
from typing import TYPE_CHECKING

import click

from xinfer_vk.cli.output import tell
from xinfer_vk.errors import XinferError

if TYPE_CHECKING:
    from xinfer_vk.vulkan.devices import DeviceInfo

FEATURE_LABELS = {
    "storage_16bit": "16-bit storage",
    "storage_8bit": "8-bit storage",
    "float16": "float16",
    "int8": "int8",
    "int16": "int16",
    "integer_dot_product": "dot product",
    "cooperative_matrix": "cooperative matrix",
    "subgroup_size_control": "subgroup size control",
}


@click.command("devices")
@click.option("--json", "as_json", is_flag=True, help="Print all properties as JSON.")
def command(as_json: bool) -> None:
    """List the Vulkan devices and their features.

    The device marked * is the default. --device (an index or part of a name) and XINFER_VK_DEVICE select
    another; "numpy" is the reference, which needs no Vulkan. The features are those that the device offers;
    kernels use the ones that help.
    """
    from xinfer_vk.vulkan.devices import choose_device, list_devices

    devices = list_devices()
    chosen: DeviceInfo | None = None
    notices: tuple[str, ...] = ()
    problem: XinferError | None = None
    try:
        choice = choose_device(None, devices)
        chosen, notices = choice.device, choice.notices
    except XinferError as error:  # nothing usable, or XINFER_VK_DEVICE is wrong: still show what there is
        problem = error
    if as_json:
        listing = [{**device.as_dict(), "default": device is chosen} for device in devices]
        click.echo(json.dumps(listing, indent=2))
    else:
        _print_table(devices, chosen)
    for notice in notices:
        tell(notice)
    if problem is not None:
        raise problem


def _print_table(devices: list[DeviceInfo], chosen: DeviceInfo | None) -> None:
    width = max(60, min(shutil.get_terminal_size().columns, 120))
    for device in devices:
        mark = "*" if device is chosen else " "
        click.echo(click.style(f"{mark} {device.index}  {device.name}", bold=True))
        rows = _rows(device)
        indent = 7 + max(len(label) for label, _ in rows)
        for label, text in rows:
            head = f"     {label}".ljust(indent)
            click.echo(textwrap.fill(text, width, initial_indent=head, subsequent_indent=" " * indent))
        click.echo()


def _rows(device: DeviceInfo) -> list[tuple[str, str]]:
    from xinfer_vk.units import format_bytes

    rows = [
        ("type", f"{device.type}, {device.vendor}" + (", unified memory" if device.unified_memory else "")),
        ("driver", f"{device.driver}, Vulkan {'.'.join(map(str, device.api_version))}"),
    ]
    for i, heap in enumerate(device.heaps):
        free = "" if heap.free_bytes is None else f", {format_bytes(heap.free_bytes)} free"
        where = "device" if heap.device_local else "host"
        label = "memory" if len(device.heaps) == 1 else f"memory {i}"
        rows.append((label, f"{format_bytes(heap.size_bytes)} ({where}){free}"))
    bound, allocated = format_bytes(device.max_storage_range_bytes), format_bytes(device.max_allocation_bytes)
    shared, operations = format_bytes(device.max_shared_bytes), ", ".join(device.subgroup_operations)
    timestamps = f"{device.timestamp_bits} bits of {device.timestamp_period_ns:g} ns"
    features = [label for name, label in FEATURE_LABELS.items() if name in device.features]
    rows += [
        ("buffers", f"{bound} storage-buffer range, {allocated} an allocation"),
        ("constants", f"{device.max_push_bytes} bytes pushed"),
        ("workgroups", f"{device.max_workgroup_invocations} invocations, {shared} shared memory"),
        ("subgroups", f"{device.subgroup_size} invocations; {operations or 'no operations'}"),
        ("timestamps", timestamps if device.timestamp_bits else "none"),
        ("features", ", ".join(features) or "none"),
    ]
    if device.rejected:
        rows.append(("not usable", device.rejected))
    if device.warning:
        rows.append(("warning", device.warning))
    return rows

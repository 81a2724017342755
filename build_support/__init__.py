"""What turns a source tree into an installed package: shaders, the Vulkan layer, Kompute's module.

Used by setup.py, build_shaders.py and the tests; nothing at run time imports it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class BuildError(Exception):
    """The build cannot go on; the message names what is missing or wrong, and the remedy."""


# What the C and C++ parts need from the system: the packages of Debian/Ubuntu, Fedora, Arch and Homebrew.
_VULKAN_HEADERS = ("libvulkan-dev", "vulkan-headers", "vulkan-headers")
_MANAGERS = {
    "Debian, Ubuntu:": "sudo apt-get install",
    "Fedora:": "sudo dnf install",
    "Arch:": "sudo pacman -S",
    "macOS:": "brew install",
}
_NEEDS = {
    "g++ (a C++ compiler)": ("g++", "gcc-c++", "gcc", "gcc"),
    "gcc (a C compiler)": ("gcc", "gcc", "gcc", "gcc"),
    "Python.h (the headers of this Python)": ("python3-dev", "python3-devel", "python", "python"),
    "vulkan/vulkan.hpp (the Vulkan headers)": (*_VULKAN_HEADERS, "vulkan-headers"),
    "vulkan/vk_layer.h (the Vulkan headers)": (*_VULKAN_HEADERS, "vulkan-headers"),
    "libvulkan.so (the Vulkan loader)": (
        "libvulkan-dev",
        "vulkan-loader-devel",
        "vulkan-icd-loader",
        "vulkan-loader",
    ),
    "fmt/format.h (the {fmt} headers)": ("libfmt-dev", "fmt-devel", "fmt", "fmt"),
}
_HEADERS = {
    "Python.h": "Python.h (the headers of this Python)",
    "vulkan/vulkan.hpp": "vulkan/vulkan.hpp (the Vulkan headers)",
    "vulkan/vk_layer.h": "vulkan/vk_layer.h (the Vulkan headers)",
    "fmt/format.h": "fmt/format.h (the {fmt} headers)",
}


def missing(what: str, needs: Sequence[str]) -> BuildError:
    """An error that names every missing thing and how each large distribution calls it."""
    lines = [f"{what} needs, and this system lacks: " + ", ".join(needs)]
    for i, (system, command) in enumerate(_MANAGERS.items()):
        packages = dict.fromkeys(_NEEDS[need][i] for need in needs)  # in order, once each
        if (system == "macOS:") == (sys.platform == "darwin"):
            lines.append(f"  {system:16}{command} {' '.join(packages)}")
    return BuildError("\n".join(lines))


def find_compiler(variable: str, names: Sequence[str], need: str, what: str) -> list[str]:
    """The compiler named by an environment variable (with its arguments), or the first one found."""
    chosen = os.environ.get(variable, "").split()
    if chosen:
        if shutil.which(chosen[0]) is None:
            raise BuildError(f"{variable}={os.environ[variable]}: no such program")
        return chosen
    for name in names:
        if shutil.which(name):
            return [name]
    raise missing(what, [need])


def lacking(
    compiler: Sequence[str], headers: Sequence[str], language: str, link_vulkan: bool = True
) -> list[str]:
    """Which of these headers, and the loader to link with, the compiler does not find."""
    include = [f"-I{sysconfig.get_path('include')}"]
    absent = []
    for header in headers:
        probe = f"#if !__has_include(<{header}>)\n#error absent\n#endif\n"
        command = [*compiler, *include, "-E", "-x", language, "-o", os.devnull, "-"]
        if subprocess.run(command, input=probe, capture_output=True, text=True).returncode:
            absent.append(_HEADERS[header])
    if link_vulkan:
        with tempfile.TemporaryDirectory(prefix="xinfer-vk-") as folder:
            command = [*compiler, "-shared", "-o", os.path.join(folder, "probe.so"), "-lvulkan"]
            if subprocess.run(command, capture_output=True).returncode:
                absent.append("libvulkan.so (the Vulkan loader)")
    return absent


def jobs() -> int:
    """Compilers to run side by side: one per core this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores))


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary path beside ``target`` that takes its place when the block ends well, at once and whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        library = target.suffix in (".so", ".dylib")
        temporary.chmod((0o777 if library else 0o666) & ~umask)  # mkstemp made it private
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)

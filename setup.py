"""The compiled parts of the package; everything else about it is in pyproject.toml.

    xinfer_vk/spirv/                          shaders as SPIR-V, with a manifest    (build_shaders.py)
    xinfer_vk/vulkan/layer/libxinfer_layer.so the companion Vulkan layer            (build_support/layer.py)
    xinfer_vk/vulkan/_kompute/kp.*.so         Kompute's Python module               (build_support/kompute.py)

A wheel carries them; an editable install leaves them in the source tree, where git ignores them.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # build front ends do not put the project's folder there

import build_shaders  # noqa: E402
from build_support import BuildError  # noqa: E402
from build_support.kompute import build_kompute  # noqa: E402
from build_support.layer import build_layer  # noqa: E402


class BuildPython(build_py):
    """As usual, but into a folder without the files of an earlier build, which would end in the wheel."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "xinfer_vk", ignore_errors=True)
        super().run()


class BuildNative(build_ext):
    """Compiles all three parts in place of the one Extension that setuptools knows about."""

    def run(self) -> None:
        package = (ROOT if self.inplace or self.editable_mode else Path(self.build_lib)) / "xinfer_vk"
        try:
            build_kompute(package / "vulkan" / "_kompute")
            build_layer(package / "vulkan" / "layer")
            shaders = build_shaders.build(package / "spirv")
        except BuildError as error:
            raise CompileError(str(error)) from error
        build_shaders.report(shaders, verbose=False)
        if shaders.failed:
            raise CompileError(f"shaders that do not compile: {' '.join(shaders.failed)}")

    def get_source_files(self) -> list[str]:
        return []

    def get_outputs(self) -> list[str]:
        return []  # all of them are under build_lib, which is packed whole

    def get_output_mapping(self) -> dict[str, str]:
        return {}


setup(
    # Without an extension setuptools would call the wheel pure.
    ext_modules=[Extension("xinfer_vk.vulkan._kompute.kp", sources=[])],
    cmdclass={"build_py": BuildPython, "build_ext": BuildNative},
)

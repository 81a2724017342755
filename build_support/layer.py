"""Compiles the companion Vulkan layer (xinfer_vk/vulkan/layer/layer.c) to a shared library, and writes the
manifest by which the Vulkan loader finds it.

python -m build_support.layer        in place, after an edit
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from build_support import ROOT, BuildError, find_compiler, lacking, missing, replacing

SOURCE = ROOT / "xinfer_vk" / "vulkan" / "layer" / "layer.c"
LIBRARY = "libxinfer_layer.dylib" if sys.platform == "darwin" else "libxinfer_layer.so"
MANIFEST = "layer.json"
NAME = "VK_LAYER_XINFER_companion"  # also in xinfer_vk/vulkan/layer.py
WHAT = "Building the Vulkan layer"
# Only what is marked EXPORT may be visible: the loader puts many libraries with the same Vulkan names
# into one process. -Werror is for those who change the file: `python -m build_support.layer --strict`.
FLAGS = ("-std=c11", "-O2", "-fPIC", "-pthread", "-fvisibility=hidden")
LINK_FLAGS = ("-dynamiclib",) if sys.platform == "darwin" else ("-shared", "-Wl,-Bsymbolic")
STRICT = ("-Wall", "-Wextra", "-Werror")


def build_layer(folder: Path, strict: bool = False) -> Path:
    """Compile the layer into ``folder``, and put its manifest beside it. Raises :class:`BuildError` with the
    compiler's message."""
    compiler = find_compiler("CC", ("gcc", "cc", "clang"), "gcc (a C compiler)", WHAT)
    absent = lacking(compiler, ["vulkan/vk_layer.h"], "c", link_vulkan=False)
    if absent:
        raise missing(WHAT, absent)
    target = folder / LIBRARY
    with replacing(target) as temporary:
        flags = [*FLAGS, *LINK_FLAGS, *(STRICT if strict else ())]
        command = [*compiler, *flags, "-o", str(temporary), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise BuildError(f"{WHAT} failed:\n{done.stderr.strip()}")
        if done.stderr.strip():
            print(done.stderr.strip(), file=sys.stderr)
    with replacing(folder / MANIFEST) as temporary:
        temporary.write_text(json.dumps(_manifest(), indent=1) + "\n", encoding="utf-8")
    return target


def _manifest() -> dict[str, object]:
    """The library is named relative to the manifest: the package may be installed anywhere."""
    return {
        "file_format_version": "1.2.0",
        "layer": {
            "name": NAME,
            "type": "GLOBAL",
            "library_path": f"./{LIBRARY}",
            "api_version": "1.1.0",
            "implementation_version": "1",
            "description": "Barriers, features, errors and a pipeline cache for xinfer-vk's use of Kompute",
        },
    }


def main() -> int:
    try:
        print(build_layer(SOURCE.parent, strict="--strict" in sys.argv[1:]))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

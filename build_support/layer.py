"""Compiles the companion Vulkan layer (xinfer_vk/vulkan/layer/layer.c) to a shared library.

python -m build_support.layer        in place, after an edit
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from build_support import ROOT, BuildError, find_compiler, lacking, missing, replacing

SOURCE = ROOT / "xinfer_vk" / "vulkan" / "layer" / "layer.c"
LIBRARY = "libxinfer_layer.so"
WHAT = "Building the Vulkan layer"
# Only what is marked EXPORT may be visible: the loader puts many libraries with the same Vulkan names
# into one process. -Werror is for those who change the file: `python -m build_support.layer --strict`.
FLAGS = ("-std=c11", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-Wl,-Bsymbolic")
STRICT = ("-Wall", "-Wextra", "-Werror")


def build_layer(folder: Path, strict: bool = False) -> Path:
    """Compile the layer into ``folder``; raises :class:`BuildError` with the compiler's message."""
    compiler = find_compiler("CC", ("gcc", "cc", "clang"), "gcc (a C compiler)", WHAT)
    absent = lacking(compiler, ["vulkan/vk_layer.h"], "c", link_vulkan=False)
    if absent:
        raise missing(WHAT, absent)
    target = folder / LIBRARY
    with replacing(target) as temporary:
        command = [*compiler, *FLAGS, *(STRICT if strict else ()), "-o", str(temporary), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise BuildError(f"{WHAT} failed:\n{done.stderr.strip()}")
        if done.stderr.strip():
            print(done.stderr.strip(), file=sys.stderr)
    return target


def main() -> int:
    try:
        print(build_layer(SOURCE.parent, strict="--strict" in sys.argv[1:]))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

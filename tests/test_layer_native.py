"""The companion layer's own code under sanitizers, on a driver that does nothing (native/layer_harness.c)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from build_support.layer import FLAGS, SOURCE

HARNESS = Path(__file__).resolve().parent / "native" / "layer_harness.c"
COMPILER = shutil.which("gcc") or shutil.which("clang")
SANITIZERS = ("address,undefined", "thread")


def compiled(sanitizer: str, source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    standard = next(flag for flag in FLAGS if flag.startswith("-std"))
    options = [standard, "-O1", "-g", "-Wno-unused", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    command = [COMPILER or "gcc", *options, f"-I{SOURCE.parent}", str(source), "-o", str(target), "-pthread"]
    return subprocess.run(command, capture_output=True, text=True)


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []  # TSan cannot place its shadow everywhere
    return subprocess.run([*fixed, str(program), *arguments], capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module", params=SANITIZERS)
def harness(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("native")
    (folder / "empty.c").write_text("int main(void) { return 0; }\n", encoding="utf-8")
    works = COMPILER and compiled(request.param, folder / "empty.c", folder / "empty").returncode == 0
    if not works or run(folder / "empty").returncode:
        pytest.skip(f"-fsanitize={request.param} does not work here")
    done = compiled(request.param, HARNESS, folder / "harness")
    assert done.returncode == 0, done.stderr
    return folder / "harness"


@pytest.mark.parametrize("case", ["many", "unknown", "portability", "threads"])
def test_the_layer_keeps_its_memory_in_order(harness, case):
    done = run(harness, case)
    assert done.returncode == 0, done.stderr

"""Builds Kompute's Python module, ``kp``, from its release on the package index.

Kompute 0.9.0 is published as source only, and its own build asks for a CMake set-up, environment
variables and numpy < 2 that `pip install` cannot express. It is eleven C++ files; so they are compiled
here, directly, with what the package needs of them: no logging, no Khronos validation layer that
switches itself on, pybind11 2.13.6 (2.10 gives silently wrong results with numpy 2). Some of its lines
are changed first (:data:`PATCHES`).

A built module is kept in the user's cache directory, so that a second environment takes seconds.

Environment: ``XINFER_VK_KOMPUTE`` names a built ``kp*.so``, a ``kp`` wheel, or Kompute's source archive
to use instead of the package index; ``XINFER_VK_CACHE`` moves the cache.

    python -m build_support.kompute        in place
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from build_support import ROOT, BuildError, find_compiler, jobs, lacking, missing, replacing

VERSION = "0.9.0"
ARCHIVE = f"kp-{VERSION}.tar.gz"
SHA256 = "98e583dc6e9731ff6d7a3e3317817e4d93f7b2945929619e29a56325db279949"
PYBIND11 = "2.13.6"  # the version this was proven with
FOLDER = ROOT / "xinfer_vk" / "vulkan" / "_kompute"
PORTABILITY = ROOT / "build_support" / "portability.hpp"
WHAT = f"Building Kompute {VERSION}"

FLAGS = (
    "-std=c++14",  # what Kompute is written in
    "-O2",
    "-fPIC",
    "-fvisibility=hidden",  # as pybind11 asks
    "-w",  # its warnings are not ours to mend
    "-DNDEBUG",
    "-DFMT_HEADER_ONLY",  # so that no libfmt.so is needed at run time, whose name differs by release
    "-DKOMPUTE_BUILD_PYTHON=1",
    "-DKOMPUTE_OPT_LOG_LEVEL_DISABLED=1",
    "-DKOMPUTE_DISABLE_VK_DEBUG_LAYERS=1",
    f'-DVERSION_INFO="{VERSION}"',
)
LINK_FLAGS = (
    ("-bundle", "-undefined", "dynamic_lookup")  # what Python loads on macOS
    if sys.platform == "darwin"
    else ("-shared", "-s", "-Wl,--as-needed", "-Wl,-O1")
)

_RELEASE_GIL = ",\n        py::call_guard<py::gil_scoped_release>()"
_EVAL = "[](kp::Sequence& self) { return self.eval(); }"
_EVAL_ASYNC = '"eval_async",\n        '
_AWAIT = "[](kp::Sequence& self) { return self.evalAwait(); }"

# (file, text, text to put in its place). Each text stands in the file once: the archive's hash pins it.
PATCHES = (
    # A mapped tensor's memory stays untouched, whatever array its size came from: the runtime fills what must
    # be zero. Of a KV cache, sized for a whole context, only the pages in use then take memory.
    (
        "src/Tensor.cpp",
        "        this->mapRawData();\n        memcpy(this->mRawData, data, this->memorySize());\n",
        "        this->mapRawData();\n",
    ),
    # While the device works, other Python threads run. Safe: with logging off, nothing in there is Python.
    ("python/src/main.cpp", f'"eval",\n        {_EVAL}', f'"eval",\n        {_EVAL}{_RELEASE_GIL}'),
    ("python/src/main.cpp", _AWAIT, _AWAIT + _RELEASE_GIL),
    # The binding of eval_async calls eval, which waits for the device.
    (
        "python/src/main.cpp",
        _EVAL_ASYNC + _EVAL,
        _EVAL_ASYNC + _EVAL.replace("eval()", "evalAsync()") + _RELEASE_GIL,
    ),
)

# A module that cannot be imported must never be installed. kp imports numpy, which a build environment
# need not have: an empty stand-in will do for that, since it is used only when tensors are made.
_IMPORT_TEST = """
import importlib.util, sys, types
sys.modules["numpy"] = types.ModuleType("numpy")
spec = importlib.util.spec_from_file_location("kp", sys.argv[1])
kp = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kp)
for name in ("Manager", "Tensor", "Algorithm", "Sequence", "OpAlgoDispatch", "OpTensorSyncLocal"):
    getattr(kp, name)
"""


def module_name() -> str:
    """``kp.cpython-311-x86_64-linux-gnu.so``: the name this Python imports it by."""
    return f"kp{sysconfig.get_config_var('EXT_SUFFIX') or '.so'}"


def build_kompute(folder: Path) -> Path:
    """Put kp's module, and the licences of what is in it, into ``folder``. Raises :class:`BuildError`."""
    given = os.environ.get("XINFER_VK_KOMPUTE")
    with tempfile.TemporaryDirectory(prefix="xinfer-vk-") as scratch:
        work = Path(scratch)
        if given and not given.endswith(".tar.gz"):
            _copy(_prebuilt(Path(given), work), folder)
        else:
            _copy(_built(Path(given) if given else None, work), folder)
    return folder / module_name()


def _copy(source: Path, folder: Path) -> None:
    """The module and the licences beside it; the module last: where it is, all is."""
    for path in sorted(source.iterdir(), key=lambda path: path.suffix == ".so"):
        if path.name.startswith("LICENSE.") or path.name == module_name():
            with replacing(folder / path.name) as temporary:
                shutil.copyfile(path, temporary)


def _prebuilt(path: Path, work: Path) -> Path:
    """A folder with the module that ``XINFER_VK_KOMPUTE`` names."""
    if not path.is_file():
        raise BuildError(f"XINFER_VK_KOMPUTE={path}: no such file")
    folder = work / "given"
    folder.mkdir()
    module = folder / module_name()
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            if module.name not in wheel.namelist():
                raise BuildError(f"XINFER_VK_KOMPUTE={path}: this wheel holds no {module.name}")
            wheel.extract(module.name, folder)
            for name in wheel.namelist():
                if re.search(r"\.dist-info/(licenses/)?LICENSE$", name):
                    (folder / "LICENSE.kompute").write_bytes(wheel.read(name))
    elif path.name == module.name:
        shutil.copyfile(path, module)
        for licence in path.parent.glob("LICENSE.*"):
            shutil.copyfile(licence, folder / licence.name)
    else:
        raise BuildError(f"XINFER_VK_KOMPUTE={path}: a wheel, {ARCHIVE} or {module.name} is wanted")
    problem = _import_problem(module)
    if problem:
        raise BuildError(f"XINFER_VK_KOMPUTE={path} cannot be imported by {sys.executable}: {problem}")
    return folder


def _built(archive: Path | None, work: Path) -> Path:
    """A folder with the module: the cached one where it can be imported, else a new one, kept there too."""
    compiler = find_compiler("CXX", ("g++", "c++", "clang++"), "g++ (a C++ compiler)", WHAT)
    cache = cache_folder()
    cached = cache / cache_key(compiler) if cache else None
    if cached and (cached / module_name()).is_file() and _import_problem(cached / module_name()) is None:
        return cached
    absent = lacking(compiler, ["Python.h", "vulkan/vulkan.hpp", "fmt/format.h"], "c++")
    if absent:
        raise missing(WHAT, absent)
    source = _unpack(archive or _fetch(work, cache), work)
    built = _compile(compiler, source, work)
    problem = _import_problem(built / module_name())
    if problem:
        raise BuildError(f"Kompute {VERSION} was built but {sys.executable} cannot import it: {problem}")
    if cached:
        with suppress(OSError):  # a read-only home is no reason to fail
            _copy(built, cached)
    return built


def cache_folder() -> Path | None:
    """Where built modules and Kompute's source are kept; None where there is no home directory."""
    chosen, base = os.environ.get("XINFER_VK_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if chosen:
        return Path(chosen).expanduser().absolute() / "kompute"
    try:
        return (Path(base) if base else Path.home() / ".cache") / "xinfer-vk" / "kompute"
    except RuntimeError:
        return None


def cache_key(compiler: Sequence[str]) -> str:
    """Names everything that decides whether a built module also works here.

    A home directory may be shared by machines of different age: a module linked against a newer libc
    or libstdc++ (by a newer compiler) does not load on an older one.
    """
    done = subprocess.run([*compiler, "-dumpversion"], capture_output=True, text=True)
    version = done.stdout.strip().split(".")[0] or "unknown"
    libc = "-".join(filter(None, platform.libc_ver())) or "libc"
    patches = [text for patch in PATCHES for text in patch]
    parts = [SHA256, PYBIND11, *FLAGS, *LINK_FLAGS, *patches, PORTABILITY.read_text(encoding="utf-8")]
    recipe = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    soabi = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
    return f"kp-{VERSION}-{soabi}-{libc}-{Path(compiler[0]).name}{version}-{recipe[:8]}"


def _import_problem(module: Path) -> str | None:
    """Why this Python cannot import the module; None when it can."""
    command = [sys.executable, "-I", "-c", _IMPORT_TEST, str(module)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"the interpreter ended with code {done.returncode}"


def _fetch(work: Path, cache: Path | None) -> Path:
    """Kompute's source archive: from the cache, else through pip, which knows the user's index and proxy."""
    cached = cache / ARCHIVE if cache else None
    if cached and cached.is_file() and _sha256(cached) == SHA256:
        return cached
    wanted = work / "requirements.txt"
    wanted.write_text(f"kp=={VERSION} --hash=sha256:{SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--require-hashes", "--requirement", str(wanted)]
    command += ["--no-deps", "--no-binary", "kp", "--no-build-isolation", "--dest", str(work)]
    done = subprocess.run(command, capture_output=True, text=True)
    archive = work / ARCHIVE
    if done.returncode or not archive.is_file():
        said = [line for line in done.stderr.splitlines() if line.strip() and "WARNING" not in line]
        raise BuildError(
            f"Kompute {VERSION} could not be fetched from the package index: is there a network? "
            f"(XINFER_VK_KOMPUTE may name a {ARCHIVE} that you have.) pip said:\n" + "\n".join(said[-5:])
        )
    if cached:
        with suppress(OSError), replacing(cached) as temporary:
            shutil.copyfile(archive, temporary)
    return archive


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _unpack(archive: Path, work: Path) -> Path:
    if not archive.is_file():
        raise BuildError(f"{archive}: no such file")
    digest = _sha256(archive)
    if digest != SHA256:
        raise BuildError(f"{archive} is not Kompute {VERSION}: its SHA-256 is {digest}, not {SHA256}")
    with tarfile.open(archive) as tar:  # its contents are known: the hash above pins them
        if hasattr(tarfile, "data_filter"):
            tar.extractall(work, filter="data")
        else:
            tar.extractall(work)
    source = work / f"kp-{VERSION}"
    for name, text, instead in PATCHES:
        file = source / name
        contents = file.read_text(encoding="utf-8")
        if contents.count(text) != 1:
            raise BuildError(f"{WHAT}: {name} holds {contents.count(text)} times, not once: {text!r}")
        file.write_text(contents.replace(text, instead), encoding="utf-8")
    return source


def _compile(compiler: Sequence[str], source: Path, work: Path) -> Path:
    """A folder with the module and the licences of what was compiled into it."""
    include = work / "include"
    include.mkdir()
    for name in ("ShaderOpMult", "ShaderLogisticRegression"):  # headers that Kompute ships ready, under .in
        shutil.copyfile(source / "src" / "shaders" / "glsl" / f"{name}.hpp.in", include / f"{name}.hpp")
    folders = [source / "src" / "include", include, _pybind11_include(), sysconfig.get_path("include")]
    flags = [*FLAGS, "-include", str(PORTABILITY), *(f"-I{folder}" for folder in folders)]
    # Two halves of equal weight. Reading vulkan.hpp is most of the work, and the library's files together
    # read it once: 22 s of CPU time in all, against 54 s for each file apart.
    library = work / "kompute.cpp"
    parts = sorted((source / "src").glob("*.cpp"))
    library.write_text("".join(f'#include "{part}"\n' for part in parts), encoding="utf-8")
    files = [library, source / "python" / "src" / "main.cpp"]

    def run(command: Sequence[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise BuildError(f"{WHAT} failed:\n$ {' '.join(command)}\n{done.stderr.strip()[:4000]}")

    objects = [work / f"{file.stem}.o" for file in files]
    commands = [[*compiler, *flags, "-c", str(f), "-o", str(o)] for f, o in zip(files, objects)]
    with ThreadPoolExecutor(jobs()) as pool:
        for _ in pool.map(run, commands):
            pass
    built = work / "built"
    built.mkdir()
    run([*compiler, *LINK_FLAGS, "-o", str(built / module_name()), *map(str, objects), "-lvulkan"])
    shutil.copyfile(source / "LICENSE", built / "LICENSE.kompute")
    _copy_pybind11_licence(built)
    return built


def _pybind11_include() -> str:
    try:
        import pybind11
    except ImportError:
        raise BuildError(f"{WHAT} needs pybind11: pip install pybind11=={PYBIND11}") from None
    if pybind11.__version__ != PYBIND11:
        raise BuildError(
            f"{WHAT} needs pybind11 {PYBIND11}, found {pybind11.__version__} (2.10 gives wrong results "
            f"with numpy 2): pip install pybind11=={PYBIND11}"
        )
    include: str = pybind11.get_include()
    return include


def _copy_pybind11_licence(folder: Path) -> None:
    """It asks to go where its compiled code goes. (A distribution's package may keep it elsewhere.)"""
    with suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("pybind11") or ():
            if file.name == "LICENSE":
                shutil.copyfile(str(file.locate()), folder / "LICENSE.pybind11")


def main() -> int:
    try:
        print(build_kompute(FOLDER))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

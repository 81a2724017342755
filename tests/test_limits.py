"""Limits of the system (``ulimit``): errors that name the limit, and no cost where none is set."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from model_files import tiny_config, write_hf_model

from xinfer_vk import limits
from xinfer_vk.errors import DeviceError, OutOfMemoryError
from xinfer_vk.vulkan import trial

resource = pytest.importorskip("resource")
pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")

MB = 1 << 20
if os.environ.get("VK_INSTANCE_LAYERS"):
    pytest.skip("a validation layer takes memory of its own", allow_module_level=True)


def limited(name: str, value: int, *arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "xinfer_vk"]
    kind = getattr(resource, name)
    return subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # its threads are another library's matter
        preexec_fn=lambda: resource.setrlimit(kind, (value, resource.getrlimit(kind)[1])),
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("limits") / "tiny"
    write_hf_model(path, tiny_config("llama"), seed=1)
    for file in (Path(__file__).parent / "fixtures" / "text" / "qwen2").iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


# 64 MB: Python hardly starts; 1200 MB: what lavapipe takes with all its threads
@pytest.mark.parametrize("megabytes", [64, 110, 140, 160, 220, 300, 400, 450, 500, 550, 650, 800, 1200])
def test_too_little_memory_is_an_error_that_names_the_limit_and_enough_is_enough(megabytes):
    done = limited("RLIMIT_AS", megabytes * MB, "devices")
    assert done.returncode in (0, 1), done.stderr
    if done.returncode:
        assert "out of memory" in done.stderr and f"ulimit -v {megabytes * 1024}`" in done.stderr
        assert "bug" not in done.stderr and megabytes < 1200


@pytest.mark.parametrize("megabytes", [220, 400, 440, 480, 520, 600, 700])
def test_a_library_gets_an_exception_where_memory_is_too_little(device, megabytes):
    """In the process of somebody else there is no parent to tell: the trial must find it out."""
    code = (
        "import sys\n"
        "from xinfer_vk.errors import OutOfMemoryError\n"
        "try:\n"
        "    from xinfer_vk.vulkan.runtime import open_runtime\n"
        "    open_runtime(sys.argv[1]).close()\n"
        "except (OutOfMemoryError, MemoryError) as error: print('caught', error)\n"
        "else: print('opened')\n"
    )
    done = limited("RLIMIT_AS", megabytes * MB, str(device.index), code=code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(("caught", "opened"))


@pytest.mark.parametrize("handles", [5, 6, 10, 15])
def test_too_few_file_handles_are_an_error_that_names_the_limit(device, handles):
    done = limited("RLIMIT_NOFILE", handles, "devices")
    assert done.returncode == 1
    assert done.stderr.startswith("error: out of file handles") and f"ulimit -n {handles}`" in done.stderr
    assert done.stderr.count("\n") == 1


def test_few_file_handles_are_enough(device):
    assert limited("RLIMIT_NOFILE", 32, "devices").returncode == 0


def test_a_limit_on_files_is_an_error_where_the_driver_keeps_its_memory_in_one(device, model):
    arguments = ["generate", "-m", str(model), "--raw", "-p", "hello", "-n", "1"]
    done = limited("RLIMIT_FSIZE", 0, *arguments, "--device", str(device.index))
    if device.info.keeps_memory_in_a_file:
        assert (
            done.returncode == 1 and "out of memory: buffer" in done.stderr and "`ulimit -f 0`" in done.stderr
        )
    else:  # SwiftShader compiles into a file in memory, and crashes where that must stay empty
        ended = "out of file size: a library ended the program (SIGBUS) under `ulimit -f 0`"
        assert done.returncode == 0 or ended in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


def test_what_fits_the_limit_on_files_is_allowed(monkeypatch):
    monkeypatch.setattr(limits, "_soft", lambda name: 10 * MB if name == "RLIMIT_FSIZE" else None)
    limits.require_file_size(4 * MB, 5 * MB, "buffer 'b'")
    with pytest.raises(OutOfMemoryError, match=r"buffer 'b' needs .*`ulimit -f 10240` leaves 4\.\d MB"):
        limits.require_file_size(5 * MB, 5 * MB, "buffer 'b'")


def test_without_limits_nothing_is_tried_and_no_process_is_made(monkeypatch):
    for name in ("RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_FSIZE"):
        assert limits._soft(name) is None, f"the tests run under a limit: {name}"
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("a process was made"))
    assert limits.memory_headroom() is None
    assert all(limit.option == "-n" for limit in limits.tight_limits())
    limits.require_memory(1 << 60, "this")
    trial.check_memory("0")


def test_file_handles_that_are_taken_by_others_count(monkeypatch):
    kind = resource.RLIMIT_NOFILE
    before = resource.getrlimit(kind)
    monkeypatch.setattr(limits, "OPEN_FILES", before[0] + 1)
    with pytest.raises(DeviceError, match=rf"out of file handles: .*raise `ulimit -n {before[0]}`"):
        limits.require_file_handles()
    monkeypatch.setattr(limits, "OPEN_FILES", 4)
    limits.require_file_handles()


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (MemoryError(), True),
        (ImportError("x.so: failed to map segment from shared object"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("can't start new thread"), True),
        (RuntimeError("failed"), False),
        (ValueError("cannot allocate memory"), False),
    ],
)
def test_an_exception_that_means_no_memory_is_known(error, is_it):
    assert limits.is_out_of_memory(error) is is_it


# -- the parent that tells ------------------------------------------------------------------------

SUPERVISED = """
import os, signal, sys, time
from xinfer_vk.cli.supervise import supervised
from xinfer_vk.limits import Limit

def program():
    {body}

sys.exit(supervised(program, [Limit("-v", 1000, "memory")]))
"""


def supervised(body: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SUPERVISED.format(body=body)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("number", ["SIGSEGV", "SIGBUS", "SIGABRT"])
def test_a_crash_under_a_limit_is_told_as_what_it_is(number):
    done = supervised(f"os.kill(os.getpid(), signal.{number})")
    assert done.returncode == 1
    assert done.stderr == (
        f"error: out of memory: a library ended the program ({number}) under `ulimit -v 1000`: raise it, "
        "or use --device numpy\n"
    )


def test_a_library_that_ends_the_program_is_told():
    done = supervised("os._exit(3)")
    assert done.returncode == 1 and "(exit code 3)" in done.stderr


@pytest.mark.parametrize("code", [0, 1, 2, 130])
def test_an_end_of_the_programs_own_stays_as_it_is(code):
    done = supervised(f"print('said'); return {code}")
    assert (done.returncode, done.stdout, done.stderr) == (code, "said\n", "")


def test_a_kill_is_handed_on():
    assert supervised("os.kill(os.getpid(), signal.SIGKILL)").returncode == -signal.SIGKILL


def test_sigterm_to_the_parent_reaches_the_program():
    body = (
        "signal.signal(signal.SIGTERM, lambda *a: (print('ended'), sys.stdout.flush(), os._exit(0)))\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISED.format(body=body)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.stdout.readline() == "ended\n" and process.wait(60) == 0

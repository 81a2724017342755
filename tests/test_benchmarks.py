"""The scripts of benchmarks/ that need no other engine and no GPU run to their end."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from conftest import DeviceUnderTest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    env = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent), **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)


def check(device: DeviceUnderTest, out: Path, *arguments: str, **environment: str):
    options = ("--device", str(device.index), "--output", str(out), *arguments)
    return run("device_check.py", *options, **environment), json.loads(out.read_text())


def test_device_check_ends_in_a_table(device: DeviceUnderTest, tmp_path: Path):
    done, kept = check(device, tmp_path / "check.json", "--only", "device")
    assert done.returncode == 0, done.stdout
    table = done.stdout.split("\n\n")[1]
    assert device.name in table and "GB/s" in table
    assert kept["device"]["records"][0]["name"] == device.name


def test_device_check_measures_as_it_was_told(device: DeviceUnderTest, tmp_path: Path):
    spec = importlib.util.spec_from_file_location("device_check", BENCHMARKS / "device_check.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules["device_check"] = script
    spec.loader.exec_module(script)
    speeds = [p.arguments for p in script.parts("0", 8, 2, "full") if "bench" in p.arguments]
    assert len(speeds) > 15 and all(a[a.index("--tune") + 1] == "full" for a in speeds)
    assert sum("--profile" in a for a in speeds) == 6
    for arguments, words in (
        (("--only", "nothing"), ("--only nothing", "synchronization")),
        (("--output", "/nowhere/x.json"), ("/nowhere/x.json", "no such folder")),
        (("--tune", "fast"), ("--tune", "quick")),
    ):
        done = run("device_check.py", *arguments)
        assert done.returncode == 2 and all(word in done.stderr for word in words), done.stderr


def test_what_there_is_no_time_for_is_told(device: DeviceUnderTest, tmp_path: Path):
    done, kept = check(device, tmp_path / "check.json", "--only", "0.5b", "--seconds", "1")
    assert done.returncode == 1 and "not run: out of time: qwen2.5-0.5b:q8_0" in done.stdout
    assert {part["problem"] for part in kept.values()} == {"not run: out of time"}


def test_a_part_that_crashes_is_told_and_the_next_one_runs(device: DeviceUnderTest, tmp_path: Path):
    broken = {"XINFER_VK_INJECT": "vkQueueSubmit:3:-4"}  # the device is lost
    done, kept = check(device, tmp_path / "check.json", "--only", "s", "--seconds", "120", **broken)
    assert done.returncode == 1 and list(kept)[:2] == ["synchronization", "kernels"]
    for name in ("synchronization", "kernels"):
        assert "the device was lost" in kept[name]["problem"], kept[name]["problem"]


FAKE_LLAMA = """
import os, time
__version__ = "0.0"
steps = open(os.environ["FAKE_LOG"], "a")
say = lambda *a: None
def llama_log_callback(f): return f
def llama_log_set(f, data): global say; say = f
def llama_backend_init(): pass
def llama_synchronize(context): pass
class Llama:
    ctx = None
    def __init__(self, model, **options):
        self.options = options
        say(2, b"load_tensors: offloaded %d/3 layers to GPU" % (3 if options["n_gpu_layers"] else 0), None)
    def n_vocab(self): return 100
    def reset(self): pass
    def eval(self, ids): print(self.options["n_gpu_layers"], len(ids), file=steps, flush=True)
"""
FAKE_GGML = """
import json, os
from types import SimpleNamespace
names = json.loads(os.environ["FAKE_DEVICES"])
seen = ["CPU", *(names[int(i)] for i in os.environ["GGML_VK_VISIBLE_DEVICES"].split(",") if i)]
def f(value): return lambda *a: value(*a)
libggml = SimpleNamespace(
    ggml_backend_dev_count=f(lambda: len(seen)), ggml_backend_dev_get=f(lambda i: i),
    ggml_backend_dev_type=f(lambda i: int(i > 0)), ggml_backend_dev_description=f(lambda i: seen[i].encode()),
    ggml_version=f(lambda: b"1.2"), ggml_commit=f(lambda: b"abc"),
)
"""


def fake_llama_cpp(folder: Path, device: DeviceUnderTest, name: str | None = None) -> dict[str, str]:
    """An environment whose llama_cpp computes nothing and logs what it is asked for. ``name``: of its device
    at our device's place in the loader's list."""
    (folder / "llama_cpp").mkdir()
    (folder / "llama_cpp" / "__init__.py").write_text(FAKE_LLAMA)
    (folder / "llama_cpp" / "_ggml.py").write_text(FAKE_GGML)
    names = [*["another"] * device.index, name or device.name]
    return {
        "PYTHONPATH": os.pathsep.join((str(BENCHMARKS.parent), str(folder))),
        "FAKE_DEVICES": json.dumps(names),
        "FAKE_LOG": str(folder / "log"),
    }


def test_peers_runs_several_files_on_both_back_ends_in_turn(
    device: DeviceUnderTest, tiny_model: Path, tmp_path: Path
):
    environment = fake_llama_cpp(tmp_path, device)
    bench = tmp_path / "llama-bench"
    seen = "os.environ['GGML_VK_VISIBLE_DEVICES']"
    bench.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"gpu = {device.name!r} if {seen} == '{device.index}' else ''\n"
        "print(json.dumps([{'avg_ts': 0.5, 'gpu_info': gpu, 'build_commit': 'b7', 'backends': 'x'}]))\n"
    )
    bench.chmod(0o755)
    out = tmp_path / "peers.json"
    arguments = ("-p", "8", "-n", "2", "-d", "3", "-r", "2", "--backend", "cpu", "--backend", "gpu")
    slow = ("--gpu-prompt-tokens", "5", "--gpu-new-tokens", "0", "--gpu-rounds", "1")
    models = ("-m", str(tiny_model), "-m", str(tiny_model))
    peers = ("--llama-python", sys.executable, "--llama-bench", str(bench), "--json", str(out))
    done = run("peers.py", *models, "--device", str(device.index), *arguments, *slow, *peers, **environment)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    of_one = [("cpu", "pp8 @ d3", 2), ("cpu", "tg2 @ d3", 2), ("gpu", "pp5 @ d3", 1)]
    assert [(r["peer"], r["test"], r["rounds"]) for r in rows[:6]] == [
        (f"{peer} {backend}", test, rounds)
        for some in (of_one[:2], of_one[2:])
        for peer in ("llama.cpp", "llama-bench")
        for backend, test, rounds in some
    ]
    assert [r["test"] for r in rows[6:]] == [r["test"] for r in rows[:6]]
    for row in rows:
        assert len(row["ours_tok_per_s"]) == len(row["peer_tok_per_s"]) == row["rounds"]
        ratios = [a / b for a, b in zip(row["ours_tok_per_s"], row["peer_tok_per_s"])]
        assert row["ratios"] == ratios and min(ratios) <= row["ratio"] <= max(ratios)
        assert device.name in row["ours_about"] and f"| {row['test']} |" in done.stdout
        assert row["peer"].startswith("llama.cpp") or row["peer_tok_per_s"][0] == 0.5
    assert "ggml 1.2 abc), CPU back end" in done.stdout and "llama-bench b7 (x), " in done.stdout
    assert f"Vulkan back end on {device.name}, offloaded 3/3 layers, flash attention off" in done.stdout
    asked = Path(environment["FAKE_LOG"]).read_text().splitlines()[: 3 * 5 + 2 * 2]  # of the first file
    round_cpu = ["0 3", "0 8", "0 3", "0 1", "0 1"]  # what fills the cache is not counted
    assert asked == [*round_cpu * 3, *["-1 3", "-1 5"] * 2]


def test_peers_refuses_a_peer_on_another_device_and_keeps_the_rows_before(
    device: DeviceUnderTest, tiny_model: Path, tmp_path: Path
):
    environment = fake_llama_cpp(tmp_path, device, name="a fast card")
    arguments = ("-p", "8", "-n", "0", "-r", "1", "--llama-python", sys.executable)
    backends = ("--backend", "cpu", "--backend", "gpu")
    done = run(
        "peers.py", "-m", str(tiny_model), "--device", str(device.index), *arguments, *backends, **environment
    )
    assert done.returncode == 1 and "| llama.cpp cpu | pp8 | 1 |" in done.stdout
    last = done.stderr.splitlines()[-1]
    assert f"sees the Vulkan devices: a fast card; wanted: {device.name}" in last


def test_a_peer_that_crashes_is_told_with_its_code(device: DeviceUnderTest, tiny_model: Path, tmp_path: Path):
    environment = fake_llama_cpp(tmp_path, device)
    with open(tmp_path / "llama_cpp" / "__init__.py", "a") as file:
        file.write("\ncalls = iter(range(9))\n")
        file.write("Llama.eval = lambda self, ids: next(calls) == 1 and os.kill(os.getpid(), 9)\n")
    arguments = ("-p", "8", "-n", "2", "-r", "2", "--llama-python", sys.executable)
    done = run("peers.py", "-m", str(tiny_model), "--device", str(device.index), *arguments, **environment)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "Error: llama.cpp cpu ended with -9: no message"


def test_a_peer_that_cannot_start_is_told_in_a_line(device: DeviceUnderTest, tiny_model: Path):
    arguments = ("-p", "8", "-n", "0", "-r", "1", "--llama-python", sys.executable)
    done = run("peers.py", "-m", str(tiny_model), "--device", str(device.index), *arguments)
    assert done.returncode == 1 and "No module named 'llama_cpp'" in done.stderr.splitlines()[-1]
    done = run("peers.py", "-m", str(tiny_model), *arguments[:-1], "/nowhere/python")
    assert done.returncode == 1 and "llama.cpp cpu cannot be started" in done.stderr.splitlines()[-1]


def test_mistakes_are_told_in_a_line(tmp_path: Path):
    peers = ("-m", "smollm2-135m", "--llama-python", sys.executable)
    for script, arguments, words in (
        ("peers.py", (*peers, "-p", "many"), ("-p", "many")),
        ("peers.py", (*peers, "-d", "-1"), ("-d", "-1")),
        ("peers.py", (*peers, "--cores", "98765"), ("--cores 98765", "this process may use")),
        ("peers.py", (*peers, "--json", "/nowhere/x.json"), ("/nowhere/x.json", "no such folder")),
        ("peers.py", ("-m", "/nowhere", *peers[2:]), ("error: '/nowhere'",)),
        ("startup.py", ("--model", "/nowhere"), ("error: '/nowhere'",)),
        ("sampling.py", ("--model", "/nowhere"), ("error: '/nowhere'",)),
    ):
        done = run(script, *arguments)
        last = done.stderr.splitlines()[-1]
        assert done.returncode in (1, 2) and all(word in last for word in words), done.stderr
        assert "Traceback" not in done.stderr


def test_errors_of_number_formats_are_below_those_of_the_plain_rule():
    done = run("quantization.py", "errors", "--rows", "16")
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines()[2:]]
    assert {row[0].strip() for row in rows} == {"q8_0", "q6_k", "q5_0", "q4_k", "q4_1", "q4_0"}
    assert all(row[4].strip() == "exact" or float(row[4]) < 1 for row in rows)

"""The scripts of benchmarks/ that need no other engine and no GPU run to their end."""

from __future__ import annotations

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


def test_what_there_is_no_time_for_is_told(device: DeviceUnderTest, tmp_path: Path):
    done, kept = check(device, tmp_path / "check.json", "--only", "0.5b", "--seconds", "1")
    assert done.returncode == 1 and "not run: out of time: qwen2.5-0.5b:q8_0" in done.stdout
    assert {part["problem"] for part in kept.values()} == {"not run: out of time"}


def test_a_part_that_crashes_is_told_and_the_next_one_runs(device: DeviceUnderTest, tmp_path: Path):
    broken = {"XINFER_VK_INJECT": "vkQueueSubmit:3:-4"}  # the device is lost
    done, kept = check(device, tmp_path / "check.json", "--only", "n", "--seconds", "10", **broken)
    assert done.returncode == 1 and list(kept)[:2] == ["synchronization", "kernels"]
    for name in ("synchronization", "kernels"):
        assert "the device was lost" in kept[name]["problem"], kept[name]["problem"]


def test_peers_prints_rates_and_ratios_in_turn(device: DeviceUnderTest, tiny_model: Path, tmp_path: Path):
    peer = tmp_path / "llama-bench"
    peer.write_text(f"#!{sys.executable}\nimport sys\nprint('[{{\"avg_ts\": 0.5}}]')\n")
    peer.chmod(0o755)
    out = tmp_path / "peers.json"
    arguments = ("-p", "8", "-n", "2", "-d", "3", "-r", "2", "--llama-bench", str(peer), "--json", str(out))
    done = run("peers.py", "-m", str(tiny_model), "--device", str(device.index), *arguments)
    assert done.returncode == 0, done.stderr
    assert "| pp8 @ d3 |" in done.stdout and "÷ llama-bench cpu" in done.stdout
    rates = json.loads(out.read_text())["tok_per_s"]["tg2 @ d3"]
    assert len(rates["xinfer-vk"]) == 2 and rates["llama-bench cpu"] == [0.5, 0.5]


def test_a_peer_that_cannot_start_is_told_in_a_line(device: DeviceUnderTest, tiny_model: Path):
    arguments = ("-p", "8", "-n", "0", "-r", "1", "--llama-python", sys.executable)
    done = run("peers.py", "-m", str(tiny_model), "--device", str(device.index), *arguments)
    assert done.returncode == 1 and "No module named 'llama_cpp'" in done.stderr.splitlines()[-1]


def test_errors_of_number_formats_are_below_those_of_the_plain_rule():
    done = run("quantization.py", "errors", "--rows", "16")
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines()[2:]]
    assert {row[0].strip() for row in rows} == {"q8_0", "q6_k", "q5_0", "q4_k", "q4_1", "q4_0"}
    assert all(row[4].strip() == "exact" or float(row[4]) < 1 for row in rows)

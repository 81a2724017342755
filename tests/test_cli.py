"""What a user meets on the command line: output, exit codes, and one clear line for each mistake.

Runs the real program in a subprocess where the process matters (signals, exit codes, no driver), and
in this process elsewhere.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_helpers import TIMING, assert_one_error, xinfer

FIXTURES = Path(__file__).parent / "fixtures" / "models"


def test_version_and_help() -> None:
    assert re.match(r"xinfer-vk, version \d+\.\d+\.\d+", xinfer("--version").stdout)
    overview = xinfer("--help")
    for command in ("generate", "devices", "pull", "selftest"):
        assert command in overview.stdout
    generate = xinfer("generate", "--help").stdout
    options = "model prompt file system raw max-new-tokens device kv-dtype context ignore-eos json quiet"
    for option in options.split():
        assert f"--{option}" in generate


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from xinfer_vk.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('vulkan', 'kp', 'numpy', 'rich', 'tokenizers', 'jinja2') if m in sys.modules])\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["generate", "--prompt", ""], 2, ["prompt is empty"]),
        (["generate", "--prompt", "x", "--file", "y"], 2, ["--prompt, --file"]),
        (["generate", "--file", "/no/such/file"], 2, ["/no/such/file"]),
        (["generate", "--prompt", "x", "--max-new-tokens", "-1"], 2, ["max-new-tokens", "-1"]),
        (["generate", "--prompt", "x", "--max-new-tokens", "0"], 2, ["max-new-tokens", "0"]),
        (["generate", "--prompt", "x", "--context", "-3"], 2, ["context", "-3"]),
        (["generate", "--prompt", "x", "--kv-dtype", "f8"], 2, ["f8", "f16"]),
        (["generate", "--prompt", "x", "--model", "/no/such/model"], 1, ["/no/such/model"]),
        (["generate", "--prompt", "x", "--model", "/no/such/model.gguf"], 1, ["/no/such/model.gguf"]),
        (["devices", "--nonsense"], 2, ["--nonsense"]),
        (["no-such-command"], 2, ["no-such-command"]),
        (["pull", "no-such-model"], 2, ["no-such-model", "smollm2-135m"]),
    ],
)
def test_a_mistake_gets_one_clear_line(args: list[str], code: int, words: list[str]) -> None:
    model = (
        [] if "--model" in args or args[0] != "generate" else ["--model", str(FIXTURES / "llama-gqa1-tied")]
    )
    result = xinfer(*args, *model)
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert any(all(w.lower() in line.lower() for w in words) for line in result.stderr.splitlines()), (
        result.stderr
    )


def test_no_prompt_at_all_says_how_to_give_one() -> None:
    assert_one_error(xinfer("generate"), 2, "prompt")


@pytest.mark.parametrize("device", ["99", "no-such-gpu"])
def test_a_device_that_does_not_exist_lists_those_that_do(demo_model: Path, device: str) -> None:
    result = xinfer("generate", "--prompt", "x", "--model", str(demo_model), "--device", device)
    assert_one_error(result, 2, device, "0")


def test_no_vulkan_driver_names_the_remedy(demo_model: Path, tmp_path: Path) -> None:
    none = str(tmp_path / "none.json")
    nothing = {"VK_DRIVER_FILES": none, "VK_ICD_FILENAMES": none, "VK_ADD_DRIVER_FILES": ""}
    result = xinfer("generate", "--prompt", "x", "--model", str(demo_model), **nothing)
    assert_one_error(result, 1, "driver")


def test_a_directory_without_a_tokenizer_says_which_file_is_missing() -> None:
    result = xinfer("generate", "--prompt", "x", "--model", str(FIXTURES / "llama-gqa1-tied"))
    assert_one_error(result, 1, "tokenizer.json")


def test_a_truncated_model_is_one_line(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "llama-gqa1-tied", tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert_one_error(
        xinfer("generate", "--prompt", "x", "--model", str(tmp_path / "m")), 1, "model.safetensors"
    )


class TestDemoModel:
    """With SmolLM2-135M, which `./run test` fetches; skipped where it is not and CI is not set."""

    @pytest.fixture(autouse=True)
    def _model(self, demo_model: Path) -> None:
        self.model = str(demo_model)

    def test_the_question_is_answered(self) -> None:
        question = "What is the capital of France?"
        result = xinfer("generate", "--model", self.model, "--kv-dtype", "f32", "--prompt", question)
        assert result.returncode == 0, result.stderr
        assert result.stdout == "The capital of France is Paris.\n"
        assert TIMING.match(result.stderr.splitlines()[-1]), result.stderr

    def test_the_prompt_comes_from_standard_input_or_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "p.txt").write_text("What is the capital of France?\n", encoding="utf-8")
        common = ["generate", "--model", self.model, "--quiet", "--max-new-tokens", "4"]
        piped = xinfer(*common, stdin="What is the capital of France?\n")
        from_file = xinfer(*common, "--file", str(tmp_path / "p.txt"))
        direct = xinfer(*common, "--prompt", "What is the capital of France?")
        dashed = xinfer(*common, "--prompt", "-", stdin="What is the capital of France?\n")
        assert {piped.stdout, from_file.stdout, direct.stdout, dashed.stdout} == {"The capital of France\n"}
        assert piped.stderr == ""

    def test_json_holds_what_makes_figures_comparable(self) -> None:
        result = xinfer(
            "generate", "--model", self.model, "--prompt", "Hi", "--max-new-tokens", "3", "--json", "-q"
        )
        record = json.loads(result.stdout)
        assert record["finish_reason"] == "length"
        assert len(record["token_ids"]) == 3
        assert record["metrics"]["bytes_read_per_token"] == 4
        assert record["metrics"]["dispatches_per_token"] > 30
        assert record["metrics"]["peak_host_bytes"] > 0
        for key in ("model", "device", "driver", "dtype", "kv_dtype", "context", "prompt_tokens"):
            assert record[key], key

    def test_verbose_tells_the_kv_size_by_its_formula(self) -> None:
        result = xinfer(
            "generate", "--model", self.model, "--prompt", "Hi", "--max-new-tokens", "2", "-v", "--raw"
        )
        assert re.search(r"KV cache: [\d.]+ kB|MB = 2 · 30 layers", result.stderr)
        assert "TTFT" in result.stderr

    def test_ignore_eos_runs_to_the_limit(self) -> None:
        args = [
            "generate",
            "--model",
            self.model,
            "--prompt",
            "What is the capital of France?",
            "-n",
            "12",
            "--json",
            "-q",
        ]
        assert len(json.loads(xinfer(*args).stdout)["token_ids"]) < 12
        assert len(json.loads(xinfer(*args, "--ignore-eos").stdout)["token_ids"]) == 12

    def test_a_prompt_longer_than_the_context_is_refused(self) -> None:
        result = xinfer("generate", "--model", self.model, "--prompt", "word " * 50, "--context", "20")
        assert_one_error(result, 2, "context of 20")

    def test_ctrl_c_keeps_what_there_is_and_prints_the_timing_line(self) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "xinfer_vk", "generate", "--model", self.model, "--prompt", "Count.",
             "--max-new-tokens", "2000", "--ignore-eos"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        first = process.stdout.read(1)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert first + out.strip()
        assert TIMING.match(err.splitlines()[-1]), err
        assert "Traceback" not in err

    def test_texts_that_a_lost_device_cuts_off_are_compared_as_far_as_they_are(self) -> None:
        args = [
            "compare-decoding",
            "--model",
            self.model,
            "--prompt",
            "Rain is",
            "--raw",
            "-n",
            "200",
            "--json",
        ]
        result = xinfer(*args, XINFER_VK_INJECT="vkQueueSubmit:40:-4", XINFER_VK_STEPS_PER_SUBMIT="9999")
        assert_one_error(result, 1, "device was lost")
        methods = json.loads(result.stdout)["methods"]
        assert len(methods) == 5
        assert all(method["token_ids"] and method["finish_reason"] == "error" for method in methods)

    def test_a_lost_device_is_one_line_and_the_text_until_then_is_kept(self) -> None:
        args = ["generate", "--model", self.model, "--prompt", "Write a poem about rain."]
        lost = "vkQueueSubmit:40:-4"  # VK_ERROR_DEVICE_LOST
        result = xinfer(*args, XINFER_VK_INJECT=lost, XINFER_VK_STEPS_PER_SUBMIT="9999")
        assert_one_error(result, 1, "device was lost", "VK_ERROR_DEVICE_LOST")
        assert len(result.stdout.split()) >= 3

"""generate's other faces: many prompts, samples, log-probabilities, sampling options, speed report."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_helpers import TIMING, assert_one_error, xinfer

from xinfer_vk import LLM
from xinfer_vk.cli import app
from xinfer_vk.cli.jsonl import ResultWriter
from xinfer_vk.errors import XinferError
from xinfer_vk.sampling.device import NAN_TOKEN


@pytest.fixture
def common(tiny_model: Path) -> list[str]:
    return ["generate", "--model", str(tiny_model), "--device", "numpy", "--kv-dtype", "f32", "--ignore-eos",
            "--max-new-tokens", "6"]  # fmt: skip


def write_lines(path: Path, *lines: object) -> str:
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return str(path)


def test_ordered_results_are_in_the_order_of_the_prompts(common: list[str], tmp_path: Path) -> None:
    prompts = write_lines(
        tmp_path / "in.jsonl",
        {"prompt": "one " * 40, "id": "long", "max_new_tokens": 9},
        '"two"',
        {"prompt": "three", "id": 3, "temperature": 0.8, "seed": 4, "max_new_tokens": 2},
    )
    out = tmp_path / "out.jsonl"
    result = xinfer(*common, "--prompts", prompts, "--output", str(out), "--ordered", "-q")
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    records = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [r.get("id") for r in records] == ["long", None, 3]
    assert [len(r["token_ids"]) for r in records] == [9, 6, 2]
    alone = json.loads(xinfer(*common, "--prompt", "two", "--json", "-q").stdout)
    assert alone["token_ids"] == records[1]["token_ids"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{not json", ["in.jsonl:2", "not valid JSON"]),
        ("[1, 2]", ["in.jsonl:2", "prompt"]),
        ('{"prompt": ""}', ["in.jsonl:2", "prompt"]),
        ('{"prompt": "x", "temprature": 1}', ["in.jsonl:2", "temprature"]),
        ('{"prompt": "x", "top_p": -1}', ["in.jsonl:2", "top_p"]),
        ('{"prompt": "x", "logit_bias": {"a": 1}}', ["in.jsonl:2", "logit_bias"]),
        ('{"prompt": "x", "stop_token_ids": [999999]}', ["in.jsonl:2", "999999"]),
        ('{"prompt": "x", "prompt": "y"}', ["in.jsonl:2", "prompt", "twice"]),
        ('{"prompt": "\\ud800"}', ["in.jsonl:2", "\\ud800", "half of a character"]),
        ('{"prompt": "x", "id": {"a": ["\\udfff"]}}', ["in.jsonl:2", "\\udfff", "half of a character"]),
        ('{"prompt": "x", "temperature": NaN}', ["in.jsonl:2", "NaN"]),
        (json.dumps({"prompt": "word " * 40000}), ["in.jsonl:2", "longer than the context"]),
    ],
)
def test_a_bad_line_is_named_and_the_others_run_with_keep_going(
    common: list[str], tmp_path: Path, line: str, words: list[str]
) -> None:
    prompts = write_lines(tmp_path / "in.jsonl", '"a"', line, '"b"')
    assert_one_error(xinfer(*common, "--prompts", prompts), 2, *words)
    result = xinfer(*common, "--prompts", prompts, "--keep-going", "--json")
    assert_one_error(result, 1, "1 of 3 prompts have no result")
    records = [json.loads(out) for out in result.stdout.splitlines()]
    assert [(r["prompt"], r["index"]) for r in records] == [("a", 0), ("b", 2)]
    assert "left out" in result.stderr
    assert all(word in result.stderr for word in words)


def test_repeated_prompts_and_samples_are_printed_under_their_names(common: list[str]) -> None:
    out = xinfer(*common, "-p", "a", "-p", "b", "--n", "2", "-t", "1.2", "--seed", "1").stdout
    headings = [line for line in out.splitlines() if line.startswith("==>")]
    assert sorted(headings) == [f"==> prompt {p}, sample {s} <==" for p in (1, 2) for s in (1, 2)]


def test_the_same_seed_gives_the_same_text_on_either_sampler(common: list[str]) -> None:
    args = [*common, "-p", "a", "-t", "0.9", "--top-k", "40", "--top-p", "0.9", "--seed", "7", "--json"]
    device, cpu = (json.loads(xinfer(*args, "--sampler", where).stdout) for where in ("device", "cpu"))
    assert device["token_ids"] == cpu["token_ids"]
    assert device["seed"] == 7
    assert device["metrics"]["bytes_read_per_token"] == 4


def test_logprobs_are_in_the_json_and_shown_as_a_table(common: list[str]) -> None:
    args = [*common, "-p", "hello", "--raw", "--logprobs", "2", "--prompt-logprobs"]
    record = json.loads(xinfer(*args, "--json").stdout)
    assert len(record["logprobs"]) == 6
    assert len(record["prompt_logprobs"]) == record["prompt_tokens"] - 1
    first = record["logprobs"][0]
    assert first["logprob"] <= 0
    assert first["rank"] == 1
    assert [len(entry["top"]) for entry in record["logprobs"]] == [2] * 6
    assert len(re.findall(r"rank \d+", xinfer(*args).stderr)) == 5 + record["prompt_tokens"]


def test_the_speed_report_says_ttft_tpot_pp_and_tg(common: list[str]) -> None:
    lines = xinfer(*common, "-p", "a", "--speed-report").stderr.splitlines()
    for beginning in ("TTFT: ", "TPOT: mean ", "PP: ", "TG: "):
        assert any(line.startswith(beginning) for line in lines)
    assert TIMING.match(lines[-1])


def test_recommended_values_are_used_and_shown(tiny_model: Path, common: list[str]) -> None:
    config = tiny_model / "generation_config.json"
    before = config.read_text() if config.exists() else None
    config.write_text(json.dumps({"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20}))
    try:
        result = xinfer(*common, "-p", "a", "--recommended", "-v")
    finally:
        config.unlink() if before is None else config.write_text(before)
    assert "recommended: temperature 0.7, top_k 20, top_p 0.8" in result.stderr


def test_a_model_without_recommended_values_says_so(tiny_model: Path, common: list[str]) -> None:
    said = "--recommended: tiny recommends no sampling values, so the defaults are used"
    assert said in xinfer(*common, "-p", "a", "--recommended").stderr
    assert said not in xinfer(*common, "-p", "a", "--recommended", "-q").stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--top-k", "-1"], ["--top-k is -1"]),
        (["--temperature", "nan"], ["temperature"]),
        (["--logit-bias", "x"], ["--logit-bias", "42=-1.5"]),
        (["--logit-bias", "999999=1"], ["999999"]),
        (["--stop-token-id", "999999"], ["999999"]),
        (["--sampler-order", "top-q"], ["top_q"]),
        (["-t", "1", "--sampler-order", "top-k", "--top-p", "0.5"], ["top_p"]),
        (["--logprobs", "99"], ["--logprobs is 99"]),
        (["--min-new-tokens", "9"], ["--min-new-tokens is 9"]),
        (["--penalty-window", "0", "--presence-penalty", "1"], ["--penalty-window is 0"]),
        (["--output", "/no/such/folder/x"], ["/no/such/folder/x"]),
        (["--prompts", "/no/such/file"], ["exclude each other"]),
        (["--sampler-order", ""], ["--sampler-order"]),
        (["--output", "/"], ["directory"]),
    ],
)
def test_bad_options_are_one_clear_line(common: list[str], args: list[str], words: list[str]) -> None:
    assert_one_error(xinfer(*common, "-p", "a", *args), 2, *words)


def test_an_old_file_of_results_stays_when_nothing_is_run(common: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("old\n")
    prompts = write_lines(tmp_path / "in.jsonl", '"a"', '{"prompt": "x", "top_p": -1}')
    assert_one_error(xinfer(*common, "--prompts", prompts, "-o", str(out)), 2, "in.jsonl:2")
    assert_one_error(xinfer(*common, "-p", "a", "--model", "/no/such/model", "-o", str(out)), 1, "/no/such")
    assert out.read_text() == "old\n"
    new = tmp_path / "new.jsonl"
    assert_one_error(xinfer(*common, "--prompts", prompts, "-o", str(new)), 2, "in.jsonl:2")
    assert not new.exists()


def test_results_are_not_written_over_the_prompts(common: list[str], tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "in.jsonl", '"a"')
    (tmp_path / "link").symlink_to(prompts)
    (tmp_path / "same").hardlink_to(prompts)
    for out in (prompts, str(tmp_path / "link"), str(tmp_path / "same")):
        assert_one_error(xinfer(*common, "--prompts", prompts, "-o", out), 2, "--output", "--prompts")
        assert_one_error(xinfer(*common, "--file", prompts, "-o", out), 2, "--output", "--file")
    assert Path(prompts).read_text() == '"a"\n'


def test_results_are_not_written_over_the_model(tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    (tmp_path / "link").symlink_to(model / "model.safetensors")
    before = (model / "model.safetensors").read_bytes()
    for out in (model / "model.safetensors", tmp_path / "link", model / "config.json"):
        args = ("generate", "-m", str(model), "--device", "numpy", "-p", "x", "-o", str(out))
        assert_one_error(xinfer(*args), 2, "--output", "--model", "write to another file")
    assert (model / "model.safetensors").read_bytes() == before


def test_the_only_line_of_a_file_is_named_too(common: list[str], tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "in.jsonl", '{"prompt": "x", "top_p": -1}')
    assert_one_error(xinfer(*common, "--prompts", prompts), 2, "in.jsonl:1", "top_p")


def test_a_dash_is_standard_output(common: list[str]) -> None:
    result = xinfer(*common, "-p", "a", "-p", "b", "-o", "-", "-q")
    assert [json.loads(line)["prompt"] for line in result.stdout.splitlines()] == ["a", "b"]


def test_a_byte_order_mark_and_minus_infinity_are_read(common: list[str], tmp_path: Path) -> None:
    args = [*common, "-n", "1", "-q", "--json"]
    first = json.loads(xinfer(*args, "-p", "a").stdout)["token_ids"][0]
    path = tmp_path / "in.jsonl"
    line = json.dumps({"prompt": "a", "logit_bias": {str(first): "-inf"}})
    path.write_text("\ufeff" + line, encoding="utf-8")
    result = xinfer(*args, "--prompts", str(path))
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["token_ids"][0] != first


def test_a_writer_that_fails_says_so_once(tmp_path: Path) -> None:
    writer = ResultWriter("/dev/full")
    with pytest.raises(XinferError, match="cannot write to /dev/full: No space left on device"):
        writer.write(0, {"text": "x"})
    writer.write(1, {"text": "y"})
    writer.close()


def test_a_record_with_half_a_character_is_written_all_the_same(tmp_path: Path) -> None:
    writer = ResultWriter(str(tmp_path / "out"))
    writer.write(0, {"text": "\ud800"})
    writer.close()
    assert json.loads((tmp_path / "out").read_text()) == {"text": "\ud800"}


# -- one prompt that fails, results as they end, and going on ----------------------------------------


@pytest.fixture
def numeric(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Token id 5 in a prompt makes the model's logits NaN."""
    from xinfer_vk.engine.runner import Chunk, ModelRunner

    run = ModelRunner.run_rows

    def failing(self: ModelRunner, chunks: list[Chunk], *more: Any) -> np.ndarray:
        out = run(self, chunks, *more)
        for row, chunk in enumerate(c for c in chunks if c.outputs == "last"):
            if 5 in chunk.token_ids:
                out[row] = NAN_TOKEN
        return out

    monkeypatch.setattr(ModelRunner, "run_rows", failing)
    return tiny_model


def run_command(*args: str) -> tuple[int, str, str]:
    """The command in this process; exit code, standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = app.run(["generate", *args])
    return code, out.getvalue(), err.getvalue()


def five(tiny_model: Path) -> str:
    """The text of token 5."""
    with LLM(tiny_model, device="numpy") as llm:
        return llm.tokenizer.token_bytes(5).decode()


@pytest.mark.parametrize("bad", [(2,), (0, 4)])
def test_a_prompt_that_fails_while_it_runs_takes_no_other_along(
    numeric: Path, common: list[str], tmp_path: Path, bad: tuple[int, ...]
) -> None:
    text = five(numeric)
    prompts = write_lines(
        tmp_path / "in.jsonl", *[{"prompt": text if i in bad else f"{i}"} for i in range(5)]
    )
    out = tmp_path / "out.jsonl"
    args = [*common[1:], "--raw", "--prompts", prompts, "-o", str(out)]
    code, _, err = run_command(*args, "--keep-going")
    assert code == 1 and f"{len(bad)} of 5 prompts have no result" in err
    for i in bad:
        assert re.search(rf"left out: {prompts}:{i + 1}: step \d+: the logits for position \d hold NaN", err)
    records = {r["index"]: r for r in map(json.loads, out.read_text().splitlines())}
    assert sorted(records) == [0, 1, 2, 3, 4]
    for i, record in records.items():
        assert record["finish_reason"] == ("error" if i in bad else "length")
        assert ("error" in record) == (i in bad)
    code, _, err = run_command(*args)
    assert code == 1 and f"error: {prompts}:{bad[0] + 1}: step" in err


def test_results_are_written_as_they_end_with_their_index(common: list[str], tmp_path: Path) -> None:
    prompts = write_lines(
        tmp_path / "in.jsonl", {"prompt": "long", "max_new_tokens": 40}, {"prompt": "b", "max_new_tokens": 1}
    )
    out = tmp_path / "out.jsonl"
    assert xinfer(*common, "--prompts", prompts, "-o", str(out), "-q").returncode == 0
    assert [json.loads(line)["index"] for line in out.read_text().splitlines()] == [1, 0]


def test_resume_runs_what_is_missing_and_mends_a_torn_line(common: list[str], tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "in.jsonl", *[f'"p{i}"' for i in range(4)])
    out = tmp_path / "out.jsonl"
    args = [*common, "--prompts", prompts, "-o", str(out), "-n", "3"]
    assert xinfer(*args, "--resume", "--ordered", "-q").returncode == 0  # there is no file yet
    lines = out.read_text().splitlines()
    whole = {json.loads(line)["index"]: json.loads(line)["token_ids"] for line in lines}
    interrupted = json.dumps({**json.loads(lines[1]), "finish_reason": "interrupted"})
    out.write_text("\n".join([lines[2], interrupted, lines[0][:100]]))
    result = xinfer(*args, "--resume")
    assert result.returncode == 0 and "has the results of 1 of 4 prompts" in result.stderr
    again = out.read_text().splitlines()
    assert again[0] == lines[2], "what was there is not written again"
    assert {json.loads(line)["index"]: json.loads(line)["token_ids"] for line in again} == whole
    assert len(again) == 4
    before = out.read_bytes()
    assert xinfer(*args, "--resume", "-m", "/no/such/model").returncode == 0, "there is nothing to run"
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"index": 0}\n', ["out.jsonl:1", "--output"]),
        ("no json\n{}\n", ["out.jsonl:1", "--output"]),
        (
            '{"index": 0, "sample": 0, "prompt": "other", "finish_reason": "stop"}\n',
            ["out.jsonl:1", "another prompt", "in.jsonl:1"],
        ),
    ],
)
def test_resume_refuses_a_file_of_something_else(
    common: list[str], tmp_path: Path, text: str, words: list[str]
) -> None:
    prompts, out = write_lines(tmp_path / "in.jsonl", '"a"'), tmp_path / "out.jsonl"
    out.write_text(text)
    assert_one_error(xinfer(*common, "--prompts", prompts, "-o", str(out), "--resume"), 2, *words)
    assert out.read_text() == text


def test_the_end_of_a_batch_is_one_line_and_verbose_has_one_a_prompt(common: list[str]) -> None:
    quiet = xinfer(*common, "-p", "a", "-p", "b").stderr
    assert "prefill:" not in quiet
    assert re.search(
        r"^2 prompts in [\d.]+ m?s.*: \d+ tok read, 12 tok generated \([\d.]+ tok/s\)$", quiet, re.M
    )
    assert xinfer(*common, "-p", "a", "-p", "b", "-v").stderr.count("prefill:") == 2

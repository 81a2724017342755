"""Perplexity is what its definition says, in both conventions and on every device; mistakes get one line.

Tiny models with random weights: what they say of a text means nothing, and must still be the same number
by every way of computing it. Float64 NumPy over ``llm.logits`` is the way that is easy to believe.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_helpers import assert_one_error, xinfer
from hypothesis import given
from hypothesis import strategies as st
from model_files import tiny_config, write_hf_model

from xinfer_vk import LLM
from xinfer_vk.cli import perplexity as cli
from xinfer_vk.engine.perplexity import Perplexity, Window, Windowing, estimate
from xinfer_vk.engine.runner import Chunk
from xinfer_vk.errors import NumericError, UsageError
from xinfer_vk.sampling.device import RowParams
from xinfer_vk.sampling.logprobs import from_parts, target_logprobs
from xinfer_vk.sampling.params import SamplingParams

ALICE = Path(__file__).parent / "fixtures" / "alice.txt"
IDS = [int(i) for i in np.random.default_rng(7).integers(3, 300, 90)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that was trained, so it says, with a begin-of-sequence token."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_hf_model(path, tiny_config("llama", vocab_size=704), seed=5)
    for file in (Path(__file__).parent / "fixtures" / "text" / "llama3").iterdir():
        shutil.copy(file, path)
    return path


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, device="numpy", kv_dtype="f32") as opened:
        yield opened


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def expected(llm: LLM, ids: Sequence[int], spans: Sequence[tuple[int, int, int]]) -> list[float]:
    """Log-probabilities by the definition: the spans' scored tokens, each span alone through the model."""
    out: list[float] = []
    for begin, end, first in spans:
        found = log_softmax(llm.logits(ids[begin:end]))
        out += [float(found[t - 1 - begin, ids[t]]) for t in range(first, end)]
    return out


# -- windows --------------------------------------------------------------------------------------


def test_sliding_windows_of_a_worked_example() -> None:
    assert Windowing.of(4, 2, "huggingface").over(9) == [
        Window(0, 4, 1), Window(2, 6, 4), Window(4, 8, 6), Window(6, 9, 8),
    ]  # fmt: skip


def test_windows_side_by_side_of_a_worked_example() -> None:
    assert Windowing.of(6, None, "llama.cpp").over(20) == [
        Window(0, 6, 4), Window(6, 12, 10), Window(12, 18, 16),
    ]  # fmt: skip


@given(st.integers(2, 300), st.integers(2, 40), st.data())
def test_sliding_windows_score_every_token_once_with_all_the_context_there_is(
    tokens: int, context: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, context))
    windows = Windowing.of(context, stride, "huggingface").over(tokens)
    scored = [t for w in windows for t in range(w.first, w.end)]
    skipped = set(range(stride, tokens, stride)) if stride == context else set()  # nothing before them
    assert scored == [t for t in range(1, tokens) if t not in skipped]
    for w in windows:
        assert w.end - w.begin <= context
        assert w.first > w.begin
        assert w.begin == 0 or w.first - w.begin >= min(max(1, context - stride), w.first)


# -- the number -----------------------------------------------------------------------------------


def test_a_text_within_one_window_agrees_with_float64_over_its_logits(llm: LLM) -> None:
    logprobs = expected(llm, IDS, [(0, len(IDS), 1)])
    result = llm.perplexity(IDS, context=128)
    assert result.perplexity == pytest.approx(math.exp(-np.mean(logprobs)), rel=1e-4)
    assert result.logprobs[1:] == pytest.approx(logprobs, abs=1e-4)
    assert np.isnan(result.logprobs[0])
    assert (result.tokens, result.windows, result.complete) == (89, 1, True)


@pytest.mark.parametrize(("context", "stride"), [(32, 16), (32, 32), (20, 7), (2, 1)])
def test_sliding_windows_agree_with_windows_run_alone(llm: LLM, context: int, stride: int) -> None:
    ids = IDS[:40] if context == 2 else IDS
    spans, done = [], 1  # the loop of Hugging Face's documentation
    for begin in range(0, len(ids), stride):
        end = min(begin + context, len(ids))
        if max(done, begin + 1) < end:
            spans.append((begin, end, max(done, begin + 1)))
        done = end
        if end == len(ids):
            break
    logprobs = expected(llm, ids, spans)
    result = llm.perplexity(ids, context=context, stride=stride)
    assert result.tokens == len(logprobs)
    assert result.perplexity == pytest.approx(math.exp(-np.mean(logprobs)), rel=1e-4)
    assert result.windows == len(spans)


@pytest.mark.parametrize("bos", [False, True])
def test_llama_cpp_scores_second_halves_after_a_begin_of_sequence_token(llm: LLM, bos: bool) -> None:
    start = llm.tokenizer.encode("", parse_special=False, add_bos=True)[0] if bos else None
    ids = IDS if start is None else [start, *IDS]
    logprobs: list[float] = []
    for begin in range(0, len(ids) - 19, 20):
        window = ids[begin : begin + 20]
        fed = window if start is None else [start, *window[1:]]
        found = log_softmax(llm.logits(fed))
        logprobs += [float(found[t - 1, window[t]]) for t in range(11, 20)]
    result = llm.perplexity(IDS, context=20, convention="llama.cpp", bos=bos)
    assert result.tokens == len(logprobs) == 4 * 9
    assert result.perplexity == pytest.approx(math.exp(-np.mean(logprobs)), rel=1e-4)


def test_a_longer_context_and_a_shorter_stride_change_the_number_and_the_work(llm: LLM) -> None:
    coarse = llm.perplexity(IDS, context=30, stride=30)
    fine = llm.perplexity(IDS, context=30, stride=5)
    assert coarse.perplexity != fine.perplexity
    assert fine.tokens_run > 3 * coarse.tokens_run


def test_more_tokens_than_a_step_holds_are_scored_alike(llm: LLM, model: Path) -> None:
    with LLM(model, device="numpy", kv_dtype="f32", prefill_chunk=7) as small:
        got = small.perplexity(IDS, context=64, stride=20)
    assert got.logprobs[1:] == pytest.approx(
        llm.perplexity(IDS, context=64, stride=20).logprobs[1:], abs=1e-4
    )


def test_a_begin_of_sequence_token_lets_the_first_token_be_scored(llm: LLM) -> None:
    text = "Alice was beginning"
    without, with_bos = llm.perplexity(text, bos=False), llm.perplexity(text, bos=True)
    assert with_bos.tokens == without.tokens + 1
    assert with_bos.token_ids[0] == llm.tokenizer.bos_id
    assert (with_bos.bos, without.bos) == (True, False)
    default = llm.perplexity(text)
    assert (default.bos, default.token_ids) == (True, with_bos.token_ids)


def test_text_that_spells_a_special_token_stays_text(llm: LLM) -> None:
    end = llm.tokenizer.id_of("<|eot_id|>")
    assert llm.tokenizer.encode("a<|eot_id|>b", parse_special=True)[2] == end
    assert end not in llm.perplexity("a<|eot_id|>b").token_ids


def test_max_tokens_takes_the_beginning(llm: LLM) -> None:
    result, shorter = llm.perplexity(IDS, max_tokens=30), llm.perplexity(IDS[:30])
    assert result.perplexity == shorter.perplexity
    assert result.token_ids == tuple(IDS[:30])


def test_bits_per_byte_divide_by_the_bytes_of_what_was_scored(llm: LLM) -> None:
    result = llm.perplexity("Down, down, down. Would the fall never come to an end?")
    written = llm.tokenizer.decode(result.token_ids[1:]).encode()
    assert result.bits_per_byte == pytest.approx(result.nll * result.tokens / math.log(2) / len(written))


def test_the_standard_error_of_a_worked_example() -> None:
    value, error = estimate(np.log([0.5, 0.25, 0.125, 0.25]))
    assert value == pytest.approx(4)
    # -log2: 1 2 3 2, of variance 2/3; error of the mean sqrt(2/3/4) bits; d exp(x) = exp(x) dx
    assert error == pytest.approx(4 * math.sqrt(1 / 6) * math.log(2))
    assert math.isnan(estimate(np.array([-1.0]))[1])


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (12.3456, 0.0621, "12.346 ± 0.062"),
        (12.3456, 3.14, "12.3 ± 3.1"),
        (50123.4, 1234.5, "50123 ± 1234"),
        (12.3456, math.nan, "12.346"),
        (1.0, 0.0, "1.000"),
    ],
)
def test_the_error_is_written_with_two_digits(llm: LLM, value: float, error: float, text: str) -> None:
    result = llm.perplexity(IDS[:5])
    fields = {**result.__dict__, "perplexity": value, "standard_error": error}
    assert str(Perplexity(**fields)) == text


# -- on devices -----------------------------------------------------------------------------------


def test_every_device_agrees_with_numpy(device: Any, model: Path, llm: LLM) -> None:
    want = llm.perplexity(IDS, context=48, stride=24)
    with LLM(model, device=str(device.index), kv_dtype="f32") as on_device:
        got = on_device.perplexity(IDS, context=48, stride=24)
        before = on_device.runtime.allocated_bytes
        on_device.perplexity(IDS, context=48, stride=24)
        assert on_device.runtime.allocated_bytes == before, "each run gives its memory back"
    assert got.perplexity == pytest.approx(want.perplexity, rel=1e-4)
    assert got.logprobs[1:] == pytest.approx(want.logprobs[1:], abs=1e-4)


def test_many_targets_are_read_at_once_as_they_are_one_by_one(device: Any, model: Path) -> None:
    inputs, targets = IDS[:20], IDS[1:21]
    rows = [RowParams(SamplingParams(logprobs=0), target=target) for target in targets]
    with LLM(model, device=str(device.index), kv_dtype="f32") as llm:
        runner = llm._open_engine().runner
        sequence = runner.cache.open()

        def run() -> None:
            runner.cache.truncate(sequence, 0)
            runner.run([Chunk(sequence, inputs, "all")], "logprobs")

        runner.sampler.write_targets(targets)
        run()
        at_once = runner.sampler.read_targets(20)
        found = []
        for _ in range(2):
            runner.sampler.write_params(rows)
            run()
            found.append([runner.read_logprobs(row) for row in range(20)])
            runner.sampler.write_targets(inputs)  # must not be taken for what write_params wrote
        runner.cache.close(sequence)
    one_by_one, again = found
    assert one_by_one == again
    assert [entry.token for entry in one_by_one] == targets
    assert list(at_once) == pytest.approx([entry.logprob for entry in one_by_one], abs=1e-12)


def test_the_demo_model_finds_alice_as_likely_on_a_device_as_on_numpy(demo_model: Path) -> None:
    text = ALICE.read_text(encoding="utf-8")
    found = {}
    for device in ("numpy", None):
        with LLM(demo_model, device=device, kv_dtype="f32") as llm:
            found[device] = llm.perplexity(text, context=32, stride=16, max_tokens=48)
    assert found[None].perplexity == pytest.approx(found["numpy"].perplexity, rel=1e-3)
    assert 5 < found[None].perplexity < 200  # English to it, not noise


def test_target_logprobs_are_from_parts_row_by_row_and_nan_where_that_has_none() -> None:
    logits = np.array([1.5, 2.0, np.inf, 3.0, -np.inf, -np.inf, np.nan], np.float32)
    largest = np.array([2.0, 2.0, np.inf, np.inf, 5.0, -np.inf, np.nan], np.float32)
    totals = np.array([3 << 44, 1 << 44, 2 << 44, 1 << 44, 1 << 44, 0, 0], np.uint64)
    found = target_logprobs(logits, largest, totals)
    for i in range(5):
        parts = from_parts(0, float(logits[i]), 1, float(largest[i]), int(totals[i]), [], [])
        assert found[i] == pytest.approx(parts.logprob), i
    assert list(np.isnan(found)) == [False] * 5 + [True] * 2


# -- interruption and bad input ---------------------------------------------------------------------


def test_a_stop_event_ends_it_with_what_was_scored(llm: LLM) -> None:
    stop, seen = threading.Event(), []

    def after_two(scored: int, total: int, value: float) -> None:
        seen.append((scored, total, value))
        if len(seen) == 2:
            stop.set()

    result = llm.perplexity(IDS, context=20, stride=10, stop_event=stop, on_estimate=after_two)
    assert not result.complete
    assert [scored for scored, _, _ in seen] == [19, 29]
    assert result.tokens < 89 == seen[0][1]
    whole = llm.perplexity(IDS[: result.tokens + 1], context=20, stride=10)
    assert result.perplexity == pytest.approx(whole.perplexity)
    assert seen[1][2] == pytest.approx(llm.perplexity(IDS[:30], context=20, stride=10).perplexity)


def test_generation_goes_on_beside_it(llm: LLM) -> None:
    stream = llm.stream([5, 6, 7], max_new_tokens=12, ignore_eos=True)
    next(stream)
    llm.perplexity(IDS, context=20)
    beside = stream.result.token_ids
    assert beside == llm.generate([5, 6, 7], max_new_tokens=12, ignore_eos=True).token_ids


def test_nan_logits_name_the_token(model: Path) -> None:
    with LLM(model, device="numpy", kv_dtype="f32") as llm:
        part = llm.weights.embed.parts[0]
        llm.runtime.write(part.buffer, part.offset, np.full(8, np.nan, np.float32).view(np.uint32))
        after = next(i for i, token in enumerate(IDS) if token < 8) + 1  # rows 0 to 7 of the embedding
        with pytest.raises(NumericError, match=f"token {after} of the text"):
            llm.perplexity(IDS)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "the text is empty"),
        (" \n", {}, "the text is empty"),
        ([], {}, "no tokens: .* at least 2"),
        ([5], {}, "1 token: .* at least 2"),
        ("a", {"bos": False}, "1 token: .* at least 2"),
        ([5, 10**6], {}, "1000000"),
        ([5, -1], {}, "-1"),
        (IDS, {"context": 1}, "context is 1"),
        (IDS, {"context": -4}, "context is -4"),
        (IDS, {"context": 16, "stride": 17}, "stride is 17 and context 16"),
        (IDS, {"context": 16, "stride": 0}, "stride is 0"),
        (IDS, {"context": 16, "stride": -3}, "stride is -3"),
        (IDS, {"context": 10**6}, "context 1000000 is more than"),
        (IDS, {"max_tokens": 1}, "max_tokens is 1"),
        (IDS, {"max_tokens": -1}, "max_tokens is -1"),
        (IDS, {"convention": "other"}, "convention is 'other'"),
        (IDS, {"convention": "llama.cpp", "stride": 5}, "side by side"),
        (IDS, {"convention": "llama.cpp", "context": 2}, "context is 2"),
        (IDS, {"convention": "llama.cpp", "context": 100}, "90 tokens.*window of 100"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(llm: LLM, text: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        llm.perplexity(text, **options)


def test_one_is_singular(llm: LLM) -> None:
    result = llm.perplexity(IDS[:2])
    assert "(1 token, " in cli.result_line(result)
    assert cli.describe_result(result).startswith("1 window of ")


# -- the command ------------------------------------------------------------------------------------


@pytest.fixture
def common(model: Path) -> list[str]:
    return ["perplexity", "--model", str(model), "--device", "numpy", "--kv-dtype", "f32"]


RESULT = re.compile(r"^perplexity: \d+(\.\d+)? ± \d+(\.\d+)? \(\d+ tokens, \d+(\.\d+)? tok/s\)\n$")


def test_the_command_prints_one_line_and_the_running_estimate_when_asked(common: list[str]) -> None:
    args = [*common, "--context", "64", "--stride", "32", "--max-tokens", "150"]
    result = xinfer(*args, "--file", str(ALICE), "-v")
    assert result.returncode == 0, result.stderr
    assert RESULT.match(result.stdout), result.stdout
    assert re.search(r"^ 63 of 149 tokens: \d+\.\d{4}$", result.stderr, re.M), result.stderr
    assert re.search(
        r"^4 windows of 64 tokens, stride 32, huggingface convention, with beg", result.stderr, re.M
    )
    piped = xinfer(*args, "--quiet", stdin=ALICE.read_text(encoding="utf-8"))
    assert piped.stdout.split(" (")[0] == result.stdout.split(" (")[0]
    assert piped.stderr == ""


def test_json_tells_what_makes_the_figure_comparable(common: list[str], llm: LLM) -> None:
    args = ["--context", "32", "--convention", "llama.cpp", "--max-tokens", "100", "--json", "-q"]
    record = json.loads(xinfer(*common, *args, "-f", str(ALICE)).stdout)
    text = ALICE.read_text(encoding="utf-8")
    want = llm.perplexity(text, context=32, convention="llama.cpp", max_tokens=100)
    assert record["perplexity"] == want.perplexity
    assert record["standard_error"] == want.standard_error
    assert (record["tokens"], record["windows"], record["text_tokens"]) == (3 * 15, 3, 100)
    assert (record["context"], record["stride"], record["convention"]) == (32, 32, "llama.cpp")
    for key in ("model", "device", "driver", "dtype", "kv_dtype", "seconds", "tok_per_s", "bits_per_byte"):
        assert record[key], key


def test_ctrl_c_gives_the_figure_for_what_was_scored(common: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "xinfer_vk", *common, "-f", str(ALICE), "-c", "16", "--stride", "1", "-v"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    next(line for line in process.stderr if " tokens: " in line)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert RESULT.match(out), out
    assert re.search(r"^interrupted after \d+ tokens$", err, re.M), err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--file", "/no/such/file"], ["/no/such/file"]),
        (["--file", str(ALICE), "--stride", "600"], ["--stride is 600", "--context 512"]),
        (["--file", str(ALICE), "--context", "-3"], ["--context is -3"]),
        (["--file", str(ALICE), "--max-tokens", "0"], ["--max-tokens is 0"]),
        ([], ["standard input", "empty"]),
    ],
)  # fmt: skip
def test_a_mistake_gets_one_clear_line(common: list[str], args: list[str], words: list[str]) -> None:
    assert_one_error(xinfer(*common, *args, stdin=""), 2, *words)


def test_a_mistake_is_told_before_a_model_is_loaded() -> None:
    for args in (["--context", "1"], ["--max-tokens", "1"]):
        result = xinfer("perplexity", "--model", "/no/such/model", "--file", str(ALICE), *args)
        assert_one_error(result, 2, args[0] + " is 1")


def test_a_file_that_is_no_text_is_refused(common: list[str], tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc\xff")
    assert_one_error(xinfer(*common, "--file", str(tmp_path / "x")), 2, "UTF-8", "byte 3")

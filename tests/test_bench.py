"""``xinfer-vk bench``: synthetic models, what a test runs, costs, and the records."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
from dataclasses import replace

import numpy as np
import pytest
from cli_helpers import assert_one_error, xinfer

from xinfer_vk.cli.app import run
from xinfer_vk.cli.bench_against import check_other, other_side, ratios, this_side
from xinfer_vk.cli.bench_plot import draw_batch, draw_context, lines, tokens_and_batch
from xinfer_vk.cli.bench_report import FORMATS as OUTPUTS
from xinfer_vk.cli.bench_report import Report, as_csv, as_markdown, as_record, fitted_table, markdown_table
from xinfer_vk.cli.output import OutputError, ReaderGone
from xinfer_vk.cli.progress import ProgressBar
from xinfer_vk.engine.bench import Bench, Peak, Workload, load_subject, measure_peak
from xinfer_vk.engine.costs import Batch, plan_cost
from xinfer_vk.errors import DeviceError, DeviceLostError, UsageError
from xinfer_vk.kernels.base import Ref
from xinfer_vk.kernels.layout import FORMATS, matrix_words
from xinfer_vk.kernels.peak import COPY_LOCAL_SIZE, peak_copy, peak_fma
from xinfer_vk.kernels.synthetic import PATTERNS, fill_weights
from xinfer_vk.kernels.unpack import unpack
from xinfer_vk.models import shapes
from xinfer_vk.plan import BufferKind, Plan
from xinfer_vk.reference import NUMPY_PROFILE, NumpyRuntime
from xinfer_vk.vulkan.layer import FEATURES

TINY = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 96, "intermediate_size": 160,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 301, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)


def run_steps(rt, words, *make):
    buffer = rt.allocate("target", words, BufferKind.SCRATCH)
    rt.prepare(Plan("test", tuple(step(buffer) for step in make))).run()
    out = rt.read(buffer, 0, words)
    rt.free(buffer)
    return out


# -- random weights -------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", PATTERNS)
def test_random_weights_are_those_of_the_oracle_and_of_a_trained_models_size(runtime, fmt):
    rows, cols = 13, 3 * 256
    words = matrix_words(fmt, rows, cols)
    got, want = (
        run_steps(rt, words + 9, lambda b: fill_weights(Ref(b, 4), fmt, rows, cols, seed=5))
        for rt in (runtime, NumpyRuntime())
    )
    assert np.array_equal(got, want)
    assert not got[:4].any() and not got[4 + words :].any()
    weights = unpack(fmt, got[4:], rows, cols)
    assert np.isfinite(weights).all() and 0.015 < weights.std() < 0.03
    assert abs(weights.mean()) < 0.005 and len(np.unique(weights)) >= (4 if fmt == "q2_k" else 8)


def test_there_are_random_weights_in_every_format():
    assert set(PATTERNS) == set(FORMATS)


def test_there_is_a_shape_of_every_family():
    from xinfer_vk.models.registry import FAMILIES

    assert {shapes.shape_config(name)[0].architecture for name in shapes.SHAPES} == set(FAMILIES)


def test_every_shape_is_a_model_that_we_run():
    for name in shapes.SHAPES:
        config, _ = shapes.shape_config(name)
        assert config.layers and config.vocab_size


@pytest.mark.parametrize(
    ("shape", "fmt", "billions"),
    [
        ("qwen2.5-0.5b", "f16", 0.494),
        ("qwen2.5-1.5b", "f16", 1.544),
        ("qwen2.5-3b", "f16", 3.086),
        ("qwen2.5-7b", "f16", 7.616),
        ("llama-3.2-1b", "f16", 1.236),
        ("llama-3.2-3b", "f16", 3.213),
        ("llama-3.1-8b", "f16", 8.030),
        ("llama-2-7b", "f16", 6.738),
        ("tinyllama-1.1b", "f16", 1.100),
        ("smollm2-135m", "f32", 0.1345),
        ("smollm2-360m", "f16", 0.3618),
        ("smollm2-1.7b", "f16", 1.711),
        ("qwen3-0.6b", "f16", 0.5961),
        ("qwen3-8b", "f16", 8.191),
        ("gemma-3-270m", "f16", 0.2681),
        ("gemma-3-1b", "f16", 0.9999),
        ("mistral-7b", "f16", 7.248),
        ("qwen2.5-14b", "f16", 14.77),
        ("qwen2.5-32b", "f16", 32.76),
        ("qwen3-1.7b", "f16", 1.721),
        ("qwen3-4b", "f16", 4.022),
        ("gemma-2-2b", "f16", 2.614),
        ("gemma-2-9b", "f16", 9.242),
        ("gemma-2-27b", "f16", 27.23),
        ("granite-3.3-2b", "f16", 2.534),
        ("granite-3.3-8b", "f16", 8.171),
        ("olmo-2-1b", "f16", 1.485),
        ("olmo-2-7b", "f16", 7.299),
        ("olmo-2-13b", "f16", 13.72),
        ("phi-3-mini", "f16", 3.821),
        ("phi-4", "f16", 14.66),
        ("smollm3-3b", "f16", 3.075),
    ],
)
def test_a_synthetic_model_has_as_many_weights_as_the_real_one(shape, fmt, billions):
    from xinfer_vk.models.registry import family
    from xinfer_vk.weights.synthetic import SyntheticPlanner, open_synthetic

    source, _ = open_synthetic(f"{shape}:{fmt}")
    planner = SyntheticPlanner(source, NumpyRuntime().profile, fmt)
    assert shape in shapes.SHAPES
    family(source.config.architecture).load(planner, source.config)
    assert planner.total_bytes / (4 if fmt == "f32" else 2) / 1e9 == pytest.approx(billions, rel=2e-3)


# -- the yardsticks -------------------------------------------------------------------------------


def test_the_yardsticks_compute_what_their_oracles_do(runtime):
    words = 4 * COPY_LOCAL_SIZE * 2 + 4
    data = np.random.default_rng(0).integers(0, 1 << 32, words, np.uint32)
    source = runtime.allocate("source", words, BufferKind.SCRATCH)
    runtime.write(source, 0, data)
    got = run_steps(runtime, words + 4, lambda b: peak_copy(runtime.profile, source, b, words))
    runtime.free(source)
    assert np.array_equal(got[:words], data) and not got[words:].any()

    got, want = (
        run_steps(rt, 512, lambda b: peak_fma(b, 2, rounds=3)).view(np.float32)
        for rt in (runtime, NumpyRuntime())
    )
    np.testing.assert_allclose(got, want, rtol=1e-6)  # a sum of 32 numbers near 2, in any order


def test_a_devices_limits_are_positive(runtime, monkeypatch):
    monkeypatch.setattr("xinfer_vk.engine.bench.COPY_BYTES", 1 << 20)
    monkeypatch.setattr("xinfer_vk.engine.bench.PEAK_S", 0.001)
    peak = measure_peak(runtime)
    assert peak.copy_bytes_per_s > 0 and peak.flops_per_s > 0


# -- what is measured -----------------------------------------------------------------------------


@pytest.mark.usefixtures("step_by_step")
@pytest.mark.parametrize("fmt", ["bf16", "q4_k"])  # q4_k: no row here is a multiple of 256, so q5_0
def test_a_bench_runs_what_a_test_says(runtime, tiny, fmt):
    subject = load_subject(runtime, f"tiny:{fmt}", synthetic=True)
    tests = [Workload("pp", 40, 3, 2), Workload("tg", 4, 33, 3), Workload("pp", 5)]
    bench = Bench(subject, tests, "f16")
    try:
        pp, tg, short = (bench.measure(test, repeats=2) for test in tests)
        assert len(bench.runner.cache._rows) == 3  # every sequence was given back
    finally:
        bench.free()
        subject.free()
    assert (pp.tokens, tg.tokens, short.tokens) == (80, 12, 5)
    assert (len(pp.run_s), len(pp.step_s), pp.steps) == (2, 2, 1)
    assert (len(tg.run_s), len(tg.step_s), tg.steps) == (2, 8, 4)
    assert 0 < tg.device_s < max(tg.run_s) and 0 < tg.host_step_s < min(tg.step_s) + 0.01
    assert tg.bytes_read == 4 * 12 and pp.bytes_read == 8
    assert tg.dispatches > 4 * 10 and 1 <= tg.submits <= 4  # several steps may be one
    # all weights but the embedding, of which a row is looked up
    norms = 5 * 96 * 4
    table = matrix_words("bf16" if fmt == "bf16" else "q5_0", 301, 96) * 4
    read = subject.weight_bytes - table - norms
    assert tg.cost.weight_bytes == pytest.approx(4 * read, rel=0.02)  # 256-byte alignment
    assert tg.cost.kv_bytes == 2 * 2 * 2 * 16 * 2 * 3 * (34 + 35 + 36 + 37)


def test_bytes_of_a_step_are_those_of_a_chunk(tiny, monkeypatch):
    monkeypatch.setattr("xinfer_vk.engine.bench.PREFILL_CHUNK", 16)
    subject = load_subject(NumpyRuntime(), "tiny:f32", synthetic=True)
    bench = Bench(subject, [Workload("pp", 40)], "f16")
    measured = bench.measure(Workload("pp", 40), repeats=1, warm_up=0)
    record = as_record(bench, measured, Peak(1.0, 1.0), 1, 0)
    assert record["steps"] == 3 and record["read_per_step_bytes"] == measured.cost.bytes / 3


def test_a_profile_has_every_kernel_of_a_step(runtime, tiny):
    subject = load_subject(runtime, "tiny:bf16", synthetic=True)
    bench = Bench(subject, [Workload("tg", 8, 20, 2)], "f16")
    try:
        decode = bench.profile(Workload("tg", 8, 20, 2), repeats=2)
        assert bench.runner.cache.in_use == 0
        prefill = bench.profile(Workload("pp", 8), repeats=1)
        bench.measure(Workload("tg", 1, 20, 2), repeats=1, warm_up=0)
        plan = bench.runner.last_plan
    finally:
        bench.free()
        subject.free()
    assert decode.what == "2 tokens at depth 20" and prefill.what == "8 tokens at depth 0"
    assert sum(k.calls for k in decode.kernels) == len(plan.steps)
    assert all(k.seconds > 0 for k in decode.kernels) and decode.seconds > 0
    by_label = {k.label: k for k in decode.kernels}
    assert by_label["down"].calls == 2 and by_label["down"].cost.weight_bytes == 2 * 96 * 160 * 2
    assert by_label["attention"].cost.kv_bytes == 2 * 2 * 2 * 16 * 2 * 2 * 21


def test_costs_are_those_of_the_textbook(tiny):
    rt = NumpyRuntime()
    subject = load_subject(rt, "tiny:f32", synthetic=True)
    bench = Bench(subject, [Workload("pp", 7)], "f16")
    bench.measure(Workload("pp", 7), repeats=1, warm_up=0)
    cost = plan_cost(bench.runner.last_plan, Batch(7, 1, [(7, 7)]))
    layer = 96 * (96 + 2 * 32) + 96 * 96 + 3 * 96 * 160
    attention = sum(4 * 6 * 16 * seen for seen in range(1, 8))
    assert cost.flops == 2 * 7 * 2 * layer + 2 * 301 * 96 + 2 * attention


def test_a_window_bounds_what_attention_costs():
    batch = Batch(6, 2, [(10, 4), (3, 2)])
    assert batch.seen(100) == 7 + 8 + 9 + 10 + 2 + 3 and batch.read(100) == 13
    assert batch.seen(4) == 4 * 4 + 2 + 3 and batch.read(4) == 7 + 3


GPU = replace(
    NUMPY_PROFILE, simd=False, subgroup_size=32, features=frozenset(FEATURES) | {"subgroup_arithmetic"}
)


def test_costs_do_not_depend_on_the_kernels_that_a_device_takes(tiny):
    costs = []
    for profile, activations in ((NUMPY_PROFILE, "f32"), (GPU, "f32"), (GPU, "int8")):
        subject = load_subject(NumpyRuntime(profile), "tiny:q8_0", synthetic=True, tune="off")
        bench = Bench(subject, [Workload("pp", 99)], "f16", activations=activations)
        costs.append([bench.measure(t, 1, 0).cost for t in (Workload("pp", 99), Workload("tg", 2, 5))])
    assert costs[0] == costs[1] == costs[2]


# -- the command ----------------------------------------------------------------------------------


SHORT = ("-p", "2", "-n", "1", "-r", "1", "--warm-up", "0", "--device", "numpy")


def bench(capsys, *arguments):
    """Run the command in this process: its exit code, standard output and standard error."""
    code = run(["bench", *arguments])
    return code, *capsys.readouterr()


def test_activations_in_8_bits_are_a_model_of_their_own(capsys, tiny):
    code, out, _ = bench(capsys, "--synthetic", "tiny:q8_0", *SHORT, "--activations", "int8", "-o", "jsonl")
    assert code == 0
    row = json.loads(out.splitlines()[0])
    assert row["activations"] == "int8" and row["model"] == "tiny:q8_0, int8 activations"
    code, _, err = bench(capsys, "--synthetic", "tiny:f16", *SHORT, "--activations", "int8")
    assert code == 2 and "this model's are in f16" in err


def test_rows_carry_what_makes_them_comparable(capsys, tiny):
    code, out, _ = bench(capsys, "--synthetic", "tiny:q8_0", *SHORT, "-o", "json", "-q", "--profile")
    assert code == 0
    rows = json.loads(out)
    assert [r["test"] for r in rows] == ["pp2", "tg1"]
    for name in (
        "version", "commit", "model", "format", "kv_dtype", "device", "driver", "subgroup_size", "layer",
        "features", "warm_up", "tune", "synchronised", "prompt_tokens", "new_tokens", "batch", "depth",
        "tok_per_s", "run_s", "bandwidth_share", "flops_share", "dispatches_per_step", "barriers_per_step",
        "bytes_read_per_token", "weight_bytes", "kv_bytes", "device_bytes", "peak_host_bytes",
    ):  # fmt: skip
        assert all(name in r for r in rows), name
    assert rows[0]["ttft_s"] > 0 and rows[1]["tpot_s"] > 0
    assert sum(k["share"] for k in rows[1]["profile"]["kernels"]) == pytest.approx(1)
    table = as_markdown(rows)
    assert "| down " in table and "for 1 token at depth 0" in table
    assert "| tiny:q8_0 | f16 | pp2 " in table and "layer off" in table
    again = list(csv.DictReader(io.StringIO(as_csv(rows))))
    assert [r["test"] for r in again] == ["pp2", "tg1"] and float(again[0]["tok_per_s"]) > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--synthetic", "qwen2.5-0.5b"], ["SHAPE:FORMAT", "q4_0"]),
        (["--synthetic", "gpt-9:q4_0"], ["gpt-9", "qwen2.5-0.5b"]),
        (["--synthetic", "qwen2.5-0.6b:q4_0"], ["did you mean qwen2.5-0.5b"]),
        (["--synthetic", "smollm2-135m:f16", "-p", "9000"], ["8192", "-p"]),
        (["-p", "0", "-n", "0"], ["-p", "-n"]),
        (["-b", "0"], ["-b 0"]),
        (["-m", "x", "--against", "y", "--profile"], ["--against", "--profile"]),
        (["--synthetic", "smollm2-135m:f16", "-b", "33"], ["33", "32"]),
        (["--plot", "/dev/null/x"], ["/dev/null/x"]),
        (
            ["--synthetic", "smollm2-135m:f16", "--quantize", "q8_0"],
            ["--quantize q8_0", "--synthetic smollm2-135m:q8_0"],
        ),
        (["compare", "/nowhere.json", "/nowhere.json"], ["/nowhere.json"]),
        (["compare", __file__, __file__], ["no results of bench"]),
    ],
)
def test_mistakes_are_told_in_a_line(capsys, arguments, words):
    device = [] if arguments[0] == "compare" else ["--device", "numpy"]
    code, out, err = bench(capsys, *device, *arguments)
    assert code == 2 and not out
    assert err.count("\n") == 1 and err.startswith("error: ") and all(word in err for word in words), err


def test_every_kv_format_is_a_row_and_reads_its_own_bytes(capsys, monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "tiny", {**TINY, "head_dim": 32})
    kinds = ("--kv-dtype", "f32", "--kv-dtype", "f16", "--kv-dtype", "q8_0")
    arguments = ("-p", "0", "-n", "1", "-d", "31", "-r", "1", "--warm-up", "0", "--device", "numpy", *kinds)
    code, out, _ = bench(capsys, "--synthetic", "tiny:f32", *arguments, "-o", "json")
    rows = json.loads(out)
    assert code == 0 and [row["kv_dtype"] for row in rows] == ["f32", "f16", "q8_0"]
    read = [row["read_per_step_bytes"] for row in rows]
    assert read[0] - read[1] == 2 * 2 * 2 * 32 * 2 * 32 and read[1] > read[2]


def test_a_device_without_a_clock_gives_rows_without_profiles(capsys, tiny, monkeypatch):
    def refuse(*args):
        raise DeviceError("it has no timestamps")

    monkeypatch.setattr("xinfer_vk.engine.bench.Bench.profile", refuse)
    code, out, err = bench(capsys, "--synthetic", "tiny:q8_0", *SHORT, "-o", "json", "--profile")
    assert code == 0 and len(json.loads(out)) == 2
    assert "no profile of tg1: it has no timestamps" in err


def test_a_list_that_is_none_is_refused():
    assert_one_error(xinfer("bench", "-p", "many"), 2, "-p", "many", "128,512")


def test_a_model_that_fails_does_not_take_the_others_along(capsys, tiny):
    code, out, err = bench(capsys, "-m", "/nowhere.gguf", "--synthetic", "tiny:q8_0", *SHORT, "-o", "jsonl")
    assert code == 1 and "error: /nowhere.gguf" in err
    assert [json.loads(line)["test"] for line in out.splitlines()] == ["pp2", "tg1"]


def test_it_is_the_same_on_the_device_that_is_the_default(capsys, tiny, monkeypatch):
    monkeypatch.setenv("XINFER_VK_DEVICE", "numpy")
    code, out, err = bench(
        capsys, "-m", "/nowhere.gguf", "--synthetic", "tiny:q8_0", *SHORT[:-2], "-o", "jsonl"
    )
    assert code == 1 and "error: /nowhere.gguf" in err and len(out.splitlines()) == 2


def test_a_device_that_cannot_be_opened_does_not_take_the_others_along(capsys, tiny, monkeypatch):
    def open_runtime(name):
        if name == "7":
            raise DeviceError("it is held by another program")
        return NumpyRuntime()

    monkeypatch.setattr("xinfer_vk.cli.bench._devices", lambda wanted: iter(("7", "numpy", "7")))
    monkeypatch.setattr("xinfer_vk.vulkan.runtime.open_runtime", open_runtime)
    code, out, err = bench(capsys, "--synthetic", "tiny:q8_0", *SHORT, "-o", "jsonl")
    assert code == 1 and len(out.splitlines()) == 2
    assert err == "error: device 7: it is held by another program\n"


def test_devices_are_known_before_anything_is_measured_and_measured_once(capsys, tiny, monkeypatch):
    monkeypatch.setattr("xinfer_vk.vulkan.devices.list_devices", list)
    code, out, err = bench(capsys, "--synthetic", "tiny:q8_0", *SHORT, "--device", "nosuch", "-o", "jsonl")
    assert code == 2 and not out and "'nosuch'" in err
    code, out, _ = bench(capsys, "--synthetic", "tiny:q8_0", *SHORT, "--device", "NumPy", "-o", "jsonl")
    assert code == 0 and len(out.splitlines()) == 2
    code, out, err = bench(capsys, "--synthetic", "tiny:q8_0", *SHORT[:-1], "all", "-o", "jsonl")
    assert code == 1 and not out and "--device all: none can be used" in err


def test_what_cannot_be_printed_is_not_measured_on(capsys, tiny, monkeypatch):
    calls = []

    def full(record):
        calls.append(record)
        raise OutputError("cannot write to standard output: No space left on device")

    monkeypatch.setattr("xinfer_vk.cli.bench_report.say_json", full)
    code, _, err = bench(capsys, "--synthetic", "tiny:q8_0,tiny:f32", *SHORT, "-o", "jsonl")
    assert code == 1 and len(calls) == 1 and err.startswith("error: cannot write to standard output")


def test_products_are_tuned_as_they_are_made_and_the_tuner_is_heard(capsys, tiny, monkeypatch):
    asked = []

    def tune(runtime, matrices, how, **options):
        asked.append((how, options["activations"]))
        return ("matvec 128 is off by 2 here: it is not used",)

    monkeypatch.setattr("xinfer_vk.loading.tune", tune)
    code, _, err = bench(
        capsys, "--synthetic", "tiny:q8_0", *SHORT, "-o", "jsonl", "--tune", "full", "--activations", "int8"
    )
    assert code == 0 and asked == [("full", "int8")] and "matvec 128 is off by 2" in err


def test_each_model_and_kv_format_shows_its_own_memory(capsys, tiny, monkeypatch):
    resets = []
    monkeypatch.setattr("xinfer_vk.engine.bench.reset_peak_host_bytes", lambda: resets.append(1))
    both = ("--kv-dtype", "f16", "--kv-dtype", "f32")
    code, out, _ = bench(capsys, "--synthetic", "tiny:q8_0", *SHORT, *both)
    lines = [line for line in out.splitlines() if line.startswith("tiny:q8_0: ")]
    assert code == 0 and len(resets) == 2
    assert [(" of KV cache in f16" in line, " of KV cache in f32" in line) for line in lines] == [
        (True, False),
        (False, True),
    ]
    assert all(line.endswith("; 4 bytes read back a token") for line in lines)


def test_two_cards_of_a_kind_are_two_tables(capsys, tiny):
    _, out, _ = bench(capsys, "--synthetic", "tiny:q8_0", *SHORT, "-o", "json")
    rows = json.loads(out)
    table = as_markdown([{**row, "device_index": i} for i in range(2) for row in rows])
    assert [line.split("|")[3].strip() for line in table.splitlines() if line.startswith("| ")].count(
        "pp2"
    ) == 2
    assert sum(line.startswith("NumPy reference (") for line in table.splitlines()) == 2


def test_tables_fit_a_narrow_terminal(capsys, tiny):
    _, out, _ = bench(capsys, "--synthetic", "tiny:q8_0", *SHORT, "-o", "json", "--profile")
    rows = json.loads(out)
    assert as_markdown(rows, 400) == as_markdown(rows)
    for columns in (80, 60):
        table = [line for line in as_markdown(rows, columns).splitlines() if line.startswith("|")]
        titles = [cell.strip() for line in table for cell in line.split("|")]
        assert max(map(len, table)) <= columns
        assert {"tok/s", "range", "of FMA", "host µs", "µs a call"} <= set(titles)


def test_a_table_is_cut_into_ones_that_begin_with_the_same_columns():
    titles = ("model", "test", "aa", "bb", "cc")
    rows = [["m", "pp", "1", "2", "3"], ["m", "tg", "4", "5", "6"]]
    assert fitted_table(titles, rows, 2, None) == fitted_table(titles, rows, 2, 80)
    assert fitted_table(titles, rows, 2, 18) == [
        "model m", "",
        "| test | aa | bb |", "| ---- | -: | -: |", "| pp   |  1 |  2 |", "| tg   |  4 |  5 |", "",
        "| test | cc |", "| ---- | -: |", "| pp   |  3 |", "| tg   |  6 |",
    ]  # fmt: skip


def test_no_name_of_a_file_breaks_a_table():
    lines = markdown_table(("model", "tok/s"), [["a|b\n c", "1.0"]])
    assert lines[2] == "| a\\|b c |   1.0 |"


@pytest.mark.parametrize("form", OUTPUTS)
@pytest.mark.parametrize(
    ("fault", "code", "told"),
    [
        (KeyboardInterrupt(), 130, None),
        (DeviceLostError("the device was lost"), 1, "error: the device was lost\n"),
        (ZeroDivisionError("oh"), 1, "error: unexpected ZeroDivisionError: oh"),
    ],
)
def test_rows_that_were_measured_are_kept_whatever_ends_it(
    capsys, tiny, monkeypatch, tmp_path, form, fault, code, told
):
    """Ctrl-C or an error in the fourth test: the three before are printed, once each, and drawn."""
    real, count = Bench.measure, iter(range(9))

    def measure(*args):
        if next(count) == 3:
            raise fault
        return real(*args)

    monkeypatch.setattr(Bench, "measure", measure)
    arguments = (
        "--synthetic",
        "tiny:q8_0",
        *SHORT,
        "-p",
        "2,3",
        "-n",
        "1,2",
        "-o",
        form,
        "-q",
        "--plot",
        str(tmp_path),
    )
    ended, out, err = bench(capsys, *arguments)
    assert ended == code and (told is None or told in err)
    tests = {
        "md": lambda: [line.split("|")[3].strip() for line in out.splitlines() if "| f16 |" in line],
        "json": lambda: [row["test"] for row in json.loads(out)],
        "jsonl": lambda: [json.loads(line)["test"] for line in out.splitlines()],
        "csv": lambda: [row["test"] for row in csv.DictReader(io.StringIO(out))],
    }
    assert tests[form]() == ["pp2", "pp3", "tg1"]
    assert [path.name for path in tmp_path.iterdir()] == ["context.png"]


def test_plots_are_drawn_though_nobody_reads_and_hide_no_error(capsys, tiny, monkeypatch, tmp_path):
    def gone(text, **more):
        raise ReaderGone

    arguments = ("--synthetic", "tiny:q8_0", *SHORT, "-p", "2,3", "-o", "json", "--plot", str(tmp_path))
    monkeypatch.setattr("xinfer_vk.cli.bench_report.say", gone)
    code, _, err = bench(capsys, *arguments)
    assert code == 0 and (tmp_path / "context.png").exists() and "error" not in err

    def refuse(*args):
        raise UsageError("cannot write the plot")

    monkeypatch.setattr("xinfer_vk.cli.bench_report.save_plots", refuse)
    monkeypatch.setattr("xinfer_vk.cli.bench_report.say", lambda text: None)
    code, _, err = bench(capsys, *arguments)
    assert code == 2 and err.endswith("error: cannot write the plot\n")
    real, count = Bench.measure, iter(range(9))

    def interrupted(*args):
        if next(count):
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(Bench, "measure", interrupted)
    code, _, err = bench(capsys, *arguments)
    assert code == 130 and "error: cannot write the plot" in err


def test_a_plot_folder_is_tried_before_anything_is_measured(capsys, tiny, monkeypatch, tmp_path):
    monkeypatch.setattr("os.access", lambda path, mode: not mode & os.W_OK)
    code, out, err = bench(capsys, "--synthetic", "tiny:q8_0", *SHORT, "--plot", str(tmp_path))
    assert code == 2 and not out and f"'{tmp_path}' is not writable" in err


def test_a_profile_that_only_a_later_row_has_is_a_column(capsys, tiny):
    rows = [record(), {**record("tg9"), "profile": {"step": "x"}}]
    again = list(csv.DictReader(io.StringIO(as_csv(rows))))
    assert [row["profile"] for row in again] == ["", '{"step": "x"}']


# -- two files of results ---------------------------------------------------------------------------


def record(test="tg8", runs=(1.0, 1.01, 0.99), device="a", **more):
    kind, tokens = test[:2], 8
    return {
        "model": "m", "kv_dtype": "f16", "test": test, "kind": kind, "device": device, "batch": 2, "depth": 0,
        "prompt_tokens": tokens * (kind == "pp"), "new_tokens": tokens * (kind == "tg"), "run_s": list(runs),
        "tok_per_s": 16.0, "tpot_s": 0.1, "ttft_s": 0.2, "version": "1", **more,
    }  # fmt: skip


@pytest.fixture
def results(tmp_path):
    def write(name, records, lines=False):
        text = "\n".join(map(json.dumps, records)) if lines else json.dumps(records)
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_compare_tells_ratios_their_noise_and_what_differs(capsys, results):
    a = results("a.json", [record(features=["x", "y"]), record("pp8"), record("tg8 @ d4")])
    faster = record(runs=(0.5, 0.51, 0.49), device="b", version="2", features=["y", "z"])
    same = record("pp8", runs=(1.02, 0.98, 1.0), device="b", version="2")
    b = results("b.jsonl", [same, faster, record("tg9", device="b")], lines=True)
    code, out, _ = bench(capsys, "compare", a, b)
    assert code == 0
    tg, pp = (next(line for line in out.splitlines() if f"| {test} " in line) for test in ("tg8", "pp8"))
    assert "2.000" in tg and " 16.0 | " in tg and " 32.0 | " in tg and "faster" in tg
    assert "1.000" in pp and "within noise" in pp
    assert "device: a → b" in out and "version: 1 → 2" in out and "features: +z -x" in out
    assert f"only in {a}: m f16 tg8 @ d4" in out and f"only in {b}: m f16 tg9" in out
    assert "geometric mean of 2 ratios: 1.414" in out
    assert json.loads(bench(capsys, "compare", a, b, "--json")[1])["rows"][0]["ratio"] == pytest.approx(2)


def test_compare_pairs_rows_of_the_same_device_where_a_file_has_several(capsys, results):
    a = results("a.json", [record(device="x"), record(device="y", runs=(2.0, 2.0))])
    b = results("b.json", [record(device="y"), record(device="x", runs=(2.0, 2.0))])
    rows = json.loads(bench(capsys, "compare", a, b, "--json")[1])["rows"]
    assert [round(row["ratio"], 2) for row in rows] == [0.5, 2.0]


def test_compare_tells_of_rows_that_differ_whatever_their_order(capsys, results):
    a = results("a.json", [record(format="q4_0"), record("pp8", format="q8_0", tune="off")])
    b = results("b.json", [record("pp8", format="q8_0", tune="quick"), record(format="q4_0")])
    told = json.loads(bench(capsys, "compare", a, b, "--json")[1])["different"]
    assert told == {"tune": ["off", "quick"]}


def test_compare_tells_what_two_files_have_that_match_in_nothing(capsys, results):
    a = results("a.json", [record(device="x"), record(device="y")])
    code, out, err = bench(capsys, "compare", a, results("b.json", [record(device="z")]))
    assert code == 2 and not out and "x m f16 tg8, y m f16 tg8" in err and "z m f16 tg8" in err


def test_compare_reads_what_windows_puts_in_front(capsys, results, tmp_path):
    a = results("a.json", [record()])
    (tmp_path / "b.json").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "a.json").read_bytes())
    assert bench(capsys, "compare", a, str(tmp_path / "b.json"))[0] == 0


@pytest.mark.parametrize(
    "odd",
    [
        {"run_s": []}, {"run_s": [0.0]}, {"run_s": [float("nan")]}, {"run_s": 3}, {"run_s": None},
        {"batch": float("inf")}, {"batch": 10**400}, {"batch": "x"},
    ],
    ids=str,
)  # fmt: skip
def test_compare_refuses_rows_without_rates(capsys, results, odd):
    a, b = results("a.json", [record()]), results("b.json", [record(), {**record("pp8"), **odd}])
    code, out, err = bench(capsys, "compare", a, b)
    assert code == 2 and not out and err.startswith(f"error: {b}: no results of bench") and "bug" not in err


QUIET = {"cpu": "x, 2 cores", "copy_bytes_per_s": 1e10, "fma_flops_per_s": 5e10, "load_average": 1.0}
SLOW = {**QUIET, "copy_bytes_per_s": 4e9, "fma_flops_per_s": 2e10}
BUSY = {**QUIET, "load_average": 6.5}


@pytest.mark.parametrize(
    ("before", "after", "runs", "verdict"),
    [
        (QUIET, SLOW, (2.5, 2.6, 2.7), "the machine was slower"),
        (SLOW, QUIET, (0.4, 0.41, 0.39), "the machine was faster"),
        (QUIET, BUSY, (2.5, 2.6, 2.7), "the machine was slower"),
        (QUIET, SLOW, (9.0, 9.1, 9.2), "slower"),  # by more than the machine
        (QUIET, QUIET, (2.5, 2.6, 2.7), "slower"),
        (QUIET, SLOW, (1.0, 1.01, 0.99), "within noise"),
        (QUIET, {**QUIET, "load_average": 2.0}, (2.5, 2.6, 2.7), "slower"),  # the benchmark's own load
        (QUIET, {**SLOW, "cpu": "y, 2 cores"}, (2.5, 2.6, 2.7), "slower"),  # another machine
    ],
)
def test_compare_tells_a_slower_machine_from_slower_code(capsys, results, before, after, runs, verdict):
    a, b = results("a.json", [record(**before)]), results("b.json", [record(runs=runs, **after)])
    assert json.loads(bench(capsys, "compare", a, b, "--json")[1])["rows"][0]["verdict"] == verdict
    _, out, _ = bench(capsys, "compare", a, b)
    assert ("`xinfer-vk bench --against` measures in turns" in out) == ("machine" in verdict)
    assert ("machine: copies 10.0 → 4.0 GB/s (0.40 ×), computes 50.0 → 20.0 GFLOP/s (0.40 ×), load 1.0 → 1.0"
            in out) == (after is SLOW)  # fmt: skip


# -- two versions in turns --------------------------------------------------------------------------

FAKE = """
import json, os, sys
def main():
    with open(os.environ["FAKE_LOG"], "a") as log:
        print({name!r}, *sys.argv[1:], file=log)
    if {fails}:
        sys.exit("error: it broke")
    row = {{"model": "m", "kv_dtype": "f16", "test": "tg8", "tok_per_s": {rate}, "commit": {name!r}}}
    print(json.dumps([row]))
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Makes checkouts of versions that measure nothing and print a rate; returns the folder."""
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))

    def make(name, rate, fails=False):
        folder = tmp_path / name / "xinfer_vk" / "cli"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").write_text("")
        (folder / "__init__.py").write_text("")
        (folder / "main.py").write_text(FAKE.format(name=name, rate=rate, fails=fails))
        return tmp_path / name

    return make


def test_another_checkout_is_measured_in_turns(capsys, checkout, tmp_path, monkeypatch):
    monkeypatch.setattr("xinfer_vk.cli.bench_against.ROOT", checkout("new", 30.0))
    old = checkout("old", 20.0)
    arguments = ("-m", "x", "-n", "8", "-p", "0", "-d", "0,4", "-r", "3", "--device", "numpy")
    code, out, _ = bench(capsys, *arguments, "--against", str(old), "-o", "json")
    assert code == 0
    found = json.loads(out)
    assert found["different"] == {"commit": ["new", "old"]} and len(found["rows"]) == 1
    row = found["rows"][0]
    assert (row["ratio"], row["rounds"], row["verdict"]) == (1.5, [1.5, 1.5, 1.5], "faster")
    runs = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert [run[0] for run in runs] == ["new", "old", "old", "new", "new", "old"]
    given = {"--model", "x", "--depth=0,4", "--new-tokens=8", "--device=numpy", "--repeats=1", "--warm-up=1"}
    assert all(given <= set(run) for run in runs)
    code, out, _ = bench(capsys, *arguments, "--against", str(old))
    assert "| m     | f16 | tg8  |       30.0 |        20.0 | 1.500 | 1.500–1.500 | faster |" in out
    assert "commit: old → new" in out


def test_rounds_before_an_error_are_printed_and_the_error_is_told(capsys, checkout, tmp_path, monkeypatch):
    monkeypatch.setattr("xinfer_vk.cli.bench_against.ROOT", checkout("new", 30.0))
    broken = checkout("broken", 20.0, fails=True)
    code, out, err = bench(capsys, "-m", "x", "--against", str(broken))
    assert (code, out, err) == (1, "", f"error: {broken}: it broke\n")


def test_rounds_before_ctrl_c_are_printed(capsys, checkout, monkeypatch):
    monkeypatch.setattr("xinfer_vk.cli.bench_against.ROOT", checkout("new", 30.0))
    real, count = subprocess.run, iter(range(9))

    def run(*args, **more):
        if next(count) == 3:  # the other's turn in the second round
            raise KeyboardInterrupt
        return real(*args, **more)

    monkeypatch.setattr("xinfer_vk.cli.bench_against.subprocess.run", run)
    code, out, _ = bench(capsys, "-m", "x", "--against", str(checkout("old", 20.0)), "-o", "jsonl")
    row = json.loads(out)
    assert code == 130 and (row["rounds"], row["verdict"], row["noise"]) == (
        [1.5],
        "one round: unknown",
        None,
    )


def test_the_other_side_is_a_version_a_format_or_a_model(tmp_path):
    file, shape = this_side("m.gguf", False, None), this_side("tiny:f16", True, None)
    assert other_side("q4_k", file).quantize == "q4_k" and other_side("q4_k", file).model == "m.gguf"
    assert other_side("q8_0", shape).model == "tiny:q8_0" and other_side("big:f16", shape).model == "big:f16"
    assert other_side("other.gguf", file).model == "other.gguf"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("")
    assert other_side(str(tmp_path), file).program[0] == str(tmp_path / "bin" / "python")
    with pytest.raises(UsageError, match="give the folder of a checkout"):
        other_side(str(tmp_path / "bin"), file)


@pytest.mark.parametrize(
    "model, synthetic, other, message",
    [
        (
            "m.gguf",
            False,
            "/no/such/checkout",
            "'/no/such/checkout': no such file .*a checkout",
        ),
        ("m.gguf", False, "smollm2-136m", "did you mean smollm2-135m"),
        ("tiny:f16", True, "q4_x", "q4_x"),
    ],
)
def test_a_mistaken_other_side_is_refused_before_anything_is_measured(model, synthetic, other, message):
    this = this_side(model, synthetic, None)
    with pytest.raises(UsageError, match=f"--against .*{message}"):
        check_other(other_side(other, this), this)
    check_other(this_side(model, synthetic, "q8_0"), this)


def test_ratios_of_rounds_say_how_far_to_trust_them():
    assert ratios([2.0], [1.0])["verdict"] == "one round: unknown" and ratios([2.0], [1.0])["noise"] is None
    assert ratios([1.0, 2.0, 1.5], [1.5, 1.5, 1.5])["verdict"] == "within noise"
    found = ratios([1.0, 1.1, 1.05], [2.0, 2.0, 2.0])
    assert found["verdict"] == "slower" and (found["ratio_min"], found["ratio_max"]) == (0.5, 0.55)


def test_one_run_says_nothing_of_its_noise(capsys, results):
    a, b = (results(f"{i}.json", [record(runs=(1.0 + i,))]) for i in range(2))
    _, out, _ = bench(capsys, "compare", a, b)
    assert "0.500" in out and "unknown" in out
    strict = json.loads(bench(capsys, "compare", a, b, "--json")[1], parse_constant=pytest.fail)
    assert strict["rows"][0]["noise"] is None


# -- plots ------------------------------------------------------------------------------------------


def test_plots_are_drawn_of_what_has_several_points(tmp_path, capsys, tiny):
    arguments = (
        "--synthetic",
        "tiny:q8_0",
        "--device",
        "numpy",
        "-p",
        "2",
        "-n",
        "1",
        "-r",
        "1",
        "--warm-up",
        "0",
    )
    code, _, err = bench(capsys, *arguments, "-d", "0,3", "-b", "1,2", "--profile", "--plot", str(tmp_path))
    assert code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["batch.png", "context.png", "kernels.png"]
    assert all(path.stat().st_size > 5000 for path in tmp_path.iterdir()) and err.count("plot: ") == 3


def test_a_line_joins_rows_that_differ_in_one_thing_only():
    rows = [record(f"tg8 @ d{d}, b{b}", depth=d, batch=b) for d in (0, 4) for b in (1, 2)]
    rows.append(record("tg8 @ d9, b3", depth=9, batch=3))
    found = lines(rows, "tg", lambda r: r["depth"], tokens_and_batch)
    assert [[x for x, _ in line] for line in found.values()] == [[0, 4], [0, 4]]
    assert list(found) == ["batch 1", "batch 2"]
    assert list(lines(rows[:2] + rows[3:4], "tg", lambda r: r["batch"], lambda r: ())) == [""]


def test_plots_say_what_was_measured_in_seconds_whole_ticks_and_with_the_spread():
    spread = {"tok_per_s_min": 15.0, "tok_per_s_max": 18.0, "date": "2026-11-30T10:00:00+00:00"}
    rows = [
        record("pp8", (7.0, 8.0, 9.5), "llvmpipe (LLVM)", ttft_s=8.0, **spread) | {"prompt_tokens": tokens}
        for tokens in (1, 2)
    ]
    figure = draw_context(rows)
    (axes,) = figure.axes
    assert figure.get_suptitle() == "m on llvmpipe, 2026-11-30"
    assert axes.get_ylabel() == "time to first token (s)" and axes.get_legend() is None
    (bars,) = axes.containers
    low, high = bars.lines[1]
    assert list(low.get_ydata()) == [7.0, 7.0] and list(high.get_ydata()) == [9.5, 9.5]
    assert all(tick == round(tick) for tick in axes.get_xticks())
    short = [r | {"ttft_s": 0.5, "run_s": [0.5]} for r in rows]
    assert draw_context(short).axes[0].get_ylabel() == "time to first token (ms)"
    batch = [record(batch=b, **spread) for b in (1, 2)] + [record("tg9", batch=b, **spread) for b in (1, 2)]
    for r in batch[2:]:
        r["new_tokens"] = 9
    legend = draw_batch(batch).axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["8 tokens", "9 tokens"]


def test_a_table_in_a_pipe_grows_row_by_row_and_is_the_same_table(capsys, tiny):
    _, out, _ = bench(capsys, "--synthetic", "tiny:q8_0", *SHORT, "-o", "json")
    rows = [{**row, "device_index": i} for i in range(2) for row in json.loads(out)]
    shown = []
    with Report("md", None, ProgressBar(enabled=False)) as report:
        for row in rows:
            report.add(row)
            shown.append(capsys.readouterr().out)
            assert f" {row['test']} " in shown[-1], "the row is there when it was measured"
    shown.append(capsys.readouterr().out)

    def words(table: str) -> list[list[str]]:
        lines = [line for line in table.splitlines() if not line.startswith("| --")]
        return [line.split() for line in lines]

    assert words("".join(shown)) == words(as_markdown(rows))

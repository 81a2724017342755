"""compare-decoding: repetition by hand, kept probability by its definition, table, JSON and plot."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_helpers import assert_one_error, xinfer
from hypothesis import given
from hypothesis import strategies as st

from xinfer_vk import LLM
from xinfer_vk.cli import compare_decoding as cli
from xinfer_vk.engine.compare import METHODS, Decoding, Kept, compare_decoding, kept_at_each_step
from xinfer_vk.engine.repetition import distinct_ngrams, repeated_ngrams, repeats
from xinfer_vk.errors import UsageError
from xinfer_vk.sampling.params import SamplingParams

PROMPT = list(range(20, 120))  # three full blocks of the cache and a part
LOOPING = "The best way to learn a language is"  # SmolLM2 goes round in circles after this, if greedy


# -- how much a text repeats itself ---------------------------------------------------------------


def test_repetition_of_a_worked_example() -> None:
    tokens = [1, 2, 3, 4, 1, 2, 3, 4, 1]
    assert repeats(tokens, 4) == [False] * 7 + [True, True]  # 1234 2341 3412 4123 1234 2341
    assert repeated_ngrams(tokens, 4) == pytest.approx(2 / 6)
    assert distinct_ngrams(tokens, 2) == pytest.approx(4 / 9)  # 12 23 34 41


def test_the_two_ends_of_the_scales() -> None:
    assert repeated_ngrams(range(50)) == 0
    assert distinct_ngrams(range(50)) == 49 / 50
    assert repeated_ngrams([7] * 50) == 46 / 47
    assert distinct_ngrams([7] * 50) == 1 / 50


def test_texts_too_short_to_tell() -> None:
    assert repeated_ngrams([1, 2, 3]) is None
    assert repeated_ngrams([1, 2, 3, 4]) == 0
    assert distinct_ngrams([]) is None
    assert distinct_ngrams([1]) == 0
    assert repeats([1, 2]) == [False, False]


@given(st.lists(st.integers(0, 3), min_size=4, max_size=60), st.integers(1, 4))
def test_repeated_ngrams_are_one_less_the_share_of_distinct_ones(tokens: list[int], n: int) -> None:
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    assert repeated_ngrams(tokens, n) == pytest.approx(1 - len(set(grams)) / len(grams))
    assert len(repeats(tokens, n)) == len(tokens)


# -- the methods ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, device="numpy", kv_dtype="f32") as opened:
        yield opened


@pytest.fixture(scope="module")
def decodings(llm: LLM) -> list[Decoding]:
    return compare_decoding(llm, PROMPT, max_new_tokens=12, seed=3, ignore_eos=True)


def test_each_method_gives_what_it_gives_alone(llm: LLM, decodings: list[Decoding]) -> None:
    assert [d.name for d in decodings] == list(METHODS)
    for d in decodings:
        alone = llm.generate(PROMPT, max_new_tokens=12, seed=3, ignore_eos=True, **METHODS[d.name])
        assert d.result.token_ids == alone.token_ids
    assert len({d.result.token_ids for d in decodings}) == len(METHODS)


def test_the_prompt_is_run_once_for_all(llm: LLM, decodings: list[Decoding]) -> None:
    shared = len(PROMPT) // 32 * 32
    assert [d.result.metrics.reused_tokens for d in decodings] == [0] + [shared] * (len(METHODS) - 1)


def test_the_methods_are_greedy_one_by_one_and_all_three() -> None:
    greedy, warm, top_k, top_p, together = METHODS.values()
    assert greedy == {}
    assert warm == {"temperature": 0.8}
    assert (top_k["top_k"], top_p["top_p"]) == (20, 0.9)
    assert together == {"temperature": 0.8, "top_k": 20, "top_p": 0.9}


def test_kept_probabilities_are_those_of_the_definition(llm: LLM, decodings: list[Decoding]) -> None:
    seen: list[tuple[int, int]] = []
    kept = kept_at_each_step(llm, decodings, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (60, 60)
    for d, k in zip(decodings, kept):
        logits = llm.logits([*PROMPT, *d.result.token_ids])[len(PROMPT) - 1 : -1].astype(np.float64)
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        ranked = -np.sort(-p, axis=1)
        prefix = np.cumsum(ranked, axis=1)
        nucleus = np.argmax(prefix >= 0.9, axis=1) + 1  # the fewest that reach 0.9
        top20 = ranked[:, :20] / prefix[:, 19:20]
        both = np.argmax(np.cumsum(top20, axis=1) >= 0.9, axis=1) + 1
        counts = {
            "greedy": np.ones(12, int),
            "T = 0.8": np.full(12, p.shape[1]),
            "top-k 20": np.full(12, 20),
            "top-p 0.9": nucleus,
            "all three": both,
        }[d.name]
        assert list(k.tokens) == list(counts), d.name
        assert list(k.mass) == pytest.approx(prefix[np.arange(12), counts - 1], abs=1e-5), d.name


@pytest.mark.usefixtures("step_by_step")
def test_a_stop_event_leaves_what_there_is(llm: LLM) -> None:
    stop = threading.Event()
    made: list[int] = []

    def after_some(tokens: int) -> None:
        made.append(tokens)
        if tokens >= 10:
            stop.set()

    found = compare_decoding(
        llm, PROMPT, max_new_tokens=50, seed=0, ignore_eos=True, stop_event=stop, on_step=after_some
    )
    assert all(d.result.finish_reason == "interrupted" for d in found)
    assert 10 <= sum(len(d.result.token_ids) for d in found) <= 15
    assert kept_at_each_step(llm, found, stop_event=stop) == [Kept((), ())] * 5


def test_equal_prompts_with_prompt_logprobs_are_each_run(llm: LLM) -> None:
    first, second = llm.batch([PROMPT, PROMPT], max_new_tokens=2, prompt_logprobs=True, ignore_eos=True)
    assert second.prompt_logprobs is not None and len(second.prompt_logprobs) == len(PROMPT) - 1
    assert first.prompt_logprobs == second.prompt_logprobs


def test_greedy_loops_and_sampling_mends_it(demo_model: Path) -> None:
    with LLM(demo_model) as llm:
        found = compare_decoding(llm, LOOPING, max_new_tokens=64, seed=0, raw=True, ignore_eos=True)
    greedy, *others = found
    assert greedy.repeated_4grams is not None and greedy.repeated_4grams > 0.25
    for d in others:
        assert d.repeated_4grams is not None and d.repeated_4grams < 0.1
        assert d.distinct_2 is not None and greedy.distinct_2 is not None
        assert d.distinct_2 > greedy.distinct_2 + 0.2


# -- the plot -------------------------------------------------------------------------------------


def drawn(monkeypatch: pytest.MonkeyPatch, path: Path, decodings: list[Decoding], kept: list[Kept]) -> Any:
    """The figure that was saved."""
    from matplotlib.figure import Figure

    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    cli.save_plot(str(path), "tiny on a device", decodings, kept)
    return figures[0]


def test_the_plot_has_a_bar_for_each_step_of_each_method(
    llm: LLM, decodings: list[Decoding], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = kept_at_each_step(llm, decodings)
    figure = drawn(monkeypatch, tmp_path / "plot.png", decodings, kept)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert len(figure.axes) == len(METHODS)
    for axes, d, k in zip(figure.axes, decodings, kept):
        assert axes.get_title("left").startswith(d.name)
        assert [bar.get_height() for bar in axes.patches] == pytest.approx(list(k.mass))


def test_the_plot_copes_with_a_method_that_made_nothing(
    decodings: list[Decoding], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = drawn(monkeypatch, tmp_path / "plot.svg", decodings, [Kept((), ())] * 5)
    assert [len(axes.patches) for axes in figure.axes] == [0] * 5


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pip install 'xinfer-vk\[plot\]'"):
        cli.check_plot("plot.png")


@pytest.mark.parametrize(
    ("name", "words"), [("plot.txt", "must end in one of"), ("no/such/plot.png", "no directory no/such")]
)
def test_a_plot_that_cannot_be_written_is_refused_at_once(name: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        cli.check_plot(name)


# -- the command ------------------------------------------------------------------------------------


@pytest.fixture
def common(tiny_model: Path) -> list[str]:
    return ["compare-decoding", "--model", str(tiny_model), "--device", "numpy", "--kv-dtype", "f32",
            "--ignore-eos", "--prompt", "a", "--raw", "--max-new-tokens", "6"]  # fmt: skip


def test_the_table_shows_every_method_with_its_figures(common: list[str]) -> None:
    result = xinfer(*common, "--quiet")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    heading, *_ = (line for line in result.stdout.splitlines() if "greedy" in line)
    assert all(name in heading for name in METHODS), "side by side"
    figures = result.stdout[result.stdout.index("repeated 4-grams") :]
    for name in METHODS:
        row = next(line for line in figures.splitlines() if line.strip().startswith(name))
        assert "%" in row and row.split()[-2:] == ["6", "length"]


def test_a_narrow_terminal_has_a_line_of_figures_for_each_method(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    import rich.console

    monkeypatch.setenv("TERM", "xterm")  # of a dumb one rich takes no width
    shown = io.StringIO()
    narrow = rich.console.Console(file=shown, force_terminal=True, width=40, color_system=None)
    monkeypatch.setattr(rich.console, "Console", lambda: narrow)
    tokens = llm.tokenizer.encode("a\x1b[2Jb", parse_special=False)
    result = dataclasses.replace(llm.generate("a", max_new_tokens=1), token_ids=tuple(tokens))
    cli.show(llm, [Decoding("greedy", SamplingParams(), result, 0.5, None)])
    text = " ".join(shown.getvalue().split())
    assert f"greedy: repeated 50.0 %, distinct-2 –, tokens {len(tokens)}, length" in text
    assert "a␛[2Jb" in text, "a model must not steer the terminal"


def test_json_holds_the_kept_probability_of_every_step_and_the_plot_is_written(
    common: list[str], tmp_path: Path
) -> None:
    plot = tmp_path / "plot.png"
    result = xinfer(*common, "--seed", "5", "--json", "--quiet", "--plot", str(plot))
    record = json.loads(result.stdout)
    assert [m["name"] for m in record["methods"]] == list(METHODS)
    assert (record["seed"], record["prompt"], record["prompt_tokens"]) == (5, "a", 1)
    for method in record["methods"]:
        assert len(method["token_ids"]) == len(method["kept_mass"]) == len(method["kept_tokens"]) == 6
        assert method["repeated_4grams"] == repeated_ngrams(method["token_ids"])
        assert method["distinct_2"] == distinct_ngrams(method["token_ids"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    again = json.loads(xinfer(*common, "--seed", "5", "--json", "-q").stdout)
    assert again["methods"] == record["methods"]


def test_repeated_tokens_are_marked(llm: LLM) -> None:
    tokens = llm.tokenizer.encode("abcd abcd abcd", parse_special=False)
    text = cli.marked_text(llm, tokens)
    assert text.plain == llm.tokenizer.decode(tokens)
    marked = "".join(text.plain[span.start : span.end] for span in text.spans)
    expected = [t for t, again in zip(tokens, repeats(tokens)) if again]
    assert marked == llm.tokenizer.decode(expected)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--prompt", ""], ["prompt is empty"]),
        (["--file", "x"], ["--prompt and --file"]),
        (["--seed", "-1"], ["seed", "-1"]),
        (["--plot", "x.doc"], ["x.doc", ".png"]),
        (["--max-new-tokens", "0"], ["max-new-tokens", "0"]),
    ],
)
def test_a_mistake_gets_one_clear_line(common: list[str], args: list[str], words: list[str]) -> None:
    assert_one_error(xinfer(*common, *args), 2, *words)

"""``--plot`` of perplexity and estimate, and the estimate's bar in text."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from xinfer_vk.cli.app import run
from xinfer_vk.cli.estimate_bar import draw as draw_estimate
from xinfer_vk.cli.estimate_bar import text_bar
from xinfer_vk.cli.perplexity_plot import along
from xinfer_vk.cli.plots import plot_title
from xinfer_vk.engine.estimate import Estimate
from xinfer_vk.engine.perplexity import estimate as perplexity_of


def figures(weights=60, kv=20, activations=10):
    sizes = (x * 10**9 for x in (weights, kv, activations))
    weight_bytes, kv_bytes, activation_bytes = sizes
    return Estimate(weight_bytes, kv_bytes, 0, 0, activation_bytes, 0, 0)


def test_a_title_names_model_device_and_day():
    assert plot_title(["m"], ["llvmpipe (LLVM 15)"], "2026-11-30T10:00") == "m on llvmpipe, 2026-11-30"
    assert plot_title("abc", ["x", "x"], "2026-11-30") == "3 models on x, 2026-11-30"
    assert plot_title("ab", ["x"], "2026-11-30") == "a, b on x, 2026-11-30"


def test_the_bar_shows_each_part_of_the_free_memory():
    assert text_bar(figures(), 180 * 10**9) == f"[{'█' * 13}{'▓' * 4}{'▒' * 2}{'·' * 21}]"
    assert text_bar(figures(), None) == f"[{'█' * 27}{'▓' * 9}{'▒' * 4}]"
    assert text_bar(figures(), 45 * 10**9) == f"[{'█' * 20}{'!' * 20}]"
    assert text_bar(figures(1, 1, 1), 10**12) == f"[█▓▒{'·' * 37}]"  # small parts are seen too
    assert len(text_bar(figures(998, 1, 1), 10**12)) == 42


def test_the_plot_of_an_estimate_has_a_bar_and_the_free_memory_for_each_device():
    fits = [
        SimpleNamespace(device=SimpleNamespace(name=name), free_bytes=free * 10**9)
        for name, free in (("a (b)", 100), ("c", 50))
    ]
    (axes,) = draw_estimate("title", figures(), fits).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "c"]
    assert [bar.get_width() for bar in axes.patches] == [60, 60, 20, 20, 10, 10]
    assert axes.get_xlim()[1] == pytest.approx(105)


def test_perplexity_along_the_text_ends_at_that_of_the_whole():
    logprobs = -np.random.default_rng(0).exponential(2.0, 200)
    logprobs[[0, 50, 51]] = np.nan
    at, local, so_far, error = along(logprobs)
    whole, deviation = perplexity_of(logprobs[~np.isnan(logprobs)])
    assert at[-1] == 200 and so_far[-1] == pytest.approx(whole) and error[-1] == pytest.approx(deviation)
    assert local[0] == so_far[0] and len(at) == 197 // 8 and (np.diff(at) > 0).all()
    assert [len(column) for column in along(np.array([np.nan, -1.0]))] == [1] * 4


def test_commands_write_the_plots(tiny_model: Path, tmp_path: Path, capsys):
    text = tmp_path / "text"
    text.write_text("a b c a b c a b c " * 20)
    model = ["-m", str(tiny_model), "-d", "numpy", "--kv-dtype", "f32"]
    assert run(["perplexity", *model, "-f", str(text), "--plot", str(tmp_path / "p.png"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["perplexity"] > 1 and f"plot: {tmp_path / 'p.png'}" in err
    assert run(["estimate", str(tiny_model), "-d", "numpy", "--plot", str(tmp_path / "e.png")]) == 0
    assert "█ weights, ▓ KV cache, ▒ activations" in capsys.readouterr().out
    assert all((tmp_path / name).stat().st_size > 5000 for name in ("p.png", "e.png"))
    assert run(["perplexity", *model, "--plot", "x.txt"]) == run(["estimate", "--plot", "no/x.png"]) == 2
    assert capsys.readouterr().err.count("error: --plot") == 2

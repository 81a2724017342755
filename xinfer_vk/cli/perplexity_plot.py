"""``perplexity --plot``: how well each part of the text was predicted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from xinfer_vk.cli.plots import plain, plot_title, save_figure

if TYPE_CHECKING:
    from xinfer_vk.engine.llm import LLM
    from xinfer_vk.engine.perplexity import Perplexity

PARTS = 60  # of the text, a point each
FEWEST = 8  # tokens of a part: fewer are noise


def save_perplexity_plot(path: str, llm: LLM, result: Perplexity) -> None:
    """Raises :class:`UsageError` for a file that cannot be written."""
    save_figure(draw(result, plot_title([llm.name], [llm.runtime.profile.name])), path)


def draw(result: Perplexity, title: str) -> Any:
    """The perplexity of each part of the text, and of all of it up to there with its standard error."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    at, local, so_far, error = along(result.logprobs)
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(at, local, color="#9ecae9", label="part")
    axes.plot(at, so_far, color="#d62728", label="up to here, ± standard error")
    factor = np.exp(error / so_far)  # of the mean log-probability's error, which the axis shows evenly
    axes.fill_between(at, so_far / factor, so_far * factor, color="#d62728", alpha=0.2, linewidth=0)
    plain(axes, xlabel="token of the text", ylabel="perplexity", yscale="log", xlim=(0, len(result.logprobs)))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_title(f"{title}: {result}", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    return figure


def along(logprobs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of each part of a text: where it ends (in tokens), its perplexity, that of all until there, and the
    standard error of that. ``logprobs``: float64 [tokens], NaN where a token was not scored."""
    scored = np.flatnonzero(~np.isnan(logprobs))
    values = logprobs[scored]
    count = max(1, min(PARTS, values.size // FEWEST))
    ends = np.linspace(0, values.size, count + 1).astype(int)[1:]
    begins = np.concatenate([[0], ends[:-1]])
    local = np.array([np.exp(-values[a:b].mean()) for a, b in zip(begins, ends)])
    so_far = np.array([np.exp(-values[:b].mean()) for b in ends])
    spread = np.array([values[:b].std(ddof=1) if b > 1 else 0.0 for b in ends])
    return scored[ends - 1] + 1, local, so_far, so_far * spread / np.sqrt(ends)

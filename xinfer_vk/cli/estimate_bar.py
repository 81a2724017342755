"""``estimate`` as a bar: what each part takes of a device's free memory, in text and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from xinfer_vk.cli.plots import plain, save_figure, short_device
from xinfer_vk.units import format_bytes

if TYPE_CHECKING:
    from xinfer_vk.engine.estimate import Estimate, Fit

WIDTH = 40  # characters
PARTS = (("weights", "█"), ("KV cache", "▓"), ("activations", "▒"))
ROOM, BEYOND = "·", "!"
COLOURS = ("#4c78a8", "#f58518", "#54a24b")


def parts(figures: Estimate) -> tuple[int, int, int]:
    """Bytes of weights, KV cache, and activations with the staging buffer."""
    return figures.weight_bytes, figures.kv_bytes, figures.activation_bytes + figures.staging_bytes


def text_bar(figures: Estimate, free_bytes: int | None) -> str:
    """``[████▓▓▒·······]``: the bar is the free memory (or the total, if that is more or no device is
    known), and each part has at least one character. ``!`` marks what is beyond the free memory."""
    sizes = parts(figures)
    whole = max(sum(sizes), free_bytes or 0)
    counts = [max(1, round(WIDTH * size / whole)) if size else 0 for size in sizes]
    while sum(counts) > WIDTH:
        counts[counts.index(max(counts))] -= 1
    bar = "".join(mark * count for (_, mark), count in zip(PARTS, counts))
    limit = WIDTH if free_bytes is None else min(WIDTH, round(WIDTH * free_bytes / whole))
    return f"[{bar[:limit].ljust(limit, ROOM)}{BEYOND * (len(bar) - limit)}]"


def legend() -> str:
    return ", ".join(f"{mark} {name}" for name, mark in PARTS)


def save_estimate_plot(path: str, title: str, figures: Estimate, fits: Sequence[Fit]) -> None:
    """Raises :class:`UsageError` for a file that cannot be written."""
    save_figure(draw(title, figures, fits), path)


def draw(title: str, figures: Estimate, fits: Sequence[Fit]) -> Any:
    """A bar for each device, or one where no device is known; the free memory is a line behind each."""
    from matplotlib.figure import Figure

    names = [short_device(fit.device.name) for fit in fits] or ["total"]
    figure = Figure(figsize=(8, 0.6 * len(names) + 1.7), layout="constrained")
    axes = figure.subplots()
    left = 0.0
    for (name, _), size, colour in zip(PARTS, parts(figures), COLOURS):
        label = f"{name} {format_bytes(size)}"  # a part can be too narrow to read from the bar
        axes.barh(range(len(names)), [size / 1e9] * len(names), 0.6, left=left, label=label, color=colour)
        left += size / 1e9
    for i, fit in enumerate(fits):
        label = "free" if i == 0 else "_nolegend_"
        axes.vlines(fit.free_bytes / 1e9, i - 0.4, i + 0.4, color="black", linewidth=2, label=label)
    plain(axes, whole=False, xlabel="GB", yticks=range(len(names)), yticklabels=names)
    axes.set_xlim(0, 1.05 * max(left, *(fit.free_bytes / 1e9 for fit in fits), 1e-3))
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=10)
    figure.legend(loc="outside lower center", ncols=len(PARTS) + 1, frameon=False, fontsize=8)
    return figure

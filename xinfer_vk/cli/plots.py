"""What all plots share: a file that can be written, a title that says what was measured, plain axes."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xinfer_vk.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 120
MOST_NAMES = 2  # in a title


def check_plot(path: str) -> None:
    """Raise :class:`UsageError` if no plot can be drawn or written there."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("--plot needs matplotlib: pip install 'xinfer-vk[plot]'") from error
    kinds = Figure().canvas.get_supported_filetypes()
    suffix = Path(path).suffix.lstrip(".").lower()
    if suffix not in kinds:
        raise UsageError(f"--plot {path}: the name must end in one of .{', .'.join(sorted(kinds))}")
    if not Path(path).parent.is_dir():
        raise UsageError(f"--plot {path}: there is no directory {Path(path).parent}")


def save_figure(figure: Figure, path: str | Path) -> None:
    """Raises :class:`UsageError` for a file that cannot be written."""
    try:
        figure.savefig(path, dpi=DPI)
    except OSError as error:
        raise UsageError(f"cannot write the plot to {path}: {error.strerror or error}") from error


def plot_title(models: Iterable[str], devices: Iterable[str], day: str | None = None) -> str:
    """``smollm2-135m on llvmpipe, 2026-11-30``; ``day`` as ISO writes it, today if None. Of more than two
    names, how many there are."""
    what, where = _names(models, "models"), _names((short_device(d) for d in devices), "devices")
    return f"{what} on {where}, {(day or date.today().isoformat())[:10]}"


def short_device(name: str) -> str:
    """A device's name without what drivers put in brackets behind it."""
    return name.partition(" (")[0] or name


def plain(axes: Axes, whole: bool = True, **settings: Any) -> None:
    """Two spines, few ticks along x, whole numbers if ``whole``, and ``settings``."""
    from matplotlib.ticker import MaxNLocator

    axes.set(**settings)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=whole))


def _names(names: Iterable[str], what: str) -> str:
    distinct = list(dict.fromkeys(names))
    return ", ".join(distinct) if len(distinct) <= MOST_NAMES else f"{len(distinct)} {what}"

"""``bench --plot DIR``: latency against context, throughput against batch, and where a step's time goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xinfer_vk.cli.plots import plain, plot_title, save_figure, short_device
from xinfer_vk.errors import UsageError

Record = Mapping[str, Any]
MOST_KERNELS = 7  # of a bar; the others are one more


def check_plot_folder(folder: str) -> None:
    """Raise :class:`UsageError` if nothing can be drawn. Makes the folder."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError("--plot needs matplotlib: pip install 'xinfer-vk[plot]'") from error
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--plot {folder}: cannot make the folder: {error.strerror or error}") from error


def save_plots(folder: str, records: Sequence[Record]) -> list[Path]:
    """Draw what the rows have several points of. Returns the files."""
    made = []
    for name, draw in (("context", draw_context), ("batch", draw_batch), ("kernels", draw_kernels)):
        figure = draw(records)
        if figure is not None:
            made.append(Path(folder) / f"{name}.png")
            save_figure(figure, made[-1])
    return made


def title_of(records: Sequence[Record]) -> str:
    models, devices = ([r[name] for r in records] for name in ("model", "device"))
    return plot_title(models, devices, records[0].get("date"))


@dataclass(frozen=True)
class Figures:
    """What a panel shows of a row: the field, and the least and most of its runs. ``seconds``: a time."""

    field: str
    limits: Callable[[Record], tuple[float, float]]
    seconds: bool = False


def run_limits(r: Record) -> tuple[float, float]:
    """The shortest and the longest run, in seconds for each decoded token or for the whole prompt."""
    steps = r["new_tokens"] or 1
    return min(r["run_s"]) / steps, max(r["run_s"]) / steps


TPOT, TTFT = Figures("tpot_s", run_limits, True), Figures("ttft_s", run_limits, True)
RATE = Figures("tok_per_s", lambda r: (r["tok_per_s_min"], r["tok_per_s_max"]))


def draw_context(records: Sequence[Record]) -> Any:
    """Seconds for a token against the tokens in the cache, and to the first token against the prompt."""
    decode = lines(records, "tg", lambda r: r["depth"], tokens_and_batch)
    prefill = lines(records, "pp", lambda r: r["prompt_tokens"], depth_and_batch)
    return two_panels(
        records,
        (decode, TPOT, "tokens in the cache", "time per token"),
        (prefill, TTFT, "prompt tokens", "time to first token"),
    )


def draw_batch(records: Sequence[Record]) -> Any:
    """Tokens a second of all sequences together against how many there are."""
    decode = lines(records, "tg", lambda r: r["batch"], tokens_and_depth)
    prefill = lines(records, "pp", lambda r: r["batch"], tokens_and_depth)
    return two_panels(
        records,
        (decode, RATE, "sequences", "decode, tok/s of all"),
        (prefill, RATE, "sequences", "prefill, tok/s of all"),
    )


Parts = tuple[str, ...]
Lines = dict[str, list[tuple[int, Record]]]  # by label: x and the row


def tokens_and_batch(r: Record) -> Parts:
    return f"{r['new_tokens'] or r['prompt_tokens']} tokens", f"batch {r['batch']}"


def depth_and_batch(r: Record) -> Parts:
    return f"depth {r['depth']}", f"batch {r['batch']}"


def tokens_and_depth(r: Record) -> Parts:
    return f"{r['new_tokens'] or r['prompt_tokens']} tokens", f"depth {r['depth']}"


def lines(
    records: Sequence[Record],
    kind: str,
    x: Callable[[Record], int],
    rest: Callable[[Record], tuple[str, ...]],
) -> Lines:
    """Rows of a kind that differ in nothing but ``x``, at least two points of each line, by a label: that in
    which lines differ of model, device, KV format and ``rest``. A single line has an empty one."""
    found: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        if record["kind"] == kind:
            key = (record["model"], short_device(record["device"]), record["kv_dtype"], *rest(record))
            found.setdefault(key, []).append(record)
    several = [key for key, rows in found.items() if len({x(r) for r in rows}) > 1]
    named: Lines = {}
    for key in several:
        differing = [part for i, part in enumerate(key) if len({k[i] for k in several}) > 1]
        named[", ".join(differing)] = [(x(r), r) for r in sorted(found[key], key=x)]
    return named


def two_panels(records: Sequence[Record], *panels: tuple[Lines, Figures, str, str]) -> Any:
    """Panels that have lines, side by side; the bars at each point are its fastest and slowest run."""
    from matplotlib.figure import Figure

    panels = tuple(panel for panel in panels if panel[0])
    if not panels:
        return None
    figure = Figure(figsize=(5.5 * len(panels), 4), layout="constrained")
    figure.suptitle(title_of(records), fontsize=10)
    for ax, (found, shown, xlabel, ylabel) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        scale, unit = scaling(found, shown)
        for label, rows in found.items():
            y = [r[shown.field] * scale for _, r in rows]
            least, most = zip(*(shown.limits(r) for _, r in rows))
            errors = [
                [max(0.0, value - low * scale) for value, low in zip(y, least)],
                [max(0.0, high * scale - value) for value, high in zip(y, most)],
            ]
            ax.errorbar([x for x, _ in rows], y, errors, fmt="o-", capsize=3, label=label)
        plain(ax, xlabel=xlabel, ylabel=f"{ylabel}{unit}", ylim=(0, None))
        if len(found) > 1:
            ax.legend(frameon=False, fontsize=8)
    return figure


def scaling(found: Lines, shown: Figures) -> tuple[float, str]:
    """Times in seconds from one second on, else in milliseconds."""
    if not shown.seconds:
        return 1.0, ""
    longest = max(r[shown.field] for rows in found.values() for _, r in rows)
    return (1.0, " (s)") if longest >= 1 else (1e3, " (ms)")


def draw_kernels(records: Sequence[Record]) -> Any:
    """A bar for each profiled step, of its kernels' shares."""
    from matplotlib.figure import Figure

    profiled = [r for r in records if "profile" in r]
    if not profiled:
        return None
    labels = list(dict.fromkeys(k["label"] for r in profiled for k in r["profile"]["kernels"]))
    total = {label: sum(share_of(r, label) for r in profiled) for label in labels}
    shown = sorted(labels, key=lambda label: -total[label])[:MOST_KERNELS]
    figure = Figure(figsize=(9, 0.5 * len(profiled) + 1.8), layout="constrained")
    ax = figure.subplots()
    one_model = len({r["model"] for r in profiled}) == 1
    names = [r["test"] if one_model else f"{r['model']}, {r['test']}" for r in profiled]
    left = [0.0] * len(profiled)
    for label, shares in bars(profiled, shown):
        ax.barh(range(len(profiled)), shares, left=left, label=label)
        left = [a + b for a, b in zip(left, shares)]
    plain(ax, yticks=range(len(profiled)), yticklabels=names, xlim=(0, 100), xlabel="% of the device's time")
    ax.invert_yaxis()
    ax.set_title(title_of(profiled), fontsize=10)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def share_of(record: Record, label: str) -> float:
    return sum(100 * k["share"] for k in record["profile"]["kernels"] if k["label"] == label)


def bars(records: Sequence[Record], shown: Sequence[str]) -> Iterator[tuple[str, list[float]]]:
    for label in shown:
        yield label, [share_of(r, label) for r in records]
    rest = [100 - sum(share_of(r, label) for label in shown) for r in records]
    if max(rest) > 0.05:
        yield "other", rest

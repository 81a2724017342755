"""``bench --plot DIR``: latency against context, throughput against batch, and where a step's time goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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
        if figure is None:
            continue
        path = Path(folder) / f"{name}.png"
        try:
            figure.savefig(path, dpi=120)
        except OSError as error:
            raise UsageError(f"cannot write the plot to {path}: {error.strerror or error}") from error
        made.append(path)
    return made


def draw_context(records: Sequence[Record]) -> Any:
    """Milliseconds a token against the tokens in the cache, and to the first token against the prompt."""
    decode = lines(records, "tg", lambda r: r["depth"], lambda r: f"tg{r['new_tokens']}, b{r['batch']}")
    prefill = lines(
        records, "pp", lambda r: r["prompt_tokens"], lambda r: f"pp @ d{r['depth']}, b{r['batch']}"
    )
    return two_panels(
        (decode, "tpot_s", "tokens in the cache", "ms a token (TPOT)"),
        (prefill, "ttft_s", "prompt tokens", "ms to the first token (TTFT)"),
        scale=1e3,
    )


def draw_batch(records: Sequence[Record]) -> Any:
    """Tokens a second of all sequences together against how many there are."""
    decode = lines(records, "tg", lambda r: r["batch"], lambda r: f"tg{r['new_tokens']} @ d{r['depth']}")
    prefill = lines(records, "pp", lambda r: r["batch"], lambda r: f"pp{r['prompt_tokens']} @ d{r['depth']}")
    return two_panels(
        (decode, "tok_per_s", "sequences", "decoded tok/s, all together"),
        (prefill, "tok_per_s", "sequences", "prefilled tok/s, all together"),
    )


Lines = dict[str, list[tuple[int, Record]]]  # by label: x and the row


def lines(
    records: Sequence[Record], kind: str, x: Callable[[Record], int], rest: Callable[[Record], str]
) -> Lines:
    """Rows of a kind that differ in nothing but ``x``, by what they have in common (``rest`` besides model,
    device and KV format) where lines differ in it; at least two points."""
    found: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        if record["kind"] == kind:
            found.setdefault(
                (record["model"], record["device"], record["kv_dtype"], rest(record)), []
            ).append(record)
    several = [key for key, rows in found.items() if len({x(r) for r in rows}) > 1]
    named: Lines = {}
    for key in several:
        differing = [part for i, part in enumerate(key) if len({k[i] for k in several}) > 1 or i == 0]
        named[", ".join(differing)] = [(x(r), r) for r in sorted(found[key], key=x)]
    return named


def two_panels(*panels: tuple[Lines, str, str, str], scale: float = 1.0) -> Any:
    from matplotlib.figure import Figure

    panels = tuple(panel for panel in panels if panel[0])
    if not panels:
        return None
    figure = Figure(figsize=(5.5 * len(panels), 4), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for ax, (found, field, xlabel, ylabel) in zip(axes, panels):
        for label, rows in found.items():
            ax.plot([x for x, _ in rows], [r[field] * scale for _, r in rows], "o-", label=label)
        ax.set(xlabel=xlabel, ylabel=ylabel, ylim=(0, None))
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False, fontsize=8)
    return figure


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
    names = [f"{r['model']}, {r['test']}" for r in profiled]
    left = [0.0] * len(profiled)
    for label, shares in bars(profiled, shown):
        ax.barh(range(len(profiled)), shares, left=left, label=label)
        left = [a + b for a, b in zip(left, shares)]
    ax.set(yticks=range(len(profiled)), yticklabels=names, xlim=(0, 100), xlabel="% of the device's time")
    ax.invert_yaxis()
    ax.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    return figure


def share_of(record: Record, label: str) -> float:
    return sum(100 * k["share"] for k in record["profile"]["kernels"] if k["label"] == label)


def bars(records: Sequence[Record], shown: Sequence[str]) -> Iterator[tuple[str, list[float]]]:
    for label in shown:
        yield label, [share_of(r, label) for r in records]
    rest = [100 - sum(share_of(r, label) for label in shown) for r in records]
    if max(rest) > 0.05:
        yield "other", rest

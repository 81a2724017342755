"""``xinfer-vk compare-decoding``: what ways of choosing tokens make of one prompt, side by side."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xinfer_vk.cli.interrupt import exit_code, interruptible
from xinfer_vk.cli.options import model_options
from xinfer_vk.cli.output import printable, say_json
from xinfer_vk.cli.progress import ProgressBar
from xinfer_vk.cli.same_file import refuse_inputs
from xinfer_vk.cli.source import check_unicode, read_prompt
from xinfer_vk.errors import UsageError, XinferError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from xinfer_vk.engine.compare import Decoding, Kept
    from xinfer_vk.engine.llm import LLM

PIPE_WIDTH = 140  # columns of the table when nobody says how wide the terminal is
LEAST_TABLE = 60  # columns that the table of figures needs
LEAST_COLUMN = 20  # narrower columns are hard to read: texts stand one below the other then
REPEATED = "red"
PLOT_COLOURS = {False: "#4c78a8", True: "#e45756"}  # by whether a step repeats


@click.command("compare-decoding")
@model_options
@click.option("--prompt", "-p", help="The prompt; - reads standard input.")
@click.option("--file", "-f", type=click.Path(), help="Read the prompt from a file.")
@click.option("--system", "-s", help="System text for the chat template.")
@click.option("--raw", is_flag=True, help="Do not use the model's chat template.")
@click.option(
    "--max-new-tokens",
    "-n",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="Generate at most this many tokens by each method.",
)
@click.option("--ignore-eos", is_flag=True, help="Do not stop at the end-of-sequence token.")
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="The same seed gives the same texts.",
)
@click.option(
    "--plot",
    type=click.Path(),
    metavar="FILE.png",
    help="Draw how much probability each method keeps at each step.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option("--quiet", "-q", is_flag=True, help="Print the result and nothing else.")
def command(
    chosen: dict[str, Any],
    prompt: str | None,
    file: str | None,
    system: str | None,
    raw: bool,
    max_new_tokens: int,
    ignore_eos: bool,
    seed: int,
    plot: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Show side by side what ways of choosing tokens make of a prompt.

    Greedy decoding, temperature 0.8, top-k 20, top-p 0.9, and the three together, all from the same
    prompt and with the same random numbers. Below the texts is how much each repeats itself: the share
    of its 4-grams that came before (0 % is none), and its distinct 2-grams a token (near 1 is varied).
    On a terminal the tokens that repeat are red. docs/decoding.md explains what is to be seen.
    """
    from xinfer_vk.sampling.params import SamplingParams

    if plot is not None:
        check_plot(plot)
        refuse_inputs("--plot", plot, {"--file": file, "--model": str(chosen["model"])})
    SamplingParams(seed=seed)  # a mistake is told before anything is loaded
    text = prompt_text(prompt, file)
    check_unicode([text, system], "the prompt or the system text")
    stop = threading.Event()

    with ProgressBar(enabled=False if quiet else None) as progress:
        from xinfer_vk.engine.compare import METHODS, compare_decoding, kept_at_each_step
        from xinfer_vk.engine.llm import LLM

        with LLM(**chosen, progress=progress) as llm:
            if not quiet:
                for notice in llm.notices:
                    click.echo(notice, err=True)
            most = len(METHODS) * max_new_tokens
            ended: list[Decoding] = []
            with interruptible(stop.set):
                try:
                    decodings = compare_decoding(
                        llm,
                        text,
                        max_new_tokens=max_new_tokens,
                        seed=seed,
                        system=system,
                        raw=raw or None,
                        ignore_eos=ignore_eos,
                        stop_event=stop,
                        on_step=lambda made: progress("generating", made, most),
                        on_decoding=ended.append,
                    )
                except XinferError:  # what there is of the texts is not lost
                    progress.close()
                    ended.sort(key=lambda decoding: decoding.result.prompt)
                    if ended and as_json:
                        say_json(as_record(llm, text, seed, ended, None))
                    elif ended:
                        show(llm, ended)
                    raise
                kept: list[Kept] | None = None

                def tell_kept(done: int, total: int) -> None:
                    progress("kept probability", done, total)

                try:
                    if as_json or plot is not None:
                        kept = kept_at_each_step(llm, decodings, tell_kept, stop)
                finally:  # an error in the second part does not take away the texts of the first
                    progress.close()
                    if as_json:
                        say_json(as_record(llm, text, seed, decodings, kept))
                    else:
                        show(llm, decodings)
            if plot is not None and kept is not None:
                save_plot(plot, decodings, kept)
                if not quiet:
                    click.echo(f"plot: {plot}", err=True)
    if stop.is_set():
        raise click.exceptions.Exit(exit_code())


def prompt_text(prompt: str | None, file: str | None) -> str:
    if prompt is not None and file is not None:
        raise UsageError("--prompt and --file exclude each other: use one of them")
    text = read_prompt(file) if prompt is None or prompt == "-" else prompt
    if not text:  # the model says what white space alone is
        raise UsageError("the prompt is empty: give some text with --prompt, --file or standard input")
    return text


def as_record(
    llm: LLM, prompt: str, seed: int, decodings: Sequence[Decoding], kept: Sequence[Kept] | None
) -> dict[str, Any]:
    """What ``--json`` prints. ``kept_mass`` and ``kept_tokens`` have an entry for each token of a text."""
    return {
        "model": llm.name,
        "device": llm.runtime.profile.name,
        "driver": llm.runtime.driver,
        "dtype": llm.dtype,
        "kv_dtype": llm.kv_dtype,
        "activations": llm.activations,
        "prompt": prompt,
        "prompt_tokens": len(decodings[0].result.prompt_token_ids),
        "seed": seed,
        "methods": [
            {
                "name": d.name,
                "temperature": d.params.temperature,
                "top_k": d.params.top_k,
                "top_p": d.params.top_p,
                "text": d.result.text,
                "token_ids": list(d.result.token_ids),
                "finish_reason": d.result.finish_reason,
                "repeated_4grams": d.repeated_4grams,
                "distinct_2": d.distinct_2,
                **({} if k is None else {"kept_mass": list(k.mass), "kept_tokens": list(k.tokens)}),
            }
            for d, k in zip_longest(decodings, kept or ())
        ],
    }


# -- the table ------------------------------------------------------------------------------------


def show(llm: LLM, decodings: Sequence[Decoding]) -> None:
    """Texts side by side, or one below the other on a narrow terminal, and the figures under them."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH)
    beside = console.width >= len(decodings) * (LEAST_COLUMN + 2)
    texts = [marked_text(llm, d.result.token_ids, console.is_terminal) for d in decodings]
    for part in side_by_side(decodings, texts) if beside else stacked(decodings, texts):
        console.print(part)
    if console.color_system is not None and any(text.spans for text in texts):
        console.print(Text.assemble(("Red", REPEATED), ": ends four tokens that came before in this order."))
    if console.width >= LEAST_TABLE:
        console.print(figures(decodings))
    else:
        for line in figure_lines(decodings):
            console.print(line, highlight=False)


def marked_text(llm: LLM, token_ids: Sequence[int], for_terminal: bool = False) -> Text:
    """The text of tokens, those marked that end four tokens which came before in the same order.
    ``for_terminal``: without what a terminal would obey."""
    from rich.text import Text

    from xinfer_vk.engine.repetition import repeats
    from xinfer_vk.text.stream import StreamDecoder

    decoder, text = StreamDecoder(llm.tokenizer), Text()
    clean = printable if for_terminal else str
    for token, again in zip(token_ids, repeats(token_ids)):
        text.append(clean(decoder.push(token)), REPEATED if again else None)
    text.append(clean(decoder.finish()))
    return text


def side_by_side(decodings: Sequence[Decoding], texts: Sequence[Text]) -> list[RenderableType]:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
    for decoding in decodings:
        table.add_column(decoding.name, ratio=1, overflow="fold")
    table.add_row(*texts)
    return [table]


def stacked(decodings: Sequence[Decoding], texts: Sequence[Text]) -> list[RenderableType]:
    from rich.text import Text

    parts: list[RenderableType] = []
    for decoding, text in zip(decodings, texts):
        parts += [Text(f"── {decoding.name}", "bold"), text, ""]
    return parts


def figures(decodings: Sequence[Decoding]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method")
    for title in ("repeated 4-grams", "distinct-2", "tokens"):
        table.add_column(title, justify="right")
    table.add_column("ended by")
    for d in decodings:
        table.add_row(d.name, *figures_of(d))
    return table


def figure_lines(decodings: Sequence[Decoding]) -> list[str]:
    """The figures where there is no room for a table: a line a method."""
    lines = []
    for d in decodings:
        repeated, distinct, tokens, ended = figures_of(d)
        lines.append(f"{d.name}: repeated {repeated}, distinct-2 {distinct}, tokens {tokens}, {ended}")
    return lines


def figures_of(d: Decoding) -> tuple[str, str, str, str]:
    """Repeated 4-grams, distinct 2-grams, tokens, what ended it."""
    return (
        "–" if d.repeated_4grams is None else f"{100 * d.repeated_4grams:.1f} %",
        "–" if d.distinct_2 is None else f"{d.distinct_2:.2f}",
        str(len(d.result.token_ids)),
        d.result.finish_reason,
    )


# -- the plot -------------------------------------------------------------------------------------


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


def save_plot(path: str, decodings: Sequence[Decoding], kept: Sequence[Kept]) -> None:
    """One panel a method, a bar a step: the probability it could choose from. Steps that repeat are red."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from xinfer_vk.engine.repetition import repeats

    figure = Figure(figsize=(9, 1.4 * len(decodings) + 1.2), layout="constrained")
    panels = figure.subplots(len(decodings), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    longest = max([1, *(len(k.mass) for k in kept)])
    for axes, decoding, k in zip(panels, decodings, kept):
        again = repeats(decoding.result.token_ids)[: len(k.mass)]
        axes.bar(range(1, len(k.mass) + 1), k.mass, 1.0, color=[PLOT_COLOURS[is_again] for is_again in again])
        mean = f", {sum(k.mass) / len(k.mass):.2f} on average" if k.mass else ""
        axes.set_title(f"{decoding.name}{mean}", loc="left", fontsize=10)
        axes.set(xlim=(0.5, longest + 0.5), ylim=(0, 1.02))
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("step")
    figure.supylabel("share of the model's probability that can be chosen", fontsize=10)
    labels = {False: "new", True: "ends four tokens that came before"}
    figure.legend(
        handles=[Patch(color=colour, label=labels[again]) for again, colour in PLOT_COLOURS.items()],
        loc="outside upper right",
        ncols=2,
        frameon=False,
    )
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise UsageError(f"cannot write the plot to {path}: {error.strerror or error}") from error

"""``xinfer-vk compare-decoding``: decoding strategies on one prompt, side by side."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import click

from xinfer_vk.cli.interrupt import exit_code, interruptible
from xinfer_vk.cli.options import model_options
from xinfer_vk.cli.output import printable, say_json, tell
from xinfer_vk.cli.plots import check_plot, plot_title, save_figure
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
@click.option("--prompt", "-p", help="Prompt text; - reads standard input.")
@click.option("--file", "-f", type=click.Path(), help="Read the prompt from a file.")
@click.option("--system", "-s", help="System prompt.")
@click.option("--raw", is_flag=True, help="Do not apply the chat template.")
@click.option(
    "--max-new-tokens",
    "-n",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="Most tokens to generate with each strategy.",
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
    help="Plot the probability that each strategy keeps at each step.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, not a table.")
@click.option("--quiet", "-q", is_flag=True, help="Print only the result.")
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
    """Compare decoding strategies on one prompt, side by side.

    The strategies are greedy decoding, temperature 0.8, top-k 20, top-p 0.9, and these three together. All
    use the same prompt and the same random numbers. Below the texts are two measures of repetition: the share
    of 4-grams that occurred before (0 % means none), and distinct 2-grams per token (near 1 means varied). On
    a terminal, repeated tokens are red. docs/decoding.md explains the figures.
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
                    tell(notice)
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
                save_plot(plot, plot_title([llm.name], [llm.runtime.profile.name]), decodings, kept)
                if not quiet:
                    tell(f"plot: {plot}")
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


def save_plot(path: str, title: str, decodings: Sequence[Decoding], kept: Sequence[Kept]) -> None:
    """One panel a method, a bar a step: the probability it could choose from. Steps that repeat are red."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

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
        loc="outside lower center",
        ncols=2,
        frameon=False,
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    save_figure(figure, path)

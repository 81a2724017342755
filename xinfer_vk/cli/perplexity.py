"""``xinfer-vk perplexity``: how well a model predicts a text."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

import click

from xinfer_vk.cli.interrupt import exit_code, interruptible
from xinfer_vk.cli.options import model_options
from xinfer_vk.cli.output import say, say_json, tell
from xinfer_vk.cli.plots import check_plot
from xinfer_vk.cli.progress import ProgressBar
from xinfer_vk.cli.source import read_source
from xinfer_vk.errors import UsageError

if TYPE_CHECKING:
    from xinfer_vk.engine.llm import LLM
    from xinfer_vk.engine.perplexity import Perplexity


def read_text(file: str | None) -> str:
    """The text to score, as it is. Raises :class:`UsageError` for no text at all, and as read_source does."""
    text = read_source(file, "the text", "no text: give --file FILE, or text on standard input")
    if not text.strip():
        where = "standard input" if file in (None, "-") else file
        raise UsageError(f"the text from {where} is empty: perplexity needs at least 2 tokens")
    return text


@click.command("perplexity")
@model_options
@click.option("--file", "-f", type=click.Path(), help="Text file. [default: standard input]")
@click.option(
    "--context",
    "-c",
    type=int,
    help="Window size in tokens. [default: 512, or the model's context if that is less]",
)
@click.option(
    "--stride",
    type=int,
    help="Tokens between the starts of two windows. Each window after the first scores its last "
    "STRIDE tokens; those before them are context. [default: half the context]",
)
@click.option(
    "--convention",
    type=click.Choice(["huggingface", "llama.cpp"]),
    default="huggingface",
    show_default=True,
    help="huggingface: sliding windows. llama.cpp: adjacent windows that score their second half.",
)
@click.option(
    "--bos/--no-bos",
    default=None,
    help="Start the text with the begin-of-sequence token. [default: as the model was trained]",
)
@click.option("--max-tokens", type=int, help="Use at most this many tokens of the text.")
@click.option("--plot", type=click.Path(), metavar="FILE.png", help="Plot the perplexity along the text.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--quiet", "-q", is_flag=True, help="Print only the result.")
@click.option("--verbose", "-v", is_flag=True, help="Report the estimate after each window, and settings.")
def command(
    chosen: dict[str, Any],
    file: str | None,
    context: int | None,
    stride: int | None,
    convention: Any,
    bos: bool | None,
    max_tokens: int | None,
    plot: str | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Measure perplexity on a text, with its standard error.

    Lower is better: 1 means certain, the vocabulary size means guessing. Compare figures only for the same
    text, tokenizer, context, stride and convention (docs/perplexity.md). Ctrl-C stops early and prints the
    perplexity of the text read so far (exit code 130).
    """
    from xinfer_vk.cli.report import describe
    from xinfer_vk.engine.perplexity import Windowing, check_max_tokens

    if plot is not None:
        check_plot(plot)
    Windowing.of(context, stride, convention)  # a mistake is told before anything is loaded
    check_max_tokens(max_tokens)
    text = read_text(file)
    stop = threading.Event()

    with ProgressBar(enabled=False if quiet else None) as progress:
        from xinfer_vk.engine.llm import LLM

        with LLM(**chosen, progress=progress) as llm:
            if not quiet:
                for notice in llm.notices:
                    tell(notice)
            if verbose:
                tell(describe(llm))

            def tell_estimate(scored: int, total: int, so_far: float) -> None:
                progress.tell(f"{scored:>{len(str(total))}} of {total} tokens: {so_far:.4f}")

            with interruptible(stop.set):
                result = llm.perplexity(
                    text,
                    context=context,
                    stride=stride,
                    convention=convention,
                    bos=bos,
                    max_tokens=max_tokens,
                    stop_event=stop,
                    on_estimate=tell_estimate if verbose else None,
                )
            progress.close()
            if as_json:
                say_json(as_record(llm, result))
            elif result.tokens:
                say(result_line(result))
            if verbose and result.tokens:
                tell(describe_result(result))
            if plot is not None and result.tokens:
                from xinfer_vk.cli.perplexity_plot import save_perplexity_plot

                save_perplexity_plot(plot, llm, result)
                if not quiet:
                    tell(f"plot: {plot}")
    if not result.complete:
        if not quiet:
            tell(f"interrupted after {counted(result.tokens, 'token')}")
        raise click.exceptions.Exit(exit_code())


def counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def result_line(result: Perplexity) -> str:
    """``perplexity: 12.345 ± 0.062 (4095 tokens, 310 tok/s)``"""
    from xinfer_vk.engine.metrics import format_rate

    return f"perplexity: {result} ({counted(result.tokens, 'token')}, {format_rate(result.rate)} tok/s)"


def describe_result(result: Perplexity) -> str:
    from xinfer_vk.engine.metrics import format_seconds

    w = result.windowing
    stride = f", stride {w.stride}" if w.convention == "huggingface" else ""
    bos = "with" if result.bos else "without"
    return (
        f"{counted(result.windows, 'window')} of {counted(w.context, 'token')}{stride}, "
        f"{w.convention} convention, {bos} begin-of-sequence token\n"
        f"{result.bits_per_byte:.4f} bits per byte; {counted(result.tokens_run, 'token')} run in "
        f"{format_seconds(result.seconds)}"
    )


def as_record(llm: LLM, result: Perplexity) -> dict[str, Any]:
    """What ``--json`` prints. What is no number (the error of one token) is null."""
    w = result.windowing
    return {
        "model": llm.name,
        "device": llm.runtime.profile.name,
        "driver": llm.runtime.driver,
        "dtype": llm.dtype,
        "kv_dtype": llm.kv_dtype,
        "activations": llm.activations,
        "perplexity": number(result.perplexity),
        "standard_error": number(result.standard_error),
        "nll": number(result.nll),
        "bits_per_byte": number(result.bits_per_byte),
        "tokens": result.tokens,
        "text_tokens": len(result.token_ids),
        "context": w.context,
        "stride": w.stride,
        "convention": w.convention,
        "bos": result.bos,
        "windows": result.windows,
        "tokens_run": result.tokens_run,
        "seconds": result.seconds,
        "tok_per_s": result.rate,
        "complete": result.complete,
    }


def number(value: float) -> float | None:
    return value if math.isfinite(value) else None

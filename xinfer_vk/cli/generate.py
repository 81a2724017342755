"""``xinfer-vk generate``: text from a prompt, streamed, with what it cost on the last line."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xinfer_vk.cli.progress import ProgressBar
from xinfer_vk.errors import UsageError

if TYPE_CHECKING:
    from xinfer_vk.engine.llm import LLM, GenerationResult, GenerationStream

INTERRUPTED = 130
DEFAULT_MAX_NEW_TOKENS = 256


def read_prompt(prompt: str | None, file: str | None) -> str:
    """The prompt's text: ``--prompt``, ``--file``, or standard input when neither is given.

    Raises :class:`UsageError` for a file that cannot be read or is not UTF-8, and for no prompt at all.
    """
    if prompt is not None and file is not None:
        raise UsageError("--prompt and --file were both given: use one of them")
    if prompt is not None and prompt != "-":
        return prompt
    where = "standard input" if file in (None, "-") else str(file)
    try:
        if where == "standard input":
            if sys.stdin is None or sys.stdin.isatty():
                raise UsageError("no prompt: give --prompt TEXT, --file FILE, or text on standard input")
            data = sys.stdin.buffer.read()
        else:
            data = Path(where).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the prompt from {where}: {error.strerror or error}") from error
    try:
        return data.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"the prompt from {where} is not UTF-8 (byte {error.start}): convert it first"
        ) from error


@click.command("generate")
@click.option(
    "--model",
    "-m",
    default="smollm2-135m",
    show_default=True,
    help="Directory in Hugging Face layout, .gguf file, hub name, or pulled model.",
)
@click.option("--prompt", "-p", help="The prompt; - reads standard input.")
@click.option("--file", "-f", type=click.Path(), help="Read the prompt from a file.")
@click.option("--system", "-s", help="System text for the chat template.")
@click.option("--raw", is_flag=True, help="Do not use the model's chat template.")
@click.option(
    "--max-new-tokens",
    "-n",
    type=click.IntRange(min=1),
    default=DEFAULT_MAX_NEW_TOKENS,
    show_default=True,
    help="Generate at most this many tokens.",
)
@click.option("--device", "-d", help="Device index, part of its name, or numpy. [default: the best there is]")
@click.option(
    "--kv-dtype",
    type=click.Choice(["f16", "f32"]),
    default="f16",
    show_default=True,
    help="Number format of the KV cache.",
)
@click.option(
    "--context",
    "-c",
    type=click.IntRange(min=1),
    help="Tokens the KV cache holds. [default: prompt + max new tokens]",
)
@click.option("--ignore-eos", is_flag=True, help="Do not stop at the end-of-sequence token.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of streaming text.")
@click.option("--quiet", "-q", is_flag=True, help="Print the text and nothing else.")
@click.option("--verbose", "-v", is_flag=True, help="Tell load time, TTFT, KV size and memory.")
def command(
    model: str,
    prompt: str | None,
    file: str | None,
    system: str | None,
    raw: bool,
    max_new_tokens: int,
    device: str | None,
    kv_dtype: str,
    context: int | None,
    ignore_eos: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Generate text greedily from a prompt.

    The text goes to standard output as it is made, notices and timing to standard error. Ctrl-C
    stops early and keeps what there is (exit code 130).
    """
    text = read_prompt(prompt, file)
    if not text.strip():
        raise UsageError("the prompt is empty: give some text with --prompt, --file or standard input")

    def tell(message: str) -> None:
        if not quiet:
            click.echo(message, err=True)

    with ProgressBar(enabled=False if quiet else None) as progress:
        from xinfer_vk.engine.llm import LLM

        with LLM(model, device=device, kv_dtype=kv_dtype, context=context, progress=progress) as llm:
            for notice in llm.notices:
                tell(notice)
            if verbose:
                tell(describe(llm))
            stream = llm.stream(
                text, max_new_tokens=max_new_tokens, system=system, raw=raw or None, ignore_eos=ignore_eos
            )
            run(stream, echo=not as_json, progress=progress)
            result = stream.result
            if as_json:
                click.echo(json.dumps(as_record(llm, result), ensure_ascii=False))
            if verbose:
                tell(describe_run(llm, result))
            tell(result.metrics.timing_line())
            if result.finish_reason == "interrupted":
                raise click.exceptions.Exit(INTERRUPTED)


def run(stream: GenerationStream, echo: bool, progress: ProgressBar) -> None:
    """Drive the stream to its end. Ctrl-C ends it after the step under way, a second one at once."""

    def interrupt(signum: int, frame: object) -> None:
        stream.cancel()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    out = sys.stdout
    if hasattr(out, "reconfigure"):
        out.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows ? and goes on
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        for piece in stream:
            if echo:
                out.write(piece)
                out.flush()
    finally:
        signal.signal(signal.SIGINT, before)
        progress.close()
        if echo:
            out.write("\n")
            out.flush()


def describe(llm: LLM) -> str:
    from xinfer_vk.engine.metrics import format_bytes, format_seconds

    return (
        f"model: {llm.name} ({llm.config.architecture}, {format_bytes(llm.weight_bytes)} of weights)\n"
        f"device: {llm.runtime.profile.name}\n"
        f"loaded in {format_seconds(llm.load_s)}"
    )


def describe_run(llm: LLM, result: GenerationResult) -> str:
    from xinfer_vk.cache import KV_BYTES
    from xinfer_vk.engine.metrics import format_bytes, format_seconds

    m, c = result.metrics, llm.config
    return (
        f"KV cache: {format_bytes(m.kv_bytes)} = 2 · {c.layers} layers · {llm.capacity} tokens · "
        f"{c.kv_heads} KV heads · {c.head_dim} head dim · {KV_BYTES[llm.kv_dtype]} bytes\n"
        f"TTFT: {format_seconds(m.ttft_s)}; {m.dispatches_per_token} dispatches and "
        f"{m.bytes_read_per_token:.0f} bytes read back per token; peak memory "
        f"{format_bytes(m.peak_host_bytes)} host, {format_bytes(m.device_bytes)} device"
    )


def as_record(llm: LLM, result: GenerationResult) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "model": llm.name,
        "device": llm.runtime.profile.name,
        "driver": llm.runtime.driver,
        "dtype": llm.dtype,
        "kv_dtype": llm.kv_dtype,
        "context": llm.capacity,
        "text": result.text,
        "token_ids": list(result.token_ids),
        "prompt_tokens": len(result.prompt_token_ids),
        "finish_reason": result.finish_reason,
        "metrics": result.metrics.as_dict(),
    }

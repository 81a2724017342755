"""``xinfer-vk generate``: text from one prompt, streamed, or from many as one batch."""

from __future__ import annotations

import dataclasses
import sys
import threading
from typing import TYPE_CHECKING, Any

import click

from xinfer_vk.cli.answer import AnswerWriter
from xinfer_vk.cli.interrupt import exit_code, interruptible
from xinfer_vk.cli.jsonl import OrderedWriter, PromptLine, check_output, read_prompts
from xinfer_vk.cli.options import (
    TEMPLATE_OPTION,
    model_options,
    params_from_options,
    sampling_options,
    template_args_from_options,
)
from xinfer_vk.cli.output import say, say_json, tell
from xinfer_vk.cli.progress import ProgressBar
from xinfer_vk.cli.report import (
    as_record,
    describe,
    describe_recommended,
    describe_run,
    logprob_table,
    recommends,
    speed_report,
)
from xinfer_vk.cli.same_file import refuse_inputs
from xinfer_vk.cli.source import check_unicode, read_prompt
from xinfer_vk.errors import UsageError
from xinfer_vk.sampling.params import DEFAULT_MAX_NEW_TOKENS
from xinfer_vk.text.thinking import Piece

if TYPE_CHECKING:
    from xinfer_vk.engine.llm import LLM, GenerationResult
    from xinfer_vk.sampling.params import SamplingParams


def gather_prompts(
    prompt: tuple[str, ...], file: str | None, prompts: str | None, keep_going: bool
) -> list[PromptLine]:
    """Every prompt the options name. With ``keep_going`` a bad line of the file is told and left out."""
    if sum((bool(prompt), file is not None, prompts is not None)) > 1:
        raise UsageError("--prompt, --file and --prompts exclude each other: use one of them")
    if prompts is not None:
        lines: list[PromptLine] = []
        for line in read_prompts(prompts):
            if isinstance(line, PromptLine):
                lines.append(line)
            elif keep_going:
                click.echo(f"left out: {line}", err=True)
            else:
                raise UsageError(f"{line} (--keep-going leaves such lines out)")
        if not lines:
            raise UsageError(f"{prompts}: there are no prompts in it")
        return lines
    texts = prompt or (read_prompt(file),)
    if "-" in texts:
        texts = tuple(read_prompt(None) if text == "-" else text for text in texts)
    for text in texts:
        if not text:  # the model says what white space alone is
            raise UsageError("the prompt is empty: give some text with --prompt, --file or standard input")
        check_unicode(text, "the prompt")
    return [PromptLine(f"prompt {i}", text, None, None, {}) for i, text in enumerate(texts, 1)]


@click.command("generate")
@model_options
@click.option("--prompt", "-p", multiple=True, help="The prompt; - reads standard input. May be repeated.")
@click.option("--file", "-f", type=click.Path(), help="Read the prompt from a file.")
@click.option(
    "--prompts",
    type=click.Path(),
    help='JSON lines: {"prompt": …, "system": …, "id": …, "temperature": …}; run as one batch.',
)
@click.option(
    "--output", "-o", type=click.Path(), help="Write results as JSON lines, in input order; - prints."
)
@click.option("--keep-going", is_flag=True, help="Leave out lines of --prompts that cannot be run.")
@click.option("--system", "-s", help="System text for the chat template.")
@click.option("--raw", is_flag=True, help="Do not use the model's chat template.")
@TEMPLATE_OPTION
@click.option(
    "--max-new-tokens",
    "-n",
    type=click.IntRange(min=1),
    default=DEFAULT_MAX_NEW_TOKENS,
    show_default=True,
    help="Generate at most this many tokens.",
)
@click.option(
    "--samples",
    "--n",
    "samples",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Samples of each prompt, which share its KV blocks.",
)
@click.option(
    "--context",
    "-c",
    type=click.IntRange(min=1),
    help="Tokens the KV cache holds of a sequence. [default: prompt + max new tokens]",
)
@click.option("--ignore-eos", is_flag=True, help="Do not stop at the end-of-sequence token.")
@sampling_options
@click.option("--logprobs", type=int, help="Log-probabilities of the tokens and of the N most likely.")
@click.option("--prompt-logprobs", is_flag=True, help="Log-probabilities of the prompt's tokens too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a result, and no stream.")
@click.option("--speed-report", is_flag=True, help="Print TTFT, TPOT (mean, p50, p99), PP and TG.")
@click.option("--quiet", "-q", is_flag=True, help="Print the text and nothing else.")
@click.option("--verbose", "-v", is_flag=True, help="Tell load time, TTFT, KV size and memory.")  # fmt: skip
def command(
    chosen: dict[str, Any],
    prompt: tuple[str, ...],
    file: str | None,
    prompts: str | None,
    output: str | None,
    keep_going: bool,
    system: str | None,
    raw: bool,
    template_arg: tuple[str, ...],
    max_new_tokens: int,
    samples: int,
    context: int | None,
    ignore_eos: bool,
    logprobs: int | None,
    prompt_logprobs: bool,
    as_json: bool,
    speed_report: bool,
    quiet: bool,
    verbose: bool,
    sampler: str,
    **options: Any,
) -> None:
    """Generate text from a prompt.

    The text goes to standard output as it is made, notices and timing to standard error. What a model thinks
    first is dim on a terminal, elsewhere between <think> and </think>; --json has it apart. The default is
    greedy; --temperature and the options after it sample. Several prompts (--prompt repeated, or
    --prompts) run as one batch, and each result is printed as it ends. Ctrl-C stops early and keeps
    what there is (exit code 130), and so does SIGTERM (143).
    """
    if output is not None:
        refuse_inputs(
            "--output", output, {"--prompts": prompts, "--file": file, "--model": str(chosen["model"])}
        )
        check_output(output)
    check_unicode(system or "", "the system text")
    template_args = template_args_from_options(template_arg)
    lines = gather_prompts(prompt, file, prompts, keep_going)
    show = Shown(as_json=as_json, quiet=quiet, verbose=verbose, speed=speed_report)
    fields: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "ignore_eos": ignore_eos,
        "logprobs": logprobs,
    }
    params_from_options({**options, "recommended": False}, **fields)  # a mistake is told before loading

    with ProgressBar(enabled=False if quiet else None) as progress:
        from xinfer_vk.engine.llm import LLM

        with LLM(
            **chosen,
            context=context,
            sampler=sampler,  # type: ignore[arg-type]
            progress=progress,
        ) as llm:  # fmt: skip
            for line in llm.notices:
                show.tell(line)
            params = params_from_options(options, llm.generation_config, **fields)
            if verbose:
                show.tell(describe(llm))
            if options["recommended"] and (verbose or not recommends(llm.generation_config)):
                show.tell(describe_recommended(llm, params))
            batch = Batch(
                llm,
                lines,
                params,
                raw=raw,
                system=system,
                template_args=template_args,
                prompt_logprobs=prompt_logprobs,
                samples=samples,
                keep_going=keep_going,
                named=prompts is not None or len(lines) > 1,
            )
            if len(batch.lines) == samples == 1 and output is None:
                result = run_one(batch, show, progress)
                interrupted = result.finish_reason == "interrupted"
            else:
                interrupted = run_batch(batch, show, output)
    if interrupted:
        raise click.exceptions.Exit(exit_code())


class Shown:
    """What is printed where: text and JSON to standard output, all else to standard error."""

    def __init__(self, *, as_json: bool, quiet: bool, verbose: bool, speed: bool) -> None:
        self.as_json, self.quiet, self.verbose, self.speed = as_json, quiet, verbose, speed

    def tell(self, message: str) -> None:
        if not self.quiet:
            tell(message)

    def costs(self, llm: LLM, result: GenerationResult) -> None:
        """After a result: log-probabilities, memory, speed, and the timing line last."""
        if (result.logprobs is not None or result.prompt_logprobs is not None) and not self.as_json:
            self.tell(logprob_table(llm, result))
        if self.verbose:
            self.tell(describe_run(llm, result))
        if self.speed:
            self.tell(speed_report(result))
        self.tell(result.metrics.timing_line())


class Batch:
    """The prompts as token ids with their parameters, checked one by one. With ``keep_going``, those that
    cannot be run are told and left out. ``named``: errors say which prompt it is."""

    def __init__(
        self,
        llm: LLM,
        lines: list[PromptLine],
        params: SamplingParams,
        *,
        raw: bool,
        system: str | None,
        template_args: dict[str, Any],
        prompt_logprobs: bool,
        samples: int,
        keep_going: bool,
        named: bool,
    ) -> None:
        self.llm, self.prompt_logprobs, self.samples = llm, prompt_logprobs, samples
        self.raw = raw or None  # None: as the model is
        self.lines: list[PromptLine] = []
        self.ids: list[list[int]] = []
        self.params: list[SamplingParams] = []
        for line in lines:
            try:
                chosen = params.replace(**line.fields) if line.fields else params
                chosen.check_vocabulary(llm.config.vocab_size)
                llm.check_prompt(line.prompt, self.raw)
                text_system = line.system if line.system is not None else system
                ids = llm.encode(line.prompt, system=text_system, raw=self.raw, template_args=template_args)
                llm.check_fits(ids, chosen)
            except UsageError as error:
                if not named:
                    raise
                if not keep_going:
                    raise UsageError(f"{line.where}: {error}") from error
                click.echo(f"left out: {line.where}: {error}", err=True)
                continue
            self.lines.append(line)
            self.ids.append(ids)
            self.params.append(chosen)
        if not self.lines:
            raise UsageError("no prompt is left to run")

    def record(self, result: GenerationResult) -> dict[str, Any]:
        line = self.lines[result.prompt]
        own = {} if line.id is None else {"id": line.id}
        return {**own, "prompt": line.prompt, **as_record(self.llm, result)}


def run_one(batch: Batch, show: Shown, progress: ProgressBar) -> GenerationResult:
    """One prompt, streamed. What there is of it when an error ends it is printed before the error."""
    reason = None  # why it ended, if the stream itself does not know
    stream = batch.llm.stream(
        batch.ids[0], batch.params[0], raw=batch.raw, prompt_logprobs=batch.prompt_logprobs
    )
    writer = AnswerWriter(sys.stdout, progress=progress)
    with stream:
        try:
            with interruptible(stream.cancel):
                for piece in stream:
                    if not show.as_json:
                        writer.write(piece)
        except BaseException as error:
            reason = "error" if isinstance(error, Exception) else "interrupted"
            raise
        finally:
            progress.close()
            result = stream.partial_result
            if reason is not None:
                result = dataclasses.replace(result, finish_reason=reason)
            if show.as_json and (reason is None or result.token_ids):
                say_json(batch.record(result))
            elif not show.as_json and (result.text or result.thinking):
                writer.end("\n")
    show.costs(batch.llm, result)
    return result


def run_batch(batch: Batch, show: Shown, output: str | None) -> bool:
    """All prompts at once; whether it was interrupted. Each result is printed, or written, as it ends."""
    writer = OrderedWriter(output) if output is not None else None
    stop, interrupted = threading.Event(), False
    as_json = show.as_json or writer is not None

    def finished(result: GenerationResult) -> None:
        nonlocal interrupted
        interrupted |= result.finish_reason == "interrupted"
        if writer is not None:
            writer.write(result.prompt * batch.samples + result.sample, batch.record(result))
        if writer is None and as_json:
            say_json(batch.record(result))
        elif writer is None:
            sample = f", sample {result.sample + 1}" if batch.samples > 1 else ""
            say(f"==> {batch.lines[result.prompt].where}{sample} <==")
            answer = AnswerWriter(sys.stdout)
            answer.write(Piece(result.thinking, thinking=True))
            answer.write(Piece(result.text))
            answer.end()
            say("\n")
        show.costs(batch.llm, result)

    try:
        with interruptible(stop.set):
            batch.llm.batch(
                batch.ids,
                batch.params,
                n=batch.samples,
                raw=batch.raw,
                prompt_logprobs=batch.prompt_logprobs,
                stop_event=stop,
                on_result=finished,
            )
    finally:
        if writer is not None:
            writer.close()
    return interrupted

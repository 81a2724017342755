"""``xinfer-vk generate``: text from one prompt, streamed, or from many as one batch."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import click

from xinfer_vk.cli.answer import AnswerWriter
from xinfer_vk.cli.interrupt import exit_code, interruptible
from xinfer_vk.cli.jsonl import PromptLine, ResultWriter, check_output, read_prompts, resume
from xinfer_vk.cli.options import (
    KV_MEMORY_OPTION,
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
from xinfer_vk.engine.metrics import FELT_S, format_rate, format_seconds
from xinfer_vk.errors import NumericError, UsageError, XinferError, parameter_words
from xinfer_vk.sampling.params import DEFAULT_MAX_NEW_TOKENS
from xinfer_vk.text.thinking import Piece

if TYPE_CHECKING:
    from xinfer_vk.engine.llm import LLM, GenerationResult
    from xinfer_vk.sampling.params import SamplingParams


def gather_prompts(
    prompt: tuple[str, ...], file: str | None, prompts: str | None, keep_going: bool
) -> tuple[list[PromptLine], int]:
    """Every prompt the options name, and how many lines of the file were left out: with ``keep_going``, bad
    ones, each named on standard error."""
    if sum((bool(prompt), file is not None, prompts is not None)) > 1:
        raise UsageError("--prompt, --file and --prompts exclude each other: use one of them")
    if prompts is not None:
        lines: list[PromptLine] = []
        left_out = 0
        for line in read_prompts(prompts):
            if isinstance(line, PromptLine):
                lines.append(line)
            elif keep_going:
                tell(f"left out: {line}")
                left_out += 1
            else:
                raise UsageError(f"{line} (--keep-going leaves such lines out)")
        if not lines:
            raise UsageError(f"{prompts}: contains no prompts")
        return lines, left_out
    texts = prompt or (read_prompt(file),)
    if "-" in texts:
        texts = tuple(read_prompt(None) if text == "-" else text for text in texts)
    for text in texts:
        if not text:  # the model says what white space alone is
            raise UsageError("the prompt is empty: give some text with --prompt, --file or standard input")
        check_unicode(text, "the prompt")
    return [PromptLine(f"prompt {i + 1}", text, None, None, {}, i) for i, text in enumerate(texts)], 0


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
    "--output",
    "-o",
    type=click.Path(),
    help='Write each result as a line of JSON when it ends ("index": position in the input). - prints.',
)
@click.option("--ordered", is_flag=True, help="Write the results in --output in input order.")
@click.option(
    "--resume", "resumes", is_flag=True, help="Run only prompts that --output has no result of, and append."
)
@click.option("--keep-going", is_flag=True, help="Skip prompts that fail; exit with code 1 if any did.")
@click.option("--system", "-s", help="System message.")
@click.option("--raw", is_flag=True, help="Do not use the chat template.")
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
    help="Samples per prompt; they share its KV blocks.",
)
@click.option(
    "--context",
    "-c",
    type=click.IntRange(min=1),
    help="The most tokens of a sequence. [default: what the model was made for, if memory holds it]",
)
@KV_MEMORY_OPTION
@click.option("--ignore-eos", is_flag=True, help="Do not stop at the end-of-sequence token.")
@sampling_options
@click.option("--logprobs", type=int, help="Report log-probabilities of each token and of the N most likely.")
@click.option("--prompt-logprobs", is_flag=True, help="Report log-probabilities of the prompt tokens.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per result instead of the text.")
@click.option("--speed-report", is_flag=True, help="Print TTFT, TPOT (mean, p50, p99), PP and TG.")
@click.option("--quiet", "-q", is_flag=True, help="Print only the text.")
@click.option("--verbose", "-v", is_flag=True, help="Print load time, TTFT, KV cache size and memory.")
def command(
    chosen: dict[str, Any],
    prompt: tuple[str, ...],
    file: str | None,
    prompts: str | None,
    output: str | None,
    ordered: bool,
    resumes: bool,
    keep_going: bool,
    system: str | None,
    raw: bool,
    template_arg: tuple[str, ...],
    max_new_tokens: int,
    samples: int,
    context: int | None,
    kv_memory: int | float | None,
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

    The text streams to standard output; notices and timing go to standard error. A model's thinking is dim on
    a terminal, and between <think> and </think> elsewhere; --json reports it separately. The default is
    greedy decoding; --temperature and the options after it control sampling. Several prompts (--prompt
    repeated, or --prompts) run as one batch, and each result is printed, or written to --output, when it
    ends. Ctrl-C (exit code 130) and SIGTERM (143) stop early and keep the text so far.
    """
    if output is not None:
        refuse_inputs(
            "--output", output, {"--prompts": prompts, "--file": file, "--model": str(chosen["model"])}
        )
        check_output(output)
    elif ordered or resumes:
        raise UsageError(f"--{'ordered' if ordered else 'resume'} needs --output FILE")
    check_unicode(system or "", "the system text")
    template_args = template_args_from_options(template_arg)
    lines, left_out = gather_prompts(prompt, file, prompts, keep_going)
    several = prompts is not None or len(lines) > 1
    show = Shown(as_json=as_json, quiet=quiet, verbose=verbose, speed=speed_report)
    fields: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "ignore_eos": ignore_eos,
        "logprobs": logprobs,
    }
    params_from_options({**options, "recommended": False}, **fields)  # a mistake is told before loading
    asked = len(lines) + left_out
    if output is not None and resumes:
        lines = resume(output, lines, samples)
        if len(lines) < asked - left_out:
            show.tell(f"{output} has the results of {asked - left_out - len(lines)} of {asked} prompts")
        if not lines:
            check_missing(left_out, asked)
            return

    with ProgressBar(enabled=False if quiet else None) as progress:
        from xinfer_vk.engine.llm import LLM

        with LLM(
            **chosen,
            context=context,
            kv_memory=kv_memory,
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
                named=several,
            )
            left_out += len(lines) - len(batch.lines)
            if len(batch.lines) == samples == 1 and output is None:
                result = run_one(batch, show, progress)
                interrupted = result.finish_reason == "interrupted"
            else:
                writer = None
                if output is not None:
                    numbers = [batch.number(i, s) for i in range(len(batch.lines)) for s in range(samples)]
                    writer = ResultWriter(output, ordered=ordered, numbers=numbers, resumed=resumes)
                run = BatchRun(batch, show, writer, progress)
                run.run()
                interrupted = run.interrupted
                left_out += run.failed
    if interrupted:
        raise click.exceptions.Exit(exit_code())
    check_missing(left_out, asked)


def check_missing(missing: int, asked: int) -> None:
    """End with exit code 1 if prompts have no result."""
    if missing:
        raise XinferError(f"{missing} of {asked} prompts have no result: the messages above name them")


class Shown:
    """What is printed where: text and JSON to standard output, all else to standard error."""

    def __init__(self, *, as_json: bool, quiet: bool, verbose: bool, speed: bool) -> None:
        self.as_json, self.quiet, self.verbose, self.speed = as_json, quiet, verbose, speed

    def tell(self, message: str) -> None:
        if not self.quiet:
            tell(message)

    def costs(self, llm: LLM, result: GenerationResult, one: bool = True) -> None:
        """After a result: log-probabilities, memory, speed, and the timing line last. ``one``: it is the only
        one; of several the timing lines are for --verbose."""
        if (result.logprobs is not None or result.prompt_logprobs is not None) and not self.as_json:
            self.tell(logprob_table(llm, result))
        if self.verbose:
            self.tell(describe_run(llm, result))
        if self.speed:
            self.tell(speed_report(result))
        if one or self.verbose:
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
        self.keep_going, self.named = keep_going, named
        self.lines: list[PromptLine] = []
        self.ids: list[list[int]] = []
        self.params: list[SamplingParams] = []
        for line in lines:
            try:
                params.check_vocabulary(llm.config.vocab_size)
                with parameter_words():  # those of the prompts' file
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
                tell(f"left out: {line.where}: {error}")
                continue
            self.lines.append(line)
            self.ids.append(ids)
            self.params.append(chosen)
        if not self.lines:
            raise UsageError("no prompts left to run")

    @property
    def has_logprobs(self) -> bool:
        return self.prompt_logprobs or any(p.logprobs is not None for p in self.params)

    def record(self, result: GenerationResult) -> dict[str, Any]:
        line = self.lines[result.prompt]
        own = {} if line.id is None else {"id": line.id}
        return {"index": line.index, **own, "prompt": line.prompt, **as_record(self.llm, result)}

    def number(self, prompt: int, sample: int) -> int:
        """The place of a result among those of all prompts and samples."""
        return self.lines[prompt].index * self.samples + sample


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


class BatchRun:
    """All prompts at once. Each result is printed, or written, as it ends; a bar shows how far they are.

    A prompt that the model has no number for (:class:`NumericError`) ends alone. The error names it, and ends
    the run after the others unless ``batch.keep_going``: :attr:`failed` counts those.
    """

    def __init__(self, batch: Batch, show: Shown, writer: ResultWriter | None, progress: ProgressBar) -> None:
        self._batch, self._show, self._writer, self._progress = batch, show, writer, progress
        self._stop = threading.Event()
        self._ended: set[tuple[int, int]] = set()  # (prompt, sample)
        self._tokens = 0  # generated, of those
        self._read = 0
        self._compiled_before = batch.llm.compile_s
        self.interrupted = False
        self._errors: dict[int, NumericError] = {}  # by prompt

    @property
    def failed(self) -> int:
        """Prompts without a result."""
        return len(self._errors)

    def run(self) -> None:
        batch = self._batch
        began = time.perf_counter()
        try:
            with (
                interruptible(self._stop.set),
                self._progress.batch(len(batch.lines) * batch.samples) as self._bar,
            ):
                self._run()
        finally:
            if self._writer is not None:
                self._writer.close()
        self._show.tell(self._total(time.perf_counter() - began, self._compile_s()))

    def _compile_s(self) -> float:
        return max(0.0, self._batch.llm.compile_s - self._compiled_before)

    def _run(self) -> None:
        batch = self._batch
        unfinished: list[GenerationResult] = []

        def finished(result: GenerationResult) -> None:
            if isinstance(result.error, NumericError):
                self._fail(result, result.error)
            elif result.finish_reason == "error":
                unfinished.append(result)
            else:
                self._finish(result)

        def stepped(tokens: int) -> None:
            self._bar.compile_s = self._compile_s()
            self._bar.update(tokens)

        try:
            batch.llm.batch(
                batch.ids,
                batch.params,
                n=batch.samples,
                raw=batch.raw,
                prompt_logprobs=batch.prompt_logprobs,
                stop_event=self._stop,
                on_result=finished,
                on_step=stepped,
            )
        except NumericError:
            if not self._errors and not self._stop.is_set():
                raise
            if self._errors and not batch.keep_going:
                prompt = min(self._errors)
                raise NumericError(self._named(prompt)) from self._errors[prompt]
        except BaseException:
            for result in unfinished:
                if result.token_ids:  # what there is of them
                    self._finish(result)
            raise

    def _named(self, prompt: int) -> str:
        """Why a prompt has no result, and which it is."""
        error = self._errors[prompt]
        return f"{self._batch.lines[prompt].where}: {error}" if self._batch.named else str(error)

    def _fail(self, result: GenerationResult, error: NumericError) -> None:
        if self._stop.is_set():
            self._finish(dataclasses.replace(result, finish_reason="interrupted"))
            return
        first = result.prompt not in self._errors  # of its samples
        self._errors.setdefault(result.prompt, error)
        if not self._batch.keep_going:
            self._finish(result)
            return
        self._finish(result, error=str(error))
        if first:
            with self._bar.hidden():
                tell(f"left out: {self._named(result.prompt)}")

    def _finish(self, result: GenerationResult, **more: str) -> None:
        """Print or write a result; ``more`` goes into its record."""
        batch, show, writer = self._batch, self._show, self._writer
        self._ended.add((result.prompt, result.sample))
        self._tokens += len(result.token_ids)
        self._read += result.metrics.prefilled_tokens
        self.interrupted |= result.finish_reason == "interrupted"
        if writer is not None:
            writer.write(batch.number(result.prompt, result.sample), {**batch.record(result), **more})
        with self._bar.hidden() if self._prints else contextlib.nullcontext():
            if writer is None and show.as_json:
                say_json({**batch.record(result), **more})
            elif writer is None:
                self._print(result)
            show.costs(batch.llm, result, one=False)
        self._bar.update(done=len(self._ended))

    @property
    def _prints(self) -> bool:
        """Whether a result prints anything."""
        show = self._show
        return self._writer is None or show.verbose or show.speed or self._batch.has_logprobs

    def _print(self, result: GenerationResult) -> None:
        sample = f", sample {result.sample + 1}" if self._batch.samples > 1 else ""
        say(f"==> {self._batch.lines[result.prompt].where}{sample} <==")
        answer = AnswerWriter(sys.stdout)
        answer.write(Piece(result.thinking, thinking=True))
        answer.write(Piece(result.text))
        answer.end("\n\n")

    def _total(self, wall_s: float, compile_s: float) -> str:
        """``20 prompts in 12.3 s: 740 tok read, 1280 tok generated (104 tok/s)``"""
        prompts = len({prompt for prompt, _ in self._ended})
        counted = "1 prompt" if prompts == 1 else f"{prompts} prompts"
        samples = f", {self._batch.samples} samples each," if self._batch.samples > 1 else ""
        compiling = f" and {format_seconds(compile_s)} of compiling" if compile_s >= FELT_S else ""
        run_s = max(wall_s - compile_s, 1e-9)
        return (
            f"{counted}{samples} in {format_seconds(run_s)}{compiling}: {self._read} tok read, "
            f"{self._tokens} tok generated ({format_rate(self._tokens / run_s)} tok/s)"
        )

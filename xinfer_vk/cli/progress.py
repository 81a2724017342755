"""Progress bars on standard error: shown on a terminal, silent in a pipe."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from xinfer_vk.cli.output import wrapped
from xinfer_vk.engine.metrics import format_rate

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import ProgressColumn, TaskID

SHOW_AFTER_S = 0.3  # what is done sooner needs no bar
BATCH_BAR_COLUMNS = 24  # leaves room for a stage's name on 80 columns


class ProgressBar:
    """A callable ``(stage, done, total)`` that draws one bar for the stage under way.

    The bar appears only for work that has taken a while, and is gone when the stage ends. Between
    :meth:`hold` and :meth:`release` an answer is being written to the terminal, and no bar appears at all.
    :meth:`batch` draws a bar of its own, which stages within it do not replace.
    """

    def __init__(self, enabled: bool | None = None) -> None:
        self._enabled = sys.stderr.isatty() if enabled is None else enabled
        self._stage, self._since = "", 0.0
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._held = False
        self._batch: BatchProgress | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        if not self._enabled or self._held:
            return
        if self._batch is not None:
            self._batch.stage = f"{stage} {done}/{total}" if done < total else ""
            self._batch.update()
            return
        if stage != self._stage:
            self.close()
            self._stage, self._since = stage, time.monotonic()
        if done >= total:
            self.close()
            return
        if self._bar is None and time.monotonic() - self._since >= SHOW_AFTER_S:
            self._open(total)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total)

    def _open(self, total: int) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        many = total >= 10_000  # bytes, say
        self._bar = rich_bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn() if many else MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self._bar.start()
        self._task = self._bar.add_task(self._stage, total=total)

    @contextlib.contextmanager
    def batch(self, total: int) -> Iterator[BatchProgress]:
        """A bar for ``total`` prompts, until the block ends."""
        self.close()
        self._batch = BatchProgress(total, self._enabled)
        try:
            yield self._batch
        finally:
            self._batch.close()
            self._batch = None

    def hold(self) -> None:
        """No bar from now on: text that must not be drawn over is on the terminal."""
        if not self._held:
            self.close()
            self._held = True

    def release(self) -> None:
        """The text is complete, and the cursor is at the start of a line."""
        self._held = False

    def tell(self, message: str) -> None:
        """Print a line to standard error, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(message, markup=False, highlight=False)
        else:
            print(wrapped(message, sys.stderr), file=sys.stderr)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar, self._task, self._stage = None, None, ""

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


class BatchProgress:
    """One bar for a whole batch: results and their number, tokens a second of all prompts together, and the
    time left. ``stage``: what the program does instead of generating, such as compiling."""

    def __init__(self, total: int, enabled: bool = True) -> None:
        self.total, self.done, self.tokens, self.stage = total, 0, 0, ""
        self.compile_s = 0.0  # of the time so far, which counts in no rate
        self._began = time.monotonic()
        self._bar: RichProgress | None = None
        if enabled:
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

            self._bar = rich_bar(
                TextColumn("{task.description}"),
                BarColumn(BATCH_BAR_COLUMNS),
                MofNCompleteColumn(),
                TextColumn("{task.fields[speed]}"),
            )
            self._task = self._bar.add_task("generating", total=total, speed="")
            self._bar.start()

    def update(self, tokens: int | None = None, done: int | None = None) -> None:
        """``tokens`` generated so far, ``done`` prompts."""
        self.tokens = self.tokens if tokens is None else tokens
        self.done = self.done if done is None else done
        if self._bar is not None:
            self._bar.update(
                self._task,
                completed=self.done,
                description=self.stage or "generating",
                speed=batch_speed(
                    self.tokens, self.done, self.total, time.monotonic() - self._began - self.compile_s
                ),
            )

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """The bar is off the screen within it, so that results can be printed."""
        if self._bar is None:
            yield
            return
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.start()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def batch_speed(tokens: int, done: int, total: int, elapsed_s: float) -> str:
    """``104 tok/s, 0:12 left``; the time left is known once a prompt is done."""
    if not tokens or elapsed_s <= 0:
        return ""
    rate = f"{format_rate(tokens / elapsed_s)} tok/s"
    if not done or done == total:
        return rate
    minutes, seconds = divmod(round(elapsed_s / done * (total - done)), 60)
    hours, minutes = divmod(minutes, 60)
    left = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
    return f"{rate}, {left} left"


def rich_bar(*columns: ProgressColumn) -> RichProgress:
    """A bar on standard error that leaves nothing behind, and leaves the program's streams alone."""
    from rich.console import Console
    from rich.progress import Progress

    return Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )

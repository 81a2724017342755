"""Progress bars on standard error: shown on a terminal, silent in a pipe."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

SHOW_AFTER_S = 0.3  # what is done sooner needs no bar


class ProgressBar:
    """A callable ``(stage, done, total)`` that draws one bar for the stage under way.

    The bar appears only for work that has taken a while, and is gone when the stage ends, so that
    the text on the terminal is never mixed with it.
    """

    def __init__(self, enabled: bool | None = None) -> None:
        self._enabled = sys.stderr.isatty() if enabled is None else enabled
        self._stage, self._since = "", 0.0
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        if not self._enabled:
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
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._bar.start()
        self._task = self._bar.add_task(self._stage, total=total)

    def tell(self, message: str) -> None:
        """Print a line to standard error, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(message, markup=False, highlight=False)
        else:
            print(message, file=sys.stderr)

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

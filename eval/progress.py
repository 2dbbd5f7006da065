"""Telling whoever waits what is being measured, and how far it has come."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

__all__ = ["ProgressBar", "progress_bar", "timed_lines"]


def timed_lines(console: Console | None) -> Callable[[str], None]:
    """A function that prints a line with the seconds since now before it; it prints nothing without a console."""
    began = time.perf_counter()

    def say(what: str) -> None:
        if console is not None:
            console.print(f"{time.perf_counter() - began:6.1f} s  {what}", highlight=False, style="dim")

    return say


class ProgressBar:
    """A bar on standard error; where that is no terminal, a line for each step on a console. See `progress_bar`."""

    def __init__(self, bar: Progress, task: TaskID, log: Console) -> None:
        self._bar, self._task, self._log = bar, task, log

    def step(self, what: str) -> None:
        """Say what comes next."""
        self._bar.update(self._task, description=what)
        if not self._bar.console.is_terminal:
            self._log.print(f"{what} …", style="dim", highlight=False)

    def expect(self, total: int | None) -> None:
        """Start again from zero, with so many units of work ahead; None if nobody knows."""
        self._bar.update(self._task, total=total, completed=0)

    def advance(self) -> None:
        """One unit of work is done."""
        self._bar.advance(self._task)


@contextmanager
def progress_bar(log: Console, width: int) -> Iterator[ProgressBar]:
    """Show a progress bar on standard error.

    Args:
        log: where the steps are listed if standard error is not a terminal.
        width: columns for the description of a step.
    """
    columns = (TextColumn(f"{{task.description:{width}}}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
    # Standard error as it is now: while lm-eval runs, `sys.stderr` is another file, which keeps its output away.
    shown = Console(file=sys.stderr, force_terminal=log.is_terminal or None)
    with Progress(*columns, TimeRemainingColumn(), console=shown, transient=True) as bar:
        yield ProgressBar(bar, bar.add_task("", total=None), log)

"""Progress of long measurements: the current step and how much is done, on a terminal as a bar, in a log as lines.

There is no estimate of the time left: steps differ by more than a factor of ten, and a guess was off by minutes.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from cuvee.codec.learning.progress import listening

__all__ = ["LINE_SECONDS", "ProgressBar", "in_words", "progress_bar"]

LINE_SECONDS = 30.0  # between two lines of a log
TICK = 1.0  # seconds between two updates


class ProgressBar:
    """The current measurement, and how many are done. See `progress_bar`."""

    def __init__(self, bar: Progress, task: TaskID, log: Console) -> None:
        self._bar, self._task, self._log = bar, task, log
        self._done = self._total = 0
        self._what = self._part = ""
        self._began = time.monotonic()
        self._line: float | None = None  # time of the last line

    def expect(self, steps: int) -> None:
        """Count so many more steps as ahead; a negative number takes some back."""
        self._total += steps
        self._bar.update(self._task, total=self._total)

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Run one of the expected steps. `tracked` work inside shows as a part of it."""
        self._what, self._part = what, ""
        if self._line is None:
            self.show()
        with listening(self._listen):
            yield
        self.skip()

    def skip(self) -> None:
        """Count an expected step that is not needed as done."""
        self._done += 1
        self._bar.advance(self._task)

    def tell(self, part: str) -> None:
        """Name the current part of the step."""
        self._part = part

    def say(self, line: str) -> None:
        """Print a line immediately, on a terminal above the bar."""
        console = self._bar.console if self._bar.console.is_terminal else self._log
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    def show(self) -> None:
        """Update the bar, or print a line if half a minute has passed."""
        now = time.monotonic()
        part = f" ({self._part})" if self._part else ""
        self._bar.update(self._task, description=self._what + part)
        if self._bar.console.is_terminal or (self._line is not None and now - self._line < LINE_SECONDS):
            return
        self._line = now
        counted = f"{self._done} of {self._total} steps done" if self._total else ""
        state = ", ".join(filter(None, [self._part, counted]))
        line = f"{in_words(now - self._began):>7}  {self._what}" + (f" ({state})" if state else "")
        self._log.print(line, style="dim", highlight=False, markup=False)

    def _listen(self, what: str, done: int, total: int) -> None:
        self._part = f"{what}: {done} of {total}"


@contextmanager
def progress_bar(log: Console, width: int) -> Iterator[ProgressBar]:
    """Show a progress bar on standard error.

    Args:
        log: for a line every half minute if standard error is not a terminal.
        width: columns for the description of a step.
    """
    columns = (TextColumn(f"{{task.description:{width}}}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
    # The current standard error: while lm-eval runs, `sys.stderr` is another file that hides its output.
    shown = Console(file=sys.stderr, force_terminal=log.is_terminal or None, quiet=log.quiet)
    lines = Console(file=log.file, width=log.width, quiet=log.quiet)
    over = threading.Event()
    with Progress(*columns, console=shown, transient=True) as bar:
        progress = ProgressBar(bar, bar.add_task("", total=None), lines)

        def keep_showing() -> None:
            while not over.wait(TICK):
                progress.show()

        # A separate thread, because a step may take minutes in a single call into a library.
        thread = threading.Thread(target=keep_showing, name="progress", daemon=True)
        thread.start()
        try:
            yield progress
        finally:
            over.set()
            thread.join()


def in_words(seconds: float) -> str:
    """Write a duration as `45 s`, `12 min` or `1 h 05`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d}"

"""Progress of long measurements: a line at the beginning of each step, and within long ones, with how much is done.

There is no estimate of the time left: steps differ by more than a factor of ten, and a guess was off by minutes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

__all__ = ["StepLog", "in_words"]

_SILENCE = 30.0  # seconds between lines within a step


class StepLog:
    """Lists the steps of a run on a console.

    Example:
        >>> log = StepLog(Console())
        >>> log.expect(2)
        >>> with log.step("learning"):
        ...     pass
            0 s  1 of 2: learning
    """

    def __init__(self, console: Console) -> None:
        # Its file is kept: while lm-eval runs, `sys.stderr` is another file that hides its output.
        self._console = Console(file=console.file, width=console.width, quiet=console.quiet)
        self._done = self._total = 0
        self._began = self._shown = time.monotonic()
        self._step = ""

    def expect(self, steps: int) -> None:
        """Add to the number of steps that are expected."""
        self._total += steps

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Run one of the expected steps."""
        self._done += 1
        self._step = what
        self._print()
        yield

    def within(self, done: str) -> None:
        """Say how far the step is, such as "8 of 24 sequences", unless there was a line less than 30 seconds ago."""
        if time.monotonic() - self._shown >= _SILENCE:
            self._print(f", {done}")

    def _print(self, done: str = "") -> None:
        """Print one line."""
        self._shown = time.monotonic()
        line = f"{in_words(self._shown - self._began):>7}  {self._done} of {self._total}: {self._step}{done}"
        self._console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)

    def skip(self) -> None:
        """Count an expected step that is not needed as done."""
        self._done += 1


def in_words(seconds: float) -> str:
    """Write a duration as `45 s`, `12 min` or `1 h 05`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d}"

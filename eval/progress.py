"""Progress of long measurements: the current step, how much is done, and the estimated end.

plan: units of work by kind, with a guess of the seconds per unit of each kind
  |
step … step … step --seconds of each--> seconds left = units left x (mean of their kind, else the guess, scaled)
  |
  +--> a terminal: a bar on standard error        elsewhere: a line every half minute
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from cuvee.codec.learning.progress import listening

__all__ = ["LINE_SECONDS", "Plan", "ProgressBar", "in_words", "progress_bar", "timed_lines"]

LINE_SECONDS = 30.0  # between two lines of a log
TICK = 1.0  # seconds between two updates
_LEAST_SHARE = 0.02  # of a step that must be done before its own pace predicts its end
_SMOOTHING = 20.0  # seconds over which a new estimate replaces the last one, because single estimates swing


def timed_lines(console: Console | None) -> Callable[[str], None]:
    """Return a function that prints a line after the seconds since now; without a console it prints nothing."""
    began = time.perf_counter()

    def say(what: str) -> None:
        if console is not None:
            console.print(f"{time.perf_counter() - began:6.1f} s  {what}", highlight=False, style="dim")

    return say


@dataclass
class Plan:
    """Work ahead, by kind, and an estimate of the seconds it takes.

    Attributes:
        guess: the cost of a unit of each kind. Only the ratios matter.
        left: units of each kind that have not begun.
        taken: seconds of the units that are finished, by kind.
    """

    guess: Mapping[str, float]
    left: dict[str, int] = field(default_factory=dict)
    taken: dict[str, list[float]] = field(default_factory=dict)

    def seconds_of(self, kind: str) -> float | None:
        """Estimate the next unit of a kind; None while nothing has been timed."""
        own = self.taken.get(kind)
        if own:
            return sum(own) / len(own)
        guessed = sum(self.guess[k] * len(seconds) for k, seconds in self.taken.items())
        return self.guess[kind] * sum(map(sum, self.taken.values())) / guessed if guessed else None

    def seconds_left(self) -> float | None:
        """Estimate all units that have not begun; None while nothing has been timed."""
        each = [(count, self.seconds_of(kind)) for kind, count in self.left.items() if count]
        return None if any(s is None for _, s in each) else sum(count * (s or 0.0) for count, s in each)


class ProgressBar:
    """The current measurement and the estimated end of all of them. See `progress_bar`."""

    def __init__(self, bar: Progress, task: TaskID, log: Console) -> None:
        self._bar, self._task, self._log = bar, task, log
        self._plan = Plan({})
        self._done = self._total = 0
        self._what = self._part = ""
        self._kind: str | None = None
        self._share = 0.0  # of the current part of the step that is done
        self._began = self._step_began = self._part_began = time.monotonic()
        self._part_name = ""
        self._known: tuple[float, float] | None = None  # time of the last estimate, and its seconds left
        self._line: float | None = None  # time of the last line
        self._said: float | None = None  # time of the last line of figures

    def expect(self, plan: Plan) -> None:
        """Begin a piece of work with known units. Earlier steps do not count."""
        self._plan, self._done, self._total, self._known = plan, 0, sum(plan.left.values()), None
        self._bar.update(self._task, total=self._total, completed=0)

    @contextmanager
    def step(self, what: str, kind: str | None = None) -> Iterator[None]:
        """Run a step, which is a unit of the plan if it has a kind.

        The estimate includes the progress of `tracked` work inside.
        """
        self._what, self._part, self._part_name, self._kind, self._share = what, "", "", kind, 0.0
        self._step_began = self._part_began = time.monotonic()
        if kind is not None:
            self._plan.left[kind] -= 1
        if self._line is None:
            self.show()
        with listening(self._listen):
            yield
        if kind is not None:
            self._plan.taken.setdefault(kind, []).append(time.monotonic() - self._step_began)
            self._finish_unit()
        self._kind = None

    def amend(self, left: Mapping[str, int]) -> None:
        """Correct the number of units left of some kinds."""
        self._total += sum(count - self._plan.left[kind] for kind, count in left.items())
        self._plan.left.update(left)
        self._bar.update(self._task, total=self._total)

    def skip(self, kind: str) -> None:
        """Count a unit of the plan that is not needed."""
        self._plan.left[kind] -= 1
        self._finish_unit()

    def tell(self, part: str) -> None:
        """Name the current part of the step."""
        self._part = part

    def say_now_and_then(self, line: str) -> None:
        """Print a line of figures, on a terminal above the bar: the first immediately, then one every half minute."""
        now = time.monotonic()
        if line and (self._said is None or now - self._said >= LINE_SECONDS):
            self._said = now
            self.say(line)

    def say(self, line: str) -> None:
        """Print a line immediately, on a terminal above the bar."""
        console = self._bar.console if self._bar.console.is_terminal else self._log
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    def show(self) -> None:
        """Update the bar, or print a line if half a minute has passed."""
        now = time.monotonic()
        left = self.seconds_left()
        if self._known is not None:
            since = now - self._known[0]
            expected = max(self._known[1] - since, 0.0)
            # While the pace of a new part is unknown, the last estimate counts down.
            left = expected if left is None else expected + (left - expected) * min(since / _SMOOTHING, 1.0)
        if left is not None:
            self._known = now, left
        until = "" if left is None else f"about {in_words(left)} left"
        part = f" ({self._part})" if self._part else ""
        self._bar.update(self._task, description=self._what + part, left=until)
        if self._bar.console.is_terminal or (self._line is not None and now - self._line < LINE_SECONDS):
            return
        self._line = now
        counted = f"{self._done} of {self._total} done" if self._total else ""
        state = ", ".join(filter(None, [self._part, counted, until]))
        line = f"{in_words(now - self._began):>7}  {self._what}" + (f" ({state})" if state else "")
        self._log.print(line, style="dim", highlight=False, markup=False)

    def seconds_left(self) -> float | None:
        """Estimate the seconds until everything is done; None while nothing has been timed."""
        ahead, spent = self._plan.seconds_left(), time.monotonic() - self._step_began
        if self._kind is None:
            return ahead if self._total else None
        usual = self._plan.seconds_of(self._kind)
        if self._share >= _LEAST_SHARE:
            of_part = time.monotonic() - self._part_began
            rest = of_part / self._share - of_part
            if usual is not None:  # other parts may follow this one
                rest = max(rest, usual - spent)
            if ahead is None and usual is None:  # the first unit of all: its own pace is all there is
                per_guess = (spent + rest) / self._plan.guess[self._kind]
                ahead = per_guess * sum(self._plan.guess[kind] * count for kind, count in self._plan.left.items())
        elif usual is not None:
            rest = max(usual - spent, 0.0)
        else:
            return None
        return None if ahead is None else ahead + rest

    def _listen(self, what: str, done: int, total: int) -> None:
        if what != self._part_name:  # each part has its own pace
            self._part_name, self._part_began = what, time.monotonic()
        self._part = f"{what}: {done} of {total}"
        self._share = done / total if self._kind is not None else 0.0

    def _finish_unit(self) -> None:
        self._done += 1
        self._bar.advance(self._task)


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
    with Progress(*columns, TextColumn("{task.fields[left]}"), console=shown, transient=True) as bar:
        progress = ProgressBar(bar, bar.add_task("", total=None, left=""), lines)

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

"""Progress of long work: a bar on a terminal, lines in a log, or calls of a listener."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from rich.console import Console
from rich.progress import track

T = TypeVar("T")
PROGRESS_LINES = 10  # lines per task in a log file
_LISTENER: ContextVar[Callable[[str, int, int], None] | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Callable[[str, int, int], None]) -> Iterator[None]:
    """Within this block, call `listener(what, done, total)` for `tracked` work instead of showing progress."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def tracked(batches: Sequence[T], what: str, progress: bool) -> Iterator[T]:
    """Yield the batches and show progress: a bar on a terminal, else a line per tenth (in a log file)."""
    if (listener := _LISTENER.get()) is not None:
        for number, batch in enumerate(batches):
            listener(what, number, len(batches))
            yield batch
        return
    console = Console(file=sys.stderr)
    if progress and console.is_terminal:
        yield from track(batches, what, console=console, transient=True)
        return
    began, lines = time.monotonic(), 0
    for number, batch in enumerate(batches):
        yield batch
        done = (number + 1) / len(batches)
        if progress and int(done * PROGRESS_LINES) > lines:
            lines = int(done * PROGRESS_LINES)
            left = (time.monotonic() - began) * (1 / done - 1)
            console.print(f"{what}: {number + 1} of {len(batches)}, {left:.0f} s left", highlight=False)

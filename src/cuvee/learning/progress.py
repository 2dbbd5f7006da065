"""Progress of long work: a bar on a terminal, or lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track

T = TypeVar("T")
PROGRESS_LINES = 10  # lines per task in a log file


def tracked(batches: Sequence[T], what: str, progress: bool) -> Iterator[T]:
    """Yield the batches and show progress: a bar on a terminal, else a line per tenth (in a log file)."""
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

"""What commands print, JSON for programs and tables for people, and the exit code of a run that is told to stop."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["counted", "make_console", "make_table", "print_json", "stoppable"]

_FILE_WIDTH = 120


def make_console(stderr: bool = False) -> Console:
    """Standard output, or standard error."""
    from rich.console import Console

    console = Console(stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _FILE_WIDTH  # a file or a pipe has no width; at rich's 80 columns tables lose their figures
    return console


def make_table(*columns: str) -> Table:
    """An empty table. Narrow enough for 80 columns; where it is not, the first column gives way."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold", no_wrap=bool(index))
    return table


def counted(number: int, what: str) -> str:
    """`1 chunk`, `2 chunks`."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def print_json(data: Any) -> None:
    """To standard output."""
    print(json.dumps(data, indent=2, allow_nan=False))


@contextmanager
def stoppable() -> Iterator[None]:
    """End with 128 + signal, as shells expect, if a run inside is told to stop. The run has said how to go on."""
    from cuvee.eval.runs import Interrupted

    try:
        yield
    except Interrupted as stopped:
        raise typer.Exit(128 + stopped.number) from None

"""Output of commands, as JSON for programs and as tables for people."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["chunk_count", "make_console", "make_table", "print_json"]

_FILE_WIDTH = 120


def make_console(stderr: bool = False) -> Console:
    """Make a console for standard output, or for standard error."""
    from rich.console import Console

    console = Console(stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _FILE_WIDTH  # a file or a pipe has no width, and rich's default of 80 columns cuts figures off
    return console


def make_table(*columns: str) -> Table:
    """Make an empty table that fits into 80 columns; if it does not, the first column breaks its lines."""
    from cuvee.codec.support.terminal_table import terminal_table

    return terminal_table("", *columns, tight=True)


def chunk_count(number: int) -> str:
    """Write `1 chunk`, `2 chunks`."""
    return f"{number} chunk" + ("" if number == 1 else "s")


def print_json(data: Any) -> None:
    """Print JSON to standard output."""
    print(json.dumps(data, indent=2, allow_nan=False))

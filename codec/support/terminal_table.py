"""Tables on a terminal, which all commands print in the same style."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["terminal_table"]


def terminal_table(title: str, *columns: str, tight: bool = False, wrap: bool = False) -> Table:
    """Make an empty table. The first column, and columns whose heading ends in a space, are aligned left.

    `tight` leaves less space between columns and lets the first one break its lines; `wrap` lets all of them.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=tight
    )
    for index, column in enumerate(columns):
        table.add_column(
            Text(column.strip(" ")),
            justify="left" if index == 0 or column.endswith(" ") else "right",
            overflow="fold" if tight or wrap else "ellipsis",
            no_wrap=not wrap and (bool(index) or not tight),
        )
    return table

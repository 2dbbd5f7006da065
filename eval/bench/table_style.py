"""What the tables of all benches look like."""

from __future__ import annotations

from rich import box
from rich.table import Table

__all__ = ["new_table"]


def new_table(title: str, *columns: str, tight: bool = False) -> Table:
    """A table whose first column is aligned left, and all others right.

    Args:
        title: above the table; may be empty.
        columns: headings.
        tight: fit more columns in: less space between them, and the first one breaks its lines.
    """
    table = Table(
        title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=tight
    )
    for index, column in enumerate(columns):
        table.add_column(
            column,
            justify="right" if index else "left",
            overflow="fold" if tight else "ellipsis",
            no_wrap=bool(index) or not tight,
        )
    return table

"""The parts of reports: tables, texts and figures under headings, as Markdown or on a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from cuvee.codec.support.terminal_table import terminal_table

if TYPE_CHECKING:
    from rich.table import Table as RichTable

__all__ = [
    "SMALL_MODEL",
    "Block",
    "Bullets",
    "Code",
    "Figure",
    "ReportSection",
    "ReportTable",
    "escape",
    "markdown_document",
]

SMALL_MODEL = 500_000_000
"""Parameters below which a report warns that a large model may lose more or less."""


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table of plain text, which a document escapes.

    Attributes:
        columns: the headings. A column whose heading ends in a space holds text and is aligned left; others hold
            numbers.
        rows: one cell per column.
        title: above the table; may be empty.
        note: below the table; may be empty.
        strong: the rows that stand out.
    """

    columns: list[str]
    rows: list[list[str]]
    title: str = ""
    note: str = ""
    strong: frozenset[int] = frozenset()

    def is_text(self, column: int) -> bool:
        """Return whether a column is aligned left."""
        return self.columns[column].endswith(" ")

    def for_terminal(self, title: str = "", tight: bool = False, wrap: bool = True) -> RichTable:
        """Make the table for a terminal, under `title` or its own title; see `terminal_table` for the rest."""
        from rich.text import Text

        table = terminal_table(title or self.title, *self.columns, tight=tight, wrap=wrap)
        for index, row in enumerate(self.rows):
            table.add_row(*map(Text, row), style="bold" if index in self.strong else "")
        return table


@dataclass(frozen=True, slots=True)
class Bullets:
    """A list of sentences."""

    items: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Code:
    """What a reader may type."""

    text: str


@dataclass(frozen=True, slots=True)
class Figure:
    """The plot of a document, with its caption."""

    caption: str


Block: TypeAlias = str | ReportTable | Bullets | Code | Figure
"""A part of a section; a string is a paragraph."""


@dataclass(frozen=True, slots=True)
class ReportSection:
    """A heading and the blocks under it."""

    title: str
    blocks: Sequence[Block]


def markdown_document(title: str, preface: Sequence[str], body: Sequence[ReportSection], plot: str = "") -> str:
    """Write a document in GitHub-flavored Markdown.

    Args:
        title: in plain text, like all other texts.
        preface: paragraphs before the first section.
        body: the sections.
        plot: the file of the figure, relative to the document. Without a file, figures are left out.
    """
    parts = [f"# {escape(title)}", *map(escape, preface)]
    for section in body:
        parts.append(f"## {escape(section.title)}")
        for block in section.blocks:
            match block:
                case ReportTable():
                    parts += _markdown_table(block)
                case Code(text):
                    parts.append(f"```\n{text}\n```")
                case Bullets(items):
                    parts.append("\n".join(f"- {escape(item)}" for item in items))
                case Figure(caption):
                    parts += [f"![{escape(caption.partition(',')[0])}]({plot})", escape(caption)] if plot else []
                case text:
                    parts.append(escape(text))
    return "\n\n".join(parts) + "\n"


def _markdown_table(table: ReportTable) -> list[str]:
    lines = [
        "| " + " | ".join(escape(column.strip()) for column in table.columns) + " |",
        "|" + "|".join("---" if table.is_text(i) else "---:" for i in range(len(table.columns))) + "|",
    ]
    for index, row in enumerate(table.rows):
        cells = [escape(cell) for cell in row]
        if index in table.strong:
            cells[0] = f"**{cells[0]}**"
        lines.append("| " + " | ".join(cells) + " |")
    parts = [f"### {escape(table.title)}"] if table.title else []
    return [*parts, "\n".join(lines), *([escape(table.note)] if table.note else [])]


def escape(text: str) -> str:
    """Escape plain text as inline Markdown, also for use inside a table."""
    text = " ".join(text.split())
    text = re.sub(r"([\\`*|<>\[\]$~])", r"\\\1", text)
    text = re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)  # inside a word an underscore means nothing
    text = re.sub(r"&(?=#?\w+;)", r"\\&", text)
    return re.sub(r"^(#+|[-+]|\d+[.)])(?=\s)", r"\\\1", text)

"""The report of `cuvee bench pages` as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from cuvee.eval.documents import ReportSection, ReportTable, markdown_document
from cuvee.eval.formatting import format_bits
from cuvee.eval.machine import machine_line

__all__ = ["pages_markdown", "print_pages_report"]

NOTE = (
    "MB/s of uncompressed bfloat16 pages, one thread, in turns; in parentheses the speed over zstd's in the same turn. "
    "Loading includes the lookup. Bits count everything that is stored, index entries too."
)


def print_pages_report(report: dict[str, Any], console: Console) -> None:
    """Print a report as a table."""
    console.print(_machine(report), style="dim", highlight=False)
    for table in _tables(report):
        console.print(table.for_terminal(tight=False, wrap=False))
        console.print(f"{table.note}\n", highlight=False)


def pages_markdown(report: dict[str, Any]) -> str:
    """A report as GitHub-flavored Markdown."""
    sections = [
        ReportSection("", table.title, [ReportTable(table.columns, table.rows, "", table.note)])
        for table in _tables(report)
    ]
    return markdown_document("cuvee bench pages", [_machine(report)], sections, {})


def _tables(report: Mapping[str, Any]) -> list[ReportTable]:
    return [_methods(report), *([_recognition(report)] if report["recognition"] else [])]


def _recognition(report: Mapping[str, Any]) -> ReportTable:
    rows = [
        [
            str(entry["tokens"]), str(entry["chunks"]), f"{entry['ids']:.1%}", f"{entry['positions']:.1%}",
            f"{entry['mb_per_s']['median']:,.0f}",
        ]
        for entry in report["recognition"]
    ]  # fmt: skip
    return ReportTable(
        ["tokens", "chunks", "right ids", "right positions", "MB/s"],
        rows,
        "What recognition finds",
        "Shares of the tokens whose ids are right, and of the chunks whose positions are. The positions may be any: "
        "nobody says that pages begin at multiples of their size.",
    )


def _methods(report: Mapping[str, Any]) -> ReportTable:
    rows = []
    for case in report["cases"]:
        for entry in case["methods"]:
            cells = [
                str(case["page_tokens"]),
                case["arrangement"],
                entry["method"],
                format_bits(entry["bits_per_value"]),
            ]
            for way in ("save", "load"):
                speed, over = entry[f"{way}_mb_per_s"]["median"], entry[f"{way}_over_zstd"]["median"]
                cells.append(f"{speed:,.0f} ({over:.2f})")
            rows.append(cells)
    return ReportTable(
        ["page", "arrangement ", "method ", "bits", "save", "load"],
        rows,
        f"Pages of {report['model']}, {report['tokens']} tokens",
        NOTE,
    )


def _machine(report: Mapping[str, Any]) -> str:
    machine = report["hardware"]
    return machine_line(machine, f"torch {machine['torch']}")

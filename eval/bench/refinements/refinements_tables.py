"""The report of `cuvee bench refinements` as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from cuvee.eval.documents import ReportSection, ReportTable, markdown_document
from cuvee.eval.formatting import format_bits, format_number
from cuvee.eval.machine import machine_line

__all__ = ["print_refinements_report", "refinements_markdown"]

NOTE = (
    "Bits count all bytes of all parts. A single blob's are those at exactly the KL of the parts, interpolated. Times "
    "are one thread's, over those of a single blob of the same error, in turns: median, and 20th to 80th percentile."
)


def print_refinements_report(report: dict[str, Any], console: Console) -> None:
    """Print a report as a table."""
    console.print(_machine(report), style="dim", highlight=False)
    table = _table(report)
    console.print(table.for_terminal(tight=False, wrap=False))
    console.print(table.note, highlight=False)


def refinements_markdown(report: dict[str, Any]) -> str:
    """A report as GitHub-flavored Markdown."""
    table = _table(report)
    section = ReportSection("", table.title, [ReportTable(table.columns, table.rows, "", table.note)])
    return markdown_document("cuvee bench refinements", [_machine(report)], [section], {})


def _times(timing: Mapping[str, float]) -> str:
    return f"{timing['median']:.2f} ({timing['p20']:.2f} to {timing['p80']:.2f})"


def _table(report: Mapping[str, Any]) -> ReportTable:
    rows = []
    for prefix in report["prefixes"]:
        over = prefix["bits_per_value"] / prefix["single_bits_per_value"] - 1
        last = prefix is report["prefixes"][-1]
        rows.append([
            str(prefix["parts"]), format_number(prefix["kl"], 2), format_bits(prefix["bits_per_value"]),
            format_bits(prefix["single_bits_per_value"]), f"{over:+.1%}", _times(prefix["decode_over_single"]),
            _times(report["encode_over_single"]) if last else "",
        ])  # fmt: skip
    title = f"{report['model']}, {report['quality']} in parts, {report['sequences']} sequences of a held-out text"
    columns = ["parts", "KL", "bits per value", "single blob", "more", "decoding", "encoding"]
    return ReportTable(columns, rows, title, NOTE)


def _machine(report: Mapping[str, Any]) -> str:
    return machine_line(report["hardware"], f"torch {report['hardware']['torch']}")

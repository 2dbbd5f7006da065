"""The report of `cuvee bench parts` as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from cuvee.eval.bench.parts.parts_bench import PARTS, PRESETS
from cuvee.eval.documents import ReportSection, ReportTable, markdown_document
from cuvee.eval.formatting import format_number
from cuvee.eval.machine import machine_line

__all__ = ["parts_markdown", "print_parts_report"]

NOTE = (
    "Tokens served from the store, and over whole chunks of high quality; mean KL of the served tokens; shares of all "
    "tokens that were served at each quality. New: after this share of the requests, a document is replaced."
)


def print_parts_report(report: dict[str, Any], console: Console) -> None:
    """Print a report as a table."""
    console.print(_machine(report), style="dim", highlight=False)
    table = _table(report)
    console.print(table.for_terminal(tight=False, wrap=False))
    console.print(table.note, highlight=False)


def parts_markdown(report: dict[str, Any]) -> str:
    """A report as GitHub-flavored Markdown."""
    table = _table(report)
    section = ReportSection("", table.title, [ReportTable(table.columns, table.rows, "", table.note)])
    return markdown_document("cuvee bench parts", [_machine(report)], [section], {})


def _table(report: Mapping[str, Any]) -> ReportTable:
    rows = []
    for case in report["cases"]:
        finest = next(entry for entry in case["methods"] if entry["method"] == PRESETS[-1])
        for entry in case["methods"]:
            ratio = entry["served"] / finest["served"] if finest["served"] else None
            cells = [f"{case['exponent']:g}", f"{case['new']:.0%}", entry["method"], f"{entry['served']:.1%}"]
            cells += [f"{format_number(ratio)}x" if ratio else "", format_number(entry["kl"], 2)]
            by_parts = [f"{share:.0%}" for share in entry["by_parts"][1:]]
            rows.append([*cells, " / ".join(by_parts) if entry["method"] == PARTS else ""])
    return ReportTable(
        ["Zipf", "new", "stored as", "served", "over high", "KL", " / ".join(PRESETS)],
        rows,
        f"A store of {report['budget']:.0%} of the documents in high quality",
        NOTE,
    )


def _machine(report: Mapping[str, Any]) -> str:
    return machine_line(report["hardware"], f"torch {report['hardware']['torch']}")

"""A report as people read it: Markdown with a plot, and a summary on the terminal.

Report --sections--> texts, tables, a figure --+--> report.md  + plots/size_kl.svg
                                               +--> terminal
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cuvee.eval.documents import ReportTable, markdown_document
from cuvee.eval.files import write_atomically
from cuvee.eval.report.plot import write_plot
from cuvee.eval.report.schema import Report
from cuvee.eval.report.sections import report_preface, report_sections, report_title, summary_sections

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["markdown", "print_summary", "write_report"]

PLOT = "plots/size_kl.svg"


def write_report(report: Report, folder: Path) -> None:
    """Write `report.md` and its plot, each file completely or not at all.

    Args:
        report: what was measured.
        folder: where to write them; it is made if need be.

    Raises:
        ImportError: matplotlib is not installed (`pip install 'cuvee[eval]'`).
    """
    plot = PLOT if write_plot(report, folder / PLOT) else ""
    write_atomically(folder / "report.md", markdown(report, plot).encode())


def markdown(report: Report, plot: str = "") -> str:
    """Write the report as GitHub-flavored Markdown; `plot` is the file of its plot, relative to the document."""
    return markdown_document(report_title(report), report_preface(report), report_sections(report), plot)


def print_summary(report: Report, console: Console) -> None:
    """Print what changed, what you lose, and how much smaller the cache is at equal KL."""
    from rich.text import Text

    console.print(Text(report_title(report), style="bold"))
    for section in summary_sections(report):
        for block in section.blocks:
            if isinstance(block, ReportTable):
                console.print(block.for_terminal(section.title))
            elif isinstance(block, str):
                console.print(Text(block))

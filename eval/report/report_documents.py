"""The documents of a report: Markdown, and a summary on the terminal.

report.json -> sections of texts, tables, figures --+--> report.md  + plots/*.svg
                                                    +--> terminal
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cuvee.eval.documents import ReportTable, markdown_document
from cuvee.eval.files import write_atomically
from cuvee.eval.report.curve_sections import equal_kl, headline
from cuvee.eval.report.report_plots import write_plots
from cuvee.eval.report.schema import Report
from cuvee.eval.report.sections import against, report_preface, report_sections, report_title

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["markdown", "print_summary", "write_report"]


def write_report(report: Report, folder: Path) -> None:
    """Write `report.md` and `plots/*` of a report, each file completely or not at all.

    Args:
        report: what was measured.
        folder: where to write them; it is made if need be.

    Raises:
        ImportError: matplotlib is not installed (`pip install 'cuvee[eval]'`).
    """
    plots = {name: f"plots/{name}.svg" for name in write_plots(report, folder / "plots")}
    write_atomically(folder / "report.md", markdown(report, plots).encode())


def print_summary(report: Report, console: Console) -> None:
    """Print what changed, what you lose, and how much smaller the cache is at equal KL."""
    from rich.text import Text

    console.print(Text(report_title(report), style="bold"))
    for section in (against(report), headline(report), equal_kl(report)):
        for block in section.blocks:
            if isinstance(block, ReportTable):
                console.print(block.for_terminal(section.title))
            elif block.kind == "text":
                console.print(Text(block.text))


def markdown(report: Report, plots: Mapping[str, str]) -> str:
    """Write the report as GitHub-flavored Markdown.

    Args:
        report: what was measured.
        plots: the file of each plot, relative to the document.
    """
    return markdown_document(report_title(report), report_preface(report), report_sections(report), plots)

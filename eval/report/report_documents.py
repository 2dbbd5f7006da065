"""The documents of a report: Markdown for a repository, and one HTML file for a mail.

    report.json -> sections of texts, tables, figures --+--> report.md    + plots/*.svg
                                                        +--> report.html  (plots inside, no script, nothing loaded)

Both documents are written from the same sections.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cuvee.eval.documents import ReportTable, markdown_document
from cuvee.eval.files import write_atomically
from cuvee.eval.report.curve_sections import equal_kl, headline
from cuvee.eval.report.report_plots import PLOTS, write_plots
from cuvee.eval.report.schema import Report
from cuvee.eval.report.sections import against, report_preface, report_sections, report_title

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["html", "markdown", "print_summary", "write_report"]

_TEMPLATE = Path(__file__).with_name("report.html.j2")


def write_report(report: Report, folder: Path) -> None:
    """Write `report.md`, `report.html` and `plots/*` of a report, each file completely or not at all.

    Args:
        report: what was measured.
        folder: where to write them; it is made if need be.

    Raises:
        ImportError: matplotlib or jinja2 is not installed (`pip install 'cuvee[eval]'`).
    """
    plots = {name: f"plots/{name}.svg" for name in write_plots(report, folder / "plots")}
    write_atomically(folder / "report.md", markdown(report, plots).encode())
    write_atomically(folder / "report.html", html(report, folder / "plots").encode())


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


def html(report: Report, plots_folder: Path) -> str:
    """Write the report as one HTML page that loads nothing, because it contains the plots as SVG.

    Args:
        report: what was measured.
        plots_folder: where `write_plots` put `NAME.svg`. Missing plots are left out.

    Raises:
        ImportError: jinja2 is not installed (`pip install 'cuvee[eval]'`).
    """
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise ImportError("the HTML report needs jinja2: pip install 'cuvee[eval]'") from error
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    found = {name: plots_folder / f"{name}.svg" for name in PLOTS}
    figures = {
        # `write_plots` drew them, and it escapes its input.
        name: Markup(_inline_svg(path.read_text(encoding="utf-8"), name))
        for name, path in found.items()
        if path.exists()
    }
    page = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return page.render(
        title=report_title(report), preface=report_preface(report), sections=report_sections(report), figures=figures
    )


def _inline_svg(text: str, name: str) -> str:
    """Turn an SVG file into an element of a page. Its ids get a prefix, because all plots use the same ids."""
    text = text[text.index("<svg") :]
    text = re.sub(
        r"<style.*?</style>", "", text, flags=re.DOTALL
    )  # it would apply to the whole page, which has its own
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    return re.sub(r"url\(#", f"url(#{name}-", text)

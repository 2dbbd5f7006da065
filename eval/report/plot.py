"""The plot of a report: size against KL."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cuvee.eval.methods import family_label
from cuvee.eval.plots import save_figure, size_kl_figure
from cuvee.eval.report.families import family_rank
from cuvee.eval.report.schema import Anchor, MethodEntry, Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["CAPTION", "size_kl", "write_plot"]

CAPTION = (
    "Size against KL, ± one standard error: a curve for methods with several settings, a point for others. Thin lines "
    "lead from a baseline to the curves at its KL."
)


def size_kl(report: Report) -> Figure | None:
    """Draw bits per value against KL, or return None if the report has nothing to show in it.

    Families with several methods are curves with their presets marked; the others are points with their names. From
    each anchor of the comparison a thin line leads to the curves, at the KL of the anchor.
    """
    shown = [entry for entry in report.quality if entry.kl > 0 and entry.bits_per_value > 0]
    if not shown:
        return None
    curves: dict[str, list[MethodEntry]] = {}
    points: dict[str, list[MethodEntry]] = {}
    for family in sorted({entry.family for entry in shown}, key=lambda name: family_rank(report, name)):
        members = [entry for entry in shown if entry.family == family]
        (curves if len(members) > 1 else points)[family_label(family)] = members
    names = ", ".join(f"“{source.name}”" for source in report.text.evaluation)
    return size_kl_figure(
        curves,
        points,
        "Size against what it costs",
        f"{report.model.name} on {names}, {report.text.sequences} sequences; lower and further left is better",
        [(anchor.bits_per_value, anchor.kl, _reach(anchor)) for anchor in report.comparison],
        next((entry.kl for entry in report.quality if entry.family == "destroyed"), None),
    )


def write_plot(report: Report, path: Path) -> bool:
    """Write the plot of a report as SVG, the same bytes for the same report, or remove a stale file.

    Args:
        report: what was measured.
        path: of the file; its folder is made.

    Returns:
        Whether there is a plot.

    Raises:
        ImportError: matplotlib is not installed (`pip install 'cuvee[eval]'`).
    """
    figure = size_kl(report)
    if figure is None:
        path.unlink(missing_ok=True)
        return False
    save_figure(figure, path)
    return True


def _reach(anchor: Anchor) -> float | None:
    """The size at which the leftmost of cuvee's curves has the KL of an anchor."""
    sizes = (family.bits_per_value for family in anchor.families if family.family.startswith("cuvee/"))
    return min((size for size in sizes if size is not None), default=None)

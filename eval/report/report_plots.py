"""The plots of a report: size against KL.

    report --size_kl--> Figure | None --write_plots--> NAME.svg

A plot is a function of the report alone, and None if the report has nothing to show in it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cuvee.eval.methods import family_label
from cuvee.eval.plots import (
    Series,
    add_title,
    bar_length,
    draw_size_kl,
    new_figure,
    save_figure,
    styled,
)
from cuvee.eval.report.families import family_rank
from cuvee.eval.report.schema import Anchor, Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PLOTS", "machine_name", "size_kl", "write_plots"]


def size_kl(report: Report) -> Figure | None:
    """Bits per value against KL, both logarithmic, with error bars of one standard error.

    Families with several methods are curves with their presets marked; the others are points with their names. From
    each anchor of the comparison a thin line leads to the curves, at the KL of the anchor.
    """
    quality = [entry for entry in report.quality if entry.kl > 0 and entry.bits_per_value > 0]
    destroyed = [float(entry.kl) for entry in report.quality if entry.family == "destroyed"]
    if not quality:
        return None
    curves: list[Series] = []
    points: list[Series] = []
    for family in sorted({str(entry.family) for entry in quality}, key=lambda name: family_rank(report, name)):
        members = sorted((e for e in quality if e.family == family), key=lambda e: float(e.bits_per_value))
        series = Series(
            family_label(family),
            family,
            [e.bits_per_value for e in members],
            [e.kl for e in members],
            [bar_length(e.kl, e.kl_stderr) for e in members],
            [str(e.setting) if e.kind == "preset" else "" for e in members],
        )
        (curves if len(members) > 1 else points).append(series)
    anchors = [(float(a.bits_per_value), float(a.kl), _reach(a)) for a in report.comparison]
    with styled():
        figure = new_figure(5.4)
        axes = figure.add_subplot()
        add_title(
            axes, "Size against what it costs", f"{_texts_and_sequences(report)}; lower and further left is better"
        )
        draw_size_kl(figure, axes, curves, points, anchors, destroyed[0] if destroyed else None)
        return figure


PLOTS: dict[str, tuple[Callable[[Report], Figure | None], str]] = {
    "size_kl": (
        size_kl,
        "Size against KL, ± one standard error: a curve for methods with several settings, a point for others. "
        "Thin lines lead from a baseline to the curves at its KL.",
    ),
}
"""Name -> (how to draw it, its caption), in the order in which a report shows the plots."""


def write_plots(report: Report, folder: Path) -> list[str]:
    """Write the plots of a report as SVG, and remove stale files of plots that it has nothing for.

    The same report gives the same files, byte for byte.

    Args:
        report: what was measured.
        folder: where the files `NAME.svg` go; it is made.

    Returns:
        The names of the plots that were written.

    Raises:
        ImportError: matplotlib is not installed (`pip install 'cuvee[eval]'`).
    """
    written = []
    for name, (draw, _) in PLOTS.items():
        figure, path = draw(report), folder / f"{name}.svg"
        if figure is None:
            path.unlink(missing_ok=True)
        else:
            save_figure(figure, path)
            written.append(name)
    return written


def _texts_and_sequences(report: Report) -> str:
    names = ", ".join(f"“{source.name}”" for source in report.text.evaluation)
    return f"{report.model.name} on {names}, {report.text.sequences} sequences"


def machine_name(report: Report) -> str:
    """The machine that a report was measured on, in a few words."""
    environment = report.environment
    return str(environment["gpu"] or f"{environment['cpu']}, {environment['cores']} cores")


def _reach(anchor: Anchor) -> float | None:
    """The size at which the leftmost of cuvee's curves has the KL of an anchor."""
    found = [
        float(family.bits_per_value)
        for family in anchor.families
        if str(family.family).startswith("cuvee/") and family.bits_per_value is not None
    ]
    return min(found, default=None)

"""The plot of a report: size against KL.

It uses no pyplot and no global backend, because a library must not change the settings of the caller's figures. The
colors are those of Okabe and Ito, which color-blind readers can distinguish (jfly.uni-koeln.de/color).
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuvee.eval.files import write_atomically
from cuvee.eval.formatting import format_number
from cuvee.eval.methods import family_label
from cuvee.eval.report.families import family_rank, is_preset
from cuvee.eval.report.schema import Anchor, MethodEntry, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["CAPTION", "size_kl", "write_plot"]

CAPTION = (
    "Size against KL, ± one standard error: a curve for methods with several settings, a point for others. Thin lines "
    "lead from a baseline to the curves at its KL."
)
INK, SOFT, LINE, POINT = "#222222", "#666666", "#dddddd", "#333333"
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#b0568c", "#56b4e9", "#e69f00")  # of curves, cuvee's first
_GRAYS = (("#555555", (0, (5, 2))), ("#777777", (0, (1.5, 1.5))), ("#8c8c8c", (0, (6, 2, 1.5, 2))), ("#9a9a9a", "-"))
_CURVE_MARKERS = "o^sDvP"
_POINT_MARKERS = "DsvPX<>ph*"  # of methods with one setting, which the legend names
# Text stays text in SVG files, which makes them small and lets a page use its own font. Labels are laid out with
# DejaVu Sans, which is wider than the fonts that replace it, so labels that do not touch here do not touch there.
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": INK,
    "axes.axisbelow": True,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "text.color": INK,
    "legend.frameon": False,
    "text.parse_math": False,  # a $ in a name is a $
    "svg.fonttype": "none",
    "svg.hashsalt": "cuvee",
}
_WIDTH, _HEIGHT = 8.0, 5.4  # inches
_DPI = 150  # 1200 pixels wide: sharp where a page shows it at 800
_SMALLEST_BAR = 0.95  # of a value: where a bar of a logarithmic axis is cut


@contextmanager
def _styled() -> Iterator[None]:
    """Use the style of the plot while it is made or written, and restore the caller's settings after that."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'cuvee[eval]'") from error
    with mpl.rc_context(_STYLE):
        yield


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
    data = io.BytesIO()
    with _styled():  # no dates or versions
        figure.savefig(data, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    write_atomically(path, data.getvalue())
    return True


def size_kl(report: Report) -> Figure | None:
    """Draw bits per value against KL, both logarithmic, or return None if the report has nothing to show in it.

    Families with several methods are curves with their presets marked; the others are points. Bars are one standard
    error. From each anchor of the comparison a thin line leads to the curves, at the KL of the anchor.
    """
    shown = [entry for entry in report.quality if entry.kl > 0 and entry.bits_per_value > 0]
    if not shown:
        return None
    curves: dict[str, list[MethodEntry]] = {}
    points: dict[str, MethodEntry] = {}
    for family in sorted({entry.family for entry in shown}, key=lambda name: family_rank(report, name)):
        members = sorted((e for e in shown if e.family == family), key=lambda e: e.bits_per_value)
        if len(members) > 1:
            curves[family] = members
        else:
            points[family] = members[0]
    with _styled():
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(_WIDTH, _HEIGHT), dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        _title(axes, report)
        for anchor in report.comparison:
            reach = _reach(anchor)
            if reach is not None and reach < anchor.bits_per_value:
                line = [reach, anchor.bits_per_value]
                axes.plot(line, [anchor.kl, anchor.kl], color="#aaaaaa", linewidth=0.7, zorder=1.5)
        _draw_curves(axes, curves)
        _draw_points(axes, points)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        _size_axis(axes, [entry.bits_per_value for entry in shown])
        _plain_log_ticks(axes)
        axes.set_xlabel("bits per value, every byte counted (the cache has 16)")
        axes.set_ylabel("KL to the exact cache, nats per token")
        axes.grid(True, which="major", color=LINE, linewidth=0.6)
        destroyed = next((entry.kl for entry in report.quality if entry.family == "destroyed"), 0.0)
        if destroyed > 0:
            _draw_destroyed(axes, destroyed)
        figure.legend(loc="outside lower left", ncols=3, fontsize=8.5, handlelength=2.6)
    return figure


def _title(axes: Axes, report: Report) -> None:
    names = ", ".join(f"“{source.name}”" for source in report.text.evaluation)
    below = f"{report.model.name} on {names}, {report.text.sequences} sequences; lower and further left is better"
    axes.set_title("Size against what it costs", fontsize=12, fontweight="bold", pad=22)
    axes.annotate(
        below, (0, 1), xycoords="axes fraction", xytext=(0, 7), textcoords="offset points", fontsize=9, color=SOFT
    )


def _reach(anchor: Anchor) -> float | None:
    """The size at which the leftmost of cuvee's curves has the KL of an anchor."""
    sizes = (family.bits_per_value for family in anchor.families if family.family.startswith("cuvee/"))
    return min((size for size in sizes if size is not None), default=None)


def _draw_curves(axes: Axes, curves: Mapping[str, Sequence[MethodEntry]]) -> None:
    """Draw a line through the settings of each family, cuvee's in front."""
    for rank, (family, shown) in enumerate(curves.items()):
        ours, pca = family.startswith("cuvee/"), family.startswith("pca/")
        color, dashes = _GRAYS[rank % len(_GRAYS)] if pca else (_COLORS[rank % len(_COLORS)], "-")
        axes.errorbar(
            *_values(shown), color=color, linestyle=dashes, linewidth=2.2 if ours else 1.4,
            marker=_CURVE_MARKERS[rank % len(_CURVE_MARKERS)], markersize=3.5, elinewidth=0.9,
            zorder=4 if ours else 3, label=family_label(family),
        )  # fmt: skip
        for entry in filter(is_preset, shown):
            point = entry.bits_per_value, entry.kl
            axes.plot(*point, "o", markersize=8, mfc="white", mec=color, markeredgewidth=2, zorder=5)
            axes.annotate(
                entry.setting, point, xytext=(-6, -6), textcoords="offset points", ha="right", va="top", fontsize=8.5,
                color=color, zorder=6,
            )  # fmt: skip


def _draw_points(axes: Axes, points: Mapping[str, MethodEntry]) -> None:
    """Draw a marker for each family with one setting."""
    for rank, (family, entry) in enumerate(points.items()):
        axes.errorbar(
            *_values([entry]), linestyle="none", marker=_POINT_MARKERS[rank % len(_POINT_MARKERS)], color=POINT,
            markersize=5.5, elinewidth=0.9, zorder=3.5, label=family_label(family),
        )  # fmt: skip


def _values(shown: Sequence[MethodEntry]) -> tuple[list[float], list[float], list[float]]:
    """Sizes, KLs, and half the heights of their error bars, cut where they would leave a logarithmic axis."""
    bars = [min(entry.kl_stderr or 0.0, _SMALLEST_BAR * entry.kl) for entry in shown]
    return [entry.bits_per_value for entry in shown], [entry.kl for entry in shown], bars


def _draw_destroyed(axes: Axes, kl: float) -> None:
    """Draw a line at the KL of a destroyed cache."""
    axes.axhline(kl, color=SOFT, linewidth=1, linestyle=(0, (4, 3)))
    low, high = axes.get_ylim()
    axes.set_ylim(low, max(high, 2 * kl))
    axes.annotate(
        f"destroyed cache: {format_number(kl)}", (1, kl), xycoords=axes.get_yaxis_transform(), xytext=(-2, 3),
        textcoords="offset points", ha="right", fontsize=8.5, color=SOFT,
    )  # fmt: skip


def _size_axis(axes: Axes, sizes: Sequence[float]) -> None:
    """Ticks at powers of two of bits per value."""
    low, high = min([*sizes, 0.5]), max([*sizes, 8.0])
    ticks = [2.0**n for n in range(math.ceil(math.log2(low)) - 1, math.floor(math.log2(high)) + 2)]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(low / 1.2, high * 1.3)


def _plain_log_ticks(axes: Axes) -> None:
    """Show decades as plain numbers, with 2 and 5 between them if there are only few."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axes.get_ylim()
    few = math.log10(high / low) < 2.2
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=20))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10f}".rstrip("0").rstrip(".")))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="y", which="minor", length=0)

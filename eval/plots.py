"""The style of all plots, and the plot of size against KL.

Plots use no pyplot and no global backend, because a library must not change the settings of the caller's figures. The
colors are those of Okabe and Ito, which color-blind readers can distinguish (jfly.uni-koeln.de/color).
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuvee.codec.profiles.quality import PRESET_KL
from cuvee.eval.files import write_atomically
from cuvee.eval.formatting import format_number
from cuvee.eval.quality import Quality

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "BLUE",
    "CURVE_MARKERS",
    "GREEN",
    "INK",
    "LINE",
    "ORANGE",
    "POINT",
    "PURPLE",
    "SKY",
    "SOFT",
    "TRANSFORMS",
    "VERMILION",
    "Series",
    "add_title",
    "bar_length",
    "draw_size_kl",
    "family_look",
    "new_figure",
    "plain_log_ticks",
    "plot_quality",
    "save_figure",
    "size_axis",
    "styled",
]

TRANSFORMS = ("pca/",)
BLUE, VERMILION, GREEN, PURPLE, SKY, ORANGE = "#0072b2", "#d55e00", "#009e73", "#b0568c", "#56b4e9", "#e69f00"
_CUVEE_COLORS = {"cuvee/layer": BLUE, "cuvee/all": VERMILION}
_MORE_COLORS = (GREEN, PURPLE, SKY, ORANGE)
_GRAYS = (("#555555", (0, (5, 2))), ("#777777", (0, (1.5, 1.5))), ("#8c8c8c", (0, (6, 2, 1.5, 2))), ("#9a9a9a", "-"))
INK, SOFT, LINE, POINT = "#222222", "#666666", "#dddddd", "#333333"
CURVE_MARKERS = "o^sDvP"
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
_WIDTH = 8.0  # inches
_DPI = 150  # 1200 pixels wide: sharp where a page shows it at 800
_SMALLEST_BAR = 0.95  # of a value: where a bar of a logarithmic axis is cut


@dataclass(frozen=True, slots=True)
class Series:
    """The points of a family in order of size: bits per value, height, half the error bar, and a name to mark it by."""

    label: str
    family: str
    x: list[float]
    y: list[float]
    bars: list[float]
    marks: list[str]


def plot_quality(
    path: Path, curves: Mapping[str, Sequence[Quality]], points: Sequence[Quality], title: str = ""
) -> None:
    """Write size against KL of measured methods as a PNG or an SVG; see `size_kl`.

    Args:
        path: file to write, `.png` or `.svg`; its folder is made.
        curves: methods with a dial by label, one series each; those named like a preset are marked.
        points: methods with one setting.
        title: over the plot.

    Raises:
        ImportError: matplotlib is not installed (`pip install 'cuvee[eval]'`).
    """
    families = list(_CUVEE_COLORS)
    series = []
    for index, (label, measured) in enumerate(curves.items()):
        family = families[index] if index < len(families) else label
        shown = sorted((q for q in measured if q.kl > 0 and q.bits_per_value > 0), key=lambda q: q.bits_per_value)
        series.append(_from_quality(label, family, shown))
    single = [_from_quality(q.name, q.name, [q]) for q in points if q.kl > 0 and q.bits_per_value > 0]
    with styled():
        figure = new_figure(5.2)
        axes = figure.add_subplot()
        add_title(axes, title, "lower and further left is better")
        draw_size_kl(figure, axes, [s for s in series if s.x], single, [], None)
    save_figure(figure, path)


def _from_quality(label: str, family: str, shown: Sequence[Quality]) -> Series:
    return Series(
        label,
        family,
        [q.bits_per_value for q in shown],
        [q.kl for q in shown],
        [bar_length(q.kl, q.kl_stderr) for q in shown],
        [q.name if q.name in PRESET_KL else "" for q in shown],
    )


@contextmanager
def styled() -> Iterator[None]:
    """Use the style of the plots while they are made or written, and restore the caller's settings after that."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'cuvee[eval]'") from error
    with mpl.rc_context(_STYLE):
        yield


def new_figure(height: float) -> Figure:
    """A figure as wide as all plots and `height` inches high, without a global backend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure, whole or not at all, without dates or versions in the file."""
    dropped = ("Date", "Creator", "Format", "Type") if path.suffix == ".svg" else ("Software",)
    data = io.BytesIO()
    with styled():
        figure.savefig(data, format=path.suffix[1:], metadata=dict.fromkeys(dropped))
    write_atomically(path, data.getvalue())


def draw_size_kl(
    figure: Figure,
    axes: Axes,
    curves: Sequence[Series],
    points: Sequence[Series],
    anchors: Sequence[tuple[float, float, float | None]],
    destroyed: float | None,
) -> None:
    """Draw curves and single points of size against KL, both logarithmic, and name them in a legend.

    Args:
        figure: of `axes`.
        axes: to draw into.
        curves: families with several settings.
        points: methods with one.
        anchors: bits per value and KL of each anchor, and how far left a thin line leads from it at that KL.
        destroyed: the KL of a destroyed cache, marked by a line.
    """
    for bits, kl, reach in anchors:
        if reach is not None and reach < bits:
            axes.plot([reach, bits], [kl, kl], color="#aaaaaa", linewidth=0.7, zorder=1.5)
    for rank, series in enumerate(curves):
        color, dashes = family_look(series.family, rank)
        ours = series.family.startswith("cuvee/")
        axes.errorbar(
            series.x,
            series.y,
            series.bars,
            color=color,
            linestyle=dashes,
            linewidth=2.2 if ours else 1.4,
            marker=CURVE_MARKERS[rank % len(CURVE_MARKERS)],
            markersize=3.5,
            elinewidth=0.9,
            zorder=4 if ours else 3,
            label=series.label,
        )
        for x, y, name in zip(series.x, series.y, series.marks, strict=True):
            if name:
                axes.plot(
                    x, y, "o", markersize=8, markerfacecolor="white", markeredgecolor=color, markeredgewidth=2, zorder=5
                )
                axes.annotate(
                    name, (x, y), xytext=(-6, -6), textcoords="offset points", ha="right", va="top", fontsize=8.5,
                    color=color, zorder=6,
                )  # fmt: skip
    for rank, series in enumerate(points):
        axes.errorbar(
            series.x,
            series.y,
            series.bars,
            linestyle="none",
            marker=_POINT_MARKERS[rank % len(_POINT_MARKERS)],
            color=POINT,
            markersize=5.5,
            elinewidth=0.9,
            zorder=3.5,
            label=series.label,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    size_axis(axes, [x for series in (*curves, *points) for x in series.x])
    plain_log_ticks(axes)
    axes.set_xlabel("bits per value, every byte counted (the cache has 16)")
    axes.set_ylabel("KL to the exact cache, nats per token")
    axes.grid(True, which="major", color=LINE, linewidth=0.6)
    if destroyed is not None and destroyed > 0:
        axes.axhline(destroyed, color=SOFT, linewidth=1, linestyle=(0, (4, 3)))
        low, high = axes.get_ylim()
        axes.set_ylim(low, max(high, 2 * destroyed))
        axes.annotate(
            f"destroyed cache: {format_number(destroyed)}",
            (1, destroyed),
            xycoords=axes.get_yaxis_transform(),
            xytext=(-2, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8.5,
            color=SOFT,
        )
    if curves or points:
        figure.legend(loc="outside lower left", ncols=3, fontsize=8.5, handlelength=2.6)


def family_look(family: str, rank: int) -> tuple[str, Any]:
    """Color and dashes of a family. cuvee's families stand out; the others are gray or dashed."""
    if family in _CUVEE_COLORS:
        return _CUVEE_COLORS[family], "-"
    if family.startswith(TRANSFORMS):
        return _GRAYS[rank % len(_GRAYS)]
    return _MORE_COLORS[rank % len(_MORE_COLORS)], "-"


def size_axis(axes: Axes, sizes: Sequence[float]) -> None:
    """Ticks at powers of two of bits per value."""
    low, high = min([*sizes, 0.5]), max([*sizes, 8.0])
    ticks = [2.0**n for n in range(math.ceil(math.log2(low)) - 1, math.floor(math.log2(high)) + 2)]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(low / 1.2, high * 1.3)


def plain_log_ticks(axes: Axes) -> None:
    """Show decades as plain numbers, with 2 and 5 between them if there are only few."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axes.get_ylim()
    few = math.log10(high / low) < 2.2
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=20))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10f}".rstrip("0").rstrip(".")))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="y", which="minor", length=0)


def add_title(axes: Axes, title: str, below: str) -> None:
    """A title, and under it a line in softer ink that says what is shown."""
    axes.set_title(title, fontsize=12, fontweight="bold", pad=22)
    axes.annotate(
        below, (0, 1), xycoords="axes fraction", xytext=(0, 7), textcoords="offset points", fontsize=9, color=SOFT
    )


def bar_length(kl: float, error: float | None) -> float:
    """Half the height of an error bar, cut where it would leave a logarithmic axis."""
    return min(error or 0.0, _SMALLEST_BAR * kl)

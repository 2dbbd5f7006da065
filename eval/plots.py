"""The style of all plots, and the plot of size against KL.

Plots use no pyplot and no global backend, because a library must not change the settings of the caller's figures. The
colors are those of Okabe and Ito, which color-blind readers can distinguish (jfly.uni-koeln.de/color).
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuvee.codec.profiles.quality import PRESET_KL
from cuvee.eval.files import write_atomically
from cuvee.eval.formatting import format_number
from cuvee.eval.quality import Quality

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["save_figure", "size_kl_figure"]

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
    """Use the style of the plots while they are made or written, and restore the caller's settings after that."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'cuvee[eval]'") from error
    with mpl.rc_context(_STYLE):
        yield


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure, whole or not at all, without dates or versions in the file."""
    dropped = ("Date", "Creator", "Format", "Type") if path.suffix == ".svg" else ("Software",)
    data = io.BytesIO()
    with _styled():
        figure.savefig(data, format=path.suffix[1:], metadata=dict.fromkeys(dropped))
    write_atomically(path, data.getvalue())


def size_kl_figure(
    curves: Mapping[str, Sequence[Quality]],
    points: Mapping[str, Sequence[Quality]],
    title: str,
    below: str,
    anchors: Sequence[tuple[float, float, float | None]],
    destroyed: float | None,
) -> Figure:
    """Draw bits per value against KL, both logarithmic, with error bars of one standard error and a legend.

    Args:
        curves: methods with several settings, by label; presets are marked with their names.
        points: methods with one, by label.
        title: of the plot.
        below: the line under the title.
        anchors: bits per value and KL of each anchor, and how far left a thin line leads from it at that KL.
        destroyed: the KL of a destroyed cache, marked by a line.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with _styled():
        figure = Figure(figsize=(_WIDTH, _HEIGHT), dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.set_title(title, fontsize=12, fontweight="bold", pad=22)
        softly: Any = {"textcoords": "offset points", "color": SOFT}
        axes.annotate(below, (0, 1), xycoords="axes fraction", xytext=(0, 7), fontsize=9, **softly)
        for bits, kl, reach in anchors:
            if reach is not None and reach < bits:
                axes.plot([reach, bits], [kl, kl], color="#aaaaaa", linewidth=0.7, zorder=1.5)
        sizes = _draw_curves(axes, curves) + _draw_points(axes, points)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        _size_axis(axes, sizes)
        _plain_log_ticks(axes)
        axes.set_xlabel("bits per value, every byte counted (the cache has 16)")
        axes.set_ylabel("KL to the exact cache, nats per token")
        axes.grid(True, which="major", color=LINE, linewidth=0.6)
        if destroyed is not None and destroyed > 0:
            axes.axhline(destroyed, color=SOFT, linewidth=1, linestyle=(0, (4, 3)))
            low, high = axes.get_ylim()
            axes.set_ylim(low, max(high, 2 * destroyed))
            axes.annotate(
                f"destroyed cache: {format_number(destroyed)}", (1, destroyed), xycoords=axes.get_yaxis_transform(),
                xytext=(-2, 3), ha="right", fontsize=8.5, **softly,
            )  # fmt: skip
        if sizes:
            figure.legend(loc="outside lower left", ncols=3, fontsize=8.5, handlelength=2.6)
    return figure


def _draw_curves(axes: Axes, curves: Mapping[str, Sequence[Quality]]) -> list[float]:
    """Draw a line through the settings of each method, cuvee's in front, and return all sizes."""
    sizes: list[float] = []
    for rank, (label, measured) in enumerate(curves.items()):
        shown = sorted((q for q in measured if q.kl > 0 and q.bits_per_value > 0), key=lambda q: q.bits_per_value)
        if not shown:
            continue
        ours, pca = label.startswith("cuvee"), label.startswith("PCA")
        color, dashes = _GRAYS[rank % len(_GRAYS)] if pca else (_COLORS[rank % len(_COLORS)], "-")
        axes.errorbar(
            *_values(shown), color=color, linestyle=dashes, linewidth=2.2 if ours else 1.4,
            marker=_CURVE_MARKERS[rank % len(_CURVE_MARKERS)], markersize=3.5, elinewidth=0.9,
            zorder=4 if ours else 3, label=label,
        )  # fmt: skip
        for quality in shown:
            if name := _preset(quality):
                place = quality.bits_per_value, quality.kl
                axes.plot(*place, "o", markersize=8, mfc="white", mec=color, markeredgewidth=2, zorder=5)
                axes.annotate(
                    name, place, xytext=(-6, -6), textcoords="offset points", ha="right", va="top", fontsize=8.5,
                    color=color, zorder=6,
                )  # fmt: skip
        sizes += [quality.bits_per_value for quality in shown]
    return sizes


def _preset(quality: Quality) -> str:
    """The preset that a method is, or nothing: the entries of a report have a kind and a setting, the demo's a name."""
    name: str = getattr(quality, "setting", quality.name)
    return name if name in PRESET_KL and getattr(quality, "kind", "preset") == "preset" else ""


def _draw_points(axes: Axes, points: Mapping[str, Sequence[Quality]]) -> list[float]:
    """Draw a marker for each method with one setting, and return all sizes."""
    sizes: list[float] = []
    for rank, (label, measured) in enumerate(points.items()):
        shown = [quality for quality in measured if quality.kl > 0 and quality.bits_per_value > 0]
        if shown:
            marker = _POINT_MARKERS[rank % len(_POINT_MARKERS)]
            axes.errorbar(
                *_values(shown), linestyle="none", marker=marker, color=POINT, markersize=5.5, elinewidth=0.9,
                zorder=3.5, label=label,
            )  # fmt: skip
        sizes += [quality.bits_per_value for quality in shown]
    return sizes


def _values(shown: Sequence[Quality]) -> tuple[list[float], list[float], list[float]]:
    """Sizes, KLs, and half the heights of their error bars, cut where they would leave a logarithmic axis."""
    bars = [min(quality.kl_stderr or 0.0, _SMALLEST_BAR * quality.kl) for quality in shown]
    return [quality.bits_per_value for quality in shown], [quality.kl for quality in shown], bars


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

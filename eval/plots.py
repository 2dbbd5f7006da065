"""The one plot of every report: size against what it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cuvee.eval.quality import Quality

__all__ = ["plot_quality"]

_MARKERS = "osD^vP"


def plot_quality(
    path: Path, curves: Mapping[str, Sequence[Quality]], points: Sequence[Quality], title: str = ""
) -> None:
    """Write a PNG: bits a value against KL, both logarithmic, with bars of one standard error.

    Args:
        path: file to write; its folder is made.
        curves: methods with a dial, one measured series each.
        points: methods with one setting.
        title: over the plot.

    Raises:
        ImportError: matplotlib is not installed (install `cuvee[plot]`).
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ImportError("the plot needs matplotlib: install cuvee[plot]") from error
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # No pyplot and no global backend: a library must not decide what the caller's figures use.
    with mpl.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        colors = ["#8c1c3f", "#d1793b", "#3b6ea8", "#4f7f52"]
        for index, (label, series) in enumerate(curves.items()):
            shown = sorted((q for q in series if q.kl > 0), key=lambda q: q.bits_per_value)
            axes.errorbar(
                [q.bits_per_value for q in shown],
                [q.kl for q in shown],
                [_bar(q) for q in shown],
                marker="o",
                markersize=4,
                capsize=2,
                linewidth=1.8,
                color=colors[index % len(colors)],
                label=label,
            )
        for index, quality in enumerate(q for q in points if q.kl > 0):
            axes.errorbar(
                [quality.bits_per_value],
                [quality.kl],
                [_bar(quality)],
                marker=_MARKERS[index % len(_MARKERS)],
                markersize=7,
                capsize=2,
                linestyle="none",
                color="#555555",
            )
            axes.annotate(
                quality.name,
                (quality.bits_per_value, quality.kl),
                xytext=(8, 5),
                textcoords="offset points",
                color="#333333",
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = [0.125, 0.25, 0.5, 1, 2, 4, 8, 16]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        sizes = [q.bits_per_value for series in (*curves.values(), points) for q in series if q.kl > 0]
        axes.set_xlim(min([*sizes, 0.5]) / 1.2, max([*sizes, 8]) * 1.3)
        axes.set_xlabel("bits a value, all bytes counted (the model stores 16)")
        axes.set_ylabel("KL to the exact cache, nats a token")
        axes.grid(True, which="major", color="#e5e5e5", linewidth=0.8)
        axes.set_axisbelow(True)
        if curves:
            axes.legend(frameon=False)
        if title:
            axes.set_title(title, loc="left")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _bar(quality: Quality) -> float:
    """Half the height of the bar; cut where it would leave a logarithmic axis."""
    return min(quality.kl_stderr or 0.0, 0.95 * quality.kl)

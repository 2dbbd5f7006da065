"""The plots of a report: size against KL and against task scores, layers, throughput.

    report --size_kl, size_scores, layers, throughput--> Figure | None --write_plots--> NAME.png, NAME.svg

Every plot is a function of the report's dict alone; one that finds nothing to show gives None. No pyplot and no global
backend: a library must not decide what the caller's figures use. Colors are those of Okabe and Ito, which keep apart
for color-blind readers (jfly.uni-koeln.de/color).
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuvee.codec.profile import PRESET_KL
from cuvee.eval.files import write_atomically
from cuvee.eval.methods import EXACT, family_label
from cuvee.eval.quality import Quality

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "PLOTS",
    "add_heading",
    "add_title",
    "family_rank",
    "is_learned",
    "layer_entries",
    "layers",
    "machine",
    "new_figure",
    "plain_log_ticks",
    "plot_quality",
    "save_figure",
    "size_kl",
    "size_scores",
    "styled",
    "throughput",
    "write_plots",
]

Report = Mapping[str, Any]
Entry = Mapping[str, Any]  # of report["quality"] or report["scores"]

_USUAL = ("cuvee/layer", "cuvee/all")
_NOTHING_LEARNED = ("cuvee/generic", "cuvee/lossless")
_TRANSFORMS = ("pca/", "kvtc/")

_BLUE, _VERMILION, _GREEN, _PURPLE, _SKY, _ORANGE = "#0072b2", "#d55e00", "#009e73", "#b0568c", "#56b4e9", "#e69f00"
_CUVEE_COLORS = {"cuvee/layer": _BLUE, "cuvee/all": _VERMILION}
_MORE_COLORS = (_GREEN, _PURPLE, _SKY, _ORANGE)
_GREYS = (("#555555", (0, (5, 2))), ("#777777", (0, (1.5, 1.5))), ("#8c8c8c", (0, (6, 2, 1.5, 2))), ("#9a9a9a", "-"))
_INK, _SOFT, _LINE, _POINT = "#222222", "#666666", "#dddddd", "#333333"
_CURVE_MARKERS = "o^sDvP"
_POINT_MARKERS = "DsvPX<>ph*"
_LEVELS = {EXACT: "-", "destroyed": (0, (4, 3))}  # keys that are horizontal lines among scores, and their dashes

# Text stays text: small files, and the page's own font. DejaVu Sans, by which the labels are laid out, is wider than
# what replaces it where it is not installed, so labels that are apart here are apart there.
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": _INK,
    "axes.axisbelow": True,
    "xtick.color": _SOFT,
    "ytick.color": _SOFT,
    "text.color": _INK,
    "legend.frameon": False,
    "text.parse_math": False,  # a $ in a name is a $
    "svg.fonttype": "none",
    "svg.hashsalt": "cuvee",
}
_WIDTH = 8.0  # inches
_DPI = 150  # 1200 pixels wide: sharp where a page shows it at 800
_SMALLEST_BAR = 0.95  # of a value: where a bar of a logarithmic axis is cut


@dataclass(frozen=True, slots=True)
class _Series:
    """Points of one family, by size: bits per value, height, half of the error bar, and the name of those to mark."""

    label: str
    family: str
    x: list[float]
    y: list[float]
    bars: list[float]
    marks: list[str]


@dataclass(frozen=True, slots=True)
class _Label:
    """A text that wants to be near a point `(x, y)` in data coordinates."""

    text: str
    x: float
    y: float
    color: str = _INK
    size: float = 8.5
    below: bool = False  # prefer below left to above right


def is_learned(family: str) -> bool:
    """Whether a family is the codec with a profile of its own: what a report is about."""
    return family.startswith("cuvee/") and family not in _NOTHING_LEARNED


def family_rank(report: Report, family: str) -> tuple[int, int]:
    """Sorts families: the cache as it is, cuvee's, transform coders, the others as they come, nothing kept last."""
    order = list(dict.fromkeys(str(entry["family"]) for entry in report["quality"]))
    place = order.index(family) if family in order else len(order)
    if is_learned(family):
        return 1, _USUAL.index(family) if family in _USUAL else len(_USUAL) + place
    groups = {EXACT: 0, "cuvee": 2, "pca": 3, "kvtc": 3, "destroyed": 5}
    return groups.get(family.partition("/")[0], 4), place


def layer_entries(report: Report) -> list[Entry]:
    """The few methods whose layers are worth a look: cuvee at `balanced`, and one of each kind to compare with."""
    ours = [e for e in report["quality"] if is_learned(e["family"]) and e["setting"] == "balanced"]
    ours.sort(key=lambda e: family_rank(report, e["family"]))
    target = ours[0]["bits_per_value"] if ours else 2.0
    transforms = [e for e in report["quality"] if e["family"].startswith(_TRANSFORMS)]
    near = sorted(transforms, key=lambda e: abs(e["bits_per_value"] - target))[:1]
    others = [e for key in ("fp8-e4m3", "kivi4", "cachegen") for e in report["quality"] if e["key"] == key]
    return ours[:2] + near + others


def size_kl(report: Report) -> Figure | None:
    """Bits a value against KL, both logarithmic, bars of one standard error.

    Families with several methods are curves, presets marked; the others are points with their names. A thin line
    leads from each anchor of the comparison to the curves: at its KL.
    """
    quality = [entry for entry in report["quality"] if entry["kl"] > 0 and entry["bits_per_value"] > 0]
    destroyed = [float(entry["kl"]) for entry in report["quality"] if entry["family"] == "destroyed"]
    if not quality:
        return None
    curves: list[_Series] = []
    points: list[_Series] = []
    for family in sorted({str(entry["family"]) for entry in quality}, key=lambda name: family_rank(report, name)):
        members = sorted((e for e in quality if e["family"] == family), key=lambda e: float(e["bits_per_value"]))
        series = _Series(
            family_label(family),
            family,
            [e["bits_per_value"] for e in members],
            [e["kl"] for e in members],
            [_bar(e["kl"], e["kl_stderr"]) for e in members],
            [str(e["setting"]) if e["kind"] == "preset" else "" for e in members],
        )
        (curves if len(members) > 1 else points).append(series)
    anchors = [(float(a["bits_per_value"]), float(a["kl"]), _reach(a)) for a in report["comparison"]]
    with styled():
        figure = new_figure(5.4)
        axes = figure.add_subplot()
        add_title(axes, "Size against what it costs", f"{_measured_on(report)}; lower and further left is better")
        _draw_size_kl(figure, axes, curves, points, anchors, destroyed[0] if destroyed else None)
        return figure


def size_scores(report: Report) -> Figure | None:
    """Bits a value against the score, a panel a task, bars of one standard error.

    Lines mark the score with the cache in bfloat16, that of a destroyed cache, and chance.
    """
    scores = report["scores"]
    families = {str(entry["key"]): str(entry["family"]) for entry in report["quality"]}
    families |= {str(s["key"]): str(s["key"]).split("@")[0] for s in scores if s["key"] not in families}
    tasks = [task for task in report["tasks"] if any(s["task"] == task["name"] for s in scores)]
    if not tasks:
        return None
    columns = min(2, len(tasks))
    rows = math.ceil(len(tasks) / columns)
    with styled():
        from matplotlib.lines import Line2D

        figure = new_figure(3.0 * rows + 0.9)
        add_heading(figure, "Size against the scores of tasks")
        grid = figure.subplots(rows, columns, squeeze=False)
        looks = _score_looks(report, families)
        levels = []
        for axes in grid.flat[len(tasks) :]:
            axes.set_axis_off()
        for axes, task in zip(grid.flat, tasks, strict=False):
            axes.set_xlabel("bits per value")
            levels.append(_draw_task(axes, task, [s for s in scores if s["task"] == task["name"]], families, looks))
        figure.draw_without_rendering()  # the heights of the panels, in which names must keep apart
        for axes, named in zip(grid.flat, levels, strict=False):
            _name_levels(figure, axes, named)
        if looks:
            handles = [Line2D([], [], **look) for look in looks.values()]
            labels = [family_label(family) for family in looks]
            note = "Bars and band: one standard error"
            legend = figure.legend(handles, labels, loc="outside lower left", ncols=3, fontsize=8.5, title=note)
            legend.set_alignment("left")
            legend.get_title().set(fontsize=8.5, color=_SOFT)
        return figure


def layers(report: Report) -> Figure | None:
    """Bits of each layer, where a method stores layers apart, and its squared error, as a share of the variance."""
    entries = layer_entries(report)
    if not entries:
        return None
    with_bits = [e for e in entries if all(layer["bits_per_value"] is not None for layer in e["layers"])]
    panels: list[tuple[str, str, list[Entry]]] = [
        ("key_error", "error of the keys", entries),
        ("value_error", "error of the values", entries),
    ]
    if with_bits:
        panels.insert(0, ("bits_per_value", "bits per value", with_bits))
    with styled():
        figure = new_figure(4.3)
        add_heading(figure, "What each layer costs")
        handles: dict[str, Any] = {}
        grid = figure.subplots(1, len(panels), squeeze=False)[0]
        grid[-1].sharey(grid[-2])
        for axes, (field, name, shown) in zip(grid, panels, strict=True):
            axes.set_title(name, fontsize=9.5)
            for rank, entry in enumerate(entries):
                if entry not in shown:
                    continue
                heights = [layer[field] for layer in entry["layers"]]
                color, dashes = _look(str(entry["family"]), rank)
                handles[str(entry["label"])] = axes.plot(
                    range(len(heights)),
                    # A logarithmic axis has no place for an exact layer.
                    [h if h > 0 or field == "bits_per_value" else math.nan for h in heights],
                    color=color,
                    linestyle=dashes,
                    marker=_CURVE_MARKERS[rank % len(_CURVE_MARKERS)],
                    markersize=4.5 if len(heights) <= 24 else 0,
                    linewidth=2.0 if str(entry["family"]).startswith("cuvee/") else 1.3,
                )[0]
            count = len(entries[0]["layers"])
            axes.set_xticks(range(0, count, max(1, math.ceil(count / 8))))
            axes.set_xlabel("layer")
            if field == "bits_per_value":
                axes.set_ylim(bottom=0)
            axes.grid(True, axis="y", color=_LINE, linewidth=0.6)
        if any(layer[field] > 0 for e in entries for layer in e["layers"] for field in ("key_error", "value_error")):
            for axes in grid[-2:]:
                axes.set_yscale("log")
                plain_log_ticks(axes)
        grid[-2].set_ylabel("squared error over variance")
        grid[-1].tick_params(labelleft=False)
        ordered = [str(entry["label"]) for entry in entries]
        figure.legend([handles[n] for n in ordered], ordered, loc="outside lower left", ncols=2, fontsize=9)
        return figure


def throughput(report: Report) -> Figure | None:
    """Speed of encoding and decoding of cuvee's methods, in bytes of 16-bit cache a second."""
    timed = [
        entry
        for entry in report["quality"]
        if str(entry["family"]).startswith("cuvee/")
        and entry["kind"] != "curve"
        and entry["encode_gb_per_s"] is not None
        and entry["decode_gb_per_s"] is not None
    ]
    if not timed:
        return None
    timed.sort(key=lambda e: (family_rank(report, str(e["family"])), float(e["bits_per_value"])))
    fastest = max(max(e["encode_gb_per_s"], e["decode_gb_per_s"]) for e in timed)
    unit, scale = ("GB/s", 1.0) if fastest >= 1 else ("MB/s", 1e3)
    with styled():
        figure = new_figure(0.46 * len(timed) + 1.0)
        add_heading(figure, f"Speed in {unit} of 16-bit cache, {machine(report)}")
        axes = figure.add_subplot()
        for offset, field, name, color in (
            (-0.2, "encode_gb_per_s", "encode", _SKY),
            (0.2, "decode_gb_per_s", "decode", _BLUE),
        ):
            lengths = [scale * float(e[field]) for e in timed]
            bars = axes.barh([row + offset for row in range(len(timed))], lengths, 0.38, color=color)
            texts = [_three(v) for v in lengths]
            texts[0] += f" {name}"
            axes.bar_label(bars, texts, padding=3, fontsize=8.5, color=_SOFT)
        axes.set_yticks(range(len(timed)), [str(e["label"]) for e in timed], color=_INK)
        axes.invert_yaxis()
        axes.margins(x=0.1, y=0.02)
        axes.xaxis.set_visible(False)
        axes.spines[["bottom", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        return figure


PLOTS: dict[str, tuple[Callable[[Report], Figure | None], str]] = {
    "size_kl": (
        size_kl,
        "Size against KL: a curve for what has a dial, a point for what has not, with one standard error. "
        "Thin lines lead from a baseline to the curves at its KL.",
    ),
    "size_scores": (
        size_scores,
        "Size against the score of each task. The lines are the cache in bfloat16, a destroyed cache, and chance.",
    ),
    "layers": (layers, "Size of each layer, where layers are stored apart, and error of its keys and values."),
    "throughput": (throughput, "Speed of encoding and decoding, every step included."),
}
"""The plots of a report by name, in the order in which it shows them, and what they show."""


def write_plots(report: Report, folder: Path) -> dict[str, list[str]]:
    """Write every plot of a report as `NAME.png` and `NAME.svg`.

    Files are written whole or not at all; those of a plot that this report has nothing for are removed, so that a
    folder never shows plots of two reports. The same report gives the same SVG, byte for byte.

    Args:
        report: the dict of `report.json`.
        folder: where the files go; it is made.

    Returns:
        names of the files of each plot, in the order of `PLOTS`.

    Raises:
        ImportError: matplotlib is not installed (install `cuvee[plot]`).
    """
    written: dict[str, list[str]] = {}
    for name, (draw, _) in PLOTS.items():
        figure = draw(report)
        paths = [folder / f"{name}.{suffix}" for suffix in ("png", "svg")]
        for path in paths:
            if figure is None:
                path.unlink(missing_ok=True)
            else:
                save_figure(figure, path)
        if figure is not None:
            written[name] = [path.name for path in paths]
    return written


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
        ImportError: matplotlib is not installed (install `cuvee[plot]`).
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
        _draw_size_kl(figure, axes, [s for s in series if s.x], single, [], None)
    save_figure(figure, path)


def _from_quality(label: str, family: str, shown: Sequence[Quality]) -> _Series:
    return _Series(
        label,
        family,
        [q.bits_per_value for q in shown],
        [q.kl for q in shown],
        [_bar(q.kl, q.kl_stderr) for q in shown],
        [q.name if q.name in PRESET_KL else "" for q in shown],
    )


@contextmanager
def styled() -> Iterator[None]:
    """The style of the plots, for as long as they are made or written; the caller's settings come back."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ImportError("the plots need matplotlib: install cuvee[plot]") from error
    with mpl.rc_context(_STYLE):
        yield


def new_figure(height: float) -> Figure:
    """A figure of the width of all plots, `height` inches high, without a global backend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write whole or not at all, without dates or versions in the file."""
    dropped = ("Date", "Creator", "Format", "Type") if path.suffix == ".svg" else ("Software",)
    data = io.BytesIO()
    with styled():
        figure.savefig(data, format=path.suffix[1:], metadata=dict.fromkeys(dropped))
    write_atomically(path, data.getvalue())


def _draw_size_kl(
    figure: Figure,
    axes: Axes,
    curves: Sequence[_Series],
    points: Sequence[_Series],
    anchors: Sequence[tuple[float, float, float | None]],
    destroyed: float | None,
) -> None:
    labels: list[_Label] = []
    for bits, kl, reach in anchors:
        if reach is not None and reach < bits:
            axes.plot([reach, bits], [kl, kl], color="#aaaaaa", linewidth=0.7, zorder=1.5)
    for rank, series in enumerate(curves):
        color, dashes = _look(series.family, rank)
        ours = series.family.startswith("cuvee/")
        axes.errorbar(
            series.x,
            series.y,
            series.bars,
            color=color,
            linestyle=dashes,
            linewidth=2.2 if ours else 1.4,
            marker=_CURVE_MARKERS[rank % len(_CURVE_MARKERS)],
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
                labels.append(_Label(name, x, y, color, below=True))
    for series in points:
        axes.errorbar(
            series.x, series.y, series.bars, fmt="D", color=_POINT, markersize=5.5, elinewidth=0.9, zorder=3.5
        )
        labels.append(_Label(series.label, series.x[0], series.y[0]))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _size_axis(axes, [x for series in (*curves, *points) for x in series.x])
    plain_log_ticks(axes)
    axes.set_xlabel("bits per value, every byte counted (the cache has 16)")
    axes.set_ylabel("KL to the exact cache, nats per token")
    axes.grid(True, which="major", color=_LINE, linewidth=0.6)
    if destroyed is not None and destroyed > 0:
        axes.axhline(destroyed, color=_SOFT, linewidth=1, linestyle=(0, (4, 3)))
        low, high = axes.get_ylim()
        axes.set_ylim(low, max(high, 2 * destroyed))
        axes.annotate(
            f"destroyed cache: {_three(destroyed)}",
            (1, destroyed),
            xycoords=axes.get_yaxis_transform(),
            xytext=(-2, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8.5,
            color=_SOFT,
        )
    if curves:
        axes.legend(loc="lower left", fontsize=9, handlelength=2.6)
    _place(figure, axes, labels, [(s.x, s.y) for s in (*curves, *points)])


def _score_looks(report: Report, families: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """How each family is drawn in every panel of `size_scores`: curves in color, single methods as dark markers."""
    shown = {str(s["key"]) for s in report["scores"] if s["bits_per_value"] and s["key"] not in _LEVELS}
    count = Counter(families[key] for key in shown)
    looks: dict[str, dict[str, Any]] = {}
    for rank, family in enumerate(sorted(count, key=lambda name: family_rank(report, name))):
        color, dashes = _look(family, rank)
        if count[family] > 1:
            marker = _CURVE_MARKERS[rank % len(_CURVE_MARKERS)]
            looks[family] = {"color": color, "linestyle": dashes, "linewidth": 1.8, "marker": marker, "markersize": 4.5}
        else:
            color = _GREEN if family.startswith("cuvee/") else _POINT
            marker = _POINT_MARKERS[rank % len(_POINT_MARKERS)]
            looks[family] = {"color": color, "linestyle": "none", "marker": marker, "markersize": 6}
    return looks


def _draw_task(
    axes: Axes,
    task: Mapping[str, Any],
    scores: Sequence[Entry],
    families: Mapping[str, str],
    looks: Mapping[str, Mapping[str, Any]],
) -> list[tuple[float, str]]:
    """One panel of `size_scores`; returns its horizontal lines, height and name."""
    better = "higher" if task["higher_is_better"] else "lower"
    axes.set_title(f"{task['name']}  ({task['metric']}, {better} is better)", fontsize=9.5)
    levels: list[tuple[float, str]] = []
    for score in scores:
        if score["key"] in _LEVELS:
            level, error = float(score["score"]), score["stderr"]
            levels.append((level, str(score["key"])))
            axes.axhline(level, color=_SOFT, linewidth=1, linestyle=_LEVELS[score["key"]], zorder=2)
            if score["key"] == EXACT and error:
                axes.axhspan(level - error, level + error, color="#000000", alpha=0.07, linewidth=0, zorder=1)
    if task["chance"] is not None:
        levels.append((float(task["chance"]), "chance"))
        axes.axhline(float(task["chance"]), color=_SOFT, linewidth=1, linestyle=(0, (1, 2)), zorder=2)
    sizes: list[float] = []
    for family, look in looks.items():
        members = [s for s in scores if families[str(s["key"])] == family and s["bits_per_value"]]
        members.sort(key=lambda s: float(s["bits_per_value"]))
        x = [float(s["bits_per_value"]) for s in members]
        sizes += x
        bars = [float(s["stderr"] or 0) for s in members]
        axes.errorbar(x, [float(s["score"]) for s in members], bars, elinewidth=0.9, **look)
    axes.set_xscale("log", base=2)
    _size_axis(axes, sizes)
    axes.margins(y=0.12)
    axes.grid(True, axis="y", color=_LINE, linewidth=0.6)
    return levels


def _name_levels(figure: Figure, axes: Axes, levels: Sequence[tuple[float, str]]) -> None:
    """Names of horizontal lines to the right of the axes, moved apart where lines are close."""
    low, high = axes.get_ylim()
    gap = 11.0 / 72 * figure.dpi / axes.bbox.height * (high - low)
    at = -math.inf
    for level, name in sorted(levels):
        at = max(level, at + gap)
        axes.text(
            1.01, at, name, transform=axes.get_yaxis_transform(), va="center", fontsize=8, color=_SOFT, clip_on=False
        )


def _place(
    figure: Figure,
    axes: Axes,
    labels: Sequence[_Label],
    drawn: Sequence[tuple[list[float], list[float]]],
) -> None:
    """Put each label beside its point where it covers least: no other label, no curve, nothing outside the axes.

    Greedy, in order of the labels; a label that had to go far gets a thin line to its point.

    Args:
        figure: of `axes`; it is laid out first, for places are chosen in pixels.
        axes: to write into.
        labels: what to place.
        drawn: points `(x, y)` of what must stay visible, joined by straight lines.
    """
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()
    pixel = figure.dpi / 72
    to_pixels = axes.transData.transform
    ink: list[tuple[float, float]] = []
    for xs, ys in drawn:
        corners = [tuple(map(float, to_pixels(pair))) for pair in zip(xs, ys, strict=True)]
        ink += [(a + i * pixel, b + j * pixel) for a, b in corners for i, j in _MARKER_SHAPE]
        for (ax, ay), (bx, by) in pairwise(corners):
            steps = max(1, int(math.hypot(bx - ax, by - ay) / (3 * pixel)))
            ink += [(ax + (bx - ax) * i / steps, ay + (by - ay) * i / steps) for i in range(1, steps)]
    inside = axes.bbox
    legend = axes.get_legend()
    taken = [] if legend is None else [legend.get_window_extent()]
    for label in labels:
        x, y = map(float, to_pixels((label.x, label.y)))
        text = axes.annotate(
            label.text,
            (label.x, label.y),
            xytext=(0, 0),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=label.size,
            color=label.color,
            zorder=6,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.3},
        )
        text.set_in_layout(False)
        extent = text.get_window_extent()
        wide, tall = extent.width, extent.height
        places: list[tuple[float, float, float, float]] = []  # cost, offset to the middle of the text, distance
        for rank, (turn, radius) in enumerate(_candidates(label.below)):
            right, up = math.cos(turn), math.sin(turn)
            dx = right * radius * pixel + wide / 2 * max(-1.0, min(1.0, 1.6 * right))
            dy = up * radius * pixel + tall / 2 * max(-1.0, min(1.0, 1.6 * up))
            box = Bbox.from_bounds(x + dx - wide / 2, y + dy - tall / 2, wide, tall)
            over = sum(_overlap(box, other) for other in taken) / (wide * tall)
            out = 1 - _overlap(box, inside) / (wide * tall)
            covered = sum(box.x0 <= a <= box.x1 and box.y0 <= b <= box.y1 for a, b in ink)
            places.append((60 * over + 60 * out + covered + 0.12 * rank, dx, dy, radius))
        _, dx, dy, radius = min(places)
        text.set_position((dx / pixel, dy / pixel))
        taken.append(text.get_window_extent())
        if radius > _RADII[1]:
            axes.annotate(
                "",
                (label.x, label.y),
                xytext=(dx / pixel, dy / pixel),
                textcoords="offset points",
                arrowprops={"arrowstyle": "-", "color": "#999999", "linewidth": 0.6, "shrinkB": 4},
                zorder=2.5,
            )


_MARKER_SHAPE = ((0, 0), (4, 0), (-4, 0), (0, 5), (0, -5))  # points about the middle of a marker
_RADII = (7.0, 11.0, 18.0, 28.0, 40.0)  # points from a point to its label


def _candidates(below: bool) -> list[tuple[float, float]]:
    """Angle and distance of places for a label, the best first."""
    turns = (225, 180, 270, 205, 0, 315, 45, 90, 135) if below else (35, 0, 325, 90, 145, 270, 180, 215)
    return [(math.radians(turn), radius) for radius in _RADII for turn in turns]


def _overlap(a: Any, b: Any) -> float:
    """Area that two boxes share, in square pixels."""
    wide, tall = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
    return float(max(wide, 0.0) * max(tall, 0.0))


def _look(family: str, rank: int) -> tuple[str, Any]:
    """Color and dashes of a family: cuvee's stand out, what it is compared with is grey or dashed."""
    if family in _CUVEE_COLORS:
        return _CUVEE_COLORS[family], "-"
    if family.startswith(_TRANSFORMS):
        return _GREYS[rank % len(_GREYS)]
    return _MORE_COLORS[rank % len(_MORE_COLORS)], "-"


def _size_axis(axes: Axes, sizes: Sequence[float]) -> None:
    """Ticks at powers of two of bits per value."""
    low, high = min([*sizes, 0.5]), max([*sizes, 8.0])
    ticks = [2.0**n for n in range(math.ceil(math.log2(low)) - 1, math.floor(math.log2(high)) + 2)]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(low / 1.2, high * 1.3)


def plain_log_ticks(axes: Axes) -> None:
    """Decades as plain numbers, and 2 and 5 between them where there are few."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axes.get_ylim()
    few = math.log10(high / low) < 2.2
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=20))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10f}".rstrip("0").rstrip(".")))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="y", which="minor", length=0)


def add_heading(figure: Figure, title: str) -> None:
    """A title over a whole figure."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")


def add_title(axes: Axes, title: str, below: str) -> None:
    """A title, and under it one soft line that says what is shown."""
    axes.set_title(title, fontsize=12, fontweight="bold", pad=22)
    axes.annotate(
        below, (0, 1), xycoords="axes fraction", xytext=(0, 7), textcoords="offset points", fontsize=9, color=_SOFT
    )


def _measured_on(report: Report) -> str:
    names = ", ".join(f"“{source['name']}”" for source in report["text"]["evaluation"])
    return f"{report['model']['name']} on {names}, {report['text']['sequences']} sequences"


def machine(report: Report) -> str:
    """What the report was measured on, in a few words."""
    environment = report["environment"]
    return str(environment["gpu"] or f"{environment['cpu']}, {environment['cores']} cores")


def _reach(anchor: Mapping[str, Any]) -> float | None:
    """Where the leftmost of cuvee's curves has the KL of an anchor."""
    found = [
        float(family["bits_per_value"])
        for family in anchor["families"]
        if str(family["family"]).startswith("cuvee/") and family["bits_per_value"] is not None
    ]
    return min(found, default=None)


def _bar(kl: float, error: float | None) -> float:
    """Half the height of the bar; cut where it would leave a logarithmic axis."""
    return min(error or 0.0, _SMALLEST_BAR * kl)


def _three(value: float) -> str:
    """Three significant digits, without an exponent."""
    if not value:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"

"""The plots of a report: size against KL, against the scores of tasks, and against the length of the cache.

    report --size_kl, size_scores, lengths--> Figure | None --write_plots--> NAME.svg

Every plot is a function of the report alone, and None if the report has nothing to show in it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuvee.eval.methods import UNCOMPRESSED, family_label
from cuvee.eval.plots import (
    BLUE,
    CURVE_MARKERS,
    GREEN,
    LINE,
    ORANGE,
    POINT,
    PURPLE,
    SKY,
    SOFT,
    VERMILION,
    Series,
    add_heading,
    add_title,
    bar_length,
    draw_size_kl,
    family_look,
    new_figure,
    plain_log_ticks,
    save_figure,
    size_axis,
    styled,
)
from cuvee.eval.report.families import family_rank, is_learned, label_and_setting
from cuvee.eval.report.schema import Anchor, Report, Score, Task
from cuvee.eval.report.scoring import ABSENT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PLOTS", "lengths", "machine_name", "size_kl", "size_scores", "write_plots"]

_POINT_MARKERS = "DsvPX<>ph*"
_OURS = (BLUE, VERMILION, PURPLE, SKY)  # of the lines over cache lengths: the codec's are in color …
_OTHERS = ("#333333", "#777777", GREEN, ORANGE)  # … and the others gray where there are few
_DASHES = ((0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
_LEVELS = {
    UNCOMPRESSED: "-",
    "destroyed": (0, (4, 3)),
}  # methods drawn as horizontal lines among the scores, and their dashes


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


def size_scores(report: Report) -> Figure | None:
    """Bits per value against the score, with a panel for each task and error bars of one standard error.

    Lines mark the score with the cache in bfloat16, the score with a destroyed cache, and chance.
    """
    scores = [score for score in report.scores if score.key != ABSENT]
    families = {str(entry.key): str(entry.family) for entry in report.quality}
    families |= {str(s.key): str(s.key).split("@")[0] for s in scores if s.key not in families}
    tasks = [task for task in report.tasks if any(s.task == task.name for s in scores)]
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
            levels.append(_draw_task(axes, task, [s for s in scores if s.task == task.name], families, looks))
        figure.draw_without_rendering()  # sets the heights of the panels, in which the names must not touch
        for axes, named in zip(grid.flat, levels, strict=False):
            _name_levels(figure, axes, named)
        if looks:
            handles = [Line2D([], [], **look) for look in looks.values()]
            labels = [family_label(family) for family in looks]
            note = "Bars and band: one standard error"
            legend = figure.legend(handles, labels, loc="outside lower left", ncols=3, fontsize=8.5, title=note)
            legend.set_alignment("left")
            legend.get_title().set(fontsize=8.5, color=SOFT)
        return figure


def lengths(report: Report) -> Figure | None:
    """Bits per value, and KL, against the number of cached tokens, all logarithmic; a line for each method."""
    entries = [e for e in report.lengths if e.kl > 0]
    counts = sorted({int(e.length) for e in entries})
    if len(counts) < 2:
        return None
    shown = {str(e.key): e for e in entries}
    keys = sorted(shown, key=lambda k: (family_rank(report, str(shown[k].family)), -shown[k].bits_per_value))
    ours = [key for key in keys if is_learned(str(shown[key].family))]
    others = [key for key in keys if key not in ours]
    with styled():
        figure = new_figure(4.6 + 0.2 * math.ceil(len(keys) / 3))
        add_heading(figure, "Size and KL as the cache grows")
        panels = zip(
            figure.subplots(1, 2),
            (("bits_per_value", "bits per value"), ("kl", "KL to the exact cache, nats per token")),
            strict=True,
        )
        handles: dict[str, Any] = {}
        for axes, (field, name) in panels:
            axes.set_title(name, fontsize=9.5)
            for key in keys:
                points = sorted((e for e in entries if e.key == key), key=lambda e: int(e.length))
                drawn = [e for e in points if getattr(e, field) > 0]
                if not drawn:
                    continue
                learned = key in ours
                rank = (ours if learned else others).index(key)
                color = _OURS[rank % len(_OURS)] if learned else _OTHERS[rank % len(_OTHERS)]
                handles[key] = axes.errorbar(
                    [int(e.length) for e in drawn],
                    [getattr(e, field) for e in drawn],
                    [bar_length(e.kl, e.kl_stderr) if field == "kl" else 0.0 for e in drawn],
                    color=color,
                    linestyle="-" if learned else _DASHES[rank // len(_OTHERS) % len(_DASHES)],
                    marker=(CURVE_MARKERS + _POINT_MARKERS)[rank % len(CURVE_MARKERS + _POINT_MARKERS)],
                    markersize=4.5,
                    linewidth=2.2 if learned else 1.3,
                    elinewidth=0.8,
                    zorder=4 if learned else 3,
                )
            axes.set_xscale("log", base=2)
            axes.set_xticks(counts, [f"{count:,}" for count in counts])
            axes.minorticks_off()
            axes.set_xlabel("cached tokens")
            axes.grid(True, axis="y", color=LINE, linewidth=0.6)
            axes.set_yscale("log", base=2 if field == "bits_per_value" else 10)
            if field == "kl":
                plain_log_ticks(axes)
            else:
                low, high = axes.get_ylim()
                ticks = [2.0**n for n in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]
                axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
                axes.minorticks_off()
        names = [label_and_setting(shown[key]) for key in handles]
        figure.legend(list(handles.values()), names, loc="outside lower left", ncols=2, fontsize=8.5)
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
    "lengths": (lengths, "Size and KL against the number of cached tokens, with one standard error."),
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


def _score_looks(report: Report, families: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Choose the look of each family in `size_scores`: curves in color, single methods as dark markers."""
    shown = {str(s.key) for s in report.scores if s.bits_per_value and s.key not in _LEVELS}
    count = Counter(families[key] for key in shown)
    looks: dict[str, dict[str, Any]] = {}
    for rank, family in enumerate(sorted(count, key=lambda name: family_rank(report, name))):
        color, dashes = family_look(family, rank)
        if count[family] > 1:
            marker = CURVE_MARKERS[rank % len(CURVE_MARKERS)]
            looks[family] = {"color": color, "linestyle": dashes, "linewidth": 1.8, "marker": marker, "markersize": 4.5}
        else:
            color = GREEN if family.startswith("cuvee/") else POINT
            marker = _POINT_MARKERS[rank % len(_POINT_MARKERS)]
            looks[family] = {"color": color, "linestyle": "none", "marker": marker, "markersize": 6}
    return looks


def _draw_task(
    axes: Axes,
    task: Task,
    scores: Sequence[Score],
    families: Mapping[str, str],
    looks: Mapping[str, Mapping[str, Any]],
) -> list[tuple[float, str]]:
    """Draw one panel of `size_scores`, and return the height and the name of each horizontal line."""
    better = "higher" if task.higher_is_better else "lower"
    axes.set_title(f"{task.name}  ({task.metric}, {better} is better)", fontsize=9.5)
    levels: list[tuple[float, str]] = []
    for score in scores:
        if score.key in _LEVELS:
            level, error = float(score.score), score.stderr
            levels.append((level, str(score.key)))
            axes.axhline(level, color=SOFT, linewidth=1, linestyle=_LEVELS[score.key], zorder=2)
            if score.key == UNCOMPRESSED and error:
                axes.axhspan(level - error, level + error, color="#000000", alpha=0.07, linewidth=0, zorder=1)
    if task.chance is not None:
        levels.append((float(task.chance), "chance"))
        axes.axhline(float(task.chance), color=SOFT, linewidth=1, linestyle=(0, (1, 2)), zorder=2)
    sizes: list[float] = []
    for family, look in looks.items():
        members = sorted(
            (s.bits_per_value, s.score, s.stderr or 0.0)
            for s in scores
            if families[s.key] == family and s.bits_per_value
        )
        if members:
            x, y, bars = map(list, zip(*members, strict=True))
            sizes += x
            axes.errorbar(x, y, bars, elinewidth=0.9, **look)
    axes.set_xscale("log", base=2)
    size_axis(axes, sizes)
    axes.margins(y=0.12)
    axes.grid(True, axis="y", color=LINE, linewidth=0.6)
    return levels


def _name_levels(figure: Figure, axes: Axes, levels: Sequence[tuple[float, str]]) -> None:
    """Write the names of horizontal lines to the right of the axes, moved apart if lines are close."""
    low, high = axes.get_ylim()
    gap = 11.0 / 72 * figure.dpi / axes.bbox.height * (high - low)
    at = -math.inf
    for level, name in sorted(levels):
        at = max(level, at + gap)
        axes.text(
            1.01, at, name, transform=axes.get_yaxis_transform(), va="center", fontsize=8, color=SOFT, clip_on=False
        )


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

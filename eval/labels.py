"""Labels beside the points of a plot, placed where they cover least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Label", "place_labels", "shared_area"]


@dataclass(frozen=True, slots=True)
class Label:
    """A text that belongs near a point `(x, y)` in data coordinates."""

    text: str
    x: float
    y: float
    color: str
    size: float = 8.5
    below: bool = False  # prefer below left to above right


def place_labels(
    figure: Figure,
    axes: Axes,
    labels: Sequence[Label],
    drawn: Sequence[tuple[list[float], list[float]]],
) -> None:
    """Put each label beside its point, where it covers least of other labels and curves, and stays inside the axes.

    The labels are placed greedily, one after the other. If one ends up far away, a thin line leads to its point.

    Args:
        figure: of `axes`. It is laid out first, because places are chosen in pixels.
        axes: to write into.
        labels: what to place.
        drawn: the points `(x, y)` of curves that must stay visible.
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
            over = sum(shared_area(box, other) for other in taken) / (wide * tall)
            out = 1 - shared_area(box, inside) / (wide * tall)
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
    """Angles and distances at which a label may go, the best first."""
    turns = (225, 180, 270, 205, 0, 315, 45, 90, 135) if below else (35, 0, 325, 90, 145, 270, 180, 215)
    return [(math.radians(turn), radius) for radius in _RADII for turn in turns]


def shared_area(a: Any, b: Any) -> float:
    """The area that two boxes share, in square pixels."""
    wide, tall = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
    return float(max(wide, 0.0) * max(tall, 0.0))

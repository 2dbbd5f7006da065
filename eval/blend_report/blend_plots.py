"""The plots of a report on blending: the share recovered against cost and by kind of chunks, and wall time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cuvee.eval import plots
from cuvee.eval.blend_report.selectors import (
    ALONE,
    AVERAGED,
    BEHIND,
    DEFAULT,
    EXACT,
    KINDS_OF_CHUNKS,
    NOTHING,
    UNCORRECTED,
)
from cuvee.eval.documents import Entry, ReportData
from cuvee.eval.formatting import format_percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "BLEND_PLOTS",
    "SHOWN_COST",
    "find_entry",
    "share_cost",
    "share_source",
    "wall_time",
]

SHOWN_COST = 0.3  # at which kinds of chunks and of prompts are compared
_DASHES = ("-", (0, (1.5, 1.5)), (0, (5, 2)), "-", (0, (6, 2, 1.5, 2)))  # of costs, in turn
_LOOKS: dict[str, tuple[str, Any, str]] = {  # selector -> color, dashes, marker
    NOTHING: ("#8c8c8c", (0, (1.5, 1.5)), "d"),
    "random": ("#8c8c8c", (0, (5, 2)), "."),
    "boundary": (plots.BLUE, "-", "o"),
    "hkvd": (plots.VERMILION, "-", "s"),
    "hkvd-gradual": (plots.VERMILION, (0, (4, 2)), "D"),
    "hkvd*boundary": (plots.ORANGE, (0, (4, 2)), "v"),
    "query": (plots.PURPLE, "-", "P"),
    "overlap": (plots.SKY, (0, (4, 2)), "^"),
    "overlap*boundary": (plots.GREEN, (0, (4, 2)), "x"),
    UNCORRECTED: (plots.GREEN, (0, (1.5, 1.5)), "p"),
    DEFAULT: (plots.GREEN, "-", "*"),
}


def find_entry(made: Entry, kv: str, chunks: str, selector: str, cost: float | None) -> Entry | None:
    """Return the measurement of a construction with these chunks, selector and cost, or None."""
    wanted = (kv, chunks, selector, cost)
    found = [e for e in made["entries"] if (e["kv"], e["chunks"], e["selector"], e["cost"]) == wanted]
    return found[0] if found and found[0]["reason"] is None else None


def share_cost(report: ReportData) -> Figure | None:
    """Share recovered against cost by selector, on exact chunks.

    Each construction has a row, with chunks computed alone on the left and then the other kinds that were measured.
    """
    made = [m for m in report["constructions"] if _lines(m, EXACT, ALONE)]
    if not made:
        return None
    with plots.styled():
        figure = plots.new_figure(3.1 * len(made) + 0.9)
        plots.add_heading(figure, "Share of the floor's KL recovered")
        kinds = {k: text for k, text in KINDS_OF_CHUNKS.items() if any(_lines(m, EXACT, k) for m in made)}
        grid = figure.subplots(len(made), len(kinds), squeeze=False, sharey="row", sharex=True)
        handles: dict[str, Any] = {}
        for row, construction in zip(grid, made, strict=True):
            for axes, (chunks, described) in zip(row, kinds.items(), strict=True):
                axes.set_title(f"{construction['name']}: chunks {described}", fontsize=9.5)
                _draw_lines(axes, _lines(construction, EXACT, chunks), handles)
            row[0].set_ylabel("share recovered, %")
        for axes in grid[-1]:
            axes.set_xlabel("cost, % of token-layers")
        legend = figure.legend(handles.values(), handles, loc="outside lower left", ncols=4, fontsize=8.5)
        legend.set_alignment("left")
        return figure


def share_source(report: ReportData) -> Figure | None:
    """Share recovered at one cost with exact and with decoded chunks, with a panel for each construction."""
    made = [m for m in report["constructions"] if m["coded"]]
    if not made:
        return None
    with plots.styled():
        figure = plots.new_figure(3.1 * len(made) + 0.9)
        plots.add_heading(figure, f"Share recovered with decoded chunks, at {format_percent(SHOWN_COST)} cost")
        handles: dict[str, Any] = {}
        for axes, construction in zip(figure.subplots(len(made), 1, squeeze=False)[:, 0], made, strict=True):
            sources = [EXACT, *dict.fromkeys(c["kv"] for c in construction["coded"])]
            bits = {c["kv"]: c["bits_per_value"] for c in construction["coded"] if c["chunks"] == ALONE}
            offset = -0.25
            for selector in (NOTHING, "boundary", DEFAULT):
                for chunks in KINDS_OF_CHUNKS:
                    cost = None if selector == NOTHING else SHOWN_COST
                    found = [(i, find_entry(construction, kv, chunks, selector, cost)) for i, kv in enumerate(sources)]
                    points = [(i + offset, e) for i, e in found if e is not None and e["share"] is not None]
                    offset += 0.07
                    if not points:
                        continue
                    color, _, marker = _LOOKS[selector]
                    handles[f"{points[0][1]['label']}, chunks {chunks}"] = axes.errorbar(
                        [x for x, _ in points],
                        [100 * e["share"] for _, e in points],
                        [100 * (e["share_stderr"] or 0) for _, e in points],
                        color=color,
                        marker=marker,
                        markersize=6,
                        markerfacecolor={ALONE: "white", AVERAGED: color, BEHIND: "0.6"}[chunks],
                        linestyle="none",
                        elinewidth=0.9,
                    )
            plots.compared_with(axes, 0, 100)
            names = [kv if kv == EXACT else f"{kv}\n{bits[kv]:.2f} bits per value" for kv in sources]
            axes.set_xticks(range(len(sources)), names)
            axes.set_title(construction["name"], fontsize=9.5)
            axes.set_ylabel("share recovered, %")
        figure.legend(handles.values(), handles, loc="outside lower left", ncols=3, fontsize=8.5)
        return figure


def wall_time(report: ReportData) -> Figure | None:
    """The time of a blend over that of a full prefill, against the length of the prompt."""
    wall = report["wall_time"]
    if wall is None:
        return None
    with plots.styled():
        figure = plots.new_figure(4.6)
        axes = figure.add_subplot()
        plots.add_title(axes, "Wall time of a blend", "over that of a full prefill in the same round; lower is better")
        tokens = [length["tokens"] for length in wall["lengths"]]
        blends = wall["lengths"][0]["blends"]
        costs = sorted({blend["cost"] for blend in blends})
        for index, blend in enumerate(blends):
            color, _, marker = _LOOKS[blend["selector"]]
            dashes = _DASHES[costs.index(blend["cost"]) % len(_DASHES)]
            label = f"{blend['label']}, {format_percent(blend['cost'])}" if blend["cost"] else str(blend["label"])
            ratios = [length["blends"][index]["ratio"] for length in wall["lengths"]]
            plots.draw_ratios(axes, tokens, ratios, label, color=color, marker=marker, linestyle=dashes)
        decoded = [length["decode"]["ratio"] for length in wall["lengths"]]
        plots.draw_ratios(
            axes, tokens, decoded, "decoding the blobs", color=plots.INK, marker="", linestyle=(0, (4, 2))
        )
        axes.set_xscale("log", base=2)
        axes.set_xticks(tokens, [f"{t:,}" for t in tokens])
        axes.minorticks_off()
        axes.set_yscale("log")
        plots.plain_log_ticks(axes)
        axes.set_xlabel("tokens of the prompt")
        axes.set_ylabel("time over full prefill")
        plots.compared_with(axes, 1)
        figure.legend(loc="outside lower left", ncols=3, fontsize=8.5)
        return figure


BLEND_PLOTS: dict[str, tuple[Callable[[ReportData], Figure | None], str]] = {
    "share_cost": (share_cost, "Share recovered against cost, with one standard error, by selector; exact chunks."),
    "share_source": (
        share_source,
        "Share recovered with exact and with decoded chunks, with one standard error. White: computed alone; "
        "in color: averaged over contexts; grey: cut out of other prompts.",
    ),
    "wall_time": (
        wall_time,
        "Time of a blend over that of a full prefill as prompts grow: median, and the 20th and 80th percentile.",
    ),
}
"""Name -> (how to draw it, its caption), in the order in which a report shows the plots."""


def _lines(made: Entry, kv: str, chunks: str) -> dict[str, list[Entry]]:
    """Return the measurements with one kind of chunks, by selector and in order of cost."""
    found: dict[str, list[Entry]] = {}
    for entry in made["entries"]:
        if (entry["kv"], entry["chunks"]) == (kv, chunks) and entry.get("share") is not None:
            found.setdefault(entry["selector"], []).append(entry)
    return {selector: sorted(entries, key=lambda e: float(e["spent"])) for selector, entries in found.items()}


def _draw_lines(axes: Axes, lines: Mapping[str, Sequence[Entry]], handles: dict[str, Any]) -> None:
    for selector, entries in lines.items():
        color, dashes, marker = _LOOKS[selector]
        shown = [*lines[NOTHING], *entries] if selector not in (NOTHING,) and NOTHING in lines else list(entries)
        handles[str(entries[0]["label"])] = axes.errorbar(
            [100 * e["spent"] for e in shown],
            [100 * e["share"] for e in shown],
            [100 * (e["share_stderr"] or 0) for e in shown],
            color=color,
            linestyle=dashes,
            marker=marker,
            markersize=5,
            linewidth=2.0 if selector == DEFAULT else 1.2,
            elinewidth=0.7,
            zorder=3 if selector == DEFAULT else 2,
        )
    plots.compared_with(axes, 0, 100)

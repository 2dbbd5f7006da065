"""The report of the clients bench as tables, and as a plot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cuvee.eval.bench.frame import Shown, machine_and_vllm
from cuvee.eval.documents import ReportTable
from cuvee.eval.plots import BLUE, GREEN, SOFT, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_clients", "show_clients"]

_COLORS = (SOFT, BLUE, GREEN)  # of the phases


def show_clients(report: Mapping[str, Any]) -> Shown:
    """Make the tables and the plot of a report, which may be unfinished."""
    preface = (
        f"{machine_and_vllm(report)}, lmcache-cli {report['hardware']['lmcache-cli']}. Model {report['model']}. "
        f"Arguments of the server: {' '.join(report['server'])}."
    )
    columns = [
        "variant ", "phase ", "first token, median, ms ", "of no cache ", "99th percentile, ms ", "of no cache ",
        "prompt tokens not computed ",
    ]  # fmt: skip
    tables = []
    for workload in report["workloads"]:
        rows = [
            [variant, phase, *_cells(measured)]
            for variant, found in report["variants"].items()
            for phase, measured in found["workloads"][workload].items()
        ]
        tables.append(ReportTable(columns, rows, workload))
    columns = ["variant ", "MB on disk ", "MB per 1,000 tokens ", "times smaller ", "answers as without a cache "]
    rows = [[variant, *_sizes(found)] for variant, found in report["variants"].items()]
    tables.append(ReportTable(columns, rows, "Sizes and answers"))
    failed = [
        [variant, " ".join(found["error"].splitlines()[:2])]
        for variant, found in report["variants"].items()
        if "error" in found
    ]
    if failed:
        tables.append(ReportTable(["variant ", "why "], failed, "Failed"))
    return Shown("Other people's benchmarks", preface, tables, draw_clients(report))


def _sizes(found: Mapping[str, Any]) -> list[str]:
    disk, same = found.get("disk", {}), found.get("same_answers", {})
    answers = "; ".join(
        f"{phase}: {of['equal']:.0%}, their beginnings {of['leading']:.0%}" for phase, of in same.items()
    )
    return [
        f"{disk['bytes'] / 1e6:.1f}" if disk else "-",
        f"{disk['bytes_per_1000_tokens'] / 1e6:.2f}" if "bytes_per_1000_tokens" in disk else "-",
        f"{disk['ratio']:.2f}" if "ratio" in disk else "-",
        answers or "-",
    ]


def _cells(measured: Mapping[str, Any]) -> list[str]:
    if "error" in measured:
        return [f"failed: {measured['error'].splitlines()[0]}", "", "", "", ""]
    cells = []
    for name in ("p50", "p99"):
        ratio = measured.get(f"{name}_ratio")
        cells += [f"{1e3 * measured[name]:.0f}", "" if ratio is None else f"{ratio:.2f}"]
    return [*cells, f"{measured['hit_rate']:.0%}"]


def draw_clients(report: Mapping[str, Any]) -> Figure | None:
    """Draw the median time to the first token of every variant and workload, over that without a cache.

    Returns:
        The figure, or None before anything was measured.
    """
    phases = list(
        dict.fromkeys(
            phase
            for found in report["variants"].values()
            for measured in found["workloads"].values()
            for phase, values in measured.items()
            if "p50_ratio" in values
        )
    )
    if not phases:
        return None
    variants = list(report["variants"])
    with styled():
        figure = new_figure(1.2 + 0.28 * len(variants) * len(report["workloads"]))
        panels = figure.subplots(len(report["workloads"]), 1, sharex=True, squeeze=False)[:, 0]
        height = 0.8 / len(phases)
        for panel, workload in zip(panels, report["workloads"], strict=True):
            for number, phase in enumerate(phases):
                ratios = [
                    report["variants"][variant]["workloads"][workload].get(phase, {}).get("p50_ratio")
                    for variant in variants
                ]
                places = [at + (number - (len(phases) - 1) / 2) * height for at in range(len(variants))]
                there = [(place, ratio) for place, ratio in zip(places, ratios, strict=True) if ratio is not None]
                panel.barh(
                    [place for place, _ in there], [ratio for _, ratio in there], height, label=phase,
                    color=_COLORS[number % len(_COLORS)],
                )  # fmt: skip
            panel.set_yticks(range(len(variants)), variants)
            panel.invert_yaxis()
            panel.set_title(workload)
            panel.axvline(1, color=SOFT, linewidth=0.8)
        panels[0].legend(loc="lower right", frameon=False)
        panels[-1].set_xlabel("median time to the first token, over that without a cache")
    return figure

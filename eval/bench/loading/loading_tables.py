"""The report of `cuvee bench loading` as tables and as a plot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console

from cuvee.eval import plots
from cuvee.eval.bench.loading.loading_bench import BEST, CACHEGEN, ORACLE, OURS, RAW, tuned
from cuvee.eval.documents import ReportSection, ReportTable, markdown_document
from cuvee.eval.machine import machine_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_loading_report", "loading_markdown", "print_loading_report"]

NOTE = (
    "Met: share of all deadlines; of oracle's: of those that the oracle meets. Over the latter loads: mean KL in "
    "1/1000 nats per token, late answers among them, the same over the oracle's, MB over the link, share of the tokens "
    "computed, and median seconds to the first token. Floor: loads, of all, that lost more than they may."
)


def print_loading_report(report: dict[str, Any], console: Console) -> None:
    """Print a report as tables."""
    console.print(_preface(report), style="dim", highlight=False)
    for table in _tables(report):
        console.print(table.for_terminal(tight=False, wrap=False))
        console.print(f"{table.note}\n", highlight=False)


def loading_markdown(report: dict[str, Any]) -> str:
    """A report as GitHub-flavored Markdown."""
    sections = [
        ReportSection("", table.title, [ReportTable(table.columns, table.rows, "", table.note)])
        for table in _tables(report)
    ]
    return markdown_document("cuvee bench loading", [_preface(report)], sections, {})


def _preface(report: Mapping[str, Any]) -> str:
    machine, planning = report["hardware"], report["planning_ms"]
    line = machine_line(machine, f"NumPy {machine['numpy']}")
    return (
        f"{line}. {report['loads']} loads, floor {report['kl_max']} nats per token, seed {report['seed']}. Planning a "
        f"load in its simulation took {planning['p50']:.0f} ms, 95th percentile {planning['p95']:.0f} ms."
    )


def _tables(report: Mapping[str, Any]) -> list[ReportTable]:
    rows = [
        [
            name, f"{entry['met']:.1%}", _percent(entry["met_of_oracle"]), _milli(entry.get("kl")),
            _ratio(entry.get("kl_over_oracle")), _shown(entry.get("mb"), ".1f"), _percent(entry.get("computed"), 0),
            _shown(entry.get("seconds", {}).get("p50"), ".2f"), str(entry["floor_broken"]),
        ]
        for name, entry in report["policies"].items()
    ]  # fmt: skip
    columns = [
        "policy ", "met", "of oracle's", "KL", "over oracle's", "MB", "computed", "first token, s", "floor broken",
    ]  # fmt: skip
    whole = ReportTable(columns, rows, "All links", NOTE, frozenset(i for i, row in enumerate(rows) if row[0] == OURS))
    return [
        whole,
        _groups(report, "trace", "By kind of link"),
        _groups(report, "mb_per_s", "By mean MB/s"),
        _targets(report),
    ]


def _groups(report: Mapping[str, Any], group: str, title: str) -> ReportTable:
    found = report["groups"][group]
    names = [RAW, tuned(BEST), CACHEGEN, tuned(CACHEGEN), OURS, ORACLE]
    rows = [
        [
            name,
            *(
                f"{_percent(each['policies'][name]['met_of_oracle'], 0)}, {_milli(each['policies'][name].get('kl'))}"
                for each in found
            ),
        ]
        for name in names
    ]
    columns = ["policy ", *(f"{each['is']:g}" if isinstance(each["is"], float) else str(each["is"]) for each in found)]
    return ReportTable(
        columns, rows, title, "Share of the oracle's deadlines that are met, and mean KL in 1/1000 nats."
    )


def _targets(report: Mapping[str, Any]) -> ReportTable:
    targets = report["targets"]
    rows = [
        [name, _ratio(targets["kl_over"][name]), _ratio(targets["least_kl_over"][name])] for name in targets["kl_over"]
    ]
    return ReportTable(
        ["KL over that of ", "cuvee", "oracle"],
        rows,
        "Ratios",
        f"cuvee meets {_percent(targets['met_of_oracle'])} of the oracle's deadlines. The oracle's ratio is a bound "
        "for all policies that load coded chunks.",
    )


def draw_loading_report(report: Mapping[str, Any]) -> Figure:
    """Draw the time to the first token, and the KL, against the link's mean bandwidth."""
    speeds = [each for each in report["groups"]["mb_per_s"] if isinstance(each["is"], float)]
    with plots.styled():
        figure = plots.new_figure(4.4)
        left, right = figure.subplots(1, 2)
        plots.add_title(left, "Loads with a deadline, simulated", "over loads whose deadline the oracle meets")
        looks = (
            (RAW, plots.SOFT), (tuned(BEST), plots.VERMILION), (tuned(CACHEGEN), plots.GREEN), (OURS, plots.BLUE),
            (ORACLE, plots.INK),
        )  # fmt: skip
        for name, color in looks:
            own = [(each["is"], each["policies"][name]) for each in speeds if "kl" in each["policies"][name]]
            x = [speed for speed, _ in own]
            if name != ORACLE:  # it has no time of its own: it takes all there is
                left.plot(x, [entry["seconds"]["p50"] for _, entry in own], marker="o", color=color, label=name)
            if name != RAW:  # it loses nothing
                dashes = (0, (3, 2)) if name == ORACLE else "-"
                label = name if name == ORACLE else None
                right.plot(
                    x, [1e3 * entry["kl"] for _, entry in own], marker="o", color=color, linestyle=dashes, label=label
                )
        left.set_ylabel("time to first token, median, s")
        right.set_ylabel("mean KL, 1/1000 nats per token")
        left.set_yscale("log")
        plots.plain_log_ticks(left)
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            ticks = [each["is"] for each in speeds]
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.minorticks_off()
            axes.set_xlabel("mean bandwidth, MB/s")
        right.set_ylim(bottom=0)
        figure.legend(loc="outside lower left", ncols=3, fontsize=8.5)
        return figure


def _percent(share: float | None, decimals: int = 1) -> str:
    return "-" if share is None else f"{share:.{decimals}%}"


def _milli(kl: float | None) -> str:
    return "-" if kl is None else f"{1e3 * kl:.2f}"


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"

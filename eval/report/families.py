"""The families of methods in a report: which of them were learned, and in what order to show them."""

from __future__ import annotations

from cuvee.eval.methods import UNCOMPRESSED, family_label
from cuvee.eval.report.schema import MethodEntry, Report, Score
from cuvee.eval.report.scoring import ABSENT
from cuvee.eval.stats import exceeds

__all__ = [
    "beyond_error", "family_rank", "is_learned", "is_preset", "name_of", "rows_of",
]  # fmt: skip


def is_learned(family: str) -> bool:
    """Return whether a family is the codec with a learned profile, the subject of a report."""
    return family.startswith("cuvee/") and family != "cuvee/lossless"


def family_rank(report: Report, family: str) -> tuple[int, int]:
    """For sorting families: the uncompressed cache, cuvee, transform coders, all others, the destroyed cache."""
    order = list(dict.fromkeys(str(entry.family) for entry in report.quality))
    rank = order.index(family) if family in order else len(order)
    if is_learned(family):
        return 1, rank
    groups = {UNCOMPRESSED: 0, "cuvee": 2, "pca": 3, "destroyed": 5}
    return groups.get(family.partition("/")[0], 4), rank


def name_of(report: Report, key: str) -> str:
    """Return the label of a method or a family."""
    if key == ABSENT:
        return "the question alone"
    labels = [str(e.label) for e in report.quality if e.key == key]
    return labels[0] if labels else family_label(key)


def rows_of(report: Report, reread: bool) -> list[int]:
    """Return the places of the sequences whose scored tokens repeat a part of their cache, or of those that do not."""
    return [row for kind in report.text.kinds if kind.reread == reread for row in kind.rows]


def is_preset(entry: MethodEntry) -> bool:
    """Return whether an entry is a preset of the codec."""
    return entry.kind == "preset" and is_learned(entry.family)


def beyond_error(report: Report, score: Score) -> str:
    """Return "better" or "worse" if a score differs from 16 bits by more than one standard error, else nothing."""
    difference, error = score.difference, score.difference_stderr
    if not difference or error is None or not exceeds(difference, error):
        return ""
    higher = next(task.higher_is_better for task in report.tasks if task.name == score.task)
    return "better" if (difference > 0) == higher else "worse"

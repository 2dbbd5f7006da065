"""The families of methods in a report: which of them were learned, and in what order to show them."""

from __future__ import annotations

from cuvee.eval.methods import UNCOMPRESSED, family_label
from cuvee.eval.plots import TRANSFORMS
from cuvee.eval.report.schema import MethodEntry, Report, Score
from cuvee.eval.report.scoring import ABSENT

__all__ = [
    "beyond_error", "family_rank", "is_learned", "is_preset", "label_and_setting", "layer_entries", "name_of",
    "rows_of",
]  # fmt: skip

_USUAL = ("cuvee/layer", "cuvee/all")


def is_learned(family: str) -> bool:
    """Return whether a family is the codec with a learned profile, the subject of a report."""
    return family.startswith("cuvee/") and family != "cuvee/lossless"


def label_and_setting(entry: MethodEntry) -> str:
    """Return the label of a method with its setting, which the label of a baseline lacks."""
    label, setting = entry.label, entry.setting
    return label if not setting or label.endswith(setting) else f"{label} @{setting}"


def family_rank(report: Report, family: str) -> tuple[int, int]:
    """For sorting families: the uncompressed cache, cuvee, transform coders, all others, the destroyed cache."""
    order = list(dict.fromkeys(str(entry.family) for entry in report.quality))
    place = order.index(family) if family in order else len(order)
    if is_learned(family):
        return 1, _USUAL.index(family) if family in _USUAL else len(_USUAL) + place
    groups = {UNCOMPRESSED: 0, "cuvee": 2, "pca": 3, "destroyed": 5}
    return groups.get(family.partition("/")[0], 4), place


def layer_entries(report: Report) -> list[MethodEntry]:
    """The few methods whose layers are worth a look: cuvee at `balanced`, and one of each kind to compare it with."""
    ours = [e for e in report.quality if is_learned(e.family) and e.setting == "balanced"]
    ours.sort(key=lambda e: family_rank(report, e.family))
    target = ours[0].bits_per_value if ours else 2.0
    transforms = [e for e in report.quality if e.family.startswith(TRANSFORMS)]
    near = sorted(transforms, key=lambda e: abs(e.bits_per_value - target))[:1]
    others = [e for key in ("fp8-e4m3", "kivi4", "cachegen") for e in report.quality if e.key == key]
    return ours[:2] + near + others


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
    if not difference or error is None or abs(difference) <= error:
        return ""
    higher = next(task.higher_is_better for task in report.tasks if task.name == score.task)
    return "better" if (difference > 0) == higher else "worse"

"""What changed since an earlier report, and whether it got worse.

    old report.json --Figures--+
                               +--> same model, tokens, documents? --> paired differences --> changes, what is missing
    this report -----Figures---+

Both reports must have measured the same tokens and documents, so every difference has the standard error of its pairs.
A figure is worse if it changed in the wrong direction by more than two of these errors, or is no longer there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuvee.codec.errors import FormatError, InputError
from cuvee.eval.report.schema import ChangeEntry, Changes, Report, Score
from cuvee.eval.stats import paired_difference

__all__ = ["Figure", "Figures", "changes_since", "check_comparable", "check_profile_names", "clear_change"]

METRICS = {"bits_per_value": False, "kl": False, "delta_nll": False, "top1": True}
"""The figures of each method that are compared, and whether more is better."""
CLEAR = 2.0  # standard errors
_ROUNDING = 1e-12  # relative: what summing in another order may leave


@dataclass(frozen=True, slots=True)
class Figure:
    """A mean, and the values by sequence or by document that it is the mean of."""

    value: float
    parts: tuple[float, ...]
    more_is_better: bool


@dataclass(frozen=True, slots=True)
class Figures:
    """What a comparison needs of a report.

    Attributes:
        name: of its file, commit and date.
        measured: what the figures depend on, such as the digest of the tokens.
        found: figures by method and metric; the metric of a score is its task.
    """

    name: str
    measured: dict[str, Any]
    found: dict[tuple[str, str], Figure]

    @classmethod
    def load(cls, path: Path) -> Figures:
        """Read a finished report.

        Raises:
            FormatError: the file is not a whole report.
            InputError: the run of this report has not finished.
            OSError: the file cannot be read.
            VersionError: the report has another version.
        """
        report = Report.load(path)
        if not report.complete:
            raise InputError(f"against: {path} is of a run that has not finished; give its command again to go on")
        environment = report.environment
        try:
            return cls.of(report, f"{path.name} of {environment['date']}, commit {environment['commit']}")
        except (KeyError, ValueError) as error:
            raise FormatError(f"{path} is damaged: {error!r}") from error

    @classmethod
    def of(cls, report: Report, name: str = "this report") -> Figures:
        """Take the figures of a report."""
        measured = {
            "model.fingerprint": report.model.fingerprint,
            "model.dtype": report.model.dtype,
            **{f"configuration.{name}": report.configuration[name] for name in ("cache_dtype", "chunk_tokens")},
            "text.tokens_sha256": report.text.tokens_sha256,
            "text.prefix": report.text.prefix,
        }
        measured |= {f"tasks.{task.name}": task.docs_sha256 for task in report.tasks}
        found = {
            (entry.key, metric): _figure(getattr(entry, metric), getattr(entry.per_sequence, metric), better)
            for entry in report.quality
            for metric, better in METRICS.items()
        }
        better = {task.name: task.higher_is_better for task in report.tasks}
        found |= {
            (score.key, score.task): _figure(score.score, score.per_doc or [], better[score.task])
            for score in report.scores
            if _is_mean(score)
        }
        return cls(name, measured, found)


def clear_change(key: str, metric: str, was: Figure, now: Figure) -> ChangeEntry | None:
    """Return how a figure of a method changed; None by up to two standard errors, or what rounding may leave."""
    change = now.value - was.value
    _, error = paired_difference(now.parts, was.parts)
    rounding = _ROUNDING * max(abs(was.value), abs(now.value))
    if abs(change) <= max(CLEAR * (error or 0.0), rounding):
        return None
    worse = (change > 0) is not now.more_is_better
    return ChangeEntry(key, metric, was.value, now.value, error, now.more_is_better, worse)


def check_profile_names(old: Figures, profiles: Sequence[str]) -> None:
    """Raise InputError if an earlier report measured profiles, and none by the name of one of these files."""
    families = {key.partition("@")[0] for key, _ in old.found}
    before = {family for family in families if family.startswith("cuvee/")} - {"cuvee/lossless"}
    now = {f"cuvee/{Path(path).stem}" for path in profiles}
    if before and now and not before & now:
        raise InputError(
            f"against: must have methods of this report's profiles, {', '.join(sorted(now))}, got "
            f"{', '.join(sorted(before))} in {old.name}: methods are named after the files of profiles, so give a copy "
            "the old name"
        )


def check_comparable(old: Figures, new: Figures) -> None:
    """Raise InputError if two reports differ in something that their figures depend on; the message lists it."""
    if different := list(_differences(old.measured, new.measured)):
        raise InputError(
            f"against: must have measured what this report measures, but they differ in {'; '.join(different)}"
        )


def changes_since(old: Figures, report: Report) -> Changes:
    """Find out what changed since an earlier report.

    Args:
        old: of that report.
        report: this one.

    Raises:
        InputError: see `check_comparable`.
    """
    new = Figures.of(report)
    check_comparable(old, new)
    compared = [clear_change(*name, was, new.found[name]) for name, was in old.found.items() if name in new.found]
    missing = [f"{key} {metric}" for key, metric in old.found if (key, metric) not in new.found]
    clear = [change for change in compared if change is not None]
    worse = len(missing) + sum(change.worse for change in clear)
    return Changes(old.name, clear, len(compared) - len(clear), missing, worse)


def _figure(value: float, parts: Sequence[float], more_is_better: bool) -> Figure:
    if not parts:
        raise ValueError("a figure without the values that it is the mean of")
    return Figure(value, tuple(parts), more_is_better)


def _is_mean(score: Score) -> bool:
    """Return whether a score is the mean over its documents, so that documents can be paired."""
    parts = score.per_doc or []
    return bool(parts) and math.isclose(math.fsum(parts) / len(parts), score.score, rel_tol=1e-6, abs_tol=1e-9)


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for name, value in old.items():
        if name in new and new[name] != value:
            yield f"{name} ({_short(value)} and {_short(new[name])})"


def _short(value: Any) -> str:
    text = str(value)
    return f"{text[:12]}…" if len(text) >= 32 else text

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
from cuvee.eval.report.schema import ChangeEntry, Changes, Report, Score, TextInfo
from cuvee.eval.stats import exceeds, paired_difference

__all__ = [
    "Figure", "Figures", "changes_since", "check_comparable", "check_profile_names", "clear_change", "measured",
]  # fmt: skip

METRICS = {"bits_per_value": False, "kl": False, "delta_nll": False, "top1": True}
"""The figures of each method that are compared, and whether more is better."""
_WORDS = {
    "dtype": "a model in {}, not {} (--dtype)",
    "cache_dtype": "caches in {}, not {}",
    "chunk_tokens": "chunks of {} tokens, not {}",
}
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
        measured: what the figures depend on, see `measured`.
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
        docs = {task.name: (task.docs, task.docs_sha256) for task in report.tasks}
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
        return cls(name, measured(report.configuration, report.text, docs), found)


def clear_change(key: str, metric: str, was: Figure, now: Figure) -> ChangeEntry | None:
    """Return how a figure of a method changed; None by up to two standard errors, or what rounding may leave."""
    change = now.value - was.value
    _, error = paired_difference(now.parts, was.parts)
    rounding = _ROUNDING * max(abs(was.value), abs(now.value))
    if abs(change) <= rounding or not exceeds(change, CLEAR * (error or 0.0)):
        return None
    worse = (change > 0) is not now.more_is_better
    return ChangeEntry(key, metric, was.value, now.value, error, now.more_is_better, worse)


def check_profile_names(old: Figures, profiles: Sequence[str], model: str) -> None:
    """Raise InputError if an earlier report measured profiles, and none by the name of one of these files.

    The message says first if the report's model has another name than `model`: then its profiles are others, too.
    """
    families = {key.partition("@")[0] for key, _ in old.found}
    before = {family for family in families if family.startswith("cuvee/")} - {"cuvee/lossless"}
    now = {f"cuvee/{Path(path).stem}" for path in profiles}
    if before and now and not before & now:
        was = old.measured.get("model")
        other = "" if was == model else f"be of the model {model}, not {was}, and "
        raise InputError(
            f"against: must {other}have methods of this report's profiles, {', '.join(sorted(now))}, got "
            f"{', '.join(sorted(before))} in {old.name}: methods are named after the files of profiles, so give a copy "
            "the old name"
        )


def measured(
    configuration: Mapping[str, Any], text: TextInfo, docs: Mapping[str, tuple[int, str | None]] | None = None
) -> dict[str, Any]:
    """Return what the figures of a report depend on.

    Args:
        configuration: of the report, or a part that is known.
        text: what it is measured on.
        docs: of each task, how many documents, and their digest, or None.
    """
    names = ("model", "model_fingerprint", "dtype", "cache_dtype", "chunk_tokens", "seed")
    known = {name: configuration[name] for name in names if name in configuration}
    return {**known, "text": text, "tasks": dict(docs or {})}


def check_comparable(old: Figures, new: Mapping[str, Any]) -> None:
    """Raise InputError if two reports differ in something that their figures depend on; the message lists it.

    Args:
        old: of the earlier report.
        new: what this one depends on, as far as it is known, see `measured`.
    """
    different = list(_differences(old.measured, new))
    was, model = old.measured.get("model"), new.get("model")
    if different and "model_fingerprint" not in new and was != model:  # a folder with another name may hold its weights
        different.insert(0, f"the model {was}, not {model} (--model)")
    if different:
        raise InputError(
            f"against: must have measured what this report measures, but {old.name} measured {'; '.join(different)}: "
            "give this report the same options, or compare it with another one"
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
    check_comparable(old, new.measured)
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
    """Say what another report measured, and what this one measures."""
    was, now = (one.get("model_fingerprint") for one in (old, new))
    if now is not None and was != now:
        yield f"other weights, {_short(was)} of {old.get('model')}, not {_short(now)} of {new.get('model')} (--model)"
    for name, words in _WORDS.items():
        if name in new and new[name] != old.get(name):
            yield words.format(old.get(name), new[name])
    if old["text"].tokens_sha256 != new["text"].tokens_sha256:
        yield _texts(old, new)
    if old["text"].prefix != new["text"].prefix:
        yield f"{old['text'].prefix} cached tokens per sequence, not {new['text'].prefix}"
    for task, (count, digest) in old["tasks"].items():
        docs, other = new["tasks"].get(task, (count, None))
        if count != docs:
            yield f"{count} documents of {task}, not {docs} (--limit)"
        elif other not in (None, digest):
            yield f"other documents of {task}: its data or lm-eval changed"


def _short(digest: Any) -> str:
    return f"{str(digest)[:12]}…"


def _texts(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Say how the texts of two reports differ, the first of what may make their tokens others."""
    was, now = old["text"], new["text"]
    names, others = ([source.name for source in text.evaluation] for text in (was, now))
    if names != others:
        return f"the texts {', '.join(names)}, not {', '.join(others)} (--text)"
    changed = [a.name for a, b in zip(was.evaluation, now.evaluation, strict=True) if a.sha256 != b.sha256]
    if changed:
        return f"other tokens of the text {', '.join(changed)}: the file or the model's tokenizer changed"
    for name, option in (("length", "tokens per sequence (--length)"), ("sequences", "sequences (--sequences)")):
        if getattr(was, name) != getattr(now, name):
            return f"{getattr(was, name)} {option}, not {getattr(now, name)}"
    return f"other repeats of the cached text: seed {old.get('seed')}, not {new.get('seed')}"

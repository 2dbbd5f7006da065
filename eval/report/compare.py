"""The regression gate: what changed between two reports, and whether that is too much.

    cuvee compare a.json b.json --fail-if 'kl>5%' --fail-if 'bits>1%@cuvee/*'

    a.json, b.json --load_report--> same model, texts, chunks? --> changes b - a, with paired errors --> failures

A condition says what must not happen:

    METRIC (>|<) NUMBER[%|se] [@METHODS[:TASKS]]

    kl>0.001               the KL of some method rose by more than 0.001 nats
    kl>5%@cuvee/*          ... of some method of cuvee, by more than 5 % of the old value
    top1<-2se              top-1 agreement fell by more than two standard errors of the change
    score<-2se@cuvee/*:cuvee_kv_*    ... or a score of such a method on such a task did

If both reports measured the same tokens or documents, the standard error is that of the paired differences.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cuvee.codec.errors import InputError
from cuvee.codec.learning.divergence import stderr
from cuvee.codec.support.suggest import suggestion
from cuvee.eval.documents import Entry, ReportData
from cuvee.eval.report.report_file import METRIC_FIELDS, SPEEDS
from cuvee.eval.stats import paired_difference

__all__ = ["Change", "Comparison", "Condition", "Failure", "Missing", "compare_reports", "print_comparison"]

_NOTICEABLE_ERRORS, _NOTICEABLE_SHARE = 2.0, 0.01
_ROUNDING = 1e-12  # relative
_CONDITION = re.compile(
    r"\s*(?P<metric>\w+)\s*(?P<sign>[<>])\s*(?P<limit>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(?P<unit>%|se)?"
    r"\s*(?:@\s*(?P<where>\S+))?\s*"
)


@dataclass(frozen=True, slots=True)
class Change:
    """One figure of one method in two reports.

    Attributes:
        key: of the method.
        metric: of `METRIC_FIELDS`.
        task: if the metric is the score.
        a, b: the figure before and after.
        stderr: of `b - a`; None if it is not known.
        paired: whether `stderr` is that of the differences on the same tokens or documents.
        conditions: the conditions on this figure.
        failed: the conditions that are met.
    """

    key: str
    metric: str
    task: str | None
    a: float
    b: float
    stderr: float | None
    paired: bool
    conditions: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()

    @property
    def change(self) -> float:
        """`b - a`, or 0 if that is no more than summing in another order may leave."""
        change = self.b - self.a
        return change if abs(change) > _ROUNDING * max(abs(self.a), abs(self.b)) else 0.0

    @property
    def relative(self) -> float | None:
        """The change as a share of `a`; None if `a` is zero and the change is not."""
        return _ratio(self.change, abs(self.a))

    @property
    def in_errors(self) -> float | None:
        """The change in standard errors; None if there is no such error, or it is not known."""
        return None if self.stderr is None else _ratio(self.change, self.stderr)

    @property
    def noticeable(self) -> bool:
        """Beyond two standard errors, or 1 %."""
        certain = self.stderr is not None and abs(self.change) > _NOTICEABLE_ERRORS * self.stderr
        return certain or abs(self.change) > _NOTICEABLE_SHARE * abs(self.a)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready dict."""
        return {
            **asdict(self),
            "change": self.change,
            "relative": self.relative,
            "in_errors": self.in_errors,
            "conditions": list(self.conditions),
            "failed": list(self.failed),
        }


@dataclass(frozen=True, slots=True)
class Missing:
    """A figure that the first report has and the second does not.

    Attributes:
        key: of the method.
        metric: None if the whole method is missing from "quality".
        task: if the metric is the score.
        reason: why the second report left the method out, if it says so.
    """

    key: str
    metric: str | None
    task: str | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class Failure:
    """A condition that is met; `what` says by what, in a few words."""

    condition: str
    key: str
    metric: str | None
    task: str | None
    what: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two reports side by side.

    Attributes:
        a, b: what each report was made with: versions, date, machine.
        different: what makes their figures hard to compare; empty unless that was allowed.
        conditions: as they were given.
        changes: every figure that both reports have.
        missing: what only the first one has.
        added: keys of methods that only the second one has.
        failures: why the gate is closed; if there are none, it is open.
    """

    a: dict[str, Any]
    b: dict[str, Any]
    different: tuple[str, ...]
    conditions: tuple[str, ...]
    changes: tuple[Change, ...]
    missing: tuple[Missing, ...]
    added: tuple[str, ...]
    failures: tuple[Failure, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready dict."""
        return {
            "a": self.a,
            "b": self.b,
            "different": list(self.different),
            "conditions": list(self.conditions),
            "changes": [change.to_dict() for change in self.changes],
            "missing": [asdict(missing) for missing in self.missing],
            "added": list(self.added),
            "failures": [asdict(failure) for failure in self.failures],
        }


@dataclass(frozen=True, slots=True)
class Condition:
    """A change that must not happen: a metric changes by more or less than a limit.

    Attributes:
        text: as it was given.
        metric: of `METRIC_FIELDS`.
        sign: ">" or "<".
        limit: what the change is compared with, in `unit`.
        unit: "" for the metric's own unit, "%" of the first report's figure, or "se" for standard errors of the change.
        methods, tasks: shell patterns of method keys and task names, case-sensitive.
    """

    text: str
    metric: str
    sign: str
    limit: float
    unit: str
    methods: str = "*"
    tasks: str = "*"

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read `METRIC (>|<) NUMBER[%|se] [@METHODS[:TASKS]]`.

        The key of a method may contain a colon. For scores, the pattern of the tasks comes after the last colon; other
        metrics have no tasks.

        Raises:
            InputError: the text is not a condition, or its metric is not known or has no standard error.

        Example:
            >>> from cuvee.eval.report.compare import Condition
            >>> condition = Condition.parse("kl>5%@cuvee/*")
            >>> condition.metric, condition.sign, condition.limit, condition.unit, condition.methods
            ('kl', '>', 5.0, '%', 'cuvee/*')
        """
        found = _CONDITION.fullmatch(text)
        if found is None:
            raise InputError(
                f"fail_if: {text!r} is not METRIC>NUMBER or METRIC<NUMBER with % or se behind it if wanted, and "
                "@METHODS or @METHODS:TASKS, such as 'kl>5%@cuvee/*'"
            )
        metric, unit, where = found["metric"], found["unit"] or "", found["where"] or "*"
        if metric not in METRIC_FIELDS:
            raise InputError(f"fail_if: no metric {metric!r} in {text!r}; {suggestion(metric, METRIC_FIELDS)}")
        if metric in SPEEDS and unit == "se":
            raise InputError(f"fail_if: {text!r}: a speed has no standard error here; give GB/s or %")
        methods, tasks = where, "*"
        if metric == "score" and ":" in where:
            methods, _, tasks = where.rpartition(":")
            if not methods or not tasks:
                raise InputError(f"fail_if: {text!r} has nothing on one side of its colon; write @*:TASKS or @METHODS")
        return cls(text.strip(), metric, found["sign"], float(found["limit"]), unit, methods, tasks)

    def covers(self, key: str, metric: str | None, task: str | None) -> bool:
        """Return whether the condition covers a figure. If `metric` is None: any figure except the score."""
        mine = self.metric != "score" if metric is None else self.metric == metric
        return mine and fnmatchcase(key, self.methods) and (task is None or fnmatchcase(task, self.tasks))

    def met(self, change: Change) -> bool:
        """Return whether a covered change must not happen.

        In %, a change from zero is infinite; in standard errors, so is a change without any spread.

        Raises:
            InputError: the unit is standard errors, and that of the change is not known.
        """
        amount, unit = change.change, 1.0
        if self.unit == "%":
            unit = abs(change.a) / 100
        elif self.unit == "se":
            if change.stderr is None:
                raise InputError(f"fail_if: {self.text!r}: the standard error of {_named(change)} is not known")
            unit = change.stderr
        if amount:
            amount = amount / unit if unit else math.copysign(math.inf, amount)
        return amount > self.limit if self.sign == ">" else amount < self.limit


def compare_reports(
    a: ReportData, b: ReportData, conditions: Sequence[Condition], allow_different: bool = False
) -> Comparison:
    """Find out what changed from one report to another.

    If only the first report has a method or a score, every condition that covers it fails: a gate must not open because
    what it watches is gone.

    Args:
        a: the report before, from `load_report`.
        b: the report after.
        conditions: what must not happen.
        allow_different: compare the reports even if models, texts, chunks or machines differ.

    Raises:
        InputError: the reports differ in something their figures depend on (the message lists it), or a condition
            covers nothing or needs a standard error that is not known.
    """
    different = tuple(_differences(a, b, any(c.metric in SPEEDS for c in conditions)))
    if different and not allow_different:
        raise InputError(
            f"report: must have been measured like the other one, but they differ in {'; '.join(different)}. "
            "--allow-different compares them anyway"
        )
    changes: list[Change] = []
    failures: list[Failure] = []
    used: set[Condition] = set()
    for change in (*_quality_changes(a, b), *_score_changes(a, b)):
        covering = [c for c in conditions if c.covers(change.key, change.metric, change.task)]
        failed = [c for c in covering if c.met(change)]
        used.update(covering)
        failures += [Failure(c.text, change.key, change.metric, change.task, _amount(change, c.unit)) for c in failed]
        texts = [tuple(c.text for c in found) for found in (covering, failed)]
        changes.append(replace(change, conditions=texts[0], failed=texts[1]))
    missing = tuple(_missing(a, b))
    for lost in missing:
        covering = [c for c in conditions if c.covers(lost.key, lost.metric, lost.task)]
        used.update(covering)
        what = "missing" + (f": {lost.reason}" if lost.reason else "")
        failures += [Failure(c.text, lost.key, lost.metric, lost.task, what) for c in covering]
    for condition in conditions:
        if condition not in used:
            raise InputError(f"fail_if: {condition.text!r} covers nothing: {_what_there_is(a, condition)}")
    known = {entry["key"] for block in ("quality", "scores") for entry in a[block]}
    found = dict.fromkeys(entry["key"] for block in ("quality", "scores") for entry in b[block])
    return Comparison(
        a=_made_with(a),
        b=_made_with(b),
        different=different,
        conditions=tuple(condition.text for condition in conditions),
        changes=tuple(changes),
        missing=missing,
        added=tuple(key for key in found if key not in known),
        failures=tuple(failures),
    )


def _differences(a: ReportData, b: ReportData, timed: bool) -> Iterator[str]:
    """List the differences in what figures depend on, with both values."""
    fields = [
        "model.fingerprint", "configuration.dtype", "configuration.cache_dtype", "configuration.chunk_tokens",
        "text.calibration", "text.evaluation", "text.sequences", "text.length", "text.prefix", "text.tokens_sha256",
    ]  # fmt: skip
    if timed:
        fields += ["environment.cpu", "environment.cores", "environment.gpu"]
    for field in fields:
        block, _, name = field.partition(".")
        before, after = a[block].get(name), b[block].get(name)
        if name in ("calibration", "evaluation"):
            before, after = ([text.get("sha256") for text in texts] for texts in (before, after))
        if before != after:
            yield f"{field} ({_short(before)} and {_short(after)})"
    tasks = {task["name"]: task for task in b["tasks"]}
    for task in a["tasks"]:
        if (other := tasks.get(task["name"])) is not None:
            for name in ("metric", "docs", "docs_sha256"):
                if task.get(name) != other.get(name):
                    yield f"tasks {task['name']}: {name} ({_short(task.get(name))} and {_short(other.get(name))})"


def _short(value: Any) -> str:
    if isinstance(value, list):
        return "+".join(map(_short, value)) or "none"
    text = str(value)
    return f"{text[:12]}…" if len(text) >= 32 else text


def _quality_changes(a: ReportData, b: ReportData) -> Iterator[Change]:
    entries = {entry["key"]: entry for entry in b["quality"]}
    same_tokens = _same(a, b, "text", "tokens_sha256") and _same(a, b, "text", "prefix")
    # A report keeps how much NLL each sequence lost against its own exact cache: enough if that cache is the same.
    same_model = _same(a, b, "model", "fingerprint") and _same(a, b, "configuration", "dtype")
    for before in a["quality"]:
        after = entries.get(before["key"])
        for metric, field in METRIC_FIELDS.items():
            if after is None or metric == "score" or before[field] is None or after[field] is None:
                continue
            values = _per_sequence(before, metric), _per_sequence(after, metric)
            same_sequences = same_tokens and len(before["per_sequence"]["kl"]) == len(after["per_sequence"]["kl"])
            paired = same_sequences and (same_model or metric != "nll")
            error = None if metric == "nll" and not paired else _error(*values, paired)
            yield Change(before["key"], metric, None, before[field], after[field], error, paired and error is not None)


def _same(a: ReportData, b: ReportData, block: str, name: str) -> bool:
    """Return whether both reports have a value and the values are equal."""
    return a[block].get(name) is not None and a[block].get(name) == b[block].get(name)


def _per_sequence(entry: Entry, metric: str) -> list[float] | None:
    """Numbers whose mean changes as the metric does; None for speeds."""
    lists = entry["per_sequence"]
    if metric == "ratio":
        # 16 over a mean, linear around it (delta method).
        bits, ratio = np.array(lists["bits_per_value"]), entry["ratio"]
        return [float(r) for r in ratio * (2 - bits / bits.mean())]
    name = {"bits": "bits_per_value", "nll": "delta_nll"}.get(metric, metric)
    return None if metric in SPEEDS else list(lists[name])


def _error(before: list[float] | None, after: list[float] | None, paired: bool) -> float | None:
    """The standard error of the difference of two means."""
    if before is None or after is None:
        return None
    if paired:
        return paired_difference(after, before)[1]
    return _root(stderr(before), stderr(after))


def _root(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else math.hypot(first, second)


def _score_changes(a: ReportData, b: ReportData) -> Iterator[Change]:
    scores = {(score["key"], score["task"]): score for score in b["scores"]}
    before_tasks, after_tasks = ({task["name"]: task for task in report["tasks"]} for report in (a, b))
    for before in a["scores"]:
        key, task = before["key"], before["task"]
        after = scores.get((key, task))
        if after is None:
            continue
        documents = [tasks.get(task, {}).get("docs_sha256") for tasks in (before_tasks, after_tasks)]
        paired = (
            documents[0] is not None
            and documents[0] == documents[1]
            and _is_mean(before)
            and _is_mean(after)
            and len(before["per_doc"]) == len(after["per_doc"])
        )
        if paired:
            error = paired_difference(after["per_doc"], before["per_doc"])[1]
        else:
            error = _root(before.get("stderr"), after.get("stderr"))
        yield Change(key, "score", task, before["score"], after["score"], error, paired and error is not None)


def _is_mean(score: Entry) -> bool:
    """Return whether a score is the mean over its documents, so that documents can be paired."""
    per_doc: list[float] = score.get("per_doc") or []
    return len(per_doc) > 0 and math.isclose(float(np.mean(per_doc)), score["score"], rel_tol=1e-6, abs_tol=1e-9)


def _missing(a: ReportData, b: ReportData) -> Iterator[Missing]:
    skipped = {entry["key"]: str(entry.get("reason")) for entry in b.get("skipped", [])}
    entries = {entry["key"]: entry for entry in b["quality"]}
    for before in a["quality"]:
        key = before["key"]
        if key not in entries:
            yield Missing(key, None, None, skipped.get(key))
            continue
        for metric, field in METRIC_FIELDS.items():
            if metric != "score" and before[field] is not None and entries[key][field] is None:
                yield Missing(key, metric, None, None)
    scores = {(score["key"], score["task"]) for score in b["scores"]}
    for score in a["scores"]:
        if (score["key"], score["task"]) not in scores:
            yield Missing(score["key"], "score", score["task"], skipped.get(score["key"]) or skipped.get(score["task"]))


def _what_there_is(report: ReportData, condition: Condition) -> str:
    if condition.metric == "score":
        pairs = [f"{score['key']}:{score['task']}" for score in report["scores"]]
        return f"there are scores of {_listed(pairs)}" if pairs else "the first report has no task scores"
    keys = [entry["key"] for entry in report["quality"] if entry[METRIC_FIELDS[condition.metric]] is not None]
    return f"there is {condition.metric} of {_listed(keys)}" if keys else f"no method has {condition.metric}"


def _listed(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _made_with(report: ReportData) -> dict[str, Any]:
    environment = report["environment"]
    names = ("cuvee", "commit", "torch", "transformers", "cpu", "gpu", "date")
    return {"model": report["model"].get("name"), **{name: environment.get(name) for name in names}}


def _ratio(above: float, below: float) -> float | None:
    """A ratio. Zero over zero is zero, and anything else over zero is None."""
    if not above:
        return 0.0
    return above / below if below else None


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print what changed noticeably, or at all if a condition watches it, and why the gate is closed, if it is."""
    for name, made in (("before", comparison.a), ("after", comparison.b)):
        words = [made["model"], f"cuvee {made['cuvee']}", made["commit"], made["gpu"] or made["cpu"], made["date"]]
        _line(console, f"{name:7} {', '.join(str(word) for word in words if word)}", "dim")
    for difference in comparison.different:
        _line(console, f"they differ in {difference}", "yellow")
    shown = [c for c in comparison.changes if c.noticeable or c.failed or (c.conditions and c.change)]
    if shown:
        console.print(_table(shown))
    hidden = len(comparison.changes) - len(shown)
    if hidden:
        _line(console, f"{hidden} {'more ' if shown else ''}figures without a change to speak of", "dim")
    for lost in comparison.missing:
        what = _named(lost) + (f": {lost.reason}" if lost.reason else "")
        _line(console, f"missing  {what}", "yellow")
    for key in comparison.added:
        _line(console, f"new      {key}", "dim")
    for failure in comparison.failures:
        _line(console, f"FAILED   {failure.condition}   {_named(failure)}: {failure.what}", "bold red")
    if comparison.conditions and not comparison.failures:
        met = "the condition is not met" if len(comparison.conditions) == 1 else "none of the conditions is met"
        _line(console, f"passed: {met}", "green")


def _table(changes: Sequence[Change]) -> Table:
    table = Table(title="Changes", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("method", "figure"):
        table.add_column(column, overflow="fold")  # these give way if space is short
    for column in ("before", "after", "change", "%", "± s.e."):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    last = None
    for change in changes:
        cells = [
            change.key if change.key != last else "",
            change.task or change.metric,
            f"{change.a:.4g}",
            f"{change.b:.4g}",
            f"{change.change:+.3g}",
            "" if change.relative is None else f"{100 * change.relative:+.1f}",
            "" if change.stderr is None else f"{change.stderr:.2g}",
            "FAIL" if change.failed else "",
        ]
        last = change.key
        table.add_row(*map(Text, cells), style="bold red" if change.failed else "")
    return table


def _line(console: Console, text: str, style: str) -> None:
    # Not markup, because keys and reasons may contain brackets.
    console.print(Text(text, style), soft_wrap=True)


def _named(figure: Change | Missing | Failure) -> str:
    return " ".join(filter(None, (figure.key, figure.metric, figure.task)))


def _amount(change: Change, unit: str) -> str:
    """A change, in the unit of the condition that it meets."""
    value = {"%": change.relative, "se": change.in_errors}.get(unit, change.change)
    if value is None:
        return f"{change.a:.4g} -> {change.b:.4g}"
    shown = {"%": f"{100 * value:+.3g} %", "se": f"{value:+.3g} s.e."}.get(unit, f"{value:+.3g}")
    return f"{change.a:.4g} -> {change.b:.4g}, {shown}"

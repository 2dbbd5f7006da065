"""`cuvee report`: measure what compression costs a model, next to the baselines, in one folder.

    model, texts, profiles --> quality of each method --> scores of tasks
                                        |                       |
                                        +-----------------------+--> report.json
                                                                          |
                                                          equal-KL ratios, report.md, a plot

`report.json` holds everything. It is written after every measurement and is also the state of an unfinished run: with
the same configuration, a second run continues where the first one stopped. A folder with the results of another
configuration is refused.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from cuvee.calibration.corpus import BUNDLED_MODEL
from cuvee.codec.errors import FormatError, InputError, ProfileError, VersionError
from cuvee.eval.machine import torch_threads
from cuvee.eval.methods import UNCOMPRESSED, baseline
from cuvee.eval.progress import StepLog
from cuvee.eval.quality import Method, QualityBench
from cuvee.eval.report.against import Figures, changes_since, check_comparable, check_profile_names, measured
from cuvee.eval.report.candidates import Candidate
from cuvee.eval.report.comparing import compare
from cuvee.eval.report.rendering import write_report
from cuvee.eval.report.report_config import ReportConfig
from cuvee.eval.report.report_plan import ReportPlan
from cuvee.eval.report.schema import (
    Exact,
    MethodEntry,
    Report,
    Score,
    Skipped,
)
from cuvee.eval.report.scoring import ABSENT, TaskScorer
from cuvee.eval.runs import (
    check_folder,
    need_packages,
    save_results,
    writing,
)

__all__ = ["run_report"]

WORST_KL = 0.3  # nats per token: once a step costs more, coarser ones are not measured
SCORED = (UNCOMPRESSED, "fp8-e4m3", "kivi4", "kivi2", "cachegen", "destroyed")  # baselines whose tasks are run
REPORT_FILE = "report.json"
_CALLED = {"evaluation": "texts", "model_fingerprint": "weights", "curves": "the profiles' curves"}  # in messages


def run_report(
    config: ReportConfig,
    out: Path,
    console: Console,
    *,
    against: Path | None = None,
    force: bool = False,
    command: str = "",
) -> Report:
    """Measure a model, or continue an unfinished report, and write the folder `out`.

    Args:
        config: what to measure.
        out: the folder. If it holds an unfinished report of the same configuration, that is finished; a finished one
            is only rendered again.
        console: where to list the steps.
        against: the `report.json` of an earlier run, to list what changed since.
        force: replace the report of another configuration.
        command: what a reader would type to get the same report.

    Returns:
        The report.

    Whatever ends a run, such as Ctrl-C, leaves a folder that can be continued.

    Raises:
        FormatError, VersionError: `against` is not a report of this version.
        ImportError: a package of `cuvee[eval]` is missing.
        InputError: `out` holds other files or cannot be written, there is no profile to measure, a method is not known,
            texts, tasks or sizes do not fit the model, or `against` has measured something else.
        UnsupportedModelError: cuvee does not support the model.
        ProfileMismatchError: a profile belongs to another model.

    Example:
        >>> from pathlib import Path
        >>> from rich.console import Console
        >>> from cuvee.eval.report.report_config import ReportConfig, quick_config
        >>> from cuvee.eval.report.report_run import run_report
        >>> config = quick_config(ReportConfig(profiles=("books-3m.safetensors",), tasks=()))
        >>> report = run_report(config, Path("out/report"), Console())  # doctest: +SKIP
    """
    learned = [name for name in config.methods if name.partition("/")[0] == "cuvee" and name != "cuvee/lossless"]
    if not config.profiles and (learned or not config.methods):
        name = Path(config.model).name
        raise InputError(
            "profiles: must name one, unless only baselines are measured: learn one with "
            f"`cuvee profile learn {config.model} -o {name}.safetensors`"
        )
    need_packages("cuvee report", "transformers", "matplotlib", *(["lm_eval"] if config.tasks else []))
    check_folder(out, force, resumed=REPORT_FILE)
    old = None if against is None else Figures.load(against)
    if old is not None:
        check_profile_names(old, config.profiles, Path(config.model).name)
    # The bundled model gains nothing from more threads, and on a busy machine several wait for each other.
    with torch_threads(1) if config.model == BUNDLED_MODEL else contextlib.nullcontext():
        return _Run(config, out, console, old, force, command).run()


class _Run:
    """The run behind `run_report`: `report` holds all measurements so far."""

    def __init__(
        self, config: ReportConfig, out: Path, console: Console, old: Figures | None, force: bool, command: str
    ) -> None:
        self.out, self.console, self.old = out, console, old
        self.plan = plan = ReportPlan(config)
        found = self._found(force)
        if self.old is not None:
            check_comparable(self.old, measured(plan.decided, plan.text))
        plan.load()  # which may take minutes
        fresh = plan.describe(command)
        if self.old is not None:
            docs = {name: (count, None) for name, count in plan.scorer.docs.items()} if plan.scorer else {}
            check_comparable(self.old, measured(fresh.configuration, plan.text, docs))
        if found is not None and found.digest != fresh.digest:
            self._check_other(found, fresh.configuration, force)
            found = None
        if found is not None:
            made = len(found.quality) + len(found.scores)
            state = "complete" if found.complete else f"{made} measurements done"
            line = f"{out} holds this run, {state}: continuing"
            console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)
        self.report = found or fresh
        self._log = StepLog(console)

    def _found(self, force: bool) -> Report | None:
        """Return the report in the folder, if it is this run's by all that is known without the weights."""
        path = self.out / REPORT_FILE
        if not path.exists():
            return None
        try:
            found = Report.load(path)
        except (FormatError, VersionError) as error:
            if force:
                return None
            raise InputError(f"out: {path} is not a report: choose another folder, or --force") from error
        decided = self.plan.decided
        if all(value == found.configuration.get(name) for name, value in decided.items()):
            return found
        self._check_other(found, decided, force)
        return None

    def _check_other(self, found: Report, configuration: Mapping[str, Any], force: bool) -> None:
        """Refuse the report of another run in the folder, unless it may be replaced."""
        if force:
            return
        before = found.configuration
        other = [_CALLED.get(name, name) for name, value in configuration.items() if value != before.get(name)]
        what = ", ".join(other) or "format"
        raise InputError(f"out: {self.out} holds another run (it differs in {what}): choose another, or --force")

    def run(self) -> Report:
        """Make all missing measurements, then write the documents."""
        self._began, self._before = time.perf_counter(), self.report.seconds
        self.report.against = None
        self.save()
        if not self.report.complete:
            self._measure()
            self.report.complete = True
            self.save()
        if self.old is not None:
            self.report.against = changes_since(self.old, self.report)
            self.save()
        with writing(self.out):
            write_report(self.report, self.out)
        return self.report

    def save(self) -> None:
        """Write all measurements so far."""
        self.report.seconds = self._before + time.perf_counter() - self._began
        save_results(self.out / REPORT_FILE, self.report.to_dict())

    # Measuring ---------------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        """Measure methods and tasks, and compare the results."""
        log = self._log
        scored = [c for c in self.plan.candidates if self._is_scored(c)] if self.plan.scorer else []
        names = self.plan.scorer.names if self.plan.scorer else []
        log.expect(len(self.plan.candidates) + len(scored) * len(names))
        self._say_scored(scored)
        for candidate in self.plan.candidates:
            if self._has_quality(candidate.key) or self._is_too_coarse(candidate):
                log.skip()
                continue
            with log.step(f"quality: {candidate.key}"):
                self._measure_quality(candidate)
                self.save()
        for name in names:  # the methods of a task share its exact caches
            for candidate in scored:
                if self.plan.scorer is None or self._has_score(candidate.key, name):
                    log.skip()
                    continue
                with log.step(f"{name}: {candidate.key}"):
                    self._score(self.plan.scorer, candidate, name)
                    self.save()
        self._score_without_context(log)
        compare(self.report, self.plan.config.seed)

    def _is_too_coarse(self, candidate: Candidate) -> bool:
        """Return whether a finer step of the same family already costs too much."""
        if not candidate.setting.startswith("2^"):
            return False
        steps = [e for e in self.report.quality if e.family == candidate.family and e.setting.startswith("2^")]
        return bool(steps) and steps[-1].kl > WORST_KL

    def _has_quality(self, key: str) -> bool:
        return key in {entry.key for entry in self.report.skipped} | {entry.key for entry in self.report.quality}

    def _has_score(self, key: str, task: str) -> bool:
        if any(entry.key in (key, task) for entry in self.report.skipped):
            return True
        return any((score.key, score.task) == (key, task) for score in self.report.scores)

    @cached_property
    def _bench(self) -> QualityBench:
        plan = self.plan
        return QualityBench(
            plan.model,
            plan.tokens,
            plan.prefix,
            dtype=plan.config.cache_dtype,
            batch_size=plan.rows,
            device=plan.config.device,
            progress=self._log.within,
        )

    # Methods -----------------------------------------------------------------------------------------------------

    def _measure_quality(self, candidate: Candidate) -> None:
        method = self._make(candidate)
        if method is None:
            return
        try:
            quality = self._bench.run(candidate.label, method, self.plan.config.chunk_tokens)
        except InputError as refused:  # the method cannot store some of the values
            self._skip(candidate.key, refused)
            return
        measured = {one.name: getattr(quality, one.name) for one in fields(quality)}
        self.report.quality.append(
            MethodEntry(
                **measured, key=candidate.key, family=candidate.family, label=candidate.label, kind=candidate.kind,
                setting=candidate.setting,
            )
        )  # fmt: skip
        if candidate.key == UNCOMPRESSED:
            self.report.exact = Exact(list(self._bench.exact_per_sequence))

    def _make(self, candidate: Candidate) -> Method | None:
        """The method, or None if it cannot be made; then the report says why."""
        try:
            return candidate.make()
        except (InputError, ProfileError) as error:
            self._skip(candidate.key, error)
            return None

    def _skip(self, key: str, error: Exception) -> None:
        """Leave a method or a task out, and say so in the report and on the console."""
        self.report.skipped.append(Skipped(key, str(error)))
        self.console.print(f"left out {key}: {error}", style="yellow", highlight=False)

    # Tasks -------------------------------------------------------------------------------------------------------

    def _is_scored(self, candidate: Candidate) -> bool:
        if candidate.key in self.plan.config.methods:
            return True
        if self.plan.config.quick:
            return candidate.key in (UNCOMPRESSED, "kivi2", "destroyed") or candidate.setting == "balanced"
        return candidate.key in SCORED or candidate.kind == "preset"

    def _say_scored(self, scored: Sequence[Candidate]) -> None:
        """Say which methods tasks are scored with, and how to have the others."""
        if not scored:
            return
        families = {candidate.family for candidate in scored}
        others = [candidate for candidate in self.plan.candidates if candidate.family not in families]
        line = f"tasks are scored with {', '.join(candidate.key for candidate in scored)}"
        if others:
            without = ", ".join(dict.fromkeys(candidate.family for candidate in others))
            line += f"; not with {without}, to save time: name one with its setting (--method {others[0].key})"
        self.console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)

    def _score(self, scorer: TaskScorer, candidate: Candidate, name: str) -> None:
        method = self._make(candidate)
        if method is None:
            return
        try:
            task, score = scorer.score(method, name, candidate.key, self._exact_score(name))
        except InputError as refused:
            # The exact cache comes first: if it fails, the model cannot do the task. Later it is the method that fails.
            self._skip(name if candidate.key == UNCOMPRESSED else candidate.key, refused)
            return
        self.report.scores.append(score)
        if all(one.name != name for one in self.report.tasks):
            self.report.tasks.append(task)

    def _exact_score(self, name: str) -> Score | None:
        return next((s for s in self.report.scores if (s.key, s.task) == (UNCOMPRESSED, name)), None)

    def _score_without_context(self, log: StepLog) -> None:
        """Score each task with the question alone. A task without a context of its own has no such score."""
        scorer = self.plan.without_context
        if scorer is None:
            return
        digests = {task.name: task.docs_sha256 for task in self.report.tasks}
        names = [name for name in digests if self.plan.scorer and self.plan.scorer.first(name) != scorer.first(name)]
        log.expect(len(names))
        for name in names:
            if self._has_score(ABSENT, name):
                log.skip()
                continue
            with log.step(f"{name}: the question alone"):
                task, score = scorer.score(baseline(UNCOMPRESSED), name, ABSENT, self._exact_score(name))
                if task.docs_sha256 != digests[name]:
                    self.report.scores.append(score)
                    self.save()

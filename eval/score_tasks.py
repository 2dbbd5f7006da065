"""`cuvee tasks`: measure whether tasks need the cache, and what compressing the cache costs on them.

A variant is a way to answer all documents of a task: with the exact cache, without a usable one, or with a compressed
one.

    exact       the unchanged cache, in 16 bits
    destroyed   a cache of zeros: the model forgets the prompt, including the question
    absent      the exact cache of the question alone, for tasks with a separate context
    NAME        a baseline of `cuvee.eval.methods`, such as fp8-e4m3
    QUALITY     a codec: lossless, high, balanced or small; or kl=, bits=, ratio= or step= with a number, as for `Codec`

Every variant answers the same documents, so differences from `exact` are paired by document. A task is informative if
each control (destroyed, absent) loses more than two standard errors, and if exact is that far above a guess.

Result files call a variant an "arm", the key of the first release.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from cuvee.codec.codec import Codec
from cuvee.codec.errors import FormatError, InputError
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.support.plain_json import parse_json
from cuvee.codec.support.suggest import suggestion
from cuvee.eval.documents import ReportTable
from cuvee.eval.machine import hardware
from cuvee.eval.methods import BASELINES, UNCOMPRESSED, baseline
from cuvee.eval.progress import ProgressBar, progress_bar
from cuvee.eval.quality import CHUNK_TOKENS, CodecMethod, Method
from cuvee.eval.report.scoring import TaskScorer, difference_from
from cuvee.eval.runs import MeasuredModel, metadata_pairs, need_packages, save_results, stoppable_run

__all__ = ["VARIANTS", "TasksConfig", "run_tasks", "shows_something", "tasks_tables"]

VARIANTS = ("exact", "destroyed", "absent", "lossless", "high", "balanced", "small")
CONTROLS = ("destroyed", "absent")
_DIALS = ("kl", "bits", "ratio", "step")
_CLEAR = 2  # standard errors


@dataclass(frozen=True, slots=True)
class TasksConfig:
    """The configuration of `cuvee tasks`.

    Attributes:
        model: see `load_model`.
        tasks: names of tasks, or of groups.
        variants: see the top of this module; `exact` is always scored.
        profile: of the codec; None: it is lossless.
        data: the folder with the files of the tasks; None: the hub.
        metadata: "name=value", for the tasks.
        limit: documents of each task at most.
        dtype: of the model.
        chunk_tokens, batch_size: as in `CuveeLM`.
        seed: of everything that is drawn.

    Raises:
        InputError: a variant is unknown or lacks a number, or `metadata` is not "name=value".
    """

    model: str
    tasks: tuple[str, ...]
    variants: tuple[str, ...] = ("exact", "destroyed", "absent")
    profile: str | None = None
    data: str | None = None
    metadata: tuple[str, ...] = ()
    limit: int | None = None
    dtype: str = "float32"
    chunk_tokens: int = CHUNK_TOKENS
    batch_size: int = 1
    seed: int = 7

    def __post_init__(self) -> None:
        if not self.tasks:
            raise InputError("tasks: must be at least one task or group, got none")
        known = (*VARIANTS, *BASELINES)
        for variant in self.variants:
            if variant not in known and _dial(variant) is None:
                raise InputError(f"variants: {variant!r} is not known; {suggestion(variant, known)}")
        metadata_pairs(self.metadata)
        if self.data is not None and not Path(self.data).expanduser().is_dir():
            raise InputError(f"data: must be the folder with the files of the tasks, got {self.data}")


def run_tasks(config: TasksConfig, out: Path | None, console: Console, command: str = "") -> dict[str, Any]:
    """Score all variants on all tasks.

    Args:
        config: what to score.
        out: a JSON file that is written after each score. Scores in an existing file are not measured again.
        console: for a progress bar, or lines in a log, and one line per score.
        command: what was typed, for readers of the file.

    Returns:
        The contents of the file: "asked", "command", "hardware", "model_fingerprint", "tasks" and "scores". A score has
        its variant as "arm", its "difference" from exact with a standard error, and what `TaskScorer.score` returns.

    Ctrl-C and SIGTERM raise `Interrupted`; the file keeps all scores so far.

    Raises:
        CorruptError, InputError: data of a task is missing or damaged, or a document is too long for the model. The
            file keeps earlier scores.
        FormatError: `out` is not a file of this function.
        ImportError: a package of `cuvee[eval]` is missing.
        Interrupted: Ctrl-C or SIGTERM.
        ProfileError: the profile does not reach the quality of a variant.
        ProfileMismatchError: the profile belongs to another model.
    """
    need_packages("cuvee tasks", "transformers", "lm_eval")
    kept = "nothing is kept without --out" if out is None else f"{out} keeps what was scored; go on with it"
    with stoppable_run(console, kept, config.model):
        return _TasksRun(config, out, console, command).run()


class _TasksRun:
    """The run behind `run_tasks`: `data` holds all scores so far."""

    def __init__(self, config: TasksConfig, out: Path | None, console: Console, command: str) -> None:
        self.config = config
        self.out = out
        self.console = console
        self.model = MeasuredModel.load(config.model, config.dtype)
        profile = None if config.profile is None else self.model.profile(config.profile)
        self.told = {"command": command, "hardware": hardware()}
        asked = {
            **asdict(config),
            # Reports leave folders out. The scores show which variants and tasks there are.
            "model": Path(config.model).name,
            "profile": None if profile is None else profile.id.hex(),
            "data": None if config.data is None else "DIR",
        }
        del asked["tasks"], asked["variants"]
        self.data: dict[str, Any] = {
            "asked": json.loads(json.dumps(asked)),
            **self.told,
            "model_fingerprint": self.model.fingerprint,
            "tasks": [],
            "scores": [],
        }
        if out is not None and out.exists():
            self.data = _resumed(out, self.data)
        self.scorer = self._scorer()
        self.alone = self._scorer(context="absent") if "absent" in config.variants else None
        self.variants = tuple(dict.fromkeys(("exact", *config.variants)))
        # Make all methods before anything is scored: the profile may not reach the quality of a variant.
        used = profile or Profile.unlearned(self.model.layout)
        self.methods = {variant: _method(variant, used) for variant in self.variants}

    def _scorer(self, **metadata: str) -> TaskScorer:
        config = self.config
        data = {} if config.data is None else {"data": config.data}
        return TaskScorer(
            self.model.lm, config.model, config.tasks,
            metadata={**data, **metadata_pairs(config.metadata), **metadata}, limit=config.limit,
            chunk_tokens=config.chunk_tokens, cache_dtype="bfloat16", batch_size=config.batch_size, seed=config.seed,
        )  # fmt: skip

    def run(self) -> dict[str, Any]:
        """Measure and save all missing scores."""
        with progress_bar(self.console, 32) as progress:
            known = {(score["task"], score["arm"]) for score in self.data["scores"]}
            pairs = [(name, variant) for name in self.scorer.names for variant in self.variants]
            missing = [pair for pair in pairs if pair not in known]
            progress.expect(len(missing))
            for name, variant in missing:
                with progress.step(f"{name}: {variant}"):
                    self._score(name, variant, progress)
        return self.data

    def _score(self, name: str, variant: str, progress: ProgressBar) -> None:
        scorer = self.alone if variant == "absent" and self.alone is not None else self.scorer
        task, scored = scorer.score(self.methods[variant], name)
        if variant == "exact":
            self.data["tasks"].append(task)
        elif variant == "absent" and task["docs_sha256"] == _task(self.data, name)["docs_sha256"]:
            progress.say(f"{name}, absent: the task has no context apart from its question")
            return
        else:
            scored |= difference_from(_find_score(self.data, name, "exact"), scored)
        self.data["scores"].append({"arm": variant, **scored})
        self.data.update(self.told)
        progress.say(f"{name}, {variant}: {scored['score']:.4f}")
        if self.out is not None:
            save_results(self.out, self.data)


def _is_codec(variant: str) -> bool:
    return variant not in ("exact", "absent", *BASELINES)


def _method(variant: str, profile: Profile) -> Method:
    if not _is_codec(variant):
        return baseline(variant if variant in BASELINES else UNCOMPRESSED)
    dial = _dial(variant)
    return CodecMethod(Codec(profile, variant) if dial is None else Codec(profile, **dial))


def _dial(variant: str) -> dict[str, Any] | None:
    """The arguments for `Codec` of a variant such as "kl=0.001"; None for any other variant."""
    name, equals, value = variant.partition("=")
    if name not in _DIALS or not equals:
        return None
    try:
        return {name: float(value)}
    except ValueError as error:
        raise InputError(f"variants: must be {name}=NUMBER, got {variant!r}") from error


def _resumed(out: Path, new: dict[str, Any]) -> dict[str, Any]:
    """The contents of a file of the same configuration."""
    try:
        old = parse_json(out.read_text(encoding="utf-8"))
        same = old["asked"] == new["asked"] and old["model_fingerprint"] == new["model_fingerprint"]
        complete = isinstance(old["tasks"], list) and isinstance(old["scores"], list)
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{out}: holds no scores of tasks: name another file") from error
    if not same or not complete:
        raise InputError(f"out: {out} holds scores of another configuration: name another file")
    return dict(old)


def _find_score(found: Mapping[str, Any], name: str, variant: str) -> Mapping[str, Any]:
    score: Mapping[str, Any] = next(s for s in found["scores"] if (s["task"], s["arm"]) == (name, variant))
    return score


def _task(found: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    task: Mapping[str, Any] = next(task for task in found["tasks"] if task["name"] == name)
    return task


def shows_something(found: Mapping[str, Any], name: str) -> bool | None:
    """Return whether a task distinguishes the exact cache from none; None without a control, or with one document.

    Args:
        found: what `run_tasks` returns.
        name: of the task.
    """
    task = _task(found, name)
    scores = {score["arm"]: score for score in found["scores"] if score["task"] == name}
    controls = [scores[name] for name in CONTROLS if name in scores]
    if not controls or any(control["difference_stderr"] is None for control in controls):
        return None
    sign = 1 if task["higher_is_better"] else -1
    lost = [-sign * control["difference"] > _CLEAR * control["difference_stderr"] for control in controls]
    if task["chance"] is None:
        return all(lost)
    docs, guess = task["docs"], task["chance"]
    above = sign * (scores["exact"]["score"] - guess) > _CLEAR * math.sqrt(guess * (1 - guess) / docs)
    return all(lost) and above


def tasks_tables(found: Mapping[str, Any]) -> list[ReportTable]:
    """Make one table per task: the score of each variant, its difference from exact, and the size of its caches."""
    verdicts = {True: "", False: " It shows nothing: leave it out.", None: " There was no control."}
    tables = []
    for task in found["tasks"]:
        rows = []
        for score in found["scores"]:
            if score["task"] == task["name"]:
                exact = score["arm"] == "exact"
                rows.append(
                    [
                        score["arm"],
                        _plus_minus(score["score"], score["stderr"], ""),
                        "" if exact else _plus_minus(score["difference"], score["difference_stderr"], "+"),
                        "" if score["bits_per_value"] is None else f"{score['bits_per_value']:.2f}",
                    ]
                )
        guess = "" if task["chance"] is None else f", a guess {task['chance']:.3f}"
        better = "more" if task["higher_is_better"] else "less"
        tables.append(
            ReportTable(
                ["variant ", task["metric"], "difference from exact", "bits per value"],
                rows,
                title=f"{task['name']}: {task['metric']} ({better} is better{guess}), {task['docs']} documents",
                note=(task["description"] + verdicts[shows_something(found, task["name"])]).strip(),
            )
        )
    return tables


def _plus_minus(value: float, error: float | None, sign: str) -> str:
    return f"{value:{sign}.4f}" + ("" if error is None else f" ± {error:.4f}")

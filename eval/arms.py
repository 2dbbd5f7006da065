"""What tasks show, and what compression costs on them: `cuvee tasks`.

An arm is a way to answer all documents of a task: with the exact cache, without a usable one, or with a compressed one.

    exact       the cache as it is, in 16 bits
    destroyed   a cache of zeros: the prompt is forgotten, question included
    absent      the exact cache of the question alone, if the task has a context apart from it
    NAME        a baseline of `cuvee.eval.methods`, such as fp8-e4m3
    QUALITY     a codec: lossless, high, balanced or small; or kl=, bits=, ratio= or step= with a number, as for `Codec`

Every arm gets the same documents, so differences from `exact` are taken document by document. A task shows something if
each control (destroyed, absent) loses more than two standard errors, and if exact is as far above a guess.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from cuvee.codec.codec import Codec
from cuvee.codec.data.corpus import load_model
from cuvee.codec.errors import FormatError, InputError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.fingerprint import model_fingerprint
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.support.plain_json import parse_json
from cuvee.codec.support.suggest import suggestion
from cuvee.eval.documents import ReportTable
from cuvee.eval.machine import hardware
from cuvee.eval.methods import BASELINES, UNCOMPRESSED, baseline
from cuvee.eval.progress import Plan, ProgressBar, progress_bar
from cuvee.eval.quality import CHUNK_TOKENS, CodecMethod, Method
from cuvee.eval.report.scoring import TaskScorer
from cuvee.eval.runs import interruptible, load_matching_profile, save_results
from cuvee.eval.stats import paired_difference

__all__ = ["ARMS", "ArmsConfig", "arms_tables", "run_arms", "shows_something"]

ARMS = ("exact", "destroyed", "absent", "lossless", "high", "balanced", "small")
CONTROLS = ("destroyed", "absent")
_DIALS = ("kl", "bits", "ratio", "step")
_CLEAR = 2  # standard errors
_ABSENT_SHARE = 0.1  # of the time of another arm, as a first guess: questions are short


@dataclass(frozen=True, slots=True)
class ArmsConfig:
    """What to score.

    Attributes:
        model: see `load_model`.
        tasks: names of tasks, or of groups.
        arms: see the top of this module; `exact` is always scored.
        profile: of the codec; default: nothing learned.
        data: the folder with the files of the tasks; default: the hub.
        metadata: "name=value", for the tasks.
        limit: documents of each task at most.
        dtype: of the model.
        chunk_tokens, batch_size: as in `CuveeLM`.

    Raises:
        InputError: an arm is not known, or asks for no number, or `metadata` is not "name=value".
    """

    model: str
    tasks: tuple[str, ...]
    arms: tuple[str, ...] = ("exact", "destroyed", "absent", "high", "balanced")
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
            raise InputError("tasks: name at least one")
        for arm in self.arms:
            if arm not in (*ARMS, *BASELINES) and _dial(arm) is None:
                raise InputError(f"arms: {arm!r} is not known; {suggestion(arm, (*ARMS, *BASELINES))}")
        if wrong := [pair for pair in self.metadata if "=" not in pair]:
            raise InputError(f"metadata: {wrong[0]!r} must be name=value")
        if self.data is not None and not Path(self.data).expanduser().is_dir():
            raise InputError(f"data: no folder {self.data}: name the one with the files of the tasks")


def run_arms(config: ArmsConfig, out: Path | None, console: Console, command: str = "") -> dict[str, Any]:
    """Score all arms on all tasks.

    Args:
        config: what to score.
        out: a JSON file that is written after each score. If it exists, what it holds is not scored again.
        console: for a progress bar, or lines in a log, and one line per score.
        command: what was typed, for readers of the file.

    Returns:
        What the file holds: "asked", "command", "hardware", "model_fingerprint", "tasks" and "scores". A score has its
        "arm", its "difference" from exact with a standard error, and what `TaskScorer.score` gives.

    Ctrl-C and SIGTERM raise `Interrupted`; the file keeps what was scored.

    Raises:
        CorruptError, InputError: data of a task is missing or damaged, or a document is too long for the model. The
            scores before it are in the file.
        FormatError: `out` is not a file of this function.
        Interrupted: somebody wants it to end.
        ProfileError: the profile does not reach the quality that an arm asks for.
        ProfileMismatchError: it is of another model.
    """

    def farewell() -> None:
        kept = "nothing is kept without --out" if out is None else f"{out} keeps what was scored; go on with it"
        console.print(f"interrupted: {kept}", highlight=False, markup=False, soft_wrap=True)

    with interruptible(farewell):
        return _run_arms(config, out, console, command)


def _run_arms(config: ArmsConfig, out: Path | None, console: Console, command: str) -> dict[str, Any]:
    model = load_model(config.model, config.dtype)
    layout = KVLayout.from_config(model.config, dtype=model.dtype)
    fingerprint = model_fingerprint(model)
    profile = None
    if config.profile is not None:
        profile = load_matching_profile(config.profile, layout, fingerprint, config.model)
    asked = {
        **asdict(config),
        # Reports leave folders out. Which arms and tasks there are is seen from the scores.
        "model": Path(config.model).name,
        "profile": None if profile is None else profile.id.hex(),
        "data": None if config.data is None else "DIR",
    }
    del asked["tasks"], asked["arms"]
    asked = json.loads(json.dumps(asked))
    machine = hardware()
    found: dict[str, Any] = {
        "asked": asked,
        "command": command,
        "hardware": machine,
        "model_fingerprint": fingerprint,
        "tasks": [],
        "scores": [],
    }
    if out is not None and out.exists():
        found = _resumed(out, found)

    def scorer(**metadata: str) -> TaskScorer:
        given = dict(pair.split("=", 1) for pair in config.metadata)
        data = {} if config.data is None else {"data": config.data}
        return TaskScorer(
            model, config.model, config.tasks, metadata={**data, **given, **metadata}, limit=config.limit,
            chunk_tokens=config.chunk_tokens, cache_dtype="bfloat16", batch_size=config.batch_size, seed=config.seed,
        )  # fmt: skip

    given = scorer()
    alone = scorer(context="absent") if "absent" in config.arms else None
    arms = tuple(dict.fromkeys(("exact", *config.arms)))
    # All of them before anything is scored: the profile may not reach what an arm asks for.
    methods = {arm: _method(arm, profile or Profile.generic(layout)) for arm in arms}

    def score(name: str, arm: str, progress: ProgressBar) -> None:
        using = alone if arm == "absent" and alone is not None else given
        task, scored = using.score(methods[arm], name)
        if arm == "exact":
            found["tasks"].append(task)
        elif arm == "absent" and task["docs_sha256"] == _task(found, name)["docs_sha256"]:
            progress.say(f"{name}, absent: the task has no context apart from its question")
            return
        else:
            scored |= _difference(scored, _score(found, name, "exact"))
        found["scores"].append({"arm": arm, **scored})
        found.update(command=command, hardware=machine)
        progress.say(f"{name}, {arm}: {scored['score']:.4f}")
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            save_results(out, found)

    with progress_bar(console, 32) as progress:
        known = {(score["task"], score["arm"]) for score in found["scores"]}
        missing = [(name, arm) for name in given.names for arm in arms if (name, arm) not in known]
        progress.expect(_plan(missing))
        for name, arm in missing:
            with progress.step(f"{name}: {arm}", _kind(name, arm)):
                score(name, arm, progress)
    return found


def _plan(missing: Sequence[tuple[str, str]]) -> Plan:
    """How much there is to do. Nobody knows how long the contexts of a task are before they are read."""
    guess = {_kind(name, arm): _ABSENT_SHARE if arm == "absent" else 1.0 for name, arm in missing}
    return Plan(guess, dict(Counter(_kind(name, arm) for name, arm in missing)))


def _kind(name: str, arm: str) -> str:
    """Arms of a task that take about as long."""
    return f"{name}, absent" if arm == "absent" else name


def _method(arm: str, profile: Profile) -> Method:
    if arm in ("exact", "absent"):
        return baseline(UNCOMPRESSED)
    if arm in BASELINES:
        return baseline(arm)
    dial = _dial(arm)
    return CodecMethod(Codec(profile, arm) if dial is None else Codec(profile, **dial))


def _dial(arm: str) -> dict[str, Any] | None:
    """What "kl=0.001" asks a `Codec` for; None if an arm is no such thing."""
    name, equals, value = arm.partition("=")
    if name not in _DIALS or not equals:
        return None
    try:
        return {name: float(value)}
    except ValueError as error:
        raise InputError(f"arms: {arm!r} must be {name}=NUMBER") from error


def _resumed(out: Path, new: dict[str, Any]) -> dict[str, Any]:
    """What a file holds, if it is of the same configuration."""
    try:
        old = parse_json(out.read_text(encoding="utf-8"))
        same = old["asked"] == new["asked"] and old["model_fingerprint"] == new["model_fingerprint"]
        complete = isinstance(old["tasks"], list) and isinstance(old["scores"], list)
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{out} holds no scores of tasks: name another file") from error
    if not same or not complete:
        raise InputError(f"out: {out} holds scores of another configuration: name another file")
    return dict(old)


def _difference(score: Mapping[str, Any], exact: Mapping[str, Any]) -> dict[str, float | None]:
    if score["per_doc"] is None or exact["per_doc"] is None:
        return {"difference": score["score"] - exact["score"], "difference_stderr": None}
    mean, error = paired_difference(score["per_doc"], exact["per_doc"])
    return {"difference": mean, "difference_stderr": error}


def _score(found: Mapping[str, Any], name: str, arm: str) -> Mapping[str, Any]:
    score: Mapping[str, Any] = next(s for s in found["scores"] if (s["task"], s["arm"]) == (name, arm))
    return score


def _task(found: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    task: Mapping[str, Any] = next(task for task in found["tasks"] if task["name"] == name)
    return task


def shows_something(found: Mapping[str, Any], name: str) -> bool | None:
    """Whether a task tells an exact cache from none; None if there was no control, or a single document.

    Args:
        found: what `run_arms` returns.
        name: of the task.
    """
    task = _task(found, name)
    scores = {score["arm"]: score for score in found["scores"] if score["task"] == name}
    controls = [scores[arm] for arm in CONTROLS if arm in scores]
    if not controls or any(control["difference_stderr"] is None for control in controls):
        return None
    sign = 1 if task["higher_is_better"] else -1
    lost = [-sign * control["difference"] > _CLEAR * control["difference_stderr"] for control in controls]
    if task["chance"] is None:
        return all(lost)
    docs, guess = task["docs"], task["chance"]
    above = sign * (scores["exact"]["score"] - guess) > _CLEAR * math.sqrt(guess * (1 - guess) / docs)
    return all(lost) and above


def arms_tables(found: Mapping[str, Any]) -> list[ReportTable]:
    """One table per task: each arm's score, its difference from exact, and the size of its caches."""
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
                ["arm ", task["metric"], "difference from exact", "bits per value"],
                rows,
                title=f"{task['name']}: {task['metric']} ({better} is better{guess}), {task['docs']} documents",
                note=(task["description"] + verdicts[shows_something(found, task["name"])]).strip(),
            )
        )
    return tables


def _plus_minus(value: float, error: float | None, sign: str) -> str:
    return f"{value:{sign}.4f}" + ("" if error is None else f" ± {error:.4f}")

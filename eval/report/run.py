"""`cuvee report`: what compression costs a model, measured beside the baselines, in one folder anyone can rerun.

    model, texts --> profiles --> quality of every method --> task scores --> equal-KL ratios --> report.json
                        |               |                        |                                     |
                     profiles/    report.json is saved after each of these            report.md, .html, plots

`report.json` holds everything, and is also the state of an unfinished run: started again with the same configuration a
run goes on where it stopped. A folder that holds another configuration's results is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cuvee.codec.codec import Codec
from cuvee.codec.errors import InputError, ProfileError, ProfileMismatch
from cuvee.codec.fingerprint import model_fingerprint
from cuvee.codec.layout import KVLayout
from cuvee.codec.model import check_tokens, prefill
from cuvee.codec.profile import PRESET_KL, Profile
from cuvee.eval.baselines.pca import BUDGETS, STEPS, Kvtc, PcaTransform
from cuvee.eval.bench.machine import hardware, torch_threads
from cuvee.eval.corpus import (
    BUNDLED_MODEL,
    Corpus,
    calibration_windows,
    load_model,
    read_corpus,
    spread_sequences,
)
from cuvee.eval.data import CALIBRATION_TEXTS, EVALUATION_TEXTS
from cuvee.eval.files import write_json
from cuvee.eval.methods import BASELINES, EXACT, Candidate, family_label
from cuvee.eval.protocol import LENGTH, SEED, reread, sample_text
from cuvee.eval.quality import CHUNK_TOKENS, CodecMethod, Method, QualityBench
from cuvee.eval.report.compare import FORMAT, VERSION
from cuvee.eval.report.render import write_report
from cuvee.eval.report.scoring import TaskScorer
from cuvee.eval.stats import compare_at_equal_kl, paired_difference
from cuvee.eval.tasks import LOCAL_TASKS

if TYPE_CHECKING:
    pass

__all__ = ["ANCHORS", "ReportConfig", "quick_config", "run_report"]

ANCHORS = ("fp8-e4m3", "kivi4", "cachegen")  # everything is compared at their KL, and with the other …
FURTHER_ANCHORS = ("int8", "fp8-e5m2", "kivi3", "kivi2", "cachegen-tables-free")  # … baselines at their own
CURVE_OCTAVES = (  # steps beside the presets, the finest first
    -6.0, -5.0, -4.0, -3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0,
)  # fmt: skip
WORST_KL = 0.1  # nats per token: once a step costs more, coarser ones are not measured
GENERIC_OCTAVES = (-4.0, -3.0, -2.0, -1.0)
SCORED = (EXACT, "fp8-e4m3", "kivi4", "kivi2", "cachegen", "destroyed")  # baselines whose tasks are run
WHOLE_CACHE_VALUES = 4096  # a token: up to here one basis for all layers is learned unasked
QUICK_TASKS = ("cuvee_kv_16", "cuvee_reread_nll")
QUICK_LIMIT = 50
_REPORT = "report.json"


@dataclass(frozen=True, slots=True)
class ReportConfig:
    """What a report measures.

    Attributes:
        model: a folder, a hub name, or "books-3m".
        profiles: profile files to measure; none: profiles are learned.
        groups: what to learn; none: "layer", and "all" where a token's cache has at most 4,096 values.
        calibration: texts to learn from (see `cuvee.eval.corpus`); `calibration_sequences` of them at most.
        samples: further sequences to learn from, sampled from the model itself.
        evaluation: texts to measure on; `sequences` of them at most.
        length, prefix: tokens of a sequence, and how many of them are cached (default: three quarters).
        reread: whether the rest of every second sequence repeats a part of its cache.
        chunk_tokens: tokens coded together.
        tasks: lm-eval tasks; `limit` documents of each at most.
        num_fewshot, chat_template, include_path: see `TaskScorer`.
        metadata: "name=value" for tasks that ask for it, such as "musique=FILE".
        dtype: of the model: "auto" is float32 on a CPU and what the files say elsewhere.
        cache_dtype: of the caches that are coded.
        device: where the model runs and the caches are coded.
        batch_size: sequences per forward pass.
        seed: of the repeats, samples, sampled targets and the bootstrap.
        quick: fewer methods.
    """

    model: str = BUNDLED_MODEL
    profiles: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    calibration: tuple[str, ...] = CALIBRATION_TEXTS
    calibration_sequences: int = 200
    samples: int = 0
    evaluation: tuple[str, ...] = EVALUATION_TEXTS
    sequences: int = 32
    length: int = LENGTH
    prefix: int | None = None
    reread: bool = True
    chunk_tokens: int = CHUNK_TOKENS
    tasks: tuple[str, ...] = LOCAL_TASKS
    limit: int | None = None
    num_fewshot: int | None = None
    chat_template: bool = False
    include_path: str | None = None
    metadata: tuple[str, ...] = ()
    dtype: str = "auto"
    cache_dtype: str = "bfloat16"
    device: str = "cpu"
    batch_size: int = 8
    seed: int = SEED
    quick: bool = False

    def __post_init__(self) -> None:
        for name in ("calibration_sequences", "sequences", "chunk_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: must be at least 1, got {getattr(self, name)}")
        if self.limit is not None and self.limit < 1:
            raise InputError(f"limit: must be at least 1, got {self.limit}")
        if self.samples < 0:
            raise InputError(f"samples: must not be negative, got {self.samples}")
        if wrong := [pair for pair in self.metadata if "=" not in pair]:
            raise InputError(f"metadata: {wrong[0]!r} must be name=value")
        if self.profiles and self.groups:
            raise InputError("groups: are learned, profiles are given; leave one of them out")


def quick_config(config: ReportConfig) -> ReportConfig:
    """The same with fewer sequences, methods, tasks and documents; what was narrower already stays."""
    default = ReportConfig()
    return replace(
        config,
        quick=True,
        calibration_sequences=min(config.calibration_sequences, 64),
        sequences=min(config.sequences, 12),
        tasks=QUICK_TASKS if config.tasks == default.tasks else config.tasks,
        limit=min(config.limit or QUICK_LIMIT, QUICK_LIMIT),
    )


def run_report(
    config: ReportConfig, out: Path, console: Console, *, force: bool = False, command: str = ""
) -> dict[str, Any]:
    """Measure a model, or go on with an unfinished report, and write the folder `out`.

    Args:
        config: what to measure.
        out: the folder; a report of the same configuration there is finished or, if it is, only rendered anew.
        console: where progress goes.
        force: replace another configuration's report.
        command: what a reader would type to get the same.

    Returns:
        the report, JSON-ready.

    Raises:
        InputError: `out` holds something else; texts, tasks or sizes that do not fit the model.
        UnsupportedModel, ProfileMismatch, ProfileError: a model that cuvee does not support, a profile of another one.
    """
    # A model so small gains nothing by more threads of torch, and on a busy machine they wait for each other.
    with torch_threads(1) if config.model == BUNDLED_MODEL else contextlib.nullcontext():
        return _Run(config, out, console, force, command).run()


class _Run:
    """One run: what is measured so far (`data`), and how to measure the rest."""

    def __init__(self, config: ReportConfig, out: Path, console: Console, force: bool, command: str) -> None:
        self.config = config
        self.out = out
        self.console = console
        _check_folder(out, force)
        dtype = ("float32" if config.device == "cpu" else "auto") if config.dtype == "auto" else config.dtype
        self.model = load_model(config.model, dtype, config.device)
        self.layout = KVLayout.from_config(self.model.config, dtype=self.model.dtype)
        self.fingerprint = model_fingerprint(self.model)
        self.given = self._given(config.profiles)
        self.calibration = [] if self.given else [read_corpus(text, config.model) for text in config.calibration]
        self.evaluation = [read_corpus(text, config.model) for text in config.evaluation]
        tokens = spread_sequences(self.evaluation, config.length, config.sequences)
        self.prefix = check_tokens(self.model, tokens, config.prefix)
        self.tokens = reread(tokens, self.prefix, config.seed) if config.reread else tokens
        self.scorer = self._scorer() if config.tasks else None
        self.data = self._resume(self._describe(command), force)
        self._profiles: dict[str, Profile] = {}

    # What is measured --------------------------------------------------------------------------------------------

    def _given(self, paths: Sequence[str]) -> dict[str, Profile]:
        """The profiles in files, by the names of these."""
        profiles: dict[str, Profile] = {}
        for path in paths:
            name = Path(path).stem
            if name in profiles or "@" in name:
                raise InputError(f"profiles: {path} must have a name of its own without an @, which names its methods")
            profile = Profile.load(path)
            profile.check_layout(self.layout)
            if profile.model not in (None, self.fingerprint):
                raise ProfileMismatch(
                    f"{path}: was calibrated on other weights ({profile.model[:12]}…) than those of "
                    f"{self.config.model} ({self.fingerprint[:12]}…): learn one for this model, or leave --profile out"
                )
            profiles[name] = profile
        return profiles

    def _scorer(self) -> TaskScorer:
        config = self.config
        return TaskScorer(
            self.model,
            config.model,
            config.tasks,
            include_path=config.include_path,
            metadata=dict(pair.split("=", 1) for pair in config.metadata),
            limit=config.limit,
            num_fewshot=config.num_fewshot,
            chat_template=config.chat_template,
            chunk_tokens=config.chunk_tokens,
            cache_dtype=config.cache_dtype,
            batch_size=config.batch_size,
            seed=config.seed,
        )

    def _groups(self) -> tuple[str, ...]:
        if self.config.groups:
            return self.config.groups
        return ("layer", "all") if self.layout.values_per_token <= WHOLE_CACHE_VALUES else ("layer",)

    def _describe(self, command: str) -> dict[str, Any]:
        """The report before anything is measured."""
        config = self.config
        machine = hardware()
        on_gpu = torch.device(config.device).type == "cuda"
        environment = {**machine, "gpu": torch.cuda.get_device_name(config.device) if on_gpu else None}
        texts = {
            "calibration": [_text(corpus) for corpus in self.calibration],
            "evaluation": [_text(corpus) for corpus in self.evaluation],
        }
        decided = {
            **{k: v for k, v in asdict(config).items() if k not in ("profiles", "groups", "include_path")},
            **texts,
            "model": Path(config.model).name,
            "model_fingerprint": self.fingerprint,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "prefix": self.prefix,
            "groups": [] if self.given else list(self._groups()),
            "profiles": {name: profile.id.hex() for name, profile in self.given.items()},
            "tasks": list(config.tasks),
            "gpu": environment["gpu"],
            "software": {k: v for k, v in machine.items() if k not in ("commit", "date", "cores")},
        }
        decided = json.loads(_canonical(decided))  # as it will be read back
        parameters = sum(p.numel() for p in self.model.parameters())
        return {
            "format": FORMAT,
            "version": VERSION,
            "complete": False,
            "digest": hashlib.blake2b(_canonical(decided), digest_size=16, person=b"cuvee-report").hexdigest(),
            "command": command,
            "configuration": decided,
            "environment": environment,
            "model": {
                "name": Path(config.model).name,
                "fingerprint": self.fingerprint,
                "model_type": self.layout.model_type,
                "parameters": parameters,
                "dtype": decided["dtype"],
                "layers": self.layout.num_layers,
                "values_per_token": self.layout.values_per_token,
                "positions": self.layout.max_positions,
            },
            "text": {
                **texts,
                "calibration_sequences": None,
                "sequences": len(self.tokens),
                "length": config.length,
                "prefix": self.prefix,
                "reread": config.reread,
                "tokens_sha256": hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest(),
            },
            "profiles": {},
            "exact": None,
            "quality": [],
            "tasks": [],
            "scores": [],
            "skipped": [],
            "comparison": [],
            "seconds": 0.0,
        }

    def _resume(self, fresh: dict[str, Any], force: bool) -> dict[str, Any]:
        """What the folder already holds of this configuration, or the fresh report."""
        path = self.out / _REPORT
        if not path.exists():
            return fresh
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            same = (found["format"], found["version"], found["digest"]) == (FORMAT, VERSION, fresh["digest"])
            before = found["configuration"]
        except (ValueError, KeyError, TypeError) as error:
            if force:
                return fresh
            raise InputError(f"out: {path} is not a report: choose another folder, or --force") from error
        if same:
            done = len(found["quality"]) + len(found["scores"])
            state = "complete" if found["complete"] else f"{done} measurements done"
            self.console.print(f"{self.out} holds this run, {state}: going on", style="dim", highlight=False)
            return dict(found)
        if force:
            return fresh
        differs = [k for k in fresh["configuration"] if fresh["configuration"][k] != before.get(k)]
        what = ", ".join(differs) or "format"
        raise InputError(f"out: {self.out} holds another run (it differs in {what}): choose another, or --force")

    # Measuring ---------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Everything that is not there yet, then the comparison and the documents."""
        began, before = time.perf_counter(), self.data["seconds"]

        def save() -> None:
            self.data["seconds"] = before + time.perf_counter() - began
            write_json(self.out / _REPORT, self.data)

        save()
        if not self.data["complete"]:
            try:
                self._measure(save)
            except KeyboardInterrupt:
                self.console.print("interrupted: the same command goes on from here", highlight=False)
                raise
            self.data["comparison"] = self._comparison()
            self.data["complete"] = True
            save()
        write_report(self.data, self.out)
        return self.data

    def _measure(self, save: Callable[[], None]) -> None:
        columns = (TextColumn("{task.description:44}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
        # A file of its own: what lm-eval prints is kept from standard error while tasks run.
        shown = Console(file=sys.stderr, force_terminal=self.console.is_terminal or None)
        with Progress(*columns, TimeRemainingColumn(), console=shown, transient=True) as progress:
            bar = progress.add_task("", total=None)

            def step(what: str) -> None:
                progress.update(bar, description=what)
                if not shown.is_terminal:
                    self.console.print(f"{what} …", style="dim", highlight=False)

            self._learn(step, save)
            candidates = self._candidates()
            scored = [c for c in candidates if self._is_scored(c)] if self.scorer else []
            names = self.scorer.names if self.scorer else []
            progress.update(bar, total=len(candidates) + len(scored) * len(names), completed=0)
            for candidate in candidates:
                if not self._has("quality", candidate.key) and not self._is_too_coarse(candidate):
                    step(f"quality: {candidate.key}")
                    self._measure_quality(candidate)
                    save()
                progress.advance(bar)
            for candidate in scored:
                for name in names:
                    if self.scorer is not None and not self._has("scores", candidate.key, name):
                        step(f"{name}: {candidate.key}")
                        self._score(self.scorer, candidate, name)
                        save()
                    progress.advance(bar)

    def _comparison(self) -> list[dict[str, Any]]:
        measured = {entry["key"] for entry in self.data["quality"]}
        anchors = [key for key in (*ANCHORS, *FURTHER_ANCHORS) if key in measured]
        comparison = compare_at_equal_kl(self.data["quality"], anchors, self.config.seed)
        for entry in comparison:
            if entry["anchor"] in FURTHER_ANCHORS:
                entry["ratios"] = [ratio for ratio in entry["ratios"] if ratio["against"] == entry["anchor"]]
        return comparison

    def _is_too_coarse(self, candidate: Candidate) -> bool:
        """Whether a finer step of the same family costs too much already."""
        if not candidate.setting.startswith("2^"):
            return False
        steps = [e for e in self.data["quality"] if e["family"] == candidate.family and e["setting"].startswith("2^")]
        return bool(steps) and steps[-1]["kl"] > WORST_KL

    def _has(self, block: str, key: str, task: str | None = None) -> bool:
        if any(entry["key"] in (key, task) for entry in self.data["skipped"]):
            return True
        return any(entry["key"] == key and (task is None or entry["task"] == task) for entry in self.data[block])

    def _learn(self, step: Callable[[str], None], save: Callable[[], None]) -> None:
        for name, profile in self.given.items():
            self._profiles[name] = profile
            self.data["profiles"].setdefault(name, self._profile_entry(profile, None, None))
        if self.given:
            return
        for group in self._groups():
            path = self.out / "profiles" / f"{group.replace(':', '-')}.safetensors"
            known = self.data["profiles"].get(group)
            if known is not None and path.exists():
                profile = Profile.load(path)
                if profile.id.hex() != known["id"]:
                    raise InputError(f"out: {path} is not the profile this report was measured with: use --force")
            else:
                step(f"learning a profile, group {group}")
                began = time.perf_counter()
                profile = Profile.calibrate(
                    self.model, self._learning, group, prefix=self.prefix, seed=self.config.seed, progress=False
                )
                seconds = time.perf_counter() - began
                if known is not None and known["id"] != profile.id.hex():
                    raise InputError(f"out: the profile {group} is gone and cannot be learned again the same: --force")
                path.parent.mkdir(parents=True, exist_ok=True)
                profile.save(path)
                self.data["profiles"][group] = self._profile_entry(profile, path, seconds)
                self.data["text"]["calibration_sequences"] = len(self._learning)
                save()
            self._profiles[group] = profile

    def _profile_entry(self, profile: Profile, path: Path | None, seconds: float | None) -> dict[str, Any]:
        size = path.stat().st_size if path is not None else _saved_size(profile)
        return {
            "id": profile.id.hex(),
            "group": profile.group,
            "source": profile.source,
            "bytes": size,
            "seconds": seconds,
            "bits_per_value_over_1m_tokens": 8 * size / (1e6 * self.layout.values_per_token),
        }

    @cached_property
    def _learning(self) -> torch.Tensor:
        """Sequences to learn from `[N, length]`, those sampled from the model first."""
        config = self.config
        tokens = calibration_windows(self.calibration, config.length, config.calibration_sequences)
        if config.reread:
            tokens = reread(tokens, self.prefix, config.seed)
        if not config.samples:
            return tokens
        return torch.cat([sample_text(self.model, config.samples, config.length, config.seed), tokens])

    @cached_property
    def _learning_caches(self) -> list[Any]:
        """Caches of the texts to learn from: what PCA is fitted on."""
        layout = replace(self.layout, dtype=self.config.cache_dtype)
        chunks = []
        with torch.no_grad():
            for batch in self._learning.split(self.config.batch_size):
                chunks += prefill(self.model, batch[:, : self.prefix].to(self.model.device), layout, self.config.device)
        return chunks

    @cached_property
    def _bench(self) -> QualityBench:
        config = self.config
        return QualityBench(
            self.model,
            self.tokens,
            self.prefix,
            dtype=config.cache_dtype,
            batch_size=config.batch_size,
            device=config.device,
        )

    # Methods -----------------------------------------------------------------------------------------------------

    def _candidates(self) -> list[Candidate]:
        """Every method of this report, in order."""
        quick = self.config.quick
        skipped = ("fp8-e5m2", "int8", "kivi3", "cachegen-tables-free") if quick else ()
        found = [Candidate(key, label, "point", make) for key, (label, make) in BASELINES.items() if key not in skipped]
        if not self.given:
            found += self._learned_baselines(quick)
        nothing = Profile.generic(self.layout)
        found += [
            _coded("cuvee/lossless", "point", nothing, quality="lossless"),
            _coded("cuvee/generic@balanced", "preset", nothing, quality="balanced"),
        ]
        if not quick:
            found += _steps("cuvee/generic", nothing, GENERIC_OCTAVES)
        for name, profile in self._profiles.items():
            found += [_coded(f"cuvee/{name}@{preset}", "preset", profile, quality=preset) for preset in PRESET_KL]
            found += _steps(f"cuvee/{name}", profile, CURVE_OCTAVES[1::2] if quick else CURVE_OCTAVES)
        return found

    def _learned_baselines(self, quick: bool) -> list[Candidate]:
        groupings = [group for group in self._groups() if group in ("head", "unit", "layer", "all")]
        found = []
        for grouping in [groupings[0]] if quick else [*groupings, "kv"]:
            family = f"pca/{grouping}"
            for step in STEPS[1::2] if quick else STEPS:
                found.append(
                    Candidate(f"{family}@{step:g}", family_label(family), "curve", self._pca(grouping, float(step)))
                )
        if not quick:
            found += [
                Candidate(f"kvtc/kv@{budget:g}", family_label("kvtc/kv"), "curve", self._kvtc(float(budget)))
                for budget in BUDGETS
            ]
        return found

    def _pca(self, grouping: str, step: float) -> Callable[[], Method]:
        return lambda: self._transform(grouping).method(step)

    def _kvtc(self, budget: float) -> Callable[[], Method]:
        return lambda: self._kvtc_transform.method(budget)

    def _transform(self, grouping: str) -> PcaTransform:
        if grouping not in self._transforms:
            layout = replace(self.layout, dtype=self.config.cache_dtype)
            self._transforms[grouping] = PcaTransform.fit(layout, self._learning_caches, grouping)
        return self._transforms[grouping]

    @cached_property
    def _transforms(self) -> dict[str, PcaTransform]:
        return {}

    @cached_property
    def _kvtc_transform(self) -> Kvtc:
        return Kvtc.fit(replace(self.layout, dtype=self.config.cache_dtype), self._learning_caches)

    def _measure_quality(self, candidate: Candidate) -> None:
        method = self._make(candidate)
        if method is None:
            return
        try:
            quality = self._bench.run(candidate.label, method, self.config.chunk_tokens)
        except InputError as refused:  # values that this method cannot store
            self._skip(candidate.key, refused)
            return
        entry = {
            "key": candidate.key,
            "family": candidate.family,
            "label": candidate.label,
            "kind": candidate.kind,
            "setting": candidate.setting,
            **quality.to_dict(),
        }
        self.data["quality"].append(entry)
        if candidate.key == EXACT:
            nll = quality.nll - quality.delta_nll
            self.data["exact"] = {"nll": nll, "perplexity": float(np.exp(nll))}

    def _make(self, candidate: Candidate) -> Method | None:
        """The method, or None where it cannot be had; then the report says why."""
        try:
            return candidate.make()
        except (InputError, ProfileError) as error:
            self._skip(candidate.key, error)
            return None

    def _skip(self, key: str, error: Exception) -> None:
        """Leave a method or a task out, and say so in the report and at once."""
        self.data["skipped"].append({"key": key, "reason": str(error)})
        self.console.print(f"left out {key}: {error}", style="yellow", highlight=False)

    # Tasks -------------------------------------------------------------------------------------------------------

    def _is_scored(self, candidate: Candidate) -> bool:
        if self.config.quick:
            return candidate.key in (EXACT, "kivi2", "destroyed") or candidate.setting == "balanced"
        return candidate.key in SCORED or candidate.kind == "preset"

    def _score(self, scorer: TaskScorer, candidate: Candidate, name: str) -> None:
        method = self._make(candidate)
        if method is None:
            return
        try:
            task, score = scorer.score(method, name)
        except InputError as refused:
            # With the exact cache, which comes first, it is the task that the model cannot do; later it is the method.
            self._skip(name if candidate.key == EXACT else candidate.key, refused)
            return
        exact = next((s for s in self.data["scores"] if (s["key"], s["task"]) == (EXACT, name)), None)
        difference, error = None, None
        if exact is not None:
            difference = score["score"] - exact["score"]
            if exact["per_doc"] and score["per_doc"]:
                difference, error = paired_difference(score["per_doc"], exact["per_doc"])
        self.data["scores"].append(
            {"key": candidate.key, **score, "difference": difference, "difference_stderr": error}
        )
        if all(known["name"] != name for known in self.data["tasks"]):
            self.data["tasks"].append(task)


def _coded(key: str, kind: str, profile: Profile, **quality: Any) -> Candidate:
    family, _, setting = key.partition("@")
    label = family_label(family) if not setting else f"{family_label(family)}, {setting}"
    return Candidate(key, label, kind, lambda: CodecMethod(Codec(profile, **quality)))


def _steps(family: str, profile: Profile, octaves: Sequence[float]) -> list[Candidate]:
    return [_coded(f"{family}@2^{octave:g}", "curve", profile, step=2.0**octave) for octave in octaves]


def _text(corpus: Corpus) -> dict[str, Any]:
    return {"name": Path(corpus.name).name, "sha256": corpus.sha256, "tokens": corpus.tokens}


def _saved_size(profile: Profile) -> int:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile"
        profile.save(path)
        return path.stat().st_size


def _canonical(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _check_folder(out: Path, force: bool) -> None:
    """Refuse, before anything is loaded, a folder that is none or that holds other things."""
    if out.exists() and not out.is_dir():
        raise InputError(f"out: {out} is a file: choose a folder")
    if out.is_dir() and any(out.iterdir()) and not (out / _REPORT).exists() and not force:
        raise InputError(f"out: {out} is not empty and holds no report: choose another folder, or --force")
    if not os.access(next(p for p in (out, *out.parents) if p.exists()), os.W_OK):
        raise InputError(f"out: {out} cannot be written to")

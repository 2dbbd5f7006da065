"""`cuvee report`: what compression costs a model, next to the baselines, in one folder that anyone can rerun.

    model, texts --> profiles --> quality of every method --> task scores --> equal-KL ratios --> report.json
                        |               |                        |                                     |
                     profiles/    report.json is saved after each of these            report.md, .html, plots

Everything is in `report.json`, which is also the state of an unfinished run: with the same configuration, a second run
continues where the first one stopped. A folder with the results of another configuration is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError, ProfileError
from cuvee.codec.files import write_json
from cuvee.codec.fingerprint import model_fingerprint
from cuvee.codec.layout import KVLayout
from cuvee.codec.model import check_tokens, prefill
from cuvee.codec.profile import Profile
from cuvee.eval.corpus import (
    BUNDLED_MODEL,
    calibration_windows,
    load_model,
    read_corpus,
    spread_sequences,
)
from cuvee.eval.machine import hardware, torch_threads
from cuvee.eval.methods import UNCOMPRESSED
from cuvee.eval.progress import progress_bar
from cuvee.eval.protocol import reread, sample_text
from cuvee.eval.quality import Method, QualityBench
from cuvee.eval.report.candidates import Candidate, LearnedBaselines, codec_candidates, fixed_baselines
from cuvee.eval.report.config import ReportConfig
from cuvee.eval.report.load import REPORT_FORMAT, REPORT_VERSION
from cuvee.eval.report.render import write_report
from cuvee.eval.report.scoring import TaskScorer
from cuvee.eval.runs import check_folder, load_matching_profile, text_entry
from cuvee.eval.stats import compare_at_equal_kl, paired_difference

__all__ = ["ANCHORS", "run_report"]

ANCHORS = ("fp8-e4m3", "kivi4", "cachegen")  # everything is compared at the KL of these; with the other …
FURTHER_ANCHORS = ("int8", "fp8-e5m2", "kivi3", "kivi2", "cachegen-tables-free")  # … baselines, at their own KL
WORST_KL = 0.1  # nats per token: once a step costs more, coarser ones are not measured
SCORED = (UNCOMPRESSED, "fp8-e4m3", "kivi4", "kivi2", "cachegen", "destroyed")  # baselines whose tasks are run
WHOLE_CACHE_VALUES = 4096  # per token; up to here one basis for all layers is learned without being asked for
REPORT_FILE = "report.json"


def run_report(
    config: ReportConfig, out: Path, console: Console, *, force: bool = False, command: str = ""
) -> dict[str, Any]:
    """Measure a model, or continue an unfinished report, and write the folder `out`.

    Args:
        config: what to measure.
        out: the folder. If it holds an unfinished report of the same configuration, that is finished; a finished one
            is only rendered again.
        console: where to list the steps.
        force: replace the report of another configuration.
        command: what a reader would type to get the same report.

    Returns:
        The report, as a dict for JSON.

    Raises:
        InputError: `out` holds something else, or texts, tasks or sizes do not fit the model.
        UnsupportedModel: cuvee does not support the model.
        ProfileMismatch, ProfileError: a profile is of another model, or cannot be learned.

    Example:
        >>> from pathlib import Path
        >>> from rich.console import Console
        >>> from cuvee.eval.report.config import ReportConfig, quick_config
        >>> from cuvee.eval.report.run import run_report
        >>> config = quick_config(ReportConfig(tasks=()))
        >>> report = run_report(config, Path("out/report"), Console())  # doctest: +SKIP
    """
    # A model this small gains nothing from more threads in torch, and on a busy machine they wait for each other.
    with torch_threads(1) if config.model == BUNDLED_MODEL else contextlib.nullcontext():
        return _ReportRun(config, out, console, force, command).run()


class _ReportRun:
    """One run: `data` holds what has been measured so far, and the methods measure the rest."""

    def __init__(self, config: ReportConfig, out: Path, console: Console, force: bool, command: str) -> None:
        self.config = config
        self.out = out
        self.console = console
        check_folder(out, force, resumed=REPORT_FILE)
        dtype = ("float32" if config.device == "cpu" else "auto") if config.dtype == "auto" else config.dtype
        self.model = load_model(config.model, dtype, config.device)
        self.layout = KVLayout.from_config(self.model.config, dtype=self.model.dtype)
        self.fingerprint = model_fingerprint(self.model)
        self.given = self._given()
        self.calibration = [] if self.given else [read_corpus(text, config.model) for text in config.calibration]
        self.evaluation = [read_corpus(text, config.model) for text in config.evaluation]
        tokens = spread_sequences(self.evaluation, config.length, config.sequences)
        self.prefix = check_tokens(self.model, tokens, config.prefix)
        self.tokens = reread(tokens, self.prefix, config.seed) if config.reread else tokens
        self.scorer = self._scorer() if config.tasks else None
        self.data = self._resume(self._describe(command), force)
        self._profiles: dict[str, Profile] = {}

    # What is measured --------------------------------------------------------------------------------------------

    def _given(self) -> dict[str, Profile]:
        """The profiles given as files, by the names of the files."""
        profiles: dict[str, Profile] = {}
        for path in self.config.profiles:
            name = Path(path).stem
            if name in profiles or "@" in name:
                raise InputError(f"profiles: {path} must have a name of its own without an @, which names its methods")
            profiles[name] = load_matching_profile(path, self.layout, self.fingerprint, self.config.model)
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
        """The report before anything has been measured."""
        config = self.config
        machine = hardware()
        on_gpu = torch.device(config.device).type == "cuda"
        environment = {**machine, "gpu": torch.cuda.get_device_name(config.device) if on_gpu else None}
        texts = {
            "calibration": [text_entry(corpus) for corpus in self.calibration],
            "evaluation": [text_entry(corpus) for corpus in self.evaluation],
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
        decided = json.loads(_canonical(decided))  # in the form in which it will be read back
        parameters = sum(p.numel() for p in self.model.parameters())
        return {
            "format": REPORT_FORMAT,
            "version": REPORT_VERSION,
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
        """What the folder already holds of this configuration, or else the fresh report."""
        path = self.out / REPORT_FILE
        if not path.exists():
            return fresh
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            same = (found["format"], found["version"], found["digest"]) == (
                REPORT_FORMAT,
                REPORT_VERSION,
                fresh["digest"],
            )
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
        """Measure everything that is missing, then make the comparison and the documents."""
        began, before = time.perf_counter(), self.data["seconds"]

        def save() -> None:
            self.data["seconds"] = before + time.perf_counter() - began
            write_json(self.out / REPORT_FILE, self.data)

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
        with progress_bar(self.console, 44) as progress:
            self._learn(progress.step, save)
            candidates = self._candidates()
            scored = [c for c in candidates if self._is_scored(c)] if self.scorer else []
            names = self.scorer.names if self.scorer else []
            progress.expect(len(candidates) + len(scored) * len(names))
            for candidate in candidates:
                if not self._has("quality", candidate.key) and not self._is_too_coarse(candidate):
                    progress.step(f"quality: {candidate.key}")
                    self._measure_quality(candidate)
                    save()
                progress.advance()
            for candidate in scored:
                for name in names:
                    if self.scorer is not None and not self._has("scores", candidate.key, name):
                        progress.step(f"{name}: {candidate.key}")
                        self._score(self.scorer, candidate, name)
                        save()
                    progress.advance()

    def _comparison(self) -> list[dict[str, Any]]:
        measured = {entry["key"] for entry in self.data["quality"]}
        anchors = [key for key in (*ANCHORS, *FURTHER_ANCHORS) if key in measured]
        comparison = compare_at_equal_kl(self.data["quality"], anchors, self.config.seed)
        for entry in comparison:
            if entry["anchor"] in FURTHER_ANCHORS:
                entry["ratios"] = [ratio for ratio in entry["ratios"] if ratio["against"] == entry["anchor"]]
        return comparison

    def _is_too_coarse(self, candidate: Candidate) -> bool:
        """Whether a finer step of the same family already costs too much."""
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
        """The sequences to learn from, `[N, length]`; those sampled from the model come first."""
        config = self.config
        tokens = calibration_windows(self.calibration, config.length, config.calibration_sequences)
        if config.reread:
            tokens = reread(tokens, self.prefix, config.seed)
        if not config.samples:
            return tokens
        return torch.cat([sample_text(self.model, config.samples, config.length, config.seed), tokens])

    @property
    def _cache_layout(self) -> KVLayout:
        """The layout of the caches that are coded."""
        return replace(self.layout, dtype=self.config.cache_dtype)

    @cached_property
    def _learning_caches(self) -> list[KVChunk]:
        """The caches of those sequences, on which the baselines are fitted."""
        layout = self._cache_layout
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
        quick, baselines = self.config.quick, LearnedBaselines(self._cache_layout, lambda: self._learning_caches)
        found = fixed_baselines(quick)
        if not self.given:
            found += baselines.candidates(self._groups(), quick)
        return found + codec_candidates(self.layout, self._profiles, quick)

    def _measure_quality(self, candidate: Candidate) -> None:
        method = self._make(candidate)
        if method is None:
            return
        try:
            quality = self._bench.run(candidate.label, method, self.config.chunk_tokens)
        except InputError as refused:  # the method cannot store some of the values
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
        if candidate.key == UNCOMPRESSED:
            nll = quality.nll - quality.delta_nll
            self.data["exact"] = {"nll": nll, "perplexity": float(np.exp(nll))}

    def _make(self, candidate: Candidate) -> Method | None:
        """The method, or None if it cannot be made; then the report says why."""
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
            return candidate.key in (UNCOMPRESSED, "kivi2", "destroyed") or candidate.setting == "balanced"
        return candidate.key in SCORED or candidate.kind == "preset"

    def _score(self, scorer: TaskScorer, candidate: Candidate, name: str) -> None:
        method = self._make(candidate)
        if method is None:
            return
        try:
            task, score = scorer.score(method, name)
        except InputError as refused:
            # The exact cache comes first: if it fails, the model cannot do the task. Later it is the method that fails.
            self._skip(name if candidate.key == UNCOMPRESSED else candidate.key, refused)
            return
        exact = next((s for s in self.data["scores"] if (s["key"], s["task"]) == (UNCOMPRESSED, name)), None)
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


def _saved_size(profile: Profile) -> int:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile"
        profile.save(path)
        return path.stat().st_size


def _canonical(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

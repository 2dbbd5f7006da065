"""What a report measures: the model, the texts, and the methods and tasks of its configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from cuvee.calibration.corpus import load_config, load_tokenizer, read_corpus, sequences_by_text
from cuvee.calibration.kinds import mixture
from cuvee.calibration.sequences import reread
from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError, ProfileMismatchError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.forward import check_tokens, coded_layout, prefill
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.support.devices import usable_device
from cuvee.eval.cached_reading import rows_of
from cuvee.eval.machine import hardware
from cuvee.eval.report.candidates import (
    PEERS,
    Candidate,
    codec_candidates,
    fixed_baselines,
    pca_candidates,
    peers,
    select,
)
from cuvee.eval.report.report_config import LARGE_LIMIT, SMALL_PARAMETERS, ReportConfig
from cuvee.eval.report.schema import (
    REPORT_FORMAT,
    REPORT_VERSION,
    Kind,
    ModelInfo,
    ProfileEntry,
    Report,
    Source,
    TextInfo,
)
from cuvee.eval.report.scoring import TaskList, TaskScorer
from cuvee.eval.runs import MeasuredModel, metadata_pairs, software

__all__ = ["ReportPlan"]


class ReportPlan:
    """A configuration with everything that it names: first what takes no time, then, by `load`, the rest.

    Args:
        config: what to measure.

    Attributes:
        text: what is measured on.
        decided: what figures follow from, as far as it is known without the weights.

    Raises:
        see `run_report`.
    """

    def __init__(self, config: ReportConfig) -> None:
        dtype = ("float32" if config.device == "cpu" else "auto") if config.dtype == "auto" else config.dtype
        self.config = config
        # All that needs no weights is checked before they are loaded, which may take minutes.
        usable_device(config.device)
        self.layout = coded_layout(load_config(config.model))
        most = self.layout.max_positions
        if most is not None and config.length > most:
            raise InputError(f"length: must be at most {most}, the model's positions, got {config.length}")
        self.profiles = self._profiles()
        self.candidates = self._candidates()
        self._check_profiles_used()
        for candidate in self.candidates if config.methods else ():
            if candidate.names[-1] in PEERS:
                candidate.make()  # refuses a package that is not installed
        if config.tasks or any(c.family.startswith("pca/") for c in self.candidates):
            load_tokenizer(config.model)  # which tasks and the texts of PCA need
        corpora = [read_corpus(text, config.model) for text in config.evaluation]
        self.sources = [Source(Path(corpus.name).name, corpus.sha256, corpus.tokens) for corpus in corpora]
        tokens, texts = sequences_by_text(corpora, config.length, config.sequences)
        self.prefix = 3 * config.length // 4
        self.tokens = reread(tokens, self.prefix, config.seed)
        self.rows = rows_of(config.length, config.batch_size)
        self.text = self._text(texts)
        self.machine = hardware()
        self.decided = self._decided(dtype)
        self._dtype = dtype

    def load(self) -> None:
        """Read the tasks' documents and the weights. Errors: see `run_report`."""
        config = self.config
        tasks = self._tasks() if config.tasks else None
        without_context = self._tasks(context="absent") if config.controls else None
        self.measured = MeasuredModel.load(config.model, self._dtype, config.device)
        self.model, self.layout = self.measured.lm, self.measured.layout
        for path, profile in zip(config.profiles, self.profiles.values(), strict=True):
            self.measured.check_profile(path, profile)
        self.candidates = self._candidates()  # of the layout in its dtype
        check_tokens(self.model, self.tokens, self.prefix)
        self.limit = config.limit or (None if self.measured.parameters <= SMALL_PARAMETERS else LARGE_LIMIT)
        self.scorer = None if tasks is None else self._scorer(tasks)
        self.without_context = None if without_context is None else self._scorer(without_context)

    def _profiles(self) -> dict[str, Profile]:
        """The profiles by the names of their files."""
        profiles: dict[str, Profile] = {}
        for path in self.config.profiles:
            name = Path(path).stem
            if name in profiles or "@" in name:
                raise InputError(
                    f"profiles: must have different names without an @ (methods are named after them), got {path}"
                )
            profiles[name] = Profile.load(path)
            try:
                profiles[name].check_layout(self.layout)
            except ProfileMismatchError as error:
                raise ProfileMismatchError(f"{path}: {error}") from None
        return profiles

    def _check_profiles_used(self) -> None:
        """Refuse a profile that no method needs: neither its codec nor PCA, which takes its group."""
        used = {c.family for c in self.candidates}
        if any(family.startswith("pca/") for family in used):
            return
        for path in self.config.profiles:
            if (own := f"cuvee/{Path(path).stem}") not in used:
                raise InputError(
                    f"profiles: must be measured by a method, got {path} with none of it: leave it out, or add the "
                    f"method {own}"
                )

    def _tasks(self, **metadata: str) -> TaskList:
        config = self.config
        return TaskList(config.tasks, {**metadata_pairs(config.metadata), **metadata}, seed=config.seed)

    def _scorer(self, tasks: TaskList) -> TaskScorer:
        config = self.config
        return TaskScorer(
            self.model,
            config.model,
            tasks,
            limit=self.limit,
            chunk_tokens=config.chunk_tokens,
            cache_dtype=config.cache_dtype,
            batch_size=config.batch_size,
        )

    @property
    def cache_layout(self) -> KVLayout:
        """The layout of the caches that are coded."""
        return replace(self.layout, dtype=self.config.cache_dtype)

    def _candidates(self) -> list[Candidate]:
        """Every method of this report, in order."""
        methods = self.config.methods
        if methods and self.config.controls:
            methods = (*methods, "destroyed")
        groups = tuple(dict.fromkeys(p.group for p in self.profiles.values() if p.learned)) or ("layer",)

        def found(quick: bool) -> list[Candidate]:
            learned = pca_candidates(self.cache_layout, lambda: self._pca_caches, groups, quick) if methods else []
            coded = codec_candidates(self.layout, self.profiles, quick)
            return fixed_baselines(quick) + ([] if quick else peers()) + learned + coded

        return select(found(False), methods, found(self.config.quick))

    @cached_property
    def _pca_caches(self) -> list[KVChunk]:
        """The caches that PCA is fitted to, of the mixture that `cuvee profile learn` learns from."""
        config = self.config
        kinds = mixture(self.model, load_tokenizer(config.model), length=config.length, seed=config.seed)
        tokens = torch.cat([rows for rows in kinds.values() if rows.shape[1] == config.length])  # without the long ones
        chunks = []
        with torch.no_grad():
            for batch in tokens[:, : self.prefix].split(self.rows):
                chunks += prefill(self.model, batch.to(self.model.device), self.cache_layout, config.device)
        return chunks

    def _text(self, texts: Sequence[int]) -> TextInfo:
        """Describe the text, given that of each sequence; group these also by whether they repeat a part of theirs."""
        found: dict[tuple[int, bool], list[int]] = {}
        for row, text in enumerate(texts):
            # `reread` changes rows 0, 2, 4 …
            found.setdefault((text, row % 2 == 0), []).append(row)
        kinds = [Kind(self.sources[text].name, again, rows) for (text, again), rows in sorted(found.items())]
        digest = hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()
        return TextInfo(self.sources, len(self.tokens), self.config.length, self.prefix, digest, kinds)

    def _decided(self, dtype: str) -> dict[str, Any]:
        """Return what figures follow from and needs no weights, in the form in which it will be read back."""
        config = self.config
        decided = {
            **{k: v for k, v in asdict(config).items() if k not in ("profiles", "dtype", "limit")},
            "evaluation": [asdict(source) for source in self.sources],
            "model": Path(config.model).name,
            "prefix": self.prefix,
            "profiles": {name: profile.id.hex() for name, profile in self.profiles.items()},
            # A profile's id does not cover its curve, which decides the step of a quality.
            "curves": {name: _digest([p.to_dict() for p in profile.points]) for name, profile in self.profiles.items()},
            "gpu": torch.cuda.get_device_name(config.device) if torch.device(config.device).type == "cuda" else None,
            "software": software(self.machine),
            **({} if dtype == "auto" else {"dtype": dtype}),
            **({} if config.tasks and config.limit is None else {"limit": config.limit if config.tasks else None}),
        }
        return dict(json.loads(json.dumps(decided, allow_nan=False)))

    def describe(self, command: str) -> Report:
        """Return the report that a loaded plan begins with."""
        limit = self.limit if self.config.tasks else None
        model = ModelInfo(**self.measured.describe(), positions=self.layout.max_positions)
        decided = {
            **self.decided, "model_fingerprint": model.fingerprint, "dtype": model.dtype, "limit": limit,
        }  # fmt: skip
        environment = {**self.machine, "gpu": self.decided["gpu"]}
        profiles = {Path(path).stem: self._profile_entry(path) for path in self.config.profiles}
        return Report(
            REPORT_FORMAT, REPORT_VERSION, False, _digest(decided), command, decided, environment, model, self.text,
            profiles,
        )  # fmt: skip

    def _profile_entry(self, path: str) -> ProfileEntry:
        profile, size = self.profiles[Path(path).stem], Path(path).stat().st_size
        bits = 8 * size / (1e6 * self.layout.values_per_token)
        return ProfileEntry(
            profile.id.hex(), profile.group, profile.source, size, bits, max(profile.lengths, default=None)
        )


def _digest(values: object) -> str:
    """Return a digest of what JSON can hold."""
    plain = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(plain.encode(), digest_size=16, person=b"cuvee-report").hexdigest()

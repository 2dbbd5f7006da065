"""What a report measures: the model, the texts, and the methods and tasks of its configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path

import torch

from cuvee.calibration.corpus import Corpus, read_corpus, sequences_by_text
from cuvee.calibration.sequences import reread
from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.forward import check_tokens
from cuvee.codec.profiles.profile import Profile
from cuvee.eval.machine import hardware
from cuvee.eval.report.candidates import Candidate, codec_candidates, fixed_baselines, pca_candidates, peers, select
from cuvee.eval.report.learning import cached_tokens, learning_corpora
from cuvee.eval.report.report_config import LARGE_LIMIT, SMALL_PARAMETERS, ReportConfig
from cuvee.eval.report.schema import (
    REPORT_FORMAT,
    REPORT_VERSION,
    Kind,
    ModelInfo,
    Report,
    Source,
    TextInfo,
)
from cuvee.eval.report.scoring import TaskScorer
from cuvee.eval.runs import MeasuredModel, metadata_pairs, software, text_entry, tokens_sha256
from cuvee.learning.calibrate import CPU_FLOPS, GPU_FLOPS, choose_group

__all__ = ["ReportPlan"]

WHOLE_CACHE_VALUES = 4096  # per token; up to here one basis for all layers is learned without being asked for


class ReportPlan:
    """A configuration with everything that it names.

    Args:
        config: what to measure.
        profile: called for the profile of a name when one of its methods is made.
        caches: called for the caches that PCA learns from, when they are first needed.

    Raises:
        see `run_report`.
    """

    def __init__(
        self, config: ReportConfig, profile: Callable[[str], Profile], caches: Callable[[], list[KVChunk]]
    ) -> None:
        dtype = ("float32" if config.device == "cpu" else "auto") if config.dtype == "auto" else config.dtype
        self.config, self._profile, self._caches = config, profile, caches
        self.measured = MeasuredModel.load(config.model, dtype, config.device)
        self.model, self.layout = self.measured.lm, self.measured.layout
        self.given = self._given()
        self.groups = self._groups()
        self.candidates = self._candidates()
        learned = any(c.family.startswith("pca/") for c in self.candidates)
        if self.given and config.calibration and not learned:
            raise InputError(
                "calibration: must be left out with profiles, which have been learned, unless PCA is measured, got "
                f"{config.calibration[0]}"
            )
        self.calibration = self._learning_corpora if learned or not self.given else []
        self.evaluation = [read_corpus(text, config.model) for text in config.evaluation]
        tokens, self.texts = sequences_by_text(self.evaluation, config.length, config.sequences)
        self.prefix = check_tokens(self.model, tokens, None)
        self.tokens = reread(tokens, self.prefix, config.seed)
        self.limit = config.limit or (None if self.measured.parameters <= SMALL_PARAMETERS else LARGE_LIMIT)
        self.scorer = self._scorer() if config.tasks else None
        self.without_context = self._scorer(context="absent") if config.controls else None

    def _given(self) -> dict[str, Profile]:
        """The profiles given as files, by the names of the files."""
        profiles: dict[str, Profile] = {}
        for path in self.config.profiles:
            name = Path(path).stem
            if name in profiles or "@" in name:
                raise InputError(
                    f"profiles: must have different names without an @ (methods are named after them), got {path}"
                )
            profiles[name] = self.measured.profile(path)
        return profiles

    def _scorer(self, **metadata: str) -> TaskScorer:
        config = self.config
        return TaskScorer(
            self.model,
            config.model,
            config.tasks,
            metadata={**metadata_pairs(config.metadata), **metadata},
            limit=self.limit,
            chunk_tokens=config.chunk_tokens,
            cache_dtype=config.cache_dtype,
            batch_size=config.batch_size,
            seed=config.seed,
        )

    def _groups(self) -> tuple[str, ...]:
        """The groups of the profiles to learn, or of the given profiles; the learned baselines use the same."""
        if self.given:
            return tuple(dict.fromkeys(profile.group for profile in self.given.values() if profile.learned))
        small = self.layout.values_per_token <= WHOLE_CACHE_VALUES
        groups = self.config.groups or (("layer", "all") if small else ("auto",))
        return tuple(dict.fromkeys(self._chosen_group() if group == "auto" else group for group in groups))

    def _chosen_group(self) -> str:
        """Return the group that `cuvee profile learn` would choose."""
        config = self.config
        prefix = 3 * config.length // 4
        flops = CPU_FLOPS if torch.device(config.device).type == "cpu" else GPU_FLOPS
        return choose_group(self.layout, cached_tokens(config, self._learning_corpora, prefix), flops)[0]

    @cached_property
    def _learning_corpora(self) -> list[Corpus]:
        return learning_corpora(self.config)

    @property
    def cache_layout(self) -> KVLayout:
        """The layout of the caches that are coded."""
        return replace(self.layout, dtype=self.config.cache_dtype)

    def _candidates(self) -> list[Candidate]:
        """Every method of this report, in order."""
        names, methods = tuple(self.given) or self.groups, self.config.methods
        if methods and self.config.controls:
            methods = (*methods, "destroyed")

        def found(quick: bool) -> list[Candidate]:
            # With profiles given, PCA, which learns, is measured only if it is asked for.
            groups = () if self.given and not methods else self.groups
            learned = pca_candidates(self.cache_layout, self._caches, groups, quick)
            coded = codec_candidates(self.layout, names, self._profile, quick)
            return fixed_baselines(quick) + ([] if quick else peers()) + learned + coded

        return select(found(False), methods, found(self.config.quick))

    def _kinds(self) -> list[Kind]:
        """Group the sequences by text, and by whether they repeat a part of their cache."""
        found: dict[tuple[int, bool], list[int]] = {}
        for row, text in enumerate(self.texts):
            # `reread` changes rows 0, 2, 4 …
            found.setdefault((text, row % 2 == 0), []).append(row)
        names = [text_entry(corpus)["name"] for corpus in self.evaluation]
        return [Kind(names[text], again, rows) for (text, again), rows in sorted(found.items())]

    def describe(self, command: str) -> Report:
        """Return the report that this plan begins with."""
        config = self.config
        machine = hardware()
        on_gpu = torch.device(config.device).type == "cuda"
        environment = {**machine, "gpu": torch.cuda.get_device_name(config.device) if on_gpu else None}
        calibration, evaluation = (
            [Source(**text_entry(corpus)) for corpus in corpora] for corpora in (self.calibration, self.evaluation)
        )
        model = ModelInfo(**self.measured.describe(), positions=self.layout.max_positions)
        decided = {
            **{k: v for k, v in asdict(config).items() if k not in ("profiles", "groups")},
            "calibration": [asdict(text) for text in calibration],
            "evaluation": [asdict(text) for text in evaluation],
            "calibration_sequences": config.learned_sequences,
            "model": model.name,
            "model_fingerprint": self.measured.fingerprint,
            "dtype": model.dtype,
            "prefix": self.prefix,
            "groups": [] if self.given else list(self.groups),
            "profiles": {name: profile.id.hex() for name, profile in self.given.items()},
            "methods": list(config.methods),
            "tasks": list(config.tasks),
            "limit": self.limit if config.tasks else None,
            "gpu": environment["gpu"],
            "software": software(machine),
        }
        decided = json.loads(json.dumps(decided, allow_nan=False))  # in the form in which it will be read back
        text = TextInfo(
            calibration, evaluation, None, len(self.tokens), config.length, self.prefix,
            tokens_sha256(self.tokens), self._kinds(),
        )  # fmt: skip
        plain = json.dumps(decided, sort_keys=True, separators=(",", ":"), allow_nan=False)
        digest = hashlib.blake2b(plain.encode(), digest_size=16, person=b"cuvee-report").hexdigest()
        return Report(REPORT_FORMAT, REPORT_VERSION, False, digest, command, decided, environment, model, text)

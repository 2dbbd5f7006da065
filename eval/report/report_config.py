"""The configuration of a report."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cuvee.calibration.bundled import CALIBRATION_TEXTS, EVALUATION_TEXTS
from cuvee.calibration.corpus import BUNDLED_MODEL
from cuvee.calibration.kinds import MIXTURE_SEQUENCES
from cuvee.calibration.sequences import LENGTH, SEED
from cuvee.codec.errors import InputError
from cuvee.eval.quality import CHUNK_TOKENS
from cuvee.eval.runs import metadata_pairs
from cuvee.eval.tasks import LOCAL_TASKS

__all__ = ["LARGE_LIMIT", "MIXTURE", "SMALL_PARAMETERS", "ReportConfig", "quick_config"]

MIXTURE = "mixture"  # the text that stands for what `cuvee profile learn` learns from
TEXT_SEQUENCES = 200  # to learn from, of other texts

SMALL_PARAMETERS = 10_000_000
LARGE_LIMIT = 40  # documents of a task: all of the 1,710 that come with cuvee would take SmolLM2 two hours on two cores

QUICK_TASKS = ("cuvee_kv_16", "cuvee_reread_nll")
QUICK_LIMIT = 50  # documents of a task


@dataclass(frozen=True, slots=True)
class ReportConfig:
    """The configuration of a report.

    Attributes:
        model: a folder, a hub name, or "books-3m".
        profiles: profile files to measure; if there are none, profiles are learned.
        groups: of the profiles to learn; by default "layer" and "all" if a token's cache has at most 4,096 values, else
            "auto", which is what `cuvee profile learn` would choose.
        calibration: texts to learn from (see `cuvee.calibration.corpus`), or "mixture", which is what
            `cuvee profile learn` learns from (`cuvee.calibration.mixture`). Default: the mixture; for the bundled
            model, bundled texts.
        calibration_sequences: at most this many sequences; default: 96 of the mixture, else 200.
        methods: methods to measure, by key, family or the first part of a family ("kivi4", "pca/layer", "cuvee"); all
            if there are none. The 16-bit cache is always measured, because scores are compared with its scores.
        evaluation: texts to measure on, at most `sequences` sequences.
        length: tokens in a sequence. Three quarters are cached; the rest of every second one repeats a part of them.
        chunk_tokens: tokens coded together.
        tasks: lm-eval tasks, with at most `limit` documents each; None: all of them for a model of up to
            `SMALL_PARAMETERS`, else `LARGE_LIMIT`.
        controls: also score each task with the question alone, and say whether the task distinguishes the exact cache
            from none.
        metadata: "name=value" for tasks that need it, such as "lines=10".
        dtype: of the model; "auto" is float32 on a CPU, and what the files say elsewhere.
        cache_dtype: of the caches that are coded.
        device: where the model runs and the caches are coded.
        batch_size: sequences per forward pass.
        seed: of the repeats, samples, sampled targets and the bootstrap.
        quick: measure fewer methods.

    Raises:
        InputError: a number is out of range, or both profiles and groups are given.
    """

    model: str = BUNDLED_MODEL
    profiles: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    calibration: tuple[str, ...] = ()
    calibration_sequences: int | None = None
    methods: tuple[str, ...] = ()
    evaluation: tuple[str, ...] = EVALUATION_TEXTS
    sequences: int = 32
    length: int = LENGTH
    chunk_tokens: int = CHUNK_TOKENS
    tasks: tuple[str, ...] = LOCAL_TASKS
    limit: int | None = None
    controls: bool = False
    metadata: tuple[str, ...] = ()
    dtype: str = "auto"
    cache_dtype: str = "bfloat16"
    device: str = "cpu"
    batch_size: int = 8
    seed: int = SEED
    quick: bool = False

    def __post_init__(self) -> None:
        counts = "learned_sequences", "sequences", "chunk_tokens", "batch_size"
        for name in counts:
            if getattr(self, name) < 1:
                field = name.replace("learned", "calibration")
                raise InputError(f"{field}: must be at least 1, got {getattr(self, name)}")
        if self.limit is not None and self.limit < 1:
            raise InputError(f"limit: must be at least 1, got {self.limit}")
        metadata_pairs(self.metadata)
        if self.controls and not self.tasks:
            raise InputError("controls: must be left out without tasks, got a report that scores none")
        if self.profiles and self.groups:
            raise InputError("groups: must be left out if profiles are given, because groups are learned")

    @property
    def learned_texts(self) -> tuple[str, ...]:
        """`calibration`, or its default."""
        return self.calibration or (CALIBRATION_TEXTS if self.model == BUNDLED_MODEL else (MIXTURE,))

    @property
    def learned_sequences(self) -> int:
        """`calibration_sequences`, or its default."""
        usual = MIXTURE_SEQUENCES if MIXTURE in self.learned_texts else TEXT_SEQUENCES
        return usual if self.calibration_sequences is None else self.calibration_sequences


def quick_config(config: ReportConfig) -> ReportConfig:
    """Return the configuration with fewer sequences, methods, tasks and documents. Smaller numbers stay.

    Raises:
        InputError: a number is larger than both that of a quick report and the default.
    """
    default = ReportConfig()
    most = {"calibration_sequences": 64, "sequences": 12, "limit": QUICK_LIMIT}
    for name, value in most.items():
        given = getattr(config, name)
        if given != getattr(default, name) and given > value:
            raise InputError(f"{name}: must be at most {value} in a quick report, got {given}: leave out one of them")
    numbers: dict[str, Any] = {name: min(getattr(config, name) or value, value) for name, value in most.items()}
    numbers["calibration_sequences"] = min(config.learned_sequences, numbers["calibration_sequences"])
    tasks = QUICK_TASKS if config.tasks == default.tasks else config.tasks
    return replace(config, quick=True, tasks=tasks, **numbers)

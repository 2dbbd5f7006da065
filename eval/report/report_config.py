"""The configuration of a report."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cuvee.calibration.bundled import EVALUATION_TEXTS
from cuvee.calibration.corpus import BUNDLED_MODEL
from cuvee.calibration.sequences import LENGTH, SEED
from cuvee.codec.errors import InputError
from cuvee.eval.quality import CHUNK_TOKENS
from cuvee.eval.runs import metadata_pairs
from cuvee.eval.tasks import LOCAL_TASKS

__all__ = ["LARGE_LIMIT", "SMALL_PARAMETERS", "ReportConfig", "quick_config"]

SMALL_PARAMETERS = 10_000_000
LARGE_LIMIT = 40  # documents of a task: all of the 1,710 that come with cuvee would take SmolLM2 two hours on two cores

QUICK_TASKS = ("cuvee_kv_16", "cuvee_reread_nll")
QUICK_LIMIT = 50  # documents of a task


@dataclass(frozen=True, slots=True)
class ReportConfig:
    """The configuration of a report.

    Attributes:
        model: a folder, a hub name, or "books-3m".
        profiles: profile files to measure, as `cuvee profile learn` writes them.
        methods: methods to measure, by key, family or the first part of a family ("kivi4", "pca/layer", "cuvee"); if
            there are none, all but PCA, which learns first. The 16-bit cache is always measured, because scores are
            compared with its scores.
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
        InputError: a number is out of range.
    """

    model: str = BUNDLED_MODEL
    profiles: tuple[str, ...] = ()
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
        for name in ("sequences", "chunk_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: must be at least 1, got {getattr(self, name)}")
        if self.length < 8:
            raise InputError(f"length: must be at least 8, got {self.length}")
        if self.limit is not None and self.limit < 1:
            raise InputError(f"limit: must be at least 1, got {self.limit}")
        metadata_pairs(self.metadata)
        if self.controls and not self.tasks:
            raise InputError("controls: must be left out without tasks, got a report that scores none")


def quick_config(config: ReportConfig) -> ReportConfig:
    """Return the configuration with fewer sequences, methods, tasks and documents. Smaller numbers stay.

    Raises:
        InputError: a number is larger than both that of a quick report and the default.
    """
    default = ReportConfig()
    most = {"sequences": 12, "limit": QUICK_LIMIT}
    for name, value in most.items():
        given = getattr(config, name)
        if given != getattr(default, name) and given > value:
            raise InputError(f"{name}: must be at most {value} in a quick report, got {given}: leave out one of them")
    numbers: dict[str, Any] = {name: min(getattr(config, name) or value, value) for name, value in most.items()}
    tasks = QUICK_TASKS if config.tasks == default.tasks else config.tasks
    return replace(config, quick=True, tasks=tasks, **numbers)

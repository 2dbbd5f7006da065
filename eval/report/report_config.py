"""The configuration of a report."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cuvee.codec.data.bundled import CALIBRATION_TEXTS, EVALUATION_TEXTS
from cuvee.codec.data.corpus import BUNDLED_MODEL
from cuvee.codec.errors import InputError
from cuvee.codec.learning.mixture import MIXTURE_SEQUENCES
from cuvee.codec.learning.sequences import LENGTH, SEED
from cuvee.eval.quality import CHUNK_TOKENS
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
        calibration: texts to learn from (see `cuvee.codec.data.corpus`), or "mixture", which is what
            `cuvee profile learn` learns from (`cuvee.calibration.mixture`). Default: the mixture; for the bundled
            model, bundled texts.
        calibration_sequences: at most this many sequences; default: 96 of the mixture, else 200.
        samples: further sequences to learn from, sampled from the model itself.
        methods: methods to measure, by key, family or the first part of a family ("kivi4", "pca/kv", "cuvee"); all
            if there are none. The 16-bit cache is always measured, because scores are compared with its scores.
        evaluation: texts to measure on, at most `sequences` sequences.
        length, prefix: tokens in a sequence, and cached tokens (default: three quarters).
        reread: whether the rest of every second sequence repeats a part of its cache.
        chunk_tokens: tokens coded together.
        lengths: cached tokens; at each of them size and KL are measured as well, on `length_sequences` sequences.
        tasks: lm-eval tasks, with at most `limit` documents each; None: all of them for a model of up to
            `SMALL_PARAMETERS`, else `LARGE_LIMIT`.
        num_fewshot, chat_template, include_path: see `TaskScorer`.
        metadata: "name=value" for tasks that need it, such as "musique=FILE".
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
    samples: int = 0
    methods: tuple[str, ...] = ()
    evaluation: tuple[str, ...] = EVALUATION_TEXTS
    sequences: int = 32
    length: int = LENGTH
    prefix: int | None = None
    reread: bool = True
    chunk_tokens: int = CHUNK_TOKENS
    lengths: tuple[int, ...] = ()
    length_sequences: int = 4
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
        for name in ("learned_sequences", "sequences", "length_sequences", "chunk_tokens", "batch_size"):
            if getattr(self, name) < 1:
                field = name.replace("learned", "calibration")
                raise InputError(f"{field}: must be at least 1, got {getattr(self, name)}")
        if self.limit is not None and self.limit < 1:
            raise InputError(f"limit: must be at least 1, got {self.limit}")
        if short := [length for length in self.lengths if length < 1]:
            raise InputError(f"lengths: must be at least 1 token, got {short[0]}")
        if self.samples < 0:
            raise InputError(f"samples: must be at least 0, got {self.samples}")
        if wrong := [pair for pair in self.metadata if "=" not in pair]:
            raise InputError(f"metadata: must be name=value, got {wrong[0]!r}")
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
    """Return the configuration with fewer sequences, methods, tasks and documents. Smaller numbers stay."""
    default = ReportConfig()
    return replace(
        config,
        quick=True,
        calibration_sequences=min(config.learned_sequences, 64),
        sequences=min(config.sequences, 12),
        tasks=QUICK_TASKS if config.tasks == default.tasks else config.tasks,
        limit=min(config.limit or QUICK_LIMIT, QUICK_LIMIT),
    )

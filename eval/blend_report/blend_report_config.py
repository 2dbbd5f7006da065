"""The configuration of a report on blending."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cuvee.codec.data.bundled import CALIBRATION_TEXTS, EVALUATION_TEXTS
from cuvee.codec.data.corpus import BUNDLED_MODEL
from cuvee.codec.errors import InputError
from cuvee.codec.learning.sequences import SEED
from cuvee.eval.blend_report.prompts import PUBLIC
from cuvee.eval.blend_report.selectors import COMPARED, SELECTORS
from cuvee.eval.blend_report.wall_time import LEAST_TOKENS

__all__ = ["BUNDLED", "BlendConfig", "quick_blend_config"]

BUNDLED = ("reread", "ahead", "passages")  # constructions that need no other data


@dataclass(frozen=True, slots=True)
class BlendConfig:
    """The configuration of a report on blending.

    Attributes:
        model: a folder, a hub name, or "books-3m".
        profile: the profile that codes the chunks; if there is none, one is learned for group "layer".
        calibration: texts to learn from and to take contexts from, at most `calibration_sequences` sequences.
        evaluation: texts for the constructions "reread" and "ahead", at most `prompts` prompts.
        constructions: which prompts, of "reread", "ahead", "passages", "xquad" and "musique" (see `prompts.py`).
        data: the folder with the files of "xquad" and "musique"; default: the hub.
        any_version: take other files than the published ones.
        multidoc: .jsonl files, each a construction of its own: objects with id, passages, gold, query and target.
        chunks, chunk_tokens, suffix: how many cached chunks a prompt has, tokens in each, and tokens after them.
        documents: how many prompts to make at most, of the task cuvee_passages, of public data and of each file.
        fit: if a prompt of a `multidoc` file has more tokens, its passages are cut to 64 tokens each.
        contexts, context_tokens: what chunks are averaged over. With 0 contexts none are averaged.
        behind: how many chunks of other prompts stand before each chunk when it is computed, as if it were harvested
            from such a prompt; 0: no chunks of this kind. A chunk that begins its prompt is computed alone.
        selectors: which selectors, by their keys in `SELECTORS`. "nothing" is always among them: it is the floor.
        costs: shares of the token-layers to spend. All of them are measured on exact chunks of "reread".
        few_costs: the costs that are measured on decoded chunks, and on other prompts.
        qualities: of the codec.
        lengths: tokens in the prompts whose wall time is measured.
        dtype: of the model and its caches; "auto" is what the files say. In 16 bits a blend that recomputes everything
            differs from the full prefill by rounding.
        seed: of the repeats, of random selection and of the bootstrap.
        quick: less of everything; see `quick_blend_config`.

    Raises:
        InputError: a number is out of range.
    """

    model: str = BUNDLED_MODEL
    profile: str | None = None
    calibration: tuple[str, ...] = CALIBRATION_TEXTS
    calibration_sequences: int = 200
    evaluation: tuple[str, ...] = EVALUATION_TEXTS
    constructions: tuple[str, ...] = BUNDLED
    data: str | None = None
    any_version: bool = False
    multidoc: tuple[str, ...] = ()
    prompts: int = 48
    chunks: int = 3
    chunk_tokens: int = 128
    suffix: int = 64
    documents: int = 60
    fit: int = 512
    contexts: int = 8
    context_tokens: int = 128
    behind: int = 0
    selectors: tuple[str, ...] = tuple(SELECTORS)
    costs: tuple[float, ...] = (0.05, 0.1, 0.15, 0.3, 0.45, 0.7, 1.0)
    few_costs: tuple[float, ...] = COMPARED
    qualities: tuple[str, ...] = ("high", "balanced", "small")
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    dtype: str = "float32"
    seed: int = SEED
    quick: bool = False

    def __post_init__(self) -> None:
        for name in ("prompts", "chunk_tokens", "documents", "fit", "context_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: must be at least 1, got {getattr(self, name)}")
        for name in ("contexts", "behind"):
            if getattr(self, name) < 0:
                raise InputError(f"{name}: must be at least 0, got {getattr(self, name)}")
        for name in ("chunks", "suffix"):
            if getattr(self, name) < 2:
                raise InputError(f"{name}: must be at least 2, got {getattr(self, name)}")
        for name, known in (("constructions", (*BUNDLED, *PUBLIC)), ("selectors", tuple(SELECTORS))):
            if unknown := [key for key in getattr(self, name) if key not in known]:
                raise InputError(f"{name}: must be among {', '.join(known)}, got {unknown[0]!r}")
        if not (self.constructions or self.multidoc):
            raise InputError("constructions: must be at least one, got none; or give a file of prompts")
        if bad := [cost for cost in self.costs if not 0 < cost <= 1]:
            raise InputError(f"costs: must be above 0 and at most 1, got {bad[0]:g}")
        if set(self.few_costs) - set(self.costs):
            raise InputError("few_costs: must be among costs, for decoded chunks are compared with exact ones")
        if short := [length for length in self.lengths if length < LEAST_TOKENS]:
            raise InputError(f"lengths: must be at least {LEAST_TOKENS} tokens, got {short[0]}")


def quick_blend_config(config: BlendConfig) -> BlendConfig:
    """The same configuration with fewer prompts, costs and lengths. What is already less stays."""
    return replace(
        config,
        quick=True,
        calibration_sequences=min(config.calibration_sequences, 32),
        prompts=min(config.prompts, 10),
        documents=min(config.documents, 8),
        costs=tuple(cost for cost in config.costs if cost in (*COMPARED, 1.0)),
        qualities=tuple(quality for quality in config.qualities if quality == "balanced"),
        lengths=tuple(length for length in config.lengths if length <= 1024),
    )

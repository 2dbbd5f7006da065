"""Profiles whose tokens have the classes that a test wants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.profiles.class_predictor import EXPONENT, MAX_SINKS, Predictor
from cuvee.codec.profiles.profile import Profile

_COARSEST = 64.0  # octaves


def with_classes(
    profile: Profile,
    weights: Sequence[float] | npt.NDArray[np.float64] | torch.Tensor | None = None,
    start: int = 0,
    every: bool = False,
    keep_id: bool = False,
) -> Profile:
    """A learned profile whose predictors choose the class of a token by its position, on every backend alike.

    The token at `start` + i costs what `weights` i says, by default all kinds of things; later ones are of the coarsest
    class. The predictors read the second component, with which an encoder saves no product, or `every` one: a shard
    drops predictors that read none of its own. With `keep_id`, blobs are those of the given profile, whose decoders
    read the classes and need no predictor.
    """
    given: Any = 2.0 ** (7 * np.arange(start, MAX_SINKS) % 12 - 6) if weights is None else weights
    weight = torch.as_tensor(given, dtype=torch.float64).numpy()
    level = np.log2(weight[weight > 0]).mean()
    octaves = -0.5 * EXPONENT * (np.log2(np.maximum(weight, 1e-300)) - level)
    sinks = np.concatenate([np.zeros(start), np.minimum(octaves, _COARSEST)]).astype(np.float32)
    learned = []
    for section in profile.learned:
        rows = len(section.scale)
        components = np.arange(rows, dtype=np.int32)[slice(None) if every else slice(min(1, rows - 1), 2)]
        count = len(components)
        nothing = np.zeros(count, np.float32)
        predictor = Predictor(
            components, np.ones(count, np.float32), nothing, nothing, 0.0, _COARSEST, sinks,
            np.zeros(count + 1, np.float32), np.empty(0, np.float32),
        )  # fmt: skip
        learned.append(replace(section, predictor=predictor))
    made = Profile(
        profile.layout, profile.group, profile.source, profile.family, tuple(learned),
        min_step_index=profile.min_step_index, model=profile.model, curve=profile.points,
        token_table=profile.token_table,
    )  # fmt: skip
    if keep_id:
        made.__dict__["id"] = profile.id
    return made

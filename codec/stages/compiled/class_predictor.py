"""The classes of a section's tokens, compiled.

Logarithms and sums are left to PyTorch, whose last bits decide where an offset is between two classes.
"""

from __future__ import annotations

import numpy as np
import torch

from cuvee.codec.entropy.token_classes import CLASSES, NEUTRAL
from cuvee.codec.profiles.class_predictor import CLAMP, CLASSES_PER_OCTAVE, ENERGY_FLOOR, SQUARE_FLOOR, Predictor
from cuvee.codec.profiles.token_prediction import Predictions
from cuvee.codec.stages.compiled.compiler import compiled
from cuvee.codec.support.arena import SECOND, tile_arena
from cuvee.codec.support.arrays import U8

_NEUTRAL, _COARSEST = np.float32(NEUTRAL), np.float32(CLASSES - 1)
_NO_PREDICTIONS = np.empty((0, 0), np.float32), np.empty(0, np.int64)


@compiled
def _features(y, predicted, row_of, scale, clamp, floor, features):  # type: ignore[no-untyped-def]
    """Write what the predictor's sums are over: clamped deviations, their squares, and squared coefficients."""
    count, tokens = y.shape
    most, least_square = np.float32(clamp), np.float32(floor)
    whole = np.empty(tokens, np.float32)
    for k in range(count):
        deviation = scale[k]
        if len(row_of):
            for t in range(tokens):
                whole[t] = y[k, t] + predicted[row_of[t], k]
        else:
            for t in range(tokens):
                whole[t] = y[k, t]
        for t in range(tokens):
            u = whole[t] / deviation
            features[1, k, t] = u * u + least_square
            u = most if u > most else u
            features[0, k, t] = -most if u < -most else u  # NaN stays
        for t in range(tokens):
            features[2, k, t] = whole[t] * whole[t]


@compiled
def _choose(  # type: ignore[no-untyped-def]
    linear, square, energy, weight, bias, finer, sinks, position, per_octave, finest, classes
):
    """Add up the terms of each token's offset, and round it to a class. The first token is at `position`."""
    weight_, bias_ = np.float32(weight), np.float32(bias)
    for t in range(len(classes)):
        offset = (linear[0, t] + square[0, t]) + (energy[t] * weight_ + bias_ - finer[t])
        if position + t < len(sinks) and sinks[position + t] < offset:
            offset = sinks[position + t]
        wanted = np.rint(offset * np.float32(per_octave)) + _NEUTRAL
        wanted = _NEUTRAL if np.isnan(wanted) else wanted
        classes[t] = np.uint8(min(max(wanted, np.float32(finest)), _COARSEST))


def predict_classes(
    predictor: Predictor,
    y: torch.Tensor,
    predictions: Predictions | None,
    start: int,
    first: int,
    finer: torch.Tensor,
    finest: int,
) -> U8:
    """Return the classes `[t]` uint8 of a run of tokens, none finer than `finest`: see `Predictor.offsets`.

    `y`, `[K, t]` float32, lacks what tokens predict of the coefficients that the predictor reads, if they do.
    """
    count, tokens = y.shape
    features = tile_arena.array(SECOND, 3 * count * tokens, np.float32).reshape(3, count, tokens)
    predicted, row_of = _NO_PREDICTIONS if predictions is None else (predictions.rows.numpy(), predictions.index)
    _features(y.numpy(), predicted, row_of, predictor.scale, CLAMP, SQUARE_FLOOR, features)
    clamped, floored, squares = torch.from_numpy(features).unbind()
    weights = torch.from_numpy(predictor.linear[None]), torch.from_numpy(predictor.square[None])
    linear, square = torch.mm(weights[0], clamped), torch.mm(weights[1], floored.log_())
    energy = squares.sum(0).add_(ENERGY_FLOOR).log_()
    classes = np.empty(tokens, np.uint8)
    _choose(
        linear.numpy(), square.numpy(), energy.numpy(), predictor.energy, predictor.bias, finer.numpy(),
        predictor.sinks, start + first, CLASSES_PER_OCTAVE, finest, classes,
    )  # fmt: skip
    return classes

"""The classes of a section's tokens, as its predictor chooses them."""

from __future__ import annotations

import torch

from cuvee.codec.profiles.class_predictor import Predictor, choose_classes
from cuvee.codec.profiles.token_prediction import Predictions
from cuvee.codec.support.arrays import U8


def predict_classes(
    predictor: Predictor,
    y: torch.Tensor,
    predictions: Predictions | None,
    start: int,
    first: int,
    finer: torch.Tensor,
    finest: int,
) -> U8:
    """See `cuvee.codec.stages.compiled.class_predictor.predict_classes`."""
    whole = y if predictions is None else y + predictions.rows[torch.from_numpy(predictions.index)].T
    return choose_classes(predictor.offsets(whole, start, first, finer), finest)

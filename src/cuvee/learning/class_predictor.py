"""Learn a `Predictor`: a regression from a token's coefficients to the cost of an error on it.

    e_t = |z_t|^2, z_t the gradient on token t in the section's coordinates: the cost of a unit of squared error there
    log e_t ~ weights . features(leading coefficients of t) + bias + recency(distance of t from the end of the cache)

The fit is ridge regression on the logarithm. e_t spans many orders of magnitude, and a few tokens hold nearly all of
it. A likelihood of e_t itself would follow those tokens and generalize badly to other kinds of text. Measured by
learning on five kinds of text and weighing the error by e_t on a sixth (SmolLM2-135M, mean of five layers): at equal
bits the ridge gains 1.36 nats of squared error, a Gamma regression 1.32. On books-3m, whose tokens differ even more,
the ridge gains 0.3 and the Gamma regression loses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from cuvee.codec.entropy.token_classes import CLASS_UNITS, CLASSES, class_frequencies
from cuvee.codec.profiles.class_predictor import CLAMP, EXPONENT, SQUARE_FLOOR, Predictor, choose_classes, recency_at
from cuvee.codec.support.arrays import F32, I16, I64, U8, U16
from cuvee.codec.support.steps import OCTAVE

LEADING = 96  # components that a predictor reads, per layer of its section
MOST_LEADING = 384
RIDGE = 0.03  # as a share of the features' variance; 0.01 to 0.1 measured equal
ENERGY_FLOOR = 1e-3  # as a share of the mean; below it, differences do not matter
EXPONENTS = (0.0, 0.25, 0.5, EXPONENT)
TRUST = 4000  # tokens for which half of the best-fitting exponent is used
CLASS_PRIOR = 64.0  # tokens for which a class gets half of its measured scale
OCTAVES_PER_LOG = 0.5 * EXPONENT / math.log(2)  # octaves of step per unit of log e


@dataclass(frozen=True, slots=True)
class TokenSample:
    """The ordinary tokens of one section, and the energies of its sinks.

    Attributes:
        y: `[R, t]` float32 coefficients of ordinary tokens.
        whole: the same with what their tokens predict, which `y` lacks.
        energy: `[t]` float32, e_t of these tokens.
        distance: `[t]` int64, 1 for the last token of a sequence's cache, 2 for the one before.
        sink_energy: `[P]`, mean e of the leading positions, whose coefficients have separate means.
        sink_count: `[P]`, number of tokens in each of these averages.
    """

    y: F32
    whole: F32
    energy: F32
    distance: I64
    sink_energy: F32
    sink_count: F32


def leading_components(scale: I16, layers: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Return the components of a section with the largest scales, in order."""
    count = min(LEADING * layers, MOST_LEADING, len(scale))
    chosen = np.argsort(-scale.astype(np.int32), kind="stable")[:count]
    return np.sort(chosen).astype(np.int32)


def learn_predictors(samples: Sequence[TokenSample], scales: Sequence[I16], layers: Sequence[int]) -> list[Predictor]:
    """Learn one predictor per section. The offsets average zero over the tokens of all sections."""
    raw = [_regress(sample, scale, count) for sample, scale, count in zip(samples, scales, layers, strict=True)]
    # Weighted by the sections' values, so that the blob's step is the geometric mean of all steps used.
    total = sum(float(offsets.mean()) * len(scale) for (_, offsets), scale in zip(raw, scales, strict=True))
    level = total / sum(len(scale) for scale in scales)
    return [
        replace(predictor, bias=predictor.bias - level, sinks=(predictor.sinks - level).astype(np.float32))
        for predictor, _ in raw
    ]


def _regress(sample: TokenSample, scale: I16, layers: int) -> tuple[Predictor, torch.Tensor]:
    """Return the predictor of one section, without the common level, and its offsets on the sample."""
    components = leading_components(scale, layers)
    y = torch.from_numpy(np.ascontiguousarray(sample.whole[components]))
    deviation = y.square().mean(1).sqrt() + 1e-9
    u = y / deviation[:, None]
    features = torch.cat(
        [
            u.clamp(-CLAMP, CLAMP),
            (u.square() + SQUARE_FLOOR).log(),
            (y.square().sum(0, keepdim=True) + 1e-9).log(),
            _hats(sample.distance),
        ]
    )
    center, spread = features.mean(1, keepdim=True), features.std(1, keepdim=True) + 1e-6
    # In float64, because the features of neighboring components are nearly collinear if there are few.
    energy = torch.from_numpy(sample.energy).double()
    level = energy.mean().clamp_min(1e-30)
    scaled, relative = ((features - center) / spread).double(), energy / level
    weights, mean = _ridge(scaled, relative)
    share = _exponent(scaled, relative)
    plain = weights.float() / spread[:, 0]
    count = len(components)
    # A small exponent equalizes the tokens of a section. The exponent of distances is 1: they are few and known, where
    # coefficients only predict. On SmolLM2-135M, 1 needs 4% fewer bits than 0.75 where the cache ends.
    plain[: 2 * count + 1] *= share / EXPONENT
    plain[2 * count + 1 :] *= _enough(features) / EXPONENT
    # The constant keeps the section's level.
    constant = float(mean + level.log()) - float(plain @ center[:, 0])
    octaves = (-OCTAVES_PER_LOG * plain).numpy().astype(np.float32)
    finer = -octaves[2 * count + 1 :]
    sinks = -OCTAVES_PER_LOG * np.log(np.maximum(sample.sink_energy, 1e-30))
    predictor = Predictor(
        components,
        deviation.numpy(),
        octaves[:count],
        octaves[count : 2 * count],
        float(octaves[2 * count]),
        -OCTAVES_PER_LOG * constant - float(finer[-1]),
        sinks.astype(np.float32),
        center[count : 2 * count + 1, 0].numpy().astype(np.float32),
        finer - finer[-1],
    )
    return predictor, _offsets(predictor, sample)


def _enough(features: torch.Tensor) -> bool:
    """Return whether there are enough tokens to learn from features `[F, t]`."""
    return features.shape[1] >= 2 * len(features)


def _hats(distance: I64) -> torch.Tensor:
    """Return the features of distances `[t]`, `[D, t]`: each is 1 at 1, 2, 4, … and falls to 0 at its neighbors.

    The last distance is the largest power of two that occurs; beyond it, nothing changes.
    """
    octaves = torch.from_numpy(np.log2(distance)).float()
    knots = torch.arange(int(octaves.max()) + 1)[:, None]
    return (1 - (octaves.clamp_max(len(knots) - 1) - knots).abs()).clamp_min(0)


def _offsets(predictor: Predictor, sample: TokenSample) -> torch.Tensor:
    """Return a predictor's offsets on the ordinary tokens of its sample, in octaves."""
    y = torch.from_numpy(np.ascontiguousarray(sample.whole[predictor.components]))
    finer = torch.from_numpy(recency_at(predictor.recency, sample.distance)).float()
    return predictor.offsets(y, len(predictor.sinks), 0, finer)


def _ridge(features: torch.Tensor, relative: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Fit log `relative` `[t]` (e over its mean) with features `[F, t]` of mean zero; return weights `[F]` and mean."""
    target = (relative + ENERGY_FLOOR).log()
    normal = features @ features.T / features.shape[1] + RIDGE * torch.eye(len(features), dtype=torch.float64)
    return torch.linalg.solve(normal, features @ (target - target.mean()) / features.shape[1]), target.mean()


def _exponent(features: torch.Tensor, relative: torch.Tensor) -> float:
    """Return the exponent that gives the smallest error on held-out tokens: how strongly classes separate tokens.

    Each half of the tokens is learned on and the error on the other half weighed. With little text, or if the
    coefficients do not predict the cost, the result is smaller than `EXPONENT`, down to zero.
    """
    count = features.shape[1]
    halves = [torch.arange(count) < count // 2, torch.arange(count) >= count // 2]
    if not _enough(features):
        return 0.0
    costs = dict.fromkeys(EXPONENTS, 0.0)
    for learned, held_out in (halves, halves[::-1]):
        weights, _ = _ridge(features[:, learned], relative[learned])
        predicted = weights @ features[:, held_out]
        for exponent in EXPONENTS:
            # Bits are equal, since the logarithms of the steps add up to zero.
            steps = torch.exp(-exponent * (predicted - predicted.mean()))
            costs[exponent] += float((relative[held_out] * steps).mean().clamp_min(1e-300).log())
    best = min(costs, key=lambda exponent: costs[exponent])
    # A mean over tokens hides the few badly predicted tokens, which decide the loss of single sequences. On books-3m
    # with 4,300 tokens, halving the exponent reduced the KL of another text from 0.0076 to 0.0063.
    return best * count / (count + TRUST)


def learn_classes(sample: TokenSample, predictor: Predictor, scale: I16) -> tuple[U8, U16, I16]:
    """Choose the classes of the sample's tokens; measure their frequencies and the scales of each class.

    Returns:
        Classes `[t]` uint8; frequencies `[16]` uint16; class scales `[16]` int16, in 1/64 octave relative to `scale`.
    """
    classes = choose_classes(_offsets(predictor, sample), 0)
    counts = np.bincount(classes, minlength=CLASSES).astype(np.float64)
    sinks = choose_classes(torch.from_numpy(predictor.sinks), 0)
    coded = counts + np.bincount(sinks, sample.sink_count, CLASSES)
    expected = np.exp2(scale.astype(np.float64) / OCTAVE)
    relative = np.square(sample.y / np.maximum(expected, 1e-30)[:, None])[predictor.components].mean(0)
    class_scale = np.zeros(CLASSES)
    for k in np.flatnonzero(counts):
        # The arithmetic mean, because the deviation selects the tables. A geometric mean would be lower.
        energy = relative[classes == k].mean()
        class_scale[k] = 0.5 * OCTAVE * math.log2(max(energy, 1e-9)) * counts[k] / (counts[k] + CLASS_PRIOR)
    occurring = np.flatnonzero(counts)
    for empty in np.flatnonzero(counts == 0) if len(occurring) else ():
        class_scale[empty] = class_scale[occurring[np.abs(occurring - empty).argmin()]]
    # Coarser classes must not code more components than finer ones.
    for coarser in range(1, CLASSES):
        class_scale[coarser] = min(class_scale[coarser], class_scale[coarser - 1] + CLASS_UNITS)
    limit = 4 * OCTAVE
    return classes, class_frequencies(coded), np.clip(np.rint(class_scale), -limit, limit).astype(np.int16)

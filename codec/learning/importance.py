"""Learning a `Predictor`: a regression of what an error on a token costs on what the encoder sees of it.

    e_t = |z_t|^2, z_t the gradient on token t in the section's coordinates: the cost of a unit of squared error there
    log e_t ~ weights . features(leading coefficients of t) + bias

Least squares on the logarithm, with a ridge. e_t spans many orders of magnitude and a few tokens hold nearly all of
it; a likelihood on e_t itself follows those few, and says the wrong thing of text of another kind. Learned on five
kinds of text and judged by the error weighed by e_t on a sixth (SmolLM2-135M, mean of five layers), the ridge gains
1.36 nats of squared error at equal bits, a Gamma regression 1.32; on books-3m, whose tokens are less equal still,
0.3 against a loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from cuvee.codec.classes import CLASS_UNITS, CLASSES, class_frequencies
from cuvee.codec.family import OCTAVE
from cuvee.codec.importance import CLAMP, EXPONENT, SQUARE_FLOOR, Predictor, choose_classes
from cuvee.codec.symbols import F32, I16, U8, U16

LEADING = 96  # components that a predictor reads, for each layer of its section
MOST_LEADING = 384
RIDGE = 0.03  # of the features' variance; 0.01 to 0.1 measured alike
ENERGY_FLOOR = 1e-3  # of the mean: what a token costs less does not matter
EXPONENTS = (0.0, 0.25, 0.5, EXPONENT)
TRUST = 4000  # tokens: with so many, half of the exponent that they bear out
CLASS_PRIOR = 64.0  # tokens: how much evidence a class needs for a scale of its own
OCTAVES_PER_LOG = 0.5 * EXPONENT / math.log(2)  # of step, for a unit of log e


@dataclass(frozen=True, slots=True)
class TokenSample:
    """Ordinary tokens of one section, sinks apart.

    Attributes:
        y: `[R, t]` float32 coefficients.
        energy: `[t]` float32, e_t.
        sink_energy: `[P]` mean e of the leading positions that have means of their own.
        sink_count: `[P]` how many tokens each of them is the mean of.
    """

    y: F32
    energy: F32
    sink_energy: F32
    sink_count: F32


def leading_components(scale: I16, layers: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """The widest components of a section, in order."""
    count = min(LEADING * layers, MOST_LEADING, len(scale))
    chosen = np.argsort(-scale.astype(np.int32), kind="stable")[:count]
    return np.sort(chosen).astype(np.int32)


def learn_predictors(samples: Sequence[TokenSample], scales: Sequence[I16], layers: Sequence[int]) -> list[Predictor]:
    """One predictor for each section; their offsets are zero on average over the tokens of all sections."""
    raw = [_regress(sample, scale, count) for sample, scale, count in zip(samples, scales, layers, strict=True)]
    # The mean goes by the sections' values: the blob's step is then the geometric mean of the steps used.
    total = sum(float(offsets.mean()) * len(scale) for (_, offsets), scale in zip(raw, scales, strict=True))
    level = total / sum(len(scale) for scale in scales)
    return [
        replace(predictor, bias=predictor.bias - level, sinks=(predictor.sinks - level).astype(np.float32))
        for predictor, _ in raw
    ]


def _regress(sample: TokenSample, scale: I16, layers: int) -> tuple[Predictor, torch.Tensor]:
    """The predictor of one section without the common level, and its offsets on the sample."""
    components = leading_components(scale, layers)
    y = torch.from_numpy(np.ascontiguousarray(sample.y[components]))
    deviation = y.square().mean(1).sqrt() + 1e-9
    u = y / deviation[:, None]
    features = torch.cat(
        [u.clamp(-CLAMP, CLAMP), (u.square() + SQUARE_FLOOR).log(), (y.square().sum(0, keepdim=True) + 1e-9).log()]
    )
    center, spread = features.mean(1, keepdim=True), features.std(1, keepdim=True) + 1e-6
    # In float64: features of neighboring components are close to collinear where components are few.
    energy = torch.from_numpy(sample.energy).double()
    level = energy.mean().clamp_min(1e-30)
    scaled, relative = ((features - center) / spread).double(), energy / level
    weights, mean = _ridge(scaled, relative)
    share = _exponent(scaled, relative)
    plain = weights.float() / spread[:, 0]
    # Where the exponent is small the offset keeps the section's level: its tokens are alike, not its weight lost.
    constant = float(mean + level.log()) - share / EXPONENT * float(plain @ center[:, 0])
    plain = plain * (share / EXPONENT)
    count = len(components)
    octaves = (-OCTAVES_PER_LOG * plain).numpy().astype(np.float32)
    sinks = -OCTAVES_PER_LOG * np.log(np.maximum(sample.sink_energy, 1e-30))
    predictor = Predictor(
        components,
        deviation.numpy(),
        octaves[:count],
        octaves[count : 2 * count],
        float(octaves[-1]),
        -OCTAVES_PER_LOG * constant,
        sinks.astype(np.float32),
        center[count:, 0].numpy().astype(np.float32),
    )
    return predictor, predictor.offsets(y, len(sinks), 0)


def _ridge(features: torch.Tensor, relative: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights `[F]` of features `[F, t]` of mean zero, and the mean of the logarithm of e over its mean, `[t]`."""
    target = (relative + ENERGY_FLOOR).log()
    normal = features @ features.T / features.shape[1] + RIDGE * torch.eye(len(features), dtype=torch.float64)
    return torch.linalg.solve(normal, features @ (target - target.mean()) / features.shape[1]), target.mean()


def _exponent(features: torch.Tensor, relative: torch.Tensor) -> float:
    """How far tokens are to be told apart: the exponent that gives the least error on text not learned from.

    Learns on one half of the tokens and weighs the error on the other, both ways. With little text, or where what a
    token costs does not show in it, that is less than EXPONENT, or nothing.
    """
    count = features.shape[1]
    halves = [torch.arange(count) < count // 2, torch.arange(count) >= count // 2]
    if count < 2 * len(features):
        return 0.0
    costs = dict.fromkeys(EXPONENTS, 0.0)
    for own, other in (halves, halves[::-1]):
        weights, _ = _ridge(features[:, own], relative[own])
        told = weights @ features[:, other]
        for exponent in EXPONENTS:
            # At equal bits: steps whose logarithms add up to nothing.
            steps = torch.exp(-exponent * (told - told.mean()))
            costs[exponent] += float((relative[other] * steps).mean().clamp_min(1e-300).log())
    best = min(costs, key=lambda exponent: costs[exponent])
    # A mean over tokens says nothing of the few that are told wrong, and they decide what single sequences lose. On
    # books-3m with 4,300 tokens half of the exponent took the KL of another text from 0.0076 to 0.0063.
    return best * count / (count + TRUST)


def learn_classes(sample: TokenSample, predictor: Predictor, scale: I16) -> tuple[U8, U16, I16]:
    """Classes of the sample's tokens, the frequencies that code them, and how wide each class's components are.

    Returns:
        classes `[t]` uint8, frequencies `[16]` uint16, class scale `[16]` int16 (1/64 octaves beyond `scale`).
    """
    offsets = predictor.offsets(torch.from_numpy(sample.y[predictor.components]), len(predictor.sinks), 0)
    classes = choose_classes(offsets, 0)
    counts = np.bincount(classes, minlength=CLASSES).astype(np.float64)
    sinks = choose_classes(torch.from_numpy(predictor.sinks), 0)
    coded = counts + np.bincount(sinks, sample.sink_count, CLASSES)
    expected = np.exp2(scale.astype(np.float64) / OCTAVE)
    relative = np.square(sample.y / np.maximum(expected, 1e-30)[:, None])[predictor.components].mean(0)
    class_scale = np.zeros(CLASSES)
    for k in np.flatnonzero(counts):
        # The geometric mean of a component's energy over tokens would be lower: tables go by the deviation.
        energy = relative[classes == k].mean()
        class_scale[k] = 0.5 * OCTAVE * math.log2(max(energy, 1e-9)) * counts[k] / (counts[k] + CLASS_PRIOR)
    seen = np.flatnonzero(counts)
    for empty in np.flatnonzero(counts == 0) if len(seen) else ():
        class_scale[empty] = class_scale[seen[np.abs(seen - empty).argmin()]]
    # Coarser classes must not code more components than finer ones.
    for coarser in range(1, CLASSES):
        class_scale[coarser] = min(class_scale[coarser], class_scale[coarser - 1] + CLASS_UNITS)
    limit = 4 * OCTAVE
    return classes, class_frequencies(coded), np.clip(np.rint(class_scale), -limit, limit).astype(np.int16)

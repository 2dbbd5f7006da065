"""`Predictor`: chooses the class of a token from its coefficients, which predict the cost of an error on it.

The cost of an error differs by factors of a thousand between tokens, and the token's coefficients predict it. The
profile holds a regression on the leading coefficients. Let e be the squared gradient on a token in the section's
coordinates, which is the cost of a unit of squared error. The best step is then proportional to e^-1/2 (reverse
water-filling). The profile's exponent is flatter, because e is only predicted.

    offset [octaves of step]  =  bias - weights . features(leading coefficients) - recency(distance from the end)
    class = 11 + round(2 offset)

The distance is that to the end of the sequence's cache, where its readers begin. On SmolLM2-135M, e falls as the
inverse of the distance up to some 200 tokens: an error on the last token costs 50 times as much as one on an average
token.

Only the encoder predicts; the decoder reads the classes. So a profile may change its predictor, and earlier blobs still
decode.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.entropy.token_classes import CLASS_UNITS, CLASSES, NEUTRAL
from cuvee.codec.errors import FormatError
from cuvee.codec.profiles.file_arrays import Arrays, read_array
from cuvee.codec.profiles.token_prediction import Predictions
from cuvee.codec.support.arrays import F32, U8
from cuvee.codec.support.steps import OCTAVE

CLASSES_PER_OCTAVE = OCTAVE // CLASS_UNITS
CLAMP = 6.0  # in deviations; larger values predict nothing more
SQUARE_FLOOR = 1e-2  # in squared deviations; below it the logarithm of a coefficient predicts nothing
ENERGY_FLOOR = 1e-9  # added to the sum of squared coefficients, whose logarithm is thus finite
KEPT_TOKENS = 1 << 10  # for longer chunks the octaves near the end are not worth the memory to keep them
MAX_SINKS = 1 << 10
MAX_DISTANCES, MAX_FINER = 32, 64.0
# Share of the readers that begin within so many tokens although the cache goes on: prompts that begin alike part ways
# anywhere, but are only found up to the end of a chunk. On SmolLM2-135M, 1,024 tokens cached in chunks of 256, 0.25
# takes 4% more bits than 0.1 at equal KL where the cache ends. Where a prompt leaves a longer one, 0.1 loses twice
# that KL, and 0.25 loses 1.65 times.
LEAVING = 0.25
LEAVING_TOKENS = 256
EXPONENT = 0.75  # the squared step goes with e to this negative power; 0.5 and 1 measured worse (SmolLM2-135M)


@dataclass(frozen=True, slots=True)
class Predictor:
    """Predicts, from a token's leading coefficients, how many octaves coarser than the blob's its step may be.

    Attributes:
        components: `[K]` int32, the section's components that the predictor reads.
        scale: `[K]` float32, their deviations.
        linear: `[K]` float32, weights of the coefficients, in deviations and clamped to ±6.
        square: `[K]` float32, weights of the logarithms of their squares.
        energy: weight of the logarithm of the sum of the squared coefficients.
        bias: in octaves.
        sinks: `[P]` float32, in octaves; upper limits of the offset at the first P positions of a sequence.
        means: `[K + 1]` float32, the average logarithms of the squares and of their sum. A shard uses them in place of
            components that it lacks.
        recency: `[D]` float32, by how many octaves a step is finer 1, 2, 4, … tokens from the end of the cache than far
            from it. Empty if the distance does not matter.
    """

    components: npt.NDArray[np.int32]
    scale: F32
    linear: F32
    square: F32
    energy: float
    bias: float
    sinks: F32
    means: F32
    recency: F32

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """Return the arrays of a profile's file; `read_predictor` is the inverse."""
        constants = np.array([self.energy, self.bias], np.float32)
        return {
            "components": self.components, "scale": self.scale, "linear": self.linear, "square": self.square,
            "constants": constants, "sinks": self.sinks, "means": self.means, "recency": self.recency,
        }  # fmt: skip

    def take(self, rows: npt.NDArray[np.intp]) -> Predictor | None:
        """Return the predictor of a section cut to the components `rows`, in this order; None if none are left.

        The mean replaces the terms of other components, and the sum over all components. The classes of a shard vary
        less than those of the whole section, but are equally fine on average.
        """
        where = {int(row): index for index, row in enumerate(rows)}
        kept = np.array([int(c) in where for c in self.components])
        if not kept.any():
            return None
        lost = self.square[~kept].astype(np.float64) @ self.means[:-1][~kept]
        components = np.array([where[int(c)] for c in self.components[kept]], np.int32)
        order = np.argsort(components)
        return Predictor(
            components[order],
            self.scale[kept][order],
            self.linear[kept][order],
            self.square[kept][order],
            0.0,
            self.bias + float(lost) + self.energy * float(self.means[-1]),
            self.sinks,
            np.append(self.means[:-1][kept][order], self.means[-1]).astype(np.float32),
            self.recency,
        )

    def offsets(self, y: torch.Tensor, start: int, first: int, finer: torch.Tensor) -> torch.Tensor:
        """Return the offsets of a run of tokens in octaves, `[t]` float32.

        `y` has their coefficients of `components`, `[K, t]`. The run begins with token `first` of a chunk that begins
        at position `start`. `finer`, `[t]`, is what the distance from the end takes off (`finer_near_end`).
        """
        u = y / torch.from_numpy(self.scale)[:, None]
        logs = u.square().add_(SQUARE_FLOOR).log_()
        out = torch.from_numpy(self.linear) @ u.clamp_(-CLAMP, CLAMP)
        out += torch.from_numpy(self.square) @ logs
        out += y.square().sum(0).add_(ENERGY_FLOOR).log_().mul_(self.energy).add_(self.bias).sub_(finer)
        sinks = torch.from_numpy(self.sinks[start + first : start + first + y.shape[1]])
        out[: len(sinks)] = torch.minimum(out[: len(sinks)], sinks)
        return out


def read_predictor(prefix: str, arrays: Arrays, rows: int) -> Predictor:
    """Return the predictor in the arrays `PREFIX.*` of a profile's file, of a section of `rows` components."""
    components = read_array(arrays, f"{prefix}.components", np.int32, None)
    count = len(components)
    if not count or components.min() < 0 or components.max() >= rows or np.any(np.diff(components) <= 0):
        raise FormatError(f"{prefix}.components: are none, out of order or out of range")
    sizes = {
        "scale": count, "linear": count, "square": count, "constants": 2, "sinks": None, "means": count + 1,
        "recency": None,
    }  # fmt: skip
    scale, linear, square, constants, sinks, means, recency = (
        read_array(arrays, f"{prefix}.{name}", np.float32, size) for name, size in sizes.items()
    )
    if scale.min() <= 0 or len(sinks) > MAX_SINKS:
        raise FormatError(f"{prefix}: scale must be above zero, and at most {MAX_SINKS} positions are sinks")
    if len(recency) > MAX_DISTANCES or np.abs(recency).max(initial=0) > MAX_FINER:
        raise FormatError(f"{prefix}.recency: must be at most {MAX_DISTANCES} numbers between -64 and 64")
    energy, bias = constants.tolist()
    return Predictor(components, scale, linear, square, energy, bias, sinks, means, recency)


def recency_at(recency: F32, distance: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the octaves of `Predictor.recency` for distances of at least 1 from the end of the cache."""
    if not len(recency):
        return np.zeros(len(distance))
    octaves: npt.NDArray[np.float64] = np.interp(np.log2(distance), np.arange(len(recency)), recency)
    return octaves


def finer_in_long_caches(recency: F32, cached: int) -> float:
    """Return by how many octaves all steps are finer in a cache of `cached` tokens, so that its KL stays the same.

    Up to D tokens from the end, the last distance of `recency`, every token costs the same at its step. Farther away,
    steps stay as they are, and costs fall as d^-a, where a continues the fall at D. So the cost of the whole cache is D
    times (1 + integral of u^-a from 1 to N / D). On SmolLM2-135M, whose a is 1.2 to 2, this is 1.8 to 2.4 times the
    cost of 256 tokens for 1,024, and 1.9 to 3.8 times for 4,096. Its KL grew 1.9 and 2.5 times.
    """
    last = 1 << (len(recency) - 1) if len(recency) else cached
    if cached <= last:
        return 0.0
    fall = 2 * float(recency[-2] - recency[-1]) if len(recency) > 1 else 1.0
    fall = min(max(fall, 1.0 + 1e-6), 2.0)  # attention adds up to 1, so that costs cannot grow with the cache
    growth = 1 + (1 - (cached / last) ** (1 - fall)) / (fall - 1)
    return 0.5 * math.log2(growth)


def finer_near_end(recency: F32, start: int, tokens: int, following: int) -> torch.Tensor:
    """Return by how many octaves a chunk's steps are finer because of its place in the cache, `[T]` float32.

    A reader begins after the last token of the cache, or, with probability `LEAVING`, after that of a chunk among the
    next `LEAVING_TOKENS` tokens: this one, or one of the same size behind it. The steps are the best for the expected
    cost of an error. If every small chunk were coded as the last one before every fourth reader, it would be as fine as
    the end of a cache: on SmolLM2-135M, chunks of 16 tokens would take 1.8 times the bits.
    """
    near_end = _cached_near_end if tokens <= KEPT_TOKENS else _near_end
    octaves = near_end(recency.tobytes(), tokens, min(following, 1 << len(recency)))  # beyond that nothing changes
    return torch.from_numpy((octaves + finer_in_long_caches(recency, start + tokens + following)).astype(np.float32))


def _near_end(recency: bytes, tokens: int, following: int) -> npt.NDArray[np.float64]:
    """Return `finer_near_end` without what a long cache takes off all steps."""
    octaves = np.frombuffer(recency, np.float32)
    distance = np.arange(tokens, 0, -1)
    finer = recency_at(octaves, distance)
    if following and len(octaves):
        ends = np.minimum(np.arange(0, LEAVING_TOKENS, tokens), following)[:, None]
        leaving = np.exp2(2 * recency_at(octaves, distance + ends)).mean(0)
        at_end = np.exp2(2 * recency_at(octaves, distance + following))
        finer = 0.5 * np.log2(LEAVING * leaving + (1 - LEAVING) * at_end)
    return finer


_cached_near_end = lru_cache(maxsize=1 << 8)(_near_end)


def choose_classes(offsets: torch.Tensor, finest: int) -> U8:
    """Round offsets `[t]` in octaves to classes `[t]` uint8, none finer than `finest`; NaN gives the neutral class."""
    # Extreme inputs give NaN, whose conversion to an integer is undefined; compiled loops need valid classes.
    wanted = (offsets * CLASSES_PER_OCTAVE).round_().add_(NEUTRAL).nan_to_num_(nan=NEUTRAL)
    classes: U8 = wanted.clamp_(finest, CLASSES - 1).to(torch.uint8).numpy()
    return classes


# The stage `predict_classes`
PredictClasses = Callable[[Predictor, torch.Tensor, Predictions | None, int, int, torch.Tensor, int], U8]

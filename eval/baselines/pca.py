"""PCA transform coding with one step for all components, as others describe it. It counts its bits and makes no bytes.

    y (see `basis.py`) --one step for all components--> levels --a static table per component--> entropy

It knows nothing of the loss that cuvee's own profiles measure, and shares no code with its coder. Its speed would say
nothing, so it is not reported.

References: Goyal, Theoretical foundations of transform coding, IEEE Signal Processing Magazine 18(5), 2001; Sullivan,
Efficient scalar quantization of exponential and Laplacian random variables, IEEE Trans. Inf. Theory 42(5), 1996 (dead
zone and centroids); Krichevsky, Trofimov, The performance of universal encoding, IEEE Trans. Inf. Theory 27(2), 1981
(half a count); Elias, Universal codeword sets, IEEE Trans. Inf. Theory 21(2), 1975 (gamma code).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout
from cuvee.eval.baselines.basis import PrincipalBasis
from cuvee.eval.baselines.untimed import Simulated

__all__ = ["HALF", "KEPT_VALUES", "LEAST_STEP", "PCA_STEPS", "ROUNDING_OFFSET", "PcaMethod", "PcaTransform"]

PCA_STEPS = (0.08, 0.12, 0.18, 0.27, 0.4, 0.6, 0.9, 1.3)
"""Steps for `PcaTransform.method` that span KL 0.001 … 0.1 on the bundled model with any grouping."""
KEPT_VALUES = 2**26  # calibration coefficients that a transform keeps to count its tables on
LEAST_STEP = 2.0**-10
ROUNDING_OFFSET = 0.4  # added to |y| / step before truncating; 0.5 would give the nearest level
HALF = 0.5  # the count that every entry of a table starts with, and so does the escape


@dataclass(frozen=True, slots=True, eq=False)
class PcaTransform:
    """Principal components of the position-free cache, ready to be quantized with any step.

    Where there was a choice, it was made in favor of the baseline, by the bits it needs at KL 0.005 … 0.05 on the
    bundled model and on two novels with groupings "layer" and "all". Units stay as they are instead of being scaled to
    equal variance (6% fewer bits on average), and there are a dead zone and centroids instead of the nearest level
    (5 % fewer).

    Attributes:
        basis: the map.
        coefficients: `[S, R]` float32 of evenly spread calibration tokens, on which tables are counted.
    """

    basis: PrincipalBasis
    coefficients: torch.Tensor

    @classmethod
    def fit(
        cls, layout: KVLayout, chunks: Sequence[KVChunk], grouping: str, basis: PrincipalBasis | None = None
    ) -> PcaTransform:
        """Learn the basis from calibration caches.

        Args:
            layout: of all chunks.
            chunks: the caches, all on one device, where all arithmetic of this transform will be done. They are read
                three times.
            grouping: what one basis spans; see `columns`.
            basis: learned from the same chunks with this grouping, if there is one already.

        Raises:
            InputError: there is no such grouping; a group has more than 65,536 values per token; there are fewer than
                twice as many tokens as components in the largest group; a chunk has another layout, or holds NaN or
                infinities.
        """
        basis = PrincipalBasis.learn(layout, chunks, grouping) if basis is None else basis
        return cls(basis, basis.sample(chunks, 1, KEPT_VALUES // layout.values_per_token).flatten(0, 1))

    def method(self, step: float) -> PcaMethod:
        """Quantize all components with one step.

        Args:
            step: in units of the root mean variance of the cache's values, so a step means the same on any model. It
                is at least 2**-10, which is finer than the cache itself and keeps the tables small.

        Raises:
            InputError: the step is smaller, or not finite.
        """
        if not LEAST_STEP <= step < math.inf:
            raise InputError(f"step: must be finite and at least {LEAST_STEP}, got {step}")
        level = torch.empty_like(self.coefficients, dtype=torch.int32)
        for part, y in zip(level.split(4096), self.coefficients.split(4096), strict=True):
            part.copy_(_levels(y, step))
        top = torch.maximum(level.amax(0), -level.amin(0)).long()
        entries = 2 * top + 1
        middle = entries.cumsum(0) - top - 1  # of each component's table in the array that holds them all
        counts = torch.zeros(int(entries.sum()), dtype=torch.int64, device=top.device)
        distance = torch.zeros(len(top), dtype=torch.float64, device=top.device)
        for part, y in zip(level.split(4096), self.coefficients.split(4096), strict=True):
            counts += torch.bincount((middle + part).flatten(), minlength=len(counts))
            distance += ((y / step - part) * part.sign()).double().sum(0)
        count = len(level) - counts[middle]
        total = len(level) + HALF * (entries + 1).double()
        bits = total.repeat_interleave(entries).log2() - (counts.double() + HALF).log2()
        escape = total.log2() - math.log2(HALF)
        # Count one more at distance zero: a component that left the dead zone once says little about its centroid.
        return PcaMethod(self.basis, float(step), top, middle, bits, escape, (distance / (count + 1)).float())


def _levels(y: torch.Tensor, step: float) -> torch.Tensor:
    """Coefficients -> int64 levels."""
    level = (y.abs() / step + ROUNDING_OFFSET).floor() * y.sign()
    if not bool((level.abs() < 2**31).all()):
        raise InputError("chunk: holds values of 2**31 steps and more: choose a larger step")
    return level.long()


@dataclass(frozen=True, slots=True, eq=False)
class PcaMethod(Simulated):
    """A `PcaTransform` at one step: a `Method`.

    Attributes:
        basis: the map.
        step: of all components.
        top: `[R]` int64, the largest level of each component that calibration saw.
        middle: `[R]` int64, where level 0 of each component stands in `bits`.
        bits: float64, the cost of the levels -top … top of all components.
        escape: `[R]` float64, the cost of saying that a level lies beyond; a sign and its distance follow.
        centroid: `[R]` float32, steps from a level's own value to where its coefficients lie on average.
    """

    basis: PrincipalBasis
    step: float
    top: torch.Tensor
    middle: torch.Tensor
    bits: torch.Tensor
    escape: torch.Tensor
    centroid: torch.Tensor

    @property
    def counts(self) -> str:
        """See `Method.counts`."""
        return "ideal entropy under tables of the calibration text; NO basis, tables or headers"

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the results, as JSON."""
        return {"kind": "pca", "grouping": self.basis.grouping, "step": self.step, "basis": self.basis.digest}

    def encode(self, chunk: KVChunk) -> tuple[Any, float]:
        """See `Method.encode`.

        Raises:
            InputError: a chunk of another layout, with NaN or infinities, or with values of 2**31 steps.
        """
        level = _levels(self.basis.analyze(chunk), self.step)
        back = level.sign() * (level.abs() + self.centroid) * self.step
        return self.basis.synthesize(back, chunk.start, chunk.device), self._cost(level)

    def _cost(self, level: torch.Tensor) -> float:
        """Bits of levels `[T, R]`."""
        known = self.bits[self.middle + torch.maximum(torch.minimum(level, self.top), -self.top)]
        beyond = (level.abs() - self.top).clamp_min(1)
        gamma = 2 * beyond.double().log2().floor() + 1
        return float(torch.where(level.abs() <= self.top, known, self.escape + 1 + gamma).sum())

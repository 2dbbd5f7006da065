"""PCA transform coding with one step for all components, as others describe it. It counts its bits and makes no bytes.

    keys, values --un-rotate the keys, unit by unit--> x [T, N] --(x - mean) / rms, one basis per group--> y [T, N]
    y --one step for all components--> levels --a static table per component--> entropy

N counts all values per token, in the order layer, K before V, head, dimension; groups are those of profiles. PCA knows
nothing of the loss that cuvee's own profiles measure, and shares no code with its coder. Its speed would say nothing,
so it is not reported.

References: Goyal, Theoretical foundations of transform coding, IEEE Signal Processing Magazine 18(5), 2001; Sullivan,
Efficient scalar quantization of exponential and Laplacian random variables, IEEE Trans. Inf. Theory 42(5), 1996 (dead
zone and centroids); Krichevsky, Trofimov, The performance of universal encoding, IEEE Trans. Inf. Theory 27(2), 1981
(half a count); Elias, Universal codeword sets, IEEE Trans. Inf. Theory 21(2), 1975 (gamma code).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.sections import columns_in_cache, partition
from cuvee.codec.stages.rotation import Rotation
from cuvee.eval.baselines.simulated import Simulated

__all__ = [
    "HALF", "KEPT_VALUES", "LEAST_STEP", "MOST_VALUES", "PCA_STEPS", "ROUNDING_OFFSET", "PcaMethod", "PcaTransform",
    "PrincipalBasis", "pca_columns",
]  # fmt: skip

PCA_STEPS = (0.08, 0.12, 0.18, 0.27, 0.4, 0.6, 0.9, 1.3)
"""Steps for `PcaTransform.method` that span KL 0.001 … 0.1 on the bundled model with any group."""
MOST_VALUES = 4096  # in one group: the decomposition takes a minute, and eight times as long for twice as many
KEPT_VALUES = 2**26  # calibration coefficients that a transform keeps to count its tables on
LEAST_STEP = 2.0**-10
ROUNDING_OFFSET = 0.4  # added to |y| / step before truncating; 0.5 would give the nearest level
HALF = 0.5  # the count that every entry of a table starts with, and so does the escape


def pca_columns(layout: KVLayout, group: str) -> tuple[torch.Tensor, ...]:
    """Return the values out of N that share one basis, int64 indices by group; `group` as for `partition`.

    Raises:
        InputError: see `partition`.
    """
    return tuple(
        columns
        for section in partition(layout, group)
        for columns in columns_in_cache(section, layout).split(list(section.blocks))
    )


def _flatten(chunk: KVChunk) -> torch.Tensor:
    """The position-free values `[T, N]` float32 of a chunk."""
    rotation = Rotation(chunk.start, chunk.tokens, chunk.device, inverse=True)
    every = slice(0, chunk.tokens)
    units = []
    for layer, keys, values in zip(chunk.layout.layers, chunk.keys, chunk.values, strict=True):
        units += [rotation.apply(keys, layer.rope, every).flatten(1), values.flatten(1).float()]
    x = torch.cat(units, 1)
    if not bool(torch.isfinite(x).all()):
        raise InputError("chunk: holds NaN or infinite values, which a transform would spread over all channels")
    return x


def _unflatten(x: torch.Tensor, layout: KVLayout, start: int) -> KVChunk:
    """The inverse of `_flatten`, in the layout's dtype."""
    rotation = Rotation(start, len(x), x.device)
    units = x.split([size for layer in layout.layers for size in (layer.key_values, layer.value_values)], 1)
    keys, values = [], []
    for layer, key, value in zip(layout.layers, units[::2], units[1::2], strict=True):
        turned = rotation.apply(key.unflatten(1, (layer.kv_heads, layer.head_dim)), layer.rope, slice(0, len(x)))
        keys.append(turned.to(layout.torch_dtype))
        values.append(value.unflatten(1, (layer.kv_heads, layer.value_dim)).to(layout.torch_dtype))
    return KVChunk(keys, values, layout, start)


@dataclass(frozen=True, slots=True, eq=False)
class PrincipalBasis:
    """An affine map of a token's values, which is orthonormal except for one factor.

    Attributes:
        layout: of the chunks.
        group: see `pca_columns`.
        columns: int64 indices of each group.
        mean: `[N]` float32.
        rms: the root of the mean variance of all values, which is the unit of the coefficients.
        matrices: `[n, n]` float32 for each group of n values, with orthonormal rows in order of falling variance.
    """

    layout: KVLayout
    group: str
    columns: tuple[torch.Tensor, ...]
    mean: torch.Tensor
    rms: float
    matrices: tuple[torch.Tensor, ...]

    @classmethod
    def learn(cls, layout: KVLayout, chunks: Sequence[KVChunk], group: str) -> PrincipalBasis:
        """Find the principal components of each group. Errors: see `PcaTransform.fit`."""
        groups = pca_columns(layout, group)
        tokens, largest = sum(chunk.tokens for chunk in chunks), max(map(len, groups))
        if largest > MOST_VALUES:
            raise InputError(
                f"group: {group!r} needs the principal components of {largest:,} values per token, and "
                f"{MOST_VALUES:,} are the most: choose a narrower one (layer, unit or head)"
            )
        if any(chunk.layout.fingerprint != layout.fingerprint for chunk in chunks):
            raise InputError("chunks: one has another layout than `layout`; take all from one model, in one dtype")
        if tokens < 2 * largest:
            raise InputError(
                f"chunks: hold {tokens:,} tokens, and a basis of {largest:,} values needs {2 * largest:,}: "
                "give more text or choose a narrower group"
            )
        device = chunks[0].device
        groups = tuple(columns.to(device) for columns in groups)
        total = torch.zeros(layout.values_per_token, dtype=torch.float64, device=device)
        for chunk in chunks:
            total += _flatten(chunk).double().sum(0)
        mean = (total / tokens).float()
        covariances = [torch.zeros(len(g), len(g), dtype=torch.float64, device=device) for g in groups]
        for chunk in chunks:
            centered = (_flatten(chunk) - mean).double()
            for columns, covariance in zip(groups, covariances, strict=True):
                covariance.addmm_(centered[:, columns].T, centered[:, columns])
        variance = sum(float(covariance.trace()) for covariance in covariances)
        # A cache that does not vary has no scale.
        rms = math.sqrt(variance / tokens / layout.values_per_token) or 1.0
        matrices = tuple(torch.linalg.eigh(one)[1].flip(1).T.float().contiguous() for one in covariances)
        return cls(layout, group, groups, mean, rms, matrices)

    @property
    def digest(self) -> str:
        """Hex BLAKE2b of the map."""
        digest = hashlib.blake2b(f"{self.group} {self.rms!r}".encode(), digest_size=16, person=b"cuvee-pca")
        for tensor in (self.mean, *self.matrices):
            digest.update(tensor.cpu().numpy().tobytes())
        return digest.hexdigest()

    def analyze(self, chunk: KVChunk) -> torch.Tensor:
        """The coefficients of a chunk `[T, N]`, group after group.

        Raises:
            InputError: the chunk has another layout, or holds NaN or infinities.
        """
        if chunk.layout.fingerprint != self.layout.fingerprint:
            raise InputError("chunk: has another layout than the chunks that the basis was learned from")
        centered = (_flatten(chunk).to(self.mean.device) - self.mean) / self.rms
        return torch.cat([centered[:, g] @ m.T for g, m in zip(self.columns, self.matrices, strict=True)], 1)

    def synthesize(self, y: torch.Tensor, start: int, device: torch.device) -> KVChunk:
        """The inverse of `analyze`."""
        x = torch.empty_like(y)
        parts = y.split([len(columns) for columns in self.columns], 1)
        for columns, matrix, part in zip(self.columns, self.matrices, parts, strict=True):
            x[:, columns] = part @ matrix
        return _unflatten((x * self.rms + self.mean).to(device), self.layout, start)


@dataclass(frozen=True, slots=True, eq=False)
class PcaTransform:
    """Principal components of the position-free cache, ready to be quantized with any step.

    Where there was a choice, it was made in favor of the baseline, by the bits it needs at KL 0.005 … 0.05 on the
    bundled model and on two novels with groups "layer" and "all". Units stay as they are instead of being scaled to
    equal variance (6% fewer bits on average), and there are a dead zone and centroids instead of the nearest level
    (5% fewer).

    Attributes:
        basis: the map.
        coefficients: `[S, N]` float32 of evenly spread calibration tokens, on which tables are counted.
    """

    basis: PrincipalBasis
    coefficients: torch.Tensor

    @classmethod
    def fit(cls, layout: KVLayout, chunks: Sequence[KVChunk], group: str) -> PcaTransform:
        """Learn the basis from calibration caches.

        Args:
            layout: of all chunks.
            chunks: the caches, all on one device, where all arithmetic of this transform will be done. They are read
                three times.
            group: what one basis spans; see `pca_columns`.

        Raises:
            InputError: there is no such group; a group has more than 4,096 values per token; there are fewer than
                twice as many tokens as values in the largest group; a chunk has another layout, or holds NaN or
                infinities.
        """
        basis = PrincipalBasis.learn(layout, chunks, group)
        stride = max(1, math.ceil(sum(chunk.tokens for chunk in chunks) / (KEPT_VALUES // layout.values_per_token)))
        kept, seen = [], 0
        for chunk in chunks:
            kept.append(basis.analyze(chunk)[-seen % stride :: stride])
            seen += chunk.tokens
        return cls(basis, torch.cat(kept))

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
        top: `[N]` int64, the largest level of each component that calibration saw.
        middle: `[N]` int64, where level 0 of each component stands in `bits`.
        bits: float64, the cost of the levels -top … top of all components.
        escape: `[N]` float64, the cost of saying that a level lies beyond; a sign and its distance follow.
        centroid: `[N]` float32, steps from a level's own value to where its coefficients lie on average.
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
        return {"kind": "pca", "group": self.basis.group, "step": self.step, "basis": self.basis.digest}

    def encode(self, chunk: KVChunk) -> tuple[Any, float]:
        """See `Method.encode`.

        Raises:
            InputError: a chunk of another layout, with NaN or infinities, or with values of 2**31 steps.
        """
        level = _levels(self.basis.analyze(chunk), self.step)
        back = level.sign() * (level.abs() + self.centroid) * self.step
        return self.basis.synthesize(back, chunk.start, chunk.device), self._cost(level)

    def _cost(self, level: torch.Tensor) -> float:
        """Bits of levels `[T, N]`."""
        known = self.bits[self.middle + torch.maximum(torch.minimum(level, self.top), -self.top)]
        beyond = (level.abs() - self.top).clamp_min(1)
        gamma = 2 * beyond.double().log2().floor() + 1
        return float(torch.where(level.abs() <= self.top, known, self.escape + 1 + gamma).sum())

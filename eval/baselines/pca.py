"""PCA transform coding of a cache, as others describe it: the baselines that learn from calibration caches.

    keys, values --un-rotate the keys, unit by unit--> x [T, N] --(x - mean) / rms, one basis per group--> y [T, N]

    PcaTransform   y --one step for all components--> levels --a static table per component--> entropy, no bytes
    Kvtc           y --min/max levels, bits by dynamic programming--> packed levels --DEFLATE--> real bytes

N counts all values per token, in the order layer, K before V, head, dimension. Both know nothing of the loss that
cuvee's own profiles measure, and share no code with its coder. Their speed would say nothing, so it is not reported.

References: Goyal, Theoretical foundations of transform coding, IEEE Signal Processing Magazine 18(5), 2001; Sullivan,
Efficient scalar quantization of exponential and Laplacian random variables, IEEE Trans. Inf. Theory 42(5), 1996 (dead
zone and centroids); Krichevsky, Trofimov, The performance of universal encoding, IEEE Trans. Inf. Theory 27(2), 1981
(half a count); Elias, Universal codeword sets, IEEE Trans. Inf. Theory 21(2), 1975 (gamma code); KVTC,
arXiv:2511.01815.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout
from cuvee.codec.transform import Rotation

__all__ = ["BUDGETS", "GROUPINGS", "STEPS", "Kvtc", "KvtcMethod", "PcaMethod", "PcaTransform", "allocate", "columns"]

GROUPINGS = ("head", "unit", "layer", "kv", "all")

STEPS = (0.08, 0.12, 0.18, 0.27, 0.4, 0.6, 0.9, 1.3)
"""Steps of `PcaTransform.method` that span KL 0.001 … 0.1 on the bundled model, whatever the grouping."""

BUDGETS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
"""Budgets of `Kvtc.method`, bits per value before DEFLATE."""

MOST_VALUES = 16384  # of one group: its covariance alone takes 2 GiB there, and the eigenvectors take hours
KEPT_VALUES = 2**26  # calibration coefficients that a transform keeps to count its tables

LEAST_STEP = 2.0**-10
ROUNDING = 0.4  # added to |y| / step before cutting off: 0.5 would be the nearest level
HALF = 0.5  # count that every table entry, and the escape, begins with

RUN = 16  # tokens that share a scale
SIZES = (4, 16, 64, 256)  # components that share a scale
MOST_BITS = 8
ERROR_RUNS = 128  # calibration runs on which the errors of an allocation are measured

Errors = NDArray[np.float64]


def columns(layout: KVLayout, grouping: str) -> tuple[torch.Tensor, ...]:
    """Which of the N values share one basis.

    Args:
        layout: whose values.
        grouping: `"head"` (one head of K or V), `"unit"` (K or V of a layer), `"layer"` (both), `"kv"` (all K; all V)
            or `"all"`.

    Returns:
        int64 indices of each group, a partition of 0 … N - 1.

    Raises:
        InputError: another grouping.
    """
    if grouping not in GROUPINGS:
        raise InputError(f"grouping: must be one of {', '.join(GROUPINGS)}, got {grouping!r}")
    groups: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    first = 0
    for index, layer in enumerate(layout.layers):
        for kind, size in (("keys", layer.head_dim), ("values", layer.value_dim)):
            for head in range(layer.kv_heads):
                names = {
                    "head": (index, kind, head),
                    "unit": (index, kind),
                    "layer": (index,),
                    "kv": (kind,),
                    "all": (),
                }
                groups.setdefault(names[grouping], []).append(torch.arange(first, first + size, device="cpu"))
                first += size
    return tuple(torch.cat(group) for group in groups.values())


def _flatten(chunk: KVChunk) -> torch.Tensor:
    """The position-free values `[T, N]` float32 of a chunk."""
    rotation = Rotation(chunk.layout, chunk.start, chunk.tokens, chunk.device, inverse=True)
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
    rotation = Rotation(layout, start, len(x), x.device)
    units = x.split([size for layer in layout.layers for size in (layer.key_values, layer.value_values)], 1)
    keys, values = [], []
    for layer, key, value in zip(layout.layers, units[::2], units[1::2], strict=True):
        turned = rotation.apply(key.unflatten(1, (layer.kv_heads, layer.head_dim)), layer.rope, slice(0, len(x)))
        keys.append(turned.to(layout.torch_dtype))
        values.append(value.unflatten(1, (layer.kv_heads, layer.value_dim)).to(layout.torch_dtype))
    return KVChunk(keys, values, layout, start)


@dataclass(frozen=True, slots=True, eq=False)
class _Basis:
    """An affine map of the values of a token, orthonormal but for one factor.

    Attributes:
        layout: of the chunks.
        grouping: see `columns`.
        columns: int64 indices of each group.
        mean: `[N]` float32.
        rms: root of the mean variance of all values: coefficients are counted in it.
        matrices: of each group `[n, n]` float32, orthonormal rows in order of falling variance.
    """

    layout: KVLayout
    grouping: str
    columns: tuple[torch.Tensor, ...]
    mean: torch.Tensor
    rms: float
    matrices: tuple[torch.Tensor, ...]

    @classmethod
    def learn(cls, layout: KVLayout, chunks: Sequence[KVChunk], grouping: str) -> _Basis:
        """Principal components of each group; all sums in float64. Errors: see `PcaTransform.fit`."""
        groups = columns(layout, grouping)
        largest, tokens = max(map(len, groups)), sum(chunk.tokens for chunk in chunks)
        if largest > MOST_VALUES:
            raise InputError(
                f"grouping: {grouping!r} needs the covariance of {largest:,} values per token, and {MOST_VALUES:,} are "
                "the most: choose a narrower one (layer, unit or head)"
            )
        if any(chunk.layout.fingerprint != layout.fingerprint for chunk in chunks):
            raise InputError("chunks: one has another layout than `layout`; take all from one model, in one dtype")
        if tokens < 2 * largest:
            raise InputError(
                f"chunks: hold {tokens:,} tokens, and a basis of {largest:,} values needs {2 * largest:,}: give more "
                "text or choose a narrower grouping"
            )
        device = chunks[0].device
        groups = tuple(group.to(device) for group in groups)
        total = torch.zeros(layout.values_per_token, dtype=torch.float64, device=device)
        for chunk in chunks:
            total += _flatten(chunk).double().sum(0)
        mean = (total / tokens).float()
        covariances = [torch.zeros(len(g), len(g), dtype=torch.float64, device=device) for g in groups]
        for chunk in chunks:
            centered = (_flatten(chunk) - mean).double()
            for group, covariance in zip(groups, covariances, strict=True):
                part = centered[:, group]
                covariance.addmm_(part.T, part)
        variance = sum(float(covariance.trace()) for covariance in covariances) / tokens
        rms = math.sqrt(variance / layout.values_per_token) or 1.0  # a cache that never varies has no scale
        matrices = tuple(torch.linalg.eigh(c)[1].flip(1).T.float().contiguous() for c in covariances)
        return cls(layout, grouping, groups, mean, rms, matrices)

    @property
    def device(self) -> torch.device:
        """Where the arithmetic is done: the device of the calibration chunks."""
        return self.mean.device

    @property
    def sizes(self) -> list[int]:
        """Values of each group."""
        return [len(group) for group in self.columns]

    @property
    def digest(self) -> str:
        """Hex BLAKE2b of the map."""
        digest = hashlib.blake2b(f"{self.grouping} {self.rms!r}".encode(), digest_size=16, person=b"cuvee-pca")
        for tensor in (self.mean, *self.matrices):
            digest.update(tensor.cpu().numpy().tobytes())
        return digest.hexdigest()

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """`_flatten`ed values `[T, N]` -> coefficients `[T, N]`, group after group."""
        centered = (x.to(self.device) - self.mean) / self.rms
        return torch.cat([centered[:, g] @ m.T for g, m in zip(self.columns, self.matrices, strict=True)], 1)

    def analyze(self, chunk: KVChunk) -> torch.Tensor:
        """The coefficients of a chunk `[T, N]`.

        Raises:
            InputError: a chunk of another layout, or one that holds NaN or infinities.
        """
        if chunk.layout.fingerprint != self.layout.fingerprint:
            raise InputError("chunk: has another layout than the chunks that the basis was learned from")
        return self.project(_flatten(chunk))

    def synthesize(self, y: torch.Tensor, start: int, device: torch.device) -> KVChunk:
        """The inverse of `analyze`."""
        x = torch.empty_like(y)
        for group, matrix, part in zip(self.columns, self.matrices, y.split(self.sizes, 1), strict=True):
            x[:, group] = part @ matrix
        return _unflatten((x * self.rms + self.mean).to(device), self.layout, start)

    def sample(self, chunks: Sequence[KVChunk], run: int, most: int) -> torch.Tensor:
        """Coefficients of at most `most` runs of `run` tokens, evenly spread over the chunks: `[runs, run, N]`."""
        runs = sum(chunk.tokens // run for chunk in chunks)
        stride = max(1, math.ceil(runs / most))
        kept, seen = [], 0
        for chunk in chunks:
            whole = chunk.tokens // run
            chosen = range(-seen % stride, whole, stride)
            if chosen:
                x = _flatten(chunk)[: whole * run].unflatten(0, (whole, run))[chosen.start :: stride]
                kept.append(self.project(x.flatten(0, 1)).unflatten(0, (-1, run)))
            seen += whole
        return torch.cat(kept) if kept else self.mean.new_empty(0, run, len(self.mean))


class _Measured:
    """A method whose speed is not measured and whose layers are not stored apart."""

    __slots__ = ()

    timed = False

    def layer_bits(self, stored: Any) -> list[float] | None:
        """See `Method.layer_bits`: not counted apart."""
        return None


# PCA, one step -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class PcaTransform:
    """Principal components of the position-free cache, ready to be quantized at any step.

    Where a choice was open it was made in the baseline's favor, by what it needs at KL 0.005 … 0.05 on the bundled
    model and on two novels with groupings "layer" and "all": units as they are rather than scaled to equal variance
    (6 % fewer bits on average), a dead zone and centroids rather than the nearest level (5 % fewer).

    Attributes:
        basis: the map.
        coefficients: `[S, N]` float32 of calibration tokens, evenly spread: what tables are counted on.
    """

    basis: _Basis
    coefficients: torch.Tensor

    @classmethod
    def fit(cls, layout: KVLayout, chunks: Sequence[KVChunk], grouping: str) -> PcaTransform:
        """Learn the basis from calibration caches.

        Args:
            layout: of all chunks.
            chunks: the caches, on one device, where all arithmetic of this transform will be done. They are read
                three times.
            grouping: what one basis spans, see `columns`.

        Raises:
            InputError: another grouping; a group of more than 16,384 values per token; fewer than twice as many tokens
                as the largest group has values; a chunk of another layout; NaN or infinite values.
        """
        basis = _Basis.learn(layout, chunks, grouping)
        return cls(basis, basis.sample(chunks, 1, KEPT_VALUES // layout.values_per_token).flatten(0, 1))

    def method(self, step: float) -> PcaMethod:
        """Quantize all components with one step.

        Args:
            step: in units of the root mean variance of the cache's values, so that a step means the same on any model;
                at least 2**-10, which is finer than the cache itself and keeps the tables small.

        Raises:
            InputError: a smaller step, or one that is not finite.
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
        # One more at distance zero: a component that has left the dead zone once says little about its centroid.
        return PcaMethod(self.basis, float(step), top, middle, bits, escape, (distance / (count + 1)).float())


def _levels(y: torch.Tensor, step: float) -> torch.Tensor:
    """Coefficients -> int64 levels."""
    level = (y.abs() / step + ROUNDING).floor() * y.sign()
    if not bool((level.abs() < 2**31).all()):
        raise InputError("chunk: holds values of 2**31 steps and more: choose a larger step")
    return level.long()


@dataclass(frozen=True, slots=True, eq=False)
class PcaMethod(_Measured):
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

    basis: _Basis
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
        """What decides its results, JSON-ready."""
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
        """Bits of levels `[T, N]`."""
        known = self.bits[self.middle + torch.maximum(torch.minimum(level, self.top), -self.top)]
        beyond = (level.abs() - self.top).clamp_min(1)
        gamma = 2 * beyond.double().log2().floor() + 1
        return float(torch.where(level.abs() <= self.top, known, self.escape + 1 + gamma).sum())

    def decode(self, stored: Any) -> KVChunk:
        """See `Method.decode`."""
        chunk: KVChunk = stored
        return chunk


# KVTC --------------------------------------------------------------------------------------------------------------


class _Group(NamedTuple):
    """Components `first … first + size - 1` of a part, coded with `bits` bits each."""

    first: int
    size: int
    bits: int


@dataclass(frozen=True, slots=True, eq=False)
class Kvtc:
    """KVTC (arXiv:2511.01815) as read here; where its description leaves a choice, the one that serves it better.

    1. One basis for all keys, position-free, and one for all values: principal components, units as they are.
    2. Consecutive components form groups of 4, 16, 64 or 256 with 1 to 8 bits a level, or are left out. In every run of
       16 tokens per group stores its minimum and its scale in 16 bits each. Dynamic programming chooses the groups and
       their bits together: least squared error on calibration caches under a budget, levels and scales counted; keys
       and values get the same budget. On the bundled model a scale for every token needs 9 to 20 % more bits, and one
       budget for both 3 % more; the paper's int2, int4 and FP8 would be fewer choices.
    3. The levels of a component in all tokens stand together, packed; DEFLATE goes over scales and levels.

    The paper keeps the first 4 and the last 128 tokens of a cache in 16 bits. Chunks here are pieces of a stored prefix
    and are coded whole, which favors it in size: 132 of 384 tokens would cost 5.5 bits per value.

    Attributes:
        basis: the map.
        errors: for keys and for values, see `allocate`.
    """

    basis: _Basis
    errors: tuple[Errors, Errors]

    @classmethod
    def fit(cls, layout: KVLayout, chunks: Sequence[KVChunk]) -> Kvtc:
        """Learn the bases and measure what every group costs in error.

        Args:
            layout: of all chunks.
            chunks: the caches, on one device, where the transforms will be done.

        Raises:
            InputError: as `PcaTransform.fit`, or no chunk of 16 tokens.
        """
        basis = _Basis.learn(layout, chunks, "kv")
        runs = basis.sample(chunks, RUN, ERROR_RUNS)
        if not len(runs):
            raise InputError(f"chunks: none holds {RUN} tokens, which share a scale: give longer ones")
        keys, values = (_group_errors(_pad(part)) for part in runs.split(basis.sizes, 2))
        return cls(basis, (keys, values))

    def method(self, budget: float) -> KvtcMethod:
        """Allocate bits.

        Args:
            budget: bits per value on average, scales counted, before DEFLATE.

        Raises:
            InputError: a budget outside 0 … 8.
        """
        if not 0 < budget <= MOST_BITS:
            raise InputError(f"budget: must lie above 0 and be at most {MOST_BITS} bits per value, got {budget}")
        parts = []
        for errors, size in zip(self.errors, self.basis.sizes, strict=True):
            chosen = allocate(errors, int(budget * size * RUN / 32))
            parts.append(tuple(_Group(SIZES[0] * p, SIZES[k], bits) for p, k, bits in chosen))
        return KvtcMethod(self.basis, float(budget), (parts[0], parts[1]))


def _pad(y: torch.Tensor) -> torch.Tensor:
    """Components of zeros up to whole groups of the smallest size."""
    return torch.nn.functional.pad(y, (0, -y.shape[-1] % SIZES[0]))


def _group_errors(y: torch.Tensor) -> Errors:
    """Squared error a run of every group at every number of bits, measured on coefficients `[runs, RUN, n]`.

    A group of s components begins at a multiple of s / 4, so that large ones cost no more time to measure than small.
    """
    runs, _, width = y.shape
    errors = np.full((width // SIZES[0], len(SIZES), MOST_BITS + 1), np.inf)
    for index, size in enumerate(SIZES):
        hop = max(SIZES[0], size // 4)
        for first in range(0, width - size + 1, hop):
            group = y[..., first : first + size].reshape(runs, -1)
            if index == 0:
                errors[first // SIZES[0], 0, 0] = float(group.double().square().sum()) / runs
            for bits in range(1, MOST_BITS + 1):
                level, scale, low = _quantize(group, bits)
                off = (level * scale + low - group).double()
                errors[first // SIZES[0], index, bits] = float(off.square().sum()) / runs
    return errors


def allocate(errors: Errors, budget: int) -> list[tuple[int, int, int]]:
    """Partition the components into groups and give each group bits: least error under a budget, exactly.

    Args:
        errors: `[P, S, B + 1]`: error of the group that begins at component 4 p, holds `SIZES[k]` components and has b
            bits per component; infinite where there is no such group. `[p, 0, 0]`, its components left out, is finite.
        budget: in units of 32 bits per run: a group with bits costs one for its scale and minimum, and half a unit a
            component and bit.

    Returns:
        `(p, k, b)` of each group that has bits, in order.
    """
    positions, sizes, depths = errors.shape
    best = np.zeros((positions + 1, budget + 1))  # least error of the components from p on, with at most r to spend
    choice = np.zeros((positions, budget + 1), np.uint8)
    for p in range(positions - 1, -1, -1):
        best[p] = errors[p, 0, 0] + best[p + 1]
        for k in range(sizes):
            for bits in range(1, depths):
                cost = _units(k, bits)
                if cost > budget or not np.isfinite(errors[p, k, bits]):
                    continue
                error = errors[p, k, bits] + best[p + SIZES[k] // SIZES[0], : budget + 1 - cost]
                better = error < best[p, cost:]
                best[p, cost:][better] = error[better]
                choice[p, cost:][better] = k * depths + bits
    groups, p, left = [], 0, budget
    while p < positions:
        k, bits = divmod(int(choice[p, left]), depths)
        if bits:
            groups.append((p, k, bits))
            left -= _units(k, bits)
        p += SIZES[k] // SIZES[0]
    return groups


def _units(index: int, bits: int) -> int:
    """What a group of `SIZES[index]` components costs a run, in units of 32 bits."""
    return 1 + SIZES[index] * bits * RUN // 32


def _quantize(group: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of values -> levels 0 … 2**bits - 1 (float32), and scale and minimum `[rows, 1]`, rounded to float16."""
    low, high = group.amin(1, keepdim=True), group.amax(1, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).half().float().clamp_min(2.0**-24)
    low = low.half().float()
    return ((group - low) / scale).round().clamp(0, 2**bits - 1), scale, low


class _Stored(NamedTuple):
    """A chunk as `KvtcMethod` stores it; what stands beside the bytes is known to whoever asks for them."""

    data: bytes
    start: int
    tokens: int
    device: torch.device


@dataclass(frozen=True, slots=True, eq=False)
class KvtcMethod(_Measured):
    """A `Kvtc` at one budget: a `Method`. Its decoder reads nothing but the bytes, the chunk's start and its length.

    Attributes:
        basis: the map.
        budget: bits per value before DEFLATE.
        parts: the groups that have bits, of keys and of values.
    """

    basis: _Basis
    budget: float
    parts: tuple[tuple[_Group, ...], tuple[_Group, ...]]

    @property
    def counts(self) -> str:
        """See `Method.counts`."""
        return "all bytes after DEFLATE, with 2 x 16 bits per group and 16 tokens; NO basis, allocation or headers"

    @property
    def identity(self) -> dict[str, Any]:
        """What decides its results, JSON-ready."""
        return {"kind": "kvtc", "grouping": "kv", "budget": self.budget, "basis": self.basis.digest}

    def encode(self, chunk: KVChunk) -> tuple[Any, float]:
        """See `Method.encode`.

        Raises:
            InputError: a chunk of another layout, with NaN or infinities, or values that float16 scales cannot reach.
        """
        y = self.basis.analyze(chunk)
        tokens = len(y)
        scales, levels = [], []
        for part, groups in zip(y.split(self.basis.sizes, 1), self.parts, strict=True):
            padded = _pad(part)
            # The last run repeats its last token, which moves no minimum.
            padded = torch.cat([padded, padded[-1:].expand(-tokens % RUN, -1)])
            for group in groups:
                rows = padded[:, group.first : group.first + group.size].reshape(-1, RUN * group.size)
                level, scale, low = _quantize(rows, group.bits)
                if not bool(torch.isfinite(torch.cat([scale, low])).all()):
                    raise InputError("chunk: holds values that lie beyond float16 scales; KVTC cannot store it")
                scales += [scale, low]
                levels.append(_pack(level.reshape(-1, group.size)[:tokens].T, group.bits))
        head = torch.cat(scales).half().cpu().numpy().tobytes() if scales else b""
        deflate = zlib.compressobj(9, zlib.DEFLATED, -15, 9)  # raw: without zlib's 6 bytes of header and checksum
        data = deflate.compress(head + b"".join(levels)) + deflate.flush()
        return _Stored(data, chunk.start, tokens, chunk.device), 8.0 * len(data)

    def decode(self, stored: Any) -> KVChunk:
        """See `Method.decode`."""
        data, start, tokens, device = stored
        raw = zlib.decompress(data, -15)
        runs = math.ceil(tokens / RUN)
        at = 4 * runs * sum(len(groups) for groups in self.parts)  # where the levels begin
        head = torch.from_numpy(np.frombuffer(raw, np.float16, at // 2).astype(np.float32)).view(-1, 2, runs)
        scales: Iterator[torch.Tensor] = iter(head)
        parts = []
        for groups, size in zip(self.parts, self.basis.sizes, strict=True):
            y = torch.zeros(tokens, size + -size % SIZES[0], device="cpu")
            for group in groups:
                length = math.ceil(group.size * tokens * group.bits / 8)
                level = _unpack(raw[at : at + length], group.bits, group.size * tokens).view(group.size, tokens).T
                scale, low = (next(scales).repeat_interleave(RUN, 1)[:, :tokens, None]).unbind(0)
                y[:, group.first : group.first + group.size] = level * scale + low
                at += length
            parts.append(y[:, :size])
        return self.basis.synthesize(torch.cat(parts, 1).to(self.basis.device), start, device)


def _pack(level: torch.Tensor, bits: int) -> bytes:
    """Levels in row-major order, `bits` bits each, most significant first, up to a whole byte."""
    flat = level.to(torch.uint8).contiguous().cpu().numpy().reshape(-1, 1)
    return np.packbits(np.unpackbits(flat, axis=1)[:, 8 - bits :]).tobytes()


def _unpack(data: bytes, bits: int, count: int) -> torch.Tensor:
    """The inverse of `_pack`: `[count]` float32."""
    single = np.unpackbits(np.frombuffer(data, np.uint8), count=count * bits).reshape(count, bits)
    return torch.from_numpy(single @ (1 << np.arange(bits - 1, -1, -1))).float()

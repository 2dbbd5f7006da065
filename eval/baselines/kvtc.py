"""KVTC (arXiv:2511.01815), written from its description: principal components, bits by dynamic programming, DEFLATE.

    y (see `basis.py`) --min/max levels, bits by dynamic programming--> packed levels --DEFLATE--> real bytes

Its speed would say nothing, so it is not reported.
"""

from __future__ import annotations

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
from cuvee.eval.baselines.basis import PrincipalBasis
from cuvee.eval.baselines.untimed import Untimed

__all__ = ["ERROR_RUNS", "KVTC_BUDGETS", "MOST_BITS", "RUN", "SIZES", "GroupErrors", "Kvtc", "KvtcMethod", "allocate"]

KVTC_BUDGETS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
"""Budgets for `Kvtc.method`, in bits per value before DEFLATE."""
RUN = 16  # tokens that share a scale
SIZES = (4, 16, 64, 256)  # components that share a scale
MOST_BITS = 8
ERROR_RUNS = 128  # on how many calibration runs the errors of an allocation are measured
GroupErrors = NDArray[np.float64]


class _Group(NamedTuple):
    """The components `first … first + size - 1` of a part, coded with `bits` bits each."""

    first: int
    size: int
    bits: int


@dataclass(frozen=True, slots=True, eq=False)
class Kvtc:
    """KVTC (arXiv:2511.01815) as we read it. Where its description leaves a choice, the better one for it is taken.

    1. There is one basis for all keys, which are position-free, and one for all values: principal components of the
       units as they are.
    2. Consecutive components form groups of 4, 16, 64 or 256 with 1 to 8 bits per level, or are left out. For every run
       of 16 tokens, a group stores its minimum and its scale in 16 bits each. Dynamic programming chooses groups and
       bits together, for the least squared error on calibration caches under a budget that counts levels and scales.
       Keys and values get the same budget. On the bundled model, a scale for every token would need 9 to 20% more
       bits, and one budget for both 3% more. The paper's int2, int4 and FP8 would be fewer choices.
    3. The levels of each component in all tokens stand together, packed. DEFLATE goes over scales and levels.

    The paper keeps the first 4 and the last 128 tokens of a cache in 16 bits. Here chunks are pieces of a stored prefix
    and are coded whole, which makes KVTC smaller: 132 of 384 tokens would cost 5.5 bits per value.

    Attributes:
        basis: the map.
        errors: for keys and for values; see `allocate`.
    """

    basis: PrincipalBasis
    errors: tuple[GroupErrors, GroupErrors]

    @classmethod
    def fit(cls, layout: KVLayout, chunks: Sequence[KVChunk], basis: PrincipalBasis | None = None) -> Kvtc:
        """Learn the bases and measure what every group costs in error.

        Args:
            layout: of all chunks.
            chunks: the caches, all on one device, where the transforms will be done.
            basis: learned from the same chunks with grouping "kv", if there is one already.

        Raises:
            InputError: see `PcaTransform.fit`; or no chunk has 16 tokens.
        """
        basis = PrincipalBasis.learn(layout, chunks, "kv") if basis is None else basis
        runs = basis.sample(chunks, RUN, ERROR_RUNS)
        if not len(runs):
            raise InputError(f"chunks: none holds {RUN} tokens, which share a scale: give longer ones")
        keys, values = (_group_errors(_pad(part)) for part in runs.split(basis.sizes, 2))
        return cls(basis, (keys, values))

    def method(self, budget: float) -> KvtcMethod:
        """Allocate bits.

        Args:
            budget: average bits per value, scales included, before DEFLATE.

        Raises:
            InputError: the budget is not between 0 and 8.
        """
        if not 0 < budget <= MOST_BITS:
            raise InputError(f"budget: must lie above 0 and be at most {MOST_BITS} bits per value, got {budget}")
        parts = []
        for errors, values in zip(self.errors, self.basis.columns, strict=True):
            chosen = allocate(errors, int(budget * len(values) * RUN / 32))
            parts.append(tuple(_Group(SIZES[0] * p, SIZES[k], bits) for p, k, bits in chosen))
        return KvtcMethod(self.basis, float(budget), (parts[0], parts[1]))


def _pad(y: torch.Tensor) -> torch.Tensor:
    """Fill up with components of zeros to whole groups of the smallest size."""
    return torch.nn.functional.pad(y, (0, -y.shape[-1] % SIZES[0]))


def _group_errors(y: torch.Tensor) -> GroupErrors:
    """Squared error per run of every group with every number of bits, measured on coefficients `[runs, RUN, n]`.

    A group of s components begins at a multiple of s / 4, so large groups take no longer to measure than small ones.
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


def allocate(errors: GroupErrors, budget: int) -> list[tuple[int, int, int]]:
    """Partition the components into groups and give bits to each group, for exactly the least error under a budget.

    Args:
        errors: `[P, S, B + 1]`, the error of the group that begins at component 4 p, holds `SIZES[k]` components and
            has b bits per component. It is infinite if there is no such group. At `[p, 0, 0]`, where the components
            are left out, it is finite.
        budget: in units of 32 bits per run. A group with bits costs one unit for its scale and minimum, and half a unit
            for each component and bit.

    Returns:
        `(p, k, b)` of each group that has bits, in order.
    """
    positions, sizes, depths = errors.shape
    best = np.zeros((positions + 1, budget + 1))  # the least error of components p and up with at most r to spend
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
    """The cost per run of a group of `SIZES[index]` components, in units of 32 bits."""
    return 1 + SIZES[index] * bits * RUN // 32


def _quantize(group: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of values -> levels 0 … 2**bits - 1 (float32), scales and minima `[rows, 1]`, both rounded to float16."""
    low, high = group.amin(1, keepdim=True), group.amax(1, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).half().float().clamp_min(2.0**-24)
    low = low.half().float()
    return ((group - low) / scale).round().clamp(0, 2**bits - 1), scale, low


class _Stored(NamedTuple):
    """A chunk as `KvtcMethod` stores it. Whoever asks for the bytes knows the other fields."""

    data: bytes
    start: int
    tokens: int
    device: torch.device


@dataclass(frozen=True, slots=True, eq=False)
class KvtcMethod(Untimed):
    """A `Kvtc` at one budget: a `Method`. Its decoder reads only the bytes, the chunk's start and its length.

    Attributes:
        basis: the map.
        budget: bits per value before DEFLATE.
        parts: the groups that have bits, of keys and of values.
    """

    basis: PrincipalBasis
    budget: float
    parts: tuple[tuple[_Group, ...], tuple[_Group, ...]]

    @property
    def counts(self) -> str:
        """See `Method.counts`."""
        return "all bytes after DEFLATE, with 2 x 16 bits per group and 16 tokens; NO basis, allocation or headers"

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the results, as JSON."""
        return {"kind": "kvtc", "grouping": "kv", "budget": self.budget, "basis": self.basis.digest}

    def encode(self, chunk: KVChunk) -> tuple[Any, float]:
        """See `Method.encode`.

        Raises:
            InputError: the chunk has another layout, or holds NaN, infinities or values beyond float16 scales.
        """
        y = self.basis.analyze(chunk)
        tokens = len(y)
        scales, levels = [], []
        for part, groups in zip(y.split(self.basis.sizes, 1), self.parts, strict=True):
            padded = _pad(part)
            # The last run is filled up with its last token, which changes neither minimum nor maximum.
            padded = torch.cat([padded, padded[-1:].expand(-tokens % RUN, -1)])
            for group in groups:
                rows = padded[:, group.first : group.first + group.size].reshape(-1, RUN * group.size)
                level, scale, low = _quantize(rows, group.bits)
                if not bool(torch.isfinite(torch.cat([scale, low])).all()):
                    raise InputError("chunk: holds values that lie beyond float16 scales; KVTC cannot store it")
                scales += [scale, low]
                levels.append(_pack(level.reshape(-1, group.size)[:tokens].T, group.bits))
        head = torch.cat(scales).half().cpu().numpy().tobytes() if scales else b""
        deflate = zlib.compressobj(9, zlib.DEFLATED, -15, 9)  # raw, without the 6 bytes of zlib's header and checksum
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
    """Pack levels in row-major order, `bits` bits each, the most significant bit first, up to a whole byte."""
    flat = level.to(torch.uint8).contiguous().cpu().numpy().reshape(-1, 1)
    return np.packbits(np.unpackbits(flat, axis=1)[:, 8 - bits :]).tobytes()


def _unpack(data: bytes, bits: int, count: int) -> torch.Tensor:
    """The inverse of `_pack`: `[count]` float32."""
    single = np.unpackbits(np.frombuffer(data, np.uint8), count=count * bits).reshape(count, bits)
    return torch.from_numpy(single @ (1 << np.arange(bits - 1, -1, -1))).float()

"""Principal components of a cache: what the baselines that learn (`pca.py`, `kvtc.py`) have in common.

    keys, values --un-rotate the keys, unit by unit--> x [T, N] --(x - mean) / rms, one basis per group--> y [T, R]

N counts all values per token, in the order layer, K before V, head, dimension. A whole eigendecomposition takes time in
the third power of a group's size (six minutes for the 5,760 keys of SmolLM2, hours for the 32,768 of a model of 8 B).
So in a group of more than 2,048 values

1. the leading 4,096 components are found by randomized subspace iteration on a sample of tokens;
2. what is orthogonal to them gets components of its own, from a decomposition of the rest alone, because on text that
   nothing was learned from more may lie there than in the sample. R is N;
3. but in a group of more than 16,384 values the rest is left out, and R is smaller.

Reference: Halko, Martinsson, Tropp, Finding structure with randomness, SIAM Review 53(2), 2011, algorithm 4.4.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout
from cuvee.codec.stages.rotation import Rotation

__all__ = [
    "COMPLETE_VALUES",
    "EXACT_VALUES",
    "GROUPINGS",
    "MOST_RANK",
    "PrincipalBasis",
    "columns",
    "flatten_values",
    "leading_directions",
]

GROUPINGS = ("head", "unit", "layer", "kv", "all")  # and layers:n, heads:n
EXACT_VALUES = 2048  # in one group; up to here all components are found, exactly
MOST_RANK = 4096  # leading components of a larger group
COMPLETE_VALUES = 16384  # up to here the rest of a group has components, too; there its matrix takes 1 GiB
MOST_VALUES = 65536  # in one group; there its sample and its components take 3 GiB
_SAMPLE_TOKENS = 16384
_SAMPLE_VALUES = 2**29  # 2 GiB of float32: a wider group is sampled on fewer tokens
_EXTRA = 64  # directions beyond the rank, without which the last ones would be inexact
_ROUNDS = 2
_SEED = 11


def columns(layout: KVLayout, grouping: str) -> tuple[torch.Tensor, ...]:
    """The values out of N that share one basis.

    Args:
        layout: of the cache.
        grouping: `"head"` (one head of K or V), `"unit"` (K or V of a layer), `"layer"` (both), `"layers:n"` (both of n
            layers; the last group may be smaller), `"heads:n"` (both of one head in n layers), `"kv"` (all K; all V)
            or `"all"`.

    Returns:
        The int64 indices of each group. Together they are a partition of 0 … N - 1.

    Raises:
        InputError: there is no such grouping.
    """
    several = re.fullmatch(r"(layers|heads):([1-9]\d*)", grouping)
    if several is None and grouping not in GROUPINGS:
        raise InputError(f"grouping: must be one of {', '.join(GROUPINGS)}, layers:n, heads:n, got {grouping!r}")
    span = int(several[2]) if several else 1
    groups: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    first = 0
    for index, layer in enumerate(layout.layers):
        for kind, size in (("keys", layer.head_dim), ("values", layer.value_dim)):
            for head in range(layer.kv_heads):
                names = {
                    "head": (index, kind, head),
                    "unit": (index, kind),
                    "layer": (index,),
                    f"layers:{span}": (index // span,),
                    f"heads:{span}": (index // span, head),
                    "kv": (kind,),
                    "all": (),
                }
                groups.setdefault(names[grouping], []).append(torch.arange(first, first + size, device="cpu"))
                first += size
    return tuple(torch.cat(group) for group in groups.values())


def flatten_values(chunk: KVChunk) -> torch.Tensor:
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
    """The inverse of `flatten_values`, in the layout's dtype."""
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
        grouping: see `columns`.
        columns: int64 indices of each group.
        mean: `[N]` float32.
        rms: the root of the mean variance of all values, which is the unit of the coefficients.
        matrices: `[r, n]` float32 for each group of n values, with orthonormal rows in order of falling variance; r is
            n up to `COMPLETE_VALUES`. What lies outside the rows is left at the mean.
    """

    layout: KVLayout
    grouping: str
    columns: tuple[torch.Tensor, ...]
    mean: torch.Tensor
    rms: float
    matrices: tuple[torch.Tensor, ...]

    @classmethod
    def learn(cls, layout: KVLayout, chunks: Sequence[KVChunk], grouping: str) -> PrincipalBasis:
        """Find the principal components of each group. Errors: see `PcaTransform.fit`."""
        groups = columns(layout, grouping)
        tokens = sum(chunk.tokens for chunk in chunks)
        needed = 2 * max(len(g) if len(g) <= COMPLETE_VALUES else min(MOST_RANK + _EXTRA, len(g)) for g in groups)
        largest = max(map(len, groups))
        if largest > MOST_VALUES:
            raise InputError(
                f"grouping: {grouping!r} needs the principal components of {largest:,} values per token, and "
                f"{MOST_VALUES:,} are the most: choose a narrower one (layer, unit or head)"
            )
        if any(chunk.layout.fingerprint != layout.fingerprint for chunk in chunks):
            raise InputError("chunks: one has another layout than `layout`; take all from one model, in one dtype")
        if tokens < needed:
            raise InputError(
                f"chunks: hold {tokens:,} tokens, and a basis of {largest:,} values needs {needed:,}: "
                "give more text or choose a narrower grouping"
            )
        device = chunks[0].device
        groups = tuple(group.to(device) for group in groups)
        total = torch.zeros(layout.values_per_token, dtype=torch.float64, device=device)
        for chunk in chunks:
            total += flatten_values(chunk).double().sum(0)
        mean = (total / tokens).float()
        exact = [len(g) <= EXACT_VALUES for g in groups]
        covariances = [
            torch.zeros(len(g) if all_ else 0, len(g) if all_ else 0, dtype=torch.float64, device=device)
            for g, all_ in zip(groups, exact, strict=True)
        ]
        most = min(_SAMPLE_TOKENS, _SAMPLE_VALUES // largest)
        stride = max(1, math.ceil(tokens / most))
        sample: list[torch.Tensor] = []
        variance, seen = 0.0, 0
        for chunk in chunks:
            centered = flatten_values(chunk) - mean
            variance += float(centered.square().sum(dtype=torch.float64))
            for group, covariance in zip(groups, covariances, strict=True):
                if len(covariance):
                    part = centered[:, group].double()
                    covariance.addmm_(part.T, part)
            if not all(exact):
                sample.append(centered[-seen % stride :: stride])
            seen += chunk.tokens
        # A cache that does not vary has no scale.
        rms = math.sqrt(variance / tokens / layout.values_per_token) or 1.0
        rows = torch.cat(sample) if sample else mean.new_empty(0, len(mean))
        matrices = tuple(
            torch.linalg.eigh(covariance)[1].flip(1).T.float().contiguous()
            if len(covariance)
            else _wide_directions(rows[:, group])
            for group, covariance in zip(groups, covariances, strict=True)
        )
        return cls(layout, grouping, groups, mean, rms, matrices)

    @property
    def device(self) -> torch.device:
        """The device of the arithmetic, which is that of the calibration chunks."""
        return self.mean.device

    @property
    def sizes(self) -> list[int]:
        """Components of each group."""
        return [len(matrix) for matrix in self.matrices]

    @property
    def digest(self) -> str:
        """Hex BLAKE2b of the map."""
        digest = hashlib.blake2b(f"{self.grouping} {self.rms!r}".encode(), digest_size=16, person=b"cuvee-pca")
        for tensor in (self.mean, *self.matrices):
            digest.update(tensor.cpu().numpy().tobytes())
        return digest.hexdigest()

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Values `[T, N]` of `flatten_values` -> coefficients `[T, R]`, group after group."""
        centered = (x.to(self.device) - self.mean) / self.rms
        return torch.cat([centered[:, g] @ m.T for g, m in zip(self.columns, self.matrices, strict=True)], 1)

    def analyze(self, chunk: KVChunk) -> torch.Tensor:
        """The coefficients of a chunk `[T, R]`.

        Raises:
            InputError: the chunk has another layout, or holds NaN or infinities.
        """
        if chunk.layout.fingerprint != self.layout.fingerprint:
            raise InputError("chunk: has another layout than the chunks that the basis was learned from")
        return self.project(flatten_values(chunk))

    def synthesize(self, y: torch.Tensor, start: int, device: torch.device) -> KVChunk:
        """The inverse of `analyze`."""
        x = y.new_empty(len(y), len(self.mean))
        for group, matrix, part in zip(self.columns, self.matrices, y.split(self.sizes, 1), strict=True):
            x[:, group] = part @ matrix
        return _unflatten((x * self.rms + self.mean).to(device), self.layout, start)

    def sample(self, chunks: Sequence[KVChunk], run: int, most: int) -> torch.Tensor:
        """The coefficients of at most `most` runs of `run` tokens, evenly spread over the chunks: `[runs, run, R]`."""
        runs = sum(chunk.tokens // run for chunk in chunks)
        stride = max(1, math.ceil(runs / most))
        kept, seen = [], 0
        for chunk in chunks:
            whole = chunk.tokens // run
            chosen = range(-seen % stride, whole, stride)
            if chosen:
                x = flatten_values(chunk)[: whole * run].unflatten(0, (whole, run))[chosen.start :: stride]
                kept.append(self.project(x.flatten(0, 1)).unflatten(0, (-1, run)))
            seen += whole
        return torch.cat(kept) if kept else self.mean.new_empty(0, run, sum(self.sizes))


def _wide_directions(rows: torch.Tensor) -> torch.Tensor:
    """The components `[r, n]` of a group of more than `EXACT_VALUES` values, from centered rows `[m, n]`."""
    width = rows.shape[1]
    leading = leading_directions(rows, min(MOST_RANK, width))
    if len(leading) == width or width > COMPLETE_VALUES:
        return leading
    rest = torch.linalg.qr(leading.T, mode="complete")[0][:, len(leading) :]
    return torch.cat([leading, _turned(rows, rest, rest.shape[1])])


def leading_directions(rows: torch.Tensor, rank: int) -> torch.Tensor:
    """The leading principal components of centered rows, by randomized subspace iteration; the same on every call.

    Args:
        rows: `[m, n]` float32, with a mean of zero.
        rank: how many to find.

    Returns:
        `[rank, n]` float32 with orthonormal rows, in order of falling variance.

    Example:
        >>> rows = torch.randn(400, 3) @ torch.tensor([[9.0, 0, 0, 0], [0, 0, 3.0, 0], [0, 1.0, 0, 0]])
        >>> leading_directions(rows, 2).abs().round().int().tolist()
        [[1, 0, 0, 0], [0, 0, 1, 0]]
    """
    width = min(rank + _EXTRA, *rows.shape)
    start = torch.randn(rows.shape[1], width, generator=torch.Generator().manual_seed(_SEED), device="cpu")
    basis = torch.linalg.qr(start.to(rows.device))[0]
    for _ in range(_ROUNDS):
        basis = torch.linalg.qr(rows.T @ (rows @ basis))[0]
    return _turned(rows, basis, rank)


def _turned(rows: torch.Tensor, basis: torch.Tensor, rank: int) -> torch.Tensor:
    """The leading components `[rank, n]` of rows `[m, n]` within the span of the orthonormal columns `[n, k]`."""
    inside = rows @ basis
    turn = torch.linalg.eigh((inside.T @ inside).double())[1].flip(1)[:, :rank]
    found: torch.Tensor = (basis @ turn.float()).T.contiguous()
    return found

"""Sections, blocks and linear maps: from a chunk's tensors to decorrelated coefficients and back.

    keys, values of a section's layers --un-rotate keys, concatenate--> x [T, N]
    y = forward (x - mean)  per block   ->   y [R, T]  component-major, one row per component
    x = inverse y + mean

A *section* is a run of layers that is coded, found and decoded on its own. Its N values per token are ordered by layer,
K before V, head, dimension. A *block* is a contiguous part of them that shares one basis. The blocks partition N.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.models.rope import cos_sin, turn
from cuvee.codec.stages.rows import Rows
from cuvee.codec.support.lazy import lazy

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]

WEIGHT_RANGE = 1e-7  # smallest over largest weight of a metric; maps in float32 cannot hold a wider range


@dataclass(frozen=True, slots=True)
class Section:
    """The layers `first_layer … end_layer - 1`. `blocks` holds the sizes of their blocks, in order."""

    first_layer: int
    end_layer: int
    blocks: tuple[int, ...]

    @property
    def values(self) -> int:
        """N: values per token."""
        return sum(self.blocks)

    def layers(self, layout: KVLayout) -> tuple[LayerLayout, ...]:
        """The layouts of its layers."""
        return layout.layers[self.first_layer : self.end_layer]


def partition(layout: KVLayout, group: str) -> tuple[Section, ...]:
    """Cut a layout into sections and blocks.

    Args:
        layout: what to cut.
        group: what one basis spans: `"head"` (one head of K or V), `"unit"` (K or V of a layer), `"layer"` (K and V
            together), `"layers:n"` (n layers together; the last section may be shorter) or `"all"`.

    Raises:
        InputError: the group is not known.
    """
    several = re.fullmatch(r"layers:([1-9]\d*)", group)
    if several is None and group not in {"head", "unit", "layer", "all"}:
        raise InputError(f"group={group!r} is not known; choose one of head, unit, layer, layers:n, all (n a number)")
    span = int(several[1]) if several else (layout.num_layers if group == "all" else 1)
    sections = []
    for first in range(0, layout.num_layers, span):
        layers = layout.layers[first : first + span]
        if group == "head":
            sizes = [s for x in layers for s in [x.head_dim] * x.kv_heads + [x.value_dim] * x.kv_heads]
        elif group == "unit":
            sizes = [s for x in layers for s in (x.key_values, x.value_values)]
        else:
            sizes = [sum(x.key_values + x.value_values for x in layers)]
        sections.append(Section(first, first + len(layers), tuple(sizes)))
    return tuple(sections)


def tile_tokens(section: Section, layout: KVLayout) -> int:
    """How many tokens to handle at a time, so that float32 tiles stay small even if a section is the whole chunk.

    This is a multiple of every number of tokens per stream, and of the windows in which tokens are sorted by class.
    """
    # Decided by layers, because adding up the values of a layout for every section would take longer than the rest.
    layers = max(section.end_layer - section.first_layer, 1)
    return 512 if layout.num_layers >= 4 * layers else 256


def tiles(tokens: int, tile: int) -> Iterator[slice]:
    """Runs of `tile` tokens. The last may be shorter."""
    for start in range(0, tokens, tile):
        yield slice(start, min(start + tile, tokens))


class Rotation:
    """cos and sin of a run of positions, computed once for each distinct RoPE of a layout."""

    def __init__(self, layout: KVLayout, start: int, tokens: int, device: torch.device, inverse: bool = False) -> None:
        positions = torch.arange(start, start + tokens, dtype=torch.int64, device=device)
        self._tables: dict[Rope, tuple[torch.Tensor, torch.Tensor]] = {}
        self._arrays: dict[Rope, tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]] = {}
        for rope in {layer.rope for layer in layout.layers}:
            if rope is None:
                continue
            cos, sin = cos_sin(rope, positions)
            if inverse:
                square = rope.attention_scaling**2
                cos, sin = cos / square, sin / -square
            self._tables[rope] = (cos[:, None], sin[:, None])
            if device.type == "cpu":
                self._arrays[rope] = cos.numpy(), sin.numpy()

    def tables(self, rope: Rope, at: slice) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Cos and sin `[t, rotary_dim / 2]` float32 of the tokens `at`, on the CPU."""
        cos, sin = self._arrays[rope]
        return cos[at], sin[at]

    def apply(self, keys: torch.Tensor, rope: Rope | None, at: slice) -> torch.Tensor:
        """Keys `[t, H, D]` of the tokens `at` of the run, rotated; float32."""
        if rope is None:
            return keys.float()
        cos, sin = self._tables[rope]
        return turn(keys, rope, cos[at], sin[at])


def gather(chunk: KVChunk, section: Section, rotation: Rotation | None, at: slice) -> torch.Tensor:
    """The section's values of the tokens `at`, `[t, N]` float32, with keys rotated by `rotation` (None: as stored)."""
    columns = []
    for index, layer in enumerate(section.layers(chunk.layout), section.first_layer):
        keys, values = chunk.keys[index][at], chunk.values[index][at]
        turned = keys.float() if rotation is None else rotation.apply(keys, layer.rope, at)
        columns += [turned.flatten(1), values.flatten(1).float()]
    return torch.cat(columns, dim=1)


def gather_centered(
    chunk: KVChunk, section: Section, rotation: Rotation, at: slice, mean: torch.Tensor
) -> torch.Tensor:
    """`gather`, less the means `[m, N]` float32, of which the last row serves all further tokens.

    The result is valid until the thread gathers the next.

    Raises:
        InputError: some of the values are NaN or infinite.
    """
    x = gather(chunk, section, rotation, at)
    x -= mean[torch.arange(len(x)).clamp_max(len(mean) - 1)] if 1 < len(mean) < len(x) else mean
    require_finite(x, section)
    return x


def require_finite(x: torch.Tensor, section: Section) -> None:
    """Raise InputError if `x`, values of the section, holds NaN or infinities."""
    # A sum is finite only if all of its terms are. If it overflows, the terms themselves are checked.
    if not bool(torch.isfinite(x.sum())) and not bool(torch.isfinite(x).all()):
        raise not_finite_error(section)


def not_finite_error(section: Section) -> InputError:
    """What is wrong with a section whose values are not all finite."""
    return InputError(
        f"the KV cache holds NaN or infinite values in layers {section.first_layer} … {section.end_layer - 1}: "
        "encode it with quality='lossless'"
    )


def place(
    x: torch.Tensor,
    mean: torch.Tensor,
    section: Section,
    layout: KVLayout,
    rotation: Rotation,
    at: slice,
    keys: Sequence[Rows | None],
    values: Sequence[Rows | None],
    order: I64 | None = None,
) -> None:
    """Write `x + mean` to the rows `at` of per-layer outputs, with keys rotated and rounded to the outputs' dtype.

    Args:
        x: `[t, N]` with position-free keys, or `[blocks, t, N / blocks]`; float32 or bfloat16. Arithmetic is float32.
        mean: `[m, N]` float32, contiguous. Its last row serves all further tokens.
        section: the section whose values x holds.
        layout: layout of the outputs.
        rotation: rotates keys to their positions; `at` indexes it.
        at: rows of the outputs.
        keys: per layer. Those of the section's layers are written, unless they are None.
        values: the same for values.
        order: `[t]`, the row of `mean`, of `at` and of the outputs that each row of x belongs to; None: its own. Rows
            of x that belong to none, because `order` names one below zero or beyond `at`, are left out.
    """
    if x.ndim == 3:
        x = x.transpose(0, 1).flatten(1)
    if order is not None:
        inside = (order >= 0) & (order < at.stop - at.start)
        x = x[torch.from_numpy(np.flatnonzero(inside)[np.argsort(order[inside])])]
    if 1 < len(mean) < len(x):
        mean = mean[torch.arange(len(x)).clamp_max(len(mean) - 1)]
    x = x.float() + mean
    column = 0
    for index, layer in enumerate(section.layers(layout), section.first_layer):
        rows = keys[index]
        if rows is not None:
            part = x[:, column : column + layer.key_values].unflatten(1, (layer.kv_heads, layer.head_dim))
            rows.write(rotation.apply(part, layer.rope, at), at)
        column += layer.key_values
        rows = values[index]
        if rows is not None:
            part = x[:, column : column + layer.value_values].unflatten(1, (layer.kv_heads, layer.value_dim))
            rows.write(part, at)
        column += layer.value_values


@dataclass(frozen=True)
class SectionBasis:
    """The linear maps of a section.

    Attributes:
        mean: `[N]` float32.
        sinks: `[P, N]` float32, the means of the first P positions of a sequence (attention sinks).
        forward: per block `[r, n]` float32, rows in order of falling scale.
        inverse: per block `[n, r]` float32.
    """

    mean: torch.Tensor
    sinks: torch.Tensor
    forward: tuple[torch.Tensor, ...]
    inverse: tuple[torch.Tensor, ...]

    @property
    def block_ranks(self) -> tuple[int, ...]:
        """How many components of each block are stored."""
        return tuple(len(f) for f in self.forward)

    def means(self, start: int, at: slice) -> torch.Tensor:
        """Means `[t, N]` (`[1, N]` if alike) of the tokens `at` of a chunk that begins at position `start`."""
        mean = self.leading_means(start, at)
        further = at.stop - at.start - len(mean)
        return torch.cat([mean, mean[-1:].expand(further, -1)]) if len(mean) > 1 and further else mean

    def leading_means(self, start: int, at: slice) -> torch.Tensor:
        """`means` without repetition: `[m, N]`. The last row serves all further tokens."""
        first = min(start + at.start, len(self.sinks))
        return self._sinks_and_mean[first : first + at.stop - at.start]

    @lazy
    def _sinks_and_mean(self) -> torch.Tensor:
        return torch.cat([self.sinks, self.mean[None]])

    def analyze(self, x: torch.Tensor, start: int, at: slice, ranks: tuple[int, ...]) -> torch.Tensor:
        """`x [t, N]` float32 of the tokens `at` of a chunk that begins at position `start` -> `y [sum(ranks), t]`.

        `ranks` says how many leading components of each block are wanted.
        """
        return self.coefficients(x - self.means(start, at), ranks)

    def coefficients(
        self, centered: torch.Tensor, ranks: tuple[int, ...], out: torch.Tensor | None = None, known: int = 0
    ) -> torch.Tensor:
        """`analyze` of values `[t, N]` less their means.

        `out` receives y. The first `known` components of the first block are left as they are there.
        """
        y = centered.new_empty(sum(ranks), len(centered)) if out is None else out
        row = column = 0
        for matrix, rank in zip(self.forward, ranks, strict=True):
            size = matrix.shape[1]
            if known < rank:
                torch.mm(matrix[known:rank], centered[:, column : column + size].T, out=y[row + known : row + rank])
            row, column, known = row + rank, column + size, 0
        return y

    def leading(self, wanted: npt.NDArray[np.int32]) -> LeadingComponents:
        """Some of the components on their own; `wanted` `[K]` numbers them, all blocks in a row."""
        parts, first, column = [], 0, 0
        for matrix in self.forward:
            rank, size = matrix.shape
            inside = np.flatnonzero((wanted >= first) & (wanted < first + rank))
            if len(inside):
                rows = matrix[torch.from_numpy(wanted[inside] - first).long()].contiguous()
                parts.append((slice(int(inside[0]), int(inside[-1]) + 1), slice(column, column + size), rows))
            first, column = first + rank, column + size
        return LeadingComponents(len(wanted), tuple(parts))


@dataclass(frozen=True, slots=True)
class LeadingComponents:
    """Some of a basis's components: what a predictor reads.

    Attributes:
        count: K.
        parts: one for each block that holds some of them: its rows among the K, its values among the N, and the matrix
            `[rows, values]` that maps values to rows.
    """

    count: int
    parts: tuple[tuple[slice, slice, torch.Tensor], ...]

    def __call__(self, centered: torch.Tensor) -> torch.Tensor:
        """Values minus their means, `[t, N]` float32 -> coefficients `[K, t]`."""
        y = centered.new_empty(self.count, len(centered))
        for rows, values, matrix in self.parts:
            torch.mm(matrix, centered[:, values].T, out=y[rows])
        return y


def spread(y: F32, live: npt.NDArray[np.intp], scale: F32, count: int) -> torch.Tensor:
    """Channels that are coded one by one to values.

    Args:
        y: `[R, t]` float32, the coded channels.
        live: `[R]`, which channels they are.
        scale: `[count]` float32, one unit of each channel.
        count: N.

    Returns:
        `[t, N]` float32; zero in the other channels.
    """
    x = torch.zeros(y.shape[1], count)
    x[:, torch.from_numpy(live)] = torch.from_numpy(y).T * torch.from_numpy(scale[live])
    return x


def synthesize(
    y: torch.Tensor,
    inverse: Sequence[torch.Tensor],
    runs: Iterable[tuple[slice, Sequence[int]]],
    out: torch.Tensor,
) -> torch.Tensor:
    """Coefficients to values: the inverse of `SectionBasis.coefficients`. All tensors share one dtype.

    Args:
        y: `[B, pad, t]`, of each block the leading components, and zeros.
        inverse: the transposed `SectionBasis.inverse`, zeros below, stacked where blocks are alike: `[b, rows, n]`,
            with at least `pad` rows. Together B blocks.
        runs: the columns multiplied together, and how many rows of each block they need. With matrix instructions all
            columns are multiplied at once, since a call costs as much as what it would save.
        out: `[t N]`, receives the values.

    Returns:
        `[t, N]`, or `[B, t, N / B]` if all blocks are alike and were multiplied at once: a view of `out`.
    """
    width = y.shape[2]
    if y.dtype == torch.bfloat16 and len(inverse) == 1:
        return torch.bmm(y.mT, inverse[0][:, : y.shape[1]], out=out.view(len(y), width, -1))
    x = out.view(width, -1)
    matrices = [matrix for alike in inverse for matrix in alike]
    for run, rows in runs:
        column = 0
        for own, matrix, depth in zip(y, matrices, rows, strict=True):
            size = matrix.shape[1]
            torch.mm(own[:depth, run].T, matrix[:depth], out=x[run, column : column + size])
            column += size
    return x


def eigenbasis(covariance: torch.Tensor, metric: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The transform with decorrelated components whose squared error is the error in the metric.

    Let M be the metric, C the covariance, R = M^1/2, and U the eigenvectors of R C R. Then forward = U^T R and
    inverse = R^-1 U. In these coordinates the squared error of a component is the loss that it costs, so one step size
    for all of them is optimal (reverse water-filling; Cover & Thomas, Elements of Information Theory, 10.3).

    Args:
        covariance: `[n, n]` float64.
        metric: `[n, n]` float64, positive semi-definite.

    Returns:
        forward `[n, n]`, inverse `[n, n]`, deviation `[n]` (falling), float64.
    """
    weight, vectors = torch.linalg.eigh(metric)
    weight = weight.clamp_min(max(float(weight.max()) * WEIGHT_RANGE, 1e-300))
    root = (vectors * weight.sqrt()) @ vectors.T
    inverse_root = (vectors * weight.rsqrt()) @ vectors.T
    energy, axes = torch.linalg.eigh(root @ covariance @ root)
    axes = axes.flip(1)
    return axes.T @ root, inverse_root @ axes, energy.flip(0).clamp_min(0).sqrt()


def as_numpy(y: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """A float32 CPU tensor as an array, without a copy."""
    return np.asarray(y.numpy(), dtype=np.float32)

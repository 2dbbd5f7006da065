"""Sections, blocks and linear maps: from a chunk's tensors to decorrelated coefficients and back.

    keys, values of a section's layers --un-rotate keys, concatenate--> x [T, N]
    y = forward (x - mean)  per block   ->   y [R, T]  component-major, one row a component
    x = inverse y + mean

A *section* is a run of layers: what is coded, found and decoded alone. Its N values a token lie in the order layer,
K before V, head, dimension. A *block* is a contiguous part of them that shares one basis; the blocks partition N.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import torch

from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVChunk, KVLayout, LayerLayout, Rope
from cuvee.codec.rope import cos_sin, turn

GROUPS = ("head", "unit", "layer", "layers:n", "all")


@dataclass(frozen=True, slots=True)
class Section:
    """Layers `first_layer … end_layer - 1`; `blocks` are the sizes of the blocks, in order."""

    first_layer: int
    end_layer: int
    blocks: tuple[int, ...]

    @property
    def values(self) -> int:
        """N: values a token."""
        return sum(self.blocks)

    def layers(self, layout: KVLayout) -> tuple[LayerLayout, ...]:
        """The layouts of its layers."""
        return layout.layers[self.first_layer : self.end_layer]


def partition(layout: KVLayout, group: str) -> tuple[Section, ...]:
    """Cut a layout into sections and blocks.

    Args:
        layout: what to cut.
        group: what one basis spans: `"head"` (one head of K or V), `"unit"` (K or V of a layer), `"layer"` (K and V
            together), `"layers:n"` (n layers together, the last section may be shorter) or `"all"`.

    Raises:
        InputError: an unknown group.
    """
    several = re.fullmatch(r"layers:([1-9]\d*)", group)
    if several is None and group not in GROUPS:
        raise InputError(f"group={group!r} is not known; choose one of {', '.join(GROUPS)} (n a number)")
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


class Rotation:
    """cos and sin of a run of positions, computed once for each distinct RoPE of a layout."""

    def __init__(self, layout: KVLayout, start: int, tokens: int, device: torch.device, inverse: bool = False) -> None:
        positions = torch.arange(start, start + tokens, dtype=torch.int64, device=device)
        self._tables: dict[Rope, tuple[torch.Tensor, torch.Tensor]] = {}
        for rope in {layer.rope for layer in layout.layers} - {None}:
            assert rope is not None
            cos, sin = cos_sin(rope, positions)
            if inverse:
                square = rope.attention_scaling**2
                cos, sin = cos / square, sin / -square
            self._tables[rope] = (cos[:, None], sin[:, None])

    def apply(self, keys: torch.Tensor, rope: Rope | None, at: slice) -> torch.Tensor:
        """Turn keys `[t, H, D]` of the tokens `at` of the run; float32."""
        if rope is None:
            return keys.float()
        cos, sin = self._tables[rope]
        return turn(keys, rope, cos[at], sin[at])


def gather(chunk: KVChunk, section: Section, rotation: Rotation | None, at: slice) -> torch.Tensor:
    """The section's values of the tokens `at`, keys turned by `rotation` (None: as stored): `[t, N]` float32."""
    columns = []
    for index, layer in enumerate(section.layers(chunk.layout), section.first_layer):
        keys, values = chunk.keys[index][at], chunk.values[index][at]
        turned = keys.float() if rotation is None else rotation.apply(keys, layer.rope, at)
        columns += [turned.flatten(1), values.flatten(1).float()]
    return torch.cat(columns, dim=1)


def scatter(
    x: torch.Tensor,
    section: Section,
    layout: KVLayout,
    rotation: Rotation,
    at: slice,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
) -> None:
    """Write `x [t, N]` float32 (position-free keys) into the tokens `at` of per-layer outputs, keys turned, rounded
    to the outputs' dtype.
    """
    column = 0
    for index, layer in enumerate(section.layers(layout), section.first_layer):
        part = x[:, column : column + layer.key_values].unflatten(1, (layer.kv_heads, layer.head_dim))
        keys[index][at] = rotation.apply(part, layer.rope, at)
        column += layer.key_values
        part = x[:, column : column + layer.value_values].unflatten(1, (layer.kv_heads, layer.value_dim))
        values[index][at] = part
        column += layer.value_values


@dataclass(frozen=True, slots=True)
class SectionBasis:
    """The linear maps of a section.

    Attributes:
        mean: `[N]` float32.
        sinks: `[P, N]` float32: the first P positions of a sequence have means of their own (attention sinks).
        forward: per block `[r, n]` float32, rows in order of falling scale.
        inverse: per block `[n, r]` float32.
    """

    mean: torch.Tensor
    sinks: torch.Tensor
    forward: tuple[torch.Tensor, ...]
    inverse: tuple[torch.Tensor, ...]

    @property
    def block_ranks(self) -> tuple[int, ...]:
        """Stored components of each block."""
        return tuple(len(f) for f in self.forward)

    def _means(self, start: int, at: slice) -> torch.Tensor | None:
        """Means of the sink tokens among `at`, None where there are none."""
        first = start + at.start
        return self.sinks[first : first + at.stop - at.start] if first < len(self.sinks) else None

    def analyse(self, x: torch.Tensor, start: int, at: slice, ranks: tuple[int, ...]) -> torch.Tensor:
        """`x [t, N]` of the tokens `at` of a chunk that starts at position `start` -> `y [sum(ranks), t]`.

        `ranks` says how many leading components of each block are wanted.
        """
        centred = x - self.mean
        sinks = self._means(start, at)
        if sinks is not None:
            centred[: len(sinks)] = x[: len(sinks)] - sinks
        y = x.new_empty(sum(ranks), len(x))
        row = column = 0
        for matrix, rank in zip(self.forward, ranks, strict=True):
            size = matrix.shape[1]
            torch.mm(matrix[:rank], centred[:, column : column + size].T, out=y[row : row + rank])
            row, column = row + rank, column + size
        return y

    def synthesise(self, y: torch.Tensor, start: int, at: slice, ranks: tuple[int, ...]) -> torch.Tensor:
        """The inverse of `analyse` on the leading components; the others count as zero."""
        x = y.new_empty(y.shape[1], len(self.mean))
        row = column = 0
        for matrix, rank in zip(self.inverse, ranks, strict=True):
            size = len(matrix)
            torch.mm(y[row : row + rank].T, matrix[:, :rank].T, out=x[:, column : column + size])
            row, column = row + rank, column + size
        sinks = self._means(start, at)
        if sinks is not None:
            x[: len(sinks)] += sinks - self.mean
        return x.add_(self.mean)


def eigenbasis(covariance: torch.Tensor, metric: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The transform whose squared error is the metric's, with decorrelated components.

    With M the metric and C the covariance, R = M^1/2 and U the eigenvectors of R C R: forward = U^T R, inverse =
    R^-1 U. In these coordinates the squared error of a component is the loss it costs, so one step size for all is
    optimal (reverse water-filling; Cover & Thomas, Elements of Information Theory, 10.3).

    Args:
        covariance: `[n, n]` float64.
        metric: `[n, n]` float64, positive semi-definite.

    Returns:
        forward `[n, n]`, inverse `[n, n]`, deviation `[n]` (falling), float64.
    """
    weight, vectors = torch.linalg.eigh(metric)
    weight = weight.clamp_min(max(float(weight.max()) * 1e-7, 1e-300))
    root = (vectors * weight.sqrt()) @ vectors.T
    inverse_root = (vectors * weight.rsqrt()) @ vectors.T
    energy, axes = torch.linalg.eigh(root @ covariance @ root)
    axes = axes.flip(1)
    return axes.T @ root, inverse_root @ axes, energy.flip(0).clamp_min(0).sqrt()


def as_numpy(y: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """A float32 CPU tensor as an array, without a copy."""
    return np.asarray(y.numpy(), dtype=np.float32)

"""Sections and blocks: how the layers of a cache are cut into parts that are coded on their own.

A *section* is a run of layers that is coded, found and decoded on its own. Its N values per token are ordered by layer,
K before V, head, dimension; in groups `heads:n` by head, layer, K before V, dimension. A *block* is a contiguous part
of them that shares one basis. The blocks partition N.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout, LayerLayout


@dataclass(frozen=True, slots=True)
class UnitColumns:
    """Where the values of a unit, K or V of one layer, are among the N of its section.

    Attributes:
        first: column of the first value of head 0.
        stride: columns from one head to the next.
    """

    layer: int
    is_value: bool
    first: int
    stride: int
    heads: int
    size: int

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return a view `[t, heads, size]` of the unit's values in the section's, `[t, N]`."""
        strides = (x.stride(0), self.stride * x.stride(1), x.stride(1))
        return x.as_strided((len(x), self.heads, self.size), strides, x.storage_offset() + self.first * x.stride(1))


@dataclass(frozen=True, slots=True)
class Section:
    """A run of layers.

    Attributes:
        first_layer, end_layer: the layers `first_layer … end_layer - 1`.
        blocks: the sizes of their blocks, in order.
        by_head: whether values are ordered by head before layer. All layers then have the same number of heads.
    """

    first_layer: int
    end_layer: int
    blocks: tuple[int, ...]
    by_head: bool = False

    @property
    def values(self) -> int:
        """N: values per token."""
        return sum(self.blocks)

    def layers(self, layout: KVLayout) -> tuple[LayerLayout, ...]:
        """Return the layouts of the section's layers."""
        return layout.layers[self.first_layer : self.end_layer]

    def units(self, layout: KVLayout) -> Iterator[UnitColumns]:
        """Yield the units of the section's layers, K before V."""
        layers = self.layers(layout)
        of_head = sum(layer.head_dim + layer.value_dim for layer in layers)
        column = 0
        for number, layer in enumerate(layers, self.first_layer):
            for is_value, size in ((False, layer.head_dim), (True, layer.value_dim)):
                stride = of_head if self.by_head else size
                yield UnitColumns(number, is_value, column, stride, layer.kv_heads, size)
                column += size if self.by_head else size * layer.kv_heads


def columns_in_cache(section: Section, layout: KVLayout) -> torch.Tensor:
    """Return where a section's values are among all values of a token, ordered by layer: int64 `[N]`."""
    (whole,) = partition(layout, "all")
    everything = torch.arange(whole.values, device="cpu")[None]
    columns = torch.empty(1, section.values, dtype=torch.int64, device="cpu")
    places = {(unit.layer, unit.is_value): unit for unit in whole.units(layout)}
    for unit in section.units(layout):
        unit.of(columns).copy_(places[unit.layer, unit.is_value].of(everything))
    return columns[0]


def partition(layout: KVLayout, group: str) -> tuple[Section, ...]:
    """Cut a layout into sections and blocks.

    Args:
        group: the values of one basis: `"head"` (one head of K or V), `"unit"` (K or V of a layer), `"layer"` (K and V
            of a layer), `"layers:n"` (n adjacent layers; the last section may be shorter), `"heads:n"` (a head's K and
            V in n adjacent layers) or `"all"`.

    Raises:
        InputError: the group is not known, or is `"heads:n"` where adjacent layers differ in their number of heads.
    """
    several = re.fullmatch(r"(layers|heads):([1-9]\d*)", group)
    if several is None and group not in {"head", "unit", "layer", "all"}:
        raise InputError(f"group: must be one of head, unit, layer, layers:n, heads:n, all (n a number), got {group!r}")
    span = int(several[2]) if several else (layout.num_layers if group == "all" else 1)
    by_head = several is not None and several[1] == "heads"
    sections = []
    for first in range(0, layout.num_layers, span):
        layers = layout.layers[first : first + span]
        end = first + len(layers)
        if by_head:
            heads = sorted({layer.kv_heads for layer in layers}, reverse=True)
            if len(heads) > 1:
                raise InputError(
                    f"group: {group!r} must span layers with as many heads, got {' and '.join(map(str, heads))} in "
                    f"layers {first} … {end - 1}: take 'heads:1'"
                )
            sizes = [sum(x.head_dim + x.value_dim for x in layers)] * heads[0]
        elif group == "head":
            sizes = [s for x in layers for s in [x.head_dim] * x.kv_heads + [x.value_dim] * x.kv_heads]
        elif group == "unit":
            sizes = [s for x in layers for s in (x.key_values, x.value_values)]
        else:
            sizes = [sum(x.key_values + x.value_values for x in layers)]
        sections.append(Section(first, end, tuple(sizes), by_head))
    return tuple(sections)


def tile_tokens(section: Section, layout: KVLayout) -> int:
    """Return the tokens per tile, so that float32 tiles stay small even if a section is the whole chunk.

    This is a multiple of every number of tokens per stream, and of the windows in which tokens are sorted by class.
    """
    # Decided by layers, because adding up the values of a layout for every section would take longer than the rest.
    layers = max(section.end_layer - section.first_layer, 1)
    return 512 if layout.num_layers >= 4 * layers else 256


def tiles(tokens: int, tile: int) -> Iterator[slice]:
    """Yield runs of `tile` tokens. The last may be shorter."""
    for start in range(0, tokens, tile):
        yield slice(start, min(start + tile, tokens))


def tiles_around(span: range, tile: int, tokens: int) -> Iterator[slice]:
    """Yield the tiles that hold the tokens `span` of a chunk of `tokens`.

    Tiles are whole and always cut at the same places, because the last bits of a matrix product depend on its shape,
    and a run of tokens must come out exactly as in the whole chunk.
    """
    for start in range(span.start - span.start % tile, span.stop, tile):
        yield slice(start, min(start + tile, tokens))

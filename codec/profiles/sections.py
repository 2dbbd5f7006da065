"""Sections and blocks: how the layers of a cache are cut into parts that are coded on their own.

A *section* is a run of layers that is coded, found and decoded on its own. Its N values per token are ordered by layer,
K before V, head, dimension. A *block* is a contiguous part of them that shares one basis. The blocks partition N.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout, LayerLayout


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
        """Return the layouts of the section's layers."""
        return layout.layers[self.first_layer : self.end_layer]


def partition(layout: KVLayout, group: str) -> tuple[Section, ...]:
    """Cut a layout into sections and blocks.

    Args:
        layout: the layout to cut.
        group: the values of one basis: `"head"` (one head of K or V), `"unit"` (K or V of a layer), `"layer"` (K and V
            of a layer), `"layers:n"` (n adjacent layers; the last section may be shorter) or `"all"`.

    Raises:
        InputError: the group is not known.
    """
    several = re.fullmatch(r"layers:([1-9]\d*)", group)
    if several is None and group not in {"head", "unit", "layer", "all"}:
        raise InputError(f"group: must be one of head, unit, layer, layers:n, all (n a number), got {group!r}")
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

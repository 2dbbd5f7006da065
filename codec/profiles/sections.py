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

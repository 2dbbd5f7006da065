"""Tiles: the pieces of heads that one program of a kernel reads or writes.

The M *columns* of gathered values, of means and of bases are a section's values in the order of its tiles, padded. A
tile has 2 * PAIRS columns: the first dimensions of its pairs, then the second ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout, Rope
from cuvee.codec.profiles.sections import Section
from cuvee.kernels.jobs import I64, BlockField, TileField

MIN_PAIRS, MAX_PAIRS = 16, 64  # of half a tile: the least for a matrix instruction; a head of 128 is one tile


@dataclass(frozen=True, slots=True)
class TileLayout:
    """Sections cut into tiles.

    Attributes:
        tiles: `[tiles, len(TileField)]` in the order of the sections and their values; no ranks yet.
        blocks: `[blocks, len(BlockField)]` likewise.
        order: int32 `[M]`: which of its section's N values a column holds, or -1: padding.
        bounds: int64 `[sections + 1]`: the columns of section i are `bounds[i] … bounds[i + 1] - 1`.
    """

    tiles: I64
    blocks: I64
    columns: int
    pairs: int
    order: npt.NDArray[np.int32]
    bounds: I64

    def pack(self, values: torch.Tensor, section: int) -> torch.Tensor:
        """Arrange values `[..., N]` of a section as columns `[..., bounds[i + 1] - bounds[i]]`, padded with zeros."""
        order = torch.from_numpy(self.order[self.bounds[section] : self.bounds[section + 1]]).to(values.device).long()
        return torch.where(order >= 0, values[..., order.clamp_min(0)], 0)

    def pack_basis(self, matrices: Sequence[torch.Tensor], section: int) -> list[torch.Tensor]:
        """Arrange each block `[rank, n]` (forward, or inverse transposed) as `[rank, BlockField.COLUMNS]`."""
        section_blocks = self.blocks[self.blocks[:, BlockField.SECTION] == section]
        packed, first = [], 0
        for matrix, block in zip(matrices, section_blocks, strict=True):
            column = int(block[BlockField.COLUMN])
            order = (
                torch.from_numpy(self.order[column : column + int(block[BlockField.COLUMNS])]).to(matrix.device).long()
            )
            packed.append(torch.where(order >= 0, matrix[:, (order - first).clamp_min(0)], 0))
            first += matrix.shape[1]
        return packed

    def with_ranks(self, ranks: Sequence[Sequence[int]], stored: Sequence[Sequence[int]]) -> tuple[I64, I64]:
        """Return the tables, tiles and blocks, for blocks cut to their leading components.

        Args:
            ranks: components that are used, per section and block.
            stored: those that the bases hold, forward or inverse alike, which follow each other.
        """
        tiles, blocks = self.tiles.copy(), self.blocks.copy()
        flat, stored_ranks = (np.array([n for section in each for n in section], np.int64) for each in (ranks, stored))
        elements = stored_ranks * blocks[:, BlockField.COLUMNS]
        blocks[:, BlockField.RANK] = flat
        blocks[:, BlockField.BASIS] = np.cumsum(elements) - elements
        for section in np.unique(blocks[:, BlockField.SECTION]):
            in_section = blocks[:, BlockField.SECTION] == section
            blocks[in_section, BlockField.ROW] = np.cumsum(flat[in_section]) - flat[in_section]
        of_tile = np.searchsorted(blocks[:, BlockField.COLUMN], tiles[:, TileField.COLUMN], side="right") - 1
        tiles[:, [TileField.ROW, TileField.RANK]] = blocks[of_tile][:, [BlockField.ROW, BlockField.RANK]]
        tiles[:, TileField.BASIS] = (
            blocks[of_tile, BlockField.BASIS] + tiles[:, TileField.COLUMN] - blocks[of_tile, BlockField.COLUMN]
        )
        tiles[:, TileField.BASIS_STRIDE] = blocks[of_tile, BlockField.COLUMNS]
        return tiles, blocks


def lay_out_tiles(layout: KVLayout, sections: Sequence[Section], angles: Mapping[Rope, int]) -> TileLayout:
    """Cut sections into tiles, each within one head of one unit and one block.

    `angles` has the first column of each RoPE in the rotation tables; a multiple of 4 allows faster loads.

    Raises:
        InputError: a block ends within a head.
    """
    longest = 1
    for layer in layout.layers:
        turned = layer.rope.rotary_dim if layer.rope else 0
        longest = max(longest, turned // 2, -(-(layer.head_dim - turned) // 2), -(-layer.value_dim // 2))
    pairs = min(max(1 << (longest - 1).bit_length(), MIN_PAIRS), MAX_PAIRS)
    tiles: list[list[int]] = []
    blocks: list[list[int]] = []
    order: list[npt.NDArray[np.int32]] = []
    bounds = [0]
    for index, section in enumerate(sections):
        ends = list(np.cumsum(section.blocks))
        # Heads in the order of the section's N values.
        heads = [
            (unit.first + head * unit.stride, head, unit)
            for unit in section.units(layout)
            for head in range(unit.heads)
        ]
        for value, head, unit in sorted(heads, key=lambda one: one[0]):
            if value == 0 or value == ends[0]:
                if value:
                    ends.pop(0)
                blocks.append([index, 0, 0, 0, len(tiles) * 2 * pairs, 0])
            if value + unit.size > ends[0]:
                raise InputError(f"sections[{index}]: must have blocks of whole heads, got an end within a head")
            block, number = len(blocks) - 1, 2 * unit.layer + unit.is_value
            rope = None if unit.is_value else layout.layers[unit.layer].rope
            for first, second, count0, count1, step, angle in _cut_head(unit.size, rope, angles, pairs):
                column = len(tiles) * 2 * pairs
                tiles.append(
                    [index, number, head, first, second, count0, count1, step, angle, 0, 0, 0, 0, column, block]
                )
                blocks[-1][BlockField.COLUMNS] += 2 * pairs
                tile_order = np.full((2, pairs), -1, np.int32)
                tile_order[0, :count0] = value + first + step * np.arange(count0)
                tile_order[1, :count1] = value + second + step * np.arange(count1)
                order.append(tile_order.ravel())
        bounds.append(len(tiles) * 2 * pairs)
    return TileLayout(
        np.array(tiles, np.int64),
        np.array(blocks, np.int64),
        len(tiles) * 2 * pairs,
        pairs,
        np.concatenate(order),
        np.array(bounds, np.int64),
    )


def _cut_head(
    size: int, rope: Rope | None, angles: Mapping[Rope, int], pairs: int
) -> list[tuple[int, int, int, int, int, int]]:
    """Return the tiles of a head: (DIM0, DIM1, COUNT0, COUNT1, STEP, ANGLE)."""
    cut = []
    turned = 0
    if rope is not None:
        turned = rope.rotary_dim
        for pair in range(0, turned // 2, pairs):
            count = min(pairs, turned // 2 - pair)
            first, second = (2 * pair, 2 * pair + 1) if rope.interleaved else (pair, turned // 2 + pair)
            cut.append((first, second, count, count, 2 if rope.interleaved else 1, angles[rope] + pair))
    for first in range(turned, size, 2 * pairs):
        count = min(2 * pairs, size - first)
        half = (count + 1) // 2
        cut.append((first, first + half, half, count - half, 1, -1))
    return cut

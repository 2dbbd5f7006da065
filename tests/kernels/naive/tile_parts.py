"""What the references of kernels over chunks and tiles share: one tile of one chunk at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tests.kernels.naive.pages import check_slots, half_views, load_pairs_reference, store_pairs_reference

from cuvee.kernels.jobs import ChunkField, TileField
from cuvee.kernels.ops.arguments import CacheView, ChunkBatch, TileTable

INTEGERS = {2: torch.int16, 4: torch.int32}  # by size in bytes


@dataclass(frozen=True, slots=True)
class TilePart:
    """One tile of one chunk.

    Attributes:
        job: its number.
        tokens: T.
        chunk: row of `chunks`.
        tile: row of `tiles`.
        place: row of `places`.
        scale: of the tile's unit.
        element: dtype of the cache.
        slots: `[T]`.
        exist: `[T]`: which slots lie in the cache.
        dims: `[n]`: dimensions of the head, the first of each pair before the second.
    """

    job: int
    tokens: int
    chunk: list[int]
    tile: list[int]
    place: list[int]
    scale: float
    element: torch.dtype
    slots: torch.Tensor
    exist: torch.Tensor
    dims: torch.Tensor

    def bits(self, dtype: torch.dtype) -> torch.Tensor:
        """The stored elements `[T, n]`, untouched; zero where there is none."""
        slots = self.slots[self.exist]
        halves = []
        for view in half_views(self.place, self.tile, INTEGERS[dtype.itemsize], self.slots.device):
            half = view.new_zeros(self.tokens, view.shape[2])
            half[self.exist] = view[slots // view.shape[1], slots % view.shape[1]]
            halves.append(half)
        return torch.cat(halves, dim=1).view(dtype)

    def values(self) -> torch.Tensor:
        """The values `[T, n]` float32."""
        count0, count1 = self.tile[TileField.COUNT0], self.tile[TileField.COUNT1]
        a, b = load_pairs_reference(
            self.place, self.scale, self.tile, self.slots, self.exist, self.element, max(count0, count1)
        )
        return torch.cat([a[:, :count0], b[:, :count1]], dim=1)

    def store(self, x: torch.Tensor, element: torch.dtype | None = None) -> None:
        """Write `[T, n]` as `element`, by default the cache's; bits stay as they are if it is an integer type."""
        count = self.tile[TileField.COUNT0]
        store_pairs_reference(
            self.place, self.scale, self.tile, self.slots, self.exist, (x[:, :count], x[:, count:]),
            element or self.element,
        )  # fmt: skip


def tile_parts(tiles: TileTable, batch: ChunkBatch, cache: CacheView) -> Iterator[TilePart]:
    """What the programs of a launch over chunks and tiles handle; flags slots beyond the cache."""
    for number, chunk in enumerate(batch.chunks.tolist()):
        for tile in tiles.tiles.tolist():
            job, unit = number * batch.sections + tile[TileField.SECTION] - batch.first_section, tile[TileField.UNIT]
            tokens, place = chunk[ChunkField.TOKENS], cache.places[unit].tolist()
            own = cache.slots[chunk[ChunkField.FIRST] : chunk[ChunkField.FIRST] + tokens]
            exist = check_slots(own, place, batch.status[job : job + 1])
            dims = torch.cat(
                [
                    tile[dim] + tile[TileField.STEP] * torch.arange(tile[count], device=own.device)
                    for dim, count in ((TileField.DIM0, TileField.COUNT0), (TileField.DIM1, TileField.COUNT1))
                ]
            )
            yield TilePart(job, tokens, chunk, tile, place, float(cache.scales[unit]), cache.element, own, exist, dims)


def turn_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn pairs `[T, n]`, the first of each in the left half."""
    a, b = x.chunk(2, dim=1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=1)

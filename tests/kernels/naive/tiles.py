"""What the references of kernels over chunks and tiles share: one tile of one chunk at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cuvee.codec.models.dtypes import saturated
from cuvee.kernels.jobs import ChunkField, PlaceField, Status, TileField
from cuvee.kernels.ops.arguments import CacheView, ChunkBatch, RotationTables, TileTable

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by size in bytes


class _Memory:
    """Elements at an address, for numpy and torch."""

    def __init__(self, pointer: int, shape: Sequence[int], strides: Sequence[int], size: int) -> None:
        interface = {
            "data": (pointer, False),
            "shape": tuple(shape),
            "strides": tuple(stride * size for stride in strides),
            "typestr": {1: "|u1", 2: "<i2", 4: "<i4"}[size],
            "version": 3,
        }
        self.__array_interface__ = self.__cuda_array_interface__ = interface


def _half(place: Sequence[int], tile: Sequence[int], dim: int, count: int, size: int, on: torch.device) -> torch.Tensor:
    """The bits `[blocks, tokens per block, count]` of a tile's first or second dimensions."""
    offset = tile[TileField.HEAD] * place[PlaceField.HEAD] + dim * place[PlaceField.DIM]
    memory: Any = _Memory(
        place[PlaceField.POINTER] + offset * size,
        (place[PlaceField.SLOTS] // place[PlaceField.BLOCK_TOKENS], place[PlaceField.BLOCK_TOKENS], count),
        (place[PlaceField.BLOCK], place[PlaceField.TOKEN], tile[TileField.STEP] * place[PlaceField.DIM]),
        size,
    )
    return torch.as_tensor(memory, device=on) if on.type == "cuda" else torch.from_numpy(np.asarray(memory))


@dataclass(frozen=True, slots=True)
class TilePart:
    """One tile of one chunk, and its T tokens.

    Attributes:
        job: its number.
        chunk: row of `chunks`.
        tile: row of `tiles`.
        at: the tokens, in `slots` and in the rows of x and of rotation tables.
        halves: bits of the first and of the second dimensions, `[blocks, tokens per block, count]`.
        scale: of the tile's unit.
        element: dtype of the cache.
        slots: of the tokens that have one.
        exist: `[T]`: which tokens these are.
        held: which of the tile's 2 * PAIRS columns hold its n values.
    """

    job: int
    chunk: list[int]
    tile: list[int]
    at: slice
    halves: list[torch.Tensor]
    scale: float
    element: torch.dtype
    slots: torch.Tensor
    exist: torch.Tensor
    held: torch.Tensor

    @property
    def tokens(self) -> int:
        """T."""
        return self.chunk[ChunkField.TOKENS]

    @property
    def dims(self) -> torch.Tensor:
        """The dimensions `[n]` of the head, the first of each pair before the second."""
        ranges = ((TileField.DIM0, TileField.COUNT0), (TileField.DIM1, TileField.COUNT1))
        return torch.cat(
            [
                self.tile[dim] + self.tile[TileField.STEP] * torch.arange(self.tile[count], device=self.slots.device)
                for dim, count in ranges
            ]
        )

    @property
    def columns(self) -> torch.Tensor:
        """The columns `[n]` of x and of the means."""
        return self.tile[TileField.COLUMN] + self.held

    def bits(self) -> torch.Tensor:
        """The stored elements `[T, n]`, untouched; zero where there is none."""
        found = [half.new_zeros(self.tokens, half.shape[2]) for half in self.halves]
        for own, half in zip(found, self.halves, strict=True):
            own[self.exist] = half[self.slots // half.shape[1], self.slots % half.shape[1]]
        return torch.cat(found, dim=1).view(self.element)

    def values(self) -> torch.Tensor:
        """The values `[T, n]` float32."""
        x = self.bits().float()
        return x * np.float32(self.scale).item() if self.element.itemsize == 1 else x

    def store(self, x: torch.Tensor) -> None:
        """Write `[T, n]`: elements of the cache's dtype as they are, float32 rounded to them, through the scale."""
        if x.dtype != self.element:
            narrow = self.element.itemsize == 1
            x = x * float(np.float32(1) / np.float32(self.scale)) if narrow else x
            x = saturated(x, self.element, None if narrow else ~x.isinf())
        raw = x.contiguous().view(INTEGERS[self.element.itemsize])[self.exist]
        for half, own in zip(self.halves, raw.split([half.shape[2] for half in self.halves], 1), strict=True):
            half[self.slots // half.shape[1], self.slots % half.shape[1]] = own

    def turned(self, x: torch.Tensor, tables: RotationTables, back: bool = False) -> torch.Tensor:
        """Turn pairs `[T, n]`, if the tile's do turn."""
        angle = self.tile[TileField.ANGLE]
        if angle < 0:
            return x
        a, b = x.chunk(2, dim=1)
        cos, sin = (table[self.at, angle : angle + a.shape[1]] for table in (tables.cos, tables.sin))
        sin = -sin if back else sin
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=1)

    def centers(self, means: torch.Tensor, center_rows: torch.Tensor | None) -> torch.Tensor:
        """The tokens' centers `[T, n]`."""
        first = self.chunk[ChunkField.SOURCE]
        rows = torch.arange(first, first + self.tokens, device=means.device).clamp_max(len(means) - 1)
        return means[rows if center_rows is None else center_rows[self.at].long()][:, self.columns]


def tile_parts(tiles: TileTable, batch: ChunkBatch, cache: CacheView) -> Iterator[TilePart]:
    """What the programs of a launch over chunks and tiles handle; flags slots beyond the cache."""
    places, scales, device = cache.places.tolist(), cache.scales.tolist(), cache.slots.device
    for number, chunk in enumerate(batch.chunks.tolist()):
        at = slice(chunk[ChunkField.FIRST], chunk[ChunkField.FIRST] + chunk[ChunkField.TOKENS])
        slots = cache.slots[at]
        for tile in tiles.tiles.tolist():
            job, place = number * batch.sections + tile[TileField.SECTION] - batch.first_section, tile[TileField.UNIT]
            total, counts = places[place][PlaceField.SLOTS], (tile[TileField.COUNT0], tile[TileField.COUNT1])
            if bool(((slots >= total) | (slots < -1)).any()):
                batch.status[job] |= int(Status.SLOT)
            exist = (slots >= 0) & (slots < total)
            halves = [
                _half(places[place], tile, dim, count, cache.element.itemsize, device)
                for dim, count in zip((tile[TileField.DIM0], tile[TileField.DIM1]), counts, strict=True)
            ]
            held = torch.cat([torch.arange(n) + tiles.pairs * half for half, n in enumerate(counts)]).to(device)
            yield TilePart(
                job, chunk, tile, at, halves, scales[place], cache.element, slots[exist], exist, held
            )  # fmt: skip

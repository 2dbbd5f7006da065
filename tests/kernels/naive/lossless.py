"""References of `merge_planes.py` and `split_planes.py`: same names with `_reference`, same signatures."""

from __future__ import annotations

import numpy as np
import torch
from tests.kernels.naive.tiles import TilePart, tile_parts

from cuvee.codec.entropy.tables import SYMBOLS, EntropyTables
from cuvee.codec.models.dtypes import saturated
from cuvee.codec.stages.reference.byte_planes import PROB_BITS, byte_planes, from_byte_planes
from cuvee.kernels.jobs import ChunkField, TileField
from cuvee.kernels.ops.arguments import CacheView, ChunkBatch, RotationTables, TileTable
from cuvee.kernels.ops.lossless import BytePlaneField
from cuvee.kernels.ops.rans import decoding_table


def _rows(part: TilePart, table: torch.Tensor, dtype: torch.dtype) -> tuple[int, list[list[int]], torch.Tensor]:
    """First row of `table` for a part, its rows, and the channels `[n]` of the part."""
    first = (2 * part.job + part.tile[TileField.UNIT] % 2) * dtype.itemsize
    rows = table[first : first + dtype.itemsize].tolist()
    return first, rows, part.tile[TileField.HEAD] * rows[0][BytePlaneField.HEAD_DIM] + part.dims


def _values(part: TilePart, channels: torch.Tensor) -> torch.Tensor:
    """Where in a plane the values `[n, T]` of channels lie."""
    return channels[:, None] * part.tokens + torch.arange(part.tokens, device=channels.device)


def _part_bytes(part: TilePart, dtype: torch.dtype) -> list[torch.Tensor]:
    """Byte planes `[n, T]` of a part, cut from the cache."""
    x = part.bits() if part.element == dtype else saturated(part.values(), dtype, part.values().isfinite())
    return [torch.from_numpy(plane).to(x.device) for plane in byte_planes(x.cpu())]


def decoding_tables_reference(freq: torch.Tensor, decoding: torch.Tensor) -> None:
    """`decoding_tables` on the host."""
    decoding.copy_(torch.from_numpy(decoding_table(EntropyTables(freq.cpu().numpy(), PROB_BITS))))


def merge_planes_reference(
    data: torch.Tensor,
    planes: torch.Tensor,
    table: torch.Tensor,
    tiles: TileTable,
    batch: ChunkBatch,
    cache: CacheView,
    source: RotationTables,
    target: RotationTables,
    *,
    dtype: torch.dtype,
    moved: bool,
    even: bool,
) -> None:
    """See `merge_planes`."""
    for part in tile_parts(tiles, batch, cache):
        _, rows, channels = _rows(part, table, dtype)
        at, parts = _values(part, channels), []
        for plane, reference, _ in rows:
            coded = reference >= 0
            parts.append(planes[plane + at] + data[reference + channels][:, None] if coded else data[plane + at])
        x = from_byte_planes([part.cpu().numpy() for part in parts], dtype).to(data.device)
        turns = part.tile[TileField.ANGLE] >= 0 and part.chunk[ChunkField.SOURCE] != part.chunk[ChunkField.TARGET]
        if moved and turns:
            pairs = x.isfinite().view(len(x), 2, -1).all(1).repeat(1, 2)
            x = saturated(part.turned(part.turned(x.float(), source, back=True), target), dtype, pairs)
        part.store(x if x.dtype == cache.element else x.float())


def sum_bytes_reference(
    table: torch.Tensor,
    tiles: TileTable,
    batch: ChunkBatch,
    cache: CacheView,
    sums: torch.Tensor,
    *,
    dtype: torch.dtype,
) -> None:
    """See `sum_bytes`."""
    for part in tile_parts(tiles, batch, cache):
        _, rows, channels = _rows(part, table, dtype)
        for row, plane in zip(rows, _part_bytes(part, dtype), strict=True):
            sums[row[BytePlaneField.REFERENCE] + channels] += plane.sum(1, dtype=torch.int64)


def count_symbols_reference(
    table: torch.Tensor,
    tiles: TileTable,
    batch: ChunkBatch,
    cache: CacheView,
    sums: torch.Tensor,
    references: torch.Tensor,
    counts: torch.Tensor,
    *,
    dtype: torch.dtype,
) -> None:
    """See `count_symbols`."""
    for part in tile_parts(tiles, batch, cache):
        first, rows, channels = _rows(part, table, dtype)
        for index, (row, plane) in enumerate(zip(rows, _part_bytes(part, dtype), strict=True)):
            at = row[BytePlaneField.REFERENCE] + channels
            mean = sums[at].cpu().numpy() / np.float64(part.tokens)
            references[at] = torch.from_numpy(np.rint(mean).astype(np.uint8)).to(references.device)
            symbols = plane - references[at][:, None]
            counts[first + index] += torch.bincount(symbols.flatten(), minlength=SYMBOLS).int()


def split_planes_reference(
    table: torch.Tensor,
    tiles: TileTable,
    batch: ChunkBatch,
    cache: CacheView,
    references: torch.Tensor,
    planes: torch.Tensor,
    out: torch.Tensor,
    *,
    dtype: torch.dtype,
    even: bool,
) -> None:
    """See `split_planes`."""
    for part in tile_parts(tiles, batch, cache):
        _, rows, channels = _rows(part, table, dtype)
        for (at, reference, _), plane in zip(rows, _part_bytes(part, dtype), strict=True):
            if reference >= 0:
                planes[at + _values(part, channels)] = plane - references[reference + channels][:, None]
            else:
                out[at + _values(part, channels)] = plane

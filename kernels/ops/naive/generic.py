"""Plain references of `ops/generic.py`: same names with `_reference`, same signatures."""

from __future__ import annotations

import torch

from cuvee.kernels.jobs import ChunkField, JobField, TileField
from cuvee.kernels.ops.arguments import CacheView, ChannelArrays, ChunkBatch, RotationTables, TileTable
from cuvee.kernels.ops.naive.tile_parts import tile_parts, turn_halves


def place_channels_reference(
    y: torch.Tensor,
    channels: ChannelArrays,
    jobs: torch.Tensor,
    tiles: TileTable,
    batch: ChunkBatch,
    rotations: RotationTables,
    cache: CacheView,
) -> None:
    """See `place_channels`; tile by tile."""
    for part in tile_parts(jobs, tiles, batch, cache):
        job = jobs[part.job].tolist()
        tile, chunk = part.tile, job[JobField.CHUNK]
        first = tile[TileField.COLUMN] - tiles.first_column
        second = first + tiles.pairs
        columns = [*range(first, first + tile[TileField.COUNT0]), *range(second, second + tile[TileField.COUNT1])]
        x = channels.means[chunk, columns].repeat(part.tokens, 1)
        for index, column in enumerate(columns):
            row = int(channels.rows[chunk, column])
            if row >= 0:
                at = job[JobField.LEVELS] + row * job[JobField.STRIDE]
                x[:, index] = y[at : at + part.tokens].float() * channels.scale[chunk, column] + x[:, index]
        if tile[TileField.ANGLE] >= 0:
            at = slice(part.chunk[ChunkField.FIRST], part.chunk[ChunkField.FIRST] + part.tokens)
            turned = slice(tile[TileField.ANGLE], tile[TileField.ANGLE] + tile[TileField.COUNT0])
            x = turn_halves(x, rotations.cos[at, turned], rotations.sin[at, turned])
        part.store(x)


def channel_statistics_reference(
    x: torch.Tensor, chunks: torch.Tensor, means: torch.Tensor, squares: torch.Tensor
) -> None:
    """See `channel_statistics`; as the codec does it."""
    for index, chunk in enumerate(chunks.tolist()):
        part = x[chunk[ChunkField.FIRST] : chunk[ChunkField.FIRST] + chunk[ChunkField.TOKENS]]
        means[index] = part.mean(0, dtype=torch.float64).bfloat16().float()
        squares[index] = (part - means[index]).double().square().sum(0)


def normalize_channels_reference(
    x: torch.Tensor,
    channels: ChannelArrays,
    jobs: torch.Tensor,
    tiles: TileTable,
    batch: ChunkBatch,
    y: torch.Tensor,
) -> None:
    """See `normalize_channels`; channel by channel."""
    for first in range(0, len(jobs), batch.sections):
        for tile in tiles.tiles.tolist():
            job = jobs[first + tile[TileField.SECTION] - batch.first_section].tolist()
            index, length = job[JobField.CHUNK], job[JobField.TOKENS]
            start, left = int(batch.chunks[index, ChunkField.FIRST]), tile[TileField.COLUMN] - tiles.first_column
            for column in range(left, left + 2 * tiles.pairs):
                row = int(channels.rows[index, column])
                if row >= 0:
                    at = job[JobField.LEVELS] + row * job[JobField.STRIDE]
                    centered = x[start : start + length, column] - channels.means[index, column]
                    y[at : at + length] = centered / channels.scale[index, column]

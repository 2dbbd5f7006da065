"""References of `transform.py`, `analyze.py`, `synthesize.py`: same names with `_reference`, same signatures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from tests.kernels.naive.tiles import tile_parts

from cuvee.codec.format.streams import WINDOW
from cuvee.codec.models.dtypes import saturated
from cuvee.kernels.jobs import BlockField, ChunkField, JobField, Status, TileField
from cuvee.kernels.ops.analyze import analysis_tokens
from cuvee.kernels.ops.arguments import CacheView, ChunkBatch, RotationTables, TileTable, TokenOrder
from cuvee.kernels.ops.synthesize import SynthesisConfig


def rotation_tables_reference(
    chunks: torch.Tensor,
    inv_freq: torch.Tensor,
    scaling: torch.Tensor,
    tables: RotationTables,
    use_source: bool,
    inverse: bool,
    max_tokens: int,
) -> None:
    """See `rotation_tables`."""
    scale = 1 / scaling if inverse else scaling
    for row in chunks.tolist():
        first, tokens = row[ChunkField.FIRST], min(row[ChunkField.TOKENS], max_tokens)
        start = row[ChunkField.SOURCE if use_source else ChunkField.TARGET]
        turn = torch.arange(start, start + tokens, device=inv_freq.device)[:, None].float() * inv_freq
        tables.cos[first : first + tokens] = turn.cos() * scale
        tables.sin[first : first + tokens] = turn.sin() * scale


def gather_reference(
    cache: CacheView,
    tiles: TileTable,
    batch: ChunkBatch,
    rotations: RotationTables,
    means: torch.Tensor,
    x: torch.Tensor,
    center_rows: torch.Tensor | None = None,
) -> None:
    """See `gather`."""
    for part in tile_parts(tiles, batch, cache):
        own = part.turned(part.values(), rotations, back=True)
        if not bool(own.isfinite().all()):
            batch.status[part.job] |= int(Status.NOT_FINITE)
        first = part.tile[TileField.COLUMN]
        x[part.at, first : first + 2 * tiles.pairs] = 0
        x[part.at, part.columns] = own - part.centers(means, center_rows)


def _tokens_of(job: Sequence[int], order: TokenOrder) -> torch.Tensor:
    """The token of each column of a job, counted from the chunk's first."""
    own = order.order[job[JobField.COLUMNS] :][: job[JobField.TOKENS]].long()
    return torch.arange(len(own), device=own.device) // WINDOW * WINDOW + own


def _ranks_of(job: Sequence[int], order: TokenOrder, block: int, size: int) -> Iterator[tuple[slice, int]]:
    """Runs of `size` columns of a job, and how many components of a block the first of each has."""
    classes = order.classes[job[JobField.COLUMNS] :][: job[JobField.TOKENS]].tolist()
    ranks = order.block_ranks[block].tolist()
    for start in range(0, len(classes), size):
        yield slice(start, min(start + size, len(classes))), ranks[classes[start]]


def _coefficients(y: torch.Tensor, job: Sequence[int], first: int, rank: int, tokens: int) -> torch.Tensor:
    """View `[rank, tokens]` of components `first …` of a job."""
    stride = job[JobField.STRIDE]
    return y.as_strided((rank, tokens), (stride, 1), y.storage_offset() + job[JobField.COEFFICIENTS] + first * stride)


def analyze_reference(
    x: torch.Tensor,
    jobs: torch.Tensor,
    blocks: torch.Tensor,
    basis: torch.Tensor,
    batch: ChunkBatch,
    y: torch.Tensor,
    max_rank: int,
    order: TokenOrder | None = None,
) -> None:
    """See `analyze`."""
    job_rows = jobs.tolist()
    for chunk, row in enumerate(batch.chunks.tolist()):
        own_x = x[row[ChunkField.FIRST] :][: row[ChunkField.TOKENS]]
        for index, block in enumerate(blocks.tolist()):
            job = job_rows[chunk * batch.sections + block[BlockField.SECTION] - batch.first_section]
            size, rank, column = block[BlockField.COLUMNS], block[BlockField.RANK], block[BlockField.COLUMN]
            matrix = basis[block[BlockField.BASIS] :][: rank * size].view(rank, size)
            values, runs = own_x[:, column : column + size], [(slice(0, len(own_x)), rank)]
            if order is not None:
                values = values[_tokens_of(job, order)]
                runs = list(_ranks_of(job, order, index, analysis_tokens(batch.max_tokens)))
            for run, own in runs:
                out = _coefficients(y, job, block[BlockField.ROW], own, len(own_x))
                out[:, run] = matrix[:own] @ values[run].T


def synthesize_reference(
    y: torch.Tensor,
    jobs: torch.Tensor,
    tiles: TileTable,
    basis: torch.Tensor,
    means: torch.Tensor,
    batch: ChunkBatch,
    rotations: RotationTables,
    cache: CacheView,
    order: TokenOrder,
    config: SynthesisConfig,
    center_rows: torch.Tensor | None = None,
) -> None:
    """See `synthesize`."""
    job_rows = jobs.tolist()
    for part in tile_parts(tiles, batch, cache):
        job, tile = job_rows[part.job], part.tile
        shape, strides = (tile[TileField.RANK], 2 * tiles.pairs), (tile[TileField.BASIS_STRIDE], 1)
        right = basis.as_strided(shape, strides, basis.storage_offset() + tile[TileField.BASIS]).float()[:, part.held]
        x = torch.empty(part.tokens, len(part.held), device=y.device)
        token = _tokens_of(job, order)
        for run, rank in _ranks_of(job, order, tile[TileField.BLOCK], config.block_t):
            left = _coefficients(y, job, tile[TileField.ROW], rank, part.tokens)
            x[token[run]] = left[:, run].float().T @ right[:rank]
        x = part.turned(x + part.centers(means, center_rows), rotations)
        part.store(saturated(x, torch.float32))

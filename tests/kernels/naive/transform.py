"""Plain references of `transform.py`, `analyze.py`, `synthesize.py`: same names with `_reference`, same signatures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from tests.kernels.naive.pages import check_slots, load_pairs_reference, store_pairs_reference

from cuvee.codec.format.streams import WINDOW
from cuvee.codec.models.dtypes import saturated
from cuvee.kernels.jobs import BlockField, ChunkField, JobField, Status, TileField
from cuvee.kernels.ops.analyze import analysis_tokens
from cuvee.kernels.ops.arguments import CacheView, ChunkBatch, RotationTables, TileTable, TokenOrder
from cuvee.kernels.ops.synthesize import SynthesisConfig, default_config


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
    pairs, cos, sin = tiles.pairs, rotations.cos, rotations.sin
    place_rows, unit_scales = cache.places.tolist(), cache.scales.tolist()
    for chunk, row in enumerate(batch.chunks.tolist()):
        at = slice(row[ChunkField.FIRST], row[ChunkField.FIRST] + row[ChunkField.TOKENS])
        mean = _centers(means, row, center_rows)
        for tile in tiles.tiles.tolist():
            place, unit_scale = place_rows[tile[TileField.UNIT]], unit_scales[tile[TileField.UNIT]]
            status = batch.status[chunk * batch.sections + tile[TileField.SECTION] - batch.first_section]
            exists = check_slots(cache.slots[at], place, status)
            a, b = load_pairs_reference(place, unit_scale, tile, cache.slots[at], exists, cache.element, pairs)
            if tile[TileField.ANGLE] >= 0:
                a, b = _turn(a, b, cos[at], -sin[at], tile[TileField.ANGLE])
            both = torch.cat([a, b], 1)
            if not bool(both.isfinite().all()):
                status |= int(Status.NOT_FINITE)
            both -= mean[:, tile[TileField.COLUMN] : tile[TileField.COLUMN] + 2 * pairs]
            both[:, tile[TileField.COUNT0] : pairs] = 0
            both[:, pairs + tile[TileField.COUNT1] :] = 0
            first = tile[TileField.COLUMN]
            x[at, first : first + 2 * pairs] = both


def _centers(means: torch.Tensor, chunk: Sequence[int], center_rows: torch.Tensor | None) -> torch.Tensor:
    """Centers `[T, M]` of a chunk's tokens."""
    first, tokens, start = chunk[ChunkField.FIRST], chunk[ChunkField.TOKENS], chunk[ChunkField.SOURCE]
    if center_rows is not None:
        return means[center_rows[first : first + tokens].long()]
    return means[torch.arange(start, start + tokens, device=means.device).clamp_max(len(means) - 1)]


def _turn(
    a: torch.Tensor, b: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, angle: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `turn_pairs` computes."""
    width = min(a.shape[1], cos.shape[1] - angle)
    c, s = torch.zeros_like(a), torch.zeros_like(a)
    c[:, :width], s[:, :width] = cos[:, angle : angle + width], sin[:, angle : angle + width]
    return a * c - b * s, b * c + a * s


def _tokens_of(job: Sequence[int], order: TokenOrder) -> torch.Tensor:
    """The token of each column of a job, counted from the chunk's first."""
    own = order.order[job[JobField.COLUMNS] :][: job[JobField.TOKENS]].long()
    place = torch.arange(len(own), device=own.device)
    return place // WINDOW * WINDOW + own


def _ranks_of(job: Sequence[int], order: TokenOrder, block: int, size: int) -> Iterator[tuple[slice, int]]:
    """Runs of `size` columns of a job, and how many components of a block the first of each has."""
    classes = order.classes[job[JobField.COLUMNS] :][: job[JobField.TOKENS]].tolist()
    ranks = order.block_ranks[block].tolist()
    for start in range(0, len(classes), size):
        yield slice(start, min(start + size, len(classes))), ranks[classes[start]]


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
    block_t = analysis_tokens(batch.max_tokens)
    for chunk, row in enumerate(batch.chunks.tolist()):
        at, tokens = (
            slice(row[ChunkField.FIRST], row[ChunkField.FIRST] + row[ChunkField.TOKENS]),
            row[ChunkField.TOKENS],
        )
        for index, block in enumerate(blocks.tolist()):
            job = job_rows[chunk * batch.sections + block[BlockField.SECTION] - batch.first_section]
            size, rank, column = (
                block[BlockField.COLUMNS],
                block[BlockField.RANK],
                block[BlockField.COLUMN],
            )
            matrix = basis[block[BlockField.BASIS] :][: rank * size].view(rank, size)
            values = x[at, column : column + size]
            if order is None:
                _coefficients(y, job, block[BlockField.ROW], rank, tokens).copy_(matrix @ values.T)
                continue
            values = values[_tokens_of(job, order)]
            for run, own in _ranks_of(job, order, index, block_t):
                out = _coefficients(y, job, block[BlockField.ROW], own, tokens)
                out[:, run] = matrix[:own] @ values[run].T


def _coefficients(y: torch.Tensor, job: Sequence[int], first: int, rank: int, tokens: int) -> torch.Tensor:
    """View `[rank, tokens]` of components `first …` of a job."""
    stride = job[JobField.STRIDE]
    return y.as_strided((rank, tokens), (stride, 1), y.storage_offset() + job[JobField.COEFFICIENTS] + first * stride)


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
    config: SynthesisConfig | None = None,
    center_rows: torch.Tensor | None = None,
) -> None:
    """See `synthesize`."""
    block_t = (config or default_config(y.dtype, batch, cache)).block_t
    pairs, cos, sin = tiles.pairs, rotations.cos, rotations.sin
    place_rows, unit_scales, job_rows = cache.places.tolist(), cache.scales.tolist(), jobs.tolist()
    for chunk, row in enumerate(batch.chunks.tolist()):
        at, tokens = (
            slice(row[ChunkField.FIRST], row[ChunkField.FIRST] + row[ChunkField.TOKENS]),
            row[ChunkField.TOKENS],
        )
        slots, mean = cache.slots[at], _centers(means, row, center_rows)
        for tile in tiles.tiles.tolist():
            index = chunk * batch.sections + tile[TileField.SECTION] - batch.first_section
            job = job_rows[index]
            right = basis.as_strided(
                (tile[TileField.RANK], 2 * pairs),
                (tile[TileField.BASIS_STRIDE], 1),
                basis.storage_offset() + tile[TileField.BASIS],
            ).float()
            both = torch.empty(tokens, 2 * pairs, device=y.device)
            token = _tokens_of(job, order)
            for run, rank in _ranks_of(job, order, tile[TileField.BLOCK], block_t):
                left = _coefficients(y, job, tile[TileField.ROW], rank, tokens)
                both[token[run]] = left[:, run].float().T @ right[:rank]
            both = both + mean[:, tile[TileField.COLUMN] : tile[TileField.COLUMN] + 2 * pairs]
            a, b = both[:, :pairs], both[:, pairs:]
            if tile[TileField.ANGLE] >= 0:
                a, b = _turn(a, b, cos[at], sin[at], tile[TileField.ANGLE])
            a, b = saturated(a, torch.float32), saturated(b, torch.float32)
            place, unit_scale = place_rows[tile[TileField.UNIT]], unit_scales[tile[TileField.UNIT]]
            exists = check_slots(slots, place, batch.status[index])
            store_pairs_reference(place, unit_scale, tile, slots, exists, (a, b), cache.element)

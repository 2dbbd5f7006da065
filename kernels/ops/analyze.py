"""The linear map from a cache to coefficients.

cache --gather: un-rotate, center--> x [tokens, M] --analyze: y = forward x--> y [R, STRIDE] per job
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cuvee.kernels.jobs import BLOCK, CHUNK, ELEMENTS, JOB, STATUS, TILE
from cuvee.kernels.ops.arguments import (
    CacheView,
    CenterTable,
    ChunkBatch,
    JobCoefficients,
    TileTable,
    TokenOrder,
)
from cuvee.kernels.ops.pages import load_pairs, rotate_pairs, token_offsets
from cuvee.kernels.ops.transform import _sorted_columns

GATHER_TOKENS = 64
ANALYSIS_ROWS, ANALYSIS_TOKENS, ANALYSIS_COLUMNS = 128, 64, 32  # a step of `analyze`: what fits registers
_GATHER_TOKENS = tl.constexpr(GATHER_TOKENS)
_COLUMNS = tl.constexpr(ANALYSIS_COLUMNS)
INFINITY = tl.constexpr(float("inf"))


@triton.jit(do_not_specialize=["sections", "sinks"])
def _gather(  # type: ignore[no-untyped-def]
    tiles, means, center_rows, chunks, slots, turns, units, x, status, sections, sinks, columns, angles,
    ELEMENT: tl.constexpr, UNIT_STRIDE: tl.constexpr, ALIGNED: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(0) * TILE.FIELDS
    chunk_index = tl.program_id(2)
    chunk = chunks + chunk_index * CHUNK.FIELDS
    tokens = tl.load(chunk + CHUNK.TOKENS).to(tl.int32)
    start = tl.program_id(1) * _GATHER_TOKENS
    if start >= tokens:
        return
    token = start + tl.arange(0, _GATHER_TOKENS)
    inside = token < tokens
    job_status = status + chunk_index * sections + tl.load(tile + TILE.SECTION)
    row = tl.load(chunk + CHUNK.FIRST) + token
    offset, exists = token_offsets(units, tl.load(tile + TILE.UNIT), slots, row, inside, job_status)
    a, b = load_pairs(units, tile, offset, exists, ELEMENT, UNIT_STRIDE, PAIRS, ALIGNED)
    angle = tl.load(tile + TILE.ANGLE)
    if angle >= 0:
        a, b = rotate_pairs(a, b, turns, row, inside, angles, angle, PAIRS, True, ALIGNED)
    finite = (tl.abs(a) < INFINITY) & (tl.abs(b) < INFINITY)
    bad = tl.max(tl.max(tl.where(finite, 0, 1), 1), 0)
    tl.atomic_or(job_status, STATUS.NOT_FINITE, mask=bad > 0)
    pair = tl.arange(0, PAIRS)
    column = tl.multiple_of(tl.load(tile + TILE.COLUMN), 2 * PAIRS)
    if center_rows is not None:
        center = tl.load(center_rows + row, mask=inside, other=0).to(tl.int64)
    else:
        center = tl.minimum(tl.load(chunk + CHUNK.SOURCE) + token, sinks)
    mean = means + (center * columns + column)[:, None] + pair[None, :]
    a -= tl.load(mean, mask=inside[:, None], other=0.0)
    b -= tl.load(mean + PAIRS, mask=inside[:, None], other=0.0)
    has0, has1 = pair < tl.load(tile + TILE.COUNT0), pair < tl.load(tile + TILE.COUNT1)
    out = x + (row * columns + column)[:, None] + pair[None, :]
    tl.store(out, tl.where(has0[None, :], a, 0.0), mask=inside[:, None])
    tl.store(out + PAIRS, tl.where(has1[None, :], b, 0.0), mask=inside[:, None])


def gather(
    cache: CacheView,
    tiles: TileTable,
    batch: ChunkBatch,
    turns: torch.Tensor,
    centers: CenterTable,
    x: torch.Tensor,
) -> None:
    """Read a cache into columns: un-rotate, then subtract the mean of the token's position, or its center.

    A program reads GATHER_TOKENS tokens of one tile. It flags NaN and infinities after un-rotation
    (Status.NOT_FINITE), and a slot beyond the cache (Status.SLOT), which reads as zero, as -1 does.

    Args:
        turns: from `rotation_tables(source=True)`.
        x: float32 `[tokens, M]`, written in rows ChunkField.FIRST …, columns TileField.COLUMN …;
            padded columns become zero.
    """
    means = centers.table
    _gather[(len(tiles.tiles), triton.cdiv(batch.max_tokens, GATHER_TOKENS), len(batch.chunks))](
        tiles.tiles, means, centers.rows, batch.chunks, cache.slots, turns, cache.units, x, batch.status,
        batch.sections, len(means) - 1, means.shape[1], turns.shape[2], ELEMENT=ELEMENTS[cache.element],
        UNIT_STRIDE=cache.unit_stride, ALIGNED=cache.aligned, PAIRS=tiles.pairs, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["sections", "rank_blocks"])
def _analyze(  # type: ignore[no-untyped-def]
    x, jobs, blocks, basis, chunks, y, classes, order, block_ranks, sections, width, rank_blocks,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Programs that share tokens run together, then those that share a basis.
    token_block = tl.program_id(0) // rank_blocks
    rank_block = tl.program_id(0) - token_block * rank_blocks
    chunk_index, block_index = tl.program_id(1), tl.program_id(2)
    block = blocks + block_index * BLOCK.FIELDS
    chunk = chunks + chunk_index * CHUNK.FIELDS
    job = jobs + (chunk_index * sections + tl.load(block + BLOCK.SECTION)) * JOB.FIELDS
    tokens = tl.load(chunk + CHUNK.TOKENS).to(tl.int32)
    start = token_block * BLOCK_T
    if start >= tokens:
        return
    column = start + tl.arange(0, BLOCK_T)
    inside = column < tokens
    if order is not None:
        token, rank = _sorted_columns(job, block_index, start, column, inside, classes, order, block_ranks)
    else:
        token, rank = column, tl.load(block + BLOCK.RANK).to(tl.int32)
    if rank_block * BLOCK_R >= rank:
        return
    row = rank_block * BLOCK_R + tl.arange(0, BLOCK_R)
    k = tl.arange(0, _COLUMNS)
    size = tl.multiple_of(tl.load(block + BLOCK.COLUMNS).to(tl.int32), _COLUMNS)
    coded = row < rank
    value = tl.multiple_of(tl.load(block + BLOCK.COLUMN), _COLUMNS)
    x_at = x + ((tl.load(chunk + CHUNK.FIRST) + token) * width + value)[:, None] + k[None, :]
    basis_at = basis + tl.multiple_of(tl.load(block + BLOCK.BASIS), _COLUMNS)
    basis_at = basis_at + (row.to(tl.int64) * size)[:, None] + k[None, :]
    acc = tl.zeros((BLOCK_R, BLOCK_T), tl.float32)
    for _ in range(0, size, _COLUMNS):
        left = tl.load(basis_at, mask=coded[:, None], other=0.0)
        right = tl.load(x_at, mask=inside[:, None], other=0.0)
        acc = tl.dot(left, tl.trans(right), acc, input_precision=PRECISION)
        basis_at += _COLUMNS
        x_at += _COLUMNS
    out = y + tl.load(job + JOB.COEFFICIENTS) + (tl.load(block + BLOCK.ROW) + row)[:, None] * tl.load(job + JOB.STRIDE)
    tl.store(out + column[None, :], acc, mask=coded[:, None] & inside[None, :])


def analyze(
    x: torch.Tensor,
    blocks: torch.Tensor,
    basis: torch.Tensor,
    batch: ChunkBatch,
    y: JobCoefficients,
    max_rank: int,
    order: TokenOrder | None = None,
) -> None:
    """Compute coefficients of centered values: `SectionBasis.analyze` for every block of every chunk.

    Rounding to bfloat16 would add an error of the order of the quantizer's step; three TF32 products (NVIDIA) or
    float32 arithmetic (AMD) do not.

    Args:
        x: float32 `[tokens, width]` from `gather`.
        blocks: int64 `[blocks, len(BlockField)]`: those of the batch's sections.
        basis: float32; `[BlockField.RANK, BlockField.COLUMNS]` at BlockField.BASIS, padded columns zero.
        y: float32; of a job, rows BlockField.ROW … are written, and tokens 0 … T - 1.
        order: column i of the coefficients is the token that it names, and rows of a block that none of 64 columns has
            are not written; row i of `block_ranks` is row i of `blocks`. None: columns are the tokens, with all rows.
    """
    block_r = min(max(triton.next_power_of_2(max_rank), 16), ANALYSIS_ROWS)
    block_t = analysis_tokens(batch.max_tokens)
    rank_blocks, token_blocks = triton.cdiv(max_rank, block_r), triton.cdiv(batch.max_tokens, block_t)
    grid = (rank_blocks * token_blocks, len(batch.chunks), len(blocks))
    if 0 in grid:
        return
    arrays = (None, None, None) if order is None else (order.classes, order.order, order.block_ranks)
    _analyze[grid](
        x, y.jobs, blocks, basis, batch.chunks, y.values, *arrays, batch.sections, x.stride(0), rank_blocks,
        BLOCK_T=block_t, BLOCK_R=block_r, PRECISION="ieee" if torch.version.hip else "tf32x3", num_warps=8,
        num_stages=3, enable_fp_fusion=True,
    )  # fmt: skip


def analysis_tokens(max_tokens: int) -> int:
    """Return the tokens that a program of `analyze` takes at a time."""
    return int(min(max(triton.next_power_of_2(max_tokens), 16), ANALYSIS_TOKENS))

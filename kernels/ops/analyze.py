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
    RotationTables,
    TileTable,
    TokenOrder,
)
from cuvee.kernels.ops.pages import load_pairs, rotate_pairs, token_offsets
from cuvee.kernels.ops.transform import _sorted_columns

GATHER_TOKENS = 64
ANALYSIS_ROWS, ANALYSIS_TOKENS, ANALYSIS_COLUMNS = 128, 64, 32  # a step of `analyze`: what fits registers
INFINITY = tl.constexpr(float("inf"))


@triton.jit(do_not_specialize=["sections", "first_section", "sinks"])
def _gather(  # type: ignore[no-untyped-def]
    tiles, means, center_rows, chunks, slots, cos, sin, units, scales, x, status, sections, first_section, sinks,
    columns, width, angles, BLOCK_T: tl.constexpr, ELEMENT: tl.constexpr, UNIT_STRIDE: tl.constexpr,
    ALIGNED: tl.constexpr, PAIRS: tl.constexpr, PREDICTED: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(0) * TILE.FIELDS
    chunk_index = tl.program_id(2)
    chunk = chunks + chunk_index * CHUNK.FIELDS
    tokens = tl.load(chunk + CHUNK.TOKENS).to(tl.int32)
    start = tl.program_id(1) * BLOCK_T
    if start >= tokens:
        return
    token = start + tl.arange(0, BLOCK_T)
    inside = token < tokens
    section = tl.load(tile + TILE.SECTION)
    job_status = status + chunk_index * sections + (section - first_section)
    row = tl.load(chunk + CHUNK.FIRST) + token
    offset, exists = token_offsets(units, tl.load(tile + TILE.UNIT), slots, row, inside, job_status)
    a, b = load_pairs(units, scales, tile, offset, exists, ELEMENT, UNIT_STRIDE, PAIRS, ALIGNED)
    angle = tl.load(tile + TILE.ANGLE)
    if angle >= 0:
        a, b = rotate_pairs(a, b, cos, sin, row, inside, angles, angle, PAIRS, True, ALIGNED)
    finite = (tl.abs(a) < INFINITY) & (tl.abs(b) < INFINITY)
    bad = tl.max(tl.max(tl.where(finite, 0, 1), 1), 0)
    tl.atomic_or(job_status, STATUS.NOT_FINITE, mask=bad > 0)
    pair = tl.arange(0, PAIRS)
    column = tl.multiple_of(tl.load(tile + TILE.COLUMN), 2 * PAIRS)
    if PREDICTED:
        center = tl.load(center_rows + row, mask=inside, other=0).to(tl.int64)
    else:
        center = tl.minimum(tl.load(chunk + CHUNK.SOURCE) + token, sinks)
    mean = means + (center * columns + column)[:, None] + pair[None, :]
    a -= tl.load(mean, mask=inside[:, None], other=0.0)
    b -= tl.load(mean + PAIRS, mask=inside[:, None], other=0.0)
    has0, has1 = pair < tl.load(tile + TILE.COUNT0), pair < tl.load(tile + TILE.COUNT1)
    out = x + (row * width + column)[:, None] + pair[None, :]
    tl.store(out, tl.where(has0[None, :], a, 0.0), mask=inside[:, None])
    tl.store(out + PAIRS, tl.where(has1[None, :], b, 0.0), mask=inside[:, None])


def gather(
    cache: CacheView,
    tiles: TileTable,
    batch: ChunkBatch,
    rotations: RotationTables,
    centers: CenterTable,
    x: torch.Tensor,
) -> None:
    """Read a cache into columns: un-rotate, then subtract the mean of the token's position, or its center.

    A program reads GATHER_TOKENS tokens of one tile. It flags NaN and infinities after un-rotation
    (Status.NOT_FINITE), and a slot beyond the cache (Status.SLOT), which reads as zero, as -1 does.

    Args:
        rotations: from `rotation_tables(inverse=True)`, by source positions.
        x: float32 `[tokens, width]`, written in rows ChunkField.FIRST …, columns TileField.COLUMN …;
            padded columns become zero.
    """
    means = centers.table
    _gather[(len(tiles.tiles), triton.cdiv(batch.max_tokens, GATHER_TOKENS), len(batch.chunks))](
        tiles.tiles, means, centers.rows, batch.chunks, cache.slots, rotations.cos, rotations.sin, cache.units,
        cache.scales, x, batch.status, batch.sections, batch.first_section, len(means) - 1, means.stride(0),
        x.stride(0), rotations.cos.shape[1], BLOCK_T=GATHER_TOKENS, ELEMENT=ELEMENTS[cache.element],
        UNIT_STRIDE=cache.unit_stride, ALIGNED=cache.aligned, PAIRS=tiles.pairs, PREDICTED=centers.rows is not None,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["sections", "first_section", "rank_blocks", "token_blocks", "chunk_count"])
def _analyze(  # type: ignore[no-untyped-def]
    x, jobs, blocks, basis, chunks, y, classes, order, block_ranks, sections, first_section, width,
    rank_blocks, token_blocks, chunk_count, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    # Programs that share tokens run together, then those that share a basis.
    program = tl.program_id(0)
    rank_block = program % rank_blocks
    rest = program // rank_blocks
    token_block = rest % token_blocks
    rest = rest // token_blocks
    chunk_index = rest % chunk_count
    block_index = rest // chunk_count
    block = blocks + block_index * BLOCK.FIELDS
    chunk = chunks + chunk_index * CHUNK.FIELDS
    job = jobs + (chunk_index * sections + tl.load(block + BLOCK.SECTION) - first_section) * JOB.FIELDS
    tokens = tl.load(chunk + CHUNK.TOKENS).to(tl.int32)
    start = token_block * BLOCK_T
    if start >= tokens:
        return
    column = start + tl.arange(0, BLOCK_T)
    inside = column < tokens
    if SORTED:
        token, rank = _sorted_columns(job, block_index, start, column, inside, classes, order, block_ranks)
    else:
        token, rank = column, tl.load(block + BLOCK.RANK).to(tl.int32)
    if rank_block * BLOCK_R >= rank:
        return
    row = rank_block * BLOCK_R + tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    size = tl.multiple_of(tl.load(block + BLOCK.COLUMNS).to(tl.int32), BLOCK_K)
    coded = row < rank
    value = tl.multiple_of(tl.load(block + BLOCK.COLUMN), BLOCK_K)
    x_at = x + ((tl.load(chunk + CHUNK.FIRST) + token) * width + value)[:, None] + k[None, :]
    basis_at = basis + tl.multiple_of(tl.load(block + BLOCK.BASIS), BLOCK_K)
    basis_at = basis_at + (row.to(tl.int64) * size)[:, None] + k[None, :]
    acc = tl.zeros((BLOCK_R, BLOCK_T), tl.float32)
    for _ in range(0, size, BLOCK_K):
        left = tl.load(basis_at, mask=coded[:, None], other=0.0)
        right = tl.load(x_at, mask=inside[:, None], other=0.0)
        acc = tl.dot(left, tl.trans(right), acc, input_precision=PRECISION)
        basis_at += BLOCK_K
        x_at += BLOCK_K
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
    grid = (len(blocks) * len(batch.chunks) * rank_blocks * token_blocks,)
    if not grid[0]:
        return
    arrays = (None, None, None) if order is None else (order.classes, order.order, order.block_ranks)
    _analyze[grid](
        x, y.jobs, blocks, basis, batch.chunks, y.values, *arrays, batch.sections, batch.first_section,
        x.stride(0), rank_blocks, token_blocks, len(batch.chunks), BLOCK_T=block_t, BLOCK_R=block_r,
        BLOCK_K=ANALYSIS_COLUMNS, PRECISION="ieee" if torch.version.hip else "tf32x3",
        SORTED=order is not None, num_warps=8, num_stages=3, enable_fp_fusion=True,
    )  # fmt: skip


def analysis_tokens(max_tokens: int) -> int:
    """Return the tokens that a program of `analyze` takes at a time."""
    return int(min(max(triton.next_power_of_2(max_tokens), 16), ANALYSIS_TOKENS))

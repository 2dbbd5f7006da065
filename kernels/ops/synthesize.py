"""The linear map from coefficients to a cache.

y --synthesize: inverse y, + mean, rotate, round--> cache
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from cuvee.kernels.jobs import CHUNK, ELEMENTS, JOB, TILE
from cuvee.kernels.ops.arguments import (
    CacheView,
    CenterTable,
    ChunkBatch,
    JobCoefficients,
    TileTable,
    TokenOrder,
)
from cuvee.kernels.ops.pages import rotate_pairs, saturated, store_pairs, token_offsets
from cuvee.kernels.ops.transform import _WINDOW, _sorted_columns

MAX_GROUP = 32  # tiles that run together: all of a section of two layers of 8 heads


@dataclass(frozen=True, slots=True)
class SynthesisConfig:
    """Launch configuration of `synthesize`: tokens and components per step, and Triton's num_warps and num_stages."""

    block_t: int
    block_r: int
    num_warps: int
    num_stages: int


HIP_STAGES = 2  # as many as fit the 64 KB of shared memory of AMD's multiprocessors
# Older releases of Triton let tensor cores read what asynchronous copies have brought without the fence that makes it
# visible to them (mended in 3.7.1). With one stage, nothing is copied asynchronously.
FENCED = tuple(int(number) for number in triton.__version__.split(".")[:2]) >= (3, 8)
# `synthesis_config` chooses among these by shape alone; callers may pass a measured choice instead.
SYNTHESIS_CONFIGS = (
    SynthesisConfig(256, 64, 8, 3),  # long sums: the fewest bytes per product from L2
    SynthesisConfig(128, 64, 8, 3),
    SynthesisConfig(64, 64, 4, 3),  # three programs per multiprocessor: one stores while others multiply
    SynthesisConfig(64, 32, 8, 2),  # short sums: memory is the limit, the more warps the better
    SynthesisConfig(128, 32, 8, 3),  # coefficients of four bytes
    SynthesisConfig(32, 32, 4, 2),
    SynthesisConfig(16, 32, 4, 2),
)


def product_precision(dtype: torch.dtype, element: torch.dtype) -> str:
    """Return Triton's `input_precision` for coefficients of `dtype` that become `element`.

    float16 has as many significant bits as a TF32 factor, 11. Tensor cores cut factors off there, so a value is wrong
    by an ulp or so of the token's largest. float32 gets float32 products. AMD has no TF32, and some of its
    compilers refuse the word for bfloat16 coefficients too, whose products are the same under any.
    """
    return "ieee" if torch.version.hip or (dtype == torch.float32 and element != torch.float16) else "tf32"


def synthesis_config(
    dtype: torch.dtype, element: torch.dtype, max_rank: int, max_tokens: int, aligned: bool = True
) -> SynthesisConfig:
    """Return the config for coefficients of `dtype` that become `element`.

    Blocks have at most `max_rank` components, chunks `max_tokens` tokens. `aligned` as in `synthesize`: narrow stores
    need registers that the longest step does not leave.
    """
    long, usual, narrow, short, wide, exact, few = SYNTHESIS_CONFIGS
    if max_tokens <= 16:
        return few
    if dtype == torch.float32:
        # Without matrix instructions products take registers, and leave few for the sums.
        return wide if product_precision(dtype, element) == "tf32" and max_tokens > 32 else exact
    if max_rank <= 128:
        return short
    if max_tokens <= 64:
        return narrow
    return usual if max_tokens <= 128 or not aligned else long


@triton.jit
def _finish(  # type: ignore[no-untyped-def]
    a, b, means, center_rows, chunk, start, turns, row, inside, units, tile, offset, exists, sinks, columns, angles,
    ELEMENT: tl.constexpr, UNIT_STRIDE: tl.constexpr, ALIGNED: tl.constexpr, PAIRS: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Add centers to half of a tile's pairs, from FIRST on, turn and store them; no token comes before `start`."""
    HALF: tl.constexpr = PAIRS // 2
    pair = FIRST + tl.arange(0, HALF)
    mean = means + tl.multiple_of(tl.load(tile + TILE.COLUMN), 2 * PAIRS)
    if center_rows is not None:
        center = tl.load(center_rows + row, mask=inside, other=0).to(tl.int64)
        addresses = mean + (center * columns)[:, None] + pair[None, :]
        a += tl.load(addresses)
        b += tl.load(addresses + PAIRS)
    else:
        position = tl.load(chunk + CHUNK.SOURCE)
        if position + start >= sinks:
            mean += sinks * columns
            a += tl.load(mean + pair)[None, :]
            b += tl.load(mean + PAIRS + pair)[None, :]
        else:
            source = tl.minimum(row - tl.load(chunk + CHUNK.FIRST) + position, sinks).to(tl.int32)
            addresses = mean + (source * columns)[:, None] + pair[None, :]
            a += tl.load(addresses)
            b += tl.load(addresses + PAIRS)
    angle = tl.load(tile + TILE.ANGLE)
    if angle >= 0:
        a, b = rotate_pairs(a, b, turns, row, inside, angles, angle + FIRST, HALF, False, ALIGNED)
    a, b = saturated(a, True, ELEMENT), saturated(b, True, ELEMENT)
    store_pairs(units, tile, offset, exists, a, b, ELEMENT, UNIT_STRIDE, HALF, ALIGNED, FIRST)


@triton.jit(do_not_specialize=["sections", "tile_count", "group", "sinks"])
def _synthesize(  # type: ignore[no-untyped-def]
    y, jobs, tiles, basis, means, center_rows, chunks, slots, turns, units, status, classes, order, block_ranks,
    sections, tile_count, group, sinks, columns, angles, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
    ELEMENT: tl.constexpr, UNIT_STRIDE: tl.constexpr, ALIGNED: tl.constexpr, PAIRS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    # `group` tiles, usually a section's, share the coefficients of a block of tokens: they run together. The blocks
    # of tokens of all chunks follow, which share the group's bases.
    token_block = tl.program_id(0) // group
    number = tl.program_id(2) * group + (tl.program_id(0) - token_block * group)
    start = token_block * BLOCK_T
    chunk_index = tl.program_id(1)
    chunk = chunks + chunk_index * CHUNK.FIELDS
    tokens = tl.load(chunk + CHUNK.TOKENS).to(tl.int32)
    if (start >= tokens) | (number >= tile_count):
        return
    tile = tiles + number * TILE.FIELDS
    job_index = chunk_index * sections + tl.load(tile + TILE.SECTION)
    job = jobs + job_index * JOB.FIELDS
    column = start + tl.arange(0, BLOCK_T)
    inside = column < tokens
    # Columns are sorted: the first of them has the most components.
    token, rank = _sorted_columns(job, tl.load(tile + TILE.BLOCK), start, column, inside, classes, order, block_ranks)
    first_token = start // _WINDOW * _WINDOW
    component = tl.arange(0, BLOCK_R)
    stride = tl.multiple_of(tl.load(job + JOB.STRIDE), 16)
    y_at = y + tl.multiple_of(tl.load(job + JOB.COEFFICIENTS), 16) + tl.load(tile + TILE.ROW) * stride
    y_at = y_at + (component * stride)[:, None] + column[None, :]
    basis_stride = tl.multiple_of(tl.load(tile + TILE.BASIS_STRIDE), 2 * PAIRS)
    basis_at = basis + tl.multiple_of(tl.load(tile + TILE.BASIS), 2 * PAIRS)
    basis_at = basis_at + (component * basis_stride)[:, None] + tl.arange(0, 2 * PAIRS)[None, :]
    # Columns T … STRIDE - 1 hold anything; they are computed and not stored.
    readable = (column < stride)[None, :]
    acc = tl.zeros((BLOCK_T, 2 * PAIRS), tl.float32)
    for done in range(0, rank, BLOCK_R):
        coded = (component < rank - done)[:, None]
        left = tl.load(y_at, mask=coded & readable, other=0.0)
        right = tl.load(basis_at, mask=coded, other=0.0)
        acc = tl.dot(tl.trans(left), right, acc, input_precision=PRECISION)
        y_at += BLOCK_R * stride
        basis_at += BLOCK_R * basis_stride
    row = tl.load(chunk + CHUNK.FIRST) + token
    offset, exists = token_offsets(units, tl.load(tile + TILE.UNIT), slots, row, inside, status + job_index)
    # One half of the pairs after the other: means, angles and addresses of all would not fit registers.
    HALF: tl.constexpr = PAIRS // 2
    left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_T, 2, 2, HALF)), (0, 1, 3, 2)))
    a, b = tl.split(tl.permute(left, (0, 2, 1)))
    _finish(
        a, b, means, center_rows, chunk, first_token, turns, row, inside, units, tile, offset, exists, sinks, columns,
        angles, ELEMENT, UNIT_STRIDE, ALIGNED, PAIRS, 0,
    )  # fmt: skip
    a, b = tl.split(tl.permute(right, (0, 2, 1)))
    _finish(
        a, b, means, center_rows, chunk, first_token, turns, row, inside, units, tile, offset, exists, sinks, columns,
        angles, ELEMENT, UNIT_STRIDE, ALIGNED, PAIRS, HALF,
    )  # fmt: skip


def synthesize(
    y: JobCoefficients,
    tiles: TileTable,
    basis: torch.Tensor,
    centers: CenterTable,
    batch: ChunkBatch,
    turns: torch.Tensor,
    cache: CacheView,
    order: TokenOrder,
    config: SynthesisConfig,
) -> None:
    """Write a cache in one pass: inverse transform, mean or center, rotation, rounding.

    A program computes one tile of `block_t` tokens: the stages `synthesize` and `scatter`. A slot beyond the cache
    is flagged (Status.SLOT) and not written, like one of -1.

    Args:
        y: bfloat16, float16 or float32, at a multiple of 16 bytes; JobField.STRIDE and JobField.COEFFICIENTS are
            multiples of 16, too; what lies beyond a job's tokens is ignored.
        basis: dtype of y, at a multiple of 16 bytes: a tile's `[RANK, 2 * PAIRS]` at TileField.BASIS with rows
            TileField.BASIS_STRIDE apart, both multiples of 2 * PAIRS.
        turns: from `rotation_tables`.
        order: column i of the coefficients is the token that it names; of each `block_t` columns, the components of
            the first are read.
    """
    means = centers.table
    token_blocks = triton.cdiv(batch.max_tokens, config.block_t)
    count = len(tiles.tiles)
    group = max(min(count // batch.sections, MAX_GROUP), 1)
    _synthesize[(group * token_blocks, len(batch.chunks), triton.cdiv(count, group))](
        y.values, y.jobs, tiles.tiles, basis, means, centers.rows, batch.chunks, cache.slots, turns, cache.units,
        batch.status, order.classes, order.order, order.block_ranks, batch.sections, count, group, len(means) - 1,
        means.shape[1], turns.shape[2], BLOCK_T=config.block_t, BLOCK_R=config.block_r,
        ELEMENT=ELEMENTS[cache.element], UNIT_STRIDE=cache.unit_stride, ALIGNED=cache.aligned, PAIRS=tiles.pairs,
        PRECISION=product_precision(y.values.dtype, cache.element), num_warps=config.num_warps, enable_fp_fusion=True,
        num_stages=_stages(config),
    )  # fmt: skip


def _stages(config: SynthesisConfig) -> int:
    """Return how many steps of the sum are under way at once on this device, with this Triton."""
    if torch.version.hip:
        return min(config.num_stages, HIP_STAGES)
    return config.num_stages if FENCED else 1

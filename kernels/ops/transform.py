"""The linear maps on the device: from a cache to coefficients and back.

    encode  cache --gather: un-rotate, center--> x [tokens, M] --analyze: y = forward x--> y [R, STRIDE] per job
    decode  y --synthesize: inverse y, + mean, rotate, round--> cache

The M *columns* of x, of the means and of the bases are a section's values in the order of its tiles: see `tiles.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from cuvee.codec.entropy.token_classes import CLASSES, WINDOW
from cuvee.kernels.analysis.kernel_spec import KernelSpec
from cuvee.kernels.jobs import (
    BLOCK_BASIS,
    BLOCK_COLUMN,
    BLOCK_COLUMNS,
    BLOCK_FIELDS,
    BLOCK_RANK,
    BLOCK_ROW,
    BLOCK_SECTION,
    CHUNK_FIELDS,
    CHUNK_FIRST,
    CHUNK_SOURCE,
    CHUNK_TOKENS,
    ELEMENTS,
    JOB_CLASS_PLAN,
    JOB_COLUMNS,
    JOB_FIELDS,
    JOB_LEVELS,
    JOB_STRIDE,
    STATUS_NOT_FINITE,
    TILE_ANGLE,
    TILE_BASIS,
    TILE_BASIS_STRIDE,
    TILE_BLOCK,
    TILE_COLUMN,
    TILE_COUNT0,
    TILE_COUNT1,
    TILE_FIELDS,
    TILE_RANK,
    TILE_ROW,
    TILE_SECTION,
    TILE_UNIT,
    ChunkField,
)
from cuvee.kernels.ops.arguments import CacheView, ChunkBatch, RotationTables, TileTable, TokenOrder
from cuvee.kernels.ops.pages import (
    COMPILED,
    load_pairs,
    store_pairs,
    token_offsets,
    turn_pairs,
)

MAX_GROUP = 32  # tiles that run together: all of a section of two layers of 8 heads
TABLE_TOKENS = 16  # a program of `rotation_tables`
GATHER_TOKENS = 64
ANALYSIS_ROWS, ANALYSIS_TOKENS, ANALYSIS_COLUMNS = 128, 64, 32  # a step of `analyze`: what fits registers

INFINITY = tl.constexpr(float("inf"))
_WINDOW = tl.constexpr(WINDOW)
_CLASSES = tl.constexpr(CLASSES)


@triton.jit
def _classed_columns(job, block, start, column, inside, classes, order, block_ranks):  # type: ignore[no-untyped-def]
    """Of columns from `start` on, all of one window: their tokens, and the components of a block that they have."""
    first = tl.load(job + JOB_COLUMNS)
    token = start // _WINDOW * _WINDOW + tl.load(order + first + column, mask=inside, other=0).to(tl.int32)
    finest = tl.load(classes + first + start).to(tl.int64)
    return token, tl.load(block_ranks + (block * _CLASSES + finest))


@triton.jit
def _rotation_tables(  # type: ignore[no-untyped-def]
    chunks, inv_freq, scaling, cos, sin, angles, POSITION: tl.constexpr, INVERSE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_A: tl.constexpr,
):  # fmt: skip
    chunk = chunks + tl.program_id(0) * CHUNK_FIELDS
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    angle = tl.program_id(2) * BLOCK_A + tl.arange(0, BLOCK_A)
    has = angle < angles
    position = (tl.load(chunk + POSITION) + token).to(tl.float32)
    scale = tl.load(scaling + angle, mask=has, other=1.0)
    if INVERSE:
        scale = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    turn = position[:, None] * tl.load(inv_freq + angle, mask=has, other=0.0)[None, :]
    at = ((tl.load(chunk + CHUNK_FIRST) + token) * angles)[:, None] + angle[None, :]
    mask = (token < tl.load(chunk + CHUNK_TOKENS))[:, None] & has[None, :]
    # On all targets these are the accurate functions, with a full reduction of large arguments.
    tl.store(cos + at, tl.cos(turn) * scale[None, :], mask=mask)
    tl.store(sin + at, tl.sin(turn) * scale[None, :], mask=mask)


def rotation_tables(
    chunks: torch.Tensor,
    inv_freq: torch.Tensor,
    scaling: torch.Tensor,
    tables: RotationTables,
    use_source: bool,
    inverse: bool,
    max_tokens: int,
) -> None:
    """Write cos and sin for every token of every chunk: `codec.rope.cos_sin` of all RoPEs of a layout side by side.

    Args:
        chunks: int64 `[chunks, len(ChunkField)]`.
        inv_freq: float32 `[A]`: angle per position.
        scaling: float32 `[A]`: `Rope.attention_scaling`.
        tables: rows ChunkField.FIRST … are written.
        use_source: positions count from ChunkField.SOURCE instead of ChunkField.TARGET.
        inverse: divide by the scaling; `turn_pairs(INVERSE=True)` then un-rotates, as `codec.rope.unrotate` does.
        max_tokens: tokens of the longest chunk.
    """
    angles = len(inv_freq)
    if not angles:
        return
    block_a = min(triton.next_power_of_2(angles), 64)
    grid = (len(chunks), triton.cdiv(max_tokens, TABLE_TOKENS), triton.cdiv(angles, block_a))
    _rotation_tables[grid](
        chunks, inv_freq, scaling, tables.cos, tables.sin, angles,
        POSITION=int(ChunkField.SOURCE if use_source else ChunkField.TARGET), INVERSE=inverse, BLOCK_T=TABLE_TOKENS,
        BLOCK_A=block_a, num_warps=4,
        enable_fp_fusion=False,  # an angle is rounded before its reduction, as in codec/models/rope.py
    )  # fmt: skip


@triton.jit(do_not_specialize=["sections", "first_section", "sinks"])
def _gather(  # type: ignore[no-untyped-def]
    tiles, means, chunks, slots, cos, sin, places, scales, x, status, sections, first_section, sinks, columns, width,
    first_column, angles, BLOCK_T: tl.constexpr, ELEMENT: tl.constexpr, UNIT_STRIDE: tl.constexpr,
    ALIGNED: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(0) * TILE_FIELDS
    chunk_index = tl.program_id(2)
    chunk = chunks + chunk_index * CHUNK_FIELDS
    tokens = tl.load(chunk + CHUNK_TOKENS).to(tl.int32)
    start = tl.program_id(1) * BLOCK_T
    if start >= tokens:
        return
    token = start + tl.arange(0, BLOCK_T)
    inside = token < tokens
    section = tl.load(tile + TILE_SECTION)
    job_status = status + chunk_index * sections + (section - first_section)
    row = tl.load(chunk + CHUNK_FIRST) + token
    offset, exists = token_offsets(places, tl.load(tile + TILE_UNIT), slots, row, inside, job_status)
    a, b = load_pairs(places, scales, tile, offset, exists, ELEMENT, UNIT_STRIDE, PAIRS, ALIGNED)
    angle = tl.load(tile + TILE_ANGLE)
    if angle >= 0:
        a, b = turn_pairs(a, b, cos, sin, row, inside, angles, angle, PAIRS, True, ALIGNED)
    finite = (tl.abs(a) < INFINITY) & (tl.abs(b) < INFINITY)
    bad = tl.max(tl.max(tl.where(finite, 0, 1), 1), 0)
    tl.atomic_or(job_status, STATUS_NOT_FINITE, mask=bad > 0)
    pair = tl.arange(0, PAIRS)
    column = tl.multiple_of(tl.load(tile + TILE_COLUMN), 2 * PAIRS)
    source = tl.load(chunk + CHUNK_SOURCE) + token
    mean = means + (tl.minimum(source, sinks) * columns + column)[:, None] + pair[None, :]
    a -= tl.load(mean, mask=inside[:, None], other=0.0)
    b -= tl.load(mean + PAIRS, mask=inside[:, None], other=0.0)
    has0, has1 = pair < tl.load(tile + TILE_COUNT0), pair < tl.load(tile + TILE_COUNT1)
    out = x + (row * width + (column - tl.multiple_of(first_column, 2 * PAIRS)))[:, None] + pair[None, :]
    tl.store(out, tl.where(has0[None, :], a, 0.0), mask=inside[:, None])
    tl.store(out + PAIRS, tl.where(has1[None, :], b, 0.0), mask=inside[:, None])


def gather(
    cache: CacheView,
    tiles: TileTable,
    batch: ChunkBatch,
    rotations: RotationTables,
    means: torch.Tensor,
    x: torch.Tensor,
) -> None:
    """Read a cache into columns: un-rotated, less the mean of the token's position.

    A program reads GATHER_TOKENS tokens of one tile. It flags NaN and infinities after un-rotation
    (Status.NOT_FINITE), and a slot beyond the cache (Status.SLOT), which reads as zero, as -1 does.

    Args:
        cache: what is read.
        tiles: of the batch's sections.
        batch: status bits are added to its jobs.
        rotations: from `rotation_tables(inverse=True)`, by source positions.
        means: float32 `[S + 1, M]`: means of the first S positions of a sequence, then that of all others.
        x: float32 `[tokens, width]`, written in rows ChunkField.FIRST …, columns `TileField.COLUMN - first_column …`;
            padded columns become zero.
    """
    _gather[(len(tiles.tiles), triton.cdiv(batch.max_tokens, GATHER_TOKENS), len(batch.chunks))](
        tiles.tiles, means, batch.chunks, cache.slots, rotations.cos, rotations.sin, cache.places, cache.scales, x,
        batch.status, batch.sections, batch.first_section, len(means) - 1, means.stride(0), x.stride(0),
        tiles.first_column, rotations.cos.shape[1], BLOCK_T=GATHER_TOKENS, ELEMENT=ELEMENTS[cache.element],
        UNIT_STRIDE=cache.unit_stride, ALIGNED=cache.aligned, PAIRS=tiles.pairs, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["sections", "first_section", "rank_blocks", "token_blocks", "chunk_count"])
def _analyze(  # type: ignore[no-untyped-def]
    x, jobs, blocks, basis, chunks, y, classes, order, block_ranks, sections, first_section, first_column, width,
    rank_blocks, token_blocks, chunk_count, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, CLASSED: tl.constexpr,
):  # fmt: skip
    # Programs that share tokens run together, then those that share a basis.
    program = tl.program_id(0)
    rank_block = program % rank_blocks
    rest = program // rank_blocks
    token_block = rest % token_blocks
    rest = rest // token_blocks
    chunk_index = rest % chunk_count
    block_index = rest // chunk_count
    block = blocks + block_index * BLOCK_FIELDS
    chunk = chunks + chunk_index * CHUNK_FIELDS
    job = jobs + (chunk_index * sections + tl.load(block + BLOCK_SECTION) - first_section) * JOB_FIELDS
    tokens = tl.load(chunk + CHUNK_TOKENS).to(tl.int32)
    start = token_block * BLOCK_T
    if (start >= tokens) | ((tl.load(job + JOB_CLASS_PLAN) > 0) != CLASSED):
        return
    column = start + tl.arange(0, BLOCK_T)
    inside = column < tokens
    if CLASSED:
        token, rank = _classed_columns(job, block_index, start, column, inside, classes, order, block_ranks)
    else:
        token, rank = column, tl.load(block + BLOCK_RANK).to(tl.int32)
    if rank_block * BLOCK_R >= rank:
        return
    row = rank_block * BLOCK_R + tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    size = tl.multiple_of(tl.load(block + BLOCK_COLUMNS).to(tl.int32), BLOCK_K)
    coded = row < rank
    value = tl.multiple_of(tl.load(block + BLOCK_COLUMN) - first_column, BLOCK_K)
    x_at = x + ((tl.load(chunk + CHUNK_FIRST) + token) * width + value)[:, None] + k[None, :]
    basis_at = basis + tl.multiple_of(tl.load(block + BLOCK_BASIS), BLOCK_K)
    basis_at = basis_at + (row.to(tl.int64) * size)[:, None] + k[None, :]
    acc = tl.zeros((BLOCK_R, BLOCK_T), tl.float32)
    for _ in range(0, size, BLOCK_K):
        left = tl.load(basis_at, mask=coded[:, None], other=0.0)
        right = tl.load(x_at, mask=inside[:, None], other=0.0)
        acc = tl.dot(left, tl.trans(right), acc, input_precision=PRECISION)
        basis_at += BLOCK_K
        x_at += BLOCK_K
    out = y + tl.load(job + JOB_LEVELS) + (tl.load(block + BLOCK_ROW) + row)[:, None] * tl.load(job + JOB_STRIDE)
    tl.store(out + column[None, :], acc, mask=coded[:, None] & inside[None, :])


def analyze(
    x: torch.Tensor,
    jobs: torch.Tensor,
    blocks: torch.Tensor,
    basis: torch.Tensor,
    batch: ChunkBatch,
    y: torch.Tensor,
    max_rank: int,
    first_column: int = 0,
    order: TokenOrder | None = None,
) -> None:
    """Coefficients of centered values: `SectionBasis.analyze` for every block of every chunk.

    Rounding to bfloat16 would add an error of the order of the quantizer's step; three TF32 products (NVIDIA) or
    float32 arithmetic (AMD) do not.

    Args:
        x: float32 `[tokens, width]` from `gather`.
        jobs: int64 `[chunks * sections, len(JobField)]`, chunk-major.
        blocks: int64 `[blocks, len(BlockField)]`: those of the batch's sections.
        basis: float32; `[BlockField.RANK, BlockField.COLUMNS]` at BlockField.BASIS, padded columns zero.
        batch: its chunks.
        y: float32; rows BlockField.ROW … of a job's `[R, JobField.STRIDE]` at JobField.LEVELS are written,
            tokens 0 … T - 1.
        max_rank: components of the largest block.
        first_column: `BlockField.COLUMN` of the first value in x.
        order: None: jobs whose tokens have classes are skipped. Otherwise the other jobs are, column i of the
            coefficients is the token that the order names, and rows of a block that none of 64 columns has are not
            written; row i of `block_ranks` is row i of `blocks`.
    """
    block_r = min(max(triton.next_power_of_2(max_rank), 16), ANALYSIS_ROWS)
    block_t = analysis_tokens(batch.max_tokens)
    rank_blocks, token_blocks = triton.cdiv(max_rank, block_r), triton.cdiv(batch.max_tokens, block_t)
    grid = (len(blocks) * len(batch.chunks) * rank_blocks * token_blocks,)
    if not grid[0]:
        return
    _analyze[grid](
        x, jobs, blocks, basis, batch.chunks, y, *_unpacked(order), batch.sections, batch.first_section, first_column,
        x.stride(0), rank_blocks, token_blocks, len(batch.chunks), BLOCK_T=block_t, BLOCK_R=block_r,
        BLOCK_K=ANALYSIS_COLUMNS, PRECISION="tf32x3" if COMPILED.value and not torch.version.hip else "ieee",
        CLASSED=order is not None, num_warps=8, num_stages=3, enable_fp_fusion=True,
    )  # fmt: skip


def analysis_tokens(max_tokens: int) -> int:
    """Tokens that a program of `analyze` takes at a time."""
    return int(min(max(triton.next_power_of_2(max_tokens), 16), ANALYSIS_TOKENS))


def _unpacked(order: TokenOrder | None) -> tuple[torch.Tensor | None, ...]:
    return (None, None, None) if order is None else (order.classes, order.order, order.block_ranks)


@dataclass(frozen=True, slots=True)
class SynthesisConfig:
    """How `synthesize` is launched: tokens and components a step, and Triton's num_warps and num_stages."""

    block_t: int
    block_r: int
    num_warps: int
    num_stages: int


HIP_STAGES = 2  # what fits the 64 KB of shared memory of AMD's multiprocessors

# What there is to choose from: `synthesis_config` chooses by shape alone; measured choices may be passed instead.
SYNTHESIS_CONFIGS = (
    SynthesisConfig(256, 64, 8, 3),  # long sums: the fewest bytes a product from L2
    SynthesisConfig(128, 64, 8, 3),
    SynthesisConfig(64, 64, 4, 3),  # three programs a multiprocessor: one stores while others multiply
    SynthesisConfig(64, 32, 8, 2),  # short sums: memory is the limit, the more warps the better
    SynthesisConfig(128, 32, 8, 3),  # coefficients of four bytes
    SynthesisConfig(32, 32, 4, 2),
    SynthesisConfig(16, 32, 4, 2),
)


def product_precision(dtype: torch.dtype, element: torch.dtype) -> str:
    """Triton's `input_precision` for coefficients of `dtype` that become `element`.

    float16 has as many significant bits as a TF32 factor, 11. Tensor cores cut factors off there, so a value is wrong
    by an ulp or so of the token's largest. float32 gets float32 products. AMD has no TF32, and some of its
    compilers refuse the word for bfloat16 coefficients too, whose products are the same under any.
    """
    return "ieee" if torch.version.hip or (dtype == torch.float32 and element != torch.float16) else "tf32"


def synthesis_config(
    dtype: torch.dtype, element: torch.dtype, max_rank: int, max_tokens: int, aligned: bool = True
) -> SynthesisConfig:
    """The config for coefficients of `dtype` that become `element`.

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
    a, b, means, chunk, start, cos, sin, row, inside, places, scales, tile, offset, exists, sinks, columns, angles,
    ELEMENT: tl.constexpr, UNIT_STRIDE: tl.constexpr, ALIGNED: tl.constexpr, PAIRS: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    """Add means to half of a tile's pairs, from FIRST on, turn and store them; no token comes before `start`."""
    HALF: tl.constexpr = PAIRS // 2
    pair = FIRST + tl.arange(0, HALF)
    mean = means + tl.multiple_of(tl.load(tile + TILE_COLUMN), 2 * PAIRS)
    position = tl.load(chunk + CHUNK_SOURCE)
    if position + start >= sinks:
        mean += sinks * columns
        a += tl.load(mean + pair)[None, :]
        b += tl.load(mean + PAIRS + pair)[None, :]
    else:
        source = tl.minimum(row - tl.load(chunk + CHUNK_FIRST) + position, sinks).to(tl.int32)
        own = mean + (source * columns)[:, None] + pair[None, :]
        a += tl.load(own)
        b += tl.load(own + PAIRS)
    angle = tl.load(tile + TILE_ANGLE)
    if angle >= 0:
        a, b = turn_pairs(a, b, cos, sin, row, inside, angles, angle + FIRST, HALF, False, ALIGNED)
    store_pairs(places, scales, tile, offset, exists, a, b, ELEMENT, UNIT_STRIDE, HALF, ALIGNED, FIRST)


@triton.jit(
    do_not_specialize=["sections", "first_section", "tile_count", "group", "chunk_count", "token_blocks", "sinks"]
)
def _synthesize(  # type: ignore[no-untyped-def]
    y, jobs, tiles, basis, means, chunks, slots, cos, sin, places, scales, status, classes, order, block_ranks,
    sections, first_section, tile_count, group, chunk_count, token_blocks, sinks, columns, angles,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, ELEMENT: tl.constexpr, UNIT_STRIDE: tl.constexpr,
    ALIGNED: tl.constexpr, PAIRS: tl.constexpr, PRECISION: tl.constexpr, CLASSED: tl.constexpr,
):  # fmt: skip
    # `group` tiles, usually a section's, share the coefficients of a block of tokens: they run together. The blocks
    # of tokens of all chunks follow, which share the group's bases.
    program = tl.program_id(0)
    blocks = chunk_count * token_blocks
    first = program // (group * blocks) * group
    in_group = program - first * blocks
    members = tl.minimum(group, tile_count - first)
    tile = tiles + (first + in_group % members) * TILE_FIELDS
    block = in_group // members
    chunk_index = block // token_blocks
    start = (block - chunk_index * token_blocks) * BLOCK_T
    chunk = chunks + chunk_index * CHUNK_FIELDS
    tokens = tl.load(chunk + CHUNK_TOKENS).to(tl.int32)
    if start >= tokens:
        return
    job_index = chunk_index * sections + tl.load(tile + TILE_SECTION) - first_section
    job = jobs + job_index * JOB_FIELDS
    if (tl.load(job + JOB_CLASS_PLAN) > 0) != CLASSED:
        return
    column = start + tl.arange(0, BLOCK_T)
    inside = column < tokens
    if CLASSED:
        # Columns are sorted: the first of them has the most components.
        block_index = tl.load(tile + TILE_BLOCK)
        token, rank = _classed_columns(job, block_index, start, column, inside, classes, order, block_ranks)
        first_token = start // _WINDOW * _WINDOW
    else:
        token, rank = column, tl.load(tile + TILE_RANK).to(tl.int32)
        first_token = start
    component = tl.arange(0, BLOCK_R)
    stride = tl.multiple_of(tl.load(job + JOB_STRIDE), 16)
    y_at = y + tl.multiple_of(tl.load(job + JOB_LEVELS), 16) + tl.load(tile + TILE_ROW) * stride
    y_at = y_at + (component * stride)[:, None] + column[None, :]
    basis_stride = tl.multiple_of(tl.load(tile + TILE_BASIS_STRIDE), 2 * PAIRS)
    basis_at = basis + tl.multiple_of(tl.load(tile + TILE_BASIS), 2 * PAIRS)
    basis_at = basis_at + (component * basis_stride)[:, None] + tl.arange(0, 2 * PAIRS)[None, :]
    # Columns T … STRIDE - 1 hold anything; they are computed and not stored.
    readable = (column < stride)[None, :]
    acc = tl.zeros((BLOCK_T, 2 * PAIRS), tl.float32)
    for done in range(0, rank, BLOCK_R):
        coded = (component < rank - done)[:, None]
        left = tl.load(y_at, mask=coded & readable, other=0.0)
        right = tl.load(basis_at, mask=coded, other=0.0)
        if not COMPILED:
            left, right = left.to(tl.float32), right.to(tl.float32)
        acc = tl.dot(tl.trans(left), right, acc, input_precision=PRECISION)
        y_at += BLOCK_R * stride
        basis_at += BLOCK_R * basis_stride
    row = tl.load(chunk + CHUNK_FIRST) + token
    offset, exists = token_offsets(places, tl.load(tile + TILE_UNIT), slots, row, inside, status + job_index)
    # One half of the pairs after the other: means, angles and addresses of all would not fit registers.
    HALF: tl.constexpr = PAIRS // 2
    left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_T, 2, 2, HALF)), (0, 1, 3, 2)))
    a, b = tl.split(tl.permute(left, (0, 2, 1)))
    _finish(
        a, b, means, chunk, first_token, cos, sin, row, inside, places, scales, tile, offset, exists, sinks, columns,
        angles, ELEMENT, UNIT_STRIDE, ALIGNED, PAIRS, 0,
    )  # fmt: skip
    a, b = tl.split(tl.permute(right, (0, 2, 1)))
    _finish(
        a, b, means, chunk, first_token, cos, sin, row, inside, places, scales, tile, offset, exists, sinks, columns,
        angles, ELEMENT, UNIT_STRIDE, ALIGNED, PAIRS, HALF,
    )  # fmt: skip


def synthesize(
    y: torch.Tensor,
    jobs: torch.Tensor,
    tiles: TileTable,
    basis: torch.Tensor,
    means: torch.Tensor,
    batch: ChunkBatch,
    rotations: RotationTables,
    cache: CacheView,
    config: SynthesisConfig | None = None,
    order: TokenOrder | None = None,
) -> None:
    """Write a cache in one pass: inverse transform, mean, rotation, rounding.

    A program computes one tile of `block_t` tokens: `codec.transform.synthesize` and `place`. A slot beyond the cache
    is flagged (Status.SLOT) and not written, like one of -1.

    Args:
        y: coefficients, bfloat16, float16 or float32, at a multiple of 16 bytes: a job's `[R, JobField.STRIDE]` at
            JobField.LEVELS. JobField.LEVELS and JobField.STRIDE are multiples of 16; what lies beyond a job's tokens is
            ignored.
        jobs: int64 `[chunks * sections, len(JobField)]`, chunk-major.
        tiles: of the batch's sections.
        basis: dtype of y, at a multiple of 16 bytes: a tile's `[RANK, 2 * PAIRS]` at TileField.BASIS with rows
            TileField.BASIS_STRIDE apart, both multiples of 2 * PAIRS.
        means: float32 `[S + 1, M]`: means of the first S positions of a sequence, then that of all others.
        batch: status bits are added to its jobs.
        rotations: from `rotation_tables`, by target positions.
        cache: what is written.
        config: None: the `synthesis_config` of a large rank.
        order: None: jobs whose tokens have classes are skipped. Otherwise the other jobs are, and column i of the
            coefficients is the token that the order names; of each `block_t` columns, the components of the first are
            read.
    """
    chosen = config or default_config(y.dtype, batch, cache)
    token_blocks = triton.cdiv(batch.max_tokens, chosen.block_t)
    count, chunks = len(tiles.tiles), len(batch.chunks)
    group = max(min(count // batch.sections, MAX_GROUP), 1)
    _synthesize[(count * chunks * token_blocks,)](
        y, jobs, tiles.tiles, basis, means, batch.chunks, cache.slots, rotations.cos, rotations.sin, cache.places,
        cache.scales, batch.status, *_unpacked(order), batch.sections, batch.first_section, count, group, chunks,
        token_blocks, len(means) - 1, means.stride(0), rotations.cos.shape[1], BLOCK_T=chosen.block_t,
        BLOCK_R=chosen.block_r, ELEMENT=ELEMENTS[cache.element], UNIT_STRIDE=cache.unit_stride, ALIGNED=cache.aligned,
        PAIRS=tiles.pairs, PRECISION=product_precision(y.dtype, cache.element), CLASSED=order is not None,
        num_warps=chosen.num_warps, enable_fp_fusion=True,
        num_stages=min(chosen.num_stages, HIP_STAGES) if torch.version.hip else chosen.num_stages,
    )  # fmt: skip


def default_config(dtype: torch.dtype, batch: ChunkBatch, cache: CacheView) -> SynthesisConfig:
    """The config of a launch that names none: blocks may have any number of components."""
    return synthesis_config(dtype, cache.element, 1 << 16, batch.max_tokens, cache.aligned)


_TABLES = dict.fromkeys(("jobs", "tiles", "blocks", "chunks", "slots", "places"), "*i64")
_ARRAYS = dict.fromkeys(("x", "means", "cos", "sin", "scales", "inv_freq", "scaling"), "*fp32")
_RUNS = dict.fromkeys(("sections", "first_section", "tile_count", "chunk_count", "token_blocks", "rank_blocks"), "i32")
_SIZES = dict.fromkeys(("group", "sinks", "columns", "width", "first_column", "angles"), "i32")
_COLUMNS = {"classes": "*u8", "order": "*u8", "block_ranks": "*i32"}
_TYPES = {**_TABLES, **_ARRAYS, **_RUNS, **_SIZES, **_COLUMNS, "status": "*i32"}
_PLAIN = {**dict.fromkeys(_COLUMNS), "CLASSED": False}
# Sizes of Llama-3.1-8B that are multiples of 16.
_DIVISIBLE = ("x", "y", "basis", "means", "cos", "sin", "tiles", "columns", "width", "first_column", "angles")


def _spec(
    name: str, kernel: object, constants: Mapping[str, object], num_warps: int, num_stages: int = 3,
    options: Mapping[str, object] | None = None, changes: Mapping[str, Mapping[str, object]] | None = None,
    **types: str,
) -> KernelSpec:  # fmt: skip
    names: list[str] = kernel.arg_names  # type: ignore[attr-defined]
    signature = {n: (_TYPES | types)[n] for n in names if n not in constants}
    divisible = tuple(n for n in names if n in _DIVISIBLE)
    return KernelSpec(
        name, kernel, signature, constants, num_warps, num_stages, options, divisible, changes=changes or {}
    )


def _analysis_spec(name: str, classed: bool) -> KernelSpec:
    constants = {
        "BLOCK_T": ANALYSIS_TOKENS, "BLOCK_R": ANALYSIS_ROWS, "BLOCK_K": ANALYSIS_COLUMNS, "PRECISION": "tf32x3",
        **({"CLASSED": True} if classed else _PLAIN),
    }  # fmt: skip
    hip = {"gfx942": {"constants": {"PRECISION": "ieee"}}}
    return _spec(name, _analyze, constants, 8, changes=hip, y="*fp32", basis="*fp32")


def _synthesis_spec(
    name: str, dtype: torch.dtype, element: torch.dtype, max_rank: int, classed: bool = False
) -> KernelSpec:
    config = synthesis_config(dtype, element, max_rank, 256)
    y = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}[dtype]
    constants = {
        "BLOCK_T": config.block_t, "BLOCK_R": config.block_r, "ELEMENT": ELEMENTS[element], "UNIT_STRIDE": True,
        "ALIGNED": True, "PAIRS": 64, "PRECISION": product_precision(dtype, element),
        **({"CLASSED": True} if classed else _PLAIN),
    }  # fmt: skip
    hip = {"num_stages": min(config.num_stages, HIP_STAGES), "constants": {"PRECISION": "ieee"}}
    return _spec(
        name, _synthesize, constants, config.num_warps, config.num_stages, changes={"gfx942": hip}, y=y, basis=y
    )


SPECS: tuple[KernelSpec, ...] = (
    _spec(
        "rotation_tables",
        _rotation_tables,
        {"POSITION": int(ChunkField.TARGET), "INVERSE": False, "BLOCK_T": TABLE_TOKENS, "BLOCK_A": 64},
        4,
        options={"enable_fp_fusion": False},
    ),
    _spec(
        "gather",
        _gather,
        {"BLOCK_T": GATHER_TOKENS, "ELEMENT": tl.bfloat16, "UNIT_STRIDE": True, "ALIGNED": True, "PAIRS": 64},
        4,
    ),
    _analysis_spec("analyze", False),
    _analysis_spec("analyze classes", True),
    _synthesis_spec("synthesize layer", torch.bfloat16, torch.bfloat16, 1400),
    _synthesis_spec("synthesize classes", torch.bfloat16, torch.bfloat16, 1400, True),
    _synthesis_spec("synthesize head", torch.bfloat16, torch.bfloat16, 128),
    _synthesis_spec("synthesize class heads", torch.bfloat16, torch.bfloat16, 128, True),
    _synthesis_spec("synthesize float16", torch.float32, torch.float16, 1400),
)

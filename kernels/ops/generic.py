"""The scheme without a profile: coefficients to and from the cache, channel by channel.

    y --place_channels: scale, mean, RoPE, rounding--> cache
    x (gathered, position-free) --channel_statistics--> means, squares --(host)--> scales, which channels are coded
    x --normalize_channels--> y

What belongs to a channel lies in arrays `[chunks, M]`, in the columns of `tiles.lay_out_tiles` (M of them for all
sections): the row of y that holds it, or -1 where it is not coded; its scale; its mean. `jobs` holds the sections of
one chunk after the other, so that the job of a tile is chunk * sections + TileField.SECTION - first_section.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cuvee.kernels.analysis.kernel_spec import KernelSpec
from cuvee.kernels.jobs import (
    CHUNK_FIELDS,
    CHUNK_FIRST,
    CHUNK_TOKENS,
    ELEMENTS,
    JOB_CHUNK,
    JOB_FIELDS,
    JOB_LEVELS,
    JOB_STRIDE,
    JOB_TOKENS,
    TILE_ANGLE,
    TILE_COLUMN,
    TILE_FIELDS,
    TILE_SECTION,
    TILE_UNIT,
)
from cuvee.kernels.ops.arguments import CacheView, ChannelArrays, ChunkBatch, RotationTables, TileTable
from cuvee.kernels.ops.pages import store_pairs, token_offsets, turn_pairs

WARPS = 8
TOKENS = 64
COLUMNS = 64  # of a program of `normalize_channels` and, at STATISTICS_TOKENS at a time, of `channel_statistics`
STATISTICS_TOKENS = 16


@triton.jit
def _place_half(y, rows, channel_scale, means, column, stride, token, inside, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The values `[tokens, PAIRS]` of the columns `column …` of a chunk."""
    at = column + tl.arange(0, PAIRS)
    row = tl.load(rows + at)
    coded = row >= 0
    address = y + (row.to(tl.int64) * stride)[None, :] + token[:, None]
    coefficient = tl.load(address, mask=inside[:, None] & coded[None, :], other=0.0).to(tl.float32)
    # Padding and channels that are not coded may have any scale.
    scale = tl.where(coded, tl.load(channel_scale + at), 0.0)
    return coefficient * scale[None, :] + tl.load(means + at)[None, :]


@triton.jit(do_not_specialize=["sections", "first_section"])
def _place_channels(  # type: ignore[no-untyped-def]
    y, rows, channel_scale, means, jobs, chunks, tiles, places, scales, slots, cos, sin, status,
    sections, first_section, columns, first_column, angles,
    ELEMENT: tl.constexpr, UNIT_STRIDE: tl.constexpr, ALIGNED: tl.constexpr,
    PAIRS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(1) * TILE_FIELDS
    job = tl.program_id(2) * sections + tl.load(tile + TILE_SECTION) - first_section
    fields = jobs + job * JOB_FIELDS
    tokens = tl.load(fields + JOB_TOKENS)
    if tl.program_id(0) * TOKENS >= tokens:
        return
    chunk = tl.load(fields + JOB_CHUNK)
    first = tl.load(chunks + chunk * CHUNK_FIELDS + CHUNK_FIRST)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    column = chunk * columns + tl.load(tile + TILE_COLUMN) - first_column
    stride = tl.load(fields + JOB_STRIDE)
    y += tl.load(fields + JOB_LEVELS)
    a = _place_half(y, rows, channel_scale, means, column, stride, token, inside, PAIRS)
    b = _place_half(y, rows, channel_scale, means, column + PAIRS, stride, token, inside, PAIRS)
    angle = tl.load(tile + TILE_ANGLE)
    if angle >= 0:
        a, b = turn_pairs(a, b, cos, sin, first + token, inside, angles, angle, PAIRS, False, ALIGNED)
    offset, exists = token_offsets(places, tl.load(tile + TILE_UNIT), slots + first, token, inside, status + job)
    store_pairs(places, scales, tile, offset, exists, a, b, ELEMENT, UNIT_STRIDE, PAIRS, ALIGNED)


@triton.jit
def _channel_statistics(  # type: ignore[no-untyped-def]
    x, chunks, means, squares, columns, TOKENS: tl.constexpr, COLUMNS: tl.constexpr
):
    chunk = chunks + tl.program_id(1) * CHUNK_FIELDS
    tokens = tl.load(chunk + CHUNK_TOKENS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    has = column < columns
    start = x + tl.load(chunk + CHUNK_FIRST) * columns
    token = tl.arange(0, TOKENS).to(tl.int64)
    at = (token * columns)[:, None] + column[None, :]
    total = tl.zeros([TOKENS, COLUMNS], tl.float64)
    for done in range(0, tokens, TOKENS):
        mask = (done + token < tokens)[:, None] & has[None, :]
        total += tl.load(start + done * columns + at, mask=mask, other=0.0).to(tl.float64)
    # Rounded twice, to float32 and to bfloat16, as PyTorch does.
    bits = (tl.sum(total, 0) / tokens.to(tl.float64)).to(tl.float32).to(tl.uint32, bitcast=True)
    mean = (bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).to(tl.float32, bitcast=True)
    center = mean[None, :]
    total = tl.zeros([TOKENS, COLUMNS], tl.float64)
    for done in range(0, tokens, TOKENS):
        mask = (done + token < tokens)[:, None] & has[None, :]
        value = tl.load(start + done * columns + at, mask=mask, other=0.0) - center
        value = tl.where(mask, value, 0.0).to(tl.float64)
        total += value * value
    out = tl.program_id(1).to(tl.int64) * columns + column
    tl.store(means + out, mean, mask=has)
    tl.store(squares + out, tl.sum(total, 0), mask=has)


@triton.jit(do_not_specialize=["sections", "first_section"])
def _normalize_channels(  # type: ignore[no-untyped-def]
    x,
    rows,
    channel_scale,
    means,
    jobs,
    chunks,
    tiles,
    y,
    sections,
    first_section,
    columns,
    first_column,
    PAIRS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    tile = tiles + tl.program_id(1) * TILE_FIELDS
    fields = jobs + (tl.program_id(2) * sections + tl.load(tile + TILE_SECTION) - first_section) * JOB_FIELDS
    tokens = tl.load(fields + JOB_TOKENS)
    if tl.program_id(0) * TOKENS >= tokens:
        return
    chunk = tl.load(fields + JOB_CHUNK)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.load(tile + TILE_COLUMN) - first_column + tl.arange(0, 2 * PAIRS)
    row = tl.load(rows + chunk * columns + column)
    coded = row >= 0
    mask = (token < tokens)[:, None] & coded[None, :]
    from_row = tl.load(chunks + chunk * CHUNK_FIELDS + CHUNK_FIRST) + token
    value = tl.load(x + (from_row * columns)[:, None] + column[None, :], mask=mask, other=0.0)
    value -= tl.load(means + chunk * columns + column)[None, :]
    scale = tl.load(channel_scale + chunk * columns + column, mask=coded, other=1.0)
    value = tl.div_rn(value, tl.broadcast_to(scale[None, :], value.shape))
    to_row = row.to(tl.int64) * tl.load(fields + JOB_STRIDE)
    tl.store(y + tl.load(fields + JOB_LEVELS) + to_row[None, :] + token[:, None], value, mask=mask)


def place_channels(
    y: torch.Tensor,
    channels: ChannelArrays,
    jobs: torch.Tensor,
    tiles: TileTable,
    batch: ChunkBatch,
    rotations: RotationTables,
    cache: CacheView,
) -> None:
    """Coefficients -> cache: coefficient * scale + mean, keys turned to their positions, rounded to the cache's dtype.

    Args:
        y: float32 or bfloat16, flat; `JobField.LEVELS` and `JobField.STRIDE` tell where the rows of a job lie.
        channels: in the columns of the tiles, from `first_column` on.
        jobs: int64 `[chunks * sections, len(JobField)]`.
        tiles: of the batch's sections.
        batch: status bits are added to its jobs.
        rotations: from `rotation_tables`, by target positions.
        cache: what is written.
    """
    grid = tiles.grid(batch, TOKENS)
    if 0 in grid:
        return
    # No fused multiply-add: the values are then the codec's, bit for bit, given the same tables.
    _place_channels[grid](
        y, channels.rows, channels.scale, channels.means, jobs, batch.chunks, tiles.tiles, cache.places, cache.scales,
        cache.slots, rotations.cos, rotations.sin, batch.status, batch.sections, batch.first_section,
        channels.means.shape[1], tiles.first_column, rotations.cos.shape[1], ELEMENT=ELEMENTS[cache.element],
        UNIT_STRIDE=cache.unit_stride, ALIGNED=cache.aligned, PAIRS=tiles.pairs, TOKENS=TOKENS, num_warps=WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip


def channel_statistics(x: torch.Tensor, chunks: torch.Tensor, means: torch.Tensor, squares: torch.Tensor) -> None:
    """Means of all channels and the sums of squares around them, in float64, always added in the same order.

    The order is not PyTorch's, so that a sum may differ in its last bits: a mean or a scale code can come out as the
    neighbor of the one on the CPU where the exact number lies within 2**-45 of the middle between both.

    Args:
        x: float32 `[tokens, M]`, gathered values, not centered; chunk c has the rows from its FIRST on.
        chunks: table of `ChunkField`.
        means: float32 `[chunks, M]`, written: rounded to bfloat16.
        squares: float64 `[chunks, M]`, written: sums of squares of x less the rounded mean.
    """
    grid = (triton.cdiv(x.shape[1], COLUMNS), len(chunks))
    if 0 not in grid:
        _channel_statistics[grid](
            x, chunks, means, squares, x.shape[1], TOKENS=STATISTICS_TOKENS, COLUMNS=COLUMNS, num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip


def normalize_channels(
    x: torch.Tensor,
    channels: ChannelArrays,
    jobs: torch.Tensor,
    tiles: TileTable,
    batch: ChunkBatch,
    y: torch.Tensor,
) -> None:
    """Gathered values -> coefficients of the coded channels: (x - mean) / scale, each step rounded to float32.

    Args:
        x: float32 `[tokens, M]`, as for `channel_statistics`.
        channels: in the columns of the tiles, from `first_column` on.
        jobs: int64 `[chunks * sections, len(JobField)]`.
        tiles: of the batch's sections.
        batch: its chunks.
        y: float32, flat, written where `JobField.LEVELS` and `JobField.STRIDE` say.
    """
    grid = tiles.grid(batch, TOKENS)
    if 0 not in grid:
        _normalize_channels[grid](
            x, channels.rows, channels.scale, channels.means, jobs, batch.chunks, tiles.tiles, y, batch.sections,
            batch.first_section, x.shape[1], tiles.first_column, PAIRS=tiles.pairs, TOKENS=TOKENS, num_warps=WARPS,
            enable_fp_fusion=True,
        )  # fmt: skip


_TABLES = {"jobs": "*i64", "chunks": "*i64", "tiles": "*i64"}
_CHANNELS = {"rows": "*i32", "channel_scale": "*fp32", "means": "*fp32"}
_SIZES = dict.fromkeys(("sections", "first_section", "columns", "first_column"), "i32")
_PLACE = {
    "y": "*fp32",
    **_CHANNELS,
    **_TABLES,
    "places": "*i64",
    "scales": "*fp32",
    "slots": "*i64",
    "cos": "*fp32",
    "sin": "*fp32",
    "status": "*i32",
    **_SIZES,
    "angles": "i32",
}
_NORMALIZE = {"x": "*fp32", **_CHANNELS, **_TABLES, "y": "*fp32", **_SIZES}
_STATISTICS = {"x": "*fp32", "chunks": "*i64", "means": "*fp32", "squares": "*fp64", "columns": "i32"}

SPECS: tuple[KernelSpec, ...] = (
    KernelSpec(
        "place_channels",
        _place_channels,
        _PLACE,
        {"ELEMENT": tl.bfloat16, "UNIT_STRIDE": True, "ALIGNED": True, "PAIRS": 64, "TOKENS": TOKENS},
        num_warps=WARPS,
        options={"enable_fp_fusion": False},
        divisible=(
            *(name for name, kind in _PLACE.items() if kind.startswith("*")),
            "columns",
            "first_column",
            "angles",
        ),
    ),
    KernelSpec(
        "channel_statistics",
        _channel_statistics,
        _STATISTICS,
        {"TOKENS": STATISTICS_TOKENS, "COLUMNS": COLUMNS},
        divisible=("x", "chunks", "means", "squares", "columns"),
    ),
    KernelSpec(
        "normalize_channels",
        _normalize_channels,
        _NORMALIZE,
        {"PAIRS": 64, "TOKENS": TOKENS},
        num_warps=WARPS,
        divisible=(*(name for name, kind in _NORMALIZE.items() if kind.startswith("*")), "columns", "first_column"),
    ),
)

"""The scheme without a profile: coefficients to and from the cache, channel by channel.

    y --place_channels: scale, mean, RoPE, rounding--> cache
    x (gathered, position-free) --channel_statistics--> means, squares --(host)--> scales, which channels are coded
    x --normalize_channels--> y

What belongs to a channel lies in arrays `[chunks, M]`, in the columns of `transform.lay_out_tiles` (M of them for all
sections): the row of y that holds it, or -1 where it is not coded; its scale; its mean. `jobs` holds the sections of
one chunk after the other, so that the job of a tile is chunk * sections + Tile.SECTION - first_section.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

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
    Chunk,
    Job,
    Tile,
)
from cuvee.kernels.lossless import tile_parts, turn_halves
from cuvee.kernels.pages import store_pairs, token_offsets, turn_pairs
from cuvee.kernels.spec import KernelSpec

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
    rows: torch.Tensor,
    channel_scale: torch.Tensor,
    means: torch.Tensor,
    jobs: torch.Tensor,
    chunks: torch.Tensor,
    tiles: torch.Tensor,
    places: torch.Tensor,
    scales: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    status: torch.Tensor,
    *,
    sections: int,
    first_section: int,
    max_tokens: int,
    pairs: int,
    element: torch.dtype,
    unit_stride: bool,
    aligned: bool,
    first_column: int = 0,
) -> None:
    """Coefficients -> cache: coefficient * scale + mean, keys turned to their positions, rounded to `element`.

    Args:
        y: float32 or bfloat16, flat; `Job.LEVELS` and `Job.STRIDE` tell where the rows of a job lie.
        rows: int32 `[chunks, M]`: of y, within the job; -1: the channel is its mean.
        channel_scale: float32 `[chunks, M]`.
        means: float32 `[chunks, M]`.
        jobs: see `jobs.py`, as the next three.
        chunks: the rows that `jobs` names.
        tiles: of one chunk.
        places: of all units.
        scales: float32 a unit, for 8-bit caches.
        slots: int64, of each token; -1: not wanted.
        cos: float32 `[rows, angles]`, `rotation_tables` of the target positions.
        sin: likewise.
        status: int32 a job.
        sections: jobs of a chunk.
        first_section: number of the first of them.
        max_tokens: of a chunk.
        pairs: of `lay_out_tiles`.
        element: of the cache.
        unit_stride: see `pages.contiguity`.
        aligned: see `pages.contiguity`.
        first_column: of the sections.
    """
    grid = (triton.cdiv(max_tokens, TOKENS), len(tiles), len(jobs) // sections)
    if 0 in grid:
        return
    # No fused multiply-add: the values are then the codec's, bit for bit, given the same tables.
    _place_channels[grid](
        y, rows, channel_scale, means, jobs, chunks, tiles, places, scales, slots, cos, sin, status,
        sections, first_section, means.shape[1], first_column, cos.shape[1],
        ELEMENT=ELEMENTS[element], UNIT_STRIDE=unit_stride, ALIGNED=aligned, PAIRS=pairs, TOKENS=TOKENS,
        num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def place_channels_reference(
    y: torch.Tensor,
    rows: torch.Tensor,
    channel_scale: torch.Tensor,
    means: torch.Tensor,
    jobs: torch.Tensor,
    chunks: torch.Tensor,
    tiles: torch.Tensor,
    places: torch.Tensor,
    scales: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    status: torch.Tensor,
    *,
    sections: int,
    first_section: int,
    max_tokens: int,
    pairs: int,
    element: torch.dtype,
    unit_stride: bool,
    aligned: bool,
    first_column: int = 0,
) -> None:
    """`place_channels`, tile by tile."""
    for part in tile_parts(jobs, chunks, tiles, places, slots, status, sections, first_section):
        job = jobs[part.job].tolist()
        tile, chunk = part.tile, job[Job.CHUNK]
        first = tile[Tile.COLUMN] - first_column
        second = first + pairs
        columns = [*range(first, first + tile[Tile.COUNT0]), *range(second, second + tile[Tile.COUNT1])]
        x = means[chunk, columns].repeat(part.tokens, 1)
        for index, column in enumerate(columns):
            row = int(rows[chunk, column])
            if row >= 0:
                at = job[Job.LEVELS] + row * job[Job.STRIDE]
                x[:, index] = y[at : at + part.tokens].float() * channel_scale[chunk, column] + x[:, index]
        if tile[Tile.ANGLE] >= 0:
            at = part.chunk[Chunk.FIRST]
            turned = slice(tile[Tile.ANGLE], tile[Tile.ANGLE] + tile[Tile.COUNT0])
            x = turn_halves(x, cos[at : at + part.tokens, turned], sin[at : at + part.tokens, turned])
        part.store(x, scales, element)


def channel_statistics(x: torch.Tensor, chunks: torch.Tensor, means: torch.Tensor, squares: torch.Tensor) -> None:
    """Means of all channels and the sums of squares around them, in float64, always added in the same order.

    The order is not PyTorch's, so that a sum may differ in its last bits: a mean or a scale code can come out as the
    neighbor of the one on the CPU where the exact number lies within 2**-45 of the middle between both.

    Args:
        x: float32 `[tokens, M]`, gathered values, not centered; chunk c has the rows from its FIRST on.
        chunks: table of `Chunk`.
        means: float32 `[chunks, M]`, written: rounded to bfloat16.
        squares: float64 `[chunks, M]`, written: sums of squares of x less the rounded mean.
    """
    grid = (triton.cdiv(x.shape[1], COLUMNS), len(chunks))
    if 0 not in grid:
        _channel_statistics[grid](
            x, chunks, means, squares, x.shape[1], TOKENS=STATISTICS_TOKENS, COLUMNS=COLUMNS, num_warps=4
        )


def channel_statistics_reference(
    x: torch.Tensor, chunks: torch.Tensor, means: torch.Tensor, squares: torch.Tensor
) -> None:
    """`channel_statistics` as the codec does it."""
    for index, chunk in enumerate(chunks.tolist()):
        part = x[chunk[Chunk.FIRST] : chunk[Chunk.FIRST] + chunk[Chunk.TOKENS]]
        means[index] = part.mean(0, dtype=torch.float64).bfloat16().float()
        squares[index] = (part - means[index]).double().square().sum(0)


def normalize_channels(
    x: torch.Tensor,
    rows: torch.Tensor,
    channel_scale: torch.Tensor,
    means: torch.Tensor,
    jobs: torch.Tensor,
    chunks: torch.Tensor,
    tiles: torch.Tensor,
    y: torch.Tensor,
    *,
    sections: int,
    first_section: int,
    max_tokens: int,
    pairs: int,
    first_column: int = 0,
) -> None:
    """Gathered values -> coefficients of the coded channels: (x - mean) / scale, each step rounded to float32.

    Args:
        x: float32 `[tokens, M]`, as for `channel_statistics`.
        rows: int32 `[chunks, M]`, of y, within the job; -1: not coded.
        channel_scale: float32 `[chunks, M]`.
        means: float32 `[chunks, M]`.
        jobs: see `jobs.py`, as the next two.
        chunks: the rows that `jobs` names.
        tiles: of one chunk.
        y: float32, flat, written where `Job.LEVELS` and `Job.STRIDE` say.
        sections: jobs of a chunk.
        first_section: number of the first of them.
        max_tokens: of a chunk.
        pairs: of `lay_out_tiles`.
        first_column: of the sections.
    """
    grid = (triton.cdiv(max_tokens, TOKENS), len(tiles), len(jobs) // sections)
    if 0 not in grid:
        _normalize_channels[grid](
            x, rows, channel_scale, means, jobs, chunks, tiles, y,
            sections, first_section, x.shape[1], first_column, PAIRS=pairs, TOKENS=TOKENS, num_warps=WARPS,
        )  # fmt: skip


def normalize_channels_reference(
    x: torch.Tensor,
    rows: torch.Tensor,
    channel_scale: torch.Tensor,
    means: torch.Tensor,
    jobs: torch.Tensor,
    chunks: torch.Tensor,
    tiles: torch.Tensor,
    y: torch.Tensor,
    *,
    sections: int,
    first_section: int,
    max_tokens: int,
    pairs: int,
    first_column: int = 0,
) -> None:
    """`normalize_channels`, channel by channel."""
    for first in range(0, len(jobs), sections):
        for tile in tiles.tolist():
            job = jobs[first + tile[Tile.SECTION] - first_section].tolist()
            index, length = job[Job.CHUNK], job[Job.TOKENS]
            start = int(chunks[index, Chunk.FIRST])
            for column in range(tile[Tile.COLUMN] - first_column, tile[Tile.COLUMN] - first_column + 2 * pairs):
                row = int(rows[index, column])
                if row >= 0:
                    at = job[Job.LEVELS] + row * job[Job.STRIDE]
                    centered = x[start : start + length, column] - means[index, column]
                    y[at : at + length] = centered / channel_scale[index, column]


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

"""The linear maps on the device: from a cache to coefficients and back.

    encode  cache --gather: un-rotate, center--> x [tokens, M] --analyze: y = forward x--> y [R, STRIDE] a job
    decode  y --synthesize: inverse y, + mean, rotate, round--> cache

The M *columns* of x, of the means and of the bases are a section's values in another order, that of its tiles, padded:
`lay_out_tiles`. A tile's 2 * PAIRS columns are the first dimensions of its pairs, then the second ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from cuvee.codec.classes import CLASSES, WINDOW
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout, Rope
from cuvee.codec.transform import Section
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
    Block,
    Chunk,
    Job,
    Status,
    Tile,
)
from cuvee.kernels.pages import (
    COMPILED,
    check_slots,
    load_pairs,
    load_pairs_reference,
    store_pairs,
    store_pairs_reference,
    token_offsets,
    turn_pairs,
)
from cuvee.kernels.spec import KernelSpec

I64 = npt.NDArray[np.int64]

MIN_PAIRS, MAX_PAIRS = 16, 64  # a half tile: what a matrix instruction takes at least; one head of 128 in one tile
MAX_GROUP = 32  # tiles that run together: all of a section of two layers of 8 heads
TABLE_TOKENS = 16  # a program of `rotation_tables`
GATHER_TOKENS = 64
ANALYSIS_ROWS, ANALYSIS_TOKENS, ANALYSIS_COLUMNS = 128, 64, 32  # a step of `analyze`: what fits registers

INFINITY = tl.constexpr(float("inf"))
_WINDOW = tl.constexpr(WINDOW)
_CLASSES = tl.constexpr(CLASSES)


@dataclass(frozen=True, slots=True)
class Columns:
    """Where tokens have classes: in which order the coefficients of a job lie, and how many there are.

    Attributes:
        classes: uint8 below 16, at `Job.COLUMNS` of each job those of its T columns, not falling within a window.
        order: uint8, likewise the token of each column, counted from the first of its window.
        block_ranks: int32 `[blocks, 16]` components of each block of the bases by class, not rising with the class.
    """

    classes: torch.Tensor
    order: torch.Tensor
    block_ranks: torch.Tensor


@triton.jit
def _classed_columns(job, block, start, column, inside, classes, order, block_ranks):  # type: ignore[no-untyped-def]
    """Of columns from `start` on, all of one window: their tokens, and the components of a block that they have."""
    first = tl.load(job + JOB_COLUMNS)
    token = start // _WINDOW * _WINDOW + tl.load(order + first + column, mask=inside, other=0).to(tl.int32)
    finest = tl.load(classes + first + start).to(tl.int64)
    return token, tl.load(block_ranks + (block * _CLASSES + finest))


@dataclass(frozen=True, slots=True)
class TileLayout:
    """How sections are cut into tiles.

    Attributes:
        tiles: `[tiles, len(Tile)]` in the order of the sections, units, heads and dimensions; no ranks yet.
        blocks: `[blocks, len(Block)]` likewise.
        columns: M, of all sections.
        pairs: PAIRS: pairs a tile.
        order: int32 `[M]`: which of its section's N values a column holds, or -1: padding.
        bounds: int64 `[sections + 1]`: the columns of section i are `bounds[i] … bounds[i + 1] - 1`.
    """

    tiles: I64
    blocks: I64
    columns: int
    pairs: int
    order: npt.NDArray[np.int32]
    bounds: I64

    def pack(self, values: torch.Tensor, section: int) -> torch.Tensor:
        """Values `[..., N]` of a section -> its columns `[..., bounds[i + 1] - bounds[i]]`, padded with zeros."""
        order = torch.from_numpy(self.order[self.bounds[section] : self.bounds[section + 1]]).to(values.device).long()
        return torch.where(order >= 0, values[..., order.clamp_min(0)], 0)

    def pack_basis(self, matrices: Sequence[torch.Tensor], section: int) -> list[torch.Tensor]:
        """Per block of a section `[rank, n]` (forward, or inverse transposed) -> `[rank, Block.COLUMNS]`."""
        own = self.blocks[self.blocks[:, Block.SECTION] == section]
        packed, first = [], 0
        for matrix, block in zip(matrices, own, strict=True):
            column = int(block[Block.COLUMN])
            order = torch.from_numpy(self.order[column : column + int(block[Block.COLUMNS])]).to(matrix.device).long()
            packed.append(torch.where(order >= 0, matrix[:, (order - first).clamp_min(0)], 0))
            first += matrix.shape[1]
        return packed

    def with_ranks(
        self, ranks: Sequence[Sequence[int]], stored: Sequence[Sequence[int]] | None = None
    ) -> tuple[I64, I64, int]:
        """The tables for blocks cut to their leading components.

        Args:
            ranks: per section, per block: components that are coded.
            stored: likewise, components of the bases in memory, at least `ranks`; None: `ranks`. The bases are one
                `[stored, Block.COLUMNS]` after the other.

        Returns:
            tiles, blocks, and the number of elements of the bases, forward or inverse alike.
        """
        tiles, blocks = self.tiles.copy(), self.blocks.copy()
        flat = np.array([rank for section in ranks for rank in section], np.int64)
        kept = flat if stored is None else np.array([rank for section in stored for rank in section], np.int64)
        if flat.shape != kept.shape or len(flat) != len(blocks) or np.any(flat > kept):
            raise InputError("ranks and stored ranks must name every block, and no more components than are stored")
        end = np.cumsum(kept * blocks[:, Block.COLUMNS])
        blocks[:, Block.RANK] = flat
        blocks[:, Block.BASIS] = end - kept * blocks[:, Block.COLUMNS]
        for section in np.unique(blocks[:, Block.SECTION]):
            own = blocks[:, Block.SECTION] == section
            blocks[own, Block.ROW] = np.cumsum(flat[own]) - flat[own]
        of_tile = np.searchsorted(blocks[:, Block.COLUMN], tiles[:, Tile.COLUMN], side="right") - 1
        tiles[:, [Tile.ROW, Tile.RANK]] = blocks[of_tile][:, [Block.ROW, Block.RANK]]
        tiles[:, Tile.BASIS] = blocks[of_tile, Block.BASIS] + tiles[:, Tile.COLUMN] - blocks[of_tile, Block.COLUMN]
        tiles[:, Tile.BASIS_STRIDE] = blocks[of_tile, Block.COLUMNS]
        return tiles, blocks, int(end[-1])


def lay_out_tiles(layout: KVLayout, sections: Sequence[Section], angles: Mapping[Rope, int]) -> TileLayout:
    """Cut sections into tiles, each within one head of one unit and one block.

    Args:
        layout: of the cache.
        sections: from `partition`, any group.
        angles: first column of every RoPE of the layout in the rotation tables; a multiple of 4 allows faster loads.

    Raises:
        InputError: a block that ends within a head.
    """
    longest = 1
    for layer in layout.layers:
        turned = layer.rope.rotary_dim if layer.rope else 0
        longest = max(longest, turned // 2, -(-(layer.head_dim - turned) // 2), -(-layer.value_dim // 2))
    pairs = min(max(1 << (longest - 1).bit_length(), MIN_PAIRS), MAX_PAIRS)
    tiles: list[list[int]] = []
    blocks: list[list[int]] = []
    order: list[npt.NDArray[np.int32]] = []
    bounds = [0]
    for index, section in enumerate(sections):
        ends = list(np.cumsum(section.blocks))
        value = 0  # of the section's N
        for layer_index, layer in enumerate(section.layers(layout), section.first_layer):
            for unit, size, rope in (
                (2 * layer_index, layer.head_dim, layer.rope),
                (2 * layer_index + 1, layer.value_dim, None),
            ):
                for head in range(layer.kv_heads):
                    if value == 0 or value == ends[0]:
                        if value:
                            ends.pop(0)
                        blocks.append([index, 0, 0, 0, len(tiles) * 2 * pairs, 0])
                    if value + size > ends[0]:
                        raise InputError(f"a block of section {index} ends within a head")
                    block = len(blocks) - 1
                    for piece in _cut_head(size, rope, angles, pairs):
                        first, second, count0, count1, step, angle = piece
                        column = len(tiles) * 2 * pairs
                        tiles.append(
                            [index, unit, head, first, second, count0, count1, step, angle, 0, 0, 0, 0, column, block]
                        )
                        blocks[-1][Block.COLUMNS] += 2 * pairs
                        place = np.full((2, pairs), -1, np.int32)
                        place[0, :count0] = value + first + step * np.arange(count0)
                        place[1, :count1] = value + second + step * np.arange(count1)
                        order.append(place.ravel())
                    value += size
        bounds.append(len(tiles) * 2 * pairs)
    return TileLayout(
        np.array(tiles, np.int64),
        np.array(blocks, np.int64),
        len(tiles) * 2 * pairs,
        pairs,
        np.concatenate(order),
        np.array(bounds, np.int64),
    )


def _cut_head(
    size: int, rope: Rope | None, angles: Mapping[Rope, int], pairs: int
) -> list[tuple[int, int, int, int, int, int]]:
    """Tiles of a head: (DIM0, DIM1, COUNT0, COUNT1, STEP, ANGLE)."""
    cut = []
    turned = 0
    if rope is not None:
        turned = rope.rotary_dim
        for pair in range(0, turned // 2, pairs):
            count = min(pairs, turned // 2 - pair)
            first, second = (2 * pair, 2 * pair + 1) if rope.interleaved else (pair, turned // 2 + pair)
            cut.append((first, second, count, count, 2 if rope.interleaved else 1, angles[rope] + pair))
    for first in range(turned, size, 2 * pairs):
        count = min(2 * pairs, size - first)
        half = (count + 1) // 2
        cut.append((first, first + half, half, count - half, 1, -1))
    return cut


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
    cos: torch.Tensor,
    sin: torch.Tensor,
    use_source: bool,
    inverse: bool,
    max_tokens: int,
) -> None:
    """Write cos and sin of all tokens of all chunks, `codec.rope.cos_sin` of all RoPEs of a layout side by side.

    Args:
        chunks: int64 `[chunks, len(Chunk)]`.
        inv_freq: float32 `[A]`, angle per position.
        scaling: float32 `[A]`, `Rope.attention_scaling`.
        cos: float32 `[tokens, A]`; rows Chunk.FIRST … are written.
        sin: likewise.
        use_source: positions count from Chunk.SOURCE, not Chunk.TARGET.
        inverse: divide by the scaling; `turn_pairs(INVERSE=True)` then un-rotates, as `codec.rope.unrotate` does.
        max_tokens: of a chunk.
    """
    angles = len(inv_freq)
    if not angles:
        return
    block_a = min(triton.next_power_of_2(angles), 64)
    grid = (len(chunks), triton.cdiv(max_tokens, TABLE_TOKENS), triton.cdiv(angles, block_a))
    _rotation_tables[grid](
        chunks, inv_freq, scaling, cos, sin, angles, POSITION=int(Chunk.SOURCE if use_source else Chunk.TARGET),
        INVERSE=inverse, BLOCK_T=TABLE_TOKENS, BLOCK_A=block_a, num_warps=4,
        enable_fp_fusion=False,  # an angle is rounded before its reduction, as in codec/rope.py
    )  # fmt: skip


def rotation_tables_reference(
    chunks: torch.Tensor,
    inv_freq: torch.Tensor,
    scaling: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    use_source: bool,
    inverse: bool,
    max_tokens: int,
) -> None:
    """See `rotation_tables`."""
    scale = 1 / scaling if inverse else scaling
    for row in chunks.tolist():
        first, tokens = row[Chunk.FIRST], min(row[Chunk.TOKENS], max_tokens)
        start = row[Chunk.SOURCE if use_source else Chunk.TARGET]
        turn = torch.arange(start, start + tokens, device=cos.device)[:, None].float() * inv_freq
        cos[first : first + tokens] = turn.cos() * scale
        sin[first : first + tokens] = turn.sin() * scale


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
    tiles: torch.Tensor,
    means: torch.Tensor,
    chunks: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    places: torch.Tensor,
    scales: torch.Tensor,
    x: torch.Tensor,
    status: torch.Tensor,
    sections: int,
    first_section: int,
    max_tokens: int,
    element: torch.dtype,
    unit_stride: bool,
    pairs: int,
    aligned: bool = False,
    first_column: int = 0,
) -> None:
    """Read a cache: un-rotated, less the mean or the sink's mean, in the columns' order.

    A program reads one tile of GATHER_TOKENS tokens. NaN and infinities are flagged (Status.NOT_FINITE), after
    un-rotation; so is a slot beyond the cache (Status.SLOT), which reads as zero, as -1 does.

    Args:
        tiles: int64 `[tiles, len(Tile)]`: those of the sections `first_section … first_section + sections - 1`.
        means: float32 `[S + 1, M]`: means of the first S positions of a sequence, then that of all others.
        chunks: int64 `[chunks, len(Chunk)]`.
        slots: int64, of every token of every chunk from Chunk.FIRST on; -1: nowhere.
        cos: float32 `[tokens, A]` from `rotation_tables(inverse=True)`, by source positions.
        sin: likewise.
        places: int64 `[units, len(Place)]`.
        scales: float32 `[units]`, of FP8 caches.
        x: float32 `[tokens, width]`, written in rows Chunk.FIRST …, columns `Tile.COLUMN - first_column …`; padded
            columns become zero.
        status: int32 `[chunks * sections]`, of the jobs in chunk-major order; Status bits are added.
        sections: how many.
        first_section: of the run.
        max_tokens: of a chunk.
        element: type of the cache.
        unit_stride: see `pages.contiguity`.
        pairs: of `lay_out_tiles`.
        aligned: see `pages.contiguity`.
        first_column: of the run of sections.
    """
    block_t = GATHER_TOKENS
    _gather[(len(tiles), triton.cdiv(max_tokens, block_t), len(chunks))](
        tiles, means, chunks, slots, cos, sin, places, scales, x, status, sections, first_section, len(means) - 1,
        means.stride(0), x.stride(0), first_column, cos.shape[1], BLOCK_T=block_t, ELEMENT=ELEMENTS[element],
        UNIT_STRIDE=unit_stride, ALIGNED=aligned, PAIRS=pairs, num_warps=4,
    )  # fmt: skip


def gather_reference(
    tiles: torch.Tensor,
    means: torch.Tensor,
    chunks: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    places: torch.Tensor,
    scales: torch.Tensor,
    x: torch.Tensor,
    status: torch.Tensor,
    sections: int,
    first_section: int,
    max_tokens: int,
    element: torch.dtype,
    unit_stride: bool,
    pairs: int,
    aligned: bool = False,
    first_column: int = 0,
) -> None:
    """See `gather`."""
    place_rows, unit_scales = places.tolist(), scales.tolist()
    for chunk, row in enumerate(chunks.tolist()):
        at = slice(row[Chunk.FIRST], row[Chunk.FIRST] + row[Chunk.TOKENS])
        mean = _means(means, row, x.device)
        for tile in tiles.tolist():
            place, unit_scale = place_rows[tile[Tile.UNIT]], unit_scales[tile[Tile.UNIT]]
            job = chunk * sections + tile[Tile.SECTION] - first_section
            exists = check_slots(slots[at], place, status[job])
            a, b = load_pairs_reference(place, unit_scale, tile, slots[at], exists, element, pairs)
            if tile[Tile.ANGLE] >= 0:
                a, b = _turn(a, b, cos[at], -sin[at], tile[Tile.ANGLE])
            both = torch.cat([a, b], 1)
            if not bool(both.isfinite().all()):
                status[job] |= int(Status.NOT_FINITE)
            both -= mean[:, tile[Tile.COLUMN] : tile[Tile.COLUMN] + 2 * pairs]
            both[:, tile[Tile.COUNT0] : pairs] = 0
            both[:, pairs + tile[Tile.COUNT1] :] = 0
            first = tile[Tile.COLUMN] - first_column
            x[at, first : first + 2 * pairs] = both


def _means(means: torch.Tensor, chunk: Sequence[int], device: torch.device) -> torch.Tensor:
    """Means `[T, M]` of a chunk's tokens."""
    source = torch.arange(chunk[Chunk.SOURCE], chunk[Chunk.SOURCE] + chunk[Chunk.TOKENS], device=device)
    return means[source.clamp_max(len(means) - 1)]


def _turn(
    a: torch.Tensor, b: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, angle: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `turn_pairs` computes."""
    width = min(a.shape[1], cos.shape[1] - angle)
    c, s = torch.zeros_like(a), torch.zeros_like(a)
    c[:, :width], s[:, :width] = cos[:, angle : angle + width], sin[:, angle : angle + width]
    return a * c - b * s, b * c + a * s


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
    chunks: torch.Tensor,
    y: torch.Tensor,
    sections: int,
    max_rank: int,
    max_tokens: int,
    first_section: int = 0,
    first_column: int = 0,
    columns: Columns | None = None,
) -> None:
    """Coefficients of centered values: `SectionBasis.analyze` for every block of every chunk.

    Rounding to bfloat16 would add an error of the order of the quantizer's step; three TF32 products (NVIDIA) or
    float32 arithmetic (AMD) do not.

    Args:
        x: float32 `[tokens, width]` from `gather`.
        jobs: int64 `[chunks * sections, len(Job)]`, chunk-major.
        blocks: int64 `[blocks, len(Block)]`: those of the run of sections.
        basis: float32; `[Block.RANK, Block.COLUMNS]` at Block.BASIS, padded columns zero.
        chunks: int64 `[chunks, len(Chunk)]`.
        y: float32; rows Block.ROW … of a job's `[R, Job.STRIDE]` at Job.LEVELS are written, tokens 0 … T - 1.
        sections: how many.
        max_rank: of a block.
        max_tokens: of a chunk.
        first_section: of the run of sections.
        first_column: likewise.
        columns: None: jobs whose tokens have classes are left out. Else the others are, column i of the coefficients
            is a token of that order, and rows of a block that none of 64 columns has are not written. `block_ranks`
            has the rows of `blocks`.
    """
    block_r = min(max(triton.next_power_of_2(max_rank), 16), ANALYSIS_ROWS)
    block_t = min(max(triton.next_power_of_2(max_tokens), 16), ANALYSIS_TOKENS)
    rank_blocks, token_blocks = triton.cdiv(max_rank, block_r), triton.cdiv(max_tokens, block_t)
    grid = (len(blocks) * len(chunks) * rank_blocks * token_blocks,)
    if not grid[0]:
        return
    _analyze[grid](
        x, jobs, blocks, basis, chunks, y, *_unpacked(columns), sections, first_section, first_column, x.stride(0),
        rank_blocks, token_blocks, len(chunks), BLOCK_T=block_t, BLOCK_R=block_r, BLOCK_K=ANALYSIS_COLUMNS,
        PRECISION="ieee" if torch.version.hip or not x.is_cuda else "tf32x3", CLASSED=columns is not None,
        num_warps=8, num_stages=3,
    )  # fmt: skip


def _unpacked(columns: Columns | None) -> tuple[torch.Tensor | None, ...]:
    return (None, None, None) if columns is None else (columns.classes, columns.order, columns.block_ranks)


def _tokens_of(job: Sequence[int], columns: Columns) -> torch.Tensor:
    """The token of each column of a job, counted from the chunk's first."""
    order = columns.order[job[Job.COLUMNS] :][: job[Job.TOKENS]].long()
    place = torch.arange(len(order), device=order.device)
    return place // WINDOW * WINDOW + order


def _ranks_of(job: Sequence[int], columns: Columns, block: int, size: int) -> Iterator[tuple[slice, int]]:
    """Runs of `size` columns of a job, and how many components of a block the first of each has."""
    classes = columns.classes[job[Job.COLUMNS] :][: job[Job.TOKENS]].tolist()
    ranks = columns.block_ranks[block].tolist()
    for start in range(0, len(classes), size):
        yield slice(start, min(start + size, len(classes))), ranks[classes[start]]


def analyze_reference(
    x: torch.Tensor,
    jobs: torch.Tensor,
    blocks: torch.Tensor,
    basis: torch.Tensor,
    chunks: torch.Tensor,
    y: torch.Tensor,
    sections: int,
    max_rank: int,
    max_tokens: int,
    first_section: int = 0,
    first_column: int = 0,
    columns: Columns | None = None,
) -> None:
    """See `analyze`."""
    job_rows = jobs.tolist()
    block_t = min(max(triton.next_power_of_2(max_tokens), 16), ANALYSIS_TOKENS)
    for chunk, row in enumerate(chunks.tolist()):
        at, tokens = slice(row[Chunk.FIRST], row[Chunk.FIRST] + row[Chunk.TOKENS]), row[Chunk.TOKENS]
        for index, block in enumerate(blocks.tolist()):
            job = job_rows[chunk * sections + block[Block.SECTION] - first_section]
            if (job[Job.CLASS_PLAN] > 0) != (columns is not None):
                continue
            size, rank, column = block[Block.COLUMNS], block[Block.RANK], block[Block.COLUMN] - first_column
            matrix = basis[block[Block.BASIS] :][: rank * size].view(rank, size)
            values = x[at, column : column + size]
            if columns is None:
                _coefficients(y, job, block[Block.ROW], rank, tokens).copy_(matrix @ values.T)
                continue
            values = values[_tokens_of(job, columns)]
            for run, own in _ranks_of(job, columns, index, block_t):
                out = _coefficients(y, job, block[Block.ROW], own, tokens)
                out[:, run] = matrix[:own] @ values[run].T


def _coefficients(y: torch.Tensor, job: Sequence[int], first: int, rank: int, tokens: int) -> torch.Tensor:
    """View `[rank, tokens]` of components `first …` of a job."""
    stride = job[Job.STRIDE]
    return y.as_strided((rank, tokens), (stride, 1), y.storage_offset() + job[Job.LEVELS] + first * stride)


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

    float16 has the 11 significant bits of a TF32 factor, so that products on tensor cores lose nothing it could hold;
    float32 gets float32 products. AMD has no TF32.
    """
    return "tf32" if dtype != torch.float32 or (element == torch.float16 and not torch.version.hip) else "ieee"


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
    tiles: torch.Tensor,
    basis: torch.Tensor,
    means: torch.Tensor,
    chunks: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    places: torch.Tensor,
    scales: torch.Tensor,
    status: torch.Tensor,
    sections: int,
    first_section: int,
    max_tokens: int,
    element: torch.dtype,
    unit_stride: bool,
    pairs: int,
    aligned: bool = False,
    config: SynthesisConfig | None = None,
    columns: Columns | None = None,
) -> None:
    """Write a cache: inverse transform, mean, rotation, rounding, in one pass.

    A program computes one tile of `block_t` tokens: `codec.transform.synthesize` and `place`. A slot beyond the cache
    is flagged (Status.SLOT) and not written, like one of -1.

    Args:
        y: coefficients, bfloat16, float16 or float32, at a multiple of 16 bytes: a job's `[R, Job.STRIDE]` at
            Job.LEVELS. Job.LEVELS and Job.STRIDE are multiples of 16; what lies beyond a job's tokens is ignored.
        jobs: int64 `[chunks * sections, len(Job)]`, chunk-major.
        tiles: int64 `[tiles, len(Tile)]`: those of the sections `first_section … first_section + sections - 1`.
        basis: type of y, at a multiple of 16 bytes: a tile's `[RANK, 2 * PAIRS]` at Tile.BASIS with rows
            Tile.BASIS_STRIDE apart, both multiples of 2 * PAIRS.
        means: float32 `[S + 1, M]`: means of the first S positions of a sequence, then that of all others.
        chunks: int64 `[chunks, len(Chunk)]`.
        slots: int64, of every token of every chunk from Chunk.FIRST on; -1: nowhere.
        cos: float32 `[tokens, A]` from `rotation_tables`, by target positions.
        sin: likewise.
        places: int64 `[units, len(Place)]`.
        scales: float32 `[units]`, of FP8 caches.
        status: int32 `[chunks * sections]`; Status bits are added.
        sections: how many.
        first_section: of the run.
        max_tokens: of a chunk.
        element: type of the cache.
        unit_stride: see `pages.contiguity`.
        pairs: of `lay_out_tiles`.
        aligned: see `pages.contiguity`.
        config: None: `synthesis_config` of a large rank.
        columns: None: jobs whose tokens have classes are left out. Else the others are, and column i of the
            coefficients is a token of that order; of each `block_t` columns the components of the first are read.
    """
    chosen = config or synthesis_config(y.dtype, element, 1 << 16, max_tokens, aligned)
    token_blocks = triton.cdiv(max_tokens, chosen.block_t)
    group = max(min(len(tiles) // sections, MAX_GROUP), 1)
    _synthesize[(len(tiles) * len(chunks) * token_blocks,)](
        y, jobs, tiles, basis, means, chunks, slots, cos, sin, places, scales, status, *_unpacked(columns), sections,
        first_section, len(tiles), group, len(chunks), token_blocks, len(means) - 1, means.stride(0), cos.shape[1],
        BLOCK_T=chosen.block_t, BLOCK_R=chosen.block_r, ELEMENT=ELEMENTS[element], UNIT_STRIDE=unit_stride,
        ALIGNED=aligned, PAIRS=pairs, PRECISION=product_precision(y.dtype, element), CLASSED=columns is not None,
        num_warps=chosen.num_warps,
        num_stages=min(chosen.num_stages, HIP_STAGES) if torch.version.hip else chosen.num_stages,
    )  # fmt: skip


def synthesize_reference(
    y: torch.Tensor,
    jobs: torch.Tensor,
    tiles: torch.Tensor,
    basis: torch.Tensor,
    means: torch.Tensor,
    chunks: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    places: torch.Tensor,
    scales: torch.Tensor,
    status: torch.Tensor,
    sections: int,
    first_section: int,
    max_tokens: int,
    element: torch.dtype,
    unit_stride: bool,
    pairs: int,
    aligned: bool = False,
    config: SynthesisConfig | None = None,
    columns: Columns | None = None,
) -> None:
    """See `synthesize`."""
    block_t = (config or synthesis_config(y.dtype, element, 1 << 16, max_tokens, aligned)).block_t
    place_rows, unit_scales, job_rows = places.tolist(), scales.tolist(), jobs.tolist()
    for chunk, row in enumerate(chunks.tolist()):
        at, tokens = slice(row[Chunk.FIRST], row[Chunk.FIRST] + row[Chunk.TOKENS]), row[Chunk.TOKENS]
        mean = _means(means, row, y.device)
        for tile in tiles.tolist():
            job = chunk * sections + tile[Tile.SECTION] - first_section
            if (job_rows[job][Job.CLASS_PLAN] > 0) != (columns is not None):
                continue
            right = basis.as_strided(
                (tile[Tile.RANK], 2 * pairs), (tile[Tile.BASIS_STRIDE], 1), basis.storage_offset() + tile[Tile.BASIS]
            ).float()
            if columns is None:
                left = _coefficients(y, job_rows[job], tile[Tile.ROW], tile[Tile.RANK], tokens)
                both = left.float().T @ right
            else:
                both = torch.empty(tokens, 2 * pairs, device=y.device)
                token = _tokens_of(job_rows[job], columns)
                for run, rank in _ranks_of(job_rows[job], columns, tile[Tile.BLOCK], block_t):
                    left = _coefficients(y, job_rows[job], tile[Tile.ROW], rank, tokens)
                    both[token[run]] = left[:, run].float().T @ right[:rank]
            both = both + mean[:, tile[Tile.COLUMN] : tile[Tile.COLUMN] + 2 * pairs]
            a, b = both[:, :pairs], both[:, pairs:]
            if tile[Tile.ANGLE] >= 0:
                a, b = _turn(a, b, cos[at], sin[at], tile[Tile.ANGLE])
            place, unit_scale = place_rows[tile[Tile.UNIT]], unit_scales[tile[Tile.UNIT]]
            exists = check_slots(slots[at], place, status[job])
            store_pairs_reference(place, unit_scale, tile, slots[at], exists, (a, b), element)


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
    hip: dict[str, object] = {"num_stages": min(config.num_stages, HIP_STAGES)}
    if dtype == torch.float32:
        hip["constants"] = {"PRECISION": "ieee"}
    return _spec(
        name, _synthesize, constants, config.num_warps, config.num_stages, changes={"gfx942": hip}, y=y, basis=y
    )


SPECS: tuple[KernelSpec, ...] = (
    _spec(
        "rotation_tables",
        _rotation_tables,
        {"POSITION": int(Chunk.TARGET), "INVERSE": False, "BLOCK_T": TABLE_TOKENS, "BLOCK_A": 64},
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

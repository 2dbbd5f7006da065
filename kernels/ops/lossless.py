"""Lossless sections: bytes of values to and from planes, and what models them.

    cache --sum_bytes--> sums --count_symbols--> references, counts --(host)--> which planes are coded, their tables
    cache, references --split_planes--> coded planes, stored planes           decoding_tables: frequencies -> theirs
    stored planes, coded planes, references --merge_planes--> cache

Encoding reads the cache three times and writes each byte once. That is less traffic than keeping planes between the
steps, and where a plane goes depends on whether it is coded, which is known only once its symbols are counted.

A section is one layer, K then V. `jobs` holds the sections of one chunk after the other, so that the job of a tile is
chunk * sections + TileField.SECTION - first_section. Values are rotated left by one bit before they are cut into bytes:
see `codec/stages/reference/byte_planes.py`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch
import triton
import triton.language as tl

from cuvee.codec.entropy.tables import SYMBOLS
from cuvee.codec.stages.reference.byte_planes import PROB_BITS
from cuvee.kernels.analysis.kernel_spec import KernelSpec
from cuvee.kernels.jobs import (
    CHUNK_FIELDS,
    CHUNK_FIRST,
    CHUNK_SOURCE,
    CHUNK_TARGET,
    ELEMENTS,
    JOB_CHUNK,
    JOB_FIELDS,
    JOB_TOKENS,
    TILE_ANGLE,
    TILE_COUNT0,
    TILE_COUNT1,
    TILE_DIM0,
    TILE_DIM1,
    TILE_FIELDS,
    TILE_HEAD,
    TILE_SECTION,
    TILE_STEP,
    TILE_UNIT,
)
from cuvee.kernels.ops.arguments import CacheView, ChunkBatch, RotationTables, TileTable
from cuvee.kernels.ops.pages import (
    half_addresses,
    load_pairs,
    rounded,
    store_pairs,
    token_offsets,
    turn_pairs,
)
from cuvee.kernels.ops.rans import ENTRIES, SPAN, WIDTH

WARPS = 8  # 64 tokens of 64 pairs at 4 spill
TOKENS = 64  # a program's: two sectors of a plane's row

WORDS = {2: tl.uint16, 4: tl.uint32}


class BytePlaneField(IntEnum):
    """A row of `table`: one for each byte of the values of each unit of each job, least significant first.

    The row is (2 * job + unit) * itemsize + byte, with unit 0 for K and 1 for V.
    """

    PLANE = 0  # of the plane `[C, T]`: in `planes` if it is coded, else in `data` or `out`
    REFERENCE = 1  # of the reference bytes `[C]`, in `data` or `references` (and of `sums`); -1: the plane is stored
    HEAD_DIM = 2  # values of a head: the channel is head * HEAD_DIM + dimension


BYTE_FIELDS = tl.constexpr(len(BytePlaneField))
BYTE_PLANE = tl.constexpr(int(BytePlaneField.PLANE))
BYTE_REFERENCE = tl.constexpr(int(BytePlaneField.REFERENCE))
BYTE_HEAD_DIM = tl.constexpr(int(BytePlaneField.HEAD_DIM))

TOTAL = tl.constexpr(1 << PROB_BITS)
VALUES = tl.constexpr(SYMBOLS)
# Of a decode table: see `rans.decoding_table`.
DECODING_WIDTH = tl.constexpr(WIDTH)
ENTRIES_AT = tl.constexpr(ENTRIES)
SLOTS_OF_WORD = tl.constexpr(SPAN)


@triton.jit
def _decoding_tables(freq, decoding):  # type: ignore[no-untyped-def]
    table = tl.program_id(0).to(tl.int64)
    symbol = tl.arange(0, VALUES)
    frequency = tl.load(freq + table * VALUES + symbol).to(tl.int32)
    low = tl.cumsum(frequency, 0) - frequency
    used = (frequency > 0) & (low < TOTAL)
    number = tl.cumsum(used.to(tl.int32), 0) - 1
    # How many begin in each word's slots, the first symbol aside. Those that begin nowhere do so in the last, unused.
    later = used & (low > 0)
    begin = tl.histogram(tl.where(later, low // SLOTS_OF_WORD, ENTRIES_AT - 1), ENTRIES_AT)
    before = (tl.cumsum(begin, 0) - begin).to(tl.uint32)
    row = decoding + table * DECODING_WIDTH
    place = tl.arange(0, ENTRIES_AT)
    tl.store(row + place, tl.where(place * SLOTS_OF_WORD < TOTAL, before << 24, 0))
    tl.store(row + ENTRIES_AT + symbol, tl.zeros((VALUES,), tl.uint32))
    tl.debug_barrier()
    bit = tl.full((VALUES,), 1, tl.uint32) << (low % SLOTS_OF_WORD).to(tl.uint32)
    tl.atomic_add(row + low // SLOTS_OF_WORD, bit, mask=later, sem="relaxed")
    entry = frequency << 20 | symbol << 12 | low
    tl.store(row + ENTRIES_AT + number, entry.to(tl.uint32, bitcast=True), mask=used)


@triton.jit
def _half_channels(tile, pair, head_dim, DIM: tl.constexpr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Channels of a tile's first or second dimensions, and which exist."""
    dim = tl.load(tile + DIM) + pair * tl.load(tile + TILE_STEP)
    return tl.load(tile + TILE_HEAD) * head_dim + dim, pair < tl.load(tile + COUNT)


@triton.jit
def _multiple(number, FACTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """`number`, known to the compiler as a multiple of FACTOR."""
    return number // FACTOR * FACTOR


@triton.jit
def _merge_half(data, planes, row, channel, has, token, inside, tokens, WORD: tl.constexpr, FACTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """The values `[tokens, PAIRS]` of some channels as words, from their planes (`row` and the rows after it)."""
    at = (channel * tokens)[None, :] + token[:, None]
    mask = inside[:, None] & has[None, :]
    word = tl.zeros(at.shape, WORD)
    for index in tl.static_range(WORD.primitive_bitwidth // 8):
        plane = _multiple(tl.load(row + index * BYTE_FIELDS + BYTE_PLANE), FACTOR)
        reference = tl.load(row + index * BYTE_FIELDS + BYTE_REFERENCE)
        if reference < 0:
            byte = tl.load(data + plane + at, mask=mask, other=0)
        else:
            center = tl.load(data + reference + channel, mask=has, other=0)
            byte = tl.load(planes + plane + at, mask=mask, other=0) + center[None, :]
        word = word | byte.to(WORD) << 8 * index
    return word >> 1 | word << WORD.primitive_bitwidth - 1


@triton.jit
def _values(word, inside, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """What words mean, float32; zero for tokens beyond the chunk, whose words are made of references alone."""
    return tl.where(inside[:, None], word, 0).to(word.dtype).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _words(x, DTYPE: tl.constexpr, WORD: tl.constexpr):  # type: ignore[no-untyped-def]
    """The inverse of `_values`, rounded to nearest, ties to even."""
    return rounded(x, DTYPE).to(WORD, bitcast=True)


@triton.jit(do_not_specialize=["sections", "first_section"])
def _merge_planes(  # type: ignore[no-untyped-def]
    data, planes, table, jobs, chunks, tiles, places, scales, slots, source_cos, source_sin, cos, sin, status,
    sections, first_section, angles,
    DTYPE: tl.constexpr, ELEMENT: tl.constexpr, WORD: tl.constexpr, FACTOR: tl.constexpr, MOVED: tl.constexpr,
    UNIT_STRIDE: tl.constexpr, ALIGNED: tl.constexpr, PAIRS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(1) * TILE_FIELDS
    unit = tl.load(tile + TILE_UNIT)
    job = tl.program_id(2) * sections + tl.load(tile + TILE_SECTION) - first_section
    tokens = _multiple(tl.load(jobs + job * JOB_FIELDS + JOB_TOKENS), FACTOR)
    if tl.program_id(0) * TOKENS >= tokens:
        return
    chunk = chunks + tl.load(jobs + job * JOB_FIELDS + JOB_CHUNK) * CHUNK_FIELDS
    first = tl.load(chunk + CHUNK_FIRST)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    pair = tl.arange(0, PAIRS)
    row = table + (2 * job + unit % 2) * (WORD.primitive_bitwidth // 8 * BYTE_FIELDS)
    head_dim = tl.load(row + BYTE_HEAD_DIM)
    channel0, has0 = _half_channels(tile, pair, head_dim, TILE_DIM0, TILE_COUNT0)
    channel1, has1 = _half_channels(tile, pair, head_dim, TILE_DIM1, TILE_COUNT1)
    a = _merge_half(data, planes, row, channel0, has0, token, inside, tokens, WORD, FACTOR)
    b = _merge_half(data, planes, row, channel1, has1, token, inside, tokens, WORD, FACTOR)
    if MOVED:
        angle = tl.load(tile + TILE_ANGLE)
        if (angle >= 0) & (tl.load(chunk + CHUNK_SOURCE) != tl.load(chunk + CHUNK_TARGET)):
            x, y = _values(a, inside, DTYPE), _values(b, inside, DTYPE)
            at = first + token
            x, y = turn_pairs(x, y, source_cos, source_sin, at, inside, angles, angle, PAIRS, True, ALIGNED)
            x, y = turn_pairs(x, y, cos, sin, at, inside, angles, angle, PAIRS, False, ALIGNED)
            a, b = _words(x, DTYPE, WORD), _words(y, DTYPE, WORD)
    offset, exists = token_offsets(places, unit, slots + first, token, inside, status + job)
    if ELEMENT == DTYPE:
        at0, mask0 = half_addresses(
            places, tile, offset, exists, TILE_DIM0, TILE_COUNT0, WORD, UNIT_STRIDE, ALIGNED, PAIRS, 0
        )  # fmt: skip
        at1, mask1 = half_addresses(
            places, tile, offset, exists, TILE_DIM1, TILE_COUNT1, WORD, UNIT_STRIDE, ALIGNED, PAIRS, 0
        )  # fmt: skip
        tl.store(at0, a, mask=mask0)
        tl.store(at1, b, mask=mask1)
    else:
        x, y = _values(a, inside, DTYPE), _values(b, inside, DTYPE)
        store_pairs(places, scales, tile, offset, exists, x, y, ELEMENT, UNIT_STRIDE, PAIRS, ALIGNED)


@triton.jit
def _load_words(  # type: ignore[no-untyped-def]
    places, scales, tile, offset, exists,
    DTYPE: tl.constexpr, ELEMENT: tl.constexpr, WORD: tl.constexpr,
    UNIT_STRIDE: tl.constexpr, ALIGNED: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """A tile of the cache as words of the blob's dtype, rotated left by one bit; zero where there is no value."""
    if ELEMENT == DTYPE:
        at0, mask0 = half_addresses(
            places, tile, offset, exists, TILE_DIM0, TILE_COUNT0, WORD, UNIT_STRIDE, ALIGNED, PAIRS, 0
        )  # fmt: skip
        at1, mask1 = half_addresses(
            places, tile, offset, exists, TILE_DIM1, TILE_COUNT1, WORD, UNIT_STRIDE, ALIGNED, PAIRS, 0
        )  # fmt: skip
        a, b = tl.load(at0, mask=mask0, other=0), tl.load(at1, mask=mask1, other=0)
    else:
        x, y = load_pairs(places, scales, tile, offset, exists, ELEMENT, UNIT_STRIDE, PAIRS, ALIGNED)
        a, b = _words(x, DTYPE, WORD), _words(y, DTYPE, WORD)
    top: tl.constexpr = WORD.primitive_bitwidth - 1
    return a << 1 | a >> top, b << 1 | b >> top


@triton.jit
def _read_tile(  # type: ignore[no-untyped-def]
    table, jobs, chunks, tile, places, scales, slots, status, sections, first_section,
    DTYPE: tl.constexpr, ELEMENT: tl.constexpr, WORD: tl.constexpr, FACTOR: tl.constexpr,
    UNIT_STRIDE: tl.constexpr, ALIGNED: tl.constexpr, PAIRS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """What the encoding kernels begin with: the words of this program and the channels they belong to."""
    unit = tl.load(tile + TILE_UNIT)
    job = tl.program_id(2) * sections + tl.load(tile + TILE_SECTION) - first_section
    tokens = _multiple(tl.load(jobs + job * JOB_FIELDS + JOB_TOKENS), FACTOR)
    first = tl.load(chunks + tl.load(jobs + job * JOB_FIELDS + JOB_CHUNK) * CHUNK_FIELDS + CHUNK_FIRST)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    offset, exists = token_offsets(places, unit, slots + first, token, inside, status + job)
    a, b = _load_words(places, scales, tile, offset, exists, DTYPE, ELEMENT, WORD, UNIT_STRIDE, ALIGNED, PAIRS)
    index = (2 * job + unit % 2) * (WORD.primitive_bitwidth // 8)
    head_dim = tl.load(table + index * BYTE_FIELDS + BYTE_HEAD_DIM)
    pair = tl.arange(0, PAIRS)
    channel0, has0 = _half_channels(tile, pair, head_dim, TILE_DIM0, TILE_COUNT0)
    channel1, has1 = _half_channels(tile, pair, head_dim, TILE_DIM1, TILE_COUNT1)
    return a, b, channel0, has0, channel1, has1, index, token, inside, tokens


@triton.jit(do_not_specialize=["sections", "first_section"])
def _sum_bytes(  # type: ignore[no-untyped-def]
    table, jobs, chunks, tiles, places, scales, slots, sums, status, sections, first_section,
    DTYPE: tl.constexpr, ELEMENT: tl.constexpr, WORD: tl.constexpr,
    UNIT_STRIDE: tl.constexpr, ALIGNED: tl.constexpr, PAIRS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(1) * TILE_FIELDS
    job = tl.program_id(2) * sections + tl.load(tile + TILE_SECTION) - first_section
    if tl.program_id(0) * TOKENS >= tl.load(jobs + job * JOB_FIELDS + JOB_TOKENS):
        return
    a, b, channel0, has0, channel1, has1, index, _, _, _ = _read_tile(
        table, jobs, chunks, tile, places, scales, slots, status, sections, first_section,
        DTYPE, ELEMENT, WORD, 1, UNIT_STRIDE, ALIGNED, PAIRS, TOKENS,
    )  # fmt: skip
    for byte in tl.static_range(WORD.primitive_bitwidth // 8):
        sum_of = sums + tl.load(table + (index + byte) * BYTE_FIELDS + BYTE_REFERENCE)
        sum0 = tl.sum((a >> 8 * byte & 255).to(tl.int32), 0)
        sum1 = tl.sum((b >> 8 * byte & 255).to(tl.int32), 0)
        tl.atomic_add(sum_of + channel0, sum0.to(tl.int64), mask=has0, sem="relaxed")
        tl.atomic_add(sum_of + channel1, sum1.to(tl.int64), mask=has1, sem="relaxed")


@triton.jit
def _mean_byte(total, tokens):  # type: ignore[no-untyped-def]
    """The mean of `tokens` bytes, rounded to nearest, ties to even. Sums of up to 2**24 bytes fit 32 bits."""
    total, tokens = total.to(tl.uint32), tokens.to(tl.uint32)
    quotient = total // tokens
    twice = 2 * (total - quotient * tokens)
    return quotient + ((twice > tokens) | ((twice == tokens) & (quotient % 2 == 1))).to(tl.uint32)


@triton.jit
def _count_half(word, byte: tl.constexpr, sums, references, channel, has, inside, tokens):  # type: ignore[no-untyped-def]
    """Histogram of one byte's symbols; the first program of a tile writes the references."""
    reference = _mean_byte(tl.load(sums + channel, mask=has, other=0), tokens)
    if tl.program_id(0) == 0:
        tl.store(references + channel, reference.to(tl.uint8), mask=has)
    symbol = (word.to(tl.int32) >> 8 * byte) - reference.to(tl.int32)[None, :] & 255
    # Triton may reorder what is reshaped for a histogram, and symbols and a mask of their own each in another way: what
    # does not exist is said by the symbol itself, one beyond the last.
    symbol = tl.where(inside[:, None] & has[None, :], symbol, VALUES)
    flat = tl.reshape(symbol, [symbol.shape[0] * symbol.shape[1]])
    return tl.histogram(flat, VALUES, mask=flat < VALUES)


@triton.jit(do_not_specialize=["sections", "first_section"])
def _count_symbols(  # type: ignore[no-untyped-def]
    table, jobs, chunks, tiles, places, scales, slots, sums, references, counts, status, sections, first_section,
    DTYPE: tl.constexpr, ELEMENT: tl.constexpr, WORD: tl.constexpr,
    UNIT_STRIDE: tl.constexpr, ALIGNED: tl.constexpr, PAIRS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(1) * TILE_FIELDS
    job = tl.program_id(2) * sections + tl.load(tile + TILE_SECTION) - first_section
    if tl.program_id(0) * TOKENS >= tl.load(jobs + job * JOB_FIELDS + JOB_TOKENS):
        return
    a, b, channel0, has0, channel1, has1, index, _, inside, tokens = _read_tile(
        table, jobs, chunks, tile, places, scales, slots, status, sections, first_section,
        DTYPE, ELEMENT, WORD, 1, UNIT_STRIDE, ALIGNED, PAIRS, TOKENS,
    )  # fmt: skip
    symbol = tl.arange(0, VALUES)
    for byte in tl.static_range(WORD.primitive_bitwidth // 8):
        at = tl.load(table + (index + byte) * BYTE_FIELDS + BYTE_REFERENCE)
        count = _count_half(a, byte, sums + at, references + at, channel0, has0, inside, tokens)
        count += _count_half(b, byte, sums + at, references + at, channel1, has1, inside, tokens)
        tl.atomic_add(counts + (index + byte) * VALUES + symbol, count, mask=count > 0, sem="relaxed")


@triton.jit
def _split_half(  # type: ignore[no-untyped-def]
    word, row, references, planes, out, channel, has, token, inside, tokens, WORD: tl.constexpr, FACTOR: tl.constexpr
):
    """Write words `[tokens, PAIRS]` into the planes of `row` and the rows after it."""
    at = (channel * tokens)[None, :] + token[:, None]
    mask = inside[:, None] & has[None, :]
    for index in tl.static_range(WORD.primitive_bitwidth // 8):
        plane = _multiple(tl.load(row + index * BYTE_FIELDS + BYTE_PLANE), FACTOR)
        reference = tl.load(row + index * BYTE_FIELDS + BYTE_REFERENCE)
        byte = (word >> 8 * index).to(tl.uint8)
        if reference < 0:
            tl.store(out + plane + at, byte, mask=mask)
        else:
            center = tl.load(references + reference + channel, mask=has, other=0)
            tl.store(planes + plane + at, byte - center[None, :], mask=mask)


@triton.jit(do_not_specialize=["sections", "first_section"])
def _split_planes(  # type: ignore[no-untyped-def]
    table, jobs, chunks, tiles, places, scales, slots, references, planes, out, status, sections, first_section,
    DTYPE: tl.constexpr, ELEMENT: tl.constexpr, WORD: tl.constexpr, FACTOR: tl.constexpr,
    UNIT_STRIDE: tl.constexpr, ALIGNED: tl.constexpr, PAIRS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(1) * TILE_FIELDS
    job = tl.program_id(2) * sections + tl.load(tile + TILE_SECTION) - first_section
    if tl.program_id(0) * TOKENS >= tl.load(jobs + job * JOB_FIELDS + JOB_TOKENS):
        return
    a, b, channel0, has0, channel1, has1, index, token, inside, tokens = _read_tile(
        table, jobs, chunks, tile, places, scales, slots, status, sections, first_section,
        DTYPE, ELEMENT, WORD, FACTOR, UNIT_STRIDE, ALIGNED, PAIRS, TOKENS,
    )  # fmt: skip
    row = table + index * BYTE_FIELDS
    _split_half(a, row, references, planes, out, channel0, has0, token, inside, tokens, WORD, FACTOR)
    _split_half(b, row, references, planes, out, channel1, has1, token, inside, tokens, WORD, FACTOR)


def decoding_tables(freq: torch.Tensor, decoding: torch.Tensor) -> None:
    """Decode tables of many frequency tables: `rans.decoding_table`, on the device.

    Args:
        freq: uint16 `[K, 256]`; rows add up to 2**12 (unchecked: others give tables that mean nothing).
        decoding: uint32 `[K, WIDTH]`, written.
    """
    if len(freq):
        _decoding_tables[(len(freq),)](freq, decoding, num_warps=WARPS, enable_fp_fusion=True)


def merge_planes(
    data: torch.Tensor,
    planes: torch.Tensor,
    table: torch.Tensor,
    jobs: torch.Tensor,
    tiles: TileTable,
    batch: ChunkBatch,
    cache: CacheView,
    source: RotationTables,
    target: RotationTables,
    *,
    dtype: torch.dtype,
    moved: bool,
    even: bool,
) -> None:
    """Byte planes -> cache. Bits are written as they are, NaN payloads included, unless keys turn or types differ.

    Keys of a chunk that moves are turned back from their old positions and on to the new ones in float32 and rounded
    to `dtype`. A cache of another type gets the values, through its scales.

    Args:
        data: uint8, stored planes and reference bytes.
        planes: uint8, decoded symbols of the coded planes.
        table: int64 `[2 * jobs * itemsize, len(BytePlaneField)]`.
        jobs: int64 `[chunks * sections, len(JobField)]`; TOKENS and CHUNK are read.
        tiles: of the batch's sections.
        batch: status bits are added to its jobs.
        cache: what is written.
        source: from `rotation_tables(inverse=True)`, by source positions; neither this nor the next is read unless
            `moved`.
        target: from `rotation_tables`, by target positions.
        dtype: of the blobs.
        moved: whether any chunk has another target than its source.
        even: whether every chunk's tokens and every BytePlaneField.PLANE are multiples of four.
    """
    grid = tiles.grid(batch, TOKENS)
    if 0 in grid:
        return
    # No fused multiply-add: the turned keys are then the codec's, bit for bit, given the same tables.
    _merge_planes[grid](
        data, planes, table, jobs, batch.chunks, tiles.tiles, cache.places, cache.scales, cache.slots, source.cos,
        source.sin, target.cos, target.sin, batch.status, batch.sections, batch.first_section, target.cos.shape[1],
        FACTOR=4 if even else 1, MOVED=moved, **_constants(tiles, cache, dtype), num_warps=WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip


def _constants(tiles: TileTable, cache: CacheView, dtype: torch.dtype) -> dict[str, Any]:
    """Constexprs of all kernels that move values of `dtype` between a cache and byte planes."""
    return {
        "DTYPE": ELEMENTS[dtype], "ELEMENT": ELEMENTS[cache.element], "WORD": WORDS[dtype.itemsize],
        "UNIT_STRIDE": cache.unit_stride, "ALIGNED": cache.aligned, "PAIRS": tiles.pairs, "TOKENS": TOKENS,
    }  # fmt: skip


def sum_bytes(
    table: torch.Tensor,
    jobs: torch.Tensor,
    tiles: TileTable,
    batch: ChunkBatch,
    cache: CacheView,
    sums: torch.Tensor,
    *,
    dtype: torch.dtype,
) -> None:
    """Cache -> sums of each byte of each channel over the tokens of a chunk.

    A cache of another type than `dtype` is converted by value first; a token without a slot counts as zeros.

    Args:
        table: int64 `[2 * jobs * itemsize, len(BytePlaneField)]`; REFERENCE (in `sums`) and HEAD_DIM are read.
        jobs: as for `merge_planes`.
        tiles: likewise.
        batch: likewise.
        cache: what is read.
        sums: int64, added to: zero before.
        dtype: of the blobs.
    """
    grid = tiles.grid(batch, TOKENS)
    if 0 in grid:
        return
    _sum_bytes[grid](
        table, jobs, batch.chunks, tiles.tiles, cache.places, cache.scales, cache.slots, sums, batch.status,
        batch.sections, batch.first_section, **_constants(tiles, cache, dtype), num_warps=WARPS,
        enable_fp_fusion=True,
    )  # fmt: skip


def count_symbols(
    table: torch.Tensor,
    jobs: torch.Tensor,
    tiles: TileTable,
    batch: ChunkBatch,
    cache: CacheView,
    sums: torch.Tensor,
    references: torch.Tensor,
    counts: torch.Tensor,
    *,
    dtype: torch.dtype,
) -> None:
    """Cache and sums -> reference byte of each channel, and how often each symbol occurs in each plane.

    From the counts the host decides which planes to code, exactly as `schemes/lossless.py` does. A plane
    holds less than 2**31 bytes.

    Args:
        table: as for `sum_bytes`.
        jobs: likewise.
        tiles: likewise.
        batch: likewise.
        cache: likewise.
        sums: of `sum_bytes`.
        references: uint8, indexed as the sums; gets means rounded to nearest, ties to even.
        counts: int32 `[rows of table, 256]`, added to: zero before.
        dtype: of the blobs.
    """
    grid = tiles.grid(batch, TOKENS)
    if 0 in grid:
        return
    _count_symbols[grid](
        table, jobs, batch.chunks, tiles.tiles, cache.places, cache.scales, cache.slots, sums, references, counts,
        batch.status, batch.sections, batch.first_section, **_constants(tiles, cache, dtype), num_warps=WARPS,
        enable_fp_fusion=True,
    )  # fmt: skip


def split_planes(
    table: torch.Tensor,
    jobs: torch.Tensor,
    tiles: TileTable,
    batch: ChunkBatch,
    cache: CacheView,
    references: torch.Tensor,
    planes: torch.Tensor,
    out: torch.Tensor,
    *,
    dtype: torch.dtype,
    even: bool,
) -> None:
    """Cache -> byte planes, each where it belongs: coded ones less their references, stored ones as they are.

    Args:
        table: int64 `[2 * jobs * itemsize, len(BytePlaneField)]`: where each plane goes: to `planes`,
            or to `out` if REFERENCE is -1.
        jobs: as for `sum_bytes`.
        tiles: likewise.
        batch: likewise.
        cache: likewise.
        references: of `count_symbols`.
        planes: uint8, gets the symbols of coded planes.
        out: uint8, gets the bytes of stored planes.
        dtype: of the blobs.
        even: as for `merge_planes`.
    """
    grid = tiles.grid(batch, TOKENS)
    if 0 in grid:
        return
    _split_planes[grid](
        table, jobs, batch.chunks, tiles.tiles, cache.places, cache.scales, cache.slots, references, planes, out,
        batch.status, batch.sections, batch.first_section, FACTOR=4 if even else 1,
        **_constants(tiles, cache, dtype), num_warps=WARPS, enable_fp_fusion=True,
    )  # fmt: skip


_TABLES = dict.fromkeys(("table", "jobs", "chunks", "tiles", "places"), "*i64")
_ROTATIONS = dict.fromkeys(("source_cos", "source_sin", "cos", "sin"), "*fp32")
_LLAMA = {
    "DTYPE": tl.bfloat16,
    "ELEMENT": tl.bfloat16,
    "WORD": tl.uint16,
    "UNIT_STRIDE": True,
    "ALIGNED": True,
    "PAIRS": 64,
    "TOKENS": TOKENS,
}
_READ = {**_TABLES, "scales": "*fp32", "slots": "*i64"}
_END = {"status": "*i32", "sections": "i32", "first_section": "i32"}


def _spec(name: str, kernel: Any, signature: dict[str, str], options: dict[str, Any], **constants: Any) -> KernelSpec:
    pointers = tuple(argument for argument, kind in signature.items() if kind.startswith("*"))
    return KernelSpec(name, kernel, signature, constants, WARPS, options=options, divisible=pointers)


SPECS: tuple[KernelSpec, ...] = (
    _spec("decoding_tables", _decoding_tables, {"freq": "*u16", "decoding": "*u32"}, {}),
    _spec(
        "merge_planes",
        _merge_planes,
        {"data": "*u8", "planes": "*u8", **_READ, **_ROTATIONS, **_END, "angles": "i32"},
        {"enable_fp_fusion": False},
        **_LLAMA,
        FACTOR=4,
        MOVED=True,
    ),
    _spec("sum_bytes", _sum_bytes, {**_READ, "sums": "*i64", **_END}, {}, **_LLAMA),
    _spec(
        "count_symbols",
        _count_symbols,
        {**_READ, "sums": "*i64", "references": "*u8", "counts": "*i32", **_END},
        {},
        **_LLAMA,
    ),
    _spec(
        "split_planes",
        _split_planes,
        {**_READ, "references": "*u8", "planes": "*u8", "out": "*u8", **_END},
        {},
        **_LLAMA,
        FACTOR=4,
    ),
)

"""Decoding of lossless sections: byte planes to values in the cache, and the decoder's tables.

stored planes, coded planes, references --merge_planes--> cache           decoding_tables: frequencies -> words
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cuvee.codec.entropy import tables
from cuvee.kernels.jobs import CHUNK, TILE
from cuvee.kernels.ops.arguments import CacheView, ChunkBatch, TileTable
from cuvee.kernels.ops.lossless import BYTE, TOKENS, VALUES, WARPS, _constants, _grid, _half_channels, _multiple, _words
from cuvee.kernels.ops.pages import finite, pair_addresses, rotate_pairs, saturated, store_pairs, token_offsets
from cuvee.kernels.ops.rans import ENTRIES, SPAN, WIDTH

TOTAL = tl.constexpr(tables.TOTAL)
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
    # Symbols that begin in each word's slots, except the first symbol. Unused symbols count for the last, unused word.
    later = used & (low > 0)
    begin = tl.histogram(tl.where(later, low // SLOTS_OF_WORD, ENTRIES_AT - 1), ENTRIES_AT)
    before = (tl.cumsum(begin, 0) - begin).to(tl.uint32)
    row = decoding + table * DECODING_WIDTH
    word = tl.arange(0, ENTRIES_AT)
    tl.store(row + word, tl.where(word * SLOTS_OF_WORD < TOTAL, before << 24, 0))
    tl.store(row + ENTRIES_AT + symbol, tl.zeros((VALUES,), tl.uint32))
    tl.debug_barrier()
    bit = tl.full((VALUES,), 1, tl.uint32) << (low % SLOTS_OF_WORD).to(tl.uint32)
    tl.atomic_add(row + low // SLOTS_OF_WORD, bit, mask=later, sem="relaxed")
    entry = frequency << 20 | symbol << 12 | low
    tl.store(row + ENTRIES_AT + number, entry.to(tl.uint32, bitcast=True), mask=used)


@triton.jit
def _merge_half(data, planes, row, channel, has, token, inside, tokens, WORD: tl.constexpr, FACTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the values `[tokens, PAIRS]` of channels as words, from their planes (from `row` on)."""
    at = (channel * tokens)[None, :] + token[:, None]
    mask = inside[:, None] & has[None, :]
    word = tl.zeros(at.shape, WORD)
    for index in tl.static_range(WORD.primitive_bitwidth // 8):
        plane = _multiple(tl.load(row + index * BYTE.FIELDS + BYTE.PLANE), FACTOR)
        reference = tl.load(row + index * BYTE.FIELDS + BYTE.REFERENCE)
        if reference < 0:
            byte = tl.load(data + plane + at, mask=mask, other=0)
        else:
            center = tl.load(data + reference + channel, mask=has, other=0)
            byte = tl.load(planes + plane + at, mask=mask, other=0) + center[None, :]
        word = word | byte.to(WORD) << 8 * index
    return word >> 1 | word << WORD.primitive_bitwidth - 1


@triton.jit
def _values(word, inside, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the values of words, float32; zero for tokens beyond the chunk, whose words hold references only."""
    return tl.where(inside[:, None], word, 0).to(word.dtype).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit(do_not_specialize=["sections"])
def _merge_planes(  # type: ignore[no-untyped-def]
    data, planes, table, chunks, tiles, units, slots, turns_back, turns, status, sections, angles,
    DTYPE: tl.constexpr, ELEMENT: tl.constexpr, WORD: tl.constexpr, FACTOR: tl.constexpr,
    UNIT_STRIDE: tl.constexpr, ALIGNED: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(1) * TILE.FIELDS
    unit = tl.load(tile + TILE.UNIT)
    job = tl.program_id(2) * sections + tl.load(tile + TILE.SECTION)
    chunk = chunks + tl.program_id(2) * CHUNK.FIELDS
    tokens = _multiple(tl.load(chunk + CHUNK.TOKENS), FACTOR)
    if tl.program_id(0) * TOKENS >= tokens:
        return
    first = tl.load(chunk + CHUNK.FIRST)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    pair = tl.arange(0, PAIRS)
    row = table + (2 * job + unit % 2) * (WORD.primitive_bitwidth // 8 * BYTE.FIELDS)
    head_dim = tl.load(row + BYTE.HEAD_DIM)
    channel0, has0 = _half_channels(tile, pair, head_dim, TILE.DIM0, TILE.COUNT0)
    channel1, has1 = _half_channels(tile, pair, head_dim, TILE.DIM1, TILE.COUNT1)
    a = _merge_half(data, planes, row, channel0, has0, token, inside, tokens, WORD, FACTOR)
    b = _merge_half(data, planes, row, channel1, has1, token, inside, tokens, WORD, FACTOR)
    if turns is not None:
        angle = tl.load(tile + TILE.ANGLE)
        if (angle >= 0) & (tl.load(chunk + CHUNK.SOURCE) != tl.load(chunk + CHUNK.TARGET)):
            x, y = _values(a, inside, DTYPE), _values(b, inside, DTYPE)
            both = finite(x) & finite(y)
            at = first + token
            x, y = rotate_pairs(x, y, turns_back, at, inside, angles, angle, PAIRS, True, ALIGNED)
            x, y = rotate_pairs(x, y, turns, at, inside, angles, angle, PAIRS, False, ALIGNED)
            a, b = _words(x, both, DTYPE, WORD), _words(y, both, DTYPE, WORD)
    offset, exists = token_offsets(units, unit, slots + first, token, inside, status + job)
    if ELEMENT == DTYPE:
        at0, mask0, at1, mask1 = pair_addresses(units, tile, offset, exists, WORD, UNIT_STRIDE, ALIGNED, PAIRS)
        tl.store(at0, a, mask=mask0)
        tl.store(at1, b, mask=mask1)
    else:
        x, y = _values(a, inside, DTYPE), _values(b, inside, DTYPE)
        x, y = saturated(x, finite(x), ELEMENT), saturated(y, finite(y), ELEMENT)
        store_pairs(units, tile, offset, exists, x, y, ELEMENT, UNIT_STRIDE, PAIRS, ALIGNED)


def decoding_tables(freq: torch.Tensor, decoding: torch.Tensor) -> None:
    """Make the decoder's tables, uint32 `[K, WIDTH]`, of frequencies `[K, 256]`: `rans.decoding_table`, on the device.

    Rows must add up to 2**12; others give tables that mean nothing.
    """
    if len(freq):
        _decoding_tables[(len(freq),)](freq, decoding, num_warps=WARPS, enable_fp_fusion=True)


def merge_planes(
    data: torch.Tensor,
    planes: torch.Tensor,
    table: torch.Tensor,
    tiles: TileTable,
    batch: ChunkBatch,
    cache: CacheView,
    turns: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    dtype: torch.dtype,
    even: bool,
) -> None:
    """Write byte planes into a cache: bit for bit, NaN payloads included, unless keys turn or types differ.

    Keys of a chunk that moves are turned back from their old positions and on to the new ones in float32 and rounded
    to `dtype`. A cache of another type gets the values, through its scales.

    Args:
        data: uint8, stored planes and reference bytes.
        planes: uint8, decoded symbols of the coded planes.
        table: int64 `[2 * jobs * itemsize, len(BytePlaneField)]`.
        turns: of `rotation_tables(source=True)` and of `rotation_tables(source=False)`; None: every chunk's target is
            its source.
        even: whether every chunk's tokens and every BytePlaneField.PLANE are multiples of four.
    """
    grid = _grid(tiles, batch)
    if 0 in grid:
        return
    # No fused multiply-add: the turned keys are then the codec's, bit for bit, given the same tables.
    _merge_planes[grid](
        data, planes, table, batch.chunks, tiles.tiles, cache.units, cache.slots, *(turns or (None, None)),
        batch.status, batch.sections, turns[0].shape[2] if turns else 0, FACTOR=4 if even else 1,
        **_constants(tiles, cache, dtype), num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip

"""Encoding of lossless sections: values of the cache to byte planes, and the statistics that model them.

    cache --sum_bytes--> sums --count_symbols--> references, counts --(host)--> which planes are coded, their tables
    cache, references --split_planes--> coded planes, stored planes

The cache is read three times, and each byte is written once. That is less traffic than keeping planes between the
steps, and where a plane goes depends on whether it is coded, which is known only once its symbols are counted.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from cuvee.kernels.jobs import CHUNK, TILE
from cuvee.kernels.ops.arguments import CacheView, ChunkBatch, TileTable
from cuvee.kernels.ops.lossless import BYTE, TOKENS, VALUES, WARPS, _constants, _grid, _half_channels, _multiple, _words
from cuvee.kernels.ops.pages import finite, load_pairs, pair_addresses, token_offsets


@triton.jit
def _load_words(  # type: ignore[no-untyped-def]
    units, tile, offset, exists,
    DTYPE: tl.constexpr, ELEMENT: tl.constexpr, WORD: tl.constexpr,
    UNIT_STRIDE: tl.constexpr, ALIGNED: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Read a tile as words of the blob's dtype, rotated left by one bit; zero where there is no value."""
    if ELEMENT == DTYPE:
        at0, mask0, at1, mask1 = pair_addresses(units, tile, offset, exists, WORD, UNIT_STRIDE, ALIGNED, PAIRS)
        a, b = tl.load(at0, mask=mask0, other=0), tl.load(at1, mask=mask1, other=0)
    else:
        x, y = load_pairs(units, tile, offset, exists, ELEMENT, UNIT_STRIDE, PAIRS, ALIGNED)
        a, b = _words(x, finite(x), DTYPE, WORD), _words(y, finite(y), DTYPE, WORD)
    top: tl.constexpr = WORD.primitive_bitwidth - 1
    return a << 1 | a >> top, b << 1 | b >> top


@triton.jit
def _read_tile(  # type: ignore[no-untyped-def]
    table, chunks, tile, units, slots, status, sections,
    DTYPE: tl.constexpr, ELEMENT: tl.constexpr, WORD: tl.constexpr, FACTOR: tl.constexpr,
    UNIT_STRIDE: tl.constexpr, ALIGNED: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Return the words of this program and their channels; every encoding kernel begins with this."""
    unit = tl.load(tile + TILE.UNIT)
    job = tl.program_id(2) * sections + tl.load(tile + TILE.SECTION)
    chunk = chunks + tl.program_id(2) * CHUNK.FIELDS
    tokens = _multiple(tl.load(chunk + CHUNK.TOKENS), FACTOR)
    first = tl.load(chunk + CHUNK.FIRST)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    offset, exists = token_offsets(units, unit, slots + first, token, inside, status + job)
    a, b = _load_words(units, tile, offset, exists, DTYPE, ELEMENT, WORD, UNIT_STRIDE, ALIGNED, PAIRS)
    index = (2 * job + unit % 2) * (WORD.primitive_bitwidth // 8)
    head_dim = tl.load(table + index * BYTE.FIELDS + BYTE.HEAD_DIM)
    pair = tl.arange(0, PAIRS)
    channel0, has0 = _half_channels(tile, pair, head_dim, TILE.DIM0, TILE.COUNT0)
    channel1, has1 = _half_channels(tile, pair, head_dim, TILE.DIM1, TILE.COUNT1)
    return a, b, channel0, has0, channel1, has1, index, token, inside, tokens


@triton.jit(do_not_specialize=["sections"])
def _sum_bytes(  # type: ignore[no-untyped-def]
    table, chunks, tiles, units, slots, sums, status, sections,
    DTYPE: tl.constexpr, ELEMENT: tl.constexpr, WORD: tl.constexpr,
    UNIT_STRIDE: tl.constexpr, ALIGNED: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(1) * TILE.FIELDS
    if tl.program_id(0) * TOKENS >= tl.load(chunks + tl.program_id(2) * CHUNK.FIELDS + CHUNK.TOKENS):
        return
    a, b, channel0, has0, channel1, has1, index, _, _, _ = _read_tile(
        table, chunks, tile, units, slots, status, sections,
        DTYPE, ELEMENT, WORD, 1, UNIT_STRIDE, ALIGNED, PAIRS,
    )  # fmt: skip
    for byte in tl.static_range(WORD.primitive_bitwidth // 8):
        sum_of = sums + tl.load(table + (index + byte) * BYTE.FIELDS + BYTE.REFERENCE)
        sum0 = tl.sum((a >> 8 * byte & 255).to(tl.int32), 0)
        sum1 = tl.sum((b >> 8 * byte & 255).to(tl.int32), 0)
        tl.atomic_add(sum_of + channel0, sum0.to(tl.int64), mask=has0, sem="relaxed")
        tl.atomic_add(sum_of + channel1, sum1.to(tl.int64), mask=has1, sem="relaxed")


@triton.jit
def _mean_byte(total, tokens):  # type: ignore[no-untyped-def]
    """Return the mean of `tokens` bytes, rounded to nearest, ties to even. Sums of up to 2**24 bytes fit 32 bits."""
    total, tokens = total.to(tl.uint32), tokens.to(tl.uint32)
    quotient = total // tokens
    twice = 2 * (total - quotient * tokens)
    return quotient + ((twice > tokens) | ((twice == tokens) & (quotient % 2 == 1))).to(tl.uint32)


@triton.jit
def _count_half(word, byte: tl.constexpr, sums, references, channel, has, inside, tokens):  # type: ignore[no-untyped-def]
    """Return the histogram of one byte's symbols; the first program of a tile also writes the references."""
    reference = _mean_byte(tl.load(sums + channel, mask=has, other=0), tokens)
    if tl.program_id(0) == 0:
        tl.store(references + channel, reference.to(tl.uint8), mask=has)
    symbol = (word.to(tl.int32) >> 8 * byte) - reference.to(tl.int32)[None, :] & 255
    # Triton may reorder what is reshaped for a histogram, and reorder symbols and a separate mask differently. So
    # places without a value have a symbol of their own, one beyond the last.
    symbol = tl.where(inside[:, None] & has[None, :], symbol, VALUES)
    flat = tl.reshape(symbol, [symbol.shape[0] * symbol.shape[1]])
    return tl.histogram(flat, VALUES, mask=flat < VALUES)


@triton.jit(do_not_specialize=["sections"])
def _count_symbols(  # type: ignore[no-untyped-def]
    table, chunks, tiles, units, slots, sums, references, counts, status, sections,
    DTYPE: tl.constexpr, ELEMENT: tl.constexpr, WORD: tl.constexpr,
    UNIT_STRIDE: tl.constexpr, ALIGNED: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(1) * TILE.FIELDS
    if tl.program_id(0) * TOKENS >= tl.load(chunks + tl.program_id(2) * CHUNK.FIELDS + CHUNK.TOKENS):
        return
    a, b, channel0, has0, channel1, has1, index, _, inside, tokens = _read_tile(
        table, chunks, tile, units, slots, status, sections,
        DTYPE, ELEMENT, WORD, 1, UNIT_STRIDE, ALIGNED, PAIRS,
    )  # fmt: skip
    symbol = tl.arange(0, VALUES)
    for byte in tl.static_range(WORD.primitive_bitwidth // 8):
        at = tl.load(table + (index + byte) * BYTE.FIELDS + BYTE.REFERENCE)
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
        plane = _multiple(tl.load(row + index * BYTE.FIELDS + BYTE.PLANE), FACTOR)
        reference = tl.load(row + index * BYTE.FIELDS + BYTE.REFERENCE)
        byte = (word >> 8 * index).to(tl.uint8)
        if reference < 0:
            tl.store(out + plane + at, byte, mask=mask)
        else:
            center = tl.load(references + reference + channel, mask=has, other=0)
            tl.store(planes + plane + at, byte - center[None, :], mask=mask)


@triton.jit(do_not_specialize=["sections"])
def _split_planes(  # type: ignore[no-untyped-def]
    table, chunks, tiles, units, slots, references, planes, out, status, sections,
    DTYPE: tl.constexpr, ELEMENT: tl.constexpr, WORD: tl.constexpr, FACTOR: tl.constexpr,
    UNIT_STRIDE: tl.constexpr, ALIGNED: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(1) * TILE.FIELDS
    if tl.program_id(0) * TOKENS >= tl.load(chunks + tl.program_id(2) * CHUNK.FIELDS + CHUNK.TOKENS):
        return
    a, b, channel0, has0, channel1, has1, index, token, inside, tokens = _read_tile(
        table, chunks, tile, units, slots, status, sections,
        DTYPE, ELEMENT, WORD, FACTOR, UNIT_STRIDE, ALIGNED, PAIRS,
    )  # fmt: skip
    row = table + index * BYTE.FIELDS
    _split_half(a, row, references, planes, out, channel0, has0, token, inside, tokens, WORD, FACTOR)
    _split_half(b, row, references, planes, out, channel1, has1, token, inside, tokens, WORD, FACTOR)


def _launch(
    kernel: Any, table: torch.Tensor, tiles: TileTable, batch: ChunkBatch, cache: CacheView, *arrays: torch.Tensor,
    dtype: torch.dtype, **constants: int,
) -> None:  # fmt: skip
    """Start a program for each tile and TOKENS tokens of each chunk, with arrays of the kernel's own."""
    grid = _grid(tiles, batch)
    if 0 not in grid:
        kernel[grid](
            table, batch.chunks, tiles.tiles, cache.units, cache.slots, *arrays, batch.status, batch.sections,
            **constants, **_constants(tiles, cache, dtype), num_warps=WARPS, enable_fp_fusion=True,
        )  # fmt: skip


def sum_bytes(
    table: torch.Tensor,
    tiles: TileTable,
    batch: ChunkBatch,
    cache: CacheView,
    sums: torch.Tensor,
    *,
    dtype: torch.dtype,
) -> None:
    """Sum each byte of each channel over the tokens of a chunk in the cache.

    A cache of another type than `dtype` is converted by value first; a token without a slot counts as zeros. `table`,
    int64 `[2 * jobs * itemsize, len(BytePlaneField)]`, says where the sums of a plane lie in `sums`, by REFERENCE; the
    sums, int64, are added to.
    """
    _launch(_sum_bytes, table, tiles, batch, cache, sums, dtype=dtype)


def count_symbols(
    table: torch.Tensor,
    tiles: TileTable,
    batch: ChunkBatch,
    cache: CacheView,
    sums: torch.Tensor,
    references: torch.Tensor,
    counts: torch.Tensor,
    *,
    dtype: torch.dtype,
) -> None:
    """Compute the reference byte of each channel from what `sum_bytes` found, and count each plane's symbols.

    From the counts the host decides which planes to code, exactly as `codec/schemes/lossless.py` does. A plane holds
    less than 2**31 bytes. `references`, uint8, get means rounded to nearest, ties to even, where the sums lie;
    `counts`, int32 `[rows of table, 256]`, are added to.
    """
    _launch(_count_symbols, table, tiles, batch, cache, sums, references, counts, dtype=dtype)


def split_planes(
    table: torch.Tensor,
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
    """Split the cache into byte planes: coded planes minus their `references`, stored planes unchanged.

    The table says where each plane goes: to `planes`, or to `out` if REFERENCE is -1. `even` as for `merge_planes`.
    """
    factor = 4 if even else 1
    _launch(_split_planes, table, tiles, batch, cache, references, planes, out, dtype=dtype, FACTOR=factor)

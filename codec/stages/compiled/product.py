"""Coefficients to values, compiled: products that skip the coefficients that are zero.

Most coefficients of a well-compressed cache are zero. So those that are not are listed, column by column, and each adds
a multiple of its row of the inverse map to the values of its token. The map is divided into slabs of `SLAB` rows and
`TILE` values. The CPU's first cache holds a slab while all columns use it. The leading slabs in which few coefficients
are zero are left to a dense product.

If products are `MIXED`, a dense product of bfloat16 serves the leading slabs in which few coefficients are expected to
be zero, see `Products.leading_rows`. If they are `INT16`, one of 16-bit integers does, see `integer_product.py`.

Sums are those of dense products in another order, so they differ in their last bits, and bfloat16 has fewer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from cuvee.codec.profiles.section_basis import InverseMaps
from cuvee.codec.stages.columns import class_runs, padded
from cuvee.codec.stages.compiled.compiler import compiled
from cuvee.codec.stages.compiled.integer_product import multiply_leading
from cuvee.codec.stages.compiled.product_steps import add_rows, add_rows_by_4, add_rows_by_8, list_step
from cuvee.codec.stages.compiled.simd import WIDTH
from cuvee.codec.stages.dense_product import most_rows, multiply, stacked_rows
from cuvee.codec.stages.products import PRODUCT_COLUMNS, PRODUCT_DEPTH, SLAB, Products
from cuvee.codec.support.arena import Arena
from cuvee.codec.support.arrays import F32, I64, U8, U32
from cuvee.codec.support.integer_maps import IntegerMaps, integer_maps

TILE = 8 * WIDTH  # values that are summed at a time: as many as the registers hold
DENSE = 0.65  # share of coefficients other than zero from which on a dense product is faster
FEW = 16  # entries of a column and a slab that are worth loading and storing its sums for
SAMPLED = 8  # of how many rows one is counted to estimate that share

_arena = Arena()


@dataclass(frozen=True, slots=True)
class TiledBlock:
    """The inverse map of one block, in tiles of values.

    Attributes:
        values: N.
        leading: bfloat16 `[L, N]`, the map of the first components, if a dense product serves them.
        first: components that another product serves: L, or those of `TiledInverse.integers`.
        tiles: float32 `[R N']`, the map of all R components, tile after tile: each `[R, TILE]`, but the last `[R, n]`
            for the remaining n values, rounded up to a multiple of `WIDTH` by zeros.
    """

    values: int
    leading: torch.Tensor
    first: int
    tiles: torch.Tensor


@dataclass(frozen=True, slots=True)
class TiledInverse:
    """The inverse maps of a section.

    Attributes:
        rows: of every block that are used.
        depth: of every tile: R, at least as many.
        blocks: one after the other.
        together: float32 `[B, R, N]`, the maps of B blocks of one tile each, if they are alike and `leading` is empty.
        integers: the maps of the first components, if a product of integers serves them.
    """

    rows: int
    depth: int
    blocks: tuple[TiledBlock, ...]
    together: torch.Tensor | None
    integers: IntegerMaps | None = None


@compiled
def _list_runs(classes, depths, share, multiple, bounds, deepest):  # type: ignore[no-untyped-def]
    """List the runs of columns that share a product, see `product_runs`; return their number.

    A run ends before a column that is less than `share` as deep as its first, or deeper than that; every run but the
    last has a multiple of `multiple` columns. `bounds` receives the first column of each run, and where the last ends,
    `deepest` the largest depth in each.
    """
    columns = len(classes)
    runs = start = 0
    while start < columns:
        first = most = depths[classes[start]]
        stop = start + 1
        while stop < columns:
            depth = depths[classes[stop]]
            # Columns are sorted within windows: the next window's begin anew with the finest.
            if (stop - start) % multiple == 0 and (depth < share * first or depth > first):
                break
            most = max(most, depth)
            stop += 1
        bounds[runs], deepest[runs] = start, most
        runs += 1
        start = stop
    bounds[runs] = columns
    return runs


def product_runs(columns: U8, class_ranks: Sequence[tuple[int, ...]]) -> Iterator[tuple[slice, tuple[int, ...]]]:
    """Yield runs of columns that share a product, and how many components of each block they need.

    With several blocks, a run has one class: an encoder's rows are those of the class, and a shard, which has some of
    the blocks, must come out bit for bit as in the whole.

    Args:
        columns: `[T]` uint8, the class of each column, sorted within windows.
        class_ranks: `SectionCoding.class_ranks`.
    """
    if len(class_ranks[0]) > 1:
        for run, k in class_runs(columns):
            yield run, class_ranks[k]
        return
    bounds, deepest = np.empty(len(columns) + 1, np.int64), np.empty(len(columns), np.int64)
    count = _list_runs(columns, _depths(class_ranks), PRODUCT_DEPTH, PRODUCT_COLUMNS, bounds, deepest)
    for i in range(count):
        yield slice(int(bounds[i]), int(bounds[i + 1])), (int(deepest[i]),)


@lru_cache(maxsize=1 << 12)
def _depths(class_ranks: Sequence[tuple[int, ...]]) -> I64:
    """Return the number of components of each class in a section of one block."""
    return np.array([rank for (rank,) in class_ranks], np.int64)


def prepare_inverse(
    maps: InverseMaps, rank: int, products: Products, shares: Sequence[F32]
) -> tuple[torch.Tensor, ...] | TiledInverse:
    """Return a section's inverse maps as `synthesize` takes them.

    Args:
        maps: of the section; they keep what is made here.
        rank: the most components of a block that are ever used.
        products: how to multiply.
        shares: for each block and component the expected share of coefficients that are not zero, which says which of
            them MIXED multiplies as bfloat16.

    Returns:
        `stacked_rows` of bfloat16 if dense products serve all rows, else tiles.
    """
    rows = padded(rank)
    leading = [products.leading_rows(share, rows) for share in shares]
    if products is Products.BFLOAT16 or (products is Products.MIXED and min(leading) == rows > 0):
        return stacked_rows(maps, rows, torch.bfloat16)
    tiled = maps.form("tiles", _tile_blocks)
    narrow: list[torch.Tensor] = []
    if products is Products.MIXED and any(leading):
        narrow = [matrix for alike in stacked_rows(maps, rows, torch.bfloat16) for matrix in alike]
    blocks = tuple(
        TiledBlock(values, narrow[number][:first] if narrow else _NOTHING, first, tiles)
        for number, (values, tiles, first) in enumerate(zip(tiled.sizes, tiled.tiles, leading, strict=True))
    )
    if products is Products.INT16 and any(leading):
        components = [min(first, len(share)) for first, share in zip(leading, shares, strict=True)]
        integers = maps.form("int16", integer_maps).leading(components)
        return TiledInverse(rows, tiled.depth, blocks, None, integers)
    return TiledInverse(rows, tiled.depth, blocks, None if any(leading) else tiled.together)


_NOTHING = torch.empty(0, 0, dtype=torch.bfloat16)


@dataclass(frozen=True, slots=True)
class _Tiled:
    """All components of a section's maps, as `TiledBlock` and `TiledInverse` have them."""

    depth: int
    sizes: tuple[int, ...]
    tiles: tuple[torch.Tensor, ...]
    together: torch.Tensor | None


def _tile_blocks(matrices: Sequence[torch.Tensor]) -> _Tiled:
    depth, sizes = most_rows(matrices), tuple(len(matrix) for matrix in matrices)
    alike = len(set(sizes)) == 1 and 0 < sizes[0] <= TILE
    widths = [-(-values // WIDTH) * WIDTH for values in sizes]
    memory = torch.zeros(len(matrices), depth, widths[0], dtype=torch.float32) if alike else None
    tiles = []
    for number, (matrix, values, width) in enumerate(zip(matrices, sizes, widths, strict=True)):
        turned = torch.zeros(depth, width, dtype=torch.float32) if memory is None else memory[number]
        turned[: matrix.shape[1], :values] = matrix.T
        tiles.append(turned.reshape(-1) if alike else torch.cat([tile.reshape(-1) for tile in turned.split(TILE, 1)]))
    return _Tiled(depth, sizes, tuple(tiles), None if memory is None else memory[:, :, : sizes[0]])


def synthesize(
    y: torch.Tensor,
    inverse: Sequence[torch.Tensor] | TiledInverse,
    runs: Iterable[tuple[slice, Sequence[int]]],
    out: torch.Tensor,
) -> torch.Tensor:
    """Turn coefficients into values.

    Args:
        y: `[B, pad, t]`, each block's leading components, then zeros.
        inverse: the result of `prepare_inverse`. If it is bfloat16, so are values, whatever `y` and `out` are.
        runs: columns of each product, and the rows of each block that it needs. In bfloat16, which only CPUs that
            multiply it fast use, one product serves all columns of equal blocks, because a call costs as much as it
            would save. Mixed products have all rows of all columns.
        out: `[t N]` of the dtype of `y`, receives the values.

    Returns:
        `[t, N]`, or `[B, t, N / B]` if one product took all blocks: a view of `out`.
    """
    if not isinstance(inverse, TiledInverse):
        return multiply(y, inverse, runs, out)
    count, depth, width = y.shape
    whole = not _has_leading(inverse) and _share_there(y.numpy()) > DENSE
    if whole and inverse.together is not None:
        return torch.bmm(y.mT, inverse.together[:, :depth], out=out.view(count, width, -1))
    x, column = out.view(width, -1), 0
    if inverse.integers is not None:
        multiply_leading(y.numpy(), inverse.integers, x.numpy())
        if all(block.first >= inverse.rows for block in inverse.blocks):
            return x
    for block_y, block in zip(y, inverse.blocks, strict=True):
        mine = x[:, column : column + block.values]
        leading = min(block.first, depth)
        if len(block.leading) and leading:
            mine.copy_(torch.mm(block_y[:leading].T.bfloat16(), block.leading[:leading]))
        there, rest = inverse.integers is not None or leading > 0, block_y[leading:]
        lists = _lists(width, len(rest))
        dense = len(rest) if whole else _list_entries(rest.numpy(), *lists)
        for first in range(0, block.values if dense else 0, TILE):
            tile = block.tiles[first * inverse.depth : (first + TILE) * inverse.depth].view(inverse.depth, -1)
            size = min(TILE, block.values - first)
            to = mine[:, first : first + size]
            torch.addmm(to, rest[:dense].T, tile[leading : leading + dense, :size], beta=int(there), out=to)
        if dense < len(rest) or not depth:
            fresh = not dense and not there
            block_of = block.tiles.numpy(), block.values, inverse.depth, leading
            _add_entries(*lists, dense, fresh, *block_of, x.numpy(), column)
        column += block.values
    return x


def _has_leading(inverse: TiledInverse) -> bool:
    return inverse.integers is not None or any(len(block.leading) for block in inverse.blocks)


def _lists(columns: int, rows: int) -> tuple[U32, F32, I64]:
    """Return room for the coefficients of each column that are not zero: their rows, themselves, and where slabs begin.

    Columns are rounded up to a multiple of `WIDTH`, and `WIDTH` entries more are written than there are.
    """
    columns, slabs = -(-columns // WIDTH) * WIDTH, -(-rows // SLAB)
    return (
        _arena.array("rows", columns * (rows + WIDTH), np.uint32),
        _arena.array("coefficients", columns * (rows + WIDTH), np.float32),
        _arena.array("begins", columns * (slabs + 1), np.int64).reshape(columns, -1),
    )


@compiled
def _share_there(y):  # type: ignore[no-untyped-def]
    """Estimate the share of coefficients that are not zero, from some of the rows."""
    blocks, depth, width = y.shape
    there, sampled = 0, 1
    for block in range(blocks):
        for row in range(0, depth, SAMPLED):
            for column in range(width):
                there += y[block, row, column] != 0
            sampled += width
    return there / sampled


@compiled
def _list_entries(y, rows, coefficients, begins):  # type: ignore[no-untyped-def]
    """List the coefficients that are not zero, column by column; return how many rows a dense product should serve.

    These are the leading slabs that are dense.
    """
    depth, width = y.shape
    pitch = len(rows) // len(begins)
    y_ = y.reshape(y.size)
    counts = np.zeros(WIDTH, np.int64)
    edge = np.zeros((WIDTH, WIDTH), np.float32)
    edge_ = edge.reshape(edge.size)
    for begin in range(0, width, WIDTH):
        size = min(WIDTH, width - begin)
        counts[:] = 0
        slab = 0
        for row in range(0, depth, WIDTH):
            if row % SLAB == 0:
                for t in range(WIDTH):
                    begins[begin + t, slab] = counts[t]
                slab += 1
            high = min(WIDTH, depth - row)
            if size == WIDTH and high == WIDTH:
                list_step(y_, row * width + begin, width, row, counts, rows, coefficients, begin * pitch, pitch)
            else:
                edge[:] = 0
                for k in range(high):
                    for t in range(size):
                        edge[k, t] = y[row + k, begin + t]
                list_step(edge_, 0, WIDTH, row, counts, rows, coefficients, begin * pitch, pitch)
        for t in range(WIDTH):
            begins[begin + t, slab] = counts[t]
    for slab in range(begins.shape[1] - 1):
        there = 0
        for t in range(width):
            there += begins[t, slab + 1] - begins[t, slab]
        if there < DENSE * width * min(SLAB, depth - slab * SLAB):
            return slab * SLAB
    return depth


@compiled
def _add_entries(rows, coefficients, begins, dense, fresh, tiles, values, depth, skip, x, column):  # type: ignore[no-untyped-def]
    """Add what is listed from row `dense` on to the values from `column` on; if `fresh`, set these.

    Rows are listed without the first `skip` ones of the tiles, which have `depth` each.
    """
    width, stride = x.shape
    x_, pitch = x.reshape(x.size), len(rows) // len(begins)
    # Slabs with few entries are served together: a sum is loaded and stored once for all of them.
    edges = np.full(begins.shape[1], dense // SLAB, np.int64)
    slabs = entries = 0
    for slab in range(dense // SLAB + 1, begins.shape[1]):
        for t in range(width):
            entries += begins[t, slab] - begins[t, slab - 1]
        if entries >= FEW * width or slab == begins.shape[1] - 1:
            slabs += 1
            edges[slabs], entries = slab, 0
    last = np.empty(WIDTH, np.float32)
    for first in range(0, values, TILE):
        size = min(TILE, values - first)
        tile_stride = (size + WIDTH - 1) // WIDTH * WIDTH
        tile = first * depth + skip * tile_stride
        for t in range(width if fresh else 0):
            x[t, column + first : column + first + size] = 0
        for slab in range(slabs):
            for t in range(width):
                begin, end = t * pitch + begins[t, edges[slab]], t * pitch + begins[t, edges[slab + 1]]
                to = t * stride + column + first
                if begin == end:
                    continue
                if size == TILE:
                    add_rows_by_8(tiles, tile, tile_stride, rows, coefficients, begin, end, x_, to)
                    continue
                i = 0
                while i + 4 * WIDTH <= size:
                    add_rows_by_4(tiles, tile + i, tile_stride, rows, coefficients, begin, end, x_, to + i)
                    i += 4 * WIDTH
                while i + WIDTH <= size:
                    add_rows(tiles, tile + i, tile_stride, rows, coefficients, begin, end, x_, to + i)
                    i += WIDTH
                if i < size:
                    for k in range(size - i):
                        last[k] = x_[to + i + k]
                    add_rows(tiles, tile + i, tile_stride, rows, coefficients, begin, end, last, 0)
                    for k in range(size - i):
                        x_[to + i + k] = last[k]

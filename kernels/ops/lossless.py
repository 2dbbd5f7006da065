"""Lossless sections: the table of byte planes, and the parts that `merge_planes.py` and `split_planes.py` share.

A section is one layer, K then V. The job of a tile is chunk * sections + TileField.SECTION. Values are rotated left by
one bit before they are cut into bytes: see `codec/stages/byte_planes.py`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch
import triton
import triton.language as tl

from cuvee.codec.entropy.tables import SYMBOLS
from cuvee.kernels.jobs import ELEMENTS, TILE, fields_of
from cuvee.kernels.ops.arguments import CacheView, ChunkBatch, TileTable
from cuvee.kernels.ops.pages import saturated

WARPS = 8  # 64 tokens of 64 pairs at 4 spill
TOKENS = tl.constexpr(64)  # a program's: two sectors of a plane's row
WORDS = {2: tl.uint16, 4: tl.uint32}


class BytePlaneField(IntEnum):
    """A row of `table`: one for each byte of the values of each unit of each job, least significant first.

    The row is (2 * job + unit) * itemsize + byte, with unit 0 for K and 1 for V.
    """

    PLANE = 0  # of the plane `[C, T]`: in `planes` if it is coded, else in `data` or `out`
    REFERENCE = 1  # of the reference bytes `[C]`, in `data` or `references` (and of `sums`); -1: the plane is stored
    HEAD_DIM = 2  # values of a head: the channel is head * HEAD_DIM + dimension


BYTE = fields_of(BytePlaneField)
VALUES = tl.constexpr(SYMBOLS)


@triton.jit
def _half_channels(tile, pair, head_dim, DIM: tl.constexpr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the channels of a tile's first or second dimensions, and a mask of those that exist."""
    dim = tl.load(tile + DIM) + pair * tl.load(tile + TILE.STEP)
    return tl.load(tile + TILE.HEAD) * head_dim + dim, pair < tl.load(tile + COUNT)


@triton.jit
def _multiple(number, FACTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return `number`, which is a multiple of FACTOR; the division tells the compiler."""
    return number // FACTOR * FACTOR


@triton.jit
def _words(x, which, DTYPE: tl.constexpr, WORD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round values to nearest, ties to even; return their words. The inverse is `merge_planes._values`.

    Values beyond the range become the largest of it where `which` says so.
    """
    return saturated(x, which, DTYPE).to(DTYPE).to(WORD, bitcast=True)


def _grid(tiles: TileTable, batch: ChunkBatch) -> tuple[int, int, int]:
    """Return the grid of programs that take TOKENS tokens of one tile."""
    return tiles.grid(batch, TOKENS.value)


def _constants(tiles: TileTable, cache: CacheView, dtype: torch.dtype) -> dict[str, Any]:
    """Return the constexprs of kernels that move values of `dtype` between a cache and byte planes."""
    return {
        "DTYPE": ELEMENTS[dtype], "ELEMENT": ELEMENTS[cache.element], "WORD": WORDS[dtype.itemsize],
        "UNIT_STRIDE": cache.unit_stride, "ALIGNED": cache.aligned, "PAIRS": tiles.pairs,
    }  # fmt: skip

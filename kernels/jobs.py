"""Descriptor tables of the kernels: one launch handles many chunks, layers and groups.

All are int64 `[rows, FIELDS]` on the device; each enumeration names the fields of a row. A *job* is one coded part: one
section of one chunk. A *plan* says how the components of a section are coded
(`CodingPlan` on the device). A *chunk* is a run of tokens and where they go. A *place* is one unit (K or V of a layer)
in memory. A *tile* is a piece of one head that a program produces or reads: up to `PAIRS` pairs of dimensions that RoPE
turns together.

Offsets count elements of the array they point into, never bytes, and are int64 wherever a chunk may exceed 2**31.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl

I64 = npt.NDArray[np.int64]


class JobField(IntEnum):
    """A row of `jobs`."""

    STATES = 0  # in `data` as uint32: the initial states of the streams
    LENGTHS = 1  # in `data` as uint16: words of each stream
    WORDS = 2  # in `data` as uint16
    ESCAPES = 3  # in `data` as uint32: E indices row * T + token, then E values (int32)
    WORD_COUNT = 4
    ESCAPE_COUNT = 5
    STREAMS = 6  # S = ceil(T / n)
    TOKENS = 7  # T
    PER_STREAM = 8  # n
    LONG_LENGTHS = 9  # 1: a length takes two uint16
    PLAN = 10  # row of `plans`
    PLANES = 11  # in `planes`: `[P, T]` uint8
    LEVELS = 12  # in `y`: `[R, STRIDE]` coefficients
    STRIDE = 13  # stride of a row of coefficients, at least T
    CHUNK = 14  # row of `chunks`
    SECTION = 15  # in `out`: byte offset of the coded part, a multiple of 4 (encoding)
    CLASS_PLAN = 16  # row of `plans` for class 0; class k is k rows later; 0 or below: no classes
    COLUMNS = 17  # in `classes` and `order`: the job's tokens in coding order
    CLASS_WORDS = 18  # in `class_words`: the stream of its classes (encoding)
    CLASS_WORD_COUNT = 19
    CLASS_STATE = 20  # initial state of that stream


class PlanField(IntEnum):
    """A row of `plans`."""

    PLANES = 0  # P = R + W
    ROWS = 1  # R
    TABLES = 2  # in `tables` (int32): table of each plane
    ROW = 3  # row of the first component, in the arrays by component
    EXTENT = 4  # rows of coefficients up to the last that the class fills
    ROW_MAP = 5  # in `row_maps`: the class's component in each row of coefficients, or -1


class ChunkField(IntEnum):
    """A row of `chunks`."""

    TOKENS = 0
    FIRST = 1  # index of its first token in `slots` and in the rows of the rotation tables
    SOURCE = 2  # position of the first token at encoding, which determines the sinks
    TARGET = 3  # position of the first token in the cache written or read


class PlaceField(IntEnum):
    """A row of `places`: one per unit, 2 * layer for K and 2 * layer + 1 for V. Strides count elements."""

    POINTER = 0
    BLOCK = 1  # stride between blocks
    TOKEN = 2  # stride between the tokens of a block
    HEAD = 3
    DIM = 4
    BLOCK_TOKENS = 5
    SLOTS = 6  # blocks * BLOCK_TOKENS


class TileField(IntEnum):
    """A row of `tiles`. Pair p is dimensions DIM0 + p * STEP and DIM1 + p * STEP of a head."""

    SECTION = 0
    UNIT = 1  # row of `places`
    HEAD = 2
    DIM0 = 3
    DIM1 = 4
    COUNT0 = 5  # number of first dimensions, at most PAIRS
    COUNT1 = 6  # number of second dimensions, at most PAIRS
    STEP = 7
    ANGLE = 8  # column of pair 0 in the rotation tables, or -1: not turned
    ROW = 9  # first component of the tile's block, within the section
    RANK = 10  # components of the block
    BASIS = 11  # of the tile's column 0, in `basis`: `[rank, BASIS_STRIDE]`, 2 * PAIRS columns a tile
    BASIS_STRIDE = 12
    COLUMN = 13  # of the tile's first value in a row of `means`, and of the gathered values
    BLOCK = 14  # row of `blocks`


class BlockField(IntEnum):
    """A row of `blocks`: one per block of a section, for the forward transform."""

    SECTION = 0
    ROW = 1
    RANK = 2
    BASIS = 3  # `[rank, COLUMNS]`
    COLUMN = 4  # of its first value in a row of the gathered values
    COLUMNS = 5  # its values, padding included: 2 * PAIRS for each of its tiles


class Status(IntFlag):
    """Errors that a kernel found in a job; flags may add up."""

    STREAMS = 1  # a stream did not end in its initial state with all its words read
    ESCAPES = 2  # the list of escapes and the ESCAPE bytes disagree
    NOT_FINITE = 4  # the cache holds NaN or infinite values
    TOO_LARGE = 8  # a coefficient is MAX_LEVEL steps or more
    SLOT = 16  # a slot beyond the cache


# A kernel can read a global only as a constexpr.
JOB_FIELDS = tl.constexpr(len(JobField))
JOB_STATES = tl.constexpr(int(JobField.STATES))
JOB_LENGTHS = tl.constexpr(int(JobField.LENGTHS))
JOB_WORDS = tl.constexpr(int(JobField.WORDS))
JOB_ESCAPES = tl.constexpr(int(JobField.ESCAPES))
JOB_WORD_COUNT = tl.constexpr(int(JobField.WORD_COUNT))
JOB_ESCAPE_COUNT = tl.constexpr(int(JobField.ESCAPE_COUNT))
JOB_STREAMS = tl.constexpr(int(JobField.STREAMS))
JOB_TOKENS = tl.constexpr(int(JobField.TOKENS))
JOB_PER_STREAM = tl.constexpr(int(JobField.PER_STREAM))
JOB_LONG_LENGTHS = tl.constexpr(int(JobField.LONG_LENGTHS))
JOB_PLAN = tl.constexpr(int(JobField.PLAN))
JOB_PLANES = tl.constexpr(int(JobField.PLANES))
JOB_LEVELS = tl.constexpr(int(JobField.LEVELS))
JOB_STRIDE = tl.constexpr(int(JobField.STRIDE))
JOB_CHUNK = tl.constexpr(int(JobField.CHUNK))
JOB_SECTION = tl.constexpr(int(JobField.SECTION))
JOB_CLASS_PLAN = tl.constexpr(int(JobField.CLASS_PLAN))
JOB_COLUMNS = tl.constexpr(int(JobField.COLUMNS))
JOB_CLASS_WORDS = tl.constexpr(int(JobField.CLASS_WORDS))
JOB_CLASS_WORD_COUNT = tl.constexpr(int(JobField.CLASS_WORD_COUNT))
JOB_CLASS_STATE = tl.constexpr(int(JobField.CLASS_STATE))

PLAN_FIELDS = tl.constexpr(len(PlanField))
PLAN_PLANES = tl.constexpr(int(PlanField.PLANES))
PLAN_ROWS = tl.constexpr(int(PlanField.ROWS))
PLAN_TABLES = tl.constexpr(int(PlanField.TABLES))
PLAN_ROW = tl.constexpr(int(PlanField.ROW))
PLAN_EXTENT = tl.constexpr(int(PlanField.EXTENT))
PLAN_ROW_MAP = tl.constexpr(int(PlanField.ROW_MAP))

CHUNK_FIELDS = tl.constexpr(len(ChunkField))
CHUNK_TOKENS = tl.constexpr(int(ChunkField.TOKENS))
CHUNK_FIRST = tl.constexpr(int(ChunkField.FIRST))
CHUNK_SOURCE = tl.constexpr(int(ChunkField.SOURCE))
CHUNK_TARGET = tl.constexpr(int(ChunkField.TARGET))

PLACE_FIELDS = tl.constexpr(len(PlaceField))
PLACE_POINTER = tl.constexpr(int(PlaceField.POINTER))
PLACE_BLOCK = tl.constexpr(int(PlaceField.BLOCK))
PLACE_TOKEN = tl.constexpr(int(PlaceField.TOKEN))
PLACE_HEAD = tl.constexpr(int(PlaceField.HEAD))
PLACE_DIM = tl.constexpr(int(PlaceField.DIM))
PLACE_BLOCK_TOKENS = tl.constexpr(int(PlaceField.BLOCK_TOKENS))
PLACE_SLOTS = tl.constexpr(int(PlaceField.SLOTS))

TILE_FIELDS = tl.constexpr(len(TileField))
TILE_SECTION = tl.constexpr(int(TileField.SECTION))
TILE_UNIT = tl.constexpr(int(TileField.UNIT))
TILE_HEAD = tl.constexpr(int(TileField.HEAD))
TILE_DIM0 = tl.constexpr(int(TileField.DIM0))
TILE_DIM1 = tl.constexpr(int(TileField.DIM1))
TILE_COUNT0 = tl.constexpr(int(TileField.COUNT0))
TILE_COUNT1 = tl.constexpr(int(TileField.COUNT1))
TILE_STEP = tl.constexpr(int(TileField.STEP))
TILE_ANGLE = tl.constexpr(int(TileField.ANGLE))
TILE_ROW = tl.constexpr(int(TileField.ROW))
TILE_RANK = tl.constexpr(int(TileField.RANK))
TILE_BASIS = tl.constexpr(int(TileField.BASIS))
TILE_BASIS_STRIDE = tl.constexpr(int(TileField.BASIS_STRIDE))
TILE_COLUMN = tl.constexpr(int(TileField.COLUMN))
TILE_BLOCK = tl.constexpr(int(TileField.BLOCK))

BLOCK_FIELDS = tl.constexpr(len(BlockField))
BLOCK_SECTION = tl.constexpr(int(BlockField.SECTION))
BLOCK_ROW = tl.constexpr(int(BlockField.ROW))
BLOCK_RANK = tl.constexpr(int(BlockField.RANK))
BLOCK_BASIS = tl.constexpr(int(BlockField.BASIS))
BLOCK_COLUMN = tl.constexpr(int(BlockField.COLUMN))
BLOCK_COLUMNS = tl.constexpr(int(BlockField.COLUMNS))

STATUS_STREAMS = tl.constexpr(int(Status.STREAMS))
STATUS_ESCAPES = tl.constexpr(int(Status.ESCAPES))
STATUS_NOT_FINITE = tl.constexpr(int(Status.NOT_FINITE))
STATUS_TOO_LARGE = tl.constexpr(int(Status.TOO_LARGE))
STATUS_SLOT = tl.constexpr(int(Status.SLOT))

# Triton's names of a cache's element types.
ELEMENTS: dict[torch.dtype, Any] = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}

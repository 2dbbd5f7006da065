"""The tables that tell the kernels what to do: one launch handles many chunks, layers and groups.

All are int64 `[rows, FIELDS]` on the device. A *job* is one coded part: one section of one chunk. A *plan* says how
the components of a section are coded (`CodingPlan` on the device). A *chunk* is a run of tokens and where they go. A
*place* is one unit (K or V of a layer) in memory. A *tile* is a piece of one head that a program produces or reads: up
to `PAIRS` pairs of dimensions that RoPE turns together.

Offsets count elements of the array they point into, never bytes, and are int64 wherever a chunk may exceed 2**31.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Any

import torch
import triton.language as tl


class Job(IntEnum):
    """Columns of `jobs`."""

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
    STRIDE = 13  # of a row of coefficients, at least T
    CHUNK = 14  # row of `chunks`
    SECTION = 15  # in `out`: byte offset of the coded part, a multiple of 4 (encoding)
    CLASS_PLAN = 16  # row of `plans` for tokens of class 0, k rows later for class k; not above 0: there are no classes
    COLUMNS = 17  # in `classes` and `order`: its tokens in the order in which they are coded
    CLASS_WORDS = 18  # in `class_words`: the stream of its classes (encoding)
    CLASS_WORD_COUNT = 19
    CLASS_STATE = 20  # of that stream, initial


class Plan(IntEnum):
    """Columns of `plans`."""

    PLANES = 0  # P = R + W
    ROWS = 1  # R
    FIRST = 2  # in `tables` (int32): table of each plane for the first token of a stream
    REST = 3  # in `tables`: for the other tokens
    ROW = 4  # of the first component, in the arrays by component
    PREDICTION = 5  # symbols.Prediction
    EXTENT = 6  # of a class: rows of coefficients up to the last that it fills
    ROW_MAP = 7  # of a class, in `row_maps`: which of its components each row of coefficients holds, or -1


class Chunk(IntEnum):
    """Columns of `chunks`."""

    TOKENS = 0
    FIRST = 1  # of its first token, in `slots` and in the rows of the rotation tables
    SOURCE = 2  # position of the first token when it was encoded: tells the sinks
    TARGET = 3  # position of the first token in the cache written or read


class Place(IntEnum):
    """Columns of `places`: one row per unit, 2 * layer for K and 2 * layer + 1 for V. Strides count elements."""

    POINTER = 0
    BLOCK = 1  # stride between blocks
    TOKEN = 2  # stride between the tokens of a block
    HEAD = 3
    DIM = 4
    BLOCK_TOKENS = 5
    SLOTS = 6  # blocks * BLOCK_TOKENS


class Tile(IntEnum):
    """Columns of `tiles`. Pair p is dimensions DIM0 + p * STEP and DIM1 + p * STEP of a head."""

    SECTION = 0
    UNIT = 1  # row of `places`
    HEAD = 2
    DIM0 = 3
    DIM1 = 4
    COUNT0 = 5  # how many of the first dimensions there are, at most PAIRS
    COUNT1 = 6  # likewise, of the second
    STEP = 7
    ANGLE = 8  # column of pair 0 in the rotation tables, or -1: not turned
    ROW = 9  # first component of the tile's block, within the section
    RANK = 10  # components of the block
    BASIS = 11  # of the tile's column 0, in `basis`: `[rank, BASIS_STRIDE]`, 2 * PAIRS columns a tile
    BASIS_STRIDE = 12
    COLUMN = 13  # of the tile's first value in a row of `means`, and of the gathered values
    BLOCK = 14  # row of `blocks`


class Block(IntEnum):
    """Columns of `blocks`: one row a block of a section, for the forward transform."""

    SECTION = 0
    ROW = 1
    RANK = 2
    BASIS = 3  # `[rank, COLUMNS]`
    COLUMN = 4  # of its first value in a row of the gathered values
    COLUMNS = 5  # its values, padding included: 2 * PAIRS for each of its tiles


class Status(IntFlag):
    """What a kernel found wrong with a job; several may add up."""

    STREAMS = 1  # a stream did not end in its initial state with all its words read
    ESCAPES = 2  # the list of escapes and the ESCAPE bytes disagree
    NOT_FINITE = 4  # the cache holds NaN or infinite values
    TOO_LARGE = 8  # a coefficient is MAX_LEVEL steps or more
    SLOT = 16  # a slot beyond the cache


# A kernel can read a global only as a constexpr.
JOB_FIELDS = tl.constexpr(len(Job))
JOB_STATES = tl.constexpr(int(Job.STATES))
JOB_LENGTHS = tl.constexpr(int(Job.LENGTHS))
JOB_WORDS = tl.constexpr(int(Job.WORDS))
JOB_ESCAPES = tl.constexpr(int(Job.ESCAPES))
JOB_WORD_COUNT = tl.constexpr(int(Job.WORD_COUNT))
JOB_ESCAPE_COUNT = tl.constexpr(int(Job.ESCAPE_COUNT))
JOB_STREAMS = tl.constexpr(int(Job.STREAMS))
JOB_TOKENS = tl.constexpr(int(Job.TOKENS))
JOB_PER_STREAM = tl.constexpr(int(Job.PER_STREAM))
JOB_LONG_LENGTHS = tl.constexpr(int(Job.LONG_LENGTHS))
JOB_PLAN = tl.constexpr(int(Job.PLAN))
JOB_PLANES = tl.constexpr(int(Job.PLANES))
JOB_LEVELS = tl.constexpr(int(Job.LEVELS))
JOB_STRIDE = tl.constexpr(int(Job.STRIDE))
JOB_CHUNK = tl.constexpr(int(Job.CHUNK))
JOB_SECTION = tl.constexpr(int(Job.SECTION))
JOB_CLASS_PLAN = tl.constexpr(int(Job.CLASS_PLAN))
JOB_COLUMNS = tl.constexpr(int(Job.COLUMNS))
JOB_CLASS_WORDS = tl.constexpr(int(Job.CLASS_WORDS))
JOB_CLASS_WORD_COUNT = tl.constexpr(int(Job.CLASS_WORD_COUNT))
JOB_CLASS_STATE = tl.constexpr(int(Job.CLASS_STATE))

PLAN_FIELDS = tl.constexpr(len(Plan))
PLAN_PLANES = tl.constexpr(int(Plan.PLANES))
PLAN_ROWS = tl.constexpr(int(Plan.ROWS))
PLAN_FIRST = tl.constexpr(int(Plan.FIRST))
PLAN_REST = tl.constexpr(int(Plan.REST))
PLAN_ROW = tl.constexpr(int(Plan.ROW))
PLAN_PREDICTION = tl.constexpr(int(Plan.PREDICTION))
PLAN_EXTENT = tl.constexpr(int(Plan.EXTENT))
PLAN_ROW_MAP = tl.constexpr(int(Plan.ROW_MAP))

CHUNK_FIELDS = tl.constexpr(len(Chunk))
CHUNK_TOKENS = tl.constexpr(int(Chunk.TOKENS))
CHUNK_FIRST = tl.constexpr(int(Chunk.FIRST))
CHUNK_SOURCE = tl.constexpr(int(Chunk.SOURCE))
CHUNK_TARGET = tl.constexpr(int(Chunk.TARGET))

PLACE_FIELDS = tl.constexpr(len(Place))
PLACE_POINTER = tl.constexpr(int(Place.POINTER))
PLACE_BLOCK = tl.constexpr(int(Place.BLOCK))
PLACE_TOKEN = tl.constexpr(int(Place.TOKEN))
PLACE_HEAD = tl.constexpr(int(Place.HEAD))
PLACE_DIM = tl.constexpr(int(Place.DIM))
PLACE_BLOCK_TOKENS = tl.constexpr(int(Place.BLOCK_TOKENS))
PLACE_SLOTS = tl.constexpr(int(Place.SLOTS))

TILE_FIELDS = tl.constexpr(len(Tile))
TILE_SECTION = tl.constexpr(int(Tile.SECTION))
TILE_UNIT = tl.constexpr(int(Tile.UNIT))
TILE_HEAD = tl.constexpr(int(Tile.HEAD))
TILE_DIM0 = tl.constexpr(int(Tile.DIM0))
TILE_DIM1 = tl.constexpr(int(Tile.DIM1))
TILE_COUNT0 = tl.constexpr(int(Tile.COUNT0))
TILE_COUNT1 = tl.constexpr(int(Tile.COUNT1))
TILE_STEP = tl.constexpr(int(Tile.STEP))
TILE_ANGLE = tl.constexpr(int(Tile.ANGLE))
TILE_ROW = tl.constexpr(int(Tile.ROW))
TILE_RANK = tl.constexpr(int(Tile.RANK))
TILE_BASIS = tl.constexpr(int(Tile.BASIS))
TILE_BASIS_STRIDE = tl.constexpr(int(Tile.BASIS_STRIDE))
TILE_COLUMN = tl.constexpr(int(Tile.COLUMN))
TILE_BLOCK = tl.constexpr(int(Tile.BLOCK))

BLOCK_FIELDS = tl.constexpr(len(Block))
BLOCK_SECTION = tl.constexpr(int(Block.SECTION))
BLOCK_ROW = tl.constexpr(int(Block.ROW))
BLOCK_RANK = tl.constexpr(int(Block.RANK))
BLOCK_BASIS = tl.constexpr(int(Block.BASIS))
BLOCK_COLUMN = tl.constexpr(int(Block.COLUMN))
BLOCK_COLUMNS = tl.constexpr(int(Block.COLUMNS))

STATUS_STREAMS = tl.constexpr(int(Status.STREAMS))
STATUS_ESCAPES = tl.constexpr(int(Status.ESCAPES))
STATUS_NOT_FINITE = tl.constexpr(int(Status.NOT_FINITE))
STATUS_TOO_LARGE = tl.constexpr(int(Status.TOO_LARGE))
STATUS_SLOT = tl.constexpr(int(Status.SLOT))

# Element types of a cache, as a kernel names them.
ELEMENTS: dict[torch.dtype, Any] = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}

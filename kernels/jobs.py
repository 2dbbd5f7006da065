"""Descriptor tables of the kernels: one launch handles many chunks, layers and groups.

All are int64 `[rows, FIELDS]` on the device; each enumeration names the fields of a row. A *job* is one coded part: one
section of one chunk, or of its refinement. A *plan* says how the components of one class of a section's tokens are
coded (`CodingPlan` on the device). A *chunk* is a run of tokens and where they go. A *place* is one unit (K or V of a
layer) in memory. A *tile* is a piece of one head that a program produces or reads: up to `PAIRS` pairs of dimensions
that RoPE turns together.

The host makes each table at once (`job_table`) and changes none. Offsets count elements of the array they point into,
never bytes, and are int64 wherever a chunk may exceed 2**31.
"""

from __future__ import annotations

from collections import namedtuple
from enum import IntEnum, IntFlag
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl

I64 = npt.NDArray[np.int64]


class JobField(IntEnum):
    """A row of `jobs`. What only decoding or only encoding reads is 0 in the tables of the other."""

    TOKENS = 0  # T
    PLAN = 1  # row of `plans` for class 0; class k is k rows later
    DEEPEST = 2  # row of `plans` for the finest class that occurs
    COLUMNS = 3  # in `classes` and `order`: the job's tokens in coding order
    PLANES = 4  # in `planes`: `[P, T]` uint8
    COEFFICIENTS = 5  # in `y`: `[R, STRIDE]`
    STRIDE = 6  # stride of a row of coefficients, at least T
    PER_STREAM = 7  # n
    STREAMS = 8  # S = ceil(T / n)
    STATES = 9  # initial states of the streams, uint32: in `data` (decoding), or in `EncodedStreams.states`
    LENGTHS = 10  # words of each stream: in `data` as uint16 (decoding), or in `EncodedStreams.lengths`
    LONG_LENGTHS = 11  # 1: in the coded part a length takes two uint16
    WORDS = 12  # uint16: in `data` (decoding), or in `EncodedStreams.words`
    WORD_COUNT = 13  # decoding
    ESCAPES = 14  # decoding: in `data` as uint32: E indices row * T + column, then E values (int32)
    ESCAPE_COUNT = 15  # decoding
    CLASS_WORDS = 16  # the stream of its classes: in `data` as uint16 (decoding), or in `class_words`
    CLASS_WORD_COUNT = 17
    CLASS_STATE = 18  # initial state of that stream
    PADDING = 19  # a row is a multiple of 16 bytes, so that the rows of refinements are aligned


class PartField(IntEnum):
    """A row of `parts`: what is known of a job only once its streams are coded (encoding)."""

    SECTION = 0  # in `out`: byte offset of the coded part, a multiple of 4
    WORD_COUNT = 1
    ESCAPES = 2  # in the arrays of escapes
    ESCAPE_COUNT = 3


class PlanField(IntEnum):
    """A row of `plans`."""

    PLANES = 0  # P = R + W
    ROWS = 1  # R
    TABLES = 2  # in `tables` (int32): table of each plane
    ROW = 3  # row of the first component, in the arrays by component
    EXTENT = 4  # rows of coefficients up to the last that the class fills
    ROW_MAP = 5  # in `row_maps`: the class's component in each row of coefficients, or -1
    STEP = 6  # two float32: the quantizer's step, and float32(1 / step)
    LIMIT = 7  # float32: `level_limit(step)`; coefficients must lie below


class ChunkField(IntEnum):
    """A row of `chunks`."""

    TOKENS = 0
    FIRST = 1  # index of its first token in `slots` and in the rows of the rotation tables
    SOURCE = 2  # position of the first token at encoding, which determines the sinks
    TARGET = 3  # position of the first token in the cache written or read


class UnitField(IntEnum):
    """A row of `units`: one per unit, 2 * layer for K and 2 * layer + 1 for V. Strides count elements."""

    POINTER = 0
    BLOCK = 1  # stride between blocks
    TOKEN = 2  # stride between the tokens of a block
    HEAD = 3
    DIM = 4
    BLOCK_TOKENS = 5
    SLOTS = 6  # blocks * BLOCK_TOKENS
    SCALE = 7  # float32: what a stored FP8 value is multiplied by; not read for other types


class TileField(IntEnum):
    """A row of `tiles`. Pair p is dimensions DIM0 + p * STEP and DIM1 + p * STEP of a head."""

    SECTION = 0  # from the first that a launch handles on
    UNIT = 1  # row of `units`
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


def fields_of(table: type[IntEnum | IntFlag]) -> Any:
    """Return the fields of a table as kernels read them; `FIELDS` is their number.

    They are a global that is a constexpr, so that it counts in the kernels' cache keys.
    """
    numbers = {name: int(field) for name, field in table.__members__.items()}
    make: Any = namedtuple  # noqa: PYI024 - its names are known at run time
    return tl.constexpr(make(table.__name__, [*numbers, "FIELDS"])(*numbers.values(), len(numbers)))


JOB = fields_of(JobField)
PART = fields_of(PartField)
PLAN = fields_of(PlanField)
CHUNK = fields_of(ChunkField)
UNIT = fields_of(UnitField)
TILE = fields_of(TileField)
BLOCK = fields_of(BlockField)
STATUS = fields_of(Status)


def job_table(count: int, **fields: npt.ArrayLike) -> I64:
    """Return a table of `count` jobs, given the values of fields by their names in lower case; it does not change."""
    table = np.zeros((count, len(JobField)), np.int64)
    for name, values in fields.items():
        table[:, JobField[name.upper()]] = values
    table.setflags(write=False)
    return table


# Triton's names of a cache's element types.
ELEMENTS: dict[torch.dtype, Any] = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}

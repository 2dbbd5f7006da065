"""From real coefficients to bytes and back: quantizer, prediction and symbol planes, in plain NumPy (the reference).

    y [R, T] float32 --quantize--> q [R, T] int32 --predict--> d [R, T] int32 --pack--> planes [R + W, T] uint8
    y^ <------------dequantize---- q <-------------unpredict-- d <------------unpack--- planes, escapes

There are R components (rows) and T tokens (columns). Prediction works on integers, so it is exactly invertible on every
machine, and the quantizer can be swapped without touching it.

**Planes.** A component whose deviation is many steps (`shift` k > 0) is *wide*: `d = (high << k) + low - half`, where
`half = 2**(k - 1)` and `0 <= low < 2**k`. Its high part is one of the first R planes. Its low bits get another plane.
A high part that its table cannot code is written as ESCAPE and listed apart, as (row * T + column, value).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from cuvee.codec.entropy.tables import EntropyTables
from cuvee.codec.errors import CorruptError, FormatError, InputError

ESCAPE = 0x80  # the byte of -128: never a value, so that values are the int8 range -127 … 127
MAX_SHIFT = 8
MAX_LEVEL = 1 << 24  # float32 holds no larger integers exactly

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I16 = npt.NDArray[np.int16]
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Quantizer:
    """A dead-zone quantizer whose thresholds and reconstruction points depend on the component's table.

    A magnitude `a` (in steps) becomes 0 below `dead_zone`, else `floor(a + rounding)`. A level m > 0 is reconstructed
    as `m - shrink[:, min(m, 2) - 1]`. The thresholds are where rate-distortion optimized quantization switches between
    levels, and the shrinkage gives the measured centroid (see `family.fit_family`). All arrays are indexed by table.
    """

    dead_zone: F32
    rounding: F32
    shrink: F32  # [tables, 2]

    def __post_init__(self) -> None:
        tables = len(self.dead_zone) if self.dead_zone.ndim else -1
        # They come from the file of a profile, and compiled loops index them without checking their size.
        for name, array, shape, least in (
            ("dead_zone", self.dead_zone, (tables,), 0.0),
            ("rounding", self.rounding, (tables,), 0.0),
            ("shrink", self.shrink, (tables, 2), -2.0),
        ):
            if array.shape != shape or array.dtype != np.float32:
                raise FormatError(f"{name} of the quantizer has the wrong shape or dtype")
            if not np.all((array >= least) & (array <= 2.0)):  # which NaN fails, too
                raise FormatError(f"{name} of the quantizer must lie within {least:g} … 2")


class Prediction(IntEnum):
    """What the levels of a token are predicted from. Streams are independent, so prediction restarts with each."""

    NONE = 0
    LAG1 = 1  # the previous token
    ANCHOR = 2  # the first token of the stream (CacheGen's anchor tokens, arXiv 2310.07240)


RHO_BITS = 8  # predictor gains are fixed-point numbers in units of 1/256


@dataclass(frozen=True, slots=True)
class CodingPlan:
    """How the components of one section are coded at one step: everything that the integer stages need.

    Attributes:
        level_table: `[R]` uint16, index into the quantizer's arrays.
        shift: `[R]` uint8, how many low bits are coded apart, 0 … 8.
        first, rest: `[R + W]` uint16, entropy table of each plane, for the first token of a stream and for the others.
        prediction: what levels are predicted from.
        rho: `[R]` int16, predictor gain in units of 1/256.
    """

    level_table: U16
    shift: U8
    first: U16
    rest: U16
    prediction: Prediction
    rho: I16

    @property
    def wide(self) -> npt.NDArray[np.intp]:
        """Rows that have a plane of low bits, in plane order."""
        return np.flatnonzero(self.shift)

    @property
    def planes(self) -> int:
        """Number of byte planes: R + W."""
        return len(self.first)


@dataclass(frozen=True, slots=True)
class Escapes:
    """Values outside their table: `index` `[E]` uint32, row * T + column, increasing; `value` `[E]` int32."""

    index: U32
    value: I32


def quantize(y: F32, step: float, plan: CodingPlan, quantizer: Quantizer) -> I32:
    """`[R, T]` float32 -> levels `[R, T]` int32. The caller must ensure that |y| / step < MAX_LEVEL."""
    magnitude = np.abs(y) * np.float32(1.0 / step)
    table = plan.level_table
    level = np.floor(magnitude + quantizer.rounding[table, None])
    level[magnitude < quantizer.dead_zone[table, None]] = 0
    signed: I32 = np.copysign(level, y).astype(np.int32)
    return signed


def too_large_error(steps: float) -> InputError:
    """Return the error about a chunk whose largest coefficient is this many steps large."""
    return InputError(
        f"the KV cache holds values that are {steps:.3g} quantizer steps large: encode it with quality='lossless'"
    )


def dequantize(q: I32, step: float, plan: CodingPlan, quantizer: Quantizer) -> F32:
    """Levels `[R, T]` int32 -> `[R, T]` float32."""
    magnitude = np.abs(q)
    shrink = quantizer.shrink[plan.level_table]
    back = magnitude.astype(np.float32) - np.where(magnitude == 1, shrink[:, :1], shrink[:, 1:])
    back[magnitude == 0] = 0
    return np.where(q < 0, -back, back) * np.float32(step)


def _predicted(source: I32, rho: I16) -> I32:
    product = source.astype(np.int64) * rho[:, None] + (1 << (RHO_BITS - 1)) >> RHO_BITS
    return product.astype(np.int32)


def predict(q: I32, plan: CodingPlan, tokens_per_stream: int) -> I32:
    """Levels -> differences from their prediction, `[R, T]` int32."""
    d = q.copy()
    for t in range(q.shape[1]):
        j = t % tokens_per_stream
        if j and plan.prediction is not Prediction.NONE:
            source = t - 1 if plan.prediction is Prediction.LAG1 else t - j
            d[:, t : t + 1] -= _predicted(q[:, source : source + 1], plan.rho)
    return d


def unpredict(d: I32, plan: CodingPlan, tokens_per_stream: int) -> I32:
    """The inverse of `predict`. Sums wrap around as int32, so damaged input gives wrong numbers and nothing worse."""
    q = d.copy()
    for t in range(d.shape[1]):
        j = t % tokens_per_stream
        if j and plan.prediction is not Prediction.NONE:
            source = t - 1 if plan.prediction is Prediction.LAG1 else t - j
            q[:, t : t + 1] += _predicted(q[:, source : source + 1], plan.rho)
    return q


def pack(d: I32, plan: CodingPlan, tables: EntropyTables, tokens_per_stream: int) -> tuple[U8, Escapes]:
    """Differences `[R, T]` int32 -> byte planes `[R + W, T]` uint8 and the escapes."""
    rows, tokens = d.shape
    wide = plan.wide
    shift = plan.shift.astype(np.int32)[:, None]
    half = np.where(shift > 0, 1 << np.maximum(shift - 1, 0), 0).astype(np.int32)
    high = (d + half) >> shift
    planes = np.empty((plan.planes, tokens), np.uint8)
    planes[rows:] = ((d + half) & ((1 << shift) - 1))[wide]
    byte = np.clip(high, -128, 127).astype(np.int8).view(np.uint8)
    starts = np.arange(tokens) % tokens_per_stream == 0
    table = np.where(starts[None, :], plan.first[:rows, None], plan.rest[:rows, None])
    escaped = (np.abs(high) > 127) | (tables.freq[table, byte] == 0)
    planes[:rows] = np.where(escaped, np.uint8(ESCAPE), byte)
    index = np.flatnonzero(escaped)
    return planes, Escapes(index.astype(np.uint32), high.ravel()[index].astype(np.int32))


def escape_error() -> CorruptError:
    """What is wrong with a section that lists other escapes than it codes."""
    return CorruptError("the escape list does not match the coded symbols: the bytes are damaged")


def unpack(planes: U8, escapes: Escapes, plan: CodingPlan) -> I32:
    """The inverse of `pack`: `[R, T]` int32.

    Raises:
        CorruptError: the escape list and the ESCAPE bytes disagree.
    """
    rows = len(plan.shift)
    high = planes[:rows].view(np.int8).astype(np.int32)
    index = np.flatnonzero(planes[:rows] == ESCAPE)
    if not np.array_equal(index, escapes.index):
        raise escape_error()
    high.ravel()[index] = escapes.value
    wide = plan.wide
    shift = plan.shift[wide].astype(np.int32)[:, None]
    high[wide] = (high[wide] << shift) + planes[rows:] - (1 << (shift - 1))
    return high

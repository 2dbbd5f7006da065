"""From real coefficients to bytes and back: quantizer and symbol planes, in plain NumPy (the reference).

    y [R, T] float32 --quantize--> q [R, T] int32 --pack--> planes [R + W, T] uint8, escapes
    y^ <------------dequantize---- q <------------unpack--- planes, escapes

There are R components (rows) and T tokens (columns).

**Planes.** A component whose deviation is many steps (`shift` k > 0) is *wide*: `q = (high << k) + low - half`, where
`half = 2**(k - 1)` and `0 <= low < 2**k`. Its high part is one of the first R planes. Its low bits get another plane.
A high part that its table cannot code is written as ESCAPE and listed separately, as (row * T + column, value).
"""

from __future__ import annotations

import numpy as np

from cuvee.codec.entropy.coding_plan import ESCAPE, CodingPlan, Escapes, Quantizer, escape_error
from cuvee.codec.entropy.tables import EntropyTables
from cuvee.codec.support.arrays import F32, I32, U8


def quantize(y: F32, step: float, plan: CodingPlan, quantizer: Quantizer) -> I32:
    """Quantize `[R, T]` float32 to levels `[R, T]` int32. The caller must ensure that |y| / step < MAX_LEVEL."""
    magnitude = np.abs(y) * np.float32(1.0 / step)
    table = plan.level_table
    level = np.floor(magnitude + quantizer.rounding[table, None])
    level[magnitude < quantizer.dead_zone[table, None]] = 0
    signed: I32 = np.copysign(level, y).astype(np.int32)
    return signed


def dequantize(q: I32, step: float, plan: CodingPlan, quantizer: Quantizer) -> F32:
    """Reconstruct `[R, T]` float32 from levels `[R, T]` int32."""
    magnitude = np.abs(q)
    shrink = quantizer.shrink[plan.level_table]
    back = magnitude.astype(np.float32) - np.where(magnitude == 1, shrink[:, :1], shrink[:, 1:])
    back[magnitude == 0] = 0
    return np.where(q < 0, -back, back) * np.float32(step)


def pack(q: I32, plan: CodingPlan, tables: EntropyTables) -> tuple[U8, Escapes]:
    """Pack levels `[R, T]` int32 into byte planes `[R + W, T]` uint8 and escapes."""
    rows, tokens = q.shape
    wide = plan.wide
    shift = plan.shift.astype(np.int32)[:, None]
    half = np.where(shift > 0, 1 << np.maximum(shift - 1, 0), 0).astype(np.int32)
    high = (q + half) >> shift
    planes = np.empty((plan.planes, tokens), np.uint8)
    planes[rows:] = ((q + half) & ((1 << shift) - 1))[wide]
    byte = np.clip(high, -128, 127).astype(np.int8).view(np.uint8)
    escaped = (np.abs(high) > 127) | (tables.freq[plan.tables[:rows, None], byte] == 0)
    planes[:rows] = np.where(escaped, np.uint8(ESCAPE), byte)
    index = np.flatnonzero(escaped)
    return planes, Escapes(index.astype(np.uint32), high.ravel()[index].astype(np.int32))


def unpack(planes: U8, escapes: Escapes, plan: CodingPlan) -> I32:
    """Invert `pack`: return `[R, T]` int32.

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

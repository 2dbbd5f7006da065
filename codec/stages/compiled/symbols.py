"""The integer stages, compiled: the same results as `reference/symbols.py`."""

from __future__ import annotations

import numpy as np

from cuvee.codec.entropy.coding_plan import ESCAPE, CodingPlan, Escapes, Quantizer
from cuvee.codec.entropy.tables import EntropyTables
from cuvee.codec.stages.compiled.compiler import compiled
from cuvee.codec.support.arrays import F32, I32, U8


@compiled
def quantize_row(y, inverse, dead_zone, rounding, levels):  # type: ignore[no-untyped-def]
    """Quantize coefficients of one component; `inverse` is one over their step."""
    for t in range(len(levels)):
        a = abs(y[t]) * inverse
        level = (
            np.int32(a + rounding) if a >= dead_zone else np.int32(0)
        )  # of a number that is not negative: rounds down
        levels[t] = level if y[t] >= 0 else -level


@compiled
def pack_row(levels, bits, codable, least, greatest, plane, low):  # type: ignore[no-untyped-def]
    """Pack levels that share a table into bytes and low bits; return the number of escapes."""
    half = np.int32(1) << (bits - 1) if bits else np.int32(0)
    mask = (np.int32(1) << bits) - np.int32(1)
    escapes = 0
    if least <= greatest:
        for t in range(len(levels)):
            high = np.int32(levels[t] + half) >> bits
            escape = high < least or high > greatest
            plane[t] = np.uint8(ESCAPE) if escape else np.uint8(high & 0xFF)
            escapes += escape
    else:  # a table with gaps
        for t in range(len(levels)):
            high = np.int32(levels[t] + half) >> bits
            escape = high < -127 or high > 127 or not codable[np.uint8(high & 0xFF)]
            plane[t] = np.uint8(ESCAPE) if escape else np.uint8(high & 0xFF)
            escapes += escape
    for t in range(len(low)):
        low[t] = np.uint8(np.int32(levels[t] + half) & mask)
    return escapes


@compiled
def _quantize(y, inverse, table, dead_zone, rounding, out):  # type: ignore[no-untyped-def]
    for c in range(len(y)):
        quantize_row(y[c], inverse, dead_zone[table[c]], rounding[table[c]], out[c])


def quantize(y: F32, step: float, plan: CodingPlan, quantizer: Quantizer) -> I32:
    """See `cuvee.codec.stages.reference.symbols.quantize`."""
    out = np.empty(y.shape, np.int32)
    _quantize(y, np.float32(1.0 / step), plan.level_table, quantizer.dead_zone, quantizer.rounding, out)
    return out


@compiled
def _pack(q, shift, which, codable, reach, planes, escaped):  # type: ignore[no-untyped-def]
    rows, _ = q.shape
    low_row = rows
    for c in range(rows):
        bits = np.int32(shift[c])
        low = planes[low_row] if bits else planes[c, :0]
        low_row += bits > 0
        table = which[c]
        escaped[c] = pack_row(q[c], bits, codable[table], reach[table, 0], reach[table, 1], planes[c], low)


def pack(q: I32, plan: CodingPlan, tables: EntropyTables) -> tuple[U8, Escapes]:
    """See `cuvee.codec.stages.reference.symbols.pack`."""
    rows, tokens = q.shape
    planes = np.empty((plan.planes, tokens), np.uint8)
    escaped = np.zeros(rows, np.int64)
    _pack(q, plan.shift, plan.tables, tables.codable, tables.reach, planes, escaped)
    those = np.flatnonzero(escaped)
    row, column = np.nonzero(planes[those] == ESCAPE)
    row = those[row]
    shift = plan.shift.astype(np.int32)[row]
    high = (q[row, column] + np.where(shift > 0, 1 << np.maximum(shift - 1, 0), 0)) >> shift
    return planes, Escapes((row * tokens + column).astype(np.uint32), high.astype(np.int32))


@compiled
def count_escapes(plane):  # type: ignore[no-untyped-def]
    """Return how many bytes of a plane are ESCAPE."""
    count = 0
    for i in range(len(plane)):
        count += plane[i] == ESCAPE
    return count


@compiled
def to_levels(plane, levels):  # type: ignore[no-untyped-def]
    """Write the bytes of a plane as levels."""
    for i in range(len(levels)):
        levels[i] = np.int32(np.int8(plane[i]))


@compiled
def add_low_bits(levels, low, bits):  # type: ignore[no-untyped-def]
    """Complete levels by their low bits."""
    half = np.int32(1) << (bits - 1)
    for i in range(len(levels)):
        levels[i] = np.int32((levels[i] << bits) + np.int32(low[i]) - half)

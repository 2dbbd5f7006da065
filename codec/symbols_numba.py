"""The integer stages for the CPU: the same results as `symbols.py`, but compiled. They release the GIL."""

from __future__ import annotations

import numpy as np

from cuvee.codec.compiled import compiled
from cuvee.codec.errors import CorruptError
from cuvee.codec.symbols import ESCAPE, F32, I32, RHO_BITS, U8, CodingPlan, Escapes, Prediction, Quantizer
from cuvee.codec.tables import EntropyTables

_RHO_HALF = 1 << (RHO_BITS - 1)


@compiled
def _quantize(y, inverse, table, dead_zone, rounding, out):  # type: ignore[no-untyped-def]
    rows, tokens = y.shape
    for c in range(rows):
        dead, offset = dead_zone[table[c]], rounding[table[c]]
        source, target = y[c], out[c]
        for t in range(tokens):
            a = abs(source[t]) * inverse
            level = np.int32(np.floor(a + offset)) if a >= dead else np.int32(0)
            target[t] = level if source[t] >= 0 else -level


def quantize(y: F32, step: float, plan: CodingPlan, quantizer: Quantizer) -> I32:
    """See `cuvee.codec.symbols.quantize`."""
    out = np.empty(y.shape, np.int32)
    _quantize(y, np.float32(1.0 / step), plan.level_table, quantizer.dead_zone, quantizer.rounding, out)
    return out


@compiled
def _dequantize(q, step, table, shrink, out):  # type: ignore[no-untyped-def]
    rows, tokens = q.shape
    for c in range(rows):
        one, more = shrink[table[c], 0], shrink[table[c], 1]
        source, target = q[c], out[c]
        for t in range(tokens):
            m = abs(source[t])
            back = np.float32(m) - (one if m == 1 else more)
            back = back if m != 0 else np.float32(0)
            target[t] = (-back if source[t] < 0 else back) * step


def dequantize(q: I32, step: float, plan: CodingPlan, quantizer: Quantizer) -> F32:
    """See `cuvee.codec.symbols.dequantize`."""
    out = np.empty(q.shape, np.float32)
    _dequantize(np.ascontiguousarray(q), np.float32(step), plan.level_table, quantizer.shrink, out)
    return out


@compiled
def _difference(q, source, rho, anchor, sign, n):  # type: ignore[no-untyped-def]
    rows, tokens = q.shape
    for c in range(rows):
        gain = np.int64(rho[c])
        for t in range(tokens):
            j = t % n
            if j:
                s = t - j if anchor else t - 1
                predicted = (np.int64(source[c, s]) * gain + _RHO_HALF) >> RHO_BITS
                q[c, t] = np.int32(q[c, t] + sign * np.int32(predicted))


def predict(q: I32, plan: CodingPlan, tokens_per_stream: int) -> I32:
    """See `cuvee.codec.symbols.predict`."""
    if plan.prediction is Prediction.NONE:
        return q
    d = q.copy()
    _difference(d, q, plan.rho, plan.prediction is Prediction.ANCHOR, -1, tokens_per_stream)
    return d


def unpredict(d: I32, plan: CodingPlan, tokens_per_stream: int) -> I32:
    """See `cuvee.codec.symbols.unpredict`."""
    if plan.prediction is Prediction.NONE:
        return d
    q = d.copy()
    _difference(q, q, plan.rho, plan.prediction is Prediction.ANCHOR, 1, tokens_per_stream)
    return q


@compiled
def _pack(d, shift, first, rest, codable, n, planes):  # type: ignore[no-untyped-def]
    rows, tokens = d.shape
    escapes = 0
    low_row = rows
    for c in range(rows):
        k = np.int32(shift[c])
        half = np.int32(1) << (k - 1) if k else np.int32(0)
        mask = (np.int32(1) << k) - np.int32(1)
        ok_first, ok_rest = codable[first[c]], codable[rest[c]]
        for t in range(tokens):
            v = d[c, t] + half
            high = v >> k
            byte = np.uint8(high & 0xFF)
            ok = ok_rest[byte] if t % n else ok_first[byte]
            if high > 127 or high < -127 or not ok:
                byte = np.uint8(ESCAPE)
                escapes += 1
            planes[c, t] = byte
            if k:
                planes[low_row, t] = np.uint8(v & mask)
        if k:
            low_row += 1
    return escapes


def pack(d: I32, plan: CodingPlan, tables: EntropyTables, tokens_per_stream: int) -> tuple[U8, Escapes]:
    """See `cuvee.codec.symbols.pack`."""
    rows, tokens = d.shape
    planes = np.empty((plan.planes, tokens), np.uint8)
    count = _pack(d, plan.shift, plan.first, plan.rest, tables.freq != 0, tokens_per_stream, planes)
    index = np.flatnonzero(planes[:rows] == ESCAPE) if count else np.empty(0, np.intp)
    shift = plan.shift.astype(np.int32)[index // tokens]
    high = (d.ravel()[index] + np.where(shift > 0, 1 << np.maximum(shift - 1, 0), 0)) >> shift
    return planes, Escapes(index.astype(np.uint32), high.astype(np.int32))


@compiled
def _unpack(planes, escape_index, escape_value, shift, out):  # type: ignore[no-untyped-def]
    rows, tokens = out.shape
    low_row = rows
    at = 0
    for c in range(rows):
        k = np.int32(shift[c])
        source, target = planes[c], out[c]
        escapes = 0
        for t in range(tokens):
            target[t] = np.int32(np.int8(source[t]))
            escapes += source[t] == ESCAPE
        for t in range(tokens if escapes else 0):
            if source[t] == ESCAPE:
                if at >= len(escape_index) or np.int64(escape_index[at]) != c * tokens + t:
                    return False
                target[t] = escape_value[at]
                at += 1
        if k:
            half = np.int32(1) << (k - 1)
            low = planes[low_row]
            for t in range(tokens):
                target[t] = (target[t] << k) + np.int32(low[t]) - half
            low_row += 1
    return at == len(escape_index)


def unpack(planes: U8, escapes: Escapes, plan: CodingPlan) -> I32:
    """See `cuvee.codec.symbols.unpack`."""
    out = np.empty((len(plan.shift), planes.shape[1]), np.int32)
    if not _unpack(planes, escapes.index, escapes.value, plan.shift, out):
        raise CorruptError("the escape list does not match the coded symbols: the bytes are damaged")
    return out

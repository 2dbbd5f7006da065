"""From real coefficients to bytes and back: quantizer and symbol planes, in plain NumPy (the reference).

    y [R, T] float32 --quantize--> q [R, T] int32 --pack--> planes [P, T] uint8, escapes
    y^ <------------dequantize---- q <------------unpack--- planes, escapes

There are R components (rows) and T tokens (columns). Columns of one class share a plan and a step; `to_planes` and
`from_planes` take the columns of all classes, run by run.

`codec/stages/compiled/symbols.py` says what planes are.
"""

from __future__ import annotations

import numpy as np
import torch

from cuvee.codec.entropy.coding_plan import ESCAPE, MAX_LEVEL, CodingPlan, Quantizer, too_large_error
from cuvee.codec.entropy.tables import EntropyTables
from cuvee.codec.entropy.token_classes import ClassedPlan
from cuvee.codec.format import rules
from cuvee.codec.format.rules import rule_error
from cuvee.codec.format.streams import Escapes
from cuvee.codec.stages.columns import class_runs
from cuvee.codec.support.arrays import F32, I32, U8


def to_planes(
    y: F32, columns: U8, plan: ClassedPlan, quantizer: Quantizer, tables: EntropyTables
) -> tuple[U8, Escapes]:
    """See `cuvee.codec.stages.compiled.symbols.to_planes`; planes are zero below a column's last."""
    tokens = len(columns)
    planes = np.zeros((int(plan.planes[columns].max(initial=0)), tokens), np.uint8)
    index, value = [np.empty(0, np.uint32)], [np.empty(0, np.int32)]
    for at, k in class_runs(columns):
        own = plan.of(k)
        rows, width = len(own.shift), at.stop - at.start
        of_class = np.ascontiguousarray(y[:rows, at])
        with np.errstate(over="ignore"):  # infinitely many steps are refused below
            largest = np.abs(of_class).max(initial=0) * (np.float32(1) / plan.steps[k])
        if not largest < MAX_LEVEL:
            raise too_large_error(float(largest))
        coded, escapes = pack(quantize(of_class, float(plan.steps[k]), own, quantizer), own, tables)
        planes[: own.planes, at] = coded
        row, column = np.divmod(escapes.index, np.uint32(width))
        index.append(row * np.uint32(tokens) + column + np.uint32(at.start))
        value.append(escapes.value)
    joined = np.concatenate(index)
    order = np.argsort(joined, kind="stable")
    return planes, Escapes(joined[order], np.concatenate(value)[order])


def from_planes(planes: U8, columns: U8, escapes: Escapes, plan: ClassedPlan, quantizer: Quantizer) -> torch.Tensor:
    """Invert `to_planes`: return `[R, T]` float32 with the rows of the finest class, zero below a column's last one.

    Raises:
        CorruptError: the escape list and the ESCAPE bytes disagree.
    """
    tokens = len(columns)
    out = np.zeros((int(plan.rows[columns].max(initial=0)), tokens), np.float32)
    row, column = np.divmod(escapes.index, np.uint32(max(tokens, 1)))
    found = 0
    for at, k in class_runs(columns):
        own = plan.of(k)
        width = at.stop - at.start
        inside = (column >= at.start) & (column < at.stop)
        local = Escapes(row[inside] * np.uint32(width) + column[inside] - np.uint32(at.start), escapes.value[inside])
        found += int((planes[: len(own.shift), at] == ESCAPE).sum())
        levels = unpack(np.ascontiguousarray(planes[: own.planes, at]), local, own)
        out[: len(own.shift), at] = dequantize(levels, float(plan.steps[k]), own, quantizer)
    if found != len(escapes.index):
        raise rule_error(rules.ESCAPE_LIST)
    return torch.from_numpy(out)


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
        raise rule_error(rules.ESCAPE_LIST)
    high.ravel()[index] = escapes.value
    wide = plan.wide
    shift = plan.shift[wide].astype(np.int32)[:, None]
    high[wide] = (high[wide] << shift) + planes[rows:] - (1 << (shift - 1))
    return high

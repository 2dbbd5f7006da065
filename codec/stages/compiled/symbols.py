"""Coefficients to byte planes, compiled: quantizer and symbols.

A component whose deviation is many steps (`shift` k > 0) is *wide*: `q = (high << k) + low - half`, where
`half = 2**(k - 1)` and `0 <= low < 2**k`. Its high part is one of the first R planes. Its low bits get another plane.
A high part that its table cannot code is written as ESCAPE and listed separately, as (row * T + column, value).
"""

from __future__ import annotations

import numpy as np

from cuvee.codec.entropy.coding_plan import ESCAPE, Quantizer, too_large_error
from cuvee.codec.entropy.tables import EntropyTables
from cuvee.codec.entropy.token_classes import ClassedPlan
from cuvee.codec.format.streams import WINDOW, Escapes
from cuvee.codec.stages.compiled.coder_steps import quantize_step
from cuvee.codec.stages.compiled.compiler import compiled, inner
from cuvee.codec.stages.compiled.simd import WIDTH
from cuvee.codec.support.arrays import F32, U8


@inner
def _quantized(y, inverse, dead_zone, rounding):  # type: ignore[no-untyped-def]
    """Return the level of a coefficient, as `quantize_step` does; `inverse` is one over its step."""
    a = abs(y) * inverse
    level = np.int32(a + rounding) if a >= dead_zone else np.int32(0)  # of a number that is not negative: rounds down
    return level if y >= 0 else -level


@inner
def _low_bits(levels, mask, low):  # type: ignore[no-untyped-def]
    for t in range(len(low)):
        low[t] = np.uint8(levels[t] & mask)


@inner
def _fill(array, first, end, value):  # type: ignore[no-untyped-def]
    for t in range(first, end):
        array[t] = value


@compiled
def _to_planes(  # type: ignore[no-untyped-def]
    y, classes, rows, inverses, level_table, dead_zone, rounding, shift, low_plane, tables, reach, out, escaped
):  # fmt: skip
    """Quantize and pack; count each row's escapes in `escaped`. Return False if a coefficient is too large."""
    bounds = np.empty(WINDOW + 1, np.int64)  # of the runs of columns of one class
    class_of_run, rows_of_run = np.empty(WINDOW, np.int64), np.empty(WINDOW, np.int64)
    level_of_run, plane_of_run = np.empty(WINDOW, np.int64), np.empty(WINDOW, np.int64)
    inverse, zone, bias = np.empty(WINDOW, np.float32), np.empty(WINDOW, np.float32), np.empty(WINDOW, np.float32)
    half, bits = np.empty(WINDOW, np.int32), np.empty(WINDOW, np.int32)
    least, greatest = np.empty(WINDOW, np.int32), np.empty(WINDOW, np.int32)
    levels = np.empty(WINDOW, np.int32)
    edge, spare = np.zeros(WIDTH, np.float32), np.empty(WIDTH, np.uint8)
    tokens = len(classes)
    y_, out_ = y.reshape(y.size), out.reshape(out.size)
    for begin in range(0, tokens, WINDOW):
        column_class = classes[begin : begin + WINDOW]
        runs = 0
        for t in range(len(column_class)):
            inverse[t] = inverses[column_class[t]]
            half[t] = bits[t] = 0
            if t == 0 or column_class[t] != column_class[t - 1]:
                bounds[runs], class_of_run[runs], rows_of_run[runs] = t, column_class[t], rows[column_class[t]]
                level_of_run[runs] = plane_of_run[runs] = -1
                runs += 1
        bounds[runs] = len(column_class)
        for c in range(rows[column_class[0]]):
            # Classes rise and their rows fall, so the runs with this row come first.
            r = 0
            low_bits = False
            while r < runs and c < rows_of_run[r]:
                k, u, v = class_of_run[r], bounds[r], bounds[r + 1]
                table, plane = np.int64(level_table[k, c]), np.int64(tables[k, c])
                if table != level_of_run[r]:
                    level_of_run[r] = table
                    _fill(zone, u, v, dead_zone[table])
                    _fill(bias, u, v, rounding[table])
                if plane != plane_of_run[r]:
                    plane_of_run[r] = plane
                    _fill(least, u, v, reach[plane, 0])
                    _fill(greatest, u, v, reach[plane, 1])
                row_bits = np.int32(shift[k, c])
                if row_bits != bits[u]:
                    _fill(bits, u, v, row_bits)
                    _fill(half, u, v, (np.int32(1) << row_bits) >> np.int32(1) if row_bits else np.int32(0))
                low_bits |= row_bits != 0
                r += 1
            at = c * tokens + begin
            reached, escapes = bounds[r], 0
            if reached < WIDTH:
                for t in range(reached):
                    edge[t] = y_[at + t]
                escapes, fit = quantize_step(
                    edge, 0, inverse, zone, bias, half, bits, least, greatest, 0, reached, spare, 0, levels
                )
                for t in range(reached):
                    out_[at + t] = spare[t]
                if not fit:
                    return False
            # The first step goes beyond the odd columns that it counts, so that the others are whole.
            t, active = 0, (reached - 1) % WIDTH + 1
            while reached >= WIDTH and t < reached:
                step_escapes, fit = quantize_step(
                    y_, at + t, inverse, zone, bias, half, bits, least, greatest, t, active, out_, at + t, levels
                )  # fmt: skip
                if not fit:
                    return False
                escapes += step_escapes
                t += active
                active = WIDTH
            escaped[c] += escapes
            for q in range(r if low_bits else 0):
                u, v = bounds[q], bounds[q + 1]
                if bits[u]:
                    low = out[low_plane[column_class[u], c], begin + u : begin + v]
                    _low_bits(levels[u:v], (np.int32(1) << bits[u]) - np.int32(1), low)
    return True


@compiled
def _list_escapes(  # type: ignore[no-untyped-def]
    y, planes, classes, rows, inverses, level_table, dead_zone, rounding, shift, escaped, index, value
):  # fmt: skip
    tokens = len(classes)
    at = 0
    for c in range(len(escaped)):
        for t in range(tokens if escaped[c] else 0):
            k = classes[t]
            if c < rows[k] and planes[c, t] == ESCAPE:
                table = level_table[k, c]
                level = _quantized(y[c, t], inverses[k], dead_zone[table], rounding[table])
                bits = np.int32(shift[k, c])
                half = np.int32(1) << (bits - 1) if bits else np.int32(0)
                index[at] = np.uint32(c * tokens + t)
                value[at] = (level + half) >> bits
                at += 1


def to_planes(
    y: F32, columns: U8, plan: ClassedPlan, quantizer: Quantizer, tables: EntropyTables
) -> tuple[U8, Escapes]:
    """Quantize and pack.

    Args:
        y: `[R, T]` float32, columns sorted by class within windows. R is at least the number of components of the
            finest class in `columns`.
        columns: `[T]` uint8, the class of each column; none is finer than `plan.finest`.

    Returns:
        planes `[P, T]` uint8, where P is the number of planes of the finest class in `columns`, and bytes below a
        column's last plane are left unwritten; and the escapes, numbered row * T + column.

    Raises:
        InputError: a coefficient is too many steps large, or not a number.
    """
    deepest = int(plan.planes[columns.min(initial=len(plan.planes) - 1)])
    planes = np.empty((deepest, len(columns)), np.uint8)
    inverses = np.float32(1.0) / plan.steps
    escaped = np.zeros(deepest, np.int64)
    if not _to_planes(
        y, columns, plan.rows, inverses, plan.level_table, quantizer.dead_zone, quantizer.rounding, plan.shift,
        plan.low_plane, plan.tables, tables.reach, planes, escaped,
    ):  # fmt: skip
        coded = np.arange(len(y))[:, None] < plan.rows[columns]
        with np.errstate(over="ignore"):
            raise too_large_error(float((np.abs(y) * inverses[columns])[coded].max()))
    count = int(escaped.sum())
    index, value = np.empty(count, np.uint32), np.empty(count, np.int32)
    if count:
        _list_escapes(
            y, planes, columns, plan.rows, inverses, plan.level_table, quantizer.dead_zone, quantizer.rounding,
            plan.shift, escaped, index, value,
        )  # fmt: skip
    return planes, Escapes(index, value)


@inner
def count_escapes(plane):  # type: ignore[no-untyped-def]
    """Return how many bytes of a plane are ESCAPE."""
    count = 0
    for i in range(len(plane)):
        count += plane[i] == ESCAPE
    return count

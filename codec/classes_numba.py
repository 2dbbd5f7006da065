"""The stages for tokens of several classes, compiled: same bytes as `rans_classes.py` and `symbols_classes.py`."""

from __future__ import annotations

import numpy as np

from cuvee.codec import lanes
from cuvee.codec.arena import Arena
from cuvee.codec.classes import WINDOW, ClassedPlan
from cuvee.codec.compiled import compiled
from cuvee.codec.lanes import FLIGHT, collect_words, encode_lanes, list_groups
from cuvee.codec.rans import U8, Streams, stream_count
from cuvee.codec.simd import WIDTH
from cuvee.codec.symbols import ESCAPE, F32, Escapes, Quantizer
from cuvee.codec.symbols_numba import pack_row, quantize_row
from cuvee.codec.tables import SYMBOLS, EntropyTables

_arena = Arena()


@compiled
def _encode(  # type: ignore[no-untyped-def]
    planes, classes, depth, tables, coders, prob_bits, n, capacity, padded, spare, log, states, lengths, words
):  # fmt: skip
    """Code the planes of sorted columns; returns how many words there are."""
    steps, tokens = planes.shape
    for c in range(steps):
        padded[c * tokens : (c + 1) * tokens] = planes[c]
    begins_of = tables.reshape(tables.size) * np.uint32(SYMBOLS)
    fields = np.zeros((1, lanes.SECTION_FIELDS), np.int64)
    fields[0, lanes.COLUMNS], fields[0, lanes.STRIDE] = tokens, tables.shape[1]
    groups = np.empty((len(states) + tokens // WINDOW + 1, lanes.GROUP_FIELDS), np.int64)
    listed = list_groups(0, 0, tokens, n, WINDOW, groups, 0)
    begins = np.empty(len(states), np.int64)
    encode_lanes(
        groups[:listed], fields, padded, classes, depth, begins_of, coders, prob_bits, capacity, spare, log, states,
        lengths, begins,
    )  # fmt: skip
    return collect_words(log, begins, lengths, words)


def rans_encode_classes(
    planes: U8, classes: U8, plan: ClassedPlan, tables: EntropyTables, tokens_per_stream: int
) -> Streams:
    """See `cuvee.codec.rans_classes.rans_encode_classes`: the same arguments, the same bytes."""
    tokens, deepest = len(classes), len(planes)
    count = stream_count(tokens, tokens_per_stream)
    states, lengths = np.empty(count, np.uint32), np.empty(count, np.uint32)
    symbols = int(plan.planes[classes].sum(dtype=np.int64))
    words = _arena.array("words", symbols, np.uint16)  # a bound: at most one word per symbol
    capacity = deepest * tokens_per_stream + 1
    filled = _encode(
        planes, classes, plan.planes, plan.tables.astype(np.uint32), tables.coders.reshape(-1), tables.prob_bits,
        tokens_per_stream, capacity, _arena.array("padded", deepest * tokens + WIDTH, np.uint8),
        _arena.array("spare", FLIGHT * WIDTH * capacity + 1, np.uint16), _arena.array("log", symbols, np.uint16),
        states, lengths, words,
    )  # fmt: skip
    return Streams(states, lengths, words[:filled].copy())


@compiled
def _to_planes(  # type: ignore[no-untyped-def]
    y, classes, rows, inverses, level_table, dead_zone, rounding, shift, low_plane, tables, codable, reach, out, escaped
):  # fmt: skip
    """Quantize and pack; counts the escapes of each row in `escaped`."""
    tokens = len(classes)
    levels = np.empty(tokens, np.int32)
    t = 0
    while t < tokens:
        k = classes[t]
        end = t + 1
        while end < tokens and classes[end] == k:
            end += 1
        own = levels[: end - t]
        for c in range(rows[k]):
            table, plane = level_table[k, c], tables[k, c]
            bits = np.int32(shift[k, c])
            quantize_row(y[c, t:end], inverses[k], dead_zone[table], rounding[table], own)
            low = out[low_plane[k, c], t:end] if bits else out[c, t:t]
            escaped[c] += pack_row(own, bits, codable[plane], reach[plane, 0], reach[plane, 1], out[c, t:end], low)
        t = end


@compiled
def _list_escapes(  # type: ignore[no-untyped-def]
    y, planes, classes, rows, inverses, level_table, dead_zone, rounding, shift, escaped, index, value
):  # fmt: skip
    tokens = len(classes)
    at = 0
    one = np.empty(1, np.int32)
    for c in range(len(escaped)):
        for t in range(tokens if escaped[c] else 0):
            k = classes[t]
            if c < rows[k] and planes[c, t] == ESCAPE:
                table = level_table[k, c]
                quantize_row(y[c, t : t + 1], inverses[k], dead_zone[table], rounding[table], one)
                bits = np.int32(shift[k, c])
                half = np.int32(1) << (bits - 1) if bits else np.int32(0)
                index[at] = np.uint32(c * tokens + t)
                value[at] = (one[0] + half) >> bits
                at += 1


def to_planes(
    y: F32, classes: U8, plan: ClassedPlan, quantizer: Quantizer, tables: EntropyTables
) -> tuple[U8, Escapes]:
    """See `cuvee.codec.symbols_classes.to_planes`. What is below a column's last plane is left unwritten."""
    deepest = int(plan.planes[classes.min(initial=len(plan.planes) - 1)])
    planes = np.empty((deepest, len(classes)), np.uint8)
    inverses = np.float32(1.0) / plan.steps
    escaped = np.zeros(deepest, np.int64)
    _to_planes(
        y, classes, plan.rows, inverses, plan.level_table, quantizer.dead_zone, quantizer.rounding, plan.shift,
        plan.low_plane, plan.tables, tables.codable, tables.reach, planes, escaped,
    )  # fmt: skip
    count = int(escaped.sum())
    index, value = np.empty(count, np.uint32), np.empty(count, np.int32)
    if count:
        _list_escapes(
            y, planes, classes, plan.rows, inverses, plan.level_table, quantizer.dead_zone, quantizer.rounding,
            plan.shift, escaped, index, value,
        )  # fmt: skip
    return planes, Escapes(index, value)

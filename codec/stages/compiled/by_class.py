"""The stages for tokens of several classes, compiled.

The results are those of `classes.py`, `symbols_classes.py` and `rans_classes.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cuvee.codec.entropy.tables import SYMBOLS, EntropyTables
from cuvee.codec.entropy.token_classes import CLASS_BITS, CLASSES, WINDOW, ClassedPlan
from cuvee.codec.stages.compiled import lanes
from cuvee.codec.stages.compiled.arena import Arena
from cuvee.codec.stages.compiled.compiler import compiled
from cuvee.codec.stages.compiled.lanes import FLIGHT, collect_words, encode_lanes, list_groups
from cuvee.codec.stages.compiled.simd import WIDTH
from cuvee.codec.stages.compiled.symbols import pack_row, quantize_row
from cuvee.codec.stages.reference.rans import LOWER_BOUND, U8, WORD_BITS, Streams, stream_count
from cuvee.codec.stages.reference.rans_by_class import ClassedPlanes
from cuvee.codec.stages.reference.symbols import ESCAPE, F32, MAX_LEVEL, Escapes, Quantizer, too_large_error

_arena = Arena()


@compiled
def sort_columns(classes, order, columns):  # type: ignore[no-untyped-def]
    """`classes.coding_order`, and the class of each column."""
    first = np.empty(CLASSES, np.int64)
    for begin in range(0, len(classes), WINDOW):
        end = min(begin + WINDOW, len(classes))
        first[:] = 0
        for t in range(begin, end):
            first[classes[t]] += 1
        place = begin
        for k in range(CLASSES):
            size = first[k]
            first[k] = place
            place += size
        for t in range(begin, end):
            k = classes[t]
            order[first[k]] = t
            columns[first[k]] = k
            first[k] += 1


def coding_order(classes: U8) -> npt.NDArray[np.intp]:
    """See `cuvee.codec.entropy.token_classes.coding_order`."""
    order = np.empty(len(classes), np.intp)
    sort_columns(classes, order, np.empty(len(classes), np.uint8))
    return order


@compiled
def _encode_classes(classes, coders, words):  # type: ignore[no-untyped-def]
    """One stream of classes: its state, and how many words it has."""
    x, count = np.int64(LOWER_BOUND), 0
    for t in range(len(classes) - 1, -1, -1):
        coder = np.int64(coders[classes[t]])
        frequency, below = coder & 0xFFFF, coder >> 16
        if x >= frequency << (32 - CLASS_BITS):
            words[count] = x & 0xFFFF
            count += 1
            x >>= WORD_BITS
        x = ((x // frequency) << CLASS_BITS) + x % frequency + below
    words[:count] = words[:count][::-1].copy()  # a decoder reads the word first that was coded last
    return x, count


@compiled
def _encode(  # type: ignore[no-untyped-def]
    data, data_at, columns, classes, depth, tables, tables_at, class_coders, coders, prob_bits, per_stream, capacity,
    spare, log, states, lengths, words, class_states, class_lengths, class_words,
):  # fmt: skip
    """Code the planes and the classes of some sections; returns how many words the planes have."""
    count, tokens = columns.shape
    fields = np.zeros((count, lanes.SECTION_FIELDS), np.int64)
    groups = np.empty((len(states) + count * (tokens // WINDOW + 1), lanes.GROUP_FIELDS), np.int64)
    listed = stream = 0
    for i in range(count):
        fields[i, lanes.CLASSES], fields[i, lanes.OUT], fields[i, lanes.COLUMNS] = i * tokens, data_at[i], tokens
        fields[i, lanes.PLANES] = i * CLASSES
        fields[i, lanes.TABLES], fields[i, lanes.STRIDE] = tables_at[i], (tables_at[i + 1] - tables_at[i]) // CLASSES
        listed = list_groups(i, stream, tokens, per_stream[i], WINDOW, groups, listed)
        stream += (tokens + per_stream[i] - 1) // per_stream[i]
        class_states[i], class_lengths[i] = _encode_classes(classes[i], class_coders[i], class_words[i])
    begins = np.empty(len(states), np.int64)
    encode_lanes(
        groups[:listed], fields, data, columns.reshape(columns.size), depth, tables, coders, prob_bits, capacity, spare,
        log, states, lengths, begins,
    )  # fmt: skip
    return collect_words(log, begins, lengths, words)


def encode_classed(sections: Sequence[ClassedPlanes], tables: EntropyTables) -> list[tuple[Streams, Streams]]:
    """See `cuvee.codec.stages.reference.rans_by_class.encode_classed`."""
    count, tokens = len(sections), len(sections[0].columns)
    per_stream = np.array([own.tokens_per_stream for own in sections])
    streams_at = _ends([stream_count(tokens, own.tokens_per_stream) for own in sections])
    data_at = _ends([own.planes.size for own in sections])
    symbols = int(data_at[-1])
    data = _arena.array("data", symbols + WIDTH, np.uint8)
    np.concatenate([own.planes.reshape(-1) for own in sections], out=data[:symbols])
    depth = np.concatenate([own.plan.planes for own in sections])
    begins_of = np.concatenate([own.plan.tables.reshape(-1) for own in sections]).astype(np.uint32)
    begins_of *= np.uint32(SYMBOLS)
    states, lengths = np.empty(streams_at[-1], np.uint32), np.empty(streams_at[-1], np.uint32)
    class_states, class_lengths = np.empty((count, 1), np.uint32), np.empty((count, 1), np.uint32)
    class_words = np.empty((count, tokens), np.uint16)
    capacity = max(len(own.planes) * own.tokens_per_stream for own in sections) + 1
    words = _arena.array("words", symbols, np.uint16)  # a bound: at most one word per symbol
    filled = _encode(
        data, data_at, np.stack([own.columns for own in sections]), np.stack([own.classes for own in sections]), depth,
        begins_of, _ends([own.plan.tables.size for own in sections]),
        np.concatenate([own.class_table.coders for own in sections]), tables.coders.reshape(-1), tables.prob_bits,
        per_stream, capacity, _arena.array("spare", FLIGHT * WIDTH * capacity + 1, np.uint16),
        _arena.array("log", symbols, np.uint16), states, lengths, words, class_states[:, 0], class_lengths[:, 0],
        class_words,
    )  # fmt: skip
    words = words[:filled].copy()
    out, word = [], 0
    for i in range(count):
        of_section = slice(streams_at[i], streams_at[i + 1])
        end = word + int(lengths[of_section].sum(dtype=np.int64))
        classes = Streams(class_states[i], class_lengths[i], class_words[i, : class_lengths[i, 0]])
        out.append((Streams(states[of_section], lengths[of_section], words[word:end]), classes))
        word = end
    return out


def _ends(sizes: Sequence[int]) -> npt.NDArray[np.int64]:
    """Where things of these sizes begin that lie one after the other, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(sizes)])


@compiled
def _code_row(y, inverse, dead_zone, rounding, half, bits, least, greatest, plane, offset):  # type: ignore[no-untyped-def]
    """The bytes of coefficients, with the numbers of each column; whether some escape, and whether all fit MAX_LEVEL.

    `offset` receives the levels, plus half of what the low bits hold.
    """
    escapes, inside = np.int32(0), np.int32(1)
    limit = np.float32(MAX_LEVEL)
    for t in range(len(plane)):
        a = abs(y[t]) * inverse[t]
        fits = a < limit
        level = np.int32((a if fits else limit) + rounding[t])  # of no negative number: rounded down
        level = level if a >= dead_zone[t] else np.int32(0)
        level = level if y[t] >= 0 else -level
        shifted = np.int32(level + half[t])
        high = shifted >> bits[t]
        escape = np.int32(high < least[t]) | np.int32(high > greatest[t])
        plane[t] = np.uint8(ESCAPE) if escape else np.uint8(high & 0xFF)
        offset[t] = shifted
        escapes |= escape
        inside &= np.int32(fits)
    return escapes != 0, inside != 0


@compiled
def _low_bits(levels, mask, low):  # type: ignore[no-untyped-def]
    for t in range(len(low)):
        low[t] = np.uint8(levels[t] & mask)


@compiled
def _to_planes(  # type: ignore[no-untyped-def]
    y, classes, rows, inverses, level_table, dead_zone, rounding, shift, low_plane, tables, codable, reach, out, escaped
):  # fmt: skip
    """Quantize and pack; counts the escapes of each row in `escaped`. False if a coefficient is too large."""
    bounds = np.empty(WINDOW + 1, np.int64)  # of the runs of columns that are of one class
    level_of_run, plane_of_run = np.empty(WINDOW, np.int64), np.empty(WINDOW, np.int64)
    inverse, zone, bias = np.empty(WINDOW, np.float32), np.empty(WINDOW, np.float32), np.empty(WINDOW, np.float32)
    half, bits = np.empty(WINDOW, np.int32), np.empty(WINDOW, np.int32)
    least, greatest = np.empty(WINDOW, np.int32), np.empty(WINDOW, np.int32)
    levels = np.empty(WINDOW, np.int32)
    for begin in range(0, len(classes), WINDOW):
        own = classes[begin : begin + WINDOW]
        runs = 0
        for t in range(len(own)):
            inverse[t] = inverses[own[t]]
            half[t] = bits[t] = 0
            if t == 0 or own[t] != own[t - 1]:
                bounds[runs] = t
                level_of_run[runs] = plane_of_run[runs] = -1
                runs += 1
        bounds[runs] = len(own)
        for c in range(rows[own[0]]):
            # Classes rise and their rows fall, so the runs that have this row come first.
            r = 0
            low_bits = False
            while r < runs and c < rows[own[bounds[r]]]:
                k, u, v = own[bounds[r]], bounds[r], bounds[r + 1]
                table, plane = np.int64(level_table[k, c]), np.int64(tables[k, c])
                if table != level_of_run[r]:
                    level_of_run[r] = table
                    zone[u:v], bias[u:v] = dead_zone[table], rounding[table]
                if plane != plane_of_run[r]:
                    plane_of_run[r] = plane
                    least[u:v], greatest[u:v] = reach[plane, 0], reach[plane, 1]
                own_bits = np.int32(shift[k, c])
                if own_bits != bits[u]:
                    bits[u:v], half[u:v] = own_bits, (np.int32(1) << own_bits) >> 1 if own_bits else 0
                low_bits |= own_bits != 0
                r += 1
            reached = bounds[r]
            source, target = y[c, begin : begin + reached], out[c, begin : begin + reached]
            escapes, inside = _code_row(source, inverse, zone, bias, half, bits, least, greatest, target, levels)
            if not inside:
                return False
            for q in range(r if low_bits else 0):
                u, v = bounds[q], bounds[q + 1]
                if bits[u]:
                    low = out[low_plane[own[u], c], begin + u : begin + v]
                    _low_bits(levels[u:v], (np.int32(1) << bits[u]) - np.int32(1), low)
            # Again, to count them; and one by one, since to a table with gaps everything has been an escape.
            for q in range(r if escapes else 0):
                k, u, v = own[bounds[q]], bounds[q], bounds[q + 1]
                table, plane = level_of_run[q], plane_of_run[q]
                quantize_row(source[u:v], inverses[k], dead_zone[table], rounding[table], levels[: v - u])
                escaped[c] += pack_row(
                    levels[: v - u], bits[u], codable[plane], reach[plane, 0], reach[plane, 1], target[u:v], target[:0]
                )
    return True


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
    """See `reference.symbols_by_class.to_planes`. Bytes below a column's last plane are left unwritten."""
    deepest = int(plan.planes[classes.min(initial=len(plan.planes) - 1)])
    planes = np.empty((deepest, len(classes)), np.uint8)
    inverses = np.float32(1.0) / plan.steps
    escaped = np.zeros(deepest, np.int64)
    if not _to_planes(
        y, classes, plan.rows, inverses, plan.level_table, quantizer.dead_zone, quantizer.rounding, plan.shift,
        plan.low_plane, plan.tables, tables.codable, tables.reach, planes, escaped,
    ):  # fmt: skip
        coded = np.arange(len(y))[:, None] < plan.rows[classes]
        with np.errstate(over="ignore"):
            raise too_large_error(float((np.abs(y) * inverses[classes])[coded].max()))
    count = int(escaped.sum())
    index, value = np.empty(count, np.uint32), np.empty(count, np.int32)
    if count:
        _list_escapes(
            y, planes, classes, plan.rows, inverses, plan.level_table, quantizer.dead_zone, quantizer.rounding,
            plan.shift, escaped, index, value,
        )  # fmt: skip
    return planes, Escapes(index, value)

"""The stages for tokens of several classes, compiled: same bytes as `rans_classes.py` and `symbols_classes.py`."""

from __future__ import annotations

import numpy as np
import torch

from cuvee.codec.classes import WINDOW, ClassedPlan
from cuvee.codec.compiled import compiled
from cuvee.codec.errors import CorruptError
from cuvee.codec.rans import LANES, U8, Streams, check_streams, stream_count
from cuvee.codec.symbols import ESCAPE, F32, Escapes, Quantizer
from cuvee.codec.tables import EntropyTables


@compiled
def _encode(symbols, classes, planes, tables, freq, cumulative, prob_bits, n, window, states, lengths, words):  # type: ignore[no-untyped-def]
    tokens = len(classes)
    shift = np.uint32(prob_bits)
    limit = np.uint64(32 - prob_bits)
    scratch = np.empty(n * tables.shape[1], np.uint16)
    filled = 0
    stream = 0
    for begin in range(0, tokens, window):
        size = min(window, tokens - begin)
        count = (size + n - 1) // n
        for s in range(count):
            x = np.uint32(65536)
            at = len(scratch)
            for t in range(begin + s + (size - 1 - s) // count * count, begin - 1, -count):
                k = classes[t]
                for c in range(planes[k] - 1, -1, -1):
                    table = tables[k, c]
                    symbol = symbols[c, t]
                    f = np.uint32(freq[table, symbol])
                    if np.uint64(x) >= np.uint64(f) << limit:
                        at -= 1
                        scratch[at] = np.uint16(x & np.uint32(0xFFFF))
                        x = x >> np.uint32(16)
                    quotient = x // f
                    x = (quotient << shift) + (x - quotient * f) + np.uint32(cumulative[table, symbol])
            used = len(scratch) - at
            words[filled : filled + used] = scratch[at:]
            filled += used
            lengths[stream] = used
            states[stream] = x
            stream += 1
    return filled


@compiled
def _decode(states, start, end, words, classes, planes, tables, slots, prob_bits, n, window, out):  # type: ignore[no-untyped-def]
    tokens = len(classes)
    mask = np.uint32((1 << prob_bits) - 1)
    shift = np.uint32(prob_bits)
    x = np.empty(LANES, np.uint32)
    at = np.empty(LANES, np.uint32)
    bounds = np.empty(LANES + 1, np.int64)  # of the runs of adjacent lanes that are of one class
    of_run = np.empty(LANES, np.int64)
    last = np.uint32(len(words) - 1)  # the caller pads with one word, so there is always one to read
    first = 0
    for begin in range(0, tokens, window):
        size = min(window, tokens - begin)
        count = (size + n - 1) // n
        for base in range(0, count, LANES):
            width = min(LANES, count - base)
            stream = first + base
            for lane in range(width):
                x[lane] = states[stream + lane]
                at[lane] = start[stream + lane]
            for row in range(base, size, count):
                active = min(width, size - row)
                column = begin + row
                runs = 0
                for lane in range(active):
                    k = classes[column + lane]
                    if lane == 0 or k != of_run[runs - 1]:
                        bounds[runs] = lane
                        of_run[runs] = k
                        runs += 1
                bounds[runs] = active
                for c in range(planes[of_run[0]]):
                    target = out[c, column : column + active]
                    for r in range(runs):
                        k = of_run[r]
                        if planes[k] <= c:
                            break
                        table = slots[tables[k, c]]
                        # Unsigned: otherwise every access would check whether the index counts from the end.
                        for lane in range(np.uint64(bounds[r]), np.uint64(bounds[r + 1])):
                            v = x[lane]
                            slot = table[v & mask]
                            target[lane] = np.uint8(slot >> np.uint32(24))
                            v = ((slot >> np.uint32(12)) & np.uint32(0xFFF)) * (v >> shift) + (slot & np.uint32(0xFFF))
                            need = v < np.uint32(65536)
                            word = np.uint32(words[min(at[lane], last)])
                            x[lane] = (v << np.uint32(16)) | word if need else v
                            at[lane] += np.uint32(1) if need else np.uint32(0)
            for lane in range(width):
                if x[lane] != np.uint32(65536) or at[lane] != end[stream + lane]:
                    return stream + lane
        first += count
    return -1


def rans_encode_classes(
    planes: U8, classes: U8, plan: ClassedPlan, tables: EntropyTables, tokens_per_stream: int
) -> Streams:
    """See `cuvee.codec.rans_classes.rans_encode_classes`: the same arguments, the same bytes."""
    count = stream_count(len(classes), tokens_per_stream)
    states, lengths = np.empty(count, np.uint32), np.empty(count, np.uint32)
    words = np.empty(int(plan.planes[classes].sum(dtype=np.int64)), np.uint16)  # a bound: at most one word per symbol
    filled = _encode(
        planes, classes, plan.planes, plan.tables, tables.freq, tables.cumulative, tables.prob_bits,
        tokens_per_stream, WINDOW, states, lengths, words,
    )  # fmt: skip
    return Streams(states, lengths, words[:filled].copy())


def rans_decode_classes(
    streams: Streams, classes: U8, plan: ClassedPlan, tables: EntropyTables, tokens_per_stream: int
) -> U8:
    """See `cuvee.codec.rans_classes.rans_decode_classes`. What is below a column's last plane is left unwritten."""
    check_streams(streams, tokens_per_stream, len(classes))
    deepest = int(plan.planes[classes.min(initial=len(plan.planes) - 1)])
    out = np.empty((deepest, len(classes)), np.uint8)
    end = np.cumsum(streams.lengths, dtype=np.int64)
    words = np.append(streams.words, np.uint16(0))
    bad = _decode(
        streams.states, end - streams.lengths, end, words, classes, plan.planes, plan.tables, tables.slots,
        tables.prob_bits, tokens_per_stream, WINDOW, out,
    )  # fmt: skip
    if bad >= 0:
        raise CorruptError(
            f"entropy-coded stream {bad} of {len(end)} does not end where it must: the bytes are damaged"
        )
    return out


@compiled
def _to_planes(y, classes, rows, inverses, level_table, dead_zone, rounding, shift, low_plane, tables, codable, out):  # type: ignore[no-untyped-def]
    escapes = 0
    tokens = len(classes)
    t = 0
    while t < tokens:
        k = classes[t]
        end = t + 1
        while end < tokens and classes[end] == k:
            end += 1
        inverse = inverses[k]
        for c in range(rows[k]):
            table = level_table[k, c]
            dead, offset = dead_zone[table], rounding[table]
            bits = np.int32(shift[k, c])
            half = np.int32(1) << (bits - 1) if bits else np.int32(0)
            mask = (np.int32(1) << bits) - np.int32(1)
            ok = codable[tables[k, c]]
            low = low_plane[k, c]
            source, target = y[c], out[c]
            for i in range(t, end):
                a = abs(source[i]) * inverse
                level = np.int32(np.floor(a + offset)) if a >= dead else np.int32(0)
                v = (level if source[i] >= 0 else -level) + half
                high = v >> bits
                byte = np.uint8(high & 0xFF)
                if high > 127 or high < -127 or not ok[byte]:
                    byte = np.uint8(ESCAPE)
                    escapes += 1
                target[i] = byte
                if bits:
                    out[low, i] = np.uint8(v & mask)
        t = end
    return escapes


@compiled
def _list_escapes(y, planes, classes, rows, inverses, level_table, dead_zone, rounding, shift, index, value):  # type: ignore[no-untyped-def]
    tokens = len(classes)
    most = 0
    for t in range(tokens):
        most = max(most, rows[classes[t]])
    at = 0
    for c in range(most):
        for t in range(tokens):
            k = classes[t]
            if c < rows[k] and planes[c, t] == ESCAPE:
                table = level_table[k, c]
                a = abs(y[c, t]) * inverses[k]
                level = np.int32(np.floor(a + rounding[table])) if a >= dead_zone[table] else np.int32(0)
                bits = np.int32(shift[k, c])
                half = np.int32(1) << (bits - 1) if bits else np.int32(0)
                index[at] = np.uint32(c * tokens + t)
                value[at] = ((level if y[c, t] >= 0 else -level) + half) >> bits
                at += 1


def to_planes(
    y: F32, classes: U8, plan: ClassedPlan, quantizer: Quantizer, tables: EntropyTables
) -> tuple[U8, Escapes]:
    """See `cuvee.codec.symbols_classes.to_planes`. What is below a column's last plane is left unwritten."""
    deepest = int(plan.planes[classes.min(initial=len(plan.planes) - 1)])
    planes = np.empty((deepest, len(classes)), np.uint8)
    inverses = np.float32(1.0) / plan.steps
    count = _to_planes(
        y, classes, plan.rows, inverses, plan.level_table, quantizer.dead_zone, quantizer.rounding, plan.shift,
        plan.low_plane, plan.tables, tables.freq != 0, planes,
    )  # fmt: skip
    index, value = np.empty(count, np.uint32), np.empty(count, np.int32)
    if count:
        _list_escapes(
            y, planes, classes, plan.rows, inverses, plan.level_table, quantizer.dead_zone, quantizer.rounding,
            plan.shift, index, value,
        )  # fmt: skip
    return planes, Escapes(index, value)


@compiled
def _from_planes(  # type: ignore[no-untyped-def]
    planes, classes, escape_index, escape_value, rows, steps, level_table, shrink, shift, low_plane, window, out, narrow
):
    """Write into `out` as float32, or into `narrow` as the bits of bfloat16 if it has rows.

    Each row is one pass over the columns that reach it. The shrinkage of every column stands in an array. A run of
    columns is rewritten there only when its table changes, which happens every few rows.
    """
    most, tokens = max(len(out), len(narrow)), len(classes)
    bounds = np.empty(tokens + 1, np.int64)
    of_run = np.empty(tokens, np.int64)
    table_of_run = np.full(tokens, -1, np.int64)
    step = np.empty(tokens, np.float32)
    one = np.empty(tokens, np.float32)
    more = np.empty(tokens, np.float32)
    levels = np.empty(tokens, np.int32)
    runs = 0
    for t in range(tokens):
        step[t] = steps[classes[t]]
        if t % window == 0 or classes[t] != of_run[runs - 1]:
            bounds[runs] = t
            of_run[runs] = classes[t]
            runs += 1
    bounds[runs] = tokens
    at = 0
    bits_of = np.empty(tokens, np.uint32)
    values = bits_of.view(np.float32)
    for c in range(most):
        source = planes[c]
        target = values if len(narrow) else out[c]
        r = 0
        for begin in range(0, tokens, window):
            end = min(begin + window, tokens)
            reached, first = begin, r
            low_bits = False
            while r < runs and bounds[r] < end:
                k = of_run[r]
                if c < rows[k]:  # in a window classes rise and their rows fall, so these runs come first
                    reached = bounds[r + 1]
                    low_bits |= shift[k, c] != 0
                    table = level_table[k, c]
                    if table != table_of_run[r]:
                        table_of_run[r] = table
                        one[bounds[r] : reached] = shrink[table, 0]
                        more[bounds[r] : reached] = shrink[table, 1]
                r += 1
            # Slices: otherwise every access would check whether the index counts from the end.
            piece, level_of = source[begin:reached], levels[begin:reached]
            escapes = 0
            for i in range(len(piece)):
                level_of[i] = np.int32(np.int8(piece[i]))
                escapes += piece[i] == ESCAPE
            for i in range(len(piece) if escapes else 0):
                if piece[i] == ESCAPE:
                    if at >= len(escape_index) or np.int64(escape_index[at]) != c * tokens + begin + i:
                        return False
                    level_of[i] = escape_value[at]
                    at += 1
            for q in range(first if low_bits else r, r):
                bits = np.int32(shift[of_run[q], c]) if c < rows[of_run[q]] else np.int32(0)
                if bits:
                    half = np.int32(1) << (bits - 1)
                    low = planes[low_plane[of_run[q], c], bounds[q] : bounds[q + 1]]
                    wide = levels[bounds[q] : bounds[q + 1]]
                    for i in range(len(low)):
                        wide[i] = np.int32((wide[i] << bits) + np.int32(low[i]) - half)
            into, step_of = target[begin:reached], step[begin:reached]
            one_of, more_of = one[begin:reached], more[begin:reached]
            for i in range(len(level_of)):
                m = abs(level_of[i])
                back = np.float32(m) - (one_of[i] if m == 1 else more_of[i])
                back = back if m != 0 else np.float32(0)
                into[i] = (-back if level_of[i] < 0 else back) * step_of[i]
            target[reached:end] = np.float32(0)
        if len(narrow):
            row = narrow[c]
            for t in range(tokens):
                # Round to nearest, ties to even. There is no NaN, since levels and steps are finite.
                v = bits_of[t]
                row[t] = np.uint16((v + np.uint32(0x7FFF) + ((v >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
    return at == len(escape_index)


def from_planes(
    planes: U8,
    classes: U8,
    escapes: Escapes,
    plan: ClassedPlan,
    quantizer: Quantizer,
    rows: int,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """See `cuvee.codec.symbols_classes.from_planes`."""
    back = torch.empty(rows, len(classes), dtype=dtype)
    wide, narrow = _NO_WIDE, _NO_NARROW
    if dtype == torch.bfloat16:
        narrow = back.view(torch.int16).numpy().view(np.uint16)
    else:
        wide = back.numpy()
    if not _from_planes(
        planes, classes, escapes.index, escapes.value, plan.rows, plan.steps, plan.level_table, quantizer.shrink,
        plan.shift, plan.low_plane, WINDOW, wide, narrow,
    ):  # fmt: skip
        raise CorruptError("the escape list does not match the coded symbols: the bytes are damaged")
    return back


_NO_WIDE, _NO_NARROW = np.empty((0, 0), np.float32), np.empty((0, 0), np.uint16)


@compiled
def _read_classes(state, words, slots, prob_bits, classes):  # type: ignore[no-untyped-def]
    x = np.uint32(state)
    mask = np.uint32((1 << prob_bits) - 1)
    shift = np.uint32(prob_bits)
    at = 0
    for t in range(len(classes)):
        slot = slots[x & mask]
        classes[t] = np.uint8(slot >> np.uint32(24))
        x = ((slot >> np.uint32(12)) & np.uint32(0xFFF)) * (x >> shift) + (slot & np.uint32(0xFFF))
        if x < np.uint32(65536):
            x = (x << np.uint32(16)) | np.uint32(words[at] if at < len(words) else 0)
            at += 1
    return x == np.uint32(65536) and at == len(words)


def read_classes(stream: Streams, table: EntropyTables, tokens: int) -> U8:
    """See `cuvee.codec.rans_classes.read_classes`."""
    classes = np.empty(tokens, np.uint8)
    if not _read_classes(stream.states[0], stream.words, table.slots[0], table.prob_bits, classes):
        raise CorruptError("the class stream of a section does not end where it must: the bytes are damaged")
    return classes

"""Coded sections to coefficients, compiled: all sections of a chunk in one call that releases the GIL.

    bytes --index--> classes, streams, escapes                                  once
    a tile of them --decode_lanes--> planes --levels, dequantize--> y           for each tile

The results are those of `reference/sections.py`, which explains the steps section by section.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.entropy.coding_plan import ESCAPE, escape_error
from cuvee.codec.entropy.streams import MAX_TOKENS_PER_STREAM, stream_count, stream_error
from cuvee.codec.entropy.token_classes import CLASSES, WINDOW
from cuvee.codec.errors import FormatError
from cuvee.codec.profiles import flat_plans as plans
from cuvee.codec.profiles.step_coding import StepCoding
from cuvee.codec.stages.compiled import coded_part as part
from cuvee.codec.stages.compiled import lanes
from cuvee.codec.stages.compiled.arena import Arena
from cuvee.codec.stages.compiled.bfloat16 import rounded
from cuvee.codec.stages.compiled.coded_part import PART_FIELDS, read_u32
from cuvee.codec.stages.compiled.coder_steps import dequantize_step
from cuvee.codec.stages.compiled.compiler import compiled
from cuvee.codec.stages.compiled.joining import joined
from cuvee.codec.stages.compiled.lanes import decode_lanes, list_groups
from cuvee.codec.stages.compiled.rans_by_class import decode_class_stream
from cuvee.codec.stages.compiled.simd import WIDTH
from cuvee.codec.stages.compiled.symbols import add_low_bits, count_escapes, to_levels
from cuvee.codec.stages.compiled.token_order import deal, sort_columns
from cuvee.codec.stages.reference.rans_by_class import class_stream_error
from cuvee.codec.stages.reference.sections import ROW_MULTIPLE, Coefficients, class_range_error, padded, read_part

# Fields of `found`, one row per section: those of `coded_part`, and these.
COLUMNS = PART_FIELDS
PAD = PART_FIELDS + 1  # rows of a block in y
STREAMS = PART_FIELDS + 2  # the section's first entry in `words_at`
FOUND_FIELDS = PART_FIELDS + 3

_NEVER = 1 << 62  # the row of the escape after the last one

# Problems of a section.
MALFORMED, CLASS_STREAM, CLASS_RANGE, STREAM, ESCAPE_LIST = range(5)


@compiled
def _next_escape(cursor, data, found, by_window, tokens, start, width, column_of):  # type: ignore[no-untyped-def]
    """Move `cursor` (place in `by_window`, its end, row, column, number) to the next escape in the tile."""
    while cursor[0] + 1 < cursor[1]:
        cursor[0] += 1
        number = np.int64(by_window[cursor[0]])
        place = np.int64(read_u32(data, found[part.ESCAPES] + 4 * number))
        column = place % tokens - start
        if 0 <= column < width:
            cursor[2] = place // tokens
            cursor[3] = column_of[column] if len(column_of) else column
            cursor[4] = number
            return
    cursor[2] = _NEVER


@compiled
def _scale(levels, one, more, step, out):  # type: ignore[no-untyped-def]
    """Dequantize, with numbers per column."""
    for i in range(len(levels)):
        m = abs(levels[i])
        back = np.float32(m) - (one[i] if m == 1 else more[i])
        back = back if m != 0 else np.float32(0)
        out[i] = (-back if levels[i] < 0 else back) * step[i]


@compiled
def _finish(u, v, levels, one, more, step, values, row, direct, row_at, wide, narrow):  # type: ignore[no-untyped-def]
    """Turn levels of the columns `u … v - 1` into coefficients: in a row of y, or in `values` or `row`."""
    _scale(levels[u:v], one[u:v], more[u:v], step[u:v], values[u:v])
    if len(narrow):
        out = narrow[row_at + u : row_at + v] if direct else row[u:v]
        for i in range(v - u):
            out[i] = rounded(values[u + i], out)
    elif direct:
        for i in range(u, v):
            wide[row_at + i] = values[i]


@compiled
def _clear(wide, narrow, begin, end):  # type: ignore[no-untyped-def]
    """Write zeros to the one of `wide` and `narrow` with entries."""
    if len(narrow):
        for i in range(begin, end):
            narrow[i] = 0
    else:
        for i in range(begin, end):
            wide[i] = 0


@compiled
def _dequantize(  # type: ignore[no-untyped-def]
    data, found, by_window, windows_at, entry, number, tokens, start, stop, columns, order, packed, shrink, source,
    wide, narrow
):  # fmt: skip
    """Turn one section's planes into coefficients; return False if the escapes do not match.

    The one of `wide` and `narrow` with entries receives `[blocks, pad, columns]`, as float32 or as bits of bfloat16.
    """
    rows, steps, level_table, shift, low_plane, block, index = packed
    width, inside = len(columns), stop - start
    mode, per_stream = found[part.MODE], np.int64(1) << found[part.LOG2]
    window = WINDOW if mode else width
    first_class = 16 * number
    stride, levels_at, pad = entry[plans.ROWS], entry[plans.LEVELS], found[PAD]
    bounds = np.empty(width + 1, np.int64)  # of the runs of columns of one class
    rows_of, level_of = np.empty(width, np.int64), np.empty(width, np.int64)  # of the runs
    window_runs = np.empty((width + window - 1) // window + 1, np.int64)  # the first run of each window
    table_of_run = np.full(width, -1, np.int64)
    step = np.zeros(width + WIDTH, np.float32)
    one, more = np.zeros(width + WIDTH, np.float32), np.zeros(width + WIDTH, np.float32)
    levels = np.empty(width, np.int32)
    values = np.zeros(width + WIDTH, np.float32)
    row = np.empty(width + WIDTH, np.uint16)
    runs = 0
    most, deepest = np.int64(0), levels_at  # the rows of the deepest class, and its first level
    last = np.int64(-1)
    for t in range(width):
        k = np.int64(columns[t]) if mode else np.int64(0)
        step[t] = steps[first_class + k]
        if t % window == 0:
            window_runs[t // window] = runs
        if rows[first_class + k] > most:
            most, deepest = np.int64(rows[first_class + k]), levels_at + k * stride
        if t % window == 0 or k != last:
            bounds[runs] = t
            rows_of[runs] = rows[first_class + k]
            level_of[runs] = levels_at + k * stride
            runs += 1
        last = k
    bounds[runs] = width
    window_runs[(width + window - 1) // window] = runs
    column_of = np.empty(0 if mode else inside, np.int64)
    for column in range(0 if mode else width):
        if order[column] >= 0:
            column_of[order[column]] = column
    # The columns of a row go to one row of y, unless classes number their components differently. In one row, every
    # coefficient is written once; in several, zeros come first.
    blocks = entry[plans.BLOCKS]
    direct = blocks == 1 or not mode
    filled = np.zeros(blocks, np.int64)  # rows of each block
    if not direct:
        _clear(wide, narrow, 0, blocks * pad * width)
    first_window = start // WINDOW
    cursors = np.zeros(((stop + WINDOW - 1) // WINDOW - first_window, 5), np.int64)
    for w in range(len(cursors)):
        cursors[w, 0], cursors[w, 1] = windows_at[first_window + w] - 1, windows_at[first_window + w + 1]
        _next_escape(cursors[w], data, found, by_window, tokens, start, inside, column_of)
    for c in range(most):
        plane = source[c * width : (c + 1) * width + WIDTH]
        if not mode:
            t = width - 1
            while t >= 0 and order[t] < 0:  # the last stream lacks its last tokens
                plane[t] = 0
                t -= width // per_stream
        row_at = np.int64(0)
        if direct:
            of_block = np.int64(block[deepest + c])
            row_at = (of_block * pad + index[deepest + c]) * width
            filled[of_block] = max(filled[of_block], np.int64(index[deepest + c]) + 1)
        for begin in range(0, width, window):
            end = min(begin + window, width)
            r = first = window_runs[begin // window]
            reached = begin
            low_bits = False
            following = window_runs[begin // window + 1]
            # Within a window classes rise and their rows fall, so the runs with this row come first.
            while r < following and c < rows_of[r]:
                level = level_of[r] + c
                low_bits |= shift[level] != 0
                table = np.int64(level_table[level])
                if table != table_of_run[r]:
                    table_of_run[r] = table
                    one[bounds[r] : bounds[r + 1]] = shrink[table, 0]
                    more[bounds[r] : bounds[r + 1]] = shrink[table, 1]
                r += 1
            if r > first:
                reached = bounds[r]
            # First as if there were neither escapes nor low bits, which few columns have. What is written beyond
            # `reached` is written again later.
            escaped = False
            for i in range(begin, reached, WIDTH):
                if len(narrow):
                    if direct:
                        escaped |= dequantize_step(plane, i, one, more, step, i, reached - i, narrow, row_at + i)
                    else:
                        escaped |= dequantize_step(plane, i, one, more, step, i, reached - i, row, i)
                elif direct:
                    escaped |= dequantize_step(plane, i, one, more, step, i, reached - i, wide, row_at + i)
                else:
                    escaped |= dequantize_step(plane, i, one, more, step, i, reached - i, values, i)
            if low_bits:
                for q in range(first, r):
                    if shift[level_of[q] + c]:
                        to_levels(plane[bounds[q] : bounds[q + 1]], levels[bounds[q] : bounds[q + 1]])
            escapes = count_escapes(plane[begin:reached]) if escaped else 0
            # Escapes of the columns `begin … end - 1`, which may be tokens of several windows.
            for w in range((start + begin) // WINDOW - first_window, len(cursors)):
                cursor = cursors[w]
                while cursor[2] == c and cursor[3] < end:
                    column = cursor[3]
                    if column >= reached or plane[column] != ESCAPE:
                        return False
                    levels[column] = np.int32(
                        read_u32(data, found[part.ESCAPES] + 4 * (found[part.LISTED] + cursor[4]))
                    )
                    escapes -= 1
                    _finish(column, column + 1, levels, one, more, step, values, row, direct, row_at, wide, narrow)
                    _next_escape(cursor, data, found, by_window, tokens, start, inside, column_of)
            if escapes:
                return False
            for q in range(first, r if low_bits else first):
                level = level_of[q] + c
                if shift[level]:
                    u, v = bounds[q], bounds[q + 1]
                    at = np.int64(low_plane[level]) * width
                    add_low_bits(levels[u:v], source[at + u : at + v], np.int32(shift[level]))
                    _finish(u, v, levels, one, more, step, values, row, direct, row_at, wide, narrow)
            if direct:
                _clear(wide, narrow, row_at + reached, row_at + end)
        for q in range(0 if direct else runs):
            if c < rows_of[q]:
                level = level_of[q] + c
                to = (np.int64(block[level]) * pad + index[level]) * width
                if len(narrow):
                    narrow[to + bounds[q] : to + bounds[q + 1]] = row[bounds[q] : bounds[q + 1]]
                else:
                    wide[to + bounds[q] : to + bounds[q + 1]] = values[bounds[q] : bounds[q + 1]]
    for b in range(blocks if direct else 0):
        _clear(wide, narrow, (b * pad + filled[b]) * width, (b + 1) * pad * width)
    return bool((cursors[:, 2] == _NEVER).all())


@compiled
def sort_escapes(data, own, tokens, windows, by_window, next_place, listed):  # type: ignore[no-untyped-def]
    """Sort the numbers of a section's escapes by window: a part lists them row by row, and a row covers all tokens.

    Args:
        data: the bytes.
        own: the section's row of `found`.
        tokens: tokens in the chunk.
        windows: receives where each window begins in `by_window`, and where the last one ends.
        by_window: receives the numbers.
        next_place: scratch, as long as `windows`.
        listed: where the section's numbers begin in `by_window`.

    Returns:
        where the next section's begin.
    """
    windows[:] = 0
    for number in range(own[part.LISTED]):
        windows[read_u32(data, own[part.ESCAPES] + 4 * number) % np.uint32(tokens) // WINDOW + 1] += 1
    windows[0] = listed
    for w in range(1, len(windows)):
        windows[w] += windows[w - 1]
    for w in range(len(windows)):
        next_place[w] = windows[w]
    for number in range(own[part.LISTED]):
        w = read_u32(data, own[part.ESCAPES] + 4 * number) % np.uint32(tokens) // WINDOW
        by_window[next_place[w]] = number
        next_place[w] += 1
    return listed + own[part.LISTED]


@compiled
def _index(  # type: ignore[no-untyped-def]
    data, spans, sections, tokens, entries, class_slots, class_bits, classes, windows_at, found, problem
):
    """Read the parts of sections that their tiles share; `problem` receives the damaged section and its problem.

    Returns:
        whether all sections are sound; for each section, the word at which each of its streams begins and where the
        last ends; and the numbers of its escapes, sorted by window. `windows_at` `[sections, windows + 1]` receives
        where each window begins among these numbers.
    """
    count = len(sections)
    streams = escapes = np.int64(0)
    for i in range(count):
        problem[0], problem[1] = i, MALFORMED
        plain, classed = entries[2 * sections[i]], entries[2 * sections[i] + 1]
        if not part.find_part(
            data, spans[i, 0], spans[i, 1], tokens, plain[plans.PLANES], plain[plans.ROWS], classed[plans.PLANES],
            classed[plans.ROWS], found[i],
        ):  # fmt: skip
            return False, np.empty(0, np.uint32), np.empty(0, np.uint32)
        found[i, STREAMS] = streams
        streams += ((tokens + (1 << found[i, part.LOG2]) - 1) >> found[i, part.LOG2]) + 1
        escapes += found[i, part.LISTED]
    words_at, by_window = np.empty(streams, np.uint32), np.empty(escapes, np.uint32)
    next_place = np.empty(windows_at.shape[1], np.int64)
    listed = np.int64(0)
    for i in range(count):
        own = found[i]
        if own[part.MODE]:
            if not decode_class_stream(
                data, own[part.CLASSES], own[part.CLASS_WORDS], own[part.CLASS_STATE], class_slots[sections[i]],
                class_bits, classes[i],
            ):  # fmt: skip
                problem[0], problem[1] = i, CLASS_STREAM
                return False, words_at, by_window
            finest = entries[2 * sections[i] + 1, plans.FINEST]
            for t in range(tokens):
                if not finest <= classes[i, t] < CLASSES:
                    problem[0], problem[1] = i, CLASS_RANGE
                    return False, words_at, by_window
        at = own[STREAMS]
        part.list_words(data, own, words_at[at : at + ((tokens + (1 << own[part.LOG2]) - 1) >> own[part.LOG2]) + 1])
        listed = sort_escapes(data, own, tokens, windows_at[i], by_window, next_place, listed)
    return True, words_at, by_window


@compiled
def list_tile(  # type: ignore[no-untyped-def]
    i, own, columns, window, entry, number, data, words_at, start, stop, out_at, classes_at, states, starts, ends, at,
    groups, listed, fields,
):  # fmt: skip
    """List section i's streams of a tile for `decode_lanes`; return where the next section's streams and groups go."""
    log2 = own[part.LOG2]
    first_stream = at
    for stream in range(start >> log2, (stop + (1 << log2) - 1) >> log2):
        states[at] = read_u32(data, own[part.STATES] + 4 * stream)
        starts[at] = words_at[own[STREAMS] + stream]
        ends[at] = words_at[own[STREAMS] + stream + 1]
        at += 1
    listed = list_groups(i, first_stream, columns, 1 << log2, window, groups, listed)
    fields[i, lanes.WORDS], fields[i, lanes.COUNT] = own[part.WORDS], own[part.COUNT]
    fields[i, lanes.CLASSES], fields[i, lanes.OUT] = classes_at, out_at
    fields[i, lanes.COLUMNS] = columns
    fields[i, lanes.PLANES] = 16 * number
    fields[i, lanes.TABLES], fields[i, lanes.STRIDE] = entry[plans.TABLES], entry[plans.PLANES]
    return at, listed


@compiled
def count_streams(found, start, stop):  # type: ignore[no-untyped-def]
    """Return how many streams the sections have in a tile."""
    streams = np.int64(0)
    for i in range(len(found)):
        log2 = found[i, part.LOG2]
        streams += ((stop + (1 << log2) - 1) >> log2) - (start >> log2)
    return streams


@compiled
def tell_stream(bad, first_stream, found, start, problem):  # type: ignore[no-untyped-def]
    """Note which section's stream is damaged, given its number among all of a tile."""
    i = 0
    while first_stream[i + 1] <= bad:
        i += 1
    problem[0], problem[1] = i, STREAM
    problem[2] = (start >> found[i, part.LOG2]) + bad - first_stream[i]


@compiled
def decode_planes(  # type: ignore[no-untyped-def]
    data, words_at, sections, start, stop, multiple, entries, depth, planes, tables, slots, bits, scratch, scratch_at,
    order, columns, classes, found, problem
):  # fmt: skip
    """Decode the planes of the tokens `start … stop - 1`; return False if a section is damaged: see `_index`."""
    count, width = len(sections), stop - start
    streams = count_streams(found, start, stop)
    states = np.empty(streams, np.uint32)
    starts, ends = np.empty(streams, np.uint32), np.empty(streams, np.uint32)
    groups = np.empty((streams + count * (width // WINDOW + 1), lanes.GROUP_FIELDS), np.int64)
    fields = np.empty((count, lanes.SECTION_FIELDS), np.int64)
    first_stream = np.empty(count + 1, np.int64)
    listed = at = np.int64(0)
    for i in range(count):
        own = found[i]
        mode, log2 = own[part.MODE], own[part.LOG2]
        number = 2 * sections[i] + mode
        first_stream[i] = at
        if mode:
            own[COLUMNS] = width
            sort_columns(classes[i, start:stop], order[i], columns[i])
            finest = np.int64(CLASSES)
            for t in range(width):
                finest = min(finest, np.int64(columns[i, t]))
        else:
            own[COLUMNS] = deal(width, 1 << log2, order[i], columns[i])
            finest = np.int64(0)
        own[PAD] = (depth[16 * number + finest] + multiple - 1) // multiple * multiple
        window = WINDOW if mode else own[COLUMNS]
        at, listed = list_tile(
            i, own, own[COLUMNS], window, entries[number], number, data, words_at, start, stop, scratch_at[i],
            i * columns.shape[1], states, starts, ends, at, groups, listed, fields,
        )  # fmt: skip
    first_stream[count] = at
    bad = decode_lanes(
        groups[:listed], fields, states, starts, ends, data, columns.reshape(columns.size), planes, tables, slots, bits,
        scratch,
    )  # fmt: skip
    if bad >= 0:
        tell_stream(bad, first_stream, found, start, problem)
        return False
    return True


@compiled
def _decode(  # type: ignore[no-untyped-def]
    data, words_at, by_window, windows_at, sections, tokens, start, stop, multiple, entries, packed, depth, planes,
    tables, slots, bits, shrink, scratch, scratch_at, y_at, wide, narrow, order, columns, classes, found, problem
):  # fmt: skip
    """Decode the tokens `start … stop - 1` of sections; return False if one is damaged: see `problem` of `_index`."""
    if not decode_planes(
        data, words_at, sections, start, stop, multiple, entries, depth, planes, tables, slots, bits, scratch,
        scratch_at, order, columns, classes, found, problem,
    ):  # fmt: skip
        return False
    for i in range(len(sections)):
        number = 2 * sections[i] + found[i, part.MODE]
        if not _dequantize(
            data, found[i], by_window, windows_at[i], entries[number], number, tokens, start, stop,
            columns[i, : found[i, COLUMNS]], order[i], packed, shrink, scratch[scratch_at[i] :], wide[y_at[i] :],
            narrow[y_at[i] :],
        ):  # fmt: skip
            problem[0], problem[1] = i, ESCAPE_LIST
            return False
    return True


NO_WIDE, NO_NARROW = np.empty(0, np.float32), np.empty(0, np.uint16)
_arena = Arena()


@dataclass(frozen=True, slots=True)
class SectionIndex:
    """Sections that were read: the parts that decoding each of their tiles needs.

    Attributes:
        coding: how the sections are coded.
        parts: number and bytes of each section.
        numbers: int64 `[S]`, numbers of the sections.
        tokens: T, tokens in the chunk.
        data: the bytes of all sections, one after the other.
        found: `[S, FOUND_FIELDS]`, the fields named above. Each tile overwrites its own fields.
        words_at, by_window, windows_at: places of streams and escapes; see `_index`.
        classes: uint8 `[S, T]`, of all tokens of the sections whose tokens have classes.
    """

    coding: StepCoding
    parts: Sequence[tuple[int, memoryview]]
    numbers: npt.NDArray[np.int64]
    tokens: int
    data: npt.NDArray[np.uint8]
    found: npt.NDArray[np.int64]
    words_at: npt.NDArray[np.uint32]
    by_window: npt.NDArray[np.uint32]
    windows_at: npt.NDArray[np.int64]
    classes: npt.NDArray[np.uint8]


def index_sections(coding: StepCoding, parts: Sequence[tuple[int, memoryview]], tokens: int) -> SectionIndex:
    """See `cuvee.codec.stages.reference.sections.index_sections`."""
    packed, count = coding.plans, len(parts)
    numbers = np.array([number for number, _ in parts])
    data, spans = joined([section for _, section in parts])
    found, problem = np.zeros((count, FOUND_FIELDS), np.int64), np.zeros(3, np.int64)
    classes = np.empty((count, tokens), np.uint8)
    windows_at = np.empty((count, -(-tokens // WINDOW) + 1), np.int64)
    sound, words_at, by_window = _index(
        data, spans, numbers, tokens, packed.entries, packed.class_slots, packed.class_bits, classes, windows_at, found,
        problem,
    )  # fmt: skip
    if not sound:
        raise section_error(coding, parts, tokens, problem, found)
    return SectionIndex(coding, parts, numbers, tokens, data, found, words_at, by_window, windows_at, classes)


def decode_sections(index: SectionIndex, at: slice, dtype: torch.dtype) -> list[Coefficients]:
    """See `cuvee.codec.stages.reference.sections.decode_sections`."""
    coding, parts, numbers, found = index.coding, index.parts, index.numbers, index.found
    packed, tables = coding.plans, coding.family.tables
    count = len(parts)
    most = at.stop - at.start + MAX_TOKENS_PER_STREAM - 1  # columns
    entries = packed.entries[2 * numbers[:, None] + np.arange(2)]
    planes_at = offsets_of(entries[:, :, plans.PLANES].max(1) * most)
    deepest = packed.depth.reshape(-1, 2 * CLASSES)[numbers].max(1)
    rows = entries[:, 0, plans.BLOCKS] * [padded(int(depth)) for depth in deepest]
    y_at = offsets_of(rows * most)
    scratch = _arena.array("planes", int(planes_at[-1]) + WIDTH, np.uint8)
    y = _arena.tensor("y", int(y_at[-1]) + WIDTH, dtype)
    if dtype == torch.bfloat16:
        wide, narrow = NO_WIDE, y.view(torch.int16).numpy().view(np.uint16)
    else:
        wide, narrow = y.numpy(), NO_NARROW
    order, columns = np.empty((count, most), np.int64), np.empty((count, most), np.uint8)
    problem = np.zeros(3, np.int64)
    if not _decode(
        index.data, index.words_at, index.by_window, index.windows_at, numbers, index.tokens, at.start, at.stop,
        ROW_MULTIPLE, packed.entries,
        (packed.rows, packed.steps, packed.level_table, packed.shift, packed.low_plane, packed.block, packed.index),
        packed.depth, packed.planes, packed.tables, tables.slots.reshape(-1), tables.prob_bits,
        coding.family.quantizer.shrink, scratch, planes_at, y_at, wide, narrow, order, columns, index.classes, found,
        problem,
    ):  # fmt: skip
        raise section_error(coding, parts, index.tokens, problem, found)
    out = []
    for i, (number, _) in enumerate(parts):
        columns_of = int(found[i, COLUMNS])
        shape = (len(coding.sections[number].ranks), int(found[i, PAD]), columns_of)
        own = y[y_at[i] : y_at[i] + math.prod(shape)].view(shape)
        classes = columns[i, :columns_of] if found[i, part.MODE] else None
        out.append(Coefficients(order[i, :columns_of], classes, own))
    return out


def offsets_of(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return where arrays of these sizes begin, aligned to cache lines, and where the last ends."""
    return np.concatenate([[0], np.cumsum(-(-sizes // 64) * 64)])


def section_error(
    coding: StepCoding,
    parts: Sequence[tuple[int, memoryview]],
    tokens: int,
    problem: npt.NDArray[np.int64],
    found: npt.NDArray[np.int64],
) -> FormatError:
    """Return the reference's error about the section that the compiled loop found damaged."""
    i, kind, detail = (int(x) for x in problem)
    number, data = parts[i]
    section = coding.sections[number]
    if kind == MALFORMED:
        read_part(data, section.plan, section.classed, tokens)  # raises
    if kind == CLASS_RANGE:
        return class_range_error(section.classed.finest)
    if kind == CLASS_STREAM:
        return class_stream_error()
    if kind == STREAM:
        return stream_error(detail, stream_count(tokens, 1 << int(found[i, part.LOG2])))
    if kind == ESCAPE_LIST:
        return escape_error()
    return FormatError(f"section {number}: must have a well-formed coded part, got a malformed one")

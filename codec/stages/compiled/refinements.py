"""Refinements, compiled: the results of `reference/refinements.py`, which explains the steps section by section.

base             --decode_planes--> planes --> levels [components, columns] int8 --> contexts
refinement 1 …   --decode_context_lanes--> symbols --refine--> levels --> contexts …
last refinement  --decode_context_lanes--> symbols --restore--> y
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.entropy.coding_plan import (
    ESCAPE,
    MAX_LEVEL,
    NO_ESCAPES,
    Escapes,
    escape_error,
    too_large_error,
)
from cuvee.codec.entropy.family import TABLES_PER_OCTAVE
from cuvee.codec.entropy.nested import CONTEXT_BITS, ESCAPED, KINDS, NestedFamily, first_level
from cuvee.codec.entropy.streams import MAX_TOKENS_PER_STREAM, stream_count, stream_error
from cuvee.codec.entropy.token_classes import CLASSES, WINDOW
from cuvee.codec.profiles import flat_plans as plans
from cuvee.codec.profiles.nested_coding import NestedCoding, NestedSection
from cuvee.codec.stages.compiled import coded_part as part
from cuvee.codec.stages.compiled import lanes
from cuvee.codec.stages.compiled.arena import Arena
from cuvee.codec.stages.compiled.bfloat16 import rounded
from cuvee.codec.stages.compiled.coded_part import read_u32
from cuvee.codec.stages.compiled.compiler import compiled
from cuvee.codec.stages.compiled.joining import joined
from cuvee.codec.stages.compiled.lanes import decode_context_lanes
from cuvee.codec.stages.compiled.refinement_steps import (
    BEYOND,
    cell_step,
    context_step,
    cut_step,
    level_step,
    refine_step,
    restore_step,
)
from cuvee.codec.stages.compiled.sections import (
    ESCAPE_LIST,
    FOUND_FIELDS,
    STREAM,
    STREAMS,
    SectionIndex,
    count_streams,
    decode_planes,
    index_sections,
    list_tile,
    offsets_of,
    section_error,
    sort_escapes,
    tell_stream,
)
from cuvee.codec.stages.compiled.simd import WIDTH
from cuvee.codec.stages.reference.refinements import (
    SectionParts,
    escape_range_error,
    read_refinement,
    unclassed_error,
)
from cuvee.codec.stages.reference.sections import ROW_MULTIPLE, Coefficients, padded
from cuvee.codec.support.arrays import F32, I64, U8

_ESCAPE_RANGE = ESCAPE_LIST + 1  # another problem of a section
_FURTHEST = np.int64(MAX_LEVEL)
_SYMBOL_MASK = np.int32((1 << CONTEXT_BITS) - 1)
_ESCAPED_BYTE = np.uint8(ESCAPED & 0xFF)
_arena = Arena()


# --- symbols of refinements


@compiled
def _list_runs(columns, rows, bounds, depth, runs_of_window):  # type: ignore[no-untyped-def]
    """List the runs of columns of one class: where each begins, its rows, and the first run of each window.

    `bounds` and `runs_of_window` hold one entry more, where the last run or window ends.

    Returns:
        the most rows of a run.
    """
    runs = most = np.int64(0)
    width = len(columns)
    for t in range(width):
        if t % WINDOW == 0:
            runs_of_window[t // WINDOW] = runs
        if t % WINDOW == 0 or columns[t] != columns[t - 1]:
            bounds[runs], depth[runs] = t, rows[columns[t]]
            most = max(most, depth[runs])
            runs += 1
    bounds[runs] = width
    runs_of_window[(width + WINDOW - 1) // WINDOW] = runs
    return most


@compiled
def _next_segment(r, end, c, depth, single):  # type: ignore[no-untyped-def]
    """Return the run after the next ones that have row `c` and share its component; `r` itself if there is none.

    Within a window classes rise and their rows fall, so the runs with this row come first. With a `single` block all of
    them share its component, otherwise classes number their components differently.
    """
    if r == end or depth[r] <= c:
        return r
    r += 1
    while single and r < end and depth[r] > c:
        r += 1
    return r


@compiled
def _copy(source, target):  # type: ignore[no-untyped-def]
    for i in range(len(target)):
        target[i] = source[i]


@compiled
def _to_refinements(  # type: ignore[no-untyped-def]
    y, columns, single, inverses, base_table, dead_zone, rounding, rows, codes, places, zones, planes, planes_at,
    escaped
):  # fmt: skip
    """Write the planes of refinements, one after the other, to `planes`; count each row's escapes in `escaped`.

    Returns:
        False if a coefficient is too large.
    """
    tokens, count, y_ = len(columns), len(zones), y.reshape(y.size)
    bounds, depth = np.empty(tokens + 1, np.int64), np.empty(tokens + 1, np.int64)
    runs_of_window = np.empty((tokens + WINDOW - 1) // WINDOW + 1, np.int64)
    most = _list_runs(columns, rows, bounds, depth, runs_of_window)
    # What the columns of a window hold in a row. Steps read and write up to 15 entries more.
    size = WINDOW + WIDTH
    own, inverse = np.zeros(size, np.float32), np.zeros(size, np.float32)
    level, low, high = np.zeros(size, np.int32), np.zeros(size, np.float32), np.zeros(size, np.float32)
    base_zone, bias = np.zeros(size, np.float32), np.zeros(size, np.float32)
    zone, fresh = np.zeros((count, size), np.float32), np.zeros((count, size), np.int32)
    out = np.empty(size, np.uint8)
    reached = np.empty(count, np.int64)
    known = np.empty((count + 1, runs_of_window[-1]), np.int64)  # the table of each run in each part
    known[:] = -2
    for w in range(len(runs_of_window) - 1):
        begin, end = w * WINDOW, runs_of_window[w + 1]
        for t in range(begin, bounds[end]):
            inverse[t - begin] = inverses[columns[t]]
        for c in range(most):
            r = runs_of_window[w]
            following = _next_segment(r, end, c, depth, single)
            while following > r:
                u, v = bounds[r] - begin, bounds[following] - begin
                reached[:] = u
                for q in range(r, following):
                    k, first, last = np.int64(columns[bounds[q]]), bounds[q] - begin, bounds[q + 1] - begin
                    place = np.int64(places[0, k, c])
                    table = np.int64(base_table[k, place]) if place >= 0 else np.int64(-1)
                    if table != known[0, q]:
                        known[0, q] = table
                        for t in range(first, last):  # nothing reaches the level 1 of a component without levels
                            base_zone[t] = dead_zone[table] if table >= 0 else np.float32(np.inf)
                            bias[t] = rounding[table] if table >= 0 else np.float32(0)
                    for number in range(count):
                        place = np.int64(places[number + 1, k, c])
                        if place < 0:
                            continue
                        reached[number] = last
                        table = np.int64(codes[number, k, place])
                        if table != known[number + 1, q]:
                            known[number + 1, q] = table
                            for t in range(first, last):
                                zone[number, t] = zones[number, table]
                                fresh[number, t] = table < TABLES_PER_OCTAVE
                _copy(y_[c * tokens + begin + u : c * tokens + begin + v], own[u:v])
                for i in range(u, v, WIDTH):
                    if not cell_step(own, i, inverse, base_zone, bias, v - i, level, low, high):
                        return False
                for number in range(count):
                    if reached[number] == u:
                        continue
                    row = np.int64(places[number + 1, columns[bounds[r]], c])
                    own_zone, own_fresh, stop, escapes = zone[number], fresh[number], reached[number], np.int64(0)
                    for i in range(u, stop, WIDTH):
                        escapes += cut_step(
                            own, i, inverse, own_zone, own_fresh, number + 1, stop - i, level, low, high, out
                        )
                    escaped[number, row] += escapes
                    at = planes_at[number] + row * tokens + begin
                    _copy(out[u:stop], planes[at + u : at + stop])
                r = following
                following = _next_segment(r, end, c, depth, single)
    return True


def to_refinements(y: F32, columns: U8, section: NestedSection, family: NestedFamily) -> list[tuple[U8, Escapes]]:
    """See `cuvee.codec.stages.reference.refinements.to_refinements`."""
    parts, tokens = section.parts, len(columns)
    count = len(parts) - 1
    if not count:
        return []
    depth = [int(own.classed.rows[columns].max(initial=0)) for own in parts[1:]]
    planes_at = np.concatenate([[0], np.cumsum(depth)]).astype(np.int64) * tokens
    planes = np.zeros(int(planes_at[-1]), np.uint8)
    quantizer, base = family.base.quantizer, parts[0].classed
    inverses = np.float32(1) / base.steps
    escaped = np.zeros((count, max(depth)), np.int64)
    if not _to_refinements(
        y, columns, len(parts[0].class_ranks[0]) == 1, inverses, base.level_table, quantizer.dead_zone,
        quantizer.rounding, parts[-1].classed.rows, section.codes, section.places,
        np.stack([own.zone for own in family.refinements[:count]]), planes, planes_at, escaped,
    ):  # fmt: skip
        coded = np.arange(len(y))[:, None] < parts[-1].classed.rows[columns]
        raise too_large_error(float((np.abs(y) * inverses[columns])[coded].max()))
    out = []
    for number, rows in enumerate(depth, 1):
        own = planes[planes_at[number - 1] : planes_at[number]].reshape(rows, tokens)
        zone = family.refinements[number - 1].zone
        out.append((own, _larger(own, escaped[number - 1], y, columns, section, number, inverses, zone)))
    return out


def _larger(
    planes: U8, escaped: I64, y: F32, columns: U8, section: NestedSection, number: int, inverses: F32, zone: F32
) -> Escapes:
    """Return the levels of a refinement that no symbol stands for, given how many each row has."""
    those = np.flatnonzero(escaped)
    if not len(those):
        return NO_ESCAPES
    row, column = np.nonzero(planes[those] == ESCAPED & _SYMBOL_MASK)
    row = those[row]
    value, last = np.empty(len(row), np.int32), section.parts[-1]
    for k in np.unique(columns[column]):
        own = columns[column] == k
        place = np.searchsorted(last.components[k], section.parts[number].components[k][row[own]])
        of_class = y[place, column[own]]
        table = section.codes[number - 1, k, row[own]]
        level = first_level(np.abs(of_class) * inverses[k] / np.float32(2.0**-number), zone[table])
        value[own] = np.where(of_class < 0, -level, level)
    return Escapes((row * len(columns) + column).astype(np.uint32), value)


# --- decoding


@compiled
def _level(levels, wide, i):  # type: ignore[no-untyped-def]
    """Return a level, wherever it is; see `_base_levels`."""
    return wide[i] if levels[i] == BEYOND else np.int32(levels[i])


@compiled
def _put_level(levels, wide, i, level):  # type: ignore[no-untyped-def]
    if -BEYOND > level > BEYOND:
        levels[i] = np.int8(level)
    else:
        levels[i] = np.int8(BEYOND)
        wide[i] = level


@compiled
def _finer(level, symbol):  # type: ignore[no-untyped-def]
    """Return the level that the byte of a symbol refines a level to."""
    signed = np.int32(np.int8(symbol))
    return np.int32(2 * level + (-signed if level < 0 else signed))


@compiled
def _base_levels(  # type: ignore[no-untyped-def]
    data, found, by_window, windows_at, entry, tokens, start, columns, runs, packed, begins, source, levels, wide
):  # fmt: skip
    """Turn one section's planes into levels.

    `levels` receives `[components, columns]`. `BEYOND` stands for a level that a byte cannot hold, which is in `wide`
    at the same place. There are few, so `wide` is hardly ever touched, and a tile fits the second cache.

    Returns:
        0, or the problem of the section.
    """
    rows, planes, shift, low_plane, block, index = packed
    most, bounds, depth, runs_of_window = runs
    width = len(columns)
    stride, levels_at, single = entry[plans.ROWS], entry[plans.LEVELS], entry[plans.BLOCKS] == 1
    windows = (width + WINDOW - 1) // WINDOW
    levels[:] = 0
    escapes = np.int64(0)
    for c in range(most):
        for w in range(windows):
            r, end = runs_of_window[w], runs_of_window[w + 1]
            following = _next_segment(r, end, c, depth, single)
            while following > r:
                u, v = bounds[r], bounds[following]
                level = levels_at + columns[u] * stride + c
                to = (begins[block[level]] + index[level]) * width
                for i in range(u, v, WIDTH):
                    escapes += level_step(source, c * width + i, v - i, levels, to + i)
                r = following
                following = _next_segment(r, end, c, depth, single)
    first_window = start // WINDOW
    for j in range(windows_at[first_window], windows_at[first_window + windows]):
        number = np.int64(by_window[j])
        place = np.int64(read_u32(data, found[part.ESCAPES] + 4 * number))
        value = np.int32(read_u32(data, found[part.ESCAPES] + 4 * (found[part.LISTED] + number)))
        c, column = place // tokens, place % tokens - start
        if column >= width or c >= rows[columns[column]] or source[c * width + column] != ESCAPE:
            return ESCAPE_LIST
        level = levels_at + columns[column] * stride + c
        if abs(np.int64(value)) > _FURTHEST >> np.int64(shift[level]):
            return _ESCAPE_RANGE
        _put_level(levels, wide, (begins[block[level]] + index[level]) * width + column, value)
        escapes -= 1
    if escapes:
        return ESCAPE_LIST
    for r in range(runs_of_window[windows]):
        u, v = bounds[r], bounds[r + 1]
        for c in range(depth[r] if planes[columns[u]] > depth[r] else 0):
            level = levels_at + columns[u] * stride + c
            if shift[level]:
                to = (begins[block[level]] + index[level]) * width
                low = np.int64(low_plane[level]) * width
                bits = np.int32(shift[level])
                half = np.int32(1) << (bits - 1)
                for t in range(u, v):
                    high = _level(levels, wide, to + t)
                    _put_level(levels, wide, to + t, np.int32((high << bits) + np.int32(source[low + t]) - half))
    return 0


@compiled
def _write_contexts(levels, planes, entry, columns, runs, packed, begins):  # type: ignore[no-untyped-def]
    """Write the contexts of a refinement to its planes."""
    _, _, block, index, _ = packed
    most, bounds, depth, runs_of_window = runs
    width = len(columns)
    stride, levels_at, single = entry[plans.ROWS], entry[plans.LEVELS], entry[plans.BLOCKS] == 1
    for c in range(most):
        for w in range((width + WINDOW - 1) // WINDOW):
            r, end = runs_of_window[w], runs_of_window[w + 1]
            following = _next_segment(r, end, c, depth, single)
            while following > r:
                level = levels_at + columns[bounds[r]] * stride + c
                to = (begins[block[level]] + index[level]) * width
                # Up to 15 contexts too many: what is behind them is written later, or not coded.
                for i in range(bounds[r], bounds[following], WIDTH):
                    context_step(levels, to + i, planes, c * width + i)
                r = following
                following = _next_segment(r, end, c, depth, single)


@compiled
def _refine(levels, wide, planes, entry, columns, runs, packed, begins):  # type: ignore[no-untyped-def]
    """Refine levels by the symbols of a refinement; return how many symbols are escapes."""
    escapes = np.int64(0)
    _, _, block, index, _ = packed
    most, bounds, depth, runs_of_window = runs
    width = len(columns)
    stride, levels_at, single = entry[plans.ROWS], entry[plans.LEVELS], entry[plans.BLOCKS] == 1
    for c in range(most):
        for w in range((width + WINDOW - 1) // WINDOW):
            r, end = runs_of_window[w], runs_of_window[w + 1]
            following = _next_segment(r, end, c, depth, single)
            while following > r:
                u, v = bounds[r], bounds[following]
                level = levels_at + columns[u] * stride + c
                to = (begins[block[level]] + index[level]) * width
                for i in range(u, v, WIDTH):
                    escaped, beyond = refine_step(levels, to + i, planes, c * width + i, v - i)
                    escapes += escaped
                    for t in range(i, min(i + WIDTH, v) if beyond else i):
                        finer = _finer(_level(levels, wide, to + t), planes[c * width + t])
                        _put_level(levels, wide, to + t, finer)
                r = following
                following = _next_segment(r, end, c, depth, single)
    return escapes


@compiled
def _restored(level, shrink, step):  # type: ignore[no-untyped-def]
    """Return the coefficient of a level; `shrink` has one number per kind of level."""
    m = abs(level)
    back = np.float32(m) - shrink[min(m, KINDS) - 1] if m else np.float32(0)
    return (-back if level < 0 else back) * step


@compiled
def _restore(  # type: ignore[no-untyped-def]
    levels, wide, planes, entry, columns, runs, packed, begins, shrink, pad, y
):  # fmt: skip
    """Refine levels by the symbols of the last refinement, into coefficients `y` `[blocks, pad, columns]`.

    Finer levels are nowhere written. The coefficients of escapes are left to `_place_escapes`.

    Returns:
        how many symbols are escapes.
    """
    escapes = np.int64(0)
    _, level_table, block, index, steps = packed
    most, bounds, depth, runs_of_window = runs
    width = len(columns)
    windows = (width + WINDOW - 1) // WINDOW
    stride, levels_at, single = entry[plans.ROWS], entry[plans.LEVELS], entry[plans.BLOCKS] == 1
    step = np.zeros(width + WIDTH, np.float32)
    one, two = np.zeros(width + WIDTH, np.float32), np.zeros(width + WIDTH, np.float32)
    three, more = np.zeros(width + WIDTH, np.float32), np.zeros(width + WIDTH, np.float32)
    table_of_run = np.full(runs_of_window[windows], np.int64(-1))
    row = np.empty(0 if single else width + WIDTH, y.dtype)
    for t in range(width):
        step[t] = steps[columns[t]]
    if not single:
        y[: entry[plans.BLOCKS] * pad * width] = 0
    for c in range(most):
        for w in range(windows):
            r, end = runs_of_window[w], runs_of_window[w + 1]
            reached = bounds[r]
            following = _next_segment(r, end, c, depth, single)
            while following > r:
                u, v = bounds[r], bounds[following]
                level = levels_at + columns[u] * stride + c
                to = (begins[block[level]] + index[level]) * width
                row_at = (np.int64(block[level]) * pad + index[level]) * width
                for q in range(r, following):
                    own = levels_at + columns[bounds[q]] * stride + c
                    table = np.int64(level_table[own])
                    if table != table_of_run[q]:
                        table_of_run[q] = table
                        for t in range(bounds[q], bounds[q + 1]):
                            one[t], two[t], three[t], more[t] = (
                                shrink[table, 0], shrink[table, 1], shrink[table, 2], shrink[table, 3]
                            )  # fmt: skip
                # Zeros beyond `v` are the values there now or later. With several blocks they are not: a coarser class
                # may have had this component in a row before.
                out, out_at = (y, row_at) if single else (row, np.int64(0))
                for i in range(u, v, WIDTH):
                    escaped, beyond = restore_step(
                        levels, to + i, planes, c * width + i, one, two, three, more, step, i, v - i, out, out_at + i
                    )
                    escapes += escaped
                    for t in range(i, min(i + WIDTH, v) if beyond else i):
                        finer = _finer(_level(levels, wide, to + t), planes[c * width + t])
                        own = levels_at + columns[t] * stride + c
                        out[out_at + t] = rounded(_restored(finer, shrink[level_table[own]], step[t]), out)
                if not single:
                    _copy(row[u:v], y[row_at + u : row_at + v])
                reached = v
                r = following
                following = _next_segment(r, end, c, depth, single)
            if single:
                y[c * width + reached : c * width + bounds[end]] = 0
    if single:
        y[most * width : pad * width] = 0
    return escapes


@compiled
def _place_escapes(  # type: ignore[no-untyped-def]
    data, found, by_window, windows_at, entry, tokens, start, columns, packed, begins, symbols, levels, wide, number,
    last, shrink, pad, y
):  # fmt: skip
    """Put the listed levels of a refinement in their places, those of the `last` one as coefficients.

    Returns:
        how many there are, or a problem below 0.
    """
    rows, level_table, block, index, steps = packed
    width = len(columns)
    first_window = start // WINDOW
    listed = windows_at[first_window + (width + WINDOW - 1) // WINDOW] - windows_at[first_window]
    for j in range(windows_at[first_window], windows_at[first_window] + listed):
        escape = np.int64(by_window[j])
        place = np.int64(read_u32(data, found[part.ESCAPES] + 4 * escape))
        value = np.int32(read_u32(data, found[part.ESCAPES] + 4 * (found[part.LISTED] + escape)))
        c, column = place // tokens, place % tokens - start
        if column >= width or c >= rows[columns[column]] or symbols[c * width + column] != _ESCAPED_BYTE:
            return -np.int64(ESCAPE_LIST)
        if abs(np.int64(value)) > _FURTHEST << number:
            return -np.int64(_ESCAPE_RANGE)
        level = entry[plans.LEVELS] + columns[column] * entry[plans.ROWS] + c
        if last:
            back = _restored(value, shrink[level_table[level]], steps[columns[column]])
            y[(np.int64(block[level]) * pad + index[level]) * width + column] = rounded(back, y)
        else:
            _put_level(levels, wide, (begins[block[level]] + index[level]) * width + column, value)
    return listed


@compiled
def _open_tile(  # type: ignore[no-untyped-def]
    data, found, by_window, windows_at, sections, tokens, start, columns, entries, packed, begins, scratch, scratch_at,
    levels, wide, levels_at, problem
):  # fmt: skip
    """Turn the planes of the bases into levels; return False if a section is damaged."""
    width = columns.shape[1]
    rows, planes, shift, low_plane, block, index = packed
    bounds, depth = np.empty(width + 1, np.int64), np.empty(width + 1, np.int64)
    runs_of_window = np.empty((width + WINDOW - 1) // WINDOW + 1, np.int64)
    for i in range(len(sections)):
        number = 2 * sections[i] + 1
        own_rows = rows[16 * number :]
        most = _list_runs(columns[i], own_rows, bounds, depth, runs_of_window)
        found_problem = _base_levels(
            data, found[i], by_window, windows_at[i], entries[number], tokens, start, columns[i],
            (most, bounds, depth, runs_of_window),
            (own_rows, planes[16 * number :], shift, low_plane, block, index), begins[sections[i]],
            scratch[scratch_at[i] :], levels[levels_at[i] : levels_at[i + 1]], wide[levels_at[i] :],
        )  # fmt: skip
        if found_problem:
            problem[0], problem[1] = i, found_problem
            return False
    return True


@compiled
def _refine_tile(  # type: ignore[no-untyped-def]
    refinement, last, data, words_at, by_window, windows_at, found, sections, tokens, start, stop, columns, entries,
    packed, begins, tables, slots, bits, shrink, scratch, scratch_at, levels, wide, levels_at, pads, y_at, y, problem
):  # fmt: skip
    """Decode one refinement of a tile into the levels, the `last` one into coefficients `[blocks, pad, columns]`.

    Returns:
        False if a section is damaged.
    """
    count, width = len(sections), stop - start
    rows, level_table, block, index, steps = packed
    streams = count_streams(found, start, stop)
    states = np.empty(streams, np.uint32)
    starts, ends = np.empty(streams, np.uint32), np.empty(streams, np.uint32)
    groups = np.empty((streams + count * (width // WINDOW + 1), lanes.GROUP_FIELDS), np.int64)
    fields = np.empty((count, lanes.SECTION_FIELDS), np.int64)
    first_stream = np.empty(count + 1, np.int64)
    bounds, depth = np.empty(width + 1, np.int64), np.empty(width + 1, np.int64)
    runs_of_window = np.empty((width + WINDOW - 1) // WINDOW + 1, np.int64)
    listed = at = np.int64(0)
    for i in range(count):
        number = 2 * sections[i] + 1
        first_stream[i] = at
        own_rows = rows[16 * number :]
        most = _list_runs(columns[i], own_rows, bounds, depth, runs_of_window)
        _write_contexts(
            levels[levels_at[i] :], scratch[scratch_at[i] :], entries[number], columns[i],
            (most, bounds, depth, runs_of_window), (own_rows, level_table, block, index, steps), begins[sections[i]],
        )  # fmt: skip
        at, listed = list_tile(
            i, found[i], width, np.int64(WINDOW), entries[number], number, data, words_at, start, stop, scratch_at[i],
            i * width, states, starts, ends, at, groups, listed, fields,
        )  # fmt: skip
    first_stream[count] = at
    bad = decode_context_lanes(
        groups[:listed], fields, states, starts, ends, data, columns.reshape(columns.size), rows, tables, slots, bits,
        scratch,
    )  # fmt: skip
    if bad >= 0:
        tell_stream(bad, first_stream, found, start, problem)
        return False
    for i in range(count):
        number = 2 * sections[i] + 1
        own = (rows[16 * number :], level_table, block, index, steps[16 * number :])
        runs = (_list_runs(columns[i], own[0], bounds, depth, runs_of_window), bounds, depth, runs_of_window)
        entry, planes, own_y = entries[number], scratch[scratch_at[i] :], y[y_at[i] :]
        own_levels, own_wide = levels[levels_at[i] :], wide[levels_at[i] :]
        if last:
            escapes = _restore(
                own_levels, own_wide, planes, entry, columns[i], runs, own, begins[sections[i]], shrink, pads[i], own_y
            )  # fmt: skip
        else:
            escapes = _refine(own_levels, own_wide, planes, entry, columns[i], runs, own, begins[sections[i]])
        placed = _place_escapes(
            data, found[i], by_window, windows_at[i], entry, tokens, start, columns[i], own, begins[sections[i]],
            planes, own_levels, own_wide, refinement, last, shrink, pads[i], own_y,
        )  # fmt: skip
        if placed != escapes:
            problem[0], problem[1] = i, -placed if placed < 0 else ESCAPE_LIST
            return False
    return True


@dataclass(frozen=True, slots=True)
class _Refinement:
    """A refinement of sections that was read: see `SectionIndex`."""

    data: npt.NDArray[np.uint8]
    found: npt.NDArray[np.int64]
    words_at: npt.NDArray[np.uint32]
    by_window: npt.NDArray[np.uint32]
    windows_at: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RefinedIndex:
    """Bases and refinements that were read: the parts that decoding each of their tiles needs.

    Attributes:
        coding: how the sections are coded.
        parts: number and parts of each section.
        base: the bases.
        refinements: the refinements, in order.
    """

    coding: NestedCoding
    parts: Sequence[SectionParts]
    base: SectionIndex
    refinements: tuple[_Refinement, ...]


@compiled
def _index(data, spans, sections, tokens, entries, found, log2, windows_at):  # type: ignore[no-untyped-def]
    """Find the parts of the sections of a refinement, as `sections._index` does.

    Returns:
        -1, or the number of a malformed section; the words of the streams; and the escapes by window.
    """
    streams = escapes = np.int64(0)
    for i in range(len(sections)):
        rows = entries[2 * sections[i] + 1, plans.ROWS]
        sound = part.find_part(data, spans[i, 0], spans[i, 1], tokens, rows, rows, part.NO_CLASSES, rows, found[i])
        if not sound or found[i, part.LOG2] != log2[i]:
            return i, np.empty(0, np.uint32), np.empty(0, np.uint32)
        found[i, STREAMS] = streams
        streams += ((tokens + (1 << log2[i]) - 1) >> log2[i]) + 1
        escapes += found[i, part.LISTED]
    words_at, by_window = np.empty(streams, np.uint32), np.empty(escapes, np.uint32)
    next_place = np.empty(windows_at.shape[1], np.int64)
    listed = np.int64(0)
    for i in range(len(sections)):
        at = found[i, STREAMS]
        part.list_words(data, found[i], words_at[at : at + ((tokens + (1 << log2[i]) - 1) >> log2[i]) + 1])
        listed = sort_escapes(data, found[i], tokens, windows_at[i], by_window, next_place, listed)
    return -1, words_at, by_window


def index_refined(coding: NestedCoding, parts: Sequence[SectionParts], tokens: int) -> RefinedIndex:
    """See `cuvee.codec.stages.reference.refinements.index_refined`."""
    base = index_sections(coding.base, [(number, data[0]) for number, data in parts], tokens)
    if not base.found[:, part.MODE].all():
        raise unclassed_error()
    refinements = []
    for number, packed in enumerate(coding.refinement_plans, 1):
        sections = [data[number] for _, data in parts]
        data, spans = joined(sections)
        found = np.zeros((len(parts), FOUND_FIELDS), np.int64)
        windows_at = np.empty_like(base.windows_at)
        log2 = np.ascontiguousarray(base.found[:, part.LOG2])
        bad, words_at, by_window = _index(data, spans, base.numbers, tokens, packed.entries, found, log2, windows_at)
        if bad >= 0:
            section, _ = parts[bad]
            read_refinement(  # raises
                sections[bad], coding.sections[section].parts[number], tokens, 1 << int(log2[bad])
            )
        refinements.append(_Refinement(data, found, words_at, by_window, windows_at))
    return RefinedIndex(coding, parts, base, tuple(refinements))


def decode_refined(index: RefinedIndex, at: slice, dtype: torch.dtype) -> list[Coefficients]:
    """See `cuvee.codec.stages.reference.refinements.decode_refined`."""
    coding, base = index.coding, index.base
    numbers, tokens, problem = base.numbers, base.tokens, np.zeros(3, np.int64)
    packed, tables = coding.base.plans, coding.base.family.tables
    finest = [coding.sections[number] for number in numbers]
    count, width = len(numbers), at.stop - at.start
    most = width + MAX_TOKENS_PER_STREAM - 1
    planes = [plan.entries[2 * numbers + 1, plans.PLANES] for plan in (packed, *coding.refinement_plans)]
    # Steps that read or write 16 places at the end of a section reach none of the next one.
    scratch_at = offsets_of(np.max(planes, axis=0) * most + WIDTH)
    levels_at = offsets_of(np.array([section.count for section in finest]) * width + WIDTH)
    scratch = _arena.array("planes", int(scratch_at[-1]), np.uint8)
    levels = _arena.array("levels", int(levels_at[-1]), np.int8)
    wide = _arena.array("wide", int(levels_at[-1]), np.int32)
    order, columns = np.empty((count, most), np.int64), np.empty((count, most), np.uint8)
    if not decode_planes(
        base.data, base.words_at, numbers, at.start, at.stop, ROW_MULTIPLE, packed.entries, packed.depth, packed.planes,
        packed.tables, tables.slots.reshape(-1), tables.prob_bits, scratch, scratch_at, order, columns, base.classes,
        base.found, problem,
    ):  # fmt: skip
        raise section_error(coding.base, base.parts, tokens, problem, base.found)
    columns = np.ascontiguousarray(columns[:, :width])
    if not _open_tile(
        base.data, base.found, base.by_window, base.windows_at, numbers, tokens, at.start, columns, packed.entries,
        (packed.rows, packed.planes, packed.shift, packed.low_plane, packed.block, packed.index), coding.begins,
        scratch, scratch_at, levels, wide, levels_at, problem,
    ):  # fmt: skip
        raise escape_range_error() if problem[1] == _ESCAPE_RANGE else escape_error()
    last = coding.refinement_plans[-1]
    blocks = last.entries[2 * numbers + 1, plans.BLOCKS]
    depth = last.depth.reshape(-1, 2, CLASSES)[numbers, 1]
    pads = np.array([padded(int(own[k])) for own, k in zip(depth, columns.min(1), strict=True)])
    y_at = offsets_of(blocks * pads * width + WIDTH)
    y = _arena.tensor("y", int(y_at[-1]), dtype)
    coefficients = y.view(torch.int16).numpy().view(np.uint16) if dtype == torch.bfloat16 else y.numpy()
    for number, (plan, coder, tables_of, own) in enumerate(
        zip(coding.refinement_plans, coding.family.coders, coding.family.refinements, index.refinements, strict=False),
        1,
    ):
        if not _refine_tile(
            number, number == coding.refinements, own.data, own.words_at, own.by_window, own.windows_at, own.found,
            numbers, tokens, at.start, at.stop, columns, plan.entries,
            (plan.rows, plan.level_table, plan.block, plan.index, plan.steps), coding.begins, plan.tables,
            (coder.decoding.slots.reshape(-1), coder.cuts), coder.decoding.prob_bits, tables_of.shrink, scratch,
            scratch_at, levels, wide, levels_at, pads, y_at, coefficients, problem,
        ):  # fmt: skip
            i, kind, stream = (int(x) for x in problem)
            if kind != STREAM:
                raise escape_range_error() if kind == _ESCAPE_RANGE else escape_error()
            raise stream_error(stream, stream_count(tokens, 1 << int(own.found[i, part.LOG2])))
    out = []
    for i in range(count):
        shape = (int(blocks[i]), int(pads[i]), width)
        own_y = y[y_at[i] : y_at[i] + math.prod(shape)].view(shape)
        out.append(Coefficients(order[i, :width], columns[i], own_y))
    return out

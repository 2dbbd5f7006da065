"""The entropy coder for the CPU: many streams at a time, of any sections of a chunk.

Streams are coded sixteen at a time (`decode_steps`, `encode_step`): a *group* of lanes in one window of one
section. A step of a group waits for the step before it, through two loads and a product. So several groups take
turns: however few streams a section has, the chunk has enough to keep the CPU busy.

The order of the columns is that of the format: if a window has S streams, its row r holds the columns
r S … r S + S - 1, one of each stream. The class of its column determines how many planes a lane decodes in a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cuvee.codec.format.streams import WINDOW
from cuvee.codec.stages.compiled.coder_steps import (
    decode_alike_steps,
    decode_steps,
    encode_alike_step,
    encode_step,
    lookup_step,
)
from cuvee.codec.stages.compiled.compiler import inlined, inner
from cuvee.codec.stages.compiled.simd import WIDTH

FLIGHT = 8  # groups that take turns: enough to hide latency, few enough to stay in the first cache

# Fields of `sections` below.
WORDS = 0  # the byte at which the coded words begin; four bytes before them can be read
COUNT = 1  # the number of words
CLASSES = 2  # where the classes of the columns begin
OUT = 3  # where the planes begin
COLUMNS = 4  # how long a plane is
PLANES = 5  # where the number of planes of each class begins
TABLES = 6  # where the tables of the planes of each class begin
STRIDE = 7  # tables per class there
SECTION_FIELDS = 8

# Fields of `groups` below.
SECTION = 0
STREAM = 1  # the first lane's stream
FIRST = 2  # the first lane's column in the first row
LANES = 3
ROW = 4  # from a row to the next: the streams of the window
END = 5  # the first column after the window
GROUP_FIELDS = 6

# Fields of a group that is being decoded. Its lanes have 16 entries in each array of states, words and tables.
_GROUP, _COLUMN, _PLANE, _STOP, _ACTIVE, _ALIKE, _TABLE, _TO, _STEP, _WORDS, _COUNT = range(11)
_SLOT_FIELDS = 11

_INITIAL = np.uint32(1 << 16)
_LINE = 32  # words in a line of the cache


@inner
def list_groups(section, stream, columns, per_stream, groups, at):  # type: ignore[no-untyped-def]
    """List a section's groups, the first stream being `stream`, in `groups` from row `at` on; return the next row."""
    for begin in range(0, columns, WINDOW):
        size = min(WINDOW, columns - begin)
        count = (size + per_stream - 1) // per_stream
        for lane in range(0, count, WIDTH):
            groups[at, SECTION] = section
            groups[at, STREAM] = stream + lane
            groups[at, FIRST] = begin + lane
            groups[at, LANES] = min(WIDTH, count - lane)
            groups[at, ROW] = count
            groups[at, END] = begin + size
            at += 1
        stream += count
    return at


@inner
def _load(slot, q, g, groups, sections, states, starts, x, at):  # type: ignore[no-untyped-def]
    slot[q, _GROUP] = g
    slot[q, _COLUMN] = groups[g, FIRST]
    slot[q, _PLANE] = slot[q, _STOP] = 0
    s = groups[g, SECTION]
    slot[q, _STEP], slot[q, _WORDS], slot[q, _COUNT] = sections[s, COLUMNS], sections[s, WORDS], sections[s, COUNT]
    stream = groups[g, STREAM]
    for lane in range(groups[g, LANES]):
        x[q * WIDTH + lane] = states[stream + lane]
        at[q * WIDTH + lane] = starts[stream + lane]


@inner
def _next_planes(slot, q, groups, sections, classes, planes, of_class):  # type: ignore[no-untyped-def]
    """Find the next planes of a group with the same lanes; return False if none are left."""
    g = slot[q, _GROUP]
    s = groups[g, SECTION]
    column_class = classes[sections[s, CLASSES] :]
    depth = planes[sections[s, PLANES] :]
    while slot[q, _COLUMN] < groups[g, END]:
        column, plane = slot[q, _COLUMN], slot[q, _PLANE]
        # Classes rise from lane to lane and their planes fall, so the lanes that go on come first.
        lanes = min(groups[g, LANES], groups[g, END] - column)
        while lanes and depth[column_class[column + lanes - 1]] <= plane:
            lanes -= 1
        if lanes:
            slot[q, _ACTIVE] = lanes
            slot[q, _STOP] = depth[column_class[column + lanes - 1]]
            slot[q, _ALIKE] = column_class[column] == column_class[column + lanes - 1]
            slot[q, _TABLE] = sections[s, TABLES]
            if slot[q, _ALIKE]:
                slot[q, _TABLE] += column_class[column] * sections[s, STRIDE]
            for lane in range(WIDTH):  # inactive lanes look up the first lane's table
                of_class[q * WIDTH + lane] = column_class[column + (lane if lane < lanes else 0)] * sections[s, STRIDE]
            slot[q, _TO] = sections[s, OUT] + plane * sections[s, COLUMNS] + column
            return True
        slot[q, _COLUMN] += groups[g, ROW]
        slot[q, _PLANE] = 0
    return False


@inner
def _bad_stream(slot, q, groups, ends, x, at):  # type: ignore[no-untyped-def]
    """Return a damaged stream of a finished group, or -1: streams end in the initial state with all words read."""
    g = slot[q, _GROUP]
    for lane in range(groups[g, LANES]):
        stream = groups[g, STREAM] + lane
        if x[q * WIDTH + lane] != _INITIAL or at[q * WIDTH + lane] != ends[stream]:
            return stream
    return -1


def _plane_decoder(step: Any, alike_step: Any) -> Any:
    """Make the function that decodes one plane of each group in flight."""

    @inlined
    def decode_planes(slot, flying, x, at, ahead, base, of_class, spare, data, tables, slots, out):  # type: ignore[no-untyped-def]
        for q in range(np.uint64(flying)):
            fields = slot[q]
            plane, active, to, first = fields[_PLANE], fields[_ACTIVE], fields[_TO], q * np.uint64(WIDTH)
            words, count = fields[_WORDS], fields[_COUNT]
            if fields[_ALIKE]:
                table = tables[np.uint64(fields[_TABLE] + plane)]
                if active == WIDTH:
                    alike_step(x, at, ahead, first, table, slots, data, words, count, active, out, to)
                else:
                    alike_step(x, at, ahead, first, table, slots, data, words, count, active, spare, 0)
            else:
                lookup_step(tables, fields[_TABLE] + plane, of_class, first, base)
                if active == WIDTH:
                    step(x, at, ahead, first, base, slots, data, words, count, active, out, to)
                else:
                    step(x, at, ahead, first, base, slots, data, words, count, active, spare, 0)
            for lane in range(active if active < WIDTH else 0):
                out[to + lane] = spare[lane]
            fields[_PLANE] = plane + 1
            fields[_TO] = to + fields[_STEP]

    return decode_planes


_decode_first, _decode_second = (
    _plane_decoder(step, alike_step) for step, alike_step in zip(decode_steps, decode_alike_steps, strict=True)
)


@inner
def decode_lanes(groups, sections, states, starts, ends, data, classes, planes, tables, slots, out):  # type: ignore[no-untyped-def]
    """Decode groups of streams.

    Args:
        groups: int64 `[G, 6]`, the fields named above; see `list_groups`.
        sections: int64 `[S, 8]`, the fields named above.
        states: uint32, the first state of each stream.
        starts: uint32, the first word of each stream, counted from its section's first word.
        ends: uint32, the word after the stream's last.
        data: uint8, holds the words.
        classes: uint8, the class of each column of each section, rising within windows.
        planes: int32, planes of a column of each class, falling from class to class.
        tables: uint32, where in `slots` the table of each plane begins.
        slots: uint32, decode tables, see `EntropyTables.slots`.
        out: uint8, receives the planes. Bytes below a column's last plane are not written.

    Returns:
        -1, or the number of a damaged stream.
    """
    x = np.zeros(FLIGHT * WIDTH, np.uint32)
    at = np.zeros(FLIGHT * WIDTH, np.uint32)
    ahead = np.empty(FLIGHT * WIDTH, np.uint32)
    base = np.zeros(FLIGHT * WIDTH, np.uint32)
    of_class = np.zeros(FLIGHT * WIDTH, np.uint32)  # where the tables of each lane's class begin
    spare = np.empty(WIDTH, np.uint8)
    slot = np.zeros((FLIGHT, _SLOT_FIELDS), np.int64)
    q: Any  # mypy takes Numba's integers for Python's
    flying = following = np.int64(0)
    while True:
        q = np.int64(0)
        while q < flying or (q < FLIGHT and following < len(groups)):
            if q == flying:
                _load(slot, q, following, groups, sections, states, starts, x, at)
                following += 1
                flying += 1
            while slot[q, _PLANE] == slot[q, _STOP] and not _next_planes(
                slot, q, groups, sections, classes, planes, of_class
            ):
                bad = _bad_stream(slot, q, groups, ends, x, at)
                if bad >= 0:
                    return bad
                if following < len(groups):
                    _load(slot, q, following, groups, sections, states, starts, x, at)
                    following += 1
                    continue
                flying -= 1
                if q == flying:
                    break
                for field in range(_SLOT_FIELDS):
                    slot[q, field] = slot[flying, field]
                for lane in range(WIDTH):
                    x[q * WIDTH + lane] = x[flying * WIDTH + lane]
                    at[q * WIDTH + lane] = at[flying * WIDTH + lane]
                    of_class[q * WIDTH + lane] = of_class[flying * WIDTH + lane]
            q += 1
        if not flying:
            return -1
        steps = slot[0, _STOP] - slot[0, _PLANE]
        for q in range(1, flying):
            steps = min(steps, slot[q, _STOP] - slot[q, _PLANE])
        pairs = steps // 2
        for pair in range(pairs + steps % 2):
            _decode_first(slot, flying, x, at, ahead, base, of_class, spare, data, tables, slots, out)
            if pair < pairs:
                _decode_second(slot, flying, x, at, ahead, base, of_class, spare, data, tables, slots, out)


# Fields of a group that is being encoded.
_BACK_GROUP, _BACK_COLUMN, _BACK_PLANE, _BACK_STOP, _BACK_ACTIVE, _BACK_ALIKE = range(6)
_BACK_TABLE, _BACK_TO, _BACK_STEP = range(6, 9)
_BACK_FIELDS = 9


@inner
def _start(slot, q, g, groups, capacity, x, at):  # type: ignore[no-untyped-def]
    """Begin a group at its last row."""
    slot[q, _BACK_GROUP] = g
    rows = (groups[g, END] - groups[g, FIRST] + groups[g, ROW] - 1) // groups[g, ROW]
    slot[q, _BACK_COLUMN] = groups[g, FIRST] + rows * groups[g, ROW]  # the row before is the first to be coded
    slot[q, _BACK_PLANE] = slot[q, _BACK_STOP] = 0
    for lane in range(WIDTH):
        x[q * WIDTH + lane] = _INITIAL
        at[q * WIDTH + lane] = (q * WIDTH + lane) * capacity


@inner
def _planes_before(slot, q, groups, sections, classes, planes, of_class):  # type: ignore[no-untyped-def]
    """Find the preceding planes with the same lanes; return False if none are left."""
    g = slot[q, _BACK_GROUP]
    s = groups[g, SECTION]
    column_class = classes[sections[s, CLASSES] :]
    depth = planes[sections[s, PLANES] :]
    while True:
        plane, column = slot[q, _BACK_PLANE], slot[q, _BACK_COLUMN]
        if plane == 0:  # the row before, from its last plane
            column -= groups[g, ROW]
            if column < groups[g, FIRST]:
                return False
            slot[q, _BACK_COLUMN] = column
            plane = slot[q, _BACK_PLANE] = slot[q, _BACK_STOP] = np.int64(depth[column_class[column]])
            if plane == 0:
                continue
        lanes = min(groups[g, LANES], groups[g, END] - column)
        while depth[column_class[column + lanes - 1]] < plane:
            lanes -= 1
        # Down to where the next lane joins in.
        more = lanes < min(groups[g, LANES], groups[g, END] - column)
        slot[q, _BACK_STOP] = depth[column_class[column + lanes]] if more else 0
        slot[q, _BACK_ACTIVE] = lanes
        slot[q, _BACK_ALIKE] = column_class[column] == column_class[column + lanes - 1]
        slot[q, _BACK_TABLE] = sections[s, TABLES]
        if slot[q, _BACK_ALIKE]:
            slot[q, _BACK_TABLE] += column_class[column] * sections[s, STRIDE]
        slot[q, _BACK_STEP] = sections[s, COLUMNS]
        slot[q, _BACK_TO] = sections[s, OUT] + plane * sections[s, COLUMNS] + column  # of the plane coded before
        for lane in range(WIDTH):  # inactive lanes look up the first lane's table
            of_class[q * WIDTH + lane] = column_class[column + (lane if lane < lanes else 0)] * sections[s, STRIDE]
        return True


@inner
def encode_lanes(  # type: ignore[no-untyped-def]
    groups, sections, data, classes, planes, tables, coders, capacity, spare, log, states, lengths, begins
):  # fmt: skip
    """Encode groups of streams; the inverse of `decode_lanes`.

    Args:
        groups: as for `decode_lanes`.
        sections: as for `decode_lanes`; `WORDS` and `COUNT` are not read.
        data: uint8, the planes. 16 bytes more can be read.
        classes: as for `decode_lanes`.
        planes: as for `decode_lanes`.
        tables: uint32, where in `coders` the table of each plane begins.
        coders: uint32, see `EntropyTables.coders`.
        capacity: more than the most words that a stream can have, see `lane_capacity`.
        spare: uint16 `[FLIGHT * 16 * capacity]`.
        log: uint16, receives the words of all streams, in the order in which the streams end.
        states: uint32, receives the state of each stream.
        lengths: uint32, receives the number of words of each stream.
        begins: int64, receives where each stream's words begin in `log`.
    """
    x = np.zeros(FLIGHT * WIDTH, np.uint32)
    at = np.zeros(FLIGHT * WIDTH, np.uint32)
    base = np.zeros(FLIGHT * WIDTH, np.uint32)
    of_class = np.zeros(FLIGHT * WIDTH, np.uint32)  # where the tables of each lane's class begin
    slot = np.zeros((FLIGHT, _BACK_FIELDS), np.int64)
    q: Any  # mypy takes Numba's integers for Python's
    flying = following = np.int64(0)
    logged = 0
    while True:
        q = np.int64(0)
        while q < flying or (q < FLIGHT and following < len(groups)):
            if q == flying:
                _start(slot, q, following, groups, capacity, x, at)
                following += 1
                flying += 1
            while slot[q, _BACK_PLANE] == slot[q, _BACK_STOP] and not _planes_before(
                slot, q, groups, sections, classes, planes, of_class
            ):
                g = slot[q, _BACK_GROUP]
                for lane in range(groups[g, LANES]):
                    stream = groups[g, STREAM] + lane
                    first = (q * WIDTH + lane) * capacity
                    count = np.int64(at[q * WIDTH + lane]) - first
                    states[stream], lengths[stream], begins[stream] = x[q * WIDTH + lane], count, logged
                    for i in range(count):  # a decoder reads words in reverse order of coding
                        log[logged + i] = spare[first + count - 1 - i]
                    logged += count
                if following < len(groups):
                    _start(slot, q, following, groups, capacity, x, at)
                    following += 1
                    continue
                flying -= 1
                if q == flying:
                    break
                for field in range(_BACK_FIELDS):
                    slot[q, field] = slot[flying, field]
                for lane in range(WIDTH):
                    x[q * WIDTH + lane] = x[flying * WIDTH + lane]
                    of_class[q * WIDTH + lane] = of_class[flying * WIDTH + lane]
                    first = (q * WIDTH + lane) * capacity
                    other = (flying * WIDTH + lane) * capacity
                    count = np.int64(at[flying * WIDTH + lane]) - other
                    for i in range(count):
                        spare[first + i] = spare[other + i]
                    at[q * WIDTH + lane] = first + count
            q += 1
        if not flying:
            return
        steps = slot[0, _BACK_PLANE] - slot[0, _BACK_STOP]
        for q in range(1, flying):
            steps = min(steps, slot[q, _BACK_PLANE] - slot[q, _BACK_STOP])
        for _ in range(steps):
            for q in range(np.uint64(flying)):
                fields = slot[q]
                plane, active, first = fields[_BACK_PLANE] - 1, fields[_BACK_ACTIVE], q * np.uint64(WIDTH)
                to = fields[_BACK_TO] - fields[_BACK_STEP]
                if fields[_BACK_ALIKE]:
                    table = tables[np.uint64(fields[_BACK_TABLE] + plane)]
                    if active == WIDTH:
                        encode_alike_step(x, at, first, table, data, to, coders, WIDTH, spare)
                    else:
                        encode_alike_step(x, at, first, table, data, to, coders, active, spare)
                else:
                    lookup_step(tables, fields[_BACK_TABLE] + plane, of_class, first, base)
                    encode_step(x, at, first, base, data, to, coders, active, spare)
                fields[_BACK_PLANE], fields[_BACK_TO] = plane, to


def lane_capacity(most: int) -> int:
    """Return the words that `encode_lanes` reserves for a lane whose stream has at most `most` words.

    This is an odd number of cache lines. Lanes a multiple of 4 KB apart would have their next words in the same few
    sets of the first cache, which then would not hold all of them.
    """
    return (most // _LINE + 1 | 1) * _LINE


@inner
def collect_words(log, begins, lengths, words):  # type: ignore[no-untyped-def]
    """Collect the words of all streams in the order of the streams; return how many there are."""
    filled = np.int64(0)
    for stream in range(len(lengths)):
        count = np.int64(lengths[stream])
        for i in range(count):
            words[filled + i] = log[begins[stream] + i]
        filled += count
    return filled

"""Decode the streams of sections whose tokens have no classes, in compiled loops."""

from __future__ import annotations

import numpy as np

from cuvee.codec.entropy.streams import MAX_TOKENS_PER_STREAM
from cuvee.codec.stages.compiled import coded_part as part
from cuvee.codec.stages.compiled import lanes
from cuvee.codec.stages.compiled.coded_part import read_u32
from cuvee.codec.stages.compiled.compiler import compiled
from cuvee.codec.stages.compiled.fetching import fetch
from cuvee.codec.stages.compiled.lanes import decode_lanes, list_groups
from cuvee.codec.stages.compiled.token_order import deal


@compiled
def decode_several(  # type: ignore[no-untyped-def]
    data, words_at, first_word, start, stop, found, planes, tables, first_table, slots, bits, out, out_at, columns
):
    """Decode a tile's planes of several sections together, so that the CPU always has streams to turn to.

    Args:
        data: uint8, holds the words, behind the states of their streams.
        words_at: uint32, of each section where the words of its streams begin, and where the last end.
        first_word: int64 `[S]`, where those of each section begin.
        start: the first token.
        stop: the token after the last.
        found: int64 `[S, …]`, begins with the fields of `coded_part`; zeros for a section without streams.
        planes: int64 `[S]`, planes per token.
        tables: uint32, where in `slots` the table of each plane begins, for one section after the other.
        first_table: int64 `[S]`, where those of each section begin.
        slots: uint32, decode tables, see `EntropyTables.slots`.
        bits: probability bits of the tables.
        out: uint8, receives the planes `[planes, columns]` of each section.
        out_at: int64 `[S]`, where those of each section begin.
        columns: int64 `[S]`, receives the columns of each section: tokens are dealt to streams as `deal` has it.

    Returns:
        -1 and 0, or the section with a damaged stream, and the number of that stream.
    """
    count, width = len(found), stop - start
    most = width + MAX_TOKENS_PER_STREAM - 1  # columns
    order, dealt = np.empty(most, np.int64), np.empty((count, most), np.uint8)
    streams = np.zeros(count + 1, np.int64)
    for i in range(count):
        log2 = found[i, part.LOG2]
        columns[i] = deal(width, np.int64(1) << log2, order, dealt[i])
        of_section = ((stop + (1 << log2) - 1) >> log2) - (start >> log2)
        streams[i + 1] = streams[i] + (of_section if found[i, part.STATES] else np.int64(0))
    states = np.empty(streams[count], np.uint32)
    starts, ends = np.empty(streams[count], np.uint32), np.empty(streams[count], np.uint32)
    groups = np.empty((streams[count], lanes.GROUP_FIELDS), np.int64)
    fields = np.zeros((count, lanes.SECTION_FIELDS), np.int64)
    depth = np.zeros(2 * count, np.int32)  # a column with a token has all planes, one without has none: see `deal`
    listed = np.int64(0)
    for i in range(count if len(states) else 0):
        if not found[i, part.STATES]:
            continue
        log2 = found[i, part.LOG2]
        first = start >> log2
        for j in range(streams[i + 1] - streams[i]):
            states[streams[i] + j] = read_u32(data, found[i, part.STATES] + 4 * (first + j))
            starts[streams[i] + j] = words_at[first_word[i] + first + j]
            ends[streams[i] + j] = words_at[first_word[i] + first + j + 1]
        fields[i, lanes.WORDS], fields[i, lanes.COUNT] = found[i, part.WORDS], found[i, part.COUNT]
        fields[i, lanes.CLASSES], fields[i, lanes.OUT] = i * dealt.shape[1], out_at[i]
        fields[i, lanes.COLUMNS], fields[i, lanes.PLANES] = columns[i], 2 * i
        fields[i, lanes.TABLES] = first_table[i]
        words = found[i, part.WORDS]
        fetch(data, words + 2 * np.int64(starts[streams[i]]), words + 2 * np.int64(ends[streams[i + 1] - 1]))
        depth[2 * i] = planes[i]
        listed = list_groups(i, streams[i], columns[i], 1 << log2, columns[i], groups, listed)
    bad = decode_lanes(
        groups[:listed], fields, states, starts, ends, data, dealt.reshape(dealt.size), depth, tables, slots, bits, out
    )
    if bad < 0:
        return np.int64(-1), np.int64(0)
    damaged = np.int64(0)
    while streams[damaged + 1] <= bad:
        damaged += 1
    return damaged, (start >> found[damaged, part.LOG2]) + bad - streams[damaged]

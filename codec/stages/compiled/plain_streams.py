"""Decode the streams of a section whose tokens have no classes, in compiled loops."""

from __future__ import annotations

import numpy as np

from cuvee.codec.stages.compiled import coded_part as part
from cuvee.codec.stages.compiled import lanes
from cuvee.codec.stages.compiled.coded_part import read_u32
from cuvee.codec.stages.compiled.compiler import compiled
from cuvee.codec.stages.compiled.lanes import decode_lanes, list_groups
from cuvee.codec.stages.compiled.token_order import ABSENT, deal


@compiled
def stream_words(data, found, tokens):  # type: ignore[no-untyped-def]
    """Return the word at which each stream of a part begins, and the word after the last stream's."""
    words_at = np.empty(((tokens + (1 << found[part.LOG2]) - 1) >> found[part.LOG2]) + 1, np.uint32)
    part.list_words(data, found, words_at)
    return words_at


@compiled
def decode_planes(  # type: ignore[no-untyped-def]
    data, words_at, start, stop, found, planes, tables, slots, bits, order, out, problem
):
    """Decode the planes of a tile; return their number of columns, or -1 for a damaged stream.

    Args:
        data: uint8, holds the words, and four bytes after them.
        words_at: uint32, the result of `stream_words`.
        start: the first token.
        stop: the token after the last.
        found: int64, the fields of `coded_part`.
        planes: planes per token.
        tables: uint32, where in `slots` the table of each plane begins.
        slots: uint32, decode tables, see `EntropyTables.slots`.
        bits: probability bits of the tables.
        order: int64 `[tokens + MAX_TOKENS_PER_STREAM - 1]`, receives the token of each column, counted from `start`;
            -1 for none.
        out: uint8, receives the planes `[planes, columns]`; undefined in a column without a token.
        problem: int64 `[1]`, receives the number of a damaged stream.
    """
    log2 = found[part.LOG2]
    width = stop - start
    first, end = start >> log2, (stop + (1 << log2) - 1) >> log2
    states = np.empty(end - first, np.uint32)
    for stream in range(first, end):
        states[stream - first] = read_u32(data, found[part.STATES] + 4 * stream)
    columns = np.empty(len(order), np.uint8)
    column = deal(width, 1 << log2, order, columns)
    fields = np.zeros((1, lanes.SECTION_FIELDS), np.int64)
    fields[0, lanes.WORDS], fields[0, lanes.LAST] = found[part.WORDS], found[part.COUNT]
    fields[0, lanes.COLUMNS] = column
    depth = np.zeros(ABSENT + 1, np.int32)
    depth[:ABSENT] = planes
    groups = np.empty((end - first, lanes.GROUP_FIELDS), np.int64)
    listed = list_groups(np.int64(0), np.int64(0), column, 1 << log2, column, groups, np.int64(0))
    bad = decode_lanes(
        groups[:listed], fields, states, words_at[first:end], words_at[first + 1 : end + 1], data, columns, depth,
        tables, slots, bits, out,
    )  # fmt: skip
    if bad >= 0:
        problem[0] = first + bad
        return -1
    return column

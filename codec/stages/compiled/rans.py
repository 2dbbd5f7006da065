"""Interleaved rANS, compiled: the same bytes as `reference/rans.py`."""

from __future__ import annotations

import numpy as np

from cuvee.codec.entropy.streams import Streams, check_streams, stream_count, stream_error
from cuvee.codec.entropy.tables import SYMBOLS, EntropyTables
from cuvee.codec.stages.compiled import lanes
from cuvee.codec.stages.compiled.arena import Arena
from cuvee.codec.stages.compiled.compiler import compiled
from cuvee.codec.stages.compiled.lanes import (
    FLIGHT,
    collect_words,
    decode_lanes,
    encode_lanes,
    lane_capacity,
    list_groups,
)
from cuvee.codec.stages.compiled.simd import WIDTH
from cuvee.codec.stages.compiled.token_order import ABSENT, deal
from cuvee.codec.support.arrays import U8, U16

_arena = Arena()
_BEFORE = 4  # bytes that may be read before the first word


@compiled
def _encode(  # type: ignore[no-untyped-def]
    symbols, which, coders, prob_bits, n, capacity, dealt, spare, log, states, lengths, words
):  # fmt: skip
    """Bring symbols into the order of columns that `lanes.py` codes, and code them; return the number of words."""
    steps, tokens = symbols.shape
    count = len(states)
    columns = np.empty(count * n, np.uint8)
    column = deal(tokens, n, np.empty(count * n, np.int64), columns)
    for c in range(steps):
        source, target = symbols[c], dealt[c * column : (c + 1) * column]
        if n == 1:
            for i in range(tokens):
                target[i] = source[i]
            continue
        for j in range(n):
            of_row = target[j * count : (j + 1) * count]
            for s in range((tokens - j + n - 1) // n):
                of_row[s] = source[s * n + j]
    tables = np.empty(steps, np.uint32)
    for c in range(steps):
        tables[c] = np.uint32(which[c]) * np.uint32(SYMBOLS)
    depth = np.zeros(ABSENT + 1, np.int32)
    depth[:ABSENT] = steps
    fields = np.zeros((1, lanes.SECTION_FIELDS), np.int64)
    fields[0, lanes.COLUMNS] = column
    groups = np.empty((count, lanes.GROUP_FIELDS), np.int64)
    listed = list_groups(np.int64(0), np.int64(0), column, n, column, groups, np.int64(0))
    begins = np.empty(count, np.int64)
    encode_lanes(
        groups[:listed], fields, dealt, columns, depth, tables, coders, prob_bits, capacity, spare, log, states,
        lengths, begins,
    )  # fmt: skip
    return collect_words(log, begins, lengths, words)


@compiled
def _decode(states, starts, ends, words, which, slots, prob_bits, n, out):  # type: ignore[no-untyped-def]
    """Decode into columns as `lanes.py` fills them, and bring the columns into the order of the tokens."""
    steps, tokens = out.shape
    count = len(states)
    columns = np.empty(count * n, np.uint8)
    column = deal(tokens, n, np.empty(count * n, np.int64), columns)
    tables = np.empty(steps, np.uint32)
    for c in range(steps):
        tables[c] = np.uint32(which[c]) << np.uint32(prob_bits)
    depth = np.zeros(ABSENT + 1, np.int32)
    depth[:ABSENT] = steps
    fields = np.zeros((1, lanes.SECTION_FIELDS), np.int64)
    fields[0, lanes.WORDS], fields[0, lanes.COUNT] = _BEFORE, (len(words) - _BEFORE) // 2
    fields[0, lanes.COLUMNS] = column
    groups = np.empty((count, lanes.GROUP_FIELDS), np.int64)
    listed = list_groups(np.int64(0), np.int64(0), column, n, column, groups, np.int64(0))
    dealt = np.empty(steps * column + WIDTH, np.uint8)
    bad = decode_lanes(
        groups[:listed], fields, states, starts, ends, words, columns, depth, tables, slots, prob_bits, dealt
    )
    if bad < 0:
        for c in range(steps):
            source, target = dealt[c * column : (c + 1) * column], out[c]
            at = 0
            for j in range(n):
                of_row = source[at : at + count]
                for s in range((tokens - j + n - 1) // n):
                    target[s * n + j] = of_row[s]
                at += count
    return bad


def rans_encode(symbols: U8, which: U16, tables: EntropyTables, tokens_per_stream: int) -> Streams:
    """See `cuvee.codec.stages.reference.rans.rans_encode`: the same arguments, the same bytes."""
    steps, tokens = symbols.shape
    count = stream_count(tokens, tokens_per_stream)
    states, lengths = np.empty(count, np.uint32), np.empty(count, np.uint32)
    columns = count * tokens_per_stream
    words = _arena.array("words", steps * tokens, np.uint16)  # a bound: at most one word per symbol
    capacity = lane_capacity(steps * tokens_per_stream)
    filled = _encode(
        symbols, which, tables.coders.reshape(-1), tables.prob_bits, tokens_per_stream, capacity,
        _arena.array("dealt", steps * columns + WIDTH, np.uint8),
        _arena.array("spare", FLIGHT * WIDTH * capacity + 1, np.uint16),
        _arena.array("log", steps * tokens, np.uint16), states, lengths, words,
    )  # fmt: skip
    return Streams(states, lengths, words[:filled].copy())


def rans_decode(streams: Streams, which: U16, tables: EntropyTables, tokens_per_stream: int, tokens: int) -> U8:
    """See `cuvee.codec.stages.reference.rans.rans_decode`: the same arguments, result and errors."""
    check_streams(streams, tokens_per_stream, tokens)
    out = np.empty((len(which), tokens), np.uint8)
    ends = np.cumsum(streams.lengths, dtype=np.uint32)
    words = np.frombuffer(b"".join((bytes(_BEFORE), streams.words.astype("<u2", copy=False).tobytes())), np.uint8)
    bad = _decode(
        streams.states, ends - streams.lengths, ends, words, which, tables.slots.reshape(-1), tables.prob_bits,
        tokens_per_stream, out,
    )  # fmt: skip
    if bad >= 0:
        raise stream_error(int(bad), len(ends))
    return out

"""Interleaved rANS, the reference implementation: plain NumPy, with every step visible. It is the specification.

    state x in [2**16, 2**32), words of 16 bits, tables that add up to 2**12   (Duda, arXiv 1311.2540)

    encode a symbol with frequency f, cumulative c      decode a symbol
      if x >= f << 20:                                    slot = x mod 2**12
          emit x mod 2**16;  x >>= 16                     find s with c[s] <= slot < c[s] + f[s]
      x = (x div f) << 12 | (x mod f) + c                 x = f[s] * (x >> 12) + slot - c[s]
                                                          if x < 2**16:  x = x << 16 | next word

At most one word moves per symbol, in both directions. After one word has moved the state is back in its range, since
tables have fewer than 16 bits. The encoder walks the symbols backwards, so that the decoder reads words forwards.

**Streams.** The symbols form a matrix `[P, T]`, a column per token in the order of `token_order.py`: sorted by class
within windows of 256. A column of class k has only the first `planes[k]` steps, and step c uses the table
`tables[k, c]`. Columns are dealt out to streams in rows: with S streams for a window of t columns, stream s holds the
columns s, s + S, … of the window, one after the other, each from its first step to its last. Any run of windows can be
decoded alone.

For the decoder every stream ends in state 2**16 with all of its words read. Anything else means damaged bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from cuvee.codec.entropy.tables import PROB_BITS, TOTAL, EntropyTables
from cuvee.codec.entropy.token_classes import ColumnPlan, SectionPlanes, one_class
from cuvee.codec.errors import CorruptError
from cuvee.codec.format import rules
from cuvee.codec.format.rules import rule_error
from cuvee.codec.format.streams import LOWER_BOUND, WORD_BITS, Streams, stream_count, windows
from cuvee.codec.support.arrays import U8


def stream_rows(tokens: int, tokens_per_stream: int) -> Iterator[tuple[slice, slice]]:
    """Yield the streams and the columns of each row of each window, in order; one column per stream."""
    for window in windows(0, tokens):
        count = stream_count(window.stop - window.start, tokens_per_stream)
        first = window.start // tokens_per_stream
        for column in range(window.start, window.stop, count):
            width = min(count, window.stop - column)
            yield slice(first, first + width), slice(column, column + width)


def rans_encode(sections: Sequence[SectionPlanes], tables: EntropyTables) -> list[Streams]:
    """See `cuvee.codec.stages.compiled.rans.rans_encode`."""
    return [_encode(section, tables) for section in sections]


def _encode(section: SectionPlanes, tables: EntropyTables) -> Streams:
    planes, plan, tokens = section.planes, section.plan, len(section.columns)
    count = stream_count(tokens, section.tokens_per_stream)
    freq, cumulative = tables.freq.astype(np.uint64), tables.cumulative.astype(np.uint64)
    state = np.full(count, LOWER_BOUND, dtype=np.uint64)
    words: list[list[int]] = [[] for _ in range(count)]
    for streams, columns in reversed(list(stream_rows(tokens, section.tokens_per_stream))):
        own = section.columns[columns]
        for step in range(int(plan.planes[own].max(initial=0)) - 1, -1, -1):
            lanes = np.flatnonzero(plan.planes[own] > step)
            table, symbol = plan.tables[own[lanes], step], planes[step, columns][lanes]
            f, low = freq[table, symbol], cumulative[table, symbol]
            at = lanes + streams.start
            x = state[at]
            full = x >= f << np.uint64(32 - PROB_BITS)
            for stream in at[full]:
                words[stream].append(int(state[stream]) & 0xFFFF)
            x = np.where(full, x >> np.uint64(WORD_BITS), x)
            state[at] = (x // f << np.uint64(PROB_BITS)) + x % f + low
    lengths = np.array([len(w) for w in words], dtype=np.uint32)
    flat = np.array([word for w in words for word in reversed(w)], dtype=np.uint16)
    return Streams(state.astype(np.uint32), lengths, flat)


def check_streams(streams: Streams, tokens_per_stream: int, tokens: int) -> None:
    """Raise CorruptError unless the parts of `streams` agree with each other and with the number of tokens."""
    count = stream_count(tokens, tokens_per_stream)
    if len(streams.states) != count or len(streams.lengths) != count:
        raise CorruptError(f"{tokens} tokens need {count} entropy-coded streams, there are {len(streams.states)}")
    if int(streams.lengths.sum(dtype=np.uint64)) != len(streams.words):
        raise CorruptError("the lengths of the entropy-coded streams do not add up to their words")


def rans_decode(streams: Streams, columns: U8, plan: ColumnPlan, tables: EntropyTables, tokens_per_stream: int) -> U8:
    """Invert `rans_encode` for one section, whose other arguments are those of its `SectionPlanes`.

    Returns:
        `[P, T]` uint8, where P is the number of planes of the finest class; zero below a column's last plane.

    Raises:
        CorruptError: a stream did not end in the initial state with all of its words read.
    """
    tokens = len(columns)
    check_streams(streams, tokens_per_stream, tokens)
    out = np.zeros((plan.tables.shape[1], tokens), dtype=np.uint8)
    state = streams.states.astype(np.uint64)
    end = np.cumsum(streams.lengths, dtype=np.int64)
    at = end - streams.lengths
    for lanes, row in stream_rows(tokens, tokens_per_stream):
        own = columns[row]
        for step in range(int(plan.planes[own].max(initial=0))):
            active = np.flatnonzero(plan.planes[own] > step)
            stream = active + lanes.start
            x = state[stream]
            low = (x & np.uint64(TOTAL - 1)).astype(np.int64)
            slot = tables.slots[plan.tables[own[active], step], low].astype(np.uint64)
            out[step, active + row.start] = slot >> np.uint64(24)
            x = (slot >> np.uint64(12) & np.uint64(0xFFF)) * (x >> np.uint64(PROB_BITS)) + (slot & np.uint64(0xFFF))
            need = x < LOWER_BOUND
            # A damaged stream may ask for more words than it has. It gets zeros, and the check below finds it.
            inside = need & (at[stream] < end[stream])
            word = np.zeros(len(stream), dtype=np.uint64)
            word[inside] = streams.words[at[stream[inside]]]
            state[stream] = np.where(need, x << np.uint64(WORD_BITS) | word, x)
            at[stream] += need
    bad = np.flatnonzero((state != LOWER_BOUND) | (at != end))
    if bad.size:
        raise rule_error(rules.STREAM, int(bad[0]), len(end))
    return out


def encode_classes(classes: U8, table: EntropyTables) -> Streams:
    """See `cuvee.codec.stages.compiled.rans.encode_classes`."""
    plan = one_class(np.zeros(len(classes), np.uint16))
    return _encode(SectionPlanes(classes[:, None], np.zeros(1, np.uint8), plan, 1), table)


def decode_classes(stream: Streams, table: EntropyTables, tokens: int) -> U8:
    """Invert `encode_classes`.

    Raises:
        CorruptError: the stream does not end in the initial state with all of its words read.
    """
    plan = one_class(np.zeros(tokens, np.uint16))
    try:
        return rans_decode(stream, np.zeros(1, np.uint8), plan, table, 1)[:, 0]
    except CorruptError as error:
        raise rule_error(rules.CLASS_STREAM) from error

"""The entropy coder for tokens with classes, the reference: the coder of `rans.py` in plain NumPy.

If the tokens of a section have classes, its planes are a matrix `[P, T]` in the order of `token_order.py`: columns
sorted by class within windows. A column of class k has only the first `planes[k]` steps, and step c uses the table
`tables[k, c]`. Columns are dealt out to streams in rows: with S streams for a window of t columns, stream s holds the
columns s, s + S, … of the window, one after the other, each from its first step to its last.

The coder itself, its bounds and its final state are those of `rans.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cuvee.codec.entropy.streams import LOWER_BOUND, WORD_BITS, Streams, check_streams, stream_count, stream_error
from cuvee.codec.entropy.tables import EntropyTables
from cuvee.codec.entropy.token_classes import ClassedPlan, windows
from cuvee.codec.errors import CorruptError
from cuvee.codec.stages.reference.rans import rans_decode, rans_encode
from cuvee.codec.support.arrays import U8


def stream_rows(tokens: int, tokens_per_stream: int) -> Iterator[tuple[slice, slice]]:
    """Yield the streams and the columns of each row of each window, in order; one column per stream."""
    for window in windows(0, tokens):
        count = stream_count(window.stop - window.start, tokens_per_stream)
        first = window.start // tokens_per_stream
        for column in range(window.start, window.stop, count):
            width = min(count, window.stop - column)
            yield slice(first, first + width), slice(column, column + width)


def rans_encode_classes(
    planes: U8, classes: U8, plan: ClassedPlan, tables: EntropyTables, tokens_per_stream: int
) -> Streams:
    """Encode planes `[P, T]` uint8 whose columns have the given classes.

    Args:
        planes: column t holds `plan.planes[classes[t]]` bytes; bytes below are not read.
        classes: `[T]` uint8, the class of each column, rising within each window.
        plan: the section's plan.
        tables: the family that `plan.tables` indexes.
        tokens_per_stream: n; a power of two, at most 128.
    """
    tokens = len(classes)
    count = stream_count(tokens, tokens_per_stream)
    freq, cumulative = tables.freq.astype(np.uint64), tables.cumulative.astype(np.uint64)
    bits = np.uint64(tables.prob_bits)
    state = np.full(count, LOWER_BOUND, dtype=np.uint64)
    words: list[list[int]] = [[] for _ in range(count)]
    for streams, columns in reversed(list(stream_rows(tokens, tokens_per_stream))):
        own = classes[columns]
        for step in range(int(plan.planes[own].max(initial=0)) - 1, -1, -1):
            lanes = np.flatnonzero(plan.planes[own] > step)
            table, symbol = plan.tables[own[lanes], step], planes[step, columns][lanes]
            f, low = freq[table, symbol], cumulative[table, symbol]
            at = lanes + streams.start
            x = state[at]
            full = x >= f << (np.uint64(32) - bits)
            for stream in at[full]:
                words[stream].append(int(state[stream]) & 0xFFFF)
            x = np.where(full, x >> np.uint64(WORD_BITS), x)
            state[at] = (x // f << bits) + x % f + low
    lengths = np.array([len(w) for w in words], dtype=np.uint32)
    flat = np.array([word for w in words for word in reversed(w)], dtype=np.uint16)
    return Streams(state.astype(np.uint32), lengths, flat)


@dataclass(frozen=True, slots=True)
class ClassedPlanes:
    """A section to entropy-code whose tokens have classes.

    Attributes:
        planes, columns, plan, tokens_per_stream: arguments of `rans_encode_classes`; `columns` is its `classes`.
        classes: `[T]` uint8, the class of each token.
        class_table: the table that codes the classes.
    """

    planes: U8
    columns: U8
    classes: U8
    plan: ClassedPlan
    class_table: EntropyTables
    tokens_per_stream: int


def encode_classed(sections: Sequence[ClassedPlanes], tables: EntropyTables) -> list[tuple[Streams, Streams]]:
    """Encode sections of one chunk; return for each the streams of its planes and the stream of its classes.

    Args:
        sections: all have the same number of tokens.
        tables: the family that the plans index.
    """
    out = []
    for own in sections:
        streams = rans_encode_classes(own.planes, own.columns, own.plan, tables, own.tokens_per_stream)
        which = np.zeros(len(own.classes), np.uint16)
        out.append((streams, rans_encode(own.classes[:, None], which, own.class_table, 1)))
    return out


def class_stream_error() -> CorruptError:
    """Return the error about a class stream that does not end in the initial state."""
    return CorruptError("the class stream of a section does not end where it must: the bytes are damaged")


def read_classes(stream: Streams, table: EntropyTables, tokens: int) -> U8:
    """Decode the classes `[T]` uint8 of a section's tokens from their one stream.

    Raises:
        CorruptError: the stream does not end in the initial state with all of its words read.
    """
    which = np.zeros(tokens, np.uint16)
    try:
        return rans_decode(stream, which, table, 1, 1)[:, 0]
    except CorruptError as error:
        raise class_stream_error() from error


def rans_decode_classes(
    streams: Streams,
    classes: U8,
    plan: ClassedPlan,
    tables: EntropyTables,
    tokens_per_stream: int,
) -> U8:
    """Invert `rans_encode_classes`, given the same arguments.

    Args:
        streams: what it returned.
        classes: as given to it.
        plan: as given to it.
        tables: as given to it.
        tokens_per_stream: as given to it.

    Returns:
        `[P, T]` uint8, where P is the number of planes of the finest class; zero below a column's last plane.

    Raises:
        CorruptError: a stream did not end in the initial state with all of its words read.
    """
    tokens = len(classes)
    check_streams(streams, tokens_per_stream, tokens)
    out = np.zeros((plan.tables.shape[1], tokens), dtype=np.uint8)
    state = streams.states.astype(np.uint64)
    end = np.cumsum(streams.lengths, dtype=np.int64)
    at = end - streams.lengths
    bits = np.uint64(tables.prob_bits)
    for lanes, columns in stream_rows(tokens, tokens_per_stream):
        own = classes[columns]
        for step in range(int(plan.planes[own].max(initial=0))):
            active = np.flatnonzero(plan.planes[own] > step)
            stream = active + lanes.start
            x = state[stream]
            low = (x & np.uint64((1 << tables.prob_bits) - 1)).astype(np.int64)
            table = plan.tables[own[active], step].astype(np.int64)
            slot = tables.slots[table, low].astype(np.uint64)
            out[step, active + columns.start] = slot >> np.uint64(24)
            x = (slot >> np.uint64(12) & np.uint64(0xFFF)) * (x >> bits) + (slot & np.uint64(0xFFF))
            need = x < LOWER_BOUND
            # A damaged stream may ask for more words than it has. It gets zeros, and the check below finds it.
            inside = need & (at[stream] < end[stream])
            word = np.zeros(len(stream), dtype=np.uint64)
            word[inside] = streams.words[at[stream[inside]]]
            state[stream] = np.where(need, x << np.uint64(WORD_BITS) | word, x)
            at[stream] += need
    bad = np.flatnonzero((state != LOWER_BOUND) | (at != end))
    if bad.size:
        raise stream_error(int(bad[0]), len(end))
    return out

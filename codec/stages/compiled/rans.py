"""Interleaved rANS, compiled, for many sections at once: see `codec/FORMAT.md`, "Streams"."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from cuvee.codec.entropy.tables import PROB_BITS, TOTAL, EntropyTables
from cuvee.codec.entropy.token_classes import MORE_BYTES, SectionPlanes
from cuvee.codec.format import rules
from cuvee.codec.format.streams import LOWER_BOUND, WINDOW, WORD_BITS, Streams, stream_count
from cuvee.codec.stages.compiled import coded_part as part
from cuvee.codec.stages.compiled import lanes
from cuvee.codec.stages.compiled.coded_part import INITIAL, read_u16, read_u32
from cuvee.codec.stages.compiled.compiler import compiled, inner
from cuvee.codec.stages.compiled.lanes import (
    FLIGHT,
    collect_words,
    decode_lanes,
    encode_lanes,
    lane_capacity,
    list_groups,
)
from cuvee.codec.stages.compiled.memory import fetch
from cuvee.codec.stages.compiled.simd import WIDTH
from cuvee.codec.support.arena import Arena
from cuvee.codec.support.arrays import U8

_arena = Arena()


@compiled
def encode_class_stream(classes, coders, words):  # type: ignore[no-untyped-def]
    """Code classes as one stream into `words`; return its state, and how many words it has."""
    x, count = np.int64(LOWER_BOUND), 0
    for t in range(len(classes) - 1, -1, -1):
        coder = np.int64(coders[classes[t]])
        frequency, below = coder & 0xFFFF, coder >> 16
        if x >= frequency << (32 - PROB_BITS):
            words[count] = x & 0xFFFF
            count += 1
            x >>= WORD_BITS
        x = ((x // frequency) << PROB_BITS) + x % frequency + below
    for i in range(count // 2):  # a decoder reads words in reverse order of coding
        words[i], words[count - 1 - i] = words[count - 1 - i], words[i]
    return x, count


@inner
def decode_class_stream(data, at, words, state, slots, classes):  # type: ignore[no-untyped-def]
    """Decode classes from the `words` words at byte `at` of `data`; return whether the stream ends as it must."""
    x = np.uint32(state)
    mask, shift = np.uint32(TOTAL - 1), np.uint32(PROB_BITS)
    word = np.int64(0)
    for t in range(len(classes)):
        slot = slots[np.uint64(x & mask)]
        classes[t] = np.uint8(slot >> np.uint32(24))
        x = ((slot >> np.uint32(12)) & np.uint32(0xFFF)) * (x >> shift) + (slot & np.uint32(0xFFF))
        if x < INITIAL:
            # A damaged stream may ask for more words than it has. It gets zeros, and the check below finds it.
            x = (x << np.uint32(16)) | (read_u16(data, at + 2 * word) if word < words else np.uint32(0))
            word += 1
    return x == INITIAL and word == words


@compiled
def _encode(  # type: ignore[no-untyped-def]
    data, columns, fields, depth, tables, coders, per_stream, capacity, spare, log, states, lengths, words
):  # fmt: skip
    """Code the planes of sections; return the number of words."""
    count, tokens = columns.shape
    groups = np.empty((len(states) + count * (tokens // WINDOW + 1), lanes.GROUP_FIELDS), np.int64)
    listed = stream = np.int64(0)
    for i in range(count):
        listed = list_groups(i, stream, tokens, per_stream[i], groups, listed)
        stream += (tokens + per_stream[i] - 1) // per_stream[i]
    begins = np.empty(len(states), np.int64)
    encode_lanes(
        groups[:listed], fields, data, columns.reshape(columns.size), depth, tables, coders, capacity, spare,
        log, states, lengths, begins,
    )  # fmt: skip
    return collect_words(log, begins, lengths, words)


def rans_encode(sections: Sequence[SectionPlanes], tables: EntropyTables) -> list[Streams]:
    """Return the streams of the planes of each section of one chunk; their plans index `tables`."""
    count, tokens = len(sections), len(sections[0].columns)
    per_stream = np.array([each.tokens_per_stream for each in sections])
    streams_at = _ends([stream_count(tokens, each.tokens_per_stream) for each in sections])
    data_at = _ends([each.planes.size for each in sections])
    symbols, data = int(data_at[-1]), _whole(sections[0].planes) if count == 1 else None
    if data is None:
        data = _arena.array("data", symbols + WIDTH, np.uint8)
        np.concatenate([each.planes.reshape(-1) for each in sections], out=data[:symbols])
    fields = np.zeros((count, lanes.SECTION_FIELDS), np.int64)
    fields[:, lanes.CLASSES], fields[:, lanes.OUT], fields[:, lanes.COLUMNS] = (
        np.arange(count) * tokens, data_at[:-1], tokens
    )  # fmt: skip
    fields[:, lanes.PLANES] = _ends([len(each.plan.planes) for each in sections])[:-1]
    fields[:, lanes.TABLES] = _ends([each.plan.tables.size for each in sections])[:-1]
    fields[:, lanes.STRIDE] = [each.plan.tables.shape[1] for each in sections]
    states, lengths = np.empty(streams_at[-1], np.uint32), np.empty(streams_at[-1], np.uint32)
    capacity = lane_capacity(max(len(each.planes) * each.tokens_per_stream for each in sections))
    words = _arena.array("words", symbols, np.uint16)  # a bound: at most one word per symbol
    filled = _encode(
        data, np.stack([each.columns for each in sections]), fields,
        np.concatenate([each.plan.planes for each in sections]),
        np.concatenate([each.plan.coders for each in sections]), tables.coders.reshape(-1), per_stream, capacity,
        _arena.array("spare", FLIGHT * WIDTH * capacity + 1, np.uint16), _arena.array("log", symbols, np.uint16),
        states, lengths, words,
    )  # fmt: skip
    words = words[:filled].copy()
    out, word = [], 0
    for i in range(count):
        of_section = slice(streams_at[i], streams_at[i + 1])
        end = word + int(lengths[of_section].sum(dtype=np.int64))
        out.append(Streams(states[of_section], lengths[of_section], words[word:end]))
        word = end
    return out


def _whole(planes: U8) -> U8 | None:
    """Return the array that begins with these planes, if there is one, and enough can be read behind them."""
    whole = planes.base
    if not isinstance(whole, np.ndarray) or whole.ndim != 1 or whole.nbytes < planes.size + MORE_BYTES:
        return None
    return whole if planes.flags.c_contiguous and whole.ctypes.data == planes.ctypes.data else None


def _ends(sizes: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return where adjacent arrays of these sizes begin, and where the last ends."""
    return np.array([0, *accumulate(sizes)])


def encode_classes(classes: U8, table: EntropyTables) -> Streams:
    """Encode the classes `[T]` uint8 of a section's tokens as one stream: one column of T steps with one table."""
    words = np.empty(len(classes), np.uint16)
    state, count = encode_class_stream(classes, table.coders[0], words)
    return Streams(np.array([state], np.uint32), np.array([count], np.uint32), words[:count])


@inner
def decode_streams(  # type: ignore[no-untyped-def]
    data, parsed, words_at, start, stop, fields, columns, depth, tables, slots, out, problem
):
    """Decode a tile's planes of several sections together, so that the CPU always has streams to turn to.

    Args:
        data: uint8, the bytes of the sections.
        parsed: int64 `[S, …]`, begins with the fields of `coded_part`; zeros for a section without streams.
        words_at: uint32, of each section where the words of its streams begin, and where the last end.
        start: the first token, which begins a window.
        stop: the token after the last.
        fields: int64 `[S, SECTION_FIELDS]` of `lanes`; all but `WORDS`, `COUNT` and `COLUMNS`, which are filled in.
        columns: as `classes` of `decode_lanes`.
        depth: as `planes` of `decode_lanes`.
        tables: see there, like the next two.
        slots: see above.
        out: see above.
        problem: receives the section, `rules.STREAM` and the number of the damaged stream.

    Returns:
        whether all streams end as they must.
    """
    count, width = len(parsed), stop - start
    first_stream = np.zeros(count + 1, np.int64)
    for i in range(count):
        log2 = parsed[i, part.LOG2]
        streams = part.stream_count(stop, log2) - (start >> log2)
        first_stream[i + 1] = first_stream[i] + (streams if parsed[i, part.STATES] else np.int64(0))
    total = first_stream[count]
    states, starts, ends = np.empty(total, np.uint32), np.empty(total, np.uint32), np.empty(total, np.uint32)
    groups = np.empty((total + count * (width // WINDOW + 1), lanes.GROUP_FIELDS), np.int64)
    listed = np.int64(0)
    for i in range(count):
        at, streams = first_stream[i], first_stream[i + 1] - first_stream[i]
        if not streams:
            continue
        log2, words = parsed[i, part.LOG2], parsed[i, part.WORDS]
        first = start >> log2
        for j in range(streams):
            states[at + j] = read_u32(data, parsed[i, part.STATES] + 4 * (first + j))
            starts[at + j] = words_at[parsed[i, part.STREAMS] + first + j]
            ends[at + j] = words_at[parsed[i, part.STREAMS] + first + j + 1]
        fetch(data, words + 2 * np.int64(starts[at]), words + 2 * np.int64(ends[at + streams - 1]))
        fields[i, lanes.WORDS], fields[i, lanes.COUNT], fields[i, lanes.COLUMNS] = words, parsed[i, part.COUNT], width
        listed = list_groups(i, at, width, np.int64(1) << log2, groups, listed)
    bad = decode_lanes(groups[:listed], fields, states, starts, ends, data, columns, depth, tables, slots, out)
    if bad < 0:
        return True
    damaged = np.int64(0)
    while first_stream[damaged + 1] <= bad:
        damaged += 1
    problem[part.SECTION], problem[part.RULE] = damaged, rules.STREAM
    problem[part.FIRST] = (start >> parsed[damaged, part.LOG2]) + bad - first_stream[damaged]
    return False

"""The entropy coder for tokens with classes, compiled: the same bytes as `reference/rans_by_class.py`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from cuvee.codec.entropy.streams import LOWER_BOUND, WORD_BITS, Streams, stream_count
from cuvee.codec.entropy.tables import EntropyTables
from cuvee.codec.entropy.token_classes import CLASS_BITS, CLASSES, WINDOW
from cuvee.codec.stages.compiled import lanes
from cuvee.codec.stages.compiled.arena import Arena
from cuvee.codec.stages.compiled.coded_part import INITIAL, read_u16
from cuvee.codec.stages.compiled.compiler import compiled
from cuvee.codec.stages.compiled.lanes import FLIGHT, collect_words, encode_lanes, lane_capacity, list_groups
from cuvee.codec.stages.compiled.simd import WIDTH
from cuvee.codec.stages.reference.rans_by_class import ClassedPlanes

_arena = Arena()


@compiled
def encode_class_stream(classes, coders, words):  # type: ignore[no-untyped-def]
    """Code classes as one stream into `words`; return its state, and how many words it has."""
    x, count = np.int64(LOWER_BOUND), 0
    for t in range(len(classes) - 1, -1, -1):
        coder = np.int64(coders[classes[t]])
        frequency, below = coder & 0xFFFF, coder >> 16
        if x >= frequency << (32 - CLASS_BITS):
            words[count] = x & 0xFFFF
            count += 1
            x >>= WORD_BITS
        x = ((x // frequency) << CLASS_BITS) + x % frequency + below
    for i in range(count // 2):  # a decoder reads words in reverse order of coding
        words[i], words[count - 1 - i] = words[count - 1 - i], words[i]
    return x, count


@compiled
def decode_class_stream(data, at, words, state, slots, bits, classes):  # type: ignore[no-untyped-def]
    """Decode classes from the `words` words at byte `at` of `data`; return whether the stream ends as it must."""
    x = np.uint32(state)
    mask, shift = np.uint32((1 << bits) - 1), np.uint32(bits)
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
    data, data_at, columns, classes, depth, tables, tables_at, class_coders, coders, prob_bits, per_stream, capacity,
    spare, log, states, lengths, words, class_states, class_lengths, class_words,
):  # fmt: skip
    """Code the planes and the classes of sections; return the number of words of the planes."""
    count, tokens = columns.shape
    fields = np.zeros((count, lanes.SECTION_FIELDS), np.int64)
    groups = np.empty((len(states) + count * (tokens // WINDOW + 1), lanes.GROUP_FIELDS), np.int64)
    listed = stream = np.int64(0)
    for i in range(count):
        fields[i, lanes.CLASSES], fields[i, lanes.OUT], fields[i, lanes.COLUMNS] = i * tokens, data_at[i], tokens
        fields[i, lanes.PLANES] = i * CLASSES
        fields[i, lanes.TABLES], fields[i, lanes.STRIDE] = tables_at[i], (tables_at[i + 1] - tables_at[i]) // CLASSES
        listed = list_groups(i, stream, tokens, per_stream[i], WINDOW, groups, listed)
        stream += (tokens + per_stream[i] - 1) // per_stream[i]
        class_states[i], class_lengths[i] = encode_class_stream(classes[i], class_coders[i], class_words[i])
    begins = np.empty(len(states), np.int64)
    encode_lanes(
        groups[:listed], fields, data, columns.reshape(columns.size), depth, tables, coders, prob_bits, capacity, spare,
        log, states, lengths, begins,
    )  # fmt: skip
    return collect_words(log, begins, lengths, words)


def encode_classed(sections: Sequence[ClassedPlanes], tables: EntropyTables) -> list[tuple[Streams, Streams]]:
    """See `cuvee.codec.stages.reference.rans_by_class.encode_classed`."""
    count, tokens = len(sections), len(sections[0].columns)
    per_stream = np.array([own.tokens_per_stream for own in sections])
    streams_at = _ends([stream_count(tokens, own.tokens_per_stream) for own in sections])
    data_at = _ends([own.planes.size for own in sections])
    symbols = int(data_at[-1])
    data = _arena.array("data", symbols + WIDTH, np.uint8)
    np.concatenate([own.planes.reshape(-1) for own in sections], out=data[:symbols])
    depth = np.concatenate([own.plan.planes for own in sections])
    begins_of = np.concatenate([own.plan.coders for own in sections])
    states, lengths = np.empty(streams_at[-1], np.uint32), np.empty(streams_at[-1], np.uint32)
    class_states, class_lengths = np.empty((count, 1), np.uint32), np.empty((count, 1), np.uint32)
    class_words = np.empty((count, tokens), np.uint16)
    capacity = lane_capacity(max(len(own.planes) * own.tokens_per_stream for own in sections))
    words = _arena.array("words", symbols, np.uint16)  # a bound: at most one word per symbol
    filled = _encode(
        data, data_at, np.stack([own.columns for own in sections]), np.stack([own.classes for own in sections]), depth,
        begins_of, _ends([own.plan.tables.size for own in sections]),
        np.concatenate([own.class_table.coders for own in sections]), tables.coders.reshape(-1), tables.prob_bits,
        per_stream, capacity, _arena.array("spare", FLIGHT * WIDTH * capacity + 1, np.uint16),
        _arena.array("log", symbols, np.uint16), states, lengths, words, class_states[:, 0], class_lengths[:, 0],
        class_words,
    )  # fmt: skip
    words = words[:filled].copy()
    out, word = [], 0
    for i in range(count):
        of_section = slice(streams_at[i], streams_at[i + 1])
        end = word + int(lengths[of_section].sum(dtype=np.int64))
        classes = Streams(class_states[i], class_lengths[i], class_words[i, : class_lengths[i, 0]])
        out.append((Streams(states[of_section], lengths[of_section], words[word:end]), classes))
        word = end
    return out


def _ends(sizes: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return where adjacent arrays of these sizes begin, and where the last ends."""
    return np.array([0, *accumulate(sizes)])

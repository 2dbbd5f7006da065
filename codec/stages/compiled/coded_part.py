"""Parse the coded part of a section in compiled loops, with the checks of `coded_part.read_coded`."""

from __future__ import annotations

import numpy as np

from cuvee.codec.entropy.streams import LOWER_BOUND, MAX_TOKENS_PER_STREAM_LOG2
from cuvee.codec.stages.compiled.compiler import compiled

# Fields of `found`: sizes, and places in bytes.
MODE, LOG2, STATES, LENGTHS, WIDE, WORDS, COUNT, CLASS_STATE, CLASS_WORDS, CLASSES, ESCAPES, LISTED = range(12)
PART_FIELDS = 12

NO_CLASSES = -1  # `class_planes` where a section must not have token classes

INITIAL = np.uint32(LOWER_BOUND)


@compiled
def read_u16(data, at):  # type: ignore[no-untyped-def]
    """Return the little-endian number at byte `at`, as uint32."""
    return np.uint32(data[at]) | np.uint32(data[at + 1]) << np.uint32(8)


@compiled
def read_u32(data, at):  # type: ignore[no-untyped-def]
    """Return the little-endian number at byte `at`, as uint32."""
    return read_u16(data, at) | read_u16(data, at + 2) << np.uint32(16)


@compiled
def find_part(data, begin, end, tokens, planes, rows, class_planes, class_rows, found):  # type: ignore[no-untyped-def]
    """Find the parts of a section; return False if the bytes break a rule.

    Args:
        data: uint8, the bytes.
        begin: the first byte of the section's coded part.
        end: the byte after its last.
        tokens: tokens in the chunk.
        planes: byte planes of a section without token classes.
        rows: its components.
        class_planes: byte planes of a section with token classes; `NO_CLASSES` if it must have none.
        class_rows: its components.
        found: int64 `[PART_FIELDS]`, receives the fields named above.
    """
    at = begin + 12
    if at > end:
        return False
    words, escapes = np.int64(read_u32(data, begin)), np.int64(read_u32(data, begin + 4))
    log2, mode = np.int64(data[begin + 8]), np.int64(data[begin + 9])
    if log2 > MAX_TOKENS_PER_STREAM_LOG2 or mode > 1 or read_u16(data, begin + 10):
        return False
    class_words = np.int64(0)
    if mode:
        if class_planes == NO_CLASSES:
            return False
        planes, rows = class_planes, class_rows
        at += 8
        if at > end:
            return False
        class_words = np.int64(read_u32(data, at - 8))
        found[CLASS_STATE] = np.int64(read_u32(data, at - 4))
        if found[CLASS_STATE] < INITIAL:
            return False
    count = (tokens + (1 << log2) - 1) >> log2
    wide = np.int64(2 if planes << log2 <= 0xFFFF else 4)
    found[MODE], found[LOG2], found[WIDE], found[COUNT] = mode, log2, wide, words
    found[STATES] = at
    found[LENGTHS] = at + 4 * count
    found[CLASSES] = found[LENGTHS] + wide * count
    found[CLASS_WORDS] = class_words
    found[WORDS] = found[CLASSES] + 2 * class_words
    at = found[WORDS] + 2 * words
    padding = -(at - begin) % 4
    found[ESCAPES], found[LISTED] = at + padding, escapes
    if found[ESCAPES] + 8 * escapes != end:
        return False
    for i in range(padding):
        if data[at + i]:
            return False
    total = np.int64(0)
    for i in range(count):
        if read_u32(data, found[STATES] + 4 * i) < INITIAL:
            return False
        total += _stream_words(data, found, i)
    if total != words:
        return False
    before = np.int64(-1)
    for i in range(escapes):
        index = np.int64(read_u32(data, found[ESCAPES] + 4 * i))
        if index <= before:
            return False
        before = index
    return before < rows * tokens


@compiled
def _stream_words(data, found, stream):  # type: ignore[no-untyped-def]
    place = found[LENGTHS] + found[WIDE] * stream
    return np.int64(read_u16(data, place) if found[WIDE] == 2 else read_u32(data, place))


@compiled
def list_words(data, found, words_at):  # type: ignore[no-untyped-def]
    """Write the word at which each stream begins, and the word after the last stream's: one entry more than streams."""
    word = np.int64(0)
    for stream in range(len(words_at) - 1):
        words_at[stream] = word
        word += _stream_words(data, found, stream)
    words_at[len(words_at) - 1] = word

"""Parse the coded part of a section in compiled loops, and check it, in the order of `codec/FORMAT.md`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cuvee.codec.errors import FormatError
from cuvee.codec.format import rules, streams
from cuvee.codec.format.rules import rule_error
from cuvee.codec.format.streams import LOWER_BOUND, MAX_TOKENS_PER_STREAM_LOG2
from cuvee.codec.stages.compiled.compiler import inner
from cuvee.codec.support.arrays import I64

# Fields of `parsed`: sizes, and offsets in bytes.
LOG2, STATES, LENGTHS, WIDE, WORDS, COUNT, CLASS_STATE, CLASS_WORDS, CLASSES, ESCAPES, LISTED = range(11)
STREAMS = 11  # for callers: the section's first entry in `words_at`
PART_FIELDS = 12

# Fields of `problem`: the damaged section, the broken rule, and the numbers that its message shows.
SECTION, RULE, FIRST, SECOND = range(4)
PROBLEM_FIELDS = 4

ONE_CLASS = np.int64(-1)  # `rows` where all tokens have one class

HEADER_BYTES = 20
INITIAL = np.uint32(LOWER_BOUND)


def joined(sections: Sequence[memoryview]) -> tuple[npt.NDArray[np.uint8], I64]:
    """Return bytes that hold all sections, and int64 `[S, 2]`, where each begins and ends.

    Nothing is copied if all sections are parts of one object's memory, as those of a blob are.
    """
    sizes = np.array([len(section) for section in sections], np.int64)
    spans = np.empty((len(sections), 2), np.int64)
    # Read-only, as `bytes` are: for arrays that may be written Numba would compile all loops once more, for 20 seconds.
    owner = memoryview(sections[0].obj).toreadonly()
    if sizes.min() and owner.c_contiguous and all(section.obj is owner.obj for section in sections):
        whole = np.frombuffer(owner, np.uint8)
        spans[:, 0] = [np.frombuffer(section, np.uint8).ctypes.data for section in sections]
        spans[:, 0] -= whole.ctypes.data
        spans[:, 1] = spans[:, 0] + sizes
        return whole, spans
    np.cumsum(sizes, out=spans[:, 1])
    spans[:, 0] = spans[:, 1] - sizes
    return np.frombuffer(b"".join(sections), np.uint8), spans


@inner
def read_u16(data, at):  # type: ignore[no-untyped-def]
    """Return the little-endian number at byte `at`, as uint32."""
    return np.uint32(data[at]) | np.uint32(data[at + 1]) << np.uint32(8)


@inner
def read_u32(data, at):  # type: ignore[no-untyped-def]
    """Return the little-endian number at byte `at`, as uint32."""
    return read_u16(data, at) | read_u16(data, at + 2) << np.uint32(16)


@inner
def find_part(data, begin, end, tokens, planes, rows, parsed, problem):  # type: ignore[no-untyped-def]
    """Find the parts of a coded part, the bytes `begin … end - 1`; return False if they break a rule.

    `planes` is the largest number of planes that a token may have, `rows` that of components, or `ONE_CLASS`. `parsed`
    receives the fields named above but for `STREAMS`, `problem` the broken rule and its numbers.
    """
    if begin + HEADER_BYTES > end:
        problem[RULE], problem[FIRST] = rules.SHORT, begin + HEADER_BYTES - end
        return False
    words, escapes = np.int64(read_u32(data, begin)), np.int64(read_u32(data, begin + 4))
    log2 = np.int64(data[begin + 8])
    if log2 > MAX_TOKENS_PER_STREAM_LOG2 or data[begin + 9] or read_u16(data, begin + 10):
        problem[RULE] = rules.HEADER
        return False
    class_words, class_state = np.int64(read_u32(data, begin + 12)), read_u32(data, begin + 16)
    if class_state < INITIAL:
        problem[RULE] = rules.CLASS_STATE
        return False
    if rows == ONE_CLASS and (class_words or escapes or class_state != INITIAL):
        problem[RULE] = rules.ONE_CLASS
        return False
    count = stream_count(tokens, log2)
    wide = np.int64(2 if planes << log2 <= 0xFFFF else 4)
    parsed[LOG2], parsed[WIDE], parsed[COUNT] = log2, wide, words
    parsed[CLASS_STATE], parsed[CLASS_WORDS] = np.int64(class_state), class_words
    parsed[STATES] = begin + HEADER_BYTES
    parsed[LENGTHS] = parsed[STATES] + 4 * count
    parsed[CLASSES] = parsed[LENGTHS] + wide * count
    parsed[WORDS] = parsed[CLASSES] + 2 * class_words
    at = parsed[WORDS] + 2 * words
    padding = -(at - begin) % 4
    parsed[ESCAPES], parsed[LISTED] = at + padding, escapes
    missing = parsed[ESCAPES] + 8 * escapes - end
    if missing:
        problem[RULE], problem[FIRST] = rules.SHORT if missing > 0 else rules.LONG, abs(missing)
        return False
    for i in range(padding):
        if data[at + i]:
            problem[RULE] = rules.PADDING
            return False
    total = np.int64(0)
    for i in range(count):
        if read_u32(data, parsed[STATES] + 4 * i) < INITIAL:
            problem[RULE], problem[FIRST] = rules.STATE, i
            return False
        total += _stream_words(data, parsed, i)
    if total != words:
        problem[RULE], problem[FIRST], problem[SECOND] = rules.LENGTHS, total, words
        return False
    before = np.int64(-1)
    for i in range(escapes):
        index = np.int64(read_u32(data, parsed[ESCAPES] + 4 * i))
        if index <= before or index >= rows * tokens:
            problem[RULE], problem[FIRST] = rules.ESCAPE_ORDER, i
            return False
        before = index
    return True


@inner
def stream_count(tokens, log2):  # type: ignore[no-untyped-def]
    """Return the number of streams of `2**log2` tokens that hold this many tokens."""
    return (tokens + (np.int64(1) << log2) - 1) >> log2


@inner
def _stream_words(data, parsed, stream):  # type: ignore[no-untyped-def]
    offset = parsed[LENGTHS] + parsed[WIDE] * stream
    return np.int64(read_u16(data, offset) if parsed[WIDE] == 2 else read_u32(data, offset))


@inner
def list_words(data, parsed, words_at):  # type: ignore[no-untyped-def]
    """Write the word at which each stream begins, and the word after the last stream's: one entry more than streams."""
    word = np.int64(0)
    for stream in range(len(words_at) - 1):
        words_at[stream] = word
        word += _stream_words(data, parsed, stream)
    words_at[len(words_at) - 1] = word


@inner
def list_all_words(data, tokens, parsed):  # type: ignore[no-untyped-def]
    """List the words of all sections that have streams, and note in `STREAMS` where the entries of each begin."""
    entries = np.int64(0)
    for i in range(len(parsed)):
        parsed[i, STREAMS] = entries
        if parsed[i, STATES]:
            entries += stream_count(tokens, parsed[i, LOG2]) + 1
    words_at = np.empty(entries, np.uint32)
    for i in range(len(parsed)):
        if parsed[i, STATES]:
            at = parsed[i, STREAMS]
            list_words(data, parsed[i], words_at[at : at + stream_count(tokens, parsed[i, LOG2]) + 1])
    return words_at


def problem_error(problem: I64, parsed: I64, tokens: int) -> FormatError:
    """Return the error about the section that a compiled loop found damaged, given `problem` and all of `parsed`."""
    section, rule, first, second = problem.tolist()
    if rule == rules.STREAM:
        second = streams.stream_count(tokens, 1 << int(parsed[section, LOG2]))
    return rule_error(rule, first, second)

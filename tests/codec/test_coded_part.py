"""The coded part of a section as bytes, field by field; both parsers read the same. `damaged.py` breaks each rule."""

from __future__ import annotations

import re
import struct

import numpy as np
import pytest
from tests.codec.inner_loops import find_part, list_words
from tests.codec.reference.coded_part import Reader, read_coded

from cuvee.codec.format.coded_part import CodedPart, write_coded
from cuvee.codec.format.streams import Escapes, Streams
from cuvee.codec.stages.compiled import coded_part as compiled
from cuvee.codec.support.arrays import U16

# 4 components and 2 planes of low bits, 20 tokens in streams of 8.
ROWS, PLANES, TOKENS = 4, 6, 20


def part_of(words: int = 6, class_words: int = 3, escapes: int = 2) -> CodedPart:
    """A part whose streams hold nothing sensible; of one class if it has no class words."""
    lengths = np.array([words - 2, 2, 0], np.uint32)
    states = np.array([1 << 16, 0xFFFFFFFF, 70000], np.uint32)
    index = np.array([3, 40], np.uint32)[:escapes]
    value = np.array([-(2**31), 2**31 - 1], np.int32)[:escapes]
    own: U16 = np.arange(90, 90 + class_words, dtype=np.uint16)
    classes = Streams(np.array([1 << 20], np.uint32), np.array([class_words], np.uint32), own)
    return CodedPart(Streams(states, lengths, np.arange(words, dtype=np.uint16)), Escapes(index, value), 8, classes)


def parse(data: bytes, planes: int = PLANES, rows: int | None = ROWS) -> CodedPart:
    """What is read, by both parsers: the compiled one says where, and which rule is broken, in the same words."""
    found, problem = np.zeros(compiled.PART_FIELDS, np.int64), np.zeros(compiled.PROBLEM_FIELDS, np.int64)
    begin = 3  # anywhere in a blob
    whole = np.frombuffer(bytes(begin) + data + b"\xff" * 9, np.uint8)
    arguments = begin, begin + len(data), TOKENS, planes, compiled.ONE_CLASS if rows is None else rows
    sound = bool(find_part(whole, *arguments, found, problem))
    if not sound:
        own = compiled.problem_error(problem, found[None], TOKENS)
        with pytest.raises(type(own), match=f"^{re.escape(str(own))}$"):
            read_coded(Reader(memoryview(data)), planes, rows, TOKENS)
        raise own
    part = read_coded(Reader(memoryview(data)), planes, rows, TOKENS)
    counts = len(part.streams.words), len(part.classes.words), len(part.escapes.index), int(part.classes.states[0])
    fields = compiled.COUNT, compiled.CLASS_WORDS, compiled.LISTED, compiled.CLASS_STATE
    assert counts == tuple(found[list(fields)]) and 1 << found[compiled.LOG2] == part.tokens_per_stream
    for field, array in (
        (compiled.STATES, part.streams.states), (compiled.CLASSES, part.classes.words),
        (compiled.WORDS, part.streams.words), (compiled.ESCAPES, part.escapes.index),
    ):  # fmt: skip
        raw = array.astype(array.dtype.newbyteorder("<")).tobytes()
        assert whole[found[field] : found[field] + len(raw)].tobytes() == raw
    words_at = np.empty(len(part.streams.states) + 1, np.uint32)
    list_words(whole, found, words_at)
    assert words_at.tolist() == [0, *np.cumsum(part.streams.lengths)]
    return part


@pytest.mark.parametrize("planes", [PLANES, 8191, 8192])
@pytest.mark.parametrize("words", [2, 5, 6, 7])
@pytest.mark.parametrize("class_words", [0, 1, 3, 4])
def test_parts_round_trip(words: int, class_words: int, planes: int) -> None:
    part = part_of(words, class_words)
    data = write_coded(part, planes)
    wide = 4 if planes * 8 > 0xFFFF else 2
    assert len(data) == -(-(20 + 3 * (4 + wide) + 2 * (class_words + words)) // 4) * 4 + 2 * 8
    back = parse(data, planes)
    assert back.tokens_per_stream == 8
    for a, b in (
        (back.streams.states, part.streams.states), (back.streams.lengths, part.streams.lengths),
        (back.streams.words, part.streams.words), (back.escapes.index, part.escapes.index),
        (back.escapes.value, part.escapes.value), (back.classes.states, part.classes.states),
        (back.classes.lengths, part.classes.lengths), (back.classes.words, part.classes.words),
    ):  # fmt: skip
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("class_words", [0, 1, 3, 4])
def test_a_part_is_laid_out_as_specified(class_words: int) -> None:
    data = write_coded(part_of(5, class_words), PLANES)
    assert struct.unpack_from("<IIB3BII", data) == (5, 2, 3, 0, 0, 0, class_words, 1 << 20)
    assert struct.unpack_from("<3I3H", data, 20) == (1 << 16, 2**32 - 1, 70000, 3, 2, 0)
    own = range(90, 90 + class_words)
    assert struct.unpack_from(f"<{class_words + 5}H", data, 38) == (*own, 0, 1, 2, 3, 4)
    end = 38 + 2 * (class_words + 5)
    assert not any(data[end : end + -end % 4])
    assert struct.unpack_from("<2I2i", data, end + -end % 4) == (3, 40, -(2**31), 2**31 - 1)
    assert len(data) == end + -end % 4 + 16


def test_the_last_component_of_the_last_token_may_escape() -> None:
    data = bytearray(write_coded(part_of(), PLANES))
    struct.pack_into("<I", data, 60, ROWS * TOKENS - 1)
    assert parse(bytes(data)).escapes.index[-1] == ROWS * TOKENS - 1

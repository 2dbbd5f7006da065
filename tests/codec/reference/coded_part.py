"""The fields of a section, read one after the other; `codec/stages/compiled/coded_part.py` has compiled loops."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from cuvee.codec.format import rules
from cuvee.codec.format.coded_part import HEADER, CodedPart, length_bytes
from cuvee.codec.format.rules import rule_error
from cuvee.codec.format.streams import LOWER_BOUND, MAX_TOKENS_PER_STREAM_LOG2, Escapes, Streams, stream_count


class Reader:
    """Reads the fields of a section in order, up to its end and no farther."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    @property
    def left(self) -> int:
        """The number of bytes not read so far."""
        return len(self._view) - self._at

    def take(self, count: int) -> memoryview:
        """Return the next `count` bytes. Raise FormatError if fewer are left."""
        if count > self.left:
            raise rule_error(rules.SHORT, count - self.left)
        self._at += count
        return self._view[self._at - count : self._at]

    def unpack(self, fields: struct.Struct) -> tuple[int, ...]:
        """Return the next fields, as described by the struct."""
        return fields.unpack(self.take(fields.size))

    def array(self, dtype: str, count: int) -> npt.NDArray[np.generic]:
        """Return the next `count` little-endian numbers, as an aligned copy in native byte order."""
        native = np.dtype(dtype)
        return np.frombuffer(self.take(count * native.itemsize), native.newbyteorder("<")).astype(native)

    def skip_padding(self) -> None:
        """Skip zero bytes up to a multiple of four. Raise FormatError if they are not zero."""
        if any(self.take(-self._at % 4)):
            raise rule_error(rules.PADDING)

    def finish(self) -> None:
        """Raise FormatError unless all bytes were read."""
        if self.left:
            raise rule_error(rules.LONG, self.left)


def read_coded(reader: Reader, planes: int, rows: int | None, tokens: int) -> CodedPart:
    """Read the output of `write_coded`: all that the reader has left, from a multiple of four bytes on.

    `planes` is the most planes and components of a token; `rows` is None if all tokens have one class.

    Raises:
        FormatError: the bytes break a rule.
    """
    whole = reader.left
    words, escapes, log2, first, second, class_words, class_state = reader.unpack(HEADER)
    if log2 > MAX_TOKENS_PER_STREAM_LOG2 or first or second:
        raise rule_error(rules.HEADER)
    if class_state < LOWER_BOUND:
        raise rule_error(rules.CLASS_STATE)
    if rows is None and (class_words or escapes or class_state != LOWER_BOUND):
        raise rule_error(rules.ONE_CLASS)
    n = 1 << log2
    count, size = stream_count(tokens, n), length_bytes(planes, n)
    ends = -(-(HEADER.size + (4 + size) * count + 2 * (class_words + words)) // 4) * 4 + 8 * escapes
    if ends != whole:
        raise rule_error(rules.SHORT, ends - whole) if ends > whole else rule_error(rules.LONG, whole - ends)
    states = reader.array("u4", count).view(np.uint32)
    lengths = reader.array(f"u{size}", count).astype(np.uint32)
    coded_classes = reader.array("u2", class_words).view(np.uint16)
    coded = reader.array("u2", words).view(np.uint16)
    reader.skip_padding()
    index = reader.array("u4", escapes).view(np.uint32)
    value = reader.array("i4", escapes).view(np.int32)
    low = np.flatnonzero(states < LOWER_BOUND)
    if low.size:
        raise rule_error(rules.STATE, int(low[0]))
    total = int(lengths.sum(dtype=np.uint64))
    if total != words:
        raise rule_error(rules.LENGTHS, total, words)
    out_of_order = np.diff(index.astype(np.int64), prepend=-1) <= 0
    wrong = np.flatnonzero(out_of_order | (index >= (rows or 0) * tokens))
    if wrong.size:
        raise rule_error(rules.ESCAPE_ORDER, int(wrong[0]))
    classes = Streams(np.array([class_state], np.uint32), np.array([class_words], np.uint32), coded_classes)
    return CodedPart(Streams(states, lengths, coded), Escapes(index, value), n, classes)

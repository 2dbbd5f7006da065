"""The coded part of a section as bytes, and the reader of a section's fields. `FORMAT.md` specifies both."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cuvee.codec.format import rules
from cuvee.codec.format.rules import rule_error
from cuvee.codec.format.streams import LOWER_BOUND, MAX_TOKENS_PER_STREAM_LOG2, Escapes, Streams, stream_count

_HEADER = struct.Struct("<IIBBHII")
_LONG_LENGTHS = 0x10000  # from this many words on, lengths take four bytes

_NATIVE = {name: np.dtype(name) for name in ("u1", "u2", "u4", "i2", "i4")}
_WIRE = {name: dtype.newbyteorder("<") for name, dtype in _NATIVE.items()}


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
        wire, native = _WIRE[dtype], _NATIVE[dtype]
        return np.frombuffer(self.take(count * wire.itemsize), wire).astype(native)

    def skip_padding(self) -> None:
        """Skip zero bytes up to a multiple of four. Raise FormatError if they are not zero."""
        if any(self.take(-self._at % 4)):
            raise rule_error(rules.PADDING)

    def finish(self) -> None:
        """Raise FormatError unless all bytes were read."""
        if self.left:
            raise rule_error(rules.LONG, self.left)


def _wire(array: npt.NDArray[np.generic], dtype: str) -> memoryview:
    return array.astype(_WIRE[dtype], copy=False).view(np.uint8).data


def _length_bytes(planes: int, tokens_per_stream: int) -> int:
    return 2 if planes * tokens_per_stream < _LONG_LENGTHS else 4


@dataclass(frozen=True, slots=True)
class CodedPart:
    """The coded part of a section: streams and escapes of its planes, n, and the stream of the tokens' classes."""

    streams: Streams
    escapes: Escapes
    tokens_per_stream: int
    classes: Streams


def write_coded(part: CodedPart, planes: int) -> bytes:
    """Write a coded part: header, states, lengths, words of the classes and of the streams, padding, escapes.

    `planes` is the largest number of planes that a token may have.
    """
    streams, escapes, n = part.streams, part.escapes, part.tokens_per_stream
    parts: list[bytes | memoryview] = [
        _HEADER.pack(
            len(streams.words), len(escapes.index), n.bit_length() - 1, 0, 0, len(part.classes.words),
            int(part.classes.states[0]),
        ),
        _wire(streams.states, "u4"),
        _wire(streams.lengths, f"u{_length_bytes(planes, n)}"),
        _wire(part.classes.words, "u2"),
        _wire(streams.words, "u2"),
    ]  # fmt: skip
    parts.append(bytes(-sum(map(len, parts)) % 4))
    parts += [_wire(escapes.index, "u4"), _wire(escapes.value, "i4")]
    return b"".join(parts)


def read_coded(reader: Reader, planes: int, rows: int | None, tokens: int) -> CodedPart:
    """Read the output of `write_coded`: all that the reader has left, from a multiple of four bytes on.

    `planes` is the most planes and components of a token; `rows` is None if all tokens have one class.

    Raises:
        FormatError: the bytes break a rule.
    """
    whole = reader.left
    words, escapes, log2, first, second, class_words, class_state = reader.unpack(_HEADER)
    if log2 > MAX_TOKENS_PER_STREAM_LOG2 or first or second:
        raise rule_error(rules.HEADER)
    if class_state < LOWER_BOUND:
        raise rule_error(rules.CLASS_STATE)
    if rows is None and (class_words or escapes or class_state != LOWER_BOUND):
        raise rule_error(rules.ONE_CLASS)
    n = 1 << log2
    count, size = stream_count(tokens, n), _length_bytes(planes, n)
    ends = -(-(_HEADER.size + (4 + size) * count + 2 * (class_words + words)) // 4) * 4 + 8 * escapes
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

"""The coded part of a section as bytes, and the reader of a section's fields. `FORMAT.md` specifies both."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cuvee.codec.entropy.coding_plan import Escapes
from cuvee.codec.entropy.streams import LOWER_BOUND, MAX_TOKENS_PER_STREAM_LOG2, Streams, stream_count
from cuvee.codec.errors import FormatError

_STREAMS = struct.Struct("<IIBBH")
_CLASSES = struct.Struct("<II")
_NATIVE = {name: np.dtype(name) for name in ("u1", "u2", "u4", "i2", "i4")}
_WIRE = {name: dtype.newbyteorder("<") for name, dtype in _NATIVE.items()}


class Reader:
    """Reads the fields of a section in order, up to its end and no farther."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    @property
    def position(self) -> int:
        """The number of bytes read so far."""
        return self._at

    def take(self, count: int) -> memoryview:
        """Return the next `count` bytes. Raise FormatError if fewer are left."""
        if count > len(self._view) - self._at:
            raise FormatError(f"section: ends {count - (len(self._view) - self._at)} bytes too early")
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
            raise FormatError("section: has padding that is not zero")

    def finish(self) -> None:
        """Raise FormatError unless all bytes were read."""
        if self._at != len(self._view):
            raise FormatError(f"section: has {len(self._view) - self._at} bytes too many")


def _wire(array: npt.NDArray[np.generic], dtype: str) -> bytes:
    return array.astype(_WIRE[dtype]).tobytes()


def _length_dtype(planes: int, tokens_per_stream: int) -> str:
    return "u2" if planes * tokens_per_stream <= 0xFFFF else "u4"


@dataclass(frozen=True, slots=True)
class CodedPart:
    """The coded part of a section.

    Attributes:
        streams: the streams of the planes.
        escapes: the escapes of the planes.
        tokens_per_stream: n.
        classes: the stream of the tokens' classes; None without classes.
    """

    streams: Streams
    escapes: Escapes
    tokens_per_stream: int
    classes: Streams | None = None


def write_streams(
    streams: Streams, escapes: Escapes, planes: int, tokens_per_stream: int, classes: Streams | None = None
) -> bytes:
    """Write the coded part of a section: counts, states, lengths, words, padding, escapes.

    Args:
        streams: the streams of the planes.
        escapes: the escapes of the planes.
        planes: the largest number of planes of a token.
        tokens_per_stream: n.
        classes: the stream of the tokens' classes; None without classes.
    """
    log2 = tokens_per_stream.bit_length() - 1
    parts = [_STREAMS.pack(len(streams.words), len(escapes.index), log2, classes is not None, 0)]
    if classes is not None:
        parts.append(_CLASSES.pack(len(classes.words), int(classes.states[0])))
    parts += [_wire(streams.states, "u4"), _wire(streams.lengths, _length_dtype(planes, tokens_per_stream))]
    if classes is not None:
        parts.append(_wire(classes.words, "u2"))
    parts.append(_wire(streams.words, "u2"))
    parts.append(bytes(-sum(map(len, parts)) % 4))
    parts += [_wire(escapes.index, "u4"), _wire(escapes.value, "i4")]
    return b"".join(parts)


def read_coded(
    reader: Reader, planes: int, rows: int, tokens: int, classed: tuple[int, int] | None = None
) -> CodedPart:
    """Read the output of `write_streams`.

    Args:
        reader: positioned at the coded part.
        planes: planes per token, for tokens without classes.
        rows: components per token, for tokens without classes.
        tokens: number of tokens in the chunk.
        classed: planes and components of the finest class, if the scheme has classes.

    Raises:
        FormatError: counts contradict the lengths, the scheme has no classes but the part does, or escapes lie outside
            the `rows` x `tokens` matrix.
    """
    words, escapes, log2, mode, reserved = reader.unpack(_STREAMS)
    if log2 > MAX_TOKENS_PER_STREAM_LOG2 or mode > 1 or reserved:
        raise FormatError("section: has a stream header out of range")
    class_words = class_state = 0
    if mode:
        if classed is None:
            raise FormatError("section: has token classes, but its scheme or profile has none")
        planes, rows = classed
        class_words, class_state = reader.unpack(_CLASSES)
    per_stream = 1 << log2
    count = stream_count(tokens, per_stream)
    states = reader.array("u4", count).view(np.uint32)
    lengths = reader.array(_length_dtype(planes, per_stream), count).astype(np.uint32)
    if np.any(states < LOWER_BOUND) or (mode and class_state < LOWER_BOUND):
        raise FormatError("section: has a stream that begins in a state below its lower bound")
    if int(lengths.sum(dtype=np.uint64)) != words:
        raise FormatError("section: has streams whose lengths do not add up")
    coded_classes = None
    if mode:
        raw = reader.array("u2", class_words).view(np.uint16)
        coded_classes = Streams(np.array([class_state], np.uint32), np.array([class_words], np.uint32), raw)
    coded = reader.array("u2", words).view(np.uint16)
    reader.skip_padding()
    index = reader.array("u4", escapes).view(np.uint32)
    value = reader.array("i4", escapes).view(np.int32)
    if escapes and (np.any(index[1:] <= index[:-1]) or int(index[-1]) >= rows * tokens):
        raise FormatError("section: has escapes out of order or out of range")
    return CodedPart(Streams(states, lengths, coded), Escapes(index, value), per_stream, coded_classes)

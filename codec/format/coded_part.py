"""The coded part of a section as bytes: see `FORMAT.md`. Compiled loops and kernels read it where it lies."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cuvee.codec.format.streams import Escapes, Streams

HEADER = struct.Struct("<IIBBHII")
_LONG_LENGTHS = 0x10000  # from this many words on, lengths take four bytes


def _wire(array: npt.NDArray[np.generic], dtype: str) -> memoryview:
    return array.astype(np.dtype(dtype).newbyteorder("<"), copy=False).view(np.uint8).data


def length_bytes(planes: int, tokens_per_stream: int) -> int:
    """Return the bytes of a stream's length, if tokens have at most `planes` planes."""
    return 2 if planes * tokens_per_stream < _LONG_LENGTHS else 4


@dataclass(frozen=True, slots=True)
class CodedPart:
    """The coded part of a section: streams and escapes of its planes, n, and the stream of the tokens' classes."""

    streams: Streams
    escapes: Escapes
    tokens_per_stream: int
    classes: Streams


def write_coded(part: CodedPart, planes: int) -> bytes:
    """Return the bytes of a coded part: see `coded_pieces`."""
    return b"".join(coded_pieces(part, planes))


def coded_pieces(part: CodedPart, planes: int) -> list[bytes | memoryview]:
    """Write a coded part in pieces: header, states, lengths, words of the classes and of the streams, padding, escapes.

    `planes` is the largest number of planes that a token may have.
    """
    streams, escapes, n = part.streams, part.escapes, part.tokens_per_stream
    parts: list[bytes | memoryview] = [
        HEADER.pack(
            len(streams.words), len(escapes.index), n.bit_length() - 1, 0, 0, len(part.classes.words),
            int(part.classes.states[0]),
        ),
        _wire(streams.states, "u4"),
        _wire(streams.lengths, f"u{length_bytes(planes, n)}"),
        _wire(part.classes.words, "u2"),
        _wire(streams.words, "u2"),
    ]  # fmt: skip
    parts.append(bytes(-sum(map(len, parts)) % 4))
    parts += [_wire(escapes.index, "u4"), _wire(escapes.value, "i4")]
    return parts

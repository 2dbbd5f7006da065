"""Reads and writes the blob: header, table of contents, sections, checksums. `FORMAT.md` specifies it in prose.

A decoder treats the bytes as hostile. It reads nothing before checking its length, trusts nothing before checking its
checksum, and allocates nothing that is not bounded by the length of the blob.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import xxhash

from cuvee.codec.entropy.family import step_value
from cuvee.codec.errors import CorruptError, FormatError, InputError, KeyMismatchError, VersionError
from cuvee.codec.format.keys import KEY_ID_BYTES, Key
from cuvee.codec.stages.reference.rans import LOWER_BOUND, MAX_TOKENS_PER_STREAM_LOG2, Streams, stream_count
from cuvee.codec.stages.reference.symbols import Escapes

MAGIC = b"cuve"
VERSION = 2
FLAG_TAG = 1
TAG_BYTES = 16
TRAILER_BYTES = KEY_ID_BYTES + TAG_BYTES
MAX_TOKENS = 1 << 24
MAX_SECTIONS = 1 << 16
MAX_STEP_INDEX = 1 << 10  # 16 octaves either way
DTYPES = ("bfloat16", "float16", "float32")
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

_FIXED = struct.Struct("<4sBBBBIIIiII16s16sQ")
_ENTRY = struct.Struct("<IQ")
_CHECKSUM = struct.Struct("<Q")
_STREAMS = struct.Struct("<IIBBH")
_CLASSES = struct.Struct("<II")


class Scheme(IntEnum):
    """How the sections are coded."""

    LOSSLESS = 0
    TRANSFORM = 1
    GENERIC = 2


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a blob.

    Attributes:
        scheme: how the sections are coded.
        dtype: name of the cache's dtype.
        tokens: number of tokens in the chunk.
        start: position of the first one.
        step_index: in units of 1/64 octave; 0 if the scheme has none.
        values_per_token: number of values of all layers, keys and values together.
        layout: fingerprint of the `KVLayout`, 16 bytes.
        profile: id of the profile, 16 bytes; zero for lossless, which needs none.
        section_bytes: length of each section.
        section_hashes: xxh3-64 of each section.
        tagged: whether a key id and a keyed tag end the blob.
    """

    scheme: Scheme
    dtype: str
    tokens: int
    start: int
    step_index: int
    values_per_token: int
    layout: bytes
    profile: bytes
    section_bytes: tuple[int, ...]
    section_hashes: tuple[int, ...]
    tagged: bool

    @property
    def header_bytes(self) -> int:
        """Length of the header, including table of contents and checksum."""
        return _FIXED.size + _ENTRY.size * len(self.section_bytes) + _CHECKSUM.size

    @property
    def total_bytes(self) -> int:
        """Length of the blob."""
        return self.header_bytes + sum(self.section_bytes) + (TRAILER_BYTES if self.tagged else 0)

    def section_offset(self, index: int) -> int:
        """Where section `index` begins in the blob."""
        return self.header_bytes + sum(self.section_bytes[:index])


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """What `inspect` tells without a profile.

    Attributes:
        scheme: "lossless", "transform" or "generic".
        version: format version.
        dtype, tokens, start, values_per_token: what the chunk holds; see `Header`.
        step: quantizer step in the profile's units, or None for lossless.
        layout_fingerprint, profile_id: in hexadecimal; profile_id is None for lossless.
        section_bytes: length of every section, in order.
        header_bytes, total_bytes: length of the header, and of the blob.
        raw_bytes: size of the uncompressed chunk.
        authenticated: whether the blob carries a keyed tag. `inspect` cannot verify it.
    """

    scheme: str
    version: int
    dtype: str
    tokens: int
    start: int
    values_per_token: int
    step: float | None
    layout_fingerprint: str
    profile_id: str | None
    section_bytes: tuple[int, ...]
    header_bytes: int
    total_bytes: int
    raw_bytes: int
    authenticated: bool

    @property
    def bits_per_value(self) -> float:
        """Bits of the whole blob per value of the chunk."""
        return 8 * self.total_bytes / (self.tokens * self.values_per_token)

    @property
    def ratio(self) -> float:
        """Uncompressed bytes per byte of the blob."""
        return self.raw_bytes / self.total_bytes


def _tag(key: Key, associated_data: bytes, *parts: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(key=key.secret, digest_size=TAG_BYTES, person=b"cuvee-tag")
    # The length goes first, so that no bytes can move from the associated data to the blob or back.
    digest.update(_CHECKSUM.pack(len(associated_data)) + associated_data)
    for part in parts:
        digest.update(part)
    return digest.digest()


def write_blob(
    scheme: Scheme,
    dtype: str,
    tokens: int,
    start: int,
    step_index: int,
    values_per_token: int,
    layout: bytes,
    profile: bytes,
    sections: Sequence[bytes],
    key: Key | None,
    associated_data: bytes = b"",
) -> bytes:
    """Put the sections into a blob. A `key` adds an authentication tag over the blob and over `associated_data`."""
    if tokens > MAX_TOKENS:
        raise InputError(f"a chunk holds at most {MAX_TOKENS} tokens, not {tokens}: encode it in pieces")
    if start >= 1 << 32:
        raise InputError(f"start={start} is beyond 2**32 - 1, the last position a blob can name")
    if len(sections) > MAX_SECTIONS or any(len(s) >= 1 << 32 for s in sections):
        raise InputError("a section of this chunk would exceed 4 GiB: encode fewer tokens at a time")
    header_bytes = _FIXED.size + _ENTRY.size * len(sections) + _CHECKSUM.size
    total = header_bytes + sum(map(len, sections)) + (TRAILER_BYTES if key else 0)
    head = _FIXED.pack(
        MAGIC, VERSION, scheme, DTYPES.index(dtype), FLAG_TAG if key else 0, tokens, start, values_per_token,
        step_index, len(sections), 0, layout, profile, total,
    ) + b"".join(_ENTRY.pack(len(s), xxhash.xxh3_64_intdigest(s)) for s in sections)  # fmt: skip
    head += _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head))
    body = [head, *sections]
    if key:
        body.append(key.id)
        body.append(_tag(key, associated_data, *body))
    return b"".join(body)


def plain_bytes(blob: bytes | memoryview) -> bytes | memoryview:
    """`blob` as one run of bytes: itself, a view of it, or a copy where its bytes do not lie side by side.

    Raises:
        InputError: it holds no bytes.
    """
    if isinstance(blob, bytes):
        return blob
    try:
        view = memoryview(blob)
    except TypeError as error:
        raise InputError(f"blob must be bytes or a memoryview, got {type(blob).__name__}") from error
    return view.cast("B") if view.c_contiguous and view.nbytes else view.tobytes()


def read_header(blob: bytes | memoryview) -> Header:
    """Parse and verify the header. This touches no section.

    Raises:
        FormatError: the bytes are not a blob, or their lengths contradict each other.
        VersionError: this build does not know the format version.
        CorruptError: the header's checksum does not match.
        InputError: `blob` is no bytes.
    """
    blob = plain_bytes(blob)
    if len(blob) < _FIXED.size + _CHECKSUM.size:
        raise FormatError(f"{len(blob)} bytes are too few for a cuvee blob: it is truncated or something else")
    fixed = _FIXED.unpack_from(blob)
    magic, version, scheme, dtype, flags, tokens, start, values, step_index, count, reserved, layout, profile, total = (
        fixed
    )
    if magic != MAGIC:
        raise FormatError(f"not a cuvee blob: it begins with {magic!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise VersionError(f"blob format version {version}; this build reads version {VERSION}")
    # The count gives the length of the table of contents, which is checked against the real length before it is read.
    header_bytes = _FIXED.size + _ENTRY.size * count + _CHECKSUM.size
    if count > MAX_SECTIONS or len(blob) < header_bytes:
        raise FormatError(f"the blob is truncated: {count} sections need a header of {header_bytes} bytes")
    head = blob[: header_bytes - _CHECKSUM.size]
    if _CHECKSUM.unpack_from(blob, len(head))[0] != xxhash.xxh3_64_intdigest(head):
        raise CorruptError("the checksum of the blob's header does not match: the bytes are damaged")
    if scheme not in iter(Scheme):
        raise FormatError(f"unknown scheme {scheme}")
    if dtype >= len(DTYPES):
        raise FormatError(f"unknown dtype {dtype}")
    if flags & ~FLAG_TAG or reserved:
        raise FormatError("reserved bits of the header are not zero")
    if not 0 < tokens <= MAX_TOKENS:
        raise FormatError(f"a blob of {tokens} tokens; the limit is 1 … {MAX_TOKENS}")
    if abs(step_index) > MAX_STEP_INDEX:
        raise FormatError(f"step index {step_index}; the limit is {MAX_STEP_INDEX} either way")
    if scheme == Scheme.LOSSLESS and (step_index or any(profile)):
        raise FormatError("a lossless blob names a step or a profile")
    if not count or not values:
        raise FormatError("a blob without sections or values")
    entries = [_ENTRY.unpack_from(blob, _FIXED.size + i * _ENTRY.size) for i in range(count)]
    header = Header(
        Scheme(scheme), DTYPES[dtype], tokens, start, step_index, values, layout, profile,
        tuple(length for length, _ in entries), tuple(checksum for _, checksum in entries), bool(flags & FLAG_TAG),
    )  # fmt: skip
    if header.total_bytes != total:
        raise FormatError(f"the sections add up to {header.total_bytes} bytes, the header says {total}")
    if len(blob) != total:
        raise FormatError(f"the blob has {len(blob)} bytes, its header says {total}: it is truncated or has a tail")
    return header


def verify_tag(blob: bytes | memoryview, header: Header, keys: Sequence[Key], associated_data: bytes = b"") -> None:
    """Verify the keyed tag.

    Args:
        blob: the blob with its tag.
        header: its header.
        keys: the accepted keys. If there are none, the blob must have no tag.
        associated_data: what the blob must have been bound to.

    Raises:
        CorruptError: the tag does not belong to these bytes bound to `associated_data`.
        KeyMismatchError: the blob has a tag and there are no keys, or there are keys and its tag is none of theirs.
    """
    if not keys and not header.tagged:
        return
    if not keys:
        raise KeyMismatchError("the blob carries an authentication tag: give Codec the key= it was encoded with")
    if not header.tagged:
        raise KeyMismatchError(
            "the blob carries no authentication tag, but this Codec has a key=: it is not to be trusted"
        )
    body, tag = memoryview(blob)[:-TAG_BYTES], bytes(blob[-TAG_BYTES:])
    name = bytes(body[-KEY_ID_BYTES:])
    key = next((key for key in keys if key.id == name), None)
    if key is None:
        known = ", ".join(key.id.hex() for key in keys)
        raise KeyMismatchError(f"the blob was made with the key of id {name.hex()}, this Codec has {known}")
    if not hmac.compare_digest(_tag(key, associated_data, body), tag):
        raise CorruptError("the authentication tag does not match: the bytes were changed, or belong somewhere else")


def read_section(blob: bytes | memoryview, header: Header, index: int) -> memoryview:
    """The bytes of one section, its checksum verified.

    Raises:
        CorruptError: its checksum does not match.
    """
    return read_sections(blob, header, range(index, index + 1))[0]


def read_sections(blob: bytes | memoryview, header: Header, indices: range) -> list[memoryview]:
    """The bytes of adjacent sections, their checksums verified.

    Raises:
        CorruptError: a checksum does not match.
    """
    views, offset = [], header.section_offset(indices.start)
    for index in indices:
        view = memoryview(blob)[offset : offset + header.section_bytes[index]]
        if xxhash.xxh3_64_intdigest(view) != header.section_hashes[index]:
            raise CorruptError(f"the checksum of section {index} does not match: the bytes are damaged")
        views.append(view)
        offset += header.section_bytes[index]
    return views


def inspect(blob: bytes | memoryview) -> BlobInfo:
    """Look at a blob without a profile: its identity, tokens and sizes. This verifies the header, not the sections.

    Raises:
        FormatError, VersionError, CorruptError: as for `read_header`.
        InputError: `blob` is no bytes.

    Example:
        >>> import torch
        >>> from cuvee import Codec, KVChunk, KVLayout, LayerLayout, Profile, inspect
        >>> layout = KVLayout("mine", (LayerLayout(2, 8, 8, None),) * 3, "float32", max_positions=None)
        >>> chunk = KVChunk(torch.zeros(3, 64, 2, 8), torch.zeros(3, 64, 2, 8), layout)
        >>> info = inspect(Codec(Profile.generic(layout), "lossless").encode(chunk))
        >>> info.scheme, info.tokens, info.raw_bytes
        ('lossless', 64, 24576)
    """
    header = read_header(blob)
    lossless = header.scheme is Scheme.LOSSLESS
    return BlobInfo(
        scheme=header.scheme.name.lower(),
        version=VERSION,
        dtype=header.dtype,
        tokens=header.tokens,
        start=header.start,
        values_per_token=header.values_per_token,
        step=None if lossless else step_value(header.step_index),
        layout_fingerprint=header.layout.hex(),
        profile_id=None if lossless else header.profile.hex(),
        section_bytes=header.section_bytes,
        header_bytes=header.header_bytes,
        total_bytes=header.total_bytes,
        raw_bytes=header.tokens * header.values_per_token * _ITEM_BYTES[header.dtype],
        authenticated=header.tagged,
    )


_NATIVE = {name: np.dtype(name) for name in ("u1", "u2", "u4", "i2", "i4")}
_WIRE = {name: dtype.newbyteorder("<") for name, dtype in _NATIVE.items()}


class Reader:
    """Reads the fields of a section in order. It refuses to read past the end, and to leave a tail."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    @property
    def position(self) -> int:
        """How many bytes were read so far."""
        return self._at

    def take(self, count: int) -> memoryview:
        """The next `count` bytes. Raises FormatError if fewer are left."""
        if count > len(self._view) - self._at:
            raise FormatError(f"a section ends {count - (len(self._view) - self._at)} bytes too early")
        self._at += count
        return self._view[self._at - count : self._at]

    def unpack(self, fields: struct.Struct) -> tuple[int, ...]:
        """The next fields, as the struct describes them."""
        return fields.unpack(self.take(fields.size))

    def array(self, dtype: str, count: int) -> npt.NDArray[np.generic]:
        """The next `count` little-endian numbers, as an aligned copy in native byte order."""
        wire, native = _WIRE[dtype], _NATIVE[dtype]
        return np.frombuffer(self.take(count * wire.itemsize), wire).astype(native)

    def skip_padding(self) -> None:
        """Skip zero bytes up to a multiple of four. Raises FormatError if they are not zero."""
        if any(self.take(-self._at % 4)):
            raise FormatError("padding of a section is not zero")

    def finish(self) -> None:
        """Raise FormatError unless all bytes were read."""
        if self._at != len(self._view):
            raise FormatError(f"a section has {len(self._view) - self._at} bytes too many")


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
        classes: the stream of the tokens' classes; None if the tokens have none.
    """

    streams: Streams
    escapes: Escapes
    tokens_per_stream: int
    classes: Streams | None = None


def write_streams(
    streams: Streams, escapes: Escapes, planes: int, tokens_per_stream: int, classes: Streams | None = None
) -> bytes:
    """The coded part of a section: counts, states, lengths, words, padding, escapes.

    Args:
        streams: the streams of the planes.
        escapes: the escapes of the planes.
        planes: the largest number of planes of a token.
        tokens_per_stream: n.
        classes: the one stream of the tokens' classes; None if the tokens have none.
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


def read_streams(reader: Reader, planes: int, rows: int, tokens: int) -> tuple[Streams, Escapes, int]:
    """Streams, escapes and tokens per stream of a coded part without token classes; see `read_coded`."""
    part = read_coded(reader, planes, rows, tokens)
    return part.streams, part.escapes, part.tokens_per_stream


def read_coded(
    reader: Reader, planes: int, rows: int, tokens: int, classed: tuple[int, int] | None = None
) -> CodedPart:
    """The inverse of `write_streams`.

    Args:
        reader: positioned at the coded part.
        planes: planes of every token, if the tokens have no classes.
        rows: components of every token, if the tokens have no classes.
        tokens: number of tokens in the chunk.
        classed: planes and components of the finest class, if the scheme has classes.

    Raises:
        FormatError: counts contradict the lengths, there are classes although the scheme has none, or escapes lie
            outside the `rows` x `tokens` matrix.
    """
    words, escapes, log2, mode, reserved = reader.unpack(_STREAMS)
    if log2 > MAX_TOKENS_PER_STREAM_LOG2 or mode > 1 or reserved:
        raise FormatError("the stream header of a section is out of range")
    class_words = class_state = 0
    if mode:
        if classed is None:
            raise FormatError("a section has token classes, which its scheme or its profile does not")
        planes, rows = classed
        class_words, class_state = reader.unpack(_CLASSES)
    per_stream = 1 << log2
    count = stream_count(tokens, per_stream)
    states = reader.array("u4", count).view(np.uint32)
    lengths = reader.array(_length_dtype(planes, per_stream), count).astype(np.uint32)
    if np.any(states < LOWER_BOUND) or (mode and class_state < LOWER_BOUND):
        raise FormatError("a stream begins in a state below its lower bound")
    if int(lengths.sum(dtype=np.uint64)) != words:
        raise FormatError("the lengths of a section's streams do not add up")
    coded_classes = None
    if mode:
        raw = reader.array("u2", class_words).view(np.uint16)
        coded_classes = Streams(np.array([class_state], np.uint32), np.array([class_words], np.uint32), raw)
    coded = reader.array("u2", words).view(np.uint16)
    reader.skip_padding()
    index = reader.array("u4", escapes).view(np.uint32)
    value = reader.array("i4", escapes).view(np.int32)
    if escapes and (np.any(index[1:] <= index[:-1]) or int(index[-1]) >= rows * tokens):
        raise FormatError("the escapes of a section are out of order or out of range")
    return CodedPart(Streams(states, lengths, coded), Escapes(index, value), per_stream, coded_classes)

"""Read and write blobs: header, table of contents, sections, checksums. `FORMAT.md` specifies the format.

A decoder treats the bytes as hostile: it checks lengths before reading, checks checksums before trusting, and bounds
allocations by the length of the blob.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from cuvee.codec.errors import CorruptError, FormatError, InputError, VersionError
from cuvee.codec.format.keys import TRAILER_BYTES, Key, tag_of
from cuvee.codec.support.steps import step_value

MAGIC = b"cuve"
VERSION = 4
FLAG_TAG = 1
FLAG_TOKEN_IDS = 2
DIGEST_BYTES = 16
MAX_TOKENS = 1 << 24
MAX_SECTIONS = 1 << 16
MAX_SECTION_BYTES = (1 << 31) - 1  # so that decoders find any word by a signed number of 32 bits
MAX_STEP_INDEX = 1 << 10  # 16 octaves either way
DTYPES = ("bfloat16", "float16", "float32")
MAX_VOCABULARY = 1 << 24  # ids take three bytes at most
NO_DIGEST = bytes(DIGEST_BYTES)
ID_BYTES = (2, 3)  # bytes per token id
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

_FIXED = struct.Struct("<4sBBBBIIIiII16s16s16sQ")
_COUNT = struct.Struct("<B16xI")  # flags and number of sections, from the offset of the flags on
_FLAGS_AT = 7
_ENTRY = struct.Struct("<IBQ")
_CHECKSUM = struct.Struct("<Q")


class Kind(IntEnum):
    """What a blob holds."""

    CHUNK = 0
    REFINEMENT = 1  # what a chunk's blob left over
    STATES = 2  # what layers hold at the end of a cache, beside keys and values: see `codec/states.py`


class Scheme(IntEnum):
    """How a section is coded. In the table of contents, 0 is the token ids."""

    LOSSLESS = 1
    TRANSFORM = 2


_TOKEN_IDS = 0

Piece = bytes | bytearray | memoryview  # of bytes, with one dimension
SectionBytes = bytes | Sequence[Piece]  # pieces are joined once, in the blob


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a blob holds: all that a writer needs beside the bytes.

    Attributes:
        kind: a chunk, a refinement of one, or the states at the end of a cache.
        dtype: name of the cache's dtype.
        tokens: number of tokens in the chunk, or before the states.
        start: position of the first token, or of the one after the states, which is their number of tokens.
        values_per_token: number of values per token, keys and values of all layers; 0 of states.
        step_index: of the quantizer's step, in units of 1/64 octave; 0 without loss.
        schemes: the coding of each section. All are equal.
        layout: fingerprint of the `KVLayout`, 16 bytes.
        profile: id of the profile, 16 bytes; zero without loss.
        refines: in a refinement, the `header_digest` of the blob that it refines, 16 bytes; zero in a chunk.
    """

    kind: Kind = Kind.CHUNK
    dtype: str
    tokens: int
    start: int
    values_per_token: int
    step_index: int = 0
    schemes: tuple[Scheme, ...]
    layout: bytes
    profile: bytes = NO_DIGEST
    refines: bytes = NO_DIGEST

    @property
    def lossless(self) -> bool:
        """Whether all sections are coded without loss, which needs no profile."""
        return Scheme.TRANSFORM not in self.schemes


@dataclass(frozen=True, slots=True, kw_only=True)
class Header(Contents):
    """The header of a blob: its contents, and where they lie.

    Attributes:
        section_hashes: xxh3-64 of each section.
        tagged: whether a key id and a keyed tag end the blob.
        token_id_bytes: length of the token ids, which precede the sections; 0 if the blob holds none.
        token_id_hash: xxh3-64 of the token ids; 0 if the blob holds none.
    """

    section_bytes: tuple[int, ...]
    section_hashes: tuple[int, ...]
    tagged: bool
    token_id_bytes: int = 0
    token_id_hash: int = 0

    @property
    def header_bytes(self) -> int:
        """Length of the header in bytes, including table of contents and checksum."""
        return _header_bytes(len(self.section_bytes), self.token_id_bytes > 0)

    @property
    def total_bytes(self) -> int:
        """Length of the blob in bytes."""
        return self.section_offset(len(self.section_bytes)) + (TRAILER_BYTES if self.tagged else 0)

    def section_offset(self, index: int) -> int:
        """Return the offset of section `index` in the blob."""
        return self.header_bytes + self.token_id_bytes + sum(self.section_bytes[:index])


def _header_bytes(sections: int, token_ids: bool) -> int:
    return _FIXED.size + _ENTRY.size * (sections + token_ids) + _CHECKSUM.size


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """The information in a blob that needs no profile.

    Attributes:
        kind: "chunk", "refinement" or "states".
        scheme: "lossless" or "transform".
        version: format version.
        dtype, tokens, start, values_per_token: the contents of the chunk; see `Contents`.
        step: quantizer step in the profile's units, or None for lossless.
        layout_fingerprint, profile_id, refines: in hexadecimal; profile_id is None for lossless, and refines is None
            except for a refinement.
        section_bytes: length of each section, in order.
        token_id_bytes: length of the token ids; 0 if the blob holds none.
        header_bytes, total_bytes: length of the header and of the blob.
        raw_bytes: size of the uncompressed chunk, or of the sections of states.
        authenticated: whether the blob carries a keyed tag. `inspect` cannot verify it.
    """

    kind: str
    scheme: str
    version: int
    dtype: str
    tokens: int
    start: int
    values_per_token: int
    step: float | None
    layout_fingerprint: str
    profile_id: str | None
    refines: str | None
    section_bytes: tuple[int, ...]
    token_id_bytes: int
    header_bytes: int
    total_bytes: int
    raw_bytes: int
    authenticated: bool

    @property
    def bits_per_value(self) -> float:
        """Bits of the whole blob per value of the cache's dtype."""
        return 8 * self.total_bytes / (self.raw_bytes / _ITEM_BYTES[self.dtype])

    @property
    def ratio(self) -> float:
        """Uncompressed bytes per byte of the blob."""
        return self.raw_bytes / self.total_bytes


def write_blob(
    contents: Contents,
    sections: Sequence[SectionBytes],
    *,
    token_ids: bytes = b"",
    key: Key | None = None,
    associated_data: bytes = b"",
) -> bytes:
    """Write the sections, and what `write_token_ids` returned, to a blob; `key` adds a tag over it and
    `associated_data`.

    Raises:
        InputError: more tokens, sections or bytes than a blob can hold.
    """
    if contents.tokens > MAX_TOKENS:
        raise InputError(f"tokens: must be at most {MAX_TOKENS} per chunk, got {contents.tokens}: encode in pieces")
    parts = [[part] if isinstance(part, bytes) else part for part in ([token_ids] if token_ids else []) + [*sections]]
    sizes = [sum(map(len, part)) for part in parts]
    if len(sections) > MAX_SECTIONS or max(sizes, default=0) > MAX_SECTION_BYTES:
        raise InputError("chunk: must have sections below 2 GiB: encode fewer tokens at a time")
    schemes = [_TOKEN_IDS, *contents.schemes] if token_ids else contents.schemes
    total = _header_bytes(len(sections), bool(token_ids)) + sum(sizes) + (TRAILER_BYTES if key else 0)
    flags = (FLAG_TAG if key else 0) | (FLAG_TOKEN_IDS if token_ids else 0)
    head = _FIXED.pack(
        MAGIC, VERSION, contents.kind, DTYPES.index(contents.dtype), flags, contents.tokens, contents.start,
        contents.values_per_token, contents.step_index, len(sections), 0, contents.layout, contents.profile,
        contents.refines, total,
    )  # fmt: skip
    head += b"".join(
        _ENTRY.pack(size, scheme, _hash(part)) for size, scheme, part in zip(sizes, schemes, parts, strict=True)
    )
    head += _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head))
    body = [head, *(piece for part in parts for piece in part)]
    if key:
        body.append(key.id)
        body.append(tag_of(key, associated_data, *body))
    return b"".join(body)


def _hash(pieces: Sequence[Piece]) -> int:
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()


def contiguous_bytes(blob: bytes | memoryview) -> bytes | memoryview:
    """Return `blob` as contiguous bytes: the blob itself, a view of it, or a copy if it is not contiguous.

    Raises:
        InputError: `blob` is not bytes.
    """
    if isinstance(blob, bytes):
        return blob
    try:
        view = memoryview(blob)
    except TypeError as error:
        raise InputError(f"blob: must be bytes or a memoryview, got {type(blob).__name__}") from error
    return view.cast("B") if view.c_contiguous and view.nbytes else view.tobytes()


def read_header(blob: bytes | memoryview) -> Header:
    """Parse and verify the header, without reading the sections.

    Raises:
        FormatError: the bytes are not a blob, or their lengths contradict each other.
        VersionError: this build does not know the format version.
        CorruptError: the header's checksum does not match.
        InputError: `blob` is not bytes.
    """
    blob = contiguous_bytes(blob)
    # A shorter blob of another version is still told by its version.
    if len(blob) > len(MAGIC) and blob[: len(MAGIC)] == MAGIC and blob[len(MAGIC)] != VERSION:
        version = blob[len(MAGIC)]
        remedy = "encode the chunk again" if version < VERSION else "read it with the cuvee that wrote it"
        raise VersionError(f"blob: has format version {version}; this build reads version {VERSION}: {remedy}")
    if len(blob) < _FIXED.size + _CHECKSUM.size:
        raise FormatError(f"blob: {len(blob)} bytes are too few for a cuvee blob: it is truncated or something else")
    (
        magic, _, kind, dtype, flags, tokens, start, values, step_index, count, reserved, layout, profile, refines,
        total,
    ) = _FIXED.unpack_from(blob)  # fmt: skip
    if magic != MAGIC:
        raise FormatError(f"not a cuvee blob: it begins with {magic!r} instead of {MAGIC!r}")
    # The count gives the length of the table of contents, which is checked against the real length before it is read.
    has_ids = bool(flags & FLAG_TOKEN_IDS)
    header_bytes = _header_bytes(count, has_ids)
    if count > MAX_SECTIONS or len(blob) < header_bytes:
        raise FormatError(f"blob: is truncated: {count} sections need a header of {header_bytes} bytes")
    head = blob[: header_bytes - _CHECKSUM.size]
    if _CHECKSUM.unpack_from(blob, len(head))[0] != xxhash.xxh3_64_intdigest(head):
        raise CorruptError("header: its checksum does not match: the bytes are damaged")
    if kind not in iter(Kind):
        raise FormatError(f"header: must be of kind 0 (a chunk), 1 (a refinement) or 2 (states), got {kind}")
    if dtype >= len(DTYPES):
        raise FormatError(f"header: has the unknown dtype {dtype}")
    if flags & ~(FLAG_TAG | FLAG_TOKEN_IDS) or reserved:
        raise FormatError("header: has reserved bits that are not zero")
    if not 0 < tokens <= MAX_TOKENS:
        raise FormatError(f"header: must have 1 … {MAX_TOKENS} tokens, got {tokens}")
    if abs(step_index) > MAX_STEP_INDEX:
        raise FormatError(f"header: must have a step index of at most ±{MAX_STEP_INDEX}, got {step_index}")
    if not count or (values > 0) is (kind == Kind.STATES):
        raise FormatError("header: must have sections, and values unless it is of states, which have none")
    lengths, schemes, hashes = zip(
        *(_ENTRY.unpack_from(blob, _FIXED.size + i * _ENTRY.size) for i in range(count + has_ids)), strict=True
    )
    if any(length > MAX_SECTION_BYTES for length in lengths):
        raise FormatError("header: lists a section that is not below 2 GiB")
    if has_ids and (schemes[0] != _TOKEN_IDS or lengths[0] not in (tokens * width for width in ID_BYTES)):
        raise FormatError(f"header: lists {lengths[0]} bytes of token ids, which {tokens} tokens cannot have")
    coded = schemes[has_ids:]
    if coded[0] not in iter(Scheme) or any(scheme != coded[0] for scheme in coded):
        raise FormatError(f"header: must list sections that are all of scheme 1 or all of scheme 2, got {set(coded)}")
    header = Header(
        kind=Kind(kind), dtype=DTYPES[dtype], tokens=tokens, start=start, values_per_token=values,
        step_index=step_index, schemes=tuple(map(Scheme, coded)), layout=layout, profile=profile, refines=refines,
        section_bytes=lengths[has_ids:], section_hashes=hashes[has_ids:], tagged=bool(flags & FLAG_TAG),
        token_id_bytes=lengths[0] if has_ids else 0, token_id_hash=hashes[0] if has_ids else 0,
    )  # fmt: skip
    _check_names(header)
    if header.total_bytes != total:
        raise FormatError(f"header: says {total} bytes, but the sections add up to {header.total_bytes}")
    if len(blob) != total:
        raise FormatError(f"blob: has {len(blob)} bytes, its header says {total}: it is truncated or has a tail")
    return header


def _check_names(header: Header) -> None:
    """Raise FormatError unless the header names a profile, a step, a base and token ids exactly where it may."""
    if header.lossless:
        if header.step_index or header.profile != NO_DIGEST:
            raise FormatError("header: must name neither a step nor a profile in a lossless blob")
        if header.token_id_bytes:
            raise FormatError("header: must list no token ids in a lossless blob")
    elif header.profile == NO_DIGEST:
        raise FormatError("header: must name the profile of a blob that is not lossless")
    if header.kind is Kind.STATES and (not header.lossless or header.start != header.tokens):
        raise FormatError("header: must have lossless sections where it is of states, and start behind their tokens")
    if header.kind is Kind.STATES and not all(header.section_bytes):
        raise FormatError("header: must list states, got an empty section")
    if header.kind is not Kind.REFINEMENT:
        if header.refines != NO_DIGEST:
            raise FormatError("header: must refine nothing unless it is of a refinement")
    elif header.lossless or header.token_id_bytes or header.refines == NO_DIGEST:
        raise FormatError("header: must name what a refinement refines, with neither token ids nor lossless sections")


def header_digest(blob: bytes | memoryview) -> bytes:
    """Return the 16 bytes that a refinement of this blob names: BLAKE2b of its header, contents and checksum.

    The table of contents holds the checksums of all sections, so the digest commits to them, too.
    """
    flags, count = _COUNT.unpack_from(blob, _FLAGS_AT)
    head = memoryview(blob)[: _header_bytes(count, bool(flags & FLAG_TOKEN_IDS))]
    return hashlib.blake2b(head, digest_size=DIGEST_BYTES, person=b"cuvee-refined").digest()


def read_section(blob: bytes | memoryview, header: Header, index: int) -> memoryview:
    """Return the bytes of one section, after verifying its checksum.

    Raises:
        CorruptError: its checksum does not match.
    """
    return read_sections(blob, header, range(index, index + 1))[0]


def read_sections(blob: bytes | memoryview, header: Header, indices: range) -> list[memoryview]:
    """Return the bytes of adjacent sections, after verifying their checksums.

    Raises:
        CorruptError: a checksum does not match.
    """
    views, offset = [], header.section_offset(indices.start)
    for index in indices:
        view = memoryview(blob)[offset : offset + header.section_bytes[index]]
        if xxhash.xxh3_64_intdigest(view) != header.section_hashes[index]:
            raise CorruptError(f"section {index}: its checksum does not match: the bytes are damaged")
        views.append(view)
        offset += header.section_bytes[index]
    return views


def inspect(blob: bytes | memoryview) -> BlobInfo:
    """Read a blob's identity, tokens and sizes, without a profile. This verifies the header, not the sections.

    Raises:
        FormatError, VersionError, CorruptError: as for `read_header`.
        InputError: `blob` is not bytes.

    Example:
        >>> import torch
        >>> from cuvee import Codec, KVChunk, KVLayout, LayerLayout, Profile, inspect
        >>> layout = KVLayout("mine", (LayerLayout(2, 8, 8, None),) * 3, "float32", max_positions=None)
        >>> chunk = KVChunk(torch.zeros(3, 64, 2, 8), torch.zeros(3, 64, 2, 8), layout)
        >>> info = inspect(Codec(Profile.unlearned(layout), "lossless").encode(chunk))
        >>> info.scheme, info.tokens, info.raw_bytes
        ('lossless', 64, 24576)
    """
    header = read_header(blob)
    return BlobInfo(
        kind=header.kind.name.lower(),
        scheme=header.schemes[0].name.lower(),
        version=VERSION,
        dtype=header.dtype,
        tokens=header.tokens,
        start=header.start,
        values_per_token=header.values_per_token,
        step=None if header.lossless else step_value(header.step_index),
        layout_fingerprint=header.layout.hex(),
        profile_id=None if header.lossless else header.profile.hex(),
        refines=header.refines.hex() if header.kind is Kind.REFINEMENT else None,
        section_bytes=header.section_bytes,
        token_id_bytes=header.token_id_bytes,
        header_bytes=header.header_bytes,
        total_bytes=header.total_bytes,
        raw_bytes=header.tokens * header.values_per_token * _ITEM_BYTES[header.dtype]
        if header.values_per_token
        else sum(header.section_bytes),
        authenticated=header.tagged,
    )

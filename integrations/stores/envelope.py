"""The envelope around a blob in a persistent store, by which a reader tells a good entry from a bad one.

    offset  bytes  field (numbers little-endian, checksums in their canonical, big-endian form)
         0      4  magic "cuvS"
         4      1  version, 1
         5      3  zeros
         8      8  float64: time of writing, in seconds since 1970
        16      8  uint64: bytes of payload
        24     16  XXH3-128 of the payload
        40     16  XXH3-128 of the key: an entry that was moved or copied to another name is refused
        56      8  XXH3-64 of bytes 0 to 55
        64      .  the payload

The checksums detect damage, not malice: anyone who can write to a store can forge them. The tag of a blob, which is
bound to its store key (`Codec(key=)`), resists forgery. Without a tag, the store must be trusted.
"""

from __future__ import annotations

import math
import struct
import time
from dataclasses import dataclass

from xxhash import xxh3_64_digest, xxh3_128_digest

from cuvee.codec.errors import CorruptError, CuveeError

_MAGIC = b"cuvS"
_VERSION = 1
_FIELDS = struct.Struct("<4sB3sdQ16s16s")
_CHECK_BYTES = 8
HEADER_BYTES = _FIELDS.size + _CHECK_BYTES


class ExpiredError(CuveeError):
    """The entry is older than its time to live."""

    blames_blob = True


@dataclass(frozen=True, slots=True)
class EntryHeader:
    """The header of an entry, with its own checksum verified.

    Attributes:
        written: time of writing, in seconds since 1970.
        length: bytes of payload that follow.
        digest: XXH3-128 of the payload.
        key_digest: XXH3-128 of the key.
    """

    written: float
    length: int
    digest: bytes
    key_digest: bytes

    def verify(self, key: str, ttl: float | None = None, now: float | None = None) -> None:
        """Refuse an entry that belongs to another key or is older than `ttl` seconds.

        Raises:
            CorruptError: the entry was written under another key.
            ExpiredError: the entry was written more than `ttl` before `now` (default: the current time).
        """
        if self.key_digest != xxh3_128_digest(key.encode()):
            raise CorruptError("entry: belongs to another key")
        if self.expired(ttl, now):
            raise ExpiredError(f"entry: older than its time to live of {ttl} s")

    def expired(self, ttl: float | None, now: float | None = None) -> bool:
        """Return whether the entry was written more than `ttl` seconds before `now` (default: the current time)."""
        return ttl is not None and (time.time() if now is None else now) - self.written > ttl

    def verify_payload(self, payload: bytes | memoryview) -> None:
        """Refuse a payload that differs from the one that was written.

        Raises:
            CorruptError: the length or the checksum differs.
        """
        if len(payload) != self.length:
            raise CorruptError(f"entry: payload must have {self.length} bytes, as its header says, got {len(payload)}")
        if xxh3_128_digest(payload) != self.digest:
            raise CorruptError("entry: the checksum of the payload does not match")


def make_header(key: str, blob: bytes, written: float) -> bytes:
    """Make the header, of `HEADER_BYTES`, that precedes `blob`. Writing them one after the other saves a copy."""
    fields = _FIELDS.pack(
        _MAGIC, _VERSION, bytes(3), written, len(blob), xxh3_128_digest(blob), xxh3_128_digest(key.encode())
    )
    return fields + xxh3_64_digest(fields)


def parse_header(data: bytes | memoryview) -> EntryHeader:
    """Parse the header at the start of `data`.

    Raises:
        CorruptError: the data are too short, not an entry, of an unknown version, or changed since they were written.
    """
    if len(data) < HEADER_BYTES:
        raise CorruptError(f"entry: must have at least the {HEADER_BYTES} bytes of a header, got {len(data)}")
    fields = bytes(data[: _FIELDS.size])
    if bytes(data[_FIELDS.size : HEADER_BYTES]) != xxh3_64_digest(fields):
        raise CorruptError("entry: the checksum of the header does not match")
    magic, version, reserved, written, length, digest, key_digest = _FIELDS.unpack(fields)
    if magic != _MAGIC or version != _VERSION or any(reserved) or not math.isfinite(written):
        raise CorruptError(f"entry: magic {magic!r}, version {version}: not a format that this build reads")
    return EntryHeader(written, length, digest, key_digest)


def seal(key: str, blob: bytes, written: float) -> bytes:
    """Make the entry of `blob` under `key`, written at `written` (seconds since 1970)."""
    return make_header(key, blob, written) + blob


def unseal(key: str, data: bytes, ttl: float | None = None, now: float | None = None) -> bytes:
    """Return the blob of an entry.

    Args:
        key: the requested key.
        data: the entry as the store returned it.
        ttl: seconds an entry lives after it was written; None means forever.
        now: seconds since 1970; default: the current time.

    Raises:
        CorruptError: the magic, length or checksum is wrong, or the entry belongs to another key.
        ExpiredError: the entry is older than `ttl`.
    """
    header = parse_header(data)
    header.verify(key, ttl, now)
    payload = memoryview(data)[HEADER_BYTES:]
    header.verify_payload(payload)
    return bytes(payload)

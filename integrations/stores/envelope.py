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


def make_header(key: str, blob: bytes, written: float) -> bytes:
    """Make the header, of `HEADER_BYTES`, that precedes `blob`. Writing them one after the other saves a copy."""
    fields = _FIELDS.pack(
        _MAGIC, _VERSION, bytes(3), written, len(blob), xxh3_128_digest(blob), xxh3_128_digest(key.encode())
    )
    return fields + xxh3_64_digest(fields)


def seal(key: str, blob: bytes, written: float) -> bytes:
    """Make the entry of `blob` under `key`, written at `written` (seconds since 1970)."""
    return make_header(key, blob, written) + blob


def verify(
    key: str, header: bytes, payload: bytes | memoryview, ttl: float | None = None, now: float | None = None
) -> None:
    """Refuse an entry that is bad or expired.

    Args:
        key: the requested key.
        header: the first `HEADER_BYTES` of the entry, as the store returned it.
        payload: the others.
        ttl: seconds an entry lives after it was written; None means forever.
        now: seconds since 1970; default: the current time.

    Raises:
        CorruptError: the magic, length or checksum is wrong, or the entry belongs to another key.
        ExpiredError: the entry is older than `ttl`.
    """
    if len(header) < HEADER_BYTES:
        raise CorruptError(f"entry: must have at least the {HEADER_BYTES} bytes of a header, got {len(header)}")
    fields = header[: _FIELDS.size]
    if header[_FIELDS.size :] != xxh3_64_digest(fields):
        raise CorruptError("entry: the checksum of the header does not match")
    magic, version, reserved, written, length, digest, key_digest = _FIELDS.unpack(fields)
    if magic != _MAGIC or version != _VERSION or any(reserved) or not math.isfinite(written):
        raise CorruptError(f"entry: magic {magic!r}, version {version}: not a format that this build reads")
    if key_digest != xxh3_128_digest(key.encode()):
        raise CorruptError("entry: belongs to another key")
    if ttl is not None and (time.time() if now is None else now) - written > ttl:
        raise ExpiredError(f"entry: older than its time to live of {ttl} s")
    if len(payload) != length:
        raise CorruptError(f"entry: payload must have {length} bytes, as its header says, got {len(payload)}")
    if xxh3_128_digest(payload) != digest:
        raise CorruptError("entry: the checksum of the payload does not match")

"""Secrets that authenticate blobs: their ids, and the tags that they make."""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from cuvee.codec.errors import CorruptError, InputError, KeyMismatchError

if TYPE_CHECKING:
    from cuvee.codec.format.container import Header

Secrets = bytes | Sequence[bytes]

MIN_KEY_BYTES = 16
MAX_KEY_BYTES = hashlib.blake2b.MAX_KEY_SIZE
KEY_ID_BYTES = 8
TAG_BYTES = 16
TRAILER_BYTES = KEY_ID_BYTES + TAG_BYTES
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Key:
    """A secret and its id. Its repr does not show the secret, and it cannot be pickled.

    Attributes:
        id: 8 bytes that identify the secret without revealing it: keyed BLAKE2b of an empty message.
        secret: 16 to 64 bytes.
    """

    id: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def of(cls, secret: object) -> Key:
        """Make the key of a secret.

        Raises:
            InputError: the secret is not 16 to 64 bytes long.
        """
        if not isinstance(secret, bytes) or not MIN_KEY_BYTES <= len(secret) <= MAX_KEY_BYTES:
            got = f"{len(secret)} bytes" if isinstance(secret, bytes) else type(secret).__name__
            raise InputError(f"key: must be {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes of secret, got {got}")
        name = hashlib.blake2b(key=secret, digest_size=KEY_ID_BYTES, person=b"cuvee-key-id").digest()
        return cls(name, secret)

    def __reduce__(self) -> NoReturn:
        raise InputError(
            "key: must not be pickled or copied with its Codec, since the bytes would hold the secret; make a Codec "
            "where it is used, with the key from that process's environment, or share one Codec between threads"
        )


def make_keys(key: Secrets | None) -> tuple[Key, ...]:
    """Return the keys of an argument `key=`: one secret, or several, of which the first writes; None gives no keys.

    Raises:
        InputError: a secret is not 16 to 64 bytes, or the list is empty.
    """
    if key is None:
        return ()
    secrets = [key] if isinstance(key, bytes) or not isinstance(key, Sequence) else list(key)
    if not secrets:
        raise InputError("key: must hold at least one secret, got none; use None for blobs without a tag")
    # During rotation, the old and the new secret may be equal for a while.
    return tuple(dict.fromkeys(Key.of(secret) for secret in secrets))


def tag_of(key: Key, associated_data: bytes, *parts: bytes | bytearray | memoryview) -> bytes:
    """Return the tag of a blob, given its parts without the tag."""
    digest = hashlib.blake2b(key=key.secret, digest_size=TAG_BYTES, person=b"cuvee-tag")
    # The length goes first, so that no bytes can move between the associated data and the blob.
    digest.update(_LENGTH.pack(len(associated_data)) + associated_data)
    for part in parts:
        digest.update(part)
    return digest.digest()


def verify_tag(blob: bytes | memoryview, header: Header, keys: Sequence[Key], associated_data: bytes = b"") -> None:
    """Verify the tag, by one of the keys. Without keys, the blob must have no tag.

    Raises:
        CorruptError: the tag does not match the bytes and `associated_data`.
        KeyMismatchError: the blob has a tag but there are no keys, or no key matches its tag.
    """
    if not keys and not header.tagged:
        return
    if not keys:
        raise KeyMismatchError("blob: carries an authentication tag: give Codec the key= it was encoded with")
    if not header.tagged:
        raise KeyMismatchError("blob: carries no authentication tag, but this Codec has a key=: do not trust it")
    body, tag = memoryview(blob)[:-TAG_BYTES], bytes(blob[-TAG_BYTES:])
    name = bytes(body[-KEY_ID_BYTES:])
    key = next((key for key in keys if key.id == name), None)
    if key is None:
        ids = ", ".join(key.id.hex() for key in keys)
        raise KeyMismatchError(f"blob: was made with the key of id {name.hex()}, this Codec has {ids}")
    if not hmac.compare_digest(tag_of(key, associated_data, body), tag):
        raise CorruptError(
            "blob: its authentication tag does not match: the bytes were changed, or belong somewhere else"
        )

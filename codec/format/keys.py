"""Secrets that authenticate blobs: their sources and their ids.

A secret comes from an environment variable or a file, never from the value of an option, because options are logged,
shown by `repr`, and echoed by servers.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from cuvee.codec.errors import InputError

Secrets = bytes | Sequence[bytes]

MIN_KEY_BYTES = 16
MAX_KEY_BYTES = hashlib.blake2b.MAX_KEY_SIZE
KEY_ID_BYTES = 8
MAX_FILE_BYTES = 1 << 16  # limit for a file with a secret, so that no device or disk image is read by mistake


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


def read_secret(option: str, *, env: str | None = None, file: str | None = None) -> bytes:
    """Read a secret from an environment variable or a file, without surrounding white space.

    White space is stripped because editors, shells and secret managers add line ends, in which the secrets of two
    replicas must not differ.

    Args:
        option: name of the option, for messages.
        env: name of the variable.
        file: path of the file, used if `env` is None.

    Raises:
        InputError: the variable is not set, the file cannot be read, or the secret is empty. Messages never show it.
    """
    if env is not None:
        try:
            value = os.environ.get(env)
        except ValueError:  # an impossible name: half of a surrogate pair
            value = None
        # A value that does not look like a name is not shown: it may be the secret itself.
        where = f"the environment variable {env}" if re.fullmatch("[A-Z_][A-Z0-9_]*", env) else "the variable it names"
        if value is None:
            raise InputError(f"{option}: {where} is not set")
        data = os.fsencode(value)
    else:
        where = f"the file {file}" if str(file).startswith(("/", ".", "~")) else "the file it names"
        try:
            with open(str(file), "rb") as stream:
                data = stream.read(MAX_FILE_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise InputError(f"{option}: {where} cannot be read: {reason}") from None
        if len(data) > MAX_FILE_BYTES:
            raise InputError(f"{option}: {where} is too large for one secret")
    secret = data.strip()
    if not secret:
        raise InputError(f"{option}: {where} is empty")
    return secret
